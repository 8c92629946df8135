"""Jaxprs as text in which a variable keeps its name from one jaxpr to the next."""

from __future__ import annotations

import itertools
import re
import string
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from precpass.jaxpr.bodies import all_held_eqns, bodies, name_of
from precpass.jaxpr.reading import consts_of, is_literal, open_jaxpr, precision_of
from precpass.jaxpr.types import Atom, Aval, Eqn, Jaxpr, Var

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def fingerprint(jaxpr: Jaxpr) -> tuple[str, tuple[Any, ...]]:
    """A key that two traces of a function share if they are the same program.

    The values of the jaxpr's own `constvars` are not part of it; those of inner jaxprs are. The
    rules of custom derivatives are left out.
    """
    return str(jaxpr), tuple(map(_told_by_value, _consts_inside(jaxpr)))


def _consts_inside(jaxpr: Jaxpr) -> Iterator[Any]:
    for eqn in all_held_eqns(jaxpr):
        for param in eqn.params.values():
            for value in param if isinstance(param, tuple) else (param,):
                if hasattr(open_jaxpr(value), "eqns"):
                    yield from consts_of(value)


_COMPARED = 1 << 16
"""Arrays of more elements are compared by identity, because comparing bytes would copy them."""


def _told_by_value(x: Any) -> Any:
    if isinstance(x, jax.Array) and (x.size > _COMPARED or not x.is_fully_addressable):
        return _Itself(x)
    try:
        return str(x.dtype), x.shape, np.asarray(x).tobytes()
    except (TypeError, AttributeError):
        return object()  # an array of keys, for instance: equal to nothing


class _Itself:
    """A value that is equal only to itself."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


class Printer:
    """Prints jaxprs, and gives a variable that two of them share one name.

    JAX names the variables of each jaxpr anew, so an added equation renames all that follow.
    """

    def __init__(self) -> None:
        self._names: dict[Any, str] = {}
        self._fresh = _names()

    def lines(self, jaxpr: Jaxpr) -> list[str]:
        """A line per equation; a body is printed once, before the first equation that enters it."""
        done: dict[int, str] = {}
        text: list[str] = []
        self._print(jaxpr, done, text)
        return text

    def _print(self, jaxpr: Jaxpr, done: dict[int, str], text: list[str]) -> str:
        opened = open_jaxpr(jaxpr)
        if id(opened) in done:
            return done[id(opened)]
        consts = " ".join(map(self._typed, opened.constvars)) if consts_of(jaxpr) else ""
        operands = " ".join(map(self._typed, opened.invars))
        lines = [f"  {self._eqn(eqn, done, text)}" for eqn in opened.eqns]
        done[id(opened)] = name = f"jaxpr{len(done)}"
        text += [f"{name} = {{ lambda {consts}; {operands} .", *lines]
        text.append(f"  in ({', '.join(map(self._atom, opened.outvars))}) }}")
        return name

    def _eqn(self, eqn: Eqn, done: dict[int, str], text: list[str]) -> str:
        inside = {(b.param, b.index): self._print(b.jaxpr, done, text) for b in bodies(eqn)}
        operands = " ".join(map(self._atom, eqn.invars))
        results = " ".join(map(self._typed, eqn.outvars))
        params = " ".join(_params(eqn, inside))
        return f"{results} = {name_of(eqn)}{f'[{params}]' if params else ''} {operands}".strip()

    def _typed(self, var: Var) -> str:
        return f"{self._atom(var)}:{_short(var.aval)}"

    def _atom(self, atom: Atom) -> str:
        if is_literal(atom):
            return f"{_value(atom.val)}:{_short(atom.aval)}"
        if atom not in self._names:
            is_dropped = type(atom).__name__ == "DropVar"
            self._names[atom] = "_" if is_dropped else next(self._fresh)
        return self._names[atom]


def _names() -> Iterator[str]:
    letters = string.ascii_lowercase
    for length in itertools.count(1):
        yield from map("".join, itertools.product(letters, repeat=length))


def _short(aval: Aval) -> str:
    dtype = precision_of(aval) or getattr(aval, "dtype", None)
    if dtype is None:
        return str(aval)
    return f"{dtype}[{','.join(map(str, aval.shape))}]"


def _params(eqn: Eqn, inside: dict[tuple[str, int | None], str]) -> Iterator[str]:
    for name, value in sorted(eqn.params.items()):
        if (name, None) in inside:
            yield f"{name}={inside[name, None]}"
        elif (name, 0) in inside:
            texts = (text for (param, _), text in inside.items() if param == name)
            yield f"{name}=({', '.join(texts)})"
        elif value is not None and not (isinstance(value, tuple) and not value):
            yield f"{name}={_value(value)}"


def _value(value: Any) -> str:
    if isinstance(value, np.dtype):
        return value.name
    if hasattr(open_jaxpr(value), "eqns"):
        return "..."
    named = getattr(value, "__qualname__", None)
    text = named if callable(value) and named else str(value)
    return _ADDRESS.sub("", " ".join(text.split()))
