"""A call of a function, traced once, and its plan and rewritten jaxpr under a policy."""

from __future__ import annotations

import dataclasses
import difflib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from precpass import jaxpr as ir
from precpass.autotune.forms import in_form
from precpass.devices.detect import device_for, device_of_call, planned_for
from precpass.jit.arguments import copied
from precpass.jit.nnx import result_paths
from precpass.jit.region import Region, tracing
from precpass.jit.selfcheck import check_jax
from precpass.plan.borders import Border
from precpass.plan.plan import Action, Plan
from precpass.plan.reasons import DecidedBy
from precpass.planner.planner import distinguish, make_plan
from precpass.policy.float16 import warn_of_unscaled_gradient
from precpass.policy.policy import PrecisionPolicy, without_known_scales
from precpass.policy.precision import Precision
from precpass.policy.primitives import OpKind
from precpass.policy.rules import Rule, layers_around
from precpass.policy.scopes import clean_scope, join_scopes
from precpass.policy.warned import PrecisionWarning, quietly, user_stacklevel
from precpass.rewrite.rewriter import Rewriter

__all__ = ["Ran", "Traced", "lowers_to_float16", "place_of", "rewritten"]


class Ran(NamedTuple):
    """What a run of a function computed.

    Attributes:
        results: the jaxpr's results, with those that update modules, and then what the arguments'
            references hold after the call.
        trips: the most trips of a loop whose end depends on floating values.
        stopped: where a loop is that reached the bound of trips; None if none did.
    """

    results: list[Any]
    trips: int
    stopped: ir.Place | None


