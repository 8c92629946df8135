"""What `compare` found as text, HTML, JSON, a frame and a plot."""

import dataclasses
import html
import json
import math
import re
import sys
from html.parser import HTMLParser

import jax.numpy as jnp
import matplotlib
import numpy as np
import pytest

import precpass as pp
from precpass.measure.execute import Timing
from precpass.view.page import CSS
from tests.report.test_compare import BOTH, W, X, product
from tests.support.passes import quiet

matplotlib.use("Agg")


@pytest.fixture(scope="module")
def comparison() -> pp.report.Comparison:
    def model(x, w):
        return jnp.tanh(x @ w) @ w, jnp.argmax(x)

    policies = {"AlwaysF32": "AlwaysF32", "<b>&low": "AutoMixedBf16", "f16": "AutoMixed"}
    return pp.compare(model, policies, rounds=3)(X, W)


def test_ratios_are_taken_within_a_round(comparison):
    first = np.asarray(comparison.rows[0].timing.seconds)
    for row in comparison.rows:
        assert len(row.timing.seconds) == comparison.rounds == 3
        assert row.ratio == pytest.approx(np.median(np.asarray(row.timing.seconds) / first))
    assert comparison.rows[0].ratio == 1


def test_the_text_is_aligned(comparison):
    lines = str(comparison).splitlines()
    head = next(i for i, line in enumerate(lines) if line.startswith("program"))
    table = lines[head : head + 5]
    assert len({len(line) for line in table}) == 1
    assert [line.split("  ")[0] for line in table[2:]] == [row.name for row in comparison.rows]
    assert "2/2" in table[3]
    assert "integers off" not in table[0]  # nobody has any
    assert "float64" in lines[0]


def test_the_dict_is_json(comparison):
    text = json.dumps(comparison.to_dict(), allow_nan=False)
    data = json.loads(text)
    assert [row["name"] for row in data["rows"]] == [row.name for row in comparison.rows]
    low = data["rows"][1]
    assert low["products_low"] == 2
    assert low["policy"] == "AutoMixedBf16"
    assert low["flops_bf16"] == 2 * 2 * 16**3
    assert low["seconds"] == comparison.rows[1].timing.median
    assert low["leaves"][0]["relative_error"] == comparison.rows[1].leaves[0][1].relative
    assert low["leaves"][0]["path"] == "output[0]"


def test_numbers_that_json_has_not_are_words():
    with quiet():
        found = pp.compare(product, "AlwaysF32", reference="f32", rounds=0)(X, W)
    (row,) = json.loads(json.dumps(found.to_dict(), allow_nan=False))["rows"]
    assert row["sqnr_db"] == "inf"
    assert row["seconds"] is row["ratio"] is None


def test_the_frame_has_a_row_for_each(comparison):
    frame = comparison.to_frame()
    assert list(frame.index) == [row.name for row in comparison.rows]
    assert frame.loc["f16", "products_low"] == 2
    assert frame.loc["f16", "flops_bf16"] == 0
    assert frame.loc["f16", "flops_f16"] == 2 * 2 * 16**3
    assert frame["relative_error"].idxmin() == "AlwaysF32"
    assert list(frame["seconds"]) == [row.timing.median for row in comparison.rows]
    with quiet():
        integers = pp.compare(lambda x: jnp.argmax(x @ x), BOTH, rounds=0)(X).to_frame()
    for name in ("seconds", "ratio", "relative_error"):
        assert integers[name].dtype == float
        assert integers[name].isna().all()


class Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.plain: list[str] = []
        self.cells: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if not attrs:
            self.plain.append(tag)
        if tag != "br":
            self.open.append(tag)
        if tag in ("td", "th"):
            self.cells.append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "td" in self.open or "th" in self.open:
            self.cells[-1] += data


