"""Programs over four devices: GSPMD, explicit sharding, shard_map with its collectives, pmap."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import precpass as pp
from tests.support.jaxprs import walk
from tests.support.libraries import FAST, assert_leaves_near, check_products, combined, signature
from tests.support.passes import LOWERING, look
from tests.support.values import normal

pytestmark = pytest.mark.programs

P = PartitionSpec
X = jnp.asarray(normal(0, 8, 16))
W = jnp.asarray(normal(1, 16, 32)) / 4
V = jnp.asarray(normal(2, 32, 16)) / 6
LOWS = (pp.AutoMixedBf16, pp.AutoMixed)
# what adds up over devices, as jax 0.10 and 0.12 call it
SUMS = frozenset({"psum", "psum_invariant", "reduce_scatter", "unreduced_psum"})


def mesh(kind: str, **axes: int) -> Any:
    types = (AxisType[kind],) * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=types)


def assert_sums_are_wide(jaxpr: Any) -> int:
    """No summand of a collective is narrowed; gives their number."""
    sums = [e for e in walk(jaxpr) if e.primitive.name in SUMS]
    assert {v.aval.dtype.name for e in sums for v in e.invars} <= {"float32"}, sums
    return len(sums)


def check_sharded(fn: Callable[..., Any], *args: Any, least: int, sums: int, factor: float = 4):
    """A program and its gradients on both sides of the pass: values, types, shardings.

    Args:
        fn: the program.
        args: its operands; the gradient is taken of all.
        least: the smallest number of low products in the program.
        sums: the smallest number of sums over devices in its gradient.
        factor: the bound on errors in units of the unit roundoff; that of gradients is twice it.
    """
    every = tuple(range(len(args)))

    def loss(fn: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: combined(fn(*args))

    def gradient(loss: Callable[..., Any]) -> Callable[..., Any]:
        return jax.value_and_grad(loss, every)

    plain, plain_gradient = (jax.jit(f, **FAST) for f in (fn, gradient(loss(fn))))
    wanted, wanted_gradient = plain(*args), plain_gradient(*args)
    bf16, f16 = LOWS
    forms = [
        (bf16, pp.auto_mixed(fn, policy=bf16, **FAST), wanted, least, factor),
        (
            bf16,
            pp.auto_mixed(gradient(loss(fn)), policy=bf16, **FAST),
            wanted_gradient,
            2 * least + 1,
            2 * factor,
        ),
        (
            f16,
            jax.jit(gradient(loss(pp.auto_mixed(fn, policy=f16))), **FAST),
            wanted_gradient,
            2 * least + 1,
            2 * factor,
        ),
    ]
    for policy, form, want, at_least, bound in forms:
        traced = form.trace(*args)
        check_products(traced.jaxpr, policy, at_least)
        found = assert_sums_are_wide(traced.jaxpr)
        assert found >= (0 if want is wanted else sums)
        got = traced.lower().compile()(*args)
        assert_leaves_near(got, want, bound * policy.low.unit_roundoff, floor=0.1)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
            assert jax.typeof(a) == jax.typeof(b)
    assert signature(forms[0][1].trace(*args).jaxpr) == signature(plain.trace(*args).jaxpr)
    found = look(fn, pp.AlwaysF32, *args)
    assert found.after is found.before


# ---------------------------------------------------------------- GSPMD


def test_a_training_step_with_sharded_and_donated_parameters():
    devices = mesh("Auto", data=2, model=2)
    rows, columns, batch = (
        NamedSharding(devices, spec) for spec in (P("model"), P(None, "model"), P("data"))
    )
    placed = {"w": columns, "v": rows}

    def step(params: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            h = lax.with_sharding_constraint(
                x @ params["w"], NamedSharding(devices, P("data", "model"))
            )
            return jnp.mean(jnp.square(jnp.tanh(h) @ params["v"] - x))

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.5 * g, params, grads), value

    options: dict[str, Any] = {
        "in_shardings": (placed, batch),
        "out_shardings": (placed, None),
        "donate_argnums": 0,
        **FAST,
    }

    def three_steps(step: Any) -> tuple[Any, Any]:
        params, value = jax.device_put({"w": W, "v": V}, placed), None
        for _ in range(3):
            before = params
            params, value = step(params, X)
            assert all(p.is_deleted() for p in jax.tree.leaves(before))
        return params, value

    want = three_steps(jax.jit(step, **options))
    for policy in LOWS:
        mixed = pp.auto_mixed(step, policy=policy, **options)
        check_products(mixed.trace({"w": W, "v": V}, X).jaxpr, policy, least=5)
        got = three_steps(mixed)
        assert_leaves_near(got, want, 4 * policy.low.unit_roundoff)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert a.sharding.is_equivalent_to(b.sharding, a.ndim)


# ---------------------------------------------------------------- explicit sharding


def test_explicit_sharding():
    devices = mesh("Explicit", a=2, b=2)

    def fn(x: Any, w: Any, v: Any) -> Any:
        h = jnp.tanh(x @ w)
        square = jnp.dot(w, v, out_sharding=P("a", "b"))
        return {
            "contracted": jnp.dot(h, v, out_sharding=P("a", None)),
            "resharded": jax.sharding.reshard(h, P("a", None)) @ jax.sharding.reshard(v, P()),
            "batched": jnp.einsum("bij,jk->bik", x.reshape(4, 2, 16), w),
            "mapped": jax.vmap(lambda row: row @ w)(x),
            "scan": lax.scan(
                lambda h, _: (jnp.tanh(jnp.dot(h, square, out_sharding=P("a", None))), None),
                x,
                None,
                length=2,
            )[0],
        }

    with jax.set_mesh(devices):
        specs = P("a"), P(None, "b"), P("b")
        args = [
            jax.device_put(x, NamedSharding(devices, spec))
            for x, spec in zip((X, W, V), specs, strict=True)
        ]
        check_sharded(fn, *args, least=7, sums=0)


@pytest.mark.parametrize("policy", LOWERING, ids=lambda p: p.name)
def test_a_value_is_rounded_on_the_mesh_that_it_is_typed_with(policy: Any):
    """A sampler with an `out_sharding` draws on a mesh of type Auto and reshards what it drew."""
    devices = mesh("Explicit", a=2, b=2)

    def fn(x: Any, w: Any, key: Any) -> Any:
        return x @ w * jax.random.normal(key, (8, 32), out_sharding=P("a", "b"))

    with jax.set_mesh(devices):
        args = (
            jax.device_put(X, NamedSharding(devices, P("a"))),
            jax.device_put(W, NamedSharding(devices, P(None, "b"))),
            jax.random.key(0),
        )
        got, want = pp.auto_mixed(fn, policy=policy, **FAST)(*args), jax.jit(fn, **FAST)(*args)
        assert_leaves_near(got, want, 4 * policy.low.unit_roundoff)
        assert jax.typeof(got) == jax.typeof(want)


# ---------------------------------------------------------------- shard_map


def ring(x: Any, axis: str) -> Any:
    size = lax.axis_size(axis)
    return lax.ppermute(x, axis, [(i, (i + 1) % size) for i in range(size)])


@pytest.mark.release(keep=1)
@pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "no vma"])
def test_collectives(check_vma: bool):
    def on_shards(x: Any, w: Any) -> Any:
        part = lax.dynamic_slice_in_dim(w, 8 * lax.axis_index("d"), 8, 1)
        columns = x @ part
        whole = lax.all_gather(x, "d", axis=0, tiled=True)
        return {
            "psum": lax.psum(x @ w, "d"),
            "pmean": lax.pmean(jnp.tanh(x @ w), "d"),
            "all_gather": lax.all_gather(columns, "d", axis=1, tiled=True),
            "gathered operand": whole @ part,
            "ppermute": ring(columns, "d") @ part.T,
            "psum_scatter": lax.psum_scatter(whole @ w, "d", scatter_dimension=0, tiled=True),
            "all_to_all": lax.all_to_all(x @ w, "d", 1, 0, tiled=True),
        }

    rows, split = P("d"), P(None, "d")
    out = {
        "psum": P(),
        "pmean": P(),
        "all_gather": rows,
        "gathered operand": split,
        "ppermute": rows,
        "psum_scatter": rows,
        "all_to_all": split,
    }
    devices = mesh("Auto", d=4)
    fn = jax.shard_map(
        on_shards, mesh=devices, in_specs=(rows, P()), out_specs=out, check_vma=check_vma
    )
    check_sharded(fn, X, W, least=7, sums=4)


@pytest.mark.parametrize("policy", LOWS, ids=lambda p: p.name)
def test_a_factor_made_of_a_position_in_the_mesh_is_small(policy: Any):
    """An integer of unknown size might overflow in float16; that of four devices does not."""

    def on_shards(x: Any, w: Any) -> Any:
        factor = (lax.axis_index("d") + 1).astype(jnp.float32)
        return lax.psum(jnp.arctan(factor * (x @ w)).sum(), "d")

    rows = P("d")
    fn = jax.shard_map(on_shards, mesh=mesh("Auto", d=4), in_specs=(rows, P()), out_specs=P())
    found = look(jax.grad(fn, (0, 1)), policy, X, W)
    check_products(found.after, policy, least=3)


def test_a_scan_over_sharded_layers_that_are_gathered_and_recomputed():
    """Data parallel with sharded weights: gathered in each layer, their gradients scattered."""

    def on_shards(x: Any, layers: Any) -> Any:
        @jax.checkpoint
        def layer(h: Any, w: Any) -> Any:
            w = lax.all_gather(w, "d", axis=0, tiled=True)
            return jnp.tanh(ring(h, "d") @ w), None

        h = lax.scan(layer, x, layers)[0]
        return lax.psum(jnp.square(h).sum(), "d"), h

    fn = jax.shard_map(
        on_shards,
        mesh=mesh("Auto", d=4),
        in_specs=(P("d"), P(None, "d")),
        out_specs=(P(), P("d")),
    )
    layers = jnp.asarray(normal(3, 3, 16, 16)) / 4
    check_sharded(fn, X, layers, least=1, sums=2, factor=6)


# ---------------------------------------------------------------- pmap


def summed(collective: str) -> Callable[..., Any]:
    """(256, 1, 1, 1) on four devices, each an element of a product, added up over them."""

    def on_shards(x: Any, w: Any) -> Any:
        part = x @ w
        if collective == "psum":
            return lax.psum(part, "d")
        return lax.psum_scatter(jnp.tile(part, (4, 1)), "d", scatter_dimension=0, tiled=True)

    out = P() if collective == "psum" else P("d")
    return jax.shard_map(
        on_shards, mesh=mesh("Auto", d=4), in_specs=(P(None, "d"), P("d")), out_specs=out
    )


@pytest.mark.parametrize("collective", ["psum", "psum_scatter"])
@pytest.mark.parametrize("policy", LOWERING, ids=lambda p: p.name)
def test_sums_over_devices_accumulate_wide(collective: str, policy: Any):
    """Added up in bfloat16 they are 256; 259 rounded once is 260 there, and exact in float16."""
    halves = jnp.repeat(jnp.asarray([256.0, 1.0, 1.0, 1.0]) / 2, 2)
    args = jnp.stack([halves, halves]), jnp.ones((8, 2))
    traced = pp.auto_mixed(summed(collective), policy=policy, **FAST).trace(*args)
    check_products(traced.jaxpr, policy, least=1)
    assert assert_sums_are_wide(traced.jaxpr) == 1
    got = traced.lower().compile()(*args)
    wanted = 260.0 if policy is pp.AlwaysBf16 else 259.0
    assert set(np.asarray(got).ravel().tolist()) == {wanted}


# ---------------------------------------------------------------- pmap


def test_pmap_on_either_side():
    def on_device(x: Any, w: Any) -> Any:
        def loss(w: Any) -> Any:
            return jnp.mean(jnp.square(jnp.tanh(x @ w)))

        value, grad = jax.value_and_grad(loss)(w)
        grad = lax.pmean(grad, "d")
        return value, w - 0.5 * grad, lax.axis_index("d")

    over = functools.partial(jax.pmap, axis_name="d", in_axes=(0, None))
    args = X.reshape(4, 2, 16), W
    want = over(on_device)(*args)
    forms = {
        pp.AutoMixedBf16: over(pp.auto_mixed(on_device, policy=pp.AutoMixedBf16)),
        pp.AutoMixed: pp.auto_mixed(over(on_device), policy=pp.AutoMixed),
    }
    for policy, form in forms.items():
        traced = jax.make_jaxpr(form)(*args)
        check_products(traced, policy, least=2)
        assert_sums_are_wide(traced)
        got = form(*args)
        assert_leaves_near(got, want, 4 * policy.low.unit_roundoff)
        assert [x.sharding for x in got] == [x.sharding for x in want]


# ---------------------------------------------------------------- six rows over four devices


def both(fn: Callable[..., Any], **options: Any) -> list[Callable[..., Any]]:
    """A gradient under plain JAX, and in both compositions."""
    grad, inner = jax.grad(fn, (0, 1)), jax.grad(pp.auto_mixed(fn), (0, 1))
    return [jax.jit(grad, **options), pp.auto_mixed(grad, **options), jax.jit(inner, **options)]


def indivisible(form: str) -> tuple[Any, list[Callable[..., Any]]]:
    """A mesh, and the gradients of a loss that divides its rows over it."""

    def loss(w: Any, x: Any) -> Any:
        return jnp.tanh(x @ w).sum()

    devices = mesh("Explicit" if form == "reshard" else "Auto", d=4)
    rows, whole = NamedSharding(devices, P("d")), NamedSharding(devices, P())
    if form in ("in_shardings", "out_shardings"):
        return devices, both(loss, **{form: (whole, rows)})
    if form == "reshard":
        return devices, both(lambda w, x: loss(w, jax.sharding.reshard(x, P("d"))))

    def on_shards(w: Any, x: Any) -> Any:
        return lax.psum(loss(w, x), "d")

    specs = {"in_specs": (P(), P("d")), "out_specs": P()}
    return devices, both(jax.shard_map(on_shards, mesh=devices, **specs))


@pytest.mark.parametrize("form", ["in_shardings", "out_shardings", "reshard", "shard_map"])
def test_a_mesh_that_does_not_divide_is_refused_in_the_words_of_jax(form: str):
    devices, steps = indivisible(form)
    said: list[tuple[Any, str]] = []
    for step in steps:
        with jax.set_mesh(devices), pytest.raises(ValueError, match="divi") as found:
            step(W, X[:6])  # jax 0.12 names this line
        said.append((found.type, str(found.value)))
    assert said[1:] == said[:1] * 2


def test_a_constraint_that_does_not_divide_is_padded_as_in_plain_jax():
    rows = NamedSharding(mesh("Auto", d=4), P("d"))

    def loss(w: Any, x: Any) -> Any:
        placed = lax.with_sharding_constraint(jnp.tanh(x @ w), rows)
        return jnp.square(lax.with_sharding_constraint(placed @ w.T, rows)).mean()

    plain, *mixed = both(loss, **FAST)
    want = plain(W, X[:6])
    for step in mixed:
        assert_leaves_near(step(W, X[:6]), want, 8 * pp.AutoMixedBf16.low.unit_roundoff)
