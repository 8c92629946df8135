"""The profitability of a policy: which products are lowered if no rule decides."""

from __future__ import annotations

__all__ = ["PROFITABILITY", "parse_profitability", "saved_profitability"]

PROFITABILITY = ("always", "best")
"""The legal values of a policy's profitability."""

_INSTEAD = "'best' (whole programs are compiled, and the cheapest form counts) or 'always'"
_FORMER = {
    "compiled": "is now named 'best': write 'best'",
    "measured": f"is no longer supported: write {_INSTEAD}",
    "assumed": f"is no longer supported: write {_INSTEAD}",
}


def parse_profitability(value: object) -> str:
    """Reads a profitability.

    Raises:
        ValueError: for any other value; the text lists the legal ones, or says what replaces a
            former one.
    """
    for known in PROFITABILITY:
        if value == known:
            return known
    for former, advice in _FORMER.items():
        if value == former:
            raise ValueError(f"profitability {former!r} {advice}")
    raise ValueError(
        f"unknown profitability {value!r}: legal are 'always' (every product is lowered) and "
        "'best' (whole programs are compiled, and the cheapest form counts)"
    )


def saved_profitability(value: object) -> str:
    """Reads the profitability of a saved plan, where a former one stands for "best".

    The plan is followed whatever it says.

    Raises:
        ValueError: as for `parse_profitability`.
    """
    return "best" if value in tuple(_FORMER) else parse_profitability(value)
