"""Pictures: what they count, where they are refused, and what Graphviz is given."""

import html
import os
import re
import shutil
import stat
import subprocess
import sys
import xml.etree.ElementTree as ET

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import precpass as pp
from precpass.view.rows import rows
from tests.support.values import f32
from tests.view import pictured
from tests.view.pictured import ODD, layers, oddly_named

X, W = f32(8, 8), f32(8, 8)
SVG = "{http://www.w3.org/2000/svg}"


def classes(root):
    return [
        rect.get("class")
        for group in root.iter(f"{SVG}g")
        if group.get("class") == "box"
        for rect in group.iter(f"{SVG}rect")
    ]


def texts(root):
    return ["".join(text.itertext()) for text in root.iter(f"{SVG}text")]


@pytest.mark.release(keep=2)
@pytest.mark.parametrize("boxes", [60, 6, 1])
def test_all_casts_are_drawn_those_of_borders_inside_and_what_is_stored_low_is_said(boxes):
    found = pp.inspect(jax.grad(pictured.stored, 1))(X, W)
    at_borders = [cast for row in rows(found.plan) if row.info.bodies for cast in row.info.casts]
    assert at_borders
    casts = sum(len(row.info.casts) for row in rows(found.plan))
    stored = sum(row.decision.stores_low for row in rows(found.plan))
    root = ET.fromstring(found.draw(graphviz=False, boxes=boxes).svg)
    marks = [int(t.text) for t in root.iter(f"{SVG}text") if t.get("class") == "mark"]
    assert sum(marks) == casts
    titles = "".join("".join(t.itertext()) for t in root.iter(f"{SVG}title"))
    said = re.findall(r"results of (\d+) equations? stored in 16 bits", titles)
    assert sum(map(int, said)) == stored > 0


@pytest.mark.parametrize("fn", [lambda x: x, lambda x: x[:0] @ jnp.zeros((8, 8)), jnp.sort])
def test_odd_programs_are_drawn(fn):
    found = pp.inspect(fn, "AlwaysF32")(X)
    assert ET.fromstring(found.draw(graphviz=False).svg).tag == f"{SVG}svg"


@jax.custom_vjp
def doubled(x, w):
    return 2 * (x @ w)


doubled.defvjp(lambda x, w: (doubled(x, w), (x, w)), lambda r, g: (2 * g @ r[1].T, r[0].T @ g * 2))
ENTERED = {
    "scan": pictured.loop,
    "cond": lambda x, w: lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: x),
    "custom_vjp": doubled,
}


@pytest.mark.parametrize("name", ENTERED)
def test_a_program_is_drawn_also_where_the_pass_is_switched_off(name):
    with pp.use_policy(None):
        found = pp.inspect(ENTERED[name])(X, W)
    root = ET.fromstring(found.draw(graphviz=False).svg)
    assert "dot_general" in texts(root)
    assert not {"low", "mixed"} & set(classes(root)) and "wide" in classes(root)
    text = content(found._repr_html_())
    assert "precpass is switched off" in text and "0 of 1 matrix product in low precision" in text


def test_what_cannot_be_drawn_or_saved_is_refused(tmp_path):
    found = pp.inspect(layers)(X, W)
    with pytest.raises(ValueError, match="boxes=0: at least one box is drawn"):
        found.draw(boxes=0)
    with pytest.raises(ValueError, match=r"f\.png: a picture is SVG, not \.png: name it \.svg"):
        found.draw().save(tmp_path / "f.png")
    assert not any(tmp_path.iterdir())


def test_a_picture_is_saved_and_shows_itself(tmp_path):
    picture = pp.inspect(layers)(X, W).draw(graphviz=False)
    picture.save(tmp_path / "model.svg")
    assert (tmp_path / "model.svg").read_text() == picture.svg == picture._repr_svg_()
    assert "script" not in picture.svg and "http" not in picture.svg.replace(SVG[1:-1], "")
    assert "save" in repr(picture)


