"""`auto_mixed`, `use_policy`, `keep` and the off switch, called as `jax.jit` is."""

import dataclasses
import functools
import importlib
import pickle
import re
import subprocess
import sys
import threading
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import precpass as pp
from precpass import AlwaysF32, AutoMixed, AutoMixedBf16, PrecisionWarning
from precpass.moved import MOVED
from precpass.types import Mixed
from tests.support.jaxprs import product_dtypes
from tests.support.public import NOT_STARRED, SUBMODULES
from tests.support.values import f32, identical, stable_id

X = jnp.linspace(-1, 1, 64).reshape(8, 8)


def square(x):
    """The product of a matrix with itself."""
    return x @ x


def dtypes_of(fn, *args, **kwargs):
    """The operand dtypes of the products that calling `fn` runs."""
    return product_dtypes(jax.make_jaxpr(functools.partial(fn, **kwargs))(*args))


# ---------------------------------------------------------------- auto_mixed


@pytest.mark.parametrize(
    "wrap",
    [
        lambda: pp.auto_mixed(square),
        lambda: pp.auto_mixed(square, policy="AutoMixedBf16"),
        lambda: pp.auto_mixed()(square),
        lambda: pp.auto_mixed(policy=AutoMixedBf16)(square),
        lambda: pp.auto_mixed(policy="p=f32,c=bf16,o=f32", inline=False)(square),
    ],
    ids=["function", "policy", "empty decorator", "decorator", "string and a jit option"],
)
def test_a_function_is_wrapped_in_every_spelling(wrap):
    mixed = wrap()
    assert isinstance(mixed, Mixed)
    assert dtypes_of(mixed, X) == ["bfloat16"]
    assert dtypes_of(square, X) == ["float32"]
    out = mixed(X)
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, square(X), atol=0.05)
    assert np.abs(out - square(X)).max() > 0, "the values are those of a bfloat16 product"


def test_the_decorator_works_on_a_definition():
    @pp.auto_mixed
    def plain(x):
        return x @ x

    @pp.auto_mixed(policy=AutoMixed)
    def with_arguments(x):
        return x @ x

    assert dtypes_of(plain, X) == ["bfloat16"]
    assert dtypes_of(with_arguments, X) == ["float16"]


def test_name_doc_and_the_function_itself_are_kept():
    mixed = pp.auto_mixed(square)
    assert (mixed.__name__, mixed.__doc__, mixed.__wrapped__) == ("square", square.__doc__, square)
    assert repr(mixed) == "<auto_mixed square, policy='default'>"
    assert (
        repr(pp.auto_mixed(square, policy="AutoMixed"))
        == "<auto_mixed square, policy=AutoMixed (float16)>"
    )


def test_the_default_policy_is_auto_mixed_bf16():
    assert pp.auto_mixed(square).policy is None
    assert dtypes_of(pp.auto_mixed(square), X) == ["bfloat16"]


def test_wrapping_twice_under_one_policy_is_wrapping_once():
    mixed = pp.auto_mixed(square, policy=AutoMixed)
    assert pp.auto_mixed(mixed) is mixed
    assert pp.auto_mixed(mixed, policy=AutoMixed) is mixed
    assert dtypes_of(pp.auto_mixed(mixed, policy=AlwaysF32), X) == ["float32"]


@pytest.mark.parametrize("bad", [3, "square", jnp.ones(3)], ids=["int", "str", "array"])
def test_what_cannot_be_called_is_refused(bad):
    with pytest.raises(TypeError) as caught:
        pp.auto_mixed(bad)
    assert "takes a function" in str(caught.value)
    assert repr(bad) in str(caught.value)


@pytest.mark.release(keep=2)
@pytest.mark.parametrize(
    ("args", "offenders"),
    [
        ((jnp.arange(3),), ["int32"]),
        ((jnp.arange(3), jnp.ones(3, bool)), ["bool", "int32"]),
        ((), ["no arguments"]),
    ],
    ids=["int", "int and bool", "nothing"],
)
def test_a_function_without_floats_runs_as_written_and_says_so_once(args, offenders):
    def count(*xs):
        return sum((x.sum() for x in xs), start=jnp.int32(0))

    mixed = pp.auto_mixed(count)
    with pytest.warns(pp.PrecisionWarning, match="count has no floating-point values") as caught:
        assert identical(mixed(*args), jax.jit(count)(*args))
    (text,) = (str(warning.message) for warning in caught)
    assert "it runs as written" in text
    assert all(dtype in text for dtype in offenders)
    mixed(*args)  # compiled: no word more, which would be an error here
    for policy in ("AutoMixed", "AlwaysBf16", pp.Custom({"compute": "f16"})):
        with pytest.warns(pp.PrecisionWarning, match="has nothing to decide") as caught:
            found = pp.inspect(count, policy)(*args)
        assert len(caught) == 1
        assert found.after is found.before
    assert identical(pp.auto_mixed(count, policy="AlwaysF32")(*args), jax.jit(count)(*args))


