"""Train one float32 program under several precision policies and compare them in one table.

A byte-level transformer language model learns the source text of Python's own standard
library. precpass is compared with the two ways of lowering that need no rewriting: casting the
parameters with jmp, and marking every product with `jax.default_matmul_precision`.
"""

import argparse
import contextlib
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import rich
from demo_model import Shape, Task, batches, cross_entropy, make_task, standard_library
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import precpass as pp
from precpass.analysis.residuals import kept_bytes
from precpass.measure.counts import count
from precpass.measure.execute import compiled, timed

PRESETS = (
    "AlwaysF32",
    "AutoMixedBf16",
    "AutoMixedF16",
    "AutoMixedConservativeF16",
    "AlwaysBf16",
    "AlwaysF16",
)
UNDER_GRAD = "AutoMixedBf16-under-grad"
MATMUL = "default_matmul_precision"
DEFAULT_ROWS = ("AlwaysF32", "AutoMixedBf16", UNDER_GRAD, "jmp", MATMUL)
DIFF_LINES = 25


def build_step(name: str, task: Task) -> Callable[..., Any]:
    """The row's training step: the same model, the same optimizer, another precision."""
    donate = partial(jax.jit, donate_argnums=(0, 1))
    if name in PRESETS:
        policy = getattr(pp, name)
        return pp.auto_mixed(task.train_step, policy=policy, donate_argnums=(0, 1))
    if name == UNDER_GRAD:
        lowered = pp.auto_mixed(task.loss, policy=pp.AutoMixedBf16)
        return donate(task.with_gradient(jax.value_and_grad(lowered)))
    if name == MATMUL:
        return donate(task.train_step)
    policy = jmp.get_policy("p=f32,c=bf16,o=f32")

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        low_params, low_tokens = policy.cast_to_compute((params, tokens))
        logits = policy.cast_to_output(task.logits(low_params, low_tokens))
        return cross_entropy(logits, tokens)

    return donate(task.with_gradient(jax.value_and_grad(loss)))


def label(name: str) -> str:
    """How the table names a row."""
    if name in PRESETS:
        return f"{name}, whole step"
    if name == UNDER_GRAD:
        return "AutoMixedBf16, under grad"
    return "jmp p=f32,c=bf16,o=f32" if name == "jmp" else "matmul BF16_BF16_F32"


@dataclass
class Row:
    """One compiled training step, its own copy of the state, and what was measured of it."""

    name: str
    step: Any
    state: tuple[Any, Any]
    products: str
    casts: int
    temp_bytes: int
    kept_bytes: float
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def train(self, tokens: np.ndarray) -> None:
        (*state, loss), seconds = timed(self.step, *self.state, tokens)
        self.seconds.append(seconds)
        self.state = (state[0], state[1])
        self.losses.append(float(loss))


def compile_row(name: str, task: Task, tokens: np.ndarray) -> Row:
    """Trace, count and compile one row; nothing is timed yet."""
    step = build_step(name, task)
    state = jax.tree.map(jnp.copy, (task.params, task.opt_state))
    marks = jax.default_matmul_precision("BF16_BF16_F32")
    with marks if name == MATMUL else contextlib.nullcontext():
        program = compiled(step, *state, tokens)
    counts = count(program.jaxpr)
    return Row(
        name,
        program.compiled,
        state,
        f"{counts.low}/{counts.products}" + (f" ({counts.marked} marked)" if counts.marked else ""),
        counts.casts,
        program.memory.temp,
        kept_bytes(program.jaxpr),
    )


