"""The dimension numbers of a transposed dot, and of a dot under a vmap."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

__all__ = [
    "Numbers",
    "Transposed",
    "batched",
    "kept",
    "summed_last",
    "transposed",
    "untransposed",
    "with_summed_last",
]

Numbers = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]
"""((contracted dimensions of the left, of the right operand), (batch dimensions of both))."""


class Transposed(NamedTuple):
    """A dot that gives the cotangent of an operand of another one.

    Attributes:
        numbers: its dimension numbers.
        side: which of its operands is the cotangent of the other dot's result.
        order: the permutation that brings its result into the operand's order; None if it is in it.
    """

    numbers: Numbers
    side: int
    order: tuple[int, ...] | None


def kept(ndim: int, summed: Sequence[int], batch: Sequence[int]) -> list[int]:
    """The dimensions of an operand that are neither contracted nor batch dimensions."""
    return [d for d in range(ndim) if d not in summed and d not in batch]


def summed_last(ndim: int, summed: Sequence[int], batch: Sequence[int]) -> tuple[int, ...]:
    """The order that puts an operand's contracted dimensions last; () if they are."""
    order = (*batch, *kept(ndim, summed, batch), *summed)
    return () if order == tuple(range(ndim)) else order


def with_summed_last(numbers: Numbers, ndims: Sequence[int]) -> Numbers:
    """The dimension numbers of a dot of operands in the order of `summed_last`."""
    summed, batch = (len(pair[0]) for pair in numbers)
    lhs, rhs = (tuple(range(ndim - summed, ndim)) for ndim in ndims)
    return (lhs, rhs), (tuple(range(batch)), tuple(range(batch)))


def transposed(numbers: Numbers, ndims: Sequence[int], side: int) -> Transposed:
    """The dot of a cotangent and the other operand, in the order that leaves no transpose behind.

    Args:
        numbers: the dot's dimension numbers.
        ndims: the rank of each of its operands.
        side: the operand whose cotangent is wanted.
    """
    (summed_here, summed_there), (own_batch, other_batch) = (
        pair if side == 0 else pair[::-1] for pair in numbers
    )
    own_kept = kept(ndims[side], summed_here, own_batch)
    other_kept = kept(ndims[1 - side], summed_there, other_batch)
    n_batch = len(own_batch)
    start = n_batch + (len(own_kept) if side == 0 else 0)
    cotangents = tuple(range(start, start + len(other_kept))), tuple(range(n_batch))
    sides = [cotangents, (tuple(other_kept), tuple(other_batch))]
    # the operand's dimensions as the result has them, which are in the order of the other's
    summed = [
        summed_here[i] for i in sorted(range(len(summed_there)), key=lambda i: summed_there[i])
    ]
    first, second = [*own_batch, *own_kept, *summed], [*own_batch, *summed, *own_kept]
    at = 1 if first != sorted(first) and second == sorted(second) else 0
    (a, a_batch), (b, b_batch) = sides[::-1] if at else sides
    made = second if at else first
    order = None if made == sorted(made) else tuple(made.index(d) for d in range(ndims[side]))
    return Transposed(((a, b), (a_batch, b_batch)), at, order)


def batched(
    numbers: Numbers, ndims: Sequence[int], dims: Sequence[int | None]
) -> tuple[Numbers, int]:
    """The dimension numbers of a dot under a vmap, and the batch dimension of its result.

    They are those of JAX's own rule.

    Args:
        numbers: the dot's dimension numbers.
        ndims: the rank of each of its operands, with the vmapped dimension.
        dims: the vmapped dimension of each operand; None for an operand without it (not for both).
    """
    summed, batch = (
        tuple(
            tuple(d + (dim is not None and d >= dim) for d in of_side)
            for of_side, dim in zip(pair, dims, strict=True)
        )
        for pair in numbers
    )
    if None not in dims:
        both = tuple((dim, *of_side) for dim, of_side in zip(dims, batch, strict=True))
        return (summed, both), 0  # pyright: ignore[reportReturnType] -- pairs
    side = 0 if dims[1] is None else 1
    before = len(kept(ndims[0], summed[0], batch[0])) if side == 1 else 0
    free = kept(ndims[side], summed[side], batch[side])
    return (summed, batch), len(batch[0]) + before + free.index(dims[side])  # pyright: ignore


def untransposed(numbers: Numbers, side: int, permutation: Sequence[int]) -> Numbers | None:
    """The dimension numbers of a dot that reads an operand as it is before its transpose.

    The result stays the same. None if its dimensions would come in another order.

    Args:
        numbers: the dot's dimension numbers.
        side: the transposed operand.
        permutation: that of the transpose.
    """
    summed, batch = (list(pair) for pair in numbers)
    free = [permutation[d] for d in kept(len(permutation), summed[side], batch[side])]
    if free != sorted(free):
        return None
    for pair in (summed, batch):
        pair[side] = tuple(permutation[d] for d in pair[side])
    return (summed[0], summed[1]), (batch[0], batch[1])
