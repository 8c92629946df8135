"""What is known of values: constants, bounds, integers; planner/test_guards.py has what follows."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from precpass.analysis.graph import Graph
from precpass.analysis.propagate import ANY, ValueRange, of_array, propagate
from precpass.planner.guards import why_out_of_range
from precpass.types import Precision
from tests.support.ranges import bounds, fact_of, facts_of
from tests.support.values import f32, stable_id

# ---------------------------------------------------------------- sources of facts


def test_an_argument_is_unknown():
    assert fact_of(lambda x: x, f32(3)) == ANY
    assert bounds(ANY) == (-math.inf, math.inf)


@pytest.mark.parametrize(
    ("dtype", "expected"), [("bool", (0, 1)), ("int8", (-128, 127)), ("uint16", (0, 65535))]
)
def test_an_integer_argument_is_bounded_by_its_dtype(dtype, expected):
    fact = fact_of(lambda x: x, jax.ShapeDtypeStruct((3,), dtype))
    assert bounds(fact) == expected
    assert fact.integer


def test_an_iota_counts_along_its_own_dimension():
    assert bounds(fact_of(lambda: lax.broadcasted_iota(jnp.int32, (5, 70), 1))) == (0, 69)


def test_a_cast_keeps_what_is_known():
    fact = fact_of(lambda: jnp.arange(300).astype(jnp.float32))
    assert bounds(fact) == (0, 299)
    assert fact.integer
    fact = fact_of(lambda x: x.astype(jnp.float32), jax.ShapeDtypeStruct((3,), jnp.int8))
    assert bounds(fact) == (-128, 127)
    assert fact.integer


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.float32(1e-12), ValueRange(1e-12, 1e-12, 1e-12, False, True, likely_max=1e-12)),
        (
            np.array([0.5, 0.0, -3.5], np.float32),
            ValueRange(-3.5, 0.5, 0.5, False, True, likely_max=3.5, step=0.5),
        ),
        (
            np.array([1.0, 2.0, 300.0], np.float32),
            ValueRange(1, 300, 1, True, True, likely_max=300),
        ),
        (np.array([1, -2], np.int32), ValueRange(-2, 1, 1, True, True, likely_max=2)),
        # the bounds hold what is infinite; what can still overflow is the largest finite element
        (
            np.array([np.inf, np.nan, 2.5], np.float32),
            ValueRange(2.5, np.inf, 2.5, False, True, likely_max=2.5, step=0.5),
        ),
        (np.array([-np.inf], np.float32), ValueRange(-np.inf, -np.inf, 0, False, True)),
        (np.zeros((0, 3), np.float32), ValueRange(0, 0, 0, False, True)),
    ],
    ids=stable_id,
)
def test_a_constant_is_known(value, expected):
    found = of_array(value)
    assert found == expected._replace(
        lo=pytest.approx(expected.lo),
        hi=pytest.approx(expected.hi),
        likely_min_nonzero=pytest.approx(expected.likely_min_nonzero),
        likely_max=pytest.approx(expected.likely_max),
    )
    assert of_array(jnp.asarray(value)) == found


@pytest.mark.parametrize(
    ("make", "step"),
    [
        (lambda i: i + 0.5, 0.5),
        (lambda i: (i + 0.5) * 4, 2.0),
        (lambda i: i / 4, 0.25),
        (lambda i: i / 16, 0.0),  # finer than `FINEST_STEP`
        (lambda i: i * 3.5, 3.5),
        (lambda i: i + 0.3, 1.0),  # on no grid through zero, but 1 apart
        (lambda i: i / 4 + i * 0.5, 0.25),
        (lambda i: i * 0.3 + i * 0.2, 0.0),
        (lambda i: -jnp.abs(i - 0.5), 0.5),
        (lambda i: jnp.stack([i + 0.5, jnp.full(9, 0.3)]), 0.5),
        (lambda i: (i + 0.5) * (i + 0.5), 0.0),
        (lambda i: 1.0 / (i + 0.5), 0.0),
        (lambda i: jnp.sin(i) + 0.5, 0.0),
        (lambda i: i + 1.0, 0.0),  # integers
    ],
)
def test_the_step_of_a_grid(make, step):
    fact = fact_of(lambda: make(jnp.arange(9.0)))
    assert fact.step == pytest.approx(step)
    assert fact.integer == (bounds(fact) == (1.0, 9.0))


def test_a_lone_number_is_a_scale_and_no_count():
    assert not of_array(np.float32(1000.0)).integer
    assert of_array(np.arange(1000, dtype=np.float32)).integer


@pytest.mark.parametrize("value", [np.complex64(1j), jax.random.key(0)], ids=stable_id)
def test_what_is_no_real_number_is_unknown(value):
    assert of_array(value) == ANY


LARGE = (1 << 20) + 7


@pytest.mark.parametrize("where", [np.asarray, jnp.asarray], ids=["host", "device"])
def test_a_large_constant_is_known_like_a_small_one(where):
    values = np.full(LARGE, 0.25, np.float32)
    values[5], values[77], values[78], values[-1] = -1e9, 1e-12, np.inf, np.nan
    fact = of_array(where(values))
    assert bounds(fact) == (pytest.approx(-1e9), np.inf)
    assert fact.likely_max == pytest.approx(1e9)
    assert fact.likely_min_nonzero == pytest.approx(1e-12)
    assert (fact.integer, fact.constant) == (False, True)
    assert of_array(where(np.ones(LARGE, np.float32))).integer


def test_looking_at_a_large_constant_stages_nothing_into_the_program():
    table = jnp.arange(LARGE, dtype=jnp.float32)

    def fn(x):
        assert bounds(of_array(table)) == (0, LARGE - 1)
        return x + 1

    assert [e.primitive.name for e in jax.make_jaxpr(fn)(f32(3)).jaxpr.eqns] == ["add"]


def test_a_constant_that_is_a_tracer_is_unknown():
    seen = []

    def outer(table):
        seen.append(of_array(table))
        closed = jax.make_jaxpr(lambda x: x * table)(f32(3))
        (out,) = closed.jaxpr.outvars
        seen.append(propagate(Graph.build(closed)).range_of(out))
        return table.sum()

    jax.grad(outer)(jnp.full(3, 1e9))
    assert seen == [ANY, ANY]


# ---------------------------------------------------------------- bounds


@pytest.mark.parametrize(
    ("combine", "expected"),
    [
        (lambda a, b: a + b, (-5, 13)),
        (lambda a, b: a - b, (-12, 6)),
        (lambda a, b: a * b, (-20, 30)),
        (lambda a, b: -a, (-3, 2)),
        (lambda a, b: abs(a), (0, 3)),
        (lambda a, b: abs(-b), (0, 10)),
        (lambda a, b: jnp.maximum(a, b), (-2, 10)),
        (lambda a, b: jnp.minimum(a, b), (-3, 3)),
        (lambda a, b: jnp.maximum(a, 1.0), (1, 3)),
        (lambda a, b: lax.square(a), (0, 9)),
        (lambda a, b: lax.integer_pow(a, 3), (-8, 27)),
        (lambda a, b: lax.integer_pow(b, 4), (0, 10_000)),
        (lambda a, b: jnp.tanh(b), (-1, 1)),
        (lambda a, b: jnp.sin(b), (-1, 1)),
        (lambda a, b: jax.nn.sigmoid(b), (0, 1)),
        (lambda a, b: lax.concatenate([a, b], 0), (-3, 10)),
        (lambda a, b: lax.select(a > b, a, b), (-3, 10)),
        (lambda a, b: a[::-1].reshape(2, 2).T, (-2, 3)),
        (lambda a, b: b.max(), (-3, 10)),
        (lambda a, b: lax.sort(b), (-3, 10)),
        (lambda a, b: lax.stop_gradient(b), (-3, 10)),
        (lambda a, b: lax.pad(a, 7.0, [(1, 1, 0)]), (-2, 7)),
        (lambda a, b: lax.dynamic_slice(b, (a.argmax(),), (2,)), (-3, 10)),
    ],
)
def test_bounds_follow_arithmetic_and_movement(combine, expected):
    def fn(x, y):
        return combine(jnp.clip(x, -2.0, 3.0), jnp.clip(y, -3.0, 10.0))

    assert bounds(fact_of(fn, f32(4), f32(4))) == expected


@pytest.mark.parametrize("fn", [jnp.exp, lambda x: 1 / x, lambda x: x @ x, lambda x: x.sum()])
def test_what_has_no_rule_is_unbounded(fn):
    fact = fact_of(lambda x: fn(jnp.clip(x, 0.0, 3.0)), f32(4))
    assert bounds(fact) == (-math.inf, math.inf)


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        # how a softmax starts its maximum; the bounds are those of the finite elements
        (lambda x: jnp.maximum(x, -jnp.inf), (-9e4, -7e4)),
        (lambda x: jnp.minimum(-x, jnp.inf), (7e4, 9e4)),
        (lambda x: lax.clamp(-jnp.inf, x, jnp.inf), (-9e4, -7e4)),
    ],
    ids=["max", "min", "clamp"],
)
def test_an_infinite_constant_does_not_move_bounds_toward_zero(fn, expected):
    lo, hi = bounds(fact_of(lambda x: fn(jnp.clip(x, -9e4, -7e4)), f32(4)))
    # they may be wider than the truth, never narrower
    assert lo <= expected[0]
    assert hi >= expected[1]


def test_index_operands_do_not_count_as_data():
    def fn(x, i):
        return lax.dynamic_update_slice(jnp.clip(x, 0.0, 3.0), jnp.clip(x[:2], 0.0, 5.0), (i,))

    assert bounds(fact_of(fn, f32(4), jax.ShapeDtypeStruct((), jnp.int32))) == (0, 5)


def test_positions_that_are_computed_stay_integers():
    fact = fact_of(lambda: (jnp.arange(40) * 40 + jnp.arange(40)).astype(jnp.float32))
    assert bounds(fact) == (0, 39 * 40 + 39)
    assert fact.integer


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: lax.sort((x, lax.iota(jnp.int32, 300)), num_keys=1)[1],
        lambda x: lax.top_k(x, 300)[1],
        lambda x: jnp.argsort(x),
        lambda x: jnp.argmax(x),
    ],
    ids=["sort", "top_k", "argsort", "argmax"],
)
def test_positions_found_in_data_are_not_bounded_by_the_data(fn):
    fact = fact_of(lambda x: fn(jnp.clip(x, 0.0, 1.0)).astype(jnp.float32), f32(300))
    assert fact.lo <= 0
    assert fact.hi >= 299
    assert why_out_of_range(fact, Precision.BF16) is not None


@pytest.mark.parametrize("power", [-1, -2])
def test_a_negative_power_is_unbounded_where_its_operand_may_be_zero(power):
    fact = fact_of(lambda x: lax.integer_pow(jnp.clip(x, -2.0, 3.0), power), f32(4))
    assert fact.hi == math.inf


def test_a_scaled_integer_is_no_integer_any_more():
    assert not fact_of(lambda: jnp.arange(300).astype(jnp.float32) * 0.5).integer


def test_positions_that_are_shifted_by_a_whole_number_are_positions():
    fact = fact_of(lambda: jnp.arange(300.0, 310.0))
    assert fact.integer and bounds(fact) == (300, 309)
    assert not fact_of(lambda: jnp.arange(0.5, 8.5)).integer


@pytest.mark.parametrize(
    ("fn", "random"),
    [
        (lambda key, x: jax.random.bits(key, (3,), "uint8"), True),
        (lambda key, x: x + x, False),
        (lambda key, x: x.astype(jnp.uint32) + jnp.uint32(1), False),
        (lambda key, x: x + jax.random.uniform(key, (3,)), False),  # mixed with data
    ],
)
def test_random_bits_are_random_and_bounded_by_their_dtype(fn, random):
    fact = fact_of(fn, jax.random.key(0), f32(3))
    assert fact.random is random
    assert bounds(fact) == (0, 255) or not random


# ---------------------------------------------------------------- across borders


def test_facts_enter_and_leave_a_jitted_body():
    @jax.jit
    def double(x):
        return x + x

    assert bounds(fact_of(lambda x: double(jnp.clip(x, -1.0, 2.0)), f32(3))) == (-2, 4)


def test_facts_of_one_shared_body_differ_by_call():
    @jax.jit
    def scaled(x, by):
        return x * by

    def fn(x):
        x = jnp.clip(x, -1.0, 2.0)
        return scaled(x, jnp.float32(10.0)), scaled(x, jnp.float32(1000.0))

    closed = jax.make_jaxpr(fn)(f32())
    graph = Graph.build(closed)
    assert len(graph.bodies) == 2 + any(n == "clip" for n in graph.primitives) + 1
    assert list(map(bounds, facts_of(fn, f32()))) == [(-10, 20), (-1000, 2000)]


def test_a_loop_carry_is_unknown_whatever_goes_in():
    def fn(x):
        return lax.scan(lambda h, _: (h + h, h), jnp.clip(x, 0.0, 1.0), length=9)

    assert [bounds(f) for f in facts_of(fn, f32(3))] == [(-math.inf, math.inf)] * 2


def test_a_loop_constant_and_its_slices_are_known_inside():
    def fn(x, xs):
        x, xs = jnp.clip(x, 0.0, 2.0), jnp.clip(xs, -1.0, 1.0)
        return lax.scan(lambda h, y: (h, x + y), 0.0, xs)[1]

    assert bounds(fact_of(fn, f32(), f32(5))) == (-1, 3)


def test_a_cond_joins_its_branches():
    def fn(p, x):
        return lax.cond(p, lambda x: x * 10, lambda x: -x, jnp.clip(x, 1.0, 2.0))

    assert bounds(fact_of(fn, jax.ShapeDtypeStruct((), bool), f32(3))) == (-2, 20)
