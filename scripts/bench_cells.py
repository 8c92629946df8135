"""What the benchmark measures of one model in one mode: a cell for each column."""

import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
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

Progress = Callable[[str, int], None]
"""Is told what is done now, and how many units of work are done since."""


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


MOST_ROUNDS = 100


@dataclass(frozen=True)
class Cell:
    """One model in one mode and one column.

    Attributes:
        failure: the type and the first line of what it raised; nothing else is there then, but
            what was found before.
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
    failure: str | None = None
    timing: Timing | None = None
    counts: Counts | None = None
    temp_bytes: int | None = None
    kept_bytes: float | None = None
    error: float | None = None
    loss: float | None = None

    def to_dict(self, ratios: dict[str, Timing]) -> dict[str, Any]:
        """All of it for JSON, with the ratios of its time to that of other columns."""
        found = {k: v for k, v in vars(self).items() if k not in ("timing", "counts")}
        counts = asdict(self.counts) if self.counts else None
        times = {"to_" + name: _times(ratio) for name, ratio in ratios.items()}
        seconds = _times(self.timing) if self.timing else None
        return found | {"counts": counts, "seconds": seconds, "ratios": times}

    @classmethod
    def from_dict(cls, found: dict[str, Any]) -> "Cell":
        """The cell of which `to_dict` was written as JSON."""
        own = {k: v for k, v in found.items() if k not in ("seconds", "ratios")}
        own["counts"] = Counts(**own["counts"]) if own["counts"] else None
        # errors may be infinite, which JSON has as a text
        own["error"] = None if own["error"] is None else float(own["error"])
        own["loss"] = None if own["loss"] is None else float(own["loss"])
        seconds = found["seconds"]
        return cls(**own, timing=Timing(tuple(seconds["rounds"])) if seconds else None)


def _times(timing: Timing) -> dict[str, Any]:
    """The median and quartiles, and each round."""
    lower, upper = timing.quartiles
    rounds = list(timing.seconds)
    return {"median": timing.median, "quartiles": [lower, upper], "rounds": rounds}


def traced(model: Model, mode: str, key: str) -> Any:
    """A column's function, jitted; it is to be traced in the column's context."""
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

    def __init__(self, model: Model, mode: str, keys: Sequence[str], progress: Progress) -> None:
        self.model, self.mode, self.progress = model, mode, progress
        self.args = bench_columns.arguments(model, mode)
        self.cells = {key: Cell(model.name, mode, key) for key in keys}
        self.programs: dict[str, Executable] = {}

    def run(self, effort: Effort) -> list[Cell]:
        """Compiles and runs every column once, then times them in rounds."""
        wanted: list[errors.Leaf] | None = None
        if self.mode != "step":
            self.progress("reference", 0)
            with suppress(RuntimeError):  # its columns are measured without an error then
                wanted = reference(self.model, self.mode)
        for key in self.cells:
            self.progress(COLUMNS[key].title, 0)
            try:
                self._compile(key)
                self._check(key, wanted, effort.steps)
            except Exception as error:
                self._failed(key, error)
            self.progress(COLUMNS[key].title, 1)
        self._time(effort)
        return list(self.cells.values())

    def _failed(self, key: str, error: Exception) -> None:
        self.programs.pop(key, None)
        self.cells[key] = replace(self.cells[key], failure=first_line(error))

    def _compile(self, key: str) -> None:
        with COLUMNS[key].context():
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
        def guarded(key: str) -> Callable[..., Any]:
            def run(*args: Any) -> Any:
                if self.cells[key].failure:
                    return None
                try:
                    return jax.block_until_ready(program.compiled(*args))
                except Exception as error:
                    self.cells[key] = replace(self.cells[key], failure=first_line(error))

            program = self.programs[key]
            return run

        def tell(turn: int) -> None:
            self.progress("warm-up" if turn < 0 else f"round {turn + 1}", int(turn > 0))

        runs = {key: guarded(key) for key in self.programs}
        found = interleaved(runs, effort.rounds, prepare=self._fresh, progress=tell)
        self.progress("", 1)
        spent = sum(sum(timing.seconds) for timing in found.values())
        if runs and spent < effort.seconds:
            rounds = min(MOST_ROUNDS, round(effort.rounds * effort.seconds / spent))
            found = interleaved(runs, rounds, prepare=self._fresh)
        for key, timing in found.items():
            if not self.cells[key].failure:
                self.cells[key] = replace(self.cells[key], timing=timing)


def measured(
    model: Model, mode: str, keys: Sequence[str], effort: Effort, progress: Progress
) -> list[Cell]:
    """A cell for each of the columns that have a program of their own in the mode."""
    own = [key for key in keys if mode in COLUMNS[key].modes and not COLUMNS[key].missing]
    with warnings.catch_warnings():
        # what the pass leaves wide is in the counts
        warnings.simplefilter("ignore", pp.PrecisionWarning)
        return Measured(model, mode, own, progress).run(effort)
