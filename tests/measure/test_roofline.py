"""A program as kernels at fusion borders, and its time by a device's peaks."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import precpass as pp
from precpass.analysis.sizes import NOMINAL_SIZE
from precpass.devices.peaks import PEAKS, Peaks, peaks_of
from precpass.measure import roofline
from precpass.measure.counts import count
from precpass.measure.roofline import Work, work_of
from tests.support.passes import quiet

each_device = pytest.mark.parametrize("peaks", PEAKS, ids=str)
N = 64
SIZE = 4.0 * N * N  # of a float32 matrix


def f32(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


X = f32(N, N)


def work(fn: Callable[..., Any], *args: Any, policy: Any = None) -> Work:
    """That of a function as it is written, or under a policy."""
    if policy is None:
        return work_of(jax.make_jaxpr(fn)(*args))
    with quiet():
        return work_of(pp.auto_mixed(fn, policy=policy).trace(*args).jaxpr)


def kernels(found: Work) -> dict[str, list[float]]:
    """The bytes of the kernels, by name."""
    names = sorted({kernel.name for kernel, _ in found.kernels})
    return {name: [k.nbytes * n for k, n in found.kernels if k.name == name] for name in names}


def gain(fn: Callable[..., Any], *args: Any, on: Peaks, policy: Any = "AutoMixedBf16") -> float:
    wide, low = (work(fn, *args, policy=p).seconds(on) for p in ("AlwaysF32", policy))
    assert wide is not None and low is not None
    return wide / low


# ---------------------------------------------------------------- what is moved


def test_a_product_reads_its_operands_and_writes_its_result():
    found = work(jnp.dot, f32(8, 16), f32(16, 32))
    ((kernel, runs),) = found.kernels
    assert (kernel.nbytes, kernel.flops, runs) == (
        4.0 * (8 * 16 + 16 * 32 + 8 * 32),
        2.0 * 8 * 16 * 32,
        1,
    )
    assert found.nbytes == kernel.nbytes


def test_elementwise_work_is_one_fusion():
    def chain(x, y):
        z = jnp.tanh(x) * y + 1.0
        return z, jnp.exp(z) - y

    assert kernels(work(chain, X, X)) == {"fusion": [4 * SIZE]}


@pytest.mark.parametrize(
    "fn",
    [
        jax.nn.softmax,
        lambda x: (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-6),
    ],
    ids=["softmax", "layer norm"],
)
def test_a_row_is_read_for_each_of_its_reductions_and_once_more(fn):
    rows = 5 * 4 * N  # the reductions' own results, beside the matrix
    assert work(fn, X).nbytes == pytest.approx(4 * SIZE, abs=2 * rows)


def test_a_cast_of_what_is_in_memory_reads_and_writes_it():
    found = kernels(work(jnp.dot, X, X, policy="AutoMixedBf16"))
    # two operands of 4 bytes are read, and written in 2
    assert found == {"fusion": [2 * 1.5 * SIZE], "dot_general": [2 * 0.5 * SIZE + SIZE]}


def test_a_cast_of_what_a_fusion_makes_costs_nothing_more():
    def made(x, w):
        return jnp.tanh(x).astype(jnp.bfloat16) @ w

    found = kernels(work(made, X, X.update(dtype=jnp.bfloat16)))
    assert found == {"dot_general": [1.5 * SIZE], "fusion": [1.5 * SIZE]}


def test_what_is_cheaply_made_again_is_not_stored():
    def masked(x, w):
        mask = jnp.tril(jnp.ones((N, N), bool))
        return jnp.where(mask, x @ w, 0.0) * jnp.ones((N, 1))

    assert kernels(work(masked, X, X)) == {"dot_general": [3 * SIZE], "fusion": [2 * SIZE]}


def test_what_is_held_low_is_read_low():
    def kept(x, w):
        y = (x @ w).astype(jnp.bfloat16)
        return (y @ w.astype(jnp.bfloat16)).astype(jnp.float32) + y.astype(jnp.float32)

    found = kernels(work(kept, X, X))
    assert found["dot_general"] == [3 * SIZE, 1.5 * SIZE]
    # the cast of w, that of y, and the sum, which reads 16 bits twice
    assert sorted(found["fusion"]) == [1.5 * SIZE, 1.5 * SIZE, 2 * SIZE]


def test_a_product_that_sums_over_nothing_is_elementwise_work():
    def outer(x, y):
        return jnp.tanh(lax.dot_general(x, y, (((), ()), ((), ()))))

    assert kernels(work(outer, f32(N), f32(N))) == {"fusion": [SIZE + 2 * SIZE / N]}


def test_a_gather_reads_what_it_takes():
    found = work(lambda table, i: table[i], f32(1000, N), jax.ShapeDtypeStruct((3,), jnp.int32))
    assert kernels(found)["gather"] == [pytest.approx(2 * 3 * 4 * N, abs=3 * 8)]


def test_views_move_nothing():
    def views(x, w):
        return (x.T.reshape(2, N // 2, N)[0] @ w).T + 1.0

    half = SIZE / 2
    assert kernels(work(views, X, X)) == {
        "dot_general": [half + SIZE + half],
        "fusion": [half + half],
    }


@pytest.mark.parametrize(
    "call",
    [
        jax.jit,
        jax.checkpoint,
        lambda f: jax.jit(jax.jit(f)),
        lambda f: lambda x: jax.nn.relu(f(x)),
    ],
    ids=["jit", "remat", "nested", "custom_jvp"],
)
def test_a_call_has_no_border(call):
    def between(x):
        return jnp.tanh(x) * 2.0

    def plain(x, w):
        return jax.nn.relu(between(x @ w)) @ w

    def called(x, w):
        return jax.nn.relu(call(between)(x @ w)) @ w

    assert kernels(work(called, X, X)) == kernels(work(plain, X, X))


def test_a_body_that_is_called_twice_runs_twice():
    inner = jax.jit(lambda x, w: jnp.tanh(x @ w))
    found = work(lambda x, w: inner(inner(x, w), w), X, X)
    assert kernels(found) == {"dot_general": [3 * SIZE] * 2, "fusion": [2 * SIZE] * 2}


def test_what_nothing_needs_is_not_there():
    def dead(x, w):
        lax.scan(lambda c, _: (c @ w, None), x, length=3)
        return x @ w, jnp.argsort(x)[:0]

    assert kernels(work(dead, X, X))["dot_general"] == [3 * SIZE]


def test_what_only_later_derivatives_read_is_not_there(monkeypatch):
    def layers(ws, x):
        return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0].sum()

    def moved() -> float:
        return work(jax.grad(layers), f32(6, N, N), X, policy="AutoMixedBf16").nbytes

    def network(ws, x):
        def layer(x, w):
            return x + jax.nn.gelu(x @ w[0]) @ w[1], None

        return jnp.square(lax.scan(layer, x, ws)[0]).mean()

    sizes = (f32(24, 2048, 8192), f32(24, 8192, 2048)), f32(8192, 2048)
    wide, low = (work(jax.grad(network), *sizes, policy=p) for p in ("AlwaysF32", "AutoMixedBf16"))
    assert low.nbytes < 0.85 * wide.nbytes

    without = moved()
    monkeypatch.setattr(roofline, "unread", lambda _graph: SimpleNamespace(values=frozenset()))
    # the wide form of what each trip keeps on 16 bits is written and read
    assert moved() >= without + 6 * 2 * SIZE


# ---------------------------------------------------------------- loops


def test_a_scan_runs_as_often_as_it_is_long():
    def layers(x, ws):
        return lax.scan(lambda x, w: (x @ w, None), x, ws)[0]

    jaxpr = jax.make_jaxpr(layers)(X, f32(7, N, N))
    found = work_of(jaxpr)
    ((kernel, runs),) = found.kernels
    assert (kernel.nbytes, runs) == (3 * SIZE, 7)
    assert kernel.flops * runs == count(jaxpr).flops["f32"] == 7 * 2 * N**3
    assert not found.guesses


def test_scans_within_scans_multiply_and_branches_add():
    def step(x, w):
        return lax.cond(x[0, 0] > 0, lambda x: x @ w, lambda x: (x @ w) @ w, x), None

    def nested(x, ws):
        return lax.scan(
            lambda x, w: (lax.scan(lambda x, _: step(x, w), x, length=3)[0], None), x, ws
        )[0]

    jaxpr = jax.make_jaxpr(nested)(X, f32(5, N, N))
    products = sum(n for k, n in work_of(jaxpr).kernels if k.name == "dot_general")
    assert products == 5 * 3 * 3
    assert products * 2 * N**3 == count(jaxpr).flops["f32"] - measure_others(jaxpr)


def measure_others(jaxpr: Any) -> float:
    """The FLOPs of a jaxpr that are no products'."""
    counts = count(jaxpr)
    return counts.flops["f32"] % (2 * N**3)


