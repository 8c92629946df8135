"""Programs and the formats of their values, by target; test_formats.py holds them against plans.

A row is a program and, for each way to plan it, the formats of what it names:

- a primitive: the results of its equations; with a shape behind it, those of that shape;
- "saved": what a scan stacks for the scan of its backward pass;
- "products": the operands of the matrix products and convolutions;
- "stored": the primitives whose results are rounded where XLA keeps the rounding;
- "derivative": those whose derivative saves rounded factors or rounds its cotangent.

A text names each format that occurs, and a list has one for each value, sorted. With `error` the
values of the first plan are within it of float32's.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import precpass as pp
from precpass.devices.detect import planned_for
from precpass.devices.targets import target_of
from tests.support.jaxprs import named, products
from tests.support.passes import quiet
from tests.support.values import normal_array

Plan = tuple[str | None, Any]
CPU: Plan = (None, "AutoMixedBf16")
H100: Plan = ("h100", "AutoMixedBf16")
A100: Plan = ("a100", "AutoMixedBf16")
TPU: Plan = ("tpu v5e", "AutoMixedBf16")
WIDE_RESULTS: Plan = ("h100", pp.AutoMixedBf16.with_results("f32"))
F16: Plan = ("h100", "AutoMixed")
F16_CPU: Plan = (None, "AutoMixed")
SHORT = {"bfloat16": "bf16", "float16": "f16", "float32": "f32", "uint16": "u16"}


class GradOfMixed:
    """`jax.grad(pp.auto_mixed(fn))` in the place of `pp.auto_mixed(jax.grad(fn))`."""

    def __init__(self, fn: Callable[..., Any], argnums: Any = 0) -> None:
        self.fn, self.argnums = fn, argnums
        self.plain = jax.grad(fn, argnums)


@dataclass(frozen=True)
class Row:
    """A program, its arguments and the formats that are expected for each plan."""

    fn: Any
    args: tuple[Any, ...]
    formats: tuple[tuple[Plan, dict[str, str | list[str]]], ...]
    error: float | None = None
    says: str = ""

    def planned(self, plan: Plan) -> tuple[Any, Any]:
        """The rewritten jaxpr, and the inspection if the program is the whole of the plan."""
        target, policy = plan
        if isinstance(self.fn, GradOfMixed):
            assert target is not None
            with planned_for(target_of(target)):
                mixed = pp.auto_mixed(self.fn.fn, policy=policy)
                return jax.make_jaxpr(jax.grad(mixed, self.fn.argnums))(*self.args), None
        with quiet():
            found = pp.inspect(self.fn, policy, target=target, compiled=False)(*self.args)
        return found.after, found


def formats_of(what: str, jaxpr: Any, found: Any) -> list[str]:
    if what in ("stored", "derivative"):
        rounds = {"stored": lambda d: d.keeps_rounding, "derivative": lambda d: d.backward}[what]
        return sorted(eqn.primitive.name for eqn, d, _ in found.decisions() if rounds(d))
    if what == "products":
        avals = [eqn.invars[0].aval for eqn in products(jaxpr)]
    else:
        name, _, shape = what.partition(" ")
        values = [v for e in named(jaxpr, "scan" if name == "saved" else name) for v in e.outvars]
        if name == "saved":
            scans = [e for e in named(jaxpr, "scan") if e.params["reverse"]]
            values = [v for v in values if any(v in e.invars for e in scans)]
        avals = [v.aval for v in values if str(v.aval.dtype) in SHORT]
        if shape:
            wanted = tuple(map(int, shape.split("x")))
            avals = [aval for aval in avals if aval.shape == wanted]
    return sorted(SHORT[str(aval.dtype)] for aval in avals)


ROWS: dict[str, Row] = {}


def row(name: str, fn: Any, args: tuple[Any, ...], *formats: Any, **options: Any) -> None:
    """Add a row; plans that expect the same formats may be given as a list."""
    each = [
        (plan, expected)
        for plans, expected in formats
        for plan in (plans if isinstance(plans, list) else [plans])
    ]
    assert name not in ROWS
    ROWS[name] = Row(fn, args, tuple(each), **options)


X, W, V = normal_array(0, 16, 32), normal_array(1, 32, 32) / 6, normal_array(2, 32, 32) / 6
TALL, BIAS = normal_array(3, 64, 32), normal_array(4, 32)
LOWEST = float(np.finfo(np.float32).min)

# ---------------------------------------------------------------- results of products


def conv(x: jax.Array, w: jax.Array) -> jax.Array:
    axes = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=axes)


def convolutions(w: Any, x: jax.Array) -> jax.Array:
    return jnp.square(conv(jax.nn.relu(conv(x, w[0])), w[1])).sum()


KERNELS = (
    (normal_array(5, 3, 3, 4, 8) / 6, normal_array(6, 3, 3, 8, 8) / 8),
    normal_array(7, 2, 6, 6, 4),
)
for composed in (jax.grad(convolutions), GradOfMixed(convolutions)):
    row(
        f"convolutions, {type(composed).__name__}",
        composed,
        KERNELS,
        (H100, {"products": "bf16", "conv_general_dilated": "bf16"}),
    )
row(
    "convolutions in float32 or float16",
    jax.grad(convolutions),
    KERNELS,
    (CPU, {"products": "bf16", "conv_general_dilated": "f32"}),
    # the products of operands in float16's range may be out of it
    (F16, {"products": "f16", "conv_general_dilated": "f32"}),
)


def result(name: str, fn: Any, *formats: str, args: Any = (W, X), **options: Any) -> None:
    """Add a row of the results of matrix products on an H100, which stay float32 on a CPU."""
    cpu = () if isinstance(fn, GradOfMixed) else ((CPU, {"dot_general": "f32"}),)
    row(name, fn, args, (H100, {"dot_general": sorted(formats)}), *cpu, **options)


@jax.jit
def product(a: jax.Array, b: jax.Array) -> jax.Array:
    return b @ a


@jax.jit
def moved(x: jax.Array) -> jax.Array:
    return 2.0 * x.T


def squares(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.square(b).sum(1)[:, None] + jnp.square(a).sum(1)[None]


def tied(table: jax.Array, tokens: jax.Array) -> jax.Array:
    """The table is looked up and multiplied, so two terms make its gradient."""
    return jnp.tanh(jnp.tanh(table[tokens]) @ table.T).sum()


def two_parts(a: jax.Array, b: jax.Array) -> jax.Array:
    left, right = jnp.split(b @ a, 2)
    return jnp.square(right - 1.0).sum() + jnp.tanh(left).sum()


result("returned", lambda a, b: b @ a, "f32")
result("returned behind a movement", lambda a, b: (b @ a).T.reshape(-1), "f32")
result("returned by a call", product, "f32")
result("a function's operand", lambda a, b: jnp.tanh(b @ a), "bf16")
result("in a call", lambda a, b: jnp.tanh(product(a, b)), "bf16")
row(
    "one call of two returns it",
    lambda a, b: (jnp.tanh(product(a, b)), product(a, b)),
    (W, X),
    (H100, {"dot_general": "f32"}),
)
result("followed into a call that returns it", lambda a, b: moved(b @ a), "f32")
result("followed into a call", lambda a, b: jnp.tanh(moved(b @ a)), "bf16")
result("a loop's state", lambda a, b: lax.fori_loop(0, 3, lambda _, c: c @ a, b), "f32")
result("in a loop", lambda a, b: lax.fori_loop(0, 3, lambda _, c: jnp.tanh(c @ a), b), "bf16")
for softmax in (jax.nn.softmax, jax.nn.log_softmax, jax.nn.logsumexp):
    name = softmax.__name__
    result(f"{name}'s operand", lambda a, b, f=softmax: jnp.tanh(f(b @ a)), "bf16")
    result(f"{name}, scaled", lambda a, b, f=softmax: f(0.3 * (b @ a)).sum(), "bf16")
result("a residual", lambda a, b: jnp.square(b @ a - b).sum(), "f32")
result("distances", lambda a, b: jnp.sqrt(squares(a, b) - 2.0 * (b @ a.T)).sum(), "f32")
result("distances, exchanged", lambda a, b: (-2.0 * (b @ a.T) + squares(a, b)).sum(), "f32")
result("a sum with a bias", lambda a, b: jnp.tanh(b @ a + 1.0), "bf16")
result("a part is subtracted from", two_parts, "f32")
result("a weight's gradient", jax.grad(lambda a, b: jnp.tanh(b @ a).sum()), "bf16", "f32")
result(
    "two terms of a weight's gradient",
    jax.grad(lambda a, b: jnp.tanh(jnp.tanh(b @ a) @ a).sum()),
    *("bf16", "bf16", "bf16", "f32", "f32"),
)
# the forward product, the cotangent of what was looked up, and the table's gradient
result("a tied table", jax.grad(tied), "bf16", "bf16", "f32", args=(W, jnp.arange(16)))
row(
    "a result that float16 cannot hold",
    lambda x: jnp.tanh(x @ x.T / 1e7),
    (jnp.full((16, 64), 300.0),),
    (F16, {"dot_general": "f32"}),
)


def two_layers(w: Any, x: jax.Array) -> jax.Array:
    return jnp.tanh(jnp.tanh(x @ w[0]) @ w[1]).sum()


# two products, the cotangent of the inner value, and the gradients of two weights
result(
    "gradients of weights",
    GradOfMixed(two_layers),
    *(*["bf16"] * 3, *["f32"] * 2),
    args=((W, V), X),
)
result(
    "and of the argument",
    GradOfMixed(two_layers, (0, 1)),
    *(*["bf16"] * 3, *["f32"] * 3),
    args=((W, V), X),
)
for name, operand in {
    "moved": lambda x: x.T.T,
    "scaled": lambda x: x * 3.0,
    "reshaped": lambda x: x.reshape(-1).reshape(x.shape),
    "called": lambda x: jax.jit(lambda y: y)(x),
    "a difference": lambda x: jnp.tanh(x) - jnp.cos(x),
    "negated": lambda x: -jnp.tanh(x),
}.items():
    loss = lambda x, w, f=operand: jnp.tanh(f(x) @ w).sum()  # noqa: E731
    result(f"the cotangent of what is {name}", GradOfMixed(loss), "bf16", "f32", args=(X, W))


def recurrent(h: jax.Array, w: jax.Array) -> jax.Array:
    return lax.scan(lambda h, _: (jnp.tanh(h @ w), None), h, None, length=3)[0].sum()


# the forward pass, the state's cotangent, and the terms whose float32 sum is the weight's
result(
    "the cotangent of a state",
    GradOfMixed(recurrent, (0, 1)),
    *("bf16", "bf16", "f32"),
    args=(X, W),
    error=0.02,
)


def saved_by_a_checkpoint(stack: jax.Array, c: jax.Array) -> jax.Array:
    def layer(c: jax.Array, a: jax.Array) -> tuple[jax.Array, None]:
        return c + jnp.tanh(jax.nn.gelu(c @ a) @ W), None

    saves = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    return lax.scan(jax.checkpoint(layer, policy=saves), c, stack)[0].sum()


row(
    "a result that a checkpoint saves",
    jax.grad(saved_by_a_checkpoint),
    (jnp.stack([W] * 3), X),
    # the backward loop stacks the gradient of the weights, which is the program's result
    (
        [H100, TPU],
        {"dot_general 32x32": ["f32"], "dot_general 16x32": "bf16", "scan 3x16x32": "bf16 f32"},
    ),
)

# ---------------------------------------------------------------- selections


def mlp(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.square(jax.nn.relu(jax.nn.relu(x @ w) @ V) @ V).sum()


row(
    "the cotangent of a relu",
    jax.grad(mlp),
    (W, X),
    ([H100, TPU], {"select_n": "bf16"}),
    ([CPU, WIDE_RESULTS, F16], {"select_n": "f32"}),
)


def chosen(x: jax.Array, w: jax.Array) -> jax.Array:
    h = jnp.where(x > 0, x @ w, 0.0)
    return jnp.tanh(h) @ w + h.sum()


row("a choice", chosen, (X, W), (H100, {"select_n": ["bf16"]}), error=0.02)


def choices(w: jax.Array, x: jax.Array) -> jax.Array:
    h = jnp.maximum(x @ w, 0.3 * (x @ V))
    return jnp.where(x > 0.5, h, jnp.minimum(h, 2.0)).sum() + jnp.square(h @ V).sum()


for composed in (jax.grad(choices), GradOfMixed(choices)):
    name = f"choices, {type(composed).__name__}"
    row(name, composed, (W, X), (H100, {"products": "bf16"}), error=0.05)
MASK = np.tril(np.ones((16, 16), bool))
MASK[3] = False  # a row that may read nothing


def masked(q: jax.Array) -> jax.Array:
    """Attention with the mask that flax and equinox have: float32's lowest number."""
    return jnp.square(jax.nn.softmax(jnp.where(MASK, (q @ W) @ X.T, LOWEST), axis=-1) @ X).sum()


