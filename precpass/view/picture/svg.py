"""A program's dataflow as a picture (SVG), coloured by the precision that it runs in."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from xml.sax import saxutils

from precpass.units import counted, sized
from precpass.view.picture.clusters import Box, Chart
from precpass.view.picture.layout import Frame, Layout, Line, Note, laid_out, short
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
    "mixed": "some products low",
    "wide": "wide",
    "other": "no floating values",
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


def picture(chart: Chart, title: str, graphviz: bool | None) -> Picture:
    """The picture of a chart.

    Args:
        chart: what is drawn.
        title: the text above it.
        graphviz: whether graphviz's `dot` lays it out; None for `dot` if it is installed.

    Raises:
        RuntimeError: if `dot` is asked for and not installed, or fails.
    """
    dot = shutil.which("dot") if graphviz is not False else None
    if graphviz and dot is None:
        raise RuntimeError(
            "graphviz's `dot` is not installed: install graphviz, or leave out graphviz=True for "
            "precpass's own layout"
        )
    return Picture(_by_graphviz(dot, chart, title) if dot else _svg(chart, title))


def tone(box: Box) -> str:
    """The precision of most of a box's bytes: "low", "mixed", "wide" or "other".

    That of a box with products is "low" if all of them are low, and "mixed" if some are.
    """
    if box.products:
        return "low" if box.low == box.products else "mixed" if box.low else "wide"
    if not box.formats:
        return "other"
    return "low" if box.moved_low > box.moved / 2 else "wide"


def _shares(chart: Chart) -> list[float]:
    """Each box's share of the bytes that are read and written."""
    total = sum(box.moved for box in chart.boxes)
    return [box.moved / total if total else 0.0 for box in chart.boxes]


def _opacity(share: float) -> float:
    """That of a box: by the root of its share, so that a hundredth is still seen."""
    return _FAINTEST + (1 - _FAINTEST) * min(1.0, 2 * share) ** 0.5


def _text(box: Box, share: float) -> tuple[str, str]:
    """The two lines in a box: its label, and how much of it is low and of the bytes."""
    several = box.formats.total() > 1
    low = f"{box.low}/{box.products} low, " if several and box.products else ""
    percent = f"{100 * share:.0f}%" if share >= 0.005 else "<1%"
    return short(box.label), f"{low}{percent}"


def _details(box: Box, share: float) -> str:
    formats = ", ".join(f"{n} in {name}" for name, n in box.formats.most_common())
    lines = "\n".join(shown_source(line) for line, _ in box.lines.most_common(5))
    casts = f"\n{counted(box.casts, 'cast')} inserted" if box.casts else ""
    stored = counted(box.stored, "equation")
    casts += f"\nresults of {stored} stored in 16 bits" if box.stored else ""
    moved = f"\n{sized(box.moved)} read and written, {share:.1%}" if box.moved else ""
    return f"{'/'.join((*box.path, box.label))}\n{formats}{moved}{casts}\n{lines}".strip()


def escape(text: str) -> str:
    """Text, escaped for XML."""
    return saxutils.escape(_legal(text))


def _legal(text: str) -> str:
    """Text with U+FFFD for characters that XML excludes: control characters, lone surrogates."""
    return _NO_XML.sub("\ufffd", text)


def _svg(chart: Chart, title: str) -> str:
    shares = _shares(chart)
    texts = [_text(box, share) for box, share in zip(chart.boxes, shares, strict=True)]
    layout = laid_out(chart, texts, _ROOM, 2 * _ROOM + 8)
    least = max(_LEGEND_WIDTH, 7.5 * len(title))
    shift = max(0.0, (least - layout.width) / 2)
    layout = laid_out(chart, texts, _ROOM + shift, 2 * _ROOM + 8) if shift else layout
    width = max(layout.width, least) + 2 * _ROOM
    height = layout.height + 6 * _ROOM + _LEGEND_HEIGHT
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
            f'viewBox="0 0 {width:.0f} {height:.0f}" class="precpass-picture" role="img" '
            f"aria-label={saxutils.quoteattr(_legal(title))}>",
            f"<style>{_STYLE}</style>",
            f'<rect class="page" width="{width:.0f}" height="{height:.0f}"/>',
            f'<text x="{_ROOM}" y="{_ROOM + 6}">{escape(title)}</text>',
            *map(_scope, layout.scopes),
            *map(_edge, layout.lines),
            *map(_note, layout.notes),
            *map(_name, layout.scopes),
            *_boxes(chart, layout, texts, shares),
            *_legend(height - _LEGEND_HEIGHT - 2 * _ROOM),
            "</svg>",
        ]
    )


