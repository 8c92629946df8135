"""Show the dated results that are kept in scripts/results/ as Markdown tables.

    scripts/run render_results                        lists what there is
    scripts/run render_results bench_xeon bench_amd   shows these
    scripts/run render_results --into docs/*.md       writes them into documents

In a document they stand between the lines `<!-- results: NAME -->` and `<!-- end of results -->`,
with their headings two levels lower.

A file has a title, the text that says what was measured where and when, and parts with tables. A
table has columns and rows; `null` is a cell without a figure. Where a table has a mode, its first
column is the model, which is shown in the first of its rows alone.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
PLACE = re.compile(r"(<!-- results: (\w+) -->\n).*?(<!-- end of results -->)", re.DOTALL)


def rendered(result: dict[str, Any]) -> Iterator[str]:
    """The lines of one file's Markdown."""
    yield from (f"# {result['title']}", "", result["text"], "")
    for part in result["parts"]:
        if part["title"]:
            yield from (f"## {part['title']}", "")
        for table in part["tables"]:
            yield from (*rendered_table(table), "")


def rendered_table(table: dict[str, Any]) -> Iterator[str]:
    """The lines of a table."""
    mode, columns = table.get("mode"), table["columns"]
    heads = [mode, "", *columns[2:]] if mode else columns
    yield row_of(heads)
    yield f"|{'---|' * len(heads)}"
    before = None
    for row in table["rows"]:
        cells = list(map(cell_of, row))
        if mode:
            cells[0] = "" if row[0] == before else f"**{row[0]}**"
            before = row[0]
        yield row_of(cells)


def row_of(cells: list[str]) -> str:
    """A row of a Markdown table."""
    return f"| {' | '.join(cells)} |"


def cell_of(value: Any) -> str:
    """A figure as it is shown: errors with an exponent, all else plainly."""
    if value is None:
        return "-"
    if isinstance(value, float) and value and abs(value) < 0.1:
        return f"{value:.1e}"
    return str(value)


def with_results(document: str, results: Mapping[str, Path]) -> str:
    """A document with the results that it names, as they are now.

    Raises:
        KeyError: for a name that `results` lacks.
    """

    def filled(place: re.Match[str]) -> str:
        start, name, end = place.groups()
        lines = rendered(json.loads(results[name].read_text(encoding="utf-8")))
        deeper = (f"##{line}" if line.startswith("#") else line for line in lines)
        return "\n".join((start, *deeper, end))

    return PLACE.sub(filled, document)


def main() -> int:
    """Runs the command."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("names", nargs="*", metavar="NAME", help="a file of scripts/results/")
    options.add_argument("--into", nargs="+", type=Path, default=[], help="documents to write into")
    parsed = options.parse_args()
    names, documents = parsed.names, parsed.into
    files = {path.stem: path for path in sorted(RESULTS.glob("*.json"))}
    unknown = [name for name in names if name not in files]
    if unknown:
        options.error(f"unknown {', '.join(unknown)}: legal are {', '.join(files)}")
    for name in names:
        result = json.loads(files[name].read_text(encoding="utf-8"))
        print("\n".join(rendered(result)))
    for path in documents:
        path.write_text(with_results(path.read_text(encoding="utf-8"), files), encoding="utf-8")
    if not names and not documents:
        for name, path in files.items():
            print(f"{name}: {json.loads(path.read_text(encoding='utf-8'))['title']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
