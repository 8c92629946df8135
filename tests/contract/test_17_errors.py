"""Design section 3, line 17: an error of the user's function is the one that jit gives."""

import sys
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import precpass as pp
from tests.support.calls import W, X
from tests.support.passes import checking_leaks

PACKAGE = pp.__path__[0]


def branches(x, n=1):
    if x.sum() > 0:
        return x @ x
    return x


def indexes(x, n=1):
    return [1, 2, 3][n] * x @ x


def converts(x, n=1):
    return x @ x * float(n)


def to_numpy(x, n=1):
    return np.asarray(x) @ np.asarray(x)


def raises(x, n=1):
    raise KeyError("the user's own")


def shapes(x, n=1):
    return x @ x[:3]


def item(x, n=1):
    return x @ x * x[0, 0].item()


def body_differs(x, n=1):
    return jax.lax.scan(lambda c, _: (c.sum(), None), x @ x, None, length=2)


def deep(x, n=1):
    return jax.jit(lambda x: jax.lax.cond(x[0, 0] > 0, branches, lambda x: x, x))(x)


FUNCTIONS = [branches, indexes, converts, to_numpy, raises, shapes, item, body_differs, deep]


def caught(fn, *args):
    with pytest.raises(Exception) as info:
        fn(*args)
    return info.value


@pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda f: f.__name__)
def test_type_text_and_traceback_are_those_under_jit(fn):
    got, wanted = caught(pp.auto_mixed(fn), X, 1), caught(jax.jit(fn), X, 1)
    assert type(got) is type(wanted)
    assert str(got) == str(wanted)

    def own(error):
        return [(f.name, f.lineno) for f in traceback.extract_tb(error.__traceback__)[1:]]

    def user(error):
        frames = traceback.extract_tb(error.__traceback__)
        return [(f.name, f.lineno) for f in frames if f.filename == __file__]

    assert user(got) == user(wanted)
    assert not [f for f in traceback.extract_tb(got.__traceback__)[2:] if PACKAGE in f.filename]
    assert len(own(got)) <= len(own(wanted)) + 1


@pytest.mark.parametrize("method", ["lower", "trace", "eval_shape"])
def test_ahead_of_time_too(method):
    got = caught(getattr(pp.auto_mixed(branches), method), X)
    wanted = caught(getattr(jax.jit(branches), method), X)
    assert (type(got), str(got)) == (type(wanted), str(wanted))
    assert traceback.extract_tb(got.__traceback__)[-1].name == "branches"


def test_inspect_too():
    got = caught(pp.inspect(branches), X)
    assert (type(got), str(got)) == (
        jax.errors.TracerBoolConversionError,
        str(caught(jax.jit(branches), X)),
    )


def test_beside_a_static_leaf_too():
    def fn(x, mode):
        return x @ x if x.sum() > 0 else x

    error = caught(pp.auto_mixed(fn), X, "m")
    assert type(error) is jax.errors.TracerBoolConversionError
    assert "the value of the argument x" in str(error)
    assert traceback.extract_tb(error.__traceback__)[-1].name == "fn"
    assert error.__context__ is None or "abstract array" not in str(error.__context__)


def test_with_jaxs_filter_off_every_frame_is_there():
    before = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", "off")
    try:
        error = caught(pp.auto_mixed(branches), X)
    finally:
        jax.config.update("jax_traceback_filtering", before)
    frames = traceback.extract_tb(error.__traceback__)
    assert sum(PACKAGE in f.filename for f in frames) > 3
    assert frames[-1].name != "<module>"


def test_an_unhashable_static_argument_is_jits_error():
    def fn(x, n):
        return x @ x

    got = caught(pp.auto_mixed(fn, static_argnums=1), X, [1])
    wanted = caught(jax.jit(fn, static_argnums=1), X, [1])
    assert (type(got), str(got)) == (type(wanted), str(wanted))


# ---------------------------------------------------------------- leaks


@pytest.mark.usefixtures("jax_leaks_too")
def test_a_leaked_tracer_is_named_as_under_jit():
    kept = []

    def leak(x):
        kept.append(x @ x)
        return kept[-1] * 2

    texts = []
    for wrap in (jax.jit, pp.auto_mixed):
        del kept[:]
        wrap(leak)(X)
        error = caught(lambda: kept[0] + 1)
        assert type(error) is jax.errors.UnexpectedTracerError
        texts.append(str(error))
    assert "traced for jit" in texts[1]
    assert "leak at " in texts[1]
    assert texts[1].splitlines()[0].split(" wit")[0] == texts[0].splitlines()[0].split(" wit")[0]
    line = f"{__file__}:{leak.__code__.co_firstlineno + 1}"
    assert line in texts[0]
    assert line in texts[1], "the line that made the value"


