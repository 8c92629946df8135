"""`compare`: measure a function under several policies side by side."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec

import jax
import jax.numpy as jnp

from precpass.api import mixed_of
from precpass.devices.cpu_info import cpu_info
from precpass.devices.targets import target_of
from precpass.jit.staged import in_two_steps, owner_of
from precpass.measure.counts import count
from precpass.measure.execute import check_callbacks
from precpass.policy.precision import Precision
from precpass.report.compare.comparison import REFERENCES, Comparison, Row
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
from precpass.view.progress import telling

__all__ = ["compare"]


P = ParamSpec("P")

WITH_SHAPES = (
    "; `precpass.report.profile` with rounds=0 or target= takes shapes, and shows no errors"
)


@in_two_steps
def compare(
    fn: Callable[P, Any],
    policies: Policies | None = None,
    *,
    reference: str = "f64",
    rounds: int | None = None,
    target: Any = None,
    progress: Progress | None = None,
) -> Callable[P, Comparison]:
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
        A function that takes the arguments of `fn`, arrays, and returns a `Comparison`.

    Raises:
        TypeError: for a row that is neither policy nor function, and a name that is not a text.
        ValueError: for an unknown policy, reference or target, a negative `rounds`, `rounds` with a
            target, names that are given twice, no rows, and (of the returned function) a row whose
            results have other shapes, names or kinds of numbers than those of `fn`, or that calls
            Python on the host of a target.
        RuntimeError: of the returned function, when the reference cannot be evaluated.

    Examples:
        >>> import jax.numpy as jnp
        >>> def f(x):
        ...     return jnp.tanh(x @ x)
        >>> found = compare(f, ["AlwaysF32", "AutoMixedBf16"], rounds=0)(jnp.eye(8) / 3)
        >>> [(row.name, row.counts.low) for row in found.rows]
        [('AlwaysF32', 0), ('AutoMixedBf16', 1)]
        >>> found.rows[0].errors.relative < 1e-6 < found.rows[1].errors.relative
        True
    """
    if reference not in REFERENCES:
        raise ValueError(f"unknown reference {reference!r}: legal are 'f64' and 'f32'")
    target = target_of(target)
    timed_rounds = rounds_of(rounds, target)
    rows = entries(policies, "compare")
    fn, owner = owner_of(fn)
    subject = mixed_of(fn)

    def compared(*args: P.args, **kwargs: P.kwargs) -> Comparison:
        at = Subject.at(subject, owner, args, kwargs, "compare", hint=WITH_SHAPES, target=target)
        with telling(progress, f"compare {at.name}") as tell:
            return _Run(at, reference, timed_rounds, tell).run(rows)

    return compared


# ---------------------------------------------------------------- running them


@dataclasses.dataclass(frozen=True)
class _Run:
    """One run of `compare` (whose arguments these are)."""

    subject: Subject
    reference: str
    rounds: int
    progress: Progress

    def run(self, made: Sequence[Made]) -> Comparison:
        subject, total = self.subject, 1 + len(made) + self.rounds
        self.progress("the reference", 0, total)
        own = subject.declared, subject.name, subject.args, subject.kwargs
        written = as_written(subject.fn, *own)
        check_callbacks(written.jaxpr, subject.target)  # the reference would run them here
        wanted = evaluated(written, Precision.parse(self.reference))
        casts = count(written.jaxpr).casts
        programs: list[Program] = []
        rows: list[Row] = []
        for done, one in enumerate(made, 1):
            self.progress(one[0], done, total)
            try:
                program = subject.program(one)
                results = program.results()
            except Exception as error:
                error.add_note(f"in the row {one[0]!r} of compare")
                raise
            _check_results(one[0], subject.name, results, wanted)
            programs.append(program)
            rows.append(_row(program, casts, results, wanted))
        if self.rounds:
            times = timed(programs, self.rounds, self.progress, total)
            rows = [
                dataclasses.replace(row, timing=timing, ratio=ratio)
                for row, (timing, ratio) in zip(rows, times, strict=True)
            ]
        device = f"{programs[0].device_kind}, jax {jax.__version__}"
        is_cpu = programs[0].device_kind == "cpu"
        slow = is_cpu and not cpu_info().bf16
        return Comparison(subject.name, tuple(rows), self.reference, self.rounds, device, slow)


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


def _row(program: Program, casts: int, results: list[Leaf], wanted: list[Leaf]) -> Row:
    counts = count(program.executable.jaxpr)
    errors, each = errors_of(results, wanted)
    return Row(
        program.name,
        program.call.policy,
        counts,
        counts.casts - casts,
        program.executable.memory,
        None,
        None,
        errors,
        tuple((leaf.path, own) for leaf, own in zip(wanted, each, strict=True)),
        program.traffic,
        program.refused,
    )
