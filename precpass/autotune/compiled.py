"""The form of a whole program that its compiler makes the best of, found by compiling candidates.

What a product gains alone does not tell what a program gains: XLA fuses casts, widens what it has
no kernel for, and keeps in memory what it cannot fuse. So the whole program is compiled in a few
forms, and the cheapest counts. On a TPU a program costs the compiler's own estimate of its cycles.
Elsewhere, and where that compiler has no estimate of some kernels, it costs the time of its bytes
at the device's bandwidth and of its products' arithmetic at the device's peaks
(`precpass.devices.peaks`): a roofline, and no measurement. Nothing is run, so the same program
has the same form every time.

The forms (`precpass.autotune.forms`) stand in the order of their accuracy, and a later one is
chosen if it saves `MIN_GAIN` of the cost, or of the temporary memory at hardly more cost
(`MAX_LOSS`).
The choices are kept in a file (`precpass.autotune.cache`).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from precpass import jaxpr as ir
from precpass.autotune.apart import all_apart
from precpass.autotune.cache import Cache, cache_folder, file_name
from precpass.autotune.forms import FORMS, forms_of, in_form
from precpass.devices.detect import device_for, is_present, planned_for
from precpass.devices.peaks import Device
from precpass.measure.counts import count
from precpass.measure.roofline import roofline
from precpass.measure.traffic import traffic_of
from precpass.policy.policy import PrecisionPolicy
from precpass.policy.precision import Precision
from precpass.units import sized

__all__ = ["MIN_GAIN", "Choice", "Figures", "choice_of", "compiles_at_once", "figures_of"]

MIN_GAIN = 0.03
"""The fraction of the cost, or of the temporary memory, that a less accurate form must save."""
MAX_LOSS = 0.01
"""The fraction of the cost that may be lost where temporary memory is saved."""

_WAY_OF_COUNTING = 5
"""A part of each choice's key. It is raised when costs are counted in another way, because a choice
by the former costs, which a file may hold, is then not the cheapest any more."""


class Choice(NamedTuple):
    """The form of a program.

    Attributes:
        form: one of `FORMS`.
        costs: each candidate that was compiled, with its cost to that of the first, and the bytes
            of its temporary memory.
    """

    form: str
    costs: tuple[tuple[str, float, float], ...]

    def text(self, device: Device) -> str:
        """What was compared, and on which device, in words."""
        each = [f"{name} {cost:.2f} (temp {sized(temp)})" for name, cost, temp in self.costs]
        costs = ", ".join(each)
        return (
            f"compiled for {device}, jax {jax.__version__}: {self.form} was chosen, by estimated "
            f"time and temporary memory: {costs}"
        )


class Figures(NamedTuple):
    """What a compiled program costs.

    Attributes:
        cycles: the compiler's estimate; 0 where it has none, or leaves out some kernels.
        seconds: the time of its bytes at the device's bandwidth and of its products' arithmetic at
            the device's peaks: a roofline.
        temp: the bytes of its temporary memory.
    """

    cycles: float
    seconds: float
    temp: float


def choice_of(
    jaxpr: ir.Jaxpr,
    policy: PrecisionPolicy,
    scope: str,
    place: Any,
    rewritten: Callable[[PrecisionPolicy], ir.Jaxpr],
) -> tuple[Choice, tuple[str, ...]]:
    """The form of a program on a device, and warnings of what is wrong with the file of choices.

    The form is read from the file, or found by compiling all of them.

    Args:
        jaxpr: the program.
        policy: the user's.
        scope: the name scope around it.
        place: the JAX device, which need not be there, or a `Target`.
        rewritten: the program under another policy.

    Raises:
        RuntimeError: if no candidate can be compiled.
    """
    if symbol := ir.symbol_in(ir.in_avals(jaxpr)):
        raise RuntimeError(f"XLA compiles for numbers, and {symbol} is symbolic")
    device = device_for(place)
    flags = " ".join(sorted(os.environ.get("XLA_FLAGS", "").split()))
    kind = f"{device.platform} {device.kind}" + (f", XLA_FLAGS {flags}" if flags else "")
    cache = _cache_of(cache_folder() / file_name(kind, jax.__version__), kind)
    key = _key(jaxpr, policy, scope)
    choice = cache.get(key) or cache.put(key, _found(jaxpr, policy, place, rewritten))
    return choice, cache.new_warnings()


def _key(jaxpr: ir.Jaxpr, policy: PrecisionPolicy, scope: str) -> str:
    """A digest of all that a choice depends on beside the device."""
    text = re.sub(r"0x[0-9a-f]+", "", str(jaxpr))  # addresses of functions
    orders = sorted(map(str, policy.orders))
    parts = (text, repr(policy), orders, scope, ir.in_x64(), list(FORMS), _WAY_OF_COUNTING)
    return hashlib.sha256(repr(parts).encode()).hexdigest()


@functools.lru_cache(maxsize=64)
def _cache_of(path: Path, kind: str) -> Cache[Choice]:
    return Cache(path, kind, jax.__version__, _parsed)


def _parsed(found: Sequence[Any]) -> Choice:
    form, costs = found
    if form not in FORMS:
        raise ValueError(f"{form!r} is not a form of a program")
    if form not in (name for name, *_ in costs):
        raise ValueError(f"{form!r} has no cost")
    return Choice(form, tuple((str(n), float(cost), float(temp)) for n, cost, temp in costs))


# ---------------------------------------------------------------- compiling


def _found(
    jaxpr: ir.Jaxpr,
    policy: PrecisionPolicy,
    place: Any,
    rewritten: Callable[[PrecisionPolicy], ir.Jaxpr],
) -> Choice:
    """The choice, by compiling each distinct candidate."""
    figures = _figures(policy, place, rewritten)
    # Cycles do not compare with seconds: where one form has no estimate, all are judged by seconds.
    in_cycles = all(x.cycles for x in figures.values())
    costs = {form: x.cycles if in_cycles else x.seconds for form, x in figures.items()}
    chosen, *_ = figures
    for form, cost in costs.items():
        best, least, temp = costs[chosen], figures[chosen].temp, figures[form].temp
        saves_memory = (
            cost <= (1 + MAX_LOSS) * best and least > 0 and temp <= (1 - MIN_GAIN) * least
        )
        saves = saves_memory or cost <= (1 - MIN_GAIN) * best
        chosen = form if saves else chosen
    base, *_ = costs.values()
    each = tuple(
        # a program of empty arrays costs nothing
        (form, round(cost / base, 4) if base else 1.0, figures[form].temp)
        for form, cost in costs.items()
    )
    return Choice(chosen, each)


def _figures(
    policy: PrecisionPolicy, place: Any, rewritten: Callable[[PrecisionPolicy], ir.Jaxpr]
) -> dict[str, Figures]:
    """What each form costs, but for those that cannot be compiled.

    Raises:
        RuntimeError: if none can.
    """
    texts: dict[str, str] = {}
    distinct: dict[str, ir.Jaxpr] = {}
    failed: list[Exception] = []
    for form in forms_of(policy):
        try:
            program = rewritten(in_form(policy, form))
        except Exception as error:
            failed.append(error)
        else:
            texts[form] = str(program)
            distinct.setdefault(texts[form], program)
    x64 = ir.in_x64()
    works = [functools.partial(figures_of, program, place, x64) for program in distinct.values()]
    groups = [works] if compiles_at_once(place) else [[work] for work in works]
    results = dict(zip(distinct, (x for group in groups for x in all_apart(group)), strict=True))
    figures: dict[str, Figures] = {}
    for form, text in texts.items():
        match results[text]:
            case Figures() as result:
                figures[form] = result
            case error:
                failed.append(error)
    if not figures:
        raise RuntimeError(f"no form of the program can be compiled: {failed[0]}") from failed[0]
    return figures


def compiles_at_once(place: Any) -> bool:
    """Whether several programs may be compiled for a device at once, in threads.

    For a GPU that is there XLA times kernels on it while it compiles, and so one after another.
    """
    return getattr(place, "platform", "cpu") != "gpu" or not is_present(place)


def figures_of(jaxpr: ir.Jaxpr, place: Any, x64: bool) -> Figures:
    """What a program costs on a device, by compiling it for that.

    Args:
        jaxpr: the program.
        place: the JAX device, which need not be there, or a `Target`.
        x64: whether the program was traced with x64 on.
    """
    sharding = jax.sharding.SingleDeviceSharding(getattr(place, "device", place))
    absent = contextlib.nullcontext() if is_present(place) else planned_for(place)
    # Settings of the whole process hold in this thread too, but not the caller's.
    with jax.enable_x64(x64), jax.disable_jit(False), jax.debug_nans(False), absent:
        shapes = [
            jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)
            for aval in ir.in_avals(jaxpr)
        ]
        program = jax.jit(lambda *xs: ir.evaluate(jaxpr, xs)).lower(*shapes).compile()
    platform = getattr(place, "platform", "cpu")
    traffic, memory = traffic_of(program.as_text() or "", platform), program.memory_analysis()
    temp = float(memory.temp_size_in_bytes) if memory is not None else 0.0
    cycles = 0.0 if traffic.without_cycles else float(traffic.cycles or 0)
    device = device_for(place)
    narrow = {str(p): p for p in Precision if p.is_low or p.is_scaled}
    seconds = roofline(
        traffic,
        count(jaxpr),
        device.peaks.bandwidth,
        lambda name, _asked: device.flops(narrow.get(name, Precision.F32)),
    )
    return Figures(cycles, seconds or 0.0, temp)