def test_keys_are_no_floating_values_either():
    with pytest.warns(pp.PrecisionWarning, match=r"its arguments are key<fry>"):
        got = pp.auto_mixed(jax.random.split)(jax.random.key(0))
    assert (
        jax.random.key_data(got) == jax.random.key_data(jax.random.split(jax.random.key(0)))
    ).all()


def test_floats_that_arise_inside_are_enough():
    def fn(n):
        x = jnp.ones((8, 8)) * n.astype(jnp.float32)
        product = x @ x
        return (product > 31.0) & (product < 33.0)

    assert dtypes_of(pp.auto_mixed(fn), jnp.int32(2)) == ["bfloat16"]
    np.testing.assert_array_equal(pp.auto_mixed(fn)(jnp.int32(2)), np.full((8, 8), True))


def test_a_policy_that_lowers_nothing_warns_once_per_trace():
    mixed = pp.auto_mixed(lambda x: jnp.tanh(x))
    with pytest.warns(PrecisionWarning, match="AutoMixedBf16 lowered nothing") as caught:
        mixed(X)
    assert len(caught) == 1
    mixed(X)  # an error here would be the second warning


# ---------------------------------------------------------------- calling is jit's


def test_arguments_keywords_defaults_and_trees_pass_through():
    @pp.auto_mixed
    def fn(params, x, *rest, scale=2.0, **extra):
        return {"y": (x @ params["w"]) * scale, "n": len(rest), "extra": extra}

    out = fn({"w": jnp.ones((8, 8))}, X, 1, 2, scale=3, k=(4.0,))
    np.testing.assert_allclose(out["y"], 3 * (X @ jnp.ones((8, 8))), atol=0.1)
    assert int(out["n"]) == 2
    assert out["extra"] == {"k": (4.0,)}


def test_python_numbers_are_traced_and_stay_weakly_typed():
    traces = []

    @pp.auto_mixed
    def fn(x, scale):
        traces.append(jax.typeof(scale))  # a tracer would outlive its trace
        return x @ x, scale * 2

    product, first = fn(X, 1.5)
    _, second = fn(X, 2.5)
    assert (float(first), float(second)) == (3.0, 5.0)
    assert first.weak_type
    assert not product.weak_type
    assert len(traces) == 1


def test_it_traces_when_jit_would_and_not_per_call():
    traces = []

    @pp.auto_mixed
    def fn(x):
        traces.append(x.shape)
        return x @ x

    for size in (4, 4, 8, 4, 8):
        fn(jnp.ones((size, size)))
    assert traces == [(4, 4), (8, 8)]


def test_donated_arguments_are_donated():
    mixed = pp.auto_mixed(lambda state, x: state + x @ x, donate_argnums=0)
    state = jnp.ones((8, 8))
    new = mixed(state, X)
    assert state.is_deleted()
    np.testing.assert_allclose(new, 1 + square(X), atol=0.05)
    donated = mixed.lower(new, X).args_info[0]
    assert [info.donated for info in donated] == [True, False]


@pytest.mark.parametrize(
    ("option", "call"),
    [
        ({"static_argnums": 1}, lambda f, n: f(X, n)),
        ({"static_argnums": (1,)}, lambda f, n: f(X, n)),
        ({"static_argnames": "depth"}, lambda f, n: f(X, depth=n)),
        ({"static_argnames": ("depth",)}, lambda f, n: f(X, n)),
    ],
    ids=stable_id,
)
def test_static_arguments_are_static(option, call):
    traces = []

    def fn(x, depth):
        traces.append(depth)
        for _ in range(depth):
            x = x @ x
        return x

    mixed = pp.auto_mixed(fn, **option)
    for depth in (1, 2, 2, 1):
        np.testing.assert_allclose(call(mixed, depth), fn(X, depth), atol=0.2)
    assert [t for t in traces if type(t) is int][:1] == [1]
    del traces[:]
    call(mixed, 2)
    assert traces == [], "the second call with equal static arguments traces nothing"