def _boxes(
    chart: Chart, layout: Layout, texts: Sequence[tuple[str, str]], shares: Sequence[float]
) -> Iterator[str]:
    for i, box in enumerate(chart.boxes):
        at, (first, second) = layout.boxes[i], texts[i]
        yield f'<g class="box"><title>{escape(_details(box, shares[i]))}</title>'
        yield (
            f'<rect class="{tone(box)}" fill-opacity="{_opacity(shares[i]):.2f}" x="{at.x:.1f}" '
            f'y="{at.y:.1f}" width="{at.width:.1f}" height="{at.height:.1f}" rx="6"/>'
        )
        middle = f'x="{at.x + at.width / 2:.1f}" text-anchor="middle"'
        yield f'<text {middle} y="{at.y + 17:.1f}">{escape(first)}</text>'
        yield f'<text class="more" {middle} y="{at.y + 31:.1f}">{escape(second)}</text>'
        if box.casts:
            x, y = at.x + at.width - 3, at.y + 3
            across = max(8.0, 3.1 * len(str(box.casts)) + 3)  # the number's letters are 5.4 wide
            yield f'<ellipse class="cast" cx="{x:.1f}" cy="{y:.1f}" rx="{across:.1f}" ry="8"/>'
            at_middle = f'x="{x:.1f}" y="{y + 3:.1f}" text-anchor="middle"'
            yield f'<text class="mark" {at_middle}>{box.casts}</text>'
        yield "</g>"


def _scope(frame: Frame) -> str:
    return (
        f'<g class="around"><title>{escape(frame.label)}</title>'
        f'<rect class="scope" x="{frame.x:.1f}" y="{frame.y:.1f}" '
        f'width="{frame.width:.1f}" height="{frame.height:.1f}" rx="10"/></g>'
    )


def _name(frame: Frame) -> str:
    at = f'x="{frame.x + 10:.1f}" y="{frame.y + 16:.1f}"'
    return f'<text class="name" {at}>{escape(short(frame.label))}</text>'


def _note(note: Note) -> str:
    return f'<text class="note" x="{note.x:.1f}" y="{note.y:.1f}">{escape(note.text)}</text>'


def _edge(line: Line) -> str:
    (_, x, y), *steps = line.steps
    path = f"M{x:.1f} {y:.1f}"
    for kind, x2, y2 in steps:
        bend = (y2 - y) / 2
        curve = f"C{x:.1f} {y + bend:.1f} {x2:.1f} {y2 - bend:.1f} {x2:.1f} {y2:.1f}"
        path += curve if kind == "C" else f"L{x2:.1f} {y2:.1f}"
        x, y = x2, y2
    style = "edge" + " back" * line.back + " thick" * line.thick
    # Every line ends downwards. A marker would be looked up by its name in the whole page.
    tip = f"{x:.1f},{y:.1f} {x - 3.5:.1f},{y - 7.5:.1f} {x + 3.5:.1f},{y - 7.5:.1f}"
    return f'<path class="{style}" d="{path}"/><polygon class="tip" points="{tip}"/>'


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


# ---------------------------------------------------------------- graphviz


def dot_text(chart: Chart, title: str) -> str:
    """The chart in graphviz's language."""
    lines = ["digraph {", f"label={_quoted(title)}; labelloc=t; fontname=monospace;"]
    lines.append('node [shape=box style="rounded,filled" fontname=monospace fontsize=11];')
    lines.append("edge [fontname=monospace fontsize=9];")
    lines += _cluster(chart, (), list(range(len(chart.boxes))), "cluster")
    for (a, b), types in sorted(chart.edges.items()):
        (first, _), *others = types
        text = f"{first} +{len(others)}" if others else first
        lines.append(f"n{a} -> n{b} [label={_quoted(text)}];")
    return "\n".join([*lines, "}"])


def _cluster(chart: Chart, path: tuple[str, ...], members: list[int], name: str) -> Iterator[str]:
    inner: dict[str, list[int]] = {}
    shares = _shares(chart)
    for i in members:
        box = chart.boxes[i]
        if len(box.path) > len(path):
            inner.setdefault(box.path[len(path)], []).append(i)
            continue
        text = "  ".join(_text(box, shares[i]))
        text += f"  ({counted(box.casts, 'cast')})" if box.casts else ""
        alpha = f"{round(255 * _opacity(shares[i])):02x}"
        color, tip = _COLORS[tone(box)][0] + alpha, _quoted(_details(box, shares[i]))
        yield f'n{i} [label={_quoted(text)} fillcolor="{color}" tooltip={tip}];'
    for at, (label, inside) in enumerate(inner.items()):
        tip = _quoted(label)
        yield f"subgraph {name}_{at} {{ label={_quoted(short(label))}; tooltip={tip}; style=dashed;"
        yield from _cluster(chart, (*path, label), inside, f"{name}_{at}")
        yield "}"


def _quoted(text: str) -> str:
    # In a label graphviz interprets escapes such as \N and entities such as &lt;.
    escapes = {"\\": "\\\\", '"': '\\"', "&": "&amp;", "\n": "\\n", "\r": "\\n"}
    return f'"{_legal(text).translate(str.maketrans(escapes))}"'


def _by_graphviz(dot: str, chart: Chart, title: str) -> str:
    # dot reads and writes UTF-8 in every locale.
    run = subprocess.run(
        [dot, "-Tsvg"],
        input=dot_text(chart, title),
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        check=False,
    )
    if run.returncode:
        raise RuntimeError(f"graphviz's dot failed: {run.stderr.strip()}")
    return run.stdout
