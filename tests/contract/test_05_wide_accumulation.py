"""Accumulation is explicit and wide. Sums, products, cumulative sums, sum-windows and scatter-adds
take low input, accumulate in float32, and round once. Max, min, sort and argmax select and need no
widening. This holds for the backward pass too."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec

import precpass as pp
from tests.support.jaxprs import LOW, dtypes_in, low_products, multiplies_matrices, named, walk
from tests.support.passes import ALWAYS_LOW, AUTO, LOWERING, both_grads, look, run
from tests.support.values import identical, normal, rel_error

N = 16384
"""Ones add up to 256 in bfloat16 and to 2048 in float16; 16384 itself both can hold."""

# AutoMixedConservative has AutoMixed's products, and the sums of all are wide
DISTINCT = [p for p in LOWERING if p is not pp.AutoMixedConservative]
each_policy = pytest.mark.parametrize("policy", DISTINCT, ids=lambda p: p.name)
each_order = pytest.mark.parametrize("policy", ALWAYS_LOW, ids=lambda p: p.name)


def _carry(s, x):
    return lax.scan(lambda c, v: (c + s * v, None), jnp.float32(0), x)[0]


def _while_carry(s, x):
    return lax.fori_loop(0, N, lambda i, c: c + s * x[i], jnp.float32(0))


def _psum(s, x):
    mesh = Mesh(np.asarray(jax.devices()[:4]), ("d",))
    spec = PartitionSpec("d")
    total = jax.shard_map(
        lambda v: lax.psum(jnp.sum(v), "d"), mesh=mesh, in_specs=spec, out_specs=PartitionSpec()
    )
    return total(s * x)


SUMS = {
    "reduce_sum": lambda s, x: jnp.sum(s * x),
    "cumsum": lambda s, x: jnp.cumsum(s * x)[-1],
    "cumsum in reverse": lambda s, x: lax.cumsum(s * x, reverse=True)[0],
    "segment_sum": lambda s, x: jax.ops.segment_sum(s * x, jnp.zeros(N, jnp.int32), 1)[0],
    "scatter-add": lambda s, x: jnp.zeros(3).at[jnp.ones(N, jnp.int32)].add(s * x)[1],
    "reduce_window": lambda s, x: (
        4 * lax.reduce_window(s * x[:4096], 0.0, lax.add, (4096,), (1,), "VALID")[0]
    ),
    "dot": lambda s, x: (s * x) @ x,
    "scan carry": _carry,
    "while carry": _while_carry,
    "psum": _psum,
    "mean": lambda s, x: jnp.mean(s * x) * N,
    "convolution": lambda s, x: jnp.convolve(s * x, x, "valid")[0],
    "sum of a product": lambda s, x: jnp.sum(jnp.outer(s * x, x[:2]) @ (x[:2, None] / 2)),
}
# the transpose of a window is quadratic in it on CPU: 512 ones, which are 256 in bfloat16, and
# 4096 in a convolution, which are 2048 in float16
BACKWARD_SUMS = SUMS | {
    "convolution": lambda s, x: 4 * jnp.convolve(s * x[:4096], x[:4096], "valid")[0],
    "reduce_window": lambda s, x: (
        32 * lax.reduce_window(s * x[:512], 0.0, lax.add, (512,), (1,), "VALID")[0]
    ),
}
each_sum = pytest.mark.parametrize("name", SUMS)


@pytest.mark.release(keep=2)
@each_policy
@each_sum
def test_16384_ones_add_up_to_16384(name, policy):
    s, x = jnp.float32(1), jnp.ones(N)
    assert float(run(SUMS[name], policy, s, x)) == N


# a convolution of 16384 elements takes seconds to run: a policy for each format
FORMATS = [
    (name, policy)
    for name in SUMS
    for policy in (*ALWAYS_LOW, pp.AutoMixedBf16)
    if not (name == "convolution" and policy is pp.AlwaysBf16)
]


@pytest.mark.release(keep=1)
@pytest.mark.enumerated
@pytest.mark.parametrize(("name", "policy"), FORMATS, ids=lambda v: getattr(v, "name", v))
def test_this_holds_for_the_backward_pass_too(name, policy):
    """The scalar's gradient is a sum of 16384 ones, each element's is one."""
    s, x = jnp.float32(1), jnp.ones(N)
    want = jax.jit(jax.grad(BACKWARD_SUMS[name], (0, 1)))(s, x)
    assert float(want[0]) == N
    for form, got in both_grads(BACKWARD_SUMS[name], policy, s, x, argnums=(0, 1)).items():
        assert float(got[0]) == N, form
        assert rel_error(got[1], want[1]) < 1e-3, form


# ---------------------------------------------------------------- the form


ACCUMULATING = {
    "reduce_sum": lambda x: lax.reduce_sum(x, (0,)),
    "reduce_prod": lambda x: lax.reduce_prod(x, (0,)),
    "cumsum": lax.cumsum,
    "cumprod": lax.cumprod,
    "cumlogsumexp": lax.cumlogsumexp,
    "reduce_window_sum": lambda x: lax.reduce_window(x, 0.0, lax.add, (4,), (1,), "VALID"),
    "scatter-add": lambda x: jnp.zeros(3).at[jnp.arange(8) % 3].add(x),
    "scatter-mul": lambda x: jnp.ones(3).at[jnp.arange(8) % 3].multiply(x),
    "select_and_scatter_add": jax.grad(
        lambda x: jnp.sum(
            # these windows share elements: of windows apart nothing is added up
            lax.reduce_window(x, -jnp.inf, lax.max, (3,), (1,), "VALID") * jnp.arange(6.0)
        )
    ),
}


@pytest.mark.release(keep=2)
@each_order
@pytest.mark.parametrize("name", ACCUMULATING)
def test_sums_take_low_input_accumulate_in_float32_and_round_once(name, policy):
    x = jnp.asarray(1 + np.abs(normal(0, 8)) / 7)
    low = policy.low.dtype
    after = look(ACCUMULATING[name], policy, x).after
    (eqn,) = named(after, name)
    assert set(dtypes_in(eqn)) == {np.dtype(np.float32)}
    made_by = {v: e for e in walk(after) for v in e.outvars}
    reads = [v for v in eqn.invars if not hasattr(v, "val")]  # literals cannot be looked up
    casts = [made_by[v] for v in reads if v.aval.dtype == np.float32 and v in made_by]
    assert any(c.primitive.name == "convert_element_type" and dtypes_in(c) == [low] for c in casts)
    readers = [e for e in walk(after) if any(v is eqn.outvars[0] for v in e.invars)]
    assert [e.params.get("new_dtype") for e in readers] == [low]
    want = ACCUMULATING[name](x.astype(low).astype(np.float32)).astype(low)
    assert rel_error(run(ACCUMULATING[name], policy, x), want) <= policy.low.unit_roundoff


@each_order
def test_devices_add_up_wide(policy):
    """256 + 1 + 1 + 1: 256 when each addition rounds to bfloat16; float16 holds 259."""
    mesh = Mesh(np.asarray(jax.devices()[:4]), ("d",))
    spec = PartitionSpec("d")

    def f(x):
        add = jax.shard_map(
            lambda v: lax.psum(v, "d"), mesh=mesh, in_specs=spec, out_specs=PartitionSpec()
        )
        return add(x)[0]

    got = float(run(f, policy, jnp.asarray([256.0, 1.0, 1.0, 1.0])))
    assert abs(got - 259) <= 1
    (eqn,) = named(look(f, policy, jnp.ones(4)).after, "psum", "psum_invariant")
    assert dtypes_in(eqn) == [np.float32]


SELECTIONS = {
    "max": lambda x: (jnp.max(x), jnp.min(x, axis=0)),
    "sort": lambda x: (jnp.sort(x), jnp.argsort(x)),
    "argmax": lambda x: (jnp.argmax(x, axis=1), jnp.argmin(x, axis=0)),
    "top_k": lambda x: lax.top_k(x, 3),
    "cummax": lax.cummax,
    "compare": lambda x: (x > 1.0, x == 1.0),
}


@pytest.mark.release(keep=2)
@each_policy
@pytest.mark.parametrize("name", SELECTIONS)
def test_max_min_sort_and_argmax_select(name, policy):
    """Nothing is narrowed for them: new ties would change the positions."""
    x = 1 + jnp.asarray(normal(0, 32, 32)) * 1e-4
    assert identical(run(SELECTIONS[name], policy, x), jax.jit(SELECTIONS[name])(x))


@pytest.mark.parametrize("policy", ALWAYS_LOW, ids=lambda p: p.name)
@pytest.mark.parametrize("name", ["reduce_max", "sort", "cummax"])
def test_and_need_no_widening(name, policy):
    """A selection of values that the user holds low stays low."""
    fn = {"reduce_max": lambda x: lax.reduce_max(x, (0,)), "sort": lax.sort, "cummax": lax.cummax}[
        name
    ]
    after = look(lambda x: fn(x.astype(policy.low.dtype)), policy, jnp.ones(8)).after
    (eqn,) = named(after, name)
    assert dtypes_in(eqn) == [policy.low.dtype]


# ---------------------------------------------------------------- backward passes


def _embedding(table, x):
    """One token looked up 16384 times, through a product."""
    rows = table[jnp.zeros(N, jnp.int32)]
    return jnp.sum(rows @ x)


def _loop_constant(w, x):
    """A loop's constant matrix, used 16384 times."""
    return lax.scan(lambda c, row: (c + jnp.sum(row[None] @ w), None), 0.0, x)[0]


