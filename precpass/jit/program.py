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
    Declared,
    Static,
    arguments,
    dynamic_leaves,
    may_hold_numbers,
    results,
    unwrapped,
)
from precpass.jit.calls import Crossing, NotDirect, name_of
from precpass.jit.errors import note_source, note_static, remove_own_frames
from precpass.jit.layers import name_root_modules
from precpass.jit.own_arrays import with_own_arrays
from precpass.jit.region import Region, tracing, use_policy
from precpass.jit.traced import checked_plan, lowers_to_float16, rewritten
from precpass.policy.float16 import warn_of_unscaled_gradient
from precpass.policy.policy import PrecisionPolicy
from precpass.policy.precision import Precision
from precpass.policy.scopes import FIXED_SCOPE
from precpass.policy.warned import PrecisionWarning, user_stacklevel

__all__ = ["NEEDS_VALUES", "Program", "Written", "calls_users_code", "program_of"]

NEEDS_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
"""The errors of code that needs a tracer's value, which it has if jit is disabled."""


class Written:
    """The user's function, unchanged, to be traced.

    Attributes:
        fn: the function of arguments in the form that `precpass.jit.calls` passes.
        name: the user's name for it, for errors.
        splits: whether modules of flax nnx are split, as `crossing.inward` splits them.
        options: the options of `jax.jit` for it.
        jitted: its `jax.jit`; all policies share its traces.
        is_in_float16: whether a plan of it has had a matrix product in float16.
    """

    def __init__(
        self, fn: Callable[..., Any], crossing: Crossing, options: dict[str, Any], *, splits: bool
    ) -> None:
        self.fn = fn
        self.name, self.splits, self.options = crossing.name, splits, options
        self._declared = crossing.declared
        self.jitted: Any = jax.jit(fn, **crossing.declared.options)
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
        args, kwargs = arguments(self._declared, self.name, args, kwargs)
        leaves, put = dynamic_leaves(self._declared, args, kwargs, keeps_numbers=keeps_numbers)

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
                out = ir.run(call, new)
            except FloatingPointError as error:
                note_source(error)
                raise
            return jax.tree.unflatten(call.tree, out)

        return mixed


def _has_float64_rules(policy: PrecisionPolicy | None) -> bool:
    rules = () if policy is None else policy.rules
    return any(Precision.parse(rule.precision) is Precision.F64 for rule in rules)


