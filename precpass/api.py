"""What a user calls: `auto_mixed` and `inspect`, with `use_policy` and `keep` from `context`."""

from __future__ import annotations

import dataclasses
import functools
import sys
import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any, overload

import jax

from precpass import calling, context, stateful
from precpass import jaxpr as ir
from precpass.context import keep, use_policy
from precpass.describe import described
from precpass.inspection import Inspection
from precpass.leaves import Declared, results, unwrapped
from precpass.planfile import policy_text
from precpass.planner import unchanged_plan
from precpass.policy import PrecisionPolicy, PrecisionWarning
from precpass.program import Program, Traced, rewritten
from precpass.site import Origin
from precpass.view.explain import Explanation

__all__ = [
    "Mixed",
    "auto_mixed",
    "explain",
    "inspect",
    "keep",
    "owner_of",
    "trace_of",
    "use_policy",
]


class Mixed:
    """A function under a policy; calling it is calling `jax.jit` of the rewritten function.

    Attributes:
        policy: its own policy, or None for the default in force when it is called.
        jit_options: those of `jax.jit`.
    """

    def __init__(
        self, fn: Callable[..., Any], policy: PrecisionPolicy | None, jit_options: dict[str, Any]
    ) -> None:
        # an object's own attributes could hide those of this class
        own = ("__dict__",) if isinstance(fn, types.FunctionType) else ()
        functools.update_wrapper(self, fn, updated=own)
        self.__wrapped__ = fn
        self.policy = policy
        self.jit_options = jit_options
        name, declared = calling.name_of(fn), Declared(fn, jit_options)
        self._crossing = crossing = calling.Crossing(name, declared)
        self._program = Program(_crossed(fn, crossing, False), name, declared, jit_options, policy)
        self._calls: dict[context.Region, Callable[..., Any]] = {}

    @functools.cached_property
    def _stateful(self) -> Program:
        """The program whose modules are split."""
        name, declared = self._crossing.name, self._crossing.declared
        fn = stateful.functional(_crossed(self.__wrapped__, self._crossing, True), declared.map)
        options = dict(self.jit_options)
        if options.get("out_shardings") is not None:
            options["out_shardings"] = (None, options["out_shardings"])
        return Program(fn, name, declared, options, self.policy)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The results of the wrapped function in the policy's precisions."""
        __tracebackhide__ = True
        # Every layer that takes *args copies them, and a name that a lambda shares is slower to
        # read: no other Python function runs here, and all that is rare is in another one.
        region, crossing = context.region_of_call(), self._crossing
        if crossing.direct:
            try:
                call = self._calls.get(region)
                if call is None:
                    call = self._calls.setdefault(region, self._program.call(region))
                out = call(*args, **kwargs) if kwargs else call(*args)
            except context.Strayed:
                pass
            except Exception as error:
                if not crossing.changes(True, error, args, kwargs):
                    calling.remove_own_frames(error)
                    raise
            else:
                return out if crossing.direct else unwrapped(out)
        return self._call_in_steps(args, kwargs)

    def _call_in_steps(self, args: Any, kwargs: Any) -> Any:
        __tracebackhide__ = True
        region = context.current()

        def run_of(program: Program) -> Any:
            return program.call(region)

        return self._run(run_of, args, kwargs, self._crossing.outward)

    def _run(
        self,
        run_of: Callable[[Program], Callable[..., Any]],
        args: Any,
        kwargs: Any,
        finish: Callable[[bool, Any], Any],
        *,
        on_clones: bool = False,
    ) -> Any:
        __tracebackhide__ = True
        while True:
            direct, splits = self._crossing.direct, self._crossing.splits
            run = run_of(self._stateful if splits else self._program)
            try:
                if direct:
                    return finish(splits, run(*args, **kwargs))
                inward = self._crossing.inward(splits, args, kwargs, on_clones)
                with inward as (inner, inner_kwargs):
                    return finish(splits, run(*inner, **inner_kwargs))
            except Exception as error:
                if not self._crossing.changes(direct, error, args, kwargs):
                    calling.remove_own_frames(error)
                    raise

    def _staged(self, name: str, args: Any, kwargs: Any) -> Any:
        __tracebackhide__ = True
        region = context.current()

        def run_of(program: Program) -> Any:
            return getattr(program.jitted(region), name)

        def finish(splits: bool, stage: Any) -> Any:
            if self._crossing.direct:
                return stage
            return calling.Stage(stage, self._crossing, splits)

        return self._run(run_of, args, kwargs, finish)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """As `jax.jit(f).lower`."""
        __tracebackhide__ = True
        return self._staged("lower", args, kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """As `jax.jit(f).trace`."""
        __tracebackhide__ = True
        return self._staged("trace", args, kwargs)

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """As `jax.jit(f).eval_shape`."""
        __tracebackhide__ = True
        region = context.current()

        def run_of(program: Program) -> Any:
            return program.jitted(region).eval_shape

        return self._run(run_of, args, kwargs, self._crossing.outward, on_clones=True)

    def _trace(self, then: Callable[[Traced], Any], args: Any, kwargs: Any) -> Any:
        """What `then` makes of one trace of the function."""
        region = context.current()
        resolved = region.resolve(self.policy)
        policy, scope = resolved.policy, resolved.scope

        def run_of(program: Program) -> Any:
            def traced(*inner: Any, **inner_kwargs: Any) -> Any:
                call = program.trace(region, inner, inner_kwargs, keeps_numbers=False)

                def output(results: Sequence[Any]) -> Any:
                    def same(*_: Any, **__: Any) -> Any:
                        return jax.tree.unflatten(call.tree, results)

                    outward = self._crossing.outward
                    return self._run(lambda _: same, args, kwargs, outward, on_clones=True)

                return then(Traced(call, program.name, region, policy, scope, output))

            return traced

        return self._run(run_of, args, kwargs, lambda _, out: out)

    def clear_cache(self) -> None:
        """Forgets every trace and compiled program."""
        self._program.clear_cache()
        self._calls.clear()
        if "_stateful" in self.__dict__:
            self._stateful.clear_cache()

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __reduce__(self) -> str | tuple[Any, ...]:
        name = self.__dict__.get("__qualname__", "")
        found: Any = sys.modules.get(self.__module__)
        for part in name.split("."):
            found = getattr(found, part, None)
        if found is self:
            return name
        return Mixed, (self.__wrapped__, self.policy, self.jit_options)

    def __repr__(self) -> str:
        return f"<auto_mixed {_shown(self.__wrapped__)}, policy={self.policy or 'default'!r}>"


def _crossed(
    fn: Callable[..., Any], crossing: calling.Crossing, takes_modules: bool
) -> Callable[..., Any]:
    """`fn` of arguments and with results as `precpass.leaves` hands them on."""

    @functools.wraps(fn)
    def crossed(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = crossing.declared.map(lambda x, _: unwrapped(x), args, kwargs)
        out, hands_through = results(fn(*args, **kwargs), crossing.name)
        if hands_through:
            crossing.direct = False
        return out

    crossed.__name__ = crossing.name
    if takes_modules:
        return crossed

    @functools.wraps(crossed)
    def without_modules(*args: Any, **kwargs: Any) -> Any:
        def refuse(x: Any, _name: str) -> None:
            if stateful.has_nodes(x):
                raise stateful.HoldsState

        crossing.declared.map(refuse, args, kwargs)
        out = crossed(*args, **kwargs)
        refuse(out, "")
        return out

    return without_modules


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

    A call is that of `jax.jit`, and takes more: a leaf that jit refuses (a string,
    a function, a field of a module) is static, hashed and compared like an argument
    of `static_argnums`; a result that is no array is handed through as it was when
    the function was traced; modules of flax nnx are updated as by `nnx.jit`.

    Inside another `auto_mixed` function, one with a policy of its own keeps it, and
    one without leaves the decision to the outer one. The options of a function that
    `jax.jit` made stay with its own, inner call: give `donate_argnums`,
    `static_argnums` and shardings to `auto_mixed`.

    Args:
        fn: the function; without it a decorator is returned. For one that
            `auto_mixed` made, the new policy and options replace its own.
        policy: a policy, a preset's name, or a string such as "p=f32,c=bf16,o=f32".
            Without one, that of `use_policy`, else AutoMixedBf16.
        jit_options: those of `jax.jit` (`donate_argnums`, `static_argnums`, ...).

    Raises:
        TypeError: when `fn` is no function that can be traced (a coroutine or
            generator function, a staticmethod object), or, when it is traced, has no
            floating values.
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
    calling.check_function(fn)
    if not isinstance(fn, Mixed):
        return Mixed(fn, parsed, jit_options)
    if parsed in (None, fn.policy) and not jit_options:
        return fn
    return Mixed(fn.__wrapped__, parsed or fn.policy, {**fn.jit_options, **jit_options})


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
    return trace_of(fn, policy, _inspection)


def trace_of(
    fn: Callable[..., Any],
    policy: PrecisionPolicy | str | None,
    then: Callable[[Traced], Any],
) -> Callable[..., Any]:
    """A function of arguments of `fn` that gives what `then` makes of its trace.

    Args:
        fn: as for `inspect`.
        policy: as for `auto_mixed`.
        then: what is done with each trace; an error in it counts as one of the call.
    """
    fn, owner = owner_of(fn)
    mixed = auto_mixed(fn, policy=policy)

    def called(*args: Any, **kwargs: Any) -> Any:
        return mixed._trace(then, (*owner, *args), kwargs)  # pyright: ignore[reportPrivateUsage]

    return called


def _inspection(traced: Traced) -> Inspection:
    before, policy, scope, name = traced.call.jaxpr, traced.policy, traced.scope, traced.name
    if policy is None:
        plan = described(before, unchanged_plan(before), Origin(name, "", scope))
        return Inspection(before, plan, before, None, scope, name)
    plan = traced.checked_plan(policy)
    after, rewriter = rewritten(before, plan, traced.region, policy, scope)
    origin = Origin(name, policy_text(policy), scope, str(policy.output or ""))
    plan = described(before, plan, origin, rewriter)
    return Inspection(before, plan, after, policy, scope, name)


def explain(
    fn: Callable[..., Any], policy: PrecisionPolicy | str | None = None
) -> Callable[..., Explanation]:
    """What a policy does to a function, what it leaves wide and why, and what to do about it.

    Args:
        fn: as for `inspect`.
        policy: as for `auto_mixed`.

    Returns:
        A function that takes arguments of `fn` (arrays or `jax.ShapeDtypeStruct`s) and
        gives an `Explanation`, whose text has the verdict first: products low and left
        wide, bytes, casts, what is kept for the backward pass, the share of the FLOPs in
        low precision; then each product left wide, with its reason and how to change it,
        rules that never matched, and advice.

    Example:
        >>> import jax.numpy as jnp
        >>> explanation = explain(lambda x: x @ x)(jnp.ones((4, 4)))
        >>> print(explanation.text(color=False).splitlines()[1].strip())
        1 of 1 products low, 0 left wide; 100.0% of the FLOPs in low precision
    """
    inspected = inspect(fn, policy)

    def explained(*args: Any, **kwargs: Any) -> Explanation:
        with warnings.catch_warnings():
            # the text says it all
            warnings.simplefilter("ignore", PrecisionWarning)
            found = inspected(*args, **kwargs)
        explanation = found.explain()
        if any(map(ir.is_differentiated, jax.tree.leaves((args, kwargs)))):
            notes = (*explanation.notes, _FROM_OUTSIDE)
            explanation = dataclasses.replace(explanation, notes=notes)
        return explanation

    return explained


_FROM_OUTSIDE = (
    "a derivative is taken around this call: the products of its backward pass are low too, "
    "but what transposition adds is out of the planner's sight; auto_mixed(jax.grad(f)) shows it"
)


def owner_of(fn: Callable[..., Any]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A function, and the object that its first argument is where it is a bound `Mixed`."""
    if isinstance(fn, types.MethodType) and isinstance(fn.__func__, Mixed):
        return fn.__func__, (fn.__self__,)
    return fn, ()


def _shown(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__name__", None) or repr(fn)
