"""The changes of a plan by module and line of your code, and the differences between two plans."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from precpass.plan.eqn_info import Cast, Crossed, Site
from precpass.plan.plan import Action, Plan
from precpass.policy.precision import Precision
from precpass.policy.primitives import op
from precpass.units import are, counted
from precpass.view.rows import Frame, Row, listed_sites, paired_rows, rows
from precpass.view.text import Line, heading, rendered

__all__ = [
    "LEVELS",
    "Section",
    "between",
    "changes",
    "check_level",
    "diff_tree",
    "totals",
]

LEVELS = ("lines", "equations", "jaxpr")

_TYPES = 3
"""The number of types that are named of the values that cross a border."""


Item = tuple[Row, ...]
"""An equation under one plan, or under two that are compared."""


@dataclasses.dataclass(eq=False)
class Section:
    """What stands inside one equation with bodies, in the order of execution.

    Attributes:
        describe: the lines for the items of a source line.
        parts: the sections inside, and the items of each source line.
    """

    describe: Callable[[list[Item]], Iterable[Line]]
    parts: dict[Frame | Site, Section | list[Item]] = dataclasses.field(default_factory=dict)

    def lines(self, indent: str = "") -> Iterator[Line]:
        """The section's lines, in which inner sections are indented."""
        for head, inside in self.entries():
            yield [(indent, ""), *head]
            if isinstance(inside, Section):
                yield from inside.lines(indent + "  ")
            else:
                yield from ([(indent + "  ", ""), *line] for line in inside)

    def entries(self) -> Iterator[tuple[Line, Section | list[Line]]]:
        """Each loop, branch, rule and source line, with the lines under it."""
        for key, part in self.parts.items():
            if isinstance(key, Frame):
                assert isinstance(part, Section)
                at = [] if not key.source.file else [("  ", ""), *heading(key.source)]
                yield [(key.name, "frame"), *at], part
            else:
                assert isinstance(part, list)
                yield heading(key.source, key.module), list(self.describe(part))


def _tree(items: Sequence[Item], describe: Callable[[list[Item]], Iterable[Line]]) -> Section:
    """Items inside the loops, branches and rules that they stand in, by source line."""
    sites = listed_sites(item[0].info.site for item in items)
    root = Section(describe)
    for item in items:
        section = root
        for frame in _shown(item[0]):
            inner = section.parts.setdefault(frame, Section(describe))
            assert isinstance(inner, Section)
            section = inner
        same = section.parts.setdefault(sites[item[0].info.site], [])
        assert isinstance(same, list)
        same.append(item)
    return root


def check_level(level: str) -> None:
    """Raises a ValueError for an unknown level."""
    if level not in LEVELS:
        raise ValueError(f"no level {level!r}: legal are {', '.join(map(repr, LEVELS))}")


def diff_tree(plan: Plan, level: str = "equations") -> Section:
    """The changes of a plan, by source line.

    Args:
        plan: a plan that `inspect` made.
        level: "lines" for a line per source line, or "equations" for one per equation.
    """
    changed = [(row,) for row in rows(plan) if row.changes]
    return _tree(changed, _changes if level == "equations" else _summary)


def changes(plan: Plan) -> list[dict[str, Any]]:
    """The changes of a plan as JSON values, one for each equation."""
    return [
        {
            "source": dataclasses.asdict(row.info.source),
            "scope": row.scope,
            "inside": [frame.name for frame in row.frames],
            "primitive": row.info.primitive,
            "operands": list(map(str, row.info.operands)),
            "results": list(map(str, row.info.results)),
            "action": row.decision.action.value,
            "compute": None if row.decision.compute is None else str(row.decision.compute),
            "swapped": row.decision.product.exchanged,
            "stored": [None if p is None else str(p) for p in row.decision.stored],
            "crossed": [
                {"value": str(value), "is_operand": is_operand, "alone": alone}
                for value, is_operand, alone in row.info.crossed
            ],
            "casts": [f"{cast} {cast.what}" for cast in row.info.casts],
            "reason": str(row.decision.reason),
        }
        for row in rows(plan)
        if row.changes
    ]


