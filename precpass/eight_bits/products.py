"""Which of the products that a policy asks for in 8 bits have a form for that, and which form."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

from precpass import jaxpr as ir
from precpass.analysis.equations import handed_on_operand
from precpass.analysis.graph import Graph
from precpass.analysis.sizes import product_sizes
from precpass.backends.backend import Backend
from precpass.devices.peaks import peaks_of_kind
from precpass.plan import reasons
from precpass.plan.plan import Decision
from precpass.plan.reasons import DecidedBy
from precpass.policy.policy import PrecisionPolicy
from precpass.policy.precision import Precision
from precpass.policy.scopes import is_backward, is_differentiated

__all__ = ["ScaledProducts", "is_derivative", "why_not_scaled"]

TILE = 16
"""The dimensions of a product in 8 bits are multiples of this, as cublasLt demands of float8
operands in bytes (NVIDIA, cuBLAS documentation, "cublasLtMatmul": 16-byte alignment)."""
_LARGEST_SUM = 2**31 // 127**2
"""So many products of two numbers of magnitude 127 have a sum in int32."""
_MARKS = ("convert_element_type", "pvary", "pcast")
"""Casts, and what marks for a `shard_map` that a value may differ between shards."""


def why_not_scaled(eqn: ir.Eqn, precision: Precision, *, in_tiles: bool) -> str:
    """Why an equation cannot be evaluated as a scaled product, in words; "" if it can.

    Args:
        eqn: a product.
        precision: of 8 bits.
        in_tiles: whether the product is to have the form that devices are fast in, because no user
            orders 8 bits for it.
    """
    numbers = ir.dot_numbers(eqn)
    if numbers is None:
        return "it is not a dot"
    (summed, _), (batch, _) = numbers
    if any(isinstance(n, int) and n == 0 for v in eqn.invars for n in v.aval.shape):
        return "it has an empty dimension"
    terms = [eqn.invars[0].aval.shape[d] for d in summed]
    if not all(isinstance(n, int) for n in terms):
        return "the number of its terms is unknown"
    if precision is Precision.INT8 and math.prod(terms) > _LARGEST_SUM:
        return "int32 cannot hold its sums"
    if in_tiles and batch:
        return "it has batch dimensions"
    known = (n for n in product_sizes(eqn) if isinstance(n, int))
    odd = next((n for n in known if n % TILE), 0) if in_tiles else 0
    return f"{odd} is not a multiple of {TILE}" if odd else ""


class ScaledProducts:
    """The products of a program that multiply in 8 bits.

    Args:
        graph: the program.
        policy: what to aim for.
        backend: the compiler that the plan is for.
        device_kind: JAX's name of the device.
    """

    def __init__(
        self, graph: Graph, policy: PrecisionPolicy, backend: Backend, device_kind: str
    ) -> None:
        self._graph = graph
        self._backend = backend
        self._asked = policy.weight_gradients
        self._peaks = peaks_of_kind(backend.name, device_kind)
        self._sums_last = self._peaks is not None and self._peaks.sums_last

    def planned(self, eqn: ir.Eqn, body: int, decision: Decision) -> Decision:
        """The decision for a product that is to multiply in 8 bits, or why it does not."""
        scaled = decision.product.scaled
        assert scaled is not None
        is_by_size = decision.decided_by is DecidedBy.PRESET
        if against := self._why_not(eqn, body, scaled, is_by_size=is_by_size):
            why = decision.reason.plus(reasons.NOT_SCALED, scaled, against)
            form = decision.product._replace(scaled=None, not_scaled=scaled)
            return dataclasses.replace(decision, product=form, reason=why)
        if self._is_emulated(scaled):
            device = self._peaks or self._backend.name.upper()
            why = decision.reason.plus(reasons.RUNS_AS, scaled, device, "an emulation of it")
            decision = dataclasses.replace(decision, reason=why)
        form = decision.product._replace(
            scaled_cotangents=self._scaled_cotangents(body, eqn, scaled, is_by_size),
            summed_last=self._sums_last and not scaled.is_forward_only,
        )
        if form.largest != (None, None):
            form = form._replace(largest=self._known(eqn, body, form.largest))
        return dataclasses.replace(decision, product=form)

    def _why_not(self, eqn: ir.Eqn, body: int, scaled: Precision, *, is_by_size: bool) -> str:
        against = why_not_scaled(eqn, scaled, in_tiles=is_by_size)
        if against or not is_derivative(self._graph.scope_in(body, eqn)):
            return against
        if scaled.is_forward_only:
            return "derivatives are in bf16"
        if not self._has_low_gradients(is_by_size) or any(self._are_given(body, eqn)):
            return ""
        hint = ': to lower it, add with_weight_gradients("f8e4m3")' if self._asked is None else ""
        return f"it is the gradient of a weight{hint}"

    def _known(self, eqn: ir.Eqn, body: int, largest: Sequence[float | None]) -> tuple[Any, Any]:
        """The magnitudes of a rule that hold for a product's operands.

        A rule names a line. The derivatives of the line have other operands, and so have several
        layers other weights, which keep scales of their own.
        """
        if is_differentiated(self._graph.scope_in(body, eqn)):
            return None, None
        each = [list(_origin(self._graph, body, v, states=False)) for v in eqn.invars]
        given = [None in makers for makers in each]
        ready = [any(eqn and ir.dequantized_from(eqn) for eqn in makers) for makers in each]
        lhs, rhs = (
            most if not given[side] or ready[1 - side] else None
            for side, most in enumerate(largest)
        )
        return lhs, rhs

    def _is_emulated(self, scaled: Precision) -> bool:
        """Whether XLA widens a scaled product on the device, as far as that is known."""
        if self._peaks is not None:
            return self._peaks.flops(str(scaled)) is None
        return self._backend.emulates_float8 and scaled is not Precision.INT8

    def _are_given(self, body: int, eqn: ir.Eqn) -> tuple[bool, bool]:
        lhs, rhs = (is_given(self._graph, body, v) for v in eqn.invars)
        return lhs, rhs

    def _has_low_gradients(self, is_by_size: bool) -> bool:
        """Whether the gradients of weights have 16 bits where other derivatives have 8.

        Units that take only summed dimensions last need activations and cotangents in a second
        order for them.
        """
        if self._asked is None:
            return self._sums_last and is_by_size
        return self._asked is Precision.BF16

    def _scaled_cotangents(
        self, body: int, eqn: ir.Eqn, scaled: Precision, is_by_size: bool
    ) -> tuple[bool, bool]:
        """For each operand of a scaled product, whether its cotangent is one of 8 bits."""
        if scaled.is_forward_only:
            return False, False
        if not self._has_low_gradients(is_by_size):
            return True, True
        # The cotangent of one operand is a product of the other one.
        lhs, rhs = self._are_given(body, eqn)
        return rhs, lhs


def is_derivative(scope: str) -> bool:
    """Whether an equation differentiates, instead of computing a value, perhaps once more."""
    return is_backward(scope) and "rematted_computation" not in scope


def is_given(graph: Graph, body: int, atom: ir.Atom) -> bool:
    """Whether a value is an argument or a constant of the program, moved or cast at the most.

    A weight is. So a product of a backward pass that reads such a value makes the gradient of data,
    and any other product there the gradient of a weight.

    Args:
        graph: the program.
        body: the index of the value's body.
        atom: the value. A loop's state counts as what it is at first.
    """
    return None in _origin(graph, body, atom, states=True)


def _origin(graph: Graph, body: int, atom: ir.Atom, *, states: bool) -> Iterator[ir.Eqn | None]:
    """The equations that move or cast a value on its way, and None if it is given to the program.

    A loop's state counts as what it is at first, if `states` is true, or else as made by the loop.
    """
    while not ir.is_literal(atom):
        if (maker := graph.maker(body, atom)) is not None:
            is_same = maker.primitive.name in _MARKS or ir.dequantized_from(maker)
            if not is_same and handed_on_operand(maker) is None:
                return
            yield maker
            atom = maker.invars[0]
            continue
        first_call = next((row for row, _ in graph.callers[body]), None)
        outside = graph.outside(body, atom, first_call)
        if outside is None:
            yield None
            return
        if outside.is_state and not states:
            return
        body, atom = outside.body, outside.atom
