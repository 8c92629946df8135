"""A program's dataflow as a picture (SVG), coloured by the precision that it runs in."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from xml.sax import saxutils

from precpass.units import counted, sized
from precpass.view.picture.chart import Box, Chart
from precpass.view.picture.layout import ENTRY, EXIT, NOTE, Line, Point, Thing, laid_out
from precpass.view.picture.places import Path as Scopes
from precpass.view.text import shown_source

__all__ = ["Picture", "picture"]

_COLORS = {
    "low": ("#5bcf98", "#1f8055"),
    "mixed": ("#84bdfb", "#2b63a8"),
    "wide": ("#ffb547", "#96620c"),
    "other": ("#b6b8c3", "#55555f"),
}
"""The fill of a box in light and in dark mode, by the precision of its equations."""

_FAINTEST = 0.12
"""The opacity of a box whose equations move next to nothing."""

_LEGEND = {
    "low": "low precision",
    "mixed": "mixed",
    "wide": "float32 or wider",
    "other": "no floats",
}
_LEGEND_WIDTH = sum(40 + 7.5 * len(text) for text in (*_LEGEND.values(), "casts"))
_MEANING = (
    "%, and the strength of the colour: the share of all",
    "bytes of operands and results, times loops' trips",
)

_RULES = {
    "text": "font:12px ui-monospace,monospace;fill:#1c1c1f",
    ".more": "font-size:10px",
    ".note": "font-size:10px;fill:#60646c",
    ".note,.name": "paint-order:stroke;stroke:#ffffff;stroke-width:3px",
    ".edge": "fill:none;stroke:#8b8d98;stroke-width:1.2",
    ".back": "stroke-dasharray:4 3",
    ".thick": "stroke-width:3",
    ".tip": "fill:#8b8d98",
    ".scope": "fill:none;stroke:#b9bbc6;stroke-dasharray:6 3",
    ".page": "fill:#ffffff",
    ".cast": "fill:#0b68cb",
    ".mark": "fill:#ffffff;font-size:9px",
    **{f".{name}": f"fill:{light};stroke:#8b8d98" for name, (light, _) in _COLORS.items()},
}
_DARK_RULES = {
    "text": "fill:#edeef0",
    ".note": "fill:#b0b4ba",
    ".note,.name": "stroke:#111113",
    ".edge,.scope": "stroke:#6f6d78",
    ".page": "fill:#111113",
    ".cast": "fill:#3b9eff",
    **{f".{name}": f"fill:{dark};stroke:#6f6d78" for name, (_, dark) in _COLORS.items()},
}


def _sheet(rules: dict[str, str]) -> str:
    """A style sheet of pictures alone: in a page it would hold for all that is around them."""
    return "".join(
        f"{','.join(f'.precpass-picture {one}' for one in names.split(','))}{{{rule}}}"
        for names, rule in rules.items()
    )


_STYLE = f"{_sheet(_RULES)}@media (prefers-color-scheme:dark){{{_sheet(_DARK_RULES)}}}"
_NO_XML = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")
_ROOM, _LEGEND_HEIGHT = 16.0, 30.0
_LETTER, _SMALL_LETTER, _BESIDE = 7.3, 6.1, 5.0
_HEIGHT, _NARROWEST, _LONGEST = 40.0, 72.0, 32
_FEW = 4
"""The most boxes of an area whose lines to another area are drawn one by one."""

Unit = int | Scopes
"""What stands in an area: a box, by its position in the chart, or an area, by its path."""


@dataclasses.dataclass(frozen=True)
class Picture:
    """An SVG picture, which a notebook displays.

    Attributes:
        svg: the text of the SVG. It is self-contained and readable in light and dark mode.
    """

    svg: str

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the picture to an SVG file.

        Raises:
            ValueError: for a path with the ending of another format.
        """
        if (suffix := Path(path).suffix.lower()) not in ("", ".svg"):
            raise ValueError(f"{os.fspath(path)}: a picture is SVG, not {suffix}: name it .svg")
        Path(path).write_text(self.svg, encoding="utf-8")

    def _repr_svg_(self) -> str:
        return self.svg

    def __repr__(self) -> str:
        return f"<Picture of {len(self.svg)} characters of SVG: .save(path) writes it>"


def picture(chart: Chart, title: str) -> Picture:
    """The picture of a chart, with a title above it."""
    svg, whole = _Drawing(chart).area((), range(len(chart.boxes)))
    width = max(whole.width, _LEGEND_WIDTH, 7.5 * len(title)) + 2 * _ROOM
    height = whole.height + 6 * _ROOM + _LEGEND_HEIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" class="precpass-picture" role="img" '
        f"aria-label={saxutils.quoteattr(_legal(title))}>",
        f"<style>{_STYLE}</style>",
        f'<rect class="page" width="{width:.0f}" height="{height:.0f}"/>',
        f'<text x="{_ROOM}" y="{_ROOM + 6}">{_escaped(title)}</text>',
        _moved((width - whole.width) / 2, 2 * _ROOM + 8, svg),
        *_legend(height - _LEGEND_HEIGHT - 2 * _ROOM),
        "</svg>",
    ]
    return Picture("\n".join(parts))