def run(names: list[str], task: Task, data: np.ndarray, console: Console) -> list[Row]:
    """Compile every row first, then train them in turn, so that noise meets them all alike."""
    columns = (TextColumn("{task.description:<36}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        bar = progress.add_task("", total=len(names))
        rows: list[Row] = []
        for name in names:
            progress.update(bar, description=f"compile {label(name)}")
            rows.append(compile_row(name, task, data[0]))
            progress.advance(bar)
        progress.update(bar, description="compiled")
        bar = progress.add_task("", total=len(names) * len(data))
        for tokens in data:
            for row in rows:
                row.train(tokens)
                progress.update(bar, advance=1, description=f"train (loss {row.losses[-1]:.3f})")
    return rows


def make_table(rows: list[Row]) -> Table:
    steps = len(rows[0].losses)
    last = min(10, steps)
    table = Table(box=rich.box.SIMPLE_HEAD, caption_justify="left", caption_style="")
    table.add_column("program", no_wrap=True)
    for heading in (
        f"loss after\n{steps} steps",
        "to\nrow 1",
        "step\nms",
        "to\nrow 1",
        "products low\nout of all",
        "casts",
        "temp\nMB",
        "kept\nMB",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    first = rows[0]
    base = statistics.mean(first.losses[-last:])
    for row in rows:
        loss = statistics.mean(row.losses[-last:])
        ratios = [a / b for a, b in zip(row.seconds, first.seconds, strict=True)]
        table.add_row(
            label(row.name),
            f"{loss:.4f}",
            f"{100 * (loss / base - 1):+.2f} %",
            f"{1e3 * statistics.median(row.seconds):.0f}",
            f"{statistics.median(ratios):.2f}",
            row.products,
            str(row.casts),
            f"{row.temp_bytes / 1e6:.0f}",
            f"{row.kept_bytes / 1e6:.1f}",
        )
    table.caption = (
        f"Loss: mean of the last {last} steps, from {first.losses[0]:.2f} at the first. Step time: "
        "median; its ratio:\nmedian over rounds in which every row takes one step.\n"
        "Products (floating, contracting dot_general) and casts: equations of the traced step, "
        "forward,\nbackward and recomputed; a scan's body counts once. low: both operands stored "
        "in 16 bits;\nmarked: float32 operands with an algorithm preset, which the backend may "
        "ignore.\nkept: what the forward pass computes and the backward pass reads."
    )
    return table


def notes(rows: list[Row]) -> Iterator[str]:
    """What the numbers alone do not say."""
    by_name = {row.name: row for row in rows}
    wide, marked = by_name.get("AlwaysF32"), by_name.get(MATMUL)
    if wide and marked:
        same = wide.losses == marked.losses
        yield f"{label(MATMUL)}: the losses are {'' if same else 'not '}bit-equal to float32's."
    if "jmp" in by_name:
        yield "jmp: one `/ np.sqrt(d)` promotes what follows it in each layer back to float32."


def machine() -> str:
    """The processor, its fast bfloat16 paths, the cores, and the versions."""
    name, flags = platform.processor() or platform.machine(), ""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        pairs = (line.partition(":") for line in cpuinfo.read_text().splitlines())
        facts = {key.strip(): value.strip() for key, _, value in pairs}
        name = facts.get("model name", name)
        bf16 = [flag for flag in facts.get("flags", "").split() if "bf16" in flag]
        flags = f" ({', '.join(bf16) or 'no bf16 instructions'})"
    return (
        f"{name}{flags}, {len(os.sched_getaffinity(0))} cores, "
        f"jax {jax.__version__}, {jax.default_backend()}, Python {platform.python_version()}"
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40, help="training steps for each row")
    parser.add_argument("--layers", type=int, default=Shape.layers)
    parser.add_argument(
        "--policy",
        action="append",
        choices=(*PRESETS, UNDER_GRAD, "jmp", MATMUL),
        help=f"a row of the table; may be repeated; default: {', '.join(DEFAULT_ROWS)}",
    )
    options = parser.parse_args()
    if options.steps < 1 or options.layers < 1:
        parser.error("--steps and --layers take a number of at least 1")
    return options


def main() -> None:
    options, start = arguments(), time.perf_counter()
    console = Console() if Console().is_terminal else Console(width=110)
    names = list(dict.fromkeys(options.policy or DEFAULT_ROWS))
    shape, text = Shape(layers=options.layers), standard_library()
    data = batches(text, shape, options.steps)
    task = make_task(shape)
    size = sum(leaf.size for leaf in jax.tree.leaves(task.params))
    say = partial(console.print, highlight=False, markup=False, soft_wrap=True)
    say(machine())
    say(
        f"{size / 1e6:.1f} M float32 parameters, {shape.layers} layers of width {shape.width}, "
        f"{shape.batch} x {shape.length} bytes a step of {len(text) / 1e6:.1f} MB of text"
    )
    rows = run(names, task, data, console)
    console.print(make_table(rows))
    for note in notes(rows):
        say(note)
    policy = next((n for n in names if n in PRESETS and n != "AlwaysF32"), "AutoMixedBf16")
    inspection = pp.inspect(task.train_step, getattr(pp, policy))
    diff = inspection(task.params, task.opt_state, data[0]).diff().splitlines()
    shown = diff[:DIFF_LINES]
    say(f"\ninspect(train_step, {policy}).diff(), {len(shown)} of its {len(diff)} lines:")
    say("\n".join(shown))
    say(f"\n{time.perf_counter() - start:.0f} s in all")


if __name__ == "__main__":
    main()
