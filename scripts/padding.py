"""What it costs to pad a product's dimensions to multiples of a tile, inside of a program.

A bfloat16 product is compared with the same one whose operands are padded with zeros and whose
result is sliced: by time on this machine, and with --targets by what XLA's compilers say for a TPU
(estimated cycles) and an H100 (bytes that kernels move, and cuBLAS's calls).
"""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from eight_bits_compiled import figure, today
from render_results import rendered_table

from precpass.devices.cpu_info import cpu_info
from precpass.measure.execute import interleaved

TILES = (8, 16, 128)
SIZES = ((2003, 999, 1001), (63, 1001, 1001), (500, 777, 333), (1001, 17, 1001), (129, 65, 4001))
"""The rows, summed elements and columns of the products, none a multiple of 8."""
TEXT = (
    "A bfloat16 product of rows x summed elements x columns, whose operands a program pads with "
    "zeros to multiples of 8, 16 or 128, and whose result it slices: ratios to the product as it "
    "is. Times are those of two cores of the server's CPU that a part names, medians of 15 "
    "interleaved rounds. The part that is compiled for other devices ran nowhere: cycles are the "
    'TPU compiler\'s estimate, and "moved" are the bytes that kernels move.'
)


def plain(x: Any, w: Any) -> Any:
    """The product."""
    return jnp.dot(x, w, preferred_element_type=jnp.float32)


def padded(tile: int, x: Any, w: Any) -> Any:
    """The product of padded operands, sliced."""

    def in_tiles(a: Any) -> Any:
        return jnp.pad(a, [(0, -size % tile) for size in a.shape])

    return plain(in_tiles(x), in_tiles(w))[: x.shape[0], : w.shape[1]]


def programs() -> dict[str, Callable[..., Any]]:
    """The product, and the padded ones."""
    return {"as it is": plain, **{f"to {tile}": partial(padded, tile) for tile in TILES}}


def table(heads: Sequence[str], rows: list[list[Any]]) -> dict[str, Any]:
    """A table of ratios for each of `SIZES`."""
    return {"columns": [*heads, *list(programs())[1:]], "rows": rows}


def timed(rounds: int) -> dict[str, Any]:
    """Times on this machine, each as a ratio to that of the product as it is."""
    rows: list[list[Any]] = []
    for m, k, n in SIZES:
        x, w = (jnp.ones(shape, jnp.bfloat16) for shape in ((m, k), (k, n)))
        runs = {name: partial(jax.jit(fn), x, w) for name, fn in programs().items()}
        times = interleaved(runs, rounds, warm_up=2)
        base, *others = times.values()
        ratios = [round(float(np.median(time.ratios(base).seconds)), 2) for time in others]
        rows.append([f"{m} x {k} x {n}", round(base.median * 1e3, 2), *ratios])
    title = f"jax {jax.__version__}, {cpu_info().model}, {today()}"
    return {"title": title, "tables": [table(["product", "ms"], rows)]}


def compiled_part() -> dict[str, Any]:
    """What compilers say of the products, each as a ratio to the product as it is."""
    rows: list[list[Any]] = []
    for target, name in (("tpu v5e", "cycles"), ("tpu v6e", "cycles"), ("h100", "moved")):
        for m, k, n in SIZES:
            args = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((m, k), (k, n))]
            base, *others = (figure(target, fn, *args) for fn in programs().values())
            ratios = [round(other / base, 2) for other in others]
            rows.append([f"{m} x {k} x {n}", target, name, *ratios])
    title = f"Compiled for devices that are not there, jax {jax.__version__}, {today()}"
    return {"title": title, "tables": [table(["product", "for", "figure"], rows)]}


def main() -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15, help="of timing; 15")
    parser.add_argument("--targets", action="store_true", help="compile for devices instead")
    parser.add_argument("--json", type=Path, help="a file of results, whose part is replaced")
    options = parser.parse_args()
    found = compiled_part() if options.targets else timed(options.rounds)
    for each in found["tables"]:
        print("\n".join(rendered_table(each)), end="\n\n")
    if options.json is not None:
        file: Path = options.json
        parts = json.loads(file.read_text(encoding="utf-8"))["parts"] if file.exists() else []
        release = found["title"].partition(",")[0]
        others = [part for part in parts if part["title"].partition(",")[0] != release]
        whole = {"title": "Products padded to tiles", "measured": today(), "text": TEXT}
        whole["parts"] = [*others, found]
        file.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
