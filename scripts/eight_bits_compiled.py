"""Products of 8 bits as they are compiled for devices that need not be there.

One product of 1024 x 2048 x 2048 and six layers of it are compiled for TPUs and an H100. The
figures are ratios to the same program in bfloat16 with weights ready: of the TPU compiler's
estimated cycles, and of the bytes that an H100's kernels move. The layers and their gradient are
compiled for a B200 too, and the gradients of loops for a TPU 7x and an H100, from either side of
the pass. All weights are float32 there.
"""

import datetime
import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import precpass as pp
from precpass.devices.detect import planned_for
from precpass.devices.targets import abstract_on, target_of
from precpass.measure.execute import compiled

READY = "p=bf16,c=bf16"
"""The policy for weights that are bfloat16 before the call. Without `p` a product of a float32 and
a bfloat16 operand is the user's own, in float32."""
SHAPE, WEIGHT, BLOCK = (1024, 2048), (2048, 2048), 128
"""The operands of the product that is compiled, and how many elements share a scale of a block."""
LARGE = 4096
"""The dimensions of a product that has enough work to hide what is around it."""
TARGETS = {
    **dict.fromkeys(("tpu v5e", "tpu v5p", "tpu v6e", "tpu 7x"), "cycles"),
    "h100": "moved",
}
"""The devices that are compiled for, with the figure that their compiler gives of a program."""


def figures(target: str, run: Callable[..., Any], *args: Any) -> tuple[float, int]:
    """What a compiler says of a program at some shapes: the figure of `TARGETS`, and temp bytes."""
    device = target_of(target)
    with planned_for(device):
        program = compiled(jax.jit(run), *abstract_on(device, args))
    return getattr(program.traffic, TARGETS[target]), program.memory.temp


def figure(target: str, run: Callable[..., Any], *args: Any) -> float:
    """The figure of `TARGETS` alone."""
    return figures(target, run, *args)[0]


def in_a_batch(x: Any, w: Any, of_x: Any, of_w: Any) -> Any:
    """A product of float8 with a scale for each block of a row or column: a batch of products."""
    rows, inner = x.shape
    count = inner // BLOCK
    parts = x.reshape(rows, count, BLOCK), w.reshape(count, BLOCK, -1)
    sums = jnp.einsum("mbk,bkn->bmn", *parts, preferred_element_type=jnp.float32)
    return (sums * of_x.T[:, :, None] * of_w[:, None, :]).sum(0).astype(jnp.bfloat16)


def in_a_loop(x: Any, w: Any, of_x: Any, of_w: Any) -> Any:
    """The same as a loop over the blocks."""
    rows, inner = x.shape
    count = inner // BLOCK

    def add(total: Any, block: Any) -> tuple[Any, None]:
        x, w, of_x, of_w = block
        part = jnp.dot(x, w, preferred_element_type=jnp.float32)
        return total + part * of_x[:, None] * of_w[None, :], None

    blocks = x.reshape(rows, count, BLOCK).swapaxes(0, 1), w.reshape(count, BLOCK, -1)
    start = jnp.zeros((rows, w.shape[1]), jnp.float32)
    return jax.lax.scan(add, start, (*blocks, of_x.T, of_w))[0].astype(jnp.bfloat16)


def of_blocks() -> dict[str, Any]:
    """A table of what scales of blocks cost, beside a bfloat16 product with operands ready."""

    def plain(x: Any, w: Any) -> Any:
        return jnp.dot(x, w, preferred_element_type=jnp.bfloat16)

    low = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in (SHAPE, WEIGHT)]
    eight = [jax.ShapeDtypeStruct(shape, jnp.float8_e4m3fn) for shape in (SHAPE, WEIGHT)]
    count = WEIGHT[0] // BLOCK
    scales = [
        jax.ShapeDtypeStruct(shape, jnp.float32)
        for shape in ((SHAPE[0], count), (count, WEIGHT[1]))
    ]
    rows: list[list[Any]] = []
    for target, name in TARGETS.items():
        base = figure(target, plain, *low)
        ratios = [figure(target, f, *eight, *scales) / base for f in (in_a_batch, in_a_loop)]
        rows.append([target, name, *(round(ratio, 2) for ratio in ratios)])
    heads = ["device", "figure", f"float8, scales of blocks of {BLOCK}, as a batch", "as a loop"]
    return {"columns": heads, "rows": rows}


def of_large() -> dict[str, Any]:
    """A table of a product of 4096^3 with operands ready, and of XLA's without scales."""
    shape = (LARGE, LARGE)
    low = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    rows: list[list[Any]] = []
    for target, name in TARGETS.items():
        base = figure(
            target, lambda w, x: jnp.dot(x, w, preferred_element_type=low.dtype), low, low
        )
        row: list[Any] = [target, name]
        for precision, dtype, sums in (
            ("int8", jnp.int8, jnp.int32),
            ("f8", jnp.float8_e4m3fn, jnp.float32),
        ):
            eight = jax.ShapeDtypeStruct(shape, dtype)
            per_row = LARGE if precision == "int8" else 1
            x = pp.quant.QuantizedArray(eight, jax.ShapeDtypeStruct((per_row, 1), jnp.float32))
            w = pp.quant.QuantizedArray(eight, jax.ShapeDtypeStruct((1, per_row), jnp.float32))
            policy = pp.AutoMixedBf16.with_rules(
                pp.Rule(primitive="dot_general", precision=precision)
            )

            def narrow(w: Any, x: Any) -> Any:
                return product(w, x).astype(jnp.bfloat16)

            def plain(w: Any, x: Any, sums: Any = sums) -> Any:
                return jnp.dot(x, w, preferred_element_type=sums)

            own = figure(target, pp.auto_mixed(narrow, policy), w, x)
            row += [round(v / base, 2) for v in (own, figure(target, plain, eight, eight))]
        rows.append(row)
    heads = [f"product of {LARGE}^3, operands ready", "figure", "int8", "XLA's int8 -> int32"]
    return {"columns": [*heads, "float8", "XLA's float8 -> float32"], "rows": rows}


