"""`monitor`: what it counts, where it says a NaN was born, and that the output keeps its bits."""

import functools
import linecache
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

import precpass as pp
from precpass import jaxpr as ir
from precpass.numerics.monitor.figures import Recorder
from precpass.view.text import shown_path
from tests.support.jaxprs import named
from tests.support.values import normal

P = PartitionSpec
f16, f32 = jnp.float16, jnp.float32
monitor = functools.partial(pp.monitor, policy="AlwaysF32")


def health_of(fn: Callable[..., Any], *args: Any) -> pp.numerics.Health:
    return monitor(fn)(*args)[1]


def seen_of(health: pp.numerics.Health, primitive: str) -> Any:
    (found,) = (s for s in health.seen() if s.place.primitive == primitive)
    return found


def code_of(seen: Any) -> str:
    return linecache.getline(seen.place.source.file, seen.place.source.line).strip()


# ---------------------------------------------------------------- what is counted


def test_magnitudes_are_of_finite_values_and_not_of_zeros():
    seen = seen_of(
        health_of(jnp.exp2, jnp.asarray([3.0, -4.0, jnp.inf, -jnp.inf, jnp.nan])), "exp2"
    )
    assert (seen.largest, seen.smallest, seen.nonfinite, seen.runs) == (8.0, 2.0**-4, 2, 1)
    assert (seen.infinities, seen.nans, seen.lost, seen.reads) == (0, 0, 0, None)


def test_subnormal_numbers_are_not_zero():
    tiny = np.asarray([2.0**-140, 1.0], np.float32)
    seen = seen_of(health_of(lambda x: jnp.where(x > 0.5, x, x[::-1] * 0 + x), tiny), "select_n")
    assert seen.largest == 1.0
    assert seen_of(health_of(lambda x: lax.rev(-x, (0,)), tiny), "neg").smallest == 2.0**-140


@pytest.mark.release(keep=2)
@pytest.mark.parametrize(
    ("fn", "x", "lost"),
    [
        (lambda x: x.astype(f16).astype(f32), [1e-9, 0.0, 1.0], 1),
        (lambda x: x * np.float32(1e-30), [1e-30, 0.0, 1.0], 1),
        (lambda x: jnp.exp(-x), [1e4, 1.0, jnp.inf], 1),
        (lambda x: x**3, [1e-30, 0.0, 1.0], 1),
        (lambda x: x / np.float32(1e30), [1e-30, 0.0, 1.0], 1),
        (lambda x: x - x, [1.0, 2.0, 3.0], 0),
        (lambda x: jnp.maximum(x, 0.0), [-1.0, 2.0, 3.0], 0),
    ],
    ids=["cast", "mul", "exp", "power", "div", "sub", "relu"],
)
def test_lost_to_zero_is_zero_of_what_is_not(fn: Any, x: Any, lost: int):
    # the policy leaves the user's cast to float16 where it is
    _, health = pp.monitor(fn, pp.Custom({"compute": "f32"}))(jnp.asarray(x, f32))
    assert sum(s.lost for s in health.seen()) == lost


def test_overflow_is_an_infinity_of_finite_operands():
    _, health = pp.monitor(lambda x: x.astype(f16), pp.Custom({"compute": "f32"}))(
        jnp.asarray([7e4, 1.0, jnp.inf])
    )
    (seen,) = health.seen()
    assert (seen.infinities, seen.nonfinite, seen.largest) == (1, 2, 1.0)


def test_a_nan_is_born_where_no_operand_is_one_and_passed_on_elsewhere():
    def f(x: Any) -> Any:
        with jax.named_scope("model"):
            y = jnp.log(x)  # the line
        return (y * 2.0 + 1.0).sum()

    health = health_of(f, jnp.asarray([1.0, -1.0, 2.0]))
    (born,) = health.born()
    assert (born.place.primitive, born.nans, born.infinities, born.place.scope) == (
        *("log", 1, 0),
        "model",
    )
    assert code_of(born) == "y = jnp.log(x)  # the line"
    assert [s.nonfinite for s in health.seen()] == [1, 1, 1, 1]
    # beside a NaN that was given
    (born,) = health_of(lambda x: jnp.log(x), jnp.asarray([jnp.nan, -1.0, 0.0, 1.0])).born()
    assert (born.nonfinite, born.nans, born.infinities) == (3, 1, 1)


