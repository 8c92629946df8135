"""The range of an equation's results from those of its operands: a rule for each primitive.

A new primitive needs a rule here only if its results' bounds follow from its operands'. Without
one nothing is known of its results.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from precpass import jaxpr as ir
from precpass.analysis.ranges import ANY, FINEST_STEP, LARGE_RATIO, ValueRange, of_aval, of_dtype
from precpass.policy.primitives import OpKind, op

__all__ = ["Memo", "hull", "results"]

_UNIT = ValueRange(-1.0, 1.0)

Memo = dict[Hashable, tuple[Sequence[ValueRange], Sequence[ValueRange]]]
"""A cache of results' ranges. The operands' ranges are in it too, because its keys are their ids.

A program repeats itself, and hashing a range takes as long as most rules do.
"""


def results(eqn: ir.Eqn, operands: Sequence[ValueRange], memo: Memo) -> Sequence[ValueRange]:
    """The ranges of an equation's results.

    Args:
        eqn: the equation.
        operands: the ranges of its operands.
        memo: a cache that the equations of a program share.
    """
    name = eqn.primitive.name
    if not _is_computed(name):
        return _of_others(eqn, operands)
    # none of their other parameters matters
    dtype, read = eqn.outvars[0].aval.dtype, _READ[name](eqn) if name in _READ else None
    key = name, dtype, read, *map(id, operands)
    if key not in memo:
        fact = _settled(name, _known(name, operands, read), operands, dtype)
        memo[key] = [fact], operands
    return memo[key][0]


@functools.cache
def _is_computed(name: str) -> bool:
    """Whether a primitive has one result, whose range follows from its operands and `_READ`."""
    return name in _RULES or op(name).kind is OpKind.ELEMENTWISE


def _of_others(eqn: ir.Eqn, operands: Sequence[ValueRange]) -> Sequence[ValueRange]:
    """The ranges of results of samplers, sorts, data movement and unknown primitives."""
    name = eqn.primitive.name
    if operands.count(ANY) == len(operands) and _learns_nothing(name):
        return [of_aval(v.aval) for v in eqn.outvars]
    avals = [v.aval for v in eqn.outvars]
    if op(name).makes_random_bits:
        return [of_aval(a)._replace(random=True) for a in avals]
    if name == "sort":
        return list(operands)
    if name in ("top_k", "approx_top_k"):
        return [operands[0], *(_position_below(eqn.invars[0].aval.shape[-1:]),) * (len(avals) - 1)]
    moves = _moves(name) and not ir.applies_function(eqn)
    data = tuple(_data(eqn, operands)) if moves else ()
    return [_moved(name, getattr(a, "dtype", None), data, *operands) for a in avals]


@functools.lru_cache(maxsize=65536)
def _moved(
    name: str, dtype: Any, data: tuple[ValueRange, ...], *operands: ValueRange
) -> ValueRange:
    # none of their parameters matters, but for which operands are moved
    known = hull(data) if data else ANY
    return _settled(name, _learned(name, known, operands), operands, dtype)


@functools.cache
def _moves(name: str) -> bool:
    """Whether the elements of a primitive's results are elements of its operands."""
    row = op(name)
    return row.kind is OpKind.DATA_MOVEMENT or (row.selects and row.kind is OpKind.REDUCTION)


def _settled(
    name: str, known: ValueRange, operands: Sequence[ValueRange], dtype: Any
) -> ValueRange:
    if operands and all(f.constant for f in operands):
        moves = op(name).kind is OpKind.DATA_MOVEMENT
        known = _of_constants(known, moves=moves)
        if not moves:
            known = known._replace(uneven=_is_uneven(name, known, operands))
    fact = _clipped(known, dtype)
    if _stays_random(name, operands):
        return fact._replace(random=True)
    # One object stands for "nothing is known", so that it is recognised quickly.
    return ANY if fact == ANY else fact


@functools.cache
def _learns_nothing(name: str) -> bool:
    """Whether nothing is known of a primitive's results if nothing is known of its operands."""
    return name not in ("sort", "top_k", "approx_top_k") and not op(name).makes_random_bits


