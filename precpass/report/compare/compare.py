"""`compare`: measure a function under several policies side by side."""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ParamSpec

import jax
import jax.numpy as jnp

from precpass.api import mixed_of
from precpass.devices.cpu_info import cpu_info
from precpass.devices.peaks import peaks_of_kind
from precpass.devices.targets import target_of
from precpass.jit.staged import AtArguments, in_two_steps, owner_of
from precpass.measure.counts import count
from precpass.measure.execute import check_callbacks
from precpass.measure.roofline import roofline
from precpass.policy.precision import Precision
from precpass.report.compare.comparison import REFERENCES, Comparison
from precpass.report.compare.errors import Leaf, as_written, errors_of, evaluated
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
from precpass.report.compare.rows import COSTS, DEFAULT, ERRORS, TIMES, TRAFFIC, Row, columns_of
from precpass.view.progress import telling

__all__ = ["compare", "profile"]

P = ParamSpec("P")


@in_two_steps
def compare(
    fn: Callable[P, Any],
    policies: Policies | None = None,
    *,
    columns: str | Iterable[str] | None = None,
    reference: str = "f64",
    rounds: int | None = None,
    target: Any = None,
    progress: Progress | None = None,
) -> AtArguments[P, Comparison]:
    """Compare a function under several policies: counts, memory, time and error.

    Each row is traced and compiled, run once for its results and then timed in rounds in which
    every row takes its turn. Arguments are put on the device before that. If a row donates some,
    all are copied before each of its runs, outside the measured time. Modules of flax nnx are
    passed as their arrays and do not change; their updates count as results. A function with
    effects has them in every run.

    Args:
        fn: the function, or the result of `auto_mixed`, whose options are then used.
        policies: one per row, by default the presets of 16 and 32 bits: policies, by value, name or
            string, precisions of matrix products ("bf16"), and other functions of the same
            signature (a model that is written in bfloat16, one cast by jmp, one under
            `jax.default_matmul_precision`), whose counts are those of their own traces. An item may
            be a pair (name, policy or function); a dict has names as its keys. Pass `fn` itself for
            the function as you wrote it.
        columns: the names of the columns to show; only what they need is computed. If they have
            neither times nor errors, nothing runs, and the arguments may be
            `jax.ShapeDtypeStruct`s. The columns are

            - "products", "casts": the matrix products in low precision, and the casts added;
            - "low_bytes", "flops", "formats": the bytes of results in 16 bits, the FLOPs, and the
              share of each format in them, with the trip counts of loops;
            - "arguments", "outputs", "temp": the memory that XLA allocates;
            - "kernels", "moved", "cast_kernels", "sent", "cycles", "without_cycles": the matrix
              kernels in low precision, the bytes that all kernels read and write, the kernels that
              only cast, the bytes of collectives by format, and a TPU compiler's estimate of
              cycles, with the kernels that it leaves out;
            - "roofline": the time of these bytes and of the products' arithmetic by the device's
              published peaks (`precpass/devices/peaks.py`), on a GPU or TPU: an estimate;
            - "time", "ratio": the run time, and that relative to the first row;
            - "error", "ulp", "sqnr", "cosine", "nonfinite", "integers": errors of the results.

            By default all but "flops", "arguments" and "outputs" are shown, and those of kernels
            not on a CPU.
        reference: what the results are compared with. "f64": the program as traced, its equations
            evaluated in float64, casts to lower formats left out, with x64 on or off; this also
            shows the error of float32. Complex arithmetic, references, opaque primitives and casts
            to float8 are not changed in it. "f32": the same in float32. Neither applies a policy,
            not even those of inner functions and their outputs.
        rounds: how many times each row is timed, by default 10; 0 for no times.
        target: the device that the rows are planned and compiled for, which need not be present: a
            name such as "h100" or "tpu v5e", or a JAX device. Nothing is timed then. Memory, bytes,
            kernels and a TPU's cycles are those of its compiler, and the errors are those of the
            same rewritten programs on this machine.
        progress: is called with a text, the steps done and their number. Without it a bar shows
            after two seconds at a terminal, and a line in a notebook.

    Returns:
        A function that takes the arguments of `fn`, and returns a `Comparison`.

    Raises:
        TypeError: for a row that is neither policy nor function, a name that is not a text, and (of
            the returned function) shapes in the place of arrays where something runs.
        ValueError: for an unknown policy, column, reference or target, a negative `rounds`,
            `rounds` with a target, names that are given twice, no rows, and (of the returned
            function) a row whose results have other shapes, names or kinds of numbers than those
            of `fn`, or that calls Python on the host of a target.
        RuntimeError: of the returned function, when the reference cannot be evaluated.

    Examples:
        >>> import jax.numpy as jnp
        >>> def f(x):
        ...     return jnp.tanh(x @ x)
        >>> found = compare(f, ["AlwaysF32", "AutoMixedBf16"], rounds=0)(jnp.eye(8) / 3)
        >>> [(row.name, row.counts.low) for row in found.rows]
        [('AlwaysF32', 0), ('AutoMixedBf16', 1)]
        >>> found.rows[0].error < 1e-6 < found.rows[1].error
        True
        >>> x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
        >>> compare(f, ["bf16"], columns=["flops", "arguments"])(x).rows[0].memory.arguments
        16384
    """
    if reference not in REFERENCES:
        raise ValueError(f"unknown reference {reference!r}: legal are 'f64' and 'f32'")
    target = target_of(target)
    shown = columns_of(columns)
    timed_rounds = rounds_of(rounds, target) * bool(TIMES & {*shown})
    rows = entries(policies)
    fn, owner = owner_of(fn)
    subject = mixed_of(fn)
    wanted = reference if ERRORS & {*shown} else ""

    def compared(*args: Any, **kwargs: Any) -> Comparison:
        runs = bool(wanted or timed_rounds)
        at = Subject.at(subject, owner, args, kwargs, takes_shapes=not runs, target=target)
        with telling(progress, f"compare {at.name}") as tell:
            return _Run(at, shown, wanted, timed_rounds, tell).run(rows)

    return compared


