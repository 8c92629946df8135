"""Ladder: the state machine step by step, and methods whose precision rises as they converge."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import precpass as pp
from tests.support.passes import quiet
from tests.support.values import normal

pytestmark = pytest.mark.programs

f32 = jnp.float32
BF16, F32 = (pp.types.Precision.parse(p).unit_roundoff for p in ("bf16", "f32"))
LADDER = ("bf16", "f32", "f64")

# ---------------------------------------------------------------- the state machine


_updated = jax.jit(pp.numerics.Ladder.updated, static_argnames="exact")


def followed(ladder: Any, measures: Any, exact: bool = False) -> list[Any]:
    """The rung and the status after each of some measures, then the ladder; states are counted."""
    seen: list[Any] = []
    for i, f in enumerate(measures):
        ladder = _updated(ladder, f32(f), f32(i + 1), exact=exact)
        seen.append((ladder.rungs[int(ladder.rung)].name, int(ladder.status)))
    return [*seen, ladder]


def fresh(**options: Any) -> pp.numerics.Ladder:
    return pp.numerics.Ladder.create(LADDER, f32(0), **{"scale": 1.0, "patience": 3, **options})


def rungs(seen: Any) -> str:
    """First letters: b, f and d for float64."""
    return "".join({"bf16": "b", "f32": "f", "f64": "d"}[name] for name, _ in seen[:-1])


@pytest.mark.parametrize(
    "measures, want",
    [
        # each step counts that is more than a unit roundoff of the scale below the last that did
        ([0.5, 0.49, 0.48, 0.47, 0.46], "bbbbb"),
        # three steps without
        ([0.5, 0.5, 0.5, 0.5], "bbbf"),
        # small ones add up
        ([0.5, 0.4985, 0.497, 0.4955, 0.494, 0.4925], "bbbbbb"),
        # too small ones do not
        ([0.5, 0.4999, 0.4998, 0.4997], "bbbf"),
        # a rise is no progress, and what comes after it counts from the best
        ([0.5, 0.7, 0.6, 0.4, 0.6, 0.6, 0.6], "bbbbbbf"),
        # nothing is left that bfloat16 can tell
        ([0.5, 0.003], "bf"),
        # an overflow
        ([0.5, np.inf], "bf"),
        ([np.nan, 0.5, np.nan], "ffd"),
        # the same on the next rung, by its own unit roundoff
        ([0.5, 0.003, 0.002, 0.0019, 0.00189, 0.001889], "bfffff"),
        ([0.5, 0.003, 0.002, 0.002, 0.002, 0.002], "bffffd"),
        ([0.5, 0.003, 3e-8], "bfd"),
    ],
)
def test_the_rung_is_raised_by_its_own_unit_roundoff(measures: Any, want: str):
    assert rungs(followed(fresh(), measures)) == want
    # the criterion is relative: it is the same in any units
    for unit in (1e-6, 1e6):
        scaled = fresh(scale=unit)
        assert rungs(followed(scaled, np.asarray(measures) * unit)) == want


def test_the_first_measure_is_the_scale_where_none_is_given():
    assert rungs(followed(fresh(scale=None), [7.0, 6.0, 7 * 0.0038])) == "bbf"
    assert rungs(followed(fresh(scale=None), [7.0, 6.0, 7 * 0.004])) == "bbb"
    for begun in (fresh(scale=None), jax.jit(lambda s: fresh(scale=s))(0.0)):
        assert float(followed(begun, [np.inf, 3.0, 2.0])[-1].scale) == 3.0


@pytest.mark.parametrize("scale", [-1.0, np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("exact", [False, True])
def test_beside_a_traced_scale_that_is_none_nothing_converges(scale: float, exact: bool):
    begun = jax.jit(lambda s: fresh(scale=s, tol=1e-3))(scale)
    ladder = followed(begun, [1.0, 1e-6] + [0.0] * 12, exact)[-1]
    # it ends, after some steps without progress on each rung
    assert not bool(ladder.converged) and not bool(ladder.running)
    text = str(ladder).splitlines()
    assert text[0].startswith("ended without convergence in f64")
    assert text[1] == "  its scale was no positive number, and no measure is small beside that"
    assert text[2].startswith("  after ") and text[2].endswith(": to f32, stalled at 0")


def test_a_negative_measure_tells_nothing():
    seen = followed(fresh(tol=0.5), [0.9, -1e-9])
    assert rungs(seen) == "bf" and [status for _, status in seen[:-1]] == [0, 0]
    ladder = seen[-1]
    assert float(ladder.best) == 1.0 == float(ladder.state)
    assert str(ladder).splitlines()[1] == "  after 2: to f32, negative at -1e-09"
    assert rungs(followed(fresh(scale=None), [-1.0, 3.0])) == "ff"
    assert float(followed(fresh(scale=None), [-1.0, 3.0])[-1].scale) == 3.0
    last = followed(fresh(tol=0.5), [-1.0] * 3)[-1]
    assert not bool(last.converged) and not bool(last.running)
    low = followed(fresh(tol=0.5), [-1.0], exact=True)[-1]
    assert bool(low.running) and not bool(low.converged)


def test_a_negative_measure_is_refused_where_it_is_known():
    with pytest.raises(ValueError, match=r"Ladder.updated: the measure is -1.0, .* a magnitude"):
        fresh().updated(f32(-1.0), f32(0))
    ladder = pp.numerics.Ladder.create(("f32", "f64"), jnp.ones(3))
    for step, options in (
        (lambda x: (x, -jnp.sum(x)), {}),
        (lambda x: x, {"measure": lambda x: -jnp.sum(x)}),
    ):
        with pytest.raises(ValueError, match=r"Ladder.step: the measure is -3.0, .* a magnitude"):
            ladder.step(step, **options)
    assert int(ladder.step(lambda x: (x, jnp.sum(x) * jnp.nan)).rung) == 1


def test_outside_of_jit_a_step_is_traced_once():
    traced = 0

    def step(x: Any, w: Any) -> Any:
        nonlocal traced
        traced += 1
        x = 0.5 * (w @ x)
        return x, jnp.linalg.norm(x)

    a = jnp.eye(4)
    ladder = pp.numerics.Ladder.create(("bf16", "f32"), jnp.ones(4), tol=1e-4)
    together = driven(ladder, step, a)
    once = None
    while bool(ladder.running):
        ladder = ladder.step(step, a)
        once = traced if once is None else once
    assert traced == once and int(ladder.steps) > 5
    assert ladder.used.tolist() == together.used.tolist()
    np.testing.assert_allclose(ladder.best, together.best, rtol=1e-6)

    class Unhashable:
        __hash__ = None

        def __call__(self, x: Any, w: Any) -> Any:
            return step(x, w)

    begun = pp.numerics.Ladder.create(("bf16", "f32"), jnp.ones(4), tol=1e-4).step(Unhashable(), a)
    assert int(begun.steps) == 1
    assert str(begun).splitlines()[0] == "running in bf16, after 1 step: 1 in bf16, 0 in f32"


def test_a_larger_factor_and_patience():
    assert rungs(followed(fresh(factor=16.0), [0.5, 0.45, 0.4, 0.35])) == "bbbb"
    assert rungs(followed(fresh(factor=16.0), [0.5, 0.48, 0.46, 0.45])) == "bbbf"
    assert rungs(followed(fresh(patience=1), [0.5, 0.5])) == "bf"


def test_the_best_state_and_the_log_are_kept():
    seen = followed(fresh(log_size=2), [0.5, 0.2, 0.3, 0.4, 0.3, 0.1, np.inf, 0.3])
    ladder = seen[-1]
    assert rungs(seen) == "bbbbffdd"
    assert ladder.used.tolist() == [5, 2, 1] and int(ladder.steps) == 8
    # behind the overflow it began again at the state of 0.1, then 0.3 was measured in float64
    assert float(ladder.best) == 8.0 and float(ladder.best_measure) == f32(0.3)
    assert int(ladder.switches) == 2
    found = {key: x.tolist() for key, x in ladder.log.items()}
    assert found["step"] == [5, 7] and found["to"] == [1, 2] and found["why"] == [1, 3]
    assert found["measure"][0] == f32(0.3) and found["measure"][1] == np.inf
    assert str(ladder).splitlines() == [
        "running in f64, after 8 steps: 5 in bf16, 2 in f32, 1 in f64",
        "  after 5: to f32, stalled at 0.3",
        "  after 7: to f64, not finite at inf",
    ]


@pytest.mark.parametrize("size", [0, 1])
def test_a_full_log_counts_on(size: int):
    ladder = followed(fresh(log_size=size), [np.inf, np.inf])[-1]
    assert ladder.log["to"].tolist() == [1] * size and int(ladder.switches) == 2
    assert str(ladder).endswith(f"\n  and {2 - size} more")


def test_it_goes_on_where_it_is_unless_that_was_lost():
    for last, at in ((0.3, 4.0), (5.0, 1.0), (np.nan, 1.0)):
        seen = followed(fresh(), [0.2, 0.25, 0.25, last])
        assert rungs(seen)[-1] == "f" and float(seen[-1].state) == at
        assert bool(seen[-1].switched) and float(seen[-1].best) == 1.0
    # what a higher rung measures outranks what a lower one did
    seen = followed(fresh(), [0.2, 0.003, 0.05])
    assert float(seen[-1].best) == 3.0 and float(seen[-1].best_measure) == f32(0.05)


@pytest.mark.parametrize(
    "tol, measures, want",
    [
        # at 0.01 of the scale, known to 0.0039 of it
        (1e-2, [0.5, 0.0062, 0.005], ("b", 0, 0, 1)),
        (1e-2, [0.5, 0.0060], ("b", 0, 1)),
        # bfloat16 cannot tell, and does not claim
        (1e-3, [0.5, 0.0005, 0.0005], ("f", 0, 0, 1)),
        (1e-3, [0.5, 0.0005, 0.05], ("f", 0, 0, 0)),
        # the last rung says so where it does not get there
        (1e-12, [0.5, 0.003, 3e-8, 0.1, 0.1, 0.1, 0.1], ("d", 0, 0, 0, 0, 0, 0, 2)),
        (0.0, [np.nan] * 3, ("d", 0, 0, 2)),
    ],
)
def test_a_tolerance_is_never_loosened(tol: float, measures: Any, want: Any):
    seen = followed(fresh(tol=tol), measures)
    assert rungs(seen)[-1] == want[0]
    assert tuple(status for _, status in seen[:-1]) == want[1:]
    ladder = seen[-1]
    assert bool(ladder.running) == (want[-1] == 0) and bool(ladder.converged) == (want[-1] == 1)


def test_it_is_lowered_after_easy_steps_if_asked():
    measures = [0.8, 0.8, 0.8, 0.8, 0.39, 0.19, 0.09, 0.04, 0.04, 0.04, 0.04, 0.01]
    assert rungs(followed(fresh(), measures)) == "bbb" + "f" * 7 + "dd"
    seen = followed(fresh(lower_after=3), measures)
    # the first step after a switch has no measure of its rung before it, and counts
    assert rungs(seen) == "bbb" + "fff" + "bbbb" + "ff"
    assert seen[-1].log["why"].tolist()[:3] == [1, 4, 1]
    # twice as many the next time
    assert int(seen[-1].needed) == 6
    # not to where nothing could be told
    small = [0.8, 0.003, 0.0015, 0.0007, 0.0003, 0.0001]
    assert rungs(followed(fresh(lower_after=2), small)) == "bfffff"


def test_an_exact_measure_counts_relative_to_itself():
    """As in iterative refinement: low steps go on helping below their own unit roundoff."""
    shrinking = [0.5 * 0.3**i for i in range(20)]
    assert rungs(followed(fresh(), shrinking)) == "bbbbb" + "f" * 9 + "d" * 6
    assert rungs(followed(fresh(), shrinking, exact=True)) == "b" * 20
    assert rungs(followed(fresh(), [1e-7, 0.999e-7, 0.998e-7, 0.998e-7], exact=True)) == "bbbf"
    # with a measure that is as small as the last rung can tell it ends on whichever
    assert followed(fresh(), [0.5, 1e-17], exact=True)[1] == ("bf16", 2)
    assert followed(fresh(tol=1e-6), [0.5, 1e-7], exact=True)[1] == ("bf16", 1)


# ---------------------------------------------------------------- methods

N = 24


def system(condition: float = 30.0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A symmetric positive definite matrix, a right-hand side, and the solution."""
    q, _ = np.linalg.qr(normal(0, N, N).astype(np.float64))
    a = ((q * np.geomspace(1, condition, N)) @ q.T).astype(np.float32).astype(np.float64)
    a = (a + a.T) / 2
    b = normal(1, N).astype(np.float32).astype(np.float64)
    return a, b, np.linalg.solve(a, b)


