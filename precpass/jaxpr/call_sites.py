"""The calls of layers around an equation: the classes and names of a model's modules.

flax's nnx and equinox open no name scopes, but JAX records the Python calls in which an equation
was made, down to the instruction. A call of a class's `__call__` is one of a layer, and the
expression at the place of the call has its name: `self.attention(x)` calls `attention`.
"""

from __future__ import annotations

import ast
import functools
import itertools
import linecache
import re
import textwrap
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any, NamedTuple

from precpass.jaxpr.reading import is_foreign, is_own
from precpass.jaxpr.types import Eqn

__all__ = ["Made", "called_path", "made_in"]


class Made(NamedTuple):
    """Where an equation was made.

    Attributes:
        layers: the layers whose calls are around it, outermost first, as "name: Class", or
            "Class" where the calling expression has no name.
        step: what the innermost of these, or the user's function, called to make the equation, such
            as "gelu"; "" for an operator.
        has_scopes: whether a library that opens a name scope for each layer made it.
        key: equal for equations that one instruction of the innermost layer made, or of the
            user's function outside layers.
        calls: all calls around it; equal for equations that the same lines made, such as those
            of a layer's two instances that are called in a Python loop.
    """

    layers: tuple[str, ...] = ()
    step: str = ""
    has_scopes: bool = False
    key: Any = None
    calls: Any = None


def made_in(eqn: Eqn) -> Made:
    """Where an equation was made; nothing is known of one that JAX recorded no calls for."""
    traceback = eqn.source_info.traceback
    return Made() if traceback is None else _made(traceback)


_OPENS_SCOPES = re.compile(
    r"[/\\](?:(?:flax[/\\]linen|haiku|keras[/\\]src[/\\]layers)[/\\]|"
    r"precpass[/\\]jit[/\\]layers\.py$)"
)
"""Files that open a name scope for each layer; ours does under a rule that names layers."""
_WRAPS = re.compile(
    r"[/\\](?:flax[/\\]nnx[/\\](?:transforms|graph|extract|object|pytreelib)|"
    r"equinox[/\\](?:_jit|_ad|_vmap_pmap|_module|_eval_shape|internal)|contextlib|functools)"
)
"""Files of libraries whose classes with a `__call__` wrap functions, and are no layers."""


@functools.lru_cache(maxsize=65536)
def _made(traceback: Any) -> Made:
    codes, at = traceback.raw_frames()
    calls = _traced(list(zip(codes, at, strict=True))[::-1])
    has_scopes = any(_OPENS_SCOPES.search(code.co_filename) for code, _ in calls)
    calls = _users(calls)
    layers, inside = _layers(calls)
    step = called_name(_expression(*calls[inside]), short=True) if calls else ""
    key = tuple(
        (code.co_filename, code.co_firstlineno, place) for code, place in calls[: inside + 1]
    )
    return Made(tuple(layers), step, has_scopes, key, traceback)


def called_path(caller: FrameType | None, callee: CodeType) -> str:
    """The path of a layer that is being called, as reports have it: "model.blocks[i].up".

    Args:
        caller: the frame that calls it.
        callee: the code of its `__call__`.
    """
    calls = [(callee, 0)]
    while caller is not None:
        calls.append((caller.f_code, caller.f_lasti))
        caller = caller.f_back
    layers, _ = _layers(_users(_traced(calls[::-1])))
    return ".".join(layer.partition(": ")[0] for layer in layers)


_Call = tuple[CodeType, int]
"""The code of a function, and the instruction at which it stands."""


def _traced(calls: list[_Call]) -> list[_Call]:
    """The calls, outermost first, inside of the one by which this package traces a function."""
    own = (i for i, (code, _) in enumerate(calls) if is_own(code.co_filename))
    return calls[next(own, 0) :]


def _users(calls: list[_Call]) -> list[_Call]:
    """The calls of functions that neither are JAX's or this package's nor wrap others."""
    files = [(call, call[0].co_filename) for call in calls]
    return [call for call, file in files if not (is_foreign(file) or _WRAPS.search(file))]


def _layers(calls: list[_Call]) -> tuple[list[str], int]:
    """The layers among calls, as `Made` has them, and the place of the innermost one."""
    layers: list[str] = []
    inside = 0
    for i, ((caller, place), (code, _)) in enumerate(itertools.pairwise([*calls[:1], *calls])):
        if (module := _module_of(code)) is not None:
            name = called_name(_expression(caller, place)) if i else ""
            layers.append(f"{name}: {module}" if name else module)
            inside = i
    return layers, inside


def _module_of(code: CodeType) -> str | None:
    """The class whose `__call__` this is; None for any other function and for a private class."""
    match = re.search(r"(?:^|\.)([A-Za-z]\w*)\.__call__$", code.co_qualname)
    return match[1] if match else None


@functools.lru_cache(maxsize=4096)
def _expression(code: CodeType, place: int) -> ast.expr | None:
    """The expression that an instruction belongs to."""
    spot = next(itertools.islice(code.co_positions(), place // 2, None), None)
    if spot is None or None in spot:
        return None
    first, last, start, end = spot
    assert first is not None and last is not None
    lines = [linecache.getline(code.co_filename, n).encode() for n in range(first, last + 1)]
    if not all(lines):
        return None
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][start:]
    text = textwrap.dedent(b"".join(lines).decode(errors="replace")).strip()
    try:
        return ast.parse(f"({text})", mode="eval").body
    except SyntaxError:
        return None


def called_name(expression: ast.expr | None, *, short: bool = False) -> str:
    """What a call's expression calls, without `self`; "" for what is no call.

    Args:
        expression: the expression.
        short: whether the last part of a dotted name suffices.

    Examples:
        >>> called_name(ast.parse("self.layers[i](x, key=None)", mode="eval").body)
        'layers[i]'
        >>> called_name(ast.parse("jax.nn.gelu(x)", mode="eval").body, short=True)
        'gelu'
        >>> called_name(ast.parse("x + y", mode="eval").body)
        ''
    """
    if not isinstance(expression, ast.Call):
        return ""
    name = ".".join(_parts(expression.func)).removeprefix("self.")
    return name.rpartition(".")[2] if short else name


def _parts(callee: ast.expr) -> Iterator[str]:
    if isinstance(callee, ast.Attribute):
        yield from _parts(callee.value)
        yield callee.attr
    elif isinstance(callee, ast.Call):
        # jax.vmap(self.layer)(x) calls the layer
        inner = callee.args[0] if callee.args else callee.func
        yield from _parts(inner)
    elif isinstance(callee, ast.Name | ast.Subscript):
        yield ast.unparse(callee).removeprefix("self.")