def test_a_while_loop_is_a_guess_and_says_so():
    def loop(x, w):
        return lax.while_loop(lambda x: x[0, 0] < 1.0, lambda x: x @ w, x)

    found = work(loop, X, X)
    assert found.guesses
    assert dict((k.name, n) for k, n in found.kernels)["dot_general"] == NOMINAL_SIZE


def test_what_a_loop_carries_unchanged_is_not_moved_and_what_it_stacks_is():
    def loop(x):
        return lax.scan(lambda c, _: ((c[0] + 1.0, c[1]), c[1]), (x[0], x), length=3)

    found = kernels(work(loop, X))
    assert found["copy"] == [3 * 2 * SIZE]
    assert found["fusion"] == [3 * 2 * SIZE / N]
    found = kernels(work(lambda x, ys: lax.map(lambda y: (x, y + 1.0), ys), X, f32(3, N, N)))
    assert found == {"copy": [3 * 2 * SIZE], "fusion": [3 * 2 * SIZE]}


def test_a_loops_constant_is_cast_once():
    def loop(x, w):
        def step(x, _):
            low = x.astype(jnp.bfloat16), w.T.astype(jnp.bfloat16)
            return lax.dot(*low, preferred_element_type=jnp.float32), None

        return lax.scan(step, x, length=5)[0]

    found = work(loop, X, X)
    assert sorted(kernels(found)["fusion"]) == [1.5 * SIZE, 5 * 1.5 * SIZE]
    called = jax.jit(loop)
    twice = work(lambda x, w: called(called(x, w), w), X, X)
    assert twice.nbytes == 2 * found.nbytes


