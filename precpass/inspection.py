"""`Inspection`: a program before and after, the plan between them, and their difference."""

from __future__ import annotations

import dataclasses
import linecache
import os
from collections.abc import Iterator
from typing import Any, NoReturn

from precpass import jaxpr as ir
from precpass.graph import Graph
from precpass.opkinds import op
from precpass.plan import Action, Decision, Plan
from precpass.policy import PrecisionPolicy

__all__ = ["Inspection"]


@dataclasses.dataclass(frozen=True, eq=False)
class Inspection:
    """What a policy does to a program.

    Attributes:
        before: the jaxpr as the user's function traces.
        plan: the decision for every equation.
        after: the rewritten jaxpr; `before` itself where nothing changes.
        policy: the policy that was asked for; None where the pass is switched off.
        scope: the name scope around the program; "" unless inside `keep`.
    """

    before: Any
    plan: Plan
    after: Any
    policy: PrecisionPolicy | None
    scope: str = ""

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "an Inspection holds jaxprs, which JAX cannot pickle: pickle its .plan and its "
            ".policy, or keep the text of its .diff()"
        )

    def __copy__(self) -> Inspection:
        return self

    def __deepcopy__(self, _memo: object) -> Inspection:
        # all that it holds is immutable
        return self

    @property
    def graph(self) -> Any:
        """The dataflow of `before` as a `networkx.MultiDiGraph` (see `Graph.to_networkx`)."""
        return Graph.build(self.before).to_networkx()

    def decisions(self) -> Iterator[tuple[Any, Decision, ir.Source]]:
        """Each equation, its decision and its source line; bodies included, shared ones once."""
        yield from _paired(self.before, self.plan, ir.Source(), set())

    def diff(self) -> str:
        """The equations that change, by source line, each with its reason.

        Returns:
            One heading per line of the user's code, in order of execution, and
            under it one line per distinct change; the totals at the end.
        """
        by_line: dict[ir.Source, dict[str, int]] = {}
        for eqn, decision, source in self.decisions():
            if decision.action in (Action.KEEP, Action.ENTER):
                continue
            changes = by_line.setdefault(source, {})
            text = _change(eqn, decision)
            changes[text] = changes.get(text, 0) + 1
        lines: list[str] = []
        for source, changes in by_line.items():
            lines.append(_heading(source))
            lines += [f"  {text}{f'  ({n} times)' if n > 1 else ''}" for text, n in changes.items()]
        return "\n".join([*lines, self._totals()])

    @property
    def _policy_name(self) -> str:
        return "switched off" if self.policy is None else self.policy.name

    def _totals(self) -> str:
        counts = self.plan.count()
        lowered = sum(n for (_, a), n in counts.items() if a is Action.LOWER)
        widened = sum(n for (_, a), n in counts.items() if a in (Action.WIDEN, Action.DROP))
        total = sum(n for (_, a), n in counts.items() if a is not Action.ENTER)
        return (
            f"{self._policy_name}: {lowered} of {total} equations lowered, {widened} widened, "
            f"{total - lowered - widened} as written"
        )

    def __repr__(self) -> str:
        return f"<Inspection under {self._policy_name}: {self.plan!r}>"

    def __str__(self) -> str:
        return self.diff()


def _paired(
    jaxpr: Any, plan: Plan, caller: ir.Source, seen: set[Any]
) -> Iterator[tuple[Any, Decision, ir.Source]]:
    key = (id(ir.open_jaxpr(jaxpr)), plan)
    if key in seen:
        return
    seen.add(key)
    for eqn, decision in zip(ir.open_jaxpr(jaxpr).eqns, plan.decisions, strict=True):
        own = ir.source_of(eqn)
        source = own if own.file else caller
        yield eqn, decision, source
        for body, inner in zip(ir.bodies(eqn), decision.inner, strict=False):
            yield from _paired(body.jaxpr, inner, source, seen)


def _heading(source: ir.Source) -> str:
    text = linecache.getline(source.file, source.line).strip() if source.file else ""
    where = f"{os.path.relpath(source.file)}:{source.line}" if source.file else str(source)
    return f"{where} {source.function}  {text}".rstrip()


def _change(eqn: Any, decision: Decision) -> str:
    operands = " ".join(_short(v.aval) for v in eqn.invars)
    results = " ".join(_short(v.aval) for v in eqn.outvars)
    verb = {
        Action.LOWER: f"in {decision.compute}",
        Action.WIDEN: f"in {decision.compute}",
        Action.DROP: "cast removed",
    }[decision.action]
    if decision.action is Action.LOWER and op(eqn.primitive.name).accumulates:
        verb += ", accumulated in f32"
    return f"{eqn.primitive.name} {operands} -> {results}: {verb}  [{decision.reason}]"


def _short(aval: Any) -> str:
    precision = ir.precision_of(aval)
    dtype = precision or getattr(aval, "dtype", type(aval).__name__)
    shape = ",".join(map(str, getattr(aval, "shape", ())))
    return f"{dtype}[{shape}]"