def test_graphviz_is_used_where_it_is_installed(tmp_path, monkeypatch):
    dot = tmp_path / "dot"
    dot.write_text(f'#!/bin/sh\ncat > {tmp_path}/given\necho "<svg>$1</svg>"\n')
    dot.chmod(dot.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    found = pp.inspect(layers)(X, W)
    assert found.draw().svg == "<svg>-Tsvg</svg>\n"
    given = (tmp_path / "given").read_text()
    assert given.count("{") == given.count("}") and given.startswith("digraph {")
    assert 'label="layer_1"' in given and given.count("dot_general") >= 4
    assert "<svg>" not in found.draw(graphviz=False).svg
    dot.write_text("#!/bin/sh\necho broken >&2\nexit 3\n")
    with pytest.raises(RuntimeError, match="dot failed: broken"):
        found.draw()


def test_names_reach_graphviz_as_they_are(tmp_path, monkeypatch):
    dot = tmp_path / "dot"
    dot.write_text(f"#!/bin/sh\ncat > {tmp_path}/given\n")
    dot.chmod(dot.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    pp.inspect(oddly_named)(X, W).draw(boxes=200)
    given = (tmp_path / "given").read_bytes().decode("utf-8")
    # graphviz's rules: a quote ends a string unless a backslash is before it, a label's
    # backslash is an escape, and its ampersand begins an entity
    strings = re.findall(r'label="((?:[^"\\]|\\.)*)"', given)
    escapes = {"\\n": "\n", '\\"': '"', "\\\\": "\\"}
    labels = [html.unescape(re.sub(r"\\.", lambda m: escapes[m[0]], s)) for s in strings]
    assert labels[0].startswith('two\nlines\\" under')
    assert set(ODD) <= set(labels)
    assert "\ufffd" in labels and "\ufffd\ufffd\ufffd[31m" in labels
    assert not re.search(r"[\x00-\x08\x0e-\x1f]", given)


@pytest.mark.skipif(shutil.which("dot") is None, reason="graphviz is not installed")
def test_graphviz_itself_shows_names_as_they_are():
    root = ET.fromstring(pp.inspect(oddly_named)(X, W).draw(graphviz=True, boxes=200).svg)
    assert set(ODD) <= {text.text for text in root.iter(f"{SVG}text")}


@pytest.mark.release
def test_graphviz_is_spoken_to_in_utf_8_whatever_the_locale(tmp_path):
    dot = tmp_path / "dot"
    dot.write_text("#!/bin/sh\ncat\n")
    dot.chmod(dot.stat().st_mode | stat.S_IXUSR)
    code = """
from precpass.view.picture.clusters import Chart
from precpass.view.picture.svg import picture
assert "\\u65e5" in picture(Chart(), "\\u65e5", True).svg
"""
    path = f"{tmp_path}:{os.environ['PATH']}"
    plain = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0", "PATH": path}
    subprocess.run([sys.executable, "-c", code], env={**os.environ, **plain}, check=True)


def test_graphviz_that_is_not_installed_is_an_error_where_it_is_asked_for(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(RuntimeError, match="`dot` is not installed: install graphviz, or"):
        pp.inspect(layers)(X, W).draw(graphviz=True)


# ---------------------------------------------------------------- lines


def content(page):
    return html.unescape(re.sub("<[^>]*>", "", page))


def test_a_plan_without_places_is_html_too():
    plan = pp.inspect(pictured.loop)(X, W).plan
    assert "1 of 1 products" in pp.Plan(plan.decisions)._repr_html_()


def test_html_of_a_long_program_has_the_first_of_its_jaxprs_lines():
    found = pp.inspect(pictured.unrolled)(X, W)
    lines = found.diff("jaxpr").splitlines()
    text = content(found._repr_html_())
    assert lines[999] in text and lines[1000] not in text
    assert f"... and {len(lines) - 1000} more lines: .diff('jaxpr') has them all" in text