def test_a_static_argument_may_be_a_string_or_a_function():
    mixed = pp.auto_mixed(lambda x, act, name: {name: act(x @ x)}, static_argnums=(1, 2))
    out = mixed(X, jnp.tanh, "h")
    np.testing.assert_allclose(out["h"], jnp.tanh(square(X)), atol=0.05)


def test_lower_compiles_what_a_call_runs():
    lowered = pp.auto_mixed(square).lower(f32(8, 8))
    assert "bf16" in lowered.as_text()
    np.testing.assert_array_equal(lowered.compile()(X), pp.auto_mixed(square)(X))


def test_trace_gives_the_rewritten_jaxpr():
    assert product_dtypes(pp.auto_mixed(square).trace(f32(8, 8)).jaxpr) == ["bfloat16"]


def test_eval_shape_gives_the_original_shapes_and_dtypes():
    shape = pp.auto_mixed(square).eval_shape(f32(8, 8))
    assert (shape.shape, shape.dtype) == ((8, 8), jnp.float32)


def test_clear_cache_makes_the_next_call_trace_again():
    traces = []
    mixed = pp.auto_mixed(lambda x: traces.append(1) or x @ x)
    mixed(X)
    mixed(X)
    assert len(traces) == 1
    mixed.clear_cache()
    mixed(X)
    assert len(traces) == 2


def test_it_binds_as_a_method():
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Model:
        w: jax.Array

        @pp.auto_mixed
        def __call__(self, x):
            return x @ self.w

        @pp.auto_mixed(static_argnums=2)
        def power(self, x, n):
            for _ in range(n):
                x = x @ self.w
            return x

    model = Model(X)
    np.testing.assert_allclose(model(X), square(X), atol=0.05)
    np.testing.assert_allclose(model.power(X, 2), X @ X @ X, atol=0.1)
    assert dtypes_of(lambda m, x: m.power(x, 3), model, X) == ["bfloat16"] * 3
    assert isinstance(Model.power, Mixed)


def test_it_nests_in_jit_grad_and_vmap():
    mixed = pp.auto_mixed(lambda x: (x @ x).sum())
    assert dtypes_of(jax.jit(mixed), X) == ["bfloat16"]
    assert set(dtypes_of(jax.grad(mixed), X)) == {"bfloat16"}
    assert dtypes_of(jax.vmap(mixed), jnp.stack([X, X])) == ["bfloat16"]
    np.testing.assert_allclose(jax.grad(mixed)(X), jax.grad(lambda x: (x @ x).sum())(X), atol=0.05)