row(
    "a mask",
    jax.grad(masked),
    (X,),
    (H100, {"select_n 16x16": ["bf16", "bf16"]}),
    # A TPU's kernel does not write the masked scores, but their exponentials.
    (TPU, {"select_n 16x16": ["bf16", "f32"]}),
    error=0.02,
)
row(
    "a mask of no number",
    lambda x, w: jax.nn.softmax(jnp.where(x > 0, x @ w, -jnp.inf), axis=-1) @ w,
    (X, W),
    (H100, {"select_n": "bf16"}),
    error=0.02,
)
row(
    "a mask that is computed, beyond bfloat16",
    lambda x, w: jax.nn.softmax(jnp.where(x > 0, x @ w, jnp.minimum(x, 0) - 3.4e38), axis=-1) @ w,
    (X, W),
    (H100, {"select_n": "f32"}),
    error=0.02,
)


def state_that_is_chosen(x: jax.Array, w: jax.Array) -> jax.Array:
    def step(c: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
        c = jnp.maximum(c + c @ w, -1.0)
        return c, c.sum()

    return lax.scan(step, x, None, length=5)[1]


for name, fn in {
    # it is asked which operand it is equal to, as the gradient of older releases of JAX does
    "equality": lambda x, w: jnp.where(jnp.maximum(x @ w, 0.1) == x @ w, x, 2.0) @ w,
    "a difference": lambda x, w: jnp.square(jnp.maximum(x @ w, 0.1) - 1.0) @ w,
    "the program's result": lambda x, w: jnp.maximum(x @ w, 0.1),
    "an order": lambda x, w: x @ w + jnp.argmax(jnp.maximum(x @ w, 0.1)).astype(jnp.float32),
    "no product before it": lambda x, w: (lambda h: h @ w + h.sum())(jnp.maximum(x, 0.1)),
    "a loop's state": state_that_is_chosen,
}.items():
    row(f"a choice that is read by {name}", fn, (X, W), (H100, {"max": "f32"}))


def slopes(x: jax.Array, w: jax.Array) -> jax.Array:
    slope = jnp.where(x @ w > 0, x, 0.1)
    return (x * slope) @ w + slope.sum()


row("exact numbers between which a product chooses", slopes, (X, W), (H100, {"select_n": "f32"}))


def halves(x: jax.Array, w: jax.Array) -> jax.Array:
    left, right = jnp.split((x @ w).T, 2)
    return jnp.tanh(left).sum() + (jnp.exp(right) * left).sum()


SPLIT_RULE = pp.AutoMixedBf16.with_rules(pp.Rule(primitive="split", precision="f32"))
row(
    "a result that is moved",
    halves,
    (X, W),
    (H100, {"split": "bf16"}),
    ([CPU, WIDE_RESULTS, ("h100", SPLIT_RULE)], {"split": "f32"}),
)


def pooled_by(size: int, stride: int) -> Callable[[jax.Array], jax.Array]:
    windows, strides = (1, size, size, 1), (1, stride, stride, 1)
    return lambda x: lax.reduce_window(x, -jnp.inf, lax.max, windows, strides, "VALID")


def pooling(size: int, stride: int, scale: float = 1.0, offset: float = 0.0) -> Any:
    def loss(kernel: jax.Array, image: jax.Array) -> jax.Array:
        hidden = image if offset else scale * jax.nn.gelu(conv(image, kernel))
        pooled = pooled_by(size, stride)(hidden) - offset
        return jnp.square(conv(pooled / scale, kernel)).mean()

    return jax.grad(loss, argnums=1 if offset else 0)


KERNEL, IMAGE = normal_array(7, 3, 3, 8, 8) / 8, normal_array(8, 4, 12, 12, 8)
TENTHS = np.arange(IMAGE.size).reshape(IMAGE.shape) % 7 / np.float32(10) + np.float32(1000)
POOL = ("reduce_window_max", "select_and_scatter_add")
row(
    "a pooling of windows apart",
    pooling(2, 2),
    (KERNEL, IMAGE),
    (H100, dict.fromkeys(POOL, "bf16")),
    ([TPU, CPU], dict.fromkeys(POOL, "f32")),  # a TPU computes in float32 anyway
    error=0.03,
)
row("of windows further apart", pooling(2, 3), (KERNEL, IMAGE), (A100, dict.fromkeys(POOL, "bf16")))
# some elements are in two windows, so cotangents are added up
row("of windows that overlap", pooling(3, 2), (KERNEL, IMAGE), (H100, dict.fromkeys(POOL, "f32")))
row(
    "of exact numbers, whose largest all digits decide",
    pooling(2, 2, offset=1000.0),
    (KERNEL, TENTHS.astype(np.float32)),
    (H100, dict.fromkeys(POOL, "f32")),
    error=0.02,
)
row(
    "of what float16 cannot hold",
    pooling(2, 2, scale=1e6),
    (KERNEL, IMAGE),
    (F16, dict.fromkeys(POOL, "f32")),
)

# ---------------------------------------------------------------- what fusions write


def network(w: jax.Array, bias: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.square(jax.nn.gelu(x @ w + bias[None]) @ V).sum()


row(
    "an expensive function, and what products and a sum read",
    jax.grad(network, (0, 1)),
    (W, BIAS, TALL),
    (H100, {"stored": ["add_any", "tanh"]}),
    (TPU, {"stored": ["add_any", "tanh"]}),
    ([CPU, WIDE_RESULTS, F16], {"stored": []}),  # float16 has not the range
    error=0.02,
)
row(
    "an expensive function, for a derivative that JAX adds later",
    network,
    (W, BIAS, TALL),
    (H100, {"stored": ["tanh"]}),
)


def read_by_its_callers(w: jax.Array, x: jax.Array) -> jax.Array:
    function = jax.jit(lambda x: jnp.arctan(x) * x)
    h = function(x @ w)
    return (h @ V).sum() + h.sum() + function(x @ V).sum()


def beside_a_gradient(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    function = jax.jit(jnp.tanh)
    differentiated = jax.grad(lambda w: jnp.arctan(x @ w).sum())(w)
    return differentiated, function(x @ w).sum() + function(x @ V).sum()


row("by the caller that reads most", read_by_its_callers, (W, TALL), (H100, {"stored": ["mul"]}))
row("beside a gradient", beside_a_gradient, (W, TALL), (H100, {"stored": []}))


def turned(calls: int) -> Any:
    turn = jax.jit(lambda x: x.T)

    def program(w: jax.Array, x: jax.Array) -> jax.Array:
        h = jnp.arctan(x @ w)
        for _ in range(calls):
            h = turn(h)
        return jnp.square(h @ V).sum() + h.sum()

    return jax.grad(program)


row("a body called on its own result", turned(20), (W, TALL), (H100, {"stored": ["atan"]}))


def stepper(w: jax.Array, x: jax.Array) -> jax.Array:
    """A differential equation, whose backward pass reads states in products alone."""

    def step(state: jax.Array, _: None) -> tuple[jax.Array, None]:
        middle = state + 0.05 * (state @ w)
        return state + 0.1 * (middle @ w), None

    return jnp.square(lax.scan(step, x, None, length=8)[0]).sum()


row(
    "a state that is stacked for products",
    jax.grad(stepper),
    (W, TALL),
    (H100, {"saved 8x64x32": "bf16", "scan 64x32": "f32"}),
    (TPU, {"saved 8x64x32": "f32"}),  # whose compiler casts the stacks by itself
    error=0.01,
)


def rms_norm(x: jax.Array) -> jax.Array:
    return x * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)


def layer_norm(x: jax.Array) -> jax.Array:
    x = x - x.mean(-1, keepdims=True)
    return x * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)


def residual_scan(norm: Callable[[jax.Array], jax.Array]) -> Any:
    @jax.checkpoint
    def layer(x: jax.Array, w: jax.Array) -> jax.Array:
        return x + jax.nn.gelu(norm(x) @ w) @ V

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.square(lax.scan(lambda x, w: (layer(x, w), None), x, w)[0]).mean()

    return jax.grad(loss)


STACK = jnp.stack([W, -W, W])
row(
    "a residual stream that a norm reads",
    residual_scan(rms_norm),
    (STACK, TALL),
    (H100, {"saved 3x64x32": "bf16"}),
    (TPU, {"saved 3x64x32": "f32"}),
    error=0.01,
)
row(
    "a residual stream whose mean is subtracted",
    residual_scan(layer_norm),
    (STACK, TALL),
    (H100, {"saved 3x64x32": "bf16"}),
    error=0.01,
)
row(
    "a residual stream of which differences are read",
    residual_scan(lambda x: x - x[:, :1]),
    (STACK, TALL),
    (H100, {"saved 3x64x32": "f32"}),
    error=0.01,
)
for name, of in {"unread": lambda y: 0, "a sum": lambda y: y.sum(), "all": lambda y: y}.items():

    def states(w: jax.Array, x: jax.Array, of: Any = of) -> Any:
        state, each = lax.scan(lambda s, _: (s + jnp.tanh(s @ w), s), x, None, length=4)
        return state, of(each)

    row(f"a stack of states, {name} returned", states, (W, TALL), (H100, {"scan 4x64x32": "f32"}))


def residual_blocks(block: Callable[[jax.Array, jax.Array], jax.Array]) -> Any:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        for _ in range(3):
            x = block(x, w)
        return jnp.square(x @ V).sum()

    return jax.grad(loss)


row(
    "a residual stream",
    residual_blocks(lambda x, w: x + jax.nn.gelu(x @ w) @ V),
    (W, TALL),
    (H100, {"stored": ["tanh"] * 3}),
    error=0.02,
)
row(
    "a relu that ends a residual block",
    residual_blocks(lambda x, w: jax.nn.relu(x + (x @ w))),
    (W, TALL),
    (H100, {"stored": ["custom_jvp_call"]}),  # the last, which a product reads
)


def attention(w: jax.Array, x: jax.Array) -> jax.Array:
    q, k, v = jnp.split(x @ w, 3, axis=-1)
    scores = jnp.where(jnp.tril(jnp.ones((len(x), len(x)), bool)), q @ k.T, -1e9)
    return jnp.square(jax.nn.softmax(scores) @ v).sum()


WIDE = normal_array(1, 128, 384) / 25, normal_array(2, 128, 128)
row(
    "an attention",
    jax.grad(attention, (0, 1)),
    WIDE,
    # A TPU's compiler adds up the exponentials in the kernel of the scores.
    (H100, {"stored": [], "select_n 128x128": ["bf16", "bf16"]}),
    (TPU, {"stored": ["exp"], "select_n 128x128": ["bf16", "f32"]}),
    error=0.02,
)
row(
    "exponentials that a loss adds up",
    jax.grad(lambda w, x: -jax.nn.log_softmax(jnp.tanh(x @ w) @ w)[:, 0].mean()),
    (WIDE[0][:, :128] * 3, WIDE[1]),
    (TPU, {"stored": ["tanh"]}),
)

# ---------------------------------------------------------------- what derivatives save


def dense(w: jax.Array, bias: jax.Array, x: jax.Array) -> jax.Array:
    h = jax.nn.gelu(x @ w + bias[None], approximate=False)
    return jnp.square(h @ w + bias[None]).sum()


def orbit(x: jax.Array) -> jax.Array:
    """No product is before its functions."""

    def step(position: jax.Array, _: Any) -> Any:
        return position + 0.1 * jnp.tanh(position) * jnp.sin(position), None

    return jnp.square(lax.scan(step, x, None, length=4)[0] @ W).sum()


def tanh_layers(w: jax.Array, x: jax.Array) -> jax.Array:
    return (jnp.tanh(x @ w) @ w).sum()


def kept_tanh(w: jax.Array, x: jax.Array) -> jax.Array:
    h = x @ w
    with pp.keep("f32"):
        h = jnp.tanh(h)
    return (h @ w).sum()


def computed_again(w: jax.Array, x: jax.Array) -> jax.Array:
    def layer(h: jax.Array, _: Any) -> Any:
        h = h @ w
        return jax.nn.silu(h) * jnp.arctan(h), None

    return lax.scan(jax.checkpoint(layer), x, None, length=3)[0].sum()


def stream(w: jax.Array, x: jax.Array) -> jax.Array:
    for _ in range(3):
        x = x + x @ w
    return jnp.square(x).sum()


TANH_RULE = pp.AutoMixedBf16.with_rules(pp.Rule(primitive="tanh", precision="f32"))
row(
    "derivatives of expensive functions and of a bias",
    dense,
    (W, BIAS, X),
    (H100, {"derivative": "add erfc"}),
    ([CPU, WIDE_RESULTS, F16, ("h100", "AlwaysF32")], {"derivative": []}),
)
row(
    "a function's derivative",
    tanh_layers,
    (W, X),
    (H100, {"derivative": ["tanh"]}),
    (("h100", TANH_RULE), {"derivative": []}),
)
for name, fn, args in (
    ("a gradient's program, which has storage of its own", jax.grad(dense), (W, BIAS, X)),
    ("functions without a product before them", orbit, (X,)),
    ("a function in a region", kept_tanh, (W, X)),
    ("a logistic, which XLA computes again", lambda w, x: (jax.nn.silu(x @ w) @ w).sum(), (W, X)),
    ("what a checkpoint computes again", computed_again, (W, X)),
    ("a residual stream's cotangent", stream, (W, X)),
):
    row(f"no derivative of {name}", fn, args, (H100, {"derivative": []}))

# ---------------------------------------------------------------- stacks on a CPU


def signs(x: jax.Array, w: jax.Array) -> jax.Array:
    def layer(x: jax.Array, w: jax.Array) -> Any:
        y = x @ w
        return jnp.where(y > 0.0, jnp.sin(x), y * y * 0.1), None

    return jnp.sum(lax.scan(layer, x, w)[0])


row(
    "what is compared with zero alone",
    jax.grad(signs, argnums=(0, 1)),
    (normal_array(0, 16, 8), normal_array(1, 5, 8, 8)),
    (CPU, {"scan 5x16x8": "f32 u16"}),
)


def layered(count: int, in_a_loop: bool) -> Any:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        if in_a_loop:
            return lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x, length=count)[0].sum()
        for _ in range(count):
            x = jnp.tanh(x @ w)
        return x.sum()

    return jax.grad(loss)