def profile(
    fn: Callable[P, Any],
    policies: Policies | None = ("AlwaysF32", "AutoMixedBf16"),
    *,
    devices: Any = None,
    rounds: int | None = None,
    target: Any = None,
    progress: Progress | None = None,
) -> AtArguments[P, Comparison]:
    """The former report of costs: `compare` with the columns of costs.

    Raises:
        ValueError: for `devices`, whose estimates came from a model of XLA's fusions.
    """
    is_timed = rounds != 0 and target is None
    columns = [name for name in COSTS if is_timed or name not in TIMES]
    text = f"profile goes away in 0.2: write compare(..., columns={columns})"
    warnings.warn(text, DeprecationWarning, stacklevel=2)
    if devices:
        raise ValueError(
            f"devices={devices!r}: an estimate is of a compiled program, so write "
            'compare(..., columns=["roofline", "moved"], target="h100"), once for each device'
        )
    return compare(fn, policies, columns=columns, rounds=rounds, target=target, progress=progress)


# ---------------------------------------------------------------- running them


@dataclasses.dataclass(frozen=True)
class _Run:
    """One run of `compare` (whose arguments these are)."""

    subject: Subject
    columns: tuple[str, ...]
    reference: str
    rounds: int
    progress: Progress

    def run(self, made: Sequence[Made]) -> Comparison:
        subject, total = self.subject, 1 + len(made) + self.rounds
        self.progress("the reference" if self.reference else "the function", 0, total)
        own = subject.declared, subject.name, subject.args, subject.kwargs
        written = as_written(subject.fn, *own)
        check_callbacks(written.jaxpr, subject.target)  # the reference would run them here
        wanted = evaluated(written, Precision.parse(self.reference)) if self.reference else []
        casts = count(written.jaxpr).casts
        programs: list[Program] = []
        rows: list[Row] = []
        for done, one in enumerate(made, 1):
            self.progress(one[0], done, total)
            try:
                program = subject.program(one)
                results = program.results() if self.reference else []
            except Exception as error:
                error.add_note(f"in the row {one[0]!r} of compare")
                raise
            _check_results(one[0], subject.name, results, wanted)
            programs.append(program)
            rows.append(self._row(program, casts, results, wanted))
        if self.rounds:
            times = timed(programs, self.rounds, self.progress, total)
            rows = [
                dataclasses.replace(row, timing=timing, ratio=ratio)
                for row, (timing, ratio) in zip(rows, times, strict=True)
            ]
        kind = programs[0].executable.device.device_kind
        return Comparison(
            subject.name,
            tuple(rows),
            self.columns,
            self.reference,
            self.rounds,
            f"{kind}, jax {jax.__version__}",
            kind == "cpu" and not cpu_info().bf16,
        )

    def _row(self, program: Program, casts: int, results: list[Leaf], wanted: list[Leaf]) -> Row:
        executable, counts = program.executable, count(program.executable.jaxpr)
        errors, each = errors_of(results, wanted) if self.reference else (None, [])
        device, memory = executable.device, executable.memory
        # On a CPU a program's time says more than its kernels, so these are shown if asked for.
        is_asked = self.columns != DEFAULT and not TRAFFIC.isdisjoint(self.columns)
        is_read = executable.refused is None and (device.platform != "cpu" or is_asked)
        traffic = executable.traffic if is_read else None
        peaks = peaks_of_kind(device.platform, device.device_kind)
        seconds = None
        if traffic is not None and peaks is not None and (memory is None or memory.devices == 1):
            seconds = roofline(traffic, counts, peaks.bandwidth, peaks.flops)
        return Row(
            program.name,
            program.policy,
            counts,
            counts.casts - casts,
            memory,
            None,
            None,
            errors,
            tuple((leaf.path, own) for leaf, own in zip(wanted, each, strict=True)),
            traffic,
            seconds,
            str(executable.refused or "").partition("\n")[0],
        )


def _check_results(name: str, fn: str, results: list[Leaf], wanted: list[Leaf]) -> None:
    got, want = ([x.value.shape for x in leaves] for leaves in (results, wanted))
    text = f"the row {name!r} has other results than {fn}"
    if got != want:
        raise ValueError(f"{text}: arrays of shapes {got}, not {want}")
    for mine, its in zip(results, wanted, strict=True):
        # A tuple may replace a named tuple, and a module may be returned under any name.
        one, other = (re.findall(r"[^\W\d]\w*", leaf.path) for leaf in (mine, its))
        if mine.path.startswith("output") and len(one) == len(other) and one != other:
            raise ValueError(f"{text}: {mine.path}, not {its.path}")
        if _numbers(mine.dtype) != _numbers(its.dtype):
            raise ValueError(f"{text}: {its.path} of {mine.dtype}, not of {its.dtype}")


def _numbers(dtype: Any) -> str:
    """The kind of an array's elements, as far as their error depends on it."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return "complex"
    return "floating" if jnp.issubdtype(dtype, jnp.floating) else "discrete"
