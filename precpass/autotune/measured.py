"""The profit model whose times are measured on the device, once for each distinct product."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from precpass.autotune import timing
from precpass.autotune.cache import TimingCache, cache_folder, file_name
from precpass.devices.detect import device_for
from precpass.devices.devices import Device
from precpass.plan.reasons import Reason
from precpass.planner.profit import Assumed, Product, ProductTimes, sentence

__all__ = ["LONGEST", "MARGIN", "TICK", "Measured", "measured"]


MARGIN = 0.03
"""The fraction of its float32 time that lowering must save for a timed product to pay."""


TICK = 1e-6
"""The seconds that it must save as well: minima of equal calls were seen to differ by 0.6 us."""


LONGEST = 0.5
"""A product that by the table takes at least this many seconds in float32 is not timed."""


Probe = Callable[[Product, Any], ProductTimes]


class Measured:
    """The profit model of measured times.

    Args:
        device: its figures give the times of products that are not timed.
        place: the JAX device.
        verdicts: the cache of times.
        probe: times a product on the JAX device; by default that of `precpass.autotune.timing`.
    """

    def __init__(
        self, device: Device, place: Any, verdicts: TimingCache, probe: Probe | None = None
    ) -> None:
        self.device = device
        self._place = place
        self._cache_of = verdicts
        self._probe = probe
        self._table = Assumed(device)
        self._not_timed: dict[str, str] = {}

    @property
    def costs(self) -> str:
        """The device on which products were timed."""
        return f"measured on {self.device}, jax {jax.__version__}"

    def least_gain(self, wide: float) -> float:
        """The seconds that the noise of a measurement may account for."""
        return MARGIN * wide + TICK

    def sentence(self, product: Product, product_times: ProductTimes) -> Reason:
        """The reason that a timed product does not pay."""
        is_measured = product_times.by == "measured"
        by = f"measured on {self.device}" if is_measured else product_times.by
        return sentence(product, product_times._replace(by=by), "here")

    def new_warnings(self) -> tuple[str, ...]:
        """Warnings of what is wrong with the file."""
        return self._cache_of.new_warnings()

    def product_times(self, product: Product) -> ProductTimes:
        """The times of a product: cached, measured now, or by the table."""
        name = product.text
        cache = self._cache_of.get(name)
        if cache is not None:
            return cache
        if name not in self._not_timed:
            if self._table.product_times(product).wide > LONGEST:
                self._not_timed[name] = "too long to be timed"
            else:
                try:
                    times = (self._probe or timing.timed)(product, self._place)
                    return self._cache_of.put(name, times)
                except timing.NotTimed as error:
                    self._not_timed[name] = str(error)
        return self._table.by_table(product, f"assumed: {self._not_timed[name]}")


def measured(place: Any) -> Measured:
    """The profit model for a JAX device, with the times in the user's cache folder."""
    return _measured(place, cache_folder())


@functools.lru_cache(maxsize=64)
def _measured(place: Any, folder: Path) -> Measured:
    device = device_for(device=place)
    # XLA_FLAGS change what is compiled, so they are part of the cache key.
    flags = " ".join(sorted(os.environ.get("XLA_FLAGS", "").split()))
    kind = f"{device.platform} {device.kind}" + (f", XLA_FLAGS {flags}" if flags else "")
    path = folder / file_name(kind, jax.__version__)
    return Measured(device, place, _cache_of(path, kind))


@functools.lru_cache(maxsize=64)
def _cache_of(path: Path, kind: str) -> TimingCache:
    return TimingCache(path, kind, jax.__version__)
