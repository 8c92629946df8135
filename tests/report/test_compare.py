"""`compare`: rows of policies and of other functions, and their figures."""

import dataclasses
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import precpass as pp
from precpass.measure import execute
from precpass.policy.presets import PRESETS
from precpass.report.compare import programs
from tests.support.passes import quiet

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
    found = rows(product, [*BOTH, "AutoMixed"], X, W)
    assert list(found) == [*BOTH, "AutoMixed (float16)"]
    for name, row in found.items():
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


@pytest.mark.parametrize("reference", ["f64", "f32"])
def test_a_reference_has_no_policy_in_it(reference):
    inner = pp.auto_mixed(product, policy=pp.AutoMixedBf16.with_output("bf16"))

    def fn(x, w):
        return inner(x, w)

    for subject in (fn, inner):
        found = rows(subject, [("own", inner), ("plain", product)], X, W, reference=reference)
        assert found["plain"].errors.relative < 1e-6 < 1e-3 < found["own"].errors.relative


def test_the_device_is_the_one_that_was_compiled_for(monkeypatch):
    compiled, kept = execute.compiled, []

    def on_another(*args, **kwargs):
        kept.append(compiled(*args, **kwargs))
        return dataclasses.replace(
            kept[-1], device=SimpleNamespace(platform="cpu", device_kind="a TPU")
        )

    monkeypatch.setattr("precpass.report.compare.programs.compiled", on_another)
    x = jax.device_put(X, jax.devices()[2])
    found = pp.compare(lambda x: x @ x, BOTH, rounds=0)(x)
    assert [program.device for program in kept] == [jax.devices()[2]] * 2
    assert found.device == f"a TPU, jax {jax.__version__}"


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


def test_the_reference_of_complex_numbers_is_complex128():
    def power(x: jax.Array) -> jax.Array:
        return jnp.abs(lax.complex(x, x) @ lax.complex(x, -x))

    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 8)), jnp.float32)
    found = pp.compare(power, ["AlwaysF32"], rounds=0)(x)
    assert 1e-8 < found.rows[0].errors.relative < 1e-6


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
    got, wide = np.asarray(jax.jit(by_hand)(X, W), np.float64), np.asarray(X, np.float64)
    wide = wide @ np.asarray(W, np.float64)
    want = np.linalg.norm(got - wide) / np.linalg.norm(wide)
    assert found.errors.relative == pytest.approx(want)


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


def test_transforms_of_mixed_functions_are_rows():
    # functools.wraps gives jax.grad's result the attributes of the mixed function
    mixed = pp.auto_mixed(lambda x, w: product(x, w).sum())
    plain = jax.grad(lambda x, w: product(x, w).sum())
    transforms = {"outside": jax.grad(mixed), "recomputed": jax.grad(jax.checkpoint(mixed))}
    for found in rows(plain, transforms, X, W).values():
        assert "bf16" in found.counts.flops


def test_an_error_in_a_row_says_in_which():
    def wrong(x, w):
        return x @ w[:3]

    with pytest.raises(TypeError, match="contracting dimensions") as caught:
        pp.compare(product, ["AlwaysF32", ("wrong", wrong)], rounds=0)(X, W)
    assert any("'wrong'" in note for note in caught.value.__notes__)
    with pytest.raises(ValueError, match=r"row 'pair'.*\(16, 16\), \(16, 16\)"):
        pp.compare(product, {"pair": lambda x, w: (x, w)}, rounds=0)(X, W)


class Pair(NamedTuple):
    loss: Any
    scale: Any


