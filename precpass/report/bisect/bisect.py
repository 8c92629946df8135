"""`bisect`: find the equations that must stay in float32 for a check to pass."""

from __future__ import annotations

import dataclasses
import itertools
import math
import numbers
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ParamSpec

import jax
import jax.numpy as jnp
import numpy as np

from precpass import jaxpr as ir
from precpass.analysis.graph import Graph
from precpass.api import trace_of
from precpass.jit.staged import in_two_steps
from precpass.jit.traced import Traced
from precpass.plan.plan import Action, Decision, Plan
from precpass.policy.policy import PolicyLike, PrecisionPolicy
from precpass.policy.precision import Precision
from precpass.policy.presets import AlwaysF32
from precpass.policy.rules import Rule
from precpass.policy.scopes import clean_scope, join_scopes
from precpass.report.bisect.bisection import Bisection, Run, listed
from precpass.report.bisect.delta_debugging import OutOfBudget, smallest
from precpass.report.bisect.places import Group, Place, grouped, notes_on
from precpass.report.compare.errors import Leaf, fetched, normwise
from precpass.units import counted
from precpass.view.progress import telling
from precpass.view.text import shown_source

__all__ = ["bisect"]

P = ParamSpec("P")


@in_two_steps
def bisect(
    fn: Callable[P, Any],
    policy: PolicyLike | None,
    check: float | Callable[[Any], bool],
    *,
    budget: int = 100,
    progress: Callable[[Run], None] | None = None,
) -> Callable[P, Bisection]:
    """Find a smallest set of equations that must stay in float32 for a check to pass.

    The function is traced once. The policy runs first unchanged, then with everything that it
    lowers or stores in 16 bits back in your own precision, then with parts of that: first name
    scopes (functions if there are none), then inner scopes, then single lines. Equal programs are
    run once. Arguments are not donated, and modules of flax nnx are not updated.

    A loop whose end depends on floating values may never end in low precision. So a function with
    such loops is first run once more, as you wrote it, to count their trips. Every other run stops
    a loop that makes ten times as many trips as the longest of them (and at least 1000), and fails;
    it says which loop that was.

    The set is 1-minimal: the check passes with it and fails without any one of its members, and all
    of that was run. If the check is monotone (more float32 never breaks it), no subset of the set
    passes.

    Args:
        fn: a function, or the result of `auto_mixed`. Differentiate inside
            (`jax.value_and_grad(loss)`) to find equations of the backward pass. JAX gives these,
            and what a backward rule computes, the line of the forward pass that they belong to.
        policy: as for `auto_mixed`. The rules that are found come before its own, except for those
            of its own that ask for float64.
        check: a tolerance, the largest normwise relative error `|y - r| / |r|` (2-norms) that any
            floating result `y` may have against `r`, the same under AlwaysF32. What the call
            updates in place (a module, a reference) is a result too. Or a function of the output
            that returns whether it is good.
        budget: the most programs that are compiled and run, counting the reference of a tolerance.
        progress: is called after each run. Without it a bar shows after two seconds at a terminal,
            and a line in a notebook.

    Returns:
        A function that takes arguments of `fn`, arrays, and returns a `Bisection`.

    Raises:
        TypeError: for a check of another type or one that does not return a bool; for arguments
            without values.
        ValueError: for a tolerance below 0, a tolerance for a function without floating results, or
            a budget below 1.
        RuntimeError: if the pass is turned off.

    Examples:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> def net(x, w):
        ...     with jax.named_scope("body"):
        ...         h = jnp.tanh(x @ w)
        ...     with jax.named_scope("head"):
        ...         return jnp.exp(30.0 * (h @ w))
        >>> x, w = jnp.ones((4, 8)), jnp.full((8, 8), 0.1331)
        >>> bisect(net, "AutoMixedBf16", 0.1)(x, w).rules
        (Rule(scope='body', precision='f32'),)
    """
    _check_arguments(check, budget)

    def bisected(*args: P.args, **kwargs: P.kwargs) -> Bisection:
        if ir.is_tracing():
            raise TypeError("bisect runs the function: call it outside of jit, grad, vmap and scan")
        traced: Traced = trace_of(fn, policy, lambda traced: traced)(*args, **kwargs)
        if any(isinstance(x, jax.ShapeDtypeStruct) for x in traced.call.operands):
            raise TypeError("bisect runs the function: give it arrays, not jax.ShapeDtypeStruct")
        if traced.policy is None:
            raise RuntimeError(
                "bisect: precpass is switched off here (use_policy(None) or PRECPASS=off), so that "
                "no policy lowers anything"
            )
        if progress is not None:
            return _Search(traced, traced.policy, check, budget, progress).result()
        with telling(None, f"bisect {traced.name}") as tell:

            def said(run: Run) -> None:
                tell(f"{run.what}, of at most {budget} runs", run.number, budget)

            return _Search(traced, traced.policy, check, budget, said).result()

    return bisected


