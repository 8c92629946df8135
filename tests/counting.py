"""How many products a program has: in the graph, warned of, and in what JAX lowers.

A jaxpr that several calls share is lowered to one function, so both sides count it once. They
differ by what JAX does not lower: equations whose results nobody needs (`dead`), and the jaxprs
of a `custom_linear_solve` that only its derivatives run (`not_lowered`).
"""

import dataclasses
import re
from typing import Any

import jax
from flow_helpers import PRODUCTS, equations, jaxprs_in, named

from precpass.graph import Graph
from precpass.planner import make_plan
from precpass.policy import AutoMixedBf16

OLD = jax.__version_info__ < (0, 12)
FLAGS = [
    flag
    for flag in ("jax_remat3", "jax_custom_jvp3", "jax_custom_vjp3", "jax_scan3")
    if hasattr(jax.config, flag)
]
"""Those of the installed JAX that make hi-primitives of its functions."""
NOT_ENTERED = r"call_hi_primitive \((Scan3|OptRemat|CustomVJPTraced)\)"
"""What they make that is not entered, always or with some options; else a warning is a miss."""


def is_product(eqn: Any) -> bool:
    return eqn.primitive.name in PRODUCTS


def in_graph(jaxpr: Any) -> int:
    return sum(name in PRODUCTS for name in Graph.build(jaxpr).primitives)


def warned_of(jaxpr: Any, of: str = "") -> int:
    """The products that warnings tell of; `of` is a pattern of what the warning begins with."""
    notes = [n for n in make_plan(jaxpr, AutoMixedBf16).notes if re.match(of, n)]
    return sum(int(n) for note in notes for n in re.findall(r"contains (\d+) product\(s\)", note))


def in_stablehlo(lowered: Any) -> int:
    text = lowered.as_text()
    return len(re.findall(r"stablehlo\.(?:dot_general|dot|convolution)\b|chlo\.ragged_dot", text))


def dead(jaxpr: Any) -> int:
    """The products of equations that nothing reads, which JAX does not lower."""
    kept: dict[int, Any] = {}
    _keep(jaxpr, kept, whole=False)
    return sum(is_product(eqn) and id(eqn) not in kept for eqn in equations(jaxpr))


def _keep(jaxpr: Any, kept: dict[int, Any], whole: bool) -> None:
    """Adds the equations that are lowered of a jaxpr and of those in it, by their identities.

    Loops, branches and rules are left `whole`: JAX's lowering drops nothing from those. But of
    0.12 it drops every scan that carries something under jax_scan3, together with its results,
    because no effect says that it writes the references which it is made to carry in.
    """
    opened = getattr(jaxpr, "jaxpr", jaxpr)
    if id(opened) in kept:
        return
    kept[id(opened)] = opened
    needed = {id(v) for v in opened.outvars}
    for eqn in reversed(opened.eqns):
        writes = any(hasattr(v.aval, "inner_aval") for v in eqn.invars)
        scans = writes and eqn.primitive.name == "call_hi_primitive"
        acts = bool(eqn.effects) or (OLD and writes) or (whole and not scans)
        if acts or any(id(v) in needed for v in eqn.outvars):
            needed.update(id(v) for v in eqn.invars)
            kept[id(eqn)] = eqn
            for inner in jaxprs_in(list(eqn.params.values())):
                _keep(inner, kept, whole or eqn.primitive.name != "jit")


def not_lowered(jaxpr: Any) -> int:
    """The products that only the derivatives of a `custom_linear_solve` run."""
    count = 0
    for eqn in named(jaxpr, "custom_linear_solve"):
        jaxprs = eqn.params["jaxprs"]
        lowered = {id(e) for e in equations(jaxprs.solve)}
        others = {id(e): e for j in jaxprs_in(list(jaxprs)) for e in equations(j)}
        count += sum(is_product(e) for key, e in others.items() if key not in lowered)
    return count


def in_hi_primitives(jaxpr: Any) -> int:
    found = {id(e): e for eqn in named(jaxpr, "call_hi_primitive") for e in _inside(eqn)}
    return sum(map(is_product, found.values()))


def _inside(eqn: Any) -> list[Any]:
    return [e for j in jaxprs_in(list(eqn.params.values())) for e in equations(j)]


@dataclasses.dataclass(frozen=True)
class Counts:
    """The numbers of a program's products.

    Attributes:
        lowered: in its StableHLO.
        graph: in the flattened graph.
        warned: in what the graph does not enter, by the warnings.
        missed: those of them that the graph should have entered.
        dead, not_lowered: those that JAX does not lower.
        hi: those of the jaxpr that stand in hi-primitives.
    """

    lowered: int
    graph: int
    warned: int
    missed: int
    dead: int
    not_lowered: int
    hi: int

    @property
    def known(self) -> int:
        return self.graph + self.warned

    @property
    def agree(self) -> bool:
        return not self.missed and self.known == self.lowered + self.dead + self.not_lowered


def counts(traced: Any, lowered: Any) -> Counts:
    jaxpr = traced.jaxpr
    warned = warned_of(jaxpr)
    return Counts(
        in_stablehlo(lowered),
        in_graph(jaxpr),
        warned,
        warned - (warned and warned_of(jaxpr, NOT_ENTERED)),
        dead(jaxpr),
        not_lowered(jaxpr),
        in_hi_primitives(jaxpr),
    )


def assert_counted(traced: Any) -> int:
    """The number of products that JAX lowers, which are those that the pass knows of."""
    found = counts(traced, traced.lower())
    assert found.agree, found
    return found.lowered