def _bias(b, x):
    """A bias broadcast over 16384 rows, before and behind a product."""
    return jnp.sum((x + b) @ jnp.eye(2) + b)


def _rnn(w, x):
    def step(h, row):
        return jnp.tanh(row + h @ w), None

    return jnp.sum(lax.scan(step, jnp.zeros(x.shape[1:]), x)[0] ** 2)


BACKWARD = {
    "embedding": (_embedding, lambda: (jnp.ones((3, 2)), jnp.ones((2, 1)))),
    "loop constant": (_loop_constant, lambda: (jnp.ones((2, 2)) / 4, jnp.ones((N, 2)))),
    "bias": (_bias, lambda: (jnp.ones((1, 2)) / 4, jnp.ones((N, 2)) / 4)),
    "cumsum": (
        lambda x, w: jnp.sum(jnp.cumsum(x) @ w),
        lambda: (jnp.ones(N) / N, jnp.ones((N, 2))),
    ),
    "rnn": (
        _rnn,
        lambda: (jnp.asarray(normal(0, 8, 8)) * 0.3, jnp.asarray(normal(1, 4096, 2, 8))),
    ),
}
# test_gradient_acceptance has these under the other policies, at any order of the transforms
ELSEWHERE = ("loop constant", "rnn")
CASES = [
    (name, policy)
    for name in BACKWARD
    for policy in ((pp.AlwaysF16,) if name in ELSEWHERE else DISTINCT)
]


