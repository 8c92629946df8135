"""Measuring: what is counted in a jaxpr, what compiling tells, and how rounds are timed."""

from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import precpass as pp
from precpass.measure.counts import Counts, count
from precpass.measure.execute import Memory, Timing, compiled, interleaved, is_jitted, timed
from tests.support.passes import look

F32, BF16 = jnp.float32, jnp.bfloat16


def counts_of(fn: Callable[..., Any], *args: Any) -> Counts:
    return count(jax.make_jaxpr(fn)(*args))


def ones(*shape: int, dtype: Any = F32) -> jax.Array:
    return jnp.ones(shape, dtype)


# ---------------------------------------------------------------- counts


def test_a_scan_counts_its_equations_once_and_their_flops_for_every_trip():
    def layers(x, ws):
        def layer(x, w):
            y = jnp.tanh(x @ w)  # 2 * 4 * 8 * 8, and one for each of 4 * 8 elements
            return y, y.sum()  # one for each operand

        return lax.scan(layer, x, ws)

    counts = counts_of(layers, ones(4, 8), ones(5, 8, 8))
    assert (counts.products, counts.low, counts.casts) == (1, 0, 0)
    assert counts.flops == {"f32": 5 * (2 * 4 * 8 * 8 + 4 * 8 + 4 * 8)}
    # the product's result, the tanh's, the sum
    assert counts.result_bytes == {"f32": 5 * 4 * (32 + 32 + 1)}


def test_trip_counts_of_nested_loops_and_of_calls_multiply():
    @jax.jit
    def square(x):
        return x @ x

    def outer(x, _):
        return lax.scan(lambda x, _: (square(square(x)), None), x, length=3)[0], None

    counts = counts_of(lambda x: lax.scan(outer, x, length=7)[0], ones(4, 4))
    assert counts.products == 1  # one jaxpr, called twice
    assert counts.flops == {"f32": 7 * 3 * 2 * (2 * 4**3)}


def test_a_product_runs_in_the_format_of_its_operands():
    def fn(x, w):
        low = lax.dot_general(x, w, (((1,), (0,)), ((), ())), preferred_element_type=F32)
        return low + 1  # in float32

    counts = counts_of(fn, ones(4, 4, dtype=BF16), ones(4, 4, dtype=BF16))
    assert (counts.products, counts.low) == (1, 1)
    assert counts.flops == {"bf16": 2 * 4**3, "f32": 16}
    assert counts.low_flops == 128 / 144
    assert counts.low_bytes == 0  # both results are wide


def test_a_product_with_one_wide_operand_is_not_low():
    def fn(x, w):
        return lax.dot_general(x, w, (((1,), (0,)), ((), ())), preferred_element_type=F32)

    counts = counts_of(fn, ones(4, 4, dtype=BF16), ones(4, 4))
    assert (counts.products, counts.low) == (1, 0)
    assert counts.flops == {"f32": 2 * 4**3}


def test_casts_between_floating_formats_are_counted_and_compute_nothing():
    def fn(x, n):
        return x.astype(BF16), x.astype(F32), x.astype(jnp.int32), n.astype(jnp.float16)

    counts = counts_of(fn, ones(4), jnp.arange(4))
    assert counts.casts == 1
    assert counts.flops == {}
    assert counts.result_bytes == {"bf16": 8, "f16": 8}
    assert counts.low_bytes == 16


def test_integers_are_no_products_and_no_flops():
    counts = counts_of(lambda x: x @ x + 1, jnp.ones((4, 4), jnp.int32))
    assert (counts.products, counts.flops, counts.result_bytes) == (0, {}, {})


def test_an_outer_product_contracts_nothing():
    counts = counts_of(lambda x: jnp.einsum("i,j->ij", x, x), ones(4))
    assert counts.products == 0
    assert counts.flops == {"f32": 2 * 16}


def test_products_of_eight_bits_are_counted_as_low():
    float8 = jnp.ones((4, 4), jnp.float8_e4m3fn)
    counts = counts_of(lambda x: lax.dot(x, x, preferred_element_type=F32), float8)
    assert (counts.products, counts.low) == (1, 1)
    assert counts.flops == {"f8e4m3": 2 * 4**3}
    integers = jnp.ones((4, 4), jnp.int8)
    counts = counts_of(lambda x: lax.dot(x, x, preferred_element_type=jnp.int32), integers)
    assert (counts.products, counts.low) == (1, 1)
    assert counts.flops == {"int8": 2 * 4**3}
    wide = jnp.ones((4, 4), jnp.int32)
    assert counts_of(lambda x: x @ x, wide).products == 0


