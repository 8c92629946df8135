"""Writes the table of README.md: primitive x composition x JAX release.

As a program it enumerates with the JAX that it runs with, puts that into `enumerated.json` beside
what other releases put there, and writes the table from it. `scripts/enumerate` runs it.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
DATA, README = TESTS / "enumerated.json", TESTS / "README.md"
BEGIN, END = "<!-- scripts/enumerate: begin -->", "<!-- scripts/enumerate: end -->"


def treatment(name: str) -> str | None:
    """What precpass does with a primitive; None for one that it does not know."""
    from precpass import jaxpr as ir
    from precpass.policy.primitives import BOUNDARY, TABLE

    if name in ir.ENTERED:
        return "entered"
    if name in TABLE:
        return str(TABLE[name].kind)
    if name in ir.OPAQUE:
        return f"opaque: {ir.OPAQUE[name]}"
    return f"boundary: {BOUNDARY[name]}" if name in BOUNDARY else None


def of_primitives(installed: dict[str, Any]) -> dict[str, str | None]:
    """How every primitive is treated that this JAX can lower or that can hold a jaxpr."""
    names = {*installed["lowerable"], *installed["holders"]}
    return {name: treatment(name) for name in sorted(names)}


def of_compositions() -> dict[str, dict[str, str]]:
    """The outcome of every cell of the matrix."""
    from tests.support.compositions import COMPOSITIONS, PROGRAMS, outcome

    return {name: {c: outcome(name, c) for c in COMPOSITIONS} for name in PROGRAMS}


def read() -> dict[str, Any]:
    """The committed enumerations, by JAX release."""
    return json.loads(DATA.read_text(encoding="utf-8")) if DATA.exists() else {}


def in_order(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())


def _rows(data: dict[str, Any]) -> list[list[str]]:
    versions = sorted(data, key=in_order)
    compositions = list(next(iter(data[versions[0]]["compositions"].values())))
    entered = dict.fromkeys(name for v in versions for name in data[v]["compositions"])
    rows = [["primitive", "treatment", "jax", *compositions]]
    rows.append(["---"] * len(rows[0]))
    for name in entered:
        present = [v for v in versions if name in data[v]["compositions"]]
        cells = [[data[v]["compositions"][name][c] for v in present] for c in compositions]
        shown = [" / ".join(cell if len(set(cell)) > 1 else cell[:1]) for cell in cells]
        rows.append([f"`{name}`", "entered", _releases(present, versions), *shown])
    groups: dict[tuple[str, str], list[str]] = {}
    for name in sorted({n for v in versions for n in data[v]["primitives"]} - set(entered)):
        present = [v for v in versions if name in data[v]["primitives"]]
        how = data[present[-1]]["primitives"][name]
        groups.setdefault((how, _releases(present, versions)), []).append(f"`{name}`")
    for (how, releases), names in sorted(groups.items()):
        rows.append([" ".join(names), how, releases, *[""] * len(compositions)])
    return rows


def _releases(present: list[str], versions: list[str]) -> str:
    return "all" if present == versions else ", ".join(present)


def render(data: dict[str, Any]) -> str:
    """The table as Markdown."""
    versions = ", ".join(sorted(data, key=in_order))
    lines = [f"Enumerated with jax {versions}.", ""]
    lines += [f"| {' | '.join(row)} |" for row in _rows(data)]
    return "\n".join(lines)


def table_in_readme() -> str:
    """The committed table."""
    text = README.read_text(encoding="utf-8")
    return text.split(BEGIN)[1].split(END)[0].strip()


def main() -> None:
    """Enumerates and writes both files."""
    import tests.conftest  # noqa: F401 -- the tests' flags, before JAX starts
    from tests.support.enumeration import installed

    found = installed()
    data = read()
    data[found["version"]] = {
        "primitives": of_primitives(found),
        "compositions": of_compositions(),
    }
    data = dict(sorted(data.items(), key=lambda item: in_order(item[0])))
    DATA.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    before, rest = README.read_text(encoding="utf-8").split(BEGIN)
    after = rest.split(END)[1]
    README.write_text(f"{before}{BEGIN}\n\n{render(data)}\n\n{END}{after}", encoding="utf-8")
    unknown = [n for n, how in data[found["version"]]["primitives"].items() if how is None]
    print(f"precpass: enumerated jax {found['version']}; unknown primitives: {unknown or 'none'}")


if __name__ == "__main__":
    sys.path.insert(0, str(TESTS.parent))
    os.chdir(TESTS.parent)
    main()
