"""Measure products of 8 bits beside those of 16: times, errors, and what training makes of them.

Three programs run forward: one product, a perceptron of eight layers, and a byte-level
transformer (scripts/bench_models). Each runs in float32; in bfloat16, with weights that are cast in
the call and with weights that were cast before; and in int8, with weights that are rounded in the
call and with those of `precpass.quant.quantized`. Times are medians of interleaved rounds, ratios
those within rounds.

With --targets nothing runs: one product of 1024 x 2048 x 2048 and six layers of it are compiled for
TPUs and an H100. The figures are ratios to the same program in bfloat16 with weights ready: of the
TPU compiler's estimated cycles, and of the bytes that an H100's kernels move. Then six layers of
4096 x 4096 are compiled for NVIDIA GPUs, beside bfloat16 by hand and flax's float8 layers.

With --train the transformer is trained from the same parameters on the same batches in float32,
bfloat16, int8 and float8, which a CPU emulates. The loss is the mean of the last fifty steps. The
gradient is that of the first batch, beside float32's.
"""

import argparse
import dataclasses
import datetime
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from bench_models import MODELS
from bench_models.model import Weights, cross_entropy
from bench_models.transformer import SHAPES, batches, layer, layer_norm, standard_library
from flax import linen as nn
from render_results import rendered_table

import precpass as pp
from precpass.devices.cpu_info import cpu_info
from precpass.devices.detect import planned_for
from precpass.devices.peaks import device_named
from precpass.devices.targets import abstract_on, target_of
from precpass.measure.execute import compiled, interleaved
from precpass.measure.traffic import traffic_of

Program = Callable[[Any, Any], Any]
ROUNDS = 9
LAST = 50
"""So many of the last losses are averaged."""
HEADS = SHAPES["medium"].heads
TRAINED: dict[str, Any] = {
    **{name: name for name in ("AlwaysF32", "AutoMixedBf16", "AutoMixedInt8", "AutoMixedF8")},
    "AutoMixedF8, weights' gradients in bf16": pp.AutoMixedF8.with_weight_gradients("bf16"),
}
"""The policies that are trained under."""
READY = "p=bf16,c=bf16"
"""The policy for weights that are bfloat16 before the call. Without `p` a product of a float32 and
a bfloat16 operand is the user's own, in float32."""
SHAPE, WEIGHT = (1024, 2048), (2048, 2048)
"""The operands of the product that is compiled."""
LARGE = 4096
LARGE_DATA = jax.ShapeDtypeStruct((LARGE, LARGE), jnp.float32)
"""The data of six layers that are compiled for NVIDIA GPUs."""
TARGETS = {
    **dict.fromkeys(("tpu v5e", "tpu v5p", "tpu v6e", "tpu 7x"), "cycles"),
    "h100": "moved",
}
"""The devices that are compiled for, with the figure that their compiler gives of a program."""
TEXT = (
    "Times are those of two cores of the server's CPU that a part names: medians of nine "
    "interleaved rounds, ratios those within rounds. Errors are against float64. The part "
    "that is compiled for other devices ran nowhere: a product of 1024 x 2048 x 2048, and six"
    " layers of that size, to bfloat16 with weights ready; cycles are the TPU compiler's "
    'estimate, and "moved" are the bytes that kernels move. A roof ratio is of the time by '
    "published peaks, of bytes and products added up, to the first row of its kind."
)


def product(w: Any, x: Any) -> Any:
    """One product."""
    return x @ w


def perceptron(ws: Any, x: Any) -> Any:
    """A perceptron."""
    for w in ws:
        x = jax.nn.relu(x @ w)
    return x


def transformer(params: Any, tokens: Any) -> Any:
    """The logits of the byte-level transformer, layer after layer."""
    tokens = tokens[:, :-1]
    x = params["embedding"][tokens] + params["positions"][: tokens.shape[1]]
    for p in params["layers"]:
        x = layer(x, p, HEADS)
    return layer_norm(x, params["scale"], params["bias"]) @ params["embedding"].T