@pytest.mark.parametrize("outside", [True, False])
def test_nothing_of_the_pass_leaks(outside):
    def loss(w, x):
        h, _ = jax.lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x, None, length=2)
        return jax.checkpoint(lambda h: (jax.nn.relu(h) @ w).sum())(h)

    with checking_leaks():
        if outside:
            jax.grad(pp.auto_mixed(loss))(W, X)
        else:
            pp.auto_mixed(jax.grad(loss))(W, X)


def test_a_leak_is_found_where_it_is():
    kept = []

    def leak(x):
        kept.append(x)
        return x @ x

    with (
        checking_leaks(),
        pytest.raises(Exception, match="Leaked") as info,
    ):
        pp.auto_mixed(leak)(X)
    assert "leak" in str(info.value)


# ---------------------------------------------------------------- NaNs


def divides(x):
    y = x @ x
    return jnp.log(y - y - 1.0)


@pytest.mark.parametrize("wrap", [pp.auto_mixed, lambda f: jax.jit(pp.auto_mixed(f))])
def test_debug_nans_names_the_line(wrap):
    with (
        jax.debug_nans(True),
        pytest.raises(FloatingPointError, match="nan") as info,
    ):
        wrap(divides)(X)
    text = "".join(traceback.format_exception(info.value))
    assert "in divides" in text
    assert "return jnp.log(y - y - 1.0)" in text


def remains(x):
    y = jnp.tanh(x @ x) @ x
    return jnp.mod(y, 0.0)


def test_debug_nans_names_the_line_of_a_jit_inside():
    with (
        jax.debug_nans(True),
        pytest.raises(
            FloatingPointError, match=r"invalid value \(nan\) encountered in rem"
        ) as info,
    ):
        pp.auto_mixed(remains)(X)
    assert "return jnp.mod(y, 0.0)" in "".join(traceback.format_exception(info.value))


TRANSFORMS = {
    "grad": lambda f: jax.grad(lambda x: f(x).sum())(X),
    "vmap": lambda f: jax.vmap(f)(X[None]),
    "jvp": lambda f: jax.jvp(f, (X,), (X,)),
    "vmap of grad": lambda f: jax.vmap(jax.grad(lambda x: f(x).sum()))(X[None]),
    "jit of value_and_grad": lambda f: jax.jit(jax.value_and_grad(lambda x: f(x).sum()))(X),
}


@pytest.mark.release(keep=2)
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize(
    ("setting", "fn", "text"),
    [
        (jax.debug_nans, divides, r"invalid value \(nan\) encountered in log"),
        (jax.debug_nans, remains, r"invalid value \(nan\) encountered in rem"),
        (jax.debug_infs, lambda x: 1.0 / (x @ x - x @ x), r"invalid value \(inf\) encountered in"),
    ],
    ids=["nan", "nan in a jit", "inf"],
)
def test_debug_nans_names_the_operation_under_transforms(transform, setting, fn, text):
    for f in (jax.jit(fn), pp.auto_mixed(fn)):
        with setting(True), pytest.raises(FloatingPointError, match=text):
            TRANSFORMS[transform](f)


def test_debug_nans_lets_finite_programs_run():
    def loss(x):
        return jax.nn.softmax(jax.nn.relu(x @ x)).sum()

    with jax.debug_nans(True), jax.debug_infs(True):
        y = pp.auto_mixed(jax.grad(loss))(X)
        z = jax.vmap(jax.grad(pp.auto_mixed(loss)))(X[None])
    assert np.isfinite(y).all() and np.isfinite(z).all()


# ---------------------------------------------------------------- warnings


def test_a_warning_points_at_the_call():
    def nothing(x):
        return jnp.tanh(x)

    with pytest.warns(pp.PrecisionWarning, match="lowered nothing") as found:
        line = sys._getframe().f_lineno + 1
        pp.auto_mixed(nothing)(X)
    assert (found[0].filename, found[0].lineno) == (__file__, line)