def test_a_product_bears_a_nan_only_of_operands_without_any():
    x = jnp.full((4, 4), 1e30)
    assert seen_of(health_of(jnp.dot, x, x), "dot_general").infinities == 16
    mixed = x.at[0, 0].set(jnp.nan)
    seen = seen_of(health_of(jnp.dot, mixed, x), "dot_general")
    assert (seen.infinities, seen.nans, seen.nonfinite) == (0, 0, 16)
    # inf - inf is a NaN of no NaN
    seen = seen_of(
        health_of(jnp.dot, jnp.ones((1, 2)), jnp.asarray([[jnp.inf], [-jnp.inf]])), "dot_general"
    )
    assert (seen.nans, seen.infinities) == (1, 0)


@pytest.mark.parametrize("fn", [jnp.real, jnp.fft.irfft])
def test_what_complex_numbers_hand_on_is_not_born(fn: Any):
    z = jnp.asarray([complex(1, 1), complex(jnp.nan, 0), complex(1, jnp.inf)], jnp.complex64)
    _, health = pp.monitor(fn, "AlwaysF32")(z)
    assert not health.born() and sum(seen.nonfinite for seen in health.seen()) >= 1


def test_complex_results_have_rows():
    def f(z: Any) -> Any:
        return jnp.abs(z * z), jnp.fft.ifft(z)

    z = jnp.asarray([3 + 4j, 1e30 + 0j, 1e-30 + 1e-32j], jnp.complex64)
    mul = seen_of(health_of(f, z[::2]), "mul")
    assert (mul.place.dtype, mul.largest, mul.lost, mul.nonfinite) == ("complex64", 24.0, 1, 0)
    health = health_of(f, z[:2])
    mul, fft = seen_of(health, "mul"), seen_of(health, "fft")
    assert mul.is_birth and (mul.nonfinite, fft.nonfinite) == (1, 0)
    assert [seen.place.primitive for seen in health.born()] == ["mul"]


def test_a_gather_out_of_bounds_bears_a_nan():
    health = health_of(lambda x: x.at[jnp.asarray([7])].get(mode="fill"), jnp.ones(3))
    assert [s.place.primitive for s in health.born()][:1] == ["gather"]


# ---------------------------------------------------------------- control flow


def test_loops_join_their_trips_and_know_the_first():
    def f(x: Any) -> Any:
        return lax.scan(lambda c, t: (c * 1e10, jnp.log(5.0 - t)), x, jnp.arange(8.0))

    health = health_of(f, f32(1.0))
    mul, log = seen_of(health, "mul"), seen_of(health, "log")
    assert (mul.runs, mul.largest, mul.infinities, mul.first) == (8, float(f32(1e30)), 1, 3)
    assert (mul.nonfinite, log.nans, log.infinities, log.first) == (5, 2, 1, 5)
    assert mul.place.inside == ("scan",)


def test_the_branch_that_is_not_taken_did_not_run():
    def f(x: Any) -> Any:
        return lax.cond(x > 0, jnp.sqrt, lambda x: jnp.tanh(jnp.exp(x)), x)

    health = health_of(f, f32(4.0))
    runs = {s.place.primitive: s.runs for s in health.seen()}
    assert runs == {"sqrt": 0, "tanh": 1, "exp": 1} or runs == {"sqrt": 1, "tanh": 0, "exp": 0}
    assert seen_of(health, "sqrt").runs == 1
    assert "not reached: 2 equations" in health.summary()


def nested(x: Any, w: Any) -> Any:
    """All that is entered, one in the other."""

    @jax.custom_vjp
    def scaled(x: Any) -> Any:
        return x * 0.5

    scaled.defvjp(lambda x: (scaled(x), x), lambda _x, ct: (ct * 0.5,))

    @jax.checkpoint
    def layer(x: Any, w: Any) -> Any:
        x = jax.nn.relu(scaled(x @ w))
        return lax.cond(x.sum() > 0, lambda x: jax.nn.gelu(x), lambda x: x - 1.0, x)

    def body(x: Any, w: Any) -> Any:
        x = layer(x, w)
        start = lax.stop_gradient(x).mean(), 0
        shift, _ = lax.while_loop(lambda s: s[1] < 2, lambda s: (jnp.tanh(s[0]), s[1] + 1), start)
        return x + shift, x.mean()

    x, means = lax.scan(body, x, w)
    return jnp.square(x).sum() + means.sum()


