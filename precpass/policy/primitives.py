"""The one table: what each JAX primitive does to precision, and why.

It has three parts. `TABLE` has a row for each primitive that may run in another precision.
`BOUNDARY` says for each other known primitive why it keeps exactly the dtypes that it was written
with; a primitive that is in neither does so too. `_COLUMNS` has, for each question that the package
asks about primitives, those for which the answer is yes. `op` answers all of it.

Primitives that hold jaxprs are `jaxpr.ENTERED` or `jaxpr.OPAQUE`.
"""

from __future__ import annotations

import dataclasses
import enum

__all__ = ["BOUNDARY", "COMPUTING", "ROWS", "TABLE", "Op", "OpKind", "named", "op"]


class OpKind(enum.Enum):
    """What a primitive does, by which a policy chooses its precision."""

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

    @classmethod
    def parse(cls, kind: OpKind | str) -> OpKind:
        """Return the kind for an `OpKind` or its name; a ValueError lists the legal ones."""
        name = kind.lower() if isinstance(kind, str) else kind
        for candidate in cls:
            if name in (candidate, candidate.value):
                return candidate
        raise ValueError(f"unknown kind {kind!r}: legal are {', '.join(map(repr, cls))}")


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Op:
    """What the table says of a primitive.

    Attributes:
        kind: the kind under which a policy finds its precision.
        full_precision: whether it is in the full-precision set, which the AutoMixed policies never
            run low.
        accumulates: adds or multiplies many terms: low operands are widened, accumulated, and
            rounded once.
        selects: its result is a choice among, or a comparison of, its operands: it runs in the
            widest operand's precision and is never a reason to narrow.
        adds_cotangents: adds up the cotangents of a value that is read several times: it is
            never low.
        spreads: one element of an operand reaches many results, so that its transpose
            accumulates: a low copy is made of the result, not shared before.
        data: the operands that hold data, for primitives that also take floating operands of
            another meaning; None for all.

    The others are the columns of `_COLUMNS`, which says why a primitive is in one.
    """

    kind: OpKind
    full_precision: bool = False
    accumulates: bool = False
    selects: bool = False
    adds_cotangents: bool = False
    spreads: bool = False
    data: tuple[int, ...] | None = None
    adds: bool = False
    scales: bool = False
    carries_sums: bool = False
    compares: bool = False
    tests_equality: bool = False
    ranks: bool = False
    chooses: bool = False
    is_bounded: bool = False
    computed_once: bool = False
    is_expanded: bool = False
    repeats: bool = False
    takes_a_part: bool = False
    no_low_kernel: bool = False
    computes_complex: bool = False
    hides_products: bool = False
    makes_random_bits: bool = False
    keeps_random_bits: bool = False
    keeps_largest: bool = False
    keeps_scale: bool = False
    is_view: bool = False
    has_factors: bool = False
    is_slice: bool = False
    own_kernel: bool = False
    fuses: bool = False
    never_zero: bool = False
    zero_if_too_small: bool = False
    zero_if_first_is: bool = False
    makes_an_operand: bool = False
    hands_on_elements: bool = False
    hands_on_digits: bool = False
    reads_phase: bool = False
    rounds_to_integers: bool = False
    reads_integers: bool = False
    factorizes: bool = False
    solves: bool = False
    is_arithmetic: bool = False


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
    # 300 ones, added one by one, make 256 in bfloat16.
    **_rows("add_any", Op(_E, adds_cotangents=True)),
    # The full-precision set: their error is the operand's error times a large factor
    # (exp, pow: the argument's magnitude; log, rsqrt: near 0; sin, cos: all digits of a
    # large argument), or they do not commute with rounding (floor, rem).
    **_rows(
        "rsqrt exp exp2 expm1 pow log log2 log1p sin cos tan asin acos atan atan2 sinh cosh"
        " asinh acosh atanh erf_inv lgamma digamma polygamma igamma igammac igamma_grad_a"
        " zeta bessel_i0e bessel_i1e regularized_incomplete_beta floor ceil"
        " round rem polynomial",
        Op(_E, full_precision=True),
    ),
    **_rows("eq ne lt le gt ge eq_to le_to lt_to is_finite", Op(_E, selects=True)),
    # Measured on CPU: 16384 ones add up to 256 in bfloat16 by reduce_window, scatter-add,
    # segment_sum and a scan carry; kernels do not accumulate wide by themselves.
    **_rows("reduce_sum reduce_prod cumsum cumprod cumlogsumexp", Op(_R, accumulates=True)),
    **_rows(
        "reduce_window_sum select_and_scatter_add psum psum_invariant reduce_scatter",
        Op(_R, full_precision=True, accumulates=True),
    ),
    **_rows(
        "scatter-add scatter-sub scatter-mul",
        Op(_R, full_precision=True, accumulates=True, data=(0, 2)),
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
"""Name -> row, for the primitives that may run in another precision."""


def _because(reason: str, names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), reason)


