"""On a GPU what a fusion writes is stored in 16 bits: dear functions, and what products share."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun

import precpass as pp
from precpass.jaxpr.primitives.carrier import _rounding_kept, detach
from tests.support.jaxprs import named, walk
from tests.support.oracle import scan_split
from tests.support.values import normal_array, rel_error

X, W, V = normal_array(0, 64, 32), normal_array(1, 32, 32) / 6, normal_array(2, 32, 32) / 6
BIAS = normal_array(3, 32)


def stored(fn: Callable[..., Any], *args: Any, **options: Any) -> list[str]:
    """The primitives whose results are rounded so that XLA keeps it, as planned for a GPU."""
    found = pp.inspect(fn, **{"target": "h100", **options})(*args)
    eqns = (eqn for eqn, decision, _ in found.decisions() if decision.keeps_rounding)
    return sorted(eqn.primitive.name for eqn in eqns)


def network(w: jax.Array, bias: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.square(jax.nn.gelu(x @ w + bias[None]) @ V).sum()


def test_a_dear_function_that_the_backward_pass_reads_too_is_stored_in_16_bits():
    gradient = jax.grad(network, (0, 1))
    assert "tanh" in stored(gradient, W, BIAS, X)
    assert "tanh" in stored(gradient, W, BIAS, X, target="tpu v5e")
    assert stored(gradient, W, BIAS, X, target=None) == []
    assert stored(gradient, W, BIAS, X, policy=pp.AutoMixedBf16.with_results("f32")) == []
    assert stored(gradient, W, BIAS, X, policy="AutoMixed") == []  # float16 has not the range


def test_a_dear_function_is_stored_for_a_derivative_that_jax_adds_later_too():
    assert stored(network, W, BIAS, X) == ["tanh"]


def test_what_products_and_others_read_is_stored_once():
    """A gelu's cotangent: two products read it, and the sum that is the gradient of the bias."""
    found = pp.inspect(jax.grad(network, (0, 1)), target="h100")(W, BIAS, X)
    assert "add_any" in stored(jax.grad(network, (0, 1)), W, BIAS, X)
    # the sum over the rows reads the rounded cotangent
    makers = {v: eqn.primitive.name for eqn in walk(found.after) for v in eqn.outvars}
    sums = [e for e in named(found.after, "reduce_sum") if e.params["axes"] == (0,)]
    assert "precpass_rounded" in [makers[e.invars[0]] for e in sums]
    got = jaxpr_as_fun(found.after)(W, BIAS, X)
    wanted = jax.jit(jax.grad(network, (0, 1)))(W, BIAS, X)
    assert all(1e-5 < rel_error(a, b) < 0.02 for a, b in zip(got, wanted, strict=True))


