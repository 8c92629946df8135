"""Design section 3, line 17: what jit refuses is static by itself, or handed through."""

import collections
import dataclasses
import datetime
import enum
import fractions
import functools
import logging
import operator
import pathlib
import re
import threading
import types

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import precpass as pp
from tests.support.calls import Layer, W, X, counted
from tests.support.jaxprs import product_dtypes
from tests.support.passes import quiet
from tests.support.values import rel_error


class Mode(enum.Enum):
    ONCE = 1
    TWICE = 2


@dataclasses.dataclass(frozen=True)
class Config:
    """No pytree: hashed and compared by its fields."""

    depth: int
    name: str = "c"


def low(fn, *args):
    """Whether the product that a call runs is low."""
    return set(product_dtypes(pp.auto_mixed(fn).trace(*args).jaxpr)) == {"bfloat16"}


# ---------------------------------------------------------------- arguments

LEAVES = {
    "string": "relu",
    "bytes": b"relu",
    "callable": jax.nn.relu,
    "lambda": lambda x: x,
    "enum": Mode.TWICE,
    "dtype": np.dtype("float16"),
    "scalar type": jnp.float32,
    "ellipsis": ...,
    "range": range(3),
    "slice of a tuple": (slice(None, 2).__class__,),
    "frozen dataclass": Config(2),
    "module": types,
    "class": Config,
    "class of arrays": nnx.Param,
    "dtype struct": np.dtype([("a", "f4")]),
}


@pytest.mark.parametrize("name", LEAVES)
def test_a_leaf_that_jit_refuses_is_static(name):
    leaf = LEAVES[name]
    seen = []

    def fn(x, leaf):
        seen.append(leaf)
        return x @ x

    with pytest.raises((TypeError, ValueError), match="abstract"):
        jax.jit(fn)(X, leaf)
    mixed = pp.auto_mixed(fn)
    for _ in range(2):
        assert rel_error(mixed(X, leaf), X @ X) < 2e-2
    assert seen == [leaf]
    assert low(fn, X, leaf)


def test_leaves_in_trees_keywords_and_rest():
    def fn(tree, *rest, mode, **extra):
        x = tree["x"] @ tree["x"] if mode == "m" else tree["x"]
        assert (tree["name"], rest[0], extra["more"]["deep"][0]) == ("n", "r", Mode.ONCE)
        return rest[1](x) * extra["more"]["deep"][1]

    mixed = pp.auto_mixed(fn)
    out = mixed({"x": X, "name": "n"}, "r", jnp.tanh, mode="m", more={"deep": [Mode.ONCE, 2.0]})
    assert rel_error(out, jnp.tanh(X @ X) * 2) < 2e-2


def test_none_is_an_empty_tree_as_for_jit():
    mixed = pp.auto_mixed(lambda x, y: x @ x if y is None else x @ y)
    assert rel_error(mixed(X, None), X @ X) < 2e-2
    assert rel_error(mixed(X, W), X @ W) < 2e-2


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


@pytest.mark.parametrize(
    ("args", "kwargs", "where"),
    [
        ((X, {1, 2}), {}, "s = {1, 2}"),
        ((X, {"k": [{3}]}), {}, "s['k'][0] = {3}"),
        ((X,), {"s": bytearray(b"a")}, "s = bytearray(b'a')"),
        ((X, 1.0, 2.0, {4}), {}, "rest[1] = {4}"),
        ((X,), {"s": 1, "more": {5}}, "more = {5}"),
        ((X, np.array(["text"])), {}, "s = array(['text']"),
    ],
    ids=["set", "in a tree", "keyword", "rest", "extra keyword", "array of strings"],
)
def test_what_has_no_hash_is_refused_by_name(args, kwargs, where):
    def model(x, s=None, *rest, **extra):
        raise AssertionError("the function ran")

    with pytest.raises(TypeError) as caught:
        pp.auto_mixed(model)(*args, **kwargs)
    assert f"model was given {where}" in str(caught.value)
    assert "has no hash" in str(caught.value)
    assert "tuple for a list" in str(caught.value)


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
    """With attributes of its own."""


class Names(frozenset):
    """With attributes of its own."""


