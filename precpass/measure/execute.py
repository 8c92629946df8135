"""Compiles programs, and measures their memory and time.

All reports and benchmarks take their figures from here, so that these mean the same everywhere;
`audit` compiles here and counts the products in the compiled text.

- A program is traced and compiled separately from its runs (`compiled`).
- Its operations are counted in its jaxpr (`counts.count`), with the trip counts of its loops,
  because XLA's `cost_analysis` counts a scan's body once.
- Memory is what XLA planned for the compiled program (`Memory`).
- A run's time ends when its results are there (`timed`). Programs run in rounds in which each
  takes its turn, so that disturbances of the machine affect all of them, and in which each comes
  after every other one, so that the contents of caches do too (`interleaved`). A figure is the
  median over the rounds, its spread the interquartile range.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from precpass import jaxpr as ir
from precpass.analysis.graph import Graph
from precpass.devices.detect import device_of_call, is_present
from precpass.devices.targets import memory_of
from precpass.measure.traffic import Traffic, traffic_of

__all__ = [
    "Executable",
    "Memory",
    "Timing",
    "check_callbacks",
    "check_sizes",
    "compiled",
    "interleaved",
    "is_jitted",
    "timed",
]

# ---------------------------------------------------------------- compiling


@dataclasses.dataclass(frozen=True)
class Memory:
    """What XLA planned for one run of a compiled program, in bytes (its `memory_analysis`).

    Attributes:
        arguments: the bytes of the operands.
        outputs: the bytes of the results.
        aliased: the bytes of results that replace donated operands.
        temp: all other bytes.
        available: the bytes that a GPU has, if it is one of the targets; None for other devices.
        devices: how many devices the program is divided over. All bytes are those of one of them.
    """

    arguments: int
    outputs: int
    aliased: int
    temp: int
    available: int | None = None
    devices: int = 1

    @property
    def needed(self) -> int:
        """The bytes that one run needs at once."""
        return self.arguments + self.outputs - self.aliased + self.temp

    @property
    def fits(self) -> bool:
        """Whether the device has as many bytes as are needed; True if its memory is not known."""
        return self.available is None or self.needed <= self.available


@dataclasses.dataclass(frozen=True, eq=False)
class Executable:
    """A program that was compiled for certain arguments, and not run.

    Attributes:
        jaxpr: its jaxpr.
        lowered: the `jax.stages.Lowered`: the program that XLA was given.
        compiled: the `jax.stages.Compiled`, which takes the arguments that are not static; None if
            the compiler has refused the program.
        device: the device that it was compiled for, the first of several.
        memory: the memory that XLA planned; None if the backend does not tell.
        donates: whether a run may overwrite arguments.
        refused: the error of a compiler that refuses the program, which may need more memory than
            the device has; None if it has not. A refusal is kept only for a device that is not
            there, because a report shows it then; for one that is there the error is raised.
    """

    jaxpr: Any
    lowered: Any
    compiled: Any
    device: Any
    memory: Memory | None
    donates: bool
    refused: RuntimeError | None = None

    @functools.cached_property
    def traffic(self) -> Traffic:
        """What one run does, as the compiled text has it.

        Raises:
            RuntimeError: that of the compiler, if it has refused the program.
        """
        if self.refused is not None:
            raise self.refused
        return traffic_of(self.compiled.as_text(), self.device.platform)


def compiled(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Executable:
    """Traces a function once, and compiles it.

    JAX caches the program, so a later call of the same `jax.jit` or `auto_mixed` function with
    such arguments compiles nothing.

    Args:
        fn: a function that `is_jitted`; any other one is given to `jax.jit`.
        args: its arguments.
        kwargs: the others.

    The device is that of `planned_for`, of the arguments, or JAX's default one.

    Raises:
        ValueError: for a function that calls Python on the host or has a `jax.Ref`, and a device
            that is not there.
        RuntimeError: if JAX asks a device that is not there while it lowers the function.

    Examples:
        >>> import jax.numpy as jnp
        >>> from precpass.measure.counts import count
        >>> program = compiled(lambda x: x @ x, jnp.ones((4, 4)))
        >>> count(program.jaxpr).products, program.memory.arguments
        (1, 64)
    """
    jitted: Any = fn if is_jitted(fn) else jax.jit(fn)
    traced = jitted.trace(*args, **kwargs)
    place = device_of_call((args, kwargs, getattr(jitted, "in_shardings", None)))
    place = getattr(place, "device", place)
    check_callbacks(traced.jaxpr, place)
    lowered = _lowered(traced, place)
    donates = any(info.donated for info in jax.tree.leaves(lowered.args_info))
    try:
        program = lowered.compile()
    except RuntimeError as error:
        if is_present(place):
            raise
        return Executable(traced.jaxpr, lowered, None, place, None, donates, error)
    # An executable for a device that is not there has no local devices, but its operands say where.
    local_devices = getattr(program.runtime_executable(), "local_devices", list)()
    device = local_devices[0] if local_devices else place
    memory = _memory(lowered, program, memory_of(device.device_kind))
    return Executable(traced.jaxpr, lowered, program, device, memory, donates)


def _lowered(traced: Any, place: Any) -> Any:
    """Lowers a traced program for a device.

    Raises:
        RuntimeError: if JAX asks a device that is not there while it lowers the program. For
            `jnp.linalg.eig` on a GPU it asks cuSOLVER for its version.
        NotImplementedError: if JAX has no rule for a primitive on the device's platform.
    """
    if is_present(place):
        return traced.lower()
    # Without arguments a program is lowered for JAX's default device.
    with jax.default_device(place):
        try:
            return traced.lower()
        except NotImplementedError:
            raise  # JAX's own text names the primitive and the platform
        except RuntimeError as error:
            raise RuntimeError(
                f"JAX cannot lower the function for {place.device_kind} on a machine without one: "
                f"{error}. Lowering asked the device or its libraries, as it does for "
                "jnp.linalg.eig on a GPU: leave that out, or run this where the device is"
            ) from error


def check_callbacks(jaxpr: ir.Jaxpr, device: Any) -> None:
    """Refuses a program that needs this machine's memory or Python, on a device that is not there.

    Args:
        jaxpr: the program.
        device: that on which it is to run; None for one of this machine.

    Raises:
        ValueError: the text names the primitive and the line, or the `jax.Ref`.
    """
    if device is None or is_present(device):
        return
    closed_over = [jax.typeof(x) for x in ir.consts_of(jaxpr) if isinstance(x, jax.Ref)]
    refs = [aval for aval in (*ir.in_avals(jaxpr), *closed_over) if ir.is_ref(aval)]
    if refs:
        raise ValueError(
            f"the function reads or writes a jax.Ref, {refs[0].str_short()}, which is in this "
            "machine's memory and not in that of a device that is not there: pass its value, "
            "ref[...], and return the new one"
        )
    graph = Graph.build(jaxpr)
    for row, eqn in enumerate(graph.eqns):
        name = eqn.primitive.name
        if "callback" in name or name == "debug_print":
            raise ValueError(
                f"the function calls Python on the host ({name} at {graph.source(row)}), and a "
                "device that is not there has no host: leave the callback out"
            )


def check_sizes(report: str, argument: Any, name: str) -> None:
    """Refuses shapes with symbolic dimensions, for which XLA compiles nothing.

    Args:
        report: the report's name, for the error.
        argument: an argument of the function that is to be compiled, a tree.
        name: its name.

    Raises:
        TypeError: naming the argument and the dimension.
    """
    for path, x in jax.tree_util.tree_flatten_with_path(argument)[0]:
        if symbol := ir.symbol_in([x]):
            raise TypeError(
                f"{report} compiles the function, and {name}{jax.tree_util.keystr(path)} has the "
                f"symbolic dimension {symbol}: give a number in its place (inspect and explain "
                "take symbolic ones)"
            )


def is_jitted(fn: Callable[..., Any]) -> bool:
    """Whether `jax.jit` or `auto_mixed` made a function.

    The jits of other libraries have methods of the same names, but their results lack attributes.

    Examples:
        >>> import jax.numpy as jnp
        >>> is_jitted(jax.jit(jnp.sin)), is_jitted(lambda x: x)
        (True, False)
    """
    # `Mixed` is defined above this module, so it is recognised by an attribute of its class. The
    # object's attributes tell nothing, because bound methods show them and functools.wraps copies
    # them, as jax.grad and nnx.jit do.
    return isinstance(fn, _JITTED) or getattr(type(fn), "stages", False)


_JITTED = type(jax.jit(lambda: None))


def _memory(lowered: Any, program: Any, available: int | None) -> Memory | None:
    analysis = program.memory_analysis()
    if analysis is None:
        return None
    attributes = lowered.compiler_ir().operation.attributes
    return Memory(
        analysis.argument_size_in_bytes,
        analysis.output_size_in_bytes,
        analysis.alias_size_in_bytes,
        analysis.temp_size_in_bytes,
        available,
        int(attributes["mhlo.num_partitions"]),
    )


# ---------------------------------------------------------------- timing


@dataclasses.dataclass(frozen=True)
class Timing:
    """The time of each measured run of a program, in seconds, in the order of the rounds.

    Examples:
        >>> timing = Timing((1.0, 2.0, 4.0, 3.0, 9.0))
        >>> timing.median, timing.quartiles, timing.spread
        (3.0, (2.0, 4.0), 2.0)
    """

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """The median."""
        return statistics.median(self.seconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        """The lower and the upper quartile, interpolated between runs."""
        if len(self.seconds) == 1:
            return self.seconds * 2  # pyright: ignore[reportReturnType] -- of length 2
        lower, _, upper = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return lower, upper

    @property
    def spread(self) -> float:
        """The interquartile range: the upper quartile less the lower one."""
        lower, upper = self.quartiles
        return upper - lower

    def ratios(self, base: Timing) -> Timing:
        """Each run over the run of `base` in the same round."""
        return Timing(tuple(a / b for a, b in zip(self.seconds, base.seconds, strict=True)))


def timed(
    run: Callable[..., Any], *args: Any, clock: Callable[[], float] = time.perf_counter
) -> tuple[Any, float]:
    """The results of a call, and the seconds until they were there (`block_until_ready`).

    Args:
        run: the call.
        args: its arguments.
        clock: in seconds; `time.process_time` for the CPU time of all threads.
    """
    start = clock()
    out = jax.block_until_ready(run(*args))
    return out, clock() - start


def _order(names: Sequence[str], turn: int) -> list[str]:
    """The order of one round, balanced for first-order carry-over (Williams 1949).

    https://doi.org/10.1071/CH9490149
    """
    n = len(names)
    zigzag = [(k + 1) // 2 if k % 2 else n - k // 2 for k in range(n)]
    order = [names[(k + turn) % n] for k in zigzag]
    return order[::-1] if n % 2 and turn % 2 else order


def interleaved(
    runs: Mapping[str, Callable[..., Any]],
    rounds: int,
    *,
    prepare: Callable[[str], Sequence[Any]] = lambda _name: (),
    warm_up: int = 1,
    clock: Callable[[], float] = time.perf_counter,
    progress: Callable[[int], None] = lambda _round: None,
) -> dict[str, Timing]:
    """Times calls in rounds, in each of which every one takes its turn.

    The order changes with the round: what runs just before leaves caches as it does, so every
    call comes after every other equally often, and is first equally often, over as many
    rounds as there are calls (over twice as many where their number is odd).

    Args:
        runs: name -> a call that is compiled already.
        rounds: how many are measured, at least 1.
        prepare: gives the arguments of a call, by its name. It runs before each turn and
            outside of the time: the place to copy arguments that the call donates.
        warm_up: how many rounds run before, unmeasured.
        clock: in seconds.
        progress: is told each round's number before it starts; those of the warm-up
            are negative.

    Returns:
        A `Timing` per name, whose runs are those of the same rounds.

    Raises:
        ValueError: for less than one round.

    Examples:
        >>> import jax.numpy as jnp
        >>> f = jax.jit(lambda x: x + 1)
        >>> found = interleaved({"f": f}, 3, prepare=lambda _: (jnp.ones(4),))
        >>> len(found["f"].seconds)
        3
    """
    if rounds < 1:
        raise ValueError(f"rounds={rounds!r}: at least one round is measured")
    names = list(runs)
    seconds_of: dict[str, list[float]] = {name: [] for name in names}

    def turn_of(name: str) -> float:
        # A function, so that a turn's arguments and results are freed before the next turn.
        args = prepare(name)
        jax.block_until_ready(args)
        return timed(runs[name], *args, clock=clock)[1]

    for turn in range(-warm_up, rounds):
        progress(turn)
        for name in _order(names, turn):
            took = turn_of(name)
            if turn >= 0:
                seconds_of[name].append(took)
    return {name: Timing(tuple(times)) for name, times in seconds_of.items()}