def programs() -> dict[str, tuple[Program, Any, Any]]:
    """The programs with their parameters and data."""
    weights, x = Weights(), np.random.default_rng(0).standard_normal((64, 1024))
    model = MODELS["unrolled"]("medium")
    return {
        "product, 64 x 1024 x 1024": (product, weights(1024, 1024), jnp.asarray(x, jnp.float32)),
        "perceptron, 8 x 1024, batch 64": (
            perceptron,
            [weights(1024, 1024) for _ in range(8)],
            jnp.asarray(x, jnp.float32),
        ),
        "byte transformer": (transformer, model.params, model.batch(0)),
    }


def low(tree: Any) -> Any:
    """Arrays of two and more dimensions in bfloat16."""
    return jax.tree.map(lambda a: a.astype(jnp.bfloat16) if a.ndim > 1 else a, tree)


def columns(fn: Program, params: Any, data: Any) -> dict[str, tuple[Program, Any]]:
    """The ways to run a program, each with its parameters."""
    bf16 = pp.auto_mixed(fn, "bf16")
    int8, small = pp.auto_mixed(fn, "int8"), pp.quant.quantized(fn, "int8")(params, data)

    def of_ready(low: Any, data: Any) -> Any:
        wide = jax.tree.map(lambda a: a.astype(jnp.float32), low)
        return bf16(wide, data)

    return {
        "float32": (jax.jit(fn), params),
        "bfloat16": (bf16, params),
        "bfloat16, weights ready": (jax.jit(of_ready), low(params)),
        "int8": (int8, params),
        "int8, weights ready": (int8, small),
    }


def measured(fn: Program, params: Any, data: Any, rounds: int) -> list[list[Any]]:
    """A row for each way to run a program."""
    ways = columns(fn, params, data)
    runs = {name: partial(run, own, data) for name, (run, own) in ways.items()}
    times = interleaved(runs, rounds, warm_up=2)
    base = times["bfloat16, weights ready"]
    with jax.enable_x64(True):
        double = jax.tree.map(lambda a: np.asarray(a, np.float64), params)
        exact = np.asarray(jax.jit(fn)(double, jnp.asarray(np.asarray(data))), np.float64)
    rows: list[list[Any]] = []
    for name, run in runs.items():
        error = np.linalg.norm(np.asarray(run(), np.float64) - exact) / np.linalg.norm(exact)
        low_quartile, high_quartile = times[name].ratios(base).quartiles
        way, own = ways[name]
        temp = compiled(jax.jit(way), own, data).memory.temp
        rows.append(
            [
                name,
                round(times[name].median * 1e3, 2),
                round(float(np.median(times[name].ratios(base).seconds)), 2),
                f"{low_quartile:.2f}-{high_quartile:.2f}",
                float(f"{error:.1e}"),
                temp // 1024,
            ]
        )
    return rows


def trained(steps: int) -> list[list[Any]]:
    """A row for each policy of `TRAINED`: the transformer's last losses, in nats, and its gradient.

    The row ends with the relative error and the cosine of the first gradient beside float32's.
    """
    model, shape = MODELS["unrolled"]("medium"), SHAPES["medium"]
    data = jnp.asarray(batches(standard_library(), shape, steps))

    def loss(params: Any, tokens: Any) -> Any:
        return cross_entropy(transformer(params, tokens), tokens[:, 1:])

    gradient, state = jax.value_and_grad(loss), model.optimizer.init(model.params)
    wanted = flat(jax.jit(gradient)(model.params, data[0])[1])
    rows: list[list[Any]] = []
    for name, policy in TRAINED.items():
        graded = pp.auto_mixed(gradient, policy)

        def step(state: Any, tokens: Any, graded: Any = graded) -> Any:
            params, opt_state = state
            value, grads = graded(params, tokens)
            updates, opt_state = model.optimizer.update(grads, opt_state, params)
            return (optax.apply_updates(params, updates), opt_state), value

        found = flat(graded(model.params, data[0])[1])
        cosine = found @ wanted / np.linalg.norm(found) / np.linalg.norm(wanted)
        error = np.linalg.norm(found - wanted) / np.linalg.norm(wanted)
        _, losses = jax.jit(partial(jax.lax.scan, step))((model.params, state), data)
        last = round(float(np.mean(losses[-LAST:])), 4)
        rows.append([name, last, float(f"{error:.1e}"), round(float(cosine), 5)])
        print(rows[-1], flush=True)
    return rows


def flat(tree: Any) -> Any:
    """All numbers of a tree, in float64."""
    return np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(tree)])


