"""The numbers that a program's float32 constants were before JAX rounded them.

With x64 off JAX rounds a number that is written in a program, or a numpy array of float64 that it
closes over, when it is traced. A float64 region needs the number itself. The same function, traced
again with x64 on and with float64 operands, has it on the same line: it is the number there that
the constant is a rounding of.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from precpass.jaxpr.bodies import Body, bodies, hidden_jaxprs, is_ref
from precpass.jaxpr.reading import Source, consts_of, is_literal, open_jaxpr, source_of
from precpass.jaxpr.types import Eqn, Jaxpr
from precpass.jaxpr.weak import WeakIdMap

__all__ = ["constant_operands", "exact", "is_rounded_type", "note_exact", "with_float64"]

_WIDE: dict[Any, np.dtype[Any]] = {
    np.dtype(np.float32): np.dtype(np.float64),
    np.dtype(np.complex64): np.dtype(np.complex128),
}
_NARROW: dict[Any, np.dtype[Any]] = {
    dtype: narrow for narrow, wide in _WIDE.items() for dtype in (narrow, wide)
}
_HAND_ON = {"jit", "cond", "scan", "while", "remat2", "custom_jvp_call", "custom_vjp_call"}
"""The primitives whose bodies read the equation's operands themselves."""
_known = WeakIdMap[Any]()


def exact(value: Any) -> Any:
    """The float64 or complex128 number or array that a literal's or a constant's value was.

    None if it is not known, or if the value is not of float32 or complex64.
    """
    if not is_rounded_type(value):
        return None
    dtype = value.dtype
    if not isinstance(value, np.ndarray):  # JAX's own numbers have all of their digits
        return np.asarray(value, _WIDE[dtype])
    found = _known.get(value)
    return np.asarray(value, _WIDE[dtype]) if found is None and _is_short(value) else found


def is_rounded_type(value: Any) -> bool:
    """Whether a constant is a number or a numpy array of float32 or complex64."""
    is_host = isinstance(value, np.ndarray | float | complex)
    return is_host and getattr(value, "dtype", None) in _WIDE


def with_float64(x: Any) -> Any:
    """An operand's type, with float64 for float32, or the operand if it has none to give."""
    aval = jax.typeof(x)
    wide = _WIDE.get(getattr(aval, "dtype", None))
    return x if wide is None or is_ref(aval) else aval.update(dtype=wide)


def _is_short(value: Any) -> bool:
    """Whether each number has 16 bits, as one that was not rounded, or is the largest one."""
    numbers = np.ascontiguousarray(value).view(np.float32)
    is_short = numbers.view(np.uint32) & 0xFF == 0
    return bool(np.all(is_short | (np.abs(numbers) == np.finfo(np.float32).max)))


def note_exact(jaxpr: Jaxpr, wide: Jaxpr | None, arrays: Sequence[Any]) -> None:
    """Notes, for `exact`, what the constants of a jaxpr were.

    Args:
        jaxpr: of a function, traced with x64 off.
        wide: of the same function, traced with x64 on and with float64 operands; None if that
            failed.
        arrays: numpy arrays that the function may close over. JAX gives a program the rounded form
            of such an array, if another program has that already.
    """
    arrays, numbers = list(arrays), dict[Any, list[Any]]()
    for source, value in _constants(wide) if wide is not None else ():
        if np.ndim(value):
            arrays.append(value)
        elif (narrow := _NARROW.get(getattr(value, "dtype", None))) and np.isfinite(value):
            number = np.asarray(value)[()]
            with np.errstate(over="ignore"):
                key = source, narrow, np.asarray(number, narrow)[()]
            numbers.setdefault(key, []).append(number)
    rounded: dict[Any, list[Any]] = {}
    for source, value in _constants(jaxpr):
        if not is_rounded_type(value) or not isinstance(value, np.ndarray):
            continue
        if value.ndim == 0:
            key = source, value.dtype, np.asarray(value)[()]
            rounded.setdefault(key, []).append(value)
        elif (found := _array_of(value, arrays)) is not None:
            _known.setdefault(value, np.array(found, _WIDE[value.dtype]))
    for key, values in rounded.items():
        found = numbers.get(key) or _near(key, numbers)
        # On a line with several numbers that are rounded alike, they are in the same order.
        each = found if len(found) == len(values) else [_best(found, values[0])] * len(values)
        for value, number in zip(values, each, strict=True) if found else ():
            _known.setdefault(value, np.array(number, _WIDE[value.dtype]))


