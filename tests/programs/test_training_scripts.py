"""The training scripts of the documentation: they learn, go on from a checkpoint, and are low."""

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import precpass as pp

pytestmark = pytest.mark.programs

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "docs" / "pages"
FOLDER = PAGES / "how-to" / "training"
SCRIPTS = sorted(FOLDER.glob("*.py"))


@pytest.fixture(autouse=True)
def promotion_as_users_have_it():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def loaded(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"training_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def nnx_arguments(script: ModuleType, x: Any, y: Any) -> tuple[Any, ...]:
    return *script.create(100), x, y


def linen_arguments(script: ModuleType, x: Any, y: Any) -> tuple[Any, ...]:
    return script.create(100), x, y


def equinox_arguments(script: ModuleType, x: Any, y: Any) -> tuple[Any, ...]:
    return (x, y, jax.random.key(0)), script.create()


ARGUMENTS: dict[str, Callable[..., tuple[Any, ...]]] = {
    "equinox_model": equinox_arguments,
    "flax_linen": linen_arguments,
    "flax_nnx": nnx_arguments,
}

each_script = pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)


@pytest.mark.release(keep=1)
@each_script
def test_it_learns_and_goes_on_from_its_checkpoint(path, tmp_path, capsys):
    script = loaded(path)
    script.main(tmp_path, epochs=2)
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == [
        "epoch 1",
        "epoch 2",
    ]
    assert script.main(tmp_path) > 0.95
    assert capsys.readouterr().out.startswith("epoch 3:")
    # nothing is left to be done
    assert script.main(tmp_path) > 0.95
    assert capsys.readouterr().out == ""


@each_script
def test_all_products_of_a_step_are_in_bfloat16_and_its_results_in_float32(path):
    script = loaded(path)
    (x, y), _ = script.data()
    args = ARGUMENTS[path.stem](script, x[: script.BATCH], y[: script.BATCH])
    found = pp.inspect(script.train_step)(*args)
    products = [d for d in found.plan.walk() if d.kind is pp.types.OpKind.COMPUTE]
    # forward, and backward for the weights and (but in the first layer) for the inputs
    assert len(products) == 8
    assert {d.compute for d in products} == {pp.types.Precision.BF16}
    floats = {a.dtype for a in found.after.out_avals if jnp.issubdtype(a.dtype, jnp.floating)}
    assert floats == {jnp.dtype("float32")}


def test_the_page_shows_every_script():
    text = (PAGES / "how-to" / "training.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^<!-- file: training/(\w+)\.py -->$", text, re.MULTILINE)) == {
        path.stem for path in SCRIPTS
    }
    assert set(ARGUMENTS) == {path.stem for path in SCRIPTS}
