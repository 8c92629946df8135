"""What XLA's compilers for GPUs and TPUs make: `scripts/test --targets` installs them."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from precpass.devices.targets import TARGETS

pytestmark = pytest.mark.targets
# A second TPU or GPU finds what the first one finds, but for its own table of devices.
A100 = pytest.param("a100", marks=pytest.mark.release)
ROOT = Path(__file__).resolve().parents[2]


def ran(*command: str) -> str:
    """What a process of its own prints, which JAX starts without the device."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    process = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, env=environment, cwd=ROOT
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


PROGRAM = """
import jax, jax.numpy as jnp, precpass as pp
from jax import lax
from precpass.backends.backend import CPU
from precpass.planner import planner

def loss(w, x):
    axes = ("NHWC", "HWIO", "NHWC")
    h = lax.conv_general_dilated(x, w[0], (1, 1), "SAME", dimension_numbers=axes)
    return jnp.tanh(jax.nn.relu(h).reshape(8, -1) @ w[1]).sum()

args = (jnp.ones((3, 3, 8, 16)), jnp.ones((16 * 64, 16))), jnp.ones((8, 8, 8, 8))
found = pp.audit(jax.grad(loss), target={target!r})(*args)
widened = [finding for finding in found.findings if finding.kind == "product widened"]
print(found.backend, found.products, found.as_planned, len(widened))
planner.backend_of = lambda platform: CPU
jax.clear_caches()
found = pp.audit(jax.grad(lambda w, x: loss(w, x)), target={target!r})(*args)
print(any(finding.kind == "product widened" for finding in found.findings))
"""


SHARDED = """
import jax, jax.numpy as jnp, precpass as pp
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec as P

def loss(w, x):
    return jnp.square(jnp.tanh(x @ w) @ w).sum()

def arguments(axes, *sizes):
    mesh = AbstractMesh(sizes, ("data", "model")[:len(sizes)], axis_types=(axes,) * len(sizes))
    specs = P(), P("data", None)
    shapes = (1024, 1024), (4096, 1024)
    return [jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
            for shape, spec in zip(shapes, specs)]

for axes in (AxisType.Auto, AxisType.Explicit):
    found = pp.audit(jax.grad(loss), target={target!r})(*arguments(axes, {count}))
    print(found.as_planned, found.products, "all-reduce" in found.hlo, found.memory.devices)
    assert f"memory of each of {count} devices" in str(found)
try:
    pp.audit(loss, target={target!r})(*arguments(AxisType.Auto, 3))
except ValueError as error:
    print(error)
try:
    pp.audit(loss, target={wrong!r})(*arguments(AxisType.Auto, 3))
except ValueError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("target", "count", "wrong"),
    [("h100:8", 8, "h100:1x2x3x4"), ("tpu v5e:4x4", 16, "tpu v5e:3x5")],
)
def test_a_sharded_program_is_compiled_for_a_topology(target: str, count: int, wrong: str):
    lines = ran("-c", SHARDED.format(target=target, count=count, wrong=wrong)).splitlines()
    assert lines[:2] == [f"5 5 True {count}"] * 2
    assert f"has {count} devices, and the arguments are sharded over 3" in lines[2]
    assert "the compiler has no topology" in lines[3]


GATHERED = """
import re
import jax, jax.numpy as jnp, numpy as np, precpass as pp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from precpass.devices.targets import target_of

target = target_of({target!r})
mesh = Mesh(np.asarray(target.devices).reshape(4), ("data",))

def loss(ws, x):
    for w in ws:
        w = jax.lax.with_sharding_constraint(w, NamedSharding(mesh, P()))
        x = jnp.tanh(x @ w)
    return jnp.square(x).mean()

sharding = NamedSharding(mesh, P("data", None))
w, x = (jax.ShapeDtypeStruct((n, 1024), jnp.float32, sharding=sharding) for n in (1024, 512))
for fn in (pp.auto_mixed(jax.grad(loss)), jax.grad(pp.auto_mixed(loss))):
    # JAX traces for the devices of the mesh, which are not those of this process.
    text = jax.jit(lambda ws, x: fn(ws, x)).lower([w] * 3, x).compile().as_text()
    lines = [line for line in text.splitlines() if " all-gather" in line and "-done" not in line]
    print(bool(lines), sorted(set(re.findall(r"(\\w+)\\[1024,1024", " ".join(lines)))))
"""


@pytest.mark.parametrize("target", ["h100:4", "tpu v5e:2x2"])
def test_a_weight_that_a_constraint_gathers_is_sent_in_16_bits(target: str):
    lines = ran("-c", GATHERED.format(target=target)).splitlines()
    assert lines == ["True ['bf16']"] * 2


@pytest.mark.parametrize(
    ("target", "widens"),
    [("h100", True), ("a100", True), ("tpu v5e", False)],
)
def test_every_product_is_low_in_the_program_that_the_compiler_makes(target: str, widens: bool):
    lines = ran("-c", PROGRAM.format(target=target)).splitlines()
    platform = TARGETS[target].platform
    first, second = lines
    assert first == f"{platform} 5 5 0"
    # with float32 results XLA widens the convolutions for a GPU, and the audit sees it
    assert second == str(widens)


STORED = """
import jax, jax.numpy as jnp, precpass as pp
from precpass.measure.hlo import Module

def loss(w, b, x):
    return jnp.square(jax.nn.gelu(x @ w[0] + b) @ w[1]).sum()

