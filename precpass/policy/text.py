"""Policies as text: a preset's name, a precision, `p=f32,c=bf16,o=f32` as jmp has it, and code."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import re
from typing import Any

import numpy as np

from precpass.policy.policy import RETYPES, PrecisionPolicy
from precpass.policy.precision import Precision, advice_for
from precpass.policy.presets import BY_COMPUTE, OTHER_NAMES, PRESETS
from precpass.policy.primitives import OpKind

__all__ = [
    "as_code",
    "as_fields",
    "fields_of",
    "is_precision",
    "parsed",
    "precision_named",
    "preset_titles",
    "shown",
]

_KEYS = {
    **dict.fromkeys(("p", "param", "params"), "p"),
    **dict.fromkeys(("c", "compute"), "c"),
    **dict.fromkeys(("o", "output", "outputs"), "o"),
}


def parsed(value: Any) -> PrecisionPolicy:
    """The policy that a value stands for (`PrecisionPolicy.parse`)."""
    if is_precision(value):
        return _of_products(value, Precision.parse(value))
    if not isinstance(value, str):
        if hasattr(value, "shape") and hasattr(value, "dtype"):
            raise TypeError(
                f"not a policy: an array of {value.dtype}. Give a function's arguments to what "
                f"auto_mixed returns: auto_mixed(f)(x). {_legal_policies()}"
            )
        raise TypeError(f"not a policy: {value!r}. {_legal_policies()}")
    if "=" in value:
        return _of_fields(value)
    presets = PRESETS | OTHER_NAMES
    by_name = {name.lower(): preset for name, preset in presets.items()}
    by_name |= {preset.title.lower(): preset for preset in OTHER_NAMES.values()}
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


def _legal_products() -> str:
    *others, last = map(str, BY_COMPUTE)
    return f"{', '.join(others)} or {last}"


def _of_products(given: object, compute: Precision) -> PrecisionPolicy:
    if compute not in BY_COMPUTE:
        raise ValueError(
            f"policy {given!r}: products are computed in {_legal_products()}, not {compute}; see "
            "Custom and with_retypes for float64 programs"
        )
    return BY_COMPUTE[compute]


def _of_fields(text: str) -> PrecisionPolicy:
    fields = fields_of(text)
    compute, output = fields["c"], fields.get("o", Precision.F32)
    if compute not in BY_COMPUTE:
        raise ValueError(f"policy string {text!r}: c must be {_legal_products()}, not {compute}")
    policy = BY_COMPUTE[compute].with_output(None if output is Precision.F32 else output)
    return policy.with_parameters(fields.get("p", Precision.F32))


def fields_of(text: str) -> dict[str, Precision]:
    """The precisions of the fields "p", "c" and "o" that a policy's text gives.

    Without `c` it is that of `p`, as in jmp.

    Raises:
        ValueError: for a text of another form, and an unknown precision.

    Examples:
        >>> fields_of("params=float32, compute=half")
        {'p': Precision.F32, 'c': Precision.F16}
    """
    pairs = re.findall(r"(\w+)\s*=\s*([\w.]+)", text)
    whole = ",".join(f"{key}={value}" for key, value in pairs)
    fields = {_KEYS.get(key.lower(), ""): value for key, value in pairs}
    reads = whole == re.sub(r"\s", "", text) and len(fields) == len(pairs) and "" not in fields
    if not reads or not {"p", "c"} & fields.keys():
        raise ValueError(
            f"policy string {text!r} does not read: write 'p=f32,c=bf16,o=f32' or "
            "'params=float32,compute=bfloat16,output=float32', where c (compute) is f32, bf16 or "
            "f16, and p (parameters) and o (output) may be left out"
        )
    fields.setdefault("c", fields.get("p", ""))
    return {key: Precision.parse(value) for key, value in fields.items()}


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
    compute = next((compute for compute, preset in BY_COMPUTE.items() if preset == plain), None)
    if compute is None:
        return ""
    return f"p={policy.parameters},c={compute},o={policy.output or Precision.F32}"


def as_code(policy: PrecisionPolicy) -> str:
    """A policy as Python makes it, for one line of an error or a plan."""
    preset = PRESETS.get(policy.name)
    if preset is not None and preset.kinds == policy.kinds:
        text = policy.name
    else:
        ordered = [kind for kind in OpKind if kind in policy.orders]
        kinds = [f"{kind!r}: {policy.precision_for(kind)!r}" for kind in ordered]
        text = f"Custom({{{', '.join(kinds)}}})"
    if policy.retypes != RETYPES:
        text += f".with_retypes({', '.join(sorted(repr(str(p)) for p in policy.retypes))})"
    if policy.output is not None:
        text += f".with_output({str(policy.output)!r})"
    if policy.parameters is not Precision.F32:
        text += f".with_parameters({str(policy.parameters)!r})"
    if policy.lock is not None:
        text += f".with_lock(<{len(policy.lock.entries)} keys of {policy.lock.name}>)"
    if policy.profitability != "always":
        text += f".with_profitability({policy.profitability!r})"
    if policy.results != "auto":
        text += f".with_results({policy.results!r})"
    if policy.weight_gradients is not None:
        text += f".with_weight_gradients({str(policy.weight_gradients)!r})"
    if policy.rules:
        text += f".with_rules({', '.join(map(repr, policy.rules))})"
    return text
