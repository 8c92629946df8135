"""Whole programs under a policy: what they keep, that their products are low, and how near they
come to float32.

`check_program` is for functions of a library's own making: everything that the contract promises
of one program is checked at once, so that a test only has to be the program.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import precpass as pp
from precpass.policy.primitives import OpKind
from tests.support.jaxprs import contracts, is_low, multiplies_matrices, products
from tests.support.lowered_text import product_stacks
from tests.support.passes import quiet

FAST: dict[str, Any] = {"compiler_options": {"xla_backend_optimization_level": 0}}
"""Options of `jax.jit`: XLA's own passes run, LLVM's do not, in a third of the time."""


@dataclasses.dataclass(frozen=True)
class Checked:
    """What `check_program` ran.

    Attributes:
        got: the results under the policy.
        want: the results in float32, under plain `jax.jit`.
        after: the rewritten jaxpr.
        grads: what float32's gradients are; None where none were asked for.
    """

    got: Any
    want: Any
    after: Any
    grads: Any = None


def check_program(
    fn: Callable[..., Any],
    *args: Any,
    policy: pp.types.PrecisionPolicy = pp.AutoMixedBf16,
    wrt: int | Sequence[int] | None = 0,
    factor: float = 4.0,
    grad_factor: float | None = None,
    least: int = 1,
    wide: int = 0,
    elementwise: int = 0,
) -> Checked:
    """Checks a program under a policy that lowers: its signature, products, values, gradients.

    - The results have the tree, shapes, dtypes and weak types of the original's, so float32
      state stays float32.
    - The pass knows of every product that JAX lowers.
    - Every product that contracts something is low, `wide` of them apart, and there are `least`
      of them: in the program, in its gradient under the policy, and in the gradient of the
      program under the policy. Their name scopes are the original's. Those that are elementwise
      work and a reduction are not low, unless the policy orders elementwise work low.
    - Values are near float32's leaf by leaf, integers and keys equal; so are both gradients.
    - It is traced once.

    Args:
        fn: the program, in plain float32. Its results may be any tree; their gradient is that
            of a fixed weighted sum of all that float.
        args: its arguments.
        policy: one with 16-bit products.
        wrt: the arguments whose floating leaves are differentiated; None for none.
        factor: the bound on errors in units of the policy's unit roundoff. Two operands rounded
            make 2 in each product, and a few products behind each other 4, the default; deeper
            programs say so.
        grad_factor: the same for gradients; twice `factor` if not given, since they pass through
            the products twice.
        least: the smallest number of low products.
        wide: how many products that contract stay wide, for a reason that the caller knows.
        elementwise: how many products of the program are elementwise work and a reduction.
    """
    roundoff = policy.low.unit_roundoff
    traces: list[None] = []

    def counted(*xs: Any) -> Any:
        traces.append(None)
        return fn(*xs)

    with quiet():
        mixed = pp.auto_mixed(counted, policy=policy, **FAST)
        after = mixed.trace(*args).jaxpr
    before = jax.jit(fn, **FAST).trace(*args)
    check_products(after, policy, least, wide)
    assert sum(map(is_elementwise, products(after))) == elementwise
    assert signature(after) == signature(before.jaxpr)
    assert product_stacks(after) == product_stacks(before.jaxpr), "name scopes"
    if wrt is None:
        got, want = mixed(*args), before.lower().compile()(*args)
        assert_leaves_near(got, want, factor * roundoff)
        checked = Checked(got, want, after)
    else:
        chosen = (wrt,) if isinstance(wrt, int) else tuple(wrt)
        limits = factor * roundoff, (2 * factor if grad_factor is None else grad_factor) * roundoff
        checked = _with_gradients(fn, args, chosen, policy, limits, after)
    mixed.eval_shape(*args)
    assert len(traces) == 1, f"traced {len(traces)} times"
    return checked


def _with_gradients(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    chosen: tuple[int, ...],
    policy: pp.types.PrecisionPolicy,
    limits: tuple[float, float],
    after: Any,
) -> Checked:
    gradient, inputs = gradient_by(args, chosen)
    forms = {
        "auto_mixed(grad)": pp.auto_mixed(gradient(fn), policy=policy, **FAST),
        "grad(auto_mixed)": jax.jit(gradient(pp.auto_mixed(fn, policy=policy)), **FAST),
    }
    plain = jax.jit(gradient(fn), **FAST).trace(*inputs)
    grads, want = plain.lower().compile()(*inputs)
    low, kept = low_and_wide(plain.jaxpr, policy)
    _, wide = low_and_wide(after, policy)
    got = None
    for name, form in forms.items():
        with quiet():
            traced = form.trace(*inputs)
        # where all are low, each product of float32's gradient has become one
        least = low + kept if name == "auto_mixed(grad)" and not wide else 2
        check_products(traced.jaxpr, policy, least, None if wide else 0)
        form_grads, got = traced.lower().compile()(*inputs)
        assert_leaves_near(got, want, limits[0], what=name)
        assert_leaves_near(form_grads, grads, limits[1], floor=0.1, what=f"{name} gradient")
    return Checked(got, want, after, grads)


def gradient_by(
    args: tuple[Any, ...], chosen: Sequence[int]
) -> tuple[Callable[[Callable[..., Any]], Callable[..., Any]], tuple[Any, Any, Any]]:
    """The gradient of a function by the floating leaves of some of `args`: makes it of the
    function; and what it is called with."""
    floats, rest, rebuild = split_floats([args[i] for i in chosen])
    others = tuple(None if i in chosen else x for i, x in enumerate(args))

    def gradient(fn: Callable[..., Any]) -> Callable[..., Any]:
        def call(floats: Any, rest: Any, others: Any) -> Any:
            filled = list(others)
            for i, x in zip(chosen, rebuild(floats, rest), strict=True):
                filled[i] = x
            out = fn(*filled)
            return combined(out), out

        return jax.grad(call, has_aux=True)

    return gradient, (floats, rest, others)


def low_and_wide(jaxpr: Any, policy: pp.types.PrecisionPolicy) -> tuple[int, int]:
    """The numbers of low and of other products that the policy is to lower."""
    found = [is_low(e, policy.low.dtype) for e in to_lower(jaxpr, policy)]
    return sum(found), len(found) - sum(found)


def check_products(
    jaxpr: Any, policy: pp.types.PrecisionPolicy, least: int, wide: int | None = 0
) -> int:
    """Every product to lower is low, `wide` (None: those with a precision) apart; how many."""
    found = to_lower(jaxpr, policy)
    elementwise = [] if lowers_all(policy) else filter(is_elementwise, products(jaxpr))
    assert not [str(e) for e in elementwise if is_low(e)], "elementwise work is low"
    kept = [str(e) for e in found if not is_low(e, policy.low.dtype)]
    low = len(found) - len(kept)
    if wide is None:
        wide = sum(is_ordered(e) and not is_low(e) for e in found)
    text = f"{len(kept)} of {len(found)} products are wide, not {wide}:\n"
    assert len(kept) == wide, text + "\n".join(kept)
    assert low >= least, f"{low} low products, not {least}; wide:\n" + "\n".join(kept)
    return low


def to_lower(jaxpr: Any, policy: pp.types.PrecisionPolicy) -> list[Any]:
    """The contracting products, but for elementwise work that the policy does not lower."""
    every = lowers_all(policy)
    return [e for e in products(jaxpr) if contracts(e) and (every or not is_elementwise(e))]


def lowers_all(policy: pp.types.PrecisionPolicy) -> bool:
    """Whether a policy lowers elementwise work too, in whichever form it is written."""
    return OpKind.ELEMENTWISE in policy.orders


def is_elementwise(eqn: Any) -> bool:
    """Whether a product is elementwise work and a reduction, and has no precision of its own."""
    return contracts(eqn) and not (multiplies_matrices(eqn) or is_ordered(eqn))


def is_ordered(eqn: Any) -> bool:
    """Whether a product contracts and has a precision that its author gave it."""
    return contracts(eqn) and eqn.params.get("precision") is not None


def ordered(fn: Callable[..., Any], *args: Any) -> int:
    """How many products of a program have a precision that a library gives them."""
    return sum(map(is_ordered, products(jax.make_jaxpr(fn)(*args))))


def signature(jaxpr: Any) -> Any:
    """Shape, dtype and weak type of all that goes in and comes out."""
    return [
        [(a.str_short(), getattr(a, "weak_type", None)) for a in side]
        for side in (jaxpr.in_avals, jaxpr.out_avals)
    ]


def is_float(x: Any) -> bool:
    """Whether a leaf is an array of a floating dtype."""
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)


def split_floats(tree: Any) -> tuple[list[Any], list[Any], Callable[..., Any]]:
    """The floating leaves of a tree, the others, and the function that joins them again."""
    leaves, structure = jax.tree.flatten(tree)
    floating = [is_float(x) for x in leaves]

    def rebuild(floats: Sequence[Any], rest: Sequence[Any]) -> Any:
        ours, others = iter(floats), iter(rest)
        return structure.unflatten([next(ours if own else others) for own in floating])

    pairs = list(zip(leaves, floating, strict=True))
    return [x for x, own in pairs if own], [x for x, own in pairs if not own], rebuild


def combined(tree: Any) -> Any:
    """A fixed weighted sum of all floating values of a tree; a scalar alone is itself."""
    floats = [x for x in jax.tree.leaves(tree) if is_float(x)]
    if len(floats) == 1 and floats[0].shape == ():
        return floats[0]
    total = jnp.float32(0)
    for seed, x in enumerate(floats):
        weights = np.random.default_rng(seed).standard_normal(x.shape)
        weights = jnp.asarray(weights / np.sqrt(max(weights.size, 1)), x.dtype)
        total += jnp.sum(x * weights).astype(jnp.float32)
    return total


def as_numbers(x: Any) -> np.ndarray:
    """A leaf as numpy array; a key by its bits."""
    if hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x)


def assert_leaves_near(
    got: Any, want: Any, bound: float, floor: float = 0.0, what: str = "values"
) -> None:
    """Two trees have one structure, equal integers, and floats within `bound` leaf by leaf.

    Args:
        got, want: the trees.
        bound: on the root mean square of a leaf's difference over that of the leaf wanted.
        floor: the part of the whole tree's root mean square that a leaf is at least measured
            by: some gradients cancel to nothing (that of a key's bias in attention is zero).
        what: is told in the error.
    """
    assert jax.tree.structure(got) == jax.tree.structure(want)
    wanted = jax.tree.leaves_with_path(want)
    all_floats = [np.asarray(x, np.float64).ravel() for _, x in wanted if is_float(x)]
    least = floor * _rms(np.concatenate(all_floats)) if all_floats and floor else 0.0
    for (path, b), a in zip(wanted, jax.tree.leaves(got), strict=True):
        name = f"{what}{jax.tree_util.keystr(path)}"
        assert np.shape(a) == np.shape(b) and getattr(a, "dtype", None) == getattr(b, "dtype", None)
        if not is_float(b):
            np.testing.assert_array_equal(as_numbers(a), as_numbers(b), err_msg=name)
            continue
        x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)
        scale = max(_rms(y), least) or 1.0
        error = _rms(x - y) / scale
        assert error <= bound, f"{name}: relative error {error:.3g} > {bound:.3g}"


def _rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(x)))) if x.size else 0.0


def assert_float32(tree: Any) -> None:
    """Every floating leaf is float32."""
    dtypes = {jax.tree_util.keystr(p): x.dtype for p, x in jax.tree.leaves_with_path(tree)}
    wrong = {k: d for k, d in dtypes.items() if jnp.issubdtype(d, jnp.floating) and d != "float32"}
    assert not wrong


def parameters(init: Callable[..., Any], *args: Any, seed: int = 0) -> Any:
    """Values for what an initialiser would make, without compiling it.

    Matrices are normal with a variance of one over their rows, vectors small, scales and
    variances one, integers zero.
    """

    def value(path: Any, shape: Any, seed: int) -> jax.Array:
        if not jnp.issubdtype(shape.dtype, jnp.floating):
            return jnp.zeros(shape.shape, shape.dtype)
        if any(word in jax.tree_util.keystr(path[-1:]) for word in ("scale", "var")):
            return jnp.ones(shape.shape, shape.dtype)
        rows = np.prod(shape.shape[:-1]) if len(shape.shape) > 1 else 100
        noise = np.random.default_rng(seed).standard_normal(shape.shape)
        return jnp.asarray(noise / np.sqrt(rows), shape.dtype)

    shapes, structure = jax.tree.flatten_with_path(jax.eval_shape(init, *args))
    leaves = [value(path, shape, seed + i) for i, (path, shape) in enumerate(shapes)]
    return structure.unflatten(leaves)
