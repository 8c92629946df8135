"""`Profile`: the result of `profile`, as text, HTML, a pandas frame and a dict."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from precpass.analysis.sizes import NOMINAL_SIZE
from precpass.devices.peaks import Peaks
from precpass.measure.counts import Counts
from precpass.measure.execute import Memory, Timing
from precpass.measure.traffic import Traffic
from precpass.policy.policy import PrecisionPolicy
from precpass.report.compare.tables import (
    TIMES,
    aligned,
    cells_of,
    for_json,
    framed,
    memory_figures,
    milliseconds,
    of_each_device,
    printed,
    refusals,
    row_data,
    shares,
    short,
    traffic_columns,
    traffic_figures,
    traffic_notes,
)
from precpass.view.sheet import figures
from precpass.view.text import as_html, page

__all__ = ["Estimate", "Profile", "ProfileRow"]


@dataclasses.dataclass(frozen=True)
class Estimate:
    """The estimated time of a program on another device, from that device's published peaks.

    Attributes:
        device: the device's name, as `profile` takes it.
        seconds: the seconds of one run; None if a format of its products has no published peak.
        gain: the float32 program's seconds divided by these; None if either is None.
        without_peak: the formats without a published peak.
    """

    device: str
    seconds: float | None
    gain: float | None
    without_peak: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class ProfileRow:
    """One program of a profile.

    Attributes:
        name: its name in the tables.
        policy: its policy; None for a function given instead of one.
        counts: what its traced step computes.
        memory: the memory that XLA planned on the device where it was compiled; None if the backend
            does not report it.
        timing: the times of its runs; None if it was not timed.
        ratio: run time relative to the first row's in the same round, the median over the rounds;
            None if nothing was timed.
        moved: the bytes that its kernels read and write in one run, by a model of fusion that is
            the same for all devices (`precpass.measure.kernels`).
        estimates: one per device.
        guesses: whether it has a loop whose trip count is only known at run time.
        by_bytes: the primitives whose arithmetic is not counted.
        traffic: the compiled program's kernels and the bytes that they move; None on a CPU.
        refused: why the compiler of a device that is not present refuses the program; "" if it
            does not. Then it has no memory and no traffic.
    """

    name: str
    policy: PrecisionPolicy | None
    counts: Counts
    memory: Memory | None
    timing: Timing | None
    ratio: float | None
    moved: float
    estimates: tuple[Estimate, ...]
    guesses: bool
    by_bytes: tuple[str, ...]
    traffic: Traffic | None = None
    refused: str = ""

    @property
    def flops(self) -> float:
        """The floating-point operations of one run, in all formats."""
        return sum(self.counts.flops.values())

    def figures(self) -> dict[str, Any]:
        """Return all figures by their names in the frame and the dict: bytes, seconds, FLOPs."""
        quartiles = (None, None) if self.timing is None else self.timing.quartiles
        return {
            "seconds": None if self.timing is None else self.timing.median,
            "seconds_lower": quartiles[0],
            "seconds_upper": quartiles[1],
            "ratio": self.ratio,
            **memory_figures(self.memory),
            **traffic_figures(self.traffic),
            **({"refused": self.refused} if self.refused else {}),
            "flops": self.flops,
            "low_flops_share": self.counts.low_flops,
            **{f"flops_{name}": n for name, n in sorted(self.counts.flops.items())},
            "moved_bytes": self.moved,
            **{f"seconds_{e.device}": e.seconds for e in self.estimates},
            **{f"gain_{e.device}": e.gain for e in self.estimates},
        }


@dataclasses.dataclass(frozen=True)
class Profile:
    """The result of `profile`: costs measured here, and estimated for other devices.

    `print` it for tables. A notebook displays it as tables.

    Attributes:
        function: the function's name.
        rows: one per policy or function, in the order in which they were given.
        rounds: how many times each row was timed.
        device: the device and the JAX release for which it was compiled.
        peaks: the peaks of the devices of the estimates, each with its source and date.
    """

    function: str
    rows: tuple[ProfileRow, ...]
    rounds: int
    device: str
    peaks: tuple[Peaks, ...]

    # ------------------------------------------------------------ as data

    def to_dict(self) -> dict[str, Any]:
        """Return all figures, and those of the devices with their sources, as JSON values.

        Numbers that are not finite are the strings "inf", "-inf" and "nan".
        """
        rows = [row_data(row) for row in self.rows]
        head = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        peaks = [
            dataclasses.asdict(of) | {"sources": [s._asdict() for s in of.sources]}
            for of in self.peaks
        ]
        return for_json({**head, "rows": rows, "peaks": peaks, "notes": self.notes})

    def to_frame(self) -> Any:
        """Return the figures as a `pandas.DataFrame`, one row per program; None is NaN.

        Raises:
            ImportError: without pandas.
        """
        return framed({row.name: row.figures() for row in self.rows})

    # ------------------------------------------------------------ as tables

    def __str__(self) -> str:
        lines = [self._title, "", *aligned(self._measured())]
        if self.peaks:
            lines += ["", _ESTIMATED, "", *aligned(self._estimated())]
        return printed([*lines, "", *self.notes])

    def _repr_html_(self) -> str:
        tables = [(self._title, self._measured())]
        if self.peaks:
            tables.append((_ESTIMATED, self._estimated()))
        body = "".join(figures(t[0], t[1:], caption=title) for title, t in tables)
        return page(body + as_html([[(note, "reason")] for note in self.notes]))

    @property
    def _title(self) -> str:
        return f"{self.function}, {self.device}"

    def _measured(self) -> list[tuple[str, ...]]:
        return cells_of(_COLUMNS, self.rows, ("program",))

    def _estimated(self) -> list[tuple[str, ...]]:
        columns = [
            (e.device, lambda row, k=k: _gain(row.estimates[k]))
            for k, e in enumerate(self.rows[0].estimates)
        ]
        return cells_of([_COLUMNS[0], *columns], self.rows, [heading for heading, _ in columns])

    @property
    def notes(self) -> list[str]:
        """Remarks on what the figures mean and leave out."""
        notes = [
            "args, out, temp: what XLA allocates on the device. GFLOP: of one run, with trip "
            "counts. moved: what kernels read and write by a model of fusion."
        ]
        if self.rounds:
            notes.append(TIMES.format(self.rounds))
        notes += traffic_notes(row.traffic for row in self.rows)
        notes += refusals((row.name, row.refused) for row in self.rows)
        memory = (row.memory for row in self.rows)
        notes += of_each_device(memory, "FLOPs, moved and the gains")
        if self.peaks:
            notes += _MEANING
        if any(row.guesses for row in self.rows):
            notes.append(
                "loops whose trips only run time knows (while, linear solvers) count as "
                f"{NOMINAL_SIZE} of them."
            )
        names = sorted({name for row in self.rows for name in row.by_bytes})
        if names:
            notes.append(f"arithmetic not counted: {', '.join(names)}: by their bytes alone.")
        missing: dict[str, list[str]] = {}
        for row in self.rows:
            for e in row.estimates:
                for name in e.without_peak:
                    missing.setdefault(name, [])
                    missing[name] += [e.device] if e.device not in missing[name] else []
        notes += [
            f"-: no peak is published for {name} on {', '.join(devices)}."
            for name, devices in missing.items()
        ]
        return notes


_ESTIMATED = "estimated gain over float32 by published peaks: an upper estimate, no measurement"
_MEANING = (
    "gain: the reckoned time of the program under AlwaysF32 over the row's, each kernel at its "
    "device's peak or bandwidth, whichever takes longer. float32 products as JAX runs them by "
    "default: TF32 on NVIDIA's, float32 on AMD's, one bfloat16 pass on TPUs.",
    "left out: launches, caches, what falls short of a peak, communication, arithmetic other than "
    "products'; where these take time, low precision gains less. A cast of an operand in memory "
    "counts in full; where XLA fuses it into the product, as on TPUs, low precision gains more.",
)


def _gain(estimate: Estimate) -> str:
    return "" if estimate.gain is None else f"{estimate.gain:.2f}"


def _megabytes(row: ProfileRow, name: str) -> str:
    return "" if row.memory is None else short(getattr(row.memory, name) / 1e6)


_COLUMNS: tuple[tuple[str, Callable[[ProfileRow], str]], ...] = (
    ("program", lambda row: row.name),
    ("ms", lambda row: milliseconds(row.timing)),
    ("ratio", lambda row: "" if row.ratio is None else f"{row.ratio:.2f}"),
    ("args MB", lambda row: _megabytes(row, "arguments")),
    ("out MB", lambda row: _megabytes(row, "outputs")),
    ("temp MB", lambda row: _megabytes(row, "temp")),
    ("GFLOP", lambda row: short(row.flops / 1e9)),
    ("FLOPs in", lambda row: shares(row.counts.flops)),
    ("moved MB", lambda row: short(row.moved / 1e6)),
    *traffic_columns(lambda row: row.traffic),
)