def _of_constants(known: ValueRange, moves: bool) -> ValueRange:
    if moves:
        return known._replace(constant=True)
    bound = max(abs(known.lo), abs(known.hi))
    likely_max = bound if math.isfinite(bound) else 0.0
    return known._replace(constant=True, likely_max=likely_max)


def _is_uneven(name: str, known: ValueRange, operands: Sequence[ValueRange]) -> bool:
    """Whether a computed constant may have elements that are far above most others.

    Its elements are not known here, only their bounds. A multiple of a table is as the table.
    """
    tables = [f for f in operands if f.lo != f.hi]
    if len(tables) == 1 and op(name).scales:
        return tables[0].uneven
    return not known.grid and known.likely_max > LARGE_RATIO


def _known(name: str, operands: Sequence[ValueRange], read: Any) -> ValueRange:
    rule = _RULES.get(name)
    return _learned(name, ANY if rule is None else rule(read, operands), operands)


def _learned(name: str, known: ValueRange, operands: Sequence[ValueRange]) -> ValueRange:
    """What is known of a result apart from its bounds."""
    learned: dict[str, float] = {}
    if op(name).keeps_largest:
        learned["likely_max"] = _reach(operands)
    if name in ("mul", "div"):
        learned["likely_max"] = _scaled(name, [f.likely_max for f in operands])
        learned["magnitude"] = _scaled(name, [f.overall_magnitude for f in operands])
    if op(name).keeps_scale:
        learned["magnitude"] = _common_scale(operands)
    if name in ("add", "max"):
        learned["likely_min_nonzero"] = min(
            (f.likely_min_nonzero for f in operands if f.likely_min_nonzero), default=0.0
        )
    if name in _ON_GRID and not known.integer and any(f.grid for f in operands):
        learned["step"] = _step(name, operands)
    if any(learned.values()) or any(getattr(known, field) for field in learned):
        known = known._replace(**learned)
    return known


_LARGEST_COUNT = 2.0**24
"""The integers up to here are those that float32 tells apart."""
_ON_GRID = frozenset(("add", "sub", "mul", "div", "neg", "abs", "max", "min", "clamp"))


def _step(name: str, operands: Sequence[ValueRange]) -> float:
    """The step of the grid that an equation's results are on; 0 if none is known."""
    grids = [f for f in operands if f.lo != f.hi]
    numbers = [f.lo for f in operands if f.lo == f.hi]
    if name in ("mul", "div"):
        # A grid is scaled by one number that is written, and divided by it, not into it.
        scales = len(grids) == len(numbers) == 1 and numbers[0] != 0
        if not scales or (name == "div" and operands[0] is not grids[0]):
            return 0.0
        # Multiples of a mask, or of integers of unknown size, rarely count anything.
        if not max(-grids[0].lo, grids[0].hi) <= _LARGEST_COUNT:
            return 0.0
        factor = abs(numbers[0])
        step = grids[0].grid * (factor if name == "mul" else 1 / factor)
    else:
        step = _coarsest([f.grid for f in grids])
        if step and name in ("add", "sub"):
            step = min(_shifted(step, number) for number in (*numbers, 0.0))
    return step if FINEST_STEP <= step < math.inf else 0.0


def _coarsest(steps: Sequence[float]) -> float:
    """The step of the grid that has all numbers of several grids; 0 if there is none."""
    step = min(steps, default=0.0)
    return 0.0 if not step or any(s % step for s in steps) else step


def _shifted(step: float, number: float) -> float:
    """The step of the grid that has the sums of a grid and a number; of no such grid its own."""
    return next((s for s in (step, step / 2, step / 4, step / 8) if number % s == 0), step)


def _stays_random(name: str, operands: Sequence[ValueRange]) -> bool:
    if not any(f.random for f in operands):
        return False
    kind = op(name).kind
    follows = kind in (OpKind.ELEMENTWISE, OpKind.DATA_MOVEMENT) or op(name).keeps_random_bits
    return follows and all(f.random or f.constant for f in operands)


