"""`Precision`: formats of values, and ways to multiply matrices."""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

__all__ = ["FORMATS", "Precision", "advice_for"]

_DTYPES: dict[str, np.dtype[Any]] = {
    "f64": np.dtype(np.float64),
    "f32": np.dtype(np.float32),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "f16": np.dtype(np.float16),
}
_SCALED: dict[str, np.dtype[Any]] = {
    # Micikevicius et al., "FP8 Formats for Deep Learning" (2022); without infinities.
    "f8e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "int8": np.dtype(np.int8),
}
"""The dtypes of 8 bits that scaled products multiply."""
_FORMER = ("mxfp8", "nvfp4", "fp4", "float4_e2m1fn", "f8e5m2", "e5m2", "float8_e5m2")
"""Names of formats that are no longer supported."""
_OTHER_NAMES = {
    "half": "f16",
    "full": "f32",
    **dict.fromkeys(("f8", "fp8", "float8", "e4m3", "float8_e4m3"), "f8e4m3"),
    **dict.fromkeys(("i8", "w8a8"), "int8"),
}


class _Multiplication(NamedTuple):
    """How a product of float32 operands is multiplied on each platform.

    Attributes:
        digits: the bits of an operand's significand that count, the first one included.
        runs_as: by platform, what runs there instead; a platform that is missing has it.
        convolutions: the same for convolutions and ragged products, which have no algorithms.
    """

    digits: int
    runs_as: dict[str, str]
    convolutions: dict[str, str]


_ON_CPU = {"cpu": "float32"}
_MULTIPLICATIONS = {
    # NVIDIA, "A100 Tensor Core GPU Architecture" (2020): 10 bits of TF32's significand are stored.
    "tf32": _Multiplication(11, _ON_CPU | {"tpu": "three passes of bfloat16"}, {}),
    # Henry, Tang and Heinecke, "Leveraging the bfloat16 Artificial Intelligence Datatype for
    # Higher-Precision Computations" (2019): two or three bfloat16 of 8 bits for each operand.
    "bf16x3": _Multiplication(16, _ON_CPU, {"gpu": "float32", "tpu": "six passes of bfloat16"}),
    "bf16x6": _Multiplication(24, _ON_CPU, {"gpu": "float32"}),
    "f32_exact": _Multiplication(24, {"tpu": "six passes of bfloat16"}, {}),
}


