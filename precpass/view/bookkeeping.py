"""Rewritten jaxprs as a reader would write them: without the pass's own bookkeeping.

The pass binds primitives that are their first operand and only tell JAX how to differentiate
(`precpass_carrier`, `precpass_detach`, `precpass_rounded`), and hands 16-bit values across the
borders of loops as unsigned integers, beside float32 values that then nothing but a derivative
reads. Here all of these are left out of what is printed. The jaxpr itself stays as it is.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from precpass import jaxpr as ir
from precpass.analysis.graph import Graph
from precpass.analysis.liveness import unread
from precpass.policy.precision import Precision
from precpass.policy.primitives import OpKind, op

__all__ = ["without_bookkeeping"]

_BITCAST = "bitcast_convert_type"
_BITS = np.dtype(np.uint16), np.dtype(np.uint8)
"""The dtypes in which the bits of floats cross borders."""
Key = tuple[int, Any]
"""A body, by the `id` of its jaxpr, and one of its variables."""


def without_bookkeeping(before: ir.Jaxpr, after: ir.Jaxpr) -> ir.Shown:
    """What is printed of a rewritten jaxpr: all but the bookkeeping of the pass.

    Args:
        before: the program as it was written.
        after: the rewritten one. A value in it that stands for one of `before` gets its name.
    """
    graph = Graph.build(after)
    ids = [id(ir.open_jaxpr(node.jaxpr)) for node in graph.bodies]
    same, formats = _border_copies(graph, ids)
    for at, eqn in _eqns(graph):
        if _is_identity(eqn):
            same[ids[at], eqn.outvars[0]] = eqn.invars[0]
    if not same:
        return ir.Shown()
    rows, operands, results = _left_out(graph, ids)
    hidden: dict[int, set[int]] = collections.defaultdict(set)
    for at, node in enumerate(graph.bodies):
        for row in range(node.start, node.stop):
            eqn = graph.eqns[row]
            if row in rows or (eqn.outvars and (ids[at], eqn.outvars[0]) in same):
                hidden[ids[at]].add(row - node.start)
    shown = ir.Shown(same, formats, {k: frozenset(v) for k, v in hidden.items()}, operands, results)
    same.update(_names(before, graph, ids, shown))
    return shown


def _eqns(graph: Graph) -> Iterator[tuple[int, Any]]:
    """Each equation with the index of its body."""
    return zip(graph.body.tolist(), graph.eqns, strict=True)


def _is_identity(eqn: Any) -> bool:
    return ir.is_identity_of_first_operand(eqn) or ir.is_detach(eqn)


# ---------------------------------------------------------------- border copies


def _border_copies(graph: Graph, ids: list[int]) -> tuple[dict[Key, Any], dict[Key, str]]:
    """The values that are floats of 16 or 8 bits handed on as integers.

    Returns:
        for each bitcast from or to one the value that is printed in its place, and for each such
        value the type with which it is printed.
    """
    linked: dict[int, list[int]] = collections.defaultdict(list)
    for a, b in graph.links.tolist():
        linked[a].append(b)
        linked[b].append(a)
    readers: dict[int, list[int]] = collections.defaultdict(list)
    for value, row in zip(graph.sources.tolist(), graph.targets.tolist(), strict=True):
        readers[value].append(row)
    producers = graph.producers.tolist()
    behind: dict[int, list[int]] = collections.defaultdict(list)
    for value, row in enumerate(producers):
        behind[row] += readers[value]
    same: dict[Key, Any] = {}
    formats: dict[Key, str] = {}
    seen = set[int]()
    for value, (var, _) in enumerate(graph.values):
        if value in seen or getattr(var.aval, "dtype", None) not in _BITS:
            continue
        group = _connected(value, linked)
        seen |= group
        casts = {row for v in group for row in (producers[v], *readers[v]) if row >= 0}
        casts -= set(graph.children)
        low = {_low_format(graph.eqns[row]) for row in casts}
        # Readers of a copy's float take it without its derivative; other bitcasts are the user's.
        detached = any(
            behind[row] and all(ir.is_detach(graph.eqns[reader]) for reader in behind[row])
            for row in casts
        )
        if len(low) != 1 or None in low or not detached:
            continue
        (precision,) = low
        for v in group:
            var, at = graph.values[v]
            formats[ids[at], var] = f"{precision}[{','.join(map(str, var.aval.shape))}]"
        for row in casts:
            eqn = graph.eqns[row]
            same[ids[int(graph.body[row])], eqn.outvars[0]] = eqn.invars[0]
    return same, formats


def _connected(start: int, linked: dict[int, list[int]]) -> set[int]:
    group, todo = {start}, [start]
    while todo:
        new = [v for v in linked[todo.pop()] if v not in group]
        group.update(new)
        todo += new
    return group


def _low_format(eqn: Any) -> Precision | None:
    """The low format that an equation takes the bits of, or makes of bits."""
    if eqn.primitive.name != _BITCAST:
        return None
    ends = eqn.invars[0].aval, eqn.outvars[0].aval
    if any(aval.dtype == Precision.F8E4M3.dtype for aval in ends):
        return Precision.F8E4M3
    return next((p for aval in ends if (p := ir.precision_of(aval)) is not None), None)


# ---------------------------------------------------------------- what only derivatives read

Positions = dict[int, frozenset[int]]


def _left_out(graph: Graph, ids: list[int]) -> tuple[set[int], Positions, Positions]:
    """The equations that only derivatives read, and the operands and results of bodies.

    An operand of a body is left out if the equations that enter it can leave it out too, and a
    carry if it is neither read in the next trip nor after the loop.
    """
    index = {(id(var), at): i for i, (var, at) in enumerate(graph.values)}
    forced = set[int]()
    while True:
        found = unread(graph, forced)
        gone = {index[id(var), at] for var, at in found.values}
        operands: dict[int, set[int]] = collections.defaultdict(set)
        results: dict[int, set[int]] = collections.defaultdict(set)
        more = set[int]()
        for group in _slots(graph):
            values = {index[id(v), at] for kind, v, at, *_ in group if kind in ("in", "result")}
            if values <= gone:
                for kind, _, _, child, i in group:
                    if kind == "in":
                        operands[ids[child]].add(i)
                    elif kind == "out":
                        results[ids[child]].add(i)
                continue
            kept = [(v, at) for _, v, at, *_ in group if not ir.is_literal(v)]
            more |= {index[id(v), at] for v, at in kept} & gone
        if not more:
            rows = set(np.flatnonzero(found.rows).tolist())
            return rows, _frozen(operands), _frozen(results)
        forced |= more


def _frozen(positions: dict[int, set[int]]) -> Positions:
    return {key: frozenset(value) for key, value in positions.items()}


Slot = tuple[str, Any, int, int, int]
"""An "operand" or "result" of an equation, or what is "in" or "out" of a body: its kind, the
variable, the variable's body, the body that is entered, and the position there."""