def test_a_shard_map_is_one_shard():
    mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = {"in_specs": (jax.P("i"), jax.P()), "out_specs": jax.P("i")}
    found = work(jax.shard_map(jnp.dot, mesh=mesh, **specs), X, X)
    assert kernels(found) == {"dot_general": [2 * SIZE]}


def test_calls_may_be_nested_deeper_than_pythons_stack():
    def fn(x):
        return jnp.tanh(x @ x)

    jaxpr = jax.make_jaxpr(fn)(X)
    eqn = jax.make_jaxpr(jax.jit(fn))(X).eqns[0]
    for _ in range(2000):
        inner = eqn.params | {"jaxpr": jaxpr}
        opened = getattr(jaxpr, "jaxpr", jaxpr)
        call = eqn.replace(invars=opened.invars, outvars=opened.outvars, params=inner)
        outer = opened.replace(eqns=[call])
        jaxpr = jaxpr.replace(jaxpr=outer) if hasattr(jaxpr, "jaxpr") else outer
    assert kernels(work_of(jaxpr)) == {"dot_general": [3 * SIZE], "fusion": [2 * SIZE]}


def test_a_loop_updates_its_state_in_place():
    def fill(x):
        def put(buffer, i):
            return lax.dynamic_update_slice(buffer, x[:1] * 2.0, (i, 0)), None

        return lax.scan(put, x, jnp.arange(N))[0]

    row = SIZE / N
    moved = kernels(work(fill, X))["dynamic_update_slice"]
    assert moved == [pytest.approx(N * 2 * row, abs=N * 16)]


# ---------------------------------------------------------------- the time


@each_device
def test_the_gain_of_a_large_product_is_the_ratio_of_the_peaks(peaks):
    n = 2**21
    ratio = peaks.bf16 / peaks.flops("f32")
    assert gain(jnp.dot, f32(n, n), f32(n, n), on=peaks) == pytest.approx(ratio, rel=5e-3)


@each_device
def test_elementwise_work_with_float32_in_and_out_gains_nothing(peaks):
    def chain(x, y):
        return jnp.tanh(x) * y + 1.0

    for policy in ("AutoMixedBf16", "AlwaysBf16"):
        assert gain(chain, X, X, on=peaks, policy=policy) == 1.0


@each_device
def test_the_gain_of_elementwise_work_is_that_of_its_bytes(peaks):
    def chain(x, y):
        return jnp.tanh(x) * y + 1.0

    low = X.update(dtype=jnp.bfloat16)
    wide, narrow = (work(chain, x, x).seconds(peaks) for x in (X, low))
    assert wide / narrow == 2.0


def block(p, x):
    def norm(x):
        centred = x - x.mean(-1, keepdims=True)
        return centred * lax.rsqrt((centred * centred).mean(-1, keepdims=True) + 1e-6)

    def heads(w):
        return (norm(x) @ w).reshape(*x.shape[:2], 16, -1)

    weights = jnp.einsum("bthd,bshd->bhts", heads(p["q"]), heads(p["k"]))
    mixed = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(weights), heads(p["v"]))
    x = x + mixed.reshape(x.shape) @ p["o"]
    return x + jax.nn.gelu(norm(x) @ p["up"]) @ p["down"]


