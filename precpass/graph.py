"""The flattened dataflow of a jaxpr and its sub-jaxprs, as columns.

A jaxpr that is called many times is one set of nodes (a `BodyNode`), weighted by
its number of calls and trips. Callers' name scopes tell calls apart only where
the policy's rules can see the difference.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
import numpy.typing as npt

from precpass import jaxpr as ir
from precpass.opkinds import OpKind, op

__all__ = ["NOMINAL_SIZE", "BodyNode", "Graph"]

NOMINAL_SIZE = 128
"""What a symbolic dimension, or a while loop's unknown trip count, counts as."""

_KINDS = list(OpKind)


@dataclasses.dataclass(frozen=True, eq=False)
class BodyNode:
    """One jaxpr of the graph.

    Attributes:
        jaxpr: as it was found, open or closed.
        scope: the callers' name scopes, joined; "" at the root.
        source: the first caller's source line.
        start, stop: its equations' rows in the graph's columns.
        calls: how often it runs in one run of the root.
    """

    jaxpr: Any
    scope: str
    source: ir.Source
    start: int
    stop: int
    calls: float


@dataclasses.dataclass(frozen=True, eq=False)
class Graph:
    """Columns: one entry per equation, per value or per edge.

    Attributes:
        bodies: the distinct jaxprs; the root is the first.
        eqns: the equations themselves, in order of execution within a body.
        primitives: their names.
        kinds: int8, the index of their kind in `OpKind`.
        body: int32, the index of their body.
        flops: float64, floating-point operations of one execution.
        calls: float64, executions in one run of the root.
        children: equation row -> ((`ir.Body`, index into `bodies`), ...).
        values: the variables and, behind each, its body's index.
        value_bytes: float64.
        sources, targets: int32, an edge from a value to an equation that reads it.
        producers: int32 per value, the equation that makes it, or -1.
        links: int32 pairs of values that are one value on two sides of a border,
            or of two trips of a loop.
    """

    bodies: tuple[BodyNode, ...]
    eqns: tuple[Any, ...]
    primitives: tuple[str, ...]
    kinds: npt.NDArray[np.int8]
    body: npt.NDArray[np.int32]
    flops: npt.NDArray[np.float64]
    calls: npt.NDArray[np.float64]
    children: dict[int, tuple[tuple[ir.Body, int], ...]]
    values: tuple[tuple[Any, int], ...]
    value_bytes: npt.NDArray[np.float64]
    sources: npt.NDArray[np.int32]
    targets: npt.NDArray[np.int32]
    producers: npt.NDArray[np.int32]
    links: npt.NDArray[np.int32]

    @property
    def root(self) -> BodyNode:
        """The outermost jaxpr."""
        return self.bodies[0]

    def scope(self, row: int) -> str:
        """The whole name scope of an equation, its callers' scopes first."""
        return join_scopes(self.bodies[int(self.body[row])].scope, ir.scope_of(self.eqns[row]))

    def source(self, row: int) -> ir.Source:
        """The source line of an equation; its caller's where JAX recorded none of its own."""
        own = ir.source_of(self.eqns[row])
        return own if own.file else self.bodies[int(self.body[row])].source

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
                scope=self.scope(row),
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
        cls, jaxpr: Any, distinguish: Callable[[str], Hashable] = lambda scope: None
    ) -> Graph:
        """The graph of a jaxpr.

        Args:
            jaxpr: open or closed.
            distinguish: calls of one jaxpr under two scopes share their nodes
                when this gives the same value for both.
        """
        builder = _Builder(distinguish)
        builder.add(jaxpr, "", ir.Source())
        return builder.graph()


@functools.lru_cache(maxsize=65536)
def join_scopes(outer: str, inner: str) -> str:
    """Two name stacks as one."""
    return f"{outer}/{inner}" if outer and inner else outer or inner


