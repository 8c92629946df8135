"""Jaxprs as text in which a variable keeps its name from one jaxpr to the next."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
import string
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

from precpass.jaxpr.bodies import all_held_eqns, bodies, name_of, scan_split
from precpass.jaxpr.border_copies import without_operands
from precpass.jaxpr.reading import consts_of, is_literal, open_jaxpr, precision_of
from precpass.jaxpr.types import Atom, Aval, Eqn, Jaxpr, Var

T = TypeVar("T")

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


@dataclasses.dataclass(frozen=True)
class Shown:
    """What of a jaxpr is printed, and under which names.

    The `id` of its opened jaxpr stands for a body, and a pair of that and a variable for a value.

    Attributes:
        same: variables that are printed as another variable or literal of their body.
        formats: variables that are printed with another dtype, as `dtype[shape]`.
        hidden: for each body the positions of the equations that are left out.
        operands, results: for each body the positions of those that are left out, and with them
            the operands and results of the equations that enter it.
    """

    same: Mapping[tuple[int, Any], Atom] = dataclasses.field(default_factory=dict)
    formats: Mapping[tuple[int, Any], str] = dataclasses.field(default_factory=dict)
    hidden: Mapping[int, frozenset[int]] = dataclasses.field(default_factory=dict)
    operands: Mapping[int, frozenset[int]] = dataclasses.field(default_factory=dict)
    results: Mapping[int, frozenset[int]] = dataclasses.field(default_factory=dict)

    def resolved(self, body: int, atom: Atom) -> Atom:
        """What is printed in the place of an atom of a body."""
        # Literals have no hash in all releases of JAX.
        while not is_literal(atom) and (body, atom) in self.same:
            atom = self.same[body, atom]
        return atom

    def left_out(self, eqn: Eqn) -> tuple[frozenset[int], frozenset[int]]:
        """The positions of an equation's operands and results that are left out."""
        operands, results = set[int](), set[int]()
        for body in bodies(eqn):
            key = id(open_jaxpr(body.jaxpr))
            operands.update(body.operands[i] for i in self.operands.get(key, ()))
            if body.results:
                results.update(body.results[i] for i in self.results.get(key, ()))
        return frozenset(operands), frozenset(results)


class Printer:
    """Prints jaxprs, and gives a variable that two of them share one name.

    JAX names the variables of each jaxpr anew, so an added equation renames all that follow.
    """

    def __init__(self) -> None:
        self._names: dict[Any, str] = {}
        self._fresh = _names()
        self._shown = Shown()

    def lines(self, jaxpr: Jaxpr, shown: Shown | None = None) -> list[str]:
        """A line per equation; a body is printed once, before the first equation that enters it.

        Args:
            jaxpr: what is printed.
            shown: what of it is printed; None for all.
        """
        self._shown = Shown() if shown is None else shown
        done: dict[int, str] = {}
        text: list[str] = []
        self._print(jaxpr, done, text)
        return text

    def _print(self, jaxpr: Jaxpr, done: dict[int, str], text: list[str]) -> str:
        opened = open_jaxpr(jaxpr)
        at, shown = id(opened), self._shown
        if at in done:
            return done[at]
        typed = functools.partial(self._typed, at)
        consts = " ".join(map(typed, opened.constvars)) if consts_of(jaxpr) else ""
        operands = " ".join(map(typed, _without(opened.invars, shown.operands.get(at, ()))))
        eqns = _without(opened.eqns, shown.hidden.get(at, ()))
        lines = [f"  {self._eqn(at, eqn, done, text)}" for eqn in eqns]
        done[at] = name = f"jaxpr{len(done)}"
        text += [f"{name} = {{ lambda {consts}; {operands} .", *lines]
        results = _without(opened.outvars, shown.results.get(at, ()))
        text.append(f"  in ({', '.join(self._atom(at, v) for v in results)}) }}")
        return name

    def _eqn(self, at: int, eqn: Eqn, done: dict[int, str], text: list[str]) -> str:
        inside = {(b.param, b.index): self._print(b.jaxpr, done, text) for b in bodies(eqn)}
        no_operands, no_results = self._shown.left_out(eqn) if inside else ((), ())
        operands = " ".join(self._atom(at, v) for v in _without(eqn.invars, no_operands))
        results = " ".join(self._typed(at, v) for v in _without(eqn.outvars, no_results))
        params = " ".join(_params(_counted(eqn, no_operands, no_results), inside))
        return f"{results} = {name_of(eqn)}{f'[{params}]' if params else ''} {operands}".strip()

    def _typed(self, at: int, var: Var) -> str:
        form = self._shown.formats.get((at, var))
        return f"{self._atom(at, var)}:{_short(var.aval) if form is None else form}"

    def _atom(self, at: int, atom: Atom) -> str:
        atom = self._shown.resolved(at, atom)
        if is_literal(atom):
            return f"{_value(atom.val)}:{_short(atom.aval)}"
        if atom not in self._names:
            is_dropped = type(atom).__name__ == "DropVar"
            self._names[atom] = "_" if is_dropped else next(self._fresh)
        return self._names[atom]


def _without(items: Sequence[T], positions: Collection[int]) -> list[T]:
    return [item for i, item in enumerate(items) if i not in positions]


def _names() -> Iterator[str]:
    letters = string.ascii_lowercase
    for length in itertools.count(1):
        yield from map("".join, itertools.product(letters, repeat=length))


def _short(aval: Aval) -> str:
    dtype = precision_of(aval) or getattr(aval, "dtype", None)
    if dtype is None:
        return str(aval)
    return f"{dtype}[{','.join(map(str, aval.shape))}]"


def _counted(eqn: Eqn, operands: Collection[int], results: Collection[int]) -> Mapping[str, Any]:
    """An equation's params for fewer operands and results; a scan's two counts in all releases."""
    params: dict[str, Any] = dict(eqn.params)
    if operands or results:
        params |= without_operands(eqn, operands, results)
    if "ft_in" in params and eqn.primitive.name == "scan":
        params["num_consts"], params["num_carry"] = scan_split(params)
        del params["ft_in"], params["ft_out"]
    return params


def _params(params: Mapping[str, Any], inside: dict[tuple[str, int | None], str]) -> Iterator[str]:
    for name, value in sorted(params.items()):
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
    if isinstance(value, (int, float)) and type(value).__name__.startswith("Typed"):
        return str(int(value) if isinstance(value, int) else float(value))  # JAX's own numbers
    if hasattr(open_jaxpr(value), "eqns"):
        return "..."
    named = getattr(value, "__qualname__", None)
    text = named if callable(value) and named else str(value)
    # The rule of a custom derivative that JAX has wrapped: the last word is the user's function.
    text = text.rpartition("Core: ")[2] if text.startswith("Wrapped function:") else text
    return _ADDRESS.sub("", " ".join(text.split()))
