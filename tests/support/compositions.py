"""Programs around every primitive that is entered, and every way of transforming one.

`PROGRAMS` x `COMPOSITIONS` x `POLICIES` is the matrix of `sweeps/test_enumeration_compositions.py`;
`scripts/enumerate` writes it into the table of README.md.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.extend.core.primitives as primitives
import jax.numpy as jnp
from jax import lax
from jax._src.core import MemorySpace
from jax.custom_batching import custom_vmap
from jax.custom_derivatives import linear_call
from jax.sharding import PartitionSpec

import precpass as pp
from tests.support.jaxprs import PRODUCTS, check_all_low, is_low, jaxprs_in, walk
from tests.support.values import normal_array

try:
    # 0.12
    from jax.experimental.compute_on import compute_on
    from jax.experimental.overlap import program_order
    from jax.experimental.xla_metadata import xla_metadata_call
except ImportError:
    from jax.experimental.compute_on import compute_on2 as compute_on
    from jax.experimental.scheduling_groups import xla_metadata_call

    program_order = None

X, W = normal_array(0, 4, 6), normal_array(1, 6, 6) / 2
DX, DW = normal_array(2, 4, 6), normal_array(3, 6, 6)
POLICIES = {"bf16": pp.AutoMixedBf16, "f16": pp.AutoMixed}
# A few roundings of 2^-8 and of 2^-11, relative to the norm of the result.
TOLERANCE = {"bf16": 0.02, "f16": 0.0025}
SCALED = {
    name: pp.AutoMixedBf16.with_rules(pp.Rule(primitive="dot_general", precision=name))
    for name in ("int8", "f8e4m3")
}
"""Policies that order a format of 8 bits for every dot, whatever its size."""

Fn = Callable[..., Any]
PROGRAMS: dict[str, Fn] = {}
"""Primitive, as the installed JAX calls it -> a function of (x, w) with a product inside of it;
the result has the shape of x."""


def program(primitive: str) -> Callable[[Fn], Fn]:
    def add(fn: Fn) -> Fn:
        PROGRAMS[primitive] = fn
        return fn

    return add


def _product(x: Any, w: Any) -> Any:
    return jnp.arctan(x @ w)


@program("jit")
def _jit(x, w):
    return jax.jit(_product)(x, w)


@program("scan")
def _scan(x, w):
    return lax.scan(lambda c, row: (_product(c, w) + row, None), x, x[:3, None])[0]


@program("while")
def _while(x, w):
    return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, _product(c[1], w)), (0, x))[1]


@program("cond")
def _cond(x, w):
    return lax.cond(x.sum() > 1e6, lambda x, w: x, _product, x, w)


@program("remat2")
def _remat(x, w):
    return jax.checkpoint(_product)(x, w)


# 0.11 made closed_call an eval_jaxpr
@program(primitives.closed_call_p.name)
def _closed_call(x, w):
    inner = jax.make_jaxpr(_product)(x, w)
    bind = primitives.closed_call_p.bind
    return bind(x, w, **primitives.closed_call_p.get_bind_params({"call_jaxpr": inner}))[0]


if primitives.call_p.name == "call":  # 0.11 dropped it

    @program("call")
    def _call(x, w):
        inner = jax.make_jaxpr(_product)(x, w).jaxpr
        bind = primitives.call_p.bind
        return bind(x, w, **primitives.call_p.get_bind_params({"call_jaxpr": inner}))[0]


@program("shard_map")
def _shard_map(x, w):
    return over_rows(_product)(x, w)


@program("custom_linear_solve")
def _custom_linear_solve(x, w):
    matrix = w @ w.T / 8 + 2 * jnp.eye(6)

    def solve(matvec, b):
        return lax.scan(lambda v, _: (v + (b - matvec(v)) * 0.3, None), b, None, length=8)[0]

    return lax.custom_linear_solve(lambda v: v @ matrix, x, solve, symmetric=True)


@program("custom_jvp_call")
def _custom_jvp(x, w):
    product = jax.custom_jvp(_product)
    product.defjvp(lambda p, t: jax.jvp(_product, p, t))
    return product(x, w)


def _with_vjp(**options: Any) -> Fn:
    def fwd(x, w):
        return _product(x, w), (x, w)

    def bwd(kept, g):
        return jax.vjp(_product, *kept)[1](g)

    product = jax.custom_vjp(_product)
    product.defvjp(fwd, bwd, **options)
    return product


@program("custom_vjp_call")
def _custom_vjp(x, w):
    return _with_vjp()(x, w)


@program("remat_opt")
def _optimize_remat(x, w):
    return _with_vjp(optimize_remat=True)(x, w)


@program("custom_vmap_call")
def _custom_vmap(x, w):
    product = custom_vmap(_product)

    @product.def_vmap
    def rule(n, batched, x, w):
        return jax.vmap(_product, [0 if b else None for b in batched])(x, w), True

    return product(x, w)


@program("linear_call")
def _linear_call(x, w):
    # JAX does not differentiate with respect to what a linear_call closes over
    w = lax.stop_gradient(w)
    return jnp.arctan(linear_call(lambda w, x: x @ w, lambda w, t: t @ w.T, w, x))


@program("composite")
def _composite(x, w):
    return lax.composite(_product, "my.product")(x, w)


@program("compute_on")
def _compute_on(x, w):
    place = {"compute_type": "device_host", "out_memory_spaces": MemorySpace.Device}
    return compute_on(_product, **place)(x, w)


@program("xla_metadata_call")
def _xla_metadata_call(x, w):
    return xla_metadata_call(_product, group="1")(x, w)


if program_order is not None:

    @program("program_order")
    def _program_order(x, w):
        return program_order(_product, enforce=True)(x, w)


def custom_root(x, w):
    """A root of `tanh(v @ a) - x / 10`, with a well-conditioned `a`, by damped iteration."""
    a = w.T @ w / 4 + jnp.eye(6)

    def solve(f, v):
        return lax.fori_loop(0, 30, lambda _, v: v - 0.3 * f(v), v)

    def solve_linear(g, y):
        return lax.fori_loop(0, 60, lambda _, v: v - 0.3 * (g(v) - y), y)

    return lax.custom_root(lambda v: jnp.tanh(v @ a) - x * 0.1, x, solve, solve_linear)


if jax.__version_info__ >= (0, 12):
    program("call_hi_primitive")(custom_root)


# ---------------------------------------------------------------- compositions


def over_rows(fn: Fn) -> Fn:
    # Two rows on each of two devices: a sum over a single row is no matrix product.
    axes = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((2,), ("rows",), axis_types=axes, devices=jax.devices()[:2])
    rows, whole = PartitionSpec("rows"), PartitionSpec()
    return jax.shard_map(fn, mesh=mesh, in_specs=(rows, whole), out_specs=rows)


def _loss(fn: Fn) -> Fn:
    return lambda x, w: jnp.arctan(fn(x, w)).sum()


Mix = Callable[[Fn], Fn]
COMPOSITIONS: dict[str, Callable[[Fn, Mix], Fn]] = {
    "eager": lambda f, mix: mix(f),
    "jit": lambda f, mix: jax.jit(mix(f)),
    "vmap": lambda f, mix: lambda x, w: jax.vmap(mix(f), (0, None))(jnp.stack([x, -x]), w),
    "grad outside": lambda f, mix: jax.grad(mix(_loss(f)), (0, 1)),
    "grad inside": lambda f, mix: mix(jax.grad(_loss(f), (0, 1))),
    "jvp": lambda f, mix: lambda x, w: jax.jvp(mix(f), (x, w), (DX, DW)),
    "remat": lambda f, mix: jax.value_and_grad(jax.checkpoint(mix(_loss(f))), (0, 1)),
    "jacfwd": lambda f, mix: jax.jacfwd(mix(f), 1),
    "hessian": lambda f, mix: jax.hessian(mix(_loss(f)), 0),
    "shard_map": lambda f, mix: over_rows(mix(f)),
}
"""Name -> (a program, the pass or what stands in its place) -> the transformed program."""


def products_inside(jaxpr: Any, primitive: str) -> list[Any]:
    """The products in the bodies of a primitive's equations."""
    outer = [e for e in walk(jaxpr) if e.primitive.name == primitive]
    bodies = [j for e in outer for j in jaxprs_in(list(e.params.values()))]
    return [e for j in bodies for e in walk(j) if e.primitive.name in PRODUCTS]