def loss(p, x):
    return jnp.square(lax.scan(lambda x, p: (block(p, x), None), x, p)[0]).mean()


@pytest.mark.release(keep=1)
@pytest.mark.parametrize("device", ["a100", "h100", "h200", "mi300x"])
def test_a_transformers_step_lies_between(device):
    d = 2048
    p = {name: f32(24, d, d) for name in "qkvo"} | {
        "up": f32(24, d, 4 * d),
        "down": f32(24, 4 * d, d),
    }
    (peaks,) = peaks_of(device)
    found = gain(jax.grad(loss), p, f32(8, 1024, d), on=peaks)
    assert 1.1 < found < 0.95 * peaks.bf16 / peaks.flops("f32")


def test_a_product_runs_as_precisely_as_it_is_asked_to():
    (h100,), (v4,) = peaks_of("h100"), peaks_of("v4")
    n = 2**15

    def seconds(precision, on):
        found = work(lambda x, y: jnp.dot(x, y, precision=precision), f32(n, n), f32(n, n))
        return found.seconds(on)

    flops = 2.0 * n**3
    assert seconds(None, h100) == seconds("high", h100) == flops / h100.tf32
    assert seconds("highest", h100) == flops / h100.f32
    assert seconds("highest", v4) == pytest.approx(flops / v4.bf16 * 6)
    assert seconds("BF16_BF16_F32", h100) == flops / h100.bf16
    assert seconds("BF16_BF16_F32_X3", h100) == pytest.approx(flops / h100.bf16 * 3)
    algorithm = lax.DotAlgorithm(jnp.bfloat16, jnp.bfloat16, jnp.float32)
    assert seconds(algorithm, h100) == flops / h100.bf16
    with jax.default_matmul_precision("highest"):
        assert seconds(None, h100) == flops / h100.f32


def test_a_format_without_a_published_peak_has_no_time():
    (h100,), (v5e,) = peaks_of("h100"), peaks_of("v5e")
    half = X.update(dtype=jnp.float16)
    found = work(jnp.dot, half, half)
    assert found.seconds(h100) is not None and not found.without_peak(h100)
    assert found.seconds(v5e) is None and found.without_peak(v5e) == {"f16"}

    def region(x, w):
        with pp.keep("f64"):
            return x @ w

    found = work(region, X, X, policy="AutoMixedBf16")
    assert found.seconds(v5e) is None and found.without_peak(v5e) == {"f64"}
    products = [k.flops for k, _ in found.kernels if k.flops]
    assert products == [2 * N**3]


def test_of_a_linear_solve_only_what_solves_counts():
    def solved(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.linalg.solve(a, b)

    found = work(solved, X, X)
    assert not found.guesses and sum(found.product_flops.values()) == 0
    # of its gradient: one product, of the two solutions
    gradient = work(jax.grad(lambda a, b: solved(a, b).sum()), X, X)
    assert not gradient.guesses and sum(gradient.product_flops.values()) == 2.0 * N**3

    def symmetric(a: jax.Array, b: jax.Array) -> jax.Array:
        return lax.custom_linear_solve(
            lambda x: a @ x, b, lambda _, b: (a + 1.0) @ b, symmetric=True
        )

    assert sum(work(symmetric, X, f32(N)).product_flops.values()) == 2.0 * N**2
    counts = count(jax.make_jaxpr(lambda a, b: solved(a, b) @ b)(X, X))
    assert sum(counts.flops.values()) < 3.0 * N**3


def test_arithmetic_that_nobody_counted_is_named():
    found = work(lambda x: jnp.linalg.cholesky(x @ x.T) + jnp.sort(x), X)
    assert found.by_bytes == {"cholesky"}

    def prints(x):
        jax.debug.print("{}", x[0, 0])
        return x @ x

    assert not work(prints, X).by_bytes
    assert work(lambda x, k: x * jax.random.normal(k, x.shape), X, jax.random.key(0)).by_bytes <= {
        *("random_bits", "threefry2x32")
    }


def test_integers_keys_and_empty_arrays_have_work_too():
    def fn(x, i, key):
        taken = x[i] @ jnp.ones((N, 0))
        return taken, i + 1, jax.random.split(key), jnp.stack([i, i]) @ jnp.stack([i, i], 1)

    found = work(fn, X, jnp.arange(3), jax.random.key(0))
    assert found.nbytes > 0
    assert all(found.seconds(peaks) is not None for peaks in PEAKS)
    assert "dot_general of integers" in found.by_bytes
    assert work(lambda: ()).nbytes == 0
