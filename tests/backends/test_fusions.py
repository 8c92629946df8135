"""Functions, shared values and selections that a GPU's fusions write; test_formats.py has more."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun

import precpass as pp
from precpass.devices.detect import planned_for
from precpass.devices.targets import target_of
from precpass.jaxpr.primitives.carrier import _rounding_kept, detach
from tests.support.jaxprs import inner_jaxprs, named, opened, walk
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


def test_what_products_and_others_read_is_stored_once():
    """A gelu's cotangent: two products read it, and the sum that is the gradient of the bias."""
    found = pp.inspect(jax.grad(network, (0, 1)), target="h100")(W, BIAS, X)
    # the sum over the rows reads the rounded cotangent
    makers = {v: eqn.primitive.name for eqn in walk(found.after) for v in eqn.outvars}
    sums = [e for e in named(found.after, "reduce_sum") if e.params["axes"] == (0,)]
    assert "precpass_rounded" in [makers[e.invars[0]] for e in sums]


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


def test_a_relu_is_chosen_in_16_bits_and_its_derivative_is_that_in_float32():
    """A GPU's compiler makes it in the kernel of the product, if no rounding is written behind."""

    def layers(w: jax.Array, x: jax.Array) -> jax.Array:
        return jax.nn.relu(jax.nn.relu(x @ w) @ V) @ w

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.square(layers(w, x)).sum()

    found = pp.inspect(layers, target="h100")(W, X)
    dtypes = [e.outvars[0].aval.dtype.name for e in named(found.after, "max")]
    assert dtypes.count("bfloat16") == 2
    assert not any(e.params["keeps_rounding"] for e in named(found.after, "precpass_detach"))
    with planned_for(target_of("h100")):
        mixed, plain = pp.auto_mixed(layers), jax.jit(layers)
        assert rel_error(mixed(W, X), plain(W, X)) < 0.01
        x = X.at[0, 0].set(jnp.nan).at[1, 0].set(jnp.inf)
        assert (jnp.isfinite(mixed(W, x)) == jnp.isfinite(plain(W, x))).all()
        wanted = jax.jit(jax.grad(loss))(W, X)
        for gradient in (jax.grad(pp.auto_mixed(loss)), pp.auto_mixed(jax.grad(loss))):
            assert rel_error(gradient(W, X), wanted) < 0.01
        mapped = jax.vmap(jax.grad(pp.auto_mixed(loss)), (None, 0))(W, jnp.stack([X, X]))
        assert rel_error(mapped[1], wanted) < 0.01


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


def makers_of_operands(jaxpr: Any, name: str, shape: tuple[int, ...]) -> list[str]:
    """The primitives that make the 16-bit operands of equations, in the equations' own bodies."""
    found: list[str] = []
    for body in [opened(jaxpr), *(inner for eqn in walk(jaxpr) for inner in inner_jaxprs(eqn))]:
        makers = {v: eqn for eqn in body.eqns for v in eqn.outvars}
        for eqn in body.eqns:
            for v in eqn.invars if eqn.primitive.name == name else ():
                is_low = v.aval.shape == shape and str(v.aval.dtype) == "bfloat16"
                if is_low and not hasattr(v, "val") and v in makers:
                    read = map(id, makers[v].invars)
                    comes_in = not set(map(id, body.invars)).isdisjoint(read)
                    found.append(makers[v].primitive.name + " of an operand" * comes_in)
    return found


def masked_layers(stack: jax.Array, x: jax.Array, fill: Any) -> jax.Array:
    mask = jnp.tril(jnp.ones((16, 16), bool))

    def layer(c: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        scores = jnp.where(mask, (c @ w) @ c.T, fill)
        return jnp.tanh(jax.nn.softmax(scores, axis=-1) @ c), None

    return lax.scan(layer, x, stack)[0].sum()


@pytest.mark.release(keep=1)
@pytest.mark.parametrize("fill", [-1e9, float(jnp.finfo(jnp.float32).min), -jnp.inf])
def test_what_a_mask_fills_in_is_no_float32_array_that_a_loop_reads(fill: float):
    """JAX makes it once before the loop, so that every trip would read it from memory."""
    stack, x = np.stack([W] * 3), X[:16]
    gradient = jax.grad(lambda s, x: masked_layers(s, x, fill))
    found = pp.inspect(gradient, target="h100")(stack, x).after
    makers = makers_of_operands(found, "select_n", (16, 16))
    assert "broadcast_in_dim" in makers
    # the scores come into the selecting bodies, and in the backward pass their cotangent
    assert makers.count("convert_element_type of an operand") == 2
    got, wanted = jaxpr_as_fun(found)(stack, x)[0], jax.jit(gradient)(stack, x)
    assert np.isfinite(got).all() and rel_error(got, wanted) < 0.03