shapes = ((1024, 4096), (4096, 1024)), (1, 4096), (4096, 1024)
args = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s, jnp.float32), shapes,
                    is_leaf=lambda s: isinstance(s[0], int))
wide = pp.AutoMixedBf16.with_results("f32")
for fn, policy in (
    (jax.grad(loss, (0, 1)), pp.AutoMixedBf16),
    (jax.grad(pp.auto_mixed(loss, pp.AutoMixedBf16), (0, 1)), pp.Custom({{}})),
    (jax.grad(loss, (0, 1)), wide),
    (jax.grad(pp.auto_mixed(loss, wide), (0, 1)), pp.Custom({{}})),
):
    text = pp.audit(fn, policy, target={target!r})(*args).hlo
    module = Module.parse(text)
    entry = module.computations[module.entry]
    written = [shape for i in entry.instructions if i.opcode == "fusion" for shape in i.shapes]
    big = [shape for shape in written if shape.size == 4096 * 4096 and shape.dims != (1024, 4096)]
    print(sum(shape.dtype == "f32" for shape in big), len(big) > 0)
"""


@pytest.mark.parametrize("target", ["h100", A100])
def test_what_fusions_write_is_in_16_bits_in_the_program_that_the_compiler_makes(target: str):
    """A gelu's tanh and its cotangent; with float32 results the compiler writes them in float32."""
    lines = ran("-c", STORED.format(target=target)).splitlines()
    assert lines[:2] == ["0 True"] * 2
    assert all(int(line.split()[0]) > 0 for line in lines[2:])


DECODED = """
import jax, jax.numpy as jnp, precpass as pp

def decoded(ws, x):
    def trip(i, carry):
        x, caches = carry
        for layer, w in enumerate(ws):
            new = (x @ w)[None, :, None]
            caches = jax.lax.dynamic_update_slice(caches, new, (layer, 0, i, 0))
            scores = jnp.einsum("bd,bsd->bs", x, caches[layer]) / 16
            masked = jnp.where(jnp.arange(128) <= i, scores.astype(jnp.float32), -jnp.inf)
            weights = jax.nn.softmax(masked).astype(x.dtype)
            x = jnp.tanh(jnp.einsum("bs,bsd->bd", weights, caches[layer]) @ w.T + x)
        return x, caches
    caches = jnp.zeros((len(ws), *x.shape[:1], 128, x.shape[1]), x.dtype)
    return jax.lax.fori_loop(0, 128, trip, (x, caches))[0]

def hand(ws, x):
    ws, x = jax.tree.map(lambda a: a.astype(jnp.bfloat16), (ws, x))
    return decoded(ws, x).astype(jnp.float32)

def shape(*sizes):
    return jax.ShapeDtypeStruct(sizes, jnp.float32)

args = [shape(256, 256)] * 2, shape(32, 256)
mixed = pp.audit(decoded, "AutoMixedBf16", target={target!r})(*args)
by_hand = pp.audit(hand, pp.Custom({{}}), target={target!r})(*args)
print(mixed.traffic.low_runs == mixed.traffic.runs > 0)
print(mixed.traffic.moved / by_hand.traffic.moved)
print(mixed.memory.temp <= 1.1 * by_hand.memory.temp)  # of which a TPU needs none
print("f32[2,32,128,256]" in mixed.hlo, "bf16[2,32,128,256]" in mixed.hlo)
"""


@pytest.mark.parametrize("target", ["h100", "tpu v5e"])
def test_a_cache_is_kept_in_16_bits_in_the_program_that_the_compiler_makes(target: str):
    are_low, moved, is_small, caches = ran("-c", DECODED.format(target=target)).splitlines()
    assert are_low == is_small == "True"
    assert float(moved) < 1.1
    assert caches == "False True"


SAVED = """
import re
import jax, jax.numpy as jnp, precpass as pp
from jax import lax

def loss(w, v, xs):
    def cell(carry, x):
        h, c = carry
        i, f, g, o = jnp.split(x @ w + h @ v, 4, axis=-1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h
    zeros = jnp.zeros_like(xs[0])
    return jnp.square(lax.scan(cell, (zeros, zeros), xs)[1]).sum()

shapes = (256, 1024), (256, 1024), (32, 128, 256)
args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
for policy in (pp.AutoMixedBf16, pp.AutoMixedBf16.with_results("f32")):
    fn = jax.grad(pp.auto_mixed(loss, policy), (0, 1))
    text = pp.audit(fn, pp.Custom({{}}), target={target!r})(*args).hlo
    whiles = [line for line in text.splitlines() if " while(" in line]
    print(*[len(re.findall(dtype + r"\\[32,128,256\\]", " ".join(
        line.partition(" while(")[0] for line in whiles))) for dtype in ("f32", "bf16")])
"""


@pytest.mark.parametrize("target", ["h100", "tpu v5e"])
def test_a_loop_saves_16_bits_for_its_backward_pass_in_the_compiled_program(target: str):
    """The stacks that the two loops carry, with low and with float32 results."""
    low, wide = (line.split() for line in ran("-c", SAVED.format(target=target)).splitlines())
    # Each loop has the gate that multiplies the state in every trip, and the results or their
    # cotangents.
    assert int(low[0]) <= 5 and int(low[1]) >= 20
    assert int(wide[0]) >= 20


