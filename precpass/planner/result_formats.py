"""Which lowered products have results in 16 bits, on devices where float32 results cost bandwidth.

On a GPU no kernel folds a cast into a product, so a float32 result is written, and read again by a
kernel that casts it. XLA even widens a convolution whose result is wider than its operands, and
computes it in float32 (`operand_upcaster` in XLA's `gpu_compiler.cc`). The units add up in float32
in any case, so a result in 16 bits is one rounding of a float32 sum.

A dot keeps its float32 result if the result leaves the program or a loop as it is: a gradient, a
carry, a stack. A convolution always has a 16-bit result, because it would not be low otherwise.
Sums that are made of results stay in float32: a rounded term has a relative error of one unit
roundoff, which is what the rounding of each operand has too, while a rounded sum would lose terms.
"""

from __future__ import annotations

import collections
import dataclasses

from precpass import jaxpr as ir
from precpass.analysis.analysis import Analysis
from precpass.analysis.equations import moved_operand
from precpass.plan.plan import Action, Decision, Plan
from precpass.policy.precision import Precision
from precpass.policy.primitives import OpKind

__all__ = ["PLATFORMS", "with_low_results"]

PLATFORMS = frozenset(("gpu", "cuda", "rocm"))
"""JAX's names of the platforms whose products are planned with results in 16 bits."""

_CONVOLUTION = "conv_general_dilated"


def with_low_results(plan: Plan, analysis: Analysis) -> Plan:
    """The plan in which products have 16-bit results wherever that loses no digits of a sum.

    Args:
        plan: of the program, with its storage assigned.
        analysis: of the program.
    """
    return _ResultFormats(analysis).of(0, plan)


class _ResultFormats:
    """The results of the products of one program."""

    def __init__(self, analysis: Analysis) -> None:
        self.graph = analysis.graph
        self._readers = analysis.uses
        self._callers: dict[int, list[tuple[int, ir.Body]]] = collections.defaultdict(list)
        for row, children in self.graph.children.items():
            for body, child in children:
                self._callers[child].append((row, body))
        self._plans: dict[tuple[int, int], Plan] = {}

    def of(self, body: int, plan: Plan) -> Plan:
        """The plan of one body."""
        key = body, id(plan)
        if key not in self._plans:
            start = self.graph.bodies[body].start
            decisions = tuple(
                self._decision(body, start + at, decision)
                for at, decision in enumerate(plan.decisions)
            )
            same = all(a is b for a, b in zip(decisions, plan.decisions, strict=True))
            self._plans[key] = plan if same else dataclasses.replace(plan, decisions=decisions)
        return self._plans[key]

    def _decision(self, body: int, row: int, decision: Decision) -> Decision:
        if decision.inner:
            children = self.graph.children[row]
            inner = tuple(
                self.of(child, plan)
                for (_, child), plan in zip(children, decision.inner, strict=True)
            )
            same = all(a is b for a, b in zip(inner, decision.inner, strict=True))
            return decision if same else dataclasses.replace(decision, inner=inner)
        if not self._rounds(body, row, decision):
            return decision
        return dataclasses.replace(decision, product=decision.product._replace(low_result=True))

    def _rounds(self, body: int, row: int, decision: Decision) -> bool:
        is_product = decision.action is Action.LOWER and decision.kind is OpKind.COMPUTE
        if not is_product or decision.compute is not Precision.BF16:
            # The result may be out of float16's range though the operands are in it.
            return False
        eqn = self.graph.eqns[row]
        if eqn.primitive.name == _CONVOLUTION or any(decision.stored):
            return True
        return not self._leaves(body, eqn.outvars[0])

    def _leaves(self, body: int, var: ir.Var) -> bool:
        """Whether a value, or another one that it is moved to, leaves a loop or the program."""
        todo, seen = [(body, var)], set[tuple[int, ir.Var]]()
        while todo:
            place = body, var = todo.pop()
            if place in seen:
                continue
            seen.add(place)
            for reader in self._readers.of(body).get(var, ()):
                if reader is None:
                    outside = self._outside(body, var)
                    if outside is None:
                        return True
                    todo += outside
                elif moved_operand(reader) is var:
                    todo.append((body, reader.outvars[0]))
        return False

    def _outside(self, body: int, var: ir.Var) -> list[tuple[int, ir.Var]] | None:
        """The names of a body's result at its callers; None if it leaves a loop or the program."""
        callers = self._callers[body]
        if not callers:
            return None
        outvars = ir.open_jaxpr(self.graph.bodies[body].jaxpr).outvars
        names: list[tuple[int, ir.Var]] = []
        for row, inner in callers:
            if inner.trips != 1 or inner.carry or not inner.results:
                return None
            results = self.graph.eqns[row].outvars
            here = int(self.graph.body[row])
            leaving = zip(outvars, inner.results, strict=True)
            names += [(here, results[at]) for outvar, at in leaving if outvar is var]
        return names