def test_threads_call_one_function_at_once():
    mixed = pp.auto_mixed(square)
    results = {}

    def call(size):
        results[size] = mixed(jnp.ones((size, size)))

    threads = [threading.Thread(target=call, args=(size,)) for size in range(2, 10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == list(range(2, 10))
    for size, out in results.items():
        np.testing.assert_array_equal(out, np.full((size, size), size))


def test_a_star_import_shadows_no_module_of_pythons():
    names: dict[str, Any] = {}
    exec("from precpass import *", names)
    assert not names.keys() & sys.stdlib_module_names
    assert names["auto_mixed"] is pp.auto_mixed
    for left_out in NOT_STARRED:
        assert callable(getattr(pp, left_out)) and left_out in dir(pp)


@pytest.mark.parametrize(
    "policy", [jnp.bfloat16, np.dtype("float16"), pp.AutoMixedF16, pp.types.Precision.BF16, "bf16"]
)
def test_a_policy_in_the_place_of_the_function_is_said_to_be_one(policy):
    with pytest.raises(TypeError, match=r"not .*: as a decorator, auto_mixed\(policy=.*16"):
        pp.auto_mixed(policy)
    with pytest.raises(TypeError, match=r"not .*: as a decorator, auto_mixed\(policy=.*16"):
        pp.auto_mixed(policy, lambda x: x)


@pytest.mark.parametrize(
    "look",
    [
        *(
            pp.inspect,
            pp.explain,
            pp.audit,
            pp.compare,
            pp.monitor,
            pp.auto_mixed(),
        ),
        lambda fn: pp.bisect(fn, "bf16", 1e-2)(1.0),
        lambda fn: pp.numerics.calibrate(fn, "bf16", [(1.0,)]),
    ],
)
def test_none_is_no_function_to_be_looked_at(look):
    with pytest.raises(TypeError, match="takes a function, not None"):
        look(None)


@pytest.mark.parametrize("make", [pp.auto_mixed, pp.with_fallback])
def test_an_unknown_option_is_named_with_the_legal_ones(make):
    with pytest.raises(
        TypeError, match=r"no option 'donate_argnam'.*'donate_argnames'.*static_arg"
    ):
        make(lambda x: x, donate_argnam="x")


def test_the_policy_may_be_given_by_position():
    wide = pp.auto_mixed(square, "AlwaysF32")
    assert wide.policy is pp.AlwaysF32
    assert pp.auto_mixed(square, jnp.float16).policy is pp.AutoMixedF16
    assert pp.auto_mixed(wide, "bf16").policy is pp.AutoMixedBf16
    for decorator in (pp.auto_mixed(), pp.auto_mixed(None, "bf16"), pp.auto_mixed(policy="bf16")):
        assert decorator(square)(X).dtype == np.float32
    with pytest.raises(TypeError, match=r"auto_mixed takes a function, not 'bf16'.*policy='bf16'"):
        pp.auto_mixed("bf16")


# ---------------------------------------------------------------- names


def test_the_top_level_has_the_names_that_users_call_and_name_most():
    assert pp.__all__ == [
        *("AlwaysBf16", "AlwaysF16", "AlwaysF32", "AutoMixed", "AutoMixedBf16"),
        *("AutoMixedConservative", "AutoMixedConservativeF16", "AutoMixedF8", "AutoMixedF16"),
        *("AutoMixedInt8", "Custom", "Plan", "PrecisionWarning", "Rule", "__version__", "audit"),
        *("auto_mixed", "cast_floating", "compare", "explain", "in_compute_dtype", "keep"),
        *("monitor", "use_policy", "with_fallback"),
    ]
    assert dir(pp) == sorted([*pp.__all__, *SUBMODULES, *NOT_STARRED])


@pytest.mark.parametrize("module", SUBMODULES)
def test_a_submodule_is_an_attribute_and_says_what_it_is_for(module: str):
    submodule = getattr(pp, module)
    assert submodule is importlib.import_module(f"precpass.{module}")
    assert submodule.__doc__ and f"`precpass.{module}`" in (pp.__doc__ or "")
    assert set(submodule.__all__) <= set(dir(submodule))
    assert not set(submodule.__all__) & set(pp.__all__), "a name has one place"
    with pytest.raises(AttributeError, match=rf"'precpass\.{module}' has no attribute 'absent'"):
        _ = submodule.absent


@pytest.mark.parametrize("name", sorted(MOVED.keys() - {"Profile", "profile"}))
def test_an_old_name_works_and_says_where_it_is_now(name: str):
    place = f"{MOVED[name]}.{name}"
    new = getattr(importlib.import_module(MOVED[name]), name)
    assert name in sys.modules[MOVED[name]].__all__
    with pytest.warns(DeprecationWarning) as caught:
        assert getattr(pp, name) is new
    (warning,) = caught
    assert f"precpass.{name} is now {place}; the old name goes away in" in str(warning.message)
    assert warning.filename == __file__
    given: dict[str, Any] = {}
    with pytest.warns(DeprecationWarning, match=rf"is now {re.escape(place)};") as caught:
        exec(compile(f"\n\nfrom precpass import {name}", "users.py", "exec"), given)
    assert given[name] is new
    assert {(warning.filename, warning.lineno) for warning in caught} == {("users.py", 3)}
    assert name not in vars(pp), "each use warns"


def test_an_old_name_is_said_once_at_a_place():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            _ = getattr(pp, "StaticLossScale")  # noqa: B009 -- an old name
    assert len(caught) == 1


def test_what_was_pickled_under_an_old_name_is_read():
    scale = pp.loss_scale.StaticLossScale(8.0)
    assert pickle.loads(pickle.dumps(scale)) == scale
    by_old_name = b"cprecpass\nStaticLossScale\n."
    with pytest.warns(DeprecationWarning, match="StaticLossScale"):
        assert pickle.loads(by_old_name) is pp.loss_scale.StaticLossScale


def test_an_unknown_name_is_no_attribute():
    with pytest.raises(AttributeError, match="module 'precpass' has no attribute 'absent'"):
        _ = pp.absent
    with pytest.raises(ImportError, match="absent"):
        exec("from precpass import absent")


def test_what_only_other_calls_need_is_not_imported():
    code = (
        "import sys, precpass; print([m for m in sys.modules if m.startswith(('precpass.report.', "
        "'precpass.numerics.', 'precpass.testing', 'precpass.types', 'precpass.loss_scale'))])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