JITTED = """
import re
import jax, jax.numpy as jnp, precpass as pp

def network(ws, b, x):
    for w in ws[:2]:
        x = jax.nn.silu(x @ w + b)
    return -jax.nn.log_softmax(x @ ws[2] + b[0]).mean()

def stepper(w, x):
    def step(state, _):
        middle = state + 0.05 * (state @ w)
        return state + 0.1 * (middle @ w), None
    return jnp.square(jax.lax.scan(step, x, None, length=20)[0]).sum()

def layers(ws, vs, x):
    @jax.checkpoint
    def layer(x, w):
        mean = jnp.square(x).mean(-1, keepdims=True)
        return x + jax.nn.silu((x * jax.lax.rsqrt(mean + 1e-6)) @ w[0]) @ w[1]
    return jnp.square(jax.lax.scan(lambda x, w: (layer(x, w), None), x, (ws, vs))[0]).mean()

def shapes(*each):
    return [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in each]

programs = (
    (jax.grad(network, (0, 1)), (shapes(*[(1024, 1024)] * 3), *shapes((1, 1024), (4096, 1024)))),
    (jax.grad(stepper), shapes((1024, 1024), (512, 1024))),
    (jax.grad(layers), shapes((6, 512, 1024), (6, 1024, 512), (2048, 512))),
)
for (fn, args), shape in zip(programs, ("4096,1024", "20,512,1024", "6,2048,512")):
    for policy in ("AutoMixedBf16", pp.AutoMixedBf16.with_results("f32")):
        hlo = pp.audit(fn, policy, target={target!r})(*args).hlo
        entry = hlo[hlo.index("ENTRY"):]
        made = re.findall(r"= (.*?) (?:fusion|while)\\(", entry)
        print(*[sum(type_.count(dtype + "[" + shape + "]") for type_ in made)
                for dtype in ("f32", "bf16")])
"""


@pytest.mark.parametrize("target", ["h100", A100])
def test_a_jitted_functions_cotangent_and_a_stacked_state_are_written_in_16_bits(target: str):
    """What a network with silu, a stepper and layers of a scan write in float32 and in bfloat16."""
    lines = ran("-c", JITTED.format(target=target)).splitlines()
    written = [tuple(map(int, line.split())) for line in lines]
    for low, wide in zip(written[::2], written[1::2], strict=True):
        assert low[0] == 0 and low[1] > 0 and wide[0] > 0
    assert len(written) == 6


ONE_ROW = """
import jax, jax.numpy as jnp, precpass as pp

def steps(dtype):
    def fn(w, h, xs):
        w = w.astype(dtype)
        def step(h, x):
            h = jnp.tanh((h.astype(dtype) @ w).astype(jnp.float32) + x)
            return h, h
        return jax.lax.scan(step, h, xs)
    return fn

args = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((1024, 1024), (1, 1024), (64, 1, 1024))]
by_hand = pp.audit(steps(jnp.bfloat16), "AlwaysF32", target={target!r})(*args)
found = pp.audit(steps(jnp.float32), target={target!r})(*args)
print(found.traffic.casts, found.traffic.cast_bytes == 6 * 1024 * 1024)
print(found.traffic.moved / by_hand.traffic.moved)
"""


@pytest.mark.parametrize("target", ["h100", A100])
def test_a_product_of_one_row_does_not_widen_a_loops_constant_in_every_trip(target: str):
    lines = ran("-c", ONE_ROW.format(target=target)).splitlines()
    assert lines[0] == "1 True"  # it is cast to bfloat16 once, outside of the loop
    assert float(lines[1]) <= 1.01