NESTED = normal(0, 4, 8), normal(1, 3, 8, 8)


@pytest.mark.release(keep=1)
@pytest.mark.parametrize("policy", ["AlwaysF32", "AutoMixedBf16"])
def test_no_bit_of_the_output_changes(policy: str):
    fn = jax.value_and_grad(nested, (0, 1))
    out, health = pp.monitor(fn, policy)(*NESTED)
    after = pp.inspect(fn, policy)(*NESTED).after
    want = jax.jit(lambda *xs: ir.evaluate(after, xs))(*NESTED)
    for a, b in zip(jax.tree.leaves(out), want, strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    assert not health.born()
    assert all(s.runs for s in health.seen() if s.place.inside[-1:] != ("branch 0",))
    where = {s.place.inside for s in health.seen() if s.place.primitive == "dot_general"}
    assert where == {("scan",)}
    # forward and backward, three trips each of the layer, two more of the loop within
    runs = {s.runs for s in health.seen() if s.place.primitive == "tanh"}
    assert {3, 6} <= runs


def test_what_makes_the_output_is_no_equation_that_is_looked_at():
    # XLA fuses what has one reader only: whether bits change, a small program need not show
    jaxpr = jax.make_jaxpr(monitor(lambda x: jnp.tanh(x * 2.0 + 1.0)))(jnp.ones(4))
    (call,) = ir.open_jaxpr(jaxpr).eqns
    (inner,) = (ir.open_jaxpr(j) for j in ir.hidden_jaxprs(call))
    needed, names = {inner.outvars[0]}, list[str]()
    for eqn in reversed(inner.eqns):
        if needed & set(eqn.outvars):
            needed |= {v for v in eqn.invars if not ir.is_literal(v)}
            names.append(eqn.primitive.name)
            readers = [e for e in inner.eqns if any(v is eqn.outvars[0] for v in e.invars)]
            if eqn.primitive.name in ("mul", "add"):
                assert len(readers) == 1
    assert names == ["tanh", "add", "mul", "precpass_undifferentiated"]


def test_what_derivatives_alone_read_has_no_row():
    _, health = pp.monitor(lambda x, w: x @ w, "AutoMixed")(*(jnp.ones((8, 8)),) * 2)
    kinds = [s.place.primitive for s in health.seen()]
    assert kinds.count("dot_general") == 1
    assert not any("precpass" in kind for kind in kinds)


@pytest.mark.release(keep=1)
@pytest.mark.parametrize("check_vma", [True, False])
def test_shards_are_joined(check_vma: bool):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))

    def f(x: Any) -> Any:
        def shard(x: Any) -> Any:
            y = lax.scan(lambda c, t: (c + jnp.log(t), None), x[0] * 0, x)[0]
            y = lax.psum(y, "x")
            return lax.cond(y > 0, lambda y: y, lambda y: y * 2, y)

        specs = {"in_specs": P("x"), "out_specs": P()}
        return jax.shard_map(shard, mesh=mesh, **specs, check_vma=check_vma)(x)

    out, health = monitor(f)(jnp.arange(8.0))
    assert not jnp.isfinite(out)
    log = seen_of(health, "log")
    assert (log.infinities, log.runs, log.largest) == (1, 8, float(jnp.log(f32(7.0))))


def test_what_has_effects_runs_once():
    ran: list[float] = []

    def f(x: Any) -> Any:
        jax.debug.callback(lambda x: ran.append(float(x)), x, ordered=True)
        y = jnp.log(x)
        jax.debug.callback(lambda y: ran.append(float(y)), y, ordered=True)
        return y

    _, health = monitor(f)(f32(0.0))
    jax.effects_barrier()
    assert ran == [0.0, -np.inf]
    assert [s.infinities for s in health.born()] == [1]
    monitored = monitor(f, every=2)
    health = monitored.init(f32(1.0))
    for _ in range(3):
        _, health = monitored(health, f32(1.0))
    jax.effects_barrier()
    assert ran[2:] == [1.0, 0.0] * 3
    assert (int(health.calls), int(health.looked)) == (3, 2)