def test_formats_without_a_precision_have_their_dtype_as_a_name():
    float8 = jnp.ones((4, 4), jnp.float8_e3m4)
    counts = counts_of(lambda x: lax.dot(x, x, preferred_element_type=F32), float8)
    assert (counts.products, counts.low) == (1, 0)
    assert counts.flops == {"float8_e3m4": 2 * 4**3}


def test_a_product_with_e5m2_of_a_library_is_counted_as_low():
    x, w = jnp.ones((4, 4), jnp.float8_e5m2), jnp.ones((4, 4), jnp.float8_e4m3fn)
    counts = counts_of(lambda x, w: lax.dot(x, w, preferred_element_type=F32), x, w)
    assert (counts.products, counts.low, counts.flops) == (1, 1, {"f8e5m2": 2 * 4**3})


def test_complex_products_are_counted_in_real_operations():
    x, z = ones(4, 4), jnp.ones((4, 4), jnp.complex64)
    counts = counts_of(lambda z: z @ z + z, z)
    assert (counts.products, counts.low) == (1, 0)
    # of a sum of complex numbers, elements
    assert counts.flops == {"complex64": 4 * 2 * 4**3 + 16}
    mixed = counts_of(lambda x, z: lax.dot(x, z, preferred_element_type=z.dtype), x, z)
    assert mixed.flops == {"complex64": 2 * 2 * 4**3}


def test_a_dot_algorithm_marks_a_product():
    def fn(x):
        with jax.default_matmul_precision("BF16_BF16_F32"):
            y = x @ x
        with jax.default_matmul_precision("highest"):
            return y @ x

    counts = counts_of(fn, ones(4, 4))
    assert (counts.products, counts.low, counts.marked) == (2, 0, 1)
    assert counts.flops == {"f32": 4 * 4**3}


def test_a_lowered_product_has_two_casts_and_no_work_but_its_own():
    before = jax.make_jaxpr(lambda x, w: x @ w)(ones(4, 4), ones(4, 4))
    after = look(lambda x, w: x @ w, pp.AutoMixedBf16, ones(4, 4), ones(4, 4)).after
    wide, low = count(before), count(after)
    assert (wide.products, wide.low, wide.casts) == (1, 0, 0)
    assert (low.products, low.low, low.casts) == (1, 1, 2)
    assert sum(low.flops.values()) == sum(wide.flops.values())
    assert low.flops == {"bf16": 2 * 4**3}
    assert low.low_bytes == 2 * 2 * 16  # the two copies, each once


def test_what_runs_in_float64_while_x64_is_off_is_counted_there():
    def fn(x):
        def step(x, _):
            with pp.keep("f64"):
                return x @ x, None

        return lax.scan(step, x, length=3)[0]

    counts = count(look(fn, pp.AutoMixedBf16, ones(4, 4)).after)
    assert (counts.products, counts.low) == (1, 0)
    assert counts.flops == {"f64": 3 * 2 * 4**3}


def test_an_empty_program_has_nothing():
    counts = counts_of(lambda x: x, ones(4))
    assert counts == Counts(0, 0, 0, 0, 0.0, {}, {})
    assert counts.low_flops == 0


# ---------------------------------------------------------------- compiling


def test_compiling_traces_once_and_a_call_after_it_not_again():
    traces: list[None] = []

    def fn(x):
        traces.append(None)
        return x @ x

    for wrap in (jax.jit, pp.auto_mixed):
        traces.clear()
        jitted = wrap(fn)
        program = compiled(jitted, ones(8, 8))
        jitted(ones(8, 8))
        assert len(traces) == 1
        assert count(program.jaxpr).products == 1


def test_memory_is_that_of_the_compiled_program():
    fn = jax.jit(lambda x, y: (x + y, x.sum()))
    program = compiled(fn, ones(16, 16), ones(16, 16))
    assert program.memory is not None
    assert program.memory.arguments == 2 * 4 * 256
    assert 4 * 257 <= program.memory.outputs < 4 * 257 + 64  # and what a tuple takes
    assert program.memory.aliased == 0
    found = program.compiled.memory_analysis()
    assert program.memory.temp == found.temp_size_in_bytes
    assert not program.donates


def test_donation_is_noticed():
    for wrap in (jax.jit, pp.auto_mixed):
        program = compiled(wrap(lambda x, y: x @ y, donate_argnums=0), ones(8, 8), ones(8, 8))
        assert program.donates
        assert program.memory is not None
        assert program.memory.aliased == 4 * 64


def test_the_device_is_that_of_the_compiled_program():
    x = jax.device_put(ones(4, 4), jax.devices()[3])
    assert compiled(lambda x: x @ x, x).device == jax.devices()[3]


