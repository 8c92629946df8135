"""Design section 3, line 17: retracing happens when jit would retrace, never per call."""

import contextlib
import decimal
import fractions

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import precpass as pp
from tests.support.calls import Layer, W, X, as_jit_traces, counted


def scaled(x, n=1.0):
    return x @ x.T * n


def tree(t, n=1.0):
    return jax.tree.map(lambda x: x @ x.T * n, t)


# a function, the arguments of each call, and how often it was traced after each
CALLS = {
    "shapes": (
        scaled,
        [(jnp.ones((size, 3)),) for size in (2, 3, 2, 4, 3, 2)],
        [1, 2, 2, 3, 3, 3],
    ),
    "dtypes": (
        lambda x: x @ x,
        [(jnp.ones((3, 3), d),) for d in ("float32", "bfloat16", "float16", "float32", "bfloat16")],
        [1, 2, 3, 3, 3],
    ),
    "weak types": (
        scaled,
        [(X, jnp.float32(2)), (X, jnp.asarray(2.0)), (X, 2.0), (X, jnp.float32(3))],
        [1, 2, 2, 2],
    ),
    "numbers by type and not by value": (
        scaled,
        [(X, n) for n in (1.0, 2.0, 1, 7, True, False, 1 + 2j, 3j, 2.5)],
        [1, 1, 2, 2, 3, 3, 4, 4, 4],
    ),
    "arrays of numpy and of jax": (
        scaled,
        [
            (np.asarray(X), np.float32(2)),
            (X, jnp.float32(2)),
            (np.asarray(X, np.float64), np.float32(2)),  # float32 with x64 off
            (jnp.asarray(X), np.asarray(2, np.float32)),
        ],
        [1, 1, 1, 1],
    ),
    "tree structures": (
        tree,
        [
            ({"a": X, "b": W},),
            ({"b": W, "a": X},),
            ((X, W),),
            ([X, W],),
            ({"a": X, "b": None},),
            ({"a": X, "b": W},),
        ],
        [1, 1, 2, 3, 4, 4],
    ),
    "static fields of a pytree": (
        lambda layer, x: layer(x),
        [(Layer(W, power), X) for power in (1, 2, 1, 3, 2)],
        [1, 2, 2, 3, 3],
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_it_traces_when_jit_does(name):
    fn, calls, wanted = CALLS[name]
    with jax.numpy_dtype_promotion("standard"):
        assert as_jit_traces(fn, lambda f: (f(*args) for args in calls)) == wanted


@pytest.mark.release(keep=2)
@pytest.mark.parametrize(
    "options",
    [{"static_argnums": 1}, {"static_argnums": -1}, {"static_argnames": "n"}],
    ids=["argnums", "negative", "argnames"],
)
def test_declared_static_arguments(options):
    def repeated(x, n):
        for _ in range(n):
            x = x @ x
        return x

    def calls(f):
        for n in (1, 2, 2, 1, 3):
            yield f(X, n)
        if "static_argnums" not in options or options["static_argnums"] > 0:
            yield f(X, n=3)

    as_jit_traces(repeated, calls, **options)


def test_keywords_and_positions_are_jits():
    def calls(f):
        yield f(X)
        yield f(X, 2.0)
        yield f(X, n=2.0)
        yield f(x=X, n=2.0)
        yield f(n=3.0, x=X)
        yield f(X, 5.0)

    as_jit_traces(scaled, calls)


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_shardings_of_the_arguments(kind):
    devices = jax.devices()
    axis_types = (jax.sharding.AxisType[kind],)
    mesh = jax.make_mesh((2,), ("d",), axis_types, devices=devices[:2])
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))

    def calls(f):
        yield f(X)
        yield f(jax.device_put(X, split))
        yield f(jax.device_put(X, devices[1]))
        yield f(X)
        yield f(jax.device_put(W, split))

    assert as_jit_traces(lambda x: x @ jnp.ones((8, 4)), calls)[-1] < 4