# ---------------------------------------------------------------- calls


def test_under_vmap_and_jit_and_scan_it_is_a_pytree():
    x = jnp.asarray([[1.0, 2.0], [0.0, -1.0]])
    _, health = jax.jit(jax.vmap(monitor(jnp.log)))(x)
    assert health.figures.largest.shape == (2, 1)
    (seen,) = health.seen()
    assert (seen.runs, seen.infinities, seen.nans, seen.largest) == (
        2,
        1,
        1,
        float(jnp.log(f32(2))),
    )
    _, stacked = lax.scan(lambda c, x: (c, monitor(jnp.log)(x)[1]), 0, x)
    assert stacked.seen() == health.seen()
    leaves, tree = jax.tree.flatten(health)
    assert jax.tree.unflatten(tree, leaves).seen() == health.seen()


def test_every_looks_at_the_first_of_so_many_calls():
    monitored = monitor(lambda x: jnp.log(x), every=3)
    health = monitored.init(jax.ShapeDtypeStruct((2,), f32))
    assert [s.runs for s in health.seen()] == [0]

    def step(health: Any, x: Any) -> Any:
        out, health = monitored(health, x)
        return health, out

    xs = jnp.ones((7, 2)).at[1].set(-1.0).at[6].set(0.0)
    health, out = lax.scan(step, health, xs)
    assert np.array_equal(out, jnp.log(xs), equal_nan=True)
    (seen,) = health.seen()
    assert (int(health.calls), int(health.looked), seen.runs) == (7, 3, 3)
    assert (seen.nans, seen.infinities) == (0, 2)


def test_healths_are_merged():
    monitored = monitor(jnp.log)
    one, two = (monitored(jnp.asarray(x, f32))[1] for x in ([1.0, 8.0], [0.0, 2.0, 3.0]))
    both = jax.jit(lambda a, b: a.merged(b))(one, two)
    (seen,) = both.seen()
    assert (seen.runs, seen.infinities, seen.largest) == (2, 1, float(jnp.log(f32(8.0))))
    assert (int(both.calls), int(both.looked)) == (2, 2)
    with pytest.raises(ValueError, match=r"different programs, log \(1 equation\) and exp"):
        one.merged(monitor(jnp.exp)(jnp.ones(2))[1])
    with pytest.raises(TypeError, match=r"monitored.init\(\*args\)"):
        monitor(jnp.sin, every=2)(jnp.ones(2))
    with pytest.raises(TypeError, match="takes a Health, not an int"):
        one.merged(3)  # pyright: ignore[reportArgumentType]


def test_counts_stay_at_their_largest_value():
    _, health = monitor(lambda x: jnp.log(x))(jnp.zeros(3))
    many = health.figures._replace(counts=jnp.full((1, 5), 2**31 - 2, jnp.int32))
    merged = pp.numerics.Health(many, *jax.tree.leaves(health)[-2:], health.places, "f").merged(
        health
    )
    assert int(merged.figures.counts.min()) >= 2**31 - 2
    assert "2147483647 or more inf" in merged.summary()


@pytest.mark.parametrize(
    "around",
    [jax.grad, lambda f: jax.grad(jax.jit(f)), lambda f: lambda x: jax.jvp(f, (x,), (x,))],
    ids=["grad", "grad-jit", "jvp"],
)
@pytest.mark.usefixtures("jax_leaks_too")  # a jit whose trace raises
def test_a_derivative_through_it_is_an_error(around: Any):
    with pytest.raises(TypeError, match=r"monitor\(jax.grad\(loss\)\)"):
        around(lambda x: monitor(jnp.sin)(x)[0])(f32(1.0))


@pytest.mark.parametrize("every", [0, -1, 1.5, True, "3"])
def test_bad_intervals_are_refused(every: Any):
    with pytest.raises(ValueError, match="whole number of 1 or more"):
        monitor(jnp.sin, every=every)


