"""The flattened dataflow of a jaxpr and its sub-jaxprs, as columns.

A jaxpr that is called many times is one set of rows (a `BodyNode`), weighted by how often it
runs. Two calls of one jaxpr under different name scopes get rows of their own only if a rule of
the policy can tell the scopes apart.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from precpass import jaxpr as ir
from precpass.analysis.sizes import NOMINAL_SIZE, element_count, flops, nbytes
from precpass.policy.primitives import OpKind, op
from precpass.policy.scopes import as_written, is_backward, join_scopes

__all__ = ["BORDER", "BodyNode", "Graph"]

BORDER = -1
"""Stands among the readers of a value for the border of its body, which the value leaves."""


_KINDS = tuple(OpKind)


@dataclasses.dataclass(frozen=True, eq=False)
class BodyNode:
    """One jaxpr of the graph.

    Attributes:
        jaxpr: the jaxpr, open or closed as it is in the program.
        scope: the callers' name scopes, joined; "" at the root.
        start, stop: its equations' rows in the graph's columns.
        calls: how often it runs in one run of the root.
        caller: the first equation that calls it, None at the root.
        around: that equation's body.
    """

    jaxpr: ir.Jaxpr
    scope: str
    start: int
    stop: int
    calls: float
    caller: Any = None
    around: BodyNode | None = None

    @property
    def source(self) -> ir.Source:
        """The first caller's source line, or that of its caller if JAX recorded none."""
        node: BodyNode | None = self
        while node is not None and node.caller is not None:
            recorded = ir.source_of(node.caller)
            if recorded.file:
                return recorded
            node = node.around
        return ir.Source()


def _trips_of(node: BodyNode) -> float:
    """How often the equation that calls a body first runs it; 1 at the root."""
    if node.caller is None:
        return 1.0
    opened = ir.open_jaxpr(node.jaxpr)
    trip_counts = (b.trips for b in ir.bodies(node.caller) if ir.open_jaxpr(b.jaxpr) is opened)
    trips = next(trip_counts, 1)
    return float(element_count((NOMINAL_SIZE if trips is None else trips,)))


class Outside(NamedTuple):
    """The name of a body's operand where the body is called.

    Attributes:
        body: the index of the body around the call.
        atom: the operand there.
        inner: how the body is the call's.
        at: the operand's position in the body.
    """

    body: int
    atom: ir.Atom
    inner: ir.Body
    at: int

    @property
    def is_call(self) -> bool:
        """Whether the body runs once for each run of the body around it."""
        return self.inner.trips == 1 and not self.inner.carry

    @property
    def is_same(self) -> bool:
        """Whether it is the same value in every trip, as a loop's constant is."""
        return self.is_call or self.at < self.inner.constants

    @property
    def is_state(self) -> bool:
        """Whether a loop's state begins with it."""
        return any(self.at == into for into, _ in self.inner.carry)


