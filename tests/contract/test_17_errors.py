"""Design section 3, line 17: an error of the user's function is the one that jit gives."""

import sys
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import precpass as pp
from tests.support.calls import W, X
from tests.support.passes import checking_leaks, config

PACKAGE = pp.__path__[0]


def branches(x, n=1):
    if x.sum() > 0:
        return x @ x
    return x


FUNCTIONS = {
    "branches": branches,
    "to numpy": lambda x, n=1: np.asarray(x) @ np.asarray(x),
    "raises": lambda x, n=1: {}["the user's own"],
    "shapes": lambda x, n=1: x @ x[:3],
    "body differs": lambda x, n=1: jax.lax.scan(lambda c, _: (c.sum(), None), x, None, length=2),
    "deep": lambda x, n=1: jax.jit(lambda x: jax.lax.cond(x[0, 0] > 0, branches, lambda x: x, x))(
        x
    ),
}


def caught(fn, *args):
    with pytest.raises(Exception) as info:
        fn(*args)
    return info.value


def frames(error):
    return traceback.extract_tb(error.__traceback__)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_type_text_and_traceback_are_those_under_jit(name):
    fn = FUNCTIONS[name]
    got, wanted = caught(pp.auto_mixed(fn), X, 1), caught(jax.jit(fn), X, 1)
    assert (type(got), str(got)) == (type(wanted), str(wanted))
    mine, jits = ([f for f in frames(e) if f.filename == __file__] for e in (got, wanted))
    assert [(f.name, f.lineno) for f in mine] == [(f.name, f.lineno) for f in jits]
    assert not [f for f in frames(got)[2:] if PACKAGE in f.filename]
    assert len(frames(got)) <= len(frames(wanted)) + 1


@pytest.mark.parametrize("method", ["lower", "trace", "eval_shape", "inspect"])
def test_ahead_of_time_too(method):
    wanted = caught(getattr(jax.jit(branches), method, jax.jit(branches)), X)
    mixed = pp.auto_mixed(branches)
    got = caught(pp.inspect(mixed) if method == "inspect" else getattr(mixed, method), X)
    assert (type(got), str(got)) == (type(wanted), str(wanted))
    assert frames(got)[-1].name == "branches"


def test_beside_a_static_leaf_too():
    error = caught(pp.auto_mixed(lambda x, mode: x @ x if x.sum() > 0 else x), X, "m")
    assert "the value of the argument x" in str(error) and frames(error)[-1].name == "<lambda>"
    assert error.__context__ is None or "abstract array" not in str(error.__context__)


def test_with_jaxs_filter_off_every_frame_is_there():
    with config("jax_traceback_filtering", "off"):
        error = caught(pp.auto_mixed(branches), X)
    assert sum(PACKAGE in f.filename for f in frames(error)) > 3
    assert frames(error)[-1].name != "<module>"


def test_an_unhashable_static_argument_is_jits_error():
    def said(wrap):
        error = caught(wrap(lambda x, n: x @ x, static_argnums=1), X, [1])
        return type(error), str(error)

    assert said(pp.auto_mixed) == said(jax.jit)


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
        # the line that made the value
        assert f"{__file__}:{leak.__code__.co_firstlineno + 1}" in texts[-1]
    assert "traced for jit" in texts[1] and "leak at " in texts[1]
    assert texts[1].splitlines()[0].split(" wit")[0] == texts[0].splitlines()[0].split(" wit")[0]


@pytest.mark.parametrize("outside", [True, False])
def test_nothing_of_the_pass_leaks(outside):
    def loss(w, x):
        h, _ = jax.lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x, None, length=2)
        return jax.checkpoint(lambda h: (jax.nn.relu(h) @ w).sum())(h)

    with checking_leaks():
        (jax.grad(pp.auto_mixed(loss)) if outside else pp.auto_mixed(jax.grad(loss)))(W, X)


# ---------------------------------------------------------------- NaNs


def divides(x):
    y = x @ x
    return jnp.log(y - y - 1.0)


def remains(x):
    y = jnp.tanh(x @ x) @ x
    return jnp.mod(y, 0.0)


TRANSFORMS = {
    "alone": lambda f: f(X),
    "jit": lambda f: jax.jit(lambda x: f(x))(X),
    "vmap of grad": lambda f: jax.vmap(jax.grad(lambda x: f(x).sum()))(X[None]),
    "jit of value_and_grad": lambda f: jax.jit(jax.value_and_grad(lambda x: f(x).sum()))(X),
}
FOUND = {
    "nan": (jax.debug_nans, divides, r"invalid value \(nan\) encountered in log"),
    "nan in a jit": (jax.debug_nans, remains, r"invalid value \(nan\) encountered in rem"),
    "inf": (jax.debug_infs, lambda x: 1.0 / (x @ x - x @ x), r"invalid value \(inf\) encountered"),
}
LINES = {"nan": "return jnp.log(y - y", "nan in a jit": "return jnp.mod(y, 0.0)"}


@pytest.mark.release(keep=2)
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("kind", FOUND)
def test_debug_nans_names_the_operation(transform, kind):
    setting, fn, text = FOUND[kind]
    for f in (jax.jit(fn), pp.auto_mixed(fn)):
        with setting(True), pytest.raises(FloatingPointError, match=text) as info:
            TRANSFORMS[transform](f)
    if transform in ("alone", "jit"):
        assert LINES.get(kind, "") in "".join(traceback.format_exception(info.value))


def test_debug_nans_lets_finite_programs_run():
    def loss(x):
        return jax.nn.softmax(jax.nn.relu(x @ x)).sum()

    with jax.debug_nans(True), jax.debug_infs(True):
        y = pp.auto_mixed(jax.grad(loss))(X)
        z = jax.vmap(jax.grad(pp.auto_mixed(loss)))(X[None])
    assert np.isfinite(y).all() and np.isfinite(z).all()


# ---------------------------------------------------------------- warnings


def test_a_warning_points_at_the_call():
    with pytest.warns(pp.PrecisionWarning, match="lowered nothing") as found:
        line = sys._getframe().f_lineno + 1
        pp.auto_mixed(lambda x: jnp.tanh(x))(X)
    assert (found[0].filename, found[0].lineno) == (__file__, line)
