"""`quantized`: round parameters to 8 bits ahead of time, for programs that only run forward."""

from __future__ import annotations

import functools
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec

import jax
import jax.numpy as jnp
from jax import lax

from precpass import jaxpr as ir
from precpass.analysis.graph import Graph
from precpass.api import inspect, mixed_of
from precpass.eight_bits.scaled_product import Rounding
from precpass.jaxpr import QuantizedArray
from precpass.jit.nnx import is_node
from precpass.jit.staged import AtArguments
from precpass.plan.plan import Plan
from precpass.planner.planned_bodies import decisions_of
from precpass.policy.policy import PolicyLike, PrecisionPolicy
from precpass.policy.precision import Precision
from precpass.policy.presets import AutoMixedInt8
from precpass.policy.warned import PrecisionWarning, quietly

if TYPE_CHECKING:
    from precpass.view.inspection import Inspection

__all__ = ["QuantizedArray", "quantized"]

P = ParamSpec("P")


def quantized(
    fn: Callable[P, Any], policy: PolicyLike = AutoMixedInt8, *, argnums: int = 0
) -> AtArguments[P, Any]:
    """Round the weights in an argument of `auto_mixed(fn, policy)` to 8 bits ahead of time.

    A weight that is rounded in each call costs a pass over it in float32. One that was rounded
    before takes a quarter of the memory, and the matrix product reads it directly. The function
    gives the same results for both, apart from a float32 rounding of the scales. An exception is a
    stack in float32 that enters a loop in 16 bits.

    The values are stored with the dimensions that products sum over behind all others, as NVIDIA's
    kernels take them; see `QuantizedArray.order`. On other devices that makes no difference.

    An array is replaced if only scaled products read it, all of them along the same dimensions. It
    may be a stack of weights that a scan slices. The policy's `profitability` is ignored: products
    that do not gain while they round their weights may gain when they need not. A derivative with
    respect to another argument reads the rounded weights. Under a 16-bit policy the result is still
    weights of 8 bits, which a matrix product casts to 16.

    Args:
        fn: the function, or the result of `auto_mixed`. It is not run, so no updates are made.
        policy: a policy with matrix products in 8 bits.
        argnums: the position of the argument.

    Returns:
        A function of `fn`'s arguments (arrays, or `jax.ShapeDtypeStruct`s in the place of all of
        them) that returns the argument with `QuantizedArray`s in the place of arrays. It is a
        pytree of arrays, which for example orbax saves.

    Raises:
        TypeError: for an argument that is or contains a module or a state of flax nnx, or
            `QuantizedArray`s.
        ValueError: for an unknown policy, one without matrix products in 8 bits, or a position that
            has no argument.

    Warns:
        PrecisionWarning: if no array is replaced.

    Examples:
        >>> def layers(ws, x):
        ...     for w in ws:
        ...         x = jnp.tanh(x @ w)
        ...     return x
        >>> ws, x = [jnp.eye(256)] * 3, jnp.ones((256, 256))
        >>> small = quantized(layers)(ws, x)
        >>> [type(w).__name__ for w in small]
        ['QuantizedArray', 'QuantizedArray', 'QuantizedArray']
        >>> small[1].values.dtype, small[1].order  # what is summed is stored last
        (dtype('int8'), (1, 0))
    """
    # What does not pay when each call rounds the weights may pay when it does not.
    mixed, parsed = mixed_of(fn), PrecisionPolicy.parse(policy).with_profitability("always")
    if not isinstance(argnums, int) or isinstance(argnums, bool):  # pyright: ignore[reportUnnecessaryIsInstance] -- user input
        raise TypeError(f"argnums = {argnums!r}: the position of one argument, an int, is taken")
    if not any(rule.parsed.is_scaled for rule in parsed.rules):
        raise ValueError(f"{parsed.title} multiplies nothing in 8 bits: take AutoMixedInt8")

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
        readers = _Readers(found.before, found.plan)
        out = list(leaves)
        for i, var in operands.items():
            if (reading := readers.common(var)) is not None:
                out[i] = _replaced(leaves[i], reading)
        if not any(isinstance(x, QuantizedArray) for x in out):
            warnings.warn(
                f"quantized: no array of argument {argnums} is read by products in 8 bits alone",
                PrecisionWarning,
                stacklevel=2,
            )
        return jax.tree.unflatten(tree, out)

    return of_arguments


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


class _Reading(NamedTuple):
    """How a scaled product reads a value.

    Attributes:
        precision: the format that it is rounded to.
        shared: the dimensions along which it has one scale.
        summed: the dimensions that the product sums over; () if products sum over different ones.
    """

    precision: Precision
    shared: tuple[int, ...]
    summed: tuple[int, ...]


