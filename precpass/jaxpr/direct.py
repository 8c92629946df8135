"""`Direct`: the interface of `Builder` on values and tracers, when no jaxpr is built."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
from jax import lax

from precpass.jaxpr.binding import convert
from precpass.jaxpr.primitives.carrier import Form, carry, detach
from precpass.jaxpr.types import Aval


class Direct:
    """Like `Builder`, but on arrays and tracers: every equation is bound at once.

    Args:
        called: whether each equation is bound in a jit of its own. A jit can be transposed even
            if the primitive's own rule takes no symbolic zero.
    """

    def __init__(self, *, called: bool = False) -> None:
        self.called = called

    def emit(
        self, primitive: Any, operands: Sequence[Any], params: dict[str, Any], aval: Aval
    ) -> Any:
        """The result of an equation; `aval` is ignored."""
        if self.called:
            return jax.jit(lambda *xs: primitive.bind(*xs, **params))(*operands)
        return primitive.bind(*operands, **params)

    def convert(self, x: Any, dtype: Any) -> Any:
        """A value in another dtype."""
        return convert(x, dtype)

    def transpose(self, x: Any, order: tuple[int, ...]) -> Any:
        """A value with its dimensions in another order."""
        return lax.transpose(x, order)

    def detach(
        self, x: Any, *, pinned: bool = False, flat: bool = False, zeros: bool = False
    ) -> Any:
        """As `precpass.jaxpr.detach`."""
        return detach(x, pinned=pinned, flat=flat, zeros=zeros)

    def carry(self, form: Form, out: Any, lhs: Any, rhs: Any, rest: Sequence[Any] = ()) -> Any:
        """As `precpass.jaxpr.carry`."""
        return carry(form, out, lhs, rhs, rest)

    def call(
        self, fn: Callable[..., Sequence[Any]], operands: Sequence[Any], key: Hashable = None
    ) -> Sequence[Any]:
        """The results of a function."""
        return fn(*operands)
