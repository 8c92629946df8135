"""Numbers of things in words."""

from __future__ import annotations

__all__ = ["are", "counted"]


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
