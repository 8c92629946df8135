"""Values are guarded by facts, not only by literals: what would overflow in the target, vanish or
lose integers keeps its consumer wide, with that reason. Facts are per call site. Constants that are
tracers or unknown are unchecked and said to be so; large ones are reduced on the device, once per
buffer. A `dot_general` without contracting dimensions is an elementwise product."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import precpass as pp
from precpass.analysis import ranges
from tests.support.jaxprs import dtypes_in, dtypes_out, low_products, named, touches_low
from tests.support.passes import ALWAYS_LOW, AUTO, LOWERING, assert_close, look, quiet, run, text_of
from tests.support.values import identical, normal, rel_error

F32_MIN = float(jnp.finfo(jnp.float32).min)

each_policy = pytest.mark.parametrize("policy", LOWERING, ids=lambda p: p.name)
each_order = pytest.mark.parametrize("policy", ALWAYS_LOW, ids=lambda p: p.name)


# ---------------------------------------------------------------- overflow


def masked_softmax(value, how="where"):
    def f(scores, mask):
        if how == "where":
            scores = jnp.where(mask, scores, jnp.float32(value))
        elif how == "bias":
            scores = scores + jnp.where(mask, jnp.float32(0), jnp.float32(value))
        else:
            scores = jnp.where(mask, scores, jnp.float32(value)).T.reshape(1, 8, 8)[0].T
        return jax.nn.softmax(scores)

    return f


@pytest.mark.release(keep=2)
@each_policy
@pytest.mark.parametrize("value", [F32_MIN, -1e30, -1e9], ids=["finfo.min", "-1e30", "-1e9"])
@pytest.mark.parametrize("how", ["where", "bias", "moved"])
def test_what_would_overflow_keeps_its_consumer_wide(how, value, policy):
    """A row in which all is masked is uniform in float32, NaN where the mask becomes -inf."""
    scores = jnp.asarray(normal(0, 8, 8))
    mask = jnp.asarray(normal(1, 8, 8) > 0).at[3].set(False)
    fn = masked_softmax(value, how)
    got, want = run(fn, policy, scores, mask), fn(scores, mask)
    assert bool(jnp.all(jnp.isfinite(got)))
    assert float(np.abs(np.asarray(got) - np.asarray(want)).max()) < 0.02


@each_order
@pytest.mark.parametrize("value", [F32_MIN, -1e9])
def test_with_that_reason(value, policy):
    inspection = look(masked_softmax(value), policy, jnp.ones((8, 8)), jnp.ones((8, 8), bool))
    (select,) = named(inspection.after, "select_n")
    fits = abs(value) <= policy.low.max
    assert touches_low(select) is fits
    (decision,) = [d for e, d, _ in inspection.decisions() if e.primitive.name == "select_n"]
    assert ("above" in str(decision.reason) and str(policy.low) in str(decision.reason)) is not fits


# ---------------------------------------------------------------- vanishing


EPSILONS = {
    "added": lambda x: x / (jnp.linalg.norm(x, axis=1, keepdims=True) + 1e-12),
    "max": lambda x: x / jnp.maximum(jnp.sum(x * x, axis=1, keepdims=True), 1e-12),
    # the 1e6 of an empty row would overflow behind it, and is scaled down first
    "rsqrt": lambda x: jax.lax.rsqrt(jnp.sum(x * x, axis=1, keepdims=True) + 1e-12) * 1e-6,
    "constant array": lambda x: (
        x / (jnp.sum(x * x, axis=1, keepdims=True) + np.full((4, 1), 1e-12, "f4"))
    ),
}


@pytest.mark.release(keep=2)
@each_policy
@pytest.mark.parametrize("name", EPSILONS)
def test_what_would_vanish_keeps_its_consumer_wide(name, policy):
    """A row of zeros is 0 / 0 where the epsilon is lost."""
    x = jnp.asarray(normal(0, 4, 8)).at[2].set(0.0)
    got, want = run(EPSILONS[name], policy, x), EPSILONS[name](x)
    assert bool(jnp.all(jnp.isfinite(got)))
    assert float(np.abs(np.asarray(got) - np.asarray(want)).max()) < 0.02


def test_an_epsilon_that_vanishes_is_the_reason():
    inspection = look(lambda x: x + jnp.float32(1e-12), pp.AlwaysF16, jnp.ones(8))
    (add,) = named(inspection.after, "add")
    assert not touches_low(add)
    assert "vanishes in f16" in text_of(inspection)
    (add,) = named(look(lambda x: x + jnp.float32(1e-12), pp.AlwaysBf16, jnp.ones(8)).after, "add")
    assert touches_low(add)


# ---------------------------------------------------------------- integers


COUNT = 5000
"""Positions that neither format holds: bfloat16 has the integers to 256, float16 to 2048."""
DEVICE_POSITIONS = np.arange(COUNT, dtype=np.float32)

POSITIONS = {
    "iota": lambda n: jnp.arange(COUNT, dtype=jnp.float32),
    "int cast": lambda n: n.astype(jnp.float32),
    "constant": lambda n: DEVICE_POSITIONS,
    "device constant": lambda n: jnp.asarray(DEVICE_POSITIONS),
    "iota cast": lambda n: jnp.arange(COUNT).astype(jnp.float32),
}


@pytest.mark.release(keep=2)
@each_policy
@pytest.mark.parametrize("name", POSITIONS)
def test_what_would_lose_integers_keeps_its_consumer_wide(name, policy):
    """Positions, through movement, into cos: the digits of the argument are all there."""

    def f(x, n):
        p = POSITIONS[name](n)
        return jnp.cos(jnp.broadcast_to(p[:, None], (COUNT, 2)).T), x @ x

    x, n = jnp.eye(4), jnp.arange(COUNT)
    want = np.cos(np.arange(float(COUNT)))
    got = run(f, policy, x, n)[0][0]
    assert float(np.max(np.abs(np.asarray(got) - want))) < 5e-3
    assert low_products(look(f, policy, x, n).after)


def test_a_product_of_positions_stays_wide():
    """Integers beyond the exact range are no operands for a low product, for that reason."""

    def f(w):
        return jnp.stack([jnp.arange(1000.0)] * 2, 1) @ w

    w = jnp.ones((2, 3))
    inspection = look(f, pp.AutoMixedBf16, w)
    assert low_products(inspection.after) == []
    assert "bf16 is exact only to 256" in text_of(inspection)
    assert identical(run(f, pp.AutoMixedBf16, w), f(w))
    assert low_products(look(f, pp.AutoMixed, w).after)  # float16 holds them


INVERSE = np.linalg.inv(np.array([[1200.0, 0, 512], [0, 1200, 512], [0, 0, 1]])).astype(np.float32)
PIXELS = 1024
GRIDS = {
    "pixel centres": lambda i: i + 0.5,
    "quarters": lambda i: i / 4,
    "of a stride": lambda i: i * 3.5,
    "of any stride": lambda i: i * 0.3,
    "before the origin": lambda i: 511.5 - i,
    "the centres of every fourth": lambda i: (i + 0.5) * 4,
    "with a shift that is on no grid": lambda i: i + 0.3,
    "in bounds": lambda i: jnp.clip(i + 0.5, 0.5, 1000.5),
    "of both axes": lambda i: i / 4 + i[::-1] * 0.5,
    "a table": lambda i: jnp.asarray(np.arange(PIXELS, dtype=np.float32) + 0.5),
    "one of two": lambda i: jnp.where(i > 3, i + 0.5, 0.0),
}


@pytest.mark.release(keep=2)
@pytest.mark.parametrize("name", GRIDS)
def test_a_product_of_a_grid_has_the_digits_of_float32(name):
    """Rays through pixels: each direction is within a thousandth of a pixel."""

    def rays(inverse):
        i = GRIDS[name](jnp.arange(PIXELS, dtype=jnp.float32))
        return jnp.stack([i, i[::-1], jnp.ones_like(i)], -1) @ inverse.T

    inspection = look(rays, pp.AutoMixedBf16, INVERSE)
    assert low_products(inspection.after) == []
    assert "tells them apart only to" in text_of(inspection)
    got, want = jax.jit(lambda w: (run(rays, pp.AutoMixedBf16, w), rays(w)))(INVERSE)
    assert float(np.abs(np.asarray(got) - np.asarray(want)).max()) * 1200 < 1e-3


FINE = {
    "few positions": lambda i: jnp.arange(100.0) + 0.5,
    "coordinates from 0 to 1": lambda i: (i + 0.5) / PIXELS,
    "a mask": lambda i: (i > 3).astype(jnp.float32) * -1e9 + 1.0,
    "pixels around zero": lambda i: (i % 256).astype(jnp.uint8).astype(jnp.float32) / 127.5 - 1.0,
    "a shift that is an argument": lambda i: jnp.cos(i) + 0.5,
}


@pytest.mark.parametrize("name", FINE)
def test_and_what_the_low_format_tells_apart_stays_low(name):
    def fn(w):
        x = FINE[name](jnp.arange(PIXELS, dtype=jnp.float32))
        return x[None] @ w[: x.size]

    assert low_products(look(fn, pp.AutoMixedBf16, jnp.ones((PIXELS, 4))).after)


@pytest.mark.release(keep=2)
@each_policy
def test_rotary_embeddings_stay_exact(policy):
    """An einsum without contraction is an elementwise product; positions up to 4095, in values
    and in the gradients of low products over them."""

    def rotary(x):
        half = x.shape[-1] // 2
        frequencies = 1.0 / (10000.0 ** (jnp.arange(half, dtype=jnp.float32) / half))
        angles = jnp.einsum("i,j->ij", jnp.arange(x.shape[0], dtype=jnp.float32), frequencies)
        a, b = x[:, :half], x[:, half:]
        c, s = jnp.cos(angles), jnp.sin(angles)
        return jnp.concatenate([a * c - b * s, a * s + b * c], 1), c

    def loss(w, x):
        return jnp.sum((rotary(x @ w)[0] @ w) ** 2) / 64

    x, w = jnp.asarray(normal(0, 4096, 16)), jnp.asarray(normal(1, 16, 16)) / 4
    if policy not in ALWAYS_LOW:  # in which cos itself is ordered low
        got = run(lambda x: (rotary(x)[1], x @ w), policy, x)[0]
        assert float(np.abs(np.asarray(got) - np.asarray(rotary(x)[1])).max()) < 1e-3
    outer = [
        e
        for e in named(look(loss, policy, w, x).after, "dot_general")
        if e.params["dimension_numbers"][0] == ((), ())
    ]
    assert [d for e in outer for d in (*dtypes_in(e), *dtypes_out(e))] == [np.float32] * 3
    assert len(low_products(look(loss, policy, w, x).after, policy.low.dtype)) == 2
    if policy not in ALWAYS_LOW:  # as above: there the angles of cos and sin are rounded
        assert_close(loss, policy, w, x, tol=0.02)


# ---------------------------------------------------------------- call sites


def test_facts_are_per_call_site():
    """Two calls of one shared `_where` body: -1e9 in one, 0.0 in the other, under float16."""

    def f(x, mask):
        return jnp.where(mask, x, jnp.float32(-1e9)), jnp.where(mask, x, jnp.float32(0.0))

    x, mask = jnp.ones((4, 4)), jnp.zeros((4, 4), bool)
    inspection = look(f, pp.AlwaysF16, x, mask)
    calls = [e for e in inspection.before.eqns if e.primitive.name == "jit"]
    assert len({id(e.params["jaxpr"]) for e in calls}) == 1 < len(calls)
    wide, low = named(inspection.after, "select_n")
    assert not touches_low(wide)
    assert touches_low(low)
    assert identical(run(f, pp.AlwaysF16, x, mask), f(x, mask))


# ---------------------------------------------------------------- constants


def test_large_constants_that_are_closed_over_are_checked():
    """2 M elements, one of which float16 cannot hold."""
    small = jnp.ones((1024, 2048))
    large = small.at[700, 3].set(1e9)
    x = jnp.ones((4, 1024))
    assert low_products(look(lambda x: x @ small, pp.AutoMixed, x).after)
    guarded = look(lambda x: x @ large, pp.AutoMixed, x)
    assert low_products(guarded.after) == []
    assert "reaches 1e+09" in text_of(guarded)
    assert rel_error(run(lambda x: x @ large, pp.AutoMixed, x), x @ large) < 1e-6


def test_once_per_buffer(monkeypatch):
    """The second program over one buffer does not read it again."""
    reads = []
    of_parts = ranges._of_parts
    monkeypatch.setattr(ranges, "_of_parts", lambda parts: reads.append(parts) or of_parts(parts))
    large, x = jnp.asarray(normal(0, 1024, 1100)), jnp.ones((4, 1024))
    look(lambda x: x @ large, pp.AutoMixed, x)
    assert [part.shape for parts in reads for part in parts] == [(1024, 1100)]
    look(lambda x: (x + 1) @ large, pp.AutoMixed, x)
    assert [len(parts) for parts in reads if parts[0].size > 1] == [1]


@pytest.mark.parametrize("policy", ALWAYS_LOW, ids=lambda p: p.name)
def test_constants_that_are_tracers_are_unchecked_and_said_to_be_so(policy):
    found = []

    @jax.jit
    def outer(mask_value, x):
        inspection = look(lambda x: x + mask_value, policy, x)
        found.append(inspection)
        return run(lambda x: x + mask_value, policy, x)

    outer(jnp.float32(2.0), jnp.ones(4))
    assert "unchecked" in text_of(found[0])
    known = look(lambda x: x + np.float32(2.0), policy, jnp.ones(4))
    assert "unchecked" not in text_of(known)


# ---------------------------------------------------------------- elementwise products

T, F, H = normal(0, 64), normal(1, 16), normal(2, 32, 16)
ELEMENTWISE = {
    "outer": (lambda t, f: jnp.einsum("i,j->ij", t, f), (T, F)),
    "outer, as a product of matrices": (lambda t, f: t[:, None] @ f[None], (T, F)),
    "outer, of a batch": (lambda t, h: jnp.einsum("bi,bj->bij", t, h), (H[:, :4], H)),
    "of rows": (lambda x, y: jnp.einsum("bd,bd->b", x, y), (H, H + 1)),
    "of rows, as a product of matrices": (
        lambda x, y: (x[:, None, :] @ y[:, :, None])[:, 0, 0],
        (H, H + 1),
    ),
    "inner": (jnp.vdot, (T, T + 1)),
    "of one feature": (lambda x, w: x @ w, (T[:, None], F[None])),
}


@pytest.mark.release(keep=2)
@pytest.mark.parametrize("policy", AUTO, ids=lambda p: p.name)
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_a_product_that_is_elementwise_work_is_float32s_in_both_compositions(name, policy):
    product, args = ELEMENTWISE[name]

    def fn(x, y):
        return jnp.square(product(x, y) + 1.0).sum()

    inspection = look(jax.value_and_grad(fn, (0, 1)), policy, *args)
    forward = look(fn, policy, *args)
    assert low_products(forward.after) == [] and named(forward.after, "dot_general")
    assert "an elementwise product" in text_of(forward)
    if "outer" not in name and "feature" not in name:  # whose cotangents are sums
        assert low_products(inspection.after) == []
    with quiet():
        mixed = pp.auto_mixed(fn, policy=policy)
        got, want = jax.jit(lambda *xs: [jax.value_and_grad(f, (0, 1))(*xs) for f in (mixed, fn)])(
            *args
        )
    assert rel_error(got, want) < 1e-6


def test_a_rule_or_a_region_lowers_it():
    def fn(x, y):
        return jnp.einsum("bd,bd->b", x, y)

    rule = pp.AutoMixedBf16.with_rules(pp.Rule(primitive="dot_general", precision="bf16"))
    assert low_products(look(fn, rule, H, H).after)
    assert low_products(look(pp.keep("bf16")(fn), pp.AutoMixedBf16, H, H).after)


VECTORS = {
    "x @ w": (lambda x, w: x @ w, (F, H.T)),
    "x @ w of one example": (lambda x, w: x @ w, (F[None], H.T)),
    "w @ x": (lambda x, w: w @ x, (F, H)),
    "w @ x of one column": (lambda x, w: w @ x, (F[:, None], H)),
    "of a batch": (lambda x, w: jnp.einsum("bj,bij->bi", x, w), (H[:4], normal(3, 4, 8, 16))),
    "mapped with weights": (jax.vmap(lambda x, w: x @ w), (H[:4], normal(3, 4, 16, 8))),
}


def weight_gradients(name, policy):
    """Of a sum of the product's results times given cotangents: in both compositions."""
    product, args = VECTORS[name]
    cotangents = normal(4, *jax.eval_shape(product, *args).shape)

    def fn(w, x):
        return (product(x, w) * cotangents).sum()

    mixed = pp.auto_mixed(jax.grad(fn), policy=policy), jax.grad(pp.auto_mixed(fn, policy=policy))
    return jax.grad(fn), mixed, args[::-1]