def test_what_other_libraries_jit_is_given_to_jit():
    # its results of trace and lower are its own
    wrapped = nnx.jit(lambda x: x @ x)
    assert not is_jitted(wrapped)
    assert count(compiled(wrapped, ones(4, 4)).jaxpr).products == 1
    assert is_jitted(pp.auto_mixed(jnp.sin)) and is_jitted(jax.jit(jnp.sin))
    mixed = pp.auto_mixed(lambda x: (x @ x).sum())
    for transformed in (jax.grad(mixed), nnx.jit(mixed)):
        assert not is_jitted(transformed)
        assert count(compiled(transformed, ones(4, 4)).jaxpr).low


def test_any_function_keywords_and_static_arguments():
    assert count(compiled(lambda x: x @ x, x=ones(4, 4)).jaxpr).products == 1
    powers = jax.jit(lambda x, n: [x @ x] * n, static_argnums=1)
    assert compiled(powers, ones(4, 4), 2).memory is not None


# ---------------------------------------------------------------- timing


class Clock:
    """Seconds that pass only where a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_run_ends_when_its_results_are_there():
    clock = Clock()

    class Pending:
        def block_until_ready(self):
            clock.now += 2.0
            return self

    def run(x):
        clock.now += 1.0
        return [x, Pending()]

    out, took = timed(run, "x", clock=clock)
    assert out[0] == "x"
    assert took == 3.0


def test_every_call_takes_its_turn_in_every_round():
    clock, order = Clock(), []

    def run_of(name: str, seconds: float) -> Callable[..., None]:
        def run(own: str) -> None:
            assert own == name
            order.append(name)
            clock.now += seconds * (1 + len(order))

        return run

    def prepare(name: str) -> tuple[str]:
        clock.now += 100.0  # outside of the time
        return (name,)

    rounds: list[int] = []
    runs = {name: run_of(name, s) for name, s in (("a", 1.0), ("b", 2.0), ("c", 0.0))}
    found = interleaved(runs, 3, prepare=prepare, warm_up=2, clock=clock, progress=rounds.append)
    assert rounds == [-2, -1, 0, 1, 2]
    turns = ["".join(order[i : i + 3]) for i in range(0, len(order), 3)]
    assert turns == ["bca", "bac", "abc", "acb", "cab"]
    assert list(found) == ["a", "b", "c"]
    # the runs of the warm-up are not in them
    assert found["a"].seconds == (8.0, 11.0, 15.0)
    assert found["c"].seconds == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("n", range(1, 9))
def test_every_call_comes_after_every_other_equally_often(n: int):
    order: list[str] = []
    names = [str(i) for i in range(n)]
    rounds = 2 * n if n % 2 else n
    interleaved({name: lambda name=name: order.append(name) for name in names}, rounds)
    turns = [order[i : i + n] for i in range(n, len(order), n)]  # without the warm-up
    before = Counter(pair for turn in turns for pair in pairwise(turn))
    places = Counter(place for turn in turns for place in enumerate(turn))
    once = 2 if n % 2 else 1
    assert before == {(a, b): once for a in names for b in names if a != b}
    assert places == {(place, name): once for place in range(n) for name in names}


def test_a_program_that_donates_runs_in_every_round():
    x, ticks = ones(16, 16), iter(range(100))
    fn = jax.jit(lambda x: x + 1, donate_argnums=0)

    def clock() -> float:
        return float(next(ticks))

    found = interleaved({"f": fn}, 4, prepare=lambda _: (x.copy(),), clock=clock)
    # the clock is read before and after each run alone, of the one that warms up too
    assert found["f"].seconds == (1.0,) * 4
    assert next(ticks) == 2 * 5
    assert not x.is_deleted()


def test_median_quartiles_and_ratios():
    rng = np.random.default_rng(0)
    for n in (1, 2, 5, 8):
        seconds = rng.uniform(1, 2, n)
        timing = Timing(tuple(map(float, seconds)))
        assert timing.median == pytest.approx(np.median(seconds))
        assert timing.quartiles == pytest.approx(tuple(np.quantile(seconds, (0.25, 0.75))))
        assert timing.spread == pytest.approx(np.subtract(*timing.quartiles[::-1]))
        base = Timing(tuple(map(float, rng.uniform(1, 2, n))))
        assert timing.ratios(base).seconds == pytest.approx(seconds / np.asarray(base.seconds))


def test_no_rounds_are_an_error():
    with pytest.raises(ValueError, match="rounds=0"):
        interleaved({"f": lambda: None}, 0)


def test_a_program_fits_if_what_it_needs_at_once_is_there():
    given = {"arguments": 10, "outputs": 5, "aliased": 3, "temp": 4}
    assert Memory(**given).needed == 16 and Memory(**given).fits  # unknown: it is taken to fit
    assert Memory(**given, available=16).fits
    assert not Memory(**given, available=15).fits
