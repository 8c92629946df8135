"""For the AutoMixed policies the precision of COMPUTE is an order; that of the other kinds a
permission, used where the planner finds that it pays. For AlwaysF16, AlwaysBf16 and Custom every
kind's precision is an order. "F32" in a preset means "not lowered"; only AlwaysF32 widens (it
removes casts to lower precisions and re-derives the products)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import precpass as pp
from tests.support.example_programs import mlp_args, mlp_loss
from tests.support.jaxprs import (
    LOW,
    dtypes_in,
    dtypes_out,
    low_products,
    named,
    products,
    touches_low,
    walk,
)
from tests.support.passes import ALWAYS_LOW, AUTO, LOWERING, assert_close, look, run
from tests.support.values import normal, rel_error, stable_id

ids = {"ids": lambda p: p.name}
BF16 = jnp.bfloat16


def square(n=8):
    return jnp.asarray(normal(0, n, n)), jnp.asarray(normal(1, n, n))


@pytest.mark.parametrize("policy", LOWERING, **ids)
@pytest.mark.parametrize("fn", [mlp_loss, jax.value_and_grad(mlp_loss)], ids=["loss", "gradient"])
def test_the_precision_of_compute_is_an_order(fn, policy):
    inspection = look(fn, policy, *mlp_args())
    low = low_products(inspection.after, policy.low.dtype)
    assert len(low) == len(products(inspection.after)) == len(products(inspection.before)) > 1
    lowered = inspection.plan.count()[pp.types.OpKind.COMPUTE, pp.types.Action.LOWER]
    assert lowered == len(low)


@pytest.mark.release(keep=2)
@pytest.mark.parametrize("policy", LOWERING, **ids)
def test_what_the_order_makes_low_is_near_float32_in_value_and_gradient(policy):
    """Sums of 4096 rows, forward and in every weight's gradient."""
    assert_close(mlp_loss, policy, *mlp_args(rows=4096, width=64), tol=0.02)


@pytest.mark.parametrize("policy", AUTO, **ids)
def test_that_of_the_other_kinds_is_a_permission_that_does_not_pay_here(policy):
    """A float32 state that an optimizer reads and writes: nothing of the update is narrowed."""

    def update(w, g, m):
        m = 0.9 * m + g
        return w - 0.001 * m, m

    def step(w, x, m):
        return update(w, x.T @ x, m)

    w, x = square()
    inspection = look(step, policy, w, x, w)
    assert len(low_products(inspection.after)) == 1
    for eqn in named(inspection.after, "mul", "add", "sub"):
        assert not touches_low(eqn), eqn
    alone = look(update, policy, w, x, w)
    assert alone.after is alone.before


def _kinds(x, w):
    y = jnp.flip(x @ w, 0)  # movement
    return jnp.sum(jnp.tanh(y * x), axis=0)  # elementwise, reduction


EQUATIONS = {
    pp.types.OpKind.COMPUTE: ("dot_general",),
    pp.types.OpKind.ELEMENTWISE: ("mul", "tanh"),
    pp.types.OpKind.REDUCTION: ("reduce_sum",),
    pp.types.OpKind.DATA_MOVEMENT: ("rev",),
}


def runs_low(inspection, name, low):
    """Whether an equation of this name reads, makes or is fed with and rounded to `low`."""
    made_by = {v: e for e in walk(inspection.after) for v in e.outvars}
    for eqn in named(inspection.after, name):
        if low in dtypes_out(eqn) or low in dtypes_in(eqn):
            return True
        reads = [None if hasattr(v, "val") else made_by.get(v) for v in eqn.invars]
        widened = all(
            r is not None and r.primitive.name == "convert_element_type" and low in dtypes_in(r)
            for r in reads
        )
        readers = [e for e in walk(inspection.after) if eqn.outvars[0] in list(e.invars)]
        if widened and any(low in dtypes_out(r) for r in readers):
            return True
    return False


@pytest.mark.parametrize("policy", ALWAYS_LOW, **ids)
def test_for_always_every_kinds_precision_is_an_order(policy):
    inspection = look(_kinds, policy, *square())
    for kind, names in EQUATIONS.items():
        for name in names:
            assert runs_low(inspection, name, policy.low.dtype), (kind, name)


@pytest.mark.release(keep=1)
@pytest.mark.parametrize("policy", ALWAYS_LOW, **ids)
@pytest.mark.parametrize("reduce", [jnp.max, jnp.min, jnp.ptp], ids=lambda f: f.__name__)
def test_the_gradient_of_a_maximum_finds_the_elements_that_equal_it(reduce, policy):
    """It divides by their number, which was 0 where only the maximum was rounded.

    The elements of a column are thirds, none of them exact, and no two equal after rounding.
    """
    w = jnp.asarray(np.random.default_rng(0).permutation(64).reshape(8, 8) / 3, jnp.float32)
    assert_close(lambda w: reduce(jnp.eye(8) @ w, axis=0).sum(), policy, w, tol=0.02)
    assert_close(lambda w: reduce(w, axis=0).sum(), policy, w, tol=0.02)


@pytest.mark.parametrize("kind", EQUATIONS, ids=stable_id)
@pytest.mark.parametrize("low", ["bf16", "f16"])
def test_for_custom_too_and_a_missing_kind_is_not_lowered(kind, low):
    inspection = look(_kinds, pp.Custom({kind: low}), *square())
    dtype = pp.types.Precision.parse(low).dtype
    for other, names in EQUATIONS.items():
        for name in names:
            assert runs_low(inspection, name, dtype) is (other is kind), (other, name)


NOT_LOWERED = [*AUTO, pp.Custom({}), pp.Custom({"compute": "f32", "elementwise": "f32"})]


