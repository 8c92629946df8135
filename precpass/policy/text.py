"""What stands for a policy: a preset's name, a precision, `p=f32,c=bf16,o=f32` as jmp has it."""

from __future__ import annotations

import contextlib
import difflib
import re
from typing import Any

import numpy as np

from precpass.policy.policy import BY_COMPUTE, OTHER_NAMES, PRESETS, PrecisionPolicy
from precpass.policy.precision import Precision

__all__ = ["fields_of", "is_precision", "parsed", "precision_named"]

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
        raise TypeError(f"not a policy: {value!r}. {_legal_policies()}")
    if "=" in value:
        return _of_fields(value)
    presets = PRESETS | OTHER_NAMES
    by_name = {name.lower(): preset for name, preset in presets.items()}
    if value.lower() in by_name:
        return by_name[value.lower()]
    precision = precision_named(value)
    if precision is not None:
        return _of_products(value, precision)
    close = difflib.get_close_matches(value, presets, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise ValueError(f"unknown policy {value!r}.{hint} {_legal_policies()}")


def _legal_policies() -> str:
    return (
        f"Legal are {', '.join(PRESETS)}, the precision of products ('bf16', jnp.float16), a "
        "string such as 'p=f32,c=bf16,o=f32', and Custom({OpKind.COMPUTE: 'bf16', ...})."
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
