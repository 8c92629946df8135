"""Programs with transposes behind their products, for `planner/test_transposes.py`."""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import precpass as pp
from tests.support.jaxprs import contracts, products, walk
from tests.support.values import normal_array

SWAPS = pp.Custom({})
"""The policy that lowers nothing."""
POLICIES = {
    "Custom": SWAPS,
    "AutoMixedBf16": pp.AutoMixedBf16,
    "AlwaysBf16": pp.AlwaysBf16,
    "AutoMixed": pp.AutoMixed,
}
each_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)


def integers(seed: int, *shape: int) -> jax.Array:
    """Operands whose products and sums are exact in every format."""
    return jnp.asarray(np.random.default_rng(seed).integers(-2, 3, shape), jnp.float32)


def dot(lhs: Any, rhs: Any, contracting: Any, batch: Any = ((), ())) -> Any:
    return lax.dot_general(lhs, rhs, (contracting, batch))


def weight(x: Any, g: Any) -> Any:
    """The gradient of a weight as JAX writes it: [b, s, x], [b, s, g] -> [x, g]."""
    return dot(g, x, ((0, 1), (0, 1))).T


def heads(x: Any, g: Any) -> Any:
    """[b, s, x], [b, s, g] -> [b, x, g], summed over s."""
    return dot(g, x, ((1,), (1,)), ((0,), (0,))).transpose(0, 2, 1)


def uneven(x: Any, g: Any) -> Any:
    """[b, s, x], [b, s, g] -> [s, x, b, g]: several kept dimensions."""
    return dot(g, x.reshape(3, 4, 2, 4), ((2,), (3,))).transpose(2, 3, 4, 0, 1)


def in_jit(x: Any, g: Any) -> Any:
    return jax.jit(weight)(x, g) + 1.0


def in_scan(x: Any, g: Any) -> Any:
    """The weight's gradient is a scan's stacked result."""
    return lax.scan(lambda c, _: (c + 1.0, weight(x + c, g)), 0.0, None, length=3)


def in_remat(x: Any, g: Any) -> Any:
    return jax.checkpoint(weight)(x, g) * 2.0


def cast_between(x: Any, g: Any) -> Any:
    return lax.convert_element_type(dot(g, x, ((0, 1), (0, 1))), jnp.float16).T + 1


def three(x: Any, g: Any) -> Any:
    """Transposes that together are the exchange."""
    y = heads(x, g)  # [b, x, g]
    return lax.transpose(lax.transpose(y, (2, 0, 1)), (1, 0, 2)).transpose(0, 2, 1)


X, G = integers(0, 3, 4, 8), integers(1, 3, 4, 4)
SWAPPED: dict[str, Callable[..., Any]] = {
    f.__name__: f for f in (weight, heads, uneven, in_jit, in_scan, in_remat, cast_between, three)
}


def undone(x: Any, g: Any) -> Any:
    return dot(g, x, ((0, 1), (0, 1))).T.T + 1.0


def undone_casts(x: Any, g: Any) -> Any:
    y = dot(g, x, ((0, 1), (0, 1))).T.astype(jnp.float16)
    return y.T.astype(jnp.float32)


UNDONE: dict[str, Callable[..., Any]] = {f.__name__: f for f in (undone, undone_casts)}


def several(x: Any, g: Any) -> Any:
    y = dot(g, x, ((0, 1), (0, 1)))
    return y.T, y


def several_links(x: Any, g: Any) -> Any:
    """The transpose of the batch has two readers: only what stands before it is a chain."""
    y = dot(g, x, ((1,), (1,)), ((0,), (0,))).transpose(1, 0, 2)
    return y.transpose(1, 2, 0), y + 1.0


def other_order(x: Any, g: Any) -> Any:
    return dot(g, x, ((1,), (1,)), ((0,), (0,))).transpose(1, 0, 2)


def result(x: Any, g: Any) -> Any:
    """The transpose stands outside of the body whose result the product is."""
    y = jax.jit(lambda x, g: dot(g, x, ((0, 1), (0, 1))))(x, g)
    return y.T


def whole_numbers(x: Any, g: Any) -> Any:
    return weight(x.astype(jnp.int32), g.astype(jnp.int32))


