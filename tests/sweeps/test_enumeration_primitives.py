"""Every primitive of the installed JAX is known by name; every body is entered, or opaque by name.

Design section 3, lines 10 to 12. `enumeration.py` says how they are found.
"""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import precpass as pp
from precpass import jaxpr as ir
from precpass.policy.primitives import BOUNDARY, TABLE
from tests.support.compositions import PROGRAMS
from tests.support.enumeration import installed
from tests.support.enumeration_table import (
    README,
    of_primitives,
    read,
    render,
    table_in_readme,
    treatment,
)
from tests.support.jaxprs import jaxprs_in, named

VERSION = jax.__version__


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return installed()


def test_the_enumeration_is_not_blind(found: dict[str, Any]):
    """What every release has is there; an empty list would make every test below pass."""
    assert found["version"] == VERSION
    assert len(found["lowerable"]) > 300
    assert {"dot_general", "add", "scan", "get", "call_hi_primitive"} <= set(found["lowerable"])
    assert {"jit": ["jaxpr"], "cond": ["branches"]}.items() <= found["holders"].items()


def test_every_primitive_that_jax_can_lower_is_known_by_name(found: dict[str, Any]):
    unknown = [name for name, how in of_primitives(found).items() if how is None]
    assert not unknown, (
        f"give these a row in TABLE of policy.primitives, or a reason in BOUNDARY: {unknown}"
    )


def test_a_primitive_has_one_treatment():
    lists = [set(ir.ENTERED), set(ir.OPAQUE), set(TABLE), set(BOUNDARY)]
    twice = {n for i, a in enumerate(lists) for b in lists[i + 1 :] for n in a & b}
    assert not twice


def test_no_name_is_stale(found: dict[str, Any]):
    """Each is a primitive here, or was one where `scripts/enumerate` ran with another JAX."""
    elsewhere = {name for column in read().values() for name in column["primitives"]}
    exist = elsewhere | {*found["lowerable"], *found["holders"]}
    named = {*ir.ENTERED, *ir.COMBINERS, *ir.OPAQUE, *TABLE, *BOUNDARY}
    ours = {name for name in named if name.startswith("precpass_")}
    assert not named - exist - ours, "these are primitives of no supported JAX"


def test_every_primitive_that_can_hold_jaxprs_is_entered_or_opaque(found: dict[str, Any]):
    undeclared = set(found["holders"]) - {*ir.ENTERED, *ir.COMBINERS, *ir.OPAQUE}
    assert not undeclared, (
        "enter these in jaxpr.bodies, or give a reason in OPAQUE: "
        f"{ {name: found['holders'][name] for name in undeclared} }"
    )


def test_what_is_entered_holds_jaxprs_and_has_a_program(found: dict[str, Any]):
    present = {name for name in ir.ENTERED if name in found["holders"]}
    # its staging rule turns 0.10's eval_jaxpr into a closed_call
    staged = {"eval_jaxpr"} if "closed_call" in present else set()
    # none of its hi-primitives is entered
    is_old = jax.__version_info__ < (0, 12)
    assert present - staged - ({"call_hi_primitive"} if is_old else set()) == set(PROGRAMS)


@pytest.mark.parametrize("primitive", PROGRAMS)
def test_every_jaxpr_in_the_params_of_an_entered_primitive_is_found(primitive: str):
    """But those of its derivative rules, which are traced and rewritten when they are used."""
    x, w = jnp.ones((4, 6)), jnp.ones((6, 6))
    fn = PROGRAMS[primitive]
    if primitive == "remat_opt":  # it is what a derivative makes
        jaxpr = jax.make_jaxpr(jax.grad(lambda x, w: fn(x, w).sum()))(x, w)
    else:
        jaxpr = jax.make_jaxpr(fn)(x, w)
    eqns = named(jaxpr, primitive)
    assert eqns
    for eqn in eqns:
        held = [j for value in eqn.params.values() for j in jaxprs_in(value)]
        assert held
        assert {id(j) for j in held} == {id(ir.open_jaxpr(b.jaxpr)) for b in ir.bodies(eqn)}


def test_a_plan_says_why_a_primitive_keeps_its_dtypes():
    def fn(x):
        return x @ x, jnp.linalg.cholesky(x), jax.random.normal(jax.random.key(0), (3,))

    inspection = pp.inspect(fn)(jnp.eye(3))
    reasons = {e.primitive.name: str(d.reason) for e, d, _ in inspection.decisions()}
    assert "linear algebra without low kernels" in reasons["cholesky"]
    assert reasons["random_bits"] == "no floating-point values"
    assert "works on bits" in reasons["bitcast_convert_type"]


# ---------------------------------------------------------------- the committed table


def test_the_committed_table_is_that_of_this_jax(found: dict[str, Any]):
    """The cells of the matrix are held against it in test_enumeration_compositions."""
    committed = read()
    assert VERSION in committed, f"run scripts/enumerate with jax {VERSION}"
    assert committed[VERSION]["primitives"] == of_primitives(found), "run scripts/enumerate"
    assert list(committed[VERSION]["compositions"]) == list(PROGRAMS), "run scripts/enumerate"


def test_every_release_in_the_table_knows_the_treatments_of_today():
    releases = read()
    assert len(releases) >= 2
    for column in releases.values():
        assert len(column["primitives"]) > 100
        for name, how in column["primitives"].items():
            assert how == treatment(name), f"{name}: run scripts/enumerate with every release"


def test_the_readme_shows_the_committed_enumerations():
    assert table_in_readme() == render(read()), f"{README.name}: run scripts/enumerate"
