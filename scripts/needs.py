"""Errors of programs whose readers need float32's digits of a product, beside mixed by hand.

Each program has such a reader, and a small network that needs no more than bfloat16. "By hand" is
how somebody who knows writes it: the network's products in bfloat16, the one that is needed exactly
in float32. "All in bfloat16" has both in bfloat16.

    scripts/needs.py             prints the table
    scripts/needs.py --record    puts it into scripts/results/needs.json, beside other versions'
"""

import argparse
import json
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from eight_bits_compiled import today
from render_results import RESULTS, rendered_table

import precpass as pp
from precpass.devices.cpu_info import cpu_info

TEXT = (
    "Errors relative to float32, norm by norm: of values, and of gradients in both orders, "
    "auto_mixed(grad(f)) and grad(auto_mixed(f)). For integers the share that is wrong, for a loop "
    "its trips (500 is where it was stopped), for pixels the largest distance in pixels."
)
MOST_TRIPS = 500
NOT_FINITE = "not finite"
COLUMNS = ["what readers need", "figure", "by hand", "all in bfloat16", "auto(f)", "grad(auto)"]

Product = Callable[[Any, Any], Any]
Program = Callable[[Product, Product, Any], Any]

rng = np.random.default_rng(0)


def normal(*shape: int) -> Any:
    return rng.standard_normal(shape).astype(np.float32)


N = 64
ORTHOGONAL = np.linalg.qr(normal(N, N))[0]
SPD = ((ORTHOGONAL * np.linspace(1, 3, N)) @ ORTHOGONAL.T).astype(np.float32)
LAYERS = normal(N, N) / 8, normal(N, N) / 8
FREQUENCIES = (normal(3, N) * 10).astype(np.float32)
BINS = (np.sign(np.linspace(-20, 20, 255)) * np.expm1(abs(np.linspace(-20, 20, 255)))).astype("f")
HEAD = normal(N, 255) / 8
CELLS = (np.eye(3) / 0.37).astype(np.float32)
CAMERA = np.array([[500, 0, 320], [0, 500, 240], [0, 0, 1]], np.float32)


def wide(x: Any, w: Any) -> Any:
    return jnp.matmul(x, w)


def low(x: Any, w: Any) -> Any:
    x, w = (jnp.asarray(v).astype(jnp.bfloat16) for v in (x, w))
    return jnp.matmul(x, w, preferred_element_type=jnp.float32)


def network(free: Product, x: Any) -> Any:
    """Two layers, whose products nobody needs exactly."""
    for w in LAYERS:
        x = jnp.tanh(free(x, w))
    return x


def trips(exact: Product, free: Product, b: Any) -> Any:
    """Richardson iterations until the residual is small."""

    def step(state: Any) -> Any:
        x, _, n = state
        residual = b - exact(SPD, x)
        return x + 0.5 * residual, jnp.linalg.norm(residual), n + 1

    start = jnp.zeros_like(b), jnp.float32(1), 0
    return jax.lax.while_loop(lambda s: (s[1] > 1e-4) & (s[2] < MOST_TRIPS), step, start)[2]


def cells(exact: Product, free: Product, positions: Any) -> Any:
    return jnp.floor(exact(positions, CELLS)).astype(jnp.int32)


def likelihood(exact: Product, free: Product, x: Any) -> Any:
    """The log-determinant of a matrix less another one, and a network of its factor."""
    a = ORTHOGONAL * 0.999
    factor = jnp.linalg.cholesky(jnp.eye(N) - exact(a.T, a) + 1e-3 * jnp.eye(N) * jnp.mean(x**2))
    return jnp.log(jnp.diagonal(factor)).sum() + network(free, factor).mean()


def fourier_features(exact: Product, free: Product, points: Any) -> Any:
    return jnp.square(network(free, jnp.sin(exact(points, FREQUENCIES)))).mean()