def _slots(graph: Graph) -> Iterable[list[Slot]]:
    """The operands and results that cross borders, those that stand or fall together in groups."""
    parent: dict[Any, Any] = {}
    slots: dict[Any, Slot] = {}

    def root(key: Any) -> Any:
        while parent.setdefault(key, key) != key:
            key = parent[key]
        return key

    def joined(a: Any, b: Any) -> None:
        parent[root(a)] = root(b)

    for row, children in graph.children.items():
        eqn, at = graph.eqns[row], int(graph.body[row])
        for body, child in children:
            opened = ir.open_jaxpr(body.jaxpr)
            for i, (var, p) in enumerate(zip(opened.invars, body.operands, strict=True)):
                slots["in", child, i] = ("in", var, child, child, i)
                slots["operand", row, p] = ("operand", eqn.invars[p], at, child, i)
                joined(("in", child, i), ("operand", row, p))
            for i, p in enumerate(body.results):
                slots["out", child, i] = ("out", opened.outvars[i], child, child, i)
                slots["result", row, p] = ("result", eqn.outvars[p], at, child, i)
                joined(("out", child, i), ("result", row, p))
            for i, k in body.carry:
                joined(("in", child, i), ("out", child, k))
    groups: dict[Any, list[Slot]] = collections.defaultdict(list)
    for key, slot in slots.items():
        groups[root(key)].append(slot)
    return groups.values()


