"""Train one float32 program under several precision policies and compare them in one table.

A byte-level transformer language model learns the source text of Python's own standard
library. precpass is compared with the two ways of lowering that need no rewriting: casting the
parameters with jmp, and marking every product with `jax.default_matmul_precision`.
"""

import argparse
import contextlib
import platform
import statistics
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import rich
from demo_model import Shape, Task, batches, cross_entropy, make_task, standard_library
from rich.console import Console
from rich.table import Table

import precpass as pp
from precpass.analysis.residuals import kept_bytes
from precpass.devices.cpu_info import cpu_info
from precpass.measure.counts import count
from precpass.measure.execute import compiled, timed
from precpass.view.progress import Progress

BETWEEN_LINES = 5.0
"""Seconds between two lines of progress where no terminal is."""
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
ROWS = (*PRESETS, UNDER_GRAD, "jmp", MATMUL)
DEFAULT_ROWS = ("AlwaysF32", "AutoMixedBf16", UNDER_GRAD, "jmp", MATMUL)
LAST = 10
"""The number of last steps whose mean loss is shown."""
DIFF_LINES = 14
PAYS = 0.95
"""The largest ratio of step times that counts as faster."""
ALIKE = 0.01
"""The largest relative difference of losses that counts as the same training."""


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
    names = {UNDER_GRAD: "AutoMixedBf16 in grad", "jmp": "jmp c=bf16", MATMUL: "BF16_BF16_F32 dots"}
    return names.get(name, name)


@dataclass
class Row:
    """One compiled training step, its own copy of the state, and what was measured of it."""

    name: str
    step: Any
    state: tuple[Any, Any]
    products: str
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
        f"{counts.low}/{counts.products}",
        program.memory.temp,
        kept_bytes(program.jaxpr),
    )


def run(names: list[str], task: Task, data: np.ndarray) -> list[Row]:
    """Compile every row first, then train them in turn, so that noise meets them all alike."""
    rows: list[Row] = []
    with Progress("compile", patience=BETWEEN_LINES) as progress:
        for done, name in enumerate(names):
            progress.say(label(name), done, len(names))
            rows.append(compile_row(name, task, data[0]))
    with Progress("train", patience=BETWEEN_LINES) as progress:
        for done, tokens in enumerate(data):
            for row in rows:
                row.train(tokens)
            text = f"step {done + 1} of {len(data)}, with a loss of {rows[-1].losses[-1]:.3f}"
            progress.say(text, done, len(data))
    return rows


def final_loss(row: Row) -> float:
    """The mean loss of a row's last steps."""
    return statistics.mean(row.losses[-LAST:])


def step_ratio(row: Row, first: Row) -> float:
    """A row's step time over another's: the median over rounds in which both take one step."""
    return statistics.median(a / b for a, b in zip(row.seconds, first.seconds, strict=True))


def make_table(rows: list[Row]) -> Table:
    """The table of all rows, which fits 80 columns."""
    steps, first = len(rows[0].losses), rows[0]
    table = Table(
        box=rich.box.SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
        caption_justify="left",
        caption_style="",
    )
    table.add_column("program", no_wrap=True)
    for heading in (
        "loss\n",
        "to\nrow 1",
        "step\nms",
        "to\nrow 1",
        "low\nproducts",
        "temp\nMB",
        "kept\nMB",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            label(row.name),
            f"{final_loss(row):.4f}",
            f"{100 * (final_loss(row) / final_loss(first) - 1):+.2f} %",
            f"{1e3 * statistics.median(row.seconds):.0f}",
            f"{step_ratio(row, first):.2f}",
            row.products,
            f"{row.temp_bytes / 1e6:.0f}",
            f"{row.kept_bytes / 1e6:.1f}",
        )
    table.caption = (
        f"loss: the mean of the last {min(LAST, steps)} of {steps} steps, from "
        f"{first.losses[0]:.2f} at the first.\n"
        "step: the median time; to row 1: the median of ratios within rounds.\n"
        "low products: matrix products of the step that have both operands in\n"
        "  16 bits; a scan's body counts once.\n"
        "temp: temporary memory, as XLA reports it.\n"
        "kept: what the forward pass computes and the backward pass reads."
    )
    return table


