"""Design section 3, line 17: an inner function's own policy is the innermost word on it."""

import jax
import jax.numpy as jnp
import pytest

import precpass as pp
from precpass import AlwaysF32, AutoMixed, AutoMixedBf16
from tests.support.calls import W, X
from tests.support.jaxprs import product_dtypes
from tests.support.passes import quiet
from tests.support.values import rel_error

BF16, F16, F32 = "bfloat16", "float16", "float32"


def square(x):
    return x @ x


def around(inner):
    """One product, the inner function, one product."""

    def outer(x):
        return inner(x @ W) @ W

    return outer


def found(fn, policy, *args):
    with quiet():
        return product_dtypes(pp.inspect(fn, policy)(*args).after)


CASES = [
    (AlwaysF32, AutoMixedBf16, [BF16, F32, BF16]),
    (AutoMixedBf16, AlwaysF32, [F32, BF16, F32]),
    (AutoMixed, AutoMixedBf16, [BF16, F16, BF16]),
]
each_case = pytest.mark.parametrize(
    ("inner", "outer", "wanted"), CASES, ids=[f"{i.name} in {o.name}" for i, o, _ in CASES]
)


@pytest.mark.release(keep=2)
@each_case
def test_the_inner_policy_wins(inner, outer, wanted):
    fn = around(pp.auto_mixed(square, policy=inner))
    assert found(fn, outer, X) == wanted
    assert rel_error(pp.auto_mixed(fn, policy=outer)(X), around(square)(X)) < 2e-2


@pytest.mark.release(keep=2)
@each_case
def test_with_its_gradient_on_either_side(inner, outer, wanted):
    """Of a lowered product the derivative is low; of a wide one the transpose is float32."""
    mixed = pp.auto_mixed(square, policy=inner)

    def loss(x):
        return around(mixed)(x).sum()

    kinds = found(jax.grad(loss), outer, X)
    assert (kinds.count(wanted[0]), kinds.count(wanted[1])) == (4, 3)
    outside = jax.grad(pp.auto_mixed(loss, policy=outer))
    with quiet():
        kinds = product_dtypes(jax.make_jaxpr(outside)(X))
    assert set(kinds) == set(wanted) and len(kinds) == 7
    want = jax.grad(lambda x: around(square)(x).sum())(X)
    assert rel_error(pp.auto_mixed(jax.grad(loss), policy=outer)(X), want) < 2e-2
    assert rel_error(outside(X), want) < 2e-2


def custom(inner):
    @jax.custom_vjp
    def fn(x):
        return inner(x)

    fn.defvjp(lambda x: (inner(x), x), lambda x, g: (inner(g) + g @ x,))
    return fn


PLACES = {
    "vmap": lambda inner: lambda x: jax.vmap(lambda row: inner(jnp.outer(row, row)))(x).sum(0),
    "scan": lambda inner: (
        lambda x: jax.lax.scan(lambda c, _: (inner(c), None), x, None, length=2)[0]
    ),
    "checkpoint": jax.checkpoint,
    "custom_vjp": custom,
}


@pytest.mark.release(keep=2)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("inner", "outer"), [(AlwaysF32, AutoMixedBf16), (AutoMixed, AlwaysF32)])
def test_wherever_it_is_called(place, inner, outer):
    fn = around(PLACES[place](pp.auto_mixed(square, policy=inner)))
    want = [BF16, F32] if outer is AutoMixedBf16 else [F32, F16]
    kinds = found(fn, outer, X)
    assert kinds[0] == kinds[-1] == want[0], kinds
    assert set(kinds[1:-1]) == {want[1]}, kinds

    def loss(x):
        return fn(x).sum()

    inside = found(jax.grad(loss), outer, X)
    assert want[1] in inside
    wide = jax.grad(lambda x: around(PLACES[place](square))(x).sum())(X)
    assert rel_error(pp.auto_mixed(jax.grad(loss), policy=outer)(X), wide) < 3e-2


