"""The text of a policy, `p=f32,c=bf16,o=f32`, in jmp's short and long forms."""

from __future__ import annotations

import contextlib
import re
from typing import Any

import numpy as np

from precpass.policy.precision import Precision

__all__ = ["fields_of", "is_precision", "precision_named"]

_KEYS = {
    **dict.fromkeys(("p", "param", "params"), "p"),
    **dict.fromkeys(("c", "compute"), "c"),
    **dict.fromkeys(("o", "output", "outputs"), "o"),
}


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
