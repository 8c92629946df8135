"""Design section 3, line 17: what jit refuses is static by itself, or handed through."""

import collections
import dataclasses
import datetime
import enum
import functools
import operator
import re
import threading
import types

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec as P

import precpass as pp
from tests.support.calls import W, X, counted
from tests.support.jaxprs import product_dtypes
from tests.support.passes import quiet
from tests.support.values import rel_error


class Mode(enum.Enum):
    ONCE = 1


class Weights(enum.Enum):
    FIRST = W


class Plain:
    """Compared by identity; it holds what it is given."""

    def __init__(self, *args, **kwargs):
        self.args = list(args)
        self.params = kwargs

    def loss(self, x):
        return x @ x


class Slotted:
    __slots__ = ("empty", "w")

    def __init__(self, w):
        self.w = w


class ByName:
    """Compared by its name, whatever else it holds."""

    def __init__(self, name, **held):
        self.name = name
        self.held = held

    def __eq__(self, other):
        return isinstance(other, ByName) and self.name == other.name

    def __hash__(self):
        return hash(self.name)


class Private(ByName):
    __slots__ = ("__w",)

    def __init__(self, w):
        super().__init__("a")
        self.__w = w


class Text(str):
    def __new__(cls, w):
        new = super().__new__(cls, "a")
        new.w = w
        return new


class Tensor:
    """An array of another library."""

    def __array__(self, dtype=None, copy=None):
        return np.ones(3)


class HashedTensor(Tensor):
    def __eq__(self, other):
        return self is other

    def __hash__(self):
        return id(self)


class WithDlpack:
    def __dlpack__(self, **_):
        raise AssertionError("it was exported")


@dataclasses.dataclass(frozen=True)
class Frozen:
    """No pytree: hashed and compared by its field."""

    field: object


@dataclasses.dataclass(frozen=True, eq=False)
class ByIdentity:
    field: object


@dataclasses.dataclass
class Mutable:
    w: object
    __hash__ = object.__hash__


def closing_over(value):
    return lambda x: x @ x if value is None else x


def with_default(x, w=W):
    return x @ x


class Layers(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.width)(x)


# ---------------------------------------------------------------- arguments

VALUES = {
    "string": lambda: "relu",
    "subclass of a string": lambda: Text("b"),
    "lambda": lambda: lambda x: x,
    "enum": lambda: Mode.ONCE,
    "dtype": lambda: np.dtype([("a", "f4")]),
    "scalar type": lambda: jnp.float32,
    "ellipsis": lambda: ...,
    "range": lambda: range(3),
    "module": lambda: types,
    "class": lambda: Frozen,
    "class of arrays": lambda: nnx.Param,
    "mesh": lambda: jax.make_mesh((2,), ("x",)),
    "sharding": lambda: NamedSharding(jax.make_mesh((2,), ("x",)), P("x")),
    "device": lambda: jax.devices()[0],
    "tree": lambda: jax.tree.structure((1, 2)),
    "checkpoint policy": lambda: jax.checkpoint_policies.save_only_these_names("a"),
    "ufunc": lambda: np.sin,
    "jnp ufunc": lambda: jnp.add,
    "jitted": lambda: jnp.tanh,
    "custom jvp": lambda: jax.nn.relu,
    "gradient": lambda: jax.grad(closing_over(None)),
    "partial": lambda: functools.partial(jnp.sum, axis=0),
    "getter": lambda: operator.itemgetter(1),
    "method of a string": lambda: "a".upper,
    "optax": lambda: optax.adam(1e-3).update,
    "linen module": lambda: Layers(3),
    "method of a linen module": lambda: Layers(3).apply,
    "policy": lambda: pp.AutoMixedBf16.with_rules(pp.Rule(where=bool, precision="f32")),
    "mixed function": lambda: pp.auto_mixed(closing_over(None)),
    "date": lambda: datetime.date(2020, 1, 1),
    "pattern": lambda: re.compile("a"),
    "frozen set": lambda: frozenset({1, "a", None}),
    "frozen dataclass": lambda: Frozen((jax.nn.relu, None, Mode.ONCE)),
    "frozen, by identity": lambda: ByIdentity((1, "a")),
    "numpy's string": lambda: np.str_("a"),
    "compared by its name": lambda: ByName("a", depth=3),
    "closure": lambda: closing_over(["a", {"b": 2}]),
}