def error(x: Any, want: np.ndarray) -> float:
    return float(np.linalg.norm(np.asarray(x, np.float64) - want) / np.linalg.norm(want))


def driven(ladder: Any, step: Any, *args: Any, most: int = 3000, **options: Any) -> Any:
    @jax.jit
    def run(ladder: Any, *args: Any) -> Any:
        return lax.while_loop(
            lambda s: s.running & (s.steps < most), lambda s: s.step(step, *args, **options), ladder
        )

    return run(ladder, *args)


def richardson(x: Any, a: Any, b: Any) -> Any:
    x = x + 0.06 * (b - a @ x)
    return x, jnp.linalg.norm(b - a @ x)


def conjugate_gradients(state: Any, a: Any, b: Any) -> Any:
    x, r, p = state["x"], state["r"], state["p"]
    ap, rr = a @ p, r @ r
    alpha = rr / (p @ ap)
    x, new = x + alpha * p, r - alpha * ap
    return {"x": x, "r": new, "p": new + (new @ new) / rr * p}, jnp.linalg.norm(b - a @ x)


def from_residual(state: Any, a: Any, b: Any) -> Any:
    r = b - a @ state["x"]
    return {"x": state["x"], "r": r, "p": r}


def test_bf16_alone_stalls_and_the_ladder_gets_to_what_float64_gives():
    """With x64 off, from a float32 state: the answer of float64, rounded."""
    a, b, want = system()
    a, b = f32(a), f32(b)
    alone = pp.auto_mixed(lambda x: lax.fori_loop(0, 400, lambda _, x: richardson(x, a, b)[0], x))
    assert error(alone(jnp.zeros(N)), want) > 5e-3
    ladder = driven(
        pp.numerics.Ladder.create(LADDER, jnp.zeros(N), scale=jnp.linalg.norm(b)), richardson, a, b
    )
    assert error(ladder.best, want) < 5e-7
    assert ladder.used[2] <= 40 and int(ladder.rung) == 2 and not ladder.converged
    assert ladder.best.dtype == f32 and str(ladder).startswith("at its limit in f64")
    # raised where each rung stalls: at some tens of its unit roundoff, and not a hundred
    stalls = np.asarray(ladder.log["measure"][:2] / ladder.scale)
    assert (stalls < 100 * np.asarray([BF16, F32])).all()


