"""Design section 3, line 12: hi-primitives are entered, or warned of with what made them.

`jax.checkpoint` under the flag `jax_remat3` is in the matrix of
`sweeps/test_enumeration_compositions.py`, as `call_hi_primitive`; here are the others, and what of
them is not entered.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import precpass as pp
from precpass.jaxpr import hi_primitives
from tests.support.compositions import COMPOSITIONS, TOLERANCE, W, X
from tests.support.jaxprs import check_all_low, products, walk
from tests.support.passes import config, look, run, text_of
from tests.support.values import assert_near


def product(x, w):
    return jnp.arctan(x @ w)


def with_jvp(x, w):
    fn = jax.custom_jvp(product)
    # a factor that only this rule has: the derivative of the product itself would lack it
    fn.defjvp(lambda p, t: (product(*p), 3 * jax.jvp(product, p, t)[1]))
    return fn(x, w)


def with_vjp(x, w, **options: Any):
    fn = jax.custom_vjp(product)
    fn.defvjp(
        lambda x, w: (product(x, w), (x, w)),
        lambda kept, g: jax.vjp(product, *kept)[1](3 * g),
        **options,
    )
    return fn(x, w)


def root(x, w):
    """A root of `tanh(v @ a) - x / 10`, with a well-conditioned `a`, by damped iteration."""
    a = w.T @ w / 4 + jnp.eye(6)

    def solve(f, v):
        return lax.fori_loop(0, 30, lambda _, v: v - 0.3 * f(v), v)

    def solve_linear(g, y):
        return lax.fori_loop(0, 60, lambda _, v: v - 0.3 * (g(v) - y), y)

    return lax.custom_root(lambda v: jnp.tanh(v @ a) - x * 0.1, x, solve, solve_linear)


OLD = jax.__version_info__ < (0, 12)
PROGRAMS: dict[str, tuple[Callable[..., Any], str]] = {
    "CustomJVPTraced": (with_jvp, "jax_custom_jvp3"),
    "CustomVJPTraced": (with_vjp, "jax_custom_vjp3"),
    "CustomRoot": (root, "jax_remat3"),  # needs no flag
}
CASES = [name for name, (_, flag) in PROGRAMS.items() if hasattr(jax.config, flag)]
# one batches a primitive that the pass sees, the other one that it has rewritten
INSIDE = {
    "vmap inside": lambda f, mix: mix(
        lambda x, w: jax.vmap(f, (0, None))(jnp.stack([x, -x]), w),
    ),
    "vmap of grad": lambda f, mix: (
        lambda x, w: jax.vmap(
            jax.grad(mix(lambda x, w: jnp.arctan(f(x, w)).sum()), (0, 1)), (0, None)
        )(jnp.stack([x, -x]), w)
    ),
}
# JAX has no forward mode of custom_vjp; 0.10 batches it by another hi-primitive around it
LEFT_OUT = {("CustomVJPTraced", c) for c in ("jvp", "jacfwd", *["vmap inside"] * OLD)}
CELLS = [(n, c) for n in CASES for c in (*COMPOSITIONS, *INSIDE) if (n, c) not in LEFT_OUT]


def hi_primitives_in(jaxpr: Any) -> set[str]:
    return {type(e.params["_prim"]).__name__ for e in walk(jaxpr) if "_prim" in e.params}


def lowered_products(lowered: Any, dtype: str) -> tuple[int, int]:
    """The products of the lowered text whose operands have a type, and all of them."""
    text = lowered.as_text()
    lines = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    return sum(f"x{dtype}>, tensor<" in line for line in lines), len(lines)


@pytest.mark.release(keep=6)
@pytest.mark.enumerated
@pytest.mark.parametrize(("name", "composition"), CELLS)
def test_entered_under_every_transformation(name: str, composition: str):
    fn, flag = PROGRAMS[name]
    transform = {**COMPOSITIONS, **INSIDE}[composition]
    with config(flag, True):
        traced = {
            key: jax.jit(transform(fn, mix)).trace(X, W)
            for key, mix in {
                "plain": jax.jit,
                "mixed": functools.partial(pp.auto_mixed, policy=pp.AutoMixedBf16),
            }.items()
        }
        lowered = {key: t.lower() for key, t in traced.items()}
    check_all_low(traced["mixed"].jaxpr, dtype=jnp.bfloat16)
    low, every = lowered_products(lowered["mixed"], "bf16")
    assert low == every > 0, "a product that no jaxpr shows is wide"
    results = {key: low.compile()(X, W) for key, low in lowered.items()}
    assert_near(results["mixed"], results["plain"], TOLERANCE["bf16"])


@pytest.mark.parametrize("name", CASES)
def test_the_programs_make_hi_primitives(name: str):
    fn, flag = PROGRAMS[name]
    with config(flag, True):
        before = jax.make_jaxpr(fn)(X, W)
        after = jax.make_jaxpr(pp.auto_mixed(fn))(X, W)
    held = {name} if name != "CustomRoot" or not OLD else set()
    assert hi_primitives_in(before) == hi_primitives_in(after) == held
    assert len(products(before)) == len(products(after)) > 0


@pytest.mark.parametrize("name", CASES)
def test_a_second_pass_changes_nothing_and_float32_gives_back_the_original(name: str):
    fn, flag = PROGRAMS[name]
    with config(flag, True):
        once = look(fn, pp.AutoMixedBf16, X, W).after
        twice = look(pp.auto_mixed(fn), pp.AutoMixedBf16, X, W).after
        kept = look(fn, pp.AlwaysF32, X, W)
    assert sorted(map(str, map(_types, products(once)))) == sorted(
        map(str, map(_types, products(twice)))
    )
    assert kept.after is kept.before


def _types(eqn: Any) -> tuple[Any, ...]:
    return tuple(v.aval for v in (*eqn.invars, *eqn.outvars))


def test_float64_region_around_one():
    def fn(x, w):
        with pp.keep("f64"):
            return jax.checkpoint(product)(x, w)

    with config("jax_remat3", True):
        after = look(fn, pp.AutoMixedBf16, X, W).after
        got = run(fn, pp.AutoMixedBf16, X, W)
    (found,) = products(after)
    assert {str(v.aval.dtype) for v in found.invars} == {"float64"}
    with jax.enable_x64(True):
        want = product(X.astype("float64"), W.astype("float64")).astype("float32")
    assert_near(got, want, 2**-23)


def test_wide_policies_widen_inside_of_one_and_keep_its_types():
    def fn(x, w):
        return jax.checkpoint(product)(x.astype("bfloat16"), w.astype("bfloat16"))

    with config("jax_remat3", True):
        after = look(fn, pp.AlwaysF32, X, W).after
        got = pp.auto_mixed(fn, policy=pp.AlwaysF32)(X, W)
    (found,) = products(after)
    assert {str(v.aval.dtype) for v in found.invars} == {"float32"}
    assert got.dtype == jnp.bfloat16


# ---------------------------------------------------------------- what is not entered


def test_a_layout_of_no_tested_release_is_a_boundary_with_a_warning(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(hi_primitives, "_LAYOUTS", {})
    with config("jax_remat3", True):
        found = look(lambda x, w: jax.checkpoint(product)(x, w), pp.AutoMixedBf16, X, W)
    assert found.after is found.before
    (note,) = (n for n in found.plan.notes if "product" in n)
    for part in (
        "call_hi_primitive (RematTraced)",
        "the flag jax_remat3",
        "1 product:",
        __file__,
    ):
        assert part in note
    assert "turn the flag off" in note
    assert "the flag jax_remat3" in text_of(found)


def test_one_that_optimises_remat_is_warned_of_with_its_flag():
    with config("jax_custom_vjp3", True):
        found = look(lambda x, w: with_vjp(x, w, optimize_remat=True), pp.AutoMixedBf16, X, W)
    (note,) = (n for n in found.plan.notes if "product" in n)
    assert "CustomVJPTraced" in note
    assert "the flag jax_custom_vjp3" in note


def test_a_scan_under_its_flag_is_warned_of_with_the_flag():
    with config("jax_scan3", True):
        found = look(
            lambda x, w: lax.scan(lambda c, _: (product(c, w), None), x, length=3)[0],
            pp.AutoMixedBf16,
            X,
            W,
        )
    (note,) = (n for n in found.plan.notes if "product" in n)
    assert "Scan3" in note
    assert "the flag jax_scan3" in note
    assert "turn the flag off" in note


def test_a_users_own_hi_primitive_is_warned_of_though_it_holds_no_jaxpr():
    hijax = pytest.importorskip("jax.experimental.hijax")
    base = getattr(hijax, "HiPrim", None) or hijax.VJPHiPrimitive  # 0.12 renamed it

    class RematTraced(base):  # by its name one of JAX's, but not of its layout
        def __init__(self, x: Any, w: Any) -> None:
            self.in_avals = x, w
            self.out_aval = jax.typeof(X)
            self.params = {}
            super().__init__()

        def expand(self, x: Any, w: Any) -> Any:  # pyright: ignore -- a base class by release
            return x @ w

    prim = RematTraced(jax.typeof(X), jax.typeof(W))
    found = look(lambda x, w: prim(x, w), pp.AutoMixedBf16, X, W)
    (note,) = (n for n in found.plan.notes if "product" in n)
    assert "call_hi_primitive (RematTraced)" in note
    assert "contains 1 product: it keeps its precision" in note
    assert found.after is found.before


def test_what_0_10_batches_by_an_object_around_it_is_warned_of():
    fn = jax.vmap(with_vjp, (0, None))
    with config("jax_custom_vjp3", True):
        found = look(lambda x, w: fn(jnp.stack([x, -x]), w), pp.AutoMixedBf16, X, W)
    notes = [n for n in found.plan.notes if "product" in n]
    if OLD:
        (note,) = notes
        assert "VmapOf" in note
        assert "the flag jax_custom_vjp3" in note
    else:
        check_all_low(found.after)
        assert notes == []