def complex_numbers(x: Any, g: Any) -> Any:
    return weight(x.astype(jnp.complex64), g.astype(jnp.complex64))


def with_algorithm(x: Any, g: Any) -> Any:
    algorithm = lax.DotAlgorithmPreset.F32_F32_F32
    return lax.dot_general(g, x, (((0, 1), (0, 1)), ((), ())), precision=algorithm).T


def kept(x: Any, g: Any) -> Any:
    with pp.keep("f32"):
        return weight(x, g)


def with_pair(x: Any, g: Any) -> Any:
    pair = (lax.Precision.HIGHEST, lax.Precision.DEFAULT)
    return lax.dot_general(g, x, (((0, 1), (0, 1)), ((), ())), precision=pair).T


def wider_result(x: Any, g: Any) -> Any:
    numbers = ((0, 1), (0, 1)), ((), ())
    g, x = g.astype(jnp.bfloat16), x.astype(jnp.bfloat16)
    return lax.dot_general(g, x, numbers, preferred_element_type=jnp.float32).T


def outer(x: Any, g: Any) -> Any:
    return dot(g, x, ((), ())).transpose(3, 4, 5, 0, 1, 2)


STAYS: dict[str, Callable[..., Any]] = {
    f.__name__: f
    for f in (several, several_links, other_order, result, whole_numbers, complex_numbers)
    + (with_algorithm, with_pair, wider_result, kept, outer)
}


def quiet(policy: Any, fn: Callable[..., Any], *args: Any) -> pp.report.Inspection:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pp.PrecisionWarning)
        return pp.inspect(fn, policy)(*args)


def mixed(fn: Callable[..., Any], policy: Any = SWAPS) -> Callable[..., Any]:
    made = pp.auto_mixed(fn, policy=policy)

    @functools.wraps(made)
    def call(*args: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", pp.PrecisionWarning)
            return made(*args)

    return call


HANDS_ON = ("precpass_detach", "precpass_carrier", "convert_element_type")


def behind(jaxpr: Any) -> list[Any]:
    """The transposes of a jaxpr that read a product, or the cast, detach and carrier behind it."""
    made = {v for e in products(jaxpr) for v in e.outvars}
    found: list[Any] = []
    for eqn in walk(jaxpr):
        reads = any(not hasattr(v, "val") and v in made for v in eqn.invars[:1])
        if reads and eqn.primitive.name in HANDS_ON:
            made |= set(eqn.outvars)
        elif reads and eqn.primitive.name == "transpose":
            found.append(eqn)
    return found


def dot_like(jaxpr: Any) -> list[Any]:
    return [eqn for eqn in products(jaxpr) if contracts(eqn)]


def counts(found: pp.report.Inspection) -> tuple[int, int, int]:
    """The products with exchanged operands, transposes left out, and products lowered."""
    count = found.plan.count()
    folded = count[pp.types.OpKind.DATA_MOVEMENT, pp.types.Action.DROP]
    swapped = sum(decision.product.exchanged for decision in found.plan.walk())
    return swapped, folded, count[pp.types.OpKind.COMPUTE, pp.types.Action.LOWER]


def jaxpr_of(jaxpr: Any) -> Any:
    return getattr(jaxpr, "jaxpr", jaxpr)


def tied(embedding, tokens):
    x = embedding[tokens]
    return jax.nn.logsumexp(jnp.tanh(x) @ embedding.T, -1).sum()


def scanned(ws, x):
    def layer(h, w):
        return jnp.tanh(jnp.einsum("bsd,df->bsf", h, w)), None

    return lax.scan(jax.checkpoint(layer), x, ws)[0].sum()


def attention(w, x):
    q = (x @ w).reshape(3, 4, 2, 4)
    scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, q))
    return jnp.einsum("bhqk,bkhd->bqhd", scores, q).sum()


GRADIENTS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "tied": (tied, (normal_array(0, 9, 8), jnp.asarray([[1, 2, 3], [4, 8, 0]]))),
    "scanned": (scanned, (normal_array(1, 3, 8, 8) / 3, normal_array(2, 3, 4, 8))),
    "attention": (attention, (normal_array(3, 8, 8), normal_array(4, 3, 4, 8))),
}
