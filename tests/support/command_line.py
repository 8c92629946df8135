"""What the tests of the command line share: a module with functions, and how a command is run."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

from precpass.cli import main

MODEL = """
import jax
import jax.numpy as jnp
import precpass as pp
from jax import lax


def loss(w, x):
    return jnp.square(jnp.tanh(x @ w)).mean()


grad = jax.grad(loss)
half = pp.auto_mixed(loss, policy="AutoMixed")


def example():
    return jnp.ones((64, 32)), jnp.ones((16, 64))


def keywords():
    return {"params": {"w": jnp.ones((8, 4)), "b": jnp.zeros(4)}, "x": jnp.ones((2, 8))}


def dense(params, x, scale=1.0):
    return scale * (x @ params["w"] + params["b"][None])


def broken(x):
    raise KeyError("the user's own")


def ranged(x, w):
    return jnp.exp(8 * (x @ w))


def powers(x, n):
    for _ in range(n):
        x = x @ x
    return x


def mapped(c, w):
    return lax.map(lambda x: jnp.tanh(x @ w), c)


number = 3
"""
SHAPES = "f32[64,32], f32[16,64]"


def written(tmp_path, monkeypatch) -> Iterator[Path]:
    """The module as a file of the working directory."""
    path = tmp_path / "a_model.py"
    path.write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    known = set(sys.modules)
    yield path
    for name in sys.modules.keys() - known:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def ran(capsys, *argv):
    """Exit status, standard output, standard error."""
    status = main(argv)
    said = capsys.readouterr()
    return status, said.out, said.err


def command(*argv):
    """The command line of a process."""
    return [sys.executable, "-m", "precpass", *argv]


def environment(**more):
    """The environment of a process."""
    package = str(Path(__file__).parents[2])
    return {**os.environ, "PYTHONPATH": package, "JAX_PLATFORMS": "cpu", **more}
