"""What devices send each other in programs that XLA compiles for several of them."""

import json

import pytest

from precpass.policy.rules import WIRE
from tests.devices.test_compiled_for_targets import ran

pytestmark = pytest.mark.targets

SENT = """
import collections, json, re, sys
import jax, numpy as np, precpass as pp
from precpass.devices.targets import target_of
from tests.support.sharded_programs import PROGRAMS, abstract

KINDS = "all-gather|all-reduce|reduce-scatter|all-to-all|ragged-all-to-all|collective-permute"
BYTES = {{"f32": 4, "bf16": 2, "u16": 2}}

def sent(text):
    "The bytes of the operands of all collectives in a program's text, by kind and format."
    types = dict(re.findall(r"(%[\\w.-]+) = (\\(.*?\\)|\\S+) ", text))
    found = collections.Counter()
    calls = re.findall(r" (" + KINDS + r")(?:-start)?\\((%.*?)\\)(?:,|$)", text, re.MULTILINE)
    for kind, operands in calls:
        for name in re.findall(r"%[\\w.-]+", operands):
            for dtype, shape in re.findall(r"(\\w+)\\[([\\d,]*)\\]", types[name]):
                if dtype in BYTES:
                    sizes = [int(n) for n in shape.split(",") if n]
                    found[f"{{kind}} {{dtype}}"] += int(np.prod(sizes)) * BYTES[dtype]
    return {{what: size for what, size in found.items() if size >= 2**14}}

program = PROGRAMS[{name!r}](list(target_of("h100:4").devices), 256)
loss, forms = program.loss, []
policy = pp.AutoMixedBf16.with_reduce({reduce!r}).with_rules(*{rules})
with program.in_force():
    for fn in (
        jax.grad(loss),
        pp.auto_mixed(jax.grad(loss), policy=policy),
        jax.grad(pp.auto_mixed(loss, policy=policy)),
    ):
        jitted = jax.jit(lambda params, x, fn=fn: fn(params, x))
        forms.append(sent(jitted.lower(*program.arguments(abstract)).compile().as_text()))
print(json.dumps(forms))
"""

GATHERED = {"all-gather bf16", "all-reduce f32"}
SHARDED = {
    "data_parallel": {"all-reduce f32"},
    "fsdp_constraint": GATHERED,
    "fsdp_reshard": {"all-gather bf16", "reduce-scatter f32"},
    "fsdp_shard_map": {"all-gather bf16", "reduce-scatter f32"},
    "offloaded": GATHERED | {"all-to-all bf16", "all-to-all f32"},
    "pipeline": {"collective-permute f32"},
    "ring_attention": {"all-reduce f32", "collective-permute bf16", "collective-permute f32"},
}
"""What the mixed programs send. The cotangents of a ring's keys are sums, and travel in float32."""


def sent(name: str, reduce: str = "auto", rules: str = "[]") -> list[dict[str, float]]:
    """What devices send in float32, in `auto_mixed(grad)` and in `grad(auto_mixed)`."""
    return json.loads(ran("-c", SENT.format(name=name, reduce=reduce, rules=rules)))


@pytest.mark.release(keep=3)
@pytest.mark.parametrize("name", SHARDED)
def test_gathered_weights_are_sent_in_16_bits_and_their_gradients_in_float32(name: str):
    float32, *mixed = sent(name)
    for form in mixed:
        assert set(form) <= SHARDED[name]
        for kind in ("all-reduce", "reduce-scatter"):
            assert form.get(f"{kind} f32") == float32.get(f"{kind} f32")
        if "all-gather f32" in float32:
            assert form["all-gather bf16"] == float32["all-gather f32"] / 2
        if name == "ring_attention":
            assert form["collective-permute bf16"] == float32["collective-permute f32"] / 4
            assert form["collective-permute f32"] == float32["collective-permute f32"] / 2


AHEAD = """
import contextlib
import jax, jax.numpy as jnp, numpy as np, precpass as pp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from precpass.devices.targets import target_of

mesh = Mesh(np.array(target_of({target!r}).devices), ("data",))
rows, shape = NamedSharding(mesh, P("data")), jax.ShapeDtypeStruct((256, 256), jnp.float32)

def loss(w, x):
    return jnp.tanh(x @ w).sum()

def placed(w, x):
    return loss(w, jax.lax.with_sharding_constraint(x, rows))

for fn, around in (loss, jax.set_mesh(mesh)), (placed, mesh), (loss, mesh):
    with around:
        step = jax.jit(lambda w, x: w - jax.grad(pp.auto_mixed(fn))(w, x), in_shardings=rows)
        text = step.lower(shape, shape).as_text()
    products = [line for line in text.splitlines() if "dot_general" in line]
    print(len(products), sum("-> tensor<256x256xbf16>" in line for line in products))
"""


@pytest.mark.parametrize("target", ["h100:4", "tpu v5e:2x2"])
def test_a_step_that_is_lowered_ahead_is_planned_for_its_mesh(target: str):
    """A kernel of these devices rounds the first product; of the last one nothing is known."""
    first, *others = ran("-c", AHEAD.format(target=target)).splitlines()
    assert first == "2 1" and others == ["2 1", "2 0"]


@pytest.mark.release(keep=3)
@pytest.mark.parametrize(
    "name", [*sorted(SHARDED.keys() - {"offloaded", "pipeline"}), "tensor_parallel"]
)
def test_bf16_halves_what_sums_of_gradients_send(name: str):
    float32, *mixed = sent(name, "bf16")
    for form in mixed:
        assert not any("f32" in kind.split() for kind in form)
        for kind in ("all-reduce", "reduce-scatter", "collective-permute"):
            assert form.get(f"{kind} bf16", 0) == float32.get(f"{kind} f32", 0) / 2


def test_a_wire_in_bfloat16_exchanges_the_terms_of_gradients():
    for form in sent("fsdp_shard_map", WIRE)[1:]:
        assert set(form) == {"all-gather bf16", "all-to-all bf16"}


def test_a_rule_halves_what_pipeline_stages_send():
    rules = '[pp.Rule(primitive="ppermute", precision="bf16")]'
    float32, *mixed = sent("pipeline", rules=rules)
    for form in mixed:
        assert form == {"collective-permute bf16": float32["collective-permute f32"] / 2}