def figures(target: str, run: Callable[..., Any], *args: Any) -> tuple[float, int]:
    """What a compiler says of a program at some shapes: the figure of `TARGETS`, and temp bytes."""
    device = target_of(target)
    with planned_for(device):
        program = compiled(jax.jit(run), *abstract_on(device, args))
    return getattr(program.traffic, TARGETS[target]), program.memory.temp


def compiled_part() -> dict[str, Any]:
    """A product, and six layers of its size, as they are compiled for `TARGETS`."""
    x = jax.ShapeDtypeStruct(SHAPE, jnp.float32)
    wide, low = (jax.ShapeDtypeStruct(WEIGHT, dtype) for dtype in (jnp.float32, jnp.bfloat16))
    ready = {
        precision: pp.quant.QuantizedArray(
            jax.ShapeDtypeStruct(x.shape, dtype), jax.ShapeDtypeStruct((rows, 1), jnp.float32)
        )
        for precision, dtype, rows in (("int8", jnp.int8, 1024), ("f8", jnp.float8_e4m3fn, 1))
    }
    rows: list[list[Any]] = []
    for target, name in TARGETS.items():
        base, _ = figures(target, pp.auto_mixed(product, READY), low, x)
        layers, temp = figures(target, pp.auto_mixed(perceptron, READY), [low] * 6, x)
        for precision in ("int8", "f8"):
            policy = pp.AutoMixedBf16.with_rules(
                pp.Rule(primitive="dot_general", precision=precision)
            )
            small = pp.quant.quantized(product, policy)(wide, x)
            single = pp.auto_mixed(product, policy)
            one, _ = figures(target, single, small, x)
            both, _ = figures(target, single, small, ready[precision])
            ratios = [None if v is None else round(v / base, 2) for v in (both, one)]
            six, own = figures(target, pp.auto_mixed(perceptron, policy), [small] * 6, x)
            known = pp.Rule(primitive="dot_general", precision=precision, largest=(8.0, 1.0))
            policy = pp.AutoMixedBf16.with_rules(known)
            scaled, _ = figures(target, pp.auto_mixed(perceptron, policy), [small] * 6, x)
            ratios += [round(six / layers, 2), round(scaled / layers, 2)]
            rows.append([target, precision, name, *ratios, round(own / temp, 2) if temp else None])
    heads = ["device", "in", "figure", "both operands ready", "weights ready", "six layers"]
    heads += ["with known scales", "temp of six layers"]
    title = f"Compiled for devices that are not there, jax {jax.__version__}, {today()}"
    large = ["device", f"six layers of {LARGE}", "products", "in 8 bits", "MiB moved", "transposes"]
    large = {"columns": [*large, "roof ratio"], "rows": [*large_part("h100"), *large_part("b200")]}
    return {"title": title, "tables": [{"columns": heads, "rows": rows}, large]}


def part(options: argparse.Namespace) -> dict[str, Any]:
    """What this machine and this JAX show."""
    ratio = "ratio to bfloat16, weights ready"
    heads = ["program", "in", "ms", ratio, "quartiles of it", "rel. error", "temp, KiB"]
    rows = [
        [name, *row]
        for name, program in programs().items()
        for row in measured(*program, options.rounds)
    ]
    tables = [{"columns": heads, "rows": rows}]
    if options.train:
        last = f"loss of the last {LAST} of {options.train} steps"
        heads = ["byte transformer under", last, "error of a gradient", "its cosine"]
        tables.append({"columns": heads, "rows": trained(options.train)})
    return {"title": f"jax {jax.__version__}, {cpu_info().model}, {today()}", "tables": tables}


class FlaxLayers(nn.Module):
    """The perceptron of six layers with flax's own float8."""

    @nn.compact
    def __call__(self, x: Any) -> Any:
        """The result."""
        for _ in range(6):
            options: dict[str, Any] = {"use_bias": False, "dtype": jnp.bfloat16}
            x = nn.relu(nn.Dense(LARGE, dot_general_cls=nn.Fp8DotGeneralOp, **options)(x))
        return x


def by_hand(ws: Any, x: Any) -> Any:
    """The perceptron in bfloat16."""
    return perceptron([w.astype(jnp.bfloat16) for w in ws], x.astype(jnp.bfloat16))


