"""Functions under policies: inspected, run, differentiated, and held against float32."""

import contextlib
import gc
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax

import precpass as pp
from precpass.jit.traced import Ran, Traced
from tests.support.jaxprs import check_all_low, product_dtypes
from tests.support.values import assert_near, rel_error

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
COMPOSITIONS: dict[str, Callable[..., Any]] = {
    "grad_of_mixed": lambda f, d=jax.grad, policy=None: d(pp.auto_mixed(f, policy=policy)),
    "mixed_of_grad": lambda f, d=jax.grad, policy=None: pp.auto_mixed(d(f), policy=policy),
}
"""A derivative of a function under the pass, from either side of it."""


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


@contextlib.contextmanager
def config(name: str, value: Any) -> Iterator[None]:
    """One of JAX's settings for a while; traces made under it are forgotten."""
    before = getattr(jax.config, name)
    jax.config.update(name, value)
    try:
        yield
    finally:
        jax.config.update(name, before)
        jax.clear_caches()


def text_of(inspection: pp.report.Inspection) -> str:
    """All that an inspection says in words: every reason, and the notes."""
    reasons = [str(decision.reason) for decision in inspection.plan.walk()]
    return "\n".join([*reasons, *inspection.plan.notes])


def look(fn: Callable[..., Any], policy: Any, *args: Any) -> pp.report.Inspection:
    """`inspect` without the package's warnings."""
    with quiet():
        return pp.inspect(fn, policy)(*args)


def wide_products(traced: Any, plan: Any, policy: Any, *_: Any) -> frozenset[int]:
    """For `with_outputs`: the indices of the products that are wide under a plan."""
    dtypes = product_dtypes(traced.rewritten(plan, policy))
    return frozenset(i for i, dtype in enumerate(dtypes) if dtype == "float32")


def with_outputs(monkeypatch: Any, run: Callable[..., Any]) -> None:
    """Puts `run(traced, plan, policy, bound)` in the place of what a traced function computes."""
    monkeypatch.setattr(Traced, "run", lambda *given: Ran(run(*given), 0, None))
    monkeypatch.setattr(Traced, "output", lambda _, results: results)


def decided(inspection: Any, primitive: str) -> list[Any]:
    """The decisions for the equations of one primitive, in order."""
    return [d for eqn, d, _ in inspection.decisions() if eqn.primitive.name == primitive]


def run(fn: Callable[..., Any], policy: Any, *args: Any) -> Any:
    """`auto_mixed(fn, policy=policy)(*args)` without the package's warnings."""
    with quiet():
        return pp.auto_mixed(fn, policy=policy)(*args)


def both_grads(fn: Callable[..., Any], policy: Any, *args: Any, argnums: Any = 0) -> dict[str, Any]:
    """The gradient with the pass around it, and with the pass inside it, compiled as one."""
    forms = {
        "auto_mixed(grad)": pp.auto_mixed(jax.grad(fn, argnums), policy=policy),
        "grad(auto_mixed)": jax.grad(pp.auto_mixed(fn, policy=policy), argnums),
    }
    with quiet():
        return jax.jit(lambda *xs: {name: form(*xs) for name, form in forms.items()})(*args)


def assert_close(fn: Callable[..., Any], policy: Any, *args: Any, tol: float, argnums: Any = 0):
    """Value and both gradients of a scalar function are within `tol` of float32's.

    One compilation of all takes half the time of six.
    """
    want, found = jax.jit(
        lambda *xs: (
            {"value": fn(*xs), "gradient": jax.grad(fn, argnums)(*xs)},
            {"value": run(fn, policy, *xs), **both_grads(fn, policy, *xs, argnums=argnums)},
        )
    )(*args)
    for form, got in found.items():
        assert rel_error(got, want.get(form, want["gradient"])) < tol, f"{form} under {policy.name}"


def assert_all_low(fn: Callable[..., Any], *args: Any, least: int = 1, dtype: Any = None) -> Any:
    """Every product in the jaxpr of `fn` is low, and there are `least` of them."""
    return check_all_low(jax.make_jaxpr(fn)(*args), least, dtype)


def run_low(fn: Callable[..., Any], *args: Any, least: int = 1, dtype: Any = None) -> Any:
    """`assert_all_low`, and what it gives when compiled and run, from one trace."""
    traced = jax.jit(fn).trace(*args)
    check_all_low(traced.jaxpr, least, dtype)
    return traced.lower().compile()(*args)


def low_and_near(
    mixed: Callable[..., Any],
    plain: Callable[..., Any],
    *args: Any,
    least: int = 1,
    dtype: Any = None,
    tolerance: float = 0.01,
) -> None:
    """`assert_all_low` of one function, whose values are near those of the other.

    One compilation of both takes half the time of two.
    """
    assert_all_low(mixed, *args, least=least, dtype=dtype)
    got, want = jax.jit(lambda *xs: (mixed(*xs), plain(*xs)))(*args)
    assert_near(got, want, tolerance)
