"""`quantized`: parameters in 8 bits ahead of time, for programs that only run forward."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec

import jax
import jax.numpy as jnp
from jax import lax

from precpass import jaxpr as ir
from precpass.api import inspect, mixed_of
from precpass.jit.nnx import is_node
from precpass.jit.staged import AtArguments
from precpass.plan.plan import Plan, ProductForm
from precpass.policy.policy import PolicyLike, PrecisionPolicy
from precpass.policy.precision import Precision
from precpass.policy.presets import AutoMixedInt8
from precpass.policy.warned import PrecisionWarning, quietly
from precpass.rewrite.scaled_product import in_eight_bits, scaled_formats

if TYPE_CHECKING:
    from precpass.view.inspection import Inspection

__all__ = ["QuantizedArray", "quantized"]

P = ParamSpec("P")

QuantizedArray = ir.QuantizedArray


class _Reading(NamedTuple):
    """How a product reads a parameter.

    Attributes:
        precision: the format.
        shared: the dimensions along which it has one scale; () for all.
        summed: the dimensions that the product sums over; () if products sum over different ones.
    """

    precision: Precision
    shared: tuple[int, ...]
    summed: tuple[int, ...]


def quantized(
    fn: Callable[P, Any], policy: PolicyLike = AutoMixedInt8, *, argnums: int = 0
) -> AtArguments[P, Any]:
    """An argument with the weights of scaled products in 8 bits, for `auto_mixed(fn, policy)`.

    A weight that is rounded in each call costs a pass over it in float32. One that was rounded
    before takes a quarter of the memory, and the product reads it as it is. The function gives the
    same results for both, but for a float32 rounding of the scales. Exceptions are weights of
    loops. One that is read in every trip would be rounded in every trip if it were float32, so its
    products have 16 bits then. And a stack in float32 may cross the loop's border in 16 bits.

    Its values are stored with the dimensions that products sum over behind all others, as NVIDIA's
    kernels take them; `QuantizedArray.order` tells. On other devices that makes no difference.

    An array is replaced if scaled products alone read it, all of them along the same dimensions.
    It may be a stack of weights that a scan slices. The policy's `profitability` is not asked here:
    products that do not pay while they round their weights may pay when they need not. A derivative
    with respect to another argument reads the rounded weights. Under a
    policy of 16 bits the results of `quantized` are weights of 8 bits, which a product casts to 16.

    Args:
        fn: the function, or the result of `auto_mixed`. Its updates are not made.
        policy: a policy with products in 8 bits.
        argnums: the position of the argument.

    Returns:
        A function of `fn`'s arguments (arrays, or `jax.ShapeDtypeStruct`s in the place of all of
        them) that gives the argument with `QuantizedArray`s in the place of arrays. It is a pytree
        of arrays, which for example orbax saves.

    Raises:
        TypeError: for an argument that is or holds a module or a state of flax nnx, or
            `QuantizedArray`s.
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
        >>> small[1].values.dtype, small[1].order  # what is summed is stored last
        (dtype('int8'), (1, 0))
    """
    # What does not pay when each call rounds the weights may pay when it does not.
    mixed, parsed = mixed_of(fn), PrecisionPolicy.parse(policy).with_profitability("always")
    if not isinstance(argnums, int) or isinstance(argnums, bool):  # pyright: ignore[reportUnnecessaryIsInstance] -- user input
        raise TypeError(f"argnums = {argnums!r}: the position of one argument, an int, is taken")
    asked = [Precision.parse(rule.precision) for rule in parsed.rules]
    asked = [p for p in (parsed.scaled, *asked) if p is not None and p.is_scaled]
    if not asked:
        raise ValueError(f"{parsed.name} multiplies nothing in 8 bits: take AutoMixedInt8")
    if all(p.block for p in asked):
        raise ValueError(
            f"quantized: operands in {asked[0]} have a scale for each block, and are rounded in "
            "each call: take a policy with 'int8', 'f8e4m3' or 'f8e5m2'"
        )

    def of_arguments(*args: Any, **kwargs: Any) -> Any:
        if not 0 <= argnums < len(args):
            raise ValueError(
                f"argnums = {argnums}: there is no such argument among the {len(args)} that were "
                "given by position"
            )
        _check(args[argnums])
        leaves, tree = jax.tree.flatten(args[argnums])
        with quietly():
            found, operands = _planned(mixed.__wrapped__, parsed, args, kwargs, argnums)
        readings = _readings(found.before, found.plan)
        out = list(leaves)
        for i, var in operands.items():
            if (reading := readings.get(var)) is not None:
                out[i] = _replaced(leaves[i], reading)
        if not any(isinstance(x, QuantizedArray) for x in out):
            warnings.warn(
                f"quantized: no array of argument {argnums} is read by products in 8 bits alone",
                PrecisionWarning,
                stacklevel=2,
            )
        return jax.tree.unflatten(tree, out)

    return of_arguments


class _Place(NamedTuple):
    """The part of one of the program's operands that a value is.

    Attributes:
        var: the operand.
        dims: for each dimension of the value the operand's.
        sliced: the dimensions of the operand of which the value is a slice.
    """

    var: Any
    dims: tuple[int, ...]
    sliced: tuple[int, ...] = ()

    def slice(self) -> _Place:
        """The place of a slice along the first dimension."""
        return _Place(self.var, self.dims[1:], (*self.sliced, self.dims[0]))

    def outside(self, reading: _Reading) -> _Reading:
        """How the operand is read, if the value is read so.

        One scale for a whole value is one for all dimensions but those of which it is a slice.
        """
        shared, summed = ([self.dims[d] for d in dims] for dims in reading[1:])
        if not shared and self.sliced:
            shared = self.dims
        return reading._replace(shared=tuple(sorted(shared)), summed=tuple(summed))


def _check(argument: Any) -> None:
    """Refuses an argument that cannot hold arrays of 8 bits, or holds some already."""
    leaves = jax.tree.leaves(argument, is_leaf=lambda x: is_node(x) or _is_quantized(x))
    if any(map(is_node, leaves)):
        raise TypeError(
            "quantized: a module, a variable or a state of flax nnx holds arrays alone; take the "
            "state as a dict, nnx.to_pure_dict(nnx.split(model)[1]), and a function that merges it"
        )
    if any(map(_is_quantized, leaves)):
        raise TypeError(
            "quantized: the argument holds QuantizedArrays already; give the arrays in float32 "
            "that they were made of"
        )


def _is_quantized(x: Any) -> bool:
    return isinstance(x, QuantizedArray)


def _planned(
    fn: Callable[..., Any], policy: PrecisionPolicy, args: Any, kwargs: Any, argnums: int
) -> tuple[Inspection, dict[int, Any]]:
    """A call as it is planned, and the variables of an argument's leaves, by their index."""
    leaves, tree = jax.tree.flatten((args, kwargs))
    before = len(jax.tree.leaves(args[:argnums]))
    own = range(before, before + len(jax.tree.leaves(args[argnums])))
    at = [i for i, x in enumerate(leaves) if hasattr(x, "shape") and hasattr(x, "dtype")]
    wide = [i for i in at if i in own and leaves[i].dtype == jnp.float32]

    def of_arrays(*arrays: Any) -> list[Any]:
        given = list(leaves)
        for i, x in zip(at, arrays, strict=True):
            given[i] = x
        args, kwargs = jax.tree.unflatten(tree, given)
        return [x for x in jax.tree.leaves(fn(*args, **kwargs)) if isinstance(x, jax.Array)]

    # The call is planned as it will be made: a loop may read a constant that has 8 bits already.
    given = [_in_the_place_of(leaves[i]) if i in wide else leaves[i] for i in at]
    found = inspect(of_arrays, policy)(*given)
    # Behind the values that the function closes over.
    variables = ir.open_jaxpr(found.before).invars[-len(jax.tree.leaves(given)) :]
    operands = jax.tree.unflatten(jax.tree.structure(given), variables)
    return found, {i - before: x.values for i, x in zip(at, operands, strict=True) if i in wide}


