"""Same input tree, output tree, shapes, dtypes and weak types as the original, under every policy
(unless the caller asks for another output precision)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import precpass as pp
from tests.support.example_programs import PROGRAMS, Program
from tests.support.passes import POLICIES, look, quiet, run
from tests.support.values import normal

EVERY_KIND = pp.Custom(
    {kind: "bf16" for kind in pp.types.OpKind if kind is not pp.types.OpKind.BOUNDARY}
)
ALL = (*POLICIES, EVERY_KIND)

each_policy = pytest.mark.parametrize("policy", ALL, ids=lambda p: p.name)
each_program = pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.name)


def signature(jaxpr):
    """Shape, dtype and weak type of all that goes in and comes out."""
    avals = [
        [str(a) + str(getattr(a, "weak_type", "")) for a in side]
        for side in (jaxpr.in_avals, jaxpr.out_avals)
    ]
    return tuple(map(tuple, avals))


def described(tree):
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(x.shape, x.dtype, getattr(x, "weak_type", None)) for x in leaves]


@pytest.mark.release(keep=3)
@each_policy
@each_program
def test_same_input_tree_output_tree_shapes_dtypes_and_weak_types(program: Program, policy):
    with program.context(), quiet():
        args = program.args()
        want, want_shapes = jax.make_jaxpr(program.fn, return_shape=True)(*args)
        mixed = pp.auto_mixed(program.fn, policy=policy)
        got, got_shapes = jax.make_jaxpr(mixed, return_shape=True)(*args)
        inspection = pp.inspect(mixed)(*args)
        traced, plain = mixed.trace(*args), jax.jit(program.fn).trace(*args)
        shapes = mixed.eval_shape(*args)
    assert signature(got) == signature(want)
    assert signature(inspection.after) == signature(inspection.before)
    assert jax.tree.structure(traced.args_info) == jax.tree.structure(plain.args_info)
    assert jax.tree.structure(traced.out_info) == jax.tree.structure(plain.out_info)
    assert got_shapes == want_shapes == shapes


@each_policy
def test_keywords_defaults_and_none_stay_as_they_are(policy):
    def f(x, *, scale=2.0, extra=None):
        return {"y": x @ x * scale, "extra": extra, "empty": []}

    x = jnp.asarray(normal(0, 4, 4))
    with quiet():
        got = pp.auto_mixed(f, policy=policy)(x, scale=3.0)
    want = jax.jit(f)(x, scale=3.0)
    assert described(got) == described(want)
    assert got["extra"] is None and got["empty"] == []


@pytest.mark.parametrize("output", ["bf16", "f16"])
def test_unless_the_caller_asks_for_another_output_precision(output):
    def f(x, n, z):
        return x @ x, n + 1, z, (x > 0), jnp.sum(x)

    args = jnp.asarray(normal(0, 8, 8)), jnp.int32(3), jnp.complex64(1j)
    policy = pp.AutoMixedBf16.with_output(output)
    low = pp.types.Precision.parse(output).dtype
    dtypes = [x.dtype for x in run(f, policy, *args)]
    assert dtypes == [low, jnp.int32, jnp.complex64, jnp.bool_, low]
    after = look(f, policy, *args).after
    assert [a.dtype for a in after.out_avals] == dtypes
    assert [a.dtype for a in after.in_avals] == [np.dtype(np.float32), jnp.int32, jnp.complex64]


def test_outputs_that_are_inputs_and_constants_and_twice_the_same():
    table = jnp.asarray(normal(1, 3, 3))

    def f(x):
        y = x @ table
        return x, y, y, table, 1.0, 2

    x = jnp.asarray(normal(0, 3, 3))
    for policy in ALL:
        assert described(run(f, policy, x)) == described(jax.jit(f)(x))
