"""A function under a policy, with one `jax.jit` function for each region that calls it."""

from __future__ import annotations

import contextlib
import functools
import types
import warnings
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax

from precpass import jaxpr as ir
from precpass.jaxpr.weak import Recent, WeakIdMap
from precpass.jit import nnx, region as regions
from precpass.jit.arguments import (
    Static,
    dynamic_leaves,
    holds_modules,
    results,
    unwrapped,
)
from precpass.jit.call import CallAdapter, note_source, shown_to_user
from precpass.jit.layers import name_root_modules
from precpass.jit.own_arrays import with_own_arrays
from precpass.jit.region import Region, tracing, use_policy
from precpass.jit.traced import Traced, lowers_to_float16
from precpass.policy.float16 import warn_of_unscaled_gradient
from precpass.policy.policy import PrecisionPolicy
from precpass.policy.precision import Precision
from precpass.policy.scopes import FIXED_SCOPE
from precpass.policy.warned import PrecisionWarning, user_stacklevel

__all__ = ["NEEDS_VALUES", "Original", "Program", "calls_users_code", "program_of"]

NEEDS_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
"""The errors of code that needs a tracer's value, which it has if jit is disabled."""


class Original:
    """The user's function, unchanged, to be traced.

    Attributes:
        fn: the function of arguments in the form that `CallAdapter.prepared` gives.
        name: the user's name for it, for errors.
        jitted: its `jax.jit`; all policies share its traces.
        is_in_float16: whether a plan of it has had a matrix product in float16.
    """

    def __init__(
        self, fn: Callable[..., Any], adapter: CallAdapter, options: dict[str, Any]
    ) -> None:
        self.fn, self.name = fn, adapter.name
        self._declared, self._options = adapter.declared, options
        self.jitted: Any = jax.jit(fn, **adapter.declared.options)
        self.is_in_float16 = False

    def options(self, *, splits: bool) -> dict[str, Any]:
        """The options of `jax.jit` for it, if it is called with modules split or without."""
        out = self._options.get("out_shardings")
        if not splits or out is None:
            return self._options
        return {**self._options, "out_shardings": nnx.Updated(None, out)}

    def trace(
        self,
        region: Region,
        policy: PrecisionPolicy | None,
        args: Any,
        kwargs: Any,
        finish: Callable[[Any], Any] = lambda out: out,
        *,
        keeps_numbers: bool = False,
    ) -> Traced:
        """The call, traced in a region for a policy; `finish` makes the output of its results.

        If it `keeps_numbers`, Python's numbers keep their values.
        """
        leaves, put = dynamic_leaves(
            self._declared, self.name, args, kwargs, keeps_numbers=keeps_numbers
        )

        def called(fn: Callable[..., Any], *values: Any) -> Any:
            put_args, put_kwargs = put(values)
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
            jaxpr = ir.dequantized_inside(traced.jaxpr)
            if policy is not None and policy.parameters.is_low:
                jaxpr = ir.with_promoted_operands(jaxpr)
        call = traced._replace(jaxpr=jaxpr)
        return Traced(call, self.name, region, policy, finish)

    def _note_exact_constants(self, traced: ir.Call, called: Any, leaves: Sequence[Any]) -> None:
        """Notes what the constants of a program with a float64 region were before rounding."""
        wide, arrays = None, []
        # whatever the user's code raises, `exact` then does not know its constants
        with use_policy(None), jax.enable_x64(True), contextlib.suppress(Exception):
            fn, arrays = with_own_arrays(self.fn)
            wide = ir.trace(functools.partial(called, fn), *map(ir.with_float64, leaves))
        ir.note_exact(traced.jaxpr, wide, arrays)

    def rewritten(self, region: Region, policy: PrecisionPolicy) -> Callable[..., Any]:
        """The function under a policy; when it is traced, it is planned and rewritten."""

        @functools.wraps(self.fn)
        def mixed(*args: Any, **kwargs: Any) -> Any:
            # Python's numbers are tracers here, unless jit is disabled or NaNs are looked for.
            try:
                traced = self.trace(region, policy, args, kwargs, keeps_numbers=True)
            except NEEDS_VALUES as error:
                if not ir.jit_is_disabled():
                    raise
                text = f"{self.name} runs as written: jit is disabled, and it needs values ({{}})"
                reason = str(error).partition("\n")[0]
                warnings.warn(text.format(reason), PrecisionWarning, stacklevel=user_stacklevel())
                return self.fn(*args, **kwargs)
            plan = traced.checked_plan(policy)
            self.is_in_float16 |= lowers_to_float16(plan)
            new = traced.rewritten(plan, policy)
            try:
                return traced.output(ir.run(traced.call, new))
            except FloatingPointError as error:
                note_source(error)
                raise

        return mixed