def _clipped(fact: ValueRange, dtype: Any) -> ValueRange:
    # The position from an argmax, or a wrapped integer, is not within the operand's bounds.
    limits = of_dtype(dtype)
    if limits is ANY:
        return fact
    if limits.lo <= fact.lo and fact.hi <= limits.hi:
        return fact._replace(integer=True)
    return limits


def _data(eqn: ir.Eqn, operands: Sequence[ValueRange]) -> list[ValueRange]:
    data = op(eqn.primitive.name).data
    if data is not None:
        return [operands[i] for i in data]
    dtype = getattr(eqn.outvars[0].aval, "dtype", None)
    return [
        f
        for f, v in zip(operands, eqn.invars, strict=True)
        if getattr(v.aval, "dtype", None) == dtype
    ] or [ANY]


def hull(facts: Sequence[ValueRange]) -> ValueRange:
    """The range of a value that is one of several values."""
    likely_min_nonzero = [f.likely_min_nonzero for f in facts if f.likely_min_nonzero]
    return ValueRange(
        min(f.lo for f in facts),
        max(f.hi for f in facts),
        min(likely_min_nonzero) if likely_min_nonzero else 0.0,
        _all_integers(facts),
        all(f.constant for f in facts),
        likely_max=_reach(facts),
        magnitude=_common_scale(facts),
        step=_common_step(facts),
        uneven=any(f.uneven for f in facts),
    )


def _common_step(facts: Sequence[ValueRange]) -> float:
    """The step of the grid of a value that is one of several; lone numbers are ignored."""
    step = _coarsest([f.grid for f in facts if f.lo != f.hi])
    return 0.0 if _all_integers(facts) else step


def _all_integers(facts: Sequence[ValueRange]) -> bool:
    """Whether all are integers; beside an integer a whole number written as a float counts too."""
    if not any(f.integer for f in facts):
        return False
    return all(f.integer or (f.lo == f.hi and f.lo % 1 == 0) for f in facts)


def _reach(facts: Sequence[ValueRange]) -> float:
    return max((f.likely_max for f in facts), default=0.0)


def _common_scale(facts: Sequence[ValueRange]) -> float:
    """The magnitude of a value that is one of several, or their sum; zeros are ignored."""
    scales = [f.overall_magnitude for f in facts if not f.lo == f.hi == 0]
    return max(scales) if scales and all(scales) else 0.0


def _scaled(name: str, magnitudes: Sequence[float]) -> float:
    """The magnitude of a product, in which an unknown factor (0) counts as 1."""
    first, second = (m or 1.0 for m in magnitudes)
    if not any(magnitudes):
        return 0.0
    reached = first * second if name == "mul" else first / second
    return reached if math.isfinite(reached) else 0.0


def _quotient(a: tuple[float, float], b: tuple[float, float]) -> list[float]:
    if b[0] <= 0 <= b[1]:
        return [-math.inf, math.inf]
    return [x / y for x in a for y in b]


def _interval(
    combine: Callable[..., list[float]], counts_to: float = -1.0
) -> Callable[[Any, Sequence[ValueRange]], ValueRange]:
    """The rule of an equation whose bounds are those of an interval operation.

    Args:
        combine: computes, from the operands' bounds, values that enclose the result.
        counts_to: the magnitude up to which integers stay integers beside whole numbers that are
            written as floats.
    """

    def rule(_read: Any, operands: Sequence[ValueRange]) -> ValueRange:
        ends = combine(*((f.lo, f.hi) for f in operands))
        integer = all(f.integer for f in operands)
        if not integer and max(map(abs, ends)) <= counts_to:
            integer = _all_integers(operands)
        if any(math.isnan(e) for e in ends):
            return ValueRange(integer=integer)
        # An interval with several numbers in it tells nothing of the smallest magnitude.
        lone = abs(ends[0]) if min(ends) == max(ends) else 0.0
        return ValueRange(min(ends), max(ends), lone, integer)

    return rule


def _iota(size: Any, _operands: Sequence[ValueRange]) -> ValueRange:
    known = isinstance(size, int)
    return ValueRange(0.0, float(size - 1) if known else math.inf, integer=True, constant=known)


def _axis_index(size: int | None, _operands: Sequence[ValueRange]) -> ValueRange:
    return ANY if size is None else _position_below([size])


