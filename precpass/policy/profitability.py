"""The profitability of a policy: which products are lowered if no rule decides."""

from __future__ import annotations

__all__ = ["PROFITABILITY", "parse_profitability"]

PROFITABILITY = ("measured", "compiled", "assumed", "always")
"""The legal values of a policy's profitability."""


def parse_profitability(value: object) -> str:
    """Reads a profitability.

    Raises:
        ValueError: for any other value; the text lists the legal ones.
    """
    for known in PROFITABILITY:
        if value == known:
            return known
    raise ValueError(
        f"unknown profitability {value!r}: legal are 'measured' (products are timed on the device, "
        "once), 'compiled' (whole programs are compiled, and the cheapest counts), 'assumed' (a "
        "table of devices decides) and 'always' (every product is lowered)"
    )
