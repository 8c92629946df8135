"""Run every notebook of notebooks/ from its first cell to its last, and write its outputs back.

What is written has no times of execution, no versions and no paths in its metadata, so that a
change of a notebook reads as what has changed.
"""

import argparse
import os
import re
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import nbformat
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbformat import NotebookNode

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
PNG, SVG = "image/png", "image/svg+xml"
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def executed(
    path: Path, *, sizes: Mapping[str, str] | None = None, timeout: int = 600
) -> NotebookNode:
    """A notebook as it comes out, run by the Python that runs this.

    Args:
        path: of the notebook.
        sizes: other right sides for some of its assignments, as in `resized`.
        timeout: of each cell, in seconds.

    Raises:
        nbclient.exceptions.CellExecutionError: for a cell that raises.
        ValueError: for a size that the notebook does not assign.
    """
    notebook = nbformat.read(path, as_version=4)
    written = [cell.source for cell in notebook.cells]
    resized(notebook, sizes or {})
    with tempfile.TemporaryDirectory() as own:
        # without folders to look in, "python3" is this interpreter, whatever is registered
        kernel = AsyncKernelManager(
            kernel_name="python3", kernel_spec_manager=KernelSpecManager(kernel_dirs=[])
        )
        # sockets in this folder, which nobody else reads
        kernel.transport = "ipc"
        kernel.connection_file = str(Path(own) / "kernel.json")
        client = NotebookClient(
            notebook,
            timeout=timeout,
            record_timing=False,
            coalesce_streams=True,
            resources={"metadata": {"path": own}},
        )
        # not as an argument: then it would be left running
        client.km = kernel
        # no startup files of the user's, and no colours for a terminal
        client.execute(env={**os.environ, "IPYTHONDIR": own, "NO_COLOR": "1"})
    for cell, source in zip(notebook.cells, written, strict=True):
        cell.source = source
    return cleaned(notebook)


def resized(notebook: NotebookNode, sizes: Mapping[str, str]) -> None:
    """Replaces assignments at the beginning of lines, so that a test runs small sizes.

    Args:
        notebook: whose code is changed.
        sizes: the right side for each left side, such as {"BATCH, WIDTH": "16, 32"}.

    Raises:
        ValueError: for a left side that is not assigned in exactly one line.
    """
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for left, right in sizes.items():
        line = re.compile(rf"^{re.escape(left)} = .*$", re.MULTILINE)
        if (found := sum(len(line.findall(cell.source)) for cell in cells)) != 1:
            raise ValueError(f"{left!r} is assigned in {found} lines, and is to be in one")
        for cell in cells:
            cell.source = line.sub(lambda _, text=f"{left} = {right}": text, cell.source)


def cleaned(notebook: NotebookNode) -> NotebookNode:
    """A notebook with nothing in it that differs from one machine or kernel to another."""
    notebook.metadata = nbformat.from_dict(METADATA)
    for number, cell in enumerate(notebook.cells, 1):
        cell.id = f"cell-{number}"
        cell.metadata = nbformat.from_dict({})
        if "outputs" in cell:  # where the progress of a report was shown nothing is left
            cell.outputs = [x for x in cell.outputs if x.get("data") != {"text/plain": ""}]
        for output in cell.get("outputs", []):
            if "metadata" in output:
                output.metadata = nbformat.from_dict({})
    return notebook


def complaints(notebook: NotebookNode) -> list[str]:
    """What no reader should see: errors, warnings, addresses and paths of this machine."""
    found: list[str] = []
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            data = {form: output.data[form] for form in output.get("data", {}) if form != PNG}
            text = str({**output, "data": data})
            if output.output_type == "error" or output.get("name") == "stderr":
                found.append(f"cell {cell.id}: {text[:400]}")
            if strange := _MACHINE.search(text):
                found.append(f"cell {cell.id}: {strange.group()!r} in its output")
    return found


_MACHINE = re.compile(
    r"(?:ipykernel_|/(?:home|tmp|root)/|site-packages|C:\\\\)\S{0,60}| at 0x[0-9a-f]{6,}"
)


def pictures(path: Path, notebook: NotebookNode) -> dict[Path, str]:
    """The SVG outputs of a notebook as files that other pages can show."""
    outputs = [o for cell in notebook.cells for o in cell.get("outputs", [])]
    found = [output.data[SVG] for output in outputs if SVG in output.get("data", {})]
    return {FOLDER / f"{path.stem}_{n}.svg": svg for n, svg in enumerate(found, 1)}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="notebooks by a part of their name; default: all")
    return parser.parse_args()


def main() -> None:
    names = arguments().names
    for path in NOTEBOOKS:
        if names and not any(name in path.name for name in names):
            continue
        start = time.perf_counter()
        notebook = executed(path)
        if found := complaints(notebook):
            raise SystemExit(f"{path.name} is not written:\n" + "\n".join(found))
        nbformat.write(notebook, path)
        for picture, svg in pictures(path, notebook).items():
            picture.write_text(svg, encoding="utf-8")
        size, seconds = path.stat().st_size / 1e3, time.perf_counter() - start
        print(f"{path.name}: {len(notebook.cells)} cells, {size:.0f} kB, {seconds:.0f} s")


if __name__ == "__main__":
    main()