def test_results_of_other_names_are_not_compared():
    def named(x):
        return {"loss": x @ x, "scale": x}

    def others(x):
        return {"grads": x, "loss": x @ x}

    for entry in (others, jax.jit(others)):
        with pytest.raises(ValueError, match=r"row 'o'.*output\['grads'\], not output\['loss'\]"):
            pp.compare(named, {"o": entry}, rounds=0)(X)
    for dtype in (jnp.complex64, jnp.int32):
        text = f"row 'o'.*output of {np.dtype(dtype)}, not of float32"
        with pytest.raises(ValueError, match=text):
            pp.compare(product, {"o": lambda x, w, d=dtype: (x @ w).astype(d)}, rounds=0)(X, W)
    # a tuple or a class of other names says the same in its order
    found = rows(named, {"pair": lambda x: Pair(x @ x, x), "tuple": lambda x: (x @ x, x)}, X)
    for row in found.values():
        assert [path for path, _ in row.leaves] == ["output['loss']", "output['scale']"]
        assert row.errors.relative < 1e-6


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
        found = rows(method, [*BOTH, ("as written", scale.plain), ("own", scale.mixed)], X)
        assert [row.counts.low for row in found.values()] == [0, 1, 0, 1]
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


def test_a_module_that_is_donated_is_so_in_the_memory_that_is_shown():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        dense = nnx.Linear(16, 16, rngs=nnx.Rngs(0))

        def update(model, x):
            model.kernel[...] = model.kernel[...] + x @ x

        step = pp.auto_mixed(update, donate_argnums=0)
        (row,) = pp.compare(step, "AlwaysF32", rounds=1)(dense, jnp.ones((16, 16))).rows
    assert row.memory.aliased >= 16 * 16 * 4
    assert not dense.kernel[...].is_deleted()


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
    assert list(rows(product, pp.AutoMixed, X, W)) == ["AutoMixed (float16)"]


@pytest.mark.parametrize(
    ("policies", "options", "error", "text"),
    [
        ([], {}, ValueError, "no rows"),
        (["AutoMixd"], {}, ValueError, "Did you mean 'AutoMixed'"),
        ([3], {}, TypeError, "not a policy: 3"),
        ([None], {}, TypeError, "not a policy: None"),
        ({3: "AutoMixed"}, {}, TypeError, "rows' names as its keys, not 3"),
        ([("a", "AutoMixed"), ("a", "AlwaysF32")], {}, ValueError, "'a' is given twice"),
        (BOTH, {"reference": "f16"}, ValueError, "legal are 'f64' and 'f32'"),
        (BOTH, {"rounds": -1}, ValueError, "rounds=-1"),
        (BOTH, {"rounds": 1.5}, ValueError, "rounds=1.5"),
        (BOTH, {"rounds": True}, ValueError, "rounds=True"),
    ],
)
def test_bad_input(policies, options, error, text):
    with pytest.raises(error, match=text):
        pp.compare(product, policies, **options)


def test_tracers_are_refused():
    compared = pp.compare(product, BOTH, rounds=0)
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


def test_without_policies_each_preset_has_a_row():
    found = pp.compare(product, rounds=0)(X, W)
    assert [(row.name, row.policy) for row in found.rows] == list(PRESETS.items())


def test_rows_may_be_named_by_precisions():
    found = pp.compare(product, [jnp.bfloat16, "f16", "half"], rounds=0)(X, W)
    policies = [pp.AutoMixedBf16, pp.AutoMixedF16, pp.AutoMixedF16]
    assert [(row.name, row.policy) for row in found.rows] == list(
        zip(["bf16", "f16", "half"], policies, strict=True)
    )


def test_what_a_compiler_refuses_is_a_row_without_its_figures(monkeypatch: pytest.MonkeyPatch):
    def compiled(fn: Any, *args: Any, **kwargs: Any) -> execute.Executable:
        made = execute.compiled(fn, *args, **kwargs)
        if "bf16" in str(made.jaxpr):
            return made
        error = RuntimeError("no room\nfor it")
        return dataclasses.replace(made, compiled=None, memory=None, refused=error)

    monkeypatch.setattr(programs, "compiled", compiled)
    with quiet():
        found = pp.compare(product, BOTH, rounds=0)(X, W)
    wide, low = found.rows
    assert (wide.refused, wide.memory, low.refused) == ("no room", None, "")
    assert low.memory is not None and wide.counts.products == 1
    assert str(found).count("is not compiled") == 1
    assert "AlwaysF32 is not compiled: no room" in str(found)
    assert [row.get("refused") for row in found.to_dict()["rows"]] == ["no room", None]
