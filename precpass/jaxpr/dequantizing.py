"""Weights of 8 bits behind the borders of the bodies that read them.

A function is traced with float32 arrays in the place of its arguments of 8 bits. Where a body reads
one, as a scan that slices a stack of weights does, the values of 8 bits and the scale cross the
border in its place. The product inside then finds them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from precpass.jaxpr.bodies import Body, bodies, with_bodies
from precpass.jaxpr.border_copies import crossing, takes_border_copies, with_border_copies_in_order
from precpass.jaxpr.building import Builder, new_variable
from precpass.jaxpr.dots import permutation
from precpass.jaxpr.primitives.dequantized import dequantized_from
from precpass.jaxpr.reading import is_literal, open_jaxpr
from precpass.jaxpr.shardings import with_sizes
from precpass.jaxpr.types import Eqn, Jaxpr

__all__ = ["dequantized_inside"]


class _Source(NamedTuple):
    """What a float32 array is made of.

    Attributes:
        maker: the equation that makes an array of values of 8 bits and a scale.
        order: for each dimension of the float32 array that of the maker's result.
    """

    maker: Eqn
    order: tuple[int, ...]

    @property
    def is_transposed(self) -> bool:
        """Whether the array is not the maker's result itself."""
        return self.order != tuple(range(len(self.order)))


_Made = dict[Any, _Source]
"""A float32 variable -> what it is made of."""


def dequantized_inside(jaxpr: Jaxpr) -> Any:
    """A jaxpr whose bodies take values of 8 bits and scales in the place of float32 arrays.

    The same jaxpr is returned if it has no such arrays. Arrays that a loop carries stay as they
    are, and so do those of equations whose operands are fixed.
    """
    opened = open_jaxpr(jaxpr)
    made: _Made = {}
    for eqn in opened.eqns:
        if (source := _source(eqn, made)) is not None:
            made[eqn.outvars[0]] = source
    if not made or not any(_positions(eqn, made) for eqn in opened.eqns):
        return jaxpr
    build = Builder({})
    for eqn in opened.eqns:
        if at := _positions(eqn, made):
            build.at(eqn)
            _enter(build, eqn, at, made)
        else:
            build.eqns.append(eqn)
    build.eqns = _without_unread(build.eqns, made, opened.outvars)
    return build.finish(jaxpr, opened.invars, opened.outvars)


def _source(eqn: Eqn, made: _Made) -> _Source | None:
    """What the result of an equation is made of, if that has 8 bits."""
    if dequantized_from(eqn):
        return _Source(eqn, tuple(range(eqn.outvars[0].aval.ndim)))
    order = permutation(eqn)
    if order is None or is_literal(eqn.invars[0]) or eqn.invars[0] not in made:
        return None
    source = made[eqn.invars[0]]
    return source._replace(order=tuple(source.order[d] for d in order))


def _without_unread(eqns: Sequence[Eqn], made: _Made, outvars: Sequence[Any]) -> list[Eqn]:
    """The equations but for those that make float32 arrays which nothing reads."""
    read = {v for v in outvars if not is_literal(v)}
    kept: list[Eqn] = []
    for eqn in reversed(eqns):
        if len(eqn.outvars) == 1 and eqn.outvars[0] in made and eqn.outvars[0] not in read:
            continue
        read.update(v for v in eqn.invars if not is_literal(v))
        kept.append(eqn)
    return kept[::-1]


def _positions(eqn: Eqn, made: _Made) -> list[int]:
    """The positions of the operands of 8 bits that can cross an equation's borders as such."""
    if not any(not is_literal(v) and v in made for v in eqn.invars):
        return []
    found = list(bodies(eqn))
    if not found or not takes_border_copies(eqn):
        return []
    carried = {body.operands[invar] for body in found for invar, _ in body.carry}
    inside = {position for body in found for position in body.operands} - carried
    return [i for i, v in enumerate(eqn.invars) if i in inside and not is_literal(v) and v in made]


def _enter(build: Builder, eqn: Eqn, at: Sequence[int], made: _Made) -> None:
    """Adds an equation with values of 8 bits in the place of operands, and their scales."""
    operands, scales, sources = list(eqn.invars), list[Any](), dict[int, _Source]()
    for position in at:
        source = made[eqn.invars[position]]
        if _is_sliced(eqn, position) and source.order[0] != 0:
            source = _transposed(build, source)
        sources[position] = source
        values, scale = source.maker.invars
        operands[position] = values
        if _is_sliced(eqn, position):
            length = values.aval.shape[0]
            if scale.aval.shape[:1] != (length,):
                scale = _repeated(build, scale, length)
        scales.append(scale)
    found = list(bodies(eqn))
    new = [_with_eight_bits(eqn, body, sources, scales) for body in found]
    change = crossing(eqn, at, [])
    build.cross(eqn, change, [*operands, *scales], eqn.outvars, with_bodies(eqn, found, new))


def _transposed(build: Builder, source: _Source) -> _Source:
    """The same array made of transposed values of 8 bits."""
    operands = [build.transpose(x, source.order) if x.aval.ndim else x for x in source.maker.invars]
    return _Source(source.maker.replace(invars=operands), tuple(range(len(source.order))))


def _is_sliced(eqn: Eqn, position: int) -> bool:
    """Whether an operand is a stack of which each trip of a scan reads a slice."""
    if eqn.primitive.name != "scan":
        return False
    (body,) = bodies(eqn)
    return position >= body.constants + len(body.carry)


def _repeated(build: Builder, scale: Any, length: int) -> Any:
    """A scale for each slice of a stack that has one scale for all slices."""

    def repeated(scale: Any) -> list[Any]:
        rest = scale.shape[1:]
        return [jnp.broadcast_to(scale, (length, *rest))]

    return build.call(repeated, [scale])[0]


def _with_eight_bits(
    eqn: Eqn, body: Body, sources: dict[int, _Source], scales: Sequence[Any]
) -> Any:
    """A body that makes the float32 arrays itself, of values of 8 bits and scales."""
    opened = open_jaxpr(body.jaxpr)
    build = Builder({}, eqn)
    invars, more, places = list(opened.invars), list[Any](), list[int]()
    for i, position in enumerate(body.operands):
        if position not in sources:
            continue
        inner, source = opened.invars[i], sources[position]
        order, scale = source.order, scales[list(sources).index(position)].aval
        shape = scale.shape
        if _is_sliced(eqn, position):
            order, shape = tuple(d - 1 for d in order[1:]), shape[1:]
        stored = inner.aval
        if source.is_transposed:
            stored = Builder({}, eqn).transpose(inner, tuple(map(int, np.argsort(order)))).aval
        dtype = source.maker.invars[0].aval.dtype
        invars[i] = new_variable(stored.update(dtype=dtype, weak_type=False))
        # The scale of a slice is sharded as the slice is, in those dimensions that it has.
        more.append(new_variable(with_sizes(stored, shape, scale.dtype)))
        places.append(i)
        made = new_variable(stored) if source.is_transposed else inner
        build.eqns.append(source.maker.replace(invars=[invars[i], more[-1]], outvars=[made]))
        if source.is_transposed:
            build.transpose(made, order)
            build.eqns[-1] = build.eqns[-1].replace(outvars=[inner])
    build.eqns += opened.eqns
    new = build.finish(body.jaxpr, [*invars, *more], opened.outvars)
    return with_border_copies_in_order(eqn, body, dequantized_inside(new), places, [])
