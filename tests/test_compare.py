"""`compare`: rows of policies and of other functions, their figures, and the forms of a table."""

import dataclasses
import json
import math
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import pytest
from flax import nnx
from helpers import quiet
from jax import lax

import precpass as pp
from precpass.measure import Timing

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

import demo_model

matplotlib.use("Agg")
RNG = np.random.default_rng(0)
X, W = (jnp.asarray(RNG.standard_normal((16, 16)) / 4, jnp.float32) for _ in range(2))
BOTH = ("AlwaysF32", "AutoMixedBf16")


def product(x: jax.Array, w: jax.Array) -> jax.Array:
    return x @ w


def rows(fn: Callable[..., Any], policies: Any, *args: Any, **options: Any) -> dict[str, Any]:
    """The rows of a comparison without times, by name."""
    with quiet():
        found = pp.compare(fn, policies, rounds=0, **options)(*args)
    return {row.name: row for row in found.rows}


# ---------------------------------------------------------------- figures


def test_errors_are_those_of_numpy_in_float64():
    wide = np.asarray(X, np.float64) @ np.asarray(W, np.float64)
    for name, row in rows(product, [*BOTH, "AutoMixed"], X, W).items():
        got = np.asarray(pp.auto_mixed(product, policy=name)(X, W), np.float64)
        d = got - wide
        assert row.errors.relative == pytest.approx(np.linalg.norm(d) / np.linalg.norm(wide))
        units = np.spacing(np.abs(wide).astype(np.float32)).astype(np.float64)
        assert row.errors.max_ulp == pytest.approx((np.abs(d) / units).max(), rel=1e-6)
        ratio = np.linalg.norm(wide) / np.linalg.norm(d)
        assert row.errors.sqnr == pytest.approx(20 * np.log10(ratio))
        assert row.errors.nonfinite == row.errors.differing == 0


def test_float32_is_a_reference_without_an_error_of_its_own():
    found = rows(product, BOTH, X, W, reference="f32")
    assert found["AlwaysF32"].errors.relative == 0
    assert found["AlwaysF32"].errors.sqnr == math.inf
    low = np.asarray(pp.auto_mixed(product)(X, W), np.float64)
    wide = np.asarray(jax.jit(product)(X, W), np.float64)
    want = np.linalg.norm(low - wide) / np.linalg.norm(wide)
    assert found["AutoMixedBf16"].errors.relative == pytest.approx(want)


def test_counts_are_those_of_the_traced_step():
    def layers(x, w):
        return lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, length=5)[0]

    found = rows(layers, BOTH, X, W)
    wide, low = found["AlwaysF32"], found["AutoMixedBf16"]
    assert (wide.counts.products, wide.counts.low, wide.casts_inserted) == (1, 0, 0)
    assert (low.counts.products, low.counts.low) == (1, 1)
    assert low.casts_inserted > 0
    flops = 5 * 2 * 16**3
    assert wide.counts.flops == {"f32": flops + 5 * 256}
    assert low.counts.flops["bf16"] == flops
    assert wide.counts.low_bytes == 0 < low.counts.low_bytes
    compiled = jax.jit(layers).lower(X, W).compile().memory_analysis()
    assert wide.memory.temp == compiled.temp_size_in_bytes


def test_casts_that_a_policy_removes_are_negative():
    def by_hand(x, w):
        return (x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(jnp.float32)

    found = rows(by_hand, ["AlwaysF32", ("as written", by_hand)], X, W)
    assert found["as written"].counts.casts == 3
    assert found["as written"].casts_inserted == 0
    assert found["AlwaysF32"].counts.casts == 0
    assert found["AlwaysF32"].casts_inserted == -3


def test_each_leaf_has_its_path_and_its_errors():
    def fn(x, w):
        return {"y": x @ w, "n": jnp.argmax(x), "s": (x * 2,)}

    row = rows(fn, "AutoMixedBf16", X, W)["AutoMixedBf16"]
    leaves = dict(row.leaves)
    assert list(leaves) == ["output['n']", "output['s'][0]", "output['y']"]
    assert leaves["output['n']"].relative is None
    assert leaves["output['s'][0]"].relative == 0
    assert leaves["output['y']"].relative > row.errors.relative > 0


# ---------------------------------------------------------------- other functions


def mlp(x: jax.Array, w: jax.Array) -> jax.Array:
    y = x @ w
    scores = y / jnp.asarray(np.sqrt(16.0), jnp.float32)  # promotes what is low
    return (jnp.tanh(scores) @ w) @ w


def test_a_float32_constant_promotes_the_rest_of_what_casts_parameters():
    def cast_parameters(x, w):
        with jax.numpy_dtype_promotion("standard"):
            return mlp(x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)).astype(jnp.float32)

    found = rows(mlp, ["AlwaysF32", "AutoMixedBf16", ("cast", cast_parameters)], X, W)
    low = {name: (row.counts.low, row.counts.products) for name, row in found.items()}
    assert low == {"AlwaysF32": (0, 3), "AutoMixedBf16": (3, 3), "cast": (1, 3)}