class _Drawing:
    """The parts of a picture, from the innermost areas outwards."""

    def __init__(self, chart: Chart) -> None:
        self.boxes = chart.boxes
        total = sum(box.moved for box in chart.boxes)
        self.shares = [box.moved / total if total else 0.0 for box in chart.boxes]
        self.edges: dict[Scopes, dict[Line, None]] = collections.defaultdict(dict)
        self.values: dict[Unit, dict[tuple[int, str], float]] = collections.defaultdict(dict)
        self.bundles: set[Line] = set()
        between: dict[tuple[Scopes, Unit, Unit], list[tuple[int, int]]] = {}
        for a, b in sorted(chart.edges):
            depth = _shared(self.boxes[a].path, self.boxes[b].path)
            around = self.boxes[a].path[:depth]
            edge = self._unit(a, depth), self._unit(b, depth)
            between.setdefault((around, *edge), []).append((a, b))
        for (around, start, end), pairs in between.items():
            self.edges[around][start, end] = None
            values = {(a, name): size for a, b in pairs for name, size in chart.edges[a, b].items()}
            if isinstance(start, tuple) and len({a for a, _ in pairs}) > _FEW:
                self.bundles.add((start, end))
                self.values[start] |= values
                continue
            for (a, name), size in values.items():
                self.values[a][a, name] = size
            for a, b in pairs:
                self._lead(a, b, len(around))

    def _lead(self, a: int, b: int, depth: int) -> None:
        """Adds the line from a box to another in the areas that only one of them stands in."""
        out, into = self.boxes[a].path, self.boxes[b].path
        for i in range(depth + 1, len(out) + 1):
            self.edges[out[:i]][self._unit(a, i), EXIT] = None
        for i in range(depth + 1, len(into) + 1):
            self.edges[into[:i]][ENTRY, self._unit(b, i)] = None

    def _unit(self, box: int, depth: int) -> Unit:
        """What stands for a box in the area around it of this depth: itself, or an area inside."""
        path = self.boxes[box].path
        return path[: depth + 1] if len(path) > depth else box

    def _note(self, unit: Unit) -> str:
        """The text below a thing: a box's largest value for others, or the size of a bundle."""
        values = self.values.get(unit, {})
        if not isinstance(unit, int):
            size = sized(sum(values.values()))
            return f"{counted(len(values), 'value')}, {size}" if values else ""
        first, *others = sorted(values, key=lambda value: (-values[value], value)) or [(0, "")]
        return f"{first[1]} +{len(others)}" if others else first[1]

    def area(self, path: Scopes, members: Sequence[int]) -> tuple[str, Thing]:
        """What is in an area, and its layout."""
        units: dict[Unit, list[int]] = collections.defaultdict(list)
        for i in members:
            units[self._unit(i, len(path))].append(i)
        drawn = {
            unit: self._box(unit) if isinstance(unit, int) else self._scope(unit, inside)
            for unit, inside in units.items()
        }
        things = {unit: thing for unit, (_, thing) in drawn.items()}
        name = _LETTER * len(_short(path[-1])) if path else None
        laid = laid_out(things, self.edges[path], name)
        parts = [_line(laid.back, " back")] if laid.back else []
        for (a, b), points in laid.lines.items():  # that to an area goes on to a box in it
            is_bundle = (a, b) in self.bundles
            style, has_tip = " thick" * is_bundle, is_bundle or isinstance(b, int)
            parts.append(_line(points, style, has_tip=has_tip))
        for unit, (x, y) in laid.corners.items():
            parts.append(_moved(x, y, drawn[unit][0]))
            if note := self._note(unit):
                x, y = x + things[unit].exit + _BESIDE, y + things[unit].height + 12
                parts.append(f'<text class="note" x="{x:.1f}" y="{y:.1f}">{_escaped(note)}</text>')
        return "\n".join(parts), laid

    def _noted(self, unit: Unit, thing: Thing) -> Thing:
        """A thing with the room of the text below it."""
        if not (note := self._note(unit)):
            return thing
        room = max(thing.width, thing.exit + _BESIDE + _SMALL_LETTER * len(note) + 2)
        return dataclasses.replace(thing, room=room, depth=thing.height + NOTE)

    def _scope(self, path: Scopes, members: Sequence[int]) -> tuple[str, Thing]:
        svg, laid = self.area(path, members)
        frame = (
            f'<g class="around"><title>{_escaped(path[-1])}</title><rect class="scope" '
            f'width="{laid.width:.1f}" height="{laid.height:.1f}" rx="10"/></g>\n{svg}\n'
            f'<text class="name" x="10" y="16">{_escaped(_short(path[-1]))}</text>'
        )
        return frame, self._noted(path, laid)

    def _box(self, unit: int) -> tuple[str, Thing]:
        box, share = self.boxes[unit], self.shares[unit]
        several = box.formats.total() > 1 and box.products
        low = f"{box.low}/{box.products} low, " if several else ""
        texts = _short(box.label), low + (f"{100 * share:.0f}%" if share >= 0.005 else "<1%")
        letters = max(_LETTER * len(texts[0]), _SMALL_LETTER * len(texts[1]))
        width = max(_NARROWEST, letters + 28)
        # By the root of its share, so that a hundredth is still seen.
        opacity = _FAINTEST + (1 - _FAINTEST) * min(1.0, 2 * share) ** 0.5
        middle = f'x="{width / 2:.1f}" text-anchor="middle"'
        parts = [
            f'<g class="box"><title>{_escaped(_details(box, share))}</title>',
            f'<rect class="{_tone(box)}" fill-opacity="{opacity:.2f}" width="{width:.1f}" '
            f'height="{_HEIGHT:.0f}" rx="6"/>',
            f'<text {middle} y="17">{_escaped(texts[0])}</text>',
            f'<text class="more" {middle} y="31">{_escaped(texts[1])}</text>',
        ]
        if box.casts:
            across = max(8.0, 3.1 * len(str(box.casts)) + 3)  # the number's letters are 5.4 wide
            at = f'x="{width - 3:.1f}" y="6" text-anchor="middle"'
            parts.append(
                f'<ellipse class="cast" cx="{width - 3:.1f}" cy="3" rx="{across:.1f}" ry="8"/>'
                f'<text class="mark" {at}>{box.casts}</text>'
            )
        thing = Thing(width, _HEIGHT, width / 2, width / 2, width, _HEIGHT, unit)
        return "\n".join([*parts, "</g>"]), self._noted(unit, thing)


