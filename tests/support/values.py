"""Numbers: reproducible data, and how far results are from what is wanted."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def normal(seed: int, *shape: int, dtype: Any = np.float32) -> np.ndarray:
    """Reproducible data, made without JAX."""
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def on_device(value: Any) -> jax.Array:
    """NumPy's array as one of JAX's; JAX 0.12 compiles a program for it in `jnp.asarray`."""
    return jax.device_put(np.asarray(value))


def normal_array(seed: int, *shape: int) -> jax.Array:
    """`normal` as an array of JAX's."""
    return on_device(normal(seed, *shape))


def f32(*shape: int) -> Any:
    """A float32 argument that is only a shape."""
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def rel_error(got: Any, want: Any) -> float:
    """The norm of the difference over the norm of what is wanted, over all leaves; inf for NaN."""
    got, want = (
        np.concatenate([np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(tree)])
        for tree in (got, want)
    )
    assert got.shape == want.shape
    error = float(np.linalg.norm(got - want) / max(float(np.linalg.norm(want)), 1e-30))
    return error if np.isfinite(error) else float("inf")


def error(got: Any, want: Any) -> float:
    """The largest normwise relative error of the leaves."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    worst = 0.0
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.isfinite(x).all()
        norm = np.linalg.norm(y.ravel())
        worst = max(worst, float(np.linalg.norm((x - y).ravel()) / (norm if norm else 1.0)))
    return worst


def assert_near(got: Any, want: Any, tolerance: float = 0.01) -> None:
    found = error(got, want)
    assert found <= tolerance, f"relative error {found:.3g} > {tolerance}"


def identical(got: Any, want: Any) -> bool:
    """Whether two trees have the same structure, dtypes and bits."""
    leaves = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    return jax.tree.structure(got) == jax.tree.structure(want) and all(
        a.dtype == b.dtype and np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in leaves
    )


def stable_id(value: object) -> str:
    """`repr` without addresses: workers that run tests in parallel must agree on the names."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))