def test_a_hand_written_model_is_measured_as_it_is():
    def by_hand(x, w):
        low = x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)
        return low.astype(jnp.float32)

    found = rows(product, [by_hand], X, W)["by_hand"]
    assert found.policy is None
    assert (found.counts.low, found.casts_inserted) == (1, 3)
    got, wide = (np.asarray(f(X, W), np.float64) for f in (jax.jit(by_hand), product))
    want = np.linalg.norm(got - wide) / np.linalg.norm(wide)
    assert found.errors.relative == pytest.approx(want, rel=1e-3)


def test_marked_products_are_shown_beside_low_ones():
    def marked(x, w):
        with jax.default_matmul_precision("BF16_BF16_F32"):
            return product(x, w)

    with quiet():
        found = pp.compare(product, ["AlwaysF32", marked], rounds=0)(X, W)
    assert (found.rows[1].counts.low, found.rows[1].counts.marked) == (0, 1)
    assert "0/1 (1 marked)" in str(found)


def test_a_jitted_row_keeps_its_own_options():
    def powers(x, n):
        for _ in range(n):
            x = x @ W
        return x

    own = jax.jit(powers, static_argnums=1, donate_argnums=0)
    mixed = pp.auto_mixed(powers, static_argnums=1)
    found = pp.compare(mixed, ["AutoMixedBf16", ("jit", own), powers], rounds=2)(X, 3)
    assert [row.counts.products for row in found.rows] == [3, 3, 3]
    assert not X.is_deleted()


def test_a_function_with_a_policy_of_its_own_is_a_row():
    own = pp.auto_mixed(product, policy=pp.AutoMixed)
    found = rows(product, ["AutoMixedBf16", ("own", own)], X, W)
    assert found["own"].counts.flops == {"f16": 2 * 16**3}
    # and given as the function it takes the rows' policies
    assert rows(own, BOTH, X, W)["AutoMixedBf16"].counts.flops == {"bf16": 2 * 16**3}


def test_an_error_in_a_row_says_in_which():
    def wrong(x, w):
        return x @ w[:3]

    with pytest.raises(TypeError, match="contracting dimensions") as caught:
        pp.compare(product, ["AlwaysF32", ("wrong", wrong)], rounds=0)(X, W)
    assert any("'wrong'" in note for note in caught.value.__notes__)
    with pytest.raises(ValueError, match=r"row 'pair'.*\(16, 16\), \(16, 16\)"):
        pp.compare(product, {"pair": lambda x, w: (x, w)}, rounds=0)(X, W)


# ---------------------------------------------------------------- what is compared


class Scale:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def plain(self, x: jax.Array) -> jax.Array:
        return (x @ x) * self.factor

    mixed = pp.auto_mixed(plain, static_argnums=0)


def test_bound_methods_and_static_arguments():
    scale = Scale(2.0)
    for method in (scale.plain, scale.mixed):
        found = rows(method, [*BOTH, ("as written", scale.plain)], X)
        assert [row.counts.low for row in found.values()] == [0, 1, 0]
        assert found["as written"].errors == found["AlwaysF32"].errors

    def activated(x, name, fn, *, twice):
        y = fn(x @ x) if name == "on" else x
        return y @ y if twice else y

    mixed = pp.auto_mixed(activated, static_argnames="twice")
    compared = pp.compare(mixed, [*BOTH, ("as written", activated)], rounds=1)
    found = compared(X, "on", jnp.tanh, twice=True)
    assert [row.counts.low for row in found.rows] == [0, 2, 0]


def test_donated_arguments_stay_with_the_caller():
    def step(state, x):
        return state + x @ x, jnp.sum(state)

    mixed = pp.auto_mixed(step, donate_argnums=0)
    found = pp.compare(mixed, BOTH, rounds=3)(X, W)
    assert not X.is_deleted()
    assert [len(row.timing.seconds) for row in found.rows] == [3, 3]
    assert found.rows[0].memory.aliased == 4 * 256