def test_odd_arguments():
    def f(tree: Any, key: Any, mode: str) -> Any:
        x = tree["x"] + jax.random.normal(key, (3,))
        return {"mode": mode, "n": tree["n"] + 1, "y": [x.astype(f16), jnp.zeros((0, 2)) * 2.0]}

    tree = {"x": jnp.ones(3, jnp.float32), "n": jnp.int32(3), "none": None}
    out, health = monitor(f)(tree, jax.random.key(0), "train")
    assert out["mode"] == "train"
    assert int(out["n"]) == 4
    assert not health.born()
    low = jnp.asarray([1.0, 2.0], jnp.float8_e4m3fn)
    assert seen_of(health_of(lambda x: x.astype(f32), low), "convert_element_type").largest == 2.0


def test_no_floating_equations_no_rows():
    out, health = monitor(lambda n: n + 1)(jnp.int32(3))
    assert int(out) == 4
    assert health.seen() == ()
    assert repr(health).startswith("<Health of <lambda>: 0 equations")


def test_without_jit_too():
    with jax.disable_jit():
        out, health = monitor(lambda x: lax.scan(lambda c, t: (c + jnp.log(t), c), 0.0, x))(
            jnp.asarray([1.0, 0.0])
        )
    assert out[0] == -jnp.inf
    assert [s.first for s in health.born()] == [1]


def test_references_are_left_alone():
    def f(x: Any) -> Any:
        ref = jax.new_ref(jnp.zeros(4))

        def body(_: Any, t: Any) -> Any:
            ref[...] = ref[...] + t
            return None, None

        lax.scan(body, None, jnp.log(x))
        return ref[...].sum()

    out, health = monitor(f)(jnp.ones((3, 4)).at[1, 2].set(0.0))
    assert out == -jnp.inf
    assert [s.place.primitive for s in health.born()] == ["log"]


def test_float64_is_seen_to_the_ends_of_float32():
    with jax.enable_x64(True):
        seen = seen_of(health_of(lambda x: -x, jnp.asarray([1e300, 1e-300, jnp.nan])), "neg")
        assert (seen.nonfinite, seen.largest) == (1, float(np.finfo(np.float32).max))
        assert 0.0 < seen.smallest < 1e-44


def test_extremes_are_of_lines_that_the_user_wrote():
    """A loss scale and the division by it are the largest and smallest numbers of this step."""
    x = 1e-20 * jnp.linspace(1.0, 2.0, 4)
    f = pp.loss_scale.scaled_value_and_grad(lambda w: (w * x).sum())
    _, health = monitor(f)(pp.loss_scale.StaticLossScale(2.0**40), jnp.full(4, 1e10))
    where = {bool(seen.place.source.file) for seen in health.seen()}
    assert where == {True, False}  # both kinds of equations are recorded
    largest, smallest = health.summary().splitlines()[-2:]
    assert largest.startswith("largest magnitude")
    assert smallest.startswith("smallest magnitude")
    assert shown_path(__file__) in largest
    assert shown_path(__file__) in smallest


def test_the_summary_has_the_worst_first():
    def f(x: Any) -> Any:
        lost = jnp.exp(-1e4 * (1.0 + x * x))
        return (jnp.log(x - 2.0) + lost).sum()

    _, health = monitor(f)(jnp.asarray([1.0, 3.0]))
    lines = health.summary().splitlines()
    assert lines[0] == f"f: {len(health.places)} equations, 1 of 1 call looked at"
    assert lines[1] == "NaNs and infinities first appear:"
    assert lines[2].startswith(f"  1 NaN by log  {shown_path(__file__)}:")
    assert "return (jnp.log(x - 2.0) + lost).sum()" in lines[2]
    assert [line for line in lines if line.startswith("lost to zero")]
    assert repr(health).endswith("born at 1, values are lost to zero at 1>")
    for n, said in ((1, "  1 value (100 %) by exp"), (2, "  2 values (100 %) by exp")):
        _, health = monitor(jnp.exp)(jnp.full(n, -1e4))
        assert said in health.summary()
    _, health = monitor(jnp.sin)(jnp.ones(2))
    assert "all values are finite, and none was lost to zero" in health.summary()


