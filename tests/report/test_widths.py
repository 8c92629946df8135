"""No line of a report is longer than the terminal, whatever the program."""

import functools
import re
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import precpass as pp

WIDTH, TOKENS = 32, jnp.zeros((2, 8), jnp.int32)


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, WIDTH, decode=False, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x = x + self.attention(self.norm(x))
        return x + self.down(nnx.gelu(self.up(x)))


class Transformer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(32, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])
        self.head = nnx.Linear(WIDTH, 32, rngs=rngs)

    def __call__(self, tokens: Any) -> Any:
        x = self.embed(tokens)
        for i in range(len(self.blocks)):
            x = self.blocks[i](x)
        return self.head(x)


def loss(model: Transformer, tokens: Any) -> Any:
    return -jax.nn.log_softmax(model(tokens))[..., 0].mean()


PROGRAMS: dict[str, Any] = {"forward": loss, "gradient": nnx.grad(loss)}
ROWS = ["AlwaysF32", "AutoMixedF16"]
LINEAR = pp.Rule(file="*/linear.py", precision="f32")
SOME = pp.AutoMixedBf16.with_rules(LINEAR, pp.Rule(scope="*/nowhere/at/all", precision="f32"))

REPORTS: dict[str, Callable[[Any], Callable[..., Any]]] = {
    "explain": lambda f: pp.explain(f),
    "explain, some in float32": lambda f: pp.explain(f, SOME),
    "diff": lambda f: lambda *xs: pp.inspect(f)(*xs).diff(),
    "diff of lines": lambda f: lambda *xs: pp.inspect(f)(*xs).diff("lines"),
    "explain, coloured": lambda f: lambda *xs: pp.inspect(f)(*xs).explain().text(color=True),
    "between": lambda f: (
        lambda *xs: pp.between(pp.inspect(f)(*xs).plan, pp.inspect(f, "AutoMixedF16")(*xs).plan)
    ),
    "compare": lambda f: pp.compare(f, ROWS, rounds=1),
    "profile": lambda f: pp.profile(f, ROWS, rounds=0),
    "audit": lambda f: pp.audit(f, "AutoMixedF16"),
    "bisect": lambda f: pp.bisect(f, "AutoMixedBf16", 1e-9, budget=3),
    "monitor": lambda f: lambda *xs: pp.monitor(f)(*xs)[1].summary(),
}


@functools.cache
def model() -> Transformer:
    with promoting():
        return Transformer(nnx.Rngs(0))


def promoting() -> Any:
    return jax.numpy_rank_promotion("allow")


@pytest.mark.release(keep=12)
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("report", REPORTS)
def test_no_line_of_a_report_is_longer_than_the_terminal(report, program, monkeypatch):
    with promoting(), jax.numpy_dtype_promotion("standard"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        monkeypatch.setenv("COLUMNS", "80")
        found = REPORTS[report](PROGRAMS[program])(model(), TOKENS)
    lines = re.sub(r"\x1b\[[\d;]*m", "", str(found)).splitlines()
    assert [line for line in lines if len(line) > 80] == []
