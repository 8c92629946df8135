"""Transpose elimination: exchanging a product's operands instead of transposing its result.

JAX writes the gradient of every weight as a transpose of a product. XLA:CPU folds that transpose
into the product, whose kernels are then slow (measured: by a factor of 2 in float32, and of 16 to
22 in bfloat16 on jax 0.12). The product of the exchanged operands gives the wanted order of
dimensions without a transpose, with the same arithmetic in any precision.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from precpass import jaxpr as ir
from precpass.analysis.equations import contracts
from precpass.analysis.graph import BORDER, BodyNode
from precpass.plan import reasons
from precpass.plan.plan import Action, Decision
from precpass.plan.reasons import DecidedBy
from precpass.policy.primitives import OpKind

__all__ = ["eliminate_transposes"]

Readers = Mapping[Any, Sequence[int]]


def eliminate_transposes(
    body: BodyNode, decisions: list[Decision], readers: Callable[[], Readers]
) -> list[Decision]:
    """The decisions for a body, with needless transposes behind products eliminated.

    Args:
        body: the body.
        decisions: one per equation.
        readers: gives for each variable the rows that read it (`Graph.readers`).
    """
    opened = ir.open_jaxpr(body.jaxpr)
    eqns = opened.eqns
    products = [row for row, of in enumerate(decisions) if of.kind is OpKind.COMPUTE]
    if not products or not ir.transposes(opened):
        return decisions
    new = list(decisions)
    for row in products:
        eqn, decision = eqns[row], decisions[row]
        if not _is_free(decision):
            continue
        exchanged = ir.exchanged_order(eqn)
        if exchanged is None or not contracts(eqn) or ir.precision_of(eqn.outvars[0].aval) is None:
            continue
        order, chain = _chain(row, eqns, body.start, decisions, readers(), exchanged)
        exchanges = order == exchanged and chain
        if exchanges:
            new[row] = _with_exchanged_operands(decision)
        for link in chain:
            transposes = ir.permutation(eqns[link]) is not None
            why = (reasons.EXCHANGED if exchanges else reasons.UNDONE)()
            new[link] = _dropped(decisions[link], why if transposes else None)
    return new


def _commutes(eqn: ir.Eqn) -> bool:
    """Whether an equation may stand in the chain between a product and the last transpose."""
    return ir.permutation(eqn) is not None or ir.is_plain_cast(eqn)


def _is_free(decision: Decision) -> bool:
    """Whether an equation may change: the pass, a keep region or the user may have fixed it."""
    if decision.action is Action.KEEP:
        asked_so = decision.decided_by in (DecidedBy.OWN_POLICY, DecidedBy.KEEP)
        return not (asked_so or decision.in_float64_span)
    changes = decision.action in (Action.LOWER, Action.MULTIPLY, Action.DROP)
    return changes and not decision.in_float64_span


def _chain(
    product: int,
    eqns: Sequence[ir.Eqn],
    start: int,
    decisions: Sequence[Decision],
    readers: Readers,
    exchanged: tuple[int, ...],
) -> tuple[tuple[int, ...], list[int]]:
    """The order that the transposes behind a product give its result, and their rows.

    Nothing but these transposes, and casts between them, reads the result. The chain ends with the
    last transpose after which the order is that of the product or of its exchanged operands.
    """
    unchanged = tuple(range(len(exchanged)))
    order, links = unchanged, list[int]()
    chain: tuple[tuple[int, ...], list[int]] = (unchanged, [])
    link = product
    while True:
        (reader, *others) = readers.get(eqns[link].outvars[0], (BORDER,))
        if others or reader == BORDER:
            return chain
        link = reader - start
        if not (_commutes(eqns[link]) and _is_free(decisions[link])):
            return chain
        links.append(link)
        if (permutation := ir.permutation(eqns[link])) is not None:
            order = tuple(order[i] for i in permutation)
            if order in (unchanged, exchanged):
                chain = order, list(links)


# layers repeat what is decided, and each is one object
@functools.lru_cache(maxsize=4096)
def _with_exchanged_operands(decision: Decision) -> Decision:
    return dataclasses.replace(decision, product=decision.product._replace(exchanged=True))


@functools.lru_cache(maxsize=4096)
def _dropped(decision: Decision, why: reasons.Reason | None) -> Decision:
    """The decision for an equation between a product and the last transpose behind it.

    A transpose is dropped for the reason `why`. For a cast `why` is None and its own reason stays:
    the rewriter makes the cast again, of a value whose dimensions have another order.
    """
    reason = decision.reason if why is None else why
    return dataclasses.replace(decision, action=Action.DROP, reason=reason)
