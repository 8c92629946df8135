"""Lines of styled text, plain or for a terminal; `page.py` has them as HTML."""

from __future__ import annotations

import io
import itertools
import linecache
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence

from precpass.jaxpr import Source

__all__ = [
    "OFF",
    "Line",
    "cell_of",
    "heading",
    "plain",
    "rendered",
    "shown_path",
    "shown_source",
    "titled",
    "width",
    "wrapped",
]

OFF = "switched off"
"""The text in the place of a policy's name if the pass is off."""

Line = Sequence[tuple[str, str]]
"""The pieces of a line: each a text, and the name of its style or ""."""

_STYLES = {
    "where": "bold",
    "code": "italic",
    "low": "green",
    "wide": "yellow",
    "cast": "cyan",
    "reason": "dim",
    "frame": "bold magenta",
    "added": "green",
    "removed": "red",
    "hunk": "cyan",
}
"""For each style its name in `rich`."""


def width() -> int:
    """The columns that a text may take: COLUMNS, or the terminal's, or 80."""
    return shutil.get_terminal_size().columns


def plain(lines: Iterable[Line]) -> str:
    """The text without styles, wrapped to the `width`."""
    return _joined(part for line in lines for part in wrapped(line))


def _joined(lines: Iterable[Line]) -> str:
    return "\n".join("".join(text for text, _ in line) for line in lines)


def wrapped(line: Line) -> Iterator[Line]:
    """The parts of a line that is longer than the `width`; those of styled lines are indented.

    The user's code at the end of a line is shortened instead.
    """
    *before, (last, style) = line or [("", "")]
    if style == "code" and (left := width() - sum(len(text) for text, _ in before)) < len(last):
        line = [*before, (textwrap.shorten(last, max(left, 4), placeholder=" ..."), style)]
    styled = [(char, style) for text, style in line for char in text]
    indent = next((i for i, (char, _) in enumerate(styled) if char != " "), 0)
    most = max(width(), 20)
    margin = min(indent + 4, most // 2) if indent or len(line) > 1 else 0
    while len(styled) > most:
        text = "".join(char for char, _ in styled)
        end = _end(text, most)
        yield _pieces(styled[: len(text[:end].rstrip())])
        more = len(text) - len(text[end:].lstrip())
        styled = [(" ", "")] * margin + styled[more:]
    yield _pieces(styled)


def _end(text: str, most: int) -> int:
    """Where a text is broken: at a space, or in a word that is too long behind one of its signs."""
    start = len(text) - len(text.lstrip())
    end = text.rfind(" ", start + 1, most + 1)
    signs = [sign.end() for sign in _SIGN.finditer(text, start, most)]
    return end if end > 0 else max(signs, default=most)


_SIGN = re.compile(r"[/\\,;.([=|\-]")


def _pieces(styled: Iterable[tuple[str, str]]) -> Line:
    groups = itertools.groupby(styled, lambda piece: piece[1])
    return [("".join(char for char, _ in chars), style) for style, chars in groups]


def rendered(lines: Iterable[Line], color: bool | None, *, wraps: bool = True) -> str:
    """The lines as text, with or without a terminal's colours.

    Args:
        lines: the lines.
        color: whether to use colours; None uses them if standard output is a terminal and
            NO_COLOR is not set.
        wraps: whether lines are wrapped to the `width`; those of a patch are not.
    """
    lines = [part for line in lines for part in (wrapped(line) if wraps else (line,))]
    if color is False:
        return _joined(lines)
    from rich.console import Console  # takes a tenth of the package's import time
    from rich.text import Text

    if color is None:
        console = Console()
        if not console.is_terminal or console.no_color:
            return _joined(lines)
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, color_system="standard", no_color=False)
    for line in lines:
        text = Text.assemble(*((text, _STYLES.get(style, "")) for text, style in line))
        console.print(text, soft_wrap=True, highlight=False)
    return out.getvalue().removesuffix("\n")


def heading(source: Source, module: str = "") -> Line:
    """The heading for a line of the user's code: the module that it calls, its place, its text."""
    text = linecache.getline(source.file, source.line).strip() if source.file else ""
    named = f"{shown_source(source)} {source.function}".rstrip()
    head = [(module, "frame"), ("  ", "")] if module else []
    return [*head, (named, "where"), *([("  ", ""), (text, "code")] if text else [])]


def shown_source(source: Source) -> str:
    """File and line of a source line, as `shown_path` has the file."""
    return f"{shown_path(source.file)}:{source.line}" if source.file else str(source)


def shown_path(file: str) -> str:
    """A path in the form that is shown.

    A notebook's cell is `In[3]`, as in IPython's tracebacks. The path of a file in an installed
    package begins with the package. Other paths are relative if that is not longer.
    """
    if cell := cell_of(file):
        return cell
    if installed := _INSTALLED.search(file):
        return file[installed.end() :]
    relative = os.path.relpath(file) if os.path.isabs(file) else file
    return file if relative.startswith(os.pardir) and len(relative) > len(file) else relative


_INSTALLED = re.compile(r".*[/\\](?:site|dist)-packages[/\\]")


def cell_of(file: str) -> str:
    """The notebook cell, as "In[3]", that IPython compiled under this file name; "" for a file."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    named = getattr(getattr(shell, "compile", None), "format_code_name", None)
    cell = named(file) if named is not None else None
    return cell[1] if cell is not None else ""


def titled(name: str, policy: str, device: str = "") -> str:
    """A title for what is shown of a program.

    Args:
        name: the function's.
        policy: the policy's, or `OFF`.
        device: what the program is planned for; "" leaves it out.

    Examples:
        >>> titled("loss", "AutoMixedBf16"), titled("loss", OFF)
        ('loss under AutoMixedBf16', 'loss, switched off')
        >>> titled("loss", "AutoMixedBf16", "NVIDIA H200")
        'loss under AutoMixedBf16, planned for NVIDIA H200'
    """
    under = f"{name}, {policy}" if policy == OFF else f"{name} under {policy}"
    return f"{under}, planned for {device}" if device else under
