"""Numbers in words."""

from __future__ import annotations

__all__ = ["are", "counted", "duration"]


def counted(n: int, noun: str) -> str:
    """A number of things whose plural ends in s.

    Example:
        >>> counted(1, "cast"), counted(2, "cast"), counted(0, "cast")
        ('1 cast', '2 casts', '0 casts')
    """
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def are(n: int) -> str:
    """The verb for a number of things.

    Example:
        >>> are(1), are(2)
        ('is', 'are')
    """
    return "is" if n == 1 else "are"


def duration(seconds: float) -> str:
    """A time to two or three digits.

    Example:
        >>> duration(5.23e-5), duration(0.0114), duration(2.0), duration(4e-8)
        ('52.3 us', '11.4 ms', '2 s', '0.04 us')
    """
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"