COMPARED = """
import jax, jax.numpy as jnp, precpass as pp
from precpass.devices.targets import target_of

def loss(w, x):
    return jnp.tanh(x @ w).sum()

rows = ["AlwaysF32", "AutoMixedBf16"]
keys = jax.random.split(jax.random.key(0))
args = jax.random.normal(keys[0], (256, 512)) / 16, jax.random.normal(keys[1], (128, 256))
wide, low = pp.compare(jax.grad(loss), rows, target={target!r})(*args).rows
print(wide.traffic.low_runs, low.traffic.low_runs == low.traffic.runs > 0)
print(0 < low.traffic.moved, low.memory.temp >= 0, low.timing, low.traffic.cycles is not None)
print(1e-4 < wide.errors.relative < {most} and 1e-4 < low.errors.relative < 1e-2)
shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in args]
costs = ["kernels", "moved", "cycles", "roofline", "temp"]
found = pp.compare(jax.grad(loss), rows, columns=costs, target={target!r})(*shapes)
print(found.rows[1].traffic == low.traffic, found.device.split(",")[0])
print(0 < found.rows[1].roofline < 2 * found.rows[0].roofline < 1e-3)

step = pp.auto_mixed(lambda w, x: w - jax.grad(loss)(w, x), donate_argnums=0, keep_unused=True)
(row,) = pp.compare(step, rows[1:], target={target!r})(*args).rows
print(row.memory == pp.audit(step, target={target!r})(*shapes).memory, row.memory.aliased)
here = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for x in args]
print(pp.audit(step, target={target!r})(*here).device_kind)

audited = audited_gradient = pp.audit(jax.grad(loss), target={target!r})(*shapes)
inspected = pp.inspect(jax.grad(loss), target={target!r})(*shapes)
explained = pp.explain(jax.grad(loss), target={target!r})(*shapes)
said = [line.strip() for line in audited.text(color=False).splitlines()]
lines = said[[line.startswith("kernels move") for line in said].index(True) :]
for shown in inspected, explained:
    assert shown.compiled.traffic == audited.traffic and shown.compiled.memory == audited.memory
    text = [line.strip() for line in str(shown).splitlines()]
    print(text[text.index("compiled for " + audited.device_kind) + 1 :][: len(lines)] == lines)
print(len(lines) > 2, explained.to_dict()["compiled"]["traffic"]["moved"] == audited.traffic.moved)
(n,) = jax.export.symbolic_shape("n")
for size, report in ((n, pp.inspect), (200_000, pp.explain)):
    large = jax.ShapeDtypeStruct((size, size), jnp.float32)
    found = report(lambda x: x @ x, target={target!r})(large)
    print(found.not_compiled or [line for line in str(found).splitlines() if "not fit" in line])

ref = jax.new_ref(args[0])
here = [
    (lambda x: jax.debug.print("{{}}", x), shapes[:1]),
    (lambda x: (x @ ref[...].T).sum(), [args[0]]),
    (lambda r, x: (x @ r[...].T).sum(), [ref, args[0]]),
]
for fn, given in here:
    refused = []
    for report in (pp.audit, lambda *f, **t: pp.compare(*f, rows, columns=costs, **t)):
        try:
            report(fn, target={target!r})(*given)
        except ValueError as error:
            refused.append(str(error))
    refused += [r(fn, target={target!r})(*given).not_compiled for r in (pp.inspect, pp.explain)]
    print(*set(refused), len(refused))

# Without arguments a program is for the target too.
# XLA computes products of constants itself, unless these are all the same.
ones = jnp.ones((64, 64))
for fn in (lambda: jnp.ones((64, 64)) @ jnp.cos(jnp.ones((64, 64))), lambda: ones @ ones):
    audited, explained = (r(fn, target={target!r})() for r in (pp.audit, pp.explain))
    low = pp.compare(fn, rows, columns="kernels", target={target!r})().rows[1].traffic.low_runs
    print({{audited.device_kind, explained.compiled.device_kind}}, audited.traffic.low_runs, low)
try:
    pp.audit(lambda: (jax.debug.print("here"), ones @ ones)[1], target={target!r})()
except ValueError as error:
    print(error)

# The option of jax.jit says which device a program is for, as arguments' shardings do.
there = jax.sharding.SingleDeviceSharding(target_of({target!r}).device)
placed = pp.auto_mixed(jax.grad(loss), in_shardings=(there, there))
first, second = pp.audit(placed)(*shapes), pp.explain(placed)(*shapes)
print({{first.device_kind, second.device, second.compiled.device_kind}})
print(first.traffic == second.compiled.traffic == audited_gradient.traffic)
"""


@pytest.mark.parametrize("target", ["h100", "tpu v5e"])
def test_compare_shows_what_a_targets_compiler_makes(target: str):
    is_tpu = TARGETS[target].platform == "tpu"
    most = 1e-2 if is_tpu else 1e-3  # of a pass of bfloat16 and of TF32, which are their defaults
    printed = ran("-c", COMPARED.format(target=target, most=most))
    lines, (symbolic, large, *rest) = printed.splitlines()[:10], printed.splitlines()[10:]
    assert lines == [
        "0 True",
        f"True True None {is_tpu}",
        "True",
        f"True {TARGETS[target].device_kind}",
        "True",
        f"True {256 * 512 * 4}",
        TARGETS[target].device_kind,
        *["True", "True", "True True"],
    ]
    assert symbolic == "XLA compiles for numbers, and n is symbolic: give one in its place"
    no_room = r"does not fit into the device's memory: it needs \d{3} GB, and there are 84.9 GB"
    assert re.search("Ran out of memory" if is_tpu else no_room, large)
    callback, closed_over, argument, *kinds, last = rest[:-2]
    placed = rest[-2:]
    for refused, why in ((callback, "debug_print at "), (closed_over, "Ref{"), (argument, "Ref{")):
        assert why in refused and "a device that is not there" in refused
        assert refused.endswith(" 4") and refused.count("a device that is not there") == 1
    assert kinds == 2 * [f"{{{TARGETS[target].device_kind!r}}} 1 1"]
    assert "debug_print at " in last
    assert placed == [f"{{{TARGETS[target].device_kind!r}}}", "True"]


LARGE = """
import jax, jax.numpy as jnp, precpass as pp

def loss(w, x):
    for _ in range(8):
        x = jnp.tanh(x @ w)
    return jnp.square(x).mean()

shapes = [jax.ShapeDtypeStruct((20_000, 20_000), jnp.float32)] * 2
rows = ["AlwaysF32", "AutoMixedBf16"]
found = pp.compare(jax.grad(loss), rows, columns=["temp", "kernels"], target="tpu v5e")(*shapes)
wide, low = found.rows
print(wide.memory, wide.traffic, low.memory.temp < 15.75 * 2**30, low.traffic.low_runs)
print(low.refused == "" and "Ran out of memory" in wide.refused)
said = f"AlwaysF32 is not compiled: {wide.refused}" in str(found)
print(said, found.to_dict()["rows"][0]["refused"])
"""


