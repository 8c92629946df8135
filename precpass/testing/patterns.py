"""The expectations of a test: patterns of equations, each with a precision or numbers."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from precpass.plan.file import Named
from precpass.policy.precision import Precision
from precpass.policy.primitives import OpKind
from precpass.policy.rules import EqnView, Rule
from precpass.policy.scopes import clean_scope

__all__ = ["Pattern"]


@dataclasses.dataclass(frozen=True)
class Pattern:
    """A pattern of equations and what is expected of them.

    Attributes:
        text: the pattern as it was given.
        rule: matches the equations; None for a pattern that is a kind.
        kind: the kind; None for a pattern with a rule.
        wanted: the precision of all of them, or the number of equations in each precision.
    """

    text: str
    rule: Rule | None
    kind: OpKind | None
    wanted: Precision | dict[Precision, int]

    @staticmethod
    def parse(pattern: str | OpKind, wanted: Precision | str | Mapping[Any, int]) -> Pattern:
        """Reads a pattern and what is expected of it, as `assert_precision` takes them.

        Raises:
            TypeError: for an object that is not a pattern.
            ValueError: for an unknown precision, or a value that is not a number of equations.
        """
        text = repr(pattern)
        if isinstance(wanted, Mapping):
            for number in wanted.values():
                if type(number) is not int or number < 0:
                    raise ValueError(f"{text}: {number!r} is not a number of equations")
            parsed = {Precision.parse(p): n for p, n in wanted.items()}
        else:
            parsed = Precision.parse(wanted)
        if not isinstance(pattern, str | OpKind):  # pyright: ignore[reportUnnecessaryIsInstance] -- user input
            raise TypeError(f"{text} is not a pattern: give a string such as 'dot_general'")
        if isinstance(pattern, OpKind):
            return Pattern(text, None, pattern, parsed)
        if in_file := _IN_FILE.fullmatch(pattern):
            file, line = in_file["file"], in_file["line"]
            anywhere = file if file.startswith(("*", "/")) else f"*/{file}"
            rule = Rule(file=anywhere, line=int(line) if line else None, precision="f32")
            return Pattern(text, rule, OpKind.COMPUTE, parsed)
        if "/" not in pattern:
            try:
                return Pattern(text, Rule(primitive=pattern, precision="f32"), None, parsed)
            except ValueError:
                pass  # it is no primitive's name, so it may be a scope's
        return Pattern(text, Rule(scope=pattern, precision="f32"), OpKind.COMPUTE, parsed)

    def concerns(self, named: Named) -> bool:
        """Whether an equation matches."""
        info, decision, scope, _ = named
        if decision.compute is None or self.kind not in (None, decision.kind):
            return False
        source = info.source
        place = clean_scope(scope), source.file, source.function, source.line
        view = EqnView(info.primitive, decision.kind, *place, (), (), (), (), {})
        return self.rule is None or self.rule.matches(view)

    def wrong(self, found: list[Named]) -> Iterator[tuple[Named, str]]:
        """Those of the pattern's equations that are not in the expected precision."""
        have = _in_each(found)
        for named in found:
            precision = named.decision.compute
            assert precision is not None
            if isinstance(self.wanted, Precision):
                if precision is not self.wanted:
                    yield named, f"not {self.wanted} as {self.text} asks"
            elif have[precision] > (most := self.wanted.get(precision, 0)):
                yield named, f"and {self.text} asks for {most} there, not {have[precision]}"

    def miscounts(self, found: list[Named]) -> Iterator[str]:
        """A message if the numbers of equations are not the expected ones."""
        have = _in_each(found)
        if isinstance(self.wanted, dict) and have != Counter(self.wanted):
            yield f"{self.text} has {_counted(have)}, not {_counted(self.wanted)}"


_IN_FILE = re.compile(r"(?P<file>.*\.py)(:(?P<line>[1-9][0-9]*))?")


def _in_each(found: list[Named]) -> Counter[Precision]:
    return Counter(p for named in found if (p := named.decision.compute) is not None)


def _counted(numbers: Mapping[Precision, int]) -> str:
    texts = [f"{numbers[p]} in {p}" for p in Precision if numbers.get(p)]
    return ", ".join(texts) or "no equations"
