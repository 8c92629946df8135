"""`python -m precpass`."""

import sys

from precpass.cli import main

sys.exit(main())
