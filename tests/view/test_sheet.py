"""Pages with a bar, and tables that a script sorts and filters, parsed as XML."""

import json
import shutil
import subprocess
import warnings
import xml.etree.ElementTree as ET

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import precpass as pp
from precpass.view.page import MOST_ROWS, SCRIPT, Cell, bar, sheet
from tests.support.values import f32
from tests.view import pictured


def loss(x, w):
    x = jnp.tanh(x @ w)
    small = lax.dot(x[:2], w, precision="highest")
    x = lax.dot(x, w, precision="highest")
    return (x @ w).sum() + small.sum()


@pytest.fixture(scope="module")
def pages():
    w, x = f32(64, 64), f32(128, 64)
    ones = jnp.ones((16, 16))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pp.PrecisionWarning)
        monitored = pp.monitor(pictured.broken)
        health = monitored(ones)[1].merged(monitored(0 * ones)[1])
        return {
            "inspect": pp.inspect(loss)(x, w)._repr_html_(),
            "explain": pp.explain(loss)(x, w)._repr_html_(),
            "compare": pp.compare(loss, ["AlwaysF32", "AutoMixedBf16"], rounds=2)(
                jnp.ones((128, 64)), jnp.ones((64, 64))
            )._repr_html_(),
            "health": health._repr_html_(),
        }


NAMES = ["inspect", "explain", "compare", "health"]
each_page = pytest.mark.parametrize("name", NAMES)


def parsed(page):
    return ET.fromstring(page.replace("&nbsp;", " "))


def content(element):
    return "".join(element.itertext())


@each_page
def test_a_page_is_self_contained_and_has_a_summary_and_tables(pages, name):
    root = parsed(pages[name])
    assert not [e for e in root.iter() if e.tag in ("link", "img", "form")]
    assert len(list(root.iter("script"))) == 1
    kinds = {e.get("class") for e in root.iter("div")}
    assert "head" in kinds and "facts" in kinds
    for table in root.iter("table"):
        heads, *rows = table.iter("tr")
        assert [next(th.iter("button")).get("value") for th in heads] == list(
            map(str, range(len(heads)))
        )
        assert rows and {len(row) for row in rows} == {len(heads)}
    assert "prefers-color-scheme: dark" in pages[name]


@each_page
def test_filters_count_the_rows_that_they_show(pages, name):
    root = parsed(pages[name])
    for one in (e for e in root.iter("div") if e.get("class") == "sheet"):
        rows = one.find("table").find("tbody").findall("tr")
        filters = [e for e in one.findall("div") if e.get("class") == "filters"]
        for total, *others in (e.findall("button") for e in filters):
            assert (content(total), total.get("value")) == (f"all {len(rows)}", "tr")
            for button in others:
                group = button.get("value").removeprefix(".")
                shown = [tr for tr in rows if group in tr.get("class").split()]
                assert content(button).endswith(f" {len(shown)}") and shown


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_figures_are_sorted_from_the_largest_and_texts_as_in_a_dictionary():
    """The script's own order, of cells as a browser has them."""
    given = ["", "b", "3/4", "inf", "1.5 (1-2)", "-", "C", "-2e3", "a"]
    start, end = SCRIPT.index("const figure"), SCRIPT.index("document.addEventListener")
    code = f"""{SCRIPT[start:end]}
    const cells = {json.dumps(given)}.map((text) => ({{ textContent: text, dataset: {{}} }}));
    cells.sort((a, b) => compare(rank(a), rank(b)));
    console.log(JSON.stringify(cells.map((cell) => cell.textContent)));"""
    found = subprocess.run(["node", "-e", code], capture_output=True, text=True, check=True)
    assert json.loads(found.stdout) == ["inf", "1.5 (1-2)", "3/4", "-2e3", "a", "b", "C", "", "-"]


def test_a_health_that_is_traced_is_html_too():
    shown = []

    @jax.jit
    def traced(x):
        _, health = pp.monitor(lambda x: x * 2)(x)
        shown.append(health._repr_html_())
        return x

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pp.PrecisionWarning)
        traced(jnp.ones(3))
    assert "traced" in content(parsed(shown[0]))


def test_a_bar_of_nothing_is_left_out():
    assert bar([("low", 0.0, "low")], "of nothing") == ""


def test_a_long_table_says_how_many_rows_it_leaves_out():
    text = sheet(["n"], [[Cell(str(i))] for i in range(MOST_ROWS + 7)])
    assert text.count("<td") == MOST_ROWS and "and 7 more" in text
