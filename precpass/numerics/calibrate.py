"""`calibrate`: a policy with rules for what real inputs drive out of a low format's range."""

from __future__ import annotations

import dataclasses
import glob
import math
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import ml_dtypes

from precpass import jaxpr as ir
from precpass.api import inspect
from precpass.graph import join_scopes
from precpass.inspection import Inspection
from precpass.numerics.health import Seen
from precpass.numerics.monitor import Monitored
from precpass.opkinds import TABLE, OpKind
from precpass.plan import Action, Plan
from precpass.policy import AlwaysF32, PrecisionPolicy, PrecisionWarning, quietly
from precpass.precision import Precision
from precpass.rules import Rule, clean_scope
from precpass.wording import counted

__all__ = ["calibrate"]


def calibrate(
    fn: Callable[..., Any],
    policy: PrecisionPolicy | str,
    batches: Iterable[tuple[Any, ...]],
    *,
    safety: float = 2.0,
) -> PrecisionPolicy:
    """A policy with rules that keep wide what real inputs drive out of a low format's range.

    Each batch is run in float32 and its ranges are recorded; one is held at a time. Only
    equations that the policy lowers, or whose results it stores low, get a rule, which names their
    primitive, scope, function and line, and has as its `evidence` what was seen:

    - for a magnitude of what is rounded, operands or results, of which `safety` times is more
      than the format's largest number;
    - for an operand of a product of which `safety` times the largest magnitude is no normal
      number of the format in any element, in some batch: smaller terms of a sum do not matter;
    - for any other number, unless it is zero, of which a `safety`-th part is less than half the
      format's smallest subnormal number, and so rounds to zero.

    Several runs merge: calibrate what came out with more batches, or put the rules of one into
    the other, `policy.with_rules(*other.rules)`. An equation that any of them keeps wide stays so.

    Args:
        fn: as for `auto_mixed`; the whole `jax.grad(loss)` where that is what will run.
        policy: the policy that will run, with what rules it has.
        batches: tuples of arguments of `fn`, of shapes that may differ. They are read once.
        safety: how many times larger or smaller other inputs may be, 1 or more.

    Raises:
        ValueError: for no batches, or a `safety` of less than 1.
        TypeError: for a batch that is no tuple.

    Warns:
        PrecisionWarning: where a batch gives NaNs or infinities in float32, which are no part of
            any range, and where no batch reached an equation that the policy lowers: it is not
            known what range that has, and it stays as it was planned.

    Example:
        >>> import jax.numpy as jnp
        >>> f = lambda x, w: jnp.tanh((x @ w) @ w)
        >>> policy = calibrate(f, "AutoMixed", [(jnp.full((4, 4), 300.0), jnp.full((4, 4), 100.0))])
        >>> [rule.evidence for rule in policy.rules]
        ['operands reach 1.2e+05, and f16 ends at 6.55e+04']
    """
    parsed = PrecisionPolicy.parse(policy)
    if not (isinstance(safety, int | float) and 1.0 <= safety < math.inf):  # pyright: ignore[reportUnnecessaryIsInstance] -- user input
        raise ValueError(f"calibrate(safety={safety!r}): it is to be a finite number of 1 or more")
    monitored = Monitored(fn, AlwaysF32, reads=True)
    planned: dict[_Key, _Low] = {}
    ranges: dict[_Key, Seen] = {}
    unsound: dict[_Key, Seen] = {}
    kinds: set[Hashable] = set()
    count = 0
    for batch in batches:
        if not isinstance(batch, tuple):  # pyright: ignore[reportUnnecessaryIsInstance] -- user input
            raise TypeError(
                f"calibrate: batch {count} is a {type(batch).__name__}, and is to be a tuple of "
                "the function's arguments: (batch,) for one"
            )
        leaves, tree = jax.tree.flatten(batch)
        kind = tree, *(_kind(x) for x in leaves)
        with quietly():
            if kind not in kinds:
                kinds.add(kind)
                planned |= _planned(inspect(fn, parsed)(*batch))
            _, health = monitored(*batch)
        for seen in health.seen():
            key = _key(seen.place)
            ranges[key] = _joined(ranges[key], seen) if key in ranges else seen
            if seen.is_birth:
                unsound.setdefault(key, seen)
        count += 1
    if not count:
        raise ValueError("calibrate: there are no batches: give at least one tuple of arguments")
    for text in _complaints(planned, ranges, unsound):
        warnings.warn(text, PrecisionWarning, stacklevel=2)
    found = (
        _rule(key, why, low.native)
        for key, low in planned.items()
        if key in ranges and (why := _evidence(low, ranges[key], safety))
    )
    return parsed.with_rules(*found)


