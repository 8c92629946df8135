"""Design section 3, line 13: loop carries, predicates and branches."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import precpass as pp
from tests.support.jaxprs import jaxprs_in, low_products, named, products, walk
from tests.support.passes import assert_all_low
from tests.support.values import assert_near, normal_array

N = 16384
F32 = jnp.dtype("float32")
X, W = normal_array(0, 4, 8), normal_array(1, 8, 8) / 3
LOW_POLICIES = {"AlwaysBf16": pp.AlwaysBf16, "AutoMixedBf16": pp.AutoMixedBf16}
each_policy = pytest.mark.parametrize("policy", LOW_POLICIES.values(), ids=LOW_POLICIES)


def one(c):
    return c + 1.0


def by_scan(body: Callable[..., Any], c: Any) -> Any:
    return lax.scan(lambda c, _: (body(c), None), c, None, length=N)[0]


def by_stack(body: Callable[..., Any], c: Any) -> Any:
    """The step is data of the loop, not a literal."""
    del body
    return lax.scan(lambda c, x: (c + x, None), c, jnp.ones(N))[0]


def by_while(body: Callable[..., Any], c: Any) -> Any:
    return lax.while_loop(lambda s: s[0] < N, lambda s: (s[0] + 1, body(s[1])), (0, c))[1]


def by_fori(body: Callable[..., Any], c: Any) -> Any:
    return lax.fori_loop(0, N, lambda _, c: body(c), c)


def by_fori_unknown(body: Callable[..., Any], c: Any) -> Any:
    return lax.fori_loop(0, jnp.asarray(N), lambda _, c: body(c), c)


def by_nested_scans(body: Callable[..., Any], c: Any) -> Any:
    inner = jax.jit(lambda c: lax.scan(lambda c, _: (body(c), None), c, None, length=128)[0])
    return lax.scan(lambda c, _: (inner(c), None), c, None, length=N // 128)[0]


LOOPS = [by_scan, by_stack, by_while, by_fori, by_fori_unknown, by_nested_scans]


@jax.custom_jvp
def identity(c):
    return c * 1.0


identity.defjvp(lambda p, t: (identity(*p), t[0]))

BODIES: dict[str, Callable[..., Any]] = {
    "plain": one,
    "jit": jax.jit(one),
    "jit in jit": jax.jit(lambda c: jax.jit(one)(c) * 1.0),
    "remat": jax.checkpoint(one),
    "jit with other work": jax.jit(lambda c: c + jnp.tanh(c * 0.0 + 20.0)),
    "custom rule": lambda c: identity(c) + 1.0,
    "relu": lambda c: jax.nn.relu(c + 1.0),
    "cond": lambda c: lax.cond(c >= 0, one, lambda c: c - 1.0, c),
    "where": lambda c: jnp.where(c >= 0, c + 1.0, c),
    "two halves": lambda c: (c + 0.5) + 0.5,
    "through a shape": lambda c: (c.reshape(1, 1).T + 1.0).reshape(()),
    "sum": lambda c: jnp.stack([c, jnp.ones(())]).sum(),
    "minus": lambda c: -(-c - 1.0),
    "maximum": lambda c: jnp.maximum(c + 1.0, 0.0),
}


def counts(loop: Callable[..., Any], body: Callable[..., Any] = one) -> Callable[..., Any]:
    """A loop that adds N ones, beside a product that shows that the policy acts."""
    return lambda x, w: (loop(body, jnp.zeros(())), x @ w)


@pytest.mark.release(keep=2)
@each_policy
@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_that_adds_ones_is_exact(loop: Callable[..., Any], policy: pp.types.PrecisionPolicy):
    mixed = pp.auto_mixed(counts(loop), policy=policy)
    assert_all_low(mixed, X, W)
    assert float(mixed(X, W)[0]) == N


@pytest.mark.release(keep=2)
@pytest.mark.parametrize("name", BODIES)
def test_so_it_is_through_whatever_the_body_is_made_of(name: str):
    mixed = pp.auto_mixed(counts(by_scan, BODIES[name]), policy=pp.AlwaysBf16)
    assert_all_low(mixed, X, W)
    assert float(mixed(X, W)[0]) == N


def carries(jaxpr: Any) -> list[Any]:
    """The dtypes of the floating results of every scan."""
    return [
        v.aval.dtype
        for eqn in named(jaxpr, "scan")
        for v in eqn.outvars
        if jnp.issubdtype(v.aval.dtype, jnp.floating)
    ]


def body_dtypes(jaxpr: Any, primitive: str) -> set[Any]:
    """The result dtypes of a primitive's floating equations inside loops."""
    return {
        v.aval.dtype
        for name in ("scan", "while")
        for loop in named(jaxpr, name)
        for j in jaxprs_in(list(loop.params.values()))
        for eqn in walk(j)
        if eqn.primitive.name == primitive
        for v in eqn.outvars
        if jnp.issubdtype(v.aval.dtype, jnp.floating)
    }


