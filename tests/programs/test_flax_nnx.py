"""Programs of flax nnx under the pass: modules as arguments, whose state is updated in place."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import precpass as pp
from tests.support.libraries import (
    FAST,
    as_numbers,
    assert_float32,
    assert_leaves_near,
    check_products,
    check_program,
)
from tests.support.passes import look
from tests.support.values import normal

pytestmark = pytest.mark.programs

ROUNDOFF = pp.types.Precision.BF16.unit_roundoff
X = jnp.asarray(normal(0, 16, 32))


class Net(nnx.Module):
    """Two layers with batch statistics and dropout between."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(32, 32, rngs=rngs)
        self.norm = nnx.BatchNorm(32, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.last = nnx.Linear(32, 4, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.last(self.dropout(nnx.gelu(self.norm(self.first(x)))))


def net() -> Net:
    return Net(nnx.Rngs(0))


def state_of(module: Any) -> dict[str, np.ndarray]:
    """The values of a module, copied."""
    pure = nnx.to_pure_dict(nnx.state(module))
    found = jax.tree.leaves_with_path(pure)
    return {jax.tree_util.keystr(p): as_numbers(x).copy() for p, x in found}


def assert_same_updates(got: Any, want: Any, before: Any) -> None:
    """Two modules were updated alike: integers and keys equal, floats within the rounding."""
    got, want, before = state_of(got), state_of(want), state_of(before)
    changed = {k for k in want if not np.array_equal(want[k], before[k])}
    assert changed, "nothing to lose"
    assert {k for k in got if not np.array_equal(got[k], before[k])} == changed
    floats = {k for k in want if want[k].dtype.kind == "f"}
    for k in set(want) - floats:
        np.testing.assert_array_equal(got[k], want[k], err_msg=k)
    assert_leaves_near({k: got[k] for k in floats}, {k: want[k] for k in floats}, 6 * ROUNDOFF)


def call(module: Net, x: Any) -> Any:
    return module(x)


def loss(module: Net, x: Any) -> Any:
    return jnp.mean(jnp.square(module(x)))


FORWARD: dict[str, Callable[..., Any]] = {
    "auto_mixed(f)": lambda f: pp.auto_mixed(f, **FAST),
    "nnx.jit(auto_mixed(f))": lambda f: nnx.jit(pp.auto_mixed(f)),
    "auto_mixed(nnx.jit(f))": lambda f: pp.auto_mixed(nnx.jit(f)),
}
GRADIENT: dict[str, Callable[..., Any]] = {
    "auto_mixed(nnx.value_and_grad(f))": lambda f: pp.auto_mixed(nnx.value_and_grad(f), **FAST),
    "nnx.value_and_grad(auto_mixed(f))": lambda f: nnx.value_and_grad(pp.auto_mixed(f)),
    "nnx.jit(nnx.value_and_grad(auto_mixed(f)))": lambda f: nnx.jit(
        nnx.value_and_grad(pp.auto_mixed(f))
    ),
}


@pytest.mark.parametrize("form", FORWARD)
def test_a_module_is_updated_as_under_nnx_jit(form: str):
    mixed, plain = net(), net()
    got = [FORWARD[form](call)(mixed, X) for _ in range(2)]
    want = [nnx.jit(call)(plain, X) for _ in range(2)]
    assert_leaves_near(got, want, 4 * ROUNDOFF)
    assert_same_updates(mixed, plain, net())


@pytest.mark.release(keep=2)
@pytest.mark.parametrize("form", GRADIENT)
def test_a_gradient_updates_the_module_too(form: str):
    mixed, plain = net(), net()
    value, grads = GRADIENT[form](loss)(mixed, X)
    wanted_value, wanted_grads = nnx.jit(nnx.value_and_grad(loss))(plain, X)
    assert_leaves_near(value, wanted_value, 4 * ROUNDOFF)
    assert_leaves_near(
        nnx.to_pure_dict(grads), nnx.to_pure_dict(wanted_grads), 8 * ROUNDOFF, floor=0.1
    )
    assert_same_updates(mixed, plain, net())


def train_step(module: Net, optimizer: nnx.Optimizer, x: Any) -> Any:
    value, grads = nnx.value_and_grad(loss)(module, x)
    optimizer.update(module, grads)
    return value


def mixed_inside(module: Net, optimizer: nnx.Optimizer, x: Any) -> Any:
    value, grads = pp.auto_mixed(nnx.value_and_grad(loss))(module, x)
    optimizer.update(module, grads)
    return value


STEPS: dict[str, Any] = {
    "auto_mixed(step)": pp.auto_mixed(train_step, **FAST),
    "nnx.jit(auto_mixed(step))": nnx.jit(pp.auto_mixed(train_step)),
    "nnx.jit(step of auto_mixed(gradient))": nnx.jit(mixed_inside),
}


@pytest.mark.release(keep=1)
@pytest.mark.parametrize("form", STEPS)
def test_a_train_step_learns_as_in_float32(form: str):
    def trained(step: Callable[..., Any]) -> tuple[Any, Any, Any]:
        module = net()
        optimizer = nnx.Optimizer(module, optax.adam(3e-3), wrt=nnx.Param)
        losses = [float(step(module, optimizer, X)) for _ in range(24)]
        return losses, module, optimizer

    # optax is written for JAX's own promotion
    with jax.numpy_dtype_promotion("standard"):
        losses, module, optimizer = trained(STEPS[form])
        wanted, plain, _ = trained(nnx.jit(train_step))
    assert wanted[-1] < 0.5 * wanted[0]
    np.testing.assert_allclose(losses, wanted, rtol=0.05, atol=0.02 * wanted[0])
    assert int(optimizer.step[...]) == 24
    assert_float32(nnx.to_pure_dict(nnx.state(optimizer, nnx.OptState)))
    counts = [k for k, v in state_of(module).items() if v.dtype == np.uint32 and v.ndim == 0]
    assert counts
    assert all(state_of(module)[k] == state_of(plain)[k] for k in counts)


def test_the_pure_form_is_low_and_near_float32():
    definition, params, rest = nnx.split(net(), nnx.Param, ...)

    def pure(params: Any, rest: Any, x: Any) -> Any:
        module = nnx.merge(definition, params, rest, copy=True)
        return module(x), nnx.to_pure_dict(nnx.state(module, nnx.BatchStat))

    check_program(pure, params, rest, X, least=2)


def test_modules_in_containers_and_keywords_and_shared_ones():
    def both(pair: Any, *, again: Net, x: Any) -> Any:
        assert pair["net"] is again
        return pair["net"](x) + again(x)

    mixed, plain = net(), net()
    got = pp.auto_mixed(both)({"net": mixed}, again=mixed, x=X)
    want = nnx.jit(both)({"net": plain}, again=plain, x=X)
    assert_leaves_near(got, want, 4 * ROUNDOFF)
    assert_same_updates(mixed, plain, net())


def test_a_method_that_counts():
    class Counting(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.layer = nnx.Linear(32, 4, rngs=rngs)
            self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

        @pp.auto_mixed
        def __call__(self, x: Any) -> Any:
            self.calls[...] += 1
            return self.layer(x)

    module = Counting(nnx.Rngs(0))
    module(X), module(X)
    assert int(module.calls[...]) == 2


def test_a_module_without_updates_is_traced_once_and_low():
    traces: list[None] = []

    def run(module: Net, x: Any) -> Any:
        traces.append(None)
        return module(x)

    module = net()
    module.eval()
    mixed = pp.auto_mixed(run, **FAST)
    got = [mixed(module, X) for _ in range(3)]
    assert len(traces) == 1
    assert_leaves_near(got[-1], module(X), 4 * ROUNDOFF)
    check_products(look(lambda x: module(x), pp.AutoMixedBf16, X).after, pp.AutoMixedBf16, 2)


def test_a_function_with_the_attributes_of_a_mixed_one_is_its_own():
    mixed = pp.auto_mixed(lambda module, x: module(x), **FAST)
    module = net()
    module.eval()
    once = mixed(module, X)

    @functools.wraps(mixed)
    def thrice(module: Net, x: Any) -> Any:
        return 3 * module(x)

    np.testing.assert_allclose(pp.auto_mixed(thrice, **FAST)(module, X), 3 * once, rtol=1e-6)


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = nnx.LayerNorm(32, rngs=rngs)
        self.attend = nnx.MultiHeadAttention(4, 32, decode=False, rngs=rngs)
        self.conv = nnx.Conv(32, 32, 3, padding="CAUSAL", rngs=rngs)

    def __call__(self, x: Any) -> Any:
        h = self.norm(x)
        x = x + self.attend(h, mask=nnx.make_causal_mask(x[..., 0]))
        return x + nnx.gelu(self.conv(x))


class Stack(nnx.Module):
    """Blocks made by nnx.vmap, run by nnx.scan and nnx.remat; a recurrent head."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        make = nnx.split_rngs(splits=2)(nnx.vmap(Block, in_axes=0, out_axes=0))
        self.blocks = make(rngs)
        self.head = nnx.RNN(nnx.GRUCell(32, 16, rngs=rngs))

    def __call__(self, x: Any) -> Any:
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        @nnx.remat
        def run(block: Block, x: Any) -> Any:
            return block(x)

        return self.head(run(self.blocks, x))


def test_blocks_under_nnx_vmap_scan_and_remat():
    definition, params, rest = nnx.split(Stack(nnx.Rngs(0)), nnx.Param, ...)

    def pure(params: Any, rest: Any, x: Any) -> Any:
        return nnx.merge(definition, params, rest, copy=True)(x)

    x = jnp.asarray(normal(1, 2, 8, 32))
    check_program(pure, params, rest, x, least=8, factor=6)


def test_modules_are_audited_and_stay_as_they_are():
    net = Net(nnx.Rngs(0))
    before = jax.tree.map(jnp.copy, nnx.state(net, nnx.BatchStat))
    found = pp.audit(lambda net, x: net(x))(net, X)
    assert found.products == 2
    assert_leaves_near(nnx.state(net, nnx.BatchStat), before, 0.0)