@dataclasses.dataclass(frozen=True, eq=False)
class Graph:
    """Columns: one entry per equation, per value or per edge.

    The columns of numbers are computed when they are first asked for.

    Attributes:
        bodies: the distinct jaxprs; the root is the first.
        eqns: the equations themselves, in order of execution within a body.
        children: equation row -> ((`ir.Body`, index into `bodies`), ...).
    """

    bodies: tuple[BodyNode, ...]
    eqns: tuple[Any, ...]
    children: dict[int, tuple[tuple[ir.Body, int], ...]]
    _scopes: dict[tuple[int, int], str] = dataclasses.field(default_factory=dict, repr=False)
    _makers: dict[int, dict[ir.Var, int]] = dataclasses.field(default_factory=dict, repr=False)
    _readers: dict[int, dict[ir.Var, list[int]]] = dataclasses.field(
        default_factory=dict, repr=False
    )

    @functools.cached_property
    def primitives(self) -> tuple[str, ...]:
        """The equations' names."""
        return tuple(eqn.primitive.name for eqn in self.eqns)

    @functools.cached_property
    def kinds(self) -> npt.NDArray[np.int8]:
        """The index of each equation's kind in `OpKind`."""
        index = {kind: i for i, kind in enumerate(_KINDS)}
        return np.asarray([index[op(name).kind] for name in self.primitives], np.int8)

    @functools.cached_property
    def body(self) -> npt.NDArray[np.int32]:
        """The index of each equation's body."""
        sizes = [node.stop - node.start for node in self.bodies]
        return np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)

    @functools.cached_property
    def callers(self) -> tuple[tuple[tuple[int, ir.Body], ...], ...]:
        """For each body, the rows of the equations that have it, and how it is theirs."""
        rows: list[list[tuple[int, ir.Body]]] = [[] for _ in self.bodies]
        for row, children in self.children.items():
            for body, child in children:
                rows[child].append((row, body))
        return tuple(map(tuple, rows))

    @functools.cached_property
    def trips(self) -> list[float]:
        """For each body, how often the loops around its first caller run it; calls do not count."""
        found: dict[int, float] = {id(None): 1.0}
        for node in self.bodies:  # a body comes behind the one around it
            found[id(node)] = found[id(node.around)] * _trips_of(node)
        return [found[id(node)] for node in self.bodies]

    def row_of_maker(self, body: int, atom: ir.Atom) -> int | None:
        """The row of the equation that makes a value; None of an operand of its body."""
        if body not in self._makers:
            node, eqns = self.bodies[body], self.eqns
            rows = range(node.start, node.stop)
            self._makers[body] = {v: row for row in rows for v in eqns[row].outvars}
        return None if ir.is_literal(atom) else self._makers[body].get(atom)

    def maker(self, body: int, atom: ir.Atom) -> ir.Eqn | None:
        """The equation that makes a value; None of an operand of its body."""
        row = self.row_of_maker(body, atom)
        return None if row is None else self.eqns[row]

    def readers(self, body: int) -> Mapping[ir.Var, Sequence[int]]:
        """For each variable of a body the rows that read it; `BORDER` if it is a result."""
        if body not in self._readers:
            node, is_literal = self.bodies[body], ir.is_literal
            readers = collections.defaultdict[ir.Var, list[int]](list)
            # This loop visits every equation, so it makes no Python call for each value.
            for row in range(node.start, node.stop):
                for v in self.eqns[row].invars:
                    if not is_literal(v):
                        readers[v].append(row)
            for v in ir.open_jaxpr(node.jaxpr).outvars:
                if not is_literal(v):
                    readers[v].append(BORDER)
            self._readers[body] = dict(readers)
        return self._readers[body]

    def names_inside(self, row: int, var: ir.Var) -> list[tuple[int, ir.Var]]:
        """The names of an equation's operand in the bodies of the equation."""
        names: list[tuple[int, ir.Var]] = []
        for inner, child in self.children.get(row, ()):
            entering = zip(ir.open_jaxpr(inner.jaxpr).invars, inner.operands, strict=False)
            names += [(child, v) for v, at in entering if self.eqns[row].invars[at] is var]
        return names

    def names_outside(
        self, body: int, var: ir.Var, *, of_stacks: bool = False
    ) -> list[tuple[int, ir.Var]] | None:
        """The names of a body's result at its callers; None if it leaves the program.

        It is None too for a loop's state, and for what a loop stacks unless `of_stacks` is true.
        """
        outvars = ir.open_jaxpr(self.bodies[body].jaxpr).outvars
        names: list[tuple[int, ir.Var]] = []
        for row, inner in self.callers[body]:
            is_state = any(outvars[at] is var for _, at in inner.carry)
            is_in_loop = inner.trips != 1 or bool(inner.carry)
            if not inner.results or is_state or (is_in_loop and not of_stacks):
                return None
            results, here = self.eqns[row].outvars, int(self.body[row])
            leaving = zip(outvars, inner.results, strict=False)
            names += [(here, results[at]) for outvar, at in leaving if outvar is var]
        return names if self.callers[body] else None

    def outside(self, body: int, atom: ir.Atom, call: int | None = None) -> Outside | None:
        """The name of a body's operand at a call of the body; None for any other value.

        Args:
            body: the body.
            atom: the value.
            call: the row of the call; None if the body has one call only. A body with several
                calls has no name outside then.
        """
        callers = [each for each in self.callers[body] if call in (None, each[0])]
        invars = ir.open_jaxpr(self.bodies[body].jaxpr).invars
        is_known = len(callers) == 1 or (call is not None and callers)
        if not is_known or ir.is_literal(atom) or atom not in invars:
            return None
        (row, inner), at = callers[0], invars.index(atom)
        return Outside(int(self.body[row]), self.eqns[row].invars[inner.operands[at]], inner, at)

    def name_in_call(self, row: int, var: ir.Var) -> tuple[int, ir.Atom] | None:
        """The name of a call's result inside of the call; None for any other equation's result."""
        match self.children.get(row, ()):
            case ((called, child),) if called.trips == 1 and not called.carry:
                position = self.eqns[row].outvars.index(var)
                inside = zip(called.results, ir.open_jaxpr(called.jaxpr).outvars, strict=False)
                return next(((child, v) for at, v in inside if at == position), None)
            case _:
                return None

    @functools.cached_property
    def rows_with_bodies(self) -> tuple[tuple[int, ...], ...]:
        """For each body, the rows of its equations that have bodies themselves."""
        rows: list[list[int]] = [[] for _ in self.bodies]
        for row in self.children:
            rows[self.body[row]].append(row)
        return tuple(map(tuple, rows))

    def inside(self, body: int) -> frozenset[int]:
        """A body and those that it enters."""
        found, todo = {body}, [body]
        while todo:
            rows = self.rows_with_bodies[todo.pop()]
            new = {child for row in rows for _, child in self.children[row]} - found
            found |= new
            todo += new
        return frozenset(found)

    @functools.cached_property
    def has_backward_pass(self) -> bool:
        """Whether JAX differentiated a part of the program in reverse mode."""
        return any(is_backward(self.scope(row)) for row in range(len(self.eqns)))

    @functools.cached_property
    def flops(self) -> npt.NDArray[np.float64]:
        """Floating-point operations of one execution of each equation."""
        return np.asarray([flops(eqn) for eqn in self.eqns], np.float64)

    @functools.cached_property
    def calls(self) -> npt.NDArray[np.float64]:
        """Executions of each equation in one run of the root."""
        return np.asarray([node.calls for node in self.bodies], np.float64)[self.body]

    @functools.cached_property
    def values(self) -> tuple[tuple[Any, int], ...]:
        """The variables and, behind each, its body's index."""
        return tuple(self._dataflow.values)

    @functools.cached_property
    def value_bytes(self) -> npt.NDArray[np.float64]:
        """The bytes of each value."""
        return np.asarray([nbytes(var.aval) for var, _ in self.values], np.float64)

    @property
    def sources(self) -> npt.NDArray[np.int32]:
        """For each edge, the value that an equation reads."""
        return self._dataflow.edges[:, 0]

    @property
    def targets(self) -> npt.NDArray[np.int32]:
        """For each edge, the equation that reads the value."""
        return self._dataflow.edges[:, 1]

    @property
    def producers(self) -> npt.NDArray[np.int32]:
        """The equation that makes each value, or -1."""
        return self._dataflow.producers

    @property
    def links(self) -> npt.NDArray[np.int32]:
        """Pairs of values that are one value on two sides of a border, or of two trips."""
        return self._dataflow.links

    @functools.cached_property
    def _dataflow(self) -> _Dataflow:
        return _dataflow(self)

    @property
    def root(self) -> BodyNode:
        """The outermost jaxpr."""
        return self.bodies[0]

    def scope(self, row: int) -> str:
        """The whole name scope of an equation, its callers' scopes first."""
        return self.scope_in(int(self.body[row]), self.eqns[row])

    def scope_in(self, body: int, eqn: ir.Eqn) -> str:
        """The whole name scope of one of a body's equations."""
        # Equations that were bound under one name stack share its object, which is slow to print.
        key = body, id(eqn.source_info.name_stack)
        if key not in self._scopes:
            self._scopes[key] = join_scopes(self.bodies[body].scope, ir.scope_of(eqn))
        return self._scopes[key]

    def source(self, row: int) -> ir.Source:
        """The source line of an equation, or its caller's if JAX recorded none."""
        recorded = ir.source_of(self.eqns[row])
        return recorded if recorded.file else self.bodies[int(self.body[row])].source

    def to_networkx(self) -> Any:
        """The dataflow as a `networkx.MultiDiGraph`.

        Nodes are ("eqn", row) with primitive, kind, scope, source, flops and
        calls, and ("value", row) with dtype, shape and bytes. Edges go from
        values to their readers and from equations to their results; links across
        borders are edges between values with `link=True`.
        """
        import networkx as nx  # its import costs as much as planning a model

        graph = nx.MultiDiGraph()
        for row in range(len(self.eqns)):
            graph.add_node(
                ("eqn", row),
                primitive=self.primitives[row],
                kind=str(_KINDS[self.kinds[row]]),
                scope=as_written(self.scope(row)),
                source=str(self.source(row)),
                flops=float(self.flops[row]),
                calls=float(self.calls[row]),
            )
        for row, (var, _) in enumerate(self.values):
            shape, dtype = getattr(var.aval, "shape", ()), getattr(var.aval, "dtype", None)
            graph.add_node(
                ("value", row), dtype=str(dtype), shape=shape, bytes=float(self.value_bytes[row])
            )
            if self.producers[row] >= 0:
                graph.add_edge(("eqn", int(self.producers[row])), ("value", row))
        for value, eqn in zip(self.sources, self.targets, strict=True):
            graph.add_edge(("value", int(value)), ("eqn", int(eqn)))
        for a, b in self.links:
            graph.add_edge(("value", int(a)), ("value", int(b)), link=True)
        return graph

    @classmethod
    def build(
        cls, jaxpr: ir.Jaxpr, distinguish: Callable[[str], Hashable] = lambda scope: None
    ) -> Graph:
        """The graph of a jaxpr.

        Args:
            jaxpr: open or closed.
            distinguish: calls of one jaxpr under two scopes share their nodes
                when this gives the same value for both.
        """
        return _Builder(distinguish).build(jaxpr)


