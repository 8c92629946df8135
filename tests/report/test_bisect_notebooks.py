"""The rules that `bisect` finds in a notebook, whose cells are files of ever other names."""

import linecache
import sys
import types
from typing import Any

import jax
import numpy as np

import precpass as pp
from precpass.policy.precision import Precision
from precpass.report.bisect.places import grouped
from tests.report.test_bisect import W, X, cancels
from tests.report.test_delta_debugging import place

CELL = """
import jax
import jax.numpy as jnp

def cancels(x, w):
    return 1e4 * (x @ (w * 1.0001) - x @ w)

def loss(x, w):
    return cancels(jnp.tanh(x @ w), w)

harmless = lambda x, w: jnp.tanh(x @ w)
nameless = lambda x, w: 1e4 * (harmless(x, w) @ (w * 1.0001) - harmless(x, w) @ w)
"""


def a_session(monkeypatch, file: str, code: str = CELL) -> dict[str, Any]:
    """What a notebook's cell defines, as IPython compiles it under a name of its own making."""
    compiler = types.SimpleNamespace(
        format_code_name=lambda name: ("Cell", "In[3]") if name == file else None
    )
    shell = types.SimpleNamespace(compile=compiler)
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setitem(linecache.cache, file, (len(code), None, code.splitlines(True), file))
    names: dict[str, Any] = {}
    exec(compile(code, file, "exec"), names)
    return names


def relative(fn, policy) -> float:
    wide = np.asarray(jax.jit(fn)(X, W), np.float64)
    return float(
        np.linalg.norm(pp.auto_mixed(fn, policy=policy)(X, W) - wide) / np.linalg.norm(wide)
    )


def test_a_rule_for_a_cells_function_holds_in_a_session_in_which_the_cell_was_edited(monkeypatch):
    first = a_session(monkeypatch, "/tmp/ipykernel_71/123.py")
    found = pp.bisect(first["loss"], "AutoMixedBf16", 0.1)(X, W)
    assert found.rules == (pp.Rule(function="cancels", precision="f32"),)
    assert found.notes == ()
    assert "In[3]:6 cancels" in str(found)
    later = a_session(monkeypatch, "/tmp/ipykernel_99/456.py", "# edited\n" + CELL)["loss"]
    assert relative(later, found.policy) < 0.1 < relative(later, "AutoMixedBf16")


def test_a_rule_for_a_cells_line_holds_while_the_cell_is_as_it_was_and_says_so(monkeypatch):
    first = a_session(monkeypatch, "/tmp/ipykernel_71/123.py")
    found = pp.bisect(first["nameless"], "AutoMixedBf16", 0.05)(X, W)
    (rule,) = found.rules
    assert rule.line == CELL.splitlines().index(CELL.splitlines()[-1]) + 1
    (note,) = found.notes
    assert "In[3]" in note and "until the cell is edited" in note
    assert str(found).endswith(note) and found.to_dict()["notes"] == [note]
    later = a_session(monkeypatch, "/tmp/ipykernel_99/123.py")["nameless"]
    assert relative(later, found.policy) < 0.05 < relative(later, "AutoMixedBf16")


def test_a_cell_in_a_terminal_is_known_by_its_text_and_not_by_its_number():
    own = place(file="<ipython-input-3-ab12cd>", function="<lambda>")
    (line,) = grouped([own], Precision.F32).parts
    assert own.is_in(line.rule)
    assert place(file="<ipython-input-8-ab12cd>", function="<lambda>").is_in(line.rule)
    assert not place(file="<ipython-input-3-ef56>", function="<lambda>").is_in(line.rule)


def test_functions_of_one_name_in_a_cell_and_a_file_are_told_apart(monkeypatch):
    cell = a_session(monkeypatch, "/tmp/ipykernel_71/123.py")["cancels"]

    def fn(x, w):
        return cell(x, w) + 1e-6 * cancels(x, w)

    found = pp.bisect(fn, "AutoMixedBf16", 0.1)(X, W)
    assert found.rules == (pp.Rule(function="cancels", file="*/123.py", precision="f32"),)
    assert len(found.notes) == 1
