"""Measure what calling and tracing cost through the pass, as ratios to plain JAX.

Tracing: all that `auto_mixed(f).trace(...)` does (the trace of f, graph, facts, plan and rewrite)
against `jax.make_jaxpr(f)(...)` alone, both of a function that JAX has not seen. Beside it what the
least form of a rewrite costs: binding each equation of the jaxpr again (`jax.core.eval_jaxpr`
under `make_jaxpr`). Calls: `auto_mixed(f)(...)` against `jax.jit(f)(...)`, compiled before; under
AlwaysF32, so that both run the same program and the difference is the call's alone.

Everything is CPU time of this process; in each round every column takes its turn, and ratios and
differences are taken within a round.
"""

import argparse
import gc
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import rich
from bench_models.transformer import layer
from jax import lax
from rich.console import Console
from rich.table import Table

import precpass as pp
from precpass.measure.execute import interleaved

POLICIES = (pp.AutoMixedBf16, pp.AutoMixedF16, pp.AlwaysBf16, pp.AlwaysF32)
FRAMES = 150
"""As many of `below` take about a chunk, 16 KiB on CPython 3.11 to 3.13."""
WIDTH, HEADS, LENGTH, BATCH, BYTES = 64, 4, 16, 2, 256


# ---------------------------------------------------------------- programs


def loss(params: Any, tokens: jax.Array, scanned: bool) -> jax.Array:
    """The mean negative log-likelihood of each byte after the first."""
    x = params["embedding"][tokens[:, :-1]]
    if scanned:
        x, _ = lax.scan(lambda x, p: (layer(x, p, HEADS), None), x, params["layers"])
    else:
        for p in params["layers"]:
            x = layer(x, p, HEADS)
    logits = jax.nn.log_softmax(x @ params["embedding"].T)
    return -jnp.mean(jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1))


def transformer(layers: int, scanned: bool) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The gradient of a transformer's loss, and its arguments."""
    rng = np.random.default_rng(0)

    def weights(*shape: int) -> jax.Array:
        return jnp.asarray(0.02 * rng.standard_normal(shape), jnp.float32)

    def make_layer() -> dict[str, jax.Array]:
        norms = {f"{name}{i}": weights(WIDTH) for name in ("scale", "bias") for i in (1, 2)}
        return norms | {
            "qkv": weights(WIDTH, 3 * WIDTH),
            "out": weights(WIDTH, WIDTH),
            "up": weights(WIDTH, 4 * WIDTH),
            "down": weights(4 * WIDTH, WIDTH),
        }

    made = [make_layer() for _ in range(layers)]
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *made) if scanned else made
    params = {"embedding": weights(BYTES, WIDTH), "layers": stacked}
    tokens = jnp.asarray(rng.integers(BYTES, size=(BATCH, LENGTH + 1)))
    return jax.value_and_grad(partial(loss, scanned=scanned)), (params, tokens)