@pytest.mark.parametrize("decay", [0.5, 0.999])
def test_a_decayed_accumulator_stays_float32(decay: float):
    def fn(xs, w):
        def step(c, x):
            y = x @ w
            return c * decay + y, y.sum()

        return lax.scan(step, jnp.zeros(8), xs)

    xs = jnp.abs(normal_array(2, 4096, 8))
    mixed = pp.auto_mixed(fn, policy=pp.AlwaysBf16)
    jaxpr = assert_all_low(mixed, xs, W)
    assert body_dtypes(jaxpr, "add") == {F32}
    assert body_dtypes(jaxpr, "mul") == {F32}
    assert set(carries(jaxpr)) == {F32}
    assert_near(mixed(xs, W)[0], jax.jit(fn)(xs, W)[0])


def test_carries_that_change_places_accumulate_too():
    def fn(x, w):
        a, b = lax.scan(lambda c, _: ((c[1], c[0] + 1.0), None), (0.0, 0.0), None, length=N)[0]
        return a, b, x @ w

    mixed = pp.auto_mixed(fn, policy=pp.AlwaysBf16)
    assert_all_low(mixed, X, W)
    assert [float(v) for v in mixed(X, W)[:2]] == [N / 2, N / 2]


@each_policy
def test_a_number_handed_to_a_branch_is_no_carry(policy: pp.types.PrecisionPolicy):
    def body(c: Any, _: Any) -> Any:
        return lax.cond(c[0, 0] > 1e6, lambda c, _: c @ W[:4, :4], lambda c, s: c + s, c, 1.0), None

    def f(c: Any) -> Any:
        return lax.scan(body, c, None, length=N)[0]

    assert jnp.array_equal(pp.auto_mixed(f, policy=policy)(jnp.zeros((4, 4))), N * jnp.ones((4, 4)))


def test_a_buffer_that_is_added_to_in_place_is_exact():
    def fn(x, w):
        def step(c, _):
            updated = lax.dynamic_slice(c, (2,), (1,)) + 1.0
            return lax.dynamic_update_slice(c, updated, (2,)), None

        def scatter(c, _):
            return c.at[1].add(1.0), None

        first = lax.scan(step, jnp.zeros(4), None, length=N)[0]
        return first[2], lax.scan(scatter, jnp.zeros(4), None, length=N)[0][1], x @ w

    mixed = pp.auto_mixed(fn, policy=pp.AlwaysBf16)
    assert_all_low(mixed, X, W)
    assert [float(v) for v in mixed(X, W)[:2]] == [N, N]


