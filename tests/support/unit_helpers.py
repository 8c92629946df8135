"""What the unit tests share: reading jaxprs without any code of the package."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp

PRODUCTS = ("dot_general", "ragged_dot_general", "conv_general_dilated")


def eqns(jaxpr: Any) -> Iterator[Any]:
    """Every equation of a jaxpr and of whatever jaxprs its params hold."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield eqn
        for value in eqn.params.values():
            for item in value if isinstance(value, (tuple, list)) else (value,):
                if hasattr(getattr(item, "jaxpr", item), "eqns"):
                    yield from eqns(item)


def assert_well_typed(jaxpr: Any) -> None:
    """Every equation's results have the types that JAX gives them, bodies included."""
    jex.check_jaxpr(getattr(jaxpr, "jaxpr", jaxpr))


def named(jaxpr: Any, primitive: str) -> list[Any]:
    """The equations of one primitive."""
    return [e for e in eqns(jaxpr) if e.primitive.name == primitive]


def operand_dtypes(jaxpr: Any, primitive: str) -> list[str]:
    """The dtype of the first operand of each equation of one primitive, in order."""
    return [str(e.invars[0].aval.dtype) for e in named(jaxpr, primitive)]


def product_dtypes(jaxpr: Any) -> list[str]:
    """For each product, the dtype that its two data operands share."""
    found = []
    for eqn in eqns(jaxpr):
        if eqn.primitive.name in PRODUCTS:
            lhs, rhs = (str(v.aval.dtype) for v in eqn.invars[:2])
            found.append(lhs if lhs == rhs else f"{lhs} x {rhs}")
    return found


def wide_products(traced: Any, plan: Any, policy: Any) -> frozenset[int]:
    """In the place of `Traced.run`: the indices of the products that are wide under a plan."""
    dtypes = product_dtypes(traced.rewritten(plan, policy))
    return frozenset(i for i, dtype in enumerate(dtypes) if dtype == "float32")


def low_values(jaxpr: Any) -> list[str]:
    """The primitives whose results are bfloat16 or float16."""
    low = ("bfloat16", "float16")
    return [
        e.primitive.name
        for e in eqns(jaxpr)
        if any(str(getattr(v.aval, "dtype", "")) in low for v in e.outvars)
    ]


def decided(inspection: Any, primitive: str) -> list[Any]:
    """The decisions for the equations of one primitive, in order."""
    return [d for eqn, d, _ in inspection.decisions() if eqn.primitive.name == primitive]


def f32(*shape: int) -> Any:
    """A float32 argument that is only a shape."""
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def stable_id(value: object) -> str:
    """`repr` without addresses: workers that run tests in parallel must agree on the names."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))