@pytest.mark.release(keep=2)
@pytest.mark.parametrize("name", ["silu", "gelu", "relu6", "log_sigmoid"])
@pytest.mark.parametrize("target", ["h100", "tpu v5e"])
def test_a_jitted_function_is_stored_as_if_its_equations_stood_where_it_is_called(
    target: str, name: str
):
    """`jax.nn` jits its functions, and XLA puts their bodies where they are called."""
    function = getattr(jax.nn, name)

    def loss(w: jax.Array, bias: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.square(function(function(x @ w + bias[None]) @ V + bias[None]) @ V).sum()

    gradient = jax.grad(loss, (0, 1))
    calls = stored(gradient, W, BIAS, X, target=target)
    with jax.disable_jit():
        inlined = jax.make_jaxpr(gradient)(W, BIAS, X)
    assert not list(named(inlined, "jit"))
    equations = stored(jaxpr_as_fun(inlined), W, BIAS, X, target=target)
    # A body that is called twice is planned once.
    assert set(calls) == set(equations) != set()


def test_what_leaves_a_body_is_read_as_by_the_call_that_reads_it_most():
    function = jax.jit(lambda x: jnp.arctan(x) * x)

    def together(w: jax.Array, x: jax.Array) -> jax.Array:
        h = function(x @ w)
        return (h @ V).sum() + h.sum() + function(x @ V).sum()

    assert stored(together, W, X) == ["mul"]

    dear = jax.jit(jnp.tanh)

    def beside_a_gradient(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        differentiated = jax.grad(lambda w: jnp.arctan(x @ w).sum())(w)
        return differentiated, dear(x @ w).sum() + dear(x @ V).sum()

    assert stored(beside_a_gradient, W, X) == []


@pytest.mark.release(keep=1)
@pytest.mark.parametrize("calls", [20, 600])
def test_a_body_that_is_called_on_its_own_result_is_planned(calls: int):
    turn = jax.jit(lambda x: x.T)

    def program(w: jax.Array, x: jax.Array) -> jax.Array:
        h = jnp.arctan(x @ w)
        for _ in range(calls):
            h = turn(h)
        return jnp.square(h @ V).sum() + h.sum()

    # So many names of one value are not followed, and then it keeps its digits.
    assert stored(jax.grad(program), W, X) == (["atan"] if calls == 20 else [])


@pytest.mark.release(keep=1)
@pytest.mark.parametrize(("target", "stacks"), [("h100", 2), ("tpu v5e", 0)])
def test_a_loop_stacks_its_state_in_16_bits_for_products_alone(target: str, stacks: int):
    """A stepper of a differential equation: its backward pass reads states in products alone.

    A TPU's compiler casts the stacks by itself.
    """

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        def step(state: jax.Array, _: None) -> tuple[jax.Array, None]:
            middle = state + 0.05 * (state @ w)
            return state + 0.1 * (middle @ w), None

        return jnp.square(jax.lax.scan(step, x, None, length=8)[0]).sum()

    found = pp.inspect(jax.grad(loss), target=target)(W, X)
    forward, backward = named(found.after, "scan")
    # A GPU's compiler drops the float32 stacks, which only derivatives of the gradient would read.
    low = [v for v in forward.outvars if str(v.aval) == "bfloat16[8,64,32]"]
    assert len(low) == stacks
    assert set(low) <= set(backward.invars)
    # the state itself is handed to the next trip in float32
    carried = forward.outvars[: scan_split(forward.params)[1]]
    assert [str(v.aval.dtype) for v in carried if v.aval.shape == X.shape].count("float32") == 1
    got, wanted = jaxpr_as_fun(found.after)(W, X)[0], jax.jit(jax.grad(loss))(W, X)
    assert 1e-5 < rel_error(got, wanted) < 0.01


def rms_norm(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)


def layer_norm(x: jax.Array) -> jax.Array:
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)


def scanned(norm: Callable[[jax.Array], jax.Array], w: jax.Array, x: jax.Array) -> jax.Array:
    """The loss of a residual network whose layers are run by a scan, and again backwards."""

    @jax.checkpoint
    def layer(x: jax.Array, w: jax.Array) -> jax.Array:
        return x + jax.nn.gelu(norm(x) @ w) @ V

    return jnp.square(jax.lax.scan(lambda x, w: (layer(x, w), None), x, w)[0]).mean()


@pytest.mark.release(keep=1)
@pytest.mark.parametrize(
    ("norm", "target", "dtype"),
    [
        (rms_norm, "h100", "bfloat16"),
        # It subtracts the mean from the stream, which may be far from zero.
        (layer_norm, "h100", "float32"),
        (rms_norm, "tpu v5e", "float32"),
    ],
)
def test_a_residual_stream_is_stacked_in_16_bits_where_its_readers_tolerate_that(
    norm: Callable[[jax.Array], jax.Array], target: str, dtype: str
):
    loss, ws = functools.partial(scanned, norm), jnp.stack([W, -W, W])
    found = pp.inspect(jax.grad(loss), target=target)(ws, X)
    forward, backward = named(found.after, "scan")
    split = scan_split(forward.params)[1]
    read = [v for v in forward.outvars[split:] if v in backward.invars]
    assert [str(v.aval.dtype) for v in read if v.aval.shape == (3, *X.shape)] == [dtype]
    # The stream itself goes from layer to layer in float32.
    carried = [str(v.aval.dtype) for v in forward.outvars[:split] if v.aval.shape == X.shape]
    assert "float32" in carried and (split == 1 or dtype == "float32")
    got, wanted = jaxpr_as_fun(found.after)(ws, X)[0], jax.jit(jax.grad(loss))(ws, X)
    assert 1e-4 < rel_error(got, wanted) < 0.01


@pytest.mark.parametrize("given", ["nothing", "a sum", "all"])
def test_a_stack_that_the_user_makes_of_a_state_keeps_its_digits(given: str):
    def program(w: jax.Array, x: jax.Array) -> Any:
        state, each = jax.lax.scan(lambda s, _: (s + jnp.tanh(s @ w), s), x, None, length=4)
        return state, {"nothing": 0, "a sum": each.sum(), "all": each}[given]

    (loop,) = named(pp.inspect(program, target="h100")(W, X).after, "scan")
    stacks = [str(v.aval.dtype) for v in loop.outvars if v.aval.shape == (4, *X.shape)]
    assert stacks == ["float32"]


def residual(w: jax.Array, x: jax.Array) -> jax.Array:
    for _ in range(3):
        x = x + jax.nn.gelu(x @ w) @ V
    return jnp.square(x).sum()


def test_a_residual_stream_and_its_cotangent_keep_their_digits():
    found = pp.inspect(jax.grad(residual), target="h100")(W, X)
    decided = list(found.decisions())
    adding = [eqn for eqn, _, _ in decided if eqn.primitive.name in ("add", "add_any")]
    added = {v for eqn in adding for v in eqn.invars if not hasattr(v, "val")}
    streams = [
        (e, d)
        for e, d, _ in decided
        if e.primitive.name in ("add", "add_any") and added.intersection(e.outvars)
    ]
    assert len(streams) >= 4
    assert not any(any(decision.stored) for _, decision in streams)
    assert rel_error(jaxpr_as_fun(found.after)(W, X)[0], jax.jit(jax.grad(residual))(W, X)) < 0.02


@pytest.mark.release(keep=1)
@pytest.mark.parametrize(
    "relu",
    [
        jax.nn.relu,
        lambda x: jnp.maximum(x, 0),
        lambda x: jnp.maximum(x, jnp.zeros_like(x)),
    ],
    ids=["nn", "numpy", "zeros"],
)
def test_a_relu_is_stored_in_16_bits_whoever_wrote_it(relu: Callable[..., Any]):
    def pooled(w: jax.Array, x: jax.Array) -> jax.Array:
        h = relu(x @ w).reshape(1, 8, 8, 32)
        size = 1, 2, 2, 1
        h = jax.lax.reduce_window(h, -jnp.inf, jax.lax.max, size, size, "VALID")
        return jnp.square(h.reshape(-1, 32) @ V).sum()

    found = pp.inspect(jax.grad(pooled), target="h100")(W, X)
    if jax.__version_info__ < (0, 11) and relu is not jax.nn.relu:
        # the gradient of a maximum asks which operand it is equal to
        assert [e for e in named(found.before, "eq") if e.outvars[0].aval.shape == (64, 32)]
        return
    stores = [
        eqn.primitive.name
        for eqn, decision, _ in found.decisions()
        if eqn.primitive.name in ("custom_jvp_call", "max") and any(decision.stored)
    ]
    assert stores
    got, wanted = jaxpr_as_fun(found.after)(W, X)[0], jax.jit(jax.grad(pooled))(W, X)
    assert rel_error(got, wanted) < 0.05


def test_a_relu_that_ends_a_residual_block_keeps_its_digits():
    def blocks(w: jax.Array, x: jax.Array) -> jax.Array:
        for _ in range(3):
            x = jax.nn.relu(x + (x @ w))
        return jnp.square(x @ V).sum()

    found = pp.inspect(jax.grad(blocks), target="h100")(W, X)
    added = {v for eqn in named(found.before, "add") for v in eqn.invars if not hasattr(v, "val")}
    relus = [
        (eqn, decision)
        for eqn, decision, _ in found.decisions()
        if eqn.primitive.name == "custom_jvp_call"
    ]
    assert len(relus) == 3
    assert [d.keeps_rounding for e, d in relus if e.outvars[0] in added] == [False, False]


def test_the_rounding_is_written_for_gpus_and_tpus_alone_and_changes_no_number():
    numbers = np.array([0.0, -0.0, 1.5, -3e38, np.inf, -np.inf, np.nan, 1e-40], np.float32)
    low = jnp.asarray(numbers, jnp.bfloat16)
    fn = jax.jit(lambda x: detach(x, keeps_rounding=True))
    lowered = {p: fn.trace(low).lower(lowering_platforms=(p,)) for p in ("cpu", "cuda", "tpu")}
    assert ["select" in text.as_text() for text in lowered.values()] == [False, True, True]
    got = jax.jit(_rounding_kept)(low)
    assert got.dtype == low.dtype
    a, b = (np.asarray(x, np.float32) for x in (got, low))
    np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(np.signbit(a), np.signbit(b))


@pytest.mark.release
@pytest.mark.parametrize("transform", ["jvp", "grad", "vmap", "remat", "jit"])
def test_stored_values_have_the_derivatives_of_the_values_before(transform: str):
    from precpass.devices.detect import planned_for
    from precpass.devices.targets import target_of

    def fitted(w: jax.Array, bias: jax.Array, x: jax.Array) -> jax.Array:
        found = jax.grad(network)(w, bias, x)
        return network(w - 0.01 * found, bias, x)

    with planned_for(target_of("h100")):
        mixed = pp.auto_mixed(lambda *xs: fitted(*xs))
        of = {
            "jvp": lambda f: lambda *xs: jax.jvp(f, xs, tuple(map(jnp.ones_like, xs)))[1],
            "grad": jax.grad,
            "vmap": lambda f: lambda w, b, x: jax.vmap(jax.grad(f), (None, 0, None))(w, b, x),
            "remat": lambda f: jax.grad(jax.checkpoint(f)),
            "jit": jax.jit,
        }[transform]
        bias = jnp.stack([BIAS, -BIAS]) if transform == "vmap" else BIAS
        got, wanted = of(mixed)(W, bias, X), of(fitted)(W, bias, X)
    assert got.dtype == jnp.float32
    assert rel_error(got, wanted) < 0.03


def attention(w: jax.Array, x: jax.Array) -> jax.Array:
    q, k, v = jnp.split(x @ w, 3, axis=-1)
    scores = jnp.where(jnp.tril(jnp.ones((len(x), len(x)), bool)), q @ k.T, -1e9)
    return jnp.square(jax.nn.softmax(scores) @ v).sum()


@pytest.mark.release
def test_a_tpu_stores_the_exponentials_of_an_attention_and_a_gpu_its_masked_scores():
    """A TPU's compiler adds them up in the kernel of the scores, if these are not rounded."""
    args = normal_array(1, 128, 384) / 25, normal_array(2, 128, 128)
    gradient = jax.grad(attention, (0, 1))
    on_tpu, on_gpu = "tpu v5e", "h100"
    assert "exp" in stored(gradient, *args, target=on_tpu)
    assert "exp" not in stored(gradient, *args, target=on_gpu)

    def low_selections(target: str) -> int:
        decisions = pp.inspect(gradient, target=target)(*args).decisions()
        return sum(
            eqn.primitive.name == "select_n" and decision.action is pp.types.Action.LOWER
            for eqn, decision, _ in decisions
        )

    assert low_selections(on_gpu) - low_selections(on_tpu) == 1
    found = pp.inspect(gradient, target=on_tpu)(*args)
    assert all(
        rel_error(a, b) < 0.02
        for a, b in zip(jaxpr_as_fun(found.after)(*args), gradient(*args), strict=True)
    )


def test_a_loss_is_added_up_from_exponentials_that_are_not_rounded():
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return -jax.nn.log_softmax(jnp.tanh(x @ w) @ w)[:, 0].mean()

    w, x = normal_array(1, 128, 128) / 8, normal_array(2, 128, 128)
    assert "exp" not in stored(jax.grad(loss), w, x, target="tpu v5e")
