"""Pictures and pages of a few programs, as they were when somebody last looked at them.

Where one changes on purpose, write it anew with `pytest tests/view --update-snapshots`, under the
oldest and the newest supported JAX, and look at it in a browser: its file is in `tests/data/pages`.
JAX's releases differentiate in other equations, so each has files of its own for gradients.
"""

import functools
import re
import warnings
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import precpass as pp
from tests.support.values import f32
from tests.view import pictured

FOLDER = Path(__file__).resolve().parents[1] / "data" / "pages"
RELEASE = "0.10" if jax.__version_info__ < (0, 11) else "0.12"
X, W = f32(8, 8), f32(8, 8)
PARAMS = {
    "table": f32(32, 16),
    "blocks": [
        {**dict.fromkeys("qkv", f32(16, 16)), "up": f32(16, 64), "down": f32(64, 16)}
        for _ in range(12)
    ],
}
TOKENS = jax.ShapeDtypeStruct((8,), jnp.int32)


def picture(fn, *args, **options) -> str:
    return pp.inspect(fn)(*args).draw(**options).svg


def page(shown) -> str:
    """The HTML of a report, without style, script and picture, which are the same everywhere."""
    text = re.sub(r"<(style|svg|script)\b.*?</\1>", "", shown._repr_html_(), flags=re.DOTALL)
    return text.replace("><", ">\n<")


def health():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pp.PrecisionWarning)
        monitored, ones = pp.monitor(pictured.broken), jnp.ones((16, 16))
        return monitored(ones)[1].merged(monitored(0 * ones)[1])


def policy():
    rule = pp.Rule(scope="*/<head>", precision="f32")
    return pp.AutoMixedBf16.with_rules(rule).with_output("bf16")


def gradient_of_layers(count: int):
    return jax.grad(functools.partial(pictured.layers, count=count))


SNAPSHOTS: dict[str, Callable[[], str]] = {
    "equations.svg": lambda: picture(pictured.equations, X, W),
    "loop.svg": lambda: picture(pictured.loop, X, W),
    "flow.svg": lambda: picture(pictured.flow, X, W),
    "unrolled.svg": lambda: picture(pictured.unrolled, X, W),
    "unequal.svg": lambda: picture(pictured.unequal, f32(4, 4), f32(1024, 1024)),
    "names.svg": lambda: picture(pictured.oddly_named, X, W, boxes=200),
    "few boxes.svg": lambda: picture(pictured.layers, X, W, boxes=3),
    "stored, gradient.svg": lambda: picture(jax.grad(pictured.stored, 1), X, W),
    "equations, gradient.svg": lambda: picture(gradient_of_layers(1), X, W, boxes=400),
    "layers, gradient.svg": lambda: picture(gradient_of_layers(100), X, W),
    "transformer, gradient.svg": lambda: picture(jax.grad(pictured.transformer), PARAMS, TOKENS),
    "inspection.html": lambda: page(pp.inspect(pictured.layers)(X, W)),
    "explanation.html": lambda: page(pp.explain(pictured.layers)(X, W)),
    "plan.html": lambda: page(pp.inspect(pictured.loop)(X, W).plan),
    "policy.html": lambda: page(policy()),
    "wide policy.html": lambda: page(pp.AlwaysF32),
    "health.html": lambda: page(health()),
}


@pytest.mark.parametrize("name", SNAPSHOTS)
def test_a_picture_or_page_is_as_somebody_last_saw_it(
    name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(FOLDER.parents[2])  # from which paths are shown
    path = FOLDER / (f"{RELEASE} {name}" if "gradient" in name else name)
    found = SNAPSHOTS[name]()
    if request.config.getoption("--update-snapshots"):
        path.write_text(found, encoding="utf-8", newline="\n")
    assert found == path.read_text(encoding="utf-8"), "look at it; then give --update-snapshots"


def test_each_snapshot_has_a_test():
    names = {path.name.removeprefix("0.10 ").removeprefix("0.12 ") for path in FOLDER.iterdir()}
    assert names == set(SNAPSHOTS)
