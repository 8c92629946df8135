"""A function under a policy, with one `jax.jit` function for each region that calls it."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax

from precpass import jaxpr as ir
from precpass.jit import region as regions
from precpass.jit.arguments import Declared, Static, arguments, dynamic_leaves
from precpass.jit.errors import note_source
from precpass.jit.own_arrays import with_own_arrays
from precpass.jit.region import Region, traced_in, tracing, use_policy
from precpass.jit.traced import checked_plan, lowers_to_float16, rewritten
from precpass.policy.float16 import warn_of_unscaled_gradient
from precpass.policy.policy import PrecisionPolicy
from precpass.policy.precision import Precision
from precpass.policy.scopes import FIXED_SCOPE
from precpass.policy.warned import PrecisionWarning, user_stacklevel

__all__ = ["NEEDS_VALUES", "Program", "Written"]


class Written:
    """The user's function, unchanged, to be traced.

    Attributes:
        fn: the function of arguments in the form that `precpass.jit.calls` passes.
        name: the user's name for it, for errors.
        declared: its static arguments.
        jitted: its `jax.jit`; all policies share its traces.
        is_in_float16: whether a plan of it has had a matrix product in float16.
    """

    def __init__(self, fn: Callable[..., Any], name: str, declared: Declared) -> None:
        self.fn = fn
        self.name = name
        self.declared = declared
        self.jitted: Any = jax.jit(fn, **declared.options)
        self.is_in_float16 = False

    def trace(
        self,
        region: Region,
        policy: PrecisionPolicy | None,
        args: Any,
        kwargs: Any,
        *,
        keeps_numbers: bool,
    ) -> ir.Call:
        """The traced call at some arguments.

        Args:
            region: where it is called.
            policy: what it is traced for.
            args: the positional arguments.
            kwargs: the others.
            keeps_numbers: whether Python's numbers keep their values.
        """
        args, kwargs = arguments(self.declared, self.name, args, kwargs)
        leaves, put = dynamic_leaves(self.declared, args, kwargs, keeps_numbers=keeps_numbers)

        def called(fn: Callable[..., Any], *values: Any) -> Any:
            # Inside a trace JAX compares a call's static arguments with themselves, by `==`.
            put_args, put_kwargs = self.declared.map(lambda x, _: x, *put(values), static=Static)
            return fn(*put_args, **put_kwargs)

        # Even if the user disabled jit, the plan is that of the program with its loops.
        # The jit of the call checks keys. Here one that is closed over is a nested jit's, and JAX
        # refuses these.
        unchecked = jax.debug_key_reuse(False)
        with tracing(region, policy), jax.disable_jit(False), unchecked:
            before = regions.float64_regions
            traced = ir.trace_call(functools.partial(called, self.jitted), leaves)
            asked = region.keep is Precision.F64 or regions.float64_regions > before
            if asked or _has_float64_rules(policy):
                self._note_exact_constants(traced, called, leaves)
            traced = traced._replace(jaxpr=ir.dequantized_inside(traced.jaxpr))
            if policy is None or not policy.parameters.is_low:
                return traced
            return traced._replace(jaxpr=ir.with_promoted_operands(traced.jaxpr))

    def _note_exact_constants(self, traced: ir.Call, called: Any, leaves: Sequence[Any]) -> None:
        """Notes what the constants of a program with a float64 region were before rounding."""
        wide, arrays = None, []
        # whatever the user's code raises, `exact` then does not know its constants
        with use_policy(None), jax.enable_x64(True), contextlib.suppress(Exception):
            fn, arrays = with_own_arrays(self.fn)
            wide = ir.trace(functools.partial(called, fn), *map(ir.with_float64, leaves))
        ir.note_exact(traced.jaxpr, wide, arrays)

    def rewritten(self, region: Region, policy: PrecisionPolicy, scope: str) -> Callable[..., Any]:
        """The function under a policy; when it is traced, it is planned and rewritten."""

        @functools.wraps(self.fn)
        def mixed(*args: Any, **kwargs: Any) -> Any:
            # Python's numbers are tracers here, unless jit is disabled or NaNs are looked for.
            try:
                call = self.trace(region, policy, args, kwargs, keeps_numbers=True)
            except NEEDS_VALUES as error:
                if not ir.jit_is_disabled():
                    raise
                text = f"{self.name} runs as written: jit is disabled, and it needs values ({{}})"
                reason = str(error).partition("\n")[0]
                warnings.warn(text.format(reason), PrecisionWarning, stacklevel=user_stacklevel())
                return self.fn(*args, **kwargs)
            plan = checked_plan(call, policy, scope, self.name)
            self.is_in_float16 |= lowers_to_float16(plan)
            new, _ = rewritten(call.jaxpr, plan, region, policy, scope)
            try:
                results = ir.run(call, new)
            except FloatingPointError as error:
                note_source(error)
                raise
            return jax.tree.unflatten(call.tree, results)

        return mixed


class Program:
    """A function with its `jax.jit` function in each region.

    The jitted functions refer to `written` and not to the program, to avoid a reference cycle.

    Attributes:
        written: the user's function.

    Args:
        fn: as for `Written`.
        name: as for `Written`.
        declared: as for `Written`.
        options: the options of `jax.jit`.
        policy: its own policy, or None.
        profitability: its own, or None.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        name: str,
        declared: Declared,
        options: dict[str, Any],
        policy: PrecisionPolicy | None,
        profitability: str | None = None,
    ) -> None:
        self.written = Written(fn, name, declared)
        self.options = options
        self.policy = policy
        self.profitability = profitability
        # The result is thrown away. An option that jit does not know is thus an error at once.
        jax.jit(fn, **options)
        self._jitted: dict[Region, Any] = {}
        self._calls: dict[Region, Callable[..., Any]] = {}
        self._differentiated = set[Region]()

    def note_gradient(self, region: Region) -> None:
        """Warns of the gradient of a function that called this one, if it is one in float16.

        JAX transposes a program once. So the first gradient is warned of where that happens, and
        the gradients of other functions here. This is called where the result, or the first of
        several, is being differentiated.
        """
        policy = region.resolve(self.policy).policy
        if policy is not None and policy.low is Precision.F16 and self.written.is_in_float16:
            if region in self._differentiated:
                warn_of_unscaled_gradient(only_by_grad=True)
            self._differentiated.add(region)

    def jitted(self, region: Region) -> Any:
        """The `jax.jit` function that a call in a region runs."""
        known = self._jitted.get(region)
        if known is None:
            resolved, fn = region.resolve(self.policy, self.profitability), self.written.fn
            if resolved.policy is not None:
                fn = self.written.rewritten(region, resolved.policy, resolved.scope)
            new = jax.jit(traced_in(region, fn), **self.options)
            # If another thread was first, all share its function.
            known = self._jitted.setdefault(region, new)
        return known

    def call(self, region: Region) -> Callable[..., Any]:
        """`jitted`, marked as fixed if an enclosing function must leave it alone."""
        known = self._calls.get(region)
        if known is None:
            jitted = self.jitted(region)
            fixed = region.resolve(self.policy).is_fixed
            known = self._calls.setdefault(region, _marked(jitted) if fixed else jitted)
        return known

    def clear_cache(self) -> None:
        """Forgets every trace and compiled program."""
        self.written.jitted.clear_cache()
        for jitted in list(self._jitted.values()):
            jitted.clear_cache()
        self._jitted.clear()
        self._calls.clear()
        self._differentiated.clear()

    def shifted_options(self, *, donates: bool = True) -> dict[str, Any]:
        """`options` for a function with one more first argument and one more last result.

        Args:
            donates: whether arguments are donated as `options` say; otherwise none is.
        """
        left = () if donates else ("donate_argnums", "donate_argnames")
        options = {name: option for name, option in self.options.items() if name not in left}
        for name in ("static_argnums", "donate_argnums"):
            option = options.get(name)
            if option is not None:
                each = (option,) if isinstance(option, int) else option
                options[name] = tuple(i + 1 if i >= 0 else i for i in each)
        if options.get("in_shardings") is not None:
            option = options["in_shardings"]
            options["in_shardings"] = (None, *(option if isinstance(option, tuple) else (option,)))
        if options.get("out_shardings") is not None:
            options["out_shardings"] = (options["out_shardings"], None)
        return options


NEEDS_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
"""The errors of code that needs a tracer's value, which it has if jit is disabled."""


def _marked(jitted: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with jax.named_scope(FIXED_SCOPE):
            return jitted(*args, **kwargs)

    return call


def _has_float64_rules(policy: PrecisionPolicy | None) -> bool:
    rules = () if policy is None else policy.rules
    return any(Precision.parse(rule.precision) is Precision.F64 for rule in rules)
