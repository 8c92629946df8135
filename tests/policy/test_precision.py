"""`Precision`: the formats, their facts, and how they are read from names and dtypes."""

import copy
import pickle
import re

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from precpass.policy.precision import FORMATS
from precpass.types import Precision
from tests.support.values import stable_id

# From IEEE 754-2019 (binary16, binary32, binary64) and Intel's definition of bfloat16: the
# largest value, the smallest normal, half the distance from 1 to the next value, and 2 ** the
# number of significand bits (the hidden one included).
FACTS = {
    Precision.F64: ("float64", 1.7976931348623157e308, 2.0**-1022, 2.0**-53, 2**53),
    Precision.F32: ("float32", (2 - 2.0**-23) * 2.0**127, 2.0**-126, 2.0**-24, 2**24),
    Precision.BF16: ("bfloat16", (2 - 2.0**-7) * 2.0**127, 2.0**-126, 2.0**-8, 2**8),
    Precision.F16: ("float16", 65504.0, 2.0**-14, 2.0**-11, 2**11),
}
# The bits of an operand that count: NVIDIA's description of the A100 has TF32's, and Henry, Tang
# and Heinecke (2019) those of two and three bfloat16.
DIGITS = {
    Precision.TF32: 11,
    Precision.BF16X3: 16,
    Precision.BF16X6: 24,
    Precision.F32_EXACT: 24,
}
# Micikevicius et al. (2022), "FP8 Formats for Deep Learning": the largest value, smallest normal
# and half the distance from 1 to the next value; int8 is scaled by its largest one.
EIGHT_BITS = {
    Precision.F8E4M3: ("float8_e4m3fn", 448.0, 2.0**-6, 2.0**-4),
    Precision.INT8: ("int8", 127.0, 1.0, 0.5 / 127),
}
each_format = pytest.mark.parametrize("precision", FACTS)
each_multiplication = pytest.mark.parametrize("precision", DIGITS)
each_precision = pytest.mark.parametrize("precision", Precision)


def test_every_precision_has_its_facts_checked():
    assert {*FACTS, *DIGITS, *EIGHT_BITS} == set(Precision)
    assert set(FORMATS) == set(FACTS)


@each_multiplication
def test_a_precision_of_products_alone_is_of_float32_operands(precision):
    assert precision.is_multiplication
    assert precision.dtype == np.float32
    assert precision.max == Precision.F32.max
    assert precision.unit_roundoff == 2.0 ** -DIGITS[precision]
    assert not precision.is_low
    assert not any(precision.is_narrower_than(other) for other in Precision if other.value != "f64")
    assert Precision.of(np.dtype(np.float32)) is Precision.F32


@pytest.mark.parametrize("precision", EIGHT_BITS)
def test_eight_bits_are_for_products_alone(precision):
    name, largest, smallest_normal, roundoff = EIGHT_BITS[precision]
    assert precision.is_scaled and not precision.is_format and not precision.is_multiplication
    assert precision.dtype.name == name
    facts = precision.max, precision.smallest_normal, precision.unit_roundoff
    assert facts == (largest, smallest_normal, roundoff)
    assert Precision.of(precision.dtype) is None
    with pytest.raises(ValueError, match=f"{precision} says how products are multiplied"):
        Precision.parse_format(precision)


def test_what_runs_where_a_platform_does_not_multiply_so():
    table = {
        (p.value, platform): p.runs_as(platform)
        for p in DIGITS
        for platform in ("cpu", "gpu", "tpu")
    }
    assert {where: what for where, what in table.items() if what} == {
        ("tf32", "cpu"): "float32",
        ("tf32", "tpu"): "three passes of bfloat16",
        ("bf16x3", "cpu"): "float32",
        ("bf16x6", "cpu"): "float32",
        ("f32_exact", "tpu"): "six passes of bfloat16",
    }
    assert Precision.BF16X3.runs_as("tpu", is_dot=False) == "six passes of bfloat16"
    assert Precision.BF16X3.runs_as("gpu", is_dot=False) == "float32"
    assert not any(p.runs_as("cpu") for p in FORMATS)


@each_format
def test_a_format_is_read_as_a_format(precision):
    assert Precision.parse_format(precision.value) is precision
    assert precision.is_format


@each_multiplication
def test_no_value_is_stored_in_a_precision_of_products_alone(precision):
    with pytest.raises(ValueError, match=f"{precision} says how products are multiplied") as caught:
        Precision.parse_format(precision.value, "output")
    assert str(caught.value).startswith(f"output = '{precision}'")
    assert all(repr(p.value) in str(caught.value) for p in FACTS)