def _check_arguments(check: Any, budget: Any) -> None:
    if isinstance(check, bool) or not (isinstance(check, numbers.Real) or callable(check)):
        raise TypeError(
            f"bisect: check={check!r} is neither a tolerance, such as 1e-2, nor a function of the "
            "output that returns a bool"
        )
    if not callable(check) and not 0 <= float(check) < math.inf:
        raise ValueError(f"bisect: check={check!r}: a tolerance is a finite number, 0 or above")
    if isinstance(budget, bool) or not isinstance(budget, numbers.Integral) or int(budget) < 1:
        raise ValueError(f"bisect: budget={budget!r}: give the number of runs, at least 1")


_AS_WRITTEN = "as it was written"


class _Search:
    """The runs of one function at one set of arguments."""

    def __init__(
        self,
        traced: Traced,
        policy: PrecisionPolicy,
        check: float | Callable[[Any], bool],
        budget: int,
        progress: Callable[[Run], None] | None,
    ) -> None:
        self.traced = traced
        self.policy = policy
        self.check = check
        self.tolerance = None if callable(check) else float(check)
        self.budget = budget
        self.progress = progress
        self.runs: list[Run] = []
        self._verdicts: dict[Any, Run] = {}
        self._programs: dict[Plan, int] = {}
        self._keys: dict[Any, int] = {_AS_WRITTEN: 0}
        self._plans: dict[PrecisionPolicy, Plan] = {}
        self._reference: list[Leaf] = []
        self._trips: int | None = None

    def result(self) -> Bisection:
        """Runs the search."""
        name = self.policy.title
        self._plans[self.policy] = self.traced.checked_plan(self.policy)
        if ir.has_loops(self.traced.call.jaxpr):
            self._trips = self.traced.run(None, self.policy).trips
        low = None
        try:
            if self.tolerance is not None:
                self._run(AlwaysF32, "AlwaysF32, the reference", is_reference=True)
            low = self._run(self.policy, f"{name} as it is")
            if low.passed:
                return self._ended(True, f"{name} passes as it is{self._error(low)}")
            places, precision = self._places()
            whole = grouped(places, precision)
            written = self._run(
                _with(self.policy, (whole.rule,)),
                "with all that it lowers kept as it was written",
                (whole.rule,),
            )
            if not written.passed:
                return self._ended(False, self._why_not(low, written, whole))
        except OutOfBudget:
            begun = f"{name} fails{self._error(low)}, and " if low else ""
            spent = f"the budget of {counted(self.budget, 'run')} is spent"
            return self._ended(False, f"not found: {begun}{spent}")
        members, minimal = smallest(whole, lambda g: g.parts, self._passes)
        return self._found(low, places, self._coarsened(whole, members), minimal)

    def _passes(self, kept: Sequence[Group]) -> bool:
        rules = tuple(group.rule for group in kept)
        what = f"{counted(len(rules), 'group')} left as written"
        return self._run(_with(self.policy, rules), what, rules).passed

    def _run(
        self,
        policy: PrecisionPolicy,
        what: str,
        rules: tuple[Rule, ...] = (),
        *,
        is_reference: bool = False,
    ) -> Run:
        """The run of a policy; an earlier run if its program was the same."""
        plan = self._plan(policy)
        program = self._program(plan), policy.output
        if program in self._verdicts:
            return self._verdicts[program]
        if len(self.runs) >= self.budget:
            raise OutOfBudget
        try:
            trips, stopped = self._trips, ""
            bound = None if trips is None else min(10 * max(trips, 100), ir.UNBOUNDED)
            ran = jax.block_until_ready(self.traced.run(plan, policy, bound))
            if ran.stopped is not None:
                at = shown_source(ran.stopped.source)
                stopped = f"the loop at {at} was stopped after {bound} trips; float32 needs {trips}"
                if is_reference:
                    raise RuntimeError(stopped)
                error, passed, worst = None, False, ""
            else:
                if is_reference:
                    self._reference = self._floating(ran.results)
                error, passed, worst = self._judge(ran.results)
        except Exception as raised:
            raised.add_note(f"bisect: in run {len(self.runs) + 1}, {what} {listed(rules)}".strip())
            raise
        low = sum(d.action is Action.LOWER or d.stores_low for d in plan.walk())
        run = Run(len(self.runs) + 1, what, rules, low, error, passed, stopped, worst)
        self.runs.append(run)
        self._verdicts[program] = run
        if self.progress is not None:
            self.progress(run)
        return run

    def _judge(self, results: list[Any]) -> tuple[float | None, bool, str]:
        """The error, whether the check passes, and the result that has this error."""
        if callable(self.check):
            verdict: Any = self.check(self.traced.output(results))
            dtype = getattr(verdict, "dtype", None)
            if not isinstance(verdict, bool) and (dtype != np.bool_ or np.shape(verdict)):
                raise TypeError(
                    f"the check of bisect returned {verdict!r}, which is not a bool: return one, "
                    "or one element of an array of booleans"
                )
            return None, bool(verdict), ""
        found = self._floating(results)
        errors = list(map(normwise, found, self._reference))
        error = max(errors)
        worst = found[errors.index(error)].path if len(errors) > 1 and error else ""
        return error, error <= float(self.check), worst

    def _floating(self, results: list[Any]) -> list[Leaf]:
        """The floating and complex results and updates, with their paths."""
        paths = itertools.chain(self.traced.result_paths(), itertools.repeat("a reference"))
        inexact = [
            (path, x)
            for path, x in zip(paths, results, strict=False)
            if jnp.issubdtype(x.dtype, jnp.inexact)
        ]
        if not inexact:
            raise ValueError(
                f"{self.traced.name} has no floating results for the tolerance {self.check}: "
                "give bisect a function of the output that returns a bool"
            )
        return [Leaf(path, fetched(x), x.dtype) for path, x in inexact]

    # ------------------------------------------------------------ plans

    def _plan(self, policy: PrecisionPolicy) -> Plan:
        if policy not in self._plans:
            self._plans[policy] = self.traced.plan(policy)
        return self._plans[policy]

    def _program(self, plan: Plan) -> int:
        """A number that plans of the same program share, whatever their reasons are."""
        if plan in self._programs:
            return self._programs[plan]

        def of(decision: Decision) -> Any:
            inner = tuple(map(self._program, decision.inner))
            if decision.action is Action.ENTER and not any(inner) and not any(decision.stored):
                return None
            # Custom rules that the run program still contains are not used.
            kept = decision.action is Action.KEEP or decision.reorders
            kept = kept and not (decision.in_float64_span or decision.stores_low)
            return None if kept else (*_own(decision), inner)

        decisions = tuple(map(of, plan.decisions))
        # A border copy beside the value that is read changes no result.
        rounded = tuple(
            tuple(t for t in border_copies if t.rounds) for border_copies in plan.border_copies
        )
        changes = bool(plan.border) or any(rounded) or any(decisions)
        key = (plan.border, rounded, decisions) if changes else _AS_WRITTEN
        number = self._keys.setdefault(key, len(self._keys))
        return self._programs.setdefault(plan, number)

    def _places(self) -> tuple[list[Place], Precision]:
        """The places that the policy lowers and a rule can keep wide, and that rule's precision.

        They are those where the plan differs from the plan with one rule for all equations.
        """
        low = self._plan(self.policy)
        scope = self.traced.scope
        graph = Graph.build(self.traced.call.jaxpr, lambda s: clean_scope(join_scopes(scope, s)))
        lowered = {
            row for row, decision, _ in _pairs(graph, low, low) if decision.action is Action.LOWER
        }
        natives = {ir.precision_of(v.aval) for row in lowered for v in graph.eqns[row].invars}
        precision = Precision.F64 if Precision.F64 in natives else Precision.F32
        wide = self._plan(_with(self.policy, (Rule(file="*", precision=precision),)))
        rows = {row for row, one, other in _pairs(graph, low, wide) if _own(one) != _own(other)}
        primitives: dict[Place, Counter[str]] = {}
        for row in sorted(rows):
            source = graph.source(row)
            inside = clean_scope(join_scopes(scope, graph.scope(row)))
            place = Place(inside, source.file, source.function, source.line)
            primitives.setdefault(place, Counter())[graph.primitives[row]] += 1
        places = [
            dataclasses.replace(place, primitives=tuple(computes.items()))
            for place, computes in primitives.items()
        ]
        return places, precision

    # ------------------------------------------------------------ results

    def _coarsened(self, whole: Group, members: Sequence[Group]) -> list[Rule]:
        """The rules of groups; a coarser group's rule is used if it keeps the same equations wide.

        A name outlives edits that change a line's number.
        """
        kept = list(members)
        program = self._program(self._plan(_with(self.policy, [g.rule for g in kept])))
        for group in _inside(whole):
            alone = len(group.parts) == 1 and (group is whole or bool(group.parts[0].parts))
            if not group.parts or alone or not all(part in kept for part in group.parts):
                continue
            first = kept.index(group.parts[0])
            others = [other for other in kept if other not in group.parts]
            coarser = [*others[:first], group, *others[first:]]
            plan = self._plan(_with(self.policy, [g.rule for g in coarser]))
            if self._program(plan) == program:
                kept = coarser
        return [group.rule for group in kept]

    def _found(
        self, low: Run, places: Sequence[Place], rules: Sequence[Rule], minimal: bool
    ) -> Bisection:
        policy = _with(self.policy, rules)
        run = self._verdicts[self._program(self._plan(policy)), policy.output]
        kept = [tuple(place for place in places if place.is_in(rule)) for rule in rules]
        wide = len({place for inside in kept for place in inside})
        at = "line" if len({place.source for place in places}) == len(places) else "place"
        verdict = (
            f"{self.policy.title} fails{self._error(low)}; it passes{self._error(run)} with "
            f"{wide} of {counted(len(places), at)} that it lowers left as written"
        )
        if minimal and len(rules) > 1:
            verdict += f", and fails without any one of these {len(rules)} rules"
        elif not minimal:
            spent = f"the budget of {counted(self.budget, 'run')} was spent"
            verdict += f"; {spent} before this was known to be a smallest set"
        bisection = self._ended(True, verdict, policy, tuple(rules), tuple(kept), minimal)
        return dataclasses.replace(bisection, notes=notes_on(rules, kept))

    def _why_not(self, low: Run, written: Run, whole: Group) -> str:
        text = f"not found: {self.policy.title} fails{self._error(low)}, also with all that it "
        text += f"lowers kept as it was written{self._error(written)}"
        try:
            wide = self._run(AlwaysF32, "AlwaysF32")
            if wide.passed and self.policy.output is not None:
                whole_policy = dataclasses.replace(_with(self.policy, (whole.rule,)), output=None)
                own_outputs = "and with outputs in their own formats"
                if self._run(whole_policy, own_outputs, (whole.rule,)).passed:
                    return f"{text}: what breaks it is its outputs in {self.policy.output}"
        except OutOfBudget:
            return text
        if wide.passed:
            return f"{text}, but not under AlwaysF32: what breaks it is low in the program itself"
        return f"{text}: the check fails in float32 too"

    def _ended(
        self,
        found: bool,
        verdict: str,
        policy: PrecisionPolicy | None = None,
        rules: tuple[Rule, ...] = (),
        kept: tuple[tuple[Place, ...], ...] = (),
        minimal: bool | None = None,
    ) -> Bisection:
        verdict += f" ({counted(len(self.runs), 'run')})"
        minimal, runs = found if minimal is None else minimal, tuple(self.runs)
        policy = policy or self.policy
        return Bisection(policy, rules, found, minimal, verdict, kept, runs, self.tolerance)

    def _error(self, run: Run) -> str:
        if run.error is None:
            return f" ({run.stopped})" if run.stopped else ""
        if run.passed:
            return f" (error {run.error:.3g})"
        where = f" in {run.worst}" if run.worst else ""
        error = f"error {run.error:.3g} > {self.tolerance:.3g}"
        return f" ({'not finite' if math.isinf(run.error) else error}{where})"