def test_compare_shows_what_fits_a_tpu_beside_what_does_not():
    first, second, third = ran("-c", LARGE).splitlines()
    assert first == "None None True 23" and second == "True"
    assert third.startswith("True RESOURCE_EXHAUSTED")


TRIPS = """
import jax, jax.numpy as jnp, precpass as pp

def loop(goes_on, number, start=0):
    def run(x):
        body = lambda c: (number(c[0]), jnp.tanh(c[1] @ x))
        return jax.lax.while_loop(lambda c: goes_on(*c), body, (start, x))[1]
    return run

def layers(x):
    return jax.lax.scan(lambda c, _: (jnp.tanh(c @ x), c), x, None, length=16)[0].sum()

x = jax.ShapeDtypeStruct((128, 128), jnp.float32)
for fn in (
    jax.grad(layers),
    lambda x: jax.lax.fori_loop(5, 21, lambda i, c: jnp.tanh(c @ x) * i, x),
    loop(lambda i, c: i > 3, lambda i: i - 1, 20),
    loop(lambda i, c: i < 10, lambda i: i + 2),
    loop(lambda i, c: c.sum() < 77.0, lambda i: i + 1),
    loop(lambda i, c: (i < 10) & (c[0, 0] < 2), lambda i: i + 2),
):
    found = pp.audit(fn, target={target!r})(x)
    compared = pp.compare(fn, ["AutoMixedBf16"], columns="moved", target={target!r})(x)
    said = ["one iteration of each loop" in str(report) for report in (found, compared)]
    print(found.traffic.runs, found.traffic.guesses, *set(said))
"""


@pytest.mark.parametrize("target", ["h100", "tpu v5e"])
def test_loops_count_as_often_as_they_run(target: str):
    lines = ran("-c", TRIPS.format(target=target)).splitlines()
    counted = [f"{runs} False False" for runs in (16 + 2 * 16, 16, 17, 5)]
    assert lines == [*counted, "1 True True", "1 True True"]


RAGGED = """
import jax, jax.numpy as jnp, precpass as pp
from jax.experimental import topologies

def experts(x, w, sizes):
    return jnp.tanh(jax.lax.ragged_dot(x, w, sizes)).sum()

shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((256, 128), (4, 128, 128))]
shapes.append(jax.ShapeDtypeStruct((4,), jnp.int32))
found = pp.audit(jax.grad(experts, argnums=(0, 1)), target="tpu v5e")(*shapes)
print(found.as_planned + found.merged, found.products, found.traffic.without_cycles > 0)
print(sorted({(kernel.call, *kernel.operands) for kernel in found.traffic.products}))
device = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices[0]
there = jax.sharding.SingleDeviceSharding(device)
shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=there) for x in shapes]
for report in pp.audit, pp.inspect, lambda f, **t: pp.compare(f, columns="moved", **t):
    try:
        report(experts, target="h100")(*shapes)
    except ValueError as error:
        print(error)
"""


def test_ragged_products_are_kernels_of_a_tpu_and_its_shapes_are_for_no_other_target():
    first, kernels, *errors = ran("-c", RAGGED).splitlines()
    assert first == "3 3 True"
    # the libtpu of jax 0.10 makes a weight gradient a convolution; that of 0.12 has a kernel for it
    made = set(ast.literal_eval(kernels)) - {("convolution", "bf16", "bf16")}
    assert made == {("ragged-dot", "bf16", "bf16")}
    assert len(errors) == 3
    assert all("'h100' is another device than the TPU v5 lite" in error for error in errors)


@pytest.mark.parametrize(
    ("target", "model"),
    [
        ("h100", "cnn"),
        ("v5e", "unrolled"),
        pytest.param("h100", "unrolled", marks=pytest.mark.release),
        pytest.param("v5e", "cnn", marks=pytest.mark.release),
    ],
)
def test_a_models_gradient_is_low_and_about_as_cheap_as_by_hand(
    target: str, model: str, tmp_path: Path
):
    """A small part of the benchmark."""
    path = tmp_path / "found.json"
    script = ("scripts/bench_targets.py", "--target", target, "--no-errors")
    columns = ("--columns", "hand,grad-auto,auto-grad")
    part = ("--models", model, "--size", "medium")
    ran(*script, *part, *columns, "--json", str(path))
    cells = {cell["column"]: cell for cell in json.loads(path.read_text())["cells"]}
    hand = cells["hand"]
    for found in (cells["grad-auto"], cells["auto-grad"]):
        assert found["failure"] is None
        assert found["low"] == found["kernels"] > 10
        cost = "moved" if found["cycles"] is None else "cycles"
        assert found[cost] <= 1.3 * hand[cost]
        assert found["casts"] <= 1.5 * hand["casts"]


MULTIPLIED = """
import jax, jax.numpy as jnp, precpass as pp

def loss(w, x):
    return jnp.square(jnp.tanh(x @ w) @ w).sum()

args = [jax.ShapeDtypeStruct((2048, 2048), jnp.float32)] * 2
for policy in {policies!r}:
    found = pp.audit({fn}, policy, target={target!r})(*args)
    how = {{kernel.multiplied or "-" for kernel in found.traffic.products}}
    print(found.traffic.runs, *how, found.traffic.cycles)
"""


