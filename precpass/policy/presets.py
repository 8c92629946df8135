"""The presets, `Custom`, and the names and texts that stand for policies."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from precpass.policy.policy import PrecisionPolicy
from precpass.policy.precision import Precision, advice_for
from precpass.policy.primitives import OpKind
from precpass.policy.rules import Rule

__all__ = [
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
    "as_fields",
    "is_precision",
    "parsed",
    "precision_named",
    "preset_titles",
    "shown",
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

PRESETS = {
    preset.name: preset
    for preset in (
        *(AlwaysF32, AlwaysF16, AlwaysBf16),
        *(AutoMixedConservativeF16, AutoMixedF16, AutoMixedBf16),
    )
}
OTHER_NAMES = {
    "AutoMixed": AutoMixed,
    "AutoMixedConservative": AutoMixedConservative,
    "AutoMixedF8": AutoMixedF8,
    "AutoMixedInt8": AutoMixedInt8,
}
"""The names that stand for another preset, or for one with a rule."""
_BY_COMPUTE = {
    Precision.F8E4M3: AutoMixedF8,
    Precision.INT8: AutoMixedInt8,
    _F32: AlwaysF32,
    _F16: AutoMixedF16,
    _BF16: AutoMixedBf16,
    **{p: Custom({OpKind.COMPUTE: p}) for p in Precision if p.is_multiplication},
}
"""The policy that a precision of matrix products stands for."""


# ---------------------------------------------------------------- names and texts


def parsed(value: Any) -> PrecisionPolicy:
    """The policy that a value stands for (`PrecisionPolicy.parse`)."""
    if is_precision(value):
        return _of_products(value, Precision.parse(value))
    if not isinstance(value, str):
        given = repr(value)
        if hasattr(value, "shape") and hasattr(value, "dtype"):
            given = (
                f"an array of {value.dtype}. Give a function's arguments to what auto_mixed "
                "returns: auto_mixed(f)(x)"
            )
        raise TypeError(f"not a policy: {given}. {_legal_policies()}")
    if "=" in value:
        fields = _fields(value)
        policy = _of_products(value, fields["c"]).with_parameters(fields.get("p", _F32))
        output = fields.get("o", _F32)
        return policy.with_output(None if output is _F32 else output)
    presets = PRESETS | OTHER_NAMES
    titles = {preset.title: preset for preset in OTHER_NAMES.values()}
    by_name = {name.lower(): preset for name, preset in (presets | titles).items()}
    if value.lower() in by_name:
        return by_name[value.lower()]
    precision = precision_named(value)
    if precision is not None:
        return _of_products(value, precision)
    close = difflib.get_close_matches(value, presets, n=1)
    hint = advice_for(value) or (f" Did you mean {close[0]!r}?" if close else "")
    raise ValueError(f"unknown policy {value!r}.{hint} {_legal_policies()}")


def preset_titles() -> list[str]:
    """The names of all presets, as they are printed."""
    return [*PRESETS, *(preset.title for preset in OTHER_NAMES.values())]


def _legal_policies() -> str:
    return (
        f"Legal are {', '.join(preset_titles())}, the precision of matrix products ('bf16', "
        "'int8', jnp.float16), a string such as 'p=f32,c=bf16,o=f32', and "
        "Custom({OpKind.COMPUTE: 'bf16', ...})."
    )


def _of_products(given: object, compute: Precision) -> PrecisionPolicy:
    if compute not in _BY_COMPUTE:
        *others, last = map(str, _BY_COMPUTE)
        raise ValueError(
            f"policy {given!r}: products are computed in {', '.join(others)} or {last}, not "
            f"{compute}; see Custom and with_retypes for float64 programs"
        )
    return _BY_COMPUTE[compute]


_KEYS = {
    **dict.fromkeys(("p", "param", "params"), "p"),
    **dict.fromkeys(("c", "compute"), "c"),
    **dict.fromkeys(("o", "output", "outputs"), "o"),
}


def _fields(text: str) -> dict[str, Precision]:
    """The precisions of "p", "c" and "o" in a policy's text, as in jmp; "c" is that of "p"."""
    pairs = [tuple(map(str.strip, pair.split("="))) for pair in text.split(",")]
    fields = {_KEYS.get(pair[0].lower(), ""): pair[-1] for pair in pairs}
    reads = all(len(pair) == 2 and pair[1] for pair in pairs) and len(fields) == len(pairs)
    if not reads or "" in fields or not {"p", "c"} & fields.keys():
        raise ValueError(
            f"policy string {text!r} does not read: write 'p=f32,c=bf16,o=f32' or "
            "'params=float32,compute=bfloat16,output=float32', where c (compute) is f32, bf16 or "
            "f16, and p (parameters) and o (output) may be left out"
        )
    return {key: Precision.parse(value) for key, value in ({"c": fields.get("p")} | fields).items()}


def precision_named(value: Any) -> Precision | None:
    """The precision that a text or a dtype names; None if it names none."""
    with contextlib.suppress(ValueError):
        return Precision.parse(value)
    return None


def is_precision(value: Any) -> bool:
    """Whether a value that is no text names a precision: a `Precision` or a floating dtype."""
    if isinstance(value, Precision | np.dtype):
        return True
    # jnp.bfloat16 is a class with a dtype, and no class of numpy's.
    return isinstance(value, type) and (
        issubclass(value, np.generic) or isinstance(getattr(value, "dtype", None), np.dtype)
    )


def shown(given: str) -> str:
    """A policy's text as reports print it: a preset's other name says its format.

    Examples:
        >>> shown("automixed"), shown("bf16")
        ('AutoMixed (float16)', 'bf16')
    """
    names = (name for name in OTHER_NAMES if name.lower() == given.lower())
    return next((OTHER_NAMES[name].title for name in names), given)


def as_fields(policy: PrecisionPolicy) -> str:
    """A policy as "p=f32,c=bf16,o=f32"; "" for one that has more to say.

    Examples:
        >>> as_fields(PrecisionPolicy.parse("half"))
        'p=f32,c=f16,o=f32'
    """
    plain = dataclasses.replace(policy, output=None, parameters=Precision.F32)
    compute = next((compute for compute, preset in _BY_COMPUTE.items() if preset == plain), None)
    if compute is None:
        return ""
    return f"p={policy.parameters},c={compute},o={policy.output or Precision.F32}"