@pytest.mark.release(keep=2)
@pytest.mark.parametrize("policy", [*AUTO, pp.AutoMixedF8], ids=lambda p: p.title)
@pytest.mark.parametrize("name", VECTORS)
def test_an_outer_product_in_a_gradient_is_float32s_in_both_compositions(name, policy):
    plain, mixed, args = weight_gradients(name, policy)
    with quiet():
        got, want = jax.jit(lambda *xs: ([f(*xs) for f in mixed], plain(*xs)))(*args)
    for each in got:
        np.testing.assert_array_equal(each, want)


def test_in_a_loop_too_and_what_is_saved_for_it_is_not_rounded():
    def fn(w, xs):
        return lax.scan(lambda c, x: (c + (x @ w).sum(), None), 0.0, xs)[0]

    xs = jnp.abs(normal(5, 32, 16))
    with quiet():
        for gradient in (pp.auto_mixed(jax.grad(fn)), jax.grad(pp.auto_mixed(fn))):
            assert rel_error(gradient(H.T, xs), jnp.tile(xs.sum(0)[:, None], 32)) < 1e-6


def test_a_rule_a_preset_that_lowers_all_and_a_saved_plan(tmp_path):
    """The first two lower the outer product too, in both compositions; a preset's plan does not."""
    rule = pp.AutoMixedBf16.with_rules(pp.Rule(primitive="dot_general", precision="bf16"))
    for policy in (rule, pp.AlwaysBf16):
        _, mixed, args = weight_gradients("x @ w of one example", policy)
        assert all(low_products(jax.make_jaxpr(f)(*args)) for f in mixed)

    def fn(w, x):
        return (x @ w).sum()

    path = tmp_path / "plan.json"
    pp.inspect(fn, "AutoMixedBf16")(H.T, F[None]).plan.save(path)
    saved = jax.grad(pp.auto_mixed(fn, policy=pp.Plan.load(path)))
    np.testing.assert_array_equal(saved(H.T, F[None]), jnp.tile(F[:, None], 32))


def test_a_vector_and_one_example_are_products_of_matrices():
    """A matrix is used for each of a vector's sums, as in a model's decoding."""
    w = jnp.ones((16, 8))
    for x in (F, F[None], H):
        assert low_products(look(lambda x: x @ w, pp.AutoMixedBf16, x).after)
