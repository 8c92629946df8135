"""Design section 3, line 17: what can be wrapped, and how it binds."""

import ast
import copy
import dataclasses
import functools
import inspect
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import precpass as pp
from precpass.testing import assert_precision
from tests.support.calls import W, X
from tests.support.jaxprs import product_dtypes
from tests.support.passes import quiet
from tests.support.values import rel_error
from tests.test_structure import FILES, parse


@pp.auto_mixed
def decorated(x, w):
    """Its text."""
    return x @ w


def plain(x, w):
    return x @ w


class Times:
    lower = "an attribute that a Mixed has too"

    def __init__(self):
        self.policy = "not a policy"

    def __call__(self, x, w):
        return x @ w


def doubled(fn):
    @functools.wraps(fn)
    def wrapper(*args, **kwargs):
        return 2 * fn(*args, **kwargs)

    return wrapper


CALLABLES = {
    "function": (plain, 1),
    "partial": (functools.partial(plain, w=W), 1),
    "partial by position": (functools.partial(lambda n, x, w: n * (x @ w), 2.0), 2),
    "object": (Times(), 1),
    "decorated": (doubled(plain), 2),
    "jit": (jax.jit(plain), 1),
    "checkpoint": (jax.checkpoint(plain), 1),
    "custom_vjp": (jax.custom_vjp(plain), 1),
    "vmap": (jax.vmap(lambda row, w: row @ w, (0, None)), 1),
    "jnp function": (jnp.matmul, 1),
}
CALLABLES["custom_vjp"][0].defvjp(
    lambda x, w: (x @ w, (x, w)), lambda res, g: (g @ res[1].T, res[0].T @ g)
)


def arguments_of(fn):
    return (X,) if isinstance(fn, functools.partial) and "w" in fn.keywords else (X, W)


@pytest.mark.release(keep=2)
@pytest.mark.parametrize("name", CALLABLES)
def test_every_callable(name):
    fn, factor = CALLABLES[name]
    args = (X,) if isinstance(fn, functools.partial) and "w" in fn.keywords else (X, W)
    mixed = pp.auto_mixed(fn)
    out = mixed(*args)
    assert out.dtype == jnp.float32
    assert rel_error(out, factor * (X @ W)) < 2e-2
    assert set(product_dtypes(mixed.trace(*args).jaxpr)) == {"bfloat16"}
    grad = jax.grad(lambda x: mixed(x, *args[1:]).sum())(X)
    assert rel_error(grad, factor * jax.grad(lambda x: (x @ W).sum())(X)) < 2e-2
    assert callable(pp.inspect(mixed)(*args).diff)
    texts = [wrap(fn).lower(*args).as_text() for wrap in (pp.auto_mixed, jax.jit)]
    assert len({text.split("attributes")[0] for text in texts}) == 1, "the names are jit's"


def test_what_a_function_says_of_itself():
    assert (decorated.__name__, decorated.__doc__) == ("decorated", "Its text.")
    for follows in (True, False):
        assert inspect.signature(decorated, follow_wrapped=follows) == inspect.signature(plain)
    partial = functools.partial(plain, w=2)
    assert inspect.signature(pp.auto_mixed(partial)) == inspect.signature(partial)
    assert "Times" in repr(pp.auto_mixed(Times()))


def test_every_kind_of_parameter():
    @pp.auto_mixed
    def fn(a, /, b, c=2.0, *rest, d, e=1.0, **more):
        return (a @ b) * c * d * e, len(rest), sorted(more), [x.sum() for x in rest]

    out, n, names, sums = fn(X, W, 3.0, X, W, d=2.0, k=1)
    assert rel_error(out, (X @ W) * 6) < 2e-2
    assert (int(n), names) == (2, ["k"])
    assert rel_error(sums, [X.sum(), W.sum()]) < 1e-5
    assert rel_error(fn(X, b=W, d=1.0)[0], (X @ W) * 2) < 2e-2
    for args, kwargs in (((), {"a": X, "b": W, "d": 1}), ((X,), {"d": 1}), ((X, W), {})):
        texts = set[str]()
        for called in (jax.jit(fn.__wrapped__), fn):
            with pytest.raises(TypeError) as refused:
                called(*args, **kwargs)
            texts.add(str(refused.value))
        assert len(texts) == 1


def test_no_arguments_and_empty_arrays():
    assert rel_error(pp.auto_mixed(lambda: X @ W)(), X @ W) < 2e-2
    mixed = pp.auto_mixed(lambda x: (x @ x.T, x.sum()))
    for shape in ((0, 3), (3, 0), (0, 0)):
        out, total = mixed(jnp.ones(shape))
        assert out.shape == (shape[0], shape[0])
        assert float(total) == 0
    assert pp.auto_mixed(lambda x: (x @ x, ()))(X)[1] == ()


@pytest.mark.release(keep=3)
@pytest.mark.parametrize(
    "x",
    [np.ones((3, 3)), np.ones((3, 3), np.float32), np.float32(2), 2.0, jnp.float32(2)],
    ids=["float64 array", "float32 array", "numpy scalar", "number", "jax scalar"],
)
def test_inputs_of_numpy_and_python(x):
    def fn(x):
        return jnp.dot(jnp.ones((2, 3)) * jnp.sum(x), jnp.ones((3, 2)))

    got, want = pp.auto_mixed(fn)(x), jax.jit(fn)(x)
    assert (got.dtype, got.shape, got.weak_type) == (want.dtype, want.shape, want.weak_type)
    assert rel_error(got, want) < 2e-2


