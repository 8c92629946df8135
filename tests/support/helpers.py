"""Shared by the tests: walking jaxprs, finding low products, errors, example programs.

Nothing here uses the package's own view of a jaxpr: a test that counts equations
must not count them with the code that it checks.
"""

import contextlib
import dataclasses
import gc
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

import precpass as pp

PRODUCTS = frozenset({"dot_general", "ragged_dot_general", "conv_general_dilated"})
COMBINED = frozenset({"reduce", "reduce_window", "select_and_scatter", "sort"})
"""Their jaxprs combine two scalars: no bodies."""

LOW = (np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16))
POLICIES = (
    pp.AlwaysF32,
    pp.AlwaysF16,
    pp.AlwaysBf16,
    pp.AutoMixedConservative,
    pp.AutoMixed,
    pp.AutoMixedBf16,
)
AUTO = POLICIES[3:]
"""The policies in which only the precision of products is an order."""
ALWAYS_LOW = POLICIES[1:3]
LOWERING = POLICIES[1:]


# ---------------------------------------------------------------- jaxprs


def opened(jaxpr: Any) -> Any:
    """The object with `eqns`, on either side of 0.11's merge of ClosedJaxpr into Jaxpr."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def _jaxprs_in(value: Any) -> Iterator[Any]:
    if hasattr(opened(value), "eqns"):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _jaxprs_in(item)


def inner_jaxprs(eqn: Any, hidden: bool = False) -> list[Any]:
    """The jaxprs in an equation's params, scalar combiners apart.

    Args:
        eqn: the equation.
        hidden: whether to look into the attributes of a `call_hi_primitive` (0.12) too.
    """
    name = eqn.primitive.name
    if name in COMBINED or name.startswith("scatter"):
        return []
    held = list(eqn.params.values())
    if hidden and name == "call_hi_primitive":
        held += list(vars(eqn.params["_prim"]).values())
    return [jaxpr for value in held for jaxpr in _jaxprs_in(value)]


def walk(jaxpr: Any, hidden: bool = False) -> Iterator[Any]:
    """Every equation of a jaxpr and of all that it contains; a shared jaxpr once."""
    seen: set[int] = set()

    def inside(jaxpr: Any) -> Iterator[Any]:
        if id(opened(jaxpr)) in seen:
            return
        seen.add(id(opened(jaxpr)))
        for eqn in opened(jaxpr).eqns:
            yield eqn
            for inner in inner_jaxprs(eqn, hidden):
                yield from inside(inner)

    return inside(jaxpr)


def named(jaxpr: Any, *names: str) -> list[Any]:
    """The equations of these primitives, bodies included."""
    return [eqn for eqn in walk(jaxpr) if eqn.primitive.name in names]


def dtypes_in(eqn: Any) -> list[np.dtype]:
    """The floating dtypes of an equation's operands (`jnp.issubdtype`, never `kind`)."""
    found = (getattr(v.aval, "dtype", None) for v in eqn.invars)
    return [np.dtype(d) for d in found if d is not None and jnp.issubdtype(d, jnp.floating)]


def dtypes_out(eqn: Any) -> list[np.dtype]:
    """The floating dtypes of an equation's results."""
    found = (getattr(v.aval, "dtype", None) for v in eqn.outvars)
    return [np.dtype(d) for d in found if d is not None and jnp.issubdtype(d, jnp.floating)]


def touches_low(eqn: Any) -> bool:
    """Whether an equation reads or makes a 16-bit floating value."""
    return any(d in LOW for d in (*dtypes_in(eqn), *dtypes_out(eqn)))


def products(jaxpr: Any) -> list[Any]:
    """The products of a jaxpr and its bodies."""
    return [eqn for eqn in walk(jaxpr, hidden=True) if eqn.primitive.name in PRODUCTS]


def count_products(jaxpr: Any) -> int:
    """Their number, a shared jaxpr's once."""
    return len(products(jaxpr))


def low_products(jaxpr: Any, dtype: Any = None) -> list[Any]:
    """The products whose two data operands are in 16 bits, or in `dtype`."""
    wanted = LOW if dtype is None else (np.dtype(dtype),)
    return [
        eqn
        for eqn in products(jaxpr)
        if all(np.dtype(v.aval.dtype) in wanted for v in eqn.invars[:2])
    ]


