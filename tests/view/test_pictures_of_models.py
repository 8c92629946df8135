"""Pictures of models: layers by name, repeated ones as one with their number."""

import xml.etree.ElementTree as ET

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import precpass as pp
from tests.view.test_pictures import classes, texts

WIDTH, HEADS, LAYERS = 16, 2, 12
TOKENS = jnp.zeros((2, 8), jnp.int32)


class Block(nnx.Module):
    def __init__(self, rngs):
        self.ln1 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.ln2 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.ln1(x))
        return x + self.down(nnx.gelu(self.up(self.ln2(x))))


class Transformer(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(32, WIDTH, rngs=rngs)
        self.layers = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.head = nnx.Linear(WIDTH, 32, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = x + nn.MultiHeadDotProductAttention(num_heads=HEADS)(nn.LayerNorm()(x))
        y = nn.gelu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x)))
        return x + nn.Dense(WIDTH)(y)


class LinenTransformer(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(32, WIDTH)(tokens)
        for _ in range(LAYERS):
            x = LinenBlock()(x)
        return nn.Dense(32)(nn.LayerNorm()(x))


class HaikuBlock(hk.Module):
    def __call__(self, x):
        scale = hk.initializers.VarianceScaling()
        y = hk.LayerNorm(-1, True, True)(x)
        attend = hk.MultiHeadAttention(HEADS, WIDTH // HEADS, w_init=scale, name="attention")
        x = x + attend(y, y, y)
        y = jax.nn.gelu(hk.Linear(4 * WIDTH, name="up")(hk.LayerNorm(-1, True, True)(x)))
        return x + hk.Linear(WIDTH, name="down")(y)


class HaikuTransformer(hk.Module):
    def __call__(self, tokens):
        x = hk.Embed(32, WIDTH)(tokens)
        for _ in range(LAYERS):
            x = HaikuBlock()(x)
        return hk.Linear(32, name="head")(x)


class Mlp(eqx.Module):
    first: eqx.nn.Linear
    rest: list

    def __init__(self, key):
        keys = jax.random.split(key, 5)
        self.first = eqx.nn.Linear(8, WIDTH, key=keys[0])
        self.rest = [eqx.nn.Linear(WIDTH, WIDTH, key=k) for k in keys[1:]]

    def __call__(self, x):
        x = jax.nn.relu(self.first(x))
        for layer in self.rest:
            x = jax.nn.relu(layer(x))
        return x


def of_nnx(take):
    return pp.inspect(take(lambda model, tokens: model(tokens).sum()))(
        Transformer(nnx.Rngs(0)), TOKENS
    )


def of_linen(take):
    model = LinenTransformer()
    params = jax.eval_shape(model.init, jax.random.key(0), TOKENS)
    return pp.inspect(take(lambda params, tokens: model.apply(params, tokens).sum()))(
        params, TOKENS
    )


def of_haiku(take):
    model = hk.without_apply_rng(hk.transform(lambda tokens: HaikuTransformer()(tokens).sum()))
    params = jax.eval_shape(model.init, jax.random.key(0), TOKENS)
    return pp.inspect(take(model.apply))(params, TOKENS)


def of_equinox(take):
    model = Mlp(jax.random.key(0))
    return pp.inspect(take(lambda model, x: jax.vmap(model)(x).sum()))(model, jnp.ones((4, 8)))


CASES = {
    "nnx": (lambda: of_nnx(lambda f: f), 1),
    "nnx, gradient": (lambda: of_nnx(nnx.grad), 2),
    "linen": (lambda: of_linen(lambda f: f), 1),
    "linen, gradient": (lambda: of_linen(jax.grad), 2),
    "haiku": (lambda: of_haiku(lambda f: f), 1),
    "haiku, gradient": (lambda: of_haiku(jax.grad), 2),
}
NAMES = {
    "nnx": [
        "model: Transformer",
        f"layer: Block \u00d7{LAYERS}",
        "attention: MultiHeadAttention",
        "query: LinearGeneral",
        "ln1: LayerNorm",
        "up: Linear",
        "down: Linear",
        "gelu",
        "head: Linear",
    ],
    "linen": [
        "LinenTransformer",
        f"LinenBlock \u00d7{LAYERS}",
        "MultiHeadDotProductAttention_0",
        "query",
        "LayerNorm_0",
        "LayerNorm_1",
        "Dense_0",
        "Dense_1",
        "gelu",
    ],
    "haiku": [
        "haiku_transformer",
        f"haiku_block \u00d7{LAYERS}",
        "attention",
        "query",
        "layer_norm",
        "layer_norm_1",
        "up",
        "down",
        "gelu",
        "head",
    ],
}


@pytest.mark.release(keep=1)
@pytest.mark.parametrize("name", CASES)
def test_a_transformer_is_drawn_by_its_layers_once_for_each_direction(name):
    make, directions = CASES[name]
    root = ET.fromstring(make().draw().svg)
    shown = texts(root)
    for layer in NAMES[name.partition(",")[0]]:
        assert shown.count(layer) >= directions, (layer, shown)
    block = NAMES[name.partition(",")[0]][1]
    assert shown.count(block) == directions
    assert len(classes(root)) <= 60 and float(root.get("width")) <= 1000
    assert ("backward" in shown) == (directions == 2)
    # each layer of all blocks is one box, and what it computes low is counted over all of them
    assert any(text.startswith(f"{LAYERS}/{LAYERS} low") for text in shown)


def test_layers_of_equinox_have_their_names_and_numbers():
    shown = texts(ET.fromstring(of_equinox(jax.grad).draw(boxes=30).svg))
    assert "model: Mlp" in shown
    assert shown.count("first: Linear") == 2 and shown.count("layer: Linear \u00d74") == 2


class EquinoxBlock(eqx.Module):
    norm: eqx.nn.LayerNorm
    mlp: eqx.nn.MLP
    out: eqx.nn.Linear

    def __call__(self, x):
        return x + jax.vmap(self.out)(jax.vmap(self.mlp)(jax.vmap(self.norm)(x)))


def test_a_layer_that_calls_jitted_functions_says_how_many_times_it_is_called():
    keys = jax.random.split(jax.random.key(0), 6)
    blocks = [
        EquinoxBlock(
            eqx.nn.LayerNorm(WIDTH),
            eqx.nn.MLP(WIDTH, WIDTH, WIDTH, 1, key=key),
            eqx.nn.Linear(WIDTH, WIDTH, key=key),
        )
        for key in keys
    ]

    def loss(blocks, x):
        for block in blocks:
            x = block(x)
        return x.sum()

    found = pp.inspect(eqx.filter_grad(loss))(blocks, jnp.ones((4, WIDTH)))
    shown = texts(ET.fromstring(found.draw().svg))
    assert shown.count("block: EquinoxBlock \u00d76") == 2
    assert "mlp: MLP" in [text.removeprefix("self.") for text in shown]


def test_layers_of_one_shape_are_one_and_others_are_not():
    class Stack(nn.Module):
        @nn.compact
        def __call__(self, x):
            for width in (8, 8, 8, 8, 24, 16):
                x = jnp.tanh(nn.Dense(width)(x)) * 2
            return x

    model = Stack()
    x = jnp.ones((4, 8))
    found = pp.inspect(model.apply)(jax.eval_shape(model.init, jax.random.key(0), x), x)
    shown = texts(ET.fromstring(found.draw(boxes=20).svg))
    assert {"Dense_0 \u2026 Dense_3 \u00d74", "Dense_4", "Dense_5"} <= set(shown)


def test_under_a_rule_that_names_layers_each_layer_is_one_box():
    model = eqx.nn.MLP(8, 8, 16, depth=2, key=jax.random.key(0))
    policy = pp.AutoMixedBf16.with_rules(pp.Rule(module="layers/1", precision="f32"))
    inspection = pp.inspect(lambda model, x: jax.vmap(model)(x), policy)(model, jnp.ones((4, 8)))
    shown = texts(ET.fromstring(inspection.draw().svg))
    assert {"layers", "0", "1", "2"} <= set(shown)
    assert not any("Linear" in text or "MLP" in text for text in shown)