def timesteps(exact: Product, free: Product, times: Any) -> Any:
    """An embedding of times: a product over one term."""
    angles = exact(times[:, None], np.geomspace(1, 1e-3, N // 2, dtype=np.float32)[None])
    return jnp.square(network(free, jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1))).mean()


def second_moments(exact: Product, free: Product, x: Any) -> Any:
    """A sum over rows that has no free dimension."""
    x = network(free, x) + 20
    lower = (lambda v: v.astype(jnp.bfloat16)) if exact is low else lambda v: v
    square = jnp.einsum("bd,bd->b", lower(x), lower(x), preferred_element_type=jnp.float32)
    return jnp.log(square / N - jnp.mean(x, -1) ** 2 + 1e-3).sum()


def pixels(exact: Product, free: Product, depth: Any) -> Any:
    """Centres of pixels made rays and projected again."""
    rows, columns = jnp.meshgrid(jnp.arange(480) + 0.5, jnp.arange(640) + 0.5, indexing="ij")
    centres = jnp.stack([columns, rows, jnp.ones_like(rows)], -1).reshape(-1, 3)
    rays = exact(centres, np.linalg.inv(CAMERA).T.astype(np.float32))
    return exact(rays * depth, CAMERA.T)[:, :2] / depth


def expected_value(exact: Product, free: Product, x: Any) -> Any:
    """The mean of bins from -5e8 to 5e8 under a softmax that is nearly even."""
    return jnp.arcsinh(exact(jax.nn.softmax(free(network(free, x), HEAD) / 50), BINS)).sum()


PROGRAMS: dict[str, tuple[Program, Any]] = {
    "a loop that ends on a tolerance": (trips, normal(N)),
    "whole numbers": (cells, rng.uniform(0, 300, (300, 3)).astype(np.float32)),
    "a factorization": (likelihood, normal(N)),
    "phases": (fourier_features, normal(256, 3)),
    "a product over one term": (timesteps, np.linspace(0, 1000, 256, dtype=np.float32)),
    "a product without a free dimension": (second_moments, normal(256, N)),
    "a grid": (pixels, np.float32(3)),
    "a table of both signs": (expected_value, normal(256, N)),
}


def error(name: str, got: Any, want: Any) -> int | float | str:
    """The figure of a row."""
    if name.startswith("a loop"):
        return int(got)
    if name == "whole numbers":
        return round(float(np.mean(np.any(got != want, -1))), 2)
    if name == "a grid":
        return round(float(np.abs(got - want).max()), 2)
    figure = float(np.linalg.norm(got - want) / np.linalg.norm(want))
    return float(f"{figure:.2g}") if np.isfinite(figure) else NOT_FINITE


def rows() -> Iterator[list[Any]]:
    """The table's rows: a value, and a gradient where there is one, of each kind."""
    for name, (program, x) in PROGRAMS.items():

        def as_written(x: Any, program: Program = program) -> Any:
            return program(wide, wide, x)

        def by_hand(x: Any, program: Program = program) -> Any:
            return program(wide, low, x)

        def all_low(x: Any, program: Program = program) -> Any:
            return program(low, low, x)

        def row(*runs: Callable[..., Any], name: str = name, x: Any = x) -> list[Any]:
            want, *got = (np.asarray(jax.jit(run)(x)) for run in runs)
            return [error(name, out, want) for out in got]

        yield [name, "value", *row(as_written, by_hand, all_low, pp.auto_mixed(as_written)), None]
        if jax.eval_shape(as_written, x).shape == ():
            grad = jax.grad
            if name.startswith("a loop"):
                continue
            orders = pp.auto_mixed(grad(as_written)), grad(pp.auto_mixed(as_written))
            yield ["", "gradient", *row(grad(as_written), grad(by_hand), grad(all_low), *orders)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--record", action="store_true", help="keep the table")
    record = parser.parse_args().record
    table = {"columns": COLUMNS, "rows": list(rows())}
    print("\n".join(rendered_table(table)))
    if record:
        path = RESULTS / "needs.json"
        title = "Readers that need float32's digits"
        kept = json.loads(path.read_text()) if path.exists() else {"parts": []}
        part = f"jax {jax.__version__}, {cpu_info().model}, {today()}"
        parts = [p for p in kept["parts"] if f"jax {jax.__version__}," not in p["title"]]
        parts = sorted([*parts, {"title": part, "tables": [table]}], key=lambda p: p["title"])
        result = {"title": title, "measured": today(), "text": TEXT, "parts": parts}
        path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
