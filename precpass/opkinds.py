"""The one table: what each JAX primitive may do in low precision, and why.

A primitive in no row is `OpKind.BOUNDARY`: it gets exactly its original dtypes.
"""

from __future__ import annotations

import dataclasses
import enum

__all__ = ["TABLE", "Op", "OpKind", "op"]


class OpKind(enum.Enum):
    """What a primitive does to precision."""

    COMPUTE = "compute"
    REDUCTION = "reduction"
    ELEMENTWISE = "elementwise"
    DATA_MOVEMENT = "data_movement"
    BOUNDARY = "boundary"

    # a plan of many equations hashes many of these, and an Enum's own hash is Python code
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return f"OpKind.{self.name}"

    def __str__(self) -> str:
        return self.value


@dataclasses.dataclass(frozen=True, slots=True)
class Op:
    """One row of the table.

    Attributes:
        kind: the kind under which a policy finds its precision.
        wide: of the full-precision set: the AutoMixed policies never run it low.
        accumulates: adds or multiplies many terms: low operands are widened,
            accumulated, and rounded once.
        selects: its result is a choice among, or a comparison of, its operands:
            it runs in the widest operand's precision and is never a reason to narrow.
        joins: adds up the cotangents of a value that is read several times: it is never low.
        spreads: one element of an operand reaches many results, so that its
            transpose accumulates: a low copy is made of the result, not shared before.
        data: the operands that hold data, for primitives that also take
            floating operands of another meaning; None for all.
    """

    kind: OpKind
    wide: bool = False
    accumulates: bool = False
    selects: bool = False
    joins: bool = False
    spreads: bool = False
    data: tuple[int, ...] | None = None


def _rows(names: str, row: Op) -> dict[str, Op]:
    return dict.fromkeys(names.split(), row)


_E, _R, _M = OpKind.ELEMENTWISE, OpKind.REDUCTION, OpKind.DATA_MOVEMENT

TABLE: dict[str, Op] = {
    # Every system that was compared (Grappler, torch.autocast, TVM, OpenVINO) lowers these.
    **_rows(
        "dot_general ragged_dot_general conv_general_dilated",
        Op(OpKind.COMPUTE, accumulates=True),
    ),
    # Follow their operands: one rounding per result, exact for neg, abs, sign, copy.
    **_rows(
        "add sub mul neg abs sign copy real stop_gradient div max min clamp"
        " select_n tanh logistic erf erfc sqrt cbrt square integer_pow convert_element_type"
        " one_minus_square",
        Op(_E),
    ),
    # 300 ones, added one by one, are 256 in bfloat16.
    **_rows("add_any", Op(_E, joins=True)),
    # The full-precision set: their error is the operand's error times a large factor
    # (exp, pow: the argument's magnitude; log, rsqrt: near 0; sin, cos: all digits of a
    # large argument), or they do not commute with rounding (floor, rem).
    **_rows(
        "rsqrt exp exp2 expm1 pow log log2 log1p sin cos tan asin acos atan atan2 sinh cosh"
        " asinh acosh atanh erf_inv lgamma digamma polygamma igamma igammac igamma_grad_a"
        " zeta bessel_i0e bessel_i1e regularized_incomplete_beta floor ceil"
        " round rem polynomial",
        Op(_E, wide=True),
    ),
    **_rows("eq ne lt le gt ge eq_to le_to lt_to is_finite", Op(_E, selects=True)),
    # Measured on CPU: 16384 ones add up to 256 in bfloat16 by reduce_window, scatter-add,
    # segment_sum and a scan carry; kernels do not accumulate wide by themselves.
    **_rows("reduce_sum reduce_prod cumsum cumprod cumlogsumexp", Op(_R, accumulates=True)),
    **_rows(
        "reduce_window_sum select_and_scatter_add psum psum_invariant reduce_scatter",
        Op(_R, wide=True, accumulates=True),
    ),
    **_rows(
        "scatter-add scatter-sub scatter-mul",
        Op(_R, wide=True, accumulates=True, data=(0, 2)),
    ),
    # Monotone: rounding commutes with selection; sorting low would only make new ties.
    **_rows(
        "reduce_max reduce_min cummax cummin reduce_window_max reduce_window_min"
        " select_and_gather_add argmax argmin sort top_k approx_top_k",
        Op(_R, selects=True),
    ),
    **_rows("scatter-min scatter-max", Op(_R, selects=True, data=(0, 2))),
    **_rows(
        "reshape squeeze transpose rev slice split concatenate pad tile stack unstack"
        " optimization_barrier sharding_constraint reshard name all_to_all ppermute pmax pmin",
        Op(_M),
    ),
    **_rows("broadcast_in_dim all_gather all_gather_invariant pbroadcast", Op(_M, spreads=True)),
    # pvary's transpose is a psum over the axes that the value begins to vary over.
    **_rows("pvary", Op(_M, spreads=True)),
    **_rows("gather", Op(_M, spreads=True, data=(0,))),
    **_rows("dynamic_slice", Op(_M, data=(0,))),
    **_rows("dynamic_update_slice", Op(_M, data=(0, 1))),
    **_rows("scatter", Op(_M, data=(0, 2))),
}

COMPUTING = frozenset(name for name, row in TABLE.items() if row.kind is OpKind.COMPUTE)
"""The products."""

_BOUNDARY = Op(OpKind.BOUNDARY)


def op(primitive: str) -> Op:
    """The row of a primitive; the boundary row for a primitive that is in no row.

    Example:
        >>> op("dot_general").kind, op("threefry2x32").kind
        (OpKind.COMPUTE, OpKind.BOUNDARY)
    """
    return TABLE.get(primitive, _BOUNDARY)
