"""Pictures: what they count, where boxes and lines stand, and what is refused."""

import html
import itertools
import re
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
from tests.view.test_snapshots import SNAPSHOTS

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
    root = ET.fromstring(found.draw(boxes=boxes).svg)
    marks = [int(t.text) for t in root.iter(f"{SVG}text") if t.get("class") == "mark"]
    assert sum(marks) == casts
    titles = "".join("".join(t.itertext()) for t in root.iter(f"{SVG}title"))
    said = re.findall(r"results of (\d+) equations? stored in 16 bits", titles)
    assert sum(map(int, said)) == stored > 0


@pytest.mark.parametrize("fn", [lambda x: x, lambda x: x[:0] @ jnp.zeros((8, 8)), jnp.sort])
def test_odd_programs_are_drawn(fn):
    found = pp.inspect(fn, "AlwaysF32")(X)
    assert ET.fromstring(found.draw().svg).tag == f"{SVG}svg"


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
    root = ET.fromstring(found.draw().svg)
    assert "dot_general" in texts(root)
    assert not {"low", "mixed"} & set(classes(root)) and "wide" in classes(root)
    text = content(found._repr_html_())
    assert "precpass is switched off" in text and "0 of 1 matrix product in low precision" in text


def drawn(element, x=0.0, y=0.0):
    """Each element of a picture with the place that it is moved to."""
    if moved := re.match(r"translate\((\S+) (\S+)\)", element.get("transform", "")):
        x, y = x + float(moved[1]), y + float(moved[2])
    yield element, x, y
    for child in element:
        yield from drawn(child, x, y)


def course(path, x, y):
    """Points of a line, close to each other."""
    at = (0.0, 0.0)
    for kind, text in re.findall(r"([MLC])([^MLC]+)", path):
        values = [float(n) for n in text.split()]
        ends = list(zip(values[::2], values[1::2], strict=True))
        corners = [at, *(ends if kind == "C" else [at, *ends, *ends])]
        for step in range(kind != "M" and 33):
            t = step / 32
            weights = (1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t * t * (1 - t), t**3
            yield tuple(
                o + sum(w * c[i] for w, c in zip(weights, corners, strict=True))
                for i, o in enumerate((x, y))
            )
        at = corners[-1]


@pytest.mark.parametrize("name", [name for name in SNAPSHOTS if name.endswith(".svg")])
def test_boxes_are_apart_and_no_line_runs_through_a_box_or_a_name(name):
    boxes, names, lines = [], [], []
    for element, x, y in drawn(ET.fromstring(SNAPSHOTS[name]())):
        if element.get("class") == "box":
            rect = element.find(f"{SVG}rect")
            boxes.append((x, y, x + float(rect.get("width")), y + float(rect.get("height"))))
        if element.get("class") == "name":
            names.append((x + 10, y + 8, x + 10 + 7 * len(element.text), y + 17))
        if element.tag == f"{SVG}path":
            lines += course(element.get("d"), x, y)
    for a, b in itertools.combinations(boxes, 2):
        assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]
    for left, top, right, bottom in (*boxes, *names):
        assert not any(left + 1 < x < right - 1 and top + 1 < y < bottom - 1 for x, y in lines)


def test_names_are_shown_as_they_are():
    shown = texts(ET.fromstring(pp.inspect(oddly_named)(X, W).draw(boxes=200).svg))
    # XML leaves out control characters and lone surrogates
    assert {*ODD, "\ufffd", "\ufffd\ufffd\ufffd[31m", f"{'x' * 31}\u2026"} <= set(shown)
    assert shown[0] == 'two\nlines\\" under AutoMixedBf16'


def test_what_cannot_be_drawn_or_saved_is_refused(tmp_path):
    found = pp.inspect(layers)(X, W)
    with pytest.raises(ValueError, match="boxes=0: at least one box is drawn"):
        found.draw(boxes=0)
    with pytest.raises(ValueError, match=r"f\.png: a picture is SVG, not \.png: name it \.svg"):
        found.draw().save(tmp_path / "f.png")
    assert not any(tmp_path.iterdir())


def test_a_picture_is_saved_and_shows_itself(tmp_path):
    picture = pp.inspect(layers)(X, W).draw()
    picture.save(tmp_path / "model.svg")
    assert (tmp_path / "model.svg").read_text() == picture.svg == picture._repr_svg_()
    assert "script" not in picture.svg and "http" not in picture.svg.replace(SVG[1:-1], "")
    assert "save" in repr(picture)


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