def test_a_rule_that_is_traced_late_keeps_its_own_policy():
    """The derivative rule is traced when JAX differentiates, after the outer function was."""
    inner = pp.auto_mixed(square, policy=AlwaysF32)
    mixed = pp.auto_mixed(around(custom(inner)))
    with quiet():
        jaxpr = jax.make_jaxpr(jax.grad(lambda x: mixed(x).sum()))(X)
    kinds = product_dtypes(jaxpr)
    # forward: x @ W, inner, @ W; backward: @ W.T, inner(g), g @ x, @ W.T
    assert kinds.count(F32) == 2, kinds
    assert kinds.count(BF16) == len(kinds) - 2


# ---------------------------------------------------------------- which word is the innermost


def inside(context, inner):
    """The inner function, called in a context."""

    def called(x):
        with context():
            return inner(x)

    return called


NONE, BF, HALF = (
    pp.auto_mixed(square),
    pp.auto_mixed(square, policy=AutoMixedBf16),
    pp.auto_mixed(square, policy=AutoMixed),
)
WIDE = pp.auto_mixed(square, policy=AlwaysF32)
INNERMOST = {
    "the outer policy": (NONE, AutoMixed, [F16] * 3),
    "use_policy inside": (
        inside(lambda: pp.use_policy("AutoMixedF16"), NONE),
        AutoMixedBf16,
        [BF16, F16, BF16],
    ),
    "switched off inside": (inside(lambda: pp.use_policy(None), NONE), "bf16", [BF16, F32, BF16]),
    "switched off around its own": (
        inside(lambda: pp.use_policy(None), HALF),
        AutoMixedBf16,
        [BF16, F32, BF16],
    ),
    "keep around its own": (inside(lambda: pp.keep("f32"), BF), AutoMixed, [F16, F32, F16]),
    "keep that lowers": (inside(lambda: pp.keep("f16"), BF), AlwaysF32, [F32, F16, F32]),
    "the outer policy's rules stay outside": (
        WIDE,
        AutoMixedBf16.with_rules(pp.Rule(primitive="dot_general", precision="f16")),
        [F16, F32, F16],
    ),
    "three deep": (
        pp.auto_mixed(around(BF), policy=AlwaysF32),
        AutoMixed,
        [F16, F32, BF16, F32, F16],
    ),
}


@pytest.mark.parametrize("name", INNERMOST)
def test_the_innermost_word_counts(name):
    inner, outer, wanted = INNERMOST[name]
    assert found(around(inner), outer, X) == wanted
    with pp.use_policy("AutoMixedF16"):
        assert found(around(inner), outer, X) == wanted, "the outer function is nearer"


def test_keep_in_the_inner_function_wins_over_both():
    @pp.auto_mixed(policy=AutoMixedBf16)
    def inner(x):
        with pp.keep("f32"):
            x = x @ x
        return x @ x

    assert found(around(inner), AutoMixed, X) == [F16, F32, BF16, F16]


def test_a_helper_that_was_jitted_outside_is_not_reused_inside():
    helper = jax.jit(lambda x: NONE(x))
    for _ in range(2):
        assert product_dtypes(jax.make_jaxpr(helper)(X)) == [BF16]
        assert found(around(helper), AutoMixed, X) == [F16] * 3


def test_low_values_cross_an_inner_function_under_always_f32():
    def outer(x):
        low = x.astype(jnp.bfloat16)
        return BF(low).astype(jnp.float32) + (low @ low).astype(jnp.float32)

    assert found(outer, AlwaysF32, X) == [BF16, F32]
    assert pp.auto_mixed(outer, policy=AlwaysF32)(X).dtype == jnp.float32


def test_the_plan_says_so_and_nothing_warns():
    found = pp.inspect(lambda x: WIDE(x))(X)  # a warning would be an error here
    reasons = {str(d.reason) for d in found.plan.walk()}
    assert "inside an auto_mixed function that has a policy of its own" in reasons
    assert found.after is found.before


def test_a_new_policy_for_a_mixed_function_replaces_its_own():
    mixed = pp.auto_mixed(square, policy=AutoMixed, donate_argnums=0)
    again = pp.auto_mixed(mixed, policy=AlwaysF32)
    assert again.__wrapped__ is square
    assert again.jit_options == {"donate_argnums": 0}
    assert product_dtypes(jax.make_jaxpr(again)(X)) == [F32]
    assert product_dtypes(jax.make_jaxpr(mixed)(X)) == [F16]
    assert pp.auto_mixed(mixed, keep_unused=True).policy is AutoMixed
