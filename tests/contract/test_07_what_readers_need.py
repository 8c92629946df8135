"""Values are guarded by what their readers need, too. A product whose result is needed exactly
stays float32 under the AutoMixed presets, with its reader as the reason: whole numbers and
equality, ends of loops, factorizations and solves, angles. A rule, a `keep` region or a saved plan
orders it low. What readers do not need exactly stays low."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import precpass as pp
from precpass.plan.reasons import DecidedBy
from tests.support.jaxprs import low_products, named
from tests.support.passes import AUTO, COMPOSITIONS, look, quiet, run, text_of
from tests.support.values import identical, normal, rel_error

N = 32
A, B = normal(0, N, N), normal(1, N, N)
V = normal(2, N)
Q = np.linalg.qr(A)[0]
SPD = (Q * np.linspace(1, 3, N)) @ Q.T
SPD = SPD.astype(np.float32)
IDS = np.arange(1000, 1000 + N).astype(np.float32)
ORDER = np.random.default_rng(3).permutation(N)
POSITIONS = np.random.default_rng(4).uniform(0, 50, (N, 3)).astype(np.float32)
CELLS = (np.eye(3) * 20).astype(np.float32)


def one_hot_gather(order, ids):
    return jax.nn.one_hot(order, N) @ ids


INTEGERS = {
    "floor": (lambda x, w: jnp.floor(x @ w).astype(jnp.int32), (POSITIONS, CELLS)),
    "a cast": (lambda x, w: (x @ w).astype(jnp.int32), (POSITIONS, CELLS)),
    "of two bytes": (lambda x, w: jnp.floor(x @ w).astype(jnp.int16), (POSITIONS, CELLS)),
    "rounded and returned as a float": (lambda *a: jnp.round(one_hot_gather(*a)), (ORDER, IDS)),
    "a flag": (lambda x, w: jnp.abs(x @ w - 500.0).min() < 1e-3, (POSITIONS, CELLS)),
    "ids": (lambda *a: one_hot_gather(*a).astype(jnp.int32), (ORDER, IDS)),
    "equality": (lambda order, ids: one_hot_gather(order, ids) == ids[order], (ORDER, IDS)),
    "an index": (lambda x, w: jnp.arange(4000.0)[jnp.floor(x @ w).astype(int)], (POSITIONS, CELLS)),
    "a mesh": (
        lambda x, w: jnp.zeros(1200).at[jnp.floor(x @ w)[:, 0].astype(int)].add(1.0),
        (POSITIONS, CELLS),
    ),
    "sorted": (lambda x, w: jnp.floor(jnp.sort(x @ w, axis=0)), (POSITIONS, CELLS)),
    "modulo": (lambda x, w: jnp.round(jnp.mod(x @ w, 50.0) - x @ w), (POSITIONS, CELLS)),
    "in a loop": (
        lambda x, w: lax.scan(lambda c, row: (c, jnp.floor(row @ w).astype(int)), 0, x)[1],
        (POSITIONS, CELLS),
    ),
    "a seed": (
        lambda x, w: jax.random.bits(jax.random.key((x @ w).astype(int)[0, 0]), (3,)),
        (POSITIONS, CELLS),
    ),
    "a key that is folded in": (
        lambda x, w: jax.vmap(
            lambda n: jax.random.bits(jax.random.fold_in(jax.random.key(0), n), ())
        )(jnp.floor(x @ w)[:, 0].astype(int)),
        (POSITIONS, CELLS),
    ),
    "of a vmap": (
        jax.vmap(lambda row, w: jnp.floor(w @ row), (0, None)),
        (POSITIONS, CELLS),
    ),
    "through a product and a sum": (
        lambda x, w: jnp.round((x @ w) @ w * 0.05 - x.sum(1, keepdims=True)),
        (POSITIONS, CELLS),
    ),
}


@pytest.mark.release(keep=2)
@pytest.mark.parametrize("policy", AUTO, ids=lambda p: p.name)
@pytest.mark.parametrize("name", INTEGERS)
def test_integers_and_equality_are_float32s(name, policy):
    fn, args = INTEGERS[name]
    inspection = look(fn, policy, *args)
    assert low_products(inspection.after) == [] and named(inspection.after, "dot_general")
    assert identical(run(fn, policy, *args), jax.jit(fn)(*args))
    assert {
        d.decided_by for _, d, _ in inspection.decisions() if d.kind is pp.types.OpKind.COMPUTE
    } == {DecidedBy.NEED}


def angles(x, w):
    return 40.0 * (x @ w)


def nearest_image(x, w):
    """Distances in a periodic box, as molecular dynamics has them."""
    d = angles(x, w)
    return d - 2.5 * jnp.round(d / 2.5)


PHASES = {
    "floor": lambda d: d - jnp.floor(d),
    "ceil": lambda d: jnp.ceil(d) - d,
    "trunc": lambda d: d - jnp.trunc(d),
    "modf": lambda d: jnp.modf(d)[0],
    "a cast": lambda d: d - d.astype(int).astype(jnp.float32),
    "a triangle": lambda d: jnp.abs(d - jnp.floor(d + 0.5)),
    "a wrap": lambda d: d - 2 * jnp.pi * jnp.floor((d + jnp.pi) / (2 * jnp.pi)),
    "a shifted wrap": lambda d: (d + 3.0) - 6.0 * jnp.floor((d + 3.0) / 6.0),
    "a shifted fold": lambda d: d - 2.5 * jnp.floor(d / 2.5 + 0.5),
}


DIGITS = {
    "cholesky": (
        lambda a, b: jnp.linalg.cholesky(a @ a.T + N * jnp.eye(N) - 0.01 * (b.T @ b)),
        (A, B),
    ),
    "cholesky of a kernel": (
        lambda a, b: jnp.linalg.cholesky(
            jnp.exp(-jnp.square(a @ b.T) / 9.0 + 0.0) * 0.01 + jnp.eye(N)
        ),
        (A, A),
    ),
    "eigh": (lambda a, b: jnp.linalg.eigh(a @ a.T + jnp.diag(b[0]))[0], (A, B)),
    "svd": (lambda a, b: jnp.linalg.svd(a @ b)[1], (A, SPD)),
    "qr": (lambda a, b: jnp.linalg.qr(a @ b)[1], (A, SPD)),
    "lu": (lambda a, b: jnp.linalg.det((a @ b) / N), (SPD, SPD)),
    "solve": (lambda a, b: jnp.linalg.solve(a.T @ a, a.T @ b), (normal(7, 90, N), normal(8, 90))),
    "triangular solve": (
        lambda a, b: jax.scipy.linalg.solve_triangular(SPD, a @ b, lower=True),
        (A, B),
    ),
    "sin": (lambda x, w: jnp.sin(angles(x, w)), (A, B)),
    "cos, with a phase": (lambda x, w: jnp.cos(angles(x, w) + V[None]), (A, B)),
    "tan": (lambda x, w: jnp.tan(0.01 * angles(x, w)), (A, 0.1 * B)),
    "a remainder": (lambda x, w: jnp.square(jnp.mod(angles(x, w), 1.0) - 0.5), (A, B)),
    "a nearest image": (lambda x, w: jnp.square(nearest_image(x, w)), (A, B)),
    **{
        f"a phase by {name}": (lambda x, w, phase=phase: jnp.square(phase(angles(x, w))), (A, B))
        for name, phase in PHASES.items()
    },
    "exp of an imaginary number": (
        lambda x, w: jnp.exp(lax.complex(0 * x, angles(x, w))).real,
        (A, B),
    ),
}


@pytest.mark.release(keep=2)
@pytest.mark.parametrize("composition", COMPOSITIONS)
@pytest.mark.parametrize("name", DIGITS)
def test_factorizations_and_angles_have_the_digits_of_float32(name, composition):
    fn, args = DIGITS[name]
    inspection = look(fn, pp.AutoMixedBf16, *args)
    assert low_products(inspection.after) == [] and named(inspection.after, "dot_general")

    def total(*xs):
        return jnp.sum(fn(*xs))

    with quiet():
        mixed = COMPOSITIONS[composition](total, jax.value_and_grad, policy=pp.AutoMixedBf16)
        got, want = jax.jit(lambda *xs: (mixed(*xs), jax.value_and_grad(total)(*xs)))(*args)
    assert rel_error(got[0], want[0]) < 1e-4
    # What the backward pass multiplies may be low, as in any network.
    assert bool(jnp.all(jnp.isfinite(got[1]))) and rel_error(got[1], want[1]) < 0.03


def looped(step, goes_on, *start):
    """The trips of a loop that ends on a tolerance, or after 500."""

    def trip(state):
        return *step(*state[:-1]), state[-1] + 1

    return lax.while_loop(lambda s: goes_on(*s[:-1]) & (s[-1] < 500), trip, (*start, 0))[-1]


def until(tolerance, residual):
    """Richardson's iteration, until a residual that `residual` computes is below a tolerance."""

    def solve(a, b):
        def step(x, _, r):
            return x + 0.4 * r, x, b - a @ (x + 0.4 * r)

        return looped(step, lambda *s: residual(*s) > tolerance(b), jnp.zeros_like(b), b, b)

    return solve


