"""`calibrate`: keep equations in float32 that leave a low format's range on real inputs."""

from __future__ import annotations

import dataclasses
import functools
import glob
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import ml_dtypes

from precpass import jaxpr as ir
from precpass.analysis.sizes import flops
from precpass.api import mixed_of
from precpass.jit.staged import Staged, owner_of
from precpass.jit.traced import Traced
from precpass.numerics.given import is_real
from precpass.numerics.monitor.figures import Recorder
from precpass.numerics.monitor.health import Health, Seen
from precpass.numerics.monitor.monitor import looked
from precpass.plan.plan import Action, Plan
from precpass.plan.reasons import DecidedBy
from precpass.policy.policy import PolicyLike, PrecisionPolicy
from precpass.policy.precision import Precision
from precpass.policy.presets import AlwaysF32
from precpass.policy.primitives import TABLE, OpKind
from precpass.policy.rules import MOST_KNOWN, Rule
from precpass.policy.scopes import clean_scope, is_differentiated, join_scopes
from precpass.policy.warned import PrecisionWarning, quietly
from precpass.units import a_value, counted, listed

__all__ = ["calibrate"]


def calibrate(
    fn: Callable[..., Any],
    policy: PolicyLike,
    batches: Iterable[tuple[Any, ...]],
    *,
    safety: float = 2.0,
) -> PrecisionPolicy:
    """Return a policy with what your data show: what stays in float32, and scales of 8 bits.

    Each batch is run in float32 (float64 where the program has it), one batch at a time, and the
    ranges of its values are recorded. An equation that the policy lowers, or whose results it
    stores in 16 bits, gets a rule that keeps it in float32 in these cases. The rule names the
    equation's primitive, scope, function and line, and its `evidence` says what was seen.

    - `safety` times a magnitude that is rounded, of an operand or a result, is more than the
      format's largest number.
    - `safety` times the largest magnitude of a matrix product's operand is below the format's
      smallest normal number, in some batch. (Smaller terms of a sum do not matter.)
    - A `safety`-th of any other nonzero number is less than half the format's smallest subnormal
      number, and so rounds to zero.

    A matrix product that the policy runs in 8 bits gets a rule with `safety` times the largest
    magnitudes of its operands (`Rule.largest`), unless JAX differentiated it. Its scales are then
    numbers, and no call looks for them. Products of one line share a rule.

    You can merge several runs: calibrate the result with more batches. An equation that any run
    keeps in float32 stays so, and scales are for the largest magnitudes of all. Rules that only
    keep equations in float32 can be added, too: `policy.with_rules(*other.rules)`. Under
    `use_policy(None)` and `PRECPASS=off` the rules are the same.

    Args:
        fn: as for `auto_mixed`; the whole `jax.grad(loss)` if that is what will run.
        policy: the policy that will run, with its rules.
        batches: tuples of arguments of `fn`, which may differ in shape. They are read once. A batch
            that `jax.jit` would trace anew is planned and compiled anew.
        safety: the factor by which other inputs may be larger or smaller, a number of at least 1.

    Raises:
        ValueError: for no batches, or a `safety` of less than 1.
        TypeError: for a batch that is not a tuple, or a leaf that is neither array nor hashable.

    Warns:
        PrecisionWarning: if a batch gives NaNs or infinities in float32, which are not part of any
            range; and if no batch reached an equation that the policy lowers, whose range is
            unknown and whose decision does not change.

    Examples:
        >>> import jax.numpy as jnp
        >>> f = lambda x, w: jnp.tanh((x @ w) @ w)
        >>> batch = jnp.full((4, 4), 300.0), jnp.full((4, 4), 100.0)
        >>> policy = calibrate(f, "AutoMixedF16", [batch])
        >>> [rule.evidence for rule in policy.rules]
        ['operands reach 1.2e+05, and f16 ends at 6.55e+04']
        >>> weights = jnp.full((256, 256), 0.5)
        >>> scaled = calibrate(jnp.matmul, "AutoMixedF8", [(jnp.full((256, 256), 3.0), weights)])
        >>> scaled.rules[0].largest
        (6.0, 1.0)
    """
    parsed = PrecisionPolicy.parse(policy)
    if not (is_real(safety) and 1 <= safety < math.inf):
        raise ValueError(f"calibrate(safety={safety!r}): it is to be a finite number of 1 or more")
    planned: dict[_Key, _Low] = {}
    fn, owner = owner_of(fn)
    mixed = mixed_of(fn, policy=parsed)
    pays = mixed.profitability
    looked_at = parsed if pays is None else parsed.with_profitability(pays)
    run = Staged(mixed, functools.partial(_looked, looked_at, planned), on_copies=True)
    ranges: dict[_Key, Seen] = {}
    unsound: dict[_Key, Seen] = {}
    tops: dict[_Key, tuple[float, float]] = {}
    count = 0
    for batch in batches:
        if not isinstance(batch, tuple):  # pyright: ignore[reportUnnecessaryIsInstance] -- user input
            raise TypeError(
                f"calibrate: batch {count} is {a_value(batch)}, and is to be a tuple of "
                "the function's arguments: (batch,) for one"
            )
        try:
            with quietly():
                _, health = run((), (*owner, *batch), {})
        except Exception as error:
            error.add_note(f"in batch {count} of calibrate")
            raise
        for seen in health.seen():
            key = _key(seen.place)
            ranges[key] = _joined(ranges[key], seen) if key in ranges else seen
            if seen.is_birth:
                unsound.setdefault(key, seen)
            if seen.runs and not is_differentiated(seen.place.scope):
                tops[key] = _larger(seen, tops.get(key, (0.0, 0.0)))
        count += 1
    if not count:
        raise ValueError("calibrate: there are no batches: give at least one tuple of arguments")
    for text in _complaints(planned, ranges, unsound):
        warnings.warn(text, PrecisionWarning, stacklevel=2)
    rules = _rules(planned, ranges, tops, float(safety), parsed.rules)
    older = tuple(old for old in parsed.rules if not any(_is_same(old, rule) for rule in rules))
    return dataclasses.replace(parsed, rules=(*rules, *older))


