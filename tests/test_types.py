"""The types that an editor shows: those of the user's own function."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pyright")

SOURCE = """
import jax
import jax.numpy as jnp
import precpass as pp


@pp.auto_mixed
def bare(x: int, *, scale: float = 1) -> str: ...


@pp.auto_mixed(policy="bf16", static_argnums=0)
def options(x: int) -> str: ...


def plain(x: int, y: str = "") -> float: ...


class Model:
    @pp.auto_mixed
    def method(self, x: int) -> str: ...


reveal_type(bare)
reveal_type(bare(1, scale=2.0))
reveal_type(options(1))
reveal_type(pp.auto_mixed(plain, jnp.bfloat16)(1))
reveal_type(Model().method)
reveal_type(pp.monitor(plain)(1))
reveal_type(pp.compare(plain))
reveal_type(pp.inspect(plain))
reveal_type(pp.inspect(plain)(jax.ShapeDtypeStruct((), float)))
reveal_type(pp.explain(plain)(1))
reveal_type(pp.audit(plain, "bf16"))
reveal_type(pp.bisect(plain, None, 0.1))
reveal_type(pp.with_fallback(plain)(1, "a"))
reveal_type(pp.loss_scale.scaled_value_and_grad(plain))
reveal_type(pp.cast_floating({"w": 1.0}, "compute"))
bare("wrong")
"""
WANTED = [
    "Mixed[(x: int, *, scale: float = 1), str]",
    "str",
    "str",
    "float",
    "(x: int) -> str",
    "tuple[float, Health]",
    'AtArguments[(x: int, y: str = ""), Comparison]',
    'AtArguments[(x: int, y: str = ""), Inspection]',
    "Inspection",
    "Explanation",
    'AtArguments[(x: int, y: str = ""), Audit]',
    '(x: int, y: str = "") -> Bisection',
    "tuple[float, FallbackReport]",
    '(LossScale, x: int, y: str = "") -> tuple[Any, Any, Array]',
    "dict[str, float]",
]


def test_the_types_are_the_functions_own(tmp_path: Path):
    (tmp_path / "program.py").write_text(SOURCE)
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable]
    root = Path(__file__).resolve().parents[1]
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({"extraPaths": [str(root)]}))
    run = subprocess.run([*command, "program.py"], cwd=tmp_path, capture_output=True, text=True)
    found = json.loads(run.stdout)["generalDiagnostics"]
    types = [d["message"].split(" is ", 1)[1].strip('"') for d in found if " is " in d["message"]]
    assert types[: len(WANTED)] == WANTED
    (error,) = [d["message"] for d in found if d["severity"] == "error"]
    assert '"x" of type "int"' in error and "wrong" in error