def with_its_tolerance(a, b):
    def step(x, r, tolerance):
        return x + 0.4 * r, b - a @ (x + 0.4 * r), tolerance

    return looped(step, lambda x, r, tol: jnp.linalg.norm(r) > tol, jnp.zeros_like(b), b, 1e-4)


def newton_schulz(a, _):
    def step(x, _):
        gram = x.T @ x
        return 1.5 * x - 0.5 * x @ gram, jnp.linalg.norm(gram - jnp.eye(N))

    return looped(step, lambda _, error: error > 1e-4, a / 3, jnp.float32(1))


def flagged(a, b):
    """A loop whose body finds out that it is done."""

    def step(x, _):
        new = jnp.tanh(0.3 * (a @ x) + b)
        return new, jnp.allclose(new, x, rtol=1e-6, atol=1e-6)

    return looped(step, lambda _, done: ~done, b, jnp.bool_(False))


def a_step(a, b):
    """A loop that ends when its steps are small, which it computes from what it carries."""

    def step(x, _):
        return x + 0.4 * (b - a @ x), x

    return looped(step, lambda x, old: jnp.abs(x - old).max() > 1e-5, b, 2 * b)


def a_trip_late(a, b):
    """A loop that looks at the step of the trip before, as pipelined solvers do."""

    def step(x, old, _):
        return jnp.tanh(0.3 * (a @ x) + b), x, jnp.abs(x - old).max() < 1e-5

    return looped(step, lambda x, old, done: ~done, b, 2 * b, False)