def test_modules_stay_as_they_are_and_their_updates_are_results():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):

        class Model(nnx.Module):
            def __init__(self) -> None:
                self.dense = nnx.Linear(16, 16, rngs=nnx.Rngs(0))
                self.norm = nnx.BatchNorm(16, rngs=nnx.Rngs(0))

            def __call__(self, x: jax.Array) -> jax.Array:
                return self.norm(self.dense(x))

        def apply(model, x):
            return model(x)

        model = Model()
        before = [np.asarray(x) for x in jax.tree.leaves(nnx.state(model))]
        with quiet():
            found = pp.compare(apply, [*BOTH, ("plain", apply), ("nnx", nnx.jit(apply))], rounds=1)(
                model, X
            )
        after = [np.asarray(x) for x in jax.tree.leaves(nnx.state(model))]
    for a, b in zip(before, after, strict=True):
        np.testing.assert_array_equal(a, b)
    assert [row.counts.low for row in found.rows] == [0, 1, 0, 0]
    paths = [path for path, _ in found.rows[0].leaves]
    assert "output" in paths
    assert any(path.startswith("model.norm.mean") for path in paths)
    means = [e.relative for p, e in found.rows[1].leaves if p.startswith("model.norm.mean")]
    assert means[0] > 1e-5  # of the low product


def test_results_of_every_kind():
    key = jax.random.key(0)

    def fn(x, n, key):
        low = x @ x
        kinds = {"int": jnp.argsort(low), "bool": low > 0, "key": jax.random.split(key)}
        return {**kinds, "empty": low[:0], "scalar": low.sum(), "text": "text", "n": n + 1}

    found = rows(fn, [*BOTH, ("as written", fn)], X, 3, key)
    assert found["AlwaysF32"].errors.differing == 0
    assert found["AutoMixedBf16"].errors.differing > 0
    leaves = dict(found["AutoMixedBf16"].leaves)
    assert leaves["output['key']"].differing == leaves["output['n']"].differing == 0
    assert leaves["output['empty']"].relative is None
    assert leaves["output['scalar']"].relative > 0
    assert "output['text']" not in leaves


def test_results_without_floating_numbers_have_no_errors():
    for fn in (lambda x: jnp.argmax(x @ x), lambda x: (x @ x)[:0], lambda x: ()):
        found = rows(fn, "AutoMixedBf16", X)["AutoMixedBf16"].errors
        assert found.relative is found.max_ulp is found.sqnr is found.cosine is None
        assert found.nonfinite == 0


def test_non_finite_values_are_counted_where_the_reference_is_finite():
    def fn(x):
        return jnp.stack([(x * 1e5) @ x, jnp.log(-jnp.abs(x))])

    found = rows(fn, ["AlwaysF32", "AlwaysF16", "AlwaysBf16"], jnp.ones((4, 4)))
    assert found["AlwaysF32"].errors.nonfinite == 0
    assert found["AlwaysF32"].errors.relative < 1e-6
    assert found["AlwaysBf16"].errors.relative < 1e-2
    assert found["AlwaysF16"].errors.nonfinite == 16
    assert found["AlwaysF16"].errors.relative == math.inf


def test_a_zero_reference():
    found = rows(lambda x: (x @ x) * 0, "AutoMixedBf16", X)["AutoMixedBf16"].errors
    assert (found.relative, found.max_ulp, found.cosine) == (0, 0, 1)


def test_regions_and_casts_of_the_users_own_are_errors_too():
    def fn(x):
        with pp.keep("bf16"):
            return x @ x

    (row,) = rows(fn, "AlwaysF32", X).values()
    assert 1e-4 < row.errors.relative < 1e-1


# ---------------------------------------------------------------- rows


def test_names():
    ruled = pp.AutoMixedBf16.with_rules(pp.Rule(primitive="tanh", precision="f32"))
    items = [pp.AutoMixedBf16, "AutoMixedBf16", ruled, "c=f16", product, ("mine", "AutoMixed")]
    found = rows(lambda x: jnp.tanh(x @ x), [*items[:4], items[5]], X)
    assert list(found) == [
        "AutoMixedBf16",
        "AutoMixedBf16 (2)",
        "AutoMixedBf16 with 1 rule",
        "c=f16",
        "mine",
    ]
    assert found["c=f16"].policy == pp.AutoMixed
    assert list(rows(product, {"a": "AutoMixed", "b": product}, X, W)) == ["a", "b"]
    assert list(rows(product, [product, product], X, W)) == ["product", "product (2)"]
    assert list(rows(product, pp.AutoMixed, X, W)) == ["AutoMixed"]