_RECORDER = Recorder(reads=True)


def _looked(
    policy: PrecisionPolicy, planned: dict[_Key, _Low], traced: Traced
) -> tuple[list[Any], Health]:
    plan = traced.checked_plan(policy)
    _walk(traced.call.jaxpr, plan, traced.scope, ir.Source(), planned)
    # the trace's own policy is the one that will run, or none where the pass is switched off
    return looked(dataclasses.replace(traced, policy=AlwaysF32), _RECORDER, to_the_bit=False)


class _Key(NamedTuple):
    """The properties by which a rule can tell equations apart."""

    primitive: str
    scope: str
    source: ir.Source


class _Known(NamedTuple):
    """Products in 8 bits whose scales may be known ahead of time.

    Attributes:
        precision: their format.
        operations: the FLOPs of the smallest one.
        is_order: whether a rule or a region orders 8 bits for them, whatever their size.
    """

    precision: Precision
    operations: float
    is_order: bool


@dataclasses.dataclass(frozen=True)
class _Low:
    """The roundings that a plan has at an equation.

    Attributes:
        kind: the equation's kind.
        native: the format in which it was written.
        computes: the low format of its operands; None if they are not rounded.
        stores: the low format of its results; None if they are not rounded.
        known: how a product that nothing differentiates multiplies in 8 bits; None for any other.
    """

    kind: OpKind
    native: Precision
    computes: Precision | None
    stores: Precision | None
    known: _Known | None = None

    @property
    def sums_in(self) -> Precision | None:
        """The format in which its results are computed; None if that is the native one."""
        if self.kind is not OpKind.COMPUTE or self.computes is None:
            return self.computes
        # The same as `low_product.Bilinear.sums_in`.
        wide = Precision.F32 if self.computes.is_low else self.native
        return wide if wide.is_narrower_than(self.native) else None


def _key(place: ir.Place) -> _Key:
    return _Key(place.primitive, clean_scope(place.scope), place.source)


def _walk(
    jaxpr: ir.Jaxpr, plan: Plan, scope: str, caller: ir.Source, found: dict[_Key, _Low]
) -> None:
    for eqn, decision in zip(ir.open_jaxpr(jaxpr).eqns, plan.decisions, strict=True):
        inside = join_scopes(scope, ir.scope_of(eqn))
        own = ir.source_of(eqn)
        source = own if own.file else caller
        for body, inner in zip(ir.bodies(eqn), decision.inner, strict=True):
            _walk(body.jaxpr, inner, inside, source, found)
        name = eqn.primitive.name
        if decision.inner or name not in TABLE:
            continue
        native = next((p for v in eqn.outvars if (p := ir.precision_of(v.aval))), None)
        if native is None:
            continue
        computes = decision.compute if decision.action is Action.LOWER else None
        low, stores = (_first_low(native, of) for of in ((computes,), decision.stored))
        if low or stores:
            key, scaled = _Key(name, clean_scope(inside), source), decision.product.scaled
            known = found[key].known if key in found else None
            if scaled is not None and not is_differentiated(inside):
                # The line, or another batch, may have a smaller product.
                operations = min(float(flops(eqn)), known.operations if known else math.inf)
                known = _Known(scaled, operations, decision.decided_by is not DecidedBy.PRESET)
            found[key] = _Low(decision.kind, native, low, stores, known)


def _first_low(native: Precision, precisions: Iterable[Precision | None]) -> Precision | None:
    """The first precision that has 16 bits or is narrower than the equation's native format."""
    low = (p for p in precisions if p is not None)
    return next((p for p in low if p.is_low or p.is_narrower_than(native)), None)


def _joined(one: Seen, other: Seen) -> Seen:
    """The joined ranges of two batches."""
    assert one.reads is not None
    assert other.reads is not None
    first, others, low, whole = zip(one.reads, other.reads, strict=True)
    return dataclasses.replace(
        one,
        runs=one.runs + other.runs,
        largest=max(one.largest, other.largest),
        smallest=min(one.smallest, other.smallest),
        reads=(max(first), max(others), min(low), min(whole)),
    )


