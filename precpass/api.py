"""The functions that users call: `auto_mixed`, `inspect`, `explain`, `use_policy` and `keep`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar, overload

import jax

from precpass import jaxpr as ir
from precpass.devices.detect import committed_device, device_for, is_present, planned_for
from precpass.devices.targets import abstract_on, check_places, target_of
from precpass.jit.arguments import Declared
from precpass.jit.functions import check_function, check_options, name_of, shown_name
from precpass.jit.mixed import Mixed
from precpass.jit.region import current, keep, use_policy
from precpass.jit.staged import AtArguments, in_two_steps, made_of_trace, owner_of
from precpass.jit.traced import Traced, place_of, rewritten
from precpass.plan.decisions import unchanged_plan
from precpass.plan.eqn_info import PlanSource
from precpass.plan.file import policy_data
from precpass.policy.policy import PolicyLike, PrecisionPolicy, cast_leaves, parse_option
from precpass.policy.precision import FORMATS, Precision
from precpass.policy.presets import precision_named
from precpass.policy.warned import quietly

if TYPE_CHECKING:
    from precpass.view.explain import Explanation
    from precpass.view.inspection import Inspection

__all__ = [
    "auto_mixed",
    "cast_floating",
    "explain",
    "in_compute_dtype",
    "inspect",
    "keep",
    "trace_of",
    "use_policy",
]


P = ParamSpec("P")
R = TypeVar("R")
Tree = TypeVar("Tree")


class _Decorator(Protocol):
    def __call__(self, fn: Callable[P, R], /) -> Mixed[P, R]: ...


@overload
def auto_mixed(
    fn: Callable[P, R],
    policy: PolicyLike | None = ...,
    *,
    profitability: str | None = ...,
    **jit_options: Any,
) -> Mixed[P, R]: ...
@overload
def auto_mixed(
    fn: None = None,
    policy: PolicyLike | None = ...,
    *,
    profitability: str | None = ...,
    **jit_options: Any,
) -> _Decorator: ...
def auto_mixed(
    fn: Any = None, policy: Any = None, *, profitability: Any = None, **jit_options: Any
) -> Any:
    """Like `jax.jit`, but runs `fn` in mixed precision; flax nnx modules are updated in place.

    Matrix products (matmuls and convolutions) run in low precision as `policy` says. The result has
    the signature of `fn`, and returns the same tree, shapes, dtypes and weak types. Differentiate
    inside where you can, `auto_mixed(jax.value_and_grad(loss))`: the pass then sees the matrix
    products of the backward pass. `jax.grad(auto_mixed(loss))` also works, and its matrix products
    run in low precision too.

    Call the result like a function of `jax.jit`. An argument leaf that jit refuses is static if it
    is a value (a string, a type, a function without arrays in its closure, a frozen dataclass of
    such): it is hashed and compared as with `static_argnums`. Numbers in equinox modules are static
    too. A result that is not an array is returned as it was when the function was traced. Modules
    of flax nnx are updated as by `nnx.jit`.

    Inside another `auto_mixed` function, a function with its own policy uses it, and one without
    leaves the decision to the outer one. If `fn` was made by `jax.jit`, its options apply to that
    inner call only: give `donate_argnums`, `static_argnums` and shardings to `auto_mixed`.

    Args:
        fn: the function; without it a decorator is returned. If `auto_mixed` made it, the new
            policy and options replace its own.
        policy: a policy, a preset's name, a precision for matrix products ("bf16", `jnp.float16`),
            or a text such as "p=f32,c=bf16,o=f32" (`PrecisionPolicy.parse`). By default the policy
            of `use_policy`, else AutoMixedBf16.
        profitability: which matrix products run in low precision, of those that the policy asks
            for: "always" all, "best" all or none, in the form whose compiled program costs the
            least. Each distinct program is compiled in its forms once, when it is first planned,
            and the choice is stored in a file. Rules, `keep` and saved plans override it. By
            default the policy's own (`with_profitability`), which is "always" unless set.
        jit_options: the options of `jax.jit` (`donate_argnums`, `static_argnums`, ...).

    Raises:
        TypeError: if `fn` cannot be traced (a coroutine or generator function, a staticmethod
            object), and for an unknown option; in a call, for an argument that jit refuses and that
            cannot be static, such as an object that holds arrays and is not a pytree.
        ValueError: for an unknown policy or profitability.

    Warns:
        PrecisionWarning: when tracing, if the policy lowers nothing, the function has no
            floating-point values, a rule matches no equation, or a primitive with matrix products
            cannot be entered.

    Examples:
        >>> import jax.numpy as jnp
        >>> @auto_mixed
        ... def f(x, w):
        ...     return jnp.tanh(x @ w).sum()
        >>> f(jnp.ones((2, 3)), jnp.ones((3, 4))).dtype
        dtype('float32')
    """
    if fn is not None:
        check_function(fn)
    if jit_options:
        check_options(jit_options)
    parsed = None if policy is None else PrecisionPolicy.parse(policy)
    pays = None if profitability is None else parse_option("profitability", profitability)
    if fn is None:
        return lambda fn: mixed_of(fn, policy=parsed, profitability=pays, **jit_options)
    if not isinstance(fn, Mixed):
        return Mixed(fn, parsed, jit_options, pays)
    if parsed in (None, fn.policy) and pays in (None, fn.profitability) and not jit_options:
        return fn
    options = {**fn.jit_options, **jit_options}
    return Mixed(fn.__wrapped__, parsed or fn.policy, options, pays or fn.profitability)


def mixed_of(fn: Any, policy: Any = None, profitability: Any = None, **jit_options: Any) -> Any:
    """`auto_mixed` of what must be a function: None is an error, and gives no decorator."""
    check_function(fn)
    return auto_mixed(fn, policy=policy, profitability=profitability, **jit_options)


@in_two_steps
def inspect(
    fn: Callable[P, Any],
    policy: PolicyLike | None = None,
    *,
    profitability: str | None = None,
    target: Any = None,
    compiled: bool = True,
) -> AtArguments[P, Inspection]:
    """Return a function's jaxpr before and after a policy, and the plan, without running it.

    Args:
        fn: a function, or the result of `auto_mixed`, whose policy and options are the defaults.
        policy: as for `auto_mixed`.
        profitability: as for `auto_mixed`, on the device that the arguments are committed to, if
            any.
        target: plan for this device, which need not be present: "h100", "a100", "tpu v4", "tpu
            v5e", "tpu v5p", "tpu v6e", "tpu 7x", or a JAX device, also one of a topology.
        compiled: whether to compile the program too if the device is not present, which takes
            seconds to minutes; the result then has the compiler's figures. If its compiler is not
            installed or cannot compile the program (it calls Python on the host, or needs too much
            memory), the result has the reason. Nothing is compiled for a device that is present.

    Raises:
        ValueError: for an unknown target.

    Returns:
        A function that takes arguments of `fn` (arrays or `jax.ShapeDtypeStruct`s) and returns an
        `Inspection`: the jaxpr `before` and `after`, the `plan`, `diff()`, and for a device that is
        not present the `compiled` program's kernels, bytes and memory.

    Examples:
        >>> import jax.numpy as jnp
        >>> print(inspect(lambda x: x @ x)(jnp.ones((4, 4))).plan)
        <Plan: 1 of 1 products lowered, 1 equation lowered, 1 in all>
    """
    fn, owner = owner_of(fn)
    mixed = mixed_of(fn, policy, profitability)
    target = target_of(target)
    planned = trace_of(mixed, None, _inspection, None, target)

    def inspected(*args: Any, **kwargs: Any) -> Inspection:
        args = *owner, *args
        inspection = planned(*args, **kwargs)
        if (shown := shown_name(mixed.__wrapped__)) != name_of(mixed.__wrapped__):
            inspection = dataclasses.replace(inspection, name=shown)
        place = target or committed_device((args, kwargs, mixed.in_shardings))
        if not compiled or place is None or is_present(place):
            return inspection
        return _with_compiled(inspection, mixed, place, args, kwargs)

    return inspected


def _with_compiled(
    inspection: Inspection, mixed: Mixed[..., Any], place: Any, args: Any, kwargs: Any
) -> Inspection:
    """An inspection with what the compiler of an absent device says, or why it says nothing."""
    from precpass.measure import execute
    from precpass.view.compiled import Compiled

    declared = Declared(mixed.__wrapped__, mixed.jit_options)
    try:
        placed, named = declared.map(lambda x, _: abstract_on(place, x), args, kwargs)
        if symbol := ir.symbol_in(jax.tree.leaves((placed, named))):
            why = f"XLA compiles for numbers, and {symbol} is symbolic: give one in its place"
            return dataclasses.replace(inspection, not_compiled=why)
        with planned_for(place), quietly():  # the plan's warnings were given
            program = execute.compiled(mixed, *placed, **named)
        made = Compiled(program.device.device_kind, program.memory, program.traffic)
    except (ModuleNotFoundError, RuntimeError, ValueError) as error:
        # The plan is worth seeing without a compiler, and of what it refuses.
        return dataclasses.replace(inspection, not_compiled=str(error).partition("\n")[0])
    return dataclasses.replace(inspection, compiled=made)


def trace_of(
    fn: Callable[..., Any],
    policy: PolicyLike | None,
    then: Callable[[Traced], Any],
    profitability: str | None = None,
    target: Any = None,
) -> Callable[..., Any]:
    """A function of arguments of `fn` that gives what `then` makes of its trace.

    Args:
        fn: as for `inspect`.
        policy: as for `auto_mixed`.
        then: called with each trace; an error in it counts as an error of the call.
        profitability: as for `auto_mixed`.
        target: as for `inspect`.
    """
    fn, owner = owner_of(fn)
    mixed = mixed_of(fn, policy, profitability)
    target = target_of(target)

    def called(*args: Any, **kwargs: Any) -> Any:
        args = *owner, *args
        check_places(target, (args, kwargs))
        with planned_for(target or committed_device((args, kwargs, mixed.in_shardings))):
            return made_of_trace(mixed, then, args, kwargs)

    return called


def _inspection(traced: Traced) -> Inspection:
    # Imported here, because a program that only calls `auto_mixed` shows nothing.
    from precpass.view.annotate import described
    from precpass.view.inspection import Inspection

    before, policy, scope, name = traced.call.jaxpr, traced.policy, traced.scope, traced.name
    if policy is None:
        plan = described(before, unchanged_plan(before), PlanSource(name, None, scope))
        return Inspection(before, plan, before, None, scope, name)
    plan = traced.checked_plan(policy)
    after, rewriter = rewritten(before, plan, traced.region, policy, scope)
    device = device_for(place_of(before, traced.call.operands))
    device_name = "" if device.platform == "cpu" else str(device)
    origin = PlanSource(name, policy_data(policy), scope, str(policy.output or ""))
    plan = described(before, plan, origin, rewriter)
    return Inspection(before, plan, after, policy, scope, name, device_name)


@in_two_steps
def explain(
    fn: Callable[P, Any],
    policy: PolicyLike | None = None,
    *,
    profitability: str | None = None,
    target: Any = None,
    compiled: bool = True,
) -> AtArguments[P, Explanation]:
    """Explain what a policy changes, what stays in float32 and why, and how to change that.

    Args:
        fn: as for `inspect`.
        policy: as for `auto_mixed`.
        profitability: as for `inspect`.
        target: as for `inspect`.
        compiled: as for `inspect`.

    Returns:
        A function that takes arguments of `fn` (arrays or `jax.ShapeDtypeStruct`s) and returns an
        `Explanation`. Its text has the matrix products in low precision and in float32, what that
        saves, the three remedies that weigh most, and what is saved for the backward pass. Its
        `.all` lists each matrix product that stays in float32, with its reason and how to change
        it, rules that never matched, and all advice.

    Examples:
        >>> import jax.numpy as jnp
        >>> explanation = explain(lambda x: x @ x)(jnp.ones((4, 4)))
        >>> print(explanation.text(color=False).splitlines()[1].strip())
        1 of 1 matrix product runs in bfloat16: 100.0% of the FLOPs.
    """
    inspected = inspect(fn, policy, profitability=profitability, target=target, compiled=compiled)

    def explained(*args: Any, **kwargs: Any) -> Explanation:
        # The text contains the warnings.
        with quietly():
            inspection = inspected(*args, **kwargs)
        explanation = inspection.explain()
        if any(map(ir.is_differentiated, jax.tree.leaves((args, kwargs)))):
            notes = (*explanation.notes, _FROM_OUTSIDE)
            explanation = dataclasses.replace(explanation, notes=notes)
        return explanation

    return explained


def cast_floating(tree: Tree, dtype: Any, policy: PolicyLike | None = None) -> Tree:
    """Return a pytree with its floating arrays cast, as in Haliax; the original is unchanged.

    Args:
        tree: a pytree. Other leaves do not change (see `PrecisionPolicy.cast_to_param`).
        dtype: "param", "compute" or "output", for a format of the policy; or a format itself
            ("bf16", `jnp.float16`), which needs no policy.
        policy: by default that of the `use_policy` around the call. Without one the tree is
            returned unchanged. Inside an `auto_mixed` function "compute" is the 16-bit format of
            that function's matrix products, if it has one, and the others leave the tree alone.

    Raises:
        ValueError: for an unknown format or policy.

    Examples:
        >>> import jax.numpy as jnp
        >>> params = {"w": jnp.ones((2, 2)), "step": jnp.int32(3)}
        >>> cast_floating(params, "param")["w"].dtype
        dtype('float32')
        >>> with use_policy("p=bf16"):
        ...     low = cast_floating(params, "param")
        >>> low["w"].dtype, low["step"].dtype
        (dtype(bfloat16), dtype('int32'))
    """
    region = current()
    chosen = region.policy if policy is None else PrecisionPolicy.parse(policy)
    if chosen is None and dtype == "compute" and region.compute is not None:
        return cast_leaves(tree, region.compute)
    if dtype in ("param", "compute", "output"):
        if chosen is None:
            return tree
        casts = {
            "param": chosen.cast_to_param,
            "compute": chosen.cast_to_compute,
            "output": chosen.cast_to_output,
        }
        return casts[dtype](tree)
    if precision_named(dtype) is None:
        legal = ", ".join(repr(str(precision)) for precision in FORMATS)
        raise ValueError(
            f"cast_floating(dtype={dtype!r}): legal are 'param', 'compute', 'output', and the "
            f"formats {legal}, also as dtypes"
        )
    return cast_leaves(tree, Precision.parse_format(dtype, "cast_floating(dtype)"))


def in_compute_dtype(fn: Callable[P, R]) -> Callable[P, R]:
    """Run a function that takes only 16-bit arrays, such as a flash-attention kernel.

    Inside an `auto_mixed` function the floating-point arguments are cast to the format of its
    matrix products, and the results back to float32, so that cotangents outside are float32. Where
    the policy lowers nothing, as AlwaysF32, and outside of `auto_mixed`, the function is called as
    it is.

    Args:
        fn: the function. It also works as a decorator.

    Examples:
        >>> import jax.numpy as jnp
        >>> @in_compute_dtype
        ... def kernel(x):
        ...     print(x.dtype)
        ...     return x * 2
        >>> auto_mixed(lambda x: kernel(x @ x), "AutoMixedBf16")(jnp.ones((2, 2))).dtype
        bfloat16
        dtype('float32')
    """

    @functools.wraps(fn)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        given = args, kwargs
        low_args, low_kwargs = cast_floating(given, "compute")
        out = fn(*low_args, **low_kwargs)
        pairs = zip(jax.tree.leaves(given), jax.tree.leaves((low_args, low_kwargs)), strict=True)
        is_cast = any(x is not y and x.dtype != y.dtype for x, y in pairs)
        return cast_leaves(out, Precision.F32) if is_cast else out

    return called


_FROM_OUTSIDE = (
    "a derivative is taken around this call: the products of its backward pass are low too, "
    "but what transposition adds is out of the planner's sight; auto_mixed(jax.grad(f)) shows it"
)
