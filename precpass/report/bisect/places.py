"""The places of a program that rules can tell apart: a tree of groups, each with its rule."""

from __future__ import annotations

import dataclasses
import glob
import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

from precpass.jaxpr import Source
from precpass.policy.precision import Precision
from precpass.policy.rules import Rule
from precpass.view.text import Line, cell_of, heading

__all__ = ["Group", "Place", "grouped", "notes_on", "shown"]

K = TypeVar("K", bound=Hashable)


@dataclasses.dataclass(frozen=True)
class Place:
    """One line of the user's code under one name scope, and what it computes.

    Attributes:
        scope: the name scopes around it, without the marks of transforms.
        file: the file of the user's line; "" if JAX recorded none.
        function: the function of that line; "" if JAX recorded none.
        line: the number of that line; 0 if JAX recorded none.
        primitives: the names of its equations, each with the number of equations.
    """

    scope: str
    file: str
    function: str
    line: int
    primitives: tuple[tuple[str, int], ...] = ()

    @property
    def source(self) -> Source:
        """The user's line."""
        return Source(self.file, self.function, self.line)

    @property
    def text(self) -> str:
        """The text of the line; "" if its file cannot be read."""
        return next((text for text, style in heading(self.source) if style == "code"), "")

    def is_in(self, rule: Rule) -> bool:
        """Whether a rule that names a region matches it."""
        return rule.covers(self.scope, self.file, self.function, self.line)


def shown(places: Sequence[Place], *, scopes: bool) -> Line:
    """The places of one line, in words: the line, and the primitives of all of them.

    Args:
        places: places with the same source.
        scopes: whether to name their scopes if there are several.
    """
    computed = Counter[str]()
    for place in places:
        computed.update(dict(place.primitives))
    text = ", ".join(f"{n} {name}" for name, n in computed.items())
    named = list(dict.fromkeys(place.scope or "no scope" for place in places))
    if scopes and len(named) > 1:
        more = [f"{len(named) - _SCOPES} more"] if len(named) > _SCOPES else []
        text += f" in {', '.join([*named[:_SCOPES], *more])}"
    return [*heading(places[0].source), (f"  ({text})", "reason")]


_SCOPES = 4
"""The most scopes of a line that are named."""


def notes_on(rules: Sequence[Rule], kept: Sequence[Sequence[Place]]) -> tuple[str, ...]:
    """A remark on rules that name a notebook's cell, whose name changes with its text."""
    fleeting: list[str] = []
    for rule, places in zip(rules, kept, strict=True):
        if rule.file not in (None, "*"):
            fleeting += [cell for place in places if (cell := cell_of(place.file))]
    if not fleeting:
        return ()
    cells = ", ".join(dict.fromkeys(fleeting))
    return (
        f"a rule for lines of {cells} holds until the cell is edited, in later sessions too: a "
        "function of a name of its own, or a jax.named_scope, gives a rule that lasts",
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Group:
    """Places that one rule matches, and the finer groups that they form."""

    rule: Rule
    parts: tuple[Group, ...] = ()


def grouped(places: Sequence[Place], precision: Precision) -> Group:
    """All places as one group of scopes, of functions outside scopes, and of lines.

    Args:
        places: the places in the program's order, which the groups keep.
        precision: the precision that the rules give.
    """
    grouping = _Grouping(precision, sorted({place.file for place in places if place.file}))
    named = [place for place in places if place.scope]
    others = [place for place in places if not place.scope and place.file]
    parts = (*grouping.scopes(named, ""), *grouping.functions(others))
    return Group(Rule(file="*", precision=precision), parts)


class _Grouping:
    def __init__(self, precision: Precision, files: Sequence[str]) -> None:
        self.precision = precision
        self.globs = {file: _shortest_glob(file, files) for file in files}
        self.cells = {file for file in files if cell_of(file)}

    def scopes(self, places: Iterable[Place], around: str) -> list[Group]:
        """A group for each scope directly inside `around`."""
        start = len(around) + 1 if around else 0
        groups: list[Group] = []
        for name, inside in _by(places, lambda p: p.scope[start:].partition("/")[0]).items():
            scope = f"{around}/{name}" if around else name
            rule = Rule(scope=glob.escape(scope), precision=self.precision)
            deeper = [place for place in inside if place.scope != scope]
            here = [place for place in inside if place.scope == scope and place.file]
            groups.append(Group(rule, (*self.scopes(deeper, scope), *self.lines(here))))
        return groups

    def functions(self, places: Iterable[Place]) -> list[Group]:
        """A group for each function, and for each line outside a named function."""
        groups: list[Group] = []
        by_function = _by(places, lambda p: (p.file, p.function))
        named = Counter(function for _, function in by_function)
        for (file, function), inside in by_function.items():
            lines = self.lines(inside)
            if function.isidentifier():
                # The name of a notebook's cell changes with its text.
                alone = file in self.cells and named[function] == 1
                where = None if alone else self.globs[file]
                rule = Rule(function=function, file=where, precision=self.precision)
                groups.append(Group(rule, lines))
            else:
                groups += lines
        return groups

    def lines(self, places: Iterable[Place]) -> tuple[Group, ...]:
        """A group for each line."""
        return tuple(
            Group(
                Rule(
                    scope=glob.escape(scope) or None,
                    file=self.globs[file],
                    line=line,
                    precision=self.precision,
                )
            )
            for scope, file, line in _by(places, lambda p: (p.scope, p.file, p.line))
        )


def _by(places: Iterable[Place], key: Callable[[Place], K]) -> dict[K, list[Place]]:
    groups: dict[K, list[Place]] = {}
    for place in places:
        groups.setdefault(key(place), []).append(place)
    return groups


def _shortest_glob(file: str, files: Sequence[str]) -> str:
    """The shortest end of a path that no other file's path has."""
    if cell := _IPYTHON.fullmatch(file):
        # by its text, in whatever order a session runs its cells
        return f"<ipython-input-*-{cell[1]}>"
    parts = file.split("/")
    for length in range(1, len(parts)):
        end = "/" + "/".join(parts[-length:])
        if sum(other.endswith(end) for other in files) == 1:
            return "*" + glob.escape(end)
    return glob.escape(file)


_IPYTHON = re.compile(r"<ipython-input-\d+-(\w+)>")