def _larger(seen: Seen, tops: tuple[float, float]) -> tuple[float, float]:
    """The larger ones of the largest magnitudes of a product's operands in two batches."""
    assert seen.reads is not None
    return max(tops[0], seen.reads[0]), max(tops[1], seen.reads[1])


def _evidence(low: _Low, seen: Seen, safety: float) -> str:
    """Why an equation's values do not fit into the planned format; "" if they do."""
    assert seen.reads is not None
    *tops, least, whole = seen.reads
    top = max(tops)
    if low.computes is not None:
        is_product = low.kind is OpKind.COMPUTE
        why = _reaches("operands", top, low.computes, safety)
        if not why and is_product and whole * safety < low.computes.smallest_normal:
            why = (
                f"no element of an operand is more than {whole:.3g}, and {low.computes}'s normal "
                f"numbers begin at {low.computes.smallest_normal:.3g}"
            )
        why = why or ("" if is_product else _vanishes("operands", least, low.computes, safety))
        if why:
            return why
    stores = low.stores or low.sums_in
    if stores is None:
        return ""
    why = _reaches("results", seen.largest, stores, safety)
    return why or _vanishes("results", seen.smallest, stores, safety)


def _least(precision: Precision) -> float:
    return float(ml_dtypes.finfo(precision.dtype).smallest_subnormal)


_LARGEST, _LEAST = Precision.F32.max, _least(Precision.F32)
"""The records of a float64 number that is larger, or smaller, than any of float32."""


def _reaches(what: str, largest: float, low: Precision, safety: float) -> str:
    if largest * safety <= low.max and largest < _LARGEST:
        return ""
    more = "" if largest < _LARGEST else " or more"
    return f"{what} reach {largest:.3g}{more}, and {low} ends at {low.max:.3g}"


def _vanishes(what: str, smallest: float, low: Precision, safety: float) -> str:
    least = _least(low)
    if smallest / safety >= least / 2 and smallest > _LEAST:
        return ""
    less = "" if smallest > _LEAST else " or less"
    return f"{what} come down to {smallest:.3g}{less}, and {low} to {least:.3g}"


def _rules(
    planned: dict[_Key, _Low],
    ranges: dict[_Key, Seen],
    tops: dict[_Key, tuple[float, float]],
    safety: float,
    before: Sequence[Rule],
) -> list[Rule]:
    """The rules for what leaves the range of its format, and for what may have known scales."""
    rules: list[Rule] = []
    for key, low in planned.items():
        if key in ranges and (why := _evidence(low, ranges[key], safety)):
            rules.append(_rule(key, why, low.native))
        elif low.known and all(tops.get(key, (0.0, 0.0))):
            rules.append(_with_scales(key, low.known, tops[key], safety, before))
    return rules


def _rule(key: _Key, evidence: str, native: Precision) -> Rule:
    source = key.source
    return Rule(
        primitive=key.primitive,
        scope=glob.escape(key.scope) or None,
        function=glob.escape(source.function) or None,
        file=glob.escape(source.file) or None,
        line=source.line if source.file else None,
        precision=native,
        evidence=evidence,
    )


def _with_scales(
    key: _Key, known: _Known, tops: tuple[float, float], safety: float, before: Sequence[Rule]
) -> Rule:
    """The rule for a product's scales, which joins an earlier one for the same equations."""
    rule = _rule(key, f"operands reach {tops[0]:.3g} and {tops[1]:.3g}", known.precision)
    same = next((old for old in before if _is_same(old, rule)), None)
    each = zip(tops, same.largest if same and same.largest else (0.0, 0.0), strict=True)
    lhs, rhs = (min(max(top * safety, earlier), MOST_KNOWN) for top, earlier in each)
    least = min(known.operations, (same and same.min_flops) or math.inf)
    least = None if known.is_order and not (same and same.min_flops) else least
    return dataclasses.replace(rule, largest=(lhs, rhs), min_flops=least)


def _is_same(old: Rule, new: Rule) -> bool:
    """Whether two rules have scales for the same equations."""
    same = {**old.patterns, "min_flops": None} == {**new.patterns, "min_flops": None}
    return same and bool(old.largest) and old.parsed is new.parsed


def _complaints(
    planned: dict[_Key, _Low], ranges: dict[_Key, Seen], unsound: dict[_Key, Seen]
) -> Iterator[str]:
    if unsound:
        first = next(iter(unsound.values()))
        lines = counted(len(unsound), "line")
        yield (
            f"calibrate: in float32 NaNs or infinities appear at {lines}"
            f", first by {first.place.primitive}  {first}; they are not part of the ranges"
        )
    missed = [key for key in planned if key not in ranges or not ranges[key].runs]
    if missed:
        places = listed([f"{key.primitive} at {key.source}" for key in missed], 3)
        yield (
            f"calibrate: no batch reached {counted(len(missed), 'equation')} that the policy "
            f"lowers ({places}): they stay as planned"
        )
