"""What is known of a value before the program runs, propagated forward per call site.

The planner guards values by these facts: what would overflow, vanish or lose
integers in a narrower format, and what follows random bits.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from precpass import jaxpr as ir
from precpass.graph import Graph
from precpass.opkinds import OpKind, op
from precpass.precision import Precision

__all__ = ["ANY", "Fact", "Facts", "guard", "propagate"]


class Fact(NamedTuple):
    """What is known of a value's elements.

    Attributes:
        lo, hi: bounds of the finite elements.
        reaches: a magnitude that an element may well have, since a constant with
            it was selected into the value or added to it; 0 where none is known.
        tiny: the smallest nonzero magnitude, where known; else 0.
        integer: every element is an integer.
        constant: the elements themselves are known.
        random: made from random bits and constants alone.
    """

    lo: float = -math.inf
    hi: float = math.inf
    tiny: float = 0.0
    integer: bool = False
    constant: bool = False
    random: bool = False
    reaches: float = 0.0


ANY = Fact()
_UNIT = Fact(-1.0, 1.0)
_BOOL = Fact(0.0, 1.0, integer=True)


@dataclasses.dataclass(frozen=True, eq=False)
class Facts:
    """The facts of one body at one class of call sites.

    Attributes:
        body: its index in the graph.
        values: variable -> fact.
        inner: equation row -> the facts of its bodies.
    """

    body: int
    values: dict[Any, Fact]
    inner: dict[int, tuple[Facts, ...]]

    def of(self, atom: Any) -> Fact:
        """The fact of a variable or literal."""
        return of_array(atom.val) if ir.is_literal(atom) else self.values.get(atom, ANY)


def guard(fact: Fact, target: Precision) -> str | None:
    """Why a value with this fact must not be held in `target`, or None."""
    bound = max(abs(fact.lo), abs(fact.hi))
    largest = bound if math.isfinite(bound) else fact.reaches
    if largest > target.max:
        return f"reaches {largest:.3g}, above {target}'s largest value {target.max:.3g}"
    if fact.constant and 0.0 < fact.tiny < target.smallest_normal:
        return (
            f"{fact.tiny:.3g} vanishes in {target} (smallest normal {target.smallest_normal:.3g})"
        )
    if fact.integer and bound > target.exact_integers:
        return f"integers up to {bound:.3g}; {target} is exact only to {target.exact_integers}"
    return None


_LARGE = 1 << 20
_known: dict[int, tuple[Any, Fact]] = {}


def of_array(value: Any) -> Fact:
    """The fact of a constant. Large device arrays are reduced on their device, once per buffer.

    A constant that is a tracer of an outer transform is unknown.
    """
    if isinstance(value, jax.core.Tracer) or not hasattr(value, "dtype"):
        return ANY if not isinstance(value, (int, float, bool)) else _of_numpy(np.asarray(value))
    if not (jnp.issubdtype(value.dtype, jnp.number) or value.dtype == np.bool_):
        return ANY
    if jnp.issubdtype(value.dtype, jnp.complexfloating):
        return ANY
    if np.size(value) < _LARGE:
        return _of_numpy(np.asarray(value))
    held = _known.get(id(value))
    if held is None or held[0] is not value:
        if len(_known) > 256:
            _known.clear()
        # the array is held so that its id is not given to another one
        held = _known[id(value)] = (value, _of_large(value))
    return held[1]


def _of_numpy(value: np.ndarray[Any, Any]) -> Fact:
    if value.size == 0:
        return Fact(0.0, 0.0, constant=True)
    wide = value.astype(np.float64)
    finite = wide[np.isfinite(wide)]
    if finite.size == 0:
        return Fact(0.0, 0.0, constant=True)
    magnitudes = np.abs(finite[finite != 0])
    tiny = float(magnitudes.min()) if magnitudes.size else 0.0
    is_float = jnp.issubdtype(value.dtype, jnp.floating)
    # a lone 1000.0 is a scale, not a count; a whole table of integers is positions
    integer = not is_float or bool(
        value.ndim and value.size > 1 and (finite == np.rint(finite)).all()
    )
    return Fact(float(finite.min()), float(finite.max()), tiny, integer, constant=True)


def _of_large(value: Any) -> Fact:
    def reduce(x: Any) -> Any:
        x = x.astype(jnp.float32)
        finite = jnp.isfinite(x)
        magnitude = jnp.where(finite & (x != 0), jnp.abs(x), jnp.inf)
        low, high = jnp.where(finite, x, jnp.inf), jnp.where(finite, x, -jnp.inf)
        whole = jnp.all(jnp.where(finite, x == jnp.round(x), True))
        return low.min(), high.max(), magnitude.min(), whole

    # compiled ahead of time: a plain call would be staged into the trace around it
    with jax.numpy_dtype_promotion("standard"):
        reduced = jax.jit(reduce).lower(jax.ShapeDtypeStruct(value.shape, value.dtype)).compile()
    lo, hi, tiny, whole = (float(x) for x in reduced(value))
    if not lo <= hi:
        return Fact(0.0, 0.0, constant=True)
    return Fact(lo, hi, tiny if math.isfinite(tiny) else 0.0, bool(whole), constant=True)


def propagate(graph: Graph) -> Facts:
    """The facts of the root and, under it, of every body at its call sites."""
    memo: dict[Any, Facts] = {}
    opened = ir.open_jaxpr(graph.root.jaxpr)
    return _body(graph, 0, tuple(_of_aval(v.aval) for v in opened.invars), memo)


def _body(graph: Graph, at: int, given: tuple[Fact, ...], memo: dict[Any, Facts]) -> Facts:
    key = (at, given)
    if key in memo:
        return memo[key]
    node = graph.bodies[at]
    opened = ir.open_jaxpr(node.jaxpr)
    values: dict[Any, Fact] = dict(zip(opened.invars, given, strict=True))
    consts = ir.consts_of(node.jaxpr)
    values.update(zip(opened.constvars, map(of_array, consts), strict=False))
    facts = memo[key] = Facts(at, values, {})
    for row in range(node.start, node.stop):
        eqn = graph.eqns[row]
        operands = [facts.of(v) for v in eqn.invars]
        if row in graph.children:
            results = _enter(graph, row, operands, facts, memo)
        else:
            results = _results(eqn, operands)
        values.update(zip(eqn.outvars, results, strict=True))
    return facts


def _enter(
    graph: Graph, row: int, operands: list[Fact], facts: Facts, memo: dict[Any, Facts]
) -> list[Fact]:
    eqn = graph.eqns[row]
    joined: list[Fact | None] = [None] * len(eqn.outvars)
    inner: list[Facts] = []
    for body, child in graph.children[row]:
        opened = ir.open_jaxpr(body.jaxpr)
        given = [operands[i] for i in body.operands]
        for invar, _ in body.carry:
            given[invar] = _of_aval(opened.invars[invar].aval)
        inside = _body(graph, child, tuple(given), memo)
        inner.append(inside)
        for atom, result in zip(opened.outvars, body.results, strict=False):
            fact = inside.of(atom)
            before = joined[result]
            joined[result] = fact if before is None else _hull([before, fact])
        for _, outvar in body.carry:
            # zero trips hand the initial value through
            joined[body.results[outvar]] = _of_aval(eqn.outvars[body.results[outvar]].aval)
    facts.inner[row] = tuple(inner)
    return [fact or _of_aval(v.aval) for fact, v in zip(joined, eqn.outvars, strict=True)]


def _of_aval(aval: Any) -> Fact:
    dtype = getattr(aval, "dtype", None)
    if dtype == np.bool_:
        return _BOOL
    if dtype is not None and jnp.issubdtype(dtype, jnp.integer):
        info = jnp.iinfo(dtype)
        return Fact(float(info.min), float(info.max), integer=True)
    return ANY


_SAMPLES = ("random_", "threefry", "rng_")
_BITS = frozenset(
    (
        *("shift_left", "shift_right_logical", "shift_right_arithmetic"),
        *("and", "or", "xor", "not", "bitcast_convert_type"),
    )
)


def _results(eqn: Any, operands: list[Fact]) -> list[Fact]:
    name = eqn.primitive.name
    avals = [v.aval for v in eqn.outvars]
    if name.startswith(_SAMPLES):
        return [_of_aval(a)._replace(random=True) for a in avals]
    rule = _RULES.get(name)
    known = rule(eqn, operands) if rule else None
    if known is None:
        row = op(name)
        moves = row.kind is OpKind.DATA_MOVEMENT or (row.selects and row.kind is OpKind.REDUCTION)
        known = _hull(_data(eqn, operands)) if moves and operands else ANY
    if name in _KEEPS_REACH:
        known = known._replace(reaches=_reach(operands))
    random = _stays_random(name, operands)
    return [_clipped(known, aval)._replace(random=random) for aval in avals]


# A mask's constant survives what adds to it or chooses among values.
_KEEPS_REACH = frozenset(
    ("add", "sub", "add_any", "max", "min", "neg", "abs", "convert_element_type", "stop_gradient")
)


def _stays_random(name: str, operands: list[Fact]) -> bool:
    if not any(f.random for f in operands):
        return False
    kind = op(name).kind
    follows = kind in (OpKind.ELEMENTWISE, OpKind.DATA_MOVEMENT) or name in _BITS
    return follows and all(f.random or f.constant for f in operands)


def _clipped(fact: Fact, aval: Any) -> Fact:
    # a position of an argmax or a wrapped integer says nothing about the operand's bounds
    limits = _of_aval(aval)
    if limits is ANY:
        return fact
    if limits.lo <= fact.lo and fact.hi <= limits.hi:
        return fact._replace(integer=True)
    return limits


def _data(eqn: Any, operands: list[Fact]) -> list[Fact]:
    data = op(eqn.primitive.name).data
    if data is not None:
        return [operands[i] for i in data]
    dtype = getattr(eqn.outvars[0].aval, "dtype", None)
    return [
        f
        for f, v in zip(operands, eqn.invars, strict=True)
        if getattr(v.aval, "dtype", None) == dtype
    ] or [ANY]


def _hull(facts: Sequence[Fact]) -> Fact:
    tiny = [f.tiny for f in facts if f.tiny]
    return Fact(
        min(f.lo for f in facts),
        max(f.hi for f in facts),
        min(tiny) if tiny else 0.0,
        all(f.integer for f in facts),
        all(f.constant for f in facts),
        reaches=_reach(facts),
    )


def _reach(facts: Sequence[Fact]) -> float:
    known = (max(abs(f.lo), abs(f.hi)) if f.constant else f.reaches for f in facts)
    return max(filter(math.isfinite, known), default=0.0)


def _interval(combine: Callable[..., list[float]]) -> Callable[[Any, list[Fact]], Fact]:
    def rule(_eqn: Any, operands: list[Fact]) -> Fact:
        ends = combine(*((f.lo, f.hi) for f in operands))
        constant = all(f.constant for f in operands)
        integer = all(f.integer for f in operands)
        if any(math.isnan(e) for e in ends):
            return Fact(integer=integer, constant=constant)
        # 0 is no magnitude: a constant that may be 0 gives no evidence of vanishing
        lone = abs(ends[0]) if constant and ends[0] == ends[-1] else 0.0
        return Fact(min(ends), max(ends), lone, integer, constant)

    return rule


def _iota(eqn: Any, _operands: list[Fact]) -> Fact:
    size = eqn.params["shape"][eqn.params["dimension"]]
    return Fact(0.0, float(size - 1) if isinstance(size, int) else math.inf, integer=True)


def _convert(_eqn: Any, operands: list[Fact]) -> Fact:
    return operands[0]


def _position(eqn: Any, _operands: list[Fact]) -> Fact:
    sizes = [eqn.invars[0].aval.shape[a] for a in eqn.params["axes"]]
    return Fact(0.0, float(max([*sizes, 1])) if all(type(s) is int for s in sizes) else math.inf)


def _power(eqn: Any, operands: list[Fact]) -> Fact:
    fact, y = operands[0], eqn.params.get("y", 2)
    try:
        ends = [fact.lo**y, fact.hi**y, *([0.0] if fact.lo <= 0 <= fact.hi else [])]
    except (OverflowError, ZeroDivisionError):
        return ANY
    return Fact(min(ends), max(ends), 0.0, fact.integer and y >= 0, fact.constant)


_RULES: dict[str, Callable[[Any, list[Fact]], Fact]] = {
    "iota": _iota,
    "convert_element_type": _convert,
    "copy": _convert,
    "stop_gradient": _convert,
    "select_n": lambda eqn, fs: _hull(fs[1:]),
    "clamp": _interval(lambda a, x, b: [max(x[0], a[0]), min(x[1], b[1])]),
    "add": _interval(lambda a, b: [a[0] + b[0], a[1] + b[1]]),
    "sub": _interval(lambda a, b: [a[0] - b[1], a[1] - b[0]]),
    "mul": _interval(lambda a, b: [x * y for x in a for y in b]),
    "neg": _interval(lambda a: [-a[1], -a[0]]),
    "abs": _interval(lambda a: [0.0 if a[0] <= 0 <= a[1] else min(map(abs, a)), max(map(abs, a))]),
    "max": _interval(lambda a, b: [max(a[0], b[0]), max(a[1], b[1])]),
    "min": _interval(lambda a, b: [min(a[0], b[0]), min(a[1], b[1])]),
    "square": _power,
    "integer_pow": _power,
    "argmax": _position,
    "argmin": _position,
    **dict.fromkeys(("tanh", "erf", "sin", "cos", "sign"), lambda eqn, fs: _UNIT),
    "logistic": lambda eqn, fs: Fact(0.0, 1.0),
}
