"""A gradient in float16 is warned of if no loss scale is in sight, and only then."""

import sys
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import precpass as pp

W, X = jnp.ones((4, 4)), jnp.ones((2, 4))
STEP = jnp.float32(8.0)
SOMEWHERE = pp.loss_scale.DynamicLossScale()


@pytest.fixture(autouse=True)
def no_program_of_another_test():
    # JAX transposes a program once, so a test before might have taken the warning.
    jax.clear_caches()


def loss(w: Any, x: Any) -> Any:
    return jnp.square(jnp.tanh(x @ w)).mean()


def in_a_loop(w: Any, x: Any) -> Any:
    return jax.lax.scan(lambda c, _: (c - jax.grad(loss)(c, x), None), w, None, length=2)[0]


def said(call: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    assert all(warning.filename == __file__ for warning in caught)
    return [str(warning.message) for warning in caught]


IN_FLOAT16 = pp.AutoMixedBf16.with_rules(pp.Rule(primitive="dot_general", precision="f16"))


def kept(w: Any, x: Any) -> Any:
    with pp.keep("f16"):
        return loss(w, x)


UNSCALED: dict[str, Callable[[], Any]] = {
    "inside": lambda: pp.auto_mixed(jax.grad(loss), "f16")(W, X),
    "of a jit": lambda: pp.auto_mixed(jax.grad(jax.jit(loss)), "f16")(W, X),
    "with a value": lambda: pp.auto_mixed(jax.value_and_grad(loss), "AutoMixedConservative")(W, X),
    "weighted": lambda: pp.auto_mixed(jax.grad(lambda w: 0.1 * loss(w, X)), "AlwaysF16")(W),
    "weighted by more than one": lambda: pp.auto_mixed(
        jax.grad(lambda w: loss(w, X) + 4.0 * jnp.abs(X @ w).mean()), "f16"
    )(W),
    "in a loop": lambda: pp.auto_mixed(in_a_loop, "f16")(W, X),
    "outside": lambda: jax.grad(pp.auto_mixed(loss, "f16"))(W, X),
    "by a rule": lambda: pp.auto_mixed(jax.grad(loss), IN_FLOAT16)(W, X),
    "by a keep": lambda: pp.auto_mixed(jax.grad(kept), "AlwaysF32")(W, X),
    "inspected": lambda: pp.inspect(jax.grad(loss), "f16")(W, X),
}
FINE: dict[str, Callable[[], Any]] = {
    "bfloat16": lambda: pp.auto_mixed(jax.grad(loss), "bf16")(W, X),
    "bfloat16 outside": lambda: jax.grad(pp.auto_mixed(loss, "bf16"))(W, X),
    "no gradient": lambda: pp.auto_mixed(loss, "f16")(W, X),
    "forward mode": lambda: jax.jvp(lambda w: pp.auto_mixed(loss, "f16")(w, X), (W,), (W,)),
    "by hand": lambda: pp.auto_mixed(jax.grad(lambda w: 1024.0 * loss(w, X)), "f16")(W),
    "by hand in a jit": lambda: pp.auto_mixed(
        jax.grad(jax.jit(lambda w: loss(w, X) * 1024.0)), "f16"
    )(W),
    "by an argument": lambda: pp.auto_mixed(jax.grad(lambda w, s: s * loss(w, X)), "f16")(W, STEP),
    "a cotangent": lambda: pp.auto_mixed(lambda w: jax.vjp(loss, w, X)[1](STEP), "f16")(W),
    "explained": lambda: pp.explain(jax.grad(loss), "f16")(W, X),
}


def scaled_inside() -> None:
    pp.auto_mixed(pp.loss_scale.scaled_value_and_grad(loss), "f16")(
        pp.loss_scale.StaticLossScale(8.0), W, X
    )


def scaled_outside() -> None:
    pp.loss_scale.scaled_value_and_grad(pp.auto_mixed(loss, "f16"))(
        pp.loss_scale.NoOpLossScale(), W, X
    )


def by_the_optimizer() -> None:
    optimizer = pp.loss_scale.scaled_optimizer(optax.sgd(1.0))
    state = optimizer.init(W)
    mixed = pp.auto_mixed(loss, "f16")
    jax.jit(jax.grad(lambda w, state: mixed(w, X) * state.scale.value))(W, state)


def by_jmp() -> None:
    import jmp

    scale = jmp.StaticLossScale(STEP)
    jax.grad(lambda w: scale.scale(pp.auto_mixed(loss, "f16")(w, X)))(W)


def of_a_global() -> None:
    jax.jit(jax.grad(lambda w: SOMEWHERE.scale(pp.auto_mixed(loss, "f16")(w, X))))(W)


def by_an_argument() -> None:
    def scaled(w: Any, scale: Any) -> Any:
        return scale.scale(pp.auto_mixed(loss, "f16")(w, X))

    jax.value_and_grad(scaled)(W, pp.loss_scale.StaticLossScale(8.0))


def by_equinox() -> None:
    import equinox as eqx

    scale = pp.loss_scale.StaticLossScale(8.0)
    eqx.filter_grad(lambda w: scale.scale(pp.auto_mixed(loss, "f16")(w, X)))(W)


def by_flax() -> None:
    from flax.training.dynamic_scale import DynamicScale

    DynamicScale().value_and_grad(pp.auto_mixed(loss, "f16"))(W, X)


@pytest.mark.release(keep=1)
@pytest.mark.parametrize("call", UNSCALED.values(), ids=UNSCALED)
def test_a_gradient_without_a_scale_is_warned_of(call: Callable[[], Any]):
    texts = said(call)
    assert texts and all("float16 without a loss scale" in text for text in texts)
    assert "scaled_value_and_grad" in texts[0] and "AutoMixedBf16" in texts[0]


@pytest.mark.release(keep=2)
@pytest.mark.parametrize("call", FINE.values(), ids=FINE)
def test_what_is_no_such_gradient_is_not(call: Callable[[], Any]):
    assert said(call) == []


@pytest.mark.release(keep=2)
@pytest.mark.parametrize(
    "call",
    [
        *(scaled_inside, scaled_outside, by_the_optimizer, by_jmp),
        *(of_a_global, by_an_argument, by_flax, by_equinox),
    ],
)
def test_who_uses_a_loss_scale_hears_nothing(call: Callable[[], Any]):
    assert said(call) == []


def test_a_scale_of_another_program_and_an_imported_jmp_do_not_silence_it():
    import jmp

    other = pp.loss_scale.StaticLossScale(8.0), jmp.DynamicLossScale(STEP)
    assert other[0].unscale(jmp.StaticLossScale(STEP).scale(STEP)) == STEP
    for call in (UNSCALED["inside"], UNSCALED["outside"]):
        assert any("without a loss scale" in text for text in said(call))
        jax.clear_caches()


def test_a_scale_that_a_train_step_reads_for_another_gradient_does_not_silence_it():
    @jax.jit
    def step(w: Any, scale: Any) -> Any:
        scaled = jax.grad(lambda w: scale.scale(loss(w, X)))(w)
        return scaled + jax.grad(pp.auto_mixed(loss, "f16"))(w, X)

    assert any("without a loss scale" in text for text in said(lambda: step(W, SOMEWHERE)))


def test_it_is_said_once_at_a_place():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            jax.grad(pp.auto_mixed(lambda w: loss(w, X), "f16"))(W)
    assert len(caught) == 1


def other(w: Any, x: Any) -> Any:
    return jnp.square(jax.nn.relu(x @ w)).mean()


@pytest.mark.parametrize(
    "take",
    [
        lambda fn: pp.auto_mixed(jax.grad(fn), "AutoMixed")(W, X),
        lambda fn: jax.grad(pp.auto_mixed(fn, "AutoMixed"))(W, X),
    ],
    ids=["inside", "outside"],
)
def test_it_is_said_of_each_function_at_a_place(take: Callable[[Any], Any]):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for fn in (loss, other, loss, other):
            take(fn)
    texts = [str(warning.message) for warning in caught]
    assert {text.partition(":")[0].rpartition(" ")[2] for text in texts} == {"loss", "other"}


def test_it_does_not_depend_on_gradients_that_were_taken_before():
    mixed = pp.auto_mixed(other, "AutoMixed")
    assert not said(lambda: jax.grad(lambda w: SOMEWHERE.scale(mixed(w, X)))(W))
    # JAX has now transposed the program, and does not transpose it again
    assert len(said(lambda: jax.grad(mixed)(W, X))) == 1
    assert len(said(lambda: jax.grad(lambda w: mixed(w, X))(W))) == 1
    assert len(said(lambda: jax.jit(jax.grad(lambda w: mixed(w, X) + 1.0))(W))) == 1
    assert len(said(lambda: jax.grad(pp.auto_mixed(other, "AutoMixed"))(W, X))) == 1
    # and again neither where the gradient is scaled, nor where none is taken
    assert not said(lambda: jax.grad(lambda w: SOMEWHERE.scale(mixed(w, X)))(W))
    assert not said(lambda: jax.jvp(lambda w: mixed(w, X), (W,), (W,)))
    assert not said(lambda: mixed(W, X))


def test_a_function_is_warned_of_once():
    gradient = jax.grad(pp.auto_mixed(other, "AutoMixed"))
    assert len(said(lambda: [gradient(W, X) for _ in range(3)])) == 1
    assert not said(lambda: gradient(jnp.ones((4, 5)), X))


def test_a_report_that_drops_it_does_not_use_it_up():
    gradient = jax.grad(pp.auto_mixed(other, "AutoMixed"))
    assert not said(lambda: pp.compare(gradient, ["AlwaysF32"], rounds=0)(W, X))
    assert not said(lambda: pp.explain(gradient, "AlwaysF32")(W, X))
    assert len(said(lambda: gradient(W, X))) == 1


def test_a_function_whose_products_stay_in_float32_is_not_warned_of():
    mixed = pp.auto_mixed(lambda w: jnp.sin(X @ w).mean(), "AutoMixed")
    with pytest.warns(pp.PrecisionWarning, match="lowered nothing"):
        mixed(W)
    for _ in range(2):
        assert not said(lambda: jax.grad(lambda w: mixed(w))(W))


def test_haiku_which_imports_jmp_does_not_silence_it():
    hk = pytest.importorskip("haiku")
    assert "jmp" in sys.modules
    model = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([8, 1])(x).mean()))
    parameters = model.init(jax.random.key(0), X)
    assert said(lambda: jax.grad(pp.auto_mixed(model.apply, "AutoMixed"))(parameters, X))
    assert said(lambda: pp.auto_mixed(jax.grad(model.apply), "AutoMixed")(parameters, X))


def test_a_comparison_shows_the_error_and_does_not_warn():
    compared = pp.compare(jax.grad(loss), ["AutoMixedF16", "AutoMixedBf16"], rounds=0)
    assert said(lambda: compared(W, X)) == []
    assert said(lambda: pp.auto_mixed(jax.grad(loss), "AutoMixedF16")(W, X))
