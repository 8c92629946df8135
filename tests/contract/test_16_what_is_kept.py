"""Design section 3, line 16: names, lines, donation, effects, checkpoint policies, sharing."""

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import io_callback

import precpass as pp
from tests.support.jaxprs import low_products, named, products
from tests.support.lowered_text import function_count, lowered_stacks, product_lines, product_stacks
from tests.support.passes import COMPOSITIONS, assert_all_low
from tests.support.values import assert_near, normal_array

X, W = normal_array(0, 4, 8), normal_array(1, 8, 8) / 3
each_composition = pytest.mark.parametrize("compose", COMPOSITIONS.values(), ids=COMPOSITIONS)


@jax.jit
def dense(x, w):
    with jax.named_scope("dense"):
        return x @ w


def model(x, w):
    with jax.named_scope("embed"):
        h = jnp.tanh(dense(x, w))

    def block(h, _):
        with jax.named_scope("attention[0]"):
            h = h + jnp.tanh(h @ w)
        with jax.named_scope("mlp"), jax.named_scope("up"):
            return jax.nn.relu(dense(h, w)), None

    with jax.named_scope("blocks"):
        h = lax.scan(jax.checkpoint(block), h, None, length=3)[0]
    with jax.named_scope("head"):
        return lax.cond(h.sum() > 0, lambda: h @ w, lambda: h @ w.T).sum()


def flat(x, w):
    with jax.named_scope("first"):
        h = jnp.tanh(x @ w)
    with jax.named_scope("second"), jax.named_scope("inner"):
        return jnp.arctan(h @ w).sum()


SCOPES = {"embed/dense", "blocks/attention[0]", "blocks/mlp/up/dense", "head"}


def test_name_scopes_of_the_forward_pass():
    before, after = (jax.make_jaxpr(f)(X, W) for f in (model, pp.auto_mixed(model)))
    assert len(low_products(after)) == len(products(after)) > 0
    found = product_stacks(after)
    assert found == product_stacks(before)
    assert {s.removesuffix("/branch_0_fun").removesuffix("/branch_1_fun") for s in found} == SCOPES


@each_composition
@pytest.mark.parametrize("fn", [flat, model])
def test_name_scopes_of_the_gradient(fn: Callable[..., Any], compose: Any):
    both = lambda f: jax.grad(f, (0, 1))  # noqa: E731
    after = assert_all_low(compose(fn, both), X, W, least=4)
    assert product_stacks(after) == product_stacks(jax.make_jaxpr(both(fn))(X, W))


@pytest.mark.release(keep=2)
@pytest.mark.parametrize("fn", [flat, jax.grad(flat, (0, 1)), model, jax.grad(model, (0, 1))])
def test_name_scopes_in_the_lowered_text(fn: Callable[..., Any]):
    before, after = jax.jit(fn).lower(X, W), pp.auto_mixed(fn).lower(X, W)
    assert "bf16" in after.as_text()
    stacks = lowered_stacks(after)
    assert stacks == lowered_stacks(before)
    assert any("second/inner" in s for s in stacks) or fn not in (flat,)


@each_composition
def test_source_lines(compose: Any):
    both = lambda f: jax.grad(f, (0, 1))  # noqa: E731
    for before, after in ((model, pp.auto_mixed(model)), (both(model), compose(model, both))):
        low = assert_all_low(after, X, W)
        lines = product_lines(low, __file__)
        assert lines == product_lines(jax.make_jaxpr(before)(X, W), __file__)
        assert {f for f, _ in lines} >= {"dense", "model.<locals>.block"}


def test_names_of_the_function_and_of_inner_functions():
    before, after = jax.jit(model).lower(X, W).as_text(), pp.auto_mixed(model).lower(X, W).as_text()
    assert "bf16" in after
    for name in ("@jit_model", "@dense", "@relu"):
        assert name in before
        assert name in after


def op_names(fn: Any, *args: Any) -> set[str]:
    """The names of a compiled program's operations, which profiles show, without those of casts."""
    names = re.findall(r'op_name="(.*?)"', fn.lower(*args).compile().as_text())
    return {name for name in names if "convert_element_type" not in name}