def text_of(inspection: pp.Inspection) -> str:
    """All that an inspection says in words: every reason, and the notes."""
    reasons = [str(decision.reason) for decision in inspection.plan.walk()]
    return "\n".join([*reasons, *inspection.plan.notes])


# ---------------------------------------------------------------- running


@contextlib.contextmanager
def checking_leaks() -> Iterator[None]:
    """`jax.checking_leaks`, which walks all objects, without those of the tests before."""
    gc.freeze()
    try:
        with jax.checking_leaks():
            yield
    finally:
        gc.unfreeze()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the package's warnings, for tests that are not about them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pp.PrecisionWarning)
        yield


def look(fn: Callable[..., Any], policy: Any, *args: Any) -> pp.Inspection:
    """`inspect` without the package's warnings."""
    with quiet():
        return pp.inspect(fn, policy)(*args)


def run(fn: Callable[..., Any], policy: Any, *args: Any) -> Any:
    """`auto_mixed(fn, policy=policy)(*args)` without the package's warnings."""
    with quiet():
        return pp.auto_mixed(fn, policy=policy)(*args)


def both_grads(fn: Callable[..., Any], policy: Any, *args: Any, argnums: Any = 0) -> dict[str, Any]:
    """The gradient with the pass around it, and with the pass inside it."""
    with quiet():
        return {
            "auto_mixed(grad)": pp.auto_mixed(jax.grad(fn, argnums), policy=policy)(*args),
            "grad(auto_mixed)": jax.grad(pp.auto_mixed(fn, policy=policy), argnums)(*args),
        }


def rel_error(got: Any, want: Any) -> float:
    """The norm of the difference over the norm of what is wanted, over all leaves; inf for NaN."""
    got, want = (
        np.concatenate([np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(tree)])
        for tree in (got, want)
    )
    assert got.shape == want.shape
    error = float(np.linalg.norm(got - want) / max(float(np.linalg.norm(want)), 1e-30))
    return error if np.isfinite(error) else float("inf")


def assert_close(fn: Callable[..., Any], policy: Any, *args: Any, tol: float, argnums: Any = 0):
    """Value and both gradients of a scalar function are within `tol` of float32's."""
    assert rel_error(run(fn, policy, *args), jax.jit(fn)(*args)) < tol
    want = jax.jit(jax.grad(fn, argnums))(*args)
    for form, got in both_grads(fn, policy, *args, argnums=argnums).items():
        assert rel_error(got, want) < tol, f"{form} under {policy.name}"


def identical(got: Any, want: Any) -> bool:
    """Whether two trees have the same structure, dtypes and bits."""
    leaves = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    return jax.tree.structure(got) == jax.tree.structure(want) and all(
        a.dtype == b.dtype and np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in leaves
    )


def normal(seed: int, *shape: int, dtype: Any = np.float32) -> np.ndarray:
    """Reproducible data, made without JAX."""
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


# ---------------------------------------------------------------- programs


@dataclasses.dataclass(frozen=True)
class Program:
    """A function and arguments for it.

    Attributes:
        name: the test's id.
        fn: the function, in plain float32 unless it is about another type.
        args: a function that makes the arguments; called under x64 where that is set.
        x64: whether it runs with x64 enabled.
    """

    name: str
    fn: Callable[..., Any]
    args: Callable[[], tuple[Any, ...]]
    x64: bool = False

    @contextlib.contextmanager
    def context(self) -> Iterator[None]:
        """Configuration under which the program is traced and run."""
        with jax.enable_x64(True) if self.x64 else contextlib.nullcontext():
            yield


def mlp(params: Any, batch: Any) -> Any:
    """A two-layer network's mean squared error and its activations, as a dict."""
    x, y = batch
    h = jnp.tanh(x @ params["w1"] + params["b1"][None])
    out = h @ params["w2"]
    return {"loss": jnp.mean((out - y) ** 2), "aux": (out, [h])}


def mlp_args(rows: int = 8, width: int = 16) -> tuple[Any, Any]:
    """Parameters and a batch for `mlp`."""
    params = {
        "w1": jnp.asarray(normal(0, width, width)) * 0.2,
        "b1": jnp.asarray(normal(1, width)) * 0.1,
        "w2": jnp.asarray(normal(2, width, 4)) * 0.2,
    }
    return params, (jnp.asarray(normal(3, rows, width)), jnp.asarray(normal(4, rows, 4)))