def test_a_gpus_compiler_multiplies_float32_as_the_policy_asks():
    policies = ("AlwaysF32", "tf32", "bf16x3", "bf16x6", "f32_exact")
    program = MULTIPLIED.format(target="h100", fn="jax.grad(loss)", policies=policies)
    lines = ran("-c", program).splitlines()
    how = ["-", "high", "bf16_bf16_f32_x3", "bf16_bf16_f32_x6", "highest"]
    assert lines == [f"5 {each} None" for each in how]


def test_a_tpus_compiler_multiplies_float32_as_the_policy_asks():
    # its gradient takes ten times as long to compile
    policies = ("AlwaysF32", "bf16x3", "f32_exact")
    program = MULTIPLIED.format(target="tpu v5e", fn="loss", policies=policies)
    lines = [line.split() for line in ran("-c", program).splitlines()]
    assert [line[:2] for line in lines] == [["2", each] for each in ("-", "high", "highest")]
    one, three, six = (int(line[2]) for line in lines)
    assert 2.5 * one < three < 3.2 * one  # passes of bfloat16
    assert 5 * one < six < 6.5 * one


EIGHT_BITS = """
import jax, jax.numpy as jnp, precpass as pp

def loss(ws, x):
    for w in ws:
        x = jax.nn.relu(x @ w)
    return jnp.square(x).sum()

args = [jnp.ones((512, 512))] * 4, jnp.ones((512, 512))
f8 = pp.AutoMixedF8.with_weight_gradients("f8")
for fn, policy in ((loss, "int8"), (jax.grad(loss), f8)):
    found = pp.audit(fn, policy, target={target!r})(*args)
    kinds = sorted({{" x ".join(p.operands) for p in found.traffic.products}})
    print(found.as_planned, found.products, ", ".join(kinds))
"""


@pytest.mark.parametrize(
    ("target", "as_planned", "kind"),
    [
        ("h100", ["4 4", "11 11"], "f8e4m3fn x f8e4m3fn"),
        # An A100 multiplies int8, and has no float8.
        ("a100", ["4 4", "0 11"], "f16 x f16"),
        ("tpu v5e", ["4 4", "11 11"], "f8e4m3fn x f8e4m3fn"),
    ],
)
def test_products_of_eight_bits_are_such_in_the_compiled_program(
    target: str, as_planned: list[str], kind: str
):
    lines = ran("-c", EIGHT_BITS.format(target=target)).splitlines()
    assert [" ".join(line.split()[:2]) for line in lines] == as_planned
    assert lines[0].endswith(" s8 x s8")
    assert kind in lines[1]


READY = """
import jax, jax.numpy as jnp
import precpass as pp
from precpass.devices.detect import planned_for
from precpass.devices.targets import abstract_on, target_of
from precpass.measure.traffic import traffic_of

def layers(ws, x):
    for w in ws:
        x = jax.nn.relu(x @ w)
    return x

shape = jax.ShapeDtypeStruct
ws, x = [shape((512, 512), "float32")] * 4, shape((256, 512), "float32")
target = target_of("h100")
for policy in ("int8", "f8"):
    small = pp.quant.quantized(layers, policy)(ws, x)
    # NVIDIA's library is called for the products, as a device chooses for large ones.
    with planned_for(target):
        lowered = pp.auto_mixed(layers, policy).lower(*abstract_on(target, (small, x)))
    found = traffic_of(lowered.compile({"xla_gpu_enable_triton_gemm": False}).as_text(), "gpu")
    print(found.transposes, sum(k.runs for k in found.products if "8" in k.operands[1]))
"""


def test_weights_of_eight_bits_are_stored_as_a_gpu_multiplies_them():
    """cublasLt wants summed dimensions last. XLA makes a copy of others in every call."""
    assert ran("-c", READY).splitlines() == ["0 4", "0 4"]


KNOWN = """
import jax
import precpass as pp
from precpass.devices.detect import planned_for
from precpass.devices.targets import abstract_on, target_of
from precpass.measure.traffic import traffic_of

def layers(ws, x):
    for w in ws:
        x = jax.nn.relu(x @ w)
    return x

shape, target = jax.ShapeDtypeStruct, target_of({target!r})
ws, x = [shape((1024, 1024), "float32")] * 3, shape((512, 1024), "float32")
for largest in (None, (8.0, 1.0)):
    rule = pp.Rule(primitive="dot_general", precision={precision!r}, largest=largest)
    policy = pp.AutoMixedBf16.with_rules(rule)
    small = pp.quant.quantized(layers, policy)(ws, x)
    with planned_for(target):
        lowered = pp.auto_mixed(layers, policy).lower(*abstract_on(target, (small, x)))
    # NVIDIA's library is called for the products, as a device chooses for large ones.
    options = {{"xla_gpu_enable_triton_gemm": False}} if target.platform == "gpu" else {{}}
    found = traffic_of(lowered.compile(options).as_text(), target.platform)
    print(sum(k.runs for k in found.products if k.results == ({name!r},)), found.moved)
"""


@pytest.mark.parametrize(
    ("target", "precision", "name"), [("h100", "f8", "f8e4m3fn"), ("tpu v5e", "int8", "s8")]
)
def test_a_product_rounds_its_own_result_to_8_bits_where_the_scale_is_known(
    target: str, precision: str, name: str
):
    """Relu and rounding are in the kernels of all products but the last one."""
    program = KNOWN.format(target=target, precision=precision, name=name)
    (unknown, before), (known, after) = map(str.split, ran("-c", program).splitlines())
    assert (unknown, known) == ("0", "2")
    assert float(after) < float(before)