@pytest.mark.parametrize("policy", NOT_LOWERED, ids=stable_id)
def test_f32_means_not_lowered_and_does_not_widen(policy):
    """A program in bfloat16 stays what it is, its reductions too where REDUCTION is F32."""

    def f(x, w):
        return lax.reduce_max(jnp.tanh(x @ w) + x, (0,))

    args = [a.astype(BF16) for a in square()]
    inspection = look(f, policy, *args)
    assert inspection.after is inspection.before


# ---------------------------------------------------------------- AlwaysF32 widens


def _flat(x, w):
    return (x.astype(BF16) @ w.astype(BF16)).astype(jnp.float32)


def _in_scan(x, w):
    def body(h, row):
        h = (h.astype(BF16) @ w.astype(BF16)).astype(jnp.float32) + row
        return h, h.astype(jnp.float16)

    h, hs = lax.scan(body, x, jnp.stack([x, w]))
    return h + hs[0].astype(jnp.float32)


def _low_carry(x, w):
    """The loop's own state and the values around it are in bfloat16."""
    low = w.astype(BF16)
    h, _ = lax.scan(lambda h, _: (h @ low, None), x.astype(BF16), None, length=3)
    return h.astype(jnp.float32)


def _in_cond(x, w):
    low = x.astype(BF16)
    y = lax.cond(x[0, 0] > 0, lambda a, b: a @ b, lambda a, b: a - b, low, w.astype(BF16))
    return y.astype(jnp.float32)


def _in_while(x, w):
    def step(c):
        return c[0] + 1, c[1] @ w.astype(BF16)

    return lax.while_loop(lambda c: c[0] < 3, step, (0, x.astype(BF16)))[1].astype(jnp.float32)


WIDENED = {
    "flat": _flat,
    "jit": jax.jit(_flat),
    "jit with a low border": lambda x, w: jax.jit(lambda a, b: a @ b)(
        x.astype(BF16), w.astype(BF16)
    ).astype(jnp.float32),
    "scan": _in_scan,
    "low carry": _low_carry,
    "cond": _in_cond,
    "while": _in_while,
    "remat": jax.checkpoint(_flat),
    "preferred": lambda x, w: jnp.matmul(
        x.astype(BF16), w.astype(BF16), preferred_element_type=jnp.float32
    ),
    "vmap": jax.vmap(_flat, (None, None), axis_size=2),
    "float16": lambda x, w: (x.astype(jnp.float16) @ w.astype(jnp.float16)).astype(jnp.float32),
}


def in_float32(fn, x, w):
    """What the program computes without its casts."""
    wide = {
        "scan": lambda: (x @ w + x) @ w + w + (x @ w + x),
        "low carry": lambda: x @ w @ w @ w,
        "while": lambda: x @ w @ w @ w,
        "cond": lambda: x @ w if x[0, 0] > 0 else x - w,
        "vmap": lambda: jnp.stack([x @ w, x @ w]),
    }
    return wide.get(fn, lambda: x @ w)()


@pytest.mark.release(keep=2)
@pytest.mark.parametrize("name", WIDENED)
def test_always_f32_removes_casts_and_rederives_the_products(name):
    fn, (x, w) = WIDENED[name], square()
    inspection = look(fn, pp.AlwaysF32, x, w)
    assert [e for e in walk(inspection.before) if touches_low(e)]
    assert [e for e in walk(inspection.after) if touches_low(e)] == []
    assert rel_error(run(fn, pp.AlwaysF32, x, w), in_float32(name, x, w)) < 1e-6
    assert rel_error(jax.jit(fn)(x, w), in_float32(name, x, w)) > 1e-4


@pytest.mark.release(keep=2)
@pytest.mark.parametrize("name", [n for n in WIDENED if n != "while"])
def test_the_gradients_under_always_f32_are_float32s(name):
    fn, (x, w) = WIDENED[name], square()
    want = jax.grad(lambda w: jnp.sum(jnp.sin(in_float32(name, x, w))))(w)

    def loss(w):
        return jnp.sum(jnp.sin(fn(x, w)))

    after = look(jax.grad(loss), pp.AlwaysF32, w).after
    assert low_products(after) == []
    # jax 0.10 fills the residuals of the branch not taken with an `empty2`, a boundary
    made = [e.primitive.name for e in walk(after) if any(d in LOW for d in dtypes_out(e))]
    assert set(made) <= {"empty", "empty2"}
    assert rel_error(run(jax.grad(loss), pp.AlwaysF32, w), want) < 1e-5


def test_always_f32_widens_inside_and_keeps_the_dtype_of_the_outputs():
    def f(x, w):
        y = x @ w
        return y, jnp.sum(y * y), y.astype(jnp.float32), x

    x, w = (a.astype(BF16) for a in square(64))
    got, want = run(f, pp.AlwaysF32, x, w), jax.jit(f)(x, w)
    assert [a.dtype for a in got] == [a.dtype for a in want] == [BF16, BF16, np.float32, BF16]
    exact = x.astype(np.float32) @ w.astype(np.float32)
    assert rel_error(got[2], exact) < 1e-6
    after = look(f, pp.AlwaysF32, x, w).after
    assert len(products(after)) == 1
    assert low_products(after) == []


def test_always_f32_sums_thousands_of_low_values_in_float32():
    """16384 ones carried through a bfloat16 scan: 256 as written, 16384 under AlwaysF32."""

    def f(x):
        total, _ = lax.scan(lambda c, x: (c + x, None), BF16(0), x.astype(BF16))
        return total.astype(jnp.float32)

    x = jnp.ones(16384)
    assert float(jax.jit(f)(x)) == 256
    assert float(run(f, pp.AlwaysF32, x)) == 16384
    assert float(run(jax.grad(lambda s: f(s * x)), pp.AlwaysF32, jnp.float32(1))) == 16384
