"""Every program that a test gives to the pass, counted at the one place that all go through.

That is `checked_plan`, where the jaxpr of the user's function gets its plan. There the program is
lowered by JAX alone, in the middle of the trace and so under the very settings, meshes and axes
that the user's function was traced under; nothing of the user's is called again.
"""

import contextlib
import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.extend.core as jex
from jax import lax

import precpass.jit.traced
from precpass import jaxpr as ir
from tests.support.jaxprs import named

LEFT_OUT = {
    "sweeps/harnesses": "a sample of scripts/sweep harnesses",
    "sweeps/random_programs": "a sample of scripts/sweep programs",
    "contract/18_overhead": "takes times of programs that are in the tables",
    "scripts/demo": "runs programs that are in the tables",
    "sweeps/product_counts": "is a sample of this",
    "docstrings": "shows the interface",
    "sweeps/libraries": "shows that the checks of programs fail, which count here",
}
"""The files of tests that are not run for what they give to the pass."""

NOT_LOWERED = {
    "contract/11_nothing_is_silent: "
    "a_primitive_that_shows_no_jaxpr_is_judged_by_its_lowering[no lowering]": "it has no lowering",
    **{
        f"programs/checkify: {test}": "its checks are not functionalised yet"
        for test in (
            *(
                f"errors_and_messages_are_those_of_the_plain_program[{name}]"
                for name in ("user", "scan", "while", "cond", "nan operand")
            ),
            "errors_of_a_gradient",
        )
    },
}
"""The tests whose program JAX cannot lower, and why."""

MARK = ", given "
"""Stands in the name of such a program between its test and its number."""


@dataclasses.dataclass
class Given:
    """What the tests of a process have given to the pass.

    Attributes:
        met: how many programs each test gave, those that were known included.
    """

    count: Callable[[str, Callable[[], tuple[Any, Any]], Any], Any]
    met: Counter[str] = dataclasses.field(default_factory=Counter)
    # the jaxprs themselves, so that no other gets the identity of one
    _known: dict[Any, Any] = dataclasses.field(default_factory=dict)

    @contextlib.contextmanager
    def watch(self, test: Callable[[], str]) -> Iterator[None]:
        """Counts what is planned; `test` names the test that runs."""
        # not `checked_plan` itself, whose warnings point at the frame that calls it
        plan = precpass.jit.traced.make_plan

        def watched(jaxpr: Any, *args: Any, **options: Any) -> Any:
            # derivative rules are planned with a border
            if "border" not in options:
                self.add(test(), jaxpr)
            return plan(jaxpr, *args, **options)

        with mock.patch.object(precpass.jit.traced, "make_plan", watched):
            yield

    def add(self, test: str, jaxpr: Any) -> None:
        """Counts a program unless an equal one was met before."""
        self.met[test] += 1
        if self._is_known(jaxpr):
            return
        name = f"{test}{MARK}{self.met[test]}"
        self.count(name, lambda: lowered(jaxpr), jaxpr)

    def _is_known(self, jaxpr: Any) -> bool:
        opened = ir.open_jaxpr(jaxpr)
        if id(opened) in self._known:
            return True
        self._known[id(opened)] = opened
        # what a hi-primitive holds is not printed
        if named(jaxpr, "call_hi_primitive"):
            return False
        key = str(jaxpr), jax.config.jax_enable_x64
        return self._known.setdefault(key, opened) is not opened


def lowered(jaxpr: Any) -> tuple[Any, Any]:
    """A jaxpr as JAX alone traces and lowers it, inside of what binds the axes it names."""
    fn, avals = jex.jaxpr_as_fun(jaxpr), ir.in_avals(jaxpr)
    mesh = jax.sharding.get_abstract_mesh()
    names = {e.name for e in jaxpr.effects if type(e).__name__ == "NamedAxisEffect"}
    for name in sorted(names - set(mesh.axis_names), key=str):
        # no operand is batched: what runs is what would run for one lane
        fn = jax.vmap(fn, None, 0, axis_name=name, axis_size=lax.axis_size(name))
    around = contextlib.nullcontext()
    if any(kind == jax.sharding.AxisType.Manual for kind in mesh.axis_types):
        fn, avals = _sharded(fn, jaxpr, mesh)
        auto = dict.fromkeys(mesh.axis_names, jax.sharding.AxisType.Auto)
        outer = mesh.update_axis_types(auto)
        around = jax.sharding.use_abstract_mesh(outer)
    with around, jax.disable_jit(False), jax.check_tracer_leaks(False):
        traced = jax.jit(fn).trace(*avals)
        # named, because a mesh without devices does not say it
        return traced, traced.lower(lowering_platforms=("cpu",))


def _sharded(fn: Any, jaxpr: Any, mesh: Any) -> tuple[Any, list[Any]]:
    """`fn` in a `shard_map`: what varies over axes there has a dimension for them outside."""
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    manual = [name for name, kind in kinds if kind == jax.sharding.AxisType.Manual]
    ins, outs = [
        [_varying(a) for a in avals] for avals in (ir.in_avals(jaxpr), ir.out_avals(jaxpr))
    ]
    checks = any(ins) or any(outs)
    if not checks:
        # JAX was told not to note what varies: all may
        ins, outs = [manual] * len(ins), [manual] * len(outs)

    def local(*xs: Any) -> Any:
        results = fn(*[x[0] if axes else x for x, axes in zip(xs, ins, strict=True)])
        return [x[None] if axes else x for x, axes in zip(results, outs, strict=True)]

    whole = [
        jax.ShapeDtypeStruct((math.prod(mesh.shape[n] for n in axes), *a.shape), a.dtype)
        if axes
        else jax.ShapeDtypeStruct(a.shape, a.dtype)
        for a, axes in zip(ir.in_avals(jaxpr), ins, strict=True)
    ]
    before, after = (
        [jax.P(tuple(axes)) if axes else jax.P() for axes in side] for side in (ins, outs)
    )
    options = {"axis_names": set(manual), "check_vma": checks}
    return jax.shard_map(local, in_specs=tuple(before), out_specs=after, **options), whole


def _varying(aval: Any) -> list[Any]:
    """The manual axes over which a value varies."""
    found = aval.mat.varying if hasattr(aval, "mat") else aval.vma
    return sorted(found)
