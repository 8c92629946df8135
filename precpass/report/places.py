"""The places of a program that rules can tell apart, as a tree of groups, each with its rule."""

from __future__ import annotations

import dataclasses
import glob
import linecache
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

from precpass.precision import Precision
from precpass.rules import Rule
from precpass.view.text import shown_path

__all__ = ["Group", "Place", "grouped"]

K = TypeVar("K", bound=Hashable)


@dataclasses.dataclass(frozen=True)
class Place:
    """One line of the user's code under one name scope, and what it computes.

    Attributes:
        scope: the name scopes around it, without the marks of transforms.
        file, function, line: the user's line; "" and 0 where JAX recorded none.
        primitives: the names of its equations, each with how often it stands there.
    """

    scope: str
    file: str
    function: str
    line: int
    primitives: tuple[tuple[str, int], ...] = ()

    @property
    def text(self) -> str:
        """The line itself; "" where its file cannot be read."""
        return linecache.getline(self.file, self.line).strip() if self.file else ""

    def is_in(self, rule: Rule) -> bool:
        """Whether a rule that names a region matches it."""
        return rule.covers(self.scope, self.file, self.function, self.line)

    def __str__(self) -> str:
        where = f"{shown_path(self.file)}:{self.line}" if self.file else "<unknown line>"
        computes = ", ".join(f"{n} {name}" for name, n in self.primitives)
        return f"{where} {self.function}  {self.text}".rstrip() + f"  ({computes})"


@dataclasses.dataclass(frozen=True, eq=False)
class Group:
    """Places that one rule matches, and the finer groups that they form."""

    rule: Rule
    parts: tuple[Group, ...] = ()


def grouped(places: Sequence[Place], precision: Precision) -> Group:
    """All places as one group: of scopes, and of functions where there is no scope, and of lines.

    Args:
        places: in the order in which the program has them, which the groups keep.
        precision: that of the rules.
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

    def scopes(self, places: Iterable[Place], around: str) -> list[Group]:
        """A group for each scope right inside of another one."""
        start = len(around) + 1 if around else 0
        found: list[Group] = []
        for name, inside in _by(places, lambda p: p.scope[start:].partition("/")[0]).items():
            scope = f"{around}/{name}" if around else name
            rule = Rule(scope=glob.escape(scope), precision=self.precision)
            deeper = [place for place in inside if place.scope != scope]
            own = [place for place in inside if place.scope == scope and place.file]
            found.append(Group(rule, (*self.scopes(deeper, scope), *self.lines(own))))
        return found

    def functions(self, places: Iterable[Place]) -> list[Group]:
        """A group for each function; for each line of what is no named function."""
        found: list[Group] = []
        for (file, function), inside in _by(places, lambda p: (p.file, p.function)).items():
            lines = self.lines(inside)
            if function.isidentifier():
                rule = Rule(function=function, file=self.globs[file], precision=self.precision)
                found.append(Group(rule, lines))
            else:
                found += lines
        return found

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
    found: dict[K, list[Place]] = {}
    for place in places:
        found.setdefault(key(place), []).append(place)
    return found


def _shortest_glob(file: str, files: Sequence[str]) -> str:
    """The shortest end of a path that tells a file from the others."""
    parts = file.split("/")
    for length in range(1, len(parts)):
        end = "/" + "/".join(parts[-length:])
        if sum(other.endswith(end) for other in files) == 1:
            return "*" + glob.escape(end)
    return glob.escape(file)