@dataclasses.dataclass(frozen=True, eq=False)
class Traced:
    """A call of a function, traced once, to be planned and run under any policy.

    Attributes:
        call: the function as it is written.
        name: the user's name for it, for errors.
        region: where it is called.
        policy: the policy that counts there; None if the pass is switched off.
        finish: makes the function's output of the tree of its results.
    """

    call: ir.Call
    name: str
    region: Region
    policy: PrecisionPolicy | None
    finish: Callable[[Any], Any]

    @property
    def scope(self) -> str:
        """The name scope around it."""
        return self.region.scope

    def output(self, results: Sequence[Any]) -> Any:
        """The function's output, made of the jaxpr's results; those behind them are left out."""
        tree = self.call.tree
        return self.finish(jax.tree.unflatten(tree, results[: tree.num_leaves]))

    def checked_plan(self, policy: PrecisionPolicy) -> Plan:
        """The plan under a policy, with the errors and warnings of a call.

        Raises:
            RuntimeError: on a JAX release that is newer than those tested, if the pass fails on it.

        Warns:
            PrecisionWarning: for each of the plan's notes, for each rule that matched nothing, and
                if the policy lowered nothing; for a gradient in float16 without a loss scale.
        """
        check_jax()
        jaxpr, plan = self.call.jaxpr, self.plan(policy)
        texts = [*_warning_texts(plan, policy, self.name, lambda: {*_layers(jaxpr, self.scope)})]
        if not policy.widens and not any(ir.precision_of(a) for a in ir.all_avals(jaxpr)):
            dtypes = sorted({str(a.dtype) for a in ir.in_avals(jaxpr) if hasattr(a, "dtype")})
            are = f"its arguments are {', '.join(dtypes)}" if dtypes else "it has no arguments"
            texts = [
                f"{self.name} has no floating-point values ({are}): it runs as written, since "
                f"{policy.title} has nothing to decide"
            ]
        for text in texts:
            warnings.warn(text, PrecisionWarning, stacklevel=user_stacklevel())
        # also where a rule or a `keep` alone asks for float16
        if lowers_to_float16(plan) and ir.takes_plain_gradient(jaxpr):
            warn_of_unscaled_gradient(self.name)
        return plan

    def plan(self, policy: PrecisionPolicy) -> Plan:
        """The plan under a policy, without warnings."""
        call = self.call
        closed_over, place = call.operands[: call.closed_over], place_of(call.jaxpr, call.operands)
        of_device = place.platform, place.device_kind

        def planned(policy: PrecisionPolicy) -> Plan:
            return make_plan(call.jaxpr, policy, self.scope, closed_over, (), *of_device)

        def rewritten_under(policy: PrecisionPolicy) -> Any:
            return self.rewritten(planned(policy), policy)

        is_multiplied = policy.precision_for(OpKind.COMPUTE).is_multiplication
        asks_nothing = policy.lock is not None or not policy.lowers or is_multiplied
        if policy.profitability != "best" or asks_nothing:
            return planned(policy)
        # All processes must run one program, and might compile different ones.
        why = "several processes run it" if jax.process_count() > 1 else ""
        if isinstance(place, jax.sharding.AbstractDevice):
            why = f"only the kind of its devices is known here, {place.device_kind}"
        if why:
            costs = f"not compiled, because {why}: every product is lowered to 16 bits"
            return dataclasses.replace(planned(policy.with_scaled(None)), costs=costs)
        # Imported here, because a program that compiles no candidates needs no files of choices.
        from precpass.autotune.compiled import choice_of

        try:
            with quietly(), planned_for(place):
                choice, said = choice_of(call.jaxpr, policy, self.scope, place, rewritten_under)
        except RuntimeError as error:
            # Of 8 bits nothing is known to pay.
            plan = planned(policy.with_scaled(None))
            note = f"profitability='best': {error}: every product is lowered to 16 bits instead"
            return dataclasses.replace(plan, notes=(*plan.notes, note))
        plan = planned(in_form(policy, choice.form))
        notes, costs = (*plan.notes, *said), choice.text(device_for(place))
        return dataclasses.replace(plan, notes=notes, costs=costs, form=choice.form)

    def rewritten(self, plan: Plan, policy: PrecisionPolicy) -> Any:
        """The jaxpr rewritten under a plan; the same jaxpr if nothing changes."""
        return rewritten(self.call.jaxpr, plan, self.region, policy, self.scope)[0]

    def under_policy(self) -> Any:
        """The jaxpr rewritten under its own policy; as it was traced if it has none."""
        if self.policy is None:
            return self.call.jaxpr
        return self.rewritten(self.checked_plan(self.policy), self.policy)

    def undifferentiated(self, advice: str) -> list[Any]:
        """The operands. Through their arrays no derivative is taken: an error gives the advice."""
        operands = self.call.operands
        return [x if isinstance(x, jax.Ref) else ir.undifferentiated(x, advice) for x in operands]

    def result_paths(self) -> list[str]:
        """The paths of the jaxpr's results, in its order."""
        tree = self.call.tree
        return result_paths(jax.tree.unflatten(tree, range(tree.num_leaves)))

    def run(self, plan: Plan | None, policy: PrecisionPolicy, bound: int | None = None) -> Ran:
        """Runs the function under a plan, or as it was written, compiled anew.

        It changes and donates no argument. Loops whose end depends on floating values are stopped
        after `bound` trips.
        """
        jaxpr = self.call.jaxpr if plan is None else self.rewritten(plan, policy)
        places: list[ir.Place] = []
        most = ir.UNBOUNDED if bound is None else bound

        def run(*operands: Any) -> tuple[list[Any], Any]:
            out, record, found = ir.with_bounded_loops(jaxpr, operands, most, keeps_rules=False)
            places[:] = found
            return out, record

        operands = copied(self.call.operands, arrays=False)
        results, record = jax.jit(run)(*operands)
        trips, reached = np.asarray(record).reshape(-1, 2).T
        stopped = next((place for place, at in zip(places, reached, strict=True) if at), None)
        references = [x[...] for x in operands if isinstance(x, jax.Ref)]
        return Ran([*results, *references], int(max(trips, default=0)), stopped)