def _has_float64_rules(policy: PrecisionPolicy | None) -> bool:
    rules = () if policy is None else policy.rules
    return any(Precision.parse(rule.precision) is Precision.F64 for rule in rules)


class Program:
    """What all `Mixed` objects with one function, policy and options share.

    It holds no reference to the function, which belongs to the `Mixed` objects. So the function
    is freed with the last of them, with the arrays that it closes over and its compiled programs,
    and without the cycle collector. For the same reason the jitted functions refer to a `Original`
    and not to the program.

    Attributes:
        policy, profitability: its own, or None.
        adapter: how calls cross into jit and back.
        original: the function as it was written.
        calls: region -> the function that a call there runs, if `adapter.direct`.
        staged: other functions made of the traces (`staged.Staged`), by their keys.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        policy: PrecisionPolicy | None,
        profitability: str | None,
        options: dict[str, Any],
    ) -> None:
        self.policy, self.profitability = policy, profitability
        self.adapter = CallAdapter(fn, options)
        self.calls: dict[Region, Callable[..., Any]] = {}
        self.staged: dict[Hashable, dict[tuple[Region, bool], Any]] = {}
        self._jitted: dict[tuple[Region, bool], Any] = {}
        self._differentiated = set[Region]()
        crossed = _crossed(_Borrowed(fn), self.adapter, options.get("out_shardings"))
        # Shardings of modules are dealt with when modules are split.
        own_options: dict[str, Any] = {
            k: nnx.without_modules(x) if k.endswith("shardings") and x is not None else x
            for k, x in options.items()
        }
        self.original = Original(crossed, self.adapter, own_options)
        # The result is thrown away. An option that jit does not know is thus an error at once.
        jax.jit(crossed, **own_options)

    def run(
        self,
        run_of: Callable[[bool], Callable[..., Any]],
        args: Any,
        kwargs: Any,
        finish: Callable[[Any], Any] | None = None,
        *,
        on_copies: bool = False,
    ) -> Any:
        """Makes a call: prepares its arguments, makes it, and finishes its results.

        Args:
            run_of: gives the jitted function, by whether modules are split.
            args: the positional arguments.
            kwargs: the others.
            finish: called with the results; by default it gives what the caller gets.
            on_copies: whether copies of the modules and references take the updates.
        """
        __tracebackhide__ = True
        finish = finish or self.adapter.finished
        try:
            with self.adapter.prepared(args, kwargs, on_copies=on_copies) as (inner, named, splits):
                return finish(run_of(splits)(*inner, **named))
        except Exception as error:
            shown_to_user(error, self.adapter.name)
            raise

    def ends(self, error: Exception, args: Any, kwargs: Any) -> bool:
        """Whether an error ends a direct call; else jit refused arguments that need steps."""
        refused = isinstance(error, (TypeError, ValueError))
        if refused and self.adapter.needs_steps(args, kwargs):
            return False
        shown_to_user(error, self.adapter.name)
        return True

    def jitted(self, region: Region, *, splits: bool) -> Any:
        """The `jax.jit` function that a call in a region runs."""
        known = self._jitted.get((region, splits))
        if known is None:
            original = self.original
            policy = region.policy_of(self.policy, self.profitability)
            fn = original.fn if policy is None else original.rewritten(region, policy)
            jitted = jax.jit(fn, **original.options(splits=splits))
            # If another thread was first, all share its function.
            known = self._jitted.setdefault((region, splits), jitted)
        return known

    def call(self, region: Region, *, splits: bool) -> Callable[..., Any]:
        """`jitted`, marked as fixed if an enclosing function must leave it alone."""
        jitted = self.jitted(region, splits=splits)
        if not region.fixes(self.policy):
            return jitted

        def marked(*args: Any, **kwargs: Any) -> Any:
            with jax.named_scope(FIXED_SCOPE):
                return jitted(*args, **kwargs)

        return marked

    def direct_call(self, region: Region) -> Callable[..., Any]:
        """The function that a direct call in a region runs, for `calls`."""
        return self.calls.setdefault(region, self.call(region, splits=False))

    def note_gradient(self, region: Region) -> None:
        """Warns of the gradient of a function that called this one, if it is one in float16.

        JAX transposes a program once. So the first gradient is warned of where that happens, and
        the gradients of other functions here. This is called where the result, or the first of
        several, is being differentiated.
        """
        policy = region.policy_of(self.policy)
        if policy is not None and policy.low is Precision.F16 and self.original.is_in_float16:
            if region in self._differentiated:
                warn_of_unscaled_gradient(only_by_grad=True)
            self._differentiated.add(region)

    def clear_cache(self) -> None:
        """Forgets every trace and compiled program."""
        for jitted in [self.original.jitted, *self._jitted.values()]:
            jitted.clear_cache()
        for cache in (self._jitted, self.calls, self.staged, self._differentiated):
            cache.clear()


_MOST_POLICIES = 64
"""The most policies and sets of options that are cached for a function. A search that tries one
policy after the other leaves no more programs behind."""
_known = WeakIdMap[Recent[Program]]()


def program_of(
    fn: Callable[..., Any],
    policy: PrecisionPolicy | None,
    profitability: str | None,
    options: dict[str, Any],
) -> Program:
    """The program of a function; equal arguments give the same object while the function lives."""

    def make() -> Program:
        return Program(fn, policy, profitability, options)

    leaves, tree = jax.tree.flatten(options)
    # what equal policies may print otherwise
    printed = policy and (policy.title, *(rule.evidence for rule in policy.rules))
    key = (policy, printed, profitability, tree, *((type(x), x) for x in leaves))
    try:
        hash(key)
        of_fn = _known.setdefault(fn, Recent(_MOST_POLICIES))
    except TypeError:  # unhashable options, or an object that takes no weak reference
        return make()
    return of_fn.get(key, make)


# ---------------------------------------------------------------- the function that jit calls


class _Borrowed:
    """A callable for a function, without a strong reference to it.

    JAX reads a function's signature and line, which it finds through `__wrapped__`.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        try:
            self._fn: Callable[[], Any] = weakref.ref(fn)
        except TypeError:  # it takes no weak reference, so its programs are not cached
            self._fn = lambda: fn

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        fn = self._fn()
        if fn is None:
            raise ReferenceError("a program is traced after its function has gone")
        return fn


