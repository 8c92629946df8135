"""Counts of a jaxpr: matrix products, casts, FLOPs and bytes, by format."""

from __future__ import annotations

import dataclasses
from collections import defaultdict

import jax.numpy as jnp

from precpass import jaxpr as ir
from precpass.analysis.equations import is_matrix_product
from precpass.analysis.graph import Graph
from precpass.analysis.liveness import unread
from precpass.analysis.sizes import nbytes
from precpass.policy.precision import FORMATS, Precision
from precpass.policy.primitives import OpKind, op

__all__ = ["EIGHT_BITS", "LOW_FORMATS", "Counts", "count", "format_of"]


@dataclasses.dataclass(frozen=True)
class Counts:
    """Counts of a jaxpr, which do not depend on a device.

    Equations that only serve later derivatives are left out (`precpass.analysis.liveness`).

    Equations are counted once, however often they run: those of a scan's body, and those of a jaxpr
    that is called many times. FLOPs and bytes are those of one run of the whole program: a scan's
    times its length, a while loop's times `precpass.analysis.sizes.NOMINAL_SIZE`, a `cond`'s over
    all branches, and inside a `shard_map` those of one shard.

    Attributes:
        products: the number of floating-point matrix products, which have contracted dimensions.
        low: the number of matrix products whose two operands have 16 or 8 bits.
        marked: the number of matrix products with a dot algorithm, such as
            `default_matmul_precision` sets; the backend may ignore it.
        casts: the number of conversions between floating formats.
        cast_bytes: the bytes of their results.
        flops: format -> floating-point operations in it. Matrix products and sums count in the
            format of their operands, elementwise work in that of its widest operand, and casts do
            not count. A product of complex numbers counts its real operations, under the complex
            format's name (`precpass.analysis.sizes.flops`).
        result_bytes: format -> bytes of the results of equations in it. XLA does not store those
            that it fuses.
        product_flops: the FLOPs of matrix products alone, by the format of their operands. If the
            program asks for a precision or an algorithm, its name follows, as in "f32 highest".

    The formats are "f64", "f32", "bf16", "f16", "f8e4m3", "f8e5m2", of scaled products "int8", or
    for others the dtype's name.
    """

    products: int
    low: int
    marked: int
    casts: int
    cast_bytes: float
    flops: dict[str, float]
    result_bytes: dict[str, float]
    product_flops: dict[str, float] = dataclasses.field(default_factory=dict[str, float])

    @property
    def low_bytes(self) -> float:
        """The bytes of the equations' results in formats of 16 bits."""
        return sum(n for name, n in self.result_bytes.items() if name in LOW_FORMATS)

    @property
    def low_flops(self) -> float:
        """The share of the FLOPs in formats of 16 and 8 bits; 0 if there are no FLOPs."""
        total = sum(self.flops.values())
        return (
            sum(n for name, n in self.flops.items() if name in LOW_FORMATS | EIGHT_BITS) / total
            if total
            else 0.0
        )


LOW_FORMATS = frozenset(str(p) for p in FORMATS if p.is_low)
"""The formats of 16 bits, by their names in plans and counts."""
# The pass has no E5M2, and flax's float8 layers have.
_EIGHT_BITS = {
    **{p.dtype: str(p) for p in Precision if p.is_scaled},
    jnp.dtype(jnp.float8_e5m2): "f8e5m2",
}
EIGHT_BITS = frozenset(_EIGHT_BITS.values())
"""The formats of 8 bits, by their names in plans and counts."""


