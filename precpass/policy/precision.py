"""The floating-point formats that a plan may use, with their properties."""

from __future__ import annotations

import enum
from typing import Any

import ml_dtypes
import numpy as np

__all__ = ["Precision"]

_DTYPES: dict[str, np.dtype[Any]] = {
    "f64": np.dtype(np.float64),
    "f32": np.dtype(np.float32),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "f16": np.dtype(np.float16),
}
_OTHER_NAMES = {"half": "f16", "full": "f32"}


class Precision(enum.Enum):
    """A floating-point format.

    Every fact is derived from `ml_dtypes.finfo`, which follows IEEE 754-2019
    (float16, float32, float64) and the bfloat16 definition of Intel's
    "BFLOAT16 - Hardware Numerics Definition" (2018).

    Examples:
        >>> Precision.parse("bf16").dtype
        dtype(bfloat16)
        >>> Precision.F16.max
        65504.0
        >>> Precision.BF16.exact_integers
        256
    """

    F64 = "f64"
    F32 = "f32"
    BF16 = "bf16"
    F16 = "f16"

    dtype: np.dtype[Any]
    """The numpy dtype of this format."""
    max: float
    """The largest finite value."""
    smallest_normal: float
    """The smallest positive value with a full significand."""
    unit_roundoff: float
    """The largest relative error of one rounding to nearest, `eps / 2`."""
    exact_integers: int
    """The n for which every integer of magnitude up to n is representable."""
    is_low: bool
    """Whether the format has 16 bits."""

    def __init__(self, name: str) -> None:
        self.dtype = _DTYPES[name]
        facts = ml_dtypes.finfo(self.dtype)
        self.max = float(facts.max)
        self.smallest_normal = float(facts.smallest_normal)
        self.unit_roundoff = float(facts.eps) / 2
        self.exact_integers = int(2 ** (facts.nmant + 1))
        self.is_low = self.dtype.itemsize < 4

    # a plan of many equations hashes many of these, and an Enum's own hash is Python code
    __hash__ = object.__hash__

    def is_narrower_than(self, other: Precision) -> bool:
        """Whether its values take fewer bits; bfloat16 and float16 take as many as each other."""
        return self.dtype.itemsize < other.dtype.itemsize

    def __repr__(self) -> str:
        return f"Precision.{self.name}"

    def __str__(self) -> str:
        return self.value

    @classmethod
    def parse(cls, value: Precision | str | Any) -> Precision:
        """Reads a precision from itself, a short or long name, or a dtype.

        Args:
            value: a `Precision`, "f32", "float32", `jnp.bfloat16`, `np.dtype("float16")`, ...;
                "half" is float16, as NumPy has it, and "full" float32, as jmp has it.

        Raises:
            ValueError: when `value` names no precision of this package; the
                text lists the legal ones.
        """
        if isinstance(value, cls):
            return value
        name = value.lower() if isinstance(value, str) else _dtype_name(value)
        for precision in cls:
            if _OTHER_NAMES.get(name, name) in (precision.value, precision.dtype.name):
                return precision
        legal = ", ".join(f"{p.value!r} ({p.dtype.name})" for p in cls)
        hint = " float8 is not supported yet." if "float8" in name or name.startswith("f8") else ""
        raise ValueError(f"unknown precision {value!r}: legal are {legal}.{hint}")

    @classmethod
    def of(cls, dtype: Any) -> Precision | None:
        """The precision with this dtype, or None for any other dtype."""
        return BY_DTYPE.get(dtype)


def _dtype_name(value: Any) -> str:
    try:
        # numpy reads None as float64
        return repr(value) if value is None else np.dtype(value).name
    except TypeError:
        return repr(value)


BY_DTYPE: dict[Any, Precision] = {precision.dtype: precision for precision in Precision}
"""The precision of each dtype."""
