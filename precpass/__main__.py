"""`python -m precpass`."""

import sys

from precpass.cli import main

if __name__ == "__main__":
    sys.exit(main())