def test_names_in_profiles_are_those_of_the_function_under_jit():
    def scoped(x: Any, w: Any) -> Any:
        with jax.named_scope("layer"):
            return jnp.tanh(x @ w)

    mixed = op_names(pp.auto_mixed(scoped), X, W)
    assert mixed == op_names(jax.jit(scoped), X, W)
    assert "jit(scoped)/layer/dot_general" in mixed

    def updating(x: Any, ref: Any) -> Any:
        ref[...] = x @ W
        return jnp.tanh(ref[...])

    ref = jax.new_ref(jnp.zeros_like(X @ W))
    assert op_names(pp.auto_mixed(updating), X, ref) == op_names(jax.jit(updating), X, ref)
    nested = op_names(jax.jit(lambda x, w: pp.auto_mixed(scoped)(x, w)), X, W)
    assert nested == op_names(jax.jit(lambda x, w: jax.jit(scoped)(x, w)), X, W)


@pytest.mark.parametrize("compose", [pp.auto_mixed, lambda f: pp.auto_mixed(jax.grad(f))])
def test_a_key_that_is_closed_over_is_checked_as_under_jit(compose: Any):
    def check(wrap: Any) -> None:
        key = jax.random.key(0)
        noisy = wrap(lambda x: (x @ jax.random.normal(key, (8, 8))).sum())
        with jax.debug_key_reuse(True):
            noisy(jnp.ones((8, 8)))
            with pytest.raises(jax.errors.KeyReuseError, match="Previously-consumed key"):
                noisy(jnp.ones((8, 8)))

    check(lambda f: jax.jit(jax.grad(f)) if compose is not pp.auto_mixed else jax.jit(f))
    check(compose)


# ---------------------------------------------------------------- donation


def test_donation():
    def step(state, x):
        return {"w": state["w"] - 0.1 * (x.T @ x), "n": state["n"] + 1.0}, (x @ state["w"]).sum()

    def state():
        return {"w": jnp.array(W), "n": jnp.zeros(())}

    mixed = pp.auto_mixed(step, donate_argnums=0)
    lowered = mixed.lower(state(), X).as_text()
    before = jax.jit(step, donate_argnums=0).lower(state(), X).as_text()
    assert "bf16" in lowered
    assert lowered.count("tf.aliasing_output") == before.count("tf.aliasing_output") == 2
    given = state()
    result, _ = mixed(given, X)
    assert given["w"].is_deleted()
    assert not X.is_deleted()
    assert_near(result, step(state(), X)[0])


# ---------------------------------------------------------------- effects


def recording(events: list[Any]) -> Callable[..., Any]:
    """Effects of every kind between products, in a loop, a branch and a nested jit."""

    def note(name: str) -> Callable[..., None]:
        return lambda value: events.append((name, np.asarray(value).dtype.name))

    def counted(value):
        events.append(("io", np.asarray(value).dtype.name))
        return np.float32(len(events))

    def fn(x, w):
        y = x @ w
        jax.debug.callback(note("first"), y, ordered=True)
        n = io_callback(counted, jax.ShapeDtypeStruct((), jnp.float32), y.sum(), ordered=True)
        inner = jax.jit(lambda y: jax.debug.callback(note("jit"), y @ w, ordered=True))
        inner(y)

        def body(c, _):
            c = jnp.tanh(c @ w)
            jax.debug.callback(note("loop"), c, ordered=True)
            return c, None

        y = lax.scan(body, y, None, length=3)[0]
        io_callback(note("last"), None, y @ w, ordered=True)
        return y.sum() + 0.0 * n

    return fn


def test_effects_and_their_order():
    runs = []
    for wrap in (jax.jit, pp.auto_mixed):
        events: list[Any] = []
        fn = recording(events)
        wrap(fn)(X, W).block_until_ready()
        jax.effects_barrier()
        runs.append(events)
    # JAX orders effects of one kind among themselves
    for own in (("io", "last"), ("first", "jit", "loop")):
        before, after = ([e for e in events if e[0] in own] for events in runs)
        assert after == before
        assert list(dict.fromkeys(name for name, _ in after)) == list(own)
    assert Counter(runs[1]) == Counter(runs[0])
    before, after = (
        jax.make_jaxpr(recording([]))(X, W),
        jax.make_jaxpr(pp.auto_mixed(recording([])))(X, W),
    )
    assert len(low_products(after)) == len(products(after)) == 4
    assert {str(e) for e in after.effects} == {str(e) for e in before.effects} != set()