@pytest.mark.parametrize("name", VALUES)
def test_a_value_is_static_by_itself(name):
    value, seen = VALUES[name](), []

    def fn(x, value):
        seen.append(value)
        return x @ x

    mixed = pp.auto_mixed(fn)
    for _ in range(3):
        assert rel_error(mixed(X, value), X @ X) < 2e-2
    assert len(seen) == 1 and seen[0] is value
    assert product_dtypes(mixed.trace(X, value).jaxpr) == ["bfloat16"]


def test_leaves_in_trees_keywords_and_rest():
    def fn(tree, *rest, mode, **extra):
        x = tree["x"] @ tree["x"] if mode == "m" else tree["x"]
        assert (tree["name"], rest[0], extra["more"]["deep"][0]) == ("n", "r", Mode.ONCE)
        return rest[1](x) * extra["more"]["deep"][1]

    mixed = pp.auto_mixed(fn)
    out = mixed({"x": X, "name": "n"}, "r", jnp.tanh, mode="m", more={"deep": [Mode.ONCE, 2.0]})
    assert rel_error(out, jnp.tanh(X @ X) * 2) < 2e-2


def test_numbers_and_arrays_beside_a_static_leaf_are_traced():
    def fn(x, n, flag, mode):
        assert all(isinstance(v, jax.core.Tracer) for v in (x, n, flag))
        return x @ x * n

    counting, runs = counted(fn)
    mixed = pp.auto_mixed(counting)
    for n in (1.0, 2.0):
        assert rel_error(mixed(np.asarray(X), n, True, "m"), X @ X * n) < 2e-2
    assert len(runs) == 1


def test_static_by_position_and_by_itself_together():
    class Key(tuple):
        """Given as it is, and not as the tuple that it is."""

    key, seen = Key(("a", 1)), []

    def fn(x, depth, mode, *, act):
        seen.append(depth)
        for _ in range(len(depth)):
            x = x @ x
        return act(x) if mode == "act" else x

    mixed = pp.auto_mixed(fn, static_argnums=1)
    assert rel_error(mixed(X, key, "act", act=jnp.tanh), jnp.tanh((X @ X) @ (X @ X))) < 0.2
    assert seen[0] is key
    mixed = pp.auto_mixed(fn, static_argnames=("depth", "mode"))
    assert rel_error(mixed(X, depth="a", mode="not", act=jnp.tanh), X @ X) < 2e-2


def test_what_is_declared_static_is_the_callers_to_answer_for():
    model = Plain(w=W)
    mixed = pp.auto_mixed(lambda x, m: x @ m.params["w"], static_argnums=1)
    assert rel_error(mixed(X, model), X @ W) < 2e-2
    assert rel_error(mixed(X, m=model), X @ W) < 2e-2


