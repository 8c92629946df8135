"""JAX's own primitive harnesses as programs for `policy_checks`, and a sample of them.

A harness is one use of one primitive, with arguments, as JAX tests itself; their list depends on
x64 at import.
"""

import functools
import warnings
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.support.jaxprs import LOW
from tests.support.passes import POLICIES
from tests.support.policy_checks import Case, numeric


@functools.cache
def harnesses() -> dict[str, Any]:
    """Those that JAX implements on CPU, for x64 as it is at the first call, by short names."""
    from jax._src.internal_test_util import test_harnesses

    found = [h for h in test_harnesses.all_harnesses if h.filter("cpu")]
    # the full names have several hundred letters
    return {f"{h.group_name}-{zlib.crc32(h.fullname.encode()):08x}": h for h in found}


def sample() -> dict[str, list[str]]:
    """Of every group a float32 harness and one of a 16-bit or integer type, where they exist.

    Which ones depends on their names alone.
    """
    groups: dict[str, list[str]] = {}
    for name in sorted(harnesses(), key=lambda name: name.rpartition("-")[2]):
        groups.setdefault(harnesses()[name].group_name, []).append(name)
    return {group: _chosen(groups[group]) for group in sorted(groups)}


def _chosen(group: list[str]) -> list[str]:
    def first(wanted: Callable[[np.dtype[Any]], bool]) -> list[str]:
        dtypes = ((name, harnesses()[name].dtype) for name in group)
        return [name for name, d in dtypes if d is not None and wanted(np.dtype(d))][:1]

    found = first(lambda d: d == np.float32)
    found += first(lambda d: d in LOW) or first(lambda d: d.kind in "iub")
    return (found + [name for name in group if name not in found])[: max(2, len(found))]


def cases(name: str, derivatives: bool = False) -> Iterator[Case]:
    """A harness under every preset, and its derivatives with the pass on either side."""
    harness = harnesses()[name]
    seed = zlib.adler32(harness.fullname.encode())
    args = tuple(harness.dyn_args_maker(np.random.RandomState(seed)))
    # a function without floats is refused
    fn = lambda one, *xs: harness.dyn_fun(*xs)  # noqa: E731
    x64 = jax.config.jax_enable_x64
    for policy in POLICIES:
        yield Case(fn, (np.float32(1), *args), policy.name, compiled=True, x64=x64)
        if derivatives and any(numeric(jnp.asarray(x)) for x in jax.tree.leaves(args)):
            derived = _differentiable(harness.dyn_fun, args)
            for form, inside in (("grad", True), ("grad", False), ("jvp", True)):
                yield Case(*derived, policy.name, form, inside, x64=x64)


def _differentiable(fn: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, Any]:
    """A loss of a program's floating arguments, and the arguments."""
    leaves, tree = jax.tree.flatten(args)
    at = [i for i, x in enumerate(leaves) if jnp.issubdtype(jnp.result_type(x), jnp.floating)]

    def loss(params: list[Any], others: list[Any]) -> tuple[Any, Any]:
        filled = list(others)
        for i, x in zip(at, params, strict=True):
            filled[i] = x
        results = [x for x in jax.tree.leaves(fn(*jax.tree.unflatten(tree, filled))) if numeric(x)]
        sums = [jnp.sum(jnp.real(x).astype(jnp.float32) * np.float32(0.7)) for x in results]
        return sum(sums, jnp.float32(0)), results

    return loss, ([jnp.asarray(leaves[i]) for i in at], leaves)


def runs(case: Case) -> bool:
    """Whether JAX itself can run a case's program."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            jax.block_until_ready(jax.jit(case.fn)(*case.args))
        except Exception:
            return False
    return True