def _in_the_place_of(x: Any) -> QuantizedArray:
    """Shapes of 8 bits for an array. The plan does not depend on which format of 8 bits it is."""
    values = jax.ShapeDtypeStruct(x.shape, jnp.int8, sharding=getattr(x, "sharding", None))
    return QuantizedArray(values, jax.ShapeDtypeStruct((1,) * len(x.shape), jnp.float32))


def _readings(jaxpr: Any, plan: Plan) -> dict[Any, _Reading]:
    """How scaled products read those operands of a jaxpr that nothing else reads."""
    opened = ir.open_jaxpr(jaxpr)
    found: dict[Any, set[_Reading | None]] = {}
    places = {v: _Place(v, tuple(range(len(v.aval.shape)))) for v in opened.invars}
    _read(opened, plan, places, found)
    alike = {var: _common(readings) for var, readings in found.items()}
    return {var: reading for var, reading in alike.items() if reading is not None}


def _common(readings: set[_Reading | None]) -> _Reading | None:
    """How all products read a value; None if it is not read in one way by products alone."""
    found = [reading for reading in readings if reading is not None]
    if len(found) < len(readings) or len({reading[:2] for reading in found}) != 1:
        return None
    return found[0] if len(found) == 1 else found[0]._replace(summed=())


def _read(
    opened: Any, plan: Plan, places: dict[Any, _Place], found: dict[Any, set[_Reading | None]]
) -> None:
    """Adds how a body reads the values of some operands, whose places are given."""
    for eqn, decision in zip(opened.eqns, plan.decisions, strict=True):
        place = _place(eqn.invars[0], places) if eqn.invars else None
        if place and ir.dequantized_from(eqn):
            places[eqn.outvars[0]] = place
            continue
        order = ir.permutation(eqn)
        if place and order is not None:
            # A transpose stands for its operand, with its dimensions in another order.
            places[eqn.outvars[0]] = place._replace(dims=tuple(place.dims[d] for d in order))
            continue
        entered = _enter(eqn, decision, places, found)
        form, read = decision.product, list[_Reading]()
        if form.scaled and not form.scaled.block:
            read = _by_product(eqn, form)
        for side, var in enumerate(eqn.invars):
            place = None if side in entered else _place(var, places)
            if place is not None:
                reading = read[side] if side < len(read) else None
                found.setdefault(place.var, set()).add(reading and place.outside(reading))
    for var in opened.outvars:
        if place := _place(var, places):
            found.setdefault(place.var, set()).add(None)


