"""The equations of a plan in order, each with the scopes, loops and branches around it."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from precpass.analysis.sizes import NOMINAL_SIZE
from precpass.jaxpr import Source
from precpass.plan.eqn_info import EqnInfo, Site
from precpass.plan.plan import Action, Decision, Plan
from precpass.policy.scopes import clean_scope, is_backward, join_scopes
from precpass.units import counted

__all__ = ["CALLS", "Frame", "Row", "alike", "frame_name", "listed_sites", "paired_rows", "rows"]

CALLS = frozenset(("jit", "closed_call", "core_call", "eval_jaxpr", "core_closed_call"))
"""Primitives that only call their body, once."""


def alike(scope: str) -> str:
    """A scope with "*" for each number, a name that it shares with scopes of other numbers.

    Examples:
        >>> alike("encoder/layer_12")
        'encoder/layer_*'
    """
    return re.sub(r"\d+", "*", scope)


def listed_sites(sites: Iterable[Site]) -> dict[Site, Site]:
    """For each site its place in a list: modules that differ only in their numbers share one."""
    together: dict[Site, dict[str, None]] = {}
    sites = list(sites)
    for site in sites:
        together.setdefault(_alike_site(site), {})[site.module] = None
    alone = {key: next(iter(modules)) for key, modules in together.items() if len(modules) == 1}
    keys = {site: _alike_site(site) for site in sites}
    return {site: site if key in alone else key for site, key in keys.items()}


def _alike_site(site: Site) -> Site:
    return site._replace(module=alike(site.module))


class Frame(NamedTuple):
    """An equation with bodies that a row stands in.

    Attributes:
        name: its name and how often it runs, "scan, 12 trips".
        source: its line.
        is_call: whether it only calls its body, once.
    """

    name: str
    source: Source
    is_call: bool


@dataclasses.dataclass(frozen=True)
class Row:
    """One equation of the original program.

    Attributes:
        info: its place in the program.
        decision: the decision for it.
        scope: all name scopes around it, without the marks of JAX's transforms.
        backward: whether it belongs to a backward pass.
        frames: the equations whose bodies it stands in, outermost first.
        calls: how often it runs in one run of the program; an unknown or symbolic trip count
            counts as `precpass.analysis.sizes.NOMINAL_SIZE`.
    """

    info: EqnInfo
    decision: Decision
    scope: str
    backward: bool
    frames: tuple[Frame, ...]
    calls: float

    @property
    def changes(self) -> bool:
        """Whether the rewritten program differs at this equation, apart from its bodies."""
        if self.info.casts:
            return True
        if self.decision.action is Action.DROP and self.info.primitive == "convert_element_type":
            # A dropped cast that is made again in its place changes nothing.
            return self.info.operands[0].dtype == self.info.results[0].dtype
        if self.decision.action is Action.ENTER:
            return bool(self.info.crossed)
        return self.decision.alters


@dataclasses.dataclass(eq=False)
class _Node:
    """A plan at the first place where it occurs."""

    plan: Plan
    scope: str
    frames: tuple[Frame, ...]
    callers: list[tuple[_Node, float]] = dataclasses.field(
        default_factory=list["tuple[_Node, float]"]
    )

    @functools.cached_property
    def calls(self) -> float:
        """How often it runs; to be asked for when all callers are known."""
        runs = (trips * caller.calls for caller, trips in self.callers)
        return sum(runs) if self.callers else 1.0


def rows(plan: Plan) -> Iterator[Row]:
    """Every equation in the order of execution; bodies follow their equation, shared ones once.

    Raises:
        ValueError: for a plan without `EqnInfo`, which `inspect` did not make.
    """
    nodes = _nodes(plan)
    return _walk(nodes[id(plan)], nodes, {id(plan)})


def _walk(node: _Node, nodes: dict[int, _Node], seen: set[int]) -> Iterator[Row]:
    for row in _rows_of(node):
        yield row
        new = {id(p): nodes[id(p)] for p in row.decision.inner if id(p) not in seen}
        seen.update(new)
        for inner in new.values():
            yield from _walk(inner, nodes, seen)


def _rows_of(node: _Node) -> Iterator[Row]:
    for info, decision in zip(node.plan.eqn_infos, node.plan.decisions, strict=True):
        scope = join_scopes(node.scope, info.scope)
        yield Row(info, decision, clean_scope(scope), is_backward(scope), node.frames, node.calls)


def _nodes(plan: Plan) -> dict[int, _Node]:
    """The distinct plans, by id, in the order in which they occur."""
    root = _Node(plan, "", ())
    nodes = {id(plan): root}

    def visit(node: _Node) -> None:
        for inner, trips in _bodies_of(node):
            known = nodes.setdefault(id(inner.plan), inner)
            known.callers.append((node, trips))
            if known is inner:
                visit(inner)

    visit(root)
    return nodes


def _bodies_of(node: _Node) -> Iterator[tuple[_Node, float]]:
    """The plans that a plan enters, each with how often it runs for each run of the plan."""
    _check_sites(node.plan)
    for info, decision in zip(node.plan.eqn_infos, node.plan.decisions, strict=True):
        if not decision.inner:
            continue
        scope = join_scopes(node.scope, info.scope)
        for index, (body, plan) in enumerate(zip(info.bodies, decision.inner, strict=True)):
            trips = body.trips if isinstance(body.trips, int) else NOMINAL_SIZE
            frame = _frame(info, index, is_backward(scope))
            yield _Node(plan, scope, (*node.frames, frame)), float(trips)


def _frame(info: EqnInfo, index: int, backward: bool) -> Frame:
    body = info.bodies[index]
    name = frame_name(info.primitive, body.name if len(info.bodies) > 1 else "", body.trips)
    direction = ", backward" if backward else ""
    return Frame(name + direction, info.source, info.primitive in CALLS)


def frame_name(primitive: str, body: str, trips: object) -> str:
    """The name of an equation with bodies, such as "scan, 12 trips".

    Args:
        primitive: its primitive's name.
        body: which of its bodies; "" if it has only one.
        trips: how often that runs; None if that is only known at run time.
    """
    if body == "cond_jaxpr":  # it runs once more than the body, of which the number is said
        return f"{primitive}, condition"
    part = "" if body == "body_jaxpr" else re.sub(r"^branches\[(\d+)\]$", r"branch \1", body)
    times = "" if trips == 1 else f"{trips if trips is not None else 'any number of'} trips"
    return ", ".join(filter(None, (primitive, part, times)))


def _check_sites(plan: Plan) -> None:
    if len(plan.eqn_infos) != len(plan.decisions):
        raise ValueError(
            "this plan does not say where its equations stand: take the .plan of "
            "precpass.inspect(f)(*args)"
        )


def paired_rows(first: Plan, second: Plan) -> Iterator[tuple[Row, Row]]:
    """The equations of one program under two plans.

    Raises:
        ValueError: for plans of different programs.
    """
    nodes = _nodes(first), _nodes(second)
    seen = {(id(first), id(second))}

    def walk(one: Plan, other: Plan) -> Iterator[tuple[Row, Row]]:
        for pair in _pairs_of(nodes[0][id(one)], nodes[1][id(other)]):
            yield pair
            for a, b in zip(*(row.decision.inner for row in pair), strict=True):
                if (id(a), id(b)) not in seen:
                    seen.add((id(a), id(b)))
                    yield from walk(a, b)

    return walk(first, second)


def _pairs_of(a: _Node, b: _Node) -> Iterator[tuple[Row, Row]]:
    if len(a.plan.eqn_infos) != len(b.plan.eqn_infos):
        one, other = len(a.plan.eqn_infos), len(b.plan.eqn_infos)
        raise ValueError(
            f"plans of two programs: one has {counted(one, 'equation')} where the other has "
            f"{other}; compare two policies on one function and the same arguments"
        )
    for pair in zip(_rows_of(a), _rows_of(b), strict=True):
        one, other = (row.info for row in pair)
        # Equal plans of one primitive may have different bodies: another branch, another length.
        if (one.signature, one.bodies) != (other.signature, other.bodies):
            raise ValueError(
                f"plans of two programs: {_said(one)} in one is {_said(other)} in the other; "
                "compare two policies on one function and the same arguments"
            )
        yield pair


def _said(info: EqnInfo) -> str:
    several = len(info.bodies) > 1
    entered = (
        frame_name(info.primitive, body.name if several else "", body.trips) for body in info.bodies
    )
    bodies = f" ({'; '.join(entered)})" if info.bodies else ""
    return f"{info.signature}{bodies} at {info.source}"