@pytest.mark.parametrize(
    ("policies", "options", "error", "text"),
    [
        ([], {}, ValueError, "no rows"),
        (["AutoMixd"], {}, ValueError, "Did you mean 'AutoMixed'"),
        ([3], {}, TypeError, "not a policy: 3"),
        (None, {}, TypeError, "not a policy: None"),
        ([("a", "AutoMixed"), ("a", "AlwaysF32")], {}, ValueError, "'a' is given twice"),
        (BOTH, {"reference": "f16"}, ValueError, "legal are 'f64' and 'f32'"),
        (BOTH, {"rounds": -1}, ValueError, "rounds=-1"),
        (BOTH, {"rounds": 1.5}, ValueError, "rounds=1.5"),
    ],
)
def test_bad_input(policies, options, error, text):
    with pytest.raises(error, match=text):
        pp.compare(product, policies, **options)


def test_shapes_and_tracers_are_refused():
    compared = pp.compare(product, BOTH, rounds=0)
    with pytest.raises(TypeError, match="x must hold arrays, not ShapeDtypeStruct"):
        compared(jax.ShapeDtypeStruct((2, 2), jnp.float32), W)
    with pytest.raises(TypeError, match="outside of jit"):
        jax.jit(lambda x: compared(x, W))(X)


def test_an_error_of_the_function_comes_first_and_as_it_is():
    def wrong(x, w):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        pp.compare(wrong, BOTH, rounds=0)(X, W)


def test_progress_is_told():
    told: list[tuple[str, int, int]] = []
    pp.compare(product, BOTH, rounds=2, progress=lambda *step: told.append(step))(X, W)
    assert {total for *_, total in told} == {5}
    done = [n for _, n, _ in told]
    assert done == sorted(done)
    assert [text for text, *_ in told][:3] == ["the reference", *BOTH]


# ---------------------------------------------------------------- forms


@pytest.fixture(scope="module")
def comparison() -> pp.Comparison:
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
    assert (frame["seconds"] > 0).all()
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
        self.cells: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag != "br":
            self.open.append(tag)
        if tag in ("td", "th"):
            self.cells.append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("td", "th"):
            self.cells[-1] += data


def test_the_html_is_a_table_with_escaped_names_and_no_script(comparison):
    page, text = Page(), comparison._repr_html_()
    page.feed(text)
    assert not page.open
    assert page.tags.count("tr") == 1 + len(comparison.rows)
    assert "<b>&low" in page.cells
    assert "b" not in page.tags
    assert "script" not in page.tags
    # the page's own colours, whether light or dark
    assert "#" not in text.replace("&#", "")
    assert "http" not in text


def made(comparison: pp.Comparison, **figures: tuple[float, float, float]) -> pp.Comparison:
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
    with pytest.raises(ValueError, match="legal are 'time', 'memory'"):
        found.pareto(by="energy")


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


# ---------------------------------------------------------------- a real model


def test_the_loss_of_the_demos_transformer():
    shape = demo_model.Shape(layers=3, width=32, heads=2, length=16, batch=2)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        task = demo_model.make_task(shape)
        tokens = RNG.integers(256, size=(2, 17)).astype(np.int32)

        def cast_parameters(params, tokens):
            low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
            logits = task.logits(low, tokens).astype(jnp.float32)
            return demo_model.cross_entropy(logits, tokens)

        found = rows(task.loss, [*BOTH, cast_parameters], task.params, tokens)
    wide, low, cast = found.values()
    assert low.counts.products == low.counts.low == wide.counts.products == 7
    assert cast.counts.products == 7
    assert 0 < cast.counts.low < 4
    assert wide.errors.relative < 1e-6 < low.errors.relative < 1e-2
    # per token and layer 2 * 12 width^2 and 4 * width * length, per token the head
    tokens_in, width = 2 * 16, 32
    layer = 2 * 12 * width**2 + 4 * width * 16
    assert low.counts.flops["bf16"] == tokens_in * (3 * layer + 2 * width * 256)