def test_a_running_mean_is_kept():
    def fn(xs, w):
        def step(c, x):
            mean, n = c
            return (mean + ((x @ w).sum() - mean) / n, n + 1.0), None

        return lax.scan(step, (jnp.zeros(()), jnp.ones(())), xs)[0]

    xs = jnp.abs(normal_array(3, 4096, 8))
    mixed = pp.auto_mixed(fn, policy=pp.AlwaysBf16)
    assert_all_low(mixed, xs, jnp.abs(W))
    assert_near(mixed(xs, jnp.abs(W)), jax.jit(fn)(xs, jnp.abs(W)))


# ---------------------------------------------------------------- predicates


def float_dtypes(jaxpr: Any) -> set[Any]:
    return {
        v.aval.dtype
        for eqn in walk(jaxpr)
        for v in (*eqn.invars, *eqn.outvars)
        if jnp.issubdtype(getattr(v.aval, "dtype", jnp.int32), jnp.floating)
    }


def close_to_its_bound(x, w):
    def unfinished(c):
        # 256.5 and 257 are one number in bfloat16
        return jnp.tanh(c[1] @ w).sum() * 0.0 + c[0] + 0.5 < 1000.0

    return lax.while_loop(unfinished, lambda c: (c[0] + 0.25, jnp.tanh(c[1] @ w)), (0.0, x))


def behind_a_nested_jit(x, w):
    norm = jax.jit(lambda v, w: ((v @ w) ** 2).sum())
    halve = lambda c: (c[0] + 1, 0.5 * c[1] @ jnp.eye(8))  # noqa: E731
    return lax.while_loop(lambda c: norm(c[1], w) > 1e-8, halve, (0, x))


@pytest.mark.parametrize("fn", [close_to_its_bound, behind_a_nested_jit])
def test_a_predicate_is_computed_wide(fn: Callable[..., Any]):
    mixed = pp.auto_mixed(fn, policy=pp.AlwaysBf16)
    (loop,) = named(jax.make_jaxpr(mixed)(X, W), "while")
    assert products(loop.params["cond_jaxpr"])
    assert float_dtypes(loop.params["cond_jaxpr"]) == {F32}
    assert low_products(loop.params["body_jaxpr"])
    assert float(mixed(X, W)[0]) == float(jax.jit(fn)(X, W)[0])


# ---------------------------------------------------------------- branches

BRANCHES: dict[str, tuple[Callable[..., Any], ...]] = {
    "product and identity": (lambda x, w: x @ w, lambda x, w: x),
    "product and elementwise": (lambda x, w: x @ w, lambda x, w: jnp.tanh(x) * 2.0),
    "product and constant": (lambda x, w: x @ w, lambda x, w: jnp.zeros_like(x)),
    "one holds a loop": (
        lambda x, w: lax.fori_loop(0, 3, lambda _, c: jnp.tanh(c @ w), x),
        lambda x, w: x.T.reshape(x.shape),
    ),
    "three": (lambda x, w: x @ w, lambda x, w: -x, lambda x, w: (x @ w) @ w.T),
}


@pytest.mark.release(keep=2)
@each_policy
@pytest.mark.parametrize("name", BRANCHES)
def test_branches_agree(name: str, policy: pp.types.PrecisionPolicy):
    branches = BRANCHES[name]

    def fn(i, x, w):
        return jnp.arctan(lax.switch(i, branches, x, w))

    mixed = pp.auto_mixed(fn, policy=policy)
    jaxpr = assert_all_low(mixed, jnp.asarray(0), X, W)
    (cond,) = named(jaxpr, "cond")
    avals = [[v.aval for v in j.outvars] for j in jaxprs_in(cond.params["branches"])]
    assert len(avals) == len(branches)
    assert all(a == avals[0] for a in avals)

    @jax.jit
    def both(i, x, w):
        gradients = [jax.grad(lambda x, f=f: f(i, x, w).sum())(x) for f in (mixed, fn)]
        return (mixed(i, x, w), fn(i, x, w)), gradients

    for i in range(len(branches)):
        for got, want in both(i, X, W):
            assert_near(got, want, 0.02)
