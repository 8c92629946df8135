"""How many products a program has: in the graph, warned of, and in what JAX lowers.

A jaxpr that several calls share is lowered to one function, so both sides count it once. They
differ by what JAX does not lower: equations whose results nobody needs (`dead`), and the jaxprs
of a `custom_linear_solve` that only its derivatives run (`not_lowered`).
"""

import re
from typing import Any

import jax
from flow_helpers import PRODUCTS, equations, jaxprs_in, named

from precpass.graph import Graph
from precpass.planner import make_plan
from precpass.policy import AutoMixedBf16

OLD = jax.__version_info__ < (0, 12)


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
            bodies = jaxprs_in(list(eqn.params.values()))
            found += is_product(eqn) + sum(is_product(e) for j in bodies for e in equations(j))
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


def assert_counted(traced: Any) -> int:
    """The number of products that JAX lowers, which are those that the pass knows of."""
    text = in_stablehlo(traced.lower())
    known = in_graph(traced.jaxpr) + warned_of(traced.jaxpr)
    assert known == text + dead(traced.jaxpr) + not_lowered(traced.jaxpr)
    return text
