"""The table of primitives, held against the installed JAX and against what was decided for it."""

import dataclasses

import jax
import pytest

from precpass import jaxpr as ir
from precpass.policy.primitives import BOUNDARY, TABLE, Op, op
from precpass.types import OpKind
from tests.support import enumeration

# Primitives that came with a release of JAX: the table has them for whoever has that release.
SINCE = {"log2": (0, 12), "one_minus_square": (0, 12), "polynomial": (0, 12)}


def _release(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2])


INSTALLED = _release(jax.__version__)

# What primitives.md says of each kind of primitive, by the names that JAX gives them.
# In its rows and not here: `nextafter`, which the design's line 10 makes bit-level code.
DECIDED: dict[OpKind, str] = {
    OpKind.COMPUTE: "dot_general ragged_dot_general conv_general_dilated",
    OpKind.ELEMENTWISE: (
        "add sub add_any mul neg abs sign copy real div max min clamp select_n tanh logistic erf"
        " erfc sqrt cbrt rsqrt exp exp2 expm1 pow log log2 log1p square integer_pow sin cos tan"
        " asin acos atan atan2 sinh cosh asinh acosh atanh erf_inv lgamma digamma polygamma"
        " igamma igammac igamma_grad_a zeta bessel_i0e bessel_i1e regularized_incomplete_beta"
        " floor ceil round rem stop_gradient eq ne lt le gt ge is_finite convert_element_type"
    ),
    OpKind.REDUCTION: (
        "reduce_sum reduce_prod cumsum cumprod cumlogsumexp reduce_window_sum"
        " select_and_scatter_add scatter-add scatter-sub scatter-mul reduce_max reduce_min cummax"
        " cummin reduce_window_max reduce_window_min scatter-min scatter-max"
        " select_and_gather_add argmax argmin sort top_k approx_top_k psum reduce_scatter"
    ),
    OpKind.DATA_MOVEMENT: (
        "reshape squeeze broadcast_in_dim transpose rev slice split concatenate pad stack unstack"
        " tile optimization_barrier sharding_constraint name gather dynamic_slice"
        " dynamic_update_slice scatter all_gather all_to_all ppermute pbroadcast pmax pmin"
    ),
    OpKind.BOUNDARY: (
        "scaled_dot scaled_matmul iota empty rng_uniform rng_bit_generator random_bits random_wrap"
        " random_unwrap random_seed random_split random_fold_in random_gamma threefry2x32"
        " reduce_precision bitcast_convert_type shift_left shift_right_logical"
        " shift_right_arithmetic and or xor not nextafter complex imag conj fft cholesky qr lu svd"
        " eig eigh schur hessenberg triangular_solve tridiagonal tridiagonal_solve pallas_call"
        " ffi_call pure_callback io_callback debug_callback custom_partitioning create_token"
        " get swap addupdate a_primitive_of_tomorrow"
    ),
}
# The rows marked K: evaluated in float32 under the AutoMixed policies.
WIDE = (
    "rsqrt exp exp2 expm1 pow log log2 log1p sin cos tan asin acos atan atan2 sinh cosh asinh"
    " acosh atanh erf_inv lgamma digamma polygamma igamma igammac igamma_grad_a zeta bessel_i0e"
    " bessel_i1e regularized_incomplete_beta floor ceil round rem reduce_window_sum"
    " select_and_scatter_add scatter-add scatter-sub scatter-mul psum reduce_scatter"
)
ACCUMULATES = (
    "dot_general ragged_dot_general conv_general_dilated reduce_sum reduce_prod cumsum cumprod"
    " cumlogsumexp reduce_window_sum select_and_scatter_add scatter-add scatter-sub scatter-mul"
    " psum reduce_scatter"
)
SELECTS = (
    "reduce_max reduce_min cummax cummin reduce_window_max reduce_window_min scatter-min"
    " scatter-max select_and_gather_add argmax argmin sort top_k approx_top_k eq ne lt le gt ge"
    " is_finite"
)