def test_conjugate_gradients_to_float64_mostly_low():
    with jax.enable_x64(True):
        a, b, want = system()
        start = {"x": np.zeros(N), "r": b, "p": b}
        ladder = pp.numerics.Ladder.create(LADDER, start, scale=np.linalg.norm(b), tol=1e-14)
        ladder = driven(ladder, conjugate_gradients, a, b, restart=from_residual)
        assert bool(ladder.converged) and error(ladder.best["x"], want) < 1e-13
        assert ladder.log["to"][:2].tolist() == [1, 2]
        assert all(x.dtype == np.float64 for x in jax.tree.leaves(ladder.best))
        # without a restart it has the residual and the directions of the rung below
        stale = pp.numerics.Ladder.create(LADDER, start, scale=np.linalg.norm(b), tol=1e-14)
        stale = driven(stale, conjugate_gradients, a, b)
        assert error(stale.best["x"], want) > error(ladder.best["x"], want)


def test_refinement_stays_low_down_to_float64():
    """The residual in float64, all else in bfloat16: every step is low."""
    with jax.enable_x64(True):
        a, b, want = system()
        approximate = np.linalg.inv(a)

        def step(x: Any, a: Any, b: Any) -> Any:
            with pp.keep("f64"):
                r = b - a @ x
            return x + approximate @ r

        def residual(x: Any, a: Any, b: Any) -> Any:
            return jnp.linalg.norm(b - a @ x)

        ladder = pp.numerics.Ladder.create(LADDER, np.zeros(N), scale=np.linalg.norm(b), tol=1e-14)
        ladder = driven(ladder, step, a, b, measure=residual)
        assert bool(ladder.converged) and error(ladder.best, want) < 1e-13
        assert ladder.used.tolist() == [int(ladder.steps), 0, 0] and int(ladder.steps) < 30


