"""How many products a program has: in the graph, warned of, and in what JAX lowers.

All are counted with every call in its place: a jaxpr that two calls share counts twice, however
often JAX writes it into the module. What JAX then leaves out or repeats is asked of JAX itself
(`dce_jaxpr`, `Traced.lojax`) or stands in `copies`.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.interpreters import partial_eval

from precpass import jaxpr as ir
from precpass.analysis.equations import unentered
from precpass.analysis.graph import Graph
from precpass.jaxpr.bodies import ENTERED, OPAQUE
from precpass.planner.planner import make_plan
from precpass.policy.presets import AutoMixedBf16
from precpass.policy.primitives import BOUNDARY, TABLE
from precpass.policy.scopes import is_fixed
from tests.support.jaxprs import PRODUCTS, jaxprs_in

# as it is at first: a test that takes one out of a table must not make it another library's
OF_JAX = frozenset({*ENTERED, *OPAQUE, *TABLE, *BOUNDARY})
"""The primitives of JAX itself that are in a table."""


def is_product(eqn: Any) -> bool:
    return eqn.primitive.name in PRODUCTS


# ---------------------------------------------------------------- what JAX lowers


def in_stablehlo(text: str) -> int:
    """The products of a module's main function and, at each call, of the function it calls."""
    own: Counter[str] = Counter()
    called: dict[str, Counter[str]] = {}
    function = ""
    for line in text.splitlines():
        head = _FUNCTION.search(line)
        if head:
            function = head[1]
            called[function] = Counter()
            continue
        own[function] += len(_PRODUCT.findall(line))
        called.get(function, Counter()).update(_NAME.findall(line))
    totals: dict[str, int] = {}

    def total(name: str) -> int:
        if name not in totals:
            inner = (n * total(f) for f, n in called[name].items() if f in called)
            totals[name] = own[name] + sum(inner)
        return totals[name]

    return total("main")


_FUNCTION = re.compile(r"^\s*func\.func (?:\w+ )?@(\"[^\"]*\"|[\w.$-]+)")
_NAME = re.compile(r"@(\"[^\"]*\"|[\w.$-]+)")
_PRODUCT = re.compile(r"stablehlo\.(?:dot_general|dot|convolution)\b|chlo\.ragged_dot")


def copies(eqn: Any, param: str, index: int) -> int:
    """How often JAX lowers a jaxpr in an equation's params."""
    name, params = eqn.primitive.name, eqn.params
    if name == "custom_linear_solve":
        # the others are those that its derivatives run
        return int(param == "jaxprs" and params[param][index] is params["jaxprs"].solve)
    if name == "linear_call":
        return int(param == "callee")
    if name == "scan":
        return _unrolled(params["length"], params["unroll"])
    if name == "while" and param == "cond_jaxpr":
        # one for each lane also chooses, in the body, the lanes that go on
        return 2 if ir.out_avals(params[param])[0].shape else 1
    return 1


def _unrolled(length: Any, unroll: int) -> int:
    if unroll == 1 or not isinstance(length, int):
        return int(length != 0)
    trips, rest = divmod(length, unroll) if unroll else (0, length)
    return length if trips == 1 and not rest else min(trips, 1) * unroll + rest


def in_jaxpr(jaxpr: Any, seen: dict[int, tuple[Any, int]] | None = None) -> int:
    """The products of a jaxpr and of all those in it, without the package's own reader."""
    seen = {} if seen is None else seen
    opened = getattr(jaxpr, "jaxpr", jaxpr)
    if id(opened) not in seen:
        inside = ((e, n, j) for e in opened.eqns for n, j in _lowered_in(e))
        found = sum(map(is_product, opened.eqns))
        found += sum(n * in_jaxpr(j, seen) for _, n, j in inside)
        seen[id(opened)] = opened, found
    return seen[id(opened)][1]


def _lowered_in(eqn: Any) -> Iterator[tuple[int, Any]]:
    if eqn.primitive.name == "call_hi_primitive" and not _held_by(eqn):
        # it holds functions, which it calls when it is lowered
        prim = eqn.params["_prim"]
        yield 1, jax.make_jaxpr(prim.expand)(*prim.in_avals)
    for param, value in eqn.params.items():
        held = value if isinstance(value, tuple | list) else (value,)
        for index, item in enumerate(held):
            for inner in jaxprs_in(item):
                yield copies(eqn, param, index), inner


def _held_by(eqn: Any) -> list[Any]:
    return list(jaxprs_in(list(eqn.params.values())))