CONTEXTS = {
    "x64": lambda: jax.enable_x64(True),
    "matmul precision": lambda: jax.default_matmul_precision("highest"),
    "dtype promotion": lambda: jax.numpy_dtype_promotion("standard"),
    "rank promotion": lambda: jax.numpy_rank_promotion("allow"),
    "default device": lambda: jax.default_device(jax.devices()[1]),
    "named scope": lambda: jax.named_scope("outer"),
    "debug nans": lambda: jax.debug_nans(True),
}


@pytest.mark.release(keep=2)
@pytest.mark.parametrize("name", CONTEXTS)
@pytest.mark.filterwarnings("ignore::precpass.PrecisionWarning")
def test_contexts_of_jax(name):
    def calls(f):
        yield f(X)
        with CONTEXTS[name]():
            yield f(X)
            yield f(X)
        yield f(X)
        with CONTEXTS[name]():
            yield f(X)

    as_jit_traces(lambda x: x @ x, calls)


def test_each_policy_is_rewritten_once():
    counting, runs = counted(lambda x: x @ x)
    mixed = pp.auto_mixed(counting)
    regions = [
        contextlib.nullcontext,
        lambda: pp.use_policy("AutoMixed"),
        lambda: pp.use_policy(None),
        lambda: pp.keep("f16"),
    ]
    for _ in range(2):
        for region in regions:
            with region():
                mixed(X)
                mixed(X)
    assert len(runs) <= len(regions)


def test_equal_policies_share_one_program():
    counting, runs = counted(lambda x: x @ x)
    mixed = pp.auto_mixed(counting)
    for _ in range(3):
        with pp.use_policy(pp.Custom({"compute": "bf16"})):
            mixed(X)
    assert len(runs) == 1


# ---------------------------------------------------------------- beyond jit


STATIC = {
    "by value": (lambda x, m: x @ x if m == "twice" else x @ x.T, ["twice", "once", "tw" + "ice"]),
    "by type too": (lambda x, n: x @ x, [fractions.Fraction(1), decimal.Decimal(1)]),
    "functions by identity": (lambda x, act: act(x @ x), [jnp.tanh, jax.nn.relu]),
}


@pytest.mark.parametrize("name", STATIC)
def test_static_leaves(name):
    fn, leaves = STATIC[name]
    counting, runs = counted(fn)
    mixed = pp.auto_mixed(lambda x, leaf: (counting(x, leaf), type(leaf).__name__))
    for leaf in leaves * 2:
        assert mixed(X, leaf)[1] == type(leaf).__name__
    assert len(runs) == 2


def test_arrays_beside_static_leaves_as_under_jit():
    counting, runs = counted(lambda t: t["x"] @ t["x"])
    mixed = pp.auto_mixed(counting)
    for size in (2, 3, 2):
        mixed({"x": jnp.ones((size, size)), "name": "a"})
    mixed({"x": np.ones((2, 2), np.float32), "name": "a"})
    assert len(runs) == 2


def test_inspecting_and_calling_share_the_trace():
    counting, runs = counted(lambda x: x @ x)
    mixed = pp.auto_mixed(counting)
    pp.inspect(mixed)(X)
    mixed(X)
    pp.inspect(mixed)(X)
    mixed.lower(X)
    assert len(runs) == 1  # and a result that is no array costs none: test_17_static_leaves


@pytest.mark.parametrize("clear", [lambda f: f.clear_cache(), lambda f: jax.clear_caches()])
def test_clearing_the_caches_traces_again_once(clear):
    def calls(f):
        yield f(X)
        clear(f)
        yield f(X)
        yield f(X)

    assert as_jit_traces(scaled, calls) == [1, 2, 2]


def test_a_jitted_function_that_is_called_on_both_sides():
    counting, runs = counted(lambda x: x @ x)
    helper = jax.jit(counting)
    mixed = pp.auto_mixed(lambda x: helper(x) @ helper(x + 1))
    for _ in range(3):
        helper(X)
        mixed(X)
    # its trace inside is one of its own: an auto_mixed function in it would do otherwise there
    assert len(runs) == 2