def test_nothing_is_switched_where_the_low_rung_converges():
    a, b, _ = system()
    ladder = pp.numerics.Ladder.create(LADDER, jnp.zeros(N), scale=np.linalg.norm(b), tol=3e-2)
    ladder = driven(ladder, richardson, f32(a), f32(b))
    assert bool(ladder.converged) and int(ladder.switches) == 0
    assert ladder.used.tolist() == [int(ladder.steps), 0, 0]
    assert np.linalg.norm(b - a @ np.asarray(ladder.best, np.float64)) <= 3e-2 * np.linalg.norm(b)


def test_what_has_ended_stays_under_vmap_and_scan():
    a, b, _ = system()
    bs = jnp.stack([f32(b), f32(b) * 0 + 1, f32(b) * 1e-3])

    def solved(b: Any) -> Any:
        ladder = pp.numerics.Ladder.create(
            ("bf16", "f32"), jnp.zeros(N), scale=jnp.linalg.norm(b), tol=1e-4
        )
        return driven(ladder, richardson, f32(a), b)

    together = jax.jit(jax.vmap(solved))(bs)
    each = [solved(b) for b in bs]
    assert together.steps.tolist() == [int(ladder.steps) for ladder in each]
    np.testing.assert_allclose(
        together.best, [ladder.best for ladder in each], rtol=1e-4, atol=1e-6
    )
    used = together.used.sum(0).tolist()
    assert str(together) == (
        f"of 3: 3 converged, 0 ended without, 0 run; {used[0]} in bf16, {used[1]} in f32"
    )

    def body(ladder: Any, _: Any) -> Any:
        ladder = ladder.step(richardson, f32(a), f32(b))
        return ladder, ladder.steps

    ladder, steps = lax.scan(body, each[0], None, length=3)
    assert steps.tolist() == [int(each[0].steps)] * 3
    np.testing.assert_array_equal(ladder.best, each[0].best)