def without_dead(jaxpr: Any) -> Any:
    """A jaxpr without what JAX drops before it lowers it."""
    return partial_eval.dce_jaxpr(
        getattr(jaxpr, "jaxpr", jaxpr), [True] * len(ir.out_avals(jaxpr))
    )[0]


# ---------------------------------------------------------------- what the pass knows


class Known(NamedTuple):
    """The numbers of products that the pass knows of; `Counts` says which."""

    graph: int = 0
    warned: int = 0
    missed: int = 0

    def plus(self, other: Known, times: int = 1) -> Known:
        return Known(*(a + times * b for a, b in zip(self, other, strict=True)))


def known_of(jaxpr: Any) -> Known:
    """What the flattened graph and the warnings of a program hold."""
    graph = Graph.build(jaxpr)
    notes = make_plan(jaxpr, AutoMixedBf16).notes
    totals: dict[int, Known] = {}

    def total(at: int) -> Known:
        if at not in totals:
            node, found = graph.bodies[at], Known()
            for row in range(node.start, node.stop):
                eqn = graph.eqns[row]
                if row not in graph.children:
                    told = notes and _about(eqn, graph.source(row), notes)
                    found = found.plus(_leaf(eqn, told, is_fixed(graph.scope(row))))
                for body, child in graph.children.get(row, ()):
                    found = found.plus(total(child), copies(eqn, body.param, body.index or 0))
            totals[at] = found
        return totals[at]

    return total(0)


def _about(eqn: Any, source: Any, notes: Sequence[str]) -> list[str]:
    where = f"{ir.name_of(eqn)} at {source} is not entered"
    return [note for note in notes if note.startswith(where)]


def _leaf(eqn: Any, notes: Sequence[str], is_of_inner: bool) -> Known:
    """The products of an equation that the graph does not enter.

    Args:
        eqn: the equation.
        notes: those about its line.
        is_of_inner: whether it belongs to an inner function with a policy of its own,
            whose own pass tells of it.
    """
    if is_product(eqn):
        return Known(graph=1)
    told = ((notes or is_of_inner) and unentered(eqn, {})) or ""
    is_told = bool(told) and (is_of_inner or any(told in n for n in notes))
    held = sum(n * in_jaxpr(j) for n, j in _lowered_in(eqn))
    if held and _is_foreign(eqn):
        # only its library knows what of its jaxprs it runs, and how often
        held = ir.contents_of(eqn).products
        return Known(warned=held, missed=0 if is_told else held)
    if held:
        return Known(warned=held, missed=0 if is_told and _may_be_left(eqn) else held)
    # a primitive without jaxprs may make products when it is lowered
    made = sum(map(int, re.findall(r"contains (\d+) product", told)))
    return Known(warned=made, missed=0 if is_told else made)


def _is_foreign(eqn: Any) -> bool:
    """Whether a primitive is of a library that builds on JAX, such as lineax."""
    return eqn.primitive.name not in OF_JAX


def _may_be_left(eqn: Any) -> bool:
    """Whether an equation that holds products is one that is not to be entered."""
    if eqn.primitive.name == "call_hi_primitive":
        made = type(eqn.params["_prim"])
        is_root = made.__name__ in ("CustomRoot", "_RootLinearMap")
        return not (is_root and made.__module__.startswith("jax."))
    return eqn.primitive.name in OPAQUE or any(hasattr(v.aval, "inner_aval") for v in eqn.invars)


@dataclasses.dataclass(frozen=True)
class Counts:
    """The numbers of a program's products.

    Attributes:
        lowered: in its StableHLO.
        graph: in the flattened graph.
        warned: in what the graph does not enter.
        missed: those of them that no warning tells of, or that the graph should have entered.
        dead: those that JAX drops.
    """

    lowered: int
    graph: int
    warned: int
    missed: int
    dead: int

    @property
    def agree(self) -> bool:
        return not self.missed and self.graph + self.warned == self.lowered + self.dead


def counts(jaxpr: Any, traced: Any, lowered: Any) -> Counts:
    dead = in_jaxpr(jaxpr) - in_jaxpr(without_dead(traced.lojax.jaxpr))
    return Counts(in_stablehlo(lowered.as_text()), *known_of(jaxpr), dead)


def assert_counted(traced: Any) -> int:
    """The number of products that JAX lowers, which are those that the pass knows of."""
    found = counts(traced.jaxpr, traced, traced.lower())
    assert found.agree, found
    return found.lowered
