"""What a user calls: `auto_mixed`, `inspect`, `use_policy`, `keep`."""

from __future__ import annotations

import contextlib
import functools
import os
import types
import warnings
from collections.abc import Callable, Generator, Iterator
from typing import Any, NamedTuple, overload

import jax

from precpass import jaxpr as ir
from precpass.inspection import Inspection
from precpass.opkinds import OpKind
from precpass.plan import Action, Plan
from precpass.planner import distinguish, make_plan, unchanged_plan
from precpass.policy import AutoMixedBf16, PrecisionPolicy, PrecisionWarning
from precpass.precision import Precision
from precpass.rewrite import Rewriter
from precpass.rules import keep_scope

__all__ = ["Mixed", "auto_mixed", "inspect", "keep", "use_policy"]

_OFF = "off"


class _Context(NamedTuple):
    policy: PrecisionPolicy | str | None = None
    keep: Precision | None = None


# Part of jit's cache key, so that a function traced in one region is not reused in another.
_context = jax.make_user_context(_Context())
_SWITCHED_OFF = os.environ.get("PRECPASS", "").lower() == _OFF


@contextlib.contextmanager
def use_policy(policy: PrecisionPolicy | str | None) -> Generator[None]:
    """Makes `policy` the default of every `auto_mixed` without a policy of its own.

    None turns the pass off altogether: every `auto_mixed(f)` called inside is
    `jax.jit(f)`, as it is in a process started with `PRECPASS=off`. The policy is
    read when the outermost function is traced, in this thread.

    Raises:
        ValueError, TypeError: for something that is no policy.

    Example:
        >>> with use_policy("AutoMixed"):
        ...     y = auto_mixed(lambda x: x @ x)(jax.numpy.ones((8, 8)))
    """
    chosen = _OFF if policy is None else PrecisionPolicy.parse(policy)
    with _context(_context.value._replace(policy=chosen)):
        yield


@contextlib.contextmanager
def keep(precision: Precision | str) -> Generator[None]:
    """Fixes the precision of the region inside, whatever the policy says.

    "f32" leaves the region as it was written. "bf16" and "f16" run its products
    low, in an AlwaysF32 program too. "f64" evaluates it in float64, whether or
    not x64 is on. The innermost region wins, over rules too. It also works as a
    decorator, and around the call of an `auto_mixed` function.

    Raises:
        ValueError: for an unknown precision.

    Example:
        >>> def head(x, w):
        ...     with keep("f32"):
        ...         return x @ w
    """
    parsed = Precision.parse(precision)
    with jax.named_scope(keep_scope(parsed)), _context(_context.value._replace(keep=parsed)):
        yield