def between(
    first: Plan, second: Plan, level: str = "equations", *, color: bool | None = None
) -> str:
    """Compare two plans of one program, and return where they differ, by source line.

    Args:
        first: the `.plan` of `inspect(f, policy)(*args)`.
        second: the plan of the same function and arguments under another policy.
        level: "lines" or "equations", as for `Inspection.diff`.
        color: as for `Inspection.diff`.

    Returns:
        The number of equations that differ, and one heading per source line, under it the equations
        that the plans treat differently, as `first | second`.

    Raises:
        TypeError: for an argument that is not a plan.
        ValueError: for plans of two programs, or another level.

    Examples:
        >>> import jax.numpy as jnp
        >>> from precpass import inspect
        >>> plans = [inspect(lambda x: x @ x, p)(jnp.ones((4, 4))).plan
        ...          for p in ("AutoMixedF16", "AutoMixedBf16")]
        >>> print(between(*plans, color=False).splitlines()[0])
        1 of 1 equations differ
    """
    for plan in (first, second):
        if not isinstance(plan, Plan):  # pyright: ignore[reportUnnecessaryIsInstance] -- user input
            raise TypeError(f"between compares plans, not {plan!r}: give inspect(...)(...).plan")
    if level not in LEVELS[:2]:
        raise ValueError(f"no level {level!r} between plans: legal are 'lines' and 'equations'")
    pairs = list(paired_rows(first, second))
    differing = [(a, b) for a, b in pairs if _fate(a) != _fate(b)]
    tree = _tree(differing, _contrasts if level == "equations" else _contrast)
    total = sum(a.decision.action is not Action.ENTER for a, _ in pairs)
    lines: list[Line] = [*tree.lines()]
    outputs = [origin.output or "their own format" for p in (first, second) if (origin := p.origin)]
    if len(set(outputs)) > 1:
        lines.append([("outputs  ", "frame"), (" | ".join(outputs), "cast")])
    entered = sum(a.decision.action is Action.ENTER for a, _ in differing)
    said = f"{len(differing) - entered} of {total} equations differ"
    said += f", and {entered} that {are(entered)} entered" if entered else ""
    return rendered([[(said, "")], *lines], color)


def totals(plan: Plan, name: str, outputs: int = 0, device: str = "") -> str:
    """A line with the totals of a plan's changes.

    Args:
        plan: the plan.
        name: the policy's, or what else the line begins with.
        outputs: the number of casts of results.
        device: what it is planned for; "" leaves it out.
    """
    plan_rows = list(rows(plan))
    fates = Counter(map(_fate_in_words, plan_rows))
    entered = fates.pop("", 0)
    casts = Counter(cast.what for row in plan_rows for cast in row.info.casts)
    casts += Counter({"inserted": outputs})
    said = ", ".join(f"{counted(n, 'cast')} {what}" for what, n in sorted(casts.items()))
    order = "".join(f"{fates[what]} {what}, " for what in _SELDOM if fates[what])
    return (
        f"{name}: {fates['lowered']} of {len(plan_rows) - entered} equations lowered, "
        f"{fates['widened']} widened, {order}{fates['as written']} as written"
        f"{'; ' if said else ''}{said}{f'; planned for {device}' if device else ''}"
    )


_SELDOM = "multiplied in another way", "reordered", "stored in 16 bits"


def _fate_in_words(row: Row) -> str:
    """What happens to an equation, as `totals` counts it; "" for one with bodies."""
    decision = row.decision
    if decision.reorders:
        return "reordered"
    match decision.action:
        case Action.ENTER:
            return ""
        case Action.LOWER:
            return "lowered"
        case Action.MULTIPLY:
            return "multiplied in another way"
        case Action.WIDEN:
            return "widened"
        case Action.DROP if row.changes:
            return "widened"
        case Action.KEEP if decision.stores_low:
            return "stored in 16 bits"
        case _:
            return "as written"


def _shown(row: Row) -> tuple[Frame, ...]:
    return tuple(frame for frame in row.frames if not frame.is_call)


def _changes(items: list[Item]) -> Iterator[Line]:
    """A line for each change, of which equal ones are counted."""
    same: dict[tuple[str, str, str, str], list[Row]] = {}
    for (row,) in items:
        head = f"{row.info.signature}: ", _verb(row), _style(row), str(row.decision.reason)
        same.setdefault(head, []).append(row)
    for (signature, verb, style, reason), found in same.items():
        casts = _casts(cast for row in found for cast in row.info.casts)
        joint = "; in all " if len(found) > 1 else "; "
        said = [(joint, ""), (casts, "cast")] if casts else []
        yield [(signature, ""), (verb, style), *said, *_end(reason, len(found))]


def _end(reason: str, n: int) -> Line:
    why = [(f"  [{reason}]", "reason")] if reason else []
    return [*why, *([(f"  ({n} times)", "")] if n > 1 else [])]


def _summary(items: list[Item]) -> Iterator[Line]:
    """One line for all changes of a source line."""
    same = [row for (row,) in items]
    # A cast may be listed with an unchanged equation, so it is shown even if the line is unchanged.
    changed = [row for row in same if row.info.crossed or row.decision.alters]
    joints = {True: ": ", False: " "}
    counts = Counter(
        f"{row.info.primitive}{joints[bool(row.info.crossed)]}{_verb(row)}"
        for row in changed or same
    )
    casts = _casts(cast for row in same for cast in row.info.casts)
    yield [(_counted(counts, "; "), "low"), *([("; ", ""), (casts, "cast")] if casts else [])]