def test_devices_take_the_same_rungs():
    """Rows on four devices, and the norm of all of them."""
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    a, b, _ = system()
    a, b = f32(a), f32(b)

    def step(x: Any, rows: Any, b: Any) -> Any:
        def residual(x: Any) -> Any:
            return b - rows @ lax.all_gather(x, "d", tiled=True)

        x = x + 0.06 * residual(x)
        return x, jnp.sqrt(lax.psum(jnp.sum(residual(x) ** 2), "d"))

    def solve(rows: Any, b: Any) -> Any:
        ladder = pp.numerics.Ladder.create(("bf16", "f32"), jnp.zeros_like(b), tol=1e-4)
        ladder = lax.while_loop(lambda s: s.running, lambda s: s.step(step, rows, b), ladder)
        return ladder.best, ladder.used

    run = jax.shard_map(solve, mesh=mesh, in_specs=(P("d"), P("d")), out_specs=(P("d"), P()))
    x, used = jax.jit(run)(a, b)
    assert (used > 0).all()
    np.testing.assert_allclose(a @ x, b, atol=1e-3)


def test_an_overflow_in_float16_goes_on_from_the_best():
    def step(x: Any, w: Any) -> Any:
        x = 0.5 * (w @ x)
        return x, jnp.linalg.norm(x)

    # 1e5 is an infinity for float16
    ladder = pp.numerics.Ladder.create(("f16", "f32"), jnp.full(4, 1e5), tol=1e-3)
    # a restart without products is no reason for a warning
    ladder = driven(ladder, step, jnp.eye(4), restart=lambda x, w: x * 1.0)
    assert bool(ladder.converged) and ladder.log["why"][0] == 3 and ladder.log["step"][0] == 1
    assert np.isfinite(ladder.best).all()