def _crossed(borrowed: _Borrowed, adapter: CallAdapter, out_shardings: Any) -> Callable[..., Any]:
    """The user's function, with arguments and results in the form in which they cross into jit.

    It refuses modules that jit took apart, whose numbers it has traced.
    """
    declared = adapter.declared

    def crossed(*args: Any, **kwargs: Any) -> Any:
        if adapter.direct and holds_modules(declared.each(args, kwargs)):
            raise TypeError("jit took a module apart, and would trace its numbers")
        return nnx.on_merged(whole, declared.map, out_shardings, args, kwargs)

    def written(x: Any) -> Any:
        return x.value if type(x) is Static else x

    def whole(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = declared.map(lambda x, _: unwrapped(x), args, kwargs, static=written)
        fn = borrowed.__wrapped__
        name_root_modules(fn, args, kwargs)
        out, passes_through = results(fn(*args, **kwargs), adapter.name)
        if passes_through or nnx.has_nodes(out):
            adapter.direct = False
        return out

    # Its attributes are not copied, because they may hold arrays.
    functools.update_wrapper(crossed, borrowed.__wrapped__, updated=())
    crossed.__name__ = adapter.name
    vars(crossed)["__wrapped__"] = borrowed
    return crossed


def calls_users_code(code: types.CodeType) -> bool:
    """Whether a frame with this code is the one in which the user's function is called."""
    return code in _crossed.__code__.co_consts and code.co_name == "whole"
