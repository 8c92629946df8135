"""Weights of 8 bits behind the borders of the bodies that read them.

A function is traced with float32 arrays in the place of its arguments of 8 bits. Where a body reads
one, as a scan that slices a stack of weights does, the values of 8 bits and the scale cross the
border in its place. The product inside then finds them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from precpass.jaxpr.bodies import Body, bodies, with_bodies
from precpass.jaxpr.border_copies import crossing, takes_border_copies, with_border_copies_in_order
from precpass.jaxpr.building import Builder, new_variable
from precpass.jaxpr.dots import permutation
from precpass.jaxpr.primitives.dequantized import dequantized_from
from precpass.jaxpr.reading import is_literal, open_jaxpr
from precpass.jaxpr.shardings import with_sizes
from precpass.jaxpr.types import Eqn, Jaxpr

__all__ = ["dequantized_inside"]

_Made = dict[Any, Any]
"""A float32 variable -> the equation that makes it of 8 bits and a scale."""


def dequantized_inside(jaxpr: Jaxpr) -> Any:
    """A jaxpr whose bodies take values of 8 bits and scales in the place of float32 arrays.

    The same jaxpr is returned if it has no such arrays. Arrays that a loop carries stay as they
    are, and so do those of equations whose operands are fixed.
    """
    opened = open_jaxpr(jaxpr)
    made: _Made = {}
    for eqn in opened.eqns:
        if dequantized_from(eqn) or _is_moved(eqn, made):
            made[eqn.outvars[0]] = eqn
    if not made or not any(_positions(eqn, made) for eqn in opened.eqns):
        return jaxpr
    build = Builder({})
    for eqn in opened.eqns:
        if _is_moved(eqn, made):
            build.at(eqn)
            made[eqn.outvars[0]] = _moved(build, eqn, made[eqn.invars[0]])
        elif at := _positions(eqn, made):
            build.at(eqn)
            _enter(build, eqn, at, made)
        else:
            build.eqns.append(eqn)
    read = {v for eqn in build.eqns for v in eqn.invars if not is_literal(v)}
    read.update(v for v in opened.outvars if not is_literal(v))
    build.eqns = [eqn for eqn in build.eqns if not _is_unread(eqn, made, read)]
    return build.finish(jaxpr, opened.invars, opened.outvars)


def _is_moved(eqn: Eqn, made: _Made) -> bool:
    """Whether an equation transposes an array of 8 bits."""
    return permutation(eqn) is not None and not is_literal(eqn.invars[0]) and eqn.invars[0] in made


def _moved(build: Builder, eqn: Eqn, maker: Eqn) -> Eqn:
    """The equation that makes a transposed float32 array of transposed values of 8 bits."""
    (values, scale), order = maker.invars, permutation(eqn)
    assert order is not None
    operands = [build.transpose(x, order) if x.aval.ndim else x for x in (values, scale)]
    build.eqns.append(maker.replace(invars=operands, outvars=eqn.outvars))
    return build.eqns[-1]


def _is_unread(eqn: Eqn, made: _Made, read: set[Any]) -> bool:
    return bool(dequantized_from(eqn)) and eqn.outvars[0] in made and eqn.outvars[0] not in read


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
    operands, scales = list(eqn.invars), list[Any]()
    for position in at:
        values, scale = made[eqn.invars[position]].invars
        operands[position] = values
        if _is_sliced(eqn, position):
            length = values.aval.shape[0]
            if scale.aval.shape[:1] != (length,):
                scale = _repeated(build, scale, length)
        scales.append(scale)
    found = list(bodies(eqn))
    new = [_with_eight_bits(eqn, body, at, scales, made) for body in found]
    change = crossing(eqn, at, [])
    build.cross(eqn, change, [*operands, *scales], eqn.outvars, with_bodies(eqn, found, new))


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
    eqn: Eqn, body: Body, at: Sequence[int], scales: Sequence[Any], made: _Made
) -> Any:
    """A body that makes the float32 arrays itself, of values of 8 bits and scales."""
    opened = open_jaxpr(body.jaxpr)
    build = Builder({}, eqn)
    invars, more, places = list(opened.invars), list[Any](), list[int]()
    for i, position in enumerate(body.operands):
        if position not in at:
            continue
        inner, maker = opened.invars[i], made[eqn.invars[position]]
        values, scale = maker.invars[0].aval, scales[at.index(position)].aval
        shape = scale.shape[1:] if _is_sliced(eqn, position) else scale.shape
        invars[i] = new_variable(inner.aval.update(dtype=values.dtype, weak_type=False))
        # The scale of a slice is sharded as the slice is, in those dimensions that it has.
        more.append(new_variable(with_sizes(inner.aval, shape, scale.dtype)))
        places.append(i)
        build.eqns.append(maker.replace(invars=[invars[i], more[-1]], outvars=[inner]))
    build.eqns += opened.eqns
    new = build.finish(body.jaxpr, [*invars, *more], opened.outvars)
    return with_border_copies_in_order(eqn, body, dequantized_inside(new), places, [])