def conclusion(rows: list[Row]) -> str:
    """What the table shows, in one sentence."""
    by_name = {row.name: row for row in rows}
    wide = by_name.get("AlwaysF32")
    low = next(
        (row for row in rows if row is not wide and row.name in (*PRESETS, UNDER_GRAD)), None
    )
    if wide is None or low is None:
        return (
            "Conclusion: there is nothing to compare without AlwaysF32 and another policy, so add "
            "them by --policy."
        )
    ratio = step_ratio(low, wide)
    memory = low.temp_bytes / wide.temp_bytes
    difference = abs(final_loss(low) / final_loss(wide) - 1)
    percent = f"{100 * max(difference, 1e-4):.2f}%"
    loss = (
        f"is that of float32 within {percent}, without a change to the model"
        if difference <= ALIKE
        else f"differs from float32's by {percent}, so look at the losses before you use it"
    )
    takes = f"{ratio:.2f} of float32's time for a step"
    if ratio <= PAYS:
        return (
            f"Conclusion: {low.name} takes {takes} and {memory:.2f} of its temporary memory, and "
            f"its loss after {len(low.losses)} steps {loss}."
        )
    # What holds on every device comes first.
    return (
        f"Conclusion: {low.name} runs {low.products} matrix products in 16 bits and takes "
        f"{memory:.2f} of float32's temporary memory, its loss after {len(low.losses)} steps "
        f"{loss}, and on this processor, which gains nothing, it takes {takes}."
    )


def cut(lines: list[str], width: int) -> Iterator[str]:
    """The first lines of a diff and its last, which counts, each cut to a width."""
    first = lines[: min(DIFF_LINES, len(lines) - 1)]
    for line in first:
        yield line if len(line) <= width else f"{line[: width - 4]} ..."
    if more := len(lines) - 1 - len(first):
        yield f"... and {more} more lines"
    yield from textwrap.wrap(lines[-1], width)


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
    info = cpu_info()
    return (
        f"{info.model} ({', '.join(info.bf16) or 'no bf16 instructions'}), {info.cores} cores, "
        f"jax {jax.__version__}, {jax.default_backend()}, Python {platform.python_version()}"
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--steps", type=int, default=20, help="training steps for each row (default: %(default)s)"
    )
    parser.add_argument(
        "--layers", type=int, default=Shape.layers, help="the model's layers (default: %(default)s)"
    )
    parser.add_argument(
        "--policy",
        action="append",
        metavar="ROW",
        choices=ROWS,
        help=f"a row of the table, which may be repeated: {', '.join(ROWS)} "
        f"(default: {', '.join(DEFAULT_ROWS)})",
    )
    options = parser.parse_args()
    if options.steps < 1 or options.layers < 1:
        parser.error("--steps and --layers take a number of at least 1")
    return options


def main() -> None:
    options, start = arguments(), time.perf_counter()
    console = Console()
    names = list(dict.fromkeys(options.policy or DEFAULT_ROWS))
    shape, text = Shape(layers=options.layers), standard_library()
    data = batches(text, shape, options.steps)
    task = make_task(shape)
    size = sum(leaf.size for leaf in jax.tree.leaves(task.params))
    say = partial(console.print, highlight=False, markup=False)
    say(machine())
    say(
        f"{size / 1e6:.1f} M float32 parameters, {shape.layers} layers of width {shape.width}, "
        f"{shape.batch} x {shape.length} bytes a step of {len(text) / 1e6:.1f} MB of text"
    )
    rows = run(names, task, data)
    console.print(make_table(rows))
    for note in notes(rows):
        say(note)
    policy = next((n for n in names if n in PRESETS and n != "AlwaysF32"), "AutoMixedBf16")
    inspection = pp.inspect(task.train_step, getattr(pp, policy))
    diff = inspection(task.params, task.opt_state, data[0]).diff("lines").splitlines()
    say(f'\nThe diff by source line, inspect(train_step, "{policy}").diff("lines"):')
    for line in cut(diff, console.width):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    say(f"\n{time.perf_counter() - start:.0f} s in all.")
    say(conclusion(rows))


if __name__ == "__main__":
    main()