class Precision(enum.Enum):
    """A floating-point format, or a way to multiply matrices.

    Every fact about a format is derived from `ml_dtypes.finfo`, which follows IEEE 754-2019
    (float16, float32, float64) and the bfloat16 definition of Intel's "BFLOAT16 - Hardware Numerics
    Definition" (2018).

    TF32, BF16X3, BF16X6 and F32_EXACT apply to matrix products only (`is_multiplication`): the
    operands and the result are float32 arrays, and the precision is that of the multiplications
    inside. "f32" leaves that to JAX's default, which is TF32 on an NVIDIA GPU and one pass of
    bfloat16 on a TPU.

    F8E4M3 and INT8 apply to matrix products only, too (`is_scaled`): a scaled product divides its
    operands by scales, rounds them to 8 bits, multiplies them, and multiplies the result by the
    scales. The code around a scaled product runs as under bfloat16.

    Examples:
        >>> Precision.parse("bf16").dtype
        dtype(bfloat16)
        >>> Precision.F16.max
        65504.0
        >>> Precision.BF16.exact_integers
        256
        >>> Precision.TF32.runs_as("tpu")
        'three passes of bfloat16'
        >>> Precision.parse("fp8").max
        448.0
    """

    F64 = "f64"
    F32 = "f32"
    BF16 = "bf16"
    F16 = "f16"
    F32_EXACT = "f32_exact"
    BF16X6 = "bf16x6"
    BF16X3 = "bf16x3"
    TF32 = "tf32"
    F8E4M3 = "f8e4m3"
    INT8 = "int8"

    dtype: np.dtype[Any]
    """The NumPy dtype of this format, or of the operands that are multiplied this way."""
    max: float
    """The largest finite value."""
    smallest_normal: float
    """The smallest positive value with a full significand."""
    unit_roundoff: float
    """The largest relative error of one rounding to nearest, `eps / 2`; of an operand for ways
    to multiply. For int8 it is relative to the largest value that shares the scale."""
    exact_integers: int
    """The largest n for which every integer of magnitude up to n is representable."""
    is_low: bool
    """Whether it is a 16-bit format."""
    is_multiplication: bool
    """Whether it applies to products of float32 matrices only. No value is stored in it, and it
    needs no casts."""
    is_scaled: bool
    """Whether it has 8 bits. Only the operands of scaled products use it."""
    by_row: bool
    """Whether each row of a left operand, and each column of a right one, has its own scale."""
    is_forward_only: bool
    """Whether the derivatives of its products use matrix products in bfloat16."""

    def __init__(self, name: str) -> None:
        multiplication = _MULTIPLICATIONS.get(name)
        self.is_multiplication = multiplication is not None
        self.is_scaled = name in _SCALED
        self.by_row = self.is_forward_only = name == "int8"
        self.dtype = (_DTYPES | _SCALED)["f32" if multiplication else name]
        self.is_low = self.dtype.itemsize == 2
        if self.dtype == np.int8:
            # The scale is the largest magnitude divided by 127.
            self.max, self.smallest_normal, self.unit_roundoff = 127.0, 1.0, 0.5 / 127
            self.exact_integers = 127
            return
        facts = ml_dtypes.finfo(self.dtype)
        digits = multiplication.digits if multiplication else int(facts.nmant) + 1
        self.max = float(facts.max)
        self.smallest_normal = float(facts.smallest_normal)
        self.unit_roundoff = 2.0**-digits
        self.exact_integers = 2**digits

    # a plan of many equations hashes many of these, and an Enum's own hash is Python code
    __hash__ = object.__hash__

    @property
    def is_format(self) -> bool:
        """Whether values can be stored in it. Other precisions apply to matrix products only."""
        return not (self.is_multiplication or self.is_scaled)

    def is_narrower_than(self, other: Precision) -> bool:
        """Return whether its values take fewer bits; bfloat16 and float16 take equally many."""
        return self.dtype.itemsize < other.dtype.itemsize

    def runs_as(self, platform: str, *, is_dot: bool = True) -> str:
        """Return what runs instead on a platform without this way to multiply; "" with it.

        What runs instead has as many digits or more.

        Args:
            platform: "cpu", "gpu" or "tpu".
            is_dot: whether the product is a `dot_general`. Convolutions and ragged products have
                fewer ways to be multiplied.
        """
        multiplication = _MULTIPLICATIONS.get(self.value)
        if multiplication is None:
            return ""
        others = {} if is_dot else multiplication.convolutions
        return (multiplication.runs_as | others).get(platform, "")

    def __repr__(self) -> str:
        return f"Precision.{self.name}"

    def __str__(self) -> str:
        return self.value

    @classmethod
    def parse(cls, value: Precision | str | Any) -> Precision:
        """Return the precision for a `Precision`, a short or long name, or a dtype.

        Args:
            value: a `Precision`, "f32", "float32", `jnp.bfloat16`, `np.dtype("float16")`, "tf32",
                "int8", ...; "half" is float16, as in NumPy, "full" is float32, as in jmp, and "fp8"
                is "f8e4m3".

        Raises:
            ValueError: if `value` is not the name of a precision; the message lists the legal ones.
        """
        if isinstance(value, cls):
            return value
        name = value.lower().replace("-", "_") if isinstance(value, str) else _dtype_name(value)
        for precision in cls:
            if _OTHER_NAMES.get(name, name) in (precision.value, precision.dtype.name):
                return precision
        products = ", ".join(repr(p.value) for p in cls if not p.is_format)
        raise ValueError(
            f"unknown precision {value!r}: legal are {_legal_formats()}, and for products alone "
            f"{products}.{advice_for(value)}"
        )

    @classmethod
    def parse_format(cls, value: Precision | str | Any, what: str = "") -> Precision:
        """Return the precision for a name or dtype, if values can be stored in it.

        Args:
            value: as for `parse`.
            what: names the place of the value, for errors.

        Raises:
            ValueError: for an unknown precision, and for one of matrix products only.

        Examples:
            >>> Precision.parse_format("half")
            Precision.F16
        """
        precision = cls.parse(value)
        if not precision.is_format:
            raise ValueError(
                f"{what}{' = ' if what else ''}{value!r}: {precision} says how products are "
                f"multiplied, and no value is stored in it: legal are {_legal_formats()}"
            )
        return precision

    @classmethod
    def of(cls, dtype: Any) -> Precision | None:
        """Return the precision with this dtype, or None for any other dtype."""
        return BY_DTYPE.get(dtype)


def advice_for(value: object) -> str:
    """What to use in the place of a former format; "" for any other value."""
    name = value.lower() if isinstance(value, str) else _dtype_name(value)
    if name not in _FORMER:
        return ""
    return f" {name} is no longer supported: use 'f8e4m3' or 'int8'."


def _legal_formats() -> str:
    return ", ".join(f"{p.value!r} ({p.dtype.name})" for p in FORMATS)


def _dtype_name(value: Any) -> str:
    try:
        # numpy reads None as float64
        return repr(value) if value is None else np.dtype(value).name
    except TypeError:
        return repr(value)


FORMATS = tuple(precision for precision in Precision if precision.is_format)
"""The precisions that values are stored in."""
BY_DTYPE: dict[Any, Precision] = {precision.dtype: precision for precision in FORMATS}
"""The precision of each dtype."""
PARTS: dict[Any, Precision] = {
    **BY_DTYPE,
    np.dtype(np.complex64): Precision.F32,
    np.dtype(np.complex128): Precision.F64,
}
"""The precision of each dtype, and that of the parts of each complex dtype."""
