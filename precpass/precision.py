"""The floating-point formats a plan may use, and their facts."""

from __future__ import annotations

import enum
from typing import Any

import ml_dtypes
import numpy as np

__all__ = ["Precision"]


class Precision(enum.Enum):
    """A floating-point format.

    Every fact is derived from `ml_dtypes.finfo`, which follows IEEE 754-2019
    (float16, float32, float64) and the bfloat16 definition of Intel's
    "BFLOAT16 - Hardware Numerics Definition" (2018).

    Example:
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

    def __repr__(self) -> str:
        return f"Precision.{self.name}"

    def __str__(self) -> str:
        return self.value

    @property
    def dtype(self) -> np.dtype[Any]:
        """The numpy dtype of this format."""
        return _DTYPES[self]

    @property
    def max(self) -> float:
        """The largest finite value."""
        return float(ml_dtypes.finfo(self.dtype).max)

    @property
    def smallest_normal(self) -> float:
        """The smallest positive value with a full significand."""
        return float(ml_dtypes.finfo(self.dtype).smallest_normal)

    @property
    def unit_roundoff(self) -> float:
        """The largest relative error of one rounding to nearest, `eps / 2`."""
        return float(ml_dtypes.finfo(self.dtype).eps) / 2

    @property
    def exact_integers(self) -> int:
        """The n for which every integer of magnitude up to n is representable."""
        return int(2 ** (ml_dtypes.finfo(self.dtype).nmant + 1))

    @property
    def is_low(self) -> bool:
        """Whether the format has 16 bits."""
        return self.dtype.itemsize < 4

    @classmethod
    def parse(cls, value: Precision | str | Any) -> Precision:
        """Reads a precision from itself, a short or long name, or a dtype.

        Args:
            value: a `Precision`, "f32", "float32", `jnp.bfloat16`, `np.dtype("float16")`, ...

        Raises:
            ValueError: when `value` names no precision of this package; the
                text lists the legal ones.
        """
        if isinstance(value, cls):
            return value
        name = value.lower() if isinstance(value, str) else _dtype_name(value)
        for precision in cls:
            if name in (precision.value, precision.dtype.name):
                return precision
        legal = ", ".join(f"{p.value!r} ({p.dtype.name})" for p in cls)
        hint = " float8 is not supported yet." if "float8" in name or name.startswith("f8") else ""
        raise ValueError(f"unknown precision {value!r}: legal are {legal}.{hint}")

    @classmethod
    def of(cls, dtype: Any) -> Precision | None:
        """The precision with this dtype, or None for any other dtype."""
        return _BY_DTYPE.get(dtype)


def _dtype_name(value: Any) -> str:
    try:
        # numpy reads None as float64
        return repr(value) if value is None else np.dtype(value).name
    except TypeError:
        return repr(value)


_DTYPES: dict[Precision, np.dtype[Any]] = {
    Precision.F64: np.dtype(np.float64),
    Precision.F32: np.dtype(np.float32),
    Precision.BF16: np.dtype(ml_dtypes.bfloat16),
    Precision.F16: np.dtype(np.float16),
}
_BY_DTYPE = {dtype: precision for precision, dtype in _DTYPES.items()}