class _Builder:
    def __init__(self, distinguish: Callable[[str], Hashable]) -> None:
        self.distinguish = distinguish
        self.index: dict[Any, int] = {}
        # jaxpr, scope, start, stop, its first caller and that one's body
        self.found: list[tuple[Any, str, int, int, Any, int]] = []
        self.callers: list[list[tuple[int, float]]] = []
        self.eqns: list[Any] = []
        self.children: dict[int, tuple[tuple[ir.Body, int], ...]] = {}

    def build(self, jaxpr: ir.Jaxpr) -> Graph:
        """The graph of a jaxpr; a body's first caller is the first in the order of execution."""
        self._add(jaxpr, "", None, -1)
        # A stack and no recursion, because JAX's nesting may exceed Python's recursion limit.
        walk, left = [self._inside(0)], list[int]()
        entered = [0]
        while walk:
            child = next(walk[-1], None)
            if child is None:
                walk.pop()
                left.append(entered.pop())
            else:
                walk.append(self._inside(child))
                entered.append(child)
        calls = [1.0] * len(self.found)
        for at in reversed(left[:-1]):  # callers first
            calls[at] = sum(trips * calls[caller] for caller, trips in self.callers[at])
        bodies: list[BodyNode] = []
        for (jaxpr, scope, start, stop, caller, around), times in zip(
            self.found, calls, strict=True
        ):
            outside = bodies[around] if bodies else None
            bodies.append(BodyNode(jaxpr, scope, start, stop, times, caller, outside))
        return Graph(tuple(bodies), tuple(self.eqns), self.children)

    def _add(self, jaxpr: ir.Jaxpr, scope: str, caller: Any, around: int) -> tuple[int, bool]:
        """The index of the body for `jaxpr` under `scope`, and whether it is new."""
        key = (id(ir.open_jaxpr(jaxpr)), self.distinguish(scope))
        if key in self.index:
            return self.index[key], False
        at = self.index[key] = len(self.found)
        eqns, start = ir.open_jaxpr(jaxpr).eqns, len(self.eqns)
        self.eqns.extend(eqns)
        self.callers.append([])
        self.found.append((jaxpr, scope, start, start + len(eqns), caller, around))
        return at, True

    def _inside(self, at: int) -> Iterator[int]:
        """Adds the bodies that a body's equations enter; yields those that are new."""
        _, scope, start, stop, _, _ = self.found[at]
        for row in range(start, stop):
            eqn = self.eqns[row]
            inner: list[tuple[ir.Body, int]] = []
            for body in ir.bodies(eqn):
                inside = join_scopes(scope, ir.scope_of(eqn))
                child, new = self._add(body.jaxpr, inside, eqn, at)
                trips = NOMINAL_SIZE if body.trips is None else body.trips
                self.callers[child].append((at, float(element_count((trips,)))))
                inner.append((body, child))
                if new:
                    yield child
            if inner:
                self.children[row] = tuple(inner)


