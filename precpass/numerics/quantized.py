"""`quantized`: parameters in 8 bits ahead of time, for programs that only run forward."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec

import jax
import jax.numpy as jnp

from precpass import jaxpr as ir
from precpass.api import inspect, mixed_of
from precpass.jit.nnx import has_nodes
from precpass.jit.staged import AtArguments
from precpass.plan.plan import Plan, ProductForm
from precpass.policy.policy import AutoMixedInt8, PolicyLike, PrecisionPolicy
from precpass.policy.precision import Precision
from precpass.policy.warned import PrecisionWarning, quietly
from precpass.rewrite.scaled_product import in_eight_bits, scaled_formats

if TYPE_CHECKING:
    from precpass.view.inspection import Inspection

__all__ = ["QuantizedArray", "quantized"]

P = ParamSpec("P")

QuantizedArray = ir.QuantizedArray

_Reading = tuple[Precision, tuple[int, ...]]
"""The format in which a product reads a parameter, and the dimensions that it sums over."""


def quantized(
    fn: Callable[P, Any], policy: PolicyLike = AutoMixedInt8, *, argnums: int = 0
) -> AtArguments[P, Any]:
    """An argument with the weights of scaled products in 8 bits, for `auto_mixed(fn, policy)`.

    A weight that is rounded in each call costs a pass over it in float32. One that was rounded
    before takes a quarter of the memory, and the product reads it as it is. The function gives the
    same results for both, but for a float32 rounding of the scales.

    An array is replaced if scaled products alone read it, all of them along the same dimensions,
    and if they stand in the function itself: not in the body of a loop, whose weights are slices
    of a stack. Under a policy of 16 bits the results of `quantized` are weights of 8 bits, which a
    product casts to 16.

    Args:
        fn: the function, or the result of `auto_mixed`. Its updates are not made.
        policy: a policy with products in 8 bits.
        argnums: the position of the argument.

    Returns:
        A function of `fn`'s arguments (arrays, or `jax.ShapeDtypeStruct`s in the place of all of
        them) that gives the argument with `QuantizedArray`s in the place of arrays. It is a pytree
        of arrays, which for example orbax saves.

    Raises:
        TypeError: for an argument that is or holds a module of flax nnx.
        ValueError: for an unknown policy, one without products in 8 bits, or a position that there
            is no argument for.

    Warns:
        PrecisionWarning: if no array is replaced.

    Examples:
        >>> def layers(ws, x):
        ...     for w in ws:
        ...         x = jnp.tanh(x @ w)
        ...     return x
        >>> ws, x = [jnp.eye(256)] * 3, jnp.ones((256, 256))
        >>> small = quantized(layers)(ws, x)
        >>> [type(w).__name__ for w in small]  # the first and the last layer have 16 bits
        ['ArrayImpl', 'QuantizedArray', 'ArrayImpl']
        >>> small[1].values.dtype, small[1].scale.shape
        (dtype('int8'), (1, 256))
    """
    mixed, parsed = mixed_of(fn), PrecisionPolicy.parse(policy)
    if parsed.scaled is None and not any(_orders_scaled(rule.precision) for rule in parsed.rules):
        raise ValueError(f"{parsed.name} multiplies nothing in 8 bits: take AutoMixedInt8")

    def of_arguments(*args: Any, **kwargs: Any) -> Any:
        if not 0 <= argnums < len(args):
            raise ValueError(
                f"argnums = {argnums}: there is no such argument among the {len(args)} that were "
                "given by position"
            )
        if has_nodes(args[argnums]):
            raise TypeError(
                "quantized: a flax nnx module holds arrays alone; take its state as a dict, "
                "nnx.to_pure_dict(nnx.split(model)[1]), and a function that merges it"
            )
        leaves, tree = jax.tree.flatten(args[argnums])
        with quietly():
            found, operands = _planned(mixed.__wrapped__, parsed, args, kwargs, argnums)
        readings = _readings(found.before, found.plan)
        out = list(leaves)
        for i, var in operands.items():
            if (reading := readings.get(var)) is not None:
                out[i] = _replaced(leaves[i], *reading)
        if not any(isinstance(x, QuantizedArray) for x in out):
            warnings.warn(
                f"quantized: no array of argument {argnums} is read by products in 8 bits alone",
                PrecisionWarning,
                stacklevel=2,
            )
        return jax.tree.unflatten(tree, out)

    return of_arguments


def _orders_scaled(precision: Any) -> bool:
    return Precision.parse(precision).is_scaled


def _planned(
    fn: Callable[..., Any], policy: PrecisionPolicy, args: Any, kwargs: Any, argnums: int
) -> tuple[Inspection, dict[int, Any]]:
    """A call as it is planned, and the variables of an argument's leaves, by their index."""
    leaves, tree = jax.tree.flatten((args, kwargs))
    before = len(jax.tree.leaves(args[:argnums]))
    own = range(before, before + len(jax.tree.leaves(args[argnums])))
    at = [i for i, x in enumerate(leaves) if hasattr(x, "shape") and hasattr(x, "dtype")]

    def of_arrays(*arrays: Any) -> list[Any]:
        given = list(leaves)
        for i, x in zip(at, arrays, strict=True):
            given[i] = x
        args, kwargs = jax.tree.unflatten(tree, given)
        return [x for x in jax.tree.leaves(fn(*args, **kwargs)) if isinstance(x, jax.Array)]

    found = inspect(of_arrays, policy)(*(leaves[i] for i in at))
    # Behind the values that the function closes over.
    own_variables = ir.open_jaxpr(found.before).invars[-len(at) :]
    variables = dict(zip(at, own_variables, strict=True))
    wide = (i for i in own if i in variables and leaves[i].dtype == jnp.float32)
    return found, {i - before: variables[i] for i in wide}