@each_composition
def test_effects_in_a_gradient_happen_once(compose: Any):
    events: list[float] = []

    def loss(w, x):
        y = x @ w
        jax.debug.callback(lambda v: events.append(float(v)), y.sum())
        return jnp.arctan(y).sum()

    gradient = compose(loss)
    assert_all_low(gradient, W, X, least=2)
    gradient(W, X).block_until_ready()
    jax.effects_barrier()
    assert len(events) == 1


# ---------------------------------------------------------------- checkpoint policies

SAVE = jax.checkpoint_policies
CHECKPOINTS: dict[str, Any] = {
    "nothing": None,
    "dots_saveable": SAVE.dots_saveable,
    "dots_with_no_batch_dims_saveable": SAVE.dots_with_no_batch_dims_saveable,
    "save_only_these_names": SAVE.save_only_these_names("kept"),
    "everything_saveable": SAVE.everything_saveable,
}


def checkpointed(policy: Any) -> Callable[..., Any]:
    def layer(x, w):
        scores = jnp.einsum("bij,bkj->bik", x, jnp.sin(x))
        hidden = checkpoint_name(jnp.arctan(jnp.einsum("bik,bkj->bij", scores, x) @ w), "kept")
        return jnp.arctan(hidden @ w)

    return lambda x, w: jax.checkpoint(layer, policy=policy)(x, w).sum()


def residuals(fn: Callable[..., Any], *args: Any) -> Counter[tuple[int, ...]]:
    """The shapes of what the forward pass keeps for the backward pass."""
    kept = jax.eval_shape(lambda *args: jax.vjp(fn, *args)[1], *args)
    return Counter(leaf.shape for leaf in jax.tree.leaves(kept))


@pytest.mark.release(keep=2)
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_checkpoint_policies_save_the_same_values(name: str):
    fn = checkpointed(CHECKPOINTS[name])
    args = normal_array(2, 3, 5, 8), W
    mixed = pp.auto_mixed(fn)
    assert_all_low(mixed, *args, least=4)
    if name != "everything_saveable":  # there a policy sees casts, too
        assert residuals(mixed, *args) == residuals(fn, *args)
    both = lambda f: jax.grad(f, (0, 1))  # noqa: E731
    before = products(jax.make_jaxpr(both(fn))(*args))
    for compose in COMPOSITIONS.values():
        after = assert_all_low(compose(fn, both), *args, least=8)
        assert len(products(after)) == len(before), "recomputes other products"


# ---------------------------------------------------------------- sharing


def layers(n: int) -> Callable[..., Any]:
    layer = jax.jit(lambda x, w: jnp.tanh(x @ w))

    def loss(w, x):
        for _ in range(n):
            x = layer(x, w)
        return x.sum()

    return loss


BOTH = {"forward": lambda f, _: pp.auto_mixed(f), **{k: lambda f, c: c(f) for k in COMPOSITIONS}}


@pytest.mark.release(keep=2)
@pytest.mark.parametrize("how", BOTH)
def test_a_layer_that_is_called_often_is_lowered_once(how: str):
    compose = COMPOSITIONS.get(how)
    plain = (lambda f: f) if compose is None else jax.grad
    functions, bodies = [], []
    for n in (3, 9):
        mixed = BOTH[how](layers(n), compose)
        functions.append(function_count(jax.jit(mixed).lower(W, X)))
        jaxpr = assert_all_low(mixed, W, X)
        assert len(named(jaxpr, "jit")) > n
        bodies.append(len(products(jaxpr)))  # of distinct jaxprs
    assert functions[0] == functions[1]
    assert bodies[0] == bodies[1]
    wanted = function_count(jax.jit(plain(layers(9))).lower(W, X))
    # the call is a jit within the jit; twice where transposed
    assert functions[1] == wanted + (2 if how == "grad_of_mixed" else 1)


def test_one_layer_under_two_scopes_is_one_unless_a_rule_tells_them_apart():
    layer = jax.jit(lambda x, w: jnp.tanh(x @ w))

    def fn(x, w):
        with jax.named_scope("body"):
            x = layer(layer(x, w), w)
        with jax.named_scope("head"):
            return layer(x, w)

    same = jax.make_jaxpr(pp.auto_mixed(fn))(X, W)
    assert len(low_products(same)) == len(products(same)) == 1
    policy = pp.AutoMixedBf16.with_rules(pp.Rule(scope="*head", precision="f32"))
    apart = jax.make_jaxpr(pp.auto_mixed(fn, policy=policy))(X, W)
    assert len(low_products(apart)) == 1
    assert len(products(apart)) == 2
