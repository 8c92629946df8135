"""Pages with a bar, filters and tables that are sorted without scripts, parsed as XML."""

import re
import warnings
import xml.etree.ElementTree as ET

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import precpass as pp
from precpass.view.sheet import MOST_ROWS, Cell, Entry, bar, figures, sheet
from tests.support.values import f32


def loss(x, w):
    x = jnp.tanh(x @ w)
    small = lax.dot(x[:2], w, precision="highest")
    x = lax.dot(x, w, precision="highest")
    return (x @ w).sum() + small.sum()


def broken(x):
    y = x / jnp.abs(x).sum()
    z = y.astype(jnp.float16) * jnp.float16(1e-7) * jnp.float16(1e-7)
    return jnp.exp(x).sum() + z.sum().astype(jnp.float32)


@pytest.fixture(scope="module")
def pages():
    w, x = f32(64, 64), f32(128, 64)
    ones = jnp.ones((16, 16))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pp.PrecisionWarning)
        monitored = pp.monitor(broken)
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
def test_a_page_has_a_summary_and_a_table_that_is_sorted_without_a_script(pages, name):
    root = parsed(pages[name])
    assert not [e for e in root.iter() if e.tag in ("script", "link", "img")]
    kinds = {e.get("class") for e in root.iter("div")}
    assert "head" in kinds and "bar" in kinds and "facts" in kinds
    for form in root.iter("form"):
        assert form.get("method") == "dialog", "a form is never sent"
        table = form.find("table")
        heads = table.find("thead").find("tr").findall("th")
        rows = table.find("tbody").findall("tr")
        sorts = [next(th.iter("input")).get("class") for th in heads]
        assert sorts == [f"s{i}" for i in range(len(heads))]
        for i in range(len(heads)):  # every row has a place in the order of every column
            places = [int(re.search(rf"--s{i}:(\d+)", tr.get("style"))[1]) for tr in rows]
            assert sorted(places) == list(range(len(rows)))
    style = pages[name]
    assert "order: var(--s0)" in style and "prefers-color-scheme: dark" in style


@each_page
def test_filters_count_the_rows_that_they_show(pages, name):
    root = parsed(pages[name])
    for form in root.iter("form"):
        rows = form.find("table").find("tbody").findall("tr")
        for box in form.findall("div"):
            if box.get("class") != "filters":
                continue
            total, *others = box.findall("label")
            assert content(total) == f"all {len(rows)}"
            for label in others:
                group = label.find("input").get("class")
                shown = [tr for tr in rows if group in tr.get("class").split()]
                assert content(label).endswith(f" {len(shown)}") and shown


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


def test_the_parts_of_a_bar_are_its_shares():
    text = bar([("low", 3.0, "low"), ("left wide", 1.0, "wide"), ("none", 0.0, "bad")], "of 4")
    assert re.findall(r"width:([\d.]+)%", text) == ["75.00", "25.00"]
    assert "25.0% left wide" in text and "bad" not in text
    assert bar([("low", 0.0, "low")], "of nothing") == ""


def test_numbers_are_sorted_from_the_largest_and_texts_as_in_a_dictionary():
    table = ET.fromstring(
        figures(["name", "error"], [["b", "inf"], ["a", "1.5 (1-2)"], ["C", "-"], ["d", "3/4"]])
    ).find("table")
    styles = [tr.get("style") for tr in table.find("tbody").findall("tr")]
    assert styles == ["--s0:1;--s1:0", "--s0:0;--s1:1", "--s0:2;--s1:3", "--s0:3;--s1:2"]


def test_a_long_table_says_how_many_rows_it_leaves_out():
    many = [Entry([Cell([(str(i), "")], float(i))]) for i in range(MOST_ROWS + 7)]
    text = sheet(["n"], many)
    assert text.count("<td") == MOST_ROWS and "and 7 more" in text
