"""Every entered primitive under every transformation: low inside, near float32, or refused alike.

Design section 3, line 15.
"""

import jax
import pytest

from tests.support.compositions import (
    COMPOSITIONS,
    POLICIES,
    PROGRAMS,
    SCALED,
    TOLERANCE,
    W,
    X,
    check_low,
    forms,
    jaxpr_or_error,
    outcome_of,
)
from tests.support.enumeration_table import read
from tests.support.jaxprs import named
from tests.support.passes import checking_leaks
from tests.support.values import assert_near

VERSION, COMMITTED = jax.__version__, read()


def test_every_entered_primitive_is_seen_somewhere():
    """Not only programs from which JAX has taken the primitive away."""
    if VERSION not in COMMITTED:
        pytest.skip(f"scripts/enumerate has not run with jax {VERSION}")
    compositions = COMMITTED[VERSION]["compositions"]
    assert len(compositions) > 10
    for name, cells in compositions.items():
        assert "inside" in cells.values(), name


@pytest.mark.release(keep=1)
@pytest.mark.parametrize("composition", COMPOSITIONS)
@pytest.mark.parametrize("primitive", PROGRAMS)
def test_the_matrix(primitive: str, composition: str):
    fns = forms(primitive, composition)
    found = {name: jaxpr_or_error(fn) for name, fn in fns.items()}
    before = found["plain"]
    # jax 0.10's own checks refuse closed_call, remat_opt and custom_linear_solve in a few places,
    # and where a trace raises, the check for leaks raises another error
    checked = jax.config.jax_enable_checks or jax.config.jax_check_tracer_leaks
    if VERSION in COMMITTED and not checked:
        shown = COMMITTED[VERSION]["compositions"][primitive][composition]
        assert outcome_of(before, primitive) == shown, "run scripts/enumerate"
    if isinstance(before, Exception):
        assert {type(error) for error in found.values()} == {type(before)}
        return
    for name, policy in POLICIES.items():
        check_low(found[name], before, primitive, policy.low.dtype)
    if composition == "eager":
        results = {name: fn(X, W) for name, fn in fns.items()}
    else:
        # one compilation of all three takes half the time of three
        results = jax.jit(lambda x, w: {name: fn(x, w) for name, fn in fns.items()})(X, W)
    for name in POLICIES:
        assert_near(results[name], results["plain"], TOLERANCE[name])


EIGHT_BITS = {"int8": 0.06, "f8e4m3": 0.3}
"""The largest errors of programs of a few products, relative to the norm of the result."""


@pytest.mark.release(keep=1)
@pytest.mark.programs
@pytest.mark.parametrize("composition", COMPOSITIONS)
@pytest.mark.parametrize("primitive", PROGRAMS)
def test_the_matrix_in_eight_bits(primitive: str, composition: str):
    fns = forms(primitive, composition, SCALED)
    before = jaxpr_or_error(fns["plain"])
    if isinstance(before, Exception):
        return
    is_dot = bool(named(before, "dot_general"))
    for name in SCALED:
        found = named(jaxpr_or_error(fns[name]), "precpass_scaling")
        rounded = [e for e in found if f"to {name}" in str(e.params["arithmetic"])]
        assert bool(rounded) == is_dot, name
    results = jax.jit(lambda x, w: {name: fn(x, w) for name, fn in fns.items()})(X, W)
    for name in SCALED:
        assert_near(results[name], results["plain"], EIGHT_BITS[name])


@pytest.mark.release(keep=2)
@pytest.mark.parametrize("primitive", PROGRAMS)
def test_no_tracer_outlives_its_trace(primitive: str):
    """Rewritten rules included. JAX itself leaks those of linear_call."""
    fns = forms(primitive, "grad outside")
    with checking_leaks():
        plain, mixed = (jaxpr_or_error(fns[name]) for name in ("plain", "bf16"))
    if not isinstance(plain, Exception):
        assert not isinstance(mixed, Exception), mixed
