"""What the devices of a mesh send each other, compiled for several that need not be there.

    scripts/run bench_sent --target h100:4 --json sent.json

Gradients of `tests/support/sharded_programs.py` are compiled and do not run. By hand, parameters
and inputs are cast to bfloat16 where the loss begins, and nothing else is changed.
"""

import argparse
import dataclasses
import datetime
import json
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from platform import python_version
from typing import Any

import jax
import jaxlib

import precpass as pp
from precpass.devices.targets import TARGETS, target_of
from precpass.measure.traffic import traffic_of
from tests.support.sharded_programs import PROGRAMS, Sharded, abstract

TITLES = {
    "data_parallel": "data parallel",
    "fsdp_arguments": "FSDP by the arguments' shardings",
    "fsdp_constraint": "FSDP by a constraint",
    "fsdp_shard_map": "FSDP in `shard_map`",
    "tensor_parallel": "tensor parallel",
    "sequence_parallel": "tensor and sequence parallel",
    "ring_attention": "ring attention",
    "pipeline": "pipeline",
    "experts": "experts by `all_to_all`",
}
WIDTH = 1024
LEAST = 2**15  # bytes of the smallest collective that is shown
ROWS = {"sequence_parallel": (4, 1024), "ring_attention": (), "pipeline": (), "experts": ()}
"""The data's dimensions but the last: 4096 if not given, and the support file's for ()."""


COLUMNS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "float32": jax.grad,
    "by hand": lambda loss: jax.grad(
        lambda *args: loss(*pp.cast_floating(args, "bf16")).astype("f4")
    ),
    "auto_mixed(grad)": lambda loss: pp.auto_mixed(jax.grad(loss)),
    "grad(auto_mixed)": lambda loss: jax.grad(pp.auto_mixed(loss)),
}


def cell(program: Sharded, column: str, platform: str) -> dict[str, Any]:
    """The bytes of one program in one column, and its cycles; or why it is not compiled."""
    try:
        fn = COLUMNS[column](program.loss)
        with program.in_force():
            lowered = jax.jit(lambda params, x: fn(params, x)).lower(*program.arguments(abstract))
            text = lowered.compile().as_text()
    except Exception as error:
        return {"failure": f"{type(error).__name__}: {error}".partition("\n")[0][:200]}
    traffic = traffic_of(text or "", platform)
    sent = {kind: int(size) for kind, size in traffic.sent if size >= LEAST}
    return {"sent": sent, "cycles": traffic.cycles, "not counted": traffic.without_cycles}


def shown(found: dict[str, Any], collective: str) -> str | None:
    """The megabytes of a collective by format."""
    sent = found.get("sent", {})
    kinds = {kind.split()[1]: n for kind, n in sent.items() if kind.startswith(collective)}
    return ", ".join(f"{n / 1e6:.3g} {name}" for name, n in kinds.items()) or None


def rows_of(name: str, cells: dict[str, Any]) -> list[list[Any]]:
    """A row for each collective of a program, and one for a TPU's cycles, relative to float32."""
    kinds = sorted({kind.split()[0] for c in cells.values() for kind in c.get("sent", ())})
    rows = [[name, kind, *(shown(c, f"{kind} ") for c in cells.values())] for kind in kinds]
    if base := cells["float32"].get("cycles"):
        ratios = [c["cycles"] / base if "cycles" in c else None for c in cells.values()]
        rows.append([name, "cycles", *(None if r is None else round(r, 2) for r in ratios)])
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--target", required=True, help=f"{', '.join(TARGETS)}, as in h100:4")
    parser.add_argument("--programs", default=",".join(TITLES))
    parser.add_argument("--json", type=Path, metavar="FILE", help="write a file of results")
    options = parser.parse_args(argv)
    devices, cells, rows = list(target_of(options.target).devices), dict[str, Any](), list[Any]()
    platform, kind = devices[0].platform, devices[0].device_kind
    versions = f"jax {jax.__version__}, jaxlib {jaxlib.__version__}, Python {python_version()}"
    table = {"mode": "gradient", "columns": ["", "", *COLUMNS], "rows": rows}
    warnings.simplefilter("ignore")
    for name in options.programs.split(","):
        program = PROGRAMS[name](devices, WIDTH)
        shape, spec = program.data
        shape = *(ROWS.get(name, (4096,)) or shape[:-1]), WIDTH
        program = dataclasses.replace(program, data=(shape, spec))
        cells[name] = {column: cell(program, column, platform) for column in COLUMNS}
        own = rows_of(TITLES[name], cells[name])
        rows += own
        print(*own, sep="\n", flush=True)
        result = {
            "title": f"Sent between {len(devices)} devices, compiled for {kind}",
            "measured": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "text": f"{versions}, width {WIDTH}, compiled and not run. MB of the larger side of "
            "each collective on one device.",
            "parts": [{"title": "", "tables": [table]}],
            "cells": cells,
        }
        if options.json is not None:
            options.json.write_text(json.dumps(result, indent=1) + "\n")  # as far as it is


if __name__ == "__main__":
    main()