row(
    "layers that save what products read",
    layered(3, False),
    (W, X),
    (H100, {"stored": ["tanh"] * 3}),
    says="stored in bf16: read by 2 products, 1.02 kB saved x 2 iterations",
)
row(
    "a loop that saves what products read",
    layered(5, True),
    (W, X),
    (H100, {"products": "bf16"}),
    says="stored in bf16: 1.02 kB saved x 5 iterations",
)

# ---------------------------------------------------------------- gathers and casts

NODES, EDGES, WIDTH = 8, 64, 16
SENDERS = jnp.asarray(np.random.default_rng(0).integers(0, NODES, EDGES))
RECEIVERS = jnp.asarray(np.random.default_rng(1).integers(0, NODES, EDGES))
W16, NODE = normal_array(0, WIDTH, WIDTH) / 4, normal_array(1, NODES, WIDTH)
CAST = "convert_element_type"


def of_a_product(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.arctan((x @ w)[SENDERS]) + 1.0


def summed(w: jax.Array, x: jax.Array) -> jax.Array:
    """Sums over edges of a product's rows, whose cotangents a backward pass gathers."""
    sums = jax.ops.segment_sum(jnp.tanh(x[SENDERS] @ w) @ w, RECEIVERS, NODES)
    return jnp.arctan(jnp.tanh(sums @ w) @ w).sum()


def message(w: jax.Array, edges: jax.Array, x: jax.Array) -> jax.Array:
    """The product of a graph network: rows of an edge and of the two nodes that it joins."""
    return jnp.concatenate([edges, x[SENDERS], x[RECEIVERS]], axis=1) @ w


row(
    "a gather of a result",
    of_a_product,
    (W16, NODE),
    # The float32 gather has the derivative, and nothing else reads it.
    ([H100, TPU], {"gather 64x16": ["bf16", "f32"]}),
    (CPU, {"gather 64x16": ["f32"]}),
)
row(
    "a gather of cotangents",
    jax.grad(summed),
    (W16, NODE),
    ([H100, TPU], {"gather 64x16": "bf16 f32"}),
)
row(
    "a cast before a gather that repeats rows",
    lambda w, x: x[SENDERS] @ w,
    (W16, NODE),
    (CPU, {"products": "bf16", f"{CAST} 8x16": "bf16", f"{CAST} 64x16": ""}),
)
row(
    "a cast behind a gather of a few rows",
    lambda w, x: x[jnp.asarray([3, 5])] @ w,
    (W16, NODE),
    (CPU, {"products": "bf16", f"{CAST} 8x16": "", f"{CAST} 2x16": "bf16"}),
)
row(
    "casts before a concatenation of what is mostly gathered",
    message,
    (normal_array(2, 48, 16), normal_array(3, 64, 16), NODE),
    # both gathers read one cast
    (CPU, {"products": "bf16", f"{CAST} 8x16": ["bf16"], f"{CAST} 64x48": ""}),
    error=0.02,
)
row(
    "a cast behind a concatenation of what is mostly not",
    message,
    (normal_array(2, 80, 16), normal_array(3, 64, 48), NODE),
    (CPU, {"products": "bf16", f"{CAST} 8x16": "", f"{CAST} 64x80": "bf16"}),
)

# ---------------------------------------------------------------- what vanishes in float16

SCALED: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "by a factor": (lambda x, w: (x * 1e-12) @ w, "f32"),
    "by a divisor": (lambda x, w: (-x / 1e12) @ w, "f32"),
    "and chosen": (lambda x, w: jnp.where(x > 0, x * 1e-12, 0).T @ w, "f32"),
    "in both terms of a sum": (lambda x, w: (x * 1e-12 + w * 1e-13) @ w, "f32"),
    "in one term of a sum": (lambda x, w: (x * 1e-12 + w) @ w, "f16"),
    "a little": (lambda x, w: (x * 1e-4) @ w, "f16"),
    # a sum of many terms is no smaller for being divided by their number
    "as a mean": (lambda x, w: jnp.broadcast_to(x, (1000, 100, 8, 8)).mean((0, 1)) @ w, "f16"),
}
for name, (fn, operands) in SCALED.items():
    row(
        f"scaled {name}",
        fn,
        (jax.ShapeDtypeStruct((8, 8), jnp.float32),) * 2,
        (F16_CPU, {"products": operands}),
        (CPU, {"products": "bf16"}),  # which has the range of float32
        says="vanishes in f16" if operands == "f32" else "",
    )

# ---------------------------------------------------------------- what else reads a stored value


def shown_to_the_host(x: Any, w: Any) -> Any:
    y = jnp.tanh(x @ w)
    return jnp.tanh(y @ w).sum() + jax.pure_callback(np.asarray, jax.typeof(y), y).sum()


row(
    "an activation that the host reads",
    shown_to_the_host,
    (X, W),
    # only the second one, which the host does not read
    (H100, {"pure_callback": "f32", "stored": ["tanh"]}),
)
