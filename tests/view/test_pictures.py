"""The picture of a graph, and the HTML of plans, inspections and policies, parsed."""

import html
import os
import re
import shutil
import stat
import subprocess
import sys
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import precpass as pp
from precpass.view.rows import rows
from tests.support.values import f32

X, W = f32(8, 8), f32(8, 8)
SVG = "{http://www.w3.org/2000/svg}"


def model(x, w, layers=3):
    with jax.named_scope("body"):
        for i in range(layers):
            with jax.named_scope(f"layer_{i}"):
                x = jnp.tanh(x @ w) + x
    with jax.named_scope("head"):
        return jax.nn.softmax(lax.dot(x, w, precision="highest")).sum()


def scanned(x, w):
    return lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, length=7)[0]


def drawn(fn, *args, **options):
    text = pp.inspect(fn)(*args).draw(graphviz=False, **options).svg
    return ET.fromstring(text)


def test_the_legend_fits_on_a_narrow_picture():
    root = drawn(lambda x, w: x @ w, X, W)
    ends = [
        float(text.get("x")) + (6 if text.get("class") in ("more", "note") else 7) * len(text.text)
        for text in root.iter(f"{SVG}text")
    ]
    assert max(ends) < float(root.get("width"))


def classes(root):
    return [
        rect.get("class")
        for group in root.iter(f"{SVG}g")
        if group.get("class") == "box"
        for rect in group.iter(f"{SVG}rect")
    ]


def texts(root):
    return ["".join(text.itertext()) for text in root.iter(f"{SVG}text")]


def frames(root, kind):
    """(x, y, width, height) of each rectangle of a kind."""
    found = [r for r in root.iter(f"{SVG}rect") if r.get("class") in kind and r.get("x")]
    return [tuple(float(r.get(k)) for k in ("x", "y", "width", "height")) for r in found]


# ---------------------------------------------------------------- pictures


def test_a_small_program_is_drawn_equation_by_equation():
    root = drawn(lambda x, w: jnp.tanh(x @ w) @ w, X, W)
    assert classes(root) == ["low", "wide", "low"]
    assert texts(root).count("dot_general") == 2 and "tanh" in texts(root)
    assert len([p for p in root.iter(f"{SVG}path")]) == 2
    marks = [t for t in root.iter(f"{SVG}text") if t.get("class") == "mark"]
    assert [mark.text for mark in marks] == ["2", "1"]


@pytest.mark.release(keep=2)
@pytest.mark.parametrize("boxes", [60, 6, 1])
def test_all_casts_are_drawn_those_of_borders_inside_and_what_is_stored_low_is_said(boxes):
    def loss(x, w):
        def step(c, _):
            h = jnp.tanh(c @ w)
            return lax.cond(c[0, 0] > 2, lambda h: h, lambda h: 2 * h, h) @ w + h @ w, None

        return lax.scan(step, x, length=3)[0].sum()

    found = pp.inspect(jax.grad(loss, 1))(X, W)
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


def test_scopes_and_loops_are_boxes_around_what_is_in_them():
    root = drawn(scanned, X, W)
    assert "scan, 7 trips" in texts(root)
    (around,) = frames(root, {"scope"})
    inside = [
        box
        for box in frames(root, {"low", "wide"})
        if box[2] != 14.0  # those of the legend
    ]
    assert len(inside) == 2
    for x, y, width, height in inside:
        assert around[0] < x and x + width < around[0] + around[2]
        assert around[1] < y and y + height < around[1] + around[3]
    root = drawn(model, X, W)
    assert {"body", "layer_0", "layer_2", "head"} <= set(texts(root))


def test_boxes_do_not_overlap_and_stand_on_the_page():
    root = drawn(jax.grad(model), X, W, boxes=200)
    boxes = [b for b in frames(root, {"low", "wide", "mixed", "other"}) if b[2] != 14.0]
    assert len(boxes) > 10
    width, height = float(root.get("width")), float(root.get("height"))
    for i, (x, y, w, h) in enumerate(boxes):
        assert x >= 0 and x + w <= width and y >= 0 and y + h <= height
        for x2, y2, w2, h2 in boxes[:i]:
            assert x + w <= x2 or x2 + w2 <= x or y + h <= y2 or y2 + h2 <= y


def test_a_loop_hands_back_its_carry():
    root = drawn(lambda x, w: lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, length=3)[0], X, W)
    edges = [p.get("class") for p in root.iter(f"{SVG}path")]
    assert sorted(edges) == ["edge", "edge back"]