def recomputed(a, b):
    """A loop whose condition computes the residual, always in float32, of what its steps made."""
    return looped(
        lambda x: (x + 0.4 * (b - a @ x),), lambda x: jnp.linalg.norm(b - a @ x) > 1e-4, b
    )


def newton(a, b):
    def residual(y):
        return y + jnp.tanh(0.3 * (a @ y)) - b

    def step(y):
        return (y - jnp.linalg.solve(jax.jacfwd(residual)(y), residual(y)),)

    return looped(step, lambda y: jnp.mean(residual(y) ** 2) > 1e-10, b)


def counted_hits(a, b):
    """A loop that ends when its residual was small three times in a row, which it counts."""

    def step(x, hits):
        residual = b - a @ x
        return x + 0.4 * residual, jnp.where(jnp.linalg.norm(residual) < 1e-4, hits + 1, 0)

    return looped(step, lambda x, hits: hits < 3, b, 0)


def branched(a, b):
    """A loop whose body carries what a branch says."""

    def step(x, _):
        residual = b - a @ x
        done = lax.cond(jnp.linalg.norm(residual) < 1e-4, lambda: True, lambda: False)
        return x + 0.4 * residual, done

    return looped(step, lambda x, done: ~done, b, False)


def relative(b):
    return 1e-4 * jnp.linalg.norm(b)