BOUNDARY: dict[str, str] = {
    **_because(
        "works on bits",
        "and or xor not shift_left shift_right_arithmetic shift_right_logical population_count clz"
        " mulhi bitcast bitcast_convert_type nextafter reduce_precision reduce_and reduce_or"
        " reduce_xor",
    ),
    **_because(
        "random bits",
        "random_bits random_clone random_fold_in random_gamma random_seed random_split"
        " random_unwrap random_wrap rng_bit_generator rng_uniform threefry2x32 threefry4x32"
        " philox2x32 philox4x32 iota_2x32_shape consume assert_consumed_value",
    ),
    **_because(
        "makes numbers that must be exact",  # iota(300) has 279 distinct values in bfloat16
        "iota empty empty2 axis_index platform_index dim_as_value dimension_size"
        " lu_pivots_to_permutation",
    ),
    **_because("complex numbers have no low format", "complex conj imag"),
    **_because(
        "linear algebra without low kernels",
        "cholesky cholesky_update eig eigh fft geqp3 geqrf hessenberg householder_product lu ormqr"
        " qr schur svd symmetric_product triangular_solve tridiagonal tridiagonal_solve",
    ),
    **_because(
        "a product whose precision somebody has decided",
        "scaled_dot scaled_matmul scaled_matmul_wrapper dot_product_attention_fwd_wrapper"
        " dot_product_attention_bwd_wrapper dot_product_attention_fp8_fwd"
        " dot_product_attention_fp8_bwd dot_product_attention_fp8_fwd_wrapper"
        " dot_product_attention_fp8_bwd_wrapper rnn_fwd rnn_bwd",
    ),
    **_because(
        "a sparse format's own kernels and index arrays",
        "bcoo_dot_general bcoo_dot_general_sampled bcoo_extract bcoo_fromdense bcoo_sort_indices"
        " bcoo_spdot_general bcoo_sum_duplicates bcoo_todense bcoo_transpose bcsr_dot_general"
        " bcsr_extract bcsr_fromdense bcsr_todense coo_fromdense coo_matmat coo_matvec coo_spmm"
        " coo_spmv coo_todense csr_fromdense csr_matmat csr_matvec csr_spmm csr_spmv csr_todense"
        " todense spsolve",
    ),
    **_because(
        "code outside of JAX reads its operands",
        "ffi_call call_exported tpu_custom_call mosaic_gpu_p pure_callback io_callback"
        " buffer_callback debug_callback debug_print inspect_sharding check shape_assertion",
    ),
    **_because(
        "tokens, and what is only there for its effect",
        "create_token after_all dce_sink tie stage unreachable",
    ),
    **_because(
        "a reference has one dtype",
        "new_ref empty_ref freeze get swap addupdate accum_grad_in_ref create_linear pin unpin"
        " broadcast_to get_global new_box box_get box_set new_log log_extend log_read",
    ),
    **_because(
        "places a value or says how it is laid out",
        "device_put layout_constraint relayout with_memory_space_constraint remove_memory_space"
        " shard_alike global_array_to_host_local_array host_local_array_to_global_array"
        " xla_metadata_value",
    ),
    **_because(
        "a half of a collective, whose other half expects what it sends",
        "all_gather_start all_gather_done all_gather_reduced_start all_to_all_start all_to_all_done"
        " pbroadcast_start pbroadcast_done ppermute_start ppermute_done psum_start psum_done"
        " psum_invariant_start reduce_scatter_start reduce_scatter_done unreduced_psum_start"
        " unreduced_reduce_scatter_start psend precv",
    ),
    **_because(
        "a collective of the explicit sharding types, or of sizes that only run time knows",
        "all_gather_reduced preduced unreduced_psum unreduced_pmax unreduced_pmin"
        " unreduced_reduce_scatter reduced_vary_cast reduced_vary_cast_p vary_unreduced_cast"
        " vary_unreduced_cast_p pbroadcast_dynamic ragged_all_to_all",
    ),
    **_because(
        "it combines pairs of scalars by a function of the user's",
        "reduce reduce_window select_and_scatter",
    ),
    **_because(
        "serves a product that was lowered before, by this package",
        "precpass_carrier precpass_detach precpass_dequantized precpass_low_cotangent"
        " precpass_low_derivative precpass_pin precpass_times_factor precpass_scaling",
    ),
    **_because(
        "masks derivatives of what is not chosen, and has the dtype of what it masks",
        "precpass_masked precpass_guarded",
    ),
    **_because("a step of JAX's own differentiation", "custom_lin to_edtype from_edtype"),
    **_because(
        "a step of a kernel, inside of Pallas",
        "reciprocal roll einshape_lo max_contiguous multiple_of atomic_cas atomic_rmw masked_load"
        " masked_swap mgpu_atomic_store dma_start dma_wait semaphore_read semaphore_signal"
        " semaphore_wait inline_mgpu wgmma_ref wgmma_accumulator_deref wgmma_accumulator_deref_p"
        " wgmma_accumulator_store wgmma_accumulator_store_p thunky.inline_constant",
    ),
}
"""Name -> why it keeps its dtypes."""

