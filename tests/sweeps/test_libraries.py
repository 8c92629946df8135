"""The checks of whole programs fail where they should."""

import jax
import jax.numpy as jnp
import pytest

import precpass as pp
from tests.support.libraries import check_program
from tests.support.values import normal

W, X = jnp.asarray(normal(0, 32, 32)), jnp.asarray(normal(1, 8, 32))


def test_a_good_program_passes_and_its_results_are_returned():
    checked = check_program(lambda w, x: {"y": jnp.tanh(x @ w), "n": jnp.argmax(x)}, W, X)
    assert checked.got["y"].dtype == jnp.float32
    assert len(checked.grads) == 1


@pytest.mark.parametrize(
    ("fn", "says"),
    [
        (lambda w, x: jnp.sin(x) * w[0][None], "0 low products, not 1"),
        (lambda w, x: jnp.dot(x, w, precision="highest"), "1 of 1 products are wide"),
        (lambda w, x: x @ w + jnp.dot(x, w, precision="highest"), "1 of 2 products are wide"),
        # differences of nearly equal products: the rounding is all that is left
        (lambda w, x: x @ (w + 1e-6) - x @ w, "relative error"),
    ],
)
def test_a_bad_one_fails(fn, says):
    with pytest.raises(AssertionError, match=says):
        check_program(fn, W, X)


def test_a_product_that_only_the_gradient_has_is_seen():
    @jax.custom_vjp
    def f(w, x):
        return x @ w

    def backward(kept, g):
        w, x = kept
        return jnp.dot(x.T, g, precision="highest"), g @ w.T

    f.defvjp(lambda w, x: (x @ w, (w, x)), backward)
    with pytest.raises(AssertionError, match="products are wide"):
        check_program(f, W, X)


def test_it_is_meant_for_policies_that_lower():
    with pytest.raises(AssertionError, match="1 of 1 products are wide"):
        check_program(lambda w, x: x @ w, W, X, policy=pp.AlwaysF32)
