"""JAX's own primitive harnesses under every preset, two of each group.

`policy_checks` says what must hold; `scripts/sweep harnesses` checks all of them.
"""

from collections import Counter
from collections.abc import Iterator

import jax
import pytest

from tests.support.harness_programs import cases, harnesses, sample

pytestmark = pytest.mark.programs

SAMPLE = sample()


@pytest.fixture(scope="module", autouse=True)
def quickly_compiled() -> Iterator[None]:
    """Code generation without optimization: each program runs once."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.mark.release(keep=20)
@pytest.mark.parametrize("group", SAMPLE)
def test_harnesses_of_a_group(group: str):
    for name in SAMPLE[group]:
        for case in cases(name):
            assert not case.check().skipped


def test_the_sample_has_two_of_every_group():
    groups = Counter(h.group_name for h in harnesses().values())
    assert len(groups) > 100
    assert {name: len(found) for name, found in SAMPLE.items()} == {
        name: min(2, number) for name, number in groups.items()
    }