def test_two_loops_and_two_branches_are_frames_of_their_own():
    def run(x, w):
        x = lax.cond(x.sum() > 0, lambda x: x @ w, lambda x: jnp.tanh(x @ w), x)
        x = lax.while_loop(lambda x: x.sum() < 1, lambda x: jnp.sin(x @ w), x)
        for _ in range(2):  # the same loop twice
            x = scanned(x, w)
        x = lax.scan(lambda c, _: (jnp.cos(c @ w), None), x, length=7)[0]
        return lax.switch(1, [lambda x: x, lambda x: x @ w, lambda x: x * 2], x).sum()

    root = drawn(run, X, W)
    shown = [text for text in texts(root) if re.match(r"(scan|while|cond)\b", text)]
    assert sorted(shown) == [
        "cond 2, branch 1",
        "cond 2, branch 2",
        "cond, branch 0",
        "cond, branch 1",
        "scan 2, 7 trips",
        "scan, 7 trips",
        "while, any number of trips",
        "while, condition",
    ]


def test_what_nothing_is_joined_to_stands_near_the_rest():
    def run(x, w):
        x = lax.cond(x.sum() > 0, lambda x: x @ w, lambda x: jnp.tanh(x @ w @ w), x)
        end = lax.while_loop(lambda c: c[1] < 5, lambda c: (jnp.tanh(c[0] @ w), c[1] + 1), (x, 0))
        return lax.switch(2, [lambda x: x, lambda x: x @ w, lambda x: x * 2], end[0]).sum()

    root = drawn(run, X, W)
    assert float(root.get("width")) < 900


def test_the_number_of_casts_fits_on_its_mark():
    def run(x, w):
        for _ in range(600):
            x = jnp.tanh(x @ w)
        return x

    (group,) = (g for g in drawn(run, X, W).iter(f"{SVG}g") if g.get("class") == "box")
    mark, (number,) = (
        group.find(f"{SVG}ellipse"),
        (text for text in group.iter(f"{SVG}text") if text.get("class") == "mark"),
    )
    assert int(number.text) > 600
    assert 2 * float(mark.get("rx")) > 5.4 * len(number.text) + 2


@pytest.mark.parametrize("layers", [20, 100])
def test_a_model_of_many_layers_is_one_screen(layers):
    root = drawn(jax.grad(lambda x, w: model(x, w, layers)), X, W)
    assert len(classes(root)) <= 60
    assert float(root.get("height")) < 2400
    assert f"layer \u00d7{layers}" in texts(root)
    # what was merged is counted: one product in each layer
    assert any(f"{layers}/{layers} low" in text for text in texts(root))
    assert any("0/1 low" in text for text in texts(root))


def test_an_unrolled_model_without_scopes_is_drawn_by_its_lines():
    def unrolled(x, w):
        for _ in range(100):
            x = jnp.tanh(x @ w)
            x = x + 1
        return x

    root = drawn(unrolled, X, W)
    assert len(classes(root)) == 2
    shown = texts(root)
    at = next(i for i, text in enumerate(shown) if text.startswith("unrolled:"))
    assert re.fullmatch(r"100/100 low, \d+%", shown[at + 1])


def test_fewer_boxes_merge_scopes():
    root = drawn(model, X, W, boxes=3)
    assert len(classes(root)) <= 3


def test_titles_are_escaped():
    def fn(x, w):
        with jax.named_scope("a<b>&c"):
            return x @ w

    root = drawn(fn, X, W)
    assert "a<b>&c" in texts(root)


def test_control_characters_are_no_part_of_a_picture():
    def fn(x, w):
        with jax.named_scope("a\x01\x1b[31m"):
            return x @ w

    fn.__name__ = "\x01<b>&"
    assert any("a\ufffd" in text for text in texts(drawn(fn, X, W)))


@pytest.mark.parametrize("fn", [lambda x: x, lambda x: x[:0] @ jnp.zeros((8, 8)), jnp.sort])
def test_odd_programs_are_drawn(fn):
    found = pp.inspect(fn, "AlwaysF32")(X)
    assert ET.fromstring(found.draw(graphviz=False).svg).tag == f"{SVG}svg"


@jax.custom_vjp
def doubled(x, w):
    return 2 * (x @ w)


