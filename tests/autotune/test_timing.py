"""Products are timed apart from every trace, and what cannot be timed is left to the table."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import precpass as pp
from precpass.analysis.operand_origin import OperandOrigin
from precpass.autotune import cache, measured, timing
from precpass.autotune.profitability import profit_model_of
from precpass.devices import detect
from precpass.jit.region import configured
from precpass.planner.profit import Assumed, Product, ProductTimes
from precpass.types import Action
from tests.support.profitability import (
    MEASURED,
    PARAMS,
    REAL,
    Clock,
    actions,
    mlp,
    products,
    restarted,
)
from tests.support.values import f32


def loss(w, x):
    return lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, length=2)[0].sum()


AROUND: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "make_jaxpr": lambda f: f,
    "jit": jax.jit,
    "grad": jax.grad,
    "jvp": lambda f: lambda w, x: jax.jvp(f, (w, x), (w, x)),
    "vmap": lambda f: jax.vmap(f, in_axes=(None, 0)),
    "scan": lambda f: lambda w, x: lax.scan(lambda c, _: (c + f(w, x), None), 0.0, length=2)[0],
    "checkpoint": jax.checkpoint,
    "default device": lambda f: jax.default_device(jax.devices()[1])(f),
    "x64": lambda f: jax.enable_x64(True)(f),
}


def with_rules(w, x):
    f = jax.custom_vjp(lambda x, w: x @ w)
    f.defvjp(lambda x, w: (x @ w, (x, w)), lambda r, g: (g @ r[1].T, r[0].T @ g))
    return jnp.arctan(f(x, w)).sum()


def test_measuring_adds_no_equation_to_a_custom_rule(compiled: list[Any]):
    def traced(profitability: str) -> str:
        mixed = pp.auto_mixed(with_rules, profitability=profitability)
        return str(jax.make_jaxpr(jax.jit(jax.grad(mixed)))(jnp.eye(8), jnp.ones((4, 8))))

    measured = traced("measured")
    # x @ w, of the same sizes as g @ w.T, and x.T @ g
    assert [times["low"].shape for times in compiled] == [(4, 8), (8, 8)]
    assert measured == traced("always")


@pytest.mark.release(keep=2)
@pytest.mark.parametrize(
    "option, value",
    [
        ("jax_disable_jit", True),
        ("jax_debug_nans", True),
        ("jax_transfer_guard", "disallow"),
        ("jax_default_matmul_precision", "highest"),
        ("jax_enable_x64", True),
    ],
)
def test_what_is_set_for_the_whole_process_does_not_disturb_it(
    compiled: list[Any], option: str, value: object
):
    (eqn,) = jax.make_jaxpr(jnp.matmul)(f32(4, 8), f32(8, 8)).eqns
    product = Product(
        eqn, pp.types.Precision.BF16, (OperandOrigin.FUSED, OperandOrigin.LOOP_INVARIANT)
    )
    with configured(option, value):
        assert REAL(product, jax.devices()[0]) == ProductTimes(1.75, 0.75, "measured")
    ((found),) = compiled
    assert 0 < np.max(np.abs(found["low"] - found["wide"])) < 0.05


@pytest.mark.release(keep=2)
@pytest.mark.parametrize("name", AROUND)
def test_measuring_adds_no_equation_to_a_trace(compiled: list[Any], name: str):
    w, x = jnp.eye(8), jnp.ones((3, 4, 8) if name == "vmap" else (4, 8))

    def traced() -> str:
        # a function of its own each time, whose program is not found again
        mixed = pp.auto_mixed(lambda w, x: loss(w, x), profitability="measured")
        return str(jax.make_jaxpr(AROUND[name](mixed))(w, x))

    measured = traced()
    assert len(compiled) == 1
    assert measured == traced()  # its time is known now
    assert len(compiled) == 1
    assert "bf16" in measured


def test_measuring_heeds_neither_disabled_jit_nor_an_enclosing_policy(compiled: list[Any]):
    w, x = jnp.eye(8), jnp.ones((4, 8))
    with jax.disable_jit(), pp.use_policy("AlwaysF32"):
        pp.auto_mixed(loss, policy=MEASURED)(w, x)
    ((found),) = compiled
    # low, whatever stands around
    assert 0 < np.max(np.abs(found["low"] - found["wide"])) < 0.05


def conv(x, k):
    return lax.conv_general_dilated(x + 1, k, (1, 1), "SAME")


def ragged(x, w):
    return lax.ragged_dot(jnp.sin(x), w, jnp.array([2, 6], jnp.int32))


BILINEAR: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "dot_general": (lambda x, w: jnp.sin(x) @ w, ((4, 8), (8, 8))),
    "weight gradient": (
        lambda x, g: lax.dot_general(x, g + 1, (((0,), (0,)), ((), ()))).T * 2,
        ((16, 8), (16, 4)),
    ),
    "batched": (lambda x, w: jnp.einsum("bij,bjk->bik", x, w), ((3, 4, 8), (3, 8, 8))),
    "conv_general_dilated": (conv, ((1, 2, 8, 8), (3, 2, 3, 3))),
    "ragged_dot_general": (ragged, ((8, 4), (2, 4, 8))),
    "in a loop": (lambda x, w: lax.fori_loop(0, 3, lambda _, c: c @ w, x), ((4, 8), (8, 8))),
}


@pytest.mark.release(keep=2)
@pytest.mark.parametrize("name", BILINEAR)
@pytest.mark.parametrize("policy", [MEASURED, pp.AutoMixed.with_profitability("measured")])
def test_every_product_is_timed_in_both_precisions(
    compiled: list[Any], name: str, policy: pp.types.PrecisionPolicy
):
    fn, shapes = BILINEAR[name]
    found = pp.inspect(fn, policy)(*[f32(*shape) for shape in shapes])
    assert found.plan.count()[pp.types.OpKind.COMPUTE, Action.LOWER] == 1
    ((times),) = compiled
    wide, low = times["wide"], times["low"]
    assert wide.shape == low.shape
    np.testing.assert_allclose(low, wide, rtol=0.05, atol=0.05)
    assert np.any(low != wide)


def test_symbolic_dimensions_have_a_nominal_size(clock: Clock):
    (n,) = jax.export.symbolic_shape("n")
    actions(jnp.matmul, MEASURED, jax.ShapeDtypeStruct((n, 8), "float32"), f32(8, 8))
    assert clock.asked[0].avals == (("float32", (128, 8)), ("float32", (8, 8)))


# ---------------------------------------------------------------- what is not timed


def test_what_is_too_large_is_left_to_the_table(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("PRECPASS_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("precpass.autotune.timing.timed", REAL)
    monkeypatch.setattr(measured, "LONGEST", float("inf"))
    x, w = f32(2**15, 2**14), f32(2**14, 1)
    # the probe itself refuses before it allocates
    with pytest.warns(pp.PrecisionWarning, match=r"\(assumed: too large to be timed\)"):
        (decision,) = products(pp.inspect(jnp.matmul, MEASURED)(x, w))
    assert decision.action is Action.KEEP
    assert not any(tmp_path.iterdir())


# A CPU without bfloat16 instructions gains nothing from it, and a warning says so.
@pytest.mark.filterwarnings("ignore:AutoMixedBf16 lowered nothing")
def test_what_takes_too_long_is_left_to_the_table(clock: Clock):
    n = 8192
    found = pp.inspect(jnp.matmul, MEASURED)(f32(n, n), f32(n, n))
    assert not clock.asked
    (decision,) = products(found)
    cpu = detect.device_for()
    assert (decision.action is Action.LOWER) == (cpu.bf16 > cpu.f32)


def test_what_cannot_be_compiled_is_left_to_the_table_and_not_tried_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    tried = []

    def fails(_runs: Any) -> None:
        tried.append(1)
        raise RuntimeError("UNIMPLEMENTED: no kernel\nwith much more text")

    monkeypatch.setenv("PRECPASS_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("precpass.autotune.timing.timed", REAL)
    monkeypatch.setattr("precpass.autotune.timing._rounds", fails)
    for _ in range(2):
        with pytest.warns(pp.PrecisionWarning, match="assumed: it cannot be timed: RuntimeError"):
            (decision,) = products(pp.inspect(jnp.matmul, MEASURED)(f32(1, 8), f32(8, 8)))
        assert str(decision.reason).endswith("UNIMPLEMENTED: no kernel)")
    assert len(tried) == 1


def test_several_processes_plan_by_the_table_as_they_must_run_one_program(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    found = profit_model_of(MEASURED)
    assert isinstance(found, Assumed)
    assert found.costs.startswith("assumed for") and "several processes" in found.costs


def test_a_folder_that_cannot_be_written_is_warned_of_once(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PRECPASS_CACHE_DIR", str(tmp_path / "file"))
    mixed = pp.auto_mixed(mlp, policy=MEASURED)
    with pytest.warns(pp.PrecisionWarning, match="PRECPASS_CACHE_DIR") as said:
        mixed(PARAMS, jnp.ones((64, 8)))
    assert [w.filename for w in said] == [__file__]
    mixed(PARAMS, jnp.ones((32, 8)))
    timed = len(clock.asked)
    pp.inspect(mlp, MEASURED)(PARAMS, f32(32, 8))
    assert len(clock.asked) == timed


def test_a_damaged_file_is_warned_of_and_rebuilt(clock: Clock):
    args = PARAMS, f32(64, 8)
    before = pp.inspect(mlp, MEASURED)(*args).plan
    (path,) = cache.cache_folder().glob("*.json")
    path.write_text("{")
    restarted()
    with pytest.warns(pp.PrecisionWarning, match="rebuilt") as said:
        assert pp.inspect(mlp, MEASURED)(*args).plan == before
    assert str(path) in str(said[0].message)
    restarted()
    assert pp.inspect(mlp, MEASURED)(*args).plan == before


def test_the_probe_measures(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """The only test that times products: it checks that there are times, not what they are."""
    monkeypatch.setenv("PRECPASS_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(timing, "SECONDS", 0.001)
    (eqn,) = jax.make_jaxpr(jnp.matmul)(f32(8, 8), f32(8, 8)).eqns
    product = Product(eqn, pp.types.Precision.BF16, (OperandOrigin.FUSED, OperandOrigin.IN_MEMORY))
    found = REAL(product, jax.devices()[0])
    assert found.wide > 0 and found.low > 0 and found.ratio > 0
    assert found.by == "measured"
