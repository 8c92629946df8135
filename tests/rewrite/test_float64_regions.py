"""Float64 regions with x64 off: every composition gives what a float64 program gives.

Design sections 6 and 3, line 15. The programs lose five digits or more in float32,
so a single equation that is not in float64 shows.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import precpass as pp
from tests.support.float64_programs import (
    CALLS,
    DIRECTION,
    PRIMITIVES,
    ROWS,
    X,
    assert_float64,
    fragile,
    in_float64,
    inside_islands,
    narrow_arithmetic,
    region,
)
from tests.support.values import rel_error

Fn = Callable[..., Any]
ALL = CALLS | PRIMITIVES


def mixed(fn: Fn) -> Fn:
    return pp.auto_mixed(fn, policy=pp.AlwaysF32)


def like(rows: Any, x: Any) -> Any:
    return jnp.asarray(rows, x.dtype)


def jvp(f: Fn) -> Fn:
    return lambda x: jax.jvp(f, (x,), (like(DIRECTION, x),))


def scanned(f: Fn) -> Fn:
    def total(x: Any) -> Any:
        def body(carry: Any, row: Any) -> Any:
            return carry + f(row * x), None

        return lax.scan(body, jnp.zeros((), x.dtype), like(ROWS, x))[0]

    return total


COMPOSITIONS: dict[str, tuple[Fn, list[str]]] = {
    "value and grad, loops and rules": (jax.value_and_grad, list(CALLS)),
    "value and grad, primitives": (jax.value_and_grad, list(PRIMITIVES)),
    "jvp": (jvp, ["plain", "scan", "custom_jvp", "sort", "svd", "cumprod", "max", "lu"]),
    "jacfwd": (jax.jacfwd, ["cond", "gather", "fori_loop"]),
    "vmap": (lambda f: lambda x: jax.vmap(f)(like(ROWS, x)), ["scan", "cond", "eigh", "softmax"]),
    "vmap of grad": (
        lambda f: lambda x: jax.vmap(jax.grad(f))(like(ROWS, x)),
        ["plain", "scan", "custom_vjp", "remat", "gather", "cumprod", "softmax"],
    ),
    "grad of vmap": (
        lambda f: jax.grad(lambda x: jnp.sum(jax.vmap(f)(x[None] * like(ROWS, x)))),
        ["jit", "custom_jvp", "custom_vjp", "max", "svd"],
    ),
    "hessian": (jax.hessian, ["plain", "jit", "scan", "custom_jvp", "sort", "softmax", "lu"]),
    "reverse over reverse": (
        lambda f: jax.grad(lambda x: jnp.sum(jax.grad(f)(x) ** 2)),
        ["plain", "scan", "cumprod", "gather", "eigh"],
    ),
    "grad of remat": (lambda f: jax.grad(jax.checkpoint(f)), ["scan", "custom_vjp", "softmax"]),
    "grad of scan": (lambda f: jax.grad(scanned(f)), ["plain", "cond", "custom_jvp", "cumsum"]),
    "jvp of scan": (lambda f: jvp(scanned(f)), ["jit", "scan", "max"]),
    "grad of cond": (
        lambda f: jax.grad(lambda x: lax.cond(x[0] > 0, f, jnp.sum, x)),
        ["plain", "fori_loop", "select_n"],
    ),
}


@pytest.mark.release(keep=1)
@pytest.mark.programs
@pytest.mark.parametrize("composition", COMPOSITIONS)
def test_a_region_is_float64_in_every_composition_on_either_side_of_the_pass(composition: str):
    compose, names = COMPOSITIONS[composition]
    want = in_float64(lambda x: {n: compose(ALL[n])(x) for n in names}, X)
    outside = jax.jit(lambda x: {n: compose(mixed(region(ALL[n])))(x) for n in names})
    inside = mixed(lambda x: {n: compose(region(ALL[n]))(x) for n in names})
    assert_float64(outside(X), want)
    assert_float64(inside(X), want)


@pytest.mark.parametrize("name", CALLS)
def test_everything_that_a_region_calls_computes_in_float64(name: str):
    jaxpr = jax.make_jaxpr(mixed(region(CALLS[name])))(X)
    assert not narrow_arithmetic(jaxpr)
    assert sum(eqn.primitive.name == "abs" for eqn in inside_islands(jaxpr)) >= 1


def test_a_helper_called_inside_and_outside_is_wide_and_narrow():
    shared = jax.jit(fragile)

    def fn(x: Any) -> Any:
        with pp.keep("f64"):
            y = shared(x)
        return y, shared(x)

    wide, narrow = mixed(fn)(X)
    assert_float64(wide, in_float64(fragile, X))
    np.testing.assert_array_equal(narrow, jax.jit(fragile)(X))
    assert rel_error(narrow, wide) > 1e-3


def test_what_the_forward_pass_keeps_for_the_backward_pass_is_exact():
    """Between them stand equations outside of the region, so there are two islands."""

    def fn(x: Any) -> Any:
        with pp.keep("f64"):
            y = (jnp.exp(x) - 1) / x
        return jnp.sum(jnp.tanh(y))

    small = X * np.float32(1e-3)

    def plain(x: Any) -> Any:
        return jnp.sum(jnp.tanh((jnp.exp(x) - 1) / x))

    want, wanted = in_float64(lambda s, x: (jax.grad(plain)(s), jax.hessian(plain)(x)), small, X)
    inspection = pp.inspect(jax.grad(fn), pp.AlwaysF32)(small)
    islands = [e for e in inspection.after.eqns if e.primitive.name == "precpass_float64"]
    assert len(islands) == 2
    assert {str(v.aval.dtype) for e in islands for v in e.outvars} == {"float32", "uint32"}
    # tanh itself and what reads it are float32; a rounded exp(x) would be off by 1e-4
    assert rel_error(mixed(jax.grad(fn))(small), want) < 5e-7
    # it can be differentiated again; tangents cross rounded to float32
    once = mixed(jax.grad(fn))
    twice = jax.jit(lambda x: (jax.jacfwd(once)(x), jax.jacrev(once)(x)))(X)
    assert max(rel_error(found, wanted) for found in twice) < 1e-5


def test_a_loop_in_a_region_that_cannot_be_reversed_says_so_as_jax_does():
    def fn(x: Any) -> Any:
        return jnp.sum(lax.while_loop(lambda c: c[0] < 3.0, lambda c: fragile(c) + 1, x))

    with pytest.raises(ValueError, match="Reverse-mode differentiation does not work"):
        jax.grad(mixed(region(fn)))(X)
    got = jax.jvp(mixed(region(fn)), (X,), (DIRECTION,))
    want = in_float64(lambda x: jax.jvp(fn, (x,), (like(DIRECTION, x),)), X)
    assert_float64(got, want)


def test_a_loop_predicate_of_a_region_is_float64():
    """Float32 stops one trip early: it rounds 1 - 2**-30 to 1."""

    def trips(x: Any) -> Any:
        return lax.while_loop(lambda c: 1 - c[0] < 1, lambda c: (c[0] / 2, c[1] + 1), (x, 0))[1]

    x = jnp.float32(1.0)
    assert mixed(region(trips))(x) == in_float64(trips, x) == 54
    assert mixed(trips)(x) == 25


# ---------------------------------------------------------------- collectives


def mesh() -> Any:
    return jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))


def shard_map(fn: Fn) -> Fn:
    spec = jax.sharding.PartitionSpec
    return jax.shard_map(fn, mesh=mesh(), in_specs=spec("i"), out_specs=spec())


def total(x: Any) -> Any:
    return lax.psum(jnp.sum(fragile(x) ** 2), "i")


@pytest.mark.release(keep=2)
@pytest.mark.parametrize(
    "form",
    [
        lambda: mixed(shard_map(region(total))),
        lambda: mixed(region(shard_map(total))),
        lambda: jax.jit(shard_map(mixed(region(total)))),
    ],
    ids=["region in shard_map", "shard_map in region", "pass in shard_map"],
)
@pytest.mark.usefixtures("jax_leaks_too")  # a grad of a jit of a shard_map
def test_a_sum_across_devices_is_float64(form: Fn):
    want = in_float64(lambda x: jax.value_and_grad(lambda x: jnp.sum(fragile(x) ** 2))(x), X)
    assert_float64(jax.value_and_grad(form())(X), want)


def test_a_sum_across_a_mapped_axis_is_float64():
    def share(x: Any) -> Any:
        return fragile(x) / lax.psum(fragile(x), "i")

    def shares(f: Fn) -> Fn:
        return lambda x: jax.jacrev(jax.vmap(f, axis_name="i"))(x)

    assert_float64(shares(mixed(region(share)))(X), in_float64(shares(share), X))