doubled.defvjp(lambda x, w: (doubled(x, w), (x, w)), lambda r, g: (2 * g @ r[1].T, r[0].T @ g * 2))
ENTERED = {
    "scan": scanned,
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
    tree = Tree(found._repr_html_())
    assert (
        "precpass is switched off" in tree.text
        and "0 of 1 matrix product in low precision" in tree.text
    )


def test_what_cannot_be_drawn_or_saved_is_refused(tmp_path):
    found = pp.inspect(model)(X, W)
    with pytest.raises(ValueError, match="boxes=0: at least one box is drawn"):
        found.draw(boxes=0)
    with pytest.raises(ValueError, match=r"f\.png: a picture is SVG, not \.png: name it \.svg"):
        found.draw().save(tmp_path / "f.png")
    assert not any(tmp_path.iterdir())


def test_a_picture_is_saved_and_shows_itself(tmp_path):
    picture = pp.inspect(model)(X, W).draw(graphviz=False)
    picture.save(tmp_path / "model.svg")
    assert (tmp_path / "model.svg").read_text() == picture.svg == picture._repr_svg_()
    assert "script" not in picture.svg and "http" not in picture.svg.replace(SVG[1:-1], "")
    assert "save" in repr(picture)


def test_graphviz_is_used_where_it_is_installed(tmp_path, monkeypatch):
    dot = tmp_path / "dot"
    dot.write_text(f'#!/bin/sh\ncat > {tmp_path}/given\necho "<svg>$1</svg>"\n')
    dot.chmod(dot.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    found = pp.inspect(model)(X, W)
    assert found.draw().svg == "<svg>-Tsvg</svg>\n"
    given = (tmp_path / "given").read_text()
    assert given.count("{") == given.count("}") and given.startswith("digraph {")
    assert 'label="layer_1"' in given and given.count("dot_general") >= 4
    assert "<svg>" not in found.draw(graphviz=False).svg
    dot.write_text("#!/bin/sh\necho broken >&2\nexit 3\n")
    with pytest.raises(RuntimeError, match="dot failed: broken"):
        found.draw()


ODD = ["\u65e5\u672c \u00fc", "a\\N b", "ends\\", 'q"uote"', "&lt;&amp; <b>", "%s {x}|y", "tab\tx"]


def oddly_named(x, w):
    for name in (*ODD, "\x00\x01\x1b[31m", "\ud800"):
        with jax.named_scope(name):
            x = jnp.tanh(x @ w)
    return x


oddly_named.__name__ = 'two\nlines\\"'


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


def test_a_long_name_of_a_scope_is_shortened_and_stands_whole_in_its_title():
    def fn(x, w):
        with jax.named_scope("x" * 500):
            return x @ w

    root = drawn(fn, X, W)
    assert float(root.get("width")) < 800
    titles = [title.text for title in root.iter(f"{SVG}title")]
    assert "x" * 500 in titles
    assert max(map(len, texts(root))) < 60


def test_graphviz_that_is_not_installed_is_an_error_where_it_is_asked_for(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(RuntimeError, match="`dot` is not installed: install graphviz, or"):
        pp.inspect(model)(X, W).draw(graphviz=True)


# ---------------------------------------------------------------- lines


def way(path):
    """Points on a line, close together."""
    x, y = 0.0, 0.0
    points = []
    for kind, numbers in re.findall(r"([MLC])([^MLC]*)", path.get("d")):
        at = list(map(float, numbers.split()))
        ends = [(x, y), *zip(at[::2], at[1::2], strict=True)]
        for i in range(1, 21):
            t = i / 20
            if kind == "C":
                weights = (1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t * t * (1 - t), t**3
            else:
                weights = (1 - t, t) if kind == "L" else (0, 1)
            points.append(
                tuple(sum(w * e[d] for w, e in zip(weights, ends, strict=True)) for d in (0, 1))
            )
        x, y = at[-2:]
    return points[20:]


def assert_lines_run_beside_boxes(root):
    boxes = [b for b in frames(root, {"low", "wide", "mixed", "other"}) if b[2] != 14.0]
    paths = [p for p in root.iter(f"{SVG}path")]
    assert paths
    for path in paths:
        points = way(path)
        for x, y, width, height in boxes:
            inside = [
                (a, b)
                for a, b in points
                if x + 0.5 < a < x + width - 0.5 and y + 0.5 < b < y + height - 0.5
            ]
            assert not inside, (path.get("d"), inside[0])
    ends = {way(path)[-1] for path in paths}
    tips = {
        tuple(map(float, tip.get("points").split()[0].split(",")))
        for tip in root.iter(f"{SVG}polygon")
    }
    assert tips == ends
    for a, b in ends:  # on the upper side of a box or a scope
        around = boxes + frames(root, {"scope"})
        assert any(x < a < x + width and abs(b - y) < 0.2 for x, y, width, _ in around)


PICTURES = {
    "layers": lambda: drawn(jax.grad(model), X, W),
    "equations": lambda: drawn(jax.grad(model), X, W, boxes=400),
    "many layers": lambda: drawn(jax.grad(lambda x, w: model(x, w, 30)), X, W),
    "a loop": lambda: drawn(jax.grad(lambda x, w: scanned(x, w).sum(), 1), X, W),
    "many readers": lambda: drawn(lambda x, w: sum((x @ w) ** i for i in range(9)), X, W),
    "branches": lambda: drawn(ENTERED["cond"], X, W),
}


@pytest.mark.release(keep=2)
@pytest.mark.parametrize("name", PICTURES)
def test_no_line_runs_through_a_box_and_each_ends_in_an_arrow(name):
    assert_lines_run_beside_boxes(PICTURES[name]())


def test_the_types_of_values_stand_at_their_lines():
    root = drawn(lambda x, w: jnp.tanh(x @ w) @ w, X, W)
    notes = [text.text for text in root.iter(f"{SVG}text") if text.get("class") == "note"]
    assert notes == ["f32[8,8]", "f32[8,8]"]
    found = pp.inspect(jax.grad(lambda x, w: scanned(x, w).sum(), 1))(f32(512, 256), f32(256, 256))
    root = ET.fromstring(found.draw(graphviz=False).svg)
    notes = [text.text for text in root.iter(f"{SVG}text") if text.get("class") == "note"]
    assert any(note.startswith("bf16[") for note in notes), "what is stored low is shown low"


def test_the_more_bytes_the_stronger_the_colour():
    def unequal(x, big):
        return (jnp.sin(x) @ x).sum() + jnp.tanh(big)

    root = drawn(unequal, f32(4, 4), f32(1024, 1024))
    assert classes(root).count("other") == 0
    strong = {}
    for group in root.iter(f"{SVG}g"):
        if group.get("class") == "box":
            name = group.find(f"{SVG}text").text
            share = group.findall(f"{SVG}text")[1].text
            strong[name] = float(group.find(f"{SVG}rect").get("fill-opacity")), share
    assert strong["tanh"] == (1.0, "50%") and strong["sin"][0] < 0.2
    assert strong["sin"][1] == "<1%"


def test_the_style_of_a_picture_holds_for_pictures_alone():
    root = drawn(model, X, W)
    assert root.get("class") == "precpass-picture"
    sheet = root.find(f"{SVG}style").text
    selectors = [one for names in re.findall(r"([^{}]+)\{", sheet) for one in names.split(",")]
    assert len(selectors) > 20
    assert all(one.startswith((".precpass-picture ", "@media")) for one in selectors)
    assert not [e for e in root.iter() if e.get("id")], "an id is one of the whole page"


# ---------------------------------------------------------------- HTML


class Tree(HTMLParser):
    """Well-formed, by whether every tag is closed in order."""

    VOID = frozenset({"br", "hr", "img", "meta", "link", "input"})

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.text, self.styled = [], [], "", []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.styled += [value for name, value in attrs if name == "class"]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.text += data


def test_an_inspection_is_html_that_folds():
    found = pp.inspect(jax.grad(model))(X, W)
    html = found._repr_html_()
    tree = Tree(html)
    assert "script" not in tree.tags and "link" not in tree.tags and "http://" not in tree.text
    assert tree.tags.count("details") > 4 and tree.tags.count("svg") == 1
    assert tree.tags.count("details") == tree.tags.count("summary")
    assert "test_pictures.py" in tree.text and "x = jnp.tanh(x @ w) + x" in tree.text
    assert {"bf16", "f32"} <= set(tree.styled)
    assert "prefers-color-scheme: dark" in html
    # every line of the diff is in it
    for line in found.diff().splitlines()[:-1]:
        assert line.strip() in tree.text


def test_html_of_a_long_program_has_the_first_of_its_jaxprs_lines():
    def long(x, w):
        for _ in range(600):
            x = jnp.tanh(x @ w)
        return x

    found = pp.inspect(long)(X, W)
    lines = found.diff("jaxpr").splitlines()
    text = Tree(found._repr_html_()).text
    assert lines[999] in text and lines[1000] not in text
    assert f"... and {len(lines) - 1000} more lines: .diff('jaxpr') has them all" in text


def test_a_plan_is_html_also_one_without_places():
    plan = pp.inspect(scanned)(X, W).plan
    tree = Tree(plan._repr_html_())
    assert "scan, 7 trips" in tree.text
    assert "1 of 1 products" in Tree(pp.Plan(plan.decisions)._repr_html_()).text


def test_a_policy_is_a_table():
    rule = pp.Rule(scope="*/<head>", precision="f32")
    tree = Tree(pp.AutoMixedBf16.with_rules(rule).with_output("bf16")._repr_html_())
    assert tree.tags.count("tr") == 5
    assert "compute" in tree.text and "order" in tree.text and "permission" in tree.text
    assert "Rule(scope='*/<head>', precision='f32')" in tree.text
    assert "outputs in bf16" in tree.text
    assert "widens" in Tree(pp.AlwaysF32._repr_html_()).text
