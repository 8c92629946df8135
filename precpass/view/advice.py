"""Advice from a program's graph: how to make it faster, or to have more of it in 16 bits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from precpass import jaxpr as ir
from precpass.analysis.graph import BORDER, Graph
from precpass.analysis.sizes import flops, nbytes, product_sizes
from precpass.plan.eqn_info import Site
from precpass.plan.plan import Action, Decision
from precpass.policy.precision import Precision
from precpass.policy.primitives import OpKind, op

__all__ = ["CACHE_LINE", "Advice", "advice"]

CACHE_LINE = 64
"""The bytes of a cache line, which memory moves whole."""

_TILE = 8
"""Tensor cores take 16-bit products in tiles of 8: NVIDIA, "Matrix Multiplication Background
User's Guide", section 3 (dimensions that are multiples of 16 bytes)."""


class Advice(NamedTuple):
    """What to do about a line of your code, and why.

    Attributes:
        source: the line.
        text: the advice.
        weight: the FLOPs of the matrix product that it is about, or the bytes of another value.
        site: where you find the equation: its module, and the line that calls it.
    """

    source: ir.Source
    text: str
    weight: float = 0.0
    site: Site = Site()


def advice(
    graph: Graph, decided: dict[int, Decision], sites: dict[int, Site], *, has_tiles: bool
) -> list[tuple[Advice, int]]:
    """All advice that the graph supports, each with the number of equations that it concerns.

    Args:
        graph: that of the original program.
        decided: the decision for each equation, by the equation's id.
        sites: where you find each equation, by its id.
        has_tiles: whether the device multiplies tiles, as a GPU or TPU does and a CPU does not.
    """

    def placed(found: Iterable[tuple[int, str, float]]) -> list[Advice]:
        eqns = graph.eqns
        return [
            Advice(graph.source(row), text, weight, sites.get(id(eqns[row]), Site()))
            for row, text, weight in found
        ]

    constants = placed(_constants(graph))
    lines = {item.source for item in constants}
    # If a constant widens a value that a cast had narrowed, the constant is the cause.
    round_trips = [item for item in placed(_round_trips(graph)) if item.source not in lines]
    odd = placed(_odd_sizes(graph, decided)) if has_tiles else []
    return list(Counter([*odd, *constants, *round_trips]).items())


_Found = tuple[int, str, float]
"""The row of an equation, the advice, and its weight."""


def _odd_sizes(graph: Graph, decided: dict[int, Decision]) -> Iterator[_Found]:
    for row, eqn in enumerate(graph.eqns):
        decision = decided.get(id(eqn))
        if decision is None or (decision.kind, decision.action) != (OpKind.COMPUTE, Action.LOWER):
            continue
        odd = [n for n in product_sizes(eqn) if isinstance(n, int) and n % _TILE and n > 1]
        if odd:
            padded = ", ".join(f"{n} to {n + -n % _TILE}" for n in dict.fromkeys(odd))
            text = (
                f"pad {padded} once, where you make the arrays: {eqn.primitive.name} has "
                f"dimensions that are not multiples of {_TILE}, which a GPU's tensor cores pad "
                "in each call"
            )
            yield row, text, flops(eqn)


def _casts(graph: Graph) -> Iterator[tuple[int, Precision, Precision, list[Any]]]:
    """For each cast between floating formats its row, both formats, and its readers."""
    for row, eqn in enumerate(graph.eqns):
        if formats := ir.cast_formats(eqn):
            readers = graph.readers(int(graph.body[row])).get(eqn.outvars[0], ())
            yield row, *formats, [graph.eqns[reader] for reader in readers if reader != BORDER]


def _constants(graph: Graph) -> Iterator[_Found]:
    """Constants of a wider format than the other operands of their equations."""
    for row, before, after, readers in _casts(graph):
        if not before.is_narrower_than(after):
            continue
        for reader in readers:
            constants = [v for v in reader.invars if ir.is_literal(v) and ir.precision_of(v.aval)]
            if constants and op(reader.primitive.name).kind is OpKind.ELEMENTWISE:
                text = (
                    f"write the constant {constants[0].val} as a Python number or in {before}: a "
                    f"{before} value becomes {after} beside the constant {constants[0].val}, and "
                    "so does everything computed from it, unless you wrote that cast yourself"
                )
                yield row, text, nbytes(graph.eqns[row].outvars[0].aval)


def _round_trips(graph: Graph) -> Iterator[_Found]:
    """Values that the user narrows and widens again."""
    for row, before, low, readers in _casts(graph):
        widened = (low, before) in map(ir.cast_formats, readers)
        if low.is_narrower_than(before) and widened:
            text = (
                f"leave out both casts unless you want the rounding: a value goes from {before} "
                f"to {low} and back"
            )
            yield row, text, nbytes(graph.eqns[row].outvars[0].aval)