def _readings(jaxpr: Any, plan: Plan) -> dict[Any, _Reading]:
    """How scaled products read the values that nothing else reads."""
    found: dict[Any, set[_Reading | None]] = {}
    opened = ir.open_jaxpr(jaxpr)
    # A transpose stands for its operand, with its dimensions in another order.
    moved: dict[Any, tuple[Any, tuple[int, ...]]] = {}
    for eqn, decision in zip(opened.eqns, plan.decisions, strict=True):
        if (order := ir.permutation(eqn)) is not None and not ir.is_literal(eqn.invars[0]):
            source, before = moved.get(eqn.invars[0], (eqn.invars[0], range(len(order))))
            moved[eqn.outvars[0]] = source, tuple(before[d] for d in order)
            continue
        read = _by_product(eqn, decision.product) if decision.product.scaled else ()
        for side, var in enumerate(eqn.invars):
            if ir.is_literal(var):
                continue
            source, order = moved.get(var, (var, None))
            reading = read[side] if side < len(read) else None
            if reading is not None and order is not None:
                reading = reading[0], tuple(sorted(order[d] for d in reading[1]))
            found.setdefault(source, set()).add(reading)
    for var in opened.outvars:
        if not ir.is_literal(var):
            found.setdefault(moved.get(var, (var, None))[0], set()).add(None)
    alike = {var: next(iter(readings)) for var, readings in found.items() if len(readings) == 1}
    return {var: reading for var, reading in alike.items() if reading is not None}


def _by_product(eqn: Any, form: ProductForm) -> list[_Reading]:
    assert form.scaled is not None
    summed, _ = ir.dot_numbers(eqn)
    formats = scaled_formats(form.scaled, form.cotangent)
    is_int8 = form.scaled is Precision.INT8
    return [
        (precision, tuple(sorted(dims)) if is_int8 else ())
        for precision, dims in zip(formats, summed, strict=True)
    ]


def _replaced(x: Any, precision: Precision, summed: Sequence[int]) -> QuantizedArray:
    def rounded(x: Any) -> list[Any]:
        return in_eight_bits(x, precision, summed)

    make = jax.eval_shape if isinstance(x, jax.ShapeDtypeStruct) else lambda f, x: jax.jit(f)(x)
    return QuantizedArray(*make(rounded, x))
