"""`Mixed`: a function under a policy, with the interface of a `jax.jit` function."""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable
from typing import Any, ClassVar, Concatenate, Generic, ParamSpec, TypeVar, overload

from precpass.devices.detect import committed_device, planned_for
from precpass.jaxpr import DIFFERENTIATED
from precpass.jit.call import Stage
from precpass.jit.program import program_of
from precpass.jit.region import current
from precpass.policy.policy import PrecisionPolicy

__all__ = ["Mixed"]


_REPORTS = ("inspect", "explain", "compare", "audit", "bisect", "monitor")
_OF_INSPECTIONS = ("diff", "draw", "plan", "before", "after")

P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)
First = TypeVar("First")
Rest = ParamSpec("Rest")


class Mixed(Generic[P, R_co]):
    """A function that runs under a policy. Call it like the function's `jax.jit`.

    Attributes:
        policy: its own policy; None for the default in force when it is called.
        profitability: its own; None for the policy's.
        jit_options: the options passed to `jax.jit`.
        stages: True: `trace` and `lower` return the same stages as those of `jax.jit`.
    """

    stages: ClassVar[bool] = True

    def __init__(
        self,
        fn: Callable[P, R_co],
        policy: PrecisionPolicy | None,
        jit_options: dict[str, Any],
        profitability: str | None = None,
    ) -> None:
        # Attributes of the wrapped function must not hide those of this class.
        own_attributes = ("__dict__",) if type(fn) is types.FunctionType else ()
        functools.update_wrapper(self, fn, updated=own_attributes)
        self.__wrapped__ = fn
        self.policy = policy
        self.profitability = profitability
        self.jit_options = jit_options
        self._program = program = program_of(fn, policy, profitability, jit_options)
        self._adapter, self._calls = program.adapter, program.calls

    @property
    def __signature__(self) -> inspect.Signature:
        """The wrapped function's signature, for callers that do not follow `__wrapped__`."""
        try:
            return inspect.signature(self.__wrapped__)
        except (ValueError, TypeError) as error:  # builtins may have none; `hasattr` expects this
            raise AttributeError(str(error)) from None

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Run the function under the policy; modules and references are updated in place."""
        __tracebackhide__ = True
        # This calls few other Python functions, because every layer that takes *args copies them,
        # and a variable that a lambda shares is slower to read. Rare cases are in other functions.
        region, adapter = current(), self._adapter
        if adapter.direct:
            try:
                call = self._calls.get(region)
                if call is None:
                    call = self._program.direct_call(region)
                out = call(*args, **kwargs) if kwargs else call(*args)
            except Exception as error:
                if self._program.ends(error, args, kwargs):
                    raise
            else:
                first: Any = out
                if type(first) is tuple and first:
                    first = first[0]
                if type(first).__name__ in DIFFERENTIATED:
                    self._program.note_gradient(region)
                return out if adapter.direct else adapter.finished(out)
        program, region = self._program, current()
        return program.run(lambda splits: program.call(region, splits=splits), args, kwargs)

    @property
    def in_shardings(self) -> Any:
        """The `in_shardings` given to `jax.jit`, or None."""
        return self.jit_options.get("in_shardings")

    def lower(self, /, *args: Any, **kwargs: Any) -> Any:
        """Trace and lower the function, like `jax.jit(f).lower`."""
        __tracebackhide__ = True
        return self._staged("lower", args, kwargs, self._stage)

    def trace(self, /, *args: Any, **kwargs: Any) -> Any:
        """Trace the function, like `jax.jit(f).trace`."""
        __tracebackhide__ = True
        return self._staged("trace", args, kwargs, self._stage)

    def eval_shape(self, /, *args: Any, **kwargs: Any) -> Any:
        """Return the shapes and dtypes of the output, like `jax.jit(f).eval_shape`."""
        __tracebackhide__ = True
        return self._staged("eval_shape", args, kwargs, on_copies=True)

    def _stage(self, stage: Any) -> Any:
        return stage if self._adapter.direct else Stage(stage, self._adapter)

    def _staged(self, name: str, args: Any, kwargs: Any, finish: Any = None, **options: Any) -> Any:
        __tracebackhide__ = True
        program, region = self._program, current()
        # In the trace the arguments are tracers, which have no device.
        with planned_for(committed_device((args, kwargs, self.in_shardings))):
            return program.run(
                lambda splits: getattr(program.jitted(region, splits=splits), name),
                args,
                kwargs,
                finish,
                **options,
            )

    def __getattr__(self, name: str) -> Any:
        if name in (*_REPORTS, *_OF_INSPECTIONS):
            wanted = f"{name}(f)(...)" if name in _REPORTS else f"inspect(f)(...).{name}"
            raise AttributeError(
                f"an auto_mixed function has no {name}: write precpass.{wanted}, "
                "with the function's arguments in the second parentheses"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def clear_cache(self) -> None:
        """Clear all cached traces and compiled programs."""
        self._program.clear_cache()

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> Mixed[P, R_co]: ...
    @overload
    def __get__(
        self: Mixed[Concatenate[First, Rest], R_co], instance: First, owner: type | None = None
    ) -> Callable[Rest, R_co]: ...
    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __reduce__(self) -> str | tuple[Any, ...]:
        name = self.__dict__.get("__qualname__", "")
        attribute: Any = sys.modules.get(self.__module__)
        for part in name.split("."):
            attribute = getattr(attribute, part, None)
        if attribute is self:
            return name
        return Mixed, (self.__wrapped__, self.policy, self.jit_options, self.profitability)

    def __repr__(self) -> str:
        policy = repr(self.policy or "default")
        if self.policy is not None and self.policy.alias:
            policy = policy.replace(self.policy.name, self.policy.title, 1)
        name = getattr(self.__wrapped__, "__name__", None) or repr(self.__wrapped__)
        return f"<auto_mixed {name}, policy={policy}>"
