"""Design section 3, line 12: `lax.custom_root` is entered; any other hi-primitive is warned of.

Since 0.12 `custom_root` is a hi-primitive. Its jaxprs under every transformation are in the matrix
of `sweeps/test_enumeration_compositions.py`; here are the products that no jaxpr shows.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import precpass as pp
from tests.support.compositions import COMPOSITIONS, TOLERANCE, W, X, custom_root
from tests.support.jaxprs import named, products
from tests.support.passes import config, look, quiet
from tests.support.values import assert_near


def product(x, w):
    return jnp.arctan(x @ w)


# one batches a primitive that the pass sees, the other one that it has rewritten
TRANSFORMED = {
    **{name: COMPOSITIONS[name] for name in ("vmap", "grad outside", "grad inside", "hessian")},
    "vmap inside": lambda f, mix: mix(
        lambda x, w: jax.vmap(f, (0, None))(jnp.stack([x, -x]), w),
    ),
    "vmap of grad": lambda f, mix: (
        lambda x, w: jax.vmap(
            jax.grad(mix(lambda x, w: jnp.arctan(f(x, w)).sum()), (0, 1)), (0, None)
        )(jnp.stack([x, -x]), w)
    ),
}


@pytest.mark.parametrize("composition", TRANSFORMED)
def test_every_product_that_a_custom_root_lowers_to_is_low(composition: str):
    mixes = jax.jit, functools.partial(pp.auto_mixed, policy=pp.AutoMixedBf16)
    plain, mixed = (
        jax.jit(TRANSFORMED[composition](custom_root, mix)).lower(X, W) for mix in mixes
    )
    lines = [line for line in mixed.as_text().splitlines() if "stablehlo.dot_general" in line]
    assert lines
    assert all("xbf16>, tensor<" in line for line in lines)
    assert_near(mixed.compile()(X, W), plain.compile()(X, W), TOLERANCE["bf16"])


def test_a_second_pass_over_a_custom_root_changes_nothing():
    def types(jaxpr: Any) -> list[str]:
        return sorted(str([v.aval for v in (*e.invars, *e.outvars)]) for e in products(jaxpr))

    once = look(custom_root, pp.AutoMixedBf16, X, W).after
    assert types(look(pp.auto_mixed(custom_root), pp.AutoMixedBf16, X, W).after) == types(once)
    kept = look(custom_root, pp.AlwaysF32, X, W)
    assert kept.after is kept.before


# ---------------------------------------------------------------- what is not entered


def with_jvp(x, w):
    fn = jax.custom_jvp(product)
    fn.defjvp(lambda p, t: jax.jvp(product, p, t))
    return fn(x, w)


def with_vjp(x, w, **options: Any):
    fn = jax.custom_vjp(product)
    fn.defvjp(
        lambda x, w: (product(x, w), (x, w)),
        lambda kept, g: jax.vjp(product, *kept)[1](g),
        **options,
    )
    return fn(x, w)


FLAGS = {
    "jax_remat3": lambda x, w: jax.checkpoint(product)(x, w),
    "jax_custom_jvp3": with_jvp,
    "jax_custom_vjp3": functools.partial(with_vjp, optimize_remat=True),
    "jax_scan3": lambda x, w: lax.scan(lambda c, _: (product(c, w), None), x, length=3)[0],
}


def check_kept(fn: Any) -> None:
    found = look(fn, pp.AutoMixedBf16, X, W)
    assert named(found.before, "call_hi_primitive")
    assert found.after is found.before
    (note,) = (n for n in found.plan.notes if "product" in n)
    assert note.startswith("call_hi_primitive (")
    assert __file__ in note
    assert "contains 1 product: it keeps its precision" in note


@pytest.mark.parametrize("flag", [flag for flag in FLAGS if hasattr(jax.config, flag)])
def test_what_experimental_flags_make_keeps_its_precision_with_a_warning(flag: str):
    fn = FLAGS[flag]
    with config(flag, True), quiet():
        check_kept(fn)
        transform = (lambda f: f) if flag == "jax_scan3" else jax.grad  # JAX has no gradient of it
        got, want = (
            jax.jit(transform(mix(lambda x, w: fn(x, w).sum())))(X, W)
            for mix in (pp.auto_mixed, jax.jit)
        )
    assert jnp.array_equal(got, want)


def test_a_users_own_hi_primitive_is_warned_of_though_it_holds_no_jaxpr():
    hijax = pytest.importorskip("jax.experimental.hijax")
    base = getattr(hijax, "HiPrim", None) or hijax.VJPHiPrimitive  # 0.12 renamed it

    class CustomRoot(base):  # by its name one of JAX's
        def __init__(self, x: Any, w: Any) -> None:
            self.in_avals = x, w
            self.out_aval = jax.typeof(X)
            self.params = {}
            super().__init__()

        def expand(self, x: Any, w: Any) -> Any:  # pyright: ignore -- a base class by release
            return x @ w

    prim = CustomRoot(jax.typeof(X), jax.typeof(W))
    check_kept(lambda x, w: prim(x, w))
