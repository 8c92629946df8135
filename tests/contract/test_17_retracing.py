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


def test_shapes():
    def calls(f):
        for size in (2, 3, 2, 4, 3, 2):
            yield f(jnp.ones((size, 3)))

    assert as_jit_traces(scaled, calls) == [1, 2, 2, 3, 3, 3]


def test_dtypes():
    def calls(f):
        for dtype in ("float32", "bfloat16", "float16", "float32", "bfloat16"):
            yield f(jnp.ones((3, 3), dtype))

    with jax.numpy_dtype_promotion("standard"):
        assert as_jit_traces(lambda x: x @ x, calls) == [1, 2, 3, 3, 3]


def test_weak_types():
    def calls(f):
        yield f(X, jnp.float32(2))
        yield f(X, jnp.asarray(2.0))  # weakly typed
        yield f(X, 2.0)
        yield f(X, jnp.float32(3))

    assert as_jit_traces(scaled, calls) == [1, 2, 2, 2]


def test_python_numbers_by_type_and_not_by_value():
    def calls(f):
        for n in (1.0, 2.0, 1, 7, True, False, 1 + 2j, 3j, 2.5):
            yield f(X, n)

    with jax.numpy_dtype_promotion("standard"):
        assert as_jit_traces(scaled, calls)[-1] == 4


def test_arrays_of_numpy_and_of_jax_share_a_trace():
    def calls(f):
        yield f(np.asarray(X), np.float32(2))
        yield f(X, jnp.float32(2))
        yield f(np.asarray(X, np.float64), np.float32(2))  # float32 with x64 off
        yield f(jnp.asarray(X), np.asarray(2, np.float32))

    assert as_jit_traces(scaled, calls) == [1, 1, 1, 1]


def test_tree_structures():
    def calls(f):
        yield f({"a": X, "b": W})
        yield f({"b": W, "a": X})
        yield f((X, W))
        yield f([X, W])
        yield f({"a": X, "b": None})
        yield f({"a": X, "b": W})

    assert as_jit_traces(tree, calls) == [1, 1, 2, 3, 4, 4]


def test_static_fields_of_a_pytree():
    def calls(f):
        for power in (1, 2, 1, 3, 2):
            yield f(Layer(W, power), X)

    assert as_jit_traces(lambda layer, x: layer(x), calls) == [1, 2, 2, 3, 3]


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


def test_static_leaves_by_value():
    counting, runs = counted(lambda x, mode: x @ x if mode == "twice" else x @ x.T)
    mixed = pp.auto_mixed(counting)
    for mode in ("twice", "once", "tw" + "ice", "once", "twice"):
        mixed(X, mode)
    assert len(runs) == 2


def test_static_leaves_by_type_too():
    counting, runs = counted(lambda x, n: (x @ x, type(n).__name__))
    mixed = pp.auto_mixed(counting)
    assert mixed(X, fractions.Fraction(1))[1] == "Fraction"
    assert mixed(X, decimal.Decimal(1))[1] == "Decimal"
    assert mixed(X, fractions.Fraction(1))[1] == "Fraction"
    assert len(runs) == 2


def test_functions_by_identity():
    counting, runs = counted(lambda x, act: act(x @ x))
    mixed = pp.auto_mixed(counting)
    for act in (jnp.tanh, jax.nn.relu, jnp.tanh):
        mixed(X, act)
    assert len(runs) == 2


def test_arrays_beside_static_leaves_as_under_jit():
    counting, runs = counted(lambda t: t["x"] @ t["x"])
    mixed = pp.auto_mixed(counting)
    for size in (2, 3, 2):
        mixed({"x": jnp.ones((size, size)), "name": "a"})
    mixed({"x": np.ones((2, 2), np.float32), "name": "a"})
    assert len(runs) == 2


def test_a_result_that_is_no_array_costs_no_trace():
    counting, runs = counted(lambda x: (x @ x, "label"))
    mixed = pp.auto_mixed(counting)
    assert [mixed(X)[1] for _ in range(3)] == ["label"] * 3
    mixed.lower(X)
    assert len(runs) == 1


def test_inspecting_and_calling_share_the_trace():
    counting, runs = counted(lambda x: x @ x)
    mixed = pp.auto_mixed(counting)
    pp.inspect(mixed)(X)
    mixed(X)
    pp.inspect(mixed)(X)
    mixed.lower(X)
    assert len(runs) == 1


def test_clear_cache_traces_again_once():
    def calls(f):
        yield f(X)
        f.clear_cache()
        yield f(X)
        yield f(X)

    assert as_jit_traces(scaled, calls) == [1, 2, 2]


def test_clearing_the_caches_of_jax_traces_again_once():
    def calls(f):
        yield f(X)
        jax.clear_caches()
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