class Program:
    """What all `Mixed` objects with one function, policy and options share.

    It holds no reference to the function, which belongs to the `Mixed` objects. So the function
    is freed with the last of them, with the arrays that it closes over and its compiled programs,
    and without the cycle collector. For the same reason the jitted functions refer to a `Written`
    and not to the program.

    Attributes:
        policy: its own policy, or None.
        profitability: its own, or None.
        crossing: how calls cross into jit and back.
        calls: region -> the function that a call there runs, if `crossing.direct`.
        staged: other functions made of the traces (`staged.Staged`), by their keys.

    Args:
        fn: the function.
        policy: its own policy, or None.
        profitability: its own, or None.
        options: those of `jax.jit`.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        policy: PrecisionPolicy | None,
        profitability: str | None,
        options: dict[str, Any],
    ) -> None:
        self.policy, self.profitability = policy, profitability
        self.crossing = Crossing(name_of(fn), Declared(fn, options), options.get("in_shardings"))
        self.calls: dict[Region, Callable[..., Any]] = {}
        self.staged: dict[Hashable, dict[tuple[Written, Region], Any]] = {}
        self._jitted: dict[tuple[Written, Region], Any] = {}
        self._differentiated = set[Region]()
        self._out_shardings = options.get("out_shardings")
        # Shardings of modules are dealt with when modules are split.
        self._options: dict[str, Any] = {
            k: nnx.without_modules(x) if k.endswith("shardings") and x is not None else x
            for k, x in options.items()
        }
        self._borrowed = _Borrowed(fn)
        self._whole = self._made(splits=False)
        # The result is thrown away. An option that jit does not know is thus an error at once.
        jax.jit(self._whole.fn, **self._options)

    def _made(self, *, splits: bool) -> Written:
        fn, options = _crossed(self._borrowed, self.crossing, splits), self._options
        if splits:
            fn = nnx.functional(fn, self.crossing.declared.map, self._out_shardings)
            if self._out_shardings is not None:
                options = {**options, "out_shardings": (None, options["out_shardings"])}
        return Written(fn, self.crossing, options, splits=splits)

    @functools.cached_property
    def _split(self) -> Written:
        return self._made(splits=True)

    def run(
        self,
        run_of: Callable[[Written], Callable[..., Any]],
        args: Any,
        kwargs: Any,
        finish: Callable[[bool, Any], Any],
        *,
        on_clones: bool = False,
    ) -> Any:
        """Makes a call in steps: arguments in the form that jit takes, the call, the results.

        Args:
            run_of: the function that takes these arguments.
            args: the positional arguments.
            kwargs: the others.
            finish: called with whether modules are split, and with the results.
            on_clones: whether clones of the modules and references take the updates.
        """
        __tracebackhide__ = True
        while True:
            direct, splits = self.crossing.direct, self.crossing.splits
            run = run_of(self._split if splits else self._whole)
            try:
                if direct and not on_clones:
                    return finish(splits, run(*args, **kwargs))
                inward = self.crossing.inward(splits, args, kwargs, on_clones)
                with inward as (inner, inner_kwargs):
                    return finish(splits, run(*inner, **inner_kwargs))
            except Exception as error:
                if self.ends(direct, error, args, kwargs):
                    raise

    def ends(self, was_direct: bool, error: Exception, args: Any, kwargs: Any) -> bool:
        """Whether an error ends a call, which then says what to do; else it is made again."""
        if self.crossing.changes(was_direct, error, args, kwargs):
            return False
        note_static(error, self.crossing.name)
        remove_own_frames(error)
        return True

    def jitted(self, written: Written, region: Region) -> Any:
        """The `jax.jit` function that a call in a region runs."""
        known = self._jitted.get((written, region))
        if known is None:
            resolved, fn = region.resolve(self.policy, self.profitability), written.fn
            if resolved.policy is not None:
                fn = written.rewritten(region, resolved.policy, resolved.scope)
            # If another thread was first, all share its function.
            known = self._jitted.setdefault((written, region), jax.jit(fn, **written.options))
        return known

    def call(self, written: Written, region: Region) -> Callable[..., Any]:
        """`jitted`, marked as fixed if an enclosing function must leave it alone."""
        jitted = self.jitted(written, region)
        return _marked(jitted) if region.resolve(self.policy).is_fixed else jitted

    def direct_call(self, region: Region) -> Callable[..., Any]:
        """The function that a direct call in a region runs, for `calls`."""
        return self.calls.setdefault(region, self.call(self._whole, region))

    def note_gradient(self, region: Region) -> None:
        """Warns of the gradient of a function that called this one, if it is one in float16.

        JAX transposes a program once. So the first gradient is warned of where that happens, and
        the gradients of other functions here. This is called where the result, or the first of
        several, is being differentiated.
        """
        policy = region.resolve(self.policy).policy
        if policy is not None and policy.low is Precision.F16 and self._whole.is_in_float16:
            if region in self._differentiated:
                warn_of_unscaled_gradient(only_by_grad=True)
            self._differentiated.add(region)

    def clear_cache(self) -> None:
        """Forgets every trace and compiled program."""
        written = [self._whole, *([self._split] if "_split" in self.__dict__ else [])]
        for jitted in [*(one.jitted for one in written), *list(self._jitted.values())]:
            jitted.clear_cache()
        for cache in (self._jitted, self.calls, self.staged, self._differentiated):
            cache.clear()


_MOST = 64
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
        of_fn = _known.setdefault(fn, Recent(_MOST))
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


def _crossed(borrowed: _Borrowed, crossing: Crossing, splits: bool) -> Callable[..., Any]:
    """A function with arguments and results in the form of `precpass.jit.arguments`.

    Unless modules of flax nnx are split, it refuses them among its arguments and results.
    """

    def refuse_modules(x: Any, _name: str) -> None:
        if not splits and nnx.has_nodes(x):
            raise NotDirect(splits=True)

    def crossed(*args: Any, **kwargs: Any) -> Any:
        crossing.declared.map(refuse_modules, args, kwargs)
        if crossing.direct and may_hold_numbers((args, kwargs)):
            raise NotDirect(splits=False)
        args, kwargs = crossing.declared.map(
            lambda x, _: unwrapped(x), args, kwargs, static=_unwrapped_static
        )
        fn = borrowed.__wrapped__
        name_root_modules(fn, args, kwargs)
        out, passes_through = results(fn(*args, **kwargs), crossing.name)
        if passes_through:
            crossing.direct = False
        refuse_modules(out, "")
        return out

    # Its attributes are not copied, because they may hold arrays.
    functools.update_wrapper(crossed, borrowed.__wrapped__, updated=())
    crossed.__name__ = crossing.name
    vars(crossed)["__wrapped__"] = borrowed
    return crossed


def _unwrapped_static(x: Any) -> Any:
    return x.value if type(x) is Static else x


def _marked(jitted: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with jax.named_scope(FIXED_SCOPE):
            return jitted(*args, **kwargs)

    return call


def calls_users_code(code: types.CodeType) -> bool:
    """Whether a frame with this code is the one in which the user's function is called."""
    return code in _crossed.__code__.co_consts and code.co_name == "crossed"