TRAINED = """
import jax, jax.numpy as jnp
import precpass as pp
from precpass.devices.detect import planned_for
from precpass.devices.targets import abstract_on, target_of
from precpass.measure.traffic import traffic_of

def loss(ws, x):
    for w in ws:
        x = jax.nn.relu(x @ w)
    return jnp.square(x).mean()

args = abstract_on(target_of("h100"), ([jax.ShapeDtypeStruct((4096, 4096), "float32")] * 4,
                                       jax.ShapeDtypeStruct((4096, 4096), "float32")))
f8 = pp.AutoMixedF8.with_weight_gradients("f8")
for gradient in pp.auto_mixed(jax.grad(loss), f8), jax.grad(pp.auto_mixed(loss, f8)):
    with planned_for(target_of("h100")):
        lowered = jax.jit(gradient).trace(*args).lower(lowering_platforms=("cuda",))
    found = traffic_of(lowered.compile({"xla_gpu_enable_triton_gemm": False}).as_text(), "gpu")
    print(found.transposes, sum(k.runs for k in found.products if k.operands[0] == "f8e4m3fn"))
"""


def test_a_gpus_backward_pass_transposes_no_values_of_8_bits():
    """Each order of an operand is rounded from the wide value. In arrays of this size, XLA's model
    of costs has one kernel for both; of smaller ones it may transpose the 8 bits."""
    assert ran("-c", TRAINED).splitlines() == ["0 11", "0 11"]


RELUS = """
import jax, jax.numpy as jnp, re
import precpass as pp
from precpass.devices.detect import planned_for
from precpass.devices.targets import abstract_on, target_of

def layers(ws, x):
    for w in ws:
        x = jax.nn.relu(x @ w)
    return x

args = abstract_on(target_of("h100"), ([jax.ShapeDtypeStruct((1024, 1024), "float32")] * 4,
                                       jax.ShapeDtypeStruct((512, 1024), "float32")))
with planned_for(target_of("h100")):
    lowered = pp.auto_mixed(layers).trace(*args).lower(lowering_platforms=("cuda",))
text = lowered.compile({"xla_gpu_enable_triton_gemm": False}).as_text()
print(len(re.findall('"epilogue":"RELU"', text)))
"""


def test_relus_are_made_by_the_calls_of_products():
    # The last one is returned in float32.
    assert ran("-c", RELUS).splitlines() == ["3"]


EIGHT_BITS_IN_LOOPS = """
import re
import jax, jax.numpy as jnp, precpass as pp

def loss(ws, x):
    return jax.lax.scan(lambda x, w: (jax.nn.relu(x @ w), None), x, ws)[0].sum()

args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((6, 2048, 2048), (1024, 2048))]
policy = pp.AutoMixedF8.with_weight_gradients("f8")
for fn, given in ((jax.grad(loss), policy), (jax.grad(pp.auto_mixed(loss, policy)), "AlwaysF32")):
    found = pp.audit(fn, given, target={target!r})(*args)
    state = " ".join(l.partition(" while(")[0] for l in found.hlo.splitlines() if " while(" in l)
    shapes = r"\\[6,(1024,2048|2048,1024)\\]"  # as the backward pass reads it
    stacks = {{t for t in ("f32", "bf16", "u8") if re.search(t + shapes, state)}}
    weights = {{t for t in ("bf16", "u8") if re.search(t + r"\\[6,2048,2048\\]", state)}}
    products = [k for k in found.traffic.products for _ in range(int(k.runs))]
    low = sum(set(k.operands) == {{"f8e4m3fn"}} for k in products)
    print(*sorted(stacks), *sorted(weights), low, len(products))
"""


@pytest.mark.parametrize("target", ["h100", pytest.param("tpu 7x", marks=pytest.mark.release)])
def test_loops_hold_values_of_8_bits_in_the_compiled_program(target: str):
    """Both sides of the pass: stacks of inputs and of weights, and three products in six trips."""
    lines = ran("-c", EIGHT_BITS_IN_LOOPS.format(target=target)).splitlines()
    assert lines == ["u8 u8 18 18", "u8 u8 18 18"]


POOLED = """
import jax, jax.numpy as jnp, precpass as pp
from jax import lax

def convolved(x, kernel):
    return lax.conv_general_dilated(
        x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

def network(kernels, x):
    for kernel in kernels:
        x = jax.nn.relu(convolved(x, kernel))
        x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    return jnp.square(x.astype(jnp.float32)).mean()

def by_hand(kernels, x):
    return network(*jax.tree.map(lambda v: v.astype(jnp.bfloat16), (kernels, x)))

shapes = [[(3, 3, 32, 32)] * 2, (64, 32, 32, 32)]
args = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s, jnp.float32), shapes,
                    is_leaf=lambda s: isinstance(s, tuple))
hand = pp.audit(jax.grad(by_hand), pp.Custom({{}}), target={target!r})(*args)
for fn, policy in (
    (jax.grad(network), "AutoMixedBf16"),
    (jax.grad(pp.auto_mixed(network, "AutoMixedBf16")), pp.Custom({{}})),
    (jax.grad(network), pp.AutoMixedBf16.with_results("f32")),
):
    found = pp.audit(fn, policy, target={target!r})(*args)
    print(found.traffic.moved <= hand.traffic.moved, found.memory.temp <= hand.memory.temp)
"""


