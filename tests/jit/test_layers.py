"""`Rule(module=...)`: layers by their path, in flax nnx, linen, equinox and haiku."""

import pickle
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import precpass as pp
from precpass.jit import layers

X = jnp.ones((2, 4))


# ---------------------------------------------------------------- one model in four libraries


class NnxAttention(nnx.Module):
    def __init__(self, rngs: Any):
        self.q, self.k = (nnx.Linear(4, 4, rngs=rngs) for _ in range(2))

    def __call__(self, x: Any) -> Any:
        return self.q(x) + self.k(x)


class NnxLayer(nnx.Module):
    def __init__(self, rngs: Any):
        self.attention = NnxAttention(rngs)
        self.mlp = nnx.Sequential(nnx.Linear(4, 4, rngs=rngs), jax.nn.relu)

    def __call__(self, x: Any) -> Any:
        return self.mlp(self.attention(x))


class NnxEncoder(nnx.Module):
    def __init__(self, rngs: Any):
        self.layers = nnx.List([NnxLayer(rngs) for _ in range(3)])

    def __call__(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


class NnxModel(nnx.Module):
    def __init__(self, rngs: Any):
        self.encoder, self.head = NnxEncoder(rngs), nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.head(self.encoder(x))


class EqxAttention(eqx.Module):
    q: eqx.nn.Linear
    k: eqx.nn.Linear

    def __init__(self, key: Any):
        self.q, self.k = (eqx.nn.Linear(4, 4, key=k) for k in jax.random.split(key))

    def __call__(self, x: Any) -> Any:
        return self.q(x) + self.k(x)


class EqxLayer(eqx.Module):
    attention: EqxAttention
    mlp: eqx.nn.Sequential

    def __init__(self, key: Any):
        self.attention = EqxAttention(key)
        self.mlp = eqx.nn.Sequential([eqx.nn.Linear(4, 4, key=key), eqx.nn.Lambda(jax.nn.relu)])

    def __call__(self, x: Any) -> Any:
        return self.mlp(self.attention(x))


class EqxEncoder(eqx.Module):
    layers: list[EqxLayer]

    def __init__(self, key: Any):
        self.layers = [EqxLayer(k) for k in jax.random.split(key, 3)]

    def __call__(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


class EqxModel(eqx.Module):
    encoder: EqxEncoder
    head: eqx.nn.Linear

    def __init__(self, key: Any):
        self.encoder, self.head = EqxEncoder(key), eqx.nn.Linear(4, 4, key=key)

    def __call__(self, x: Any) -> Any:
        return self.head(self.encoder(x))


class LinenAttention(linen.Module):
    def setup(self):
        self.q, self.k = linen.Dense(4), linen.Dense(4)

    def scores(self, x: Any) -> Any:
        return self.q(x) + self.k(x)

    def __call__(self, x: Any) -> Any:
        return self.scores(x)


class LinenLayer(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        return jax.nn.relu(linen.Dense(4, name="mlp")(LinenAttention(name="attention")(x)))


class LinenEncoder(linen.Module):
    def setup(self):
        self.layers = [LinenLayer() for _ in range(3)]

    def __call__(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


class LinenModel(linen.Module):
    @linen.compact
    def __call__(self, x: Any) -> Any:
        return linen.Dense(4, name="head")(LinenEncoder(name="encoder")(x))


class HaikuLayer(hk.Module):
    def __call__(self, x: Any) -> Any:
        q, k = hk.Linear(4, name="q"), hk.Linear(4, name="k")
        return jax.nn.relu(hk.Linear(4, name="mlp")(q(x) + k(x)))


def haiku_model(x: Any) -> Any:
    for at in range(3):
        x = HaikuLayer(name=f"layers_{at}")(x)
    return hk.Linear(4, name="head")(x)


def of_nnx() -> tuple[Any, Any]:
    return lambda model, x: model(x).sum(), (NnxModel(nnx.Rngs(0)), X)


def of_equinox() -> tuple[Any, Any]:
    return lambda model, x: jax.vmap(model)(x).sum(), (EqxModel(jax.random.key(0)), X)


def of_linen() -> tuple[Any, Any]:
    model = LinenModel()
    return lambda v, x: model.apply(v, x).sum(), (model.init(jax.random.key(0), X), X)


def of_haiku() -> tuple[Any, Any]:
    model = hk.transform(haiku_model)
    return lambda p, x: model.apply(p, None, x).sum(), (model.init(jax.random.key(0), X), X)


GRADIENTS = {of_nnx: nnx.grad, of_equinox: eqx.filter_grad, of_linen: jax.grad, of_haiku: jax.grad}


def wide_products(fn: Any, args: Any, module: str) -> tuple[int, int]:
    """The products in float32, and all, under a rule for a layer; as they are planned."""
    policy = pp.AutoMixedBf16.with_rules(pp.Rule(module=module, precision="f32"))
    inspection = pp.inspect(fn, policy)(*args)
    chosen = [d.compute for d in inspection.plan.walk() if d.kind is pp.types.OpKind.COMPUTE]
    return chosen.count(pp.types.Precision.F32), len(chosen)


CASES = [
    (of_nnx, "encoder/layers/1/attention", 2),
    (of_nnx, "encoder/layers/*/attention", 6),
    (of_nnx, "encoder/layers/1", 3),
    (of_nnx, "layers/1/attention/q", 1),
    (of_nnx, "layers/0/mlp/layers/0", 1),
    (of_nnx, "head", 1),
    (of_equinox, "encoder/layers/1/attention", 2),
    (of_equinox, "encoder/layers/[02]/attention/k", 2),
    (of_equinox, "layers/0/mlp/layers/0", 1),  # inside of equinox's own scope, eqx.nn.Sequential
    (of_equinox, "encoder", 9),
    (of_equinox, "/encoder/layers/1/", 3),
    (of_equinox, "head", 1),
    (of_linen, "encoder/layers_1/attention", 2),
    (of_linen, "LinenModel/encoder/layers_*/attention/q", 3),
    (of_linen, "layers_0/mlp", 1),
    (of_haiku, "layers_1", 3),
    (of_haiku, "layers_*/~/q", 3),
    (of_haiku, "head", 1),
]
OF_INPUT = {
    "encoder/layers/*/attention": 2,
    "encoder/layers/[02]/attention/k": 1,
    "encoder": 2,
    "LinenModel/encoder/layers_*/attention/q": 1,
    "layers_*/~/q": 1,
}


@pytest.mark.release(keep=2)
@pytest.mark.parametrize(("made", "module", "wanted"), CASES)
def test_a_rule_keeps_one_layer_wide_forward_and_backward(made: Any, module: str, wanted: int):
    fn, args = made()
    assert wide_products(fn, args, module) == (wanted, 10)
    # Each product has two more for its operands' gradients; nobody asks for that of the input,
    # which the first two products read.
    of_input = OF_INPUT.get(module, 0)
    assert wide_products(GRADIENTS[made](fn), args, module) == (3 * wanted - of_input, 28)


@pytest.mark.parametrize("made", [of_nnx, of_equinox])
def test_the_program_that_runs_has_the_precision(made: Any):
    fn, args = made()
    rule = pp.Rule(module="encoder/layers/1", precision="f32")
    text = pp.auto_mixed(fn, pp.AutoMixedBf16.with_rules(rule)).lower(*args).as_text()
    products = [line for line in text.splitlines() if "dot_general" in line]
    assert len(products) == 10
    assert sum("bf16" not in line for line in products) == 3


# ---------------------------------------------------------------- nothing of the user's changes


def calls() -> dict[type[Any], Any]:
    return {cls: vars(cls)["__call__"] for cls in layers._classes_with_calls()}


POLICY = pp.AutoMixedBf16.with_rules(pp.Rule(module="head", precision="f32"))


def products(inspection: Any) -> list[tuple[str, str]]:
    """Of each product the path that reports have for it, and the reason of its precision."""

    def of(plan: Any) -> Iterator[tuple[str, str]]:
        for info, decision in zip(plan.eqn_infos, plan.decisions, strict=True):
            if info.contracts:
                yield info.site.module, str(decision.reason)
            for inner in decision.inner:
                yield from of(inner)

    return list(of(inspection.plan))


def as_reported(fn: Any, args: Any) -> dict[str, tuple[int, int]]:
    """How many products a path has, and how many a rule with it matches, for all paths."""
    paths = Counter(path for path, _ in products(pp.inspect(fn)(*args)))
    found = dict[str, tuple[int, int]]()
    for path, n in paths.items():
        policy = pp.AutoMixedBf16.with_rules(pp.Rule(module=path, precision="f32"))
        reasons = [reason for _, reason in products(pp.inspect(fn, policy)(*args))]
        found[path] = n, sum(reason.startswith("Rule(") for reason in reasons)
    return found


@pytest.mark.parametrize("made", GRADIENTS)
def test_a_rule_takes_the_path_that_reports_have(made: Any):
    loss, args = made()
    found = as_reported(GRADIENTS[made](loss), args)
    assert len(found) >= 4 and all(n == matched for n, matched in found.values()), found


def test_a_reported_path_tells_apart_what_the_attributes_do_not():
    def fn(teacher: Any, student: Any, x: Any) -> Any:
        with jax.named_scope("first"):
            x = teacher(x)
        with jax.named_scope("second"):
            return student(teacher(x))

    models = (EqxAttention(jax.random.key(i)) for i in range(2))
    found = as_reported(fn, (*models, X[0]))
    assert found == dict.fromkeys(
        [
            *("first.teacher.q", "first.teacher.k", "second.teacher.q", "second.teacher.k"),
            *("second.student.q", "second.student.k"),
        ],
        (1, 1),
    )


def test_a_function_that_jax_has_traced_is_traced_again_for_another_path():
    @jax.jit
    def inner(layer: Any, x: Any) -> Any:
        return layer(x) @ X.T

    args = EqxAttention(jax.random.key(0)), X[0]
    for path, n in (("layer.q", 1), ("layer.k", 1), ("layer", 2), ("layer.q", 1)):
        assert wide_products(inner, args, path) == (n, 3)


@pytest.mark.release(keep=1)
@pytest.mark.parametrize("made", [of_nnx, of_equinox])
def test_classes_and_objects_are_as_before(made: Any):
    fn, args = made()
    before, leaves = calls(), [np.asarray(x) for x in jax.tree.leaves(args)]
    mixed = pp.auto_mixed(fn, POLICY)
    first = mixed(*args)
    assert calls() == before
    assert all(
        (a == np.asarray(b)).all() for a, b in zip(leaves, jax.tree.leaves(args), strict=True)
    )
    assert mixed(*args) == first == pp.auto_mixed(fn, POLICY)(*args)


def test_classes_are_as_before_when_the_trace_raises():
    before = calls()

    def wrong(model: Any, x: Any) -> Any:
        assert vars(NnxModel)["__call__"] is not before[NnxModel]
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        pp.auto_mixed(wrong, POLICY)(NnxModel(nnx.Rngs(0)), X)
    assert calls() == before


def test_other_threads_call_the_methods_as_before():
    before, seen = calls(), []
    model, other = NnxModel(nnx.Rngs(0)), EqxModel(jax.random.key(1))

    def names() -> list[str]:
        return [str(eqn.source_info.name_stack) for eqn in jax.make_jaxpr(other)(X[0]).eqns]

    as_written = names()

    def beside() -> None:
        seen.append(names())
        seen.append(pp.auto_mixed(of_equinox()[0], POLICY)(other, X))

    def fn(model: Any, x: Any) -> Any:
        thread = threading.Thread(target=beside)
        thread.start()
        thread.join()
        assert vars(NnxModel)["__call__"] is not before[NnxModel]  # this trace is not over
        return model(x).sum()

    pp.auto_mixed(fn, POLICY)(model, X)
    assert seen[0] == as_written and len(seen) == 2
    assert calls() == before


def test_a_trace_with_names_is_not_used_where_they_are_not_asked_for():
    model = NnxModel(nnx.Rngs(0))
    whole = jax.jit(lambda x: model(x))  # its trace is cached by JAX

    def names(policy: Any) -> set[str]:
        plan = pp.inspect(lambda x: whole(x).sum(), policy)(X).plan
        return {info.scope for inner in plan.decisions[0].inner for info in inner.eqn_infos}

    for _ in range(2):
        assert names("AutoMixedBf16") == {""}
        assert "encoder/layers/1/attention/q" in names(POLICY)
        assert {str(eqn.source_info.name_stack) for eqn in whole.trace(X).jaxpr.eqns} == {""}


def test_a_layer_that_is_called_by_itself_has_its_place_in_the_argument():
    def fn(model: Any, x: Any) -> Any:
        return model.head(model.encoder(x)).sum()

    args = (NnxModel(nnx.Rngs(0)), X)
    assert wide_products(fn, args, "encoder/layers/2/attention") == (2, 10)
    assert wide_products(nnx.grad(fn), args, "head") == (3, 28)


def applied_by(transform: Any) -> Any:
    def fn(model: Any, x: Any) -> Any:
        for layer in model.encoder.layers:
            x = jax.vmap(transform(layer))(x)
        return jax.vmap(model.head)(x).sum()

    return fn


def test_a_checkpointed_layer_is_known_by_its_arrays():
    args = (EqxModel(jax.random.key(0)), X)
    fn = applied_by(eqx.filter_checkpoint)
    assert wide_products(fn, args, "encoder/layers/1/attention") == (2, 10)
    assert wide_products(fn, args, "encoder") == (9, 10)


def test_inside_of_a_transform_that_hides_which_it_is_a_layer_has_its_class_as_its_name():
    args = (EqxModel(jax.random.key(0)), X)
    fn = applied_by(lambda layer: lambda x: eqx.filter_jit(lambda f, x: f(x))(layer, x))
    assert wide_products(fn, args, "EqxLayer") == (9, 10)
    assert wide_products(fn, args, "EqxLayer/attention/q") == (3, 10)


class EqxStack(eqx.Module):
    """A stack of layers that a scan slices, and a layer of the same class and shapes."""

    layers: eqx.nn.Linear
    head: eqx.nn.Linear

    def __init__(self, key: Any):
        def made(key: Any) -> Any:
            return eqx.nn.Linear(4, 4, key=key)

        self.layers = eqx.filter_vmap(made)(jax.random.split(key, 3))
        self.head = made(key)

    def __call__(self, x: Any) -> Any:
        arrays, rest = eqx.partition(self.layers, eqx.is_array)
        x, _ = jax.lax.scan(lambda x, each: (eqx.combine(each, rest)(x), None), x, arrays)
        return self.head(x)


def test_a_slice_of_a_stack_does_not_have_the_name_of_a_layer_of_its_shapes():
    def fn(model: Any, x: Any) -> Any:
        return jax.vmap(model)(x)

    args = (EqxStack(jax.random.key(0)), X)
    assert wide_products(fn, args, "head") == (1, 2)
    assert wide_products(fn, args, "Linear") == (1, 2)


class NnxPair(nnx.Module):
    """Two layers of one class and of the same shapes, which no method calls."""

    def __init__(self, rngs: Any):
        self.encoder, self.decoder = NnxAttention(rngs), NnxAttention(rngs)


class EqxPair(eqx.Module):
    encoder: EqxAttention
    decoder: EqxAttention

    def __init__(self, key: Any):
        self.encoder, self.decoder = (EqxAttention(k) for k in jax.random.split(key))


@pytest.mark.release(keep=2)
@pytest.mark.parametrize(
    ("model", "gradient"),
    [
        (NnxPair(nnx.Rngs(0)), nnx.grad),
        (NnxPair(nnx.Rngs(0)), nnx.value_and_grad),
        (EqxPair(jax.random.key(0)), eqx.filter_grad),
        (EqxPair(jax.random.key(0)), jax.grad),
    ],
    ids=["nnx.grad", "nnx.value_and_grad", "eqx.filter_grad", "jax.grad"],
)
def test_layers_alike_that_a_loss_calls_are_told_apart_by_their_arrays(model: Any, gradient: Any):
    def loss(model: Any, x: Any) -> Any:
        each = jax.vmap if isinstance(model, EqxPair) else lambda layer: layer
        return jnp.square(each(model.decoder)(jnp.tanh(each(model.encoder)(x)))).sum()

    step = gradient(loss)
    wide, of = wide_products(step, (model, X), "encoder")
    assert (wide, of) == (4, 10)  # two layers forward, and their weights' gradients
    wide, of = wide_products(step, (model, X), "decoder/q")
    assert (wide, of) == (3, 10)  # and the cotangent of its operand


def test_a_rule_for_a_layer_is_a_value_like_other_rules():
    rule = pp.Rule(module="encoder/*", precision="f32")
    assert repr(rule) == "Rule(module='encoder/*', precision='f32')"
    assert eval(repr(rule), vars(pp)) == rule == pickle.loads(pickle.dumps(rule))
    with pytest.raises(ValueError, match=r"module=5.*glob"):
        pp.Rule(module=5, precision="f32")


def test_the_method_of_a_module_is_a_root_too():
    (model, x), other = of_nnx()[1], NnxHead(nnx.Rngs(0))
    assert wide_products(model.__call__, (x,), "encoder/layers/1/attention") == (2, 10)
    assert wide_products(other.logits, (x,), "inner/encoder/layers/*/attention/q") == (3, 10)


class NnxHead(nnx.Module):
    def __init__(self, rngs: Any):
        self.inner = NnxModel(rngs)

    def logits(self, x: Any) -> Any:
        return self.inner(x)


@pytest.mark.release(keep=1)
@pytest.mark.parametrize("made", [of_nnx, of_equinox, of_linen, of_haiku])
def test_a_layer_that_is_not_there_is_reported_with_those_that_are(made: Any):
    fn, args = made()
    policy = pp.AutoMixedBf16.with_rules(pp.Rule(module="decoder/layers/1/q", precision="f32"))
    with pytest.warns(pp.PrecisionWarning, match="matched no equation") as caught:
        pp.auto_mixed(fn, policy)(*args)
    text = str(caught[0].message)
    shown = text.partition("its innermost layers are ")[2]
    assert text.startswith("Rule(module='decoder/layers/1/q'") and shown.endswith(" more")
    for path in shown.rpartition(" and ")[0].split(", "):
        assert wide_products(fn, args, path.strip("'"))[0] > 0


def test_a_rule_for_a_layer_of_a_function_without_layers_says_that_there_is_none():
    policy = pp.AutoMixedBf16.with_rules(pp.Rule(module="head", precision="f32"))
    with pytest.warns(
        pp.PrecisionWarning, match="no layer of a flax, equinox, haiku or keras model"
    ):
        pp.auto_mixed(lambda x: x @ x.T, policy)(X)