def forms(
    primitive: str, composition: str, policies: Mapping[str, pp.types.PrecisionPolicy] = POLICIES
) -> dict[str, Fn]:
    """A cell's program without the pass, and under each policy."""
    # a call of auto_mixed is a call of jax.jit, which JAX's transformations take differently
    # from the same code inline; a plain call is not compared with another compiled one
    mixes: dict[str, Mix] = {"plain": (lambda f: f) if composition == "eager" else jax.jit}
    for name, policy in policies.items():
        mixes[name] = functools.partial(pp.auto_mixed, policy=policy)
    return {n: COMPOSITIONS[composition](PROGRAMS[primitive], mix) for n, mix in mixes.items()}


def jaxpr_or_error(fn: Fn) -> Any:
    """The jaxpr of a program that can be lowered, else what JAX raises."""
    try:
        traced = jax.jit(fn).trace(X, W)
        traced.lower()
    except Exception as error:  # whatever JAX raises is what the pass must raise too
        return error
    return traced.jaxpr


def outcome(primitive: str, composition: str) -> str:
    """What a cell of the matrix shows, from the program without the pass."""
    return outcome_of(jaxpr_or_error(forms(primitive, composition)["plain"]), primitive)


def outcome_of(found: Any, primitive: str) -> str:
    """What a cell shows.

    "inside": the primitive is there with products inside. "low": JAX's transformation took it away,
    or its products. Else the name of what JAX raises.
    """
    if isinstance(found, Exception):
        return type(found).__name__
    return "inside" if products_inside(found, primitive) else "low"


def check_low(after: Any, before: Any, primitive: str, dtype: Any) -> None:
    """Every product is low, and low ones stand inside of the primitive wherever any stood there."""
    check_all_low(after, dtype=dtype)
    if products_inside(before, primitive):
        inside = products_inside(after, primitive)
        assert any(is_low(e, dtype) for e in inside), f"none low inside {primitive}:\n{after}"
