"""The presets, and `Custom`, which makes a policy of a table of kinds."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from precpass.policy.policy import PrecisionPolicy
from precpass.policy.precision import Precision
from precpass.policy.primitives import OpKind
from precpass.policy.rules import Rule

__all__ = [
    "BY_COMPUTE",
    "OTHER_NAMES",
    "PRESETS",
    "AlwaysBf16",
    "AlwaysF16",
    "AlwaysF32",
    "AutoMixed",
    "AutoMixedBf16",
    "AutoMixedConservative",
    "AutoMixedConservativeF16",
    "AutoMixedF8",
    "AutoMixedF16",
    "AutoMixedInt8",
    "Custom",
]


def Custom(
    kinds: Mapping[OpKind | str, Precision | str], rules: Iterable[Rule] = ()
) -> PrecisionPolicy:
    """Return a policy from a table of kinds; kinds that are missing are not lowered.

    Only float32, bfloat16 and float16 values may change, unless you use `with_retypes`.
    `Custom({OpKind.COMPUTE: "f32"}).with_retypes("f64")` runs a float64 program with float32 matrix
    products: operands are rounded to float32, sums and everything else stay in float64.

    Raises:
        ValueError: for an unknown kind or precision, or a precision for BOUNDARY, which keeps its
            original dtypes by definition.

    Examples:
        >>> Custom({OpKind.COMPUTE: "bf16"}).precision_for("reduction")
        Precision.F32
    """
    if not isinstance(kinds, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance] -- user input
        raise TypeError(f"Custom takes a dict of OpKind to Precision, not {kinds!r}")
    precisions = {OpKind.parse(kind): Precision.parse(p) for kind, p in kinds.items()}
    if precisions.pop(OpKind.BOUNDARY, Precision.F32) is not Precision.F32:
        raise ValueError(
            "Custom: OpKind.BOUNDARY keeps its original dtypes; use with_output(...) for the "
            "format of the outputs"
        )
    for kind, precision in precisions.items():
        if not precision.is_format and kind is not OpKind.COMPUTE:
            raise ValueError(
                f"Custom: {precision} says how products are multiplied, so OpKind.COMPUTE alone "
                f"takes it, not {kind!r}"
            )
    scaled = precisions.get(OpKind.COMPUTE, Precision.F32)
    if scaled.is_scaled:
        precisions[OpKind.COMPUTE] = Precision.BF16
    table = tuple(precisions.get(kind, Precision.F32) for kind in OpKind)
    policy = PrecisionPolicy("Custom", table, frozenset(precisions)).with_rules(*rules)
    return policy.with_scaled(scaled if scaled.is_scaled else None)


def _preset(name: str, *kinds: Precision, order: bool = False) -> PrecisionPolicy:
    ordered = frozenset(OpKind) - {OpKind.BOUNDARY} if order else frozenset({OpKind.COMPUTE})
    return PrecisionPolicy(name, (*kinds, Precision.F32), ordered)


_F32, _F16, _BF16 = Precision.F32, Precision.F16, Precision.BF16

AlwaysF32 = dataclasses.replace(_preset("AlwaysF32", *[_F32] * 4), orders=frozenset(), widens=True)
AlwaysF16 = _preset("AlwaysF16", *[_F16] * 4, order=True)
AlwaysBf16 = _preset("AlwaysBf16", *[_BF16] * 4, order=True)
AutoMixedConservativeF16 = _preset("AutoMixedConservativeF16", _F16, _F32, _F16, _F16)
AutoMixedF16 = _preset("AutoMixedF16", *[_F16] * 4)
AutoMixedBf16 = _preset("AutoMixedBf16", *[_BF16] * 4)
AutoMixedF8 = dataclasses.replace(AutoMixedBf16.with_scaled("f8e4m3"), alias="AutoMixedF8")
"""`AutoMixedBf16` with a rule by which large matrix products run in float8."""
AutoMixedInt8 = dataclasses.replace(AutoMixedBf16.with_scaled("int8"), alias="AutoMixedInt8")
"""`AutoMixedBf16` with a rule by which large matrix products run in int8."""
AutoMixed = dataclasses.replace(AutoMixedF16, alias="AutoMixed (float16)")
"""Another name for `AutoMixedF16`, the preset of float16; reports print `AutoMixed (float16)`."""
AutoMixedConservative = dataclasses.replace(
    AutoMixedConservativeF16, alias="AutoMixedConservative (float16)"
)
"""Another name for `AutoMixedConservativeF16`, the conservative preset of float16."""

PRESETS: dict[str, PrecisionPolicy] = {
    preset.name: preset
    for preset in (
        AlwaysF32,
        AlwaysF16,
        AlwaysBf16,
        AutoMixedConservativeF16,
        AutoMixedF16,
        AutoMixedBf16,
    )
}
OTHER_NAMES = {
    "AutoMixed": AutoMixed,
    "AutoMixedConservative": AutoMixedConservative,
    "AutoMixedF8": AutoMixedF8,
    "AutoMixedInt8": AutoMixedInt8,
}
"""The names that stand for another preset, or for one with a rule."""
BY_COMPUTE = {
    Precision.F8E4M3: AutoMixedF8,
    Precision.INT8: AutoMixedInt8,
    _F32: AlwaysF32,
    _F16: AutoMixedF16,
    _BF16: AutoMixedBf16,
    **{p: Custom({OpKind.COMPUTE: p}) for p in Precision if p.is_multiplication},
}
"""The policy that a precision of products stands for."""