LOOPS = {
    "a residual that is carried": until(relative, lambda x, old, r: jnp.linalg.norm(r)),
    "a step": a_step,
    "a step of the trip before": a_trip_late,
    "an error over its tolerance": until(
        lambda b: 1.0, lambda x, old, r: jnp.max(jnp.abs(r) / (1e-5 + 1e-5 * jnp.abs(x)))
    ),
    "a tolerance from outside": until(
        lambda b: jnp.abs(b[0]) * 1e-4, lambda x, old, r: jnp.sum(r * r)
    ),
    "a computed tolerance": until(lambda b: jnp.sqrt(1e-8), lambda x, old, r: jnp.linalg.norm(r)),
    "a power of ten": until(lambda b: jnp.power(10.0, -4), lambda x, old, r: jnp.linalg.norm(r)),
    "an exponential": until(lambda b: jnp.exp(-9.0), lambda x, old, r: jnp.linalg.norm(r)),
    "a root of a tolerance from outside": until(
        lambda b: jnp.sqrt(1e-8 * jnp.abs(b[0])), lambda x, old, r: jnp.linalg.norm(r)
    ),
    "a chosen tolerance": until(
        lambda b: jnp.where(b[0] > 0, 1e-4, 1e-3), lambda x, old, r: jnp.linalg.norm(r)
    ),
    "a tolerance that is carried": with_its_tolerance,
    "Newton-Schulz": newton_schulz,
    "a flag": flagged,
    "a residual in the condition": recomputed,
    "Newton": newton,
    "a count of small residuals": counted_hits,
    "a flag of a branch": branched,
    "all but one": until(lambda b: 1e-4, lambda x, old, r: jnp.sort(jnp.abs(r))[-2]),
    "how many are small": until(
        lambda b: 1.0, lambda x, old, r: 2.0 - jnp.mean((jnp.abs(r) < 1e-4).astype(jnp.float32))
    ),
}


@pytest.mark.release(keep=2)
@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("batched", [False, True])
def test_a_loop_that_ends_on_a_tolerance_ends_after_as_many_trips(name, batched):
    fn, b = LOOPS[name], V
    if batched:
        fn, b = jax.vmap(fn, (None, 0)), np.stack([V, 3 * V])
    inspection = look(fn, pp.AutoMixedBf16, SPD, b)
    assert low_products(inspection.after) == []
    assert "ends on a tolerance" in text_of(inspection)
    assert identical(run(fn, pp.AutoMixedBf16, SPD, b), jax.jit(fn)(SPD, b))


def a_recursion(a, b):
    """Conjugate gradients by hand, whose residual is never computed anew."""

    def step(state):
        x, r, p = state
        ap = a @ p
        alpha = jnp.vdot(r, r) / jnp.vdot(p, ap)
        new = r - alpha * ap
        return x + alpha * p, new, new + jnp.vdot(new, new) / jnp.vdot(r, r) * p

    return lax.while_loop(
        lambda state: jnp.vdot(state[1], state[1]) > 1e-8, step, (jnp.zeros_like(b), b, b)
    )[0]


SOLVERS = {
    "a recursion": a_recursion,
    "cg with a start": lambda a, b: jax.scipy.sparse.linalg.cg(lambda x: a @ x, b, x0=b)[0],
    "cg": lambda a, b: jax.scipy.sparse.linalg.cg(lambda x: a @ x, b)[0],
    "bicgstab": lambda a, b: jax.scipy.sparse.linalg.bicgstab(lambda x: a @ x, b)[0],
    "gmres": lambda a, b: jax.scipy.sparse.linalg.gmres(lambda x: a @ x, b)[0],
}


@pytest.mark.release(keep=2)
@pytest.mark.parametrize("name", SOLVERS)
def test_an_iterative_solver_solves_the_system_that_it_is_given(name):
    got = run(SOLVERS[name], pp.AutoMixedBf16, SPD, V)
    assert rel_error(got, np.linalg.solve(SPD, V)) < 1e-4