def of_a_b200() -> dict[str, Any]:
    """A table of six layers and their gradient in bfloat16 and float8, for a B200."""

    def graded(ws: Any, x: Any) -> Any:
        return jax.grad(lambda ws: perceptron(ws, x).sum())(ws)

    x, wide = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (SHAPE, WEIGHT))
    rows: list[list[Any]] = []
    first: list[Any] = []
    for name in ("bf16", "f8"):
        found = [pp.audit(f, name, target="b200")([wide] * 6, x) for f in (perceptron, graded)]
        first = first or found
        row: list[Any] = [name]
        for one, base in zip(found, first, strict=True):
            formats = Counter[str]()
            for kernel in one.traffic.products:
                formats[f"{kernel.call} of {kernel.operands[0]}"] += kernel.runs
            row.append(", ".join(f"{runs} {kind}" for kind, runs in sorted(formats.items())))
            row.append(round(one.traffic.moved / base.traffic.moved, 2))
            row.append(round(one.memory.temp / base.memory.temp, 2))
        rows.append(row)
    heads = ["six layers, compiled for a B200, in", "kernels", "moved", "temp"]
    heads += ["kernels of the gradient", "moved", "temp"]
    return {"columns": heads, "rows": rows}


def layers(ws: Any, x: Any) -> Any:
    """The loss of six layers in a scan."""
    return jax.lax.scan(lambda x, w: (jax.nn.relu(x @ w), None), x, ws)[0].sum()


def checkpointed(ws: Any, x: Any) -> Any:
    """The same with layers that are computed again in the backward pass."""
    layer = jax.checkpoint(lambda x, w: (jax.nn.relu(x @ w), None))
    return jax.lax.scan(layer, x, ws)[0].sum()


def recurrent(ws: Any, x: Any) -> Any:
    """The loss of a recurrent network, which reads one weight in each of eight trips."""
    steps = jnp.broadcast_to(x, (8, *x.shape))
    return jax.lax.scan(lambda h, x: (jnp.tanh(h @ ws[0] + x), None), x, steps)[0].sum()


def of_loops() -> dict[str, Any]:
    """A table of gradients of loops, from either side of the pass."""
    args = jax.ShapeDtypeStruct((6, *WEIGHT), jnp.float32), jax.ShapeDtypeStruct(SHAPE, jnp.float32)
    programs = {"six layers": layers, "with checkpoints": checkpointed, "recurrent": recurrent}
    rows: list[list[Any]] = []
    for target, (name, loss) in itertools.product(("tpu 7x", "h100"), programs.items()):
        base = None
        for policy in ("AutoMixedBf16", "AutoMixedF8"):
            ratios: list[float] = []
            for fn in (
                jax.grad(pp.auto_mixed(loss, policy)),
                pp.auto_mixed(jax.grad(loss), policy),
            ):
                found = figures(target, fn, *args)
                base = base or found
                ratios += [round(a / b, 2) for a, b in zip(found, base, strict=True)]
            rows.append([name, target, policy, TARGETS[target], *ratios])
    heads = ["gradient of a scan", "for", "under", "figure"]
    heads += ["grad(auto)", "its temp", "auto(grad)", "its temp"]
    return {"columns": heads, "rows": rows}


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
        base = figure(target, pp.auto_mixed(product, READY), low, x)
        layers, temp = figures(target, pp.auto_mixed(perceptron, READY), [low] * 6, x)
        for precision in ("int8", "f8"):
            policy = pp.AutoMixedBf16.with_rules(
                pp.Rule(primitive="dot_general", precision=precision)
            )
            small = pp.quant.quantized(product, policy)(wide, x)
            single = pp.auto_mixed(product, policy)
            one = figure(target, single, small, x)
            both = figure(target, single, small, ready[precision])
            ratios = [None if v is None else round(v / base, 2) for v in (both, one)]
            six, own = figures(target, pp.auto_mixed(perceptron, policy), [small] * 6, x)
            ratios += [round(six / layers, 2), round(own / temp, 2) if temp else None]
            rows.append([target, precision, name, *ratios])
    heads = ["device", "in", "figure", "both operands ready", "weights ready", "six layers"]
    heads += ["their temp"]
    title = f"Compiled for devices that are not there, jax {jax.__version__}, {today()}"
    tables = [
        {"columns": heads, "rows": rows},
        of_large(),
        of_loops(),
        of_a_b200(),
        of_blocks(),
    ]
    return {"title": title, "tables": tables}


def product(w: Any, x: Any) -> Any:
    """One product."""
    return x @ w


def perceptron(ws: Any, x: Any) -> Any:
    """A perceptron."""
    for w in ws:
        x = jax.nn.relu(x @ w)
    return x


def today() -> str:
    """The date."""
    return datetime.datetime.now(datetime.UTC).date().isoformat()
