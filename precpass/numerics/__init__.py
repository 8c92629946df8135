"""Numerical tools on top of the pass, one topic a file: what catches low precision's failures."""
