"""Errors and warnings as a user sees them: with the frames and lines of the user's own code."""

from __future__ import annotations

import traceback
import types

import jax

from precpass.policy.warned import OWN_FOLDER, is_users

__all__ = ["note_source", "note_static", "remove_own_frames"]


def remove_own_frames(error: Exception) -> None:
    """Removes this package's frames from an error's traceback, as jit removes JAX's own.

    JAX removes its own frames, unless its `jax_traceback_filtering` is "off".
    """
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


def note_static(error: Exception, name: str) -> None:
    """Adds advice to JAX's error about static arguments that are traced.

    Args:
        error: an exception that a call raised.
        name: the function's.
    """
    is_of_tracer = "Non-hashable static arguments" in str(error) and "Tracer" in str(error)
    if not (isinstance(error, ValueError) and is_of_tracer):
        return
    head = "a function that jax.jit made with static arguments, "
    # Of nested calls the innermost is the one with the traced argument.
    if any(note.startswith(head) for note in getattr(error, "__notes__", ())):
        return
    error.add_note(
        f"{head}{name} or one that it calls, is given a traced one: declare it static to "
        f"auto_mixed too, auto_mixed({name}, static_argnums=...) or static_argnames=..., and give "
        "that to compare or inspect; or close over it"
    )
