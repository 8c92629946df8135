"""The notebooks, run in a short form, are what is committed, and read well."""

import nbformat
import pytest

import notebooks

pytestmark = pytest.mark.programs

each_notebook = pytest.mark.parametrize("path", notebooks.NOTEBOOKS, ids=lambda path: path.stem)


def code(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@each_notebook
def test_a_notebook_runs_in_its_short_form(path):
    committed = nbformat.read(path, as_version=4)
    run = notebooks.executed(path, short=True, timeout=120)
    assert [cell.source for cell in code(run)] == [cell.source for cell in code(committed)]
    assert [cell.execution_count for cell in code(run)] == list(range(1, len(code(run)) + 1))
    assert notebooks.complaints(run) == []
    # a cell that shows something does so in both, and in the same forms
    assert list(map(forms, code(run))) == list(map(forms, code(committed)))


def forms(cell):
    return [sorted(o.data) if "data" in o else o.output_type for o in cell.outputs]


@each_notebook
def test_what_is_committed_is_whole(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    counts = [cell.execution_count for cell in code(notebook)]
    assert counts == list(range(1, len(counts) + 1)), "run scripts/notebooks"
    assert sum(bool(cell.outputs) for cell in code(notebook)) > 3
    for cell in code(notebook):
        assert cell.outputs or "print(" not in cell.source, cell.source
    assert notebooks.complaints(notebook) == []
    text = path.read_text(encoding="utf-8")
    assert text == nbformat.writes(notebooks.cleaned(notebook)) + "\n"


def test_the_pictures_are_those_of_the_notebooks():
    files = {path: path.read_text(encoding="utf-8") for path in notebooks.FOLDER.glob("*.svg")}
    read = {path: nbformat.read(path, as_version=4) for path in notebooks.NOTEBOOKS}
    drawn = {k: v for path, nb in read.items() for k, v in notebooks.pictures(path, nb).items()}
    assert drawn
    assert files == drawn, "run scripts/notebooks"


def test_the_list_of_notebooks_is_complete():
    listed = (notebooks.FOLDER / "README.md").read_text(encoding="utf-8")
    assert len(notebooks.NOTEBOOKS) == 8
    for path in notebooks.NOTEBOOKS:
        assert f"({path.name})" in listed