def test_odd_states_and_a_traced_summary():
    """Keys, integers and Python's numbers in the state; a ladder is a pytree like any other."""
    said: list[str] = []

    def step(state: Any, w: Any) -> Any:
        key, _ = jax.random.split(state["key"])
        x = state["x"] * 0.5 + 0 * (w @ w).sum()
        return {"key": key, "n": state["n"] + 1, "x": x, "none": None}, jnp.abs(x)

    start = {"key": jax.random.key(0), "n": 0, "x": 1.0, "none": None}

    @jax.jit
    def run(w: Any) -> Any:
        ladder = pp.numerics.Ladder.create(("bf16", "f32"), start, tol=1e-3)
        ladder = lax.while_loop(lambda s: s.running, lambda s: s.step(step, w), ladder)
        said.append(str(ladder))
        return ladder

    ladder = run(jnp.ones((4, 4)))
    assert said == ["on one of bf16, f32: not known while it is traced"]
    assert int(ladder.best["n"]) == int(ladder.steps) > 8 and bool(ladder.converged)
    assert jax.tree.structure(jax.tree.map(lambda x: x, ladder)) == jax.tree.structure(ladder)


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    "options, said",
    [
        ({"ladder": ("bf16",)}, "Ladder.create: ladder=('bf16',) has 1 rung,"),
        ({"tol": 1e-8, "ladder": ("bf16", "f32")}, "f32, the last rung, tells no measure below 6e"),
        ({"tol": -1.0}, "tol=-1.0"),
        ({"tol": 2.0}, "in [0, 1)"),
        ({"tol": jnp.float32(1e-3)}, "it is to be a number"),
        ({"patience": 0}, "patience=0"),
        ({"factor": 0.0}, "factor=0.0"),
        ({"lower_after": 0}, "lower_after=0"),
        ({"log_size": -1}, "log_size=-1"),
        ({"scale": 0.0}, "scale=0.0"),
        ({"scale": jnp.float32(-2.0)}, "scale=-2.0): it is to be positive and finite"),
        ({"scale": np.nan}, "scale=nan"),
        ({"scale": jnp.ones(1)}, "scale is float32[1], and it is to be a real scalar"),
        ({"scale": jnp.complex64(1)}, "scale is complex64[], and it is to be a real scalar"),
        ({"scale": True}, "scale is bool[], and it is to be a real scalar"),
        ({"scale": "float32"}, "scale is 'float32', and it is to be a real scalar"),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, Any], said: str):
    options = {"ladder": LADDER, **options}
    with pytest.raises(ValueError) as found:
        pp.numerics.Ladder.create(options.pop("ladder"), jnp.zeros(3), **options)
    assert said in str(found.value) and "Ladder.create" in str(found.value)


@pytest.mark.parametrize(
    "step, options, said",
    [
        (lambda x: x * 2, {}, "is to return (state, measure)"),
        (
            lambda x: (x[:2], x[0]),
            {},
            "the step returned state as float32[2], and it was float32[3]",
        ),
        (lambda x: ({"x": x}, x[0]), {}, "the step returned PyTreeDef"),
        (lambda x: (x.astype(jnp.bfloat16), x[0]), {}, "as bfloat16[3]"),
        (lambda x: (x, x), {}, "the step returned float32[3] as the measure"),
        (lambda x: (x, jnp.int32(3)), {}, "the step returned int32[] as the measure"),
        (lambda x: x, {"measure": lambda x: x}, "measure returned float32[3] as the measure"),
        (lambda x: (x, x[0]), {"restart": lambda x: x[:1]}, "restart returned state as float32[1]"),
    ],
)
def test_steps_that_do_not_fit_are_refused(step: Any, options: Any, said: str):
    ladder = pp.numerics.Ladder.create(("f32", "f64"), jnp.ones(3))
    with pytest.raises(TypeError) as found, quiet():
        ladder.step(step, **options)
    assert said in str(found.value)