def test_what_a_loop_reads_in_each_trip_does_not_start_it():
    def fn(x, w):
        bias = x @ w

        def step(state):
            z, _ = state
            new = jnp.tanh(0.1 * z @ w + bias)
            return new, jnp.abs(new - z).max()

        return lax.while_loop(lambda state: state[1] > 1e-4, step, (x, jnp.float32(1)))[0]

    inspection = look(fn, pp.AutoMixedBf16, A, 0.1 * B)
    assert len(low_products(inspection.after)) == 1
    assert len(named(inspection.after, "dot_general")) == 2


NEEDED_BY_A_GRADIENT = {
    "normal equations": (
        lambda t, y: (lambda v: jnp.linalg.solve(v.T @ v, v.T @ y)[1])(
            t[:, None] ** jnp.arange(5.0)[None]
        ),
        (np.linspace(0.1, 1, 200, dtype=np.float32), normal(7, 200, 8)),
    ),
    "a kernel's determinant": (
        lambda x, d: jnp.linalg.slogdet(
            jnp.exp(-0.5 * (d[:, None] + d[None] - 2 * x @ x.T)) + 0.01 * jnp.eye(128)
        )[1],
        (normal(4, 128, 3), np.square(normal(4, 128, 3)).sum(1)),
    ),
}


@pytest.mark.parametrize("name", NEEDED_BY_A_GRADIENT)
@pytest.mark.parametrize("composition", COMPOSITIONS)
def test_the_derivatives_of_an_exact_product_are_exact(name, composition):
    fn, args = NEEDED_BY_A_GRADIENT[name]

    def total(*xs):
        return jnp.sum(fn(*xs))

    with quiet():
        mixed = COMPOSITIONS[composition](total, jax.grad, policy=pp.AutoMixedBf16)
        got, want = jax.jit(lambda *xs: (mixed(*xs), jax.grad(total)(*xs)))(*args)
    assert rel_error(got, want) < 0.01


@pytest.mark.parametrize("stored", [False, True])
def test_what_is_needed_exactly_is_not_stored_in_16_bits_either(stored):
    """The angles that a checkpoint saves in a scan, for the backward pass."""
    policy = jax.checkpoint_policies.dots_saveable if stored else None

    def loss(w, xs):
        def step(total, x):
            return total + jnp.sum(jnp.sin(angles(x, w))), None

        return lax.scan(jax.checkpoint(step, policy=policy), 0.0, xs)[0]

    xs = normal(9, 16, 32, N)
    got, want = jax.jit(lambda *a: (run(jax.grad(loss), pp.AutoMixedBf16, *a), jax.grad(loss)(*a)))(
        A, xs
    )
    assert rel_error(got, want) < 0.02


@jax.custom_vjp
def dense(x, w):
    return x @ w


dense.defvjp(lambda x, w: (x @ w, (x, w)), lambda xw, g: (g @ xw[1].T, xw[0].T @ g))


@jax.custom_jvp
def multiplied(x, w):
    return x @ w


multiplied.defjvp(lambda p, t: (p[0] @ p[1], t[0] @ p[1] + p[0] @ t[1]))


@pytest.mark.parametrize("product", [dense, multiplied], ids=["vjp", "jvp"])
def test_custom_rules_whose_result_is_needed_exactly_are_not_rewritten(product):
    """JAX traces them when it differentiates, and does not say then who reads the result."""

    def fn(x, w):
        return jnp.sum(jnp.sin(40.0 * product(x, w)))

    with quiet():
        mixed = jax.value_and_grad(pp.auto_mixed(fn), 1)
        got, want = jax.jit(lambda *xs: (mixed(*xs), jax.value_and_grad(fn, 1)(*xs)))(A, B)
    assert rel_error(got, want) < 1e-5


