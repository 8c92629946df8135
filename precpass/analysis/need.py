"""Which products are needed with the digits that float32 gives them, and by which reader.

A lowered product is off by about 2**-9 of its terms, which most readers do not mind: a network's
next layer, a loss, a gradient, a ranking. Some do. A whole number that is taken of the result is
another number, an angle of 100 is off by 0.2, a Cholesky factorization of a difference fails, and
a loop that ends on a small residual never ends.

What readers ask is handed back from each result to the operands of its equation, up to the products
(`analysis.backward`), by the columns of the table of primitives.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from precpass import jaxpr as ir
from precpass.analysis.activations import features
from precpass.analysis.backward import NOTHING, Asked, BackwardWalk, BodyAsks
from precpass.analysis.graph import Graph
from precpass.analysis.numbers import Numbers
from precpass.analysis.phases import Phases
from precpass.analysis.thresholds import Thresholds
from precpass.analysis.tolerances import Tolerances
from precpass.policy.primitives import COMPUTING, ROWS, Op, OpKind, named, op

__all__ = ["EXACT_NOWHERE", "ExactNeeds", "ExactProducts", "exact_needs"]


class Need(enum.IntEnum):
    """Which digits of a value its readers need; a member includes those before it."""

    NOTHING = 0
    """No more than a sum of rounded products has."""
    RETURNED = 1
    """It is returned as it is, so a whole number that is taken of it reaches the caller."""
    EXACT = 2
    """What float32 would have given, as far as its operands are so exact themselves."""
    FACTORED = 3
    """As EXACT; a difference, or a function of it, is factorized."""
    STRICT = 4
    """As EXACT, whatever its operands have lost: what is factorized must stay positive."""


@dataclasses.dataclass(frozen=True, eq=False)
class ExactProducts:
    """The products of one body whose results are needed exactly, at one class of its call sites.

    Attributes:
        why: equation row -> why, in words.
        inner: equation row -> the same for its bodies.
        around: why every product is, in words, because of a loop around the body; "" if none is.
    """

    why: Mapping[int, str]
    inner: Mapping[int, tuple[ExactProducts, ...]]
    around: str = ""

    def why_exact(self, row: int) -> str:
        """Why the result of a product, or of custom rules, is needed exactly, in words; or ""."""
        return self.around or self.why.get(row, "")

    def inside(self, row: int, at: int) -> ExactProducts:
        """The products of one of an equation's bodies."""
        if row in self.inner:
            return self.inner[row][at]
        return self if self.around else EXACT_NOWHERE


EXACT_NOWHERE = ExactProducts({}, {})


@dataclasses.dataclass(frozen=True, eq=False)
class ExactNeeds:
    """What is needed exactly in a program.

    Attributes:
        products: the products whose results are, in the root and, inside, in its bodies.
        values: the floating values that are at a call site, with their bodies.
        bodies: those in which everything is, because a loop around them ends on a tolerance.
    """

    products: ExactProducts = EXACT_NOWHERE
    values: frozenset[tuple[int, Any]] = frozenset()
    bodies: frozenset[int] = frozenset()


def exact_needs(graph: Graph, numbers: Numbers) -> ExactNeeds:
    """What the readers of a program's values need exactly.

    Args:
        graph: the program.
        numbers: its values that are one number.
    """
    if COMPUTING.isdisjoint(graph.primitives):
        return ExactNeeds()
    results = tuple(_of_result(v.aval) for v in ir.open_jaxpr(graph.root.jaxpr).outvars)
    thresholds = Thresholds(graph, numbers)
    tolerances = Tolerances(graph, thresholds)
    walk = _NeedWalk(graph, tolerances, thresholds, Phases(graph, numbers))
    products = _Collected(graph, tolerances.reasons).products(walk.body(0, results))
    loops = (child for row in tolerances.reasons for _, child in graph.children[row])
    bodies = frozenset[int]().union(*map(graph.inside, loops))
    values = ((at, v, asked) for at, asks in walk.found() for v, asked in asks.of.items())
    floats = ((at, v, asked) for at, v, asked in values if ir.precision_of(v.aval) is not None)
    exact = frozenset((at, v) for at, v, asked in floats if walk.is_exact(asked, [v]))
    return ExactNeeds(products, exact, bodies)


_ASKING = frozenset(
    (*named("reads_phase"), *named("factorizes"), *named("solves"), *named("reads_integers"))
    + ("exp", "sub", "eq", "ne", "eq_to", "ragged_dot_general", "while", "cond")
    + tuple(name for name, row in ROWS.items() if row.data is not None)
)
"""Primitives that ask for digits though nothing is asked of their results."""


