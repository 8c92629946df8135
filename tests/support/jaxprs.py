"""The tests' own walk over jaxprs, and what they look for in one.

Nothing here uses the package's view of a jaxpr: a test that counts equations must not count them
with the code that it checks.
"""

from collections.abc import Iterator
from typing import Any

import jax.extend.core as jex
import jax.numpy as jnp
import ml_dtypes
import numpy as np

PRODUCTS = frozenset({"dot_general", "ragged_dot_general", "ragged_dot", "conv_general_dilated"})
COMBINED = frozenset({"reduce", "reduce_window", "select_and_scatter", "sort"})
"""Primitives whose jaxprs combine two scalars: they are no bodies. Neither are scatters'."""

LOW = (np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16))


def opened(jaxpr: Any) -> Any:
    """The object with `eqns`, on either side of 0.11's merge of ClosedJaxpr into Jaxpr."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def jaxprs_in(value: Any, depth: int = 0) -> Iterator[Any]:
    """The open jaxprs in a param, wherever in tuples, lists, dicts and hi-primitives they stand."""
    if hasattr(value, "in_avals_flat"):  # a hi-primitive: its params are its attributes
        value = value.params
    value = opened(opened(value))  # on 0.10 a traced function's is a closed one
    if hasattr(value, "eqns") and hasattr(value, "invars"):
        yield value
    elif isinstance(value, dict | tuple | list) and depth < 4:
        for item in value.values() if isinstance(value, dict) else value:
            yield from jaxprs_in(item, depth + 1)


def inner_jaxprs(eqn: Any) -> list[Any]:
    """The bodies of an equation: the jaxprs in its params, scalar combiners apart."""
    name = eqn.primitive.name
    if name in COMBINED or name.startswith("scatter"):
        return []
    return list(jaxprs_in(eqn.params))


def walk(jaxpr: Any, repeated: bool = False) -> Iterator[Any]:
    """Every equation of a jaxpr and of all that it contains, in order.

    Args:
        jaxpr: open or closed.
        repeated: whether the equations of a shared jaxpr come once for each of its callers.
    """
    return _walk(jaxpr, None if repeated else {})


def _walk(jaxpr: Any, seen: dict[int, Any] | None) -> Iterator[Any]:
    # no closure that calls itself: that is a reference cycle, and holds the jaxprs until the
    # collector comes, while some tests look for what is freed at once
    jaxpr = opened(jaxpr)
    if seen is not None:
        if id(jaxpr) in seen:
            return
        # the jaxprs themselves, so that no other gets the identity of one
        seen[id(jaxpr)] = jaxpr
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in inner_jaxprs(eqn):
            yield from _walk(inner, seen)


def named(jaxpr: Any, *names: str) -> list[Any]:
    """The equations of these primitives, bodies included."""
    return [eqn for eqn in walk(jaxpr) if eqn.primitive.name in names]


def assert_well_typed(jaxpr: Any) -> None:
    """Every equation's results have the types that JAX gives them, bodies included."""
    jex.check_jaxpr(opened(jaxpr))


# ---------------------------------------------------------------- dtypes


def _floats(atoms: Any) -> list[np.dtype]:
    """The floating dtypes of atoms (`jnp.issubdtype`, never `kind`)."""
    dtypes = (getattr(v.aval, "dtype", None) for v in atoms)
    return [np.dtype(d) for d in dtypes if d is not None and jnp.issubdtype(d, jnp.floating)]


def dtypes_in(eqn: Any) -> list[np.dtype]:
    """The floating dtypes of an equation's operands."""
    return _floats(eqn.invars)


def dtypes_out(eqn: Any) -> list[np.dtype]:
    """The floating dtypes of an equation's results."""
    return _floats(eqn.outvars)


def touches_low(eqn: Any) -> bool:
    """Whether an equation reads or makes a 16-bit floating value."""
    return any(d in LOW for d in (*dtypes_in(eqn), *dtypes_out(eqn)))


def low_values(jaxpr: Any) -> list[str]:
    """The primitives whose results are bfloat16 or float16, in order."""
    eqns = walk(jaxpr, repeated=True)
    return [e.primitive.name for e in eqns if any(d in LOW for d in dtypes_out(e))]


def operand_dtypes(jaxpr: Any, primitive: str) -> list[str]:
    """The dtype of the first operand of each equation of one primitive, in order."""
    eqns = walk(jaxpr, repeated=True)
    return [str(e.invars[0].aval.dtype) for e in eqns if e.primitive.name == primitive]


# ---------------------------------------------------------------- products


def products(jaxpr: Any, repeated: bool = False) -> list[Any]:
    """The products of a jaxpr and its bodies."""
    return [eqn for eqn in walk(jaxpr, repeated) if eqn.primitive.name in PRODUCTS]


def product_dtypes(jaxpr: Any) -> list[str]:
    """For each product, the dtype that its two data operands share, or both as `a x b`."""
    pairs = [[str(v.aval.dtype) for v in e.invars[:2]] for e in products(jaxpr, repeated=True)]
    return [lhs if lhs == rhs else f"{lhs} x {rhs}" for lhs, rhs in pairs]


def is_low(eqn: Any, dtype: Any = None) -> bool:
    """Whether both data operands of a product have 16 bits, or are of `dtype`."""
    wanted = LOW if dtype is None else (np.dtype(dtype),)
    return all(np.dtype(v.aval.dtype) in wanted for v in eqn.invars[:2])


def low_products(jaxpr: Any, dtype: Any = None) -> list[Any]:
    """The products whose two data operands have 16 bits, or are of `dtype`."""
    return [eqn for eqn in products(jaxpr) if is_low(eqn, dtype)]


def contracts(eqn: Any) -> bool:
    """Whether it sums over anything; else it is an elementwise product (design 3, line 7)."""
    return eqn.primitive.name != "dot_general" or bool(eqn.params["dimension_numbers"][0][0])


def multiplies_matrices(eqn: Any) -> bool:
    """Whether a product sums over more than one term, and reads an element for several sums.

    Any other is elementwise work, perhaps with a reduction: the presets leave it in float32.
    """
    if eqn.primitive.name != "dot_general":
        return True
    summed, batch = eqn.params["dimension_numbers"]
    sizes: list[list[int]] = [[], []]
    for side in (0, 1):
        shape = eqn.invars[side].aval.shape
        free = set(range(len(shape))) - {*summed[side], *batch[side]}
        sizes[0] += [shape[d] for d in summed[side]]
        sizes[1] += [shape[d] for d in free]
    return all(any(size != 1 for size in found) for found in sizes)


def split_products(jaxpr: Any, opaque: str) -> tuple[list[Any], list[Any]]:
    """The contracting products outside, and those inside, of a primitive that is not entered."""
    bodies = [j for e in named(jaxpr, opaque) for j in jaxprs_in(e.params)]
    inside = {id(e) for body in bodies for e in products(body)}
    contracting = [e for e in products(jaxpr) if contracts(e)]
    return (
        [e for e in contracting if id(e) not in inside],
        [e for e in contracting if id(e) in inside],
    )


def check_all_low(jaxpr: Any, least: int = 1, dtype: Any = None) -> Any:
    """Asserts that at least `least` products are there and that those that contract are low."""
    eqns = products(jaxpr)
    wide = [str(e) for e in eqns if contracts(e) and not is_low(e, dtype)]
    assert len(eqns) >= least, f"{len(eqns)} products, not {least}:\n{jaxpr}"
    assert any(is_low(e, dtype) for e in eqns)
    assert not wide, f"{len(wide)} of {len(eqns)} products are wide:\n" + "\n".join(wide)
    return jaxpr
