"""What each of several processes runs over one mesh of four devices, and prints as JSON.

`python -m tests.support.several_processes PORT PROCESSES PROCESS`. All run the same checks in the
same order. What only one process knows, such as its own part of an array, is not printed.
"""

import faulthandler
import hashlib
import json
import sys
import tempfile
import traceback
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

import precpass as pp
from precpass.loss_scale import DynamicLossScale, scaled_value_and_grad, skip_nonfinite
from tests.support.sharded_programs import PROGRAMS, Sharded, meshed

P = PartitionSpec
DEVICES, WIDTH = 4, 32
RUN = ("data_parallel", "fsdp_arguments", "tensor_parallel_shard_map")
DEADLINE = 480.0
"""Seconds after which a process says where it waits for another, and ends."""


def value(seed: int, shape: tuple[int, ...], sharding: Any) -> jax.Array:
    """As `sharded_programs.value`, of which each process makes its own part."""
    numbers = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    numbers /= np.sqrt(shape[-2] if seed else 1).astype(np.float32)
    return jax.make_array_from_callback(shape, sharding, lambda part: numbers[part])


def whole(tree: Any) -> list[Any]:
    """The whole arrays of a tree, in every process."""
    return [multihost_utils.process_allgather(x, tiled=True) for x in jax.tree.leaves(tree)]


def digest(*things: Any) -> str:
    """Of arrays or texts."""
    parts = [x.encode() if isinstance(x, str) else np.asarray(x).tobytes() for x in things]
    return hashlib.sha256(b"".join(parts)).hexdigest()


def plan_of(fn: Callable[..., Any], args: Any, **options: Any) -> dict[str, Any]:
    """A plan as it is saved, and the program that it makes."""
    found = pp.inspect(fn, **options)(*args)
    with tempfile.TemporaryDirectory() as folder:
        found.plan.save(Path(folder, "plan.json"))
        saved = Path(folder, "plan.json").read_text(encoding="utf-8")
    return {"saved": digest(saved), "program": digest(str(found.after)), "costs": found.plan.costs}


def of_program(name: str) -> tuple[Sharded, Any]:
    program = PROGRAMS[name](jax.devices(), WIDTH)
    return program, program.arguments(value)


# ---------------------------------------------------------------- the checks


def plans() -> dict[str, Any]:
    """Of every program, as it is planned from arrays that lie in several processes."""
    found: dict[str, Any] = {}
    for name in PROGRAMS:
        if name != "offloaded":
            program, args = of_program(name)
            with program.in_force():
                found[name] = plan_of(jax.grad(program.loss), args)
    return found


def steps() -> dict[str, Any]:
    """Training steps in both compositions, with their errors to plain JAX's."""
    found: dict[str, Any] = {}
    for name in RUN:
        program, args = of_program(name)

        def step(params: Any, x: Any, loss: Any = program.loss) -> Any:
            value, grads = jax.value_and_grad(loss)(params, x)
            return value, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

        def inner(params: Any, x: Any, loss: Any = program.loss, step: Any = step) -> Any:
            return step(params, x, pp.auto_mixed(loss))

        with program.in_force():
            want = whole(jax.jit(step)(*args))
            for form, fn in (("auto(grad)", pp.auto_mixed(step)), ("grad(auto)", jax.jit(inner))):
                got = whole(fn(*args))
                pairs = zip(got, want, strict=True)
                errors = [float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in pairs]
                found[f"{name}, {form}"] = {"bits": digest(*got), "error": max(errors)}
    return found


def best() -> dict[str, Any]:
    """Plans and a step with profitability="best"."""
    found: dict[str, Any] = {}
    for name in ("data_parallel", "fsdp_reshard"):
        program, args = of_program(name)
        with program.in_force():
            grad = jax.grad(program.loss)
            found[name] = plan_of(grad, args, profitability="best")
            found[name]["bits"] = digest(*whole(pp.auto_mixed(grad, profitability="best")(*args)))
    return found


def monitored() -> dict[str, Any]:
    """A health, of which one NaN is born in the part of the last process."""
    mesh = meshed(jax.devices(), "data")
    numbers = np.ones((8, 8), np.float32)
    numbers[-1, -1] = -1.0
    rows = NamedSharding(mesh, P("data"))
    x = jax.make_array_from_callback(numbers.shape, rows, lambda part: numbers[part])
    every = pp.monitor(lambda x: jnp.log(x @ x - 7.0).sum(), every=2)
    _, health = pp.monitor(lambda x: jnp.log(x @ x - 7.0).sum())(x)
    again = every.init(x)
    for _ in range(3):
        _, again = every(again, x)
    born = [(seen.place.primitive, seen.nans, seen.infinities) for seen in health.born()]
    texts = str(health), str(again), health._repr_html_()
    return {"born": born, "texts": digest(*texts), "looked": str(again).splitlines()[0]}


def reports() -> dict[str, Any]:
    """`compare`, `explain` and `audit` of a gradient."""
    program, args = of_program("fsdp_arguments")
    grad = jax.grad(program.loss)
    columns = "products", "error", "ulp", "sent", "temp", "time"
    compared = pp.compare(grad, ["AlwaysF32", "AutoMixedBf16"], columns=columns, rounds=2)(*args)
    rows = compared.rows
    return {
        "errors": [row.error for row in rows],
        "each": digest(repr([row.errors for row in rows])),
        "sent": [dict(row.traffic.sent) for row in rows],
        "temp": [row.memory.temp for row in rows],
        "devices": [row.memory.devices for row in rows],
        "timed": all(len(row.timing.seconds) == 2 for row in rows),
        "refused": [row.refused for row in rows],
        "explain": digest(pp.explain(grad)(*args).text(color=False)),
        "compiled": pp.inspect(grad)(*args).compiled is not None,
        "audit": digest(str(pp.audit(grad)(*args))),
    }