def six_layers() -> dict[str, tuple[str, Program, Any]]:
    """Ways to run six layers: to which other one each is compared, its function and parameters."""
    wide, x = [jax.ShapeDtypeStruct((LARGE, LARGE), jnp.float32)] * 6, LARGE_DATA
    low = [jax.ShapeDtypeStruct((LARGE, LARGE), jnp.bfloat16)] * 6
    flax_layers = FlaxLayers()
    variables = jax.eval_shape(flax_layers.init, jax.random.key(0), x)
    rule = pp.Rule(primitive="dot_general", precision="f8")
    in_f8 = pp.AutoMixedBf16.with_rules(rule)
    known = pp.AutoMixedBf16.with_rules(dataclasses.replace(rule, largest=(8.0, 1.0)))
    small = pp.quant.quantized(perceptron, in_f8)(wide, x)

    def gradient(fn: Program) -> Program:
        return jax.grad(
            lambda ws, x: jnp.square(fn(ws, x).astype(jnp.float32)).mean(), allow_int=True
        )

    graded, base, ready = gradient(perceptron), "gradient, AutoMixedBf16", "forward, bfloat16 ready"
    return {
        base: (base, pp.auto_mixed(graded), wide),
        "gradient, bfloat16 by hand": (base, gradient(by_hand), wide),
        "gradient, AutoMixedF8": (base, pp.auto_mixed(graded, "AutoMixedF8"), wide),
        'gradient, with_weight_gradients("f8")': (
            base,
            pp.auto_mixed(graded, pp.AutoMixedF8.with_weight_gradients("f8")),
            wide,
        ),
        "gradient, flax's Fp8DotGeneralOp": (base, gradient(flax_layers.apply), variables),
        ready: (ready, pp.auto_mixed(perceptron, READY), low),
        "forward, float8 weights ready": (ready, pp.auto_mixed(perceptron, in_f8), small),
        "forward, with known scales": (ready, pp.auto_mixed(perceptron, known), small),
    }


def large_part(target: str) -> list[list[Any]]:
    """A row for each way to run six layers, compiled for an NVIDIA GPU."""
    device, times, rows = target_of(target), dict[str, float](), list[list[Any]]()
    peaks = device_named("gpu", device.device_kind).peaks
    for name, (base, run, params) in six_layers().items():
        # cuBLAS for all products: a device chooses it for large ones, and its calls show formats.
        with planned_for(device):
            lowered = jax.jit(run).lower(*abstract_on(device, (params, LARGE_DATA)))
        options = {"xla_gpu_enable_triton_gemm": False}
        traffic = traffic_of(lowered.compile(options).as_text(), "gpu")
        in_8_bits = sum(k.runs for k in traffic.products if k.operands[0].startswith("f8"))
        seconds = traffic.moved / peaks.bandwidth
        for runs, dtype in ((in_8_bits, "f8e4m3"), (traffic.runs - in_8_bits, "bf16")):
            seconds += runs * 2 * LARGE**3 / peaks.flops(dtype)
        times[name] = seconds
        figures = [traffic.runs, in_8_bits, round(traffic.moved / 2**20), traffic.transposes]
        rows.append([target, name, *figures, round(seconds / times[base], 2)])
    return rows


def today() -> str:
    """The date."""
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def main() -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"of timing; {ROUNDS}")
    parser.add_argument("--train", type=int, default=0, metavar="STEPS", help="train so long, too")
    parser.add_argument(
        "--json", type=Path, help="a file of results, in which the part of this JAX is replaced"
    )
    parser.add_argument(
        "--targets", action="store_true", help="compile for TPUs and GPUs instead, run nothing"
    )
    options = parser.parse_args()
    found = compiled_part() if options.targets else part(options)
    for table in found["tables"]:
        print("\n".join(rendered_table(table)), end="\n\n")
    if options.json is not None:
        parts = []
        if options.json.exists():
            parts = json.loads(options.json.read_text(encoding="utf-8"))["parts"]
        release = found["title"].partition(",")[0]
        others = [p for p in parts if p["title"].partition(",")[0] != release]
        measured = found["title"].rpartition(" ")[2]
        whole = {"title": "Products of 8 bits", "measured": measured, "text": TEXT}
        whole["parts"] = [*others, found]
        options.json.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
