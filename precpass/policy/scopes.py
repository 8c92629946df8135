"""Name scopes: the user's names, the marks of JAX's transforms, and the marks of the pass.

JAX prints the name stack of a backward pass as `transpose(jvp(model))/head`, and a user may call
a scope `transpose(x)` too. To tell them apart, the parentheses in a user's name are replaced by
other characters until the name is shown or compared with what a user wrote.
"""

from __future__ import annotations

import functools
import re

from precpass.policy.precision import Precision

__all__ = [
    "FIXED_SCOPE",
    "as_written",
    "called_scope",
    "clean_scope",
    "escaped",
    "innermost_keep",
    "is_backward",
    "is_differentiated",
    "is_fixed",
    "keep_scope",
]

# of Unicode's private use area
_ESCAPES = str.maketrans("()", "\ue000\ue001")
_WRITTEN = str.maketrans("\ue000\ue001", "()")


def escaped(name: str) -> str:
    """A user's name for a scope, as it stands in a name stack.

    Examples:
        >>> "(" in escaped("transpose(x)"), as_written(escaped("transpose(x)"))
        (False, 'transpose(x)')
    """
    return name.translate(_ESCAPES)


def as_written(stack: str) -> str:
    """A name stack with the names that the user wrote."""
    return stack.translate(_WRITTEN)


_WRAPPED = re.compile(r"[^/()]+\(([^()]*)\)")


_KEEP = re.compile(r"precpass\.keep\[(\w+)\]")


@functools.lru_cache(maxsize=65536)
def clean_scope(stack: str) -> str:
    """A name stack without what JAX's transforms add to it, with names as the user wrote them.

    Examples:
        >>> clean_scope("transpose(jvp(model))/head/rematted_computation")
        'model/head'
    """
    previous = None
    while previous != stack:
        previous, stack = stack, _WRAPPED.sub(r"\1", stack)
    dropped = ("", "rematted_computation")
    return as_written("/".join(part for part in stack.split("/") if part not in dropped))


def is_backward(stack: str) -> bool:
    """Whether a name stack is one of a backward pass, as JAX's transposition marks it."""
    return "transpose(" in stack


def is_differentiated(stack: str) -> bool:
    """Whether a name stack is one of a function that JAX differentiated, in any mode."""
    return "jvp(" in stack or is_backward(stack)


def keep_scope(precision: Precision) -> str:
    """The name scope that marks a region kept in `precision`."""
    return f"precpass.keep[{precision}]"


@functools.lru_cache(maxsize=65536)
def innermost_keep(scope: str) -> Precision | None:
    """The precision of the innermost keep region in a scope."""
    regions = _KEEP.findall(scope)
    return Precision.parse(regions[-1]) if regions else None


def called_scope(path: str) -> str:
    """The name scope that marks a layer's call, by the path that reports have for it.

    Examples:
        >>> called_scope("model.blocks[i]")
        'precpass.called[model.blocks_i_]'
    """
    name = re.sub(r"[^\w.*]", "_", path)
    return f"precpass.called[{name}]"


FIXED_SCOPE = "precpass.fixed"
"""The name scope around the call of a function whose own policy was applied already."""


def is_fixed(scope: str) -> bool:
    """Whether a scope is inside such a call."""
    return FIXED_SCOPE in scope


@functools.lru_cache(maxsize=65536)
def join_scopes(outer: str, inner: str) -> str:
    """Two name stacks as one."""
    return f"{outer}/{inner}" if outer and inner else outer or inner
