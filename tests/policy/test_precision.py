"""`Precision`: the formats, their facts, and how they are read from names and dtypes."""

import copy
import pickle
import re

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from precpass import Precision
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
each_precision = pytest.mark.parametrize("precision", Precision)


def test_every_precision_has_its_facts_checked():
    assert set(FACTS) == set(Precision)


@each_precision
def test_the_facts_are_those_of_the_standards(precision):
    name, largest, smallest_normal, roundoff, exact = FACTS[precision]
    assert precision.dtype.name == name
    assert precision.max == largest
    assert precision.smallest_normal == smallest_normal
    assert precision.unit_roundoff == roundoff
    assert precision.exact_integers == exact


@each_precision
def test_the_largest_value_is_finite_and_twice_it_is_not(precision):
    assert np.isfinite(np.asarray(precision.max, precision.dtype))
    with np.errstate(over="ignore"):
        largest = np.asarray(precision.max, precision.dtype)
        assert not np.isfinite(largest * np.asarray(2, precision.dtype))


@each_precision
def test_integers_are_exact_up_to_the_limit_and_not_behind_it(precision):
    limit = precision.exact_integers
    assert int(np.asarray(limit, precision.dtype)) == limit
    assert int(np.asarray(limit - 1, precision.dtype)) == limit - 1
    assert int(np.asarray(limit + 1, precision.dtype)) != limit + 1


@each_precision
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
        "tf32",
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
        assert precision.dtype.name in str(caught.value)
    assert "float8" not in str(caught.value)


@pytest.mark.parametrize(
    "value",
    ["float8_e4m3fn", "f8e4m3", "float8_e5m2", jnp.float8_e4m3fn, np.dtype(ml_dtypes.float8_e5m2)],
    ids=stable_id,
)
def test_float8_is_said_to_be_unsupported(value):
    with pytest.raises(ValueError, match="float8 is not supported yet") as caught:
        Precision.parse(value)
    assert repr(value) in str(caught.value)
    assert "'bf16'" in str(caught.value)


@each_precision
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
