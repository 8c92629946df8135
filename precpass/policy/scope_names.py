"""How the name of a user's scope is told from the marks that JAX's transforms put around it.

JAX prints the name stack of a backward pass as `transpose(jvp(model))/head`, and a user may call
a scope `transpose(x)` too. So name stacks have other characters in the place of the parentheses of
user's names, until they are shown or compared with what a user wrote.
"""

from __future__ import annotations

__all__ = ["as_written", "escaped"]

# of Unicode's private use area
_ESCAPES = str.maketrans("()", "\ue000\ue001")
_WRITTEN = str.maketrans("\ue000\ue001", "()")


def escaped(name: str) -> str:
    """A user's name for a scope, as it stands in a name stack.

    Example:
        >>> "(" in escaped("transpose(x)"), as_written(escaped("transpose(x)"))
        (False, 'transpose(x)')
    """
    return name.translate(_ESCAPES)


def as_written(stack: str) -> str:
    """A name stack with the names that the user wrote."""
    return stack.translate(_WRITTEN)