# ---------------------------------------------------------------- classes


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Model:
    w: jax.Array

    @pp.auto_mixed
    def method(self, x):
        return x @ self.w

    @classmethod
    @pp.auto_mixed(static_argnums=0)
    def of_class(cls, x, w):
        return cls(x @ w)

    @staticmethod
    @pp.auto_mixed
    def static(x, w):
        return x @ w

    @property
    @pp.auto_mixed
    def gram(self):
        return self.w @ self.w.T

    @functools.cached_property
    @pp.auto_mixed
    def cached(self):
        return self.w.T @ self.w


class Derived(Model):
    @pp.auto_mixed
    def method(self, x):
        return Model.method(self, x) @ self.w


jax.tree_util.register_dataclass(Derived, data_fields=["w"], meta_fields=[])


def test_methods_of_every_kind():
    model = Model(W)
    made = Model.of_class(X, W)
    assert isinstance(made, Model) and model.cached is model.cached
    for got, want in [
        (model.method(X), X @ W),
        (Model.method(model, X), X @ W),
        (made.w, X @ W),
        (model.static(X, W), X @ W),
        (Model.static(X, W), X @ W),
        (model.gram, W @ W.T),
        (model.cached, W.T @ W),
        (Derived(W).method(X), X @ W @ W),
        (jax.vmap(model.method)(X), X @ W),
    ]:
        assert rel_error(got, want) < 3e-2
    # a bound method can be wrapped and inspected
    assert product_dtypes(pp.inspect(model.method)(X).after) == ["bfloat16"]
    half = pp.auto_mixed(model.method, policy="AutoMixed")
    assert product_dtypes(half.trace(X).jaxpr) == ["float16"]


# ---------------------------------------------------------------- what is refused


async def coroutine(x):
    return x


def generator(x):
    yield x


async def async_generator(x):
    yield x


class Rows:
    def __call__(self, x):
        yield x


LATER = "whose body runs after its trace has ended"
REFUSED = {
    "coroutine": (coroutine, LATER),
    "generator": (generator, LATER),
    "async generator": (async_generator, LATER),
    "object": (Rows(), LATER),
    "partial": (functools.partial(coroutine), LATER),
    "staticmethod": (staticmethod(plain), "put @staticmethod above @auto_mixed"),
    "property": (property(plain), "put @property above @auto_mixed"),
}


@pytest.mark.parametrize("taker", [pp.auto_mixed, pp.inspect])
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_function_of_arrays_is_refused(name, taker):
    fn, said = REFUSED[name]
    with pytest.raises(TypeError, match=said):
        taker(fn)


# ---------------------------------------------------------------- copies


@pytest.mark.parametrize("again", [lambda v: pickle.loads(pickle.dumps(v)), copy.deepcopy])
def test_a_function_is_pickled_by_name_or_with_its_options(again):
    assert again(decorated) is decorated
    mixed = pp.auto_mixed(plain, policy="AutoMixed", keep_unused=True)
    copied = again(mixed)
    assert copied is not mixed
    assert (copied.policy, copied.jit_options) == (mixed.policy, mixed.jit_options)
    np.testing.assert_array_equal(copied(X, W), mixed(X, W))


# ---------------------------------------------------------------- keywords of any name

# every name that a parameter of the package has: none may be in a user's way
NAMES = sorted(
    {
        arg.arg
        for path in FILES
        for node in ast.walk(parse(path))
        if isinstance(node, ast.FunctionDef | ast.Lambda)
        for arg in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
    }
)


def of_keywords(**named):
    assert named.keys() == set(NAMES)
    return named["self"] @ named["fn"]


def loss_of_keywords(weights_, /, **named):
    return (weights_ @ of_keywords(**named)).sum()


POLICIES = ["AlwaysF32", "AutoMixedBf16"]
FORWARDING = {
    "call": lambda f: pp.auto_mixed(f),
    "lower": lambda f: pp.auto_mixed(f).lower,
    "trace": lambda f: pp.auto_mixed(f).trace,
    "eval_shape": lambda f: pp.auto_mixed(f).eval_shape,
    "static": lambda f: pp.auto_mixed(f, static_argnames="owner"),
    "modules": lambda f: lambda **named: nnx_called(f, named),
    "inspect": pp.inspect,
    "explain": pp.explain,
    "compare": lambda f: pp.compare(f, POLICIES, rounds=1),
    "audit": pp.audit,
    "bisect": lambda f: pp.bisect(f, "AutoMixedBf16", lambda out: True),
    "monitor": pp.monitor,
    "monitor, at times": lambda f: (
        lambda **n: pp.monitor(f, every=2)(pp.monitor(f, every=2).init(**n), **n)
    ),
    "fallback": pp.with_fallback,
    "assert_precision": lambda f: (
        lambda **named: assert_precision(f, (), {"dot_general": {"bf16": 1}}, kwargs=named)
    ),
}


def nnx_called(f, named):
    linear = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    return pp.auto_mixed(lambda model, **named: model(f(**named)))(linear, **named)


@pytest.mark.release(keep=2)
@pytest.mark.parametrize("way", FORWARDING)
def test_a_keyword_may_have_any_name(way):
    assert {"self", "fn", "policy", "args", "kwargs", "more", "scale", "name"} <= set(NAMES)
    named = {name: 2 if name == "owner" and way == "static" else X for name in NAMES}
    with quiet():
        assert FORWARDING[way](of_keywords)(**named) is not None or way == "assert_precision"


def test_the_keywords_of_a_scaled_loss_are_the_losss():
    named = dict.fromkeys(NAMES, X)
    value, gradient, finite = pp.loss_scale.scaled_value_and_grad(loss_of_keywords)(
        pp.loss_scale.StaticLossScale(8.0), X, **named
    )
    assert bool(finite) and rel_error(value, loss_of_keywords(X, **named)) < 1e-6
    assert gradient.shape == X.shape
