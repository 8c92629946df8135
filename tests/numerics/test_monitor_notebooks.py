"""What a monitor says in a notebook, whose cells are files of ever other names."""

import jax.numpy as jnp

import precpass as pp
from tests.report.test_bisect_notebooks import a_session

CELL = """
import jax.numpy as jnp

def spread(x):
    return jnp.log(x - 2.0)
"""


def test_a_birth_is_shown_by_its_cell_as_all_else_is(monkeypatch):
    spread = a_session(monkeypatch, "/tmp/ipykernel_71/123.py", CELL)["spread"]
    _, health = pp.monitor(spread, "AlwaysF32")(jnp.asarray([1.0, 3.0]))
    (birth,) = health.born()
    assert str(birth) == "In[3]:5 spread  return jnp.log(x - 2.0)"
    assert f"1 NaN by log  {birth}" in health.summary()
