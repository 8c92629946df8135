"""How files are named in what is printed: cells, installed packages, files of one's own."""

import os
import sys
import types

import jax
import pytest

import precpass as pp
from precpass.jaxpr import Source
from precpass.view.text import plain, rendered, shown_path, shown_source
from tests.support.values import f32

CELL = os.path.join(os.sep, "somewhere", "ipykernel_71", "123.py")
CODE = "def model(x, w):\n    with jax.named_scope('body'):\n        return x @ w\n"


@pytest.fixture
def in_a_notebook(monkeypatch: pytest.MonkeyPatch):
    """A shell that has compiled CELL as its third cell, as IPython says it."""
    compiler = types.SimpleNamespace(
        format_code_name=lambda name: ("Cell", "In[3]") if name == CELL else None
    )
    shell = types.SimpleNamespace(compile=compiler)
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    namespace = {"jax": jax}
    exec(compile(CODE, CELL, "exec"), namespace)
    return namespace["model"]


def test_a_cell_is_named_by_its_number_wherever_a_line_is(in_a_notebook):
    found = pp.inspect(in_a_notebook)(f32(8, 8), f32(8, 8))
    x = jax.numpy.full((8, 8), 1 / 3)
    texts = [
        found.diff(color=False),
        found.diff("lines", color=False),
        found.explain().text(color=False),
        found.draw().svg,
        found._repr_html_(),
        str(pp.bisect(in_a_notebook, "AutoMixedBf16", 1e-6)(x, x)),
    ]
    assert not any("ipykernel" in text for text in texts)
    assert "\nIn[3]:3 model" in texts[0]
    assert "In[3]:3 model" in texts[5]
    assert "In[3]:3" in texts[3] and "In[3]:3" in texts[4]


@pytest.mark.parametrize("without", [None, types.SimpleNamespace(get_ipython=lambda: None)])
def test_outside_of_a_notebook_a_name_is_a_file(monkeypatch: pytest.MonkeyPatch, without):
    monkeypatch.setitem(sys.modules, "IPython", without)
    assert shown_path(CELL).endswith("123.py")


def test_a_file_of_an_installed_package_begins_with_the_package():
    folder = os.path.join(os.sep, "opt", "lib", "site-packages")
    file = os.path.join(folder, "flax", "linen", "linear.py")
    assert shown_path(file) == os.path.join("flax", "linen", "linear.py")
    assert shown_source(Source(file, "f", 7)).endswith("linear.py:7")
    # a project of that name is no installed package
    assert "my-site-packages" in shown_path(os.path.join(os.sep, "my-site-packages", "a.py"))


def test_a_file_of_ones_own_is_relative_where_that_is_not_longer():
    assert shown_path(os.path.abspath("model.py")) == "model.py"
    assert shown_path(os.path.join(os.sep, "a.py")) == os.path.join(os.sep, "a.py")
    assert shown_source(Source()) == "<unknown>"


def test_text_without_colours_needs_no_rich(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert rendered([[("low", "low"), (" and wide", "wide")]], color=False) == "low and wide"


def test_one_of_a_thing_is_no_plural():
    found = pp.inspect(lambda x: x @ jax.numpy.arange(8.0).astype("float32"))(f32(8, 8))
    assert found.diff().splitlines()[0].endswith("; 2 casts inserted")
    one = pp.inspect(lambda x: x @ x)(f32(8, 8))
    assert one.diff().splitlines()[0].endswith("; 1 cast inserted")
    assert "1 cast more than written" in one.explain().all
    assert "1 equation lowered" in repr(one.plan)
    assert "1 cast inserted" in one.draw().svg


def test_an_equation_without_operands_has_a_signature():
    plan = pp.inspect(lambda x: (jax.numpy.arange(8), x @ x))(f32(8, 8)).plan
    found = {info.primitive: info.signature for info in plan.eqn_infos}
    assert found["iota"] == "iota -> int32[8]"
    assert found["dot_general"] == "dot_general f32[8,8] f32[8,8] -> f32[8,8]"


@pytest.mark.parametrize("columns", [30, 40, 80])
def test_a_long_line_is_wrapped_between_words(monkeypatch: pytest.MonkeyPatch, columns: int):
    monkeypatch.setenv("COLUMNS", str(columns))
    prose = " ".join(["precision"] * 20)
    lines = plain([[(prose, "")], [("  ", ""), (prose, "wide")]]).splitlines()
    assert max(map(len, lines)) <= columns
    assert {word for line in lines for word in line.split()} == {"precision"}
    assert {len(line) - len(line.lstrip()) for line in lines} == {0, 2, 6}
    # a word that does not fit is broken behind one of its signs
    path = "/".join(["folder"] * 20)
    parts = plain([[(path, "")]]).splitlines()
    assert "".join(parts) == path and all(part.startswith("folder") for part in parts)