@pytest.mark.parametrize("target", ["h100", A100])
def test_a_network_with_poolings_moves_no_more_than_by_hand(target: str):
    lines = ran("-c", POOLED.format(target=target)).splitlines()
    # with float32 results, and so without pooling in 16 bits, it does
    assert lines == ["True True", "True True", "False False"]


ACTIVATIONS = """
import re
import jax, jax.numpy as jnp, precpass as pp
from jax import lax

def normalised(x):
    return jax.nn.relu((x - x.mean(1, keepdims=True)) * lax.rsqrt(x.var(1, keepdims=True) + 1e-6))

def exact_gelu(x):
    return jax.nn.gelu(x, approximate=False)

def loss_of(activation):
    def loss(ws, x):
        for w in ws:
            x = activation(x @ w)
        return jnp.square(x).mean()
    return loss

ws = [jax.ShapeDtypeStruct((1024, 1024), jnp.float32)] * 3
x = jax.ShapeDtypeStruct((8192, 1024), jnp.float32)
for activation in (normalised, exact_gelu):
    text = pp.audit(jax.grad(loss_of(activation)), "AutoMixedBf16", target={target!r})(ws, x).hlo
    entry = text[text.index("ENTRY"):].replace("bf16[", "low[")
    kernels = re.findall(r" = (.*?) (?:fusion|custom-call)\\(", entry)
    print(sum("f32[8192,1024]" in results for results in kernels))
"""


@pytest.mark.parametrize(
    ("target", "wide"), [("h100", 0), pytest.param("tpu v5e", 1, marks=pytest.mark.release)]
)
def test_no_product_before_an_activation_is_float32_in_the_compiled_program(target: str, wide: int):
    """With float32 results three layers write three on a GPU, and four on a TPU.

    The one that is left on a TPU is the batch, which XLA brings into its fast memory.
    """
    assert ran("-c", ACTIVATIONS.format(target=target)).split() == [str(wide), str(wide)]


STRIDED = """
import jax, jax.numpy as jnp, precpass as pp
from jax import lax

def network(kernels, x):
    for kernel in kernels:
        x = jax.nn.relu(lax.conv_general_dilated(
            x, kernel, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")))
    return jnp.square(x.astype(jnp.float32)).mean()

def decoder(kernels, x):
    for kernel in kernels:
        x = jax.nn.relu(lax.conv_transpose(x, kernel, (2, 2), "SAME", transpose_kernel=True))
    return x

def by_hand(fn):
    return lambda *args: fn(*jax.tree.map(lambda v: v.astype(jnp.bfloat16), args))

def abstract(shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)

encoders = [(3, 3, 3, 64), (3, 3, 64, 128), (3, 3, 128, 256)], (16, 64, 64, 3)
decoders = [(4, 4, 128, 256), (4, 4, 64, 128), (4, 4, 3, 64)], (16, 8, 8, 256)
for fn, hand, (kernels, x) in (
    (jax.grad(network), jax.grad(by_hand(network)), encoders),
    (decoder, by_hand(decoder), decoders),
):
    args = list(map(abstract, kernels)), abstract(x)
    rows = [pp.audit(hand, pp.Custom({{}}), target={target!r})(*args),
            pp.audit(fn, "AutoMixedBf16", target={target!r})(*args)]
    print([sum(kernel.runs for kernel in found.traffic.products if "BackwardInput" in kernel.call)
           for found in rows])
    print(rows[1].traffic.moved / rows[0].traffic.moved < 1.05)
    print(rows[1].memory.temp / rows[0].memory.temp < 1.05)
"""


@pytest.mark.parametrize("target", ["h100", A100])
def test_strided_and_transposed_convolutions_have_the_kernels_that_they_have_by_hand(target: str):
    """Without the reversal in 16 bits XLA computes them over arrays that it fills up with zeros."""
    lines = ran("-c", STRIDED.format(target=target)).splitlines()
    assert lines == ["[2, 2]", "True", "True", "[3, 3]", "True", "True"]


ASKS_THE_DEVICE = """
import jax, jax.numpy as jnp, precpass as pp

def spectrum(w):
    return jnp.abs(jnp.linalg.eig(w @ w)[0])

for report in (pp.audit, pp.compare):
    try:
        report(spectrum, target="h100")(jnp.eye(8))
    except RuntimeError as error:
        print(error)
"""


def test_what_jax_asks_the_device_while_it_lowers_is_named():
    first, second = ran("-W", "ignore", "-c", ASKS_THE_DEVICE).splitlines()
    assert first == second
    assert "cannot lower the function for NVIDIA H100 80GB HBM3 on a machine without one" in first
    assert "cusolver" in first.lower() and "jnp.linalg.eig" in first and "leave that out" in first


TWO_PROCESSES = """
import os, subprocess, sys
import jax.numpy as jnp, precpass as pp

os.environ.pop("ALLOW_MULTIPLE_LIBTPU_LOAD", None)
found = pp.audit(lambda x: x @ x, target="tpu v5e")(jnp.eye(128))
print(found.backend, found.as_planned, flush=True)
if sys.argv[1:]:
    subprocess.run([sys.executable, "-c", sys.argv[1]], check=True)
"""


def test_two_processes_have_a_tpus_compiler_at_once():
    assert ran("-c", TWO_PROCESSES, TWO_PROCESSES).splitlines() == ["tpu 1", "tpu 1"]
