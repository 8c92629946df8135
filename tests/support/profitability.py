"""What the tests of profitability share: a network, a probe without a clock, and what is asked."""

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import precpass as pp
from precpass.autotune.measured import _cache_of, _measured
from precpass.autotune.timing import timed
from precpass.devices.devices import device_named
from precpass.planner.profit import Product, ProductTimes
from precpass.types import Action

# that in force in the tests refuses (`conftest`)
REAL = timed
MEASURED = pp.AutoMixedBf16.with_profitability("measured")
ASSUMED = pp.AutoMixedBf16.with_profitability("assumed")
H200 = device_named("gpu", "NVIDIA H200")


def mlp(params, x):
    for w, b in params:
        x = jax.nn.relu(x @ w + b[None])
    return x


def weights(*widths: int) -> list[Any]:
    rng = np.random.default_rng(0)
    pairs = itertools.pairwise(widths)
    return [(jnp.asarray(rng.random((m, n), np.float32)), jnp.zeros(n)) for m, n in pairs]


PARAMS = weights(8, 16, 16, 4)


class Clock:
    """Stands in for `timed`: products of one row take twice as long low."""

    def __init__(self, ratio: Callable[[Product], float] | None = None) -> None:
        self.asked: list[Product] = []
        self.devices: list[Any] = []
        self.ratio = ratio or (lambda product: 2.0 if 1 in product.avals[0][1] else 0.5)
        self.seconds = 1e-5

    def __call__(self, product: Product, device: Any) -> ProductTimes:
        self.asked.append(product)
        self.devices.append(device)
        ratio = self.ratio(product)
        return ProductTimes(self.seconds, self.seconds * ratio, "measured")


def restarted() -> None:
    """What a process knows is forgotten, as in a new one."""
    _measured.cache_clear()
    _cache_of.cache_clear()


def products(found: pp.report.Inspection) -> list[pp.types.Decision]:
    return [d for eqn, d, _ in found.decisions() if eqn.primitive.name == "dot_general"]


def actions(fn: Callable[..., Any], policy: Any, *args: Any) -> list[Action]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pp.PrecisionWarning)
        return [d.action for d in products(pp.inspect(fn, policy)(*args))]