class Mixed:
    """A function under a policy; calling it is calling `jax.jit` of the rewritten function.

    Attributes:
        policy: its own policy, or None for the default in force when it is called.
    """

    def __init__(
        self, fn: Callable[..., Any], policy: PrecisionPolicy | None, jit_options: dict[str, Any]
    ) -> None:
        functools.update_wrapper(self, fn)
        self.__wrapped__ = fn
        self.policy = policy
        self.jit_options = jit_options
        self._jitted: dict[Any, Any] = {}

    def resolved(self) -> tuple[PrecisionPolicy | None, str]:
        """The policy that counts here, None where the pass is off, and the scope around a call."""
        policy, kept = _context.value
        if _SWITCHED_OFF or policy == _OFF:
            return None, ""
        assert not isinstance(policy, str)
        return self.policy or policy or AutoMixedBf16, "" if kept is None else keep_scope(kept)

    @property
    def jitted(self) -> Any:
        """The `jax.jit` function that a call in this context runs."""
        key = self.resolved()
        if key not in self._jitted:
            policy, scope = key
            fn = self.__wrapped__ if policy is None else rewritten(self.__wrapped__, policy, scope)
            self._jitted[key] = jax.jit(fn, **self.jit_options)
        return self._jitted[key]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The results of the wrapped function in the policy's precisions."""
        return self.jitted(*args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """As `jax.jit(f).lower`."""
        return self.jitted.lower(*args, **kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """As `jax.jit(f).trace`."""
        return self.jitted.trace(*args, **kwargs)

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """As `jax.jit(f).eval_shape`."""
        return self.jitted.eval_shape(*args, **kwargs)

    def clear_cache(self) -> None:
        """Forgets every trace and compiled program."""
        for jitted in self._jitted.values():
            jitted.clear_cache()
        self._jitted.clear()

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __repr__(self) -> str:
        return f"<auto_mixed {_name(self.__wrapped__)}, policy={self.policy or 'default'!r}>"


@overload
def auto_mixed(
    fn: Callable[..., Any], *, policy: PrecisionPolicy | str | None = ..., **jit_options: Any
) -> Mixed: ...
@overload
def auto_mixed(
    *, policy: PrecisionPolicy | str | None = ..., **jit_options: Any
) -> Callable[[Callable[..., Any]], Mixed]: ...
def auto_mixed(fn: Any = None, *, policy: Any = None, **jit_options: Any) -> Any:
    """`jax.jit` of a function, run in the precisions that a policy asks for.

    The result has the same signature, output tree, shapes, dtypes and weak types.
    Differentiate inside where you can, `auto_mixed(jax.value_and_grad(loss))`: the
    pass then sees the backward products. `jax.grad(auto_mixed(loss))` is right and
    low too.

    Args:
        fn: the function; without it a decorator is returned.
        policy: a policy, a preset's name, or a string such as "p=f32,c=bf16,o=f32".
            Without one, that of `use_policy`, else AutoMixedBf16.
        jit_options: those of `jax.jit` (`donate_argnums`, `static_argnums`, ...).

    Raises:
        TypeError: when `fn` is not callable, or, when it is traced, has no floating values.
        ValueError: for an unknown policy.

    Warns:
        PrecisionWarning: when tracing, where the policy lowered nothing, a rule
            matched no equation, or a primitive with products could not be entered.

    Example:
        >>> import jax.numpy as jnp
        >>> @auto_mixed
        ... def f(x, w):
        ...     return jnp.tanh(x @ w).sum()
        >>> f(jnp.ones((2, 3)), jnp.ones((3, 4))).dtype
        dtype('float32')
    """
    parsed = None if policy is None else PrecisionPolicy.parse(policy)
    if fn is None:
        return lambda fn: auto_mixed(fn, policy=parsed, **jit_options)
    if not callable(fn):
        raise TypeError(f"auto_mixed takes a function, not {fn!r}")
    if isinstance(fn, Mixed) and parsed in (None, fn.policy) and not jit_options:
        return fn
    return Mixed(fn, parsed, jit_options)


def rewritten(fn: Callable[..., Any], policy: PrecisionPolicy, scope: str) -> Callable[..., Any]:
    """`fn` under a policy and inside a name scope, without the `jax.jit` around it."""

    @functools.wraps(fn)
    def mixed(*args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs))
        # under jit whatever varies is an array; the rest was declared static
        arrays = [x for x in leaves if isinstance(x, jax.Array)]

        @functools.wraps(fn)
        def on_arrays(*xs: Any) -> Any:
            given = iter(xs)
            filled = [next(given) if isinstance(x, jax.Array) else x for x in leaves]
            inner_args, inner_kwargs = jax.tree.unflatten(tree, filled)
            return fn(*inner_args, **inner_kwargs)

        jaxpr, shapes = ir.trace_shaped(on_arrays, *arrays)
        plan = _checked_plan(jaxpr, policy, scope, _name(fn))
        results = _run(jaxpr, plan, arrays, policy, scope)
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return mixed


def _run(jaxpr: Any, plan: Plan, args: Any, policy: PrecisionPolicy, scope: str) -> list[Any]:
    if plan.changes:
        results = _rewriter(policy).run(jaxpr, plan, args, scope)
    else:
        results = ir.evaluate(jaxpr, args)
    if policy.output is None:
        return results
    return [
        x.astype(policy.output.dtype) if ir.precision_of(jax.typeof(x)) in policy.retypes else x
        for x in results
    ]


def _rewriter(policy: PrecisionPolicy) -> Rewriter:
    return Rewriter(
        lambda jaxpr, scope: make_plan(jaxpr, policy, scope),
        lambda scope: distinguish(policy, scope),
    )


def _checked_plan(
    jaxpr: Any, policy: PrecisionPolicy, scope: str, name: str, hoisted: int = 0
) -> Plan:
    if not policy.widens and not any(ir.precision_of(a) for a in ir.all_avals(jaxpr)):
        dtypes = sorted({str(a.dtype) for a in ir.in_avals(jaxpr) if hasattr(a, "dtype")})
        raise TypeError(
            f"{name} has no floating-point values (its arguments are {', '.join(dtypes) or 'none'})"
            f", so {policy.name} has nothing to decide: call it without auto_mixed, or pass "
            "arrays of float32, bfloat16, float16 or float64"
        )
    plan = make_plan(jaxpr, policy, scope, hoisted)
    for text in _complaints(plan, policy, name):
        warnings.warn(text, PrecisionWarning, stacklevel=4)
    return plan


def _complaints(plan: Plan, policy: PrecisionPolicy, name: str) -> Iterator[str]:
    yield from plan.notes
    for rule in plan.unmatched:
        yield f"{rule!r} matched no equation of {name}"
    counts = plan.count()
    if policy.lowers and not any(action is Action.LOWER for _, action in counts):
        reasons = {d.reason for d in plan.walk() if d.kind is OpKind.COMPUTE}
        why = "; ".join(sorted(reasons)[:3]) if reasons else "it has no products"
        if "the user's own precision" not in reasons:
            yield f"{policy.name} lowered nothing in {name}: {why}"


def inspect(
    fn: Callable[..., Any], policy: PrecisionPolicy | str | None = None
) -> Callable[..., Inspection]:
    """What a policy does to a function, without running it.

    Args:
        fn: a function, or the result of `auto_mixed`, whose policy and options then count.
        policy: as for `auto_mixed`.

    Returns:
        A function that takes arguments of `fn` (arrays or `jax.ShapeDtypeStruct`s) and
        gives an `Inspection`: the jaxpr `before` and `after`, the `plan`, and `diff()`.

    Example:
        >>> import jax.numpy as jnp
        >>> print(inspect(lambda x: x @ x)(jnp.ones((4, 4))).plan)
        <Plan: 1 of 1 products lowered, 1 equations lowered, 1 in all>
    """
    owner: tuple[Any, ...] = ()
    if isinstance(fn, types.MethodType) and isinstance(fn.__func__, Mixed):
        fn, owner = fn.__func__, (fn.__self__,)
    mixed = fn if isinstance(fn, Mixed) else auto_mixed(fn, policy=policy)
    if policy is not None:
        mixed = Mixed(mixed.__wrapped__, PrecisionPolicy.parse(policy), mixed.jit_options)

    def inspected(*args: Any, **kwargs: Any) -> Inspection:
        resolved, scope = mixed.resolved()
        options = {k: v for k, v in mixed.jit_options.items() if k.startswith("static_")}
        traced = jax.jit(mixed.__wrapped__, **options).trace(*owner, *args, **kwargs)
        before = after = traced.jaxpr
        if resolved is None:
            return Inspection(before, unchanged_plan(before), after, None, scope)
        hoisted = len(ir.in_avals(before)) - len(jax.tree.leaves(traced.args_info))
        plan = _checked_plan(before, resolved, scope, _name(mixed.__wrapped__), hoisted)
        if plan.changes or resolved.output is not None:
            after = ir.retrace(before, lambda *xs: _run(before, plan, xs, resolved, scope))
        return Inspection(before, plan, after, resolved, scope)

    return inspected


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__name__", None) or repr(fn)