def _convert(_read: Any, operands: Sequence[ValueRange]) -> ValueRange:
    return operands[0]


def _position(sizes: Sequence[Any], _operands: Sequence[ValueRange]) -> ValueRange:
    return _position_below(sizes)


def _position_below(sizes: Sequence[Any]) -> ValueRange:
    known = all(type(size) is int for size in sizes)
    return ValueRange(0.0, float(max([*sizes, 1])) if known else math.inf, integer=True)


def _sum(sizes: Sequence[Any], operands: Sequence[ValueRange]) -> ValueRange:
    terms = math.prod(sizes) if all(type(size) is int for size in sizes) else 1
    return ValueRange(magnitude=(operands[0].overall_magnitude or 1.0) * terms)


def _power(y: int, operands: Sequence[ValueRange]) -> ValueRange:
    fact = operands[0]
    if y < 0 and fact.lo <= 0 <= fact.hi:
        return ANY
    try:
        ends = [fact.lo**y, fact.hi**y, *([0.0] if fact.lo <= 0 <= fact.hi else [])]
    except (OverflowError, ZeroDivisionError):
        return ANY
    return ValueRange(min(ends), max(ends), 0.0, fact.integer and y >= 0)


def _exponential(of: Callable[[float], float]) -> Callable[[Any, Sequence[ValueRange]], ValueRange]:
    """The rule of a growing function of a constant; of other values nothing is known."""

    def rule(_read: Any, operands: Sequence[ValueRange]) -> ValueRange:
        (fact,) = operands
        try:
            return ValueRange(of(fact.lo), of(fact.hi)) if fact.constant else ANY
        except OverflowError:
            return ANY

    return rule


_READ: dict[str, Callable[[Any], Hashable]] = {
    "iota": ir.iota_size,
    "axis_index": ir.axis_size,
    "reduce_sum": ir.reduced_sizes,
    "square": ir.exponent,
    "integer_pow": ir.exponent,
    "argmax": ir.reduced_sizes,
    "argmin": ir.reduced_sizes,
}
"""The params that a rule reads of its equation, beside the operands' ranges."""

_RULES: dict[str, Callable[[Any, Sequence[ValueRange]], ValueRange]] = {
    "iota": _iota,
    # What a branch does not save for its derivative, which nothing reads.
    **dict.fromkeys(("empty", "empty2"), lambda read, fs: ValueRange(0.0, 0.0, integer=True)),
    "axis_index": _axis_index,
    "convert_element_type": _convert,
    "copy": _convert,
    "stop_gradient": _convert,
    "select_n": lambda read, fs: hull(fs[1:]),
    "clamp": _interval(lambda a, x, b: [max(x[0], a[0]), min(x[1], b[1])]),
    "add": _interval(lambda a, b: [a[0] + b[0], a[1] + b[1]], counts_to=math.inf),
    "sub": _interval(lambda a, b: [a[0] - b[1], a[1] - b[0]], counts_to=math.inf),
    # A mask's 0 or 1 times -1e9 is no count: float32 has no exact integers from here on.
    "mul": _interval(lambda a, b: [x * y for x in a for y in b], counts_to=_LARGEST_COUNT),
    "div": _interval(_quotient),
    "neg": _interval(lambda a: [-a[1], -a[0]]),
    "abs": _interval(lambda a: [0.0 if a[0] <= 0 <= a[1] else min(map(abs, a)), max(map(abs, a))]),
    "max": _interval(lambda a, b: [max(a[0], b[0]), max(a[1], b[1])], counts_to=math.inf),
    "min": _interval(lambda a, b: [min(a[0], b[0]), min(a[1], b[1])], counts_to=math.inf),
    **{f.__name__: _exponential(f) for f in (math.exp, math.expm1, math.sinh)},
    "reduce_sum": _sum,
    "square": _power,
    "integer_pow": _power,
    "argmax": _position,
    "argmin": _position,
    **dict.fromkeys(("tanh", "erf", "sin", "cos", "sign"), lambda read, fs: _UNIT),
    "logistic": lambda read, fs: ValueRange(0.0, 1.0),
}