class _NeedWalk(BackwardWalk[Asked]):
    """The walk that finds what is needed of each value."""

    def __init__(
        self, graph: Graph, tolerances: Tolerances, thresholds: Thresholds, phases: Phases
    ) -> None:
        decides = Asked(Need.EXACT, "decides which way the program goes")
        super().__init__(graph, _ASKING, NOTHING, decides)
        self._tolerances, self._thresholds, self._phases = tolerances, thresholds, phases

    @functools.cached_property
    def features(self) -> frozenset[Any]:
        """The program's features: few programs ask for them."""
        return features(self.graph)

    def is_exact(self, asked: Asked, made_of: Sequence[ir.Atom]) -> bool:
        """Whether what is made of values is needed exactly; of features only what is STRICT is."""
        if asked.level in (Need.EXACT, Need.FACTORED):
            return not any(v in self.features for v in made_of if not ir.is_literal(v))
        return asked.level == Need.STRICT

    def around(self, row: int, eqn: ir.Eqn, here: BodyAsks[Asked]) -> Mapping[int, Asked]:
        """A choice of a branch, and what the residual of a loop is made of when it starts."""
        if ir.has_rules(eqn):
            self._keep(row, eqn, eqn.invars, here)
        if row in self._tolerances.reasons:
            start = _exact(row, "starts a loop that ends on a tolerance")
            return dict.fromkeys(self._tolerances.starts[row], start)
        return super().around(row, eqn, here)

    def _keep(
        self, row: int, eqn: ir.Eqn, made_of: Sequence[ir.Atom], here: BodyAsks[Asked]
    ) -> None:
        """Keep a product, or custom rules, whose result is needed exactly."""
        asked = [here.of[v] for v in eqn.outvars if v in here.of and ir.is_inexact(v.aval)]
        if self.is_exact(max(asked, default=NOTHING), made_of):
            here.kept[row] = max(asked)

    def operands(
        self, row: int, eqn: ir.Eqn, asked: Asked, here: BodyAsks[Asked]
    ) -> Sequence[Asked]:
        """What an equation needs of its operands."""
        name, table, count = eqn.primitive.name, op(eqn.primitive.name), len(eqn.invars)
        if table.kind is OpKind.COMPUTE:
            self._keep(row, eqn, eqn.invars[:2], here)
            exact = asked._replace(level=min(asked.level, Need.EXACT))
            each = exact if self.is_exact(exact, eqn.invars[:2]) else NOTHING
            return [each] * 2 + [_exact(row, "says where groups begin")] * (count - 2)
        if name == "convert_element_type":
            return [self._cast(row, eqn, asked)]
        if table.rounds_to_integers:
            return [_exact(row, "becomes whole numbers") if asked.level else NOTHING]
        if name in ("sort", "top_k") and not ir.is_integer(eqn.invars[0].aval):
            return _sorted(row, eqn, [here.of.get(v, NOTHING) for v in eqn.outvars])
        if table.compares:
            return [self._compared(row, eqn, asked)] * 2
        reads_phase = table.reads_phase and not ir.is_integer(eqn.invars[0].aval)
        if reads_phase or (name == "exp" and ir.has_complex(eqn)):
            return [_exact(row, f"is a phase that {name} reads")]
        if name == "sub" and self._phases.has(row):
            phase = _exact(row, "is reduced to a phase")
            return [max(own, phase) for own in self._handed_on(row, eqn, asked)]
        if table.factorizes:
            return [Asked(Need.FACTORED, f"is factorized by {name}", row)] * count
        if table.solves:
            return [_exact(row, "is an operand of a linear solve")] * count
        return self._handed_on(row, eqn, asked)

    def _handed_on(self, row: int, eqn: ir.Eqn, asked: Asked) -> list[Asked]:
        """What an equation needs of its operands only because its results are needed."""
        name, table, invars = eqn.primitive.name, op(eqn.primitive.name), eqn.invars
        data = _of_data(name, table, asked)
        is_integer = [ir.is_integer(v.aval) for v in invars]
        if table.data is None and not any(is_integer) and name != "select_n":
            return [data] * len(invars)
        index = _exact(row, "is used as an index")
        integers = _exact(row, f"is read by {name}") if table.reads_integers else asked
        places = range(name == "select_n", len(invars)) if table.data is None else table.data
        of_data = [integers if whole else data for whole in is_integer]
        of_others = [index if whole else NOTHING for whole in is_integer]
        return [of_data[i] if i in places else of_others[i] for i in range(len(invars))]

    def _cast(self, row: int, eqn: ir.Eqn, asked: Asked) -> Asked:
        before, after = eqn.invars[0].aval, eqn.outvars[0].aval
        if ir.is_inexact(before) and not ir.is_inexact(after):
            is_rounded = asked.level >= Need.EXACT and after.dtype != np.bool_
            return _exact(row, "becomes whole numbers") if is_rounded else NOTHING
        # What the user rounds to 16 bits is not needed with more digits.
        precision = ir.precision_of(after)
        return NOTHING if precision is not None and precision.is_low else asked

    def _compared(self, row: int, eqn: ir.Eqn, asked: Asked) -> Asked:
        left, right = eqn.invars
        tests_equality = op(eqn.primitive.name).tests_equality
        if left.aval.dtype == np.bool_:
            return asked
        if ir.is_integer(left.aval):
            return _exact(row, "is compared as a whole number") if tests_equality else asked
        of_zero = any(ir.is_literal(v) and _is_zero_or_infinite(v.val) for v in (left, right))
        if left is right or of_zero or asked.level < Need.EXACT:
            return NOTHING
        if tests_equality:
            return _exact(row, "is tested for equality")
        is_test = self._thresholds.has_tolerance(row, in_loop=False)
        return _exact(row, "is compared with a tolerance") if is_test else NOTHING