@each_format
def test_the_facts_are_those_of_the_standards(precision):
    name, largest, smallest_normal, roundoff, exact = FACTS[precision]
    assert precision.dtype.name == name
    assert precision.max == largest
    assert precision.smallest_normal == smallest_normal
    assert precision.unit_roundoff == roundoff
    assert precision.exact_integers == exact


@each_format
def test_the_largest_value_is_finite_and_twice_it_is_not(precision):
    assert np.isfinite(np.asarray(precision.max, precision.dtype))
    with np.errstate(over="ignore"):
        largest = np.asarray(precision.max, precision.dtype)
        assert not np.isfinite(largest * np.asarray(2, precision.dtype))


@each_format
def test_integers_are_exact_up_to_the_limit_and_not_behind_it(precision):
    limit = precision.exact_integers
    assert int(np.asarray(limit, precision.dtype)) == limit
    assert int(np.asarray(limit - 1, precision.dtype)) == limit - 1
    assert int(np.asarray(limit + 1, precision.dtype)) != limit + 1


@each_format
def test_the_roundoff_is_the_error_of_a_tie(precision):
    one, tie = np.asarray(1, precision.dtype), np.asarray(precision.unit_roundoff, precision.dtype)
    assert one + tie == one
    assert one + 2 * tie != one


def test_only_the_16_bit_formats_are_low():
    assert [p for p in Precision if p.is_low] == [Precision.BF16, Precision.F16]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (Precision.BF16, Precision.BF16),
        ("f64", Precision.F64),
        ("float64", Precision.F64),
        ("TF32", Precision.TF32),
        ("f32-exact", Precision.F32_EXACT),
        ("f32", Precision.F32),
        ("float32", Precision.F32),
        ("F32", Precision.F32),
        ("bf16", Precision.BF16),
        ("BFloat16", Precision.BF16),
        ("f16", Precision.F16),
        ("float16", Precision.F16),
        (jnp.bfloat16, Precision.BF16),
        (jnp.float16, Precision.F16),
        (jnp.float32, Precision.F32),
        (ml_dtypes.bfloat16, Precision.BF16),
        (np.float64, Precision.F64),
        (np.dtype("float16"), Precision.F16),
        (jnp.dtype("bfloat16"), Precision.BF16),
        ("fp8", Precision.F8E4M3),
        ("float8_e4m3fn", Precision.F8E4M3),
        ("W8A8", Precision.INT8),
        (np.int8, Precision.INT8),
    ],
    ids=stable_id,
)
def test_a_precision_is_read_from_names_and_dtypes(value, expected):
    assert Precision.parse(value) is expected


@each_precision
def test_a_precision_is_read_from_its_own_text(precision):
    assert Precision.parse(str(precision)) is precision
    assert eval(repr(precision)) is precision


@pytest.mark.parametrize(
    "value",
    [
        "quarter",
        "",
        "fp32",
        "bf",
        "int32",
        np.int32,
        np.dtype("bool"),
        np.complex64,
        16,
        None,
    ],
    ids=stable_id,
)
def test_an_unknown_precision_is_quoted_beside_the_legal_ones(value):
    with pytest.raises(ValueError, match=re.escape(f"unknown precision {value!r}")) as caught:
        Precision.parse(value)
    for precision in Precision:
        assert repr(precision.value) in str(caught.value)
    for precision in FORMATS:
        assert precision.dtype.name in str(caught.value)


@pytest.mark.parametrize(
    "value",
    ["mxfp8", "NVFP4", "fp4", jnp.float4_e2m1fn, "f8e5m2", np.dtype(ml_dtypes.float8_e5m2)],
    ids=stable_id,
)
def test_a_format_that_is_no_longer_supported_is_refused_and_the_text_says_what_to_use(value):
    with pytest.raises(ValueError, match="no longer supported: use 'f8e4m3' or 'int8'") as caught:
        Precision.parse(value)
    for precision in Precision:
        assert repr(precision.value) in str(caught.value)


@each_format
def test_the_precision_of_a_dtype_is_found(precision):
    assert Precision.of(precision.dtype) is precision


@pytest.mark.parametrize(
    "dtype", [np.int32, np.bool_, np.complex64, jnp.float8_e4m3fn], ids=stable_id
)
def test_other_dtypes_have_no_precision(dtype):
    assert Precision.of(np.dtype(dtype)) is None


def test_no_dtype_has_no_precision():
    assert Precision.of(None) is None


@each_precision
def test_a_copied_or_pickled_precision_is_the_same_object(precision):
    assert pickle.loads(pickle.dumps(precision)) is precision
    assert copy.deepcopy(precision) is precision