def test_the_html_is_a_table_with_escaped_names(comparison):
    page, text = Page(), comparison._repr_html_()
    page.feed(text)
    assert not page.open
    assert page.tags.count("tr") == 1 + len(comparison.rows)
    assert "<b>&low" in page.cells
    assert "b" not in page.plain  # a format's own has a class
    # the page's own colours, whether light or dark, but for those that all results share
    assert "#" not in text.replace(CSS, "").replace("&#", "")
    assert "http" not in text
    shown = html.unescape(re.sub(r"<[^>]+>", "", text))  # names of formats have a colour
    assert all(note in shown for note in str(comparison).splitlines()[-4:])


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_on_a_terminal_a_table_is_no_wider(comparison, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = str(comparison).splitlines()
    end = next(i for i, line in enumerate(lines) if line.startswith("products low:"))
    table = lines[2:end]
    assert max(map(len, table)) <= columns
    heads = [line for line in table if line.startswith("program")]
    assert (len(heads) == 1) == (columns == 200)
    for name in ("AlwaysF32", "<b>&low"):  # each part has the names again
        assert sum(line.startswith(name) for line in table) == len(heads)
    found = [head for line in heads for head in re.split(r" {2,}", line)[1:]]
    monkeypatch.setenv("COLUMNS", "1000")
    assert found == re.split(r" {2,}", str(comparison).splitlines()[2])[1:]


def test_the_page_begins_with_what_to_use(comparison):
    above, table, _ = comparison._repr_html_().partition("<table")
    said = re.sub(r"\s+", " ", html.unescape(re.sub("<[^>]*>", "", above)))
    assert table and comparison.conclusion and comparison.conclusion in said


def made(
    comparison: pp.report.Comparison, **figures: tuple[float, float, float]
) -> pp.report.Comparison:
    """A comparison whose rows have these times, temp bytes and errors."""
    (first, *_) = comparison.rows
    found = [
        dataclasses.replace(
            first,
            name=name,
            timing=Timing((seconds,)),
            memory=dataclasses.replace(first.memory, temp=temp),
            errors=dataclasses.replace(first.errors, relative=error),
        )
        for name, (seconds, temp, error) in figures.items()
    ]
    return dataclasses.replace(comparison, rows=tuple(found))


FIGURES = {
    "slow": (4.0, 10, 1e-7),
    "beaten": (4.5, 20, 1e-6),
    "fast": (1.0, 30, 1e-2),
    "between": (2.0, 30, 1e-3),
    "broken": (0.1, 0, math.inf),
    "exact": (9.0, 40, 0.0),
}


def test_the_front_is_what_no_row_beats(comparison):
    found = made(comparison, **FIGURES)
    assert [row.name for row in found.pareto()] == ["fast", "between", "slow", "exact"]
    assert [row.name for row in found.pareto(by="memory")] == ["slow", "exact"]
    with pytest.raises(ValueError, match="legal are 'time', 'ratio', 'memory'"):
        found.pareto(by="energy")


@pytest.mark.release(keep=1)
@pytest.mark.parametrize(("x", "names"), [("time", 4), ("memory", 2)])
def test_the_plot_draws_the_front_and_names_every_row(comparison, x, names):
    found = made(comparison, **FIGURES)
    ax = found.plot(x=x)
    (front,) = [line for line in ax.lines if line.get_label() == "Pareto front"]
    scale = 1e3 if x == "time" else 1e-6
    costs = [row.timing.median if x == "time" else row.memory.temp for row in found.pareto(by=x)]
    assert len(costs) == names
    np.testing.assert_allclose(front.get_xdata(), np.asarray(costs) * scale)
    # zero stands below the smallest error
    assert front.get_ydata()[-1] == pytest.approx(1e-8)
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    texts = {text.get_text() for text in ax.texts}
    assert texts == {*FIGURES} - {"broken"} | {"broken (not finite)"}
    assert x in ax.get_xlabel()
    assert ax.get_title() == "model: cost and error"
    matplotlib.pyplot.close(ax.figure)


NEAR = {
    "AlwaysF32": (7.80, 10, 2.1e-07),
    "AutoMixedBf16": (7.77, 10, 1.9e-02),
    "AutoMixed": (8.26, 10, 6.9e-03),
    "AlwaysBf16": (10.2, 10, 2.4e-02),
    "cast_by_hand": (10.4, 10, 2.1e-02),
    "another": (10.3, 10, 2.2e-02),
}


@pytest.mark.release(keep=1)
@pytest.mark.parametrize("figures", [NEAR, FIGURES, {"alone": (1.0, 10, 1e-3)}])
def test_the_labels_of_a_plot_cover_nothing(comparison, figures):
    ax = made(comparison, **figures).plot()
    ax.figure.canvas.draw()
    boxes = [text.get_window_extent() for text in ax.texts]
    boxes.append(ax.get_legend().get_window_extent())
    assert len(boxes) == 1 + len(figures)
    for i, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[:i])
        assert ax.bbox.x0 <= box.x0 < box.x1 <= ax.bbox.x1
        assert ax.bbox.y0 <= box.y0 < box.y1 <= ax.bbox.y1
    matplotlib.pyplot.close(ax.figure)


