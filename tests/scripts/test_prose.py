"""Texts for users are in plain English: the patterns that had to be read twice do not come back."""

import ast
import functools
import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import precpass
from tests.support.public import public_names

ROOT = Path(precpass.__file__).resolve().parents[1]
PATTERNS = {
    "say that it is in float32, or left as written": r"\b(left|kept) wide\b",
    "say in low precision, or in 16 bits": r"\bstored low\b|\blow products?\b",
    "say matrix products in float32": r"\bwide products?\b",
    "say that it is not one": r"(?<!there )\b(is|are) no (?!longer|faster|slower|more|larger)[a-z]",
    "name it": r"\bthat which\b|\bwhat is no\b|\bas they were\b|\bshows itself\b",
    "say that no host callback is used": r"\bcalled back\b",
    "say a loop or function boundary": r"\bacross borders\b",
}


@functools.cache
def prose() -> list[tuple[str, str]]:
    """Where a text stands, and the text."""
    return [*texts()]


def texts() -> Iterator[tuple[str, str]]:
    for path in (ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs/pages").rglob("*.md")):
        yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        texts = ["".join(c["source"]) for c in cells if c["cell_type"] == "markdown"]
        yield path.name, "\n".join(texts)
    for name, value in public_names().items():
        if callable(value):
            yield name, inspect.getdoc(value) or ""
    for path in (ROOT / "precpass").rglob("*.py"):
        place = path.relative_to(ROOT).as_posix()
        yield place, "\n".join(messages(ast.parse(path.read_text(encoding="utf-8"))))


def messages(tree: ast.AST) -> Iterator[str]:
    """The texts in a module's code, but for its docstrings."""
    nodes = list(ast.walk(tree))
    documented = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    texts = (n for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str))
    yield from (node.value for node in texts if id(node) not in documented)


@pytest.mark.parametrize("advice", PATTERNS)
def test_texts_for_users_are_in_plain_english(advice):
    pattern = re.compile(PATTERNS[advice], re.IGNORECASE)
    found = [
        f"{place}: {match[0]!r} in {text[max(0, match.start() - 40) : match.end() + 40]!r}"
        for place, text in prose()
        for match in pattern.finditer(text)
    ]
    assert found == [], advice


@pytest.mark.parametrize("advice", PATTERNS)
def test_and_the_patterns_find_what_they_are_for(advice):
    bad = (
        "Products left wide, stored low, a wide product that is no array, as they were; called back"
    )
    assert re.search(PATTERNS[advice], f"{bad} across borders")