@pytest.mark.release(keep=3)
@pytest.mark.enumerated
@pytest.mark.parametrize(("name", "policy"), CASES, ids=lambda v: getattr(v, "name", v))
def test_gradients_accumulate_wide(name, policy):
    """Within 1 % of float32's, where a shared low copy would give 1/64 of it; products all low."""
    fn, make = BACKWARD[name]
    args = make()
    want = jax.jit(jax.grad(fn))(*args)
    backward = look(jax.grad(fn), policy, *args)
    forward = look(fn, policy, *args)
    for inspection in (backward, forward):
        written = named(inspection.before, "dot_general")
        low = len(low_products(inspection.after, policy.low.dtype))
        # a sum of one term is elementwise work, which AutoMixed does not lower
        assert 1 <= sum(map(multiplies_matrices, written)) <= low <= len(written)
    for form, got in both_grads(fn, policy, *args).items():
        assert rel_error(got, want) < 0.01, form
    assert rel_error(run(fn, policy, *args), jax.jit(fn)(*args)) < 0.01


def test_the_cotangents_of_a_fan_out_add_up_wide():
    """256 and seven ones, added up one by one: in bfloat16 the sum has no odd numbers."""

    def fn(w, x):
        return jnp.sum(jnp.concatenate([row[None] @ w for row in x]))

    w, x = np.ones((1, 1), np.float32), np.ones((8, 1), np.float32)
    x[3] = 256.0
    for form, got in both_grads(fn, pp.AlwaysBf16, w, x).items():
        assert got == 263.0, form


@each_policy
def test_a_loops_gradient_carries_in_float32(policy):
    """The carry that collects dW over 4096 steps is not narrowed in the gradient's loop."""
    fn, make = BACKWARD["rnn"]
    loops = named(look(jax.grad(fn), policy, *make()).after, "scan")
    assert len(loops) == 2
    for loop in loops:
        body = loop.params["jaxpr"]
        assert not any(getattr(a, "dtype", None) in LOW for a in body.out_avals)


def test_conservative_reductions_are_float32_altogether():
    """Its REDUCTION is F32: the sum of a low product is never rounded."""
    x = jnp.asarray(normal(0, 64, 64))
    after = look(lambda x: jnp.sum(x @ x), pp.AutoMixedConservative, x).after
    (eqn,) = named(after, "reduce_sum")
    assert dtypes_in(eqn) == [np.float32]
    assert low_products(after, np.float16)
    assert AUTO[0] is pp.AutoMixedConservative
