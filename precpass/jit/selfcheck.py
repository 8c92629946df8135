"""On a JAX release newer than those tested: does the pass still lower what it claims to?

JAX's IR is no stable interface. A parameter that is renamed would turn a pass that looks for it
into one that silently does nothing. So the first planning on such a release traces a few small
programs, and a product that is not lowered in them is an error.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from precpass import jaxpr as ir
from precpass.jit.region import Region
from precpass.planner.planner import make_plan
from precpass.policy.presets import AutoMixedBf16

__all__ = ["NEWEST_TESTED", "OLDEST_TESTED", "check_jax"]

OLDEST_TESTED = (0, 10, 2)
NEWEST_TESTED = (0, 12, 0)
"""The releases of JAX between which every test of this repository passes."""

_lock = threading.Lock()
_passed = False


def check_jax() -> None:
    """Checks once per process that the pass works with this JAX, if that is newer than tested.

    Raises:
        RuntimeError: when a product inside a scan, cond, remat or custom rule does not come out
            low. It names the primitive and says what to do.

    Examples:
        >>> check_jax()  # silent, and free from the second call on
    """
    global _passed
    if _passed:
        return
    with _lock:
        if not _passed and jax.__version_info__[:3] > NEWEST_TESTED:
            for primitive, program in _PROGRAMS.items():
                _check(primitive, program)
        _passed = True


def _check(primitive: str, program: Callable[[Any], Any]) -> None:
    try:
        # Bodies must be traced as bodies even if the user disabled jit for debugging.
        with jax.disable_jit(False):
            wide, low = _products(program)
    except Exception as error:
        raise RuntimeError(_text(primitive, f"{type(error).__name__}: {error}")) from error
    if wide or not low:
        outcome = f"{wide} of its {wide + low} products stay wide" if wide + low else "none is left"
        raise RuntimeError(_text(primitive, outcome))


def _products(program: Callable[[Any], Any]) -> tuple[int, int]:
    """The numbers of float32 and of 16-bit products in the rewritten program and its gradient."""
    from precpass.jit.traced import rewritten  # which is what checks before it plans

    x = jax.ShapeDtypeStruct((2, 2), jnp.float32)
    before = ir.trace(program, x)
    plan = make_plan(before, AutoMixedBf16)

    def loss(x: Any) -> Any:
        new, _ = rewritten(before, plan, Region(), AutoMixedBf16, "")
        return jnp.sum(ir.evaluate(new, [x])[0])

    after = ir.trace(jax.value_and_grad(loss), x)
    dtypes = [
        {v.aval.dtype for v in eqn.invars}
        for eqn in ir.all_held_eqns(after)
        if eqn.primitive.name == "dot_general"
    ]
    low = sum(formats == {jnp.dtype(jnp.bfloat16)} for formats in dtypes)
    return len(dtypes) - low, low


def _text(primitive: str, found: str) -> str:
    oldest, newest = (".".join(map(str, v)) for v in (OLDEST_TESTED, NEWEST_TESTED))
    return (
        f"precpass does not work with jax {jax.__version__}: in a small program with {primitive}, "
        f"{found}. It was tested with jax {oldest} to {newest}: install one of these "
        f"(pip install 'jax<={newest}'), or a newer precpass, or set PRECPASS=off to run every "
        "auto_mixed function as jax.jit would."
    )


def _dot(x: Any, w: Any) -> Any:
    # Without the user's jax.default_matmul_precision, which would count as an order.
    return lax.dot(x, w, precision=lax.Precision.DEFAULT)


_with_jvp = jax.custom_jvp(_dot)
_with_jvp.defjvp(lambda p, t: (_dot(*p), _dot(t[0], p[1]) + _dot(p[0], t[1])))
_with_vjp = jax.custom_vjp(_dot)
_with_vjp.defvjp(lambda x, w: (_dot(x, w), (x, w)), lambda r, g: (_dot(g, r[1]), _dot(r[0], g)))

_PROGRAMS: dict[str, Callable[[Any], Any]] = {
    "jit": lambda x: jax.jit(_dot)(x, x),
    "scan": lambda x: lax.scan(lambda c, _: (_dot(c, x), None), x, None, length=2)[0],
    "cond": lambda x: lax.cond(jnp.sum(x) > 0, _dot, lambda x, _: x, x, x),
    "remat": lambda x: jax.checkpoint(lambda x: jnp.tanh(_dot(x, x)))(x),
    "custom_jvp": lambda x: _with_jvp(x, x),
    "custom_vjp": lambda x: _with_vjp(x, x),
}
