"""`Query`: everything that the decision about one equation may depend on, except the policy.

A program repeats itself: the layers of a model ask the same query, which is answered once. `decide`
sees nothing but the query and the policy, so that no two equations that differ in anything that
matters can share an answer.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from precpass import jaxpr as ir
from precpass.analysis.equations import is_matrix_product, spreads
from precpass.analysis.graph import BORDER
from precpass.analysis.need import ExactProducts
from precpass.analysis.propagate import ValueRanges
from precpass.analysis.ranges import ValueRange
from precpass.planner.requests import PolicyRequests, Request
from precpass.policy.precision import BY_DTYPE, PARTS, Precision
from precpass.policy.primitives import BOUNDARY, COMPUTING, Op, OpKind, op
from precpass.policy.scopes import is_backward, is_fixed, join_scopes

__all__ = ["EqnSite", "Queries", "Query", "Traits"]

Stored = Mapping[Any, Precision | None]
"""Maps a variable to the format that it is stored in, if that is not its own dtype."""


@dataclasses.dataclass(frozen=True, eq=False)
class EqnSite:
    """Where an equation stands and what the policy asks for there. Equal places are one object.

    Attributes:
        request: what the policy asks for; None if it is not asked, because the equation is in a
            function with a policy of its own, is BOUNDARY, or has no floating-point values.
        is_fixed: whether it belongs to a function with a policy of its own.
        in_float64: whether it stands in a float64 region, if it is BOUNDARY or on complex values.
        decides_loop: whether it computes a loop's predicate.
        in_sampler: whether it belongs to one of JAX's samplers.
    """

    request: Request | None
    is_fixed: bool
    in_float64: bool
    decides_loop: bool
    in_sampler: bool


place = functools.lru_cache(maxsize=4096)(EqnSite)


@dataclasses.dataclass(frozen=True, eq=False)
class Traits:
    """Properties that few equations have. Equal traits are one object.

    Attributes:
        row: the primitive's row in the table of primitives.
        user_order: the precision that the user gave a product, in words.
        sums_nothing: whether it is a product that is elementwise work, and perhaps a reduction.
        spreads: whether one element of an operand reaches many results.
        holds_terms: whether each device holds one term of a sum that it reads or makes.
        is_unchecked: whether it reads a constant whose elements cannot be read.
        applies_function: whether it applies a function of the user's in place.
        has_effects: whether it has effects.
        readers_round_to: the format that all of its readers cast its results to, if they do.
        undoes_cast_from: if it is a cast that undoes the one before it, whose result nothing else
            reads, the low format that the value had before both.
        why_boundary: why a BOUNDARY equation keeps its dtypes; "" if no reason is recorded.
        is_float64_span: whether it is a float64 region that an earlier rewrite of the pass made.
        serves_product: whether an earlier rewrite of the pass made it to serve a lowered product.
    """

    row: Op
    user_order: str = ""
    sums_nothing: bool = False
    spreads: bool = False
    holds_terms: bool = False
    is_unchecked: bool = False
    applies_function: bool = False
    has_effects: bool = False
    readers_round_to: Precision | None = None
    undoes_cast_from: Precision | None = None
    why_boundary: str = ""
    is_float64_span: bool = False
    serves_product: bool = False


traits = functools.lru_cache(maxsize=4096)(Traits)


class Query(NamedTuple):
    """Everything by which decisions about two equations can differ under one policy.

    Attributes:
        primitive: its name.
        operands: the number of its operands.
        dtypes: the dtypes of its operands and then of its results; None for a value without one.
        ranges: the range of each of these values; None or `ANY` if nothing is known of it.
        stored: for each operand the format that it is stored in if that is not its own; () if every
            operand is stored in its own.
        accumulates: whether a loop accumulates through it.
        place: where it stands.
        traits: its uncommon properties.
        need: why its result is needed exactly, in words; "" if it is not.
    """

    primitive: str
    operands: int
    dtypes: tuple[np.dtype[Any] | None, ...]
    ranges: tuple[ValueRange | None, ...]
    stored: tuple[Precision | None, ...]
    accumulates: bool
    place: EqnSite
    traits: Traits
    need: str = ""

    @property
    def row(self) -> Op:
        """The primitive's row in the table of primitives."""
        return self.traits.row

    @property
    def results(self) -> tuple[Precision | None, ...]:
        """The formats of its results."""
        return tuple(map(BY_DTYPE.get, self.dtypes[self.operands :]))

    @property
    def formats(self) -> set[Precision]:
        """The floating formats of all that it reads and makes."""
        return {p for dtype in self.dtypes if (p := BY_DTYPE.get(dtype))}

    @property
    def widest(self) -> str:
        """The name of the dtype in which it runs if it is not lowered: float64 or float32."""
        return "float64" if Precision.F64 in self.formats else "float32"

    @property
    def has_complex(self) -> bool:
        """Whether it reads or makes complex values."""
        return any(d is not None and jnp.issubdtype(d, jnp.complexfloating) for d in self.dtypes)

    @property
    def parts(self) -> set[Precision]:
        """The precisions of all floating and complex values that it reads and makes."""
        return {p for dtype in self.dtypes if (p := PARTS.get(dtype))}

    def stored_of_floats(self) -> list[Precision | None]:
        """The formats that its floating operands are stored in, None for their own."""
        stored = self.stored or (None,) * self.operands
        pairs = zip(stored, self.dtypes, strict=False)
        return [format_ for format_, dtype in pairs if dtype in BY_DTYPE]