class _Collected:
    """What the walk found, as far as it concerns products; bodies that agree in it are one."""

    def __init__(self, graph: Graph, loops: Mapping[int, str]) -> None:
        self._graph = graph
        self._in_loops = {row: ExactProducts({}, {}, why) for row, why in loops.items()}
        self._shared: dict[Any, ExactProducts] = {}
        self._known: dict[BodyAsks[Asked], ExactProducts] = {}

    def products(self, asks: BodyAsks[Asked]) -> ExactProducts:
        """The products of a body that are needed exactly."""
        if asks not in self._known:
            self._known[asks] = self._found(asks)
        return self._known[asks]

    def _found(self, asks: BodyAsks[Asked]) -> ExactProducts:
        inner: dict[int, tuple[ExactProducts, ...]] = {}
        for row, inside in asks.inner.items():
            bodies = tuple(self._in_loops.get(row) or self.products(body) for body in inside)
            if any(body is not EXACT_NOWHERE for body in bodies):
                inner[row] = bodies
        if not (asks.kept or inner):
            return EXACT_NOWHERE
        why = {row: self._in_words(asked) for row, asked in asks.kept.items()}
        content = tuple(why.items()), tuple((row, *map(id, b)) for row, b in inner.items())
        return self._shared.setdefault(content, ExactProducts(why, inner))

    def _in_words(self, asked: Asked) -> str:
        place = self._graph.source(asked.row).place if asked.row >= 0 else ""
        return f"its result {asked.reader}" + (f" at {place}" if place else "")


def _of_data(name: str, table: Op, asked: Asked) -> Asked:
    """What a primitive needs of the operands that hold its data, but for integers."""
    if table.hands_on_elements or table.kind is OpKind.DATA_MOVEMENT:
        return asked
    if asked.level < Need.EXACT:
        return NOTHING
    if name == "sub" and asked.level == Need.FACTORED:
        return asked._replace(level=Need.STRICT)
    if table.hands_on_digits or table.no_low_kernel:
        return asked
    is_function = asked.level >= Need.FACTORED and table.kind is OpKind.ELEMENTWISE
    return asked._replace(level=Need.STRICT) if is_function else NOTHING


def _sorted(row: int, eqn: ir.Eqn, of_results: Sequence[Asked]) -> list[Asked]:
    """What is needed of the operands of a sort: what their numbers are needed for."""
    index, pairs = _exact(row, "is used as an index"), zip(eqn.invars, of_results, strict=False)
    return [index if ir.is_integer(v.aval) else own for v, own in pairs]


def _exact(row: int, reader: str) -> Asked:
    return Asked(Need.EXACT, reader, row)


def _of_result(aval: Any) -> Asked:
    """What the caller of a program needs of a result."""
    dtype = getattr(aval, "dtype", None)
    if dtype is None or ir.is_inexact(aval):
        return Asked(Need.RETURNED)
    # Whole numbers of 8 bits are quantised values, and no positions.
    is_number = dtype == np.bool_ or (ir.is_integer(aval) and dtype.itemsize > 1)
    return Asked(Need.EXACT, "is returned as whole numbers") if is_number else NOTHING


def _is_zero_or_infinite(value: Any) -> bool:
    return np.ndim(value) == 0 and (value == 0 or not np.isfinite(value))
