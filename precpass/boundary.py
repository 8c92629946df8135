"""The primitives that keep exactly the dtypes they were written with, by name, and why.

Not needed for that: a primitive that is in no row of `opkinds.TABLE` is `OpKind.BOUNDARY`
anyway. The names tell what was decided from what is unknown, in a plan's reasons and in the test
that knows every primitive of the installed JAX. Those that hold jaxprs are `jaxpr.OPAQUE`.
"""

from __future__ import annotations

__all__ = ["BOUNDARY", "FUSES"]


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
        "precpass_carrier precpass_detach precpass_pin",
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

FUSES = frozenset(
    name
    for name, why in BOUNDARY.items()
    if why in ("works on bits", "complex numbers have no low format")
)
"""Those that are elementwise work for a compiler, however exact."""