def test_a_chain_of_states_is_planned_in_linear_time():
    """Each state of the loop is made of the next one, so that what the last is read for reaches
    each product after as many trips. More than a few are not followed one by one."""

    def fn(states, w):
        def step(carry, _):
            return [*carry[1:], carry[0] @ w], None

        return jnp.floor(lax.scan(step, states, None, length=2)[0][0])

    states = [A] * 200
    inspection = look(fn, pp.AutoMixedBf16, states, B)
    assert low_products(inspection.after) == []


def test_a_rule_a_region_and_a_saved_plan_order_it_low(tmp_path):
    fn, args = INTEGERS["floor"]
    rule = pp.AutoMixedBf16.with_rules(pp.Rule(primitive="dot_general", precision="bf16"))
    ordered = look(fn, rule, *args)
    assert low_products(ordered.after)
    assert low_products(look(pp.keep("bf16")(fn), pp.AutoMixedBf16, *args).after)
    ordered.plan.save(tmp_path / "plan.json")
    saved = pp.Plan.load(tmp_path / "plan.json")
    assert low_products(look(fn, pp.AutoMixedBf16.with_lock(saved.lock), *args).after)
    for policy in (pp.AlwaysBf16, pp.Custom({"compute": "bf16"})):
        assert low_products(look(fn, policy, *args).after)


def test_the_reader_is_named():
    fn, args = INTEGERS["floor"]
    assert "its result becomes whole numbers at test_07_what_readers_need.py:" in text_of(
        look(fn, pp.AutoMixedBf16, *args)
    )
    # nobody would want to change it
    explained = pp.explain(fn)(*args)
    assert explained.wide[0].remedy is None and "to change it" not in explained.all


# ---------------------------------------------------------------- what stays low


def accuracy(x, w):
    return jnp.mean(jnp.argmax(x @ w, 1) == jnp.arange(N))


def quantised_by_straight_through(x, w):
    h = x @ w
    scale = jnp.abs(h).max() / 127
    return h + lax.stop_gradient(jnp.round(h / scale) * scale - h)


def quantised_less_its_error(x, w):
    h = x @ w
    return h - lax.stop_gradient(h - jnp.round(h * 8) / 8)


def early_stopping(x, w):
    def step(state):
        w, best, loss, trips = state
        residual = x @ w - x
        loss = jnp.mean(residual**2)
        return w - 0.01 * x.T @ residual, jnp.minimum(best, loss), loss, trips + 1

    def goes_on(state):
        return (state[3] < 9) & ~(state[2] > 2 * state[1])

    return lax.while_loop(goes_on, step, (w, jnp.float32(9e9), jnp.float32(0), 0))[0]


def until_a_time(x, w):
    def step(state):
        y, time = state
        slope = jnp.tanh(y @ w)
        return y + 0.1 * slope, time + 0.1 / (1 + jnp.abs(slope).max())

    return lax.while_loop(lambda s: s[1] < 1.0, step, (x, jnp.float32(0)))[0]


def router(x, w):
    weights, experts = lax.top_k(jax.nn.softmax(x @ w), 2)
    return weights[..., None] * w[experts]


def chosen_branch(x, w):
    h = x @ w
    return lax.cond(h.sum() < 1.0, lambda h: h @ w, lambda h: h, h)


def counted(x, w):
    return lax.fori_loop(0, 3, lambda i, h: jnp.tanh(h @ w), x)


def triangle_counts(x, w):
    edges = (x > 0).astype(jnp.float32)
    return jnp.einsum("ij,jk->ik", edges, edges).astype(jnp.int32)