def with_attribute(x, w):
    x.w = w
    return x


class Weights(enum.Enum):
    FIRST = W


class Tensor:
    """An array of another library."""

    def __init__(self, values):
        self.values = values

    def __array__(self, dtype=None, copy=None):
        return self.values


class HashedTensor(Tensor):
    def __eq__(self, other):
        return self is other

    def __hash__(self):
        return id(self)


class WithDlpack:
    def __init__(self, values):
        self.values = values

    def __dlpack__(self, **_):
        raise AssertionError("it was exported")


@dataclasses.dataclass(frozen=True)
class Frozen:
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


ONES = np.ones(3)


def with_default(x, w=ONES):
    return x @ x


@functools.wraps(with_default)
def wrapping(x):
    return x @ x


HOLDING = {
    "attribute": (lambda: Slotted(W), "w"),
    "item of a dict": (lambda: Plain(w=W), "params['w']"),
    "item of a list": (lambda: Plain(1, W), "args[1]"),
    "nested object": (lambda: Plain(inner=Plain(w=W)), "params['inner'].params['w']"),
    "numpy's": (lambda: Plain(w=np.ones(3)), "params['w']"),
    "tensor": (lambda: Plain(w=Tensor(np.ones(3))), "params['w']"),
    "object compared by its name": (lambda: ByName("a", w=W), "held['w']"),
    "closure": (lambda: closing_over(W), "closes over value"),
    "object in a closure": (lambda: closing_over(Plain(w=W)), "closes over value.params['w']"),
    "default": (lambda: with_default, "__defaults__[0]"),
    "wrapped": (lambda: wrapping, "__wrapped__.__defaults__[0]"),
    "partial": (lambda: functools.partial(jnp.dot, W), "args[0]"),
    "bound method": (lambda: Plain(w=W).loss, "__self__.params['w']"),
    "method of a list": (lambda: [W].append, "__self__[0]"),
    "optimizer": (lambda: optax.sgd(W).update, "closes over"),
    "named tuple": (lambda: Frozen((1, closing_over(W))), "field[1] closes over value"),
    "dataclass": (lambda: Mutable(W), "w"),
    "mixed function": (lambda: pp.auto_mixed(closing_over(W)), "__wrapped__ closes over value"),
    "private slot": (lambda: Private(W), "in a Private"),
    "deque": (lambda: ByName("a", w=collections.deque([W])), "held['w'] in a deque"),
    "view of a dict": (
        lambda: ByName("a", w=types.MappingProxyType({"w": W})),
        "held['w'] in a mappingproxy['w']",
    ),
    "enum": (lambda: Weights.FIRST, "_value_"),
    "text": (lambda: with_attribute(Text("a"), W), "w"),
    "frozen set": (lambda: with_attribute(Names("a"), W), "w"),
}
IDENTITY = {
    "object": (object, ""),
    "plain": (Plain, ""),
    "logger": (lambda: logging.getLogger("a"), ""),
    "lock": (threading.Lock, ""),
    "field": (lambda: Frozen(Plain()), "whose field is of"),
    "item": (lambda: frozenset({Plain()}), "whose [0] is of"),
    "mutable dataclass": (lambda: Mutable(1), ""),
    "bound method": (lambda: Plain().loss, "whose __self__ is of"),
    "partial of a method": (lambda: functools.partial(Plain().loss, 1), "func.__self__ is of"),
    "argument of a partial": (lambda: functools.partial(max, key=Plain()), "whose (key) is of"),
}
CHANGING = {
    "list of a partial": (lambda: functools.partial(max, [1]), "(0) is of <class 'list'>"),
    "method of a dict": (lambda: {}.get, "whose __self__ is of <class 'dict'>"),
    "field with a list": (lambda: ByIdentity([1]), "whose field is of <class 'list'>"),
}
FOREIGN = (Tensor, HashedTensor, WithDlpack)
REFUSED = {
    **{name: (make, [f"which holds arrays ({where}"]) for name, (make, where) in HOLDING.items()},
    **{name: (make, ["compared by identity", at]) for name, (make, at) in IDENTITY.items()},
    **{name: (make, ["which has no hash: it could", at]) for name, (make, at) in CHANGING.items()},
    **{cls.__name__: (lambda cls=cls: cls(ONES), ["another library: convert"]) for cls in FOREIGN},
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
    if isinstance(make(), FOREIGN):
        with pytest.raises(TypeError):
            jax.jit(lambda x, t: x)(X, make())
    else:
        assert "jax.tree_util.register_dataclass" in text and "static_argnums" in text


def test_a_method_of_an_object_that_holds_arrays_is_refused():
    class Model:
        def __init__(self):
            self.params = {"w": W}

        @pp.auto_mixed
        def __call__(self, x):
            return x @ self.params["w"]

    with pytest.raises(TypeError, match=r"__call__ was given self of .*params\['w'\]"):
        Model()(X)


def test_what_is_declared_static_is_the_callers_to_answer_for():
    model = Plain(w=W)
    mixed = pp.auto_mixed(lambda x, m: x @ m.params["w"], static_argnums=1)
    assert rel_error(mixed(X, model), X @ W) < 2e-2
    mixed = pp.auto_mixed(lambda x, m: x @ m.params["w"], static_argnames="m")
    assert rel_error(mixed(X, m=model), X @ W) < 2e-2


class Layers(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.width)(x)


VALUES = {
    "mesh": lambda: jax.make_mesh((2,), ("x",)),
    "abstract mesh": lambda: jax.make_mesh((2,), ("x",)).abstract_mesh,
    "sharding": lambda: NamedSharding(jax.make_mesh((2,), ("x",)), P("x")),
    "partition": lambda: P("x"),
    "device": lambda: jax.devices()[0],
    "tree": lambda: jax.tree.structure((1, 2)),
    "aval": lambda: jax.core.ShapedArray((2,), jnp.float32),
    "precision": lambda: jax.lax.Precision.HIGH,
    "checkpoint policy": lambda: jax.checkpoint_policies.save_only_these_names("a"),
    "ufunc": lambda: np.sin,
    "jnp ufunc": lambda: jnp.add,
    "jitted": lambda: jnp.tanh,
    "custom jvp": lambda: jax.nn.relu,
    "initializer": jax.nn.initializers.lecun_normal,
    "gradient": lambda: jax.grad(closing_over(None)),
    "partial": lambda: functools.partial(jnp.sum, axis=0),
    "getter": lambda: operator.itemgetter(1),
    "method of a string": lambda: "a".upper,
    "optax": lambda: optax.adam(1e-3).update,
    "schedule": lambda: optax.cosine_decay_schedule(1.0, 100),
    "haiku": lambda: hk.transform(lambda x: hk.Linear(3)(x)).apply,
    "linen module": lambda: Layers(3),
    "policy": lambda: pp.AutoMixedBf16.with_rules(pp.Rule(where=bool, precision="f32")),
    "mixed function": lambda: pp.auto_mixed(closing_over(None)),
    "date": lambda: datetime.date(2020, 1, 1),
    "path": lambda: pathlib.PurePath("a"),
    "pattern": lambda: re.compile("a"),
    "fraction": lambda: fractions.Fraction(1, 2),
    "frozen set": lambda: frozenset({1, "a", None}),
    "frozen dataclass of a function": lambda: Frozen((jax.nn.relu, None, Mode.ONCE)),
    "numpy's string": lambda: np.str_("a"),
    "date of numpy's": lambda: np.datetime64("2020"),
    "compared by its name": lambda: ByName("a", depth=3),
    "closure": lambda: closing_over(["a", {"b": 2}]),
    "method of a value": lambda: Frozen(1).__repr__,
    "method of a linen module": lambda: Layers(3).apply,
    "text with attributes": lambda: with_attribute(Text("a"), "b"),
    "frozen, by identity": lambda: ByIdentity((1, "a")),
}


@pytest.mark.parametrize("name", VALUES)
def test_a_value_is_static_by_itself(name):
    counting, runs = counted(lambda x, value: x @ x)
    mixed = pp.auto_mixed(counting)
    value = VALUES[name]()
    for _ in range(3):
        assert rel_error(mixed(X, value), X @ X) < 2e-2
    # jit itself traces the function before it refuses these
    assert len(runs) == 1 + (name in ("aval", "date of numpy's"))


def test_values_that_are_equal_are_one_program_and_others_are_not():
    counting, runs = counted(lambda x, config: x * config.field)
    with quiet():
        mixed = pp.auto_mixed(counting)
        for value in (1.0, 1.0, 2.0, 1.0, 2.0):
            np.testing.assert_array_equal(mixed(X, Frozen(value)), X * value)
    assert len(runs) == 2


def test_an_object_that_is_its_own_cycle_is_looked_through_once():
    one = ByName("a")
    one.held["itself"] = one
    assert rel_error(pp.auto_mixed(lambda x, thing: x @ x)(X, one), X @ X) < 2e-2
    one.held["w"] = W
    with pytest.raises(TypeError, match="holds arrays"):
        pp.auto_mixed(lambda x, thing: x @ x)(X, one)


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
    assert wanted[:2] == [(8, 8), (8, 8)]
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

    mixed = pp.auto_mixed(lambda x: x @ x)
    for bad, error in ((2**100, OverflowError), (Dual(), ValueError)):
        with pytest.raises(error) as wanted:
            jax.jit(lambda x: x)(bad)
        with pytest.raises(error) as got:
            mixed(bad)
        assert str(got.value).replace("<lambda>", "") == str(wanted.value).replace("<lambda>", "")
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        mixed()


def test_after_a_refused_call_array_calls_go_on():
    mixed = pp.auto_mixed(lambda x, s=None: x @ x)
    with pytest.raises(TypeError, match="has no hash"):
        mixed(X, {1})
    assert rel_error(mixed(X), X @ X) < 2e-2


# ---------------------------------------------------------------- results

RESULTS = {
    "string": "label",
    "callable": jnp.tanh,
    "enum": Mode.ONCE,
    "class of arrays": nnx.Param,
    "dtype": np.dtype("float16"),
    "unhashable": {1, 2},
    "object": Config(2),
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


@pytest.mark.parametrize("make", [Plain, Frozen, closing_over, lambda y: functools.partial(max, y)])
def test_arrays_of_the_trace_do_not_leave_it_in_an_object(make):
    """They are refused by name: a tracer that is used later raises far from here."""
    with pytest.raises(TypeError, match=r"returned an object of .* holds arrays of the trace"):
        pp.auto_mixed(lambda x: {"y": x @ x, "state": make(x @ x)})(X)


def test_nothing_but_a_string():
    with pytest.warns(pp.PrecisionWarning, match="lowered nothing"):
        assert pp.auto_mixed(lambda x: "only")(X) == "only"


def test_handed_through_results_belong_to_their_trace():
    mixed = pp.auto_mixed(lambda x, mode: (x @ x, f"{mode} of {x.shape[0]}"))
    small = X[:4, :4]
    for _ in range(2):
        assert mixed(X, "a")[1] == "a of 8"
        assert mixed(small, "b")[1] == "b of 4"
        assert mixed(X, "b")[1] == "b of 8"


def test_inside_of_another_transform_results_are_the_functions_own():
    mixed = pp.auto_mixed(lambda x: ((x @ x).sum(), "aux"))
    grad, aux = jax.grad(mixed, has_aux=True)(X)
    assert aux == "aux"
    assert rel_error(grad, jax.grad(lambda x: (x @ x).sum())(X)) < 2e-2
    assert jax.jit(lambda x: mixed(x)[0])(X).shape == ()


async def later(x):
    return x


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda x: (row for row in x), "generator"),
        (lambda x: {"rows": [(row for row in x)]}, "generator"),
        (later, "coroutine"),
    ],
    ids=["generator", "in a tree", "coroutine"],
)
@pytest.mark.filterwarnings("ignore:Python iterable type:DeprecationWarning")
def test_what_goes_on_later_is_no_result(make, kind):
    made = []
    with pytest.raises(TypeError, match=f"returned a {kind}, whose body would run after"):
        pp.auto_mixed(lambda x: made.append(make(x)) or made[0])(X)
    if kind == "coroutine":
        made[0].close()