def count(jaxpr: ir.Jaxpr | Graph) -> Counts:
    """Count a jaxpr's matrix products, casts, FLOPs and bytes, its bodies included.

    Custom derivative rules, which JAX traces in differentiation, and the matrix products of opaque
    primitives such as Pallas kernels are not counted.

    Args:
        jaxpr: open or closed: from `jax.make_jaxpr`, `jax.jit(f).trace(...)` or an `Inspection`; or
            its graph.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> def layers(x, ws):
        ...     return jax.lax.scan(lambda x, w: (x @ w, None), x, ws)[0]
        >>> counts = count(jax.make_jaxpr(layers)(jnp.ones((8, 8)), jnp.ones((5, 8, 8))))
        >>> counts.products, counts.flops  # 5 times 2 * 8 * 8 * 8
        (1, {'f32': 5120.0})
    """
    tally = _Tally()
    tally.add(jaxpr, 1.0)
    sums = (tally.flops, tally.result_bytes, tally.product_flops)
    return Counts(
        tally.products,
        tally.low,
        tally.marked,
        tally.casts,
        tally.cast_bytes,
        *({name: n for name, n in by_name.items() if n} for by_name in sums),
    )


class _Tally:
    def __init__(self) -> None:
        self.products = self.low = self.marked = self.casts = 0
        self.cast_bytes = 0.0
        self.flops = defaultdict[str, float](float)
        self.result_bytes = defaultdict[str, float](float)
        self.product_flops = defaultdict[str, float](float)

    def add(self, jaxpr: ir.Jaxpr | Graph, times: float) -> None:
        graph = jaxpr if isinstance(jaxpr, Graph) else Graph.build(jaxpr)
        dropped = unread(graph).rows
        for row, eqn in enumerate(graph.eqns):
            calls = times * float(graph.calls[row])
            # The pass does not enter a jit with references, such as the call of a whole program.
            of_refs = eqn.primitive.name == "jit" and row not in graph.children
            if ir.is_float64(eqn) or of_refs:
                for inner in ir.hidden_jaxprs(eqn):
                    self.add(inner, calls)
            # An equation that returns its first operand makes no new value.
            elif not (
                row in graph.children or ir.is_identity_of_first_operand(eqn) or dropped[row]
            ):
                self._leaf(eqn, float(graph.flops[row]), calls)

    def _leaf(self, eqn: ir.Eqn, flops: float, calls: float) -> None:
        sides = eqn.invars, eqn.outvars
        operands, result_avals = ([a for v in vs if format_of(a := v.aval)] for vs in sides)
        for aval in result_avals:
            self.result_bytes[format_of(aval)] += calls * nbytes(aval)
        if eqn.primitive.name == "convert_element_type":
            if operands and result_avals and operands[0].dtype != result_avals[0].dtype:
                self.casts += 1
                self.cast_bytes += calls * nbytes(result_avals[0])
            return
        is_product = op(eqn.primitive.name).kind is OpKind.COMPUTE and is_matrix_product(eqn)
        eight_bits = {_EIGHT_BITS.get(v.aval.dtype) for v in eqn.invars[:2]} if is_product else ()
        is_low = bool(eight_bits) and None not in eight_bits
        if is_low:
            name = max(map(str, eight_bits))
        elif operands or result_avals:
            widest = max(operands or result_avals[:1], key=lambda aval: aval.dtype.itemsize)
            name = format_of(widest)
        else:
            return
        self.flops[name] += calls * flops
        if is_product:
            self.products += 1
            self.low += is_low or all(format_of(a) in LOW_FORMATS for a in operands[:2])
            self.marked += ir.has_algorithm(eqn)
            named = f"{name} {ir.asked_precision(eqn)}".removesuffix(" default")
            self.product_flops[named] += calls * flops


def format_of(aval: ir.Aval) -> str:
    """The name of a floating or complex value's format; "" for any other value."""
    if (precision := ir.precision_of(aval)) is not None:
        return str(precision)
    dtype = getattr(aval, "dtype", None)
    if dtype is not None and dtype != jnp.int8 and dtype in _EIGHT_BITS:
        return _EIGHT_BITS[dtype]
    return str(dtype) if dtype is not None and jnp.issubdtype(dtype, jnp.inexact) else ""