def _near(constant: Any, numbers: dict[Any, list[Any]]) -> list[Any]:
    """The numbers that a constant may be computed from roundings of, or stands for elsewhere."""
    source, dtype, value = constant
    if not np.isfinite(value):
        return []
    alike = [key for key in numbers if key[1] == dtype]
    keys = [key for key in alike if abs(key[2] - value) <= 2.0**-22 * abs(value)]
    return next((numbers[key] for key in keys if key[0] == source), []) or [
        number for key in keys if key[2] == value for number in numbers[key]
    ]


def _best(numbers: Sequence[Any], rounded: Any) -> Any:
    """The number of those that are rounded alike which a constant is the likeliest to be."""
    return min(numbers, key=lambda x: (x == rounded) != _is_short(rounded), default=None)


def _array_of(rounded: Any, arrays: Sequence[Any]) -> Any:
    """The array that `rounded` is the rounding of: of float64 if there is one, else of float32."""
    alike = [
        x
        for x in arrays
        if x is not rounded
        and x.shape == rounded.shape
        and x.dtype in (rounded.dtype, _WIDE[rounded.dtype])
        and np.array_equal(np.asarray(x, rounded.dtype), rounded, equal_nan=True)
    ]
    return max(alike, key=lambda x: x.dtype.itemsize, default=None)


def constant_operands(jaxpr: Jaxpr) -> dict[Any, Any]:
    """The numpy constants of a program, by the variables that stand for them in it and its bodies.

    A variable of a body stands for one if it does in every call of the body.
    """
    found: dict[Any, Any] = {}
    todo, seen = [(jaxpr, [None] * len(open_jaxpr(jaxpr).invars))], set[Any]()
    while todo:
        body, operands = todo.pop()
        opened = open_jaxpr(body)
        for v, value in zip(opened.invars, operands, strict=True):
            found[v] = value if found.get(v, value) is value else None
        constants = consts_of(body) or [None] * len(opened.constvars)
        found.update(zip(opened.constvars, constants, strict=True))
        key = id(opened), *(id(found[v]) for v in opened.invars)
        if key in seen:
            continue
        seen.add(key)
        for eqn in opened.eqns:
            values = [None if is_literal(v) else found.get(v) for v in eqn.invars]
            todo += [(inner.jaxpr, _handed_on(eqn, inner, values)) for inner in bodies(eqn)]
    return {v: x for v, x in found.items() if isinstance(x, np.ndarray)}


def _handed_on(eqn: Eqn, body: Body, values: Sequence[Any]) -> list[Any]:
    """Those of an equation's operands that are the same in each call of a body; None for others."""
    invars = open_jaxpr(body.jaxpr).invars
    if eqn.primitive.name not in _HAND_ON:
        return [None] * len(invars)
    fixed = body.constants if body.carry or body.decides else len(invars)
    return [
        values[at] if i < fixed and np.shape(values[at]) == v.aval.shape else None
        for i, (v, at) in enumerate(zip(invars, body.operands, strict=True))
    ]


def _constants(jaxpr: Jaxpr) -> Iterator[tuple[Source | None, Any]]:
    """The constants and the literals of a jaxpr and of all jaxprs in it, with their lines."""
    todo, seen = [jaxpr], set[int]()
    while todo:
        body = todo.pop()
        yield from ((None, x) for x in consts_of(body))
        if id(open_jaxpr(body)) in seen:
            continue
        seen.add(id(open_jaxpr(body)))
        for eqn in open_jaxpr(body).eqns:
            yield from ((source_of(eqn), v.val) for v in eqn.invars if is_literal(v))
            todo += hidden_jaxprs(eqn)
            todo += [body.jaxpr for body in bodies(eqn)]  # on 0.10 these have constants