def flat(equations: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A chain of equations without a body: one product and nine elementwise ones in ten."""

    def program(x: jax.Array, w: jax.Array) -> jax.Array:
        for row in range(equations):
            if row % 10 == 0:
                x = lax.dot(x, w)
            else:
                x = lax.mul(x, w) if row % 2 else lax.tanh(x)
        return x

    return program, (jnp.ones((4, 4)), jnp.ones((4, 4)))


def nested(depth: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """One product inside of `depth` jits, new ones in every trace, each with an equation more."""

    def program(x: jax.Array, w: jax.Array) -> jax.Array:
        def level(inner: Callable[..., Any]) -> Callable[..., Any]:
            return jax.jit(lambda x, w: lax.tanh(inner(x, w)))

        fn: Callable[..., Any] = lax.dot
        for _ in range(depth):
            fn = level(fn)
        return fn(x, w)

    return program, (jnp.ones((4, 4)), jnp.ones((4, 4)))


# ---------------------------------------------------------------- measuring


def below(frames: int, run: Callable[[], Any]) -> None:
    """Runs a call below some more frames; what it made is freed in its own time."""
    if frames:
        return below(frames - 1, run)
    run()


def rounds_of(columns: dict[str, Callable[[], Any]], rounds: int, cold: bool) -> dict[str, Any]:
    """The CPU seconds of each column in each round, after one round that is not counted.

    Each round is at another depth of the stack. CPython keeps frames in chunks, and a call that
    crosses the end of one allocates the next: by its depth alone the same trace was seen to take
    up to 1.4 times as long.
    """
    depth = 0

    def at_depth(turn: int) -> None:
        nonlocal depth
        depth = FRAMES * max(turn, 0) // rounds

    def prepare(_name: str) -> tuple[()]:
        if cold:
            jax.clear_caches()
        gc.collect()
        return ()

    runs = {name: lambda run=run: below(depth, run) for name, run in columns.items()}
    found = interleaved(runs, rounds, prepare=prepare, clock=time.process_time, progress=at_depth)
    return {name: timing.seconds for name, timing in found.items()}


def tracing(fn: Callable[..., Any], args: Sequence[Any]) -> dict[str, Callable[[], Any]]:
    """Column -> one trace. JAX remembers a trace by its function: each gets a new one."""
    closed = jax.make_jaxpr(fn)(*args)
    leaves = jax.tree.leaves(args)

    def new() -> Callable[..., Any]:
        return lambda *xs: fn(*xs)

    def again(*xs: Any) -> Any:
        return jax.core.eval_jaxpr(getattr(closed, "jaxpr", closed), closed.consts, *xs)

    def through(policy: pp.types.PrecisionPolicy) -> Any:
        return pp.auto_mixed(new(), policy=policy).trace(*args)

    return {
        "trace": lambda: jax.make_jaxpr(new())(*args),
        "re-bind": lambda: jax.make_jaxpr(lambda *xs: again(*xs))(*leaves),
        **{policy.name: partial(through, policy) for policy in POLICIES},
    }


def size(fn: Callable[..., Any], args: Sequence[Any]) -> int:
    """The number of equations, those of bodies included."""

    def count(jaxpr: Any) -> int:
        eqns = getattr(jaxpr, "jaxpr", jaxpr).eqns
        return sum(1 + sum(map(count, jax.extend.core.jaxprs_in_params(e.params))) for e in eqns)

    return count(jax.make_jaxpr(fn)(*args))


def spread(values: Sequence[float], digits: int = 2) -> str:
    """The median and, where there are enough values, the quartiles."""
    middle = f"{statistics.median(values):.{digits}f}"
    if len(values) < 4:
        return middle
    low, _, high = statistics.quantiles(values, n=4)
    return f"{middle} ({low:.{digits}f}-{high:.{digits}f})"


# ---------------------------------------------------------------- tables


def trace_table(programs: dict[str, Any], rounds: int, cold: bool) -> Table:
    """One row per program: the trace in milliseconds, the other columns as multiples of it."""
    caches = "cleared before every trace" if cold else "warm"
    table = Table(title=f"tracing, JAX's caches {caches}", box=rich.box.SIMPLE_HEAD)
    table.add_column("program", no_wrap=True)
    names = ("equations", "make_jaxpr\nms", "bare re-bind\nalone", *(p.name for p in POLICIES))
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for name, (fn, args) in programs.items():
        measured = rounds_of(tracing(fn, args), rounds, cold)
        base = measured.pop("trace")
        ratios = [[a / b for a, b in zip(m, base, strict=True)] for m in measured.values()]
        times = spread([1e3 * s for s in base], 0)
        table.add_row(name, str(size(fn, args)), times, *map(spread, ratios))
    return table


def call_table(counts: Sequence[int], rounds: int, calls: int) -> Table:
    """One row per number of arguments: microseconds of a call, and what the pass adds."""
    table = Table(title="calls", box=rich.box.SIMPLE_HEAD)
    for name in ("array arguments", "jax.jit(f)\nus", "auto_mixed(f)\nus", "difference\nus"):
        table.add_column(name, justify="right", no_wrap=True)
    for count in counts:
        args = [jnp.ones((2, 2)) for _ in range(count)]

        def program(*xs: jax.Array) -> jax.Array:
            return xs[0] @ xs[-1]

        def repeat(fn: Callable[..., Any], args: Sequence[Any] = args) -> None:
            for _ in range(calls):
                fn(*args)

        columns = {
            "jit": partial(repeat, jax.jit(program)),
            "mixed": partial(repeat, pp.auto_mixed(program, policy=pp.AlwaysF32)),
        }
        measured = rounds_of(columns, rounds, cold=False)
        plain, mixed = ([1e6 * s / calls for s in measured[name]] for name in columns)
        added = [b - a for a, b in zip(plain, mixed, strict=True)]
        table.add_row(str(count), *map(spread, (plain, mixed, added)))
    return table


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9, help="measured rounds of each table")
    parser.add_argument("--quick", action="store_true", help="tiny programs and two rounds")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("--rounds takes a number of at least 1")
    return options


def main() -> None:
    options = arguments()
    layers, sizes, depth = (2, (30, 60), 5) if options.quick else (12, (1_000, 10_000), 30)
    largest = 100 if options.quick else 100_000
    rounds, calls = (2, 10) if options.quick else (options.rounds, 2_000)
    console = Console() if Console().is_terminal else Console(width=130)
    say = partial(console.print, highlight=False, markup=False, soft_wrap=True)
    say(f"jax {jax.__version__}, Python {platform.python_version()}, CPU time, {rounds} rounds")
    # AlwaysF32 has nothing to do here, and the last program of a row has no more to say
    warnings.simplefilter("ignore", pp.PrecisionWarning)
    models = {
        f"gradient, {layers} layers unrolled": transformer(layers, scanned=False),
        f"gradient, {layers} layers scanned": transformer(layers, scanned=True),
    }
    others = {f"flat, {n:,}": flat(n) for n in sizes} | {f"nested jits, {depth}": nested(depth)}
    for cold in (False, True):
        console.print(trace_table(models | others if not cold else models, rounds, cold))
    few = min(rounds, 3)
    console.print(trace_table({f"flat, {largest:,}": flat(largest)}, few, cold=False))
    console.print(call_table((1, 10, 300), rounds, calls))
    say(
        "Multiples: of make_jaxpr in the same round. bare re-bind: eval_jaxpr of the finished "
        "jaxpr under make_jaxpr, without the trace of f; the columns behind it hold both, and the "
        "pass. Median (lower-upper quartile)."
    )


if __name__ == "__main__":
    main()