HOLDING = {
    "attribute": (lambda: Slotted(W), "w"),
    "item of a dict": (lambda: Plain(w=W), "params['w']"),
    "item of a list": (lambda: Plain(1, W), "args[1]"),
    "nested object": (lambda: Plain(inner=Plain(w=W)), "params['inner'].params['w']"),
    "numpy's": (lambda: Plain(w=np.ones(3)), "params['w']"),
    "tensor": (lambda: Plain(w=Tensor()), "params['w']"),
    "object compared by its name": (lambda: ByName("a", w=W), "held['w']"),
    "closure": (lambda: closing_over(W), "closes over value"),
    "default": (lambda: with_default, "__defaults__[0]"),
    "wrapped": (lambda: functools.wraps(with_default)(lambda x: x), "__wrapped__.__defaults__[0]"),
    "partial": (lambda: functools.partial(jnp.dot, W), "args[0]"),
    "bound method": (lambda: Plain(w=W).loss, "__self__.params['w']"),
    "optimizer": (lambda: optax.sgd(W).update, "closes over"),
    "frozen field": (lambda: Frozen((1, closing_over(W))), "field[1] closes over value"),
    "dataclass": (lambda: Mutable(W), "w"),
    "mixed function": (lambda: pp.auto_mixed(closing_over(W)), "__wrapped__ closes over value"),
    "private slot": (lambda: Private(W), "in a Private"),
    "deque": (lambda: ByName("a", w=collections.deque([W])), "held['w'] in a deque"),
    "enum": (lambda: Weights.FIRST, "_value_"),
    "subclass of a string": (lambda: Text(W), "w"),
}
IDENTITY = {
    "object": (object, ""),
    "lock": (threading.Lock, ""),
    "field": (lambda: Frozen(Plain()), "whose field is of"),
    "item": (lambda: frozenset({Plain()}), "whose [0] is of"),
    "mutable dataclass": (lambda: Mutable(1), ""),
    "partial of a method": (lambda: functools.partial(Plain().loss, 1), "func.__self__ is of"),
    "argument of a partial": (
        lambda: functools.partial(max, key=Plain()),
        "whose keywords['key'] is of",
    ),
}
CHANGING = {
    "list of a partial": (lambda: functools.partial(max, [1]), "args[0] is of <class 'list'>"),
    "method of a dict": (lambda: {}.get, "whose __self__ is of <class 'dict'>"),
    "field with a list": (lambda: ByIdentity([1]), "whose field is of <class 'list'>"),
}
FOREIGN = (Tensor, HashedTensor, WithDlpack)
REFUSED = {
    **{name: (make, [f"which holds arrays ({where}"]) for name, (make, where) in HOLDING.items()},
    **{name: (make, ["compared by identity", at]) for name, (make, at) in IDENTITY.items()},
    **{name: (make, ["which has no hash: it could", at]) for name, (make, at) in CHANGING.items()},
    **{cls.__name__: (cls, ["another library: convert"]) for cls in FOREIGN},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_value_is_refused_by_name(name):
    """What holds arrays would be a constant, and what can change would be found again."""
    make, said = REFUSED[name]
    with pytest.raises(TypeError) as caught:
        pp.auto_mixed(lambda x, thing: x @ x)(X, {"deep": [make()]})
    text = str(caught.value)
    assert text.startswith(f"<lambda> was given thing['deep'][0] of {type(make())}")
    assert all(part in text for part in said)
    if not isinstance(make(), FOREIGN):
        assert "jax.tree_util.register_dataclass" in text and "static_argnums" in text


@pytest.mark.parametrize(
    ("args", "kwargs", "where"),
    [
        ((X, {"k": [{3}]}), {}, "s['k'][0] = {3}"),
        ((X,), {"s": bytearray(b"a")}, "s = bytearray(b'a')"),
        ((X, 1.0, 2.0, {4}), {}, "rest[1] = {4}"),
        ((X,), {"s": 1, "more": {5}}, "more = {5}"),
        ((X, np.array(["text"])), {}, "s = array(['text']"),
    ],
    ids=["in a tree", "keyword", "rest", "extra keyword", "array of strings"],
)
def test_what_has_no_hash_is_refused_by_name(args, kwargs, where):
    def model(x, s=None, *rest, **extra):
        if s is not None or rest or extra:
            raise AssertionError("the function ran")
        return x @ x

    mixed = pp.auto_mixed(model)
    with pytest.raises(TypeError) as caught:
        mixed(*args, **kwargs)
    assert f"model was given {where}" in str(caught.value)
    assert "has no hash" in str(caught.value) and "tuple for a list" in str(caught.value)
    assert rel_error(mixed(X), X @ X) < 2e-2, "calls with arrays go on"


def test_an_object_that_is_its_own_cycle_is_looked_through_once():
    one = ByName("a")
    one.held["itself"] = one
    assert rel_error(pp.auto_mixed(lambda x, thing: x @ x)(X, one), X @ X) < 2e-2


class RaisesWhenCompared:
    def __hash__(self):
        return 0

    def __eq__(self, other):
        raise RuntimeError("not to be compared")


def test_a_static_argument_whose_comparison_raises_is_taken_as_under_jit():
    # two names: JAX compares what is static to functions of one name and line
    def plain(x, key):
        return x @ x

    def mixed(x, key):
        return x @ x

    def said(jitted):
        one, other = RaisesWhenCompared(), RaisesWhenCompared()
        for key in (one, one, other, one):
            try:
                yield jitted(X, key).shape
            except ValueError as error:
                yield str(error).partition(".")[0]

    wanted = list(said(jax.jit(plain, static_argnums=1)))
    assert list(said(pp.auto_mixed(mixed, static_argnums=1))) == wanted
    assert wanted[2] == "static arguments should be comparable using __eq__"


def test_an_error_of_the_function_itself_is_not_taken_for_a_refused_leaf():
    counting, runs = counted(lambda x, mode="m": x @ None)
    for args in ((X,), (X, "m"), (X, "m")):
        del runs[:]
        with pytest.raises(TypeError, match="unsupported operand type"):
            pp.auto_mixed(counting)(*args)
        assert len(runs) == 1, "it ran a second time"


def test_errors_of_jit_about_arguments_stay():
    class Dual:
        def __jax_array__(self):
            return X

    for bad in (2**100, Dual()):
        said = []
        for wrap in (jax.jit, pp.auto_mixed):
            with pytest.raises((OverflowError, ValueError)) as caught:
                wrap(lambda x: x)(bad)
            said.append((caught.type, str(caught.value)))
        assert said[0] == said[1]


# ---------------------------------------------------------------- results

RESULTS = {
    "string": "label",
    "callable": jnp.tanh,
    "class of arrays": nnx.Param,
    "unhashable": {1, 2},
    "array of strings": np.array(["a"]),
    "by identity": object(),
}


@pytest.mark.parametrize("name", RESULTS)
def test_a_result_that_is_no_array_is_handed_through(name):
    value = RESULTS[name]
    counting, runs = counted(lambda x: {"y": x @ x, "kept": [value, None], "n": 3})
    mixed = pp.auto_mixed(counting)
    for _ in range(3):
        out = mixed(X)
        assert out["kept"][0] is value
        assert out["kept"][1] is None
        assert rel_error(out["y"], X @ X) < 2e-2
        assert isinstance(out["n"], jax.Array)
    assert len(runs) == 1


def test_handed_through_results_belong_to_their_trace():
    mixed = pp.auto_mixed(lambda x, mode: (x @ x, f"{mode} of {x.shape[0]}"))
    for _ in range(2):
        for x, mode in ((X, "a"), (X[:4, :4], "b"), (X, "b")):
            assert mixed(x, mode)[1] == f"{mode} of {len(x)}"


def test_inside_of_another_transform_results_are_the_functions_own():
    mixed = pp.auto_mixed(lambda x: ((x @ x).sum(), "aux"))
    grad, aux = jax.grad(mixed, has_aux=True)(X)
    assert aux == "aux"
    assert rel_error(grad, jax.grad(lambda x: (x @ x).sum())(X)) < 2e-2
    assert jax.jit(lambda x: mixed(x)[0])(X).shape == ()


@pytest.mark.parametrize("make", [Plain, Frozen, closing_over, lambda y: functools.partial(max, y)])
def test_arrays_of_the_trace_do_not_leave_it_in_an_object(make):
    """They are refused by name: a tracer that is used later raises far from here."""
    with pytest.raises(TypeError, match=r"returned an object of .* holds arrays of the trace"):
        pp.auto_mixed(lambda x: {"y": x @ x, "state": make(x @ x)})(X)


async def later(x):
    return x


@pytest.mark.parametrize(
    ("make", "kind"),
    [(lambda x: {"rows": [(row for row in x)]}, "generator"), (later, "coroutine")],
    ids=["generator", "coroutine"],
)
@pytest.mark.filterwarnings("ignore:Python iterable type:DeprecationWarning")
def test_what_goes_on_later_is_no_result(make, kind):
    made = []
    with pytest.raises(TypeError, match=f"returned a {kind}, whose body would run after"):
        pp.auto_mixed(lambda x: made.append(make(x)) or made[0])(X)
    if kind == "coroutine":
        made[0].close()


# ---------------------------------------------------------------- with both


def test_stages_take_and_give_them_too():
    mixed = pp.auto_mixed(lambda x, mode: (x @ x, mode))
    traced = mixed.trace(X, "m")
    for compiled in (traced.lower().compile(), mixed.lower(X, "m").compile()):
        y, mode = compiled(X, "m")
        assert mode == "m"
        np.testing.assert_array_equal(y, mixed(X, "m")[0])
        with pytest.raises(TypeError):
            compiled(X, "other")
        assert compiled.cost_analysis()
    assert "bf16" in mixed.lower(X, "m").as_text()
    assert mixed.eval_shape(X, "m") == (jax.ShapeDtypeStruct((8, 8), jnp.float32), "m")
    assert traced.out_info[1] == "m"


def test_inspected_and_switched_off_they_are_taken_too():
    found = pp.inspect(lambda x, mode, n: (x @ x * n, mode))(X, "m", 2.0)
    assert product_dtypes(found.after) == ["bfloat16"]
    assert len(found.before.in_avals) == 2, "the number is traced, as in a call"
    with pp.use_policy(None):
        y, mode = pp.auto_mixed(lambda x, mode: (x @ x, mode))(X, "m")
    assert mode == "m"
    np.testing.assert_array_equal(y, jax.jit(lambda x: x @ x)(X))
    with quiet():
        assert pp.auto_mixed(lambda x: "only")(X) == "only"


# ---------------------------------------------------------------- equinox


def mlp():
    return eqx.nn.MLP(8, 4, 16, 2, key=jax.random.key(0))


def apply(model, x):
    return jax.vmap(model)(x)


@pytest.mark.parametrize(
    "form",
    [
        pp.auto_mixed,
        lambda f: eqx.filter_jit(pp.auto_mixed(f)),
        lambda f: pp.auto_mixed(eqx.filter_jit(f)),
        lambda f: lambda model, x: pp.auto_mixed(eqx.filter_vmap(model))(x),
    ],
    ids=["alone", "filter_jit around", "filter_jit inside", "a method"],
)
def test_an_equinox_module_as_argument(form):
    model = mlp()
    got = form(apply)(model, X)
    assert rel_error(got, apply(model, X)) < 2e-2
    assert np.abs(got - apply(model, X)).max() > 0


def test_the_gradient_of_an_equinox_module_from_outside():
    def loss(model, x):
        return jnp.mean(apply(model, x) ** 2)

    model = mlp()
    want, got = (eqx.filter_grad(f)(model, X) for f in (loss, pp.auto_mixed(loss)))
    assert jax.tree.structure(got) == jax.tree.structure(want)
    assert rel_error(eqx.filter(got, eqx.is_array), eqx.filter(want, eqx.is_array)) < 2e-2


def test_a_method_of_an_object_is_called_with_it():
    class Model(eqx.Module):
        w: jax.Array
        act: object

        @pp.auto_mixed
        def __call__(self, x):
            return self.act(x @ self.w)

    for factor in (1, 2):
        assert rel_error(Model(factor * W, jnp.tanh)(X), jnp.tanh(X @ (factor * W))) < 2e-2

    class NoPytree:
        w = property(lambda self: self.params["w"])
        __init__ = Plain.__init__
        __call__ = pp.auto_mixed(lambda self, x: x @ self.w)

    with pytest.raises(TypeError, match=r"was given self of .*params\['w'\]"):
        NoPytree(w=W)(X)
