"""Only floating values whose dtype is in the policy's `retypes` ever change. Never integers,
booleans, PRNG keys, complex, float64 (unless in `retypes`), index operands, tokens, refs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import precpass as pp
from tests.support.example_programs import PROGRAMS, Program
from tests.support.jaxprs import LOW, inner_jaxprs, low_products, named, walk
from tests.support.passes import LOWERING, assert_close, look, run
from tests.support.values import identical, normal

EVERY_KIND = pp.Custom(
    {kind: "f16" for kind in pp.types.OpKind if kind is not pp.types.OpKind.BOUNDARY}
)
ALL = (*LOWERING, EVERY_KIND)
CHANGEABLE = (np.dtype(np.float32), *LOW)

each_policy = pytest.mark.parametrize("policy", ALL, ids=lambda p: p.name)


def casts(jaxpr):
    return [
        (e.invars[0].aval.dtype, e.params["new_dtype"])
        for e in named(jaxpr, "convert_element_type")
    ]


def untouchable(jaxpr):
    """Primitive and dtypes of every equation that neither reads nor makes a changeable float."""
    found = []
    for eqn in walk(jaxpr):
        dtypes = [getattr(v.aval, "dtype", None) for v in (*eqn.invars, *eqn.outvars)]
        if not inner_jaxprs(eqn) and not any(d in CHANGEABLE for d in dtypes):
            found.append((eqn.primitive.name, tuple(map(str, dtypes))))
    return sorted(found)


@each_policy
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.name)
def test_what_is_not_a_float_of_the_retypes_never_changes(program: Program, policy):
    with program.context():
        inspection = look(program.fn, policy, *program.args())
    before, after = casts(inspection.before), casts(inspection.after)
    for operand, result in after:
        if (operand, result) not in before:
            assert operand in CHANGEABLE and result in CHANGEABLE, f"cast {operand} -> {result}"
    assert untouchable(inspection.after) == untouchable(inspection.before)


IDS = jnp.arange(100_000, 100_016)
Z = lax.complex(normal(0, 16, 16), normal(1, 16, 16))
TABLE = jnp.asarray(np.arange(4000.0).reshape(1000, 4) % 7, jnp.float32)
KEY = jax.random.key(7)


def rows_of_large_indices(ids, at):
    put = lax.dynamic_update_slice(TABLE, jnp.ones((2, 4)), (at, 0))
    return TABLE[ids], lax.dynamic_slice(TABLE, (at, 0), (2, 4)), put.at[ids].set(1.0)


UNTOUCHED = {
    "integers": (lambda n: (n @ n, jnp.cumsum(n)), (IDS,)),
    "booleans": (lambda mask, n: mask | (n > 300), (IDS % 3 == 0, IDS)),
    "keys": (lambda key: jax.random.key_data(jax.random.split(key)[0]), (KEY,)),
    "bits": (lambda key: jax.random.bits(key, (9,)), (KEY,)),
    "complex": (lambda z: (z @ z, jnp.sum(z), jnp.exp(z), jnp.fft.fft(z)), (Z,)),
    "indices": (rows_of_large_indices, (jnp.asarray([257, 999]), jnp.int32(517))),
}


@pytest.mark.release(keep=2)
@each_policy
@pytest.mark.parametrize("name", UNTOUCHED)
def test_other_types_are_bit_equal_beside_a_low_product(name, policy):
    fn, args = UNTOUCHED[name]

    def beside(x, *args):
        return x @ x, fn(*args)

    x = jnp.asarray(normal(0, 16, 16))
    assert len(low_products(look(beside, policy, x, *args).after)) == 1
    assert identical(run(beside, policy, x, *args)[1], jax.jit(fn)(*args))


@pytest.mark.release(keep=2)
@each_policy
def test_float64_stays(policy):
    def f(x, d):
        return x @ x, (d @ d, jnp.sum(jnp.tanh(d)))

    with jax.enable_x64(True):
        d = jnp.asarray(normal(1, 32, 32, dtype=np.float64))
        x = jnp.asarray(normal(0, 32, 32))
        inspection = look(f, policy, x, d)
        assert len(low_products(inspection.after)) == 1
        assert identical(run(f, policy, x, d)[1], jax.jit(f)(x, d)[1])


@pytest.mark.parametrize("low", ["bf16", "f16"])
def test_float64_changes_where_it_is_in_retypes(low):
    def loss(d, w):
        return jnp.sum((d @ w) ** 2) / d.shape[0]

    base = pp.AutoMixedBf16 if low == "bf16" else pp.AutoMixed
    policy = base.with_retypes("f64", "f32")
    with jax.enable_x64(True):
        d = jnp.asarray(normal(1, 4096, 16, dtype=np.float64))
        w = jnp.asarray(normal(2, 16, 16, dtype=np.float64))
        inspection = look(loss, policy, d, w)
        assert low_products(inspection.after, policy.low.dtype)
        assert [a.dtype for a in inspection.after.out_avals] == [np.float64]
        assert_close(loss, policy, d, w, tol=0.01, argnums=1)


@each_policy
def test_a_policy_without_float32_in_retypes_leaves_it_alone(policy):
    x = jnp.asarray(normal(0, 8, 8))
    inspection = look(lambda x: jnp.tanh(x @ x).sum(), policy.with_retypes("f64"), x)
    assert inspection.after is inspection.before
    assert all(
        "retypes" in str(d.reason)
        for d in inspection.plan.walk()
        if d.kind is pp.types.OpKind.COMPUTE
    )


@each_policy
def test_tokens_and_ordered_effects_stay(policy):
    seen = []

    def f(x):
        y = x @ x
        jax.debug.callback(lambda v: seen.append(v), y, ordered=True)
        jax.debug.callback(lambda v: seen.append(v), jnp.int32(70_001), ordered=True)
        return y

    x = jnp.asarray(normal(0, 8, 8))
    run(f, policy, x)
    jax.effects_barrier()
    assert [v.dtype for v in seen] == [np.float32, np.int32]
    assert int(seen[1]) == 70_001
    inspection = look(f, policy, x)
    assert low_products(inspection.after)
    assert inspection.after.effects == inspection.before.effects


@each_policy
def test_refs_stay(policy):
    """A mutable array that holds a running count, beside a product that is lowered."""

    def f(x):
        counter = jax.new_ref(jnp.zeros((), jnp.float32))

        def body(i, y):
            counter[...] += 1.0
            return y @ x

        y = lax.fori_loop(0, 1000, body, jnp.eye(4))
        return y, counter[...]

    x = jnp.eye(4)
    inspection = look(f, policy, x)
    refs = [e for e in walk(inspection.after) if e.primitive.name in ("get", "swap", "addupdate")]
    assert refs
    assert all(e.invars[0].aval.dtype == np.float32 for e in refs)
    assert float(run(f, policy, x)[1]) == 1000.0


def test_nothing_but_integers_runs_as_written_and_says_so():
    with pytest.warns(pp.PrecisionWarning, match="no floating-point values") as caught:
        assert int(pp.auto_mixed(lambda n: n @ n)(jnp.arange(4))) == 14
    assert len(caught) == 1