# ---------------------------------------------------------------- with both, ahead of time


def test_stages_take_and_give_them_too():
    def fn(x, mode):
        return x @ x, mode

    mixed = pp.auto_mixed(fn)
    traced = mixed.trace(X, "m")
    for compiled in (traced.lower().compile(), mixed.lower(X, "m").compile()):
        y, mode = compiled(X, "m")
        assert mode == "m"
        np.testing.assert_array_equal(y, mixed(X, "m")[0])
        with pytest.raises(TypeError):
            compiled(X, "other")
    assert "bf16" in mixed.lower(X, "m").as_text()
    assert mixed.eval_shape(X, "m") == (jax.ShapeDtypeStruct((8, 8), jnp.float32), "m")
    assert traced.out_info[1] == "m"
    assert mixed.lower(X, "m").compile().cost_analysis()


def test_inspected_and_switched_off_they_are_taken_too():
    found = pp.inspect(lambda x, mode, n: (x @ x * n, mode))(X, "m", 2.0)
    assert product_dtypes(found.after) == ["bfloat16"]
    assert len(found.before.in_avals) == 2, "the number is traced, as in a call"
    with pp.use_policy(None):
        y, mode = pp.auto_mixed(lambda x, mode: (x @ x, mode))(X, "m")
    assert mode == "m"
    np.testing.assert_array_equal(y, jax.jit(lambda x: x @ x)(X))


