"""A mixed function that was traced or lowered, and not run yet."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Hashable, Sequence
from typing import Any, ParamSpec, Protocol, TypeVar, cast, overload

import jax
import numpy as np

from precpass.jit.mixed import Mixed
from precpass.jit.program import Original
from precpass.jit.region import Region, current
from precpass.jit.traced import Traced
from precpass.policy.policy import PrecisionPolicy

__all__ = ["AtArguments", "Staged", "in_two_steps", "made_of_trace", "owner_of"]

P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)
F = TypeVar("F", bound=Callable[..., Any])


class AtArguments(Protocol[P, R_co]):
    """A callable that takes a function's arguments, or shapes in the place of its arrays."""

    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...
    @overload
    def __call__(self, *args: Any, **kwargs: Any) -> R_co: ...


def in_two_steps(report: F) -> F:
    """Make a report say what to write if it is used in one step instead of two.

    A report such as `inspect` takes a function, and returns a function of the arguments. Reading an
    attribute of the latter, printing it, or giving arguments to the first call is the same
    mistake.
    """
    name = report.__name__

    @functools.wraps(report)
    def first_step(fn: Any, *args: Any, **options: Any) -> Any:
        __tracebackhide__ = True
        asked = f"{name}({getattr(fn, '__name__', 'f')})"
        if any(isinstance(x, (jax.Array, np.ndarray)) for x in jax.tree.leaves(args)):
            raise TypeError(
                f"{name} takes the function's arguments in a second call: write {asked}(...) "
                f"with the arguments in the second parentheses"
            )
        return _WaitsForArguments(report(fn, *args, **options), asked)

    return cast(F, first_step)


class _WaitsForArguments:
    """A report on a function that was not given the function's arguments yet."""

    def __init__(self, call: Callable[..., Any], asked: str) -> None:
        self._call = call
        self._asked = asked

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        return self._call(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<{self._asked}: call it with the function's arguments, {self._asked}(...)>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(
            f"{self._asked} was not given the function's arguments yet: write "
            f"{self._asked}(...).{name}"
        )


class Staged:
    """A `jax.jit` function made from the traces of a `Mixed`.

    Args:
        mixed: the function.
        then: called with a trace and a call's additional arguments; returns the results of the
            jaxpr and anything else.
        key: unique to `then`; the compiled programs are cached under it, as those of `mixed` are.
        on_copies: whether a call must not change its arguments: modules and references are then
            copied, and nothing is donated.
    """

    def __init__(
        self,
        mixed: Mixed[..., Any],
        then: Callable[..., tuple[Sequence[Any], Any]],
        key: Hashable = None,
        *,
        on_copies: bool = False,
    ) -> None:
        self._mixed = mixed  # the program holds no reference to the function
        self._then = then
        self._on_copies = on_copies
        self._program = program = mixed._program  # pyright: ignore[reportPrivateUsage] -- its own module
        jitted: dict[tuple[Region, bool], Any] = {}
        self._jitted = jitted if key is None else program.staged.setdefault(key, jitted)

    def __call__(self, more: tuple[Any, ...], args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The function's output, and the other result of `then`."""
        __tracebackhide__ = True
        return self._run(lambda jitted: jitted, more, args, kwargs, self._on_copies)

    def shape(self, more: tuple[Any, ...], args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The shapes and dtypes of the output and of the other result; nothing runs."""
        return self._run(lambda jitted: jitted.eval_shape, more, args, kwargs, True)

    def _run(
        self, part: Callable[[Any], Any], more: Any, args: Any, kwargs: Any, on_copies: bool
    ) -> Any:
        program, region = self._program, current()

        def run_of(splits: bool) -> Any:
            run_part = part(self._of(region, splits))
            return lambda *inner, **inner_kwargs: run_part(more, *inner, **inner_kwargs)

        def finish(out: Any) -> Any:
            return program.adapter.finished(out[0]), out[1]

        return program.run(run_of, args, kwargs, finish, on_copies=on_copies)

    def _of(self, region: Region, splits: bool) -> Any:
        key, program = (region, splits), self._program
        if key not in self._jitted:
            policy = region.policy_of(program.policy, program.profitability)
            options = program.original.options(splits=splits)
            options = _shifted(options, donates=not self._on_copies)
            self._jitted[key] = _staged(program.original, region, policy, self._then, options)
        return self._jitted[key]


def _shifted(options: dict[str, Any], *, donates: bool) -> dict[str, Any]:
    """Options of `jax.jit` for a function with one more first argument and one more last result."""
    left = () if donates else ("donate_argnums", "donate_argnames")
    options = {name: option for name, option in options.items() if name not in left}
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


def made_of_trace(
    mixed: Mixed[..., Any], then: Callable[[Traced], Any], args: Any, kwargs: Any
) -> Any:
    """Traces a function once at some arguments, and returns what `then` makes of the trace."""
    program, region = mixed._program, current()  # pyright: ignore[reportPrivateUsage] -- its own module
    # the policy of the program is an equal one, which may have been saved with other costs
    policy = region.policy_of(mixed.policy, mixed.profitability)

    def output(out: Any) -> Any:
        return program.run(lambda _: lambda *_a, **_k: out, args, kwargs, on_copies=True)

    def traced(*inner: Any, **inner_kwargs: Any) -> Any:
        return then(program.original.trace(region, policy, inner, inner_kwargs, output))

    return program.run(lambda _: traced, args, kwargs, lambda made: made)


def owner_of(fn: Callable[..., Any]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A function, and its first argument if it is a `Mixed` that is bound to an object."""
    if isinstance(fn, types.MethodType) and isinstance(fn.__func__, Mixed):
        return fn.__func__, (fn.__self__,)
    return fn, ()


def _staged(
    original: Original,
    region: Region,
    policy: PrecisionPolicy | None,
    then: Callable[..., tuple[Sequence[Any], Any]],
    options: dict[str, Any],
) -> Any:
    # The jitted function refers neither to the program nor to the `Staged`, which refer to it.
    # JAX counts one name too few if a keyword has a parameter's name, so these are unusual.
    def traced(*_precpass_args: Any, **_precpass_kwargs: Any) -> Any:
        more, *args = _precpass_args
        trace = original.trace(region, policy, args, _precpass_kwargs)
        results, other = then(trace, *more)
        return trace.output(results), other

    traced.__name__ = original.name
    return jax.jit(traced, **options)
