"""The notebooks, run in a short form, are what is committed, and read well."""

import jax.numpy as jnp
import nbformat
import numpy as np
import pytest

import notebooks
from tests.support.nist_problems import problems

pytestmark = pytest.mark.programs

# What a test runs instead of the sizes that a reader sees.
SHORT = {
    "01_first_steps": {"BATCH, WIDTH, CLASSES": "16, 32, 10"},
    "02_comparing_policies": {
        "WIDTH, BLOCKS, BATCH, STEPS, ROUNDS": "16, 1, 16, 3, 2",
        "POLICIES": '["AlwaysF32", "AutoMixedBf16", "AlwaysBf16"]',
    },
    "03_why_casting_parameters_is_not_mixed_precision": {
        "LAYERS, WIDTH, HEADS, LENGTH, BATCH": "2, 32, 4, 16, 2",
        "VOCABULARY, ROUNDS": "64, 2",
    },
    "04_writing_a_policy": {"LAYERS, WIDTH, BATCH": "2, 16, 8"},
    "05_float16_and_loss_scaling": {
        "STEPS, IMAGES, SHOWN": "10, 100, 3",
        "WIDTHS": "(64, 16, 64)",
    },
    "06_a_nan_traced_to_its_line": {"IMAGES, BATCH, STEPS": "100, 16, 4"},
    "07_least_squares_by_roles": {"NAMES": '["Misra1a"]', "ROUNDS": "1"},
    "08_refinement_and_condition": {"N, POWERS": "16, (1, 8)", "FACTORS": '["bf16"]'},
    "09_training_a_flax_nnx_model": {"WIDTH, BATCH, EPOCHS": "16, 64, 1"},
    "10_training_an_equinox_model": {"WIDTH, BLOCKS, BATCH, EPOCHS": "16, 1, 64, 1"},
    "11_eight_bits": {"WIDTH, LAYERS, BATCH, STEPS, ROUNDS": "256, 3, 256, 3, 2"},
}
each_notebook = pytest.mark.parametrize("path", notebooks.NOTEBOOKS, ids=lambda path: path.stem)


def code(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@pytest.mark.release(keep=2)
@each_notebook
def test_a_notebook_runs_in_its_short_form(path):
    committed = nbformat.read(path, as_version=4)
    run = notebooks.executed(path, sizes=SHORT[path.stem], timeout=120)
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
    assert counts == list(range(1, len(counts) + 1)), "run scripts/run notebooks"
    assert sum(bool(cell.outputs) for cell in code(notebook)) > 3
    for cell in code(notebook):
        assert cell.outputs or "print(" not in cell.source, cell.source
        assert "<unknown>" not in str(cell.outputs)  # a report that lost a source line
    assert notebooks.complaints(notebook) == []
    text = path.read_text(encoding="utf-8")
    assert text == nbformat.writes(notebooks.cleaned(notebook)) + "\n"


def test_the_pictures_are_those_of_the_notebooks():
    files = {path: path.read_text(encoding="utf-8") for path in notebooks.FOLDER.glob("*.svg")}
    read = {path: nbformat.read(path, as_version=4) for path in notebooks.NOTEBOOKS}
    drawn = {k: v for path, nb in read.items() for k, v in notebooks.pictures(path, nb).items()}
    assert drawn
    assert files == drawn, "run scripts/run notebooks"


def test_the_problems_that_a_notebook_spells_out_are_nists():
    (path,) = (path for path in notebooks.NOTEBOOKS if path.stem.startswith("07"))
    (cell,) = (c for c in code(nbformat.read(path, as_version=4)) if "PROBLEMS = {" in c.source)
    names = {"np": np, "jnp": jnp}
    exec(cell.source, names)
    assert len(names["PROBLEMS"]) >= 8
    for name, problem in names["PROBLEMS"].items():
        certified = problems()[name]
        for field in ("starts", "certified", "x", "y"):
            np.testing.assert_array_equal(getattr(problem, field), getattr(certified, field), name)
        found = problem.residual(certified.certified, None)
        np.testing.assert_allclose(found, certified.residual(certified.certified), atol=1e-5)


def test_the_list_of_notebooks_is_complete():
    listed = (notebooks.FOLDER / "README.md").read_text(encoding="utf-8")
    assert [path.stem for path in notebooks.NOTEBOOKS] == list(SHORT)
    for path in notebooks.NOTEBOOKS:
        assert f"({path.name})" in listed
