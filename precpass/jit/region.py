"""The region of a call: its default policy, its `keep` precision, an enclosing trace."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import os
from collections.abc import Generator
from typing import Any

import jax

from precpass import jaxpr as ir
from precpass.jit.layers import layers_asked, naming_layers
from precpass.policy.policy import PolicyLike, PrecisionPolicy
from precpass.policy.precision import Precision
from precpass.policy.presets import AutoMixedBf16
from precpass.policy.primitives import OpKind
from precpass.policy.scopes import keep_scope

__all__ = [
    "Region",
    "configured",
    "current",
    "keep",
    "tracing",
    "use_policy",
]

_SWITCHED_OFF = os.environ.get("PRECPASS", "").lower() == "off"


@contextlib.contextmanager
def configured(name: str, value: object) -> Generator[None]:
    """A context with another value of an option of `jax.config`, in all threads."""
    before = getattr(jax.config, name)
    jax.config.update(name, value)
    try:
        yield
    finally:
        jax.config.update(name, before)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Region:
    """Where a call stands. There is one object per value, so that it compares by identity.

    Attributes:
        policy: that of the innermost `use_policy`; None outside all of them.
        off: whether that is `use_policy(None)`.
        keep: the precision of the innermost `keep`.
        inside: whether an `auto_mixed` function is being traced around it.
        named: the layers that its rules name; if there are any, layers have name scopes.
        products: the format of matrix products in that one; None outside, and if it lowers none.
    """

    policy: PrecisionPolicy | None = None
    off: bool = False
    keep: Precision | None = None
    inside: bool = False
    named: frozenset[str] = frozenset()
    products: Precision | None = None

    @property
    def compute(self) -> Precision | None:
        """The 16-bit format in which matrix products run here; None if they stay as they are."""
        precision = self.products if self.keep is None else self.keep
        return precision if precision is not None and precision.is_low else None

    @property
    def scope(self) -> str:
        """The name scope that stands for its `keep`."""
        return "" if self.keep is None else keep_scope(self.keep)

    @property
    def is_off(self) -> bool:
        """Whether every function runs here as it was written."""
        return self.off or _SWITCHED_OFF

    def policy_of(
        self, own: PrecisionPolicy | None, profitability: str | None = None
    ) -> PrecisionPolicy | None:
        """The policy of a function with these of its own; None if it runs as it was written."""
        policy = own or self.policy
        if self.is_off or (policy is None and self.inside):
            return None
        policy = policy or AutoMixedBf16
        return policy if profitability is None else policy.with_profitability(profitability)

    def fixes(self, own: PrecisionPolicy | None) -> bool:
        """Whether an enclosing `auto_mixed` function leaves a function with this policy alone."""
        return self.inside and (self.is_off or (own or self.policy) is not None)


_region = functools.lru_cache(maxsize=4096)(Region)
_OUTERMOST = _region(None, False, None, False, frozenset(), None)
# Each task of asyncio has its own region, while JAX's contexts belong to a thread.
_current: contextvars.ContextVar[Region] = contextvars.ContextVar("precpass", default=_OUTERMOST)
# It is part of jit's cache key, so a function traced in one region is not reused in another.
_cache_key = jax.make_user_context(_OUTERMOST)


def current() -> Region:
    """The region of this call, after bringing jit's cache key to the same region."""
    region = _current.get()
    if _cache_key.value is not region:
        _synchronise(region)
    return region


def _synchronise(region: Region) -> None:
    """Brings jit's cache key to this task's region, after a switch between tasks.

    Raises:
        RuntimeError: while jit traces, under a key that says another region.
    """
    if ir.is_tracing():
        raise RuntimeError(
            "an auto_mixed function is traced while the use_policy or keep region of another "
            "asyncio task (or of the thread that started this one) is open. jit's cache cannot "
            "tell the two apart: keep `await` out of the region, or call the auto_mixed function "
            "once before what is jitted around it"
        )
    _cache_key(region).__enter__()


@contextlib.contextmanager
def _enter(**changes: Any) -> Generator[None]:
    """A context in a region that differs from that around it."""
    around = _current.get()
    region = _region(*(changes.get(name, getattr(around, name)) for name in Region.__slots__))
    token = _current.set(region)
    try:
        with _cache_key(region):
            yield
    finally:
        _current.reset(token)
        if _cache_key.value is not _current.get():
            # Regions of several tasks need not end in the reverse order of their beginnings.
            _cache_key(_current.get()).__enter__()


@contextlib.contextmanager
def use_policy(policy: PolicyLike | None) -> Generator[None]:
    """Make `policy` the default of every `auto_mixed` function without its own policy.

    `None` turns the pass off: every `auto_mixed(f)` called inside is `jax.jit(f)`, as in a process
    started with `PRECPASS=off`. The policy holds in this thread or asyncio task, and is read when
    the outermost function is traced.

    Raises:
        ValueError, TypeError: for something that is not a policy.

    Examples:
        >>> import precpass as pp
        >>> with use_policy("AutoMixedF16"):
        ...     y = pp.auto_mixed(lambda x: x @ x)(jax.numpy.ones((8, 8)))
    """
    chosen = None if policy is None else PrecisionPolicy.parse(policy)
    off: dict[str, Any] = {"products": None} if policy is None else {}
    with _enter(policy=chosen, off=policy is None, **off):
        yield


float64_regions = 0
"""How many `keep("f64")` regions have been entered: a trace that changes it holds one."""


@contextlib.contextmanager
def keep(precision: Precision | str) -> Generator[None]:
    """Fix the precision of the code inside, whatever the policy says.

    "f32" leaves the region as you wrote it. "bf16" and "f16" run its matrix products in low
    precision, under AlwaysF32 too. "tf32", "bf16x3", "bf16x6" and "f32_exact" choose how its
    float32 matrix products are multiplied. "f64" evaluates it in float64, with x64 on or off. The
    innermost region wins, over rules too. You can also use it as a decorator, and around the call
    of an `auto_mixed` function.

    Raises:
        ValueError: for an unknown precision.

    Examples:
        >>> def head(x, w):
        ...     with keep("f32"):
        ...         return x @ w
    """
    global float64_regions
    parsed = Precision.parse(precision)
    float64_regions += parsed is Precision.F64
    # If the pass is off, the program has no marks, so that it can serve as a reference.
    is_off = _current.get().off
    scope = contextlib.nullcontext() if is_off else jax.named_scope(keep_scope(parsed))
    with scope, _enter(keep=parsed):
        yield


@contextlib.contextmanager
def tracing(region: Region, policy: PrecisionPolicy | None) -> Generator[None]:
    """A context around the trace, under its policy, of an `auto_mixed` function in a region.

    An inner `auto_mixed` function without a policy of its own leaves the decision to the outer one.
    If rules name layers, the trace has their names, and no cache of it is read where they are not
    asked for.
    """
    named = region.named | layers_asked(policy)
    naming = naming_layers(named) if named else contextlib.nullcontext()
    products = region.products if policy is None else policy.precision_for(OpKind.COMPUTE)
    inside = {"inside": True, "named": named, "products": products}
    with _enter(policy=None, off=False, keep=region.keep, **inside), naming:
        yield