def _enter(
    eqn: Any, decision: Any, places: dict[Any, _Place], found: dict[Any, set[_Reading | None]]
) -> set[int]:
    """Adds how an equation's bodies read values; gives the positions of these operands."""
    bodies = list(ir.bodies(eqn))
    if not decision.inner or not ir.takes_border_copies(eqn):
        return set()
    carried = {body.operands[invar] for body in bodies for invar, _ in body.carry}
    entered = set[int]()
    for body, plan in zip(bodies, decision.inner, strict=True):
        opened, inner = ir.open_jaxpr(body.jaxpr), dict[Any, _Place]()
        for at, (var, position) in enumerate(zip(opened.invars, body.operands, strict=True)):
            place = _place(eqn.invars[position], places)
            if place is None or position in carried:
                continue
            entered.add(position)
            is_sliced = eqn.primitive.name == "scan" and at >= body.constants + len(body.carry)
            inner[var] = place.slice() if is_sliced else place
        _read(opened, plan, inner, found)
    return entered


def _place(atom: Any, places: dict[Any, _Place]) -> _Place | None:
    return None if ir.is_literal(atom) else places.get(atom)


def _by_product(eqn: Any, form: ProductForm) -> list[_Reading]:
    assert form.scaled is not None
    formats = scaled_formats(form.scaled, form.cotangent, by_row=form.by_row)
    numbers, avals = ir.dot_numbers(eqn), [v.aval for v in eqn.invars]
    return [
        _Reading(rounding.precision, tuple(sorted(rounding.summed)), tuple(summed))
        for rounding, summed in zip(formats.roundings(numbers, avals), numbers[0], strict=True)
    ]


def _replaced(x: Any, reading: _Reading) -> QuantizedArray:
    """The array in 8 bits, with the dimensions that products sum over behind the others."""
    last = sorted(reading.summed)
    order = (*(d for d in range(len(x.shape)) if d not in last), *last)
    moved = [at for at, d in enumerate(order) if at != d]
    first = min(moved, default=len(order))

    def rounded(x: Any) -> list[Any]:
        values, scale = in_eight_bits(x, reading.precision, reading.shared)
        # A scale with all dimensions can be stacked and sliced together with the values.
        made = values, scale if scale.ndim else lax.reshape(scale, (1,) * values.ndim)
        return [lax.transpose(a, order) if moved else a for a in made]

    make = jax.eval_shape if isinstance(x, jax.ShapeDtypeStruct) else lambda f, x: jax.jit(f)(x)
    values, scale = make(rounded, x)
    return QuantizedArray(values, scale, [d - first for d in order[first:]])
