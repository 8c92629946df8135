"""A program's dataflow as a picture (SVG), coloured by the precision that it runs in."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from xml.sax import saxutils

from precpass.units import counted
from precpass.view.picture.clusters import Box, Chart
from precpass.view.picture.layout import Frame, Layout, laid_out, short
from precpass.view.text import shown_source

__all__ = ["Picture", "picture"]

_COLORS = {
    "low": ("#c6f0d8", "#1d5a3c"),
    "mixed": ("#d6e9ff", "#17406d"),
    "wide": ("#ffe3b8", "#6b4400"),
    "other": ("#ededf0", "#3a3a42"),
}
"""The fill of a box in light and in dark mode, by the precision of its equations."""

_LEGEND = {
    "low": "low precision",
    "mixed": "some products low",
    "wide": "wide",
    "other": "no floating values",
}
_LEGEND_WIDTH = sum(40 + 7.5 * len(text) for text in (*_LEGEND.values(), "casts"))

_STYLE = "".join(
    [
        "text{font:12px ui-monospace,monospace;fill:#1c1c1f}",
        ".edge{fill:none;stroke:#8b8d98;stroke-width:1.2}.back{stroke-dasharray:4 3}",
        ".scope{fill:none;stroke:#b9bbc6;stroke-dasharray:6 3}",
        ".page{fill:#ffffff}.cast{fill:#0b68cb}.mark{fill:#ffffff;font-size:9px}",
        *(f".{name}{{fill:{light};stroke:#8b8d98}}" for name, (light, _) in _COLORS.items()),
        "@media (prefers-color-scheme:dark){text{fill:#edeef0}.page{fill:#111113}",
        ".edge,.scope{stroke:#6f6d78}.cast{fill:#3b9eff}",
        *(f".{name}{{fill:{dark};stroke:#6f6d78}}" for name, (_, dark) in _COLORS.items()),
        "}",
    ]
)
_NO_XML = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")
_ROOM, _LEGEND_HEIGHT = 16.0, 30.0


@dataclasses.dataclass(frozen=True)
class Picture:
    """An SVG.

    Attributes:
        svg: its text, which is self-contained and readable in light and in dark mode.
    """

    svg: str

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes it to a file.

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
            "networkx's layout"
        )
    return Picture(_by_graphviz(dot, chart, title) if dot else _svg(chart, title))


def tone(box: Box) -> str:
    """The precision of a box's equations: "low", "mixed", "wide" or "other"."""
    if box.products:
        return "low" if box.low == box.products else "mixed" if box.low else "wide"
    lows = sum(n for name, n in box.formats.items() if name in ("bf16", "f16"))
    if not box.formats:
        return "other"
    return "low" if lows == box.formats.total() else "mixed" if lows else "wide"


def _text(box: Box) -> str:
    label = short(box.label)
    several = box.formats.total() > 1
    return f"{label}  {box.low}/{box.products} low" if several and box.products else label


def _details(box: Box) -> str:
    formats = ", ".join(f"{n} in {name}" for name, n in box.formats.most_common())
    lines = "\n".join(shown_source(line) for line, _ in box.lines.most_common(5))
    casts = f"\n{counted(box.casts, 'cast')} inserted" if box.casts else ""
    casts += f"\nresults of {counted(box.stored, 'equation')} stored low" if box.stored else ""
    return f"{'/'.join((*box.path, box.label))}\n{formats}{casts}\n{lines}".strip()


def escape(text: str) -> str:
    """Text, escaped for XML."""
    return saxutils.escape(_legal(text))


def _legal(text: str) -> str:
    """Text with U+FFFD for characters that XML excludes: control characters, lone surrogates."""
    return _NO_XML.sub("\ufffd", text)


def _svg(chart: Chart, title: str) -> str:
    layout = laid_out(chart, [_text(box) for box in chart.boxes])
    layout.move(_ROOM, 2 * _ROOM + 8)
    width = max(layout.width, _LEGEND_WIDTH, 7.5 * len(title)) + 2 * _ROOM
    height = layout.height + 4 * _ROOM + _LEGEND_HEIGHT
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
            f'viewBox="0 0 {width:.0f} {height:.0f}" role="img" '
            f"aria-label={saxutils.quoteattr(_legal(title))}>",
            f"<style>{_STYLE}</style>",
            f'<rect class="page" width="{width:.0f}" height="{height:.0f}"/>',
            f'<text x="{_ROOM}" y="{_ROOM + 6}">{escape(title)}</text>',
            *map(_scope, layout.scopes),
            *(_edge(layout.boxes[a], layout.boxes[b]) for a, b in sorted(chart.edges)),
            *_boxes(chart, layout),
            *_legend(height - _LEGEND_HEIGHT),
            "</svg>",
        ]
    )