def _contrasts(items: list[Item]) -> Iterator[Line]:
    """A line for each difference between two plans, of which equal ones are counted."""
    same: Counter[tuple[tuple[tuple[str, str], ...], str]] = Counter()
    for a, b in items:
        casts = [_casts(row.info.casts) or "no casts" for row in (a, b)]
        differ = [(f"; {casts[0]} | {casts[1]}", "cast")] if casts[0] != casts[1] else []
        reasons = dict.fromkeys(str(row.decision.reason) for row in (a, b))
        verbs = (_verb(a), _style(a)), (" | ", ""), (_verb(b), _style(b))
        same[((f"{a.info.signature}: ", ""), *verbs, *differ), " | ".join(reasons)] += 1
    yield from ([*head, *_end(reason, n)] for (head, reason), n in same.items())


def _contrast(items: list[Item]) -> Iterator[Line]:
    """One line for all differences at a source line."""
    texts = Counter(f"{a.info.primitive}: {_verb(a)} | {_verb(b)}" for a, b in items)
    yield [(_counted(texts, "; "), "cast")]


def _verb(row: Row) -> str:
    if row.info.crossed:
        return _crossed(row.info.crossed)
    formats = {p: None for p in row.decision.stored if p is not None}
    stored = f", stored in {', '.join(map(str, formats))}" if row.decision.stores_low else ""
    return _computed(row) + stored + _backward(row)


def _backward(row: Row) -> str:
    """What the derivative of an equation saves and makes in bfloat16, in words."""
    form = row.decision.backward
    if form is None:
        return ""
    saved = ", factors of its derivative saved in bf16" if any(form.low_factors) else ""
    return saved + (", its cotangent in bf16" if form.low_cotangent else "")


def _computed(row: Row) -> str:
    """The precision that an equation is evaluated in, apart from the storage of its results."""
    decision = row.decision
    match decision.action:
        case Action.DROP if not row.changes:
            return f"stays in {row.info.results[0].dtype}"
        case Action.DROP if row.info.primitive == "convert_element_type":
            is_moved = any(cast.what == "moved" for cast in row.info.casts)
            return "cast moved" if is_moved else "cast removed"
        case Action.DROP:
            return "left out" if decision.reorders else "removed"
        case Action.KEEP if decision.reorders:
            return "operands exchanged"
        case Action.LOWER if op(row.info.primitive).accumulates and not decision.adds_low:
            how = ", operands exchanged" if decision.product.exchanged else ""
            rounded = f", result in {decision.compute}" if decision.product.low_result else ""
            scaled = decision.product.scaled
            sums = "int32" if scaled is Precision.INT8 else "f32"
            return f"in {scaled or decision.compute}, accumulated in {sums}{rounded}{how}"
        case Action.MULTIPLY:
            how = ", operands exchanged" if decision.product.exchanged else ""
            return f"multiplied in {decision.compute}{how}"
        case Action.LOWER | Action.WIDEN:
            return f"in {decision.compute}"
        case _:
            return f"stays in {decision.compute}" if decision.compute else "stays"


def _crossed(crossed: Sequence[Crossed]) -> str:
    """The values whose border copies cross, in words."""
    said: list[str] = []
    for is_operand, alone, bits in itertools.product((True, False), (True, False), (16, 8)):
        alike = [c for c in crossed if c[1:] == (is_operand, alone)]
        types = [str(c.value) for c in alike if c.bits == bits]
        if not types:
            continue
        what = counted(len(types), "operand" if is_operand else "result")
        text = f"{what} {are(len(types))} passed in {bits} bits"
        counts = Counter(types)
        some = _counted(Counter(dict(list(counts.items())[:_TYPES])))
        more = f" and {len(counts) - _TYPES} more types" if len(counts) > _TYPES else ""
        text += f"{'' if alone else ' too'} ({some}{more})"
        said.append(text + (", cast once outside" if is_operand and not alone else ""))
    return "; ".join(said)


def _style(row: Row) -> str:
    low = row.decision.action is Action.LOWER or row.decision.stores_low or row.info.crossed
    return "low" if low else "wide"


def _casts(casts: Iterable[Cast]) -> str:
    texts = {False: Counter[str](), True: Counter[str]()}
    for cast in casts:
        texts[cast.what == "removed"][f"{cast} {cast.what}"] += 1
    there = f"cast {_counted(texts[False])}" if texts[False] else ""
    return ", ".join(filter(None, (there, _counted(texts[True]))))


def _counted(texts: Counter[str], joint: str = ", ") -> str:
    return joint.join(f"{text} (x{n})" if n > 1 else text for text, n in texts.items())


def _fate(row: Row) -> tuple[object, ...]:
    decision = row.decision
    changed = row.changes and decision.alters
    form = decision.product.exchanged, decision.product.low_result, decision.product.scaled
    fields = decision.action, decision.compute, decision.stored, form, decision.backward
    fate = fields if changed else ()
    return (fate, row.info.crossed, Counter(row.info.casts))