_COLUMNS: dict[str, str] = {
    # A sum of two values: a small step that is added to a rounded one is lost.
    "adds": "add sub add_any",
    # Their result is an operand or a multiple of it: adding to the result adds to the operand.
    "scales": "mul div neg copy select_n convert_element_type",
    # A loop whose next carry is one of these of its carry may accumulate. (So may data movement
    # and reductions, by their kind.)
    "carries_sums": "add sub add_any mul neg copy select_n convert_element_type max min clamp",
    # The result may change with the last digit of an operand.
    "compares": "eq ne lt le gt ge eq_to le_to lt_to",
    # max's gradient tests `x == max(x)`. If a policy lowers one side, both are to be low: otherwise
    # nothing compares equal, and the gradient divides by zero.
    "tests_equality": "eq ne",
    # The result says which operand, or which order, is the largest: rounding makes ties.
    "ranks": "argmax argmin sort top_k approx_top_k",
    # Each element of the result is one of an operand's: in a low format only it is rounded.
    "chooses": "select_n max min",
    # They are bounded, so low formats have the range, and a derivative reads 1 minus the result.
    "is_bounded": "tanh logistic erf erfc",
    # They are so dear that XLA writes the result for all readers and computes it for none of them
    # again. A logistic is computed again: storing EfficientNet's made the compiled program move
    # 1.10 of the bytes (H100, jax 0.12.0.1).
    "computed_once": "tanh erf erfc",
    "is_expanded": "erf erfc",  # into dozens of operations, by XLA
    # Their derivative multiplies by a function of the operands, which JAX saves for it.
    "has_factors": (
        "tanh logistic erf erfc exp exp2 expm1 log log1p sin cos tan sinh cosh asinh atan sqrt"
        " rsqrt cbrt square integer_pow mul div"
    ),
    # They may repeat their operand, so a cast belongs before them, where there are fewer elements.
    "repeats": (
        "broadcast_in_dim all_gather all_gather_invariant tile reshard sharding_constraint gather"
    ),
    # They take a part that is chosen at run time: a loop takes another slice of a stack each trip.
    "takes_a_part": "dynamic_slice",
    # They run in float64 in a float64 region, and never in 16 bits.
    "no_low_kernel": (
        "cholesky cholesky_update eigh geqrf hessenberg householder_product lu ormqr qr schur svd"
        " symmetric_product triangular_solve tridiagonal tridiagonal_solve"
    ),
    # They run on complex128 in a float64 region.
    "computes_complex": "complex conj imag fft eig",
    # No jaxpr shows their products, but the text that they are lowered to does.
    "hides_products": (
        "bcoo_dot_general bcoo_dot_general_sampled bcoo_extract bcoo_fromdense bcoo_sort_indices"
        " bcoo_spdot_general bcoo_sum_duplicates bcoo_todense bcoo_transpose bcsr_dot_general"
        " bcsr_extract bcsr_fromdense bcsr_todense coo_fromdense coo_matmat coo_matvec coo_spmm"
        " coo_spmv coo_todense csr_fromdense csr_matmat csr_matvec csr_spmm csr_spmv csr_todense"
        " todense spsolve call_exported"
    ),
    # Samplers turn their results into numbers of which every digit matters.
    "makes_random_bits": (
        "random_bits random_clone random_fold_in random_gamma random_seed random_split"
        " random_unwrap random_wrap rng_bit_generator rng_uniform threefry2x32 threefry4x32"
        " philox2x32 philox4x32"
    ),
    # They make random bits from random bits. (So do elementwise work and movement, by their kind.)
    "keeps_random_bits": (
        "shift_left shift_right_logical shift_right_arithmetic and or xor not bitcast_convert_type"
    ),
    # The largest constant in an operand is in the result: a mask survives what adds to it.
    "keeps_largest": "add sub add_any max min neg abs convert_element_type stop_gradient",
    # The result's magnitude is that of the operands taken together.
    "keeps_scale": "add sub add_any neg abs",
    # The same bytes in another shape: XLA only changes the layout.
    "is_view": (
        "reshape squeeze transpose copy stop_gradient name device_put optimization_barrier"
        " sharding_constraint reshard layout_constraint pvary random_wrap random_unwrap"
        " bitcast_convert_type"
    ),
    # A part of the bytes, which is not moved either.
    "is_slice": "slice dynamic_slice split unstack",
    # XLA has a kernel of its own for each of these, outside every fusion.
    "own_kernel": (
        "dynamic_update_slice gather scatter all_gather all_gather_invariant all_to_all ppermute"
        " pbroadcast pmax pmin reduce_scatter"
    ),
    # The compiler fuses these as elementwise work, although their dtypes are kept.
    "fuses": (
        "and or xor not shift_left shift_right_arithmetic shift_right_logical population_count clz"
        " mulhi bitcast bitcast_convert_type nextafter reduce_precision reduce_and reduce_or"
        " reduce_xor complex conj imag"
    ),
    # Not zero for any finite operand.
    "never_zero": "exp exp2 logistic erfc",
    # Zero of an operand that is not zero only if the result was too small for its format.
    "zero_if_too_small": (
        "convert_element_type reduce_precision mul square sqrt cbrt tanh expm1 log1p erf sin tan"
        " sinh asinh asin atan atanh"
    ),
    # Zero if the first operand is, or if the other one is too large.
    "zero_if_first_is": "div pow integer_pow",
    # The result is one of the operands, or its magnitude.
    "makes_an_operand": (
        "neg abs copy select_n max min clamp sort cummax cummin reduce_max reduce_min"
        " stop_gradient top_k sign"
    ),
    # If the result is needed exactly, so are the operands (`analysis.need`). Of these the elements
    # of the result are an operand's, perhaps with another sign, so a value that is returned is
    # still the operand's. (So is data movement, by its kind.)
    "hands_on_elements": (
        "neg copy stop_gradient max min clamp abs real imag complex conj and or xor not reduce_and"
        " reduce_or reduce_max reduce_min cummax cummin reduce_window_max reduce_window_min pmax"
        " pmin device_put reduce_precision bitcast_convert_type select_n scatter-min scatter-max"
    ),
    # Of these an error of an operand becomes one of about the same size. (So does that of linear
    # algebra and of products; no function but these hands on more than an order.)
    "hands_on_digits": (
        "add sub add_any mul div rem square integer_pow sqrt reduce_sum reduce_prod cumsum cumprod"
        " reduce_window_sum psum psum_invariant reduce_scatter scatter-add scatter-sub scatter-mul"
        " select_and_scatter_add fft"
    ),
    # Of their operand, how far it is into a period counts, so an error is not relative to its size.
    "reads_phase": "sin cos tan rem",
    # Their result is another number if the operand is a little off.
    "rounds_to_integers": "floor ceil round",
    # Another whole number gives another result: an order, another program's input, a seed.
    "reads_integers": "sort pure_callback io_callback ffi_call random_seed random_fold_in",
    # They fail, or amplify, if a difference of large matrices is a little off.
    "factorizes": (
        "cholesky cholesky_update eig eigh geqp3 geqrf hessenberg lu qr schur svd tridiagonal"
    ),
    # They amplify an error of their operands by a condition number.
    "solves": "triangular_solve tridiagonal_solve",
    # Elementwise primitives that no network has for its activation.
    "is_arithmetic": (
        "add sub add_any mul div neg copy real stop_gradient convert_element_type integer_pow"
        " square sqrt rsqrt select_n"
    ),
}
"""Column -> the primitives that are in it, and above it the reason."""


def _whole_table() -> dict[str, Op]:
    boundary = Op(OpKind.BOUNDARY)
    rows = dict.fromkeys(BOUNDARY, boundary) | TABLE
    for column, names in _COLUMNS.items():
        for name in names.split():
            rows[name] = dataclasses.replace(rows[name], **{column: True})
    return rows


ROWS = _whole_table()
"""Name -> row with its columns, of each primitive that the table knows."""
_UNKNOWN = Op(OpKind.BOUNDARY)

COMPUTING = frozenset(name for name, row in TABLE.items() if row.kind is OpKind.COMPUTE)
"""The products."""


def op(primitive: str) -> Op:
    """What the table says of a primitive; of one that it does not know, that it is BOUNDARY.

    Examples:
        >>> op("dot_general").kind, op("threefry2x32").kind
        (OpKind.COMPUTE, OpKind.BOUNDARY)
        >>> op("argmax").ranks, op("add").ranks
        (True, False)
    """
    return ROWS.get(primitive, _UNKNOWN)


def named(column: str) -> frozenset[str]:
    """The primitives in a column, for loops that ask every equation of a program."""
    return frozenset(_COLUMNS[column].split())