def callbacks() -> dict[str, Any]:
    """`compare` and `audit` of a function that calls Python, on devices of which some are here."""
    program, args = of_program("data_parallel")

    def told(params: Any, x: Any) -> Any:
        jax.debug.callback(lambda: None)
        return program.loss(params, x)

    found = pp.compare(told, ["AutoMixedBf16"], columns=["products"])(*args)
    return {"low": found.rows[0].counts.low}


def scaled() -> dict[str, Any]:
    """Steps in float16, the second of which overflows in the part of the last process."""
    mesh = meshed(jax.devices(), "data")
    w = value(1, (WIDTH, WIDTH), NamedSharding(mesh, P("data")))
    xs = [np.ones((8, WIDTH), np.float32) for _ in range(3)]
    xs[1][-1] = 1e6
    rows = NamedSharding(mesh, P("data"))

    def loss(w: Any, x: Any) -> Any:
        return jnp.square(x @ w).mean()

    def step(w: Any, scale: Any, x: Any) -> Any:
        _, grads, finite = scaled_value_and_grad(loss)(scale, w, x)
        new = skip_nonfinite(finite, w - 1e-3 * grads, w)
        return new, scale.adjusted(finite), finite

    def on_shards(w: Any, scale: Any, x: Any) -> Any:
        grads_of = scaled_value_and_grad(lambda w, x: loss(w, x), axis_name="data")
        _, grads, finite = grads_of(scale, w, x)
        return jax.lax.pmean(grads, "data"), scale.adjusted(finite), finite

    by_hand = jax.shard_map(
        on_shards, mesh=mesh, in_specs=(P(), P(), P("data")), out_specs=P(), check_vma=False
    )
    found: dict[str, Any] = {}
    for form, fn in (("jit", step), ("shard_map", by_hand)):
        mixed, scale, finites = pp.auto_mixed(fn, policy="AutoMixedF16"), DynamicLossScale(8.0), []
        if form == "shard_map":
            w = jax.device_put(w, NamedSharding(mesh, P()))
        for x in xs:
            placed = jax.make_array_from_callback(x.shape, rows, lambda part, x=x: x[part])
            out, scale, finite = mixed(w, scale, placed)
            finites.append(bool(finite))
        found[form] = {"finite": finites, "scale": float(scale.value), "bits": digest(*whole(out))}
    return found


def fallen_back() -> dict[str, Any]:
    """Rungs: the part of the last process overflows in float16."""
    mesh = meshed(jax.devices(), "data")
    rows = NamedSharding(mesh, P("data"))
    found: dict[str, Any] = {}

    def loss(x: Any) -> Any:
        return jnp.square(x @ x.T).sum(-1)

    by_hand = jax.shard_map(
        pp.with_fallback(loss, ("f16", "f32"), axis_name="data"),
        mesh=mesh,
        in_specs=P("data"),
        out_specs=(P("data"), P()),
    )
    for form, fn in (
        ("jit", pp.with_fallback(loss, ("f16", "f32"))),
        ("shard_map", jax.jit(by_hand)),
    ):
        for size in (1.0, 1e6):
            numbers = np.ones((8, 8), np.float32)
            numbers[-1] = size
            x = jax.make_array_from_callback((8, 8), rows, lambda part, n=numbers: n[part])
            out, report = fn(x)
            bits = digest(*whole(out))
            found[f"{form}, {size:g}"] = {
                "rung": int(report.rung),
                "text": str(report),
                "bits": bits,
            }
    return found


def agreed() -> dict[str, Any]:
    """The recipe of the documentation, for one policy and for one that only process 0 has."""
    program, args = of_program("fsdp_arguments")
    grad = jax.grad(program.loss)
    found: dict[str, Any] = {}
    for name, mine in (("same", "bf16"), ("other", "f32" if jax.process_index() else "bf16")):
        text = str(pp.inspect(grad, mine)(*args).after)
        try:
            multihost_utils.assert_equal(np.uint32(zlib.crc32(text.encode())), "other program")
        except AssertionError as error:
            found[name] = str(error).partition(".")[0]
        else:
            found[name] = "equal"
    return found


CHECKS = (plans, steps, best, monitored, reports, callbacks, scaled, fallen_back, agreed)


def main(port: str, processes: str, process: str) -> None:
    faulthandler.dump_traceback_later(DEADLINE, exit=True)
    warnings.simplefilter("ignore")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_num_cpu_devices", DEVICES // int(processes))
    jax.distributed.initialize(f"127.0.0.1:{port}", int(processes), int(process))
    assert len(jax.devices()) == DEVICES and jax.process_count() == int(processes)
    found: dict[str, Any] = {}
    for check in CHECKS:
        try:
            found[check.__name__] = check()
        except Exception:
            found[check.__name__] = {"failed": traceback.format_exc()}
        print(check.__name__, file=sys.stderr, flush=True)
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
