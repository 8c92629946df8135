"""The products of a program: in the graph, warned of, and in what JAX lowers; why they may differ.

A jaxpr that several calls share is lowered to one function, so both sides count it once. They
differ by what JAX does not lower: equations whose results nobody needs (`dead`), and the jaxprs
of a `custom_linear_solve` that only its derivatives run (`not_lowered`).
"""

import contextlib
import functools
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import compositions
import graph_programs
import helpers
import jax
import test_contract_12_everything_is_entered as entered
import test_gradient_acceptance as acceptance
import test_inspection
import test_product_form
import test_scopes
import test_transposition
from flow_helpers import PRODUCTS, equations, jaxprs_in, named

from precpass.graph import Graph
from precpass.planner import make_plan
from precpass.policy import AutoMixedBf16

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

import bench_overhead
import demo_model

Made = tuple[Callable[..., Any], tuple[Any, ...]]


def _demo(name: str) -> Made:
    task = demo_model.make_task(demo_model.Shape(layers=2, width=16, heads=2, length=8, batch=2))
    tokens = jax.ShapeDtypeStruct((2, 9), "int32")
    args = {"loss": (task.params, tokens), "train_step": (task.params, task.opt_state, tokens)}
    return getattr(task, name), args[name]


def _table(prefix: str, fns: dict[str, Any], *args: Any) -> dict[str, Callable[[], Made]]:
    return {f"{prefix}: {name}": lambda fn=fn: (fn, args) for name, fn in fns.items()}


PROGRAMS: dict[str, Callable[[], Made]] = {
    **{f"helpers: {p.name}": lambda p=p: (p.fn, p.args()) for p in helpers.PROGRAMS},
    **_table("compositions", compositions.PROGRAMS, compositions.X, compositions.W),
    **_table(
        "graph", {f.__name__: f for f in graph_programs.PROGRAMS}, *[graph_programs.SQUARE] * 2
    ),
    **_table("inspection", test_inspection.PROGRAMS, test_inspection.X, test_inspection.W),
    **{
        f"scopes: {fn.__name__}, {name}": functools.partial(transform, fn)
        for fn in test_scopes.PROGRAMS
        for name, transform in test_scopes.TRANSFORMS.items()
    },
    **_table("transposition", test_transposition.PROGRAMS, test_transposition.X),
    **{
        f"acceptance: {name}": lambda fn=fn, args=args: (jax.value_and_grad(fn), args)
        for name, (fn, args, _) in acceptance.CASES.items()
    },
    **{
        f"product form: {name}": lambda fn=fn, x=x, w=w: (fn, (x, w))
        for name, (fn, x, w) in test_product_form.CASES.items()
    },
    **_table("entered", entered.PROGRAMS, entered.X, entered.W),
    "bench: loop": lambda: bench_overhead.transformer(2, False),
    "bench: scan": lambda: bench_overhead.transformer(2, True),
    "bench: flat": lambda: bench_overhead.flat(50),
    "bench: nested": lambda: bench_overhead.nested(10),
    "demo: loss": lambda: _demo("loss"),
    "demo: train step": lambda: _demo("train_step"),
}
"""Every table of programs in the tests and the scripts; each makes a function and arguments."""

X64 = {f"helpers: {p.name}" for p in helpers.PROGRAMS if p.x64}


@contextlib.contextmanager
def settings(name: str) -> Iterator[None]:
    """What a program is traced under: the libraries' promotion for those of the scripts."""
    with contextlib.ExitStack() as stack:
        if name.startswith(("bench", "demo")):
            stack.enter_context(jax.numpy_dtype_promotion("standard"))
            stack.enter_context(jax.numpy_rank_promotion("allow"))
        if name in X64:
            stack.enter_context(jax.enable_x64(True))
        yield


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
