"""`auto_mixed`, `use_policy`, `keep` and the off switch, called as `jax.jit` is."""

import functools
import importlib
import pickle
import re
import subprocess
import sys
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import precpass as pp
from precpass import AlwaysF32, AutoMixed, AutoMixedBf16, PrecisionWarning
from precpass.types import Mixed
from tests.support.jaxprs import product_dtypes
from tests.support.public import NOT_STARRED, SUBMODULES
from tests.support.values import identical

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


# ---------------------------------------------------------------- names


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
    assert not set(submodule.__all__) & set(pp.__all__), "a name has one place"


@pytest.mark.parametrize(
    "place",
    [
        *("loss_scale.DynamicLossScale", "numerics.Ladder", "quant.quantized", "report.between"),
        "types.OpKind",
    ],
)
def test_an_old_name_works_and_says_where_it_is_now(place: str):
    module, name = place.split(".")
    new, place = getattr(getattr(pp, module), name), f"precpass.{place}"
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


@pytest.mark.parametrize("module", [pp, pp.quant])
def test_a_name_that_has_left_says_what_to_write(module: Any):
    with pytest.raises(AttributeError, match=r"no longer .* Use auto_mixed\(f, 'AutoMixedF8'\)"):
        _ = module.delayed_scaling


IMPORTED_IN_A_TRACE = """
import sys, precpass as pp
assert "jax" not in sys.modules
import jax, jax.numpy as jnp

@jax.jit
def f(x):
    with pp.keep("f32"), pp.use_policy("bf16"):
        return pp.auto_mixed(jnp.matmul)(x, x)

x = jnp.ones((4, 4))
f(x), f(x), f(x)
assert f._cache_size() == 2  # under the keys before and after the import
assert "bf16" in str(jax.make_jaxpr(pp.auto_mixed(jnp.matmul))(x, x))
lazy = ("report.", "numerics.", "testing", "types", "loss_scale")
print([m for m in sys.modules if m.startswith(tuple(f"precpass.{name}" for name in lazy))])
"""


def test_the_package_is_imported_where_it_is_used_even_inside_a_trace():
    code = [sys.executable, "-c", IMPORTED_IN_A_TRACE]
    run = subprocess.run(code, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