# ---------------------------------------------------------------- what it costs


def test_a_value_is_reduced_once_for_all_that_make_and_read_it():
    def read_by_many(x: Any, w: Any) -> Any:
        y = x @ w
        return y @ w, w @ y, lax.cumsum(y), lax.exp(y)

    args = jnp.ones((128, 128)), jnp.ones((128, 128))
    program, record = recorded(read_by_many, *args, reads=True)
    assert len(named(record, "reduce")) == len(args) + len(program.eqns)


def recorded(fn: Any, *args: Any, reads: bool = False) -> tuple[Any, Any]:
    """The jaxpr of a function, and that of its record."""
    program = jax.make_jaxpr(fn)(*args)
    look = Recorder(reads=reads)
    return program, jax.make_jaxpr(lambda *xs: ir.watched(program, xs, look)[1])(*args)


def test_values_of_few_elements_are_reduced_together():
    @jax.jit
    def layer(x: Any) -> Any:
        return jnp.exp(x) * x

    def layers(depth: int) -> Any:
        return lambda x: functools.reduce(lambda y, _: layer(jnp.sin(y)), range(depth), x)

    x = jnp.ones((8, 8))
    short, long = (recorded(layers(depth), x)[1] for depth in (2, 8))
    assert len(named(long, "reduce")) == len(named(short, "reduce"))
    assert len(named(long, "gather")) == len(named(short, "gather"))


def test_what_keeps_magnitudes_is_not_reduced_again():
    def keeping(x: Any, low: Any) -> Any:
        y = jnp.sin(x)
        wide = low.astype(jnp.float32)
        return (
            -y,
            lax.stop_gradient(y),
            abs(y),
            y.T @ y,
            jnp.broadcast_to(y, (2, 128, 128)).sum(),
            wide,
        )

    args = jnp.ones((128, 128)), jnp.ones((128, 128), jnp.bfloat16)
    record = recorded(keeping, *args)[1]
    # of `sin`, of the low argument, and of the product; the sum is a scalar
    assert len([e for e in named(record, "reduce") if e.invars[0].aval.size > 4096]) == 3


def test_the_figures_of_what_keeps_magnitudes():
    x = jnp.asarray([[0.0, -2.0, jnp.inf], [jnp.nan, 3e-38, 1.0]])

    def keeping(x: Any) -> Any:
        low = x.astype(jnp.bfloat16)
        wide = low.astype(jnp.float32)
        return -wide, jnp.broadcast_to(abs(wide.T), (2, 3, 2)) + 1.0, jnp.sum(wide.T)

    _, health = monitor(keeping)(x)
    for seen in health.seen():
        found = seen.nonfinite, seen.nans, seen.infinities
        if seen.place.primitive in ("convert_element_type", "neg", "abs"):
            assert (*found, seen.lost, seen.largest) == (2, 0, 0, 0, 2.0)
            assert 2.9e-38 < seen.smallest < 3.1e-38
        else:
            assert found == ({"reduce_sum": 1, "add": 4}[seen.place.primitive], 0, 0)


@pytest.mark.parametrize("rows", [2, 3000])
def test_an_operand_with_one_element_along_an_axis_counts_for_each(rows: int):
    """JAX's equations repeat axes of size one by themselves."""
    x = np.ones((rows, 2), np.float32)
    x[0] = np.nan, 3e38
    _, health = pp.monitor(lax.mul, "AlwaysF32")(x, np.asarray([[1.0, 1e3]], np.float32))
    (seen,) = health.born()
    assert (seen.infinities, seen.nans) == (1, 0)
    tiny = np.full((rows, 2), 1e-30, np.float32)
    _, health = pp.monitor(lax.mul, "AlwaysF32")(tiny, tiny[:1])
    assert [seen.lost for seen in health.seen()] == [2 * rows]


def test_the_magnitude_of_a_complex_number_may_overflow():
    _, health = pp.monitor(jnp.abs, "AlwaysF32")(jnp.asarray([3e38 + 3e38j, 1.0], jnp.complex64))
    assert [(seen.place.primitive, seen.infinities) for seen in health.born()] == [("abs", 1)]
