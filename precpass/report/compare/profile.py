"""`profile`: a function's costs under several policies, measured here and estimated elsewhere."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec

import jax

from precpass.api import mixed_of
from precpass.devices.peaks import Peaks, peaks_of
from precpass.devices.targets import target_of
from precpass.jit.staged import AtArguments, in_two_steps, owner_of
from precpass.measure.counts import count
from precpass.measure.roofline import Work, work_of
from precpass.policy.presets import AlwaysF32
from precpass.report.compare.profiled import Estimate, Profile, ProfileRow
from precpass.report.compare.programs import (
    Made,
    Policies,
    Program,
    Progress,
    Subject,
    entries,
    rounds_of,
    timed,
)
from precpass.view.progress import telling

__all__ = ["DEVICES", "PROFILED", "profile"]

P = ParamSpec("P")

DEVICES = ("a100", "h100", "h200", "mi300x", "v4", "v5e", "v5p", "v6e")
"""The devices for which estimates are made if none is named."""
PROFILED = ("AlwaysF32", "AutoMixedBf16")
"""The rows of a profile that names none."""


@in_two_steps
def profile(
    fn: Callable[P, Any],
    policies: Policies | None = None,
    *,
    devices: str | Sequence[str] | None = DEVICES,
    rounds: int | None = None,
    target: Any = None,
    progress: Progress | None = None,
) -> AtArguments[P, Profile]:
    """Measure time, memory, FLOPs and bytes under several policies, and estimate other devices.

    Each row is traced, compiled and timed in rounds in which every row takes its turn, as by
    `compare`, which reports what the rows cost in accuracy. FLOPs and the bytes that kernels move
    are counted in the traced program, with the trip counts of its loops
    (`precpass.analysis.sizes.NOMINAL_SIZE` for a count that is only known at run time, as of a
    while loop). Memory is what XLA allocates on the device that the program is compiled for.

    For other devices the gain is estimated by a roofline (`precpass.measure.roofline`): a kernel
    takes the time of its arithmetic, at the device's published dense peak for the format of its
    operands, or the time of its bytes, at the memory's published bandwidth, whichever is longer.
    The gain is the sum of these times under `AlwaysF32` divided by the row's. float32 matrix
    products count as JAX runs them by default, unless the program asks for more: in TF32 on
    NVIDIA's GPUs, in float32 on AMD's, in one bfloat16 pass on TPUs. Kernels are those of a model
    of XLA's fusion, the same for all devices (`precpass.measure.kernels`).

    It is an upper estimate from peaks, not a measurement. Launches, caches, communication between
    devices, arithmetic outside matrix products, and losses against a peak are left out; if they
    take time, low precision gains less. A cast of an operand in memory counts in full, as the
    planner counts it; if XLA fuses it into the matrix product, as on TPUs, low precision gains
    more.

    Args:
        fn: the function, or the result of `auto_mixed`, whose options are then used.
        policies: one per row, as for `compare`; by default float32 and the default policy.
        devices: for which a gain is estimated: "a100" (80 GB), "a100-40gb", "h100", "h200",
            "mi300x", "v4", "v5e", "v5p", "v6e"; () for none of them, None for those of the default.
        rounds: how many times each row is timed, by default 10; 0 for no times. Nothing runs then,
            and the arguments may be `jax.ShapeDtypeStruct`s.
        target: the device that the rows are planned and compiled for, which need not be present, as
            in `compare`. Nothing runs then.
        progress: as for `compare`.

    Returns:
        A function that takes the arguments of `fn`, and returns a `Profile`.

    Raises:
        TypeError: for a row that is neither policy nor function, a name that is not a text, and (of
            the returned function) shapes in the place of arrays where rows are timed.
        ValueError: for an unknown policy, device or target, a negative `rounds`, `rounds` with a
            target, names that are given twice, and no rows.

    Examples:
        >>> import jax.numpy as jnp
        >>> x = jax.ShapeDtypeStruct((8192, 8192), jnp.float32)
        >>> found = profile(jnp.dot, ["AlwaysF32", "AutoMixedBf16"], devices="h100", rounds=0)(x, x)
        >>> wide, low = found.rows
        >>> low.counts.flops == {"bf16": 2.0 * 8192**3}, low.memory.arguments
        (True, 536870912)
        >>> 1.5 < low.estimates[0].gain < 2.0  # 2 is the ratio of the peaks
        True
    """
    target = target_of(target)
    timed_rounds = rounds_of(rounds, target)
    peaks = peaks_of(DEVICES if devices is None else devices)
    rows = entries(PROFILED if policies is None else policies, "profile")
    fn, owner = owner_of(fn)
    subject = mixed_of(fn)

    def profiled(*args: Any, **kwargs: Any) -> Profile:
        at = Subject.at(
            subject,
            owner,
            args,
            kwargs,
            "profile",
            takes_shapes=timed_rounds == 0,
            hint="; with rounds=0 nothing runs, and shapes will do",
            target=target,
        )
        with telling(progress, f"profile {at.name}") as tell:
            return _profile(at, rows, peaks, timed_rounds, tell)

    return profiled


def _profile(
    subject: Subject, made: Sequence[Made], peaks: Sequence[Peaks], rounds: int, progress: Progress
) -> Profile:
    total = 1 + len(made) + rounds
    progress("the float32 program", 0, total)
    wide = subject.call(AlwaysF32)
    base = work_of(wide.fn.trace(*wide.args, **wide.kwargs).jaxpr)
    programs: list[Program] = []
    rows: list[ProfileRow] = []
    for done, one in enumerate(made, 1):
        progress(one[0], done, total)
        try:
            programs.append(subject.program(one))
        except Exception as error:
            error.add_note(f"in the row {one[0]!r} of profile")
            raise
        rows.append(_row(programs[-1], base, peaks))
    if rounds:
        times = timed(programs, rounds, progress, total)
        rows = [
            dataclasses.replace(row, timing=timing, ratio=ratio)
            for row, (timing, ratio) in zip(rows, times, strict=True)
        ]
    device = f"{programs[0].device_kind}, jax {jax.__version__}"
    return Profile(subject.name, tuple(rows), rounds, device, tuple(peaks))


def _row(program: Program, base: Work, peaks: Sequence[Peaks]) -> ProfileRow:
    work = work_of(program.executable.jaxpr)
    return ProfileRow(
        program.name,
        program.call.policy,
        count(program.executable.jaxpr),
        program.executable.memory,
        None,
        None,
        work.nbytes,
        tuple(_estimate(work, base, of) for of in peaks),
        work.guesses,
        tuple(sorted(work.by_bytes)),
        program.traffic,
        program.refused,
    )


def _estimate(work: Work, base: Work, peaks: Peaks) -> Estimate:
    wide, seconds = base.seconds(peaks), work.seconds(peaks)
    missing = work.without_peak(peaks) | base.without_peak(peaks)
    gain = None
    if wide is not None and seconds is not None:
        # a program that moves nothing
        gain = wide / seconds if seconds else 1.0
    return Estimate(peaks.aliases[0], seconds, gain, tuple(sorted(missing)))