class _Dataflow(NamedTuple):
    values: list[tuple[Any, int]]
    producers: npt.NDArray[np.int32]
    edges: npt.NDArray[np.int32]
    links: npt.NDArray[np.int32]


def _dataflow(graph: Graph) -> _Dataflow:
    values: list[tuple[Any, int]] = []
    producers: list[int] = []
    places: list[dict[Any, int]] = []

    def add(var: ir.Var, at: int, producer: int) -> None:
        places[at][var] = len(values)
        values.append((var, at))
        producers.append(producer)

    for at, node in enumerate(graph.bodies):
        opened = ir.open_jaxpr(node.jaxpr)
        places.append({})
        for var in (*opened.constvars, *opened.invars):
            add(var, at, -1)
        for row in range(node.start, node.stop):
            for var in graph.eqns[row].outvars:
                add(var, at, row)
    edges: list[tuple[int, int]] = []
    links: list[tuple[int, int]] = []
    for at, node in enumerate(graph.bodies):
        place = places[at]
        for row in range(node.start, node.stop):
            eqn = graph.eqns[row]
            edges += [(place[v], row) for v in eqn.invars if not ir.is_literal(v)]
            for body, child in graph.children.get(row, ()):
                links += _links(eqn, body, place, places[child])
    return _Dataflow(values, np.asarray(producers, np.int32), _pairs(edges), _pairs(links))


def _pairs(rows: list[tuple[int, int]]) -> npt.NDArray[np.int32]:
    return np.asarray(rows, np.int32).reshape(-1, 2)


def _links(
    eqn: ir.Eqn, body: ir.Body, outside: dict[Any, int], inside: dict[Any, int]
) -> Iterator[tuple[int, int]]:
    opened = ir.open_jaxpr(body.jaxpr)
    for var, operand in zip(opened.invars, body.operands, strict=True):
        if not ir.is_literal(eqn.invars[operand]):
            yield outside[eqn.invars[operand]], inside[var]
    for atom, result in zip(opened.outvars, body.results, strict=False):
        if not ir.is_literal(atom):
            yield inside[atom], outside[eqn.outvars[result]]
    for invar, outvar in body.carry:
        if not ir.is_literal(opened.outvars[outvar]):
            yield inside[opened.outvars[outvar]], inside[opened.invars[invar]]
