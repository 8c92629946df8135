"""How a call crosses into `jax.jit` and back: it is prepared, made, and finished."""

from __future__ import annotations

import contextlib
import traceback
import types
from collections.abc import Callable, Generator, Mapping
from typing import Any

import jax

from precpass.jit import nnx
from precpass.jit.arguments import Declared, arguments, copied, needs_steps, unwrapped
from precpass.jit.functions import name_of
from precpass.policy.warned import OWN_FOLDER, is_users

__all__ = ["CallAdapter", "Stage", "note_source", "shown_to_user"]


class CallAdapter:
    """How the calls of one function cross into jit and back: `prepared`, and then `finished`.

    Attributes:
        name: the user's name for the function, for errors.
        declared: its static arguments.
        direct: whether no call so far has needed steps around it.
    """

    def __init__(self, fn: Callable[..., Any], options: Mapping[str, Any]) -> None:
        self.name, self.declared = name_of(fn), Declared(fn, options)
        self._in_shardings = options.get("in_shardings")
        self.direct = True

    def needs_steps(self, args: Any, kwargs: Any) -> bool:
        """Whether arguments are to be prepared; those of later calls then are, too."""
        found = any(map(needs_steps, self.declared.each(args, kwargs)))
        self.direct = self.direct and not found
        return found

    @contextlib.contextmanager
    def prepared(
        self, args: Any, kwargs: Any, *, on_copies: bool = False
    ) -> Generator[tuple[Any, Any, bool]]:
        """A context, around a call, with the arguments as jit takes them, and if modules are split.

        With `on_copies`, copies of the modules and references take the updates.
        """
        if self.direct and not self.needs_steps(args, kwargs) and not on_copies:
            yield args, kwargs, False
            return
        args, kwargs = arguments(self.declared, self.name, args, kwargs)
        if on_copies:
            args, kwargs = self.declared.map(lambda x, _: copied(x, arrays=False), args, kwargs)
        given = self.declared.map, args, kwargs, self._in_shardings
        with nnx.split(*given, on_copies=on_copies) as inner:
            yield inner

    def finished(self, out: Any) -> Any:
        """The results in the form that the caller gets; modules are updated."""
        return unwrapped(nnx.updated(out))


class Stage:
    """A `Traced`, `Lowered` or `Compiled` of `jax.stages` with the adapter of the call itself."""

    def __init__(self, stage: Any, adapter: CallAdapter) -> None:
        self._stage = stage
        self._adapter = adapter

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._stage, name)
        if name in ("lower", "compile"):
            return lambda *args, **kwargs: Stage(value(*args, **kwargs), self._adapter)
        return unwrapped(value) if name == "out_info" else value

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """The results of the compiled program."""
        with self._adapter.prepared(args, kwargs) as (args, kwargs, _):
            return self._adapter.finished(self._stage(*args, **kwargs))

    def __repr__(self) -> str:
        return repr(self._stage)


# ---------------------------------------------------------------- errors


def shown_to_user(error: Exception, name: str) -> None:
    """Removes this package's frames from the traceback of an error in a call of `name`.

    JAX removes its own frames, unless its `jax_traceback_filtering` is "off".
    """
    _note_static(error, name)
    if jax.config.jax_traceback_filtering == "off":  # pyright: ignore[reportAttributeAccessIssue] -- dynamic
        return
    kept: list[types.TracebackType] = []
    trace = error.__traceback__
    while trace is not None:
        if not trace.tb_frame.f_code.co_filename.startswith(OWN_FOLDER):
            kept.append(trace)
        trace = trace.tb_next
    filtered = None
    for trace in reversed(kept):
        filtered = types.TracebackType(filtered, trace.tb_frame, trace.tb_lasti, trace.tb_lineno)
    error.__traceback__ = filtered


def note_source(error: FloatingPointError) -> None:
    """Notes the user's line on an error of `jax_debug_nans`.

    JAX runs the program again one operation at a time. It has the operation's line in the
    error's cause, which it drops on the way to the caller.
    """
    cause = error.__cause__
    frames = [] if cause is None else traceback.extract_tb(cause.__traceback__)
    users_frames = [f for f in frames if is_users(f.filename)]
    if users_frames:
        error.add_note(
            "The operation is from\n" + "".join(traceback.format_list(users_frames[-1:])).rstrip()
        )


def _note_static(error: Exception, name: str) -> None:
    """Adds advice to JAX's error about a jitted function's static arguments that are traced."""
    said = str(error) if isinstance(error, ValueError) else ""
    if "Non-hashable static arguments" not in said or "Tracer" not in said:
        return
    head = "a function that jax.jit made with static arguments, "
    # Of nested calls the innermost is the one with the traced argument.
    if not any(note.startswith(head) for note in getattr(error, "__notes__", ())):
        error.add_note(
            f"{head}{name} or one that it calls, is given a traced one: declare it static to "
            f"auto_mixed too, auto_mixed({name}, static_argnums=...) or static_argnames=..., and "
            "give that to compare or inspect; or close over it"
        )
