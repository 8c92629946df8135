"""The columns of the table of primitives, held against what was decided for them.

The kind of each primitive is in the table of `sweeps/test_enumeration_primitives.py`.
"""

import dataclasses

import pytest

from precpass import jaxpr as ir
from precpass.policy.primitives import BOUNDARY, TABLE, Op, op
from precpass.types import OpKind
from tests.support import enumeration

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
