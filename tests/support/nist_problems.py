"""NIST's 27 nonlinear regression problems: the files read, the models as they stand in them.

Statistical Reference Datasets, https://www.itl.nist.gov/div898/strd/nls/nls_main.shtml. The files
in `data/nist_strd` have the start points, the parameters certified to 11 digits, and the
observations.
"""

import dataclasses
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

FOLDER = Path(__file__).parents[1] / "data" / "nist_strd"
CERTIFIED_DIGITS = 11
Model = Callable[[Any, Any], Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
    """A regression problem in float64.

    Attributes:
        starts: the two start points, of shape (2, parameters).
        certified: the parameters of the best fit.
        squares: the certified sum of squares of the residual.
        x: the predictor, of shape (observations,); Nelson's two are of shape (2, observations).
        y: the response; of Nelson its logarithm.
    """

    name: str
    model: Model
    starts: np.ndarray
    certified: np.ndarray
    squares: float
    x: np.ndarray
    y: np.ndarray

    def residual(self, b: Any, _args: Any = None) -> Any:
        return self.model(b, self.x) - self.y


def lre(found: Any, certified: np.ndarray) -> float:
    """The least number of correct digits of any parameter, 0 to 11."""
    with np.errstate(divide="ignore"):
        digits = -np.log10(np.abs(np.asarray(found, np.float64) - certified) / np.abs(certified))
    return float(np.min(np.clip(np.nan_to_num(digits, nan=0.0), 0.0, CERTIFIED_DIGITS)))


def read(name: str) -> Problem:
    lines = (FOLDER / f"{name}.dat").read_text(encoding="ascii").splitlines()
    rows = [re.findall(r"\S+", line.split("=", 1)[1]) for line in lines if _PARAMETER.match(line)]
    starts_and_certified = np.asarray(rows, np.float64)[:, :3].T
    squares = next(line for line in lines if line.startswith("Residual Sum of Squares"))
    first = 1 + max(i for i, line in enumerate(lines) if line.startswith("Data:"))
    y, *x = np.asarray([line.split() for line in lines[first:] if line.strip()], np.float64).T
    return Problem(
        name,
        MODELS[name],
        starts_and_certified[:2],
        starts_and_certified[2],
        float(squares.split(":")[1]),
        np.stack(x) if len(x) > 1 else x[0],
        np.log(y) if name == "Nelson" else y,
    )


@functools.cache
def problems() -> dict[str, Problem]:
    return {name: read(name) for name in MODELS}


_PARAMETER = re.compile(r"\s*b\d\s*=(\s+\S+){4}\s*$")


def rising(b: Any, x: Any) -> Any:
    return b[0] * (1 - jnp.exp(-b[1] * x))


def chwirut(b: Any, x: Any) -> Any:
    return jnp.exp(-b[0] * x) / (b[1] + b[2] * x)


def enso(b: Any, x: Any) -> Any:
    def cycle(cos: Any, sin: Any, period: Any) -> Any:
        angle = 2 * np.pi * x / period
        return cos * jnp.cos(angle) + sin * jnp.sin(angle)

    return b[0] + cycle(b[1], b[2], 12.0) + cycle(b[4], b[5], b[3]) + cycle(b[7], b[8], b[6])


def gauss(b: Any, x: Any) -> Any:
    def peak(height: Any, middle: Any, width: Any) -> Any:
        return height * jnp.exp(-((x - middle) ** 2) / width**2)

    return b[0] * jnp.exp(-b[1] * x) + peak(b[2], b[3], b[4]) + peak(b[5], b[6], b[7])


def cubics(b: Any, x: Any) -> Any:
    above = b[0] + b[1] * x + b[2] * x**2 + b[3] * x**3
    return above / (1 + b[4] * x + b[5] * x**2 + b[6] * x**3)


def lanczos(b: Any, x: Any) -> Any:
    return sum(b[i] * jnp.exp(-b[i + 1] * x) for i in (0, 2, 4))


def roszman(b: Any, x: Any) -> Any:
    return b[0] - b[1] * x - jnp.arctan(b[2] / (x - b[3])) / np.pi


MODELS: dict[str, Model] = {
    "Bennett5": lambda b, x: b[0] * (b[1] + x) ** (-1 / b[2]),
    "BoxBOD": rising,
    "Chwirut1": chwirut,
    "Chwirut2": chwirut,
    "DanWood": lambda b, x: b[0] * x ** b[1],
    "ENSO": enso,
    "Eckerle4": lambda b, x: b[0] / b[1] * jnp.exp(-0.5 * ((x - b[2]) / b[1]) ** 2),
    "Gauss1": gauss,
    "Gauss2": gauss,
    "Gauss3": gauss,
    "Hahn1": cubics,
    "Kirby2": lambda b, x: (b[0] + b[1] * x + b[2] * x**2) / (1 + b[3] * x + b[4] * x**2),
    "Lanczos1": lanczos,
    "Lanczos2": lanczos,
    "Lanczos3": lanczos,
    "MGH09": lambda b, x: b[0] * (x**2 + x * b[1]) / (x**2 + x * b[2] + b[3]),
    "MGH10": lambda b, x: b[0] * jnp.exp(b[1] / (x + b[2])),
    "MGH17": lambda b, x: b[0] + b[1] * jnp.exp(-x * b[3]) + b[2] * jnp.exp(-x * b[4]),
    "Misra1a": rising,
    "Misra1b": lambda b, x: b[0] * (1 - (1 + b[1] * x / 2) ** (-2)),
    "Misra1c": lambda b, x: b[0] * (1 - (1 + 2 * b[1] * x) ** (-0.5)),
    "Misra1d": lambda b, x: b[0] * b[1] * x * (1 + b[1] * x) ** (-1),
    "Nelson": lambda b, x: b[0] - b[1] * x[0] * jnp.exp(-b[2] * x[1]),
    "Rat42": lambda b, x: b[0] / (1 + jnp.exp(b[1] - b[2] * x)),
    "Rat43": lambda b, x: b[0] / (1 + jnp.exp(b[1] - b[2] * x)) ** (1 / b[3]),
    "Roszman1": roszman,
    "Thurber": cubics,
}


def padded(problem: Problem, start: int) -> tuple[np.ndarray, Any]:
    """The unknowns and the arguments of `any_residual` for a problem: of one shape for all."""
    unknowns, size = 9, 250
    missing = size - len(problem.y)
    x = np.zeros((2, size))
    x[: problem.x.ndim] = np.pad(
        problem.x, [(0, 0)] * (problem.x.ndim - 1) + [(0, missing)], "edge"
    )
    counts = np.arange(size) < len(problem.y)
    b = np.pad(problem.starts[start], (0, unknowns - len(problem.certified)))
    kind = np.int32(list(MODELS).index(problem.name))
    return b, (kind, x, np.pad(problem.y, (0, missing)), counts.astype(np.float64))


def any_residual(b: Any, args: Any) -> Any:
    """The residual of any problem, so that all are one program that is compiled once."""
    kind, x, y, counts = args
    x = jnp.asarray(x)

    def branch(name: str) -> Callable[[Any], Any]:
        return lambda b: MODELS[name](b, x if name == "Nelson" else x[0])

    return (lax.switch(kind, [branch(name) for name in MODELS], b) - y) * counts