@pytest.fixture(scope="module")
def installed() -> set[str]:
    # those of JAX alone: in this process the tests before have made primitives of their own
    return set(enumeration.installed()["primitives"])


@pytest.mark.parametrize("name", sorted(TABLE))
def test_every_name_of_the_table_is_a_primitive_of_this_jax(name: str, installed: set[str]):
    assert (name in installed) == (SINCE.get(name, (0, 0)) <= INSTALLED)


def test_the_gated_names_are_in_the_table():
    assert set(SINCE) <= set(TABLE)


@pytest.mark.parametrize(
    ("name", "kind"), [(n, kind) for kind, names in DECIDED.items() for n in names.split()]
)
def test_a_primitive_has_the_kind_that_was_decided(name: str, kind: OpKind):
    assert op(name).kind is kind


@pytest.mark.parametrize("name", WIDE.split())
def test_the_full_precision_set_is_wide(name: str):
    assert op(name).full_precision


def test_nothing_else_is_wide():
    # what JAX's own variants of a listed primitive are called is their own; these are all
    variants = {"polynomial", "psum_invariant", "random_gamma_grad"}
    assert {n for n, row in TABLE.items() if row.full_precision} - set(WIDE.split()) <= variants


@pytest.mark.parametrize("name", ACCUMULATES.split())
def test_what_adds_many_terms_accumulates(name: str):
    assert op(name).accumulates


def test_nothing_else_accumulates():
    assert {n for n, row in TABLE.items() if row.accumulates} - set(ACCUMULATES.split()) == {
        "psum_invariant"
    }


@pytest.mark.parametrize("name", SELECTS.split())
def test_what_chooses_or_compares_selects(name: str):
    assert op(name).selects
    # a choice is exact: it needs neither float32 nor a wide accumulator
    assert not op(name).accumulates


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("gather", (0,)),
        ("dynamic_slice", (0,)),
        ("dynamic_update_slice", (0, 1)),
        ("scatter", (0, 2)),
        ("scatter-add", (0, 2)),
        ("scatter-min", (0, 2)),
    ],
)
def test_index_operands_are_no_data(name: str, data: tuple[int, ...]):
    assert op(name).data == data


@pytest.mark.parametrize("name", ["broadcast_in_dim", "gather", "all_gather", "pvary"])
def test_what_reaches_many_results_spreads(name: str):
    assert op(name).spreads


def test_an_unknown_primitive_is_boundary_without_any_permission():
    row = dataclasses.asdict(op("a_primitive_of_tomorrow"))
    assert row == dataclasses.asdict(Op(OpKind.BOUNDARY))


def test_no_row_of_the_table_says_boundary():
    # boundary is what a primitive without a row is; a row for it could only go stale
    assert not [name for name, row in TABLE.items() if row.kind is OpKind.BOUNDARY]


def test_what_is_entered_has_no_row():
    entered = "jit scan while cond remat2 checkpoint custom_jvp_call custom_vjp_call shard_map"
    assert not set(entered.split()) & set(TABLE)


def test_every_primitive_of_this_jax_that_has_float_products_is_known():
    # steps of a matrix unit inside of a Pallas kernel have no lowering of their own
    names = enumeration.installed()["lowerable"]
    products = {n for n in names if "dot" in n or "conv" in n or "matmul" in n}
    compute = {n for n, row in TABLE.items() if row.kind is OpKind.COMPUTE}
    # quantized or fused by somebody already, or on a sparse format: named there with the reason
    others = {n for n in products - compute if n in BOUNDARY or n in ir.OPAQUE}
    others |= {"convert_element_type", "bitcast_convert_type"} & products
    assert products == compute | others


@pytest.mark.parametrize("kind", OpKind)
def test_a_kind_reads_as_it_prints(kind: OpKind):
    assert eval(repr(kind)) is kind
    assert OpKind(str(kind)) is kind
