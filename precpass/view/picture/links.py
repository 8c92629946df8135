"""A chart's edges as links between the parts of nested areas, those of two areas bundled."""

from __future__ import annotations

import collections
import dataclasses

from precpass.units import counted, sized
from precpass.view.picture.clusters import Chart
from precpass.view.picture.places import Path

__all__ = ["End", "Link", "labels", "linked", "unit_of"]

End = int | Path
"""A box, by its position in the chart, or a whole area, by its path."""

_BUNDLED = 4
"""The most values between two areas that are drawn one by one."""


@dataclasses.dataclass(frozen=True)
class Link:
    """A line of the picture.

    Attributes:
        source, target: its ends.
        around: the path of the innermost area that holds both.
        text: what is written at it, if it is a bundle.
    """

    source: End
    target: End
    around: Path
    text: str = ""

    @property
    def thick(self) -> bool:
        """Whether it stands for several values."""
        return bool(self.text)


def linked(chart: Chart) -> list[Link]:
    """The lines between the boxes, and between areas that hand on many values."""
    found: dict[tuple[Path, End, End], list[tuple[int, int]]] = collections.defaultdict(list)
    for a, b in sorted(chart.edges):
        paths = chart.boxes[a].path, chart.boxes[b].path
        around = _common(*paths)
        ends = unit_of(chart, a, around), unit_of(chart, b, around)
        found[around, *ends].append((a, b))
    links: list[Link] = []
    for (around, source, target), pairs in found.items():
        sources = {a for a, _ in pairs}
        if isinstance(source, int) or len(sources) <= _BUNDLED:
            links += [Link(a, b, around) for a, b in pairs]
            continue
        types = {(a, name): size for a, b in pairs for name, size in chart.edges[a, b]}
        text = f"{counted(len(types), 'value')}, {sized(sum(types.values()))}"
        links.append(Link(source, target, around, text))
    return links


def _common(a: Path, b: Path) -> Path:
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return a[:n]


def unit_of(chart: Chart, end: End, around: Path) -> End:
    """What stands for an end in an area that holds it: the box itself, or an area inside."""
    path = end if isinstance(end, tuple) else chart.boxes[end].path
    return path[: len(around) + 1] if len(path) > len(around) else end


def labels(chart: Chart, links: list[Link]) -> dict[End, str]:
    """What is written below the sources of lines: the type of the largest value."""
    types: dict[End, dict[str, float]] = collections.defaultdict(dict)
    for link in links:
        if isinstance(link.source, int) and isinstance(link.target, int):
            types[link.source].update(chart.edges[link.source, link.target])
    texts = {source: _listed(of) for source, of in types.items()}
    return texts | {link.source: link.text for link in links if link.thick}


def _listed(types: dict[str, float]) -> str:
    first, *others = sorted(types, key=lambda name: (-types[name], name))
    return f"{first} +{len(others)}" if others else first
