"""scripts/suites finds what fails only with `auto_mixed` in the place of `jax.jit`."""

from pathlib import Path

import jax
import pytest
import suites

import precpass as pp

SUITE = """
import functools, jax, numpy as np

@functools.partial(jax.jit, static_argnums=1, donate_argnums=())
def power(x, n):
    return x @ x if n == 2 else x

X = np.linspace(-1, 1, 16, dtype=np.float32).reshape(4, 4)

def test_options_of_jit():
    np.testing.assert_allclose(power(X, 2), X @ X, rtol=1e-6, atol=1e-7)

def test_digits_of_float32():
    assert np.abs(np.asarray(power(X, 2)) - X @ X).max() < 1e-6

def test_fails_plain():
    assert power(X, 1).sum() > 1000
"""


@pytest.mark.programs
def test_what_fails_only_under_a_policy_is_found(tmp_path: Path):
    path = tmp_path / "test_library.py"
    path.write_text(SUITE)
    found = {}
    for policy in suites.POLICIES:
        results = suites.outcomes(tmp_path, [path], policy, seconds=120)
        assert len(results) == 3
        found[policy] = {name.rpartition("::")[2] for name, error in results.items() if error}
    assert found["AlwaysF32"] == {"test_fails_plain"}
    # the comparison by numpy's own function is as wide as bfloat16, the other is not
    assert found["AutoMixedBf16"] == {"test_fails_plain", "test_digits_of_float32"}


def test_options_are_those_of_jax_whatever_stands_in_its_place(monkeypatch: pytest.MonkeyPatch):
    plain = jax.jit

    def replaced(fun=None, /, **options):
        return plain(fun, **options)

    monkeypatch.setattr(jax, "jit", replaced)
    cubed = pp.auto_mixed(lambda x, n: x**n, static_argnums=1, policy="AlwaysF32")
    assert cubed(2.0, 3) == 8.0
    with pytest.raises(TypeError, match=r"no option 'static_argnum'.*'static_argnums'"):
        pp.auto_mixed(lambda x, n: x**n, static_argnum=1)
