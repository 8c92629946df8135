"""In which formats programs compute and store their values: the rows of `formats.py`."""

import jax
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun

from tests.planner.formats import ROWS, GradOfMixed, formats_of
from tests.support.values import rel_error


@pytest.mark.parametrize("name", ROWS)
def test_the_formats_of_a_program(name: str):
    given = ROWS[name]
    for i, (plan, expected) in enumerate(given.formats):
        jaxpr, found = given.planned(plan)
        for what, formats in expected.items():
            got = formats_of(what, jaxpr, found)
            assert (got if isinstance(formats, list) else set(got)) == (
                formats if isinstance(formats, list) else set(formats.split())
            ), (plan, what)
        if i == 0 and given.says:
            assert any(given.says in str(d.reason) for d in found.plan.walk())


@pytest.mark.release(keep=8)
@pytest.mark.parametrize("name", [name for name, each in ROWS.items() if each.error is not None])
def test_its_values_with_every_rounding_are_near_to_float32s(name: str):
    """One equation at a time: XLA:CPU would leave out roundings that are undone at once."""
    given = ROWS[name]
    got = jaxpr_as_fun(given.planned(given.formats[0][0])[0])(*jax.tree.leaves(given.args))
    plain = given.fn.plain if isinstance(given.fn, GradOfMixed) else given.fn
    for a, b in zip(got, jax.tree.leaves(jax.jit(plain)(*given.args)), strict=True):
        assert a.dtype == b.dtype and np.isfinite(a).all()
        assert rel_error(a, b) < given.error