class _Readers:
    """The equations that read the arguments of a planned program.

    Args:
        jaxpr: the program.
        plan: its plan.
    """

    def __init__(self, jaxpr: Any, plan: Plan) -> None:
        self._graph = graph = Graph.build(jaxpr)
        every = [range(node.start, node.stop) for node in graph.bodies]
        self._decisions = decisions_of(graph, plan, every)
        self._rows = defaultdict[tuple[int, Any], list[tuple[int, int]]](list)
        for row, eqn in enumerate(graph.eqns):
            for at, atom in enumerate(eqn.invars):
                if not ir.is_literal(atom):
                    self._rows[int(graph.body[row]), atom].append((row, at))

    def common(self, var: ir.Var) -> _Reading | None:
        """How all readers read an argument; None if they are not scaled products that agree."""
        found = set(self._of(0, var))
        if None in found or len({reading[:2] for reading in found if reading}) != 1:
            return None
        one = found.pop()
        return one._replace(summed=()) if one and found else one

    def _of(self, body: int, var: ir.Var) -> Iterator[_Reading | None]:
        """The readings of a value by all its readers; None for one that is no scaled product."""
        if any(var is v for v in ir.open_jaxpr(self._graph.bodies[body].jaxpr).outvars):
            yield None
        for row, at in self._rows[body, var]:
            yield from self._by(row, at)

    def _by(self, row: int, at: int) -> Iterator[_Reading | None]:
        eqn, order = self._graph.eqns[row], ir.permutation(self._graph.eqns[row])
        behind = functools.partial(self._of, int(self._graph.body[row]))
        if row in self._graph.children:
            yield from self._inside(row, at)
        elif ir.dequantized_from(eqn):
            yield from behind(eqn.outvars[0])
        elif order is not None:
            for reading in behind(eqn.outvars[0]):
                yield reading and _moved(reading, order)
        elif ir.moves_whole(eqn):
            for reading in behind(eqn.outvars[0]):
                before, after = (v.aval.ndim for v in (eqn.invars[0], eqn.outvars[0]))
                has_one_scale = reading and len(reading.shared) == after
                every = tuple(range(before))
                yield _Reading(reading.precision, every, ()) if reading and has_one_scale else None
        else:
            for decision in self._decisions.get(row, (None,)):
                scaled = decision and decision.product.scaled
                yield _read_by_product(eqn, at, scaled) if scaled else None

    def _inside(self, row: int, at: int) -> Iterator[_Reading | None]:
        """The readings of an equation's operand in the equation's bodies."""
        eqn = self._graph.eqns[row]
        if not ir.takes_border_copies(eqn):
            yield None
        loop = ir.loop_rows(eqn)
        is_sliced = loop is not None and at >= loop[0]
        for body, child in self._graph.children[row]:
            carried = {invar for invar, _ in body.carry}
            for i, v in enumerate(ir.open_jaxpr(body.jaxpr).invars):
                if body.operands[i] != at:
                    continue
                for reading in (None,) if i in carried else self._of(child, v):
                    dims = range(1, v.aval.ndim + 1)
                    yield reading and _moved(reading, dims) if is_sliced else reading


def _read_by_product(eqn: ir.Eqn, at: int, scaled: Precision) -> _Reading:
    summed = tuple(sorted(ir.dot_numbers(eqn)[0][at]))
    shared = summed if scaled.by_row else tuple(range(eqn.invars[at].aval.ndim))
    return _Reading(scaled, shared, summed)


def _moved(reading: _Reading, order: Sequence[int]) -> _Reading:
    """The reading of an operand whose dimensions `order` are those of a result with a reading."""
    shared, summed = (tuple(sorted(order[d] for d in dims)) for dims in reading[1:])
    return reading._replace(shared=shared, summed=summed)


def _replaced(x: Any, reading: _Reading) -> QuantizedArray:
    """The array in 8 bits, with the dimensions that products sum over behind the others."""
    last = reading.summed
    order = (*(d for d in range(len(x.shape)) if d not in last), *last)
    moved = [at for at, d in enumerate(order) if at != d]
    first = min(moved, default=len(order))

    def rounded(x: Any) -> list[Any]:
        is_whole = len(reading.shared) == x.ndim
        rounding = Rounding(reading.precision, () if is_whole else reading.shared)
        values, scale = rounding(x, platform="cpu")
        # A scale with all dimensions can be stacked and sliced together with the values.
        made = values, scale if scale.ndim else lax.reshape(scale, (1,) * values.ndim)
        return [lax.transpose(a, order) if moved else a for a in made]

    make = jax.eval_shape if isinstance(x, jax.ShapeDtypeStruct) else lambda f, x: jax.jit(f)(x)
    values, scale = make(rounded, x)
    return QuantizedArray(values, scale, [d - first for d in order[first:]])
