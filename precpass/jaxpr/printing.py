"""The text of a program before and after the pass, by JAX's printer, with equal names in both."""

from __future__ import annotations

import itertools
import string
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.extend.core as jex
from jax.interpreters.partial_eval import dce_jaxpr

from precpass.jaxpr.bodies import bodies, with_bodies
from precpass.jaxpr.primitives.identities import is_identity_of_first_operand
from precpass.jaxpr.reading import is_literal, open_jaxpr
from precpass.jaxpr.types import Atom, Jaxpr, Var

__all__ = ["texts"]

_WIDTH = 120
"""Most equations fit on one line of so many characters, so that a diff shows them whole."""


def texts(before: Jaxpr, after: Jaxpr, *, whole: bool = False) -> tuple[str, str]:
    """Both programs as JAX prints them, except that a value has one name in both.

    JAX names the variables of each jaxpr anew, so that an added equation renames all that follow.

    Args:
        before: the program as it was written.
        after: the rewritten one.
        whole: whether to print all of it. Otherwise the primitives that return their first operand
            and only serve derivatives are left out, and what then nothing reads.
    """
    if not whole:
        before, after = map(_without_identities, (before, after))
    names, heirs = defaultdict[Var, str](_names().__next__), _heirs(before, after)
    printed: dict[Var, _Printed] = {}

    def named(atom: Atom) -> Atom:
        if is_literal(atom) or isinstance(atom, jex.DropVar):
            return atom
        return printed.setdefault(atom, _Printed(heirs.get(atom, atom), names))

    before, after = (
        _mapped(jaxpr, named).pretty_print(width=_WIDTH, use_color=False)
        for jaxpr in (before, after)
    )
    return before, after


def _names() -> Iterator[str]:
    for length in itertools.count(1):
        yield from map("".join, itertools.product(string.ascii_lowercase, repeat=length))


class _Printed(jex.Var):
    """A variable that is printed under the name of another one."""

    def __init__(self, var: Var, names: dict[Var, str]) -> None:
        super().__init__(var.aval)
        self._like, self._names = var, names

    def pretty_print(self, context: Any, *, print_dtype: bool = True) -> str:
        # JAX has set aside "_" for what nothing reads.
        return "_" if context.var_names.get(self) == "_" else self._names[self._like]


def _without_identities(jaxpr: Jaxpr) -> Any:
    eqns = filter(is_identity_of_first_operand, _eqns(jaxpr))
    same = {eqn.outvars[0]: eqn.invars[0] for eqn in eqns}

    def resolved(atom: Atom) -> Atom:
        while not is_literal(atom) and atom in same:
            atom = same[atom]
        return atom

    opened = open_jaxpr(_mapped(jaxpr, resolved))
    try:
        return dce_jaxpr(opened, [True] * len(opened.outvars), instantiate=True)[0]
    except ValueError:  # a jit with fewer shardings than operands, as 0.12 leaves in some loops
        return opened


def _mapped(
    jaxpr: Jaxpr, atom: Callable[[Atom], Atom], done: dict[int, tuple[Any, Any]] | None = None
) -> Any:
    """A jaxpr with other atoms, without equations whose result now is their first operand."""
    # A body that is shared stays shared, so that JAX prints it once.
    done = {} if done is None else done
    if id(jaxpr) in done:
        return done[id(jaxpr)][1]
    opened, eqns = open_jaxpr(jaxpr), []
    for eqn in opened.eqns:
        invars, outvars = _each(atom, eqn.invars), _each(atom, eqn.outvars)
        if invars and outvars and outvars[0] is invars[0]:
            continue
        inside = bodies(eqn)
        params = with_bodies(eqn, inside, [_mapped(b.jaxpr, atom, done) for b in inside])
        eqns.append(eqn.replace(invars=invars, outvars=outvars, params=params))
    new = opened.replace(
        constvars=_each(atom, opened.constvars),
        invars=_each(atom, opened.invars),
        outvars=_each(atom, opened.outvars),
        eqns=eqns,
    )
    if opened is not jaxpr and not hasattr(opened, "with_consts"):  # 0.11 merged the two classes
        new = jaxpr.replace(jaxpr=new)
    done[id(jaxpr)] = jaxpr, new
    return new


def _each(atom: Callable[[Atom], Atom], atoms: Sequence[Atom]) -> list[Atom]:
    return [atom(v) for v in atoms]


def _jaxprs(jaxpr: Jaxpr, seen: dict[int, Any] | None = None) -> Iterator[Any]:
    """A jaxpr and its bodies, each once however often it is called."""
    seen = {} if seen is None else seen
    if id(jaxpr) not in seen:
        seen[id(jaxpr)] = jaxpr
        yield open_jaxpr(jaxpr)
        for eqn in open_jaxpr(jaxpr).eqns:
            for body in bodies(eqn):
                yield from _jaxprs(body.jaxpr, seen)


def _eqns(jaxpr: Jaxpr) -> Iterator[Any]:
    return (eqn for body in _jaxprs(jaxpr) for eqn in body.eqns)


def _heirs(before: Jaxpr, after: Jaxpr) -> dict[Var, Var]:
    """For results of replaced equations the variable of `before` whose name they get.

    An equation that is still there makes the same variables as before, or heirs of them, and reads
    what it read before, or its heirs.
    """
    makers = {eqn.outvars[0]: eqn for eqn in _eqns(before) if eqn.outvars}
    heirs: dict[Var, Var] = {}
    taken = {v for body in _jaxprs(after) for v in (*body.constvars, *body.invars)}
    taken |= {v for eqn in _eqns(after) for v in eqn.outvars}

    def inherit(new: Sequence[Atom], old: Sequence[Atom]) -> None:
        if len(new) != len(old):
            return
        for value, var in zip(new, old, strict=True):
            if is_literal(value) or is_literal(var) or value in heirs or var in taken:
                continue
            if value.aval == var.aval:
                heirs[value] = var
                taken.add(var)

    inherit(open_jaxpr(after).outvars, open_jaxpr(before).outvars)
    for body in _jaxprs(after):
        for eqn in reversed(body.eqns):
            old = makers.get(heirs.get(eqn.outvars[0], eqn.outvars[0])) if eqn.outvars else None
            if old is None or old.primitive is not eqn.primitive:
                continue
            opened = [
                (open_jaxpr(inner.jaxpr), open_jaxpr(was.jaxpr))
                for inner, was in zip(bodies(eqn), bodies(old), strict=False)
            ]
            if all(inner.invars == was.invars for inner, was in opened):
                inherit(eqn.invars, old.invars)
            for inner, was in opened:
                inherit(inner.outvars, was.outvars)
    return heirs