class Queries:
    """The queries about the equations of one body at one class of call sites.

    Args:
        facts: what is known of the body's values there.
        exact: the body's products whose results are needed exactly there.
        requests: what the policy asks of single equations.
        scope: the name scopes around the program.
        decides_loop: whether the body computes a loop's predicate.
    """

    def __init__(
        self,
        facts: ValueRanges,
        exact: ExactProducts,
        requests: PolicyRequests,
        scope: str,
        *,
        decides_loop: bool,
    ) -> None:
        self._facts = facts
        self._exact = exact
        self._requests = requests
        self._scope = scope
        self._decides_loop = decides_loop
        casts = ir.casts(requests.graph.bodies[facts.body].jaxpr)
        self._cast = frozenset(e.invars[0] for e in casts if not ir.is_literal(e.invars[0]))
        self._widenings: dict[Any, Any] = dict(filter(None, map(ir.widening, casts)))
        self._scopes: dict[int, str] = {}
        self._places: dict[tuple[str, str], EqnSite] = {}
        self._exact_factors = {
            (self._unmoved(v), requests.graph.source(row)): why
            for row, why in exact.why.items()
            for v in requests.graph.eqns[row].invars[:2]
            if not ir.is_literal(v)
        }

    def query_of(self, row: int, eqn: ir.Eqn, stored: Stored, *, accumulates: bool) -> Query:
        """The query about one equation.

        Args:
            row: in the graph.
            eqn: the equation.
            stored: of the values before it.
            accumulates: whether a loop accumulates through it.
        """
        name, invars = eqn.primitive.name, eqn.invars
        # Every equation comes here, so this makes no Python call for each value.
        fact_of, get, is_literal = self._facts.range_of, self._facts.values.get, ir.is_literal
        atoms = (*invars, *eqn.outvars)
        try:
            dtypes = tuple([v.aval.dtype for v in atoms])
        except AttributeError:  # a token
            dtypes = tuple([getattr(v.aval, "dtype", None) for v in atoms])
        ranges = tuple([fact_of(v) if is_literal(v) else get(v) for v in atoms])
        stored_formats = (
            tuple([None if is_literal(v) else stored.get(v) for v in invars]) if stored else ()
        )
        here, traits = self._place(row, eqn, dtypes), self._traits(eqn)
        # This is `Query(...)` without the Python call of its constructor.
        need = self._why_exact(row, eqn) if name in COMPUTING else ""
        fields = name, len(invars), dtypes, ranges, stored_formats, accumulates, here, traits, need
        return tuple.__new__(Query, fields)

    def _why_exact(self, row: int, eqn: ir.Eqn) -> str:
        """Why a product is needed exactly, in words; "" if it is not.

        So are the derivatives of such a product. JAX makes them float32 too if it differentiates a
        planned program.
        """
        graph, why = self._requests.graph, self._exact.why_exact(row)
        if why or not self._exact_factors or not is_backward(graph.scope(row)):
            return why
        line = graph.source(row)
        factors = ((self._unmoved(v), line) for v in eqn.invars[:2] if not ir.is_literal(v))
        of_forward = next(filter(None, map(self._exact_factors.get, factors)), "")
        return of_forward and f"in the forward pass {of_forward}"

    def _unmoved(self, var: ir.Var) -> ir.Var:
        """The variable that a transposed or reshaped one was made of."""
        while (maker := self._requests.graph.maker(self._facts.body, var)) is not None:
            if len(maker.invars) != 1 or op(maker.primitive.name).kind is not OpKind.DATA_MOVEMENT:
                break
            if ir.is_literal(maker.invars[0]):
                break
            var = maker.invars[0]
        return var

    # ------------------------------------------------------------ where it stands

    def _place(self, row: int, eqn: ir.Eqn, dtypes: tuple[Any, ...]) -> EqnSite:
        if self._requests.tells_equations_apart:
            return self._new_place(row, eqn, dtypes)
        # Equations that were bound under one name stack share one object for it.
        stack, name = id(eqn.source_info.name_stack), eqn.primitive.name
        scope = self._scopes.get(stack)
        if scope is None:
            scope = self._requests.graph.scope_in(self._facts.body, eqn)
            self._scopes[stack] = scope
        known = self._places.get((scope, name))
        if known is None:
            known = self._places[scope, name] = self._new_place(row, eqn, dtypes)
        return known

    def _new_place(self, row: int, eqn: ir.Eqn, dtypes: tuple[Any, ...]) -> EqnSite:
        scope, table = self._scope_of(eqn), op(eqn.primitive.name)
        around = self._decides_loop, self._facts.sampler
        if is_fixed(scope):
            return place(None, True, False, *around)
        # a rule that only matches what no precision concerns is reported as one without a match
        tells = self._requests.tells_equations_apart
        if tells and not any(dtype in BY_DTYPE for dtype in dtypes):
            wide = ir.has_complex(eqn) and self._requests.in_float64(row, scope)
            return place(None, False, wide, *around)
        if table.kind is OpKind.BOUNDARY:
            return place(None, False, self._requests.in_float64(row, scope), *around)
        if tells and ir.applies_function(eqn):
            return place(None, False, False, *around)
        return place(self._requests.request(row, table, scope), False, False, *around)

    def _scope_of(self, eqn: ir.Eqn) -> str:
        return join_scopes(self._scope, self._requests.graph.scope_in(self._facts.body, eqn))

    # ------------------------------------------------------------ what few equations have

    def _traits(self, eqn: ir.Eqn) -> Traits:
        name, facts = eqn.primitive.name, self._facts
        is_cast_by_reader = self._cast and not self._cast.isdisjoint(eqn.outvars)
        plain = _plain_traits(name)
        is_plain = not (is_cast_by_reader or facts.unchecked or eqn.effects)
        is_plain = is_plain and ir.user_order(eqn) is None and not ir.holds_terms(eqn)
        if plain is not None and is_plain:
            return plain
        row = op(name)
        is_boundary = row.kind is OpKind.BOUNDARY
        return traits(
            row,
            ir.user_order(eqn) or "",
            row.kind is OpKind.COMPUTE and not is_matrix_product(eqn),
            spreads(eqn),
            ir.holds_terms(eqn),
            any(not ir.is_literal(v) and v in facts.unchecked for v in eqn.invars),
            ir.applies_function(eqn),
            ir.effects_of(eqn),
            self._readers_round_to(eqn) if is_cast_by_reader else None,
            self._undoes_cast_from(eqn) if name == "convert_element_type" else None,
            (ir.why_opaque(eqn) or BOUNDARY.get(name, "")) if is_boundary else "",
            is_boundary and ir.is_float64(eqn),
            is_boundary and (ir.is_identity_of_first_operand(eqn) or ir.is_detach(eqn)),
        )

    def _readers_round_to(self, eqn: ir.Eqn) -> Precision | None:
        graph = self._requests.graph
        readers_of = graph.readers(self._facts.body)
        rows = [row for v in eqn.outvars for row in readers_of.get(v, ())]
        if any(r == BORDER or graph.primitives[r] != "convert_element_type" for r in rows):
            return None
        readers = [graph.eqns[row] for row in rows]
        formats = {ir.precision_of(reader.outvars[0].aval) for reader in readers}
        return formats.pop() if len(formats) == 1 else None

    def _undoes_cast_from(self, eqn: ir.Eqn) -> Precision | None:
        body, operand = self._facts.body, eqn.invars[0]
        if ir.is_literal(operand) or operand not in self._widenings:
            return None
        # If there were several readers, their cotangents would be added up in the low format.
        is_read_alone = len(self._requests.graph.readers(body).get(operand, ())) == 1
        return ir.precision_of(self._widenings[operand].aval) if is_read_alone else None


@functools.cache
def _plain_traits(name: str) -> Traits | None:
    """The traits that all equations of a primitive share; None if its equations differ in them."""
    named = ("convert_element_type", "scatter", "reshard")
    if name in named or op(name).kind in (OpKind.COMPUTE, OpKind.BOUNDARY):
        return None
    return traits(op(name), spreads=op(name).spreads)
