"""What a primitive without a jaxpr computes, read from the text that it is lowered to."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import jax

from precpass.jaxpr.types import Eqn

_PRODUCT = re.compile(r'= "?stablehlo\.(?:dot_general|dot|convolution)\b')
_OP = re.compile(r'= "?(?:stablehlo|chlo)\.(\w+)')
_PYTHON = re.compile(r"custom_call @\w*python\w*callback")


class Contents(NamedTuple):
    """What the text of a lowered equation contains.

    Attributes:
        products: the number of products.
        python: whether it does nothing but call Python.
    """

    products: int
    python: bool


NOTHING = Contents(0, False)


def contents_of(eqn: Eqn) -> Contents:
    """The contents of an equation that is lowered by itself; `NOTHING` if that is not possible.

    It is lowered ahead of time, so nothing is added to the trace around it.
    """

    def call(*args: Any) -> Any:
        return eqn.primitive.bind(*args, **eqn.params)

    try:
        shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
        text = jax.jit(call).lower(*shapes).as_text()
    except Exception:  # an unknown primitive may raise anything
        return NOTHING
    python = _PYTHON.search(text) is not None
    return Contents(
        len(_PRODUCT.findall(text)),
        python and set(_OP.findall(text)) <= {"custom_call", "constant"},
    )