def _kind(x: Any) -> Hashable:
    """What a trace knows of a leaf."""
    return (x.shape, x.dtype) if hasattr(x, "dtype") else (type(x), x)


class _Key(NamedTuple):
    """What a rule can tell equations apart by."""

    primitive: str
    scope: str
    source: ir.Source


@dataclasses.dataclass(frozen=True)
class _Low:
    """What a plan rounds at an equation.

    Attributes:
        kind: its kind.
        native: the format in which it was written.
        computes: the format of its operands; None where they stay.
        stores: that of its results.
    """

    kind: OpKind
    native: Precision
    computes: Precision | None
    stores: Precision | None


def _key(place: ir.Place) -> _Key:
    return _Key(place.primitive, clean_scope(place.scope), place.source)


def _planned(found: Inspection) -> dict[_Key, _Low]:
    lowered: dict[_Key, _Low] = {}
    _walk(found.before, found.plan, found.scope, ir.Source(), lowered)
    return lowered


def _walk(jaxpr: Any, plan: Plan, scope: str, caller: ir.Source, found: dict[_Key, _Low]) -> None:
    for eqn, decision in zip(ir.open_jaxpr(jaxpr).eqns, plan.decisions, strict=True):
        inside = join_scopes(scope, ir.scope_of(eqn))
        own = ir.source_of(eqn)
        source = own if own.file else caller
        for body, inner in zip(ir.bodies(eqn), decision.inner, strict=True):
            _walk(body.jaxpr, inner, inside, source, found)
        name = eqn.primitive.name
        if decision.inner or name not in TABLE:
            continue
        stores = next((p for p in decision.stored if p is not None and p.is_low), None)
        low = decision.compute if decision.action is Action.LOWER else None
        low = low if low is not None and low.is_low else None
        native = next((p for v in eqn.outvars if (p := ir.precision_of(v.aval))), None)
        if native is not None and (low or stores):
            found[_Key(name, clean_scope(inside), source)] = _Low(
                decision.kind, native, low, stores
            )


def _joined(one: Seen, other: Seen) -> Seen:
    """What was seen in both of two batches."""
    assert one.reads is not None
    assert other.reads is not None
    top, low, whole = zip(one.reads, other.reads, strict=True)
    return dataclasses.replace(
        one,
        runs=one.runs + other.runs,
        largest=max(one.largest, other.largest),
        smallest=min(one.smallest, other.smallest),
        reads=(max(top), min(low), min(whole)),
    )


def _evidence(low: _Low, seen: Seen, safety: float) -> str:
    """Why an equation's values do not fit into the format that is planned; "" where they do."""
    assert seen.reads is not None
    top, least, whole = seen.reads
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
    # the sums of a lowered product are wide
    stores = low.stores or (None if low.kind is OpKind.COMPUTE else low.computes)
    if stores is None:
        return ""
    why = _reaches("results", seen.largest, stores, safety)
    return why or _vanishes("results", seen.smallest, stores, safety)


def _reaches(what: str, largest: float, low: Precision, safety: float) -> str:
    if largest * safety <= low.max:
        return ""
    return f"{what} reach {largest:.3g}, and {low} ends at {low.max:.3g}"


def _vanishes(what: str, smallest: float, low: Precision, safety: float) -> str:
    least = float(ml_dtypes.finfo(low.dtype).smallest_subnormal)
    if smallest / safety >= least / 2:
        return ""
    return f"{what} come down to {smallest:.3g}, and {low} to {least:.3g}"


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


def _complaints(
    planned: dict[_Key, _Low], ranges: dict[_Key, Seen], unsound: dict[_Key, Seen]
) -> Iterator[str]:
    if unsound:
        first = next(iter(unsound.values()))
        yield (
            f"calibrate: in float32 NaNs or infinities are born at {counted(len(unsound), 'line')}"
            f", first by {first.place.primitive}  {first}; they are no part of the ranges"
        )
    missed = [key for key in planned if key not in ranges or not ranges[key].runs]
    if missed:
        places = ", ".join(f"{key.primitive} at {key.source}" for key in missed[:3])
        more = f" and {len(missed) - 3} more" if len(missed) > 3 else ""
        yield (
            f"calibrate: no batch reached {counted(len(missed), 'equation')} that the policy "
            f"lowers ({places}{more}): they stay as planned"
        )