# ---------------------------------------------------------------- equinox


def mlp():
    return eqx.nn.MLP(8, 4, 16, 2, key=jax.random.key(0))


def apply(model, x):
    return jax.vmap(model)(x)


def test_an_equinox_module_as_argument():
    model = mlp()
    with pytest.raises(TypeError):
        jax.jit(apply)(model, X)  # its activation is a leaf that is no array
    mixed = pp.auto_mixed(apply)
    assert rel_error(mixed(model, X), apply(model, X)) < 2e-2
    assert low(apply, model, X)


def test_an_equinox_module_as_result():
    def scaled(model, x):
        arrays, rest = eqx.partition(model, eqx.is_array)
        return eqx.combine(jax.tree.map(lambda w: w * 2, arrays), rest), apply(model, x)

    model = mlp()
    new, _ = pp.auto_mixed(scaled)(model, X)
    assert isinstance(new, eqx.nn.MLP)
    assert jax.tree.structure(new) == jax.tree.structure(model)
    np.testing.assert_array_equal(new.layers[0].weight, model.layers[0].weight * 2)


@pytest.mark.parametrize("outside", [True, False])
def test_the_gradient_of_an_equinox_module(outside):
    def loss(model, x):
        return jnp.mean(apply(model, x) ** 2)

    model = mlp()
    want = eqx.filter_grad(loss)(model, X)
    got = (
        eqx.filter_grad(pp.auto_mixed(loss))(model, X)
        if outside
        else pp.auto_mixed(eqx.filter_grad(loss))(model, X)
    )
    assert jax.tree.structure(got) == jax.tree.structure(want)
    assert rel_error(eqx.filter(got, eqx.is_array), eqx.filter(want, eqx.is_array)) < 2e-2


def test_a_method_of_an_equinox_module():
    class Model(eqx.Module):
        w: jax.Array
        act: object

        @pp.auto_mixed
        def __call__(self, x):
            return self.act(x @ self.w)

    model = Model(W, jnp.tanh)
    assert rel_error(model(X), jnp.tanh(X @ W)) < 2e-2
    assert rel_error(Model(2 * W, jnp.tanh)(X), jnp.tanh(X @ (2 * W))) < 2e-2


def test_filter_jit_around_and_inside():
    model = mlp()
    want = apply(model, X)
    assert rel_error(eqx.filter_jit(pp.auto_mixed(apply))(model, X), want) < 2e-2
    assert rel_error(pp.auto_mixed(eqx.filter_jit(apply))(model, X), want) < 2e-2


def test_a_pytree_with_static_fields_needs_no_second_way():
    mixed = pp.auto_mixed(lambda layer, x: layer(x))
    assert rel_error(mixed(Layer(W, 2), X), X @ W @ W) < 2e-2
    assert isinstance(mixed.trace(Layer(W, 2), X), jax.stages.Traced)