def test_the_ticks_of_a_short_axis_are_plain_numbers(comparison):
    ax = made(comparison, **NEAR).plot()
    ax.figure.canvas.draw()
    low, high = ax.get_xlim()
    labels = [t.get_text() for t in ax.get_xticklabels()]
    shown = [float(label) for label in labels]  # none is in mathematical notation
    inside = [value for value in shown if low <= value <= high]
    assert 3 <= len(inside) <= 9
    assert [t.get_text() for t in ax.get_xticklabels(minor=True)] == []
    assert "10^" in ax.get_yticklabels()[0].get_text()  # five powers of ten are ticks enough
    matplotlib.pyplot.close(ax.figure)


def test_the_ratios_of_a_plot_are_those_of_the_table(comparison):
    """Of times that drift, the medians may order two programs otherwise than their ratios do."""
    first, second = comparison.rows[:2]
    drifting = Timing((1.0, 2.0, 9.0)), Timing((0.9, 2.5, 8.0))
    ratio = drifting[1].ratios(drifting[0])
    rows = (
        dataclasses.replace(first, timing=drifting[0], ratio=1.0),
        dataclasses.replace(second, timing=drifting[1], ratio=ratio.median),
    )
    found = dataclasses.replace(comparison, rows=rows)
    ax = found.plot(x="ratio")
    drawn = [line.get_xdata() for line in ax.lines if line.get_label() != "Pareto front"]
    np.testing.assert_allclose(drawn[0], (1.0, 1.0))
    np.testing.assert_allclose(drawn[1], ratio.quartiles)
    assert ax.collections[1].get_offsets()[0][0] == pytest.approx(ratio.median)
    assert ratio.median < 1 < drifting[1].median / drifting[0].median
    assert [row.name for row in found.pareto(by="ratio")] == [second.name, first.name]
    assert ax.get_xlabel() == "time / time of AlwaysF32 (median over rounds)"
    matplotlib.pyplot.close(ax.figure)


def test_a_plot_on_given_axes_and_without_anything_to_plot(comparison):
    import matplotlib.pyplot as plt

    figure, ax = plt.subplots()
    assert comparison.plot(ax=ax) is ax
    plt.close(figure)
    with quiet():
        untimed = pp.compare(product, BOTH, rounds=0)(X, W)
        integers = pp.compare(lambda x: jnp.argmax(x @ x), BOTH, rounds=1)(X)
    with pytest.raises(ValueError, match=r"time was not measured \(rounds=0\)"):
        untimed.plot()
    with pytest.raises(ValueError, match="no row has floating results"):
        integers.plot()


@pytest.mark.parametrize(("module", "use"), [("pandas", "to_frame"), ("matplotlib", "plot")])
def test_what_is_not_installed_is_named(comparison, monkeypatch, module, use):
    for name in (module, f"{module}.pyplot"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=f"pip install {module}"):
        getattr(comparison, use)()