class _Builder:
    def __init__(self, distinguish: Callable[[str], Hashable]) -> None:
        self.distinguish = distinguish
        self.index: dict[Any, int] = {}
        self.bodies: list[tuple[Any, str, ir.Source, int, int]] = []
        self.eqns: list[Any] = []
        self.body: list[int] = []
        self.children: dict[int, tuple[tuple[ir.Body, int], ...]] = {}
        self.calls: list[list[tuple[int, float]]] = []
        self.values: dict[tuple[Any, int], int] = {}
        self.producers: list[int] = []
        self.edges: list[tuple[int, int]] = []
        self.links: list[tuple[int, int]] = []

    def add(self, jaxpr: Any, scope: str, source: ir.Source) -> int:
        """The index of the body for `jaxpr` under `scope`, added where it is new."""
        key = (id(ir.open_jaxpr(jaxpr)), self.distinguish(scope))
        if key in self.index:
            return self.index[key]
        at = self.index[key] = len(self.bodies)
        opened = ir.open_jaxpr(jaxpr)
        start, stop = len(self.eqns), len(self.eqns) + len(opened.eqns)
        self.bodies.append((jaxpr, scope, source, start, stop))
        self.calls.append([])
        self.eqns.extend(opened.eqns)
        self.body.extend([at] * len(opened.eqns))
        for var in (*opened.constvars, *opened.invars):
            self._value(var, at, -1)
        for row, eqn in enumerate(opened.eqns, start):
            self._eqn(row, eqn, at)
        return at

    def _value(self, var: Any, body: int, producer: int) -> int:
        row = self.values.setdefault((var, body), len(self.values))
        if row == len(self.producers):
            self.producers.append(producer)
        return row

    def _eqn(self, row: int, eqn: Any, at: int) -> None:
        _, scope, source, _, _ = self.bodies[at]
        reads = [None if ir.is_literal(v) else self._value(v, at, -1) for v in eqn.invars]
        self.edges.extend((value, row) for value in reads if value is not None)
        makes = [self._value(v, at, row) for v in eqn.outvars]
        inner: list[tuple[ir.Body, int]] = []
        for body in ir.bodies(eqn):
            own = ir.source_of(eqn)
            inside = join_scopes(scope, ir.scope_of(eqn))
            child = self.add(body.jaxpr, inside, own if own.file else source)
            trips = NOMINAL_SIZE if body.trips is None else body.trips
            self.calls[child].append((at, float(_size((trips,)))))
            inner.append((body, child))
            self._link(body, child, reads, makes)
        if inner:
            self.children[row] = tuple(inner)

    def _link(self, body: ir.Body, child: int, reads: list[int | None], makes: list[int]) -> None:
        opened = ir.open_jaxpr(body.jaxpr)
        for var, operand in zip(opened.invars, body.operands, strict=True):
            outer = reads[operand]
            if outer is not None:
                self.links.append((outer, self._value(var, child, -1)))
        for atom, result in zip(opened.outvars, body.results, strict=False):
            if not ir.is_literal(atom):
                self.links.append((self._value(atom, child, -1), makes[result]))
        for invar, outvar in body.carry:
            atom = opened.outvars[outvar]
            if not ir.is_literal(atom):
                last, first = self._value(atom, child, -1), opened.invars[invar]
                self.links.append((last, self._value(first, child, -1)))

    def _total_calls(self) -> list[float]:
        totals: dict[int, float] = {0: 1.0}

        # callers first, wherever they were met: a body's first caller need not be its last
        def total(body: int) -> float:
            if body not in totals:
                totals[body] = sum(trips * total(at) for at, trips in self.calls[body])
            return totals[body]

        return [total(body) for body in range(len(self.bodies))]

    def graph(self) -> Graph:
        """The columns."""
        calls = self._total_calls()
        bodies = tuple(
            BodyNode(*body, calls=times) for body, times in zip(self.bodies, calls, strict=True)
        )
        names = tuple(eqn.primitive.name for eqn in self.eqns)
        body = np.asarray(self.body, np.int32)
        return Graph(
            bodies=bodies,
            eqns=tuple(self.eqns),
            primitives=names,
            kinds=np.asarray([_KINDS.index(op(name).kind) for name in names], np.int8),
            body=body,
            flops=np.asarray([flops(eqn) for eqn in self.eqns], np.float64),
            calls=np.asarray(calls, np.float64)[body],
            children=self.children,
            values=tuple(self.values),
            value_bytes=np.asarray([nbytes(var.aval) for var, _ in self.values], np.float64),
            sources=np.asarray([a for a, _ in self.edges], np.int32),
            targets=np.asarray([b for _, b in self.edges], np.int32),
            producers=np.asarray(self.producers, np.int32),
            links=np.asarray(self.links, np.int32).reshape(-1, 2),
        )


def _size(shape: tuple[Any, ...]) -> float:
    return math.prod((d if isinstance(d, int) else NOMINAL_SIZE for d in shape), start=1.0)


def nbytes(aval: Any) -> float:
    """The bytes of a value; 0 for tokens, keys and references."""
    itemsize = getattr(getattr(aval, "dtype", None), "itemsize", 0)
    return itemsize * _size(getattr(aval, "shape", ()))


def flops(eqn: Any) -> float:
    """Floating-point operations of one execution.

    2 M N K for a product, one per operand element for a reduction, one per
    result element for elementwise work, none for movement and bodies.
    """
    kind = op(eqn.primitive.name).kind
    out = _size(getattr(eqn.outvars[0].aval, "shape", ())) if eqn.outvars else 0.0
    if kind is OpKind.COMPUTE:
        return 2.0 * out * _contracted(eqn)
    if kind is OpKind.REDUCTION:
        return _size(getattr(eqn.invars[0].aval, "shape", ()))
    return out if kind is OpKind.ELEMENTWISE else 0.0


def _contracted(eqn: Any) -> float:
    lhs, rhs = (v.aval.shape for v in eqn.invars[:2])
    if eqn.primitive.name == "conv_general_dilated":
        # each output element sums over the kernel's elements of one output feature
        features = rhs[eqn.params["dimension_numbers"].rhs_spec[0]]
        return _size(rhs) / max(_size((features,)), 1.0)
    numbers = eqn.params.get("dimension_numbers")
    if numbers is None:
        numbers = eqn.params["ragged_dot_dimension_numbers"].dot_dimension_numbers
    return _size(tuple(lhs[d] for d in numbers[0][0]))
