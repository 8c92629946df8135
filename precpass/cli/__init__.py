"""The command line: `precpass explain model.py:loss --args "f32[8,128]"`."""

from precpass.cli.main import main

__all__ = ["main"]