def _with(policy: PrecisionPolicy, rules: Sequence[Rule]) -> PrecisionPolicy:
    """A policy with more rules, after those of its own that ask for float64."""
    old = policy.rules
    at = max((i + 1 for i, rule in enumerate(old) if rule.precision is Precision.F64), default=0)
    return dataclasses.replace(policy, rules=(*old[:at], *rules, *old[at:]))


def _inside(group: Group) -> Iterator[Group]:
    """All groups inside a group, and then the group itself."""
    for part in group.parts:
        yield from _inside(part)
    yield group


def _own(decision: Decision) -> tuple[Any, ...]:
    """The part of a decision that does not concern bodies."""
    return decision.action, decision.compute, decision.stored, decision.in_float64_span


def _pairs(graph: Graph, one: Plan, other: Plan) -> Iterator[tuple[int, Decision, Decision]]:
    """The rows of a graph with their decisions in two plans; once for each pair of plans."""
    todo, seen = [(0, one, other)], set[tuple[int, Plan, Plan]]()
    while todo:
        at, *plans = body = todo.pop()
        if body in seen:
            continue
        seen.add(body)
        rows = range(graph.bodies[at].start, graph.bodies[at].stop)
        for row, a, b in zip(rows, *(plan.decisions for plan in plans), strict=True):
            yield row, a, b
            children = graph.children.get(row, ())
            todo += [(c, p, q) for (_, c), p, q in zip(children, a.inner, b.inner, strict=False)]