def rewritten(
    jaxpr: ir.Jaxpr, plan: Plan, region: Region, policy: PrecisionPolicy, scope: str
) -> tuple[Any, Rewriter]:
    """A jaxpr rewritten under a plan (the same one if nothing changes), and its rewriter."""
    said = set(plan.notes)
    policy = in_form(policy, plan.form)
    # Custom rules are traced in differentiation: a saved plan has none of their equations, and
    # magnitudes that a calibration saw are not those of their operands.
    of_rules = without_known_scales(policy.with_lock(None) if policy.lock else policy)
    place = place_of(jaxpr)
    of_device = place.platform, place.device_kind

    def plan_rule(rule: Any, scope: str, border: Border) -> Plan:
        its_plan = make_plan(rule, of_rules, scope, (), border, *of_device)
        for text in its_plan.notes:
            if text not in said:
                said.add(text)
                warnings.warn(text, PrecisionWarning, stacklevel=user_stacklevel())
        return its_plan

    rewriter = Rewriter(
        plan_rule,
        lambda scope: distinguish(policy, scope),
        lambda: tracing(region, policy),
    )
    new = rewriter.jaxpr(jaxpr, plan, scope)
    if policy.output is None:
        return new, rewriter
    asked = [
        policy.output.dtype if ir.precision_of(aval) in policy.retypes else None
        for aval in ir.out_avals(new)
    ]
    return ir.with_results_in(new, asked), rewriter


def place_of(jaxpr: ir.Jaxpr, operands: Sequence[Any] = ()) -> Any:
    """The device that a program is planned for: its operands', or one of a mesh that it names."""
    return device_of_call((operands, ir.in_avals(jaxpr), ir.placed_avals(jaxpr)))


def lowers_to_float16(plan: Plan) -> bool:
    """Whether a plan lowers anything to float16."""
    return any(d.action is Action.LOWER and d.compute is Precision.F16 for d in plan.walk())


def _layers(jaxpr: ir.Jaxpr, scope: str) -> Iterator[str]:
    """The paths of the layers of a program that have no layers inside, with some more than once."""
    for eqn in ir.open_jaxpr(jaxpr).eqns:
        inner = join_scopes(scope, ir.scope_of(eqn))
        bodies = ir.bodies(eqn)
        for body in bodies:
            yield from _layers(body.jaxpr, inner)
        if not bodies:
            yield "/".join(layers_around(clean_scope(inner)))


def _hint(rule: Rule, layers: set[str]) -> str:
    """What else a rule of a layer could name."""
    if rule.module is None:
        return ""
    layers = {x for x in layers if x and not any(y.startswith(f"{x}/") for y in layers)}
    if not layers:
        return ": no layer of a flax, equinox, haiku or keras model is called there"
    close = difflib.get_close_matches(rule.module, sorted(layers), n=4, cutoff=0.0)
    more = f" and {len(layers) - len(close)} more" if len(layers) > len(close) else ""
    return f": its innermost layers are {', '.join(map(repr, close))}{more}"


def _warning_texts(
    plan: Plan, policy: PrecisionPolicy, name: str, layers: Callable[[], set[str]]
) -> Iterator[str]:
    yield from plan.notes
    for rule in plan.unmatched:
        yield f"{rule!r} matched no equation of {name}{_hint(rule, layers())}"
    if policy.lowers and not plan.lowers and plan.form:
        why = "no form with 16 bits saves enough"
        yield f"{policy.title} lowered nothing in {name}, because {why}: {plan.costs}"
    elif policy.lowers and not plan.lowers:
        products = [d for d in plan.walk() if d.kind is OpKind.COMPUTE]
        why_not = {d.reason for d in products}
        asked_so = any(d.decided_by in (DecidedBy.USER, DecidedBy.OWN_POLICY) for d in products)
        none = "what is not entered holds its products" if plan.notes else "it has no products"
        more = f"; {len(why_not) - 3} more in explain" if len(why_not) > 3 else ""
        why = "; ".join(sorted(map(str, why_not))[:3]) + more or none
        if not asked_so or policy.scaled is not None:
            yield f"{policy.title} lowered nothing in {name}: {why}"