def mlp_loss(params: Any, batch: Any) -> Any:
    """`mlp`'s loss alone."""
    return mlp(params, batch)["loss"]


def attention(q: Any, k: Any, v: Any) -> Any:
    """Causal attention with the mask that most code uses."""
    scores = jnp.einsum("qd,kd->qk", q, k) / np.float32(np.sqrt(q.shape[-1]))
    causal = jnp.tril(jnp.ones(scores.shape, bool))
    return jax.nn.softmax(jnp.where(causal, scores, jnp.finfo(jnp.float32).min)) @ v


def _weak(x: Any) -> Any:
    scale = lax.full_like(jnp.asarray(2.0), 3.0)  # weakly typed
    return x @ x, jnp.asarray(1.5), jnp.sum(x) * 1.0, scale, jnp.where(x[0, 0] > 0, 1.0, 2.0)


def _integers(x: Any, ids: Any) -> Any:
    one_hot = jax.nn.one_hot(ids, x.shape[0])
    return one_hot @ x, ids * 2, jnp.argmax(x, axis=1), x[ids], ids > 1, (ids @ ids)


def _keys(key: Any, x: Any) -> Any:
    key, other = jax.random.split(key)
    return key, x @ jax.random.normal(other, x.shape), jax.random.bits(other, (3,))


def _complex(x: Any, z: Any) -> Any:
    return x @ x, z @ z, jnp.fft.fft(x.astype(jnp.complex64)), jnp.real(z) @ x, jnp.abs(z)


def _float64(x: Any, d: Any) -> Any:
    return x @ x, d @ d, d * 2, d.astype(jnp.float32) @ x, x.astype(jnp.float64) @ d


def _loop(x: Any, w: Any) -> Any:
    def body(carry: Any, row: Any) -> Any:
        h, n = carry
        h = jnp.tanh(row + h @ w)
        return (h, n + 1), h

    (h, n), hs = lax.scan(body, (jnp.zeros(w.shape[0]), 0), x)
    return lax.cond(n > 3, lambda h: h @ w, lambda h: h, h), n, hs


def _matrix() -> Any:
    return jnp.asarray(normal(0, 4, 4))


PROGRAMS = (
    Program("pytrees", mlp, mlp_args),
    Program("gradient", jax.value_and_grad(mlp_loss), mlp_args),
    Program("attention", attention, lambda: tuple(jnp.asarray(normal(s, 6, 8)) for s in range(3))),
    Program("weak types", _weak, lambda: (_matrix(),)),
    Program("python scalars", lambda x, n: (x @ x * n, n, n + 1), lambda: (_matrix(), 2.0)),
    Program("integers", _integers, lambda: (_matrix(), jnp.arange(3))),
    Program(
        "booleans",
        lambda x, m: (jnp.where(m, x @ x, 0.0), ~m, m & (x > 0), jnp.any(m)),
        lambda: (_matrix(), _matrix() > 0),
    ),
    Program("keys", _keys, lambda: (jax.random.key(0), _matrix())),
    Program("complex", _complex, lambda: (_matrix(), _matrix().astype(jnp.complex64) * 1j)),
    Program("float64", _float64, lambda: (_matrix(), jnp.asarray(_matrix(), jnp.float64)), True),
    Program(
        "empty arrays",
        lambda x, e: (x @ e, e @ e.T, jnp.sum(e), e),
        lambda: (_matrix(), jnp.zeros((4, 0))),
    ),
    Program(
        "scalars", lambda a, b: (a * b + 1, jnp.dot(a, b)), lambda: (jnp.float32(2), jnp.float32(3))
    ),
    Program("loops", _loop, lambda: (jnp.asarray(normal(1, 5, 4)), _matrix())),
    Program(
        "bfloat16",
        lambda x: (x @ x, x.sum(), x.astype(jnp.float32)),
        lambda: (_matrix().astype(jnp.bfloat16),),
    ),
    Program("float16", lambda x: {"y": x @ x, "n": None}, lambda: (_matrix().astype(jnp.float16),)),
    Program("nothing out", lambda x: ((), {"a": x @ x}), lambda: (_matrix(),)),
)
