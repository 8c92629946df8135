"""Comparison, audit and bisection of real programs: a transformer, a CNN, a neural ODE, mixed code.

They are those of `test_views.py`, at arrays.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import precpass as pp
from precpass.measure.counts import count
from tests.programs.test_views import MADE, each, promoting
from tests.support.audits import factor_dtypes
from tests.support.jaxprs import products
from tests.support.passes import quiet

pytestmark = pytest.mark.programs

BOTH = ("AlwaysF32", "AutoMixedBf16")


@functools.cache
def program(name: str) -> tuple[Any, Any]:
    """A program and arrays for it."""
    rng = np.random.default_rng(0)

    def filled(x: Any) -> Any:
        if not isinstance(x, jax.ShapeDtypeStruct):
            return x
        if jnp.issubdtype(x.dtype, jnp.integer):
            return jnp.asarray(rng.integers(10, size=x.shape), x.dtype)
        return jnp.asarray(rng.standard_normal(x.shape) / 3, x.dtype)

    fn, args = MADE[name]()
    return fn, jax.tree.map(filled, args)


@functools.cache
def compared(name: str) -> pp.report.Comparison:
    with quiet(), promoting():
        fn, args = program(name)
        return pp.compare(fn, BOTH, rounds=0)(*args)


@functools.cache
def audited(name: str) -> pp.report.Audit:
    with quiet(), promoting():
        fn, args = program(name)
        return pp.audit(fn, "AutoMixedBf16")(*args)


@pytest.mark.release(keep=1)
@each
def test_a_comparison(name):
    wide, low = compared(name).rows
    after = products(audited(name).inspection.after)
    assert low.counts.low == low.counts.products == wide.counts.products == len(after) > 0
    assert wide.counts.low == 0
    for row, bound in ((wide, 1e-6), (low, 0.05)):
        assert row.errors.nonfinite == row.errors.differing == 0
        assert 0 < row.errors.relative < bound
    assert low.errors.relative > 100 * wide.errors.relative
    assert len(low.leaves) == len(jax.tree.leaves(audited(name).inspection.before.out_avals))
    assert low.counts.flops["bf16"] > 0
    # XLA drops what nothing needs, and a count of the trace does not
    assert sum(low.counts.flops.values()) == pytest.approx(sum(wide.counts.flops.values()))


@pytest.mark.release
def test_the_flops_of_the_transformer_are_those_of_its_sizes():
    # per token and layer 2 * 12 width^2 and 4 * width * length, per token the head
    tokens, width, length = 2 * 8, 16, 8
    layer = 2 * 12 * width**2 + 4 * width * length
    _, low = compared("the demo's transformer").rows
    assert low.counts.flops["bf16"] == tokens * (2 * layer + 2 * width * 256)


def test_casting_the_parameters_of_the_transformer_leaves_most_of_it_wide():
    fn, (params, tokens) = program("the demo's transformer")

    def cast_parameters(params, tokens):
        return fn(jax.tree.map(lambda x: x.astype(jnp.bfloat16), params), tokens)

    with promoting():
        counts = count(jax.make_jaxpr(cast_parameters)(params, tokens))
    # of each layer the products before its first `/ np.sqrt(d)`, and that with the embedding
    assert (counts.low, counts.products) == (3, 7)


@pytest.mark.release(keep=1)
@each
def test_an_audit(name):
    found = audited(name)
    changed = sum(f.times for f in found.findings if f.kind.startswith("product"))
    assert found.products == found.as_planned + found.merged + changed > 0
    # where XLA calls oneDNN, which it does on some CPUs, a kernel may have lost its name
    assert found.merged <= (found.products // 4 if "__onednn" in found.hlo else 0)
    # all are planned low: those that XLA runs low are counted without names or lines
    pairs = [set(pair) for pair in factor_dtypes(found.hlo)]
    assert len(pairs) == found.products
    assert found.as_planned <= pairs.count({"bf16"}) <= found.as_planned + found.merged
    lines = {source.line for _, _, source in found.inspection.decisions()}
    assert {f.source.line for f in found.findings} <= lines
    assert all(f.reason for f in found.findings if f.kind.startswith("product"))


@pytest.mark.release(keep=1)
@each
def test_a_bisection(name):
    _, low = compared(name).rows
    tolerance = max(errors.relative for _, errors in low.leaves) / 3
    with quiet(), promoting():
        fn, args = program(name)
        found = pp.bisect(fn, "AutoMixedBf16", tolerance, budget=3)(*args)
    reference, whole, other = found.runs
    assert (reference.error, reference.low) == (0, 0)
    assert whole.error > tolerance
    assert 0 <= other.low < whole.low
    if name == "mixed by hand":
        assert not found.found
        assert "low in the program itself" in found.verdict
        return
    # with all left as written it is the reference
    best = other if other.error <= tolerance else reference
    assert (found.found, found.minimal) == (True, False)
    assert f"it passes (error {best.error:.3g}) with" in found.verdict
    for places in found.kept:
        assert all(place.text in str(found) for place in places)