def _boxes(chart: Chart, layout: Layout) -> Iterator[str]:
    for i, box in enumerate(chart.boxes):
        at = layout.boxes[i]
        yield f'<g class="box"><title>{escape(_details(box))}</title>'
        yield (
            f'<rect class="{tone(box)}" x="{at.x:.1f}" y="{at.y:.1f}" width="{at.width:.1f}" '
            f'height="{at.height:.1f}" rx="6"/>'
        )
        middle = at.x + at.width / 2, at.y + at.height / 2 + 4
        yield (
            f'<text x="{middle[0]:.1f}" y="{middle[1]:.1f}" text-anchor="middle">'
            f"{escape(at.label)}</text>"
        )
        if box.casts:
            x, y = at.x + at.width - 3, at.y + 3
            yield f'<circle class="cast" cx="{x:.1f}" cy="{y:.1f}" r="8"/>'
            at_middle = f'x="{x:.1f}" y="{y + 3:.1f}" text-anchor="middle"'
            yield f'<text class="mark" {at_middle}>{box.casts}</text>'
        yield "</g>"


def _scope(frame: Frame) -> str:
    return (
        f'<g class="around"><title>{escape(frame.label)}</title>'
        f'<rect class="scope" x="{frame.x:.1f}" y="{frame.y:.1f}" '
        f'width="{frame.width:.1f}" height="{frame.height:.1f}" rx="10"/>'
        f'<text x="{frame.x + 10:.1f}" y="{frame.y + 16:.1f}">'
        f"{escape(short(frame.label))}</text></g>"
    )


def _edge(a: Frame, b: Frame) -> str:
    """A line from the bottom of one box to the top of another; upwards it is a loop's feedback."""
    x1, y1, x2, y2 = a.x + a.width / 2, a.y + a.height, b.x + b.width / 2, b.y
    if y2 >= y1:
        bend = (y2 - y1) / 2
        path = f"M{x1:.1f} {y1:.1f}C{x1:.1f} {y1 + bend:.1f} {x2:.1f} {y2 - bend:.1f} "
        return f'<path class="edge" d="{path}{x2:.1f} {y2:.1f}"/>'
    x1, y1, x2, y2 = a.x + a.width, a.y + a.height / 2, b.x + b.width, b.y + b.height / 2
    out = max(x1, x2) + 24
    path = f"M{x1:.1f} {y1:.1f}C{out:.1f} {y1:.1f} {out:.1f} {y2:.1f} {x2:.1f} {y2:.1f}"
    return f'<path class="edge back" d="{path}"/>'


def _legend(y: float) -> Iterator[str]:
    x = _ROOM
    for name, text in _LEGEND.items():
        yield f'<rect class="{name}" x="{x:.0f}" y="{y:.0f}" width="14" height="14" rx="3"/>'
        yield f'<text x="{x + 20:.0f}" y="{y + 11:.0f}">{text}</text>'
        x += 40 + 7.5 * len(text)
    yield f'<circle class="cast" cx="{x + 7:.0f}" cy="{y + 7:.0f}" r="7"/>'
    yield f'<text x="{x + 20:.0f}" y="{y + 11:.0f}">casts</text>'


# ---------------------------------------------------------------- graphviz


def dot_text(chart: Chart, title: str) -> str:
    """The chart in graphviz's language."""
    lines = ["digraph {", f"label={_quoted(title)}; labelloc=t; fontname=monospace;"]
    lines.append('node [shape=box style="rounded,filled" fontname=monospace fontsize=11];')
    lines += _cluster(chart, (), list(range(len(chart.boxes))), "cluster")
    lines += [f"n{a} -> n{b};" for a, b in sorted(chart.edges)]
    return "\n".join([*lines, "}"])


def _cluster(chart: Chart, path: tuple[str, ...], members: list[int], name: str) -> Iterator[str]:
    inner: dict[str, list[int]] = {}
    for i in members:
        box = chart.boxes[i]
        if len(box.path) > len(path):
            inner.setdefault(box.path[len(path)], []).append(i)
            continue
        text = _text(box) + (f"  ({counted(box.casts, 'cast')})" if box.casts else "")
        color, tip = _COLORS[tone(box)][0], _quoted(_details(box))
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