# ---------------------------------------------------------------- names


def _names(before: ir.Jaxpr, graph: Graph, ids: list[int], shown: ir.Shown) -> dict[Key, Any]:
    """For results of replaced equations the variable of `before` whose name they get.

    It is found by a reader that is not replaced, or for a product by its operands.
    """
    old = Graph.build(before)
    makers = {eqn.outvars[0]: eqn for eqn in old.eqns if eqn.outvars}
    products: dict[Any, list[Any]] = collections.defaultdict(list)
    for eqn in old.eqns:
        if op(eqn.primitive.name).kind is OpKind.COMPUTE:
            operands = (v for v in eqn.invars[:2] if not ir.is_literal(v))
            products[(*operands, _form(eqn))].append(eqn)
    old_vars = frozenset(var for var, _ in old.values)
    names: dict[Key, Any] = {}
    for body, node in zip(ids, graph.bodies, strict=True):
        opened = ir.open_jaxpr(node.jaxpr)
        naming = _Naming(shown, body, opened, old_vars)
        for eqn in opened.eqns:
            maker = makers.get(eqn.outvars[0]) if eqn.outvars else None
            if maker is not None and len(maker.invars) == len(eqn.invars):
                naming.name_all(eqn.invars, maker.invars)
            elif ir.is_identity_of_first_operand(eqn) and len(eqn.invars) > 2:
                naming.name_product(eqn, products)
        if node is graph.root:
            naming.name_all(opened.outvars, ir.open_jaxpr(before).outvars)
        names |= {(body, new): var for new, var in naming.names.items()}
    return names


def _form(eqn: Any) -> str:
    return f"{eqn.primitive.name} {ir.summed_and_batch(eqn)}"


class _Naming:
    """The new names of one body's variables."""

    def __init__(self, shown: ir.Shown, body: int, opened: Any, old: frozenset[Any]) -> None:
        self.shown, self.body, self.old = shown, body, old
        self.names: dict[Any, Any] = {}
        self.makers = {v: eqn for eqn in opened.eqns for v in eqn.outvars}
        hidden = shown.hidden.get(body, ())
        made = (v for i, eqn in enumerate(opened.eqns) if i not in hidden for v in eqn.outvars)
        self.taken = {*opened.invars, *opened.constvars, *made}

    def called(self, atom: Any) -> Any:
        """The variable under whose name an atom is printed."""
        atom = self.shown.resolved(self.body, atom)
        return atom if ir.is_literal(atom) else self.names.get(atom, atom)

    def name_product(self, carrier: Any, products: dict[Any, list[Any]]) -> None:
        """Names a product that a carrier hands on as the one of the same operands."""
        product = self.makers.get(self.shown.resolved(self.body, carrier.outvars[0]))
        operands = [self.called(v) for v in carrier.invars[1:3]]
        if product is None or any(map(ir.is_literal, operands)):
            return
        if same := products[(*operands, _form(product))]:
            self.name(carrier.outvars[0], same.pop(0).outvars[0])

    def name_all(self, new: Iterable[Any], variables: Iterable[Any]) -> None:
        """Names several values."""
        for value, var in zip(new, variables, strict=True):
            self.name(value, var)

    def name(self, new: Any, var: Any) -> None:
        """Gives a value the name of a variable, unless either has another one."""
        new = self.shown.resolved(self.body, new)
        if ir.is_literal(new) or ir.is_literal(var) or new in self.old or new in self.names:
            return
        if var in self.taken or (self.body, var) in self.shown.same:
            return
        if getattr(new.aval, "shape", None) == getattr(var.aval, "shape", None):
            self.names[new] = var
            self.taken.add(var)
