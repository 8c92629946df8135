"""What the benchmark measures of one model in one mode: a cell for each column."""

import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import bench_columns
import jax
from bench_columns import COLUMNS
from bench_models import Model

import precpass as pp
from precpass.analysis.residuals import kept_bytes
from precpass.jit.arguments import Declared
from precpass.measure.counts import Counts, count
from precpass.measure.execute import Executable, Timing, compiled, interleaved, is_jitted
from precpass.policy.precision import Precision
from precpass.report.compare import errors

MOST_ROUNDS = 100


class Effort(NamedTuple):
    """How much is run of each model and mode.

    Attributes:
        rounds: so many are measured,
        seconds: and more where they are over sooner, up to `MOST_ROUNDS`.
        steps: so many are trained for the loss.
    """

    rounds: int
    steps: int
    seconds: float = 0.0


@dataclass(frozen=True)
class Cell:
    """One model in one mode and one column.

    Attributes:
        failure: the type and the first line of what it raised, "" where it raised nothing.
        timing: of a run.
        counts: of the traced program.
        temp_bytes: what XLA planned.
        kept_bytes: what the forward pass leaves for the backward pass; none without one.
        error: relative, against float64; none of a step, whose results are the parameters.
        loss: of the last step that was trained; none but in steps.
    """

    model: str
    mode: str
    column: str
    failure: str = ""
    timing: Timing | None = None
    counts: Counts | None = None
    temp_bytes: int | None = None
    kept_bytes: float | None = None
    error: float | None = None
    loss: float | None = None


def traced(model: Model, mode: str, key: str) -> Any:
    """A column's function, jitted."""
    fn = COLUMNS[key].program(model, mode)
    return fn if is_jitted(fn) else jax.jit(fn)


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def reference(model: Model, mode: str, batch: int = 0) -> list[errors.Leaf]:
    """The results of the model as written, for one of its batches, evaluated in float64."""
    fn = pp.auto_mixed(COLUMNS["float32"].program(model, mode))
    args = bench_columns.arguments(model, mode, batch)
    declared = Declared(fn.__wrapped__, fn.jit_options)
    written = errors.as_written(fn, declared, model.name, args, {})
    return errors.evaluated(written, Precision.F64)


def error_of(results: Any, wanted: Sequence[errors.Leaf]) -> float | None:
    """The relative error of all results together."""
    found = jax.tree.leaves(results)
    got = [leaf._replace(value=errors.fetched(x)) for leaf, x in zip(wanted, found, strict=True)]
    return errors.error_of(got, wanted).relative


class Measured:
    """All columns of one model in one mode."""

    def __init__(self, model: Model, mode: str, keys: Sequence[str]) -> None:
        self.model, self.mode = model, mode
        self.args = bench_columns.arguments(model, mode)
        self.cells = {key: Cell(model.name, mode, key) for key in keys}
        self.programs: dict[str, Executable] = {}

    def run(self, effort: Effort) -> list[Cell]:
        """Compiles and runs every column once, then times them in rounds."""
        wanted: list[errors.Leaf] | None = None
        if self.mode != "step":
            with suppress(RuntimeError):  # its columns are measured without an error then
                wanted = reference(self.model, self.mode)
        for key in self.cells:
            try:
                self._compile(key)
                self._check(key, wanted, effort.steps)
            except Exception as error:
                self.programs.pop(key, None)
                self.cells[key] = replace(self.cells[key], failure=first_line(error))
        self._time(effort)
        return list(self.cells.values())

    def _compile(self, key: str) -> None:
        program = compiled(traced(self.model, self.mode, key), *self.args)
        self.programs[key] = program
        self.cells[key] = replace(
            self.cells[key],
            counts=count(program.jaxpr),
            temp_bytes=program.memory.temp if program.memory else None,
            kept_bytes=None if self.mode == "forward" else kept_bytes(program.jaxpr),
        )

    def _check(self, key: str, wanted: list[errors.Leaf] | None, steps: int) -> None:
        """Runs it: for its error, and a step for its loss."""
        run, args = self.programs[key].compiled, self._fresh(key)
        if self.mode == "step":
            *carried, loss = run(*args)
            for step in range(1, steps):
                *carried, loss = run(*carried, self.model.batch(step))
            self.cells[key] = replace(self.cells[key], loss=float(loss))
            return
        results = jax.block_until_ready(run(*args))
        if wanted is not None:
            self.cells[key] = replace(self.cells[key], error=error_of(results, wanted))

    def _fresh(self, key: str) -> Any:
        return bench_columns.copied(self.args) if self.programs[key].donates else self.args

    def _time(self, effort: Effort) -> None:
        def ready(program: Executable) -> Callable[..., Any]:
            return lambda *args: jax.block_until_ready(program.compiled(*args))

        runs = {key: ready(program) for key, program in self.programs.items()}
        found = interleaved(runs, effort.rounds, prepare=self._fresh)
        spent = sum(sum(timing.seconds) for timing in found.values())
        if runs and spent < effort.seconds:
            rounds = min(MOST_ROUNDS, round(effort.rounds * effort.seconds / spent))
            found = interleaved(runs, rounds, prepare=self._fresh)
        for key, timing in found.items():
            self.cells[key] = replace(self.cells[key], timing=timing)


def measured(model: Model, mode: str, keys: Sequence[str], effort: Effort) -> list[Cell]:
    """A cell for each of the columns that have a program of their own in the mode."""
    with warnings.catch_warnings():
        # the counts say what the pass leaves in float32
        warnings.simplefilter("ignore", pp.PrecisionWarning)
        own = [key for key in keys if mode in COLUMNS[key].modes]
        return Measured(model, mode, own).run(effort)
