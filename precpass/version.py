"""The release of this package: the only place that says it, which the wheel's metadata reads."""

__version__ = "0.1.0"