def _shared(a: Scopes, b: Scopes) -> int:
    """How many areas are around both of two paths."""
    pairs = zip(a, b, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _tone(box: Box) -> str:
    """The precision of most of a box's bytes: "low", "mixed", "wide" or "other".

    That of a box with products is "low" if all of them are low, and "mixed" if some are.
    """
    if box.products:
        return "low" if box.low == box.products else "mixed" if box.low else "wide"
    if not box.formats:
        return "other"
    return "low" if box.moved_low > box.moved / 2 else "wide"


def _details(box: Box, share: float) -> str:
    formats = ", ".join(f"{n} in {name}" for name, n in box.formats.most_common())
    lines = "\n".join(shown_source(line) for line, _ in box.lines.most_common(5))
    casts = f"\n{counted(box.casts, 'cast')} inserted" if box.casts else ""
    stored = counted(box.stored, "equation")
    casts += f"\nresults of {stored} stored in 16 bits" if box.stored else ""
    moved = f"\n{sized(box.moved)} read and written, {share:.1%}" if box.moved else ""
    return f"{'/'.join((*box.path, box.label))}\n{formats}{moved}{casts}\n{lines}".strip()


def _short(label: str) -> str:
    return label if len(label) <= _LONGEST else label[: _LONGEST - 1] + "\u2026"


def _escaped(text: str) -> str:
    return saxutils.escape(_legal(text))


def _legal(text: str) -> str:
    """Text with U+FFFD for characters that XML excludes: control characters, lone surrogates."""
    return _NO_XML.sub("\ufffd", text)


def _moved(x: float, y: float, svg: str) -> str:
    return f'<g transform="translate({x:.1f} {y:.1f})">\n{svg}\n</g>'


def _line(points: Sequence[Point], style: str, *, has_tip: bool = True) -> str:
    """A line through points, straight where they are above or beside each other."""
    (x, y), *_ = points
    path = f"M{x:.1f} {y:.1f}"
    for (x, y), (x2, y2) in itertools.pairwise(points):
        bend = (y2 - y) / 2
        curve = f"C{x:.1f} {y + bend:.1f} {x2:.1f} {y2 - bend:.1f} {x2:.1f} {y2:.1f}"
        if (x, y) != (x2, y2):
            path += f"L{x2:.1f} {y2:.1f}" if x == x2 or y == y2 else curve
    x, y = points[-1]
    # Every line ends downwards. A marker would be looked up by its name in the whole page.
    tip = f"{x:.1f},{y:.1f} {x - 3.5:.1f},{y - 7.5:.1f} {x + 3.5:.1f},{y - 7.5:.1f}"
    head = f'<polygon class="tip" points="{tip}"/>' if has_tip else ""
    return f'<path class="edge{style}" d="{path}"/>{head}'


def _legend(y: float) -> Iterator[str]:
    x = _ROOM
    for name, text in _LEGEND.items():
        yield f'<rect class="{name}" x="{x:.0f}" y="{y:.0f}" width="14" height="14" rx="3"/>'
        yield f'<text x="{x + 20:.0f}" y="{y + 11:.0f}">{text}</text>'
        x += 40 + 7.5 * len(text)
    yield f'<circle class="cast" cx="{x + 7:.0f}" cy="{y + 7:.0f}" r="7"/>'
    yield f'<text x="{x + 20:.0f}" y="{y + 11:.0f}">casts</text>'
    for i, text in enumerate(_MEANING):
        yield f'<text class="more" x="{_ROOM:.0f}" y="{y + 30 + 13 * i:.0f}">{text}</text>'