STAYS_LOW = {
    "accuracy": accuracy,
    "straight-through rounding": quantised_by_straight_through,
    "rounding as an error that is taken away": quantised_less_its_error,
    "half a byte": lambda x, w: lax.rem(jnp.round(x @ w).astype(jnp.int8), jnp.int8(16)),
    "8-bit codes": lambda x, w: jnp.clip(jnp.round(x @ w), -127, 127).astype(jnp.int8),
    "early stopping": early_stopping,
    "a time": until_a_time,
    "a router": router,
    "a branch": chosen_branch,
    "a counted loop": counted,
    "counts that the low format holds": triangle_counts,
    "a mask": lambda x, w: jnp.where(x @ w > 0, x, 0.0),
    "small thresholds": lambda x, w: ((x @ w > 0.05), jnp.sum(x @ w > 0.02)),
    "a table that is computed": lambda x, w: jnp.searchsorted(jnp.sort((x @ w)[0]), (x @ w)[0]),
    "a derivative of a sampler": jax.grad(
        lambda x, w: jax.random.gamma(jax.random.key(0), jnp.exp(x @ w)).sum()
    ),
    "a threshold that counts": lambda x, w: jnp.sum(x @ w > 0.5),
    "a nearest code": lambda x, w: w[jnp.argmin((w * w).sum(1)[None] - 2 * x @ w.T, axis=1)],
    "clipping by a norm": lambda x, w: (x @ w) / jnp.maximum(1.0, jnp.linalg.norm(x @ w)),
    "a finite test": lambda x, w: jnp.isfinite(x @ w).all(),
    "an inner layer of sines": lambda x, w: jnp.sin(jax.nn.relu(x @ w) @ w),
    "curvature of a network": lambda x, w: jnp.linalg.cholesky(
        jax.nn.relu(x @ w).T @ jax.nn.relu(x @ w) + 9 * jnp.eye(N)
    ),
    "sampling": lambda x, w: jax.random.categorical(jax.random.key(0), x @ w),
}


@pytest.mark.parametrize("name", STAYS_LOW)
def test_what_readers_do_not_need_exactly_stays_low(name):
    inspection = look(STAYS_LOW[name], pp.AutoMixedBf16, A, B)
    products = named(inspection.after, "dot_general")
    assert products and len(low_products(inspection.after)) == len(products)


def test_one_call_of_a_shared_function_does_not_speak_for_another():
    @jax.jit
    def multiplied(x, w):
        return x @ w

    def fn(x, w):
        return jax.nn.relu(multiplied(x, w)), jnp.floor(multiplied(w, x))

    low = look(fn, pp.AutoMixedBf16, A, B)
    assert len(low_products(low.after)) == 1
    (_, floor), want = run(fn, pp.AutoMixedBf16, A, B), jnp.floor(jnp.asarray(B) @ A)
    assert identical(floor, want)


def test_a_caller_that_gives_features_does_not_speak_for_another():
    @jax.jit
    def cells(x, w):
        return jnp.floor(x @ w)

    def fn(x, w):
        return cells(jax.nn.silu(x @ w), w), cells(x, w)

    x = 20 * B
    (_, found), want = run(fn, pp.AutoMixedBf16, x, A), fn(x, A)[1]
    assert identical(found, want)


def symexp(x, xp=np):
    return (xp.sign(x) * xp.expm1(xp.abs(x))).astype(np.float32)


BINS = symexp(np.linspace(-20, 20, 255))
TABLES = {
    "closed over": lambda logits: jax.nn.softmax(logits) @ BINS,
    "computed": lambda logits: jax.nn.softmax(logits) @ symexp(jnp.linspace(-20, 20, 255), jnp),
    "scaled and moved": lambda logits: jnp.einsum(
        "ij,kj->ki", jax.nn.softmax(logits), 2 * BINS[None]
    ),
    "of both halves": lambda logits: (
        jax.nn.softmax(logits) @ jnp.concatenate([BINS[:128], -BINS[:127][::-1]])
    ),
}


@pytest.mark.parametrize("name", TABLES)
def test_a_table_whose_large_elements_cancel_is_not_rounded(name):
    """The two-hot values of a reinforcement learner: 4.8e8 in the outer bins."""
    logits = normal(5, 16, 255)
    fn = TABLES[name]
    inspection = look(fn, pp.AutoMixedBf16, logits)
    assert low_products(inspection.after) == []
    assert "large elements cancel" in text_of(inspection)
    assert low_products(look(lambda x: x @ normal(6, 255, 9), pp.AutoMixedBf16, logits).after)
