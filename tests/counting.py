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


def is_product(eqn: Any) -> bool:
    return eqn.primitive.name in PRODUCTS


def in_graph(jaxpr: Any) -> int:
    return sum(name in PRODUCTS for name in Graph.build(jaxpr).primitives)


def warned_of(jaxpr: Any) -> int:
    notes = make_plan(jaxpr, AutoMixedBf16).notes
    return sum(int(n) for note in notes for n in re.findall(r"contains (\d+) product\(s\)", note))


def in_stablehlo(lowered: Any) -> int:
    text = lowered.as_text()
    return len(re.findall(r"stablehlo\.(?:dot_general|dot|convolution)\b|chlo\.ragged_dot", text))


def dead(jaxpr: Any) -> int:
    """The products of equations that nothing reads, in the outermost jaxpr and its calls.

    Loops and branches are left whole: JAX's lowering drops nothing from those.
    """
    opened = getattr(jaxpr, "jaxpr", jaxpr)
    needed = {id(v) for v in opened.outvars}
    found = 0
    for eqn in reversed(opened.eqns):
        # a scan under jax_scan3 notes no effect of writing its references; 0.12 drops it for that
        writes = OLD and any(hasattr(v.aval, "inner_aval") for v in eqn.invars)
        acts = eqn.effects or writes
        if acts or any(id(v) in needed for v in eqn.outvars):
            needed.update(id(v) for v in eqn.invars)
        else:
            found += is_product(eqn) + sum(map(is_product, _inside(eqn)))
    return found


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
        dead, not_lowered: those that JAX does not lower.
        hi: those of the jaxpr that stand in hi-primitives.
    """

    lowered: int
    graph: int
    warned: int
    dead: int
    not_lowered: int
    hi: int

    @property
    def known(self) -> int:
        return self.graph + self.warned

    @property
    def agree(self) -> bool:
        return self.known == self.lowered + self.dead + self.not_lowered


def counts(traced: Any, lowered: Any) -> Counts:
    jaxpr = traced.jaxpr
    return Counts(
        in_stablehlo(lowered),
        in_graph(jaxpr),
        warned_of(jaxpr),
        dead(jaxpr),
        not_lowered(jaxpr),
        in_hi_primitives(jaxpr),
    )


def assert_counted(traced: Any) -> int:
    """The number of products that JAX lowers, which are those that the pass knows of."""
    found = counts(traced, traced.lower())
    assert found.agree, found
    return found.lowered
