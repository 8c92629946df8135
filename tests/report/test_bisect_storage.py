"""`bisect` finds what breaks a program by being stored low, and not only what is computed so."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import precpass as pp
from precpass.plan.plan import Action
from precpass.report.bisect.bisect import _Search
from tests.report.test_bisect import check_found, lines_of

RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(4, 8)) / 10, jnp.float32)
W = jnp.asarray(RNG.normal(size=(8, 8)) / 3, jnp.float32)


def kept(w: Any) -> Any:
    """What products read, and what is kept for them, is also the one side of a small difference."""

    def step(c: Any, _: Any) -> Any:
        h = jnp.tanh(c)  # stored low
        out = 300 * (h - c + c**3 / 3)  # all rounding then
        return c + 0.01 * (h @ w), out

    return lax.scan(step, X, length=3)[1]


def with_gradient(w: Any) -> Any:
    out, pull = jax.vjp(kept, w)
    return out, pull(jnp.ones_like(out))


def plan_of(policy: Any) -> pp.Plan:
    return pp.inspect(with_gradient, policy)(W).plan


def test_a_value_that_must_not_be_stored_low_is_found():
    found = pp.bisect(with_gradient, "AutoMixedBf16", 0.05)(W)
    check_found(found, with_gradient, W)
    stored = kept.__code__.co_firstlineno + 4
    assert lines_of(found) == [stored]
    # the products stay low
    low = [d.action for d in plan_of(found.policy).walk() if d.kind is pp.types.OpKind.COMPUTE]
    assert low and set(low) == {Action.LOWER}
    assert found.runs[1].low == sum(
        d.action is Action.LOWER or d.stores_low for d in plan_of("AutoMixedBf16").walk()
    )


def test_plans_that_differ_in_what_is_stored_are_two_programs_and_others_one():
    search = object.__new__(_Search)
    search._programs, search._keys = {}, {"as it was written": 0}
    wide = pp.Rule(where=lambda eqn: eqn.kind is pp.types.OpKind.ELEMENTWISE, precision="f32")
    as_it_is = pp.Rule(primitive="dot_general", precision="bf16")  # with another reason alone
    plans = [plan_of(pp.AutoMixedBf16.with_rules(*given)) for given in ((), (wide,), (as_it_is,))]
    one, all_wide, other = map(search._program, plans)
    assert one == other != all_wide
    assert 0 not in (one, all_wide)
