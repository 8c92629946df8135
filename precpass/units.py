"""Counts and bytes in words."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["a_value", "are", "counted", "in_unit", "listed", "sized"]


def counted(n: int, noun: str) -> str:
    """A number of things whose plural ends in s.

    Examples:
        >>> counted(1, "cast"), counted(2, "cast"), counted(0, "cast")
        ('1 cast', '2 casts', '0 casts')
    """
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def are(n: int) -> str:
    """The verb for a number of things.

    Examples:
        >>> are(1), are(2)
        ('is', 'are')
    """
    return "is" if n == 1 else "are"


def a_value(x: object) -> str:
    """What a value of a user is, for an error.

    Examples:
        >>> import jax.numpy as jnp
        >>> a_value(jnp.ones(3)), a_value([1]), a_value(1)
        ('an array', 'a list', 'an int')
    """
    name = type(x).__name__
    if name in ("ArrayImpl", "ndarray") or name.endswith("Tracer"):
        return "an array"
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def listed(names: Sequence[str], most: int) -> str:
    """Names behind each other; of a long list the first ones, and how many more there are.

    Args:
        names: the names.
        most: the number of names that are shown.

    Examples:
        >>> listed("abc", 3), listed("abcdefgh", 3)
        ('a, b, c', 'a, b, c and 5 more')
    """
    more = len(names) - most
    shown = ", ".join(names[:most])
    return f"{shown} and {more} more" if more > 0 else shown


def in_unit(value: float, units: Sequence[tuple[str, float]]) -> str:
    """A quantity to three digits, in the largest unit of which there is at least one.

    Args:
        value: how much of the quantity there is.
        units: the names and sizes of the units, the largest first; the last one is for all that is
            smaller.

    Examples:
        >>> in_unit(999_900, (("MB", 1e6), ("kB", 1e3)))  # not 1e+03 kB
        '1 MB'
        >>> in_unit(12, (("MB", 1e6), ("kB", 1e3)))
        '0.012 kB'
    """
    name, size = next((unit for unit in units if value >= 0.9995 * unit[1]), units[-1])
    count = value / size
    return f"{count:.0f} {name}" if count >= 999.5 else f"{count:.3g} {name}"


def sized(nbytes: float) -> str:
    """A number of bytes to three digits.

    Examples:
        >>> sized(96), sized(768), sized(12.58e6)
        ('96 bytes', '768 bytes', '12.6 MB')
    """
    if nbytes < 999.5:
        return counted(round(nbytes), "byte")
    return in_unit(nbytes, (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)))
