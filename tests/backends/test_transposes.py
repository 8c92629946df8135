"""Design sections 5 and 6: operands are exchanged in the place of transposes behind a product."""

import functools
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bench_columns
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bench_models import MODELS
from jax import lax

import precpass as pp
from precpass.measure import execute
from precpass.measure.counts import Counts, count
from tests.support.jaxprs import contracts, named, products, walk
from tests.support.passes import COMPOSITIONS
from tests.support.values import assert_near, normal_array

# ---------------------------------------------------------------- programs with transposes

SWAPS = pp.Custom({})
"""The policy that lowers nothing."""
POLICIES = {
    "Custom": SWAPS,
    "AutoMixedBf16": pp.AutoMixedBf16,
    "AlwaysBf16": pp.AlwaysBf16,
    "AutoMixed": pp.AutoMixed,
}
each_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)


def integers(seed: int, *shape: int) -> jax.Array:
    """Operands whose products and sums are exact in every format."""
    return jnp.asarray(np.random.default_rng(seed).integers(-2, 3, shape), jnp.float32)


def dot(lhs: Any, rhs: Any, contracting: Any, batch: Any = ((), ())) -> Any:
    return lax.dot_general(lhs, rhs, (contracting, batch))


def weight(x: Any, g: Any) -> Any:
    """The gradient of a weight as JAX writes it: [b, s, x], [b, s, g] -> [x, g]."""
    return dot(g, x, ((0, 1), (0, 1))).T


def heads(x: Any, g: Any) -> Any:
    """[b, s, x], [b, s, g] -> [b, x, g], summed over s."""
    return dot(g, x, ((1,), (1,)), ((0,), (0,))).transpose(0, 2, 1)


def uneven(x: Any, g: Any) -> Any:
    """[b, s, x], [b, s, g] -> [s, x, b, g]: several kept dimensions."""
    return dot(g, x.reshape(3, 4, 2, 4), ((2,), (3,))).transpose(2, 3, 4, 0, 1)


def in_jit(x: Any, g: Any) -> Any:
    return jax.jit(weight)(x, g) + 1.0


def in_scan(x: Any, g: Any) -> Any:
    """The weight's gradient is a scan's stacked result."""
    return lax.scan(lambda c, _: (c + 1.0, weight(x + c, g)), 0.0, None, length=3)


def in_remat(x: Any, g: Any) -> Any:
    return jax.checkpoint(weight)(x, g) * 2.0


def cast_between(x: Any, g: Any) -> Any:
    return lax.convert_element_type(dot(g, x, ((0, 1), (0, 1))), jnp.float16).T + 1


def three(x: Any, g: Any) -> Any:
    """Transposes that together are the exchange."""
    y = heads(x, g)  # [b, x, g]
    return lax.transpose(lax.transpose(y, (2, 0, 1)), (1, 0, 2)).transpose(0, 2, 1)


X, G = integers(0, 3, 4, 8), integers(1, 3, 4, 4)
SWAPPED: dict[str, Callable[..., Any]] = {
    f.__name__: f for f in (weight, heads, uneven, in_jit, in_scan, in_remat, cast_between, three)
}


def undone(x: Any, g: Any) -> Any:
    return dot(g, x, ((0, 1), (0, 1))).T.T + 1.0


def undone_casts(x: Any, g: Any) -> Any:
    y = dot(g, x, ((0, 1), (0, 1))).T.astype(jnp.float16)
    return y.T.astype(jnp.float32)


UNDONE: dict[str, Callable[..., Any]] = {f.__name__: f for f in (undone, undone_casts)}


def several(x: Any, g: Any) -> Any:
    y = dot(g, x, ((0, 1), (0, 1)))
    return y.T, y


def several_links(x: Any, g: Any) -> Any:
    """The transpose of the batch has two readers: only what stands before it is a chain."""
    y = dot(g, x, ((1,), (1,)), ((0,), (0,))).transpose(1, 0, 2)
    return y.transpose(1, 2, 0), y + 1.0


def other_order(x: Any, g: Any) -> Any:
    return dot(g, x, ((1,), (1,)), ((0,), (0,))).transpose(1, 0, 2)


def result(x: Any, g: Any) -> Any:
    """The transpose stands outside of the body whose result the product is."""
    y = jax.jit(lambda x, g: dot(g, x, ((0, 1), (0, 1))))(x, g)
    return y.T


def whole_numbers(x: Any, g: Any) -> Any:
    return weight(x.astype(jnp.int32), g.astype(jnp.int32))


def complex_numbers(x: Any, g: Any) -> Any:
    return weight(x.astype(jnp.complex64), g.astype(jnp.complex64))


def with_algorithm(x: Any, g: Any) -> Any:
    algorithm = lax.DotAlgorithmPreset.F32_F32_F32
    return lax.dot_general(g, x, (((0, 1), (0, 1)), ((), ())), precision=algorithm).T


def kept(x: Any, g: Any) -> Any:
    with pp.keep("f32"):
        return weight(x, g)


def with_pair(x: Any, g: Any) -> Any:
    pair = (lax.Precision.HIGHEST, lax.Precision.DEFAULT)
    return lax.dot_general(g, x, (((0, 1), (0, 1)), ((), ())), precision=pair).T


def wider_result(x: Any, g: Any) -> Any:
    numbers = ((0, 1), (0, 1)), ((), ())
    g, x = g.astype(jnp.bfloat16), x.astype(jnp.bfloat16)
    return lax.dot_general(g, x, numbers, preferred_element_type=jnp.float32).T


def outer(x: Any, g: Any) -> Any:
    return dot(g, x, ((), ())).transpose(3, 4, 5, 0, 1, 2)


STAYS: dict[str, Callable[..., Any]] = {
    f.__name__: f
    for f in (several, several_links, other_order, result, whole_numbers, complex_numbers)
    + (with_algorithm, with_pair, wider_result, kept, outer)
}


def quiet(policy: Any, fn: Callable[..., Any], *args: Any) -> pp.report.Inspection:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pp.PrecisionWarning)
        return pp.inspect(fn, policy)(*args)


def mixed(fn: Callable[..., Any], policy: Any = SWAPS) -> Callable[..., Any]:
    made = pp.auto_mixed(fn, policy=policy)

    @functools.wraps(made)
    def call(*args: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", pp.PrecisionWarning)
            return made(*args)

    return call


HANDS_ON = ("precpass_detach", "precpass_carrier", "convert_element_type")


def behind(jaxpr: Any) -> list[Any]:
    """The transposes of a jaxpr that read a product, or the cast, detach and carrier behind it."""
    made = {v for e in products(jaxpr) for v in e.outvars}
    found: list[Any] = []
    for eqn in walk(jaxpr):
        reads = any(not hasattr(v, "val") and v in made for v in eqn.invars[:1])
        if reads and eqn.primitive.name in HANDS_ON:
            made |= set(eqn.outvars)
        elif reads and eqn.primitive.name == "transpose":
            found.append(eqn)
    return found


def dot_like(jaxpr: Any) -> list[Any]:
    return [eqn for eqn in products(jaxpr) if contracts(eqn)]


def counts(found: pp.report.Inspection) -> tuple[int, int, int]:
    """The products with exchanged operands, transposes left out, and products lowered."""
    count = found.plan.count()
    folded = count[pp.types.OpKind.DATA_MOVEMENT, pp.types.Action.DROP]
    swapped = sum(decision.product.exchanged for decision in found.plan.walk())
    return swapped, folded, count[pp.types.OpKind.COMPUTE, pp.types.Action.LOWER]


def jaxpr_of(jaxpr: Any) -> Any:
    return getattr(jaxpr, "jaxpr", jaxpr)


def tied(embedding, tokens):
    x = embedding[tokens]
    return jax.nn.logsumexp(jnp.tanh(x) @ embedding.T, -1).sum()


def scanned(ws, x):
    def layer(h, w):
        return jnp.tanh(jnp.einsum("bsd,df->bsf", h, w)), None

    return lax.scan(jax.checkpoint(layer), x, ws)[0].sum()


def attention(w, x):
    q = (x @ w).reshape(3, 4, 2, 4)
    scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, q))
    return jnp.einsum("bhqk,bkhd->bqhd", scores, q).sum()


GRADIENTS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "tied": (tied, (normal_array(0, 9, 8), jnp.asarray([[1, 2, 3], [4, 8, 0]]))),
    "scanned": (scanned, (normal_array(1, 3, 8, 8) / 3, normal_array(2, 3, 4, 8))),
    "attention": (attention, (normal_array(3, 8, 8), normal_array(4, 3, 4, 8))),
}

# ---------------------------------------------------------------- what is exchanged


@pytest.mark.release(keep=1)
@each_policy
@pytest.mark.parametrize("name", SWAPPED)
def test_the_transposes_are_gone_and_the_values_are_the_same(name: str, policy: Any):
    fn = SWAPPED[name]
    found = quiet(policy, fn, X, G)
    assert behind(found.before) and not behind(found.after)
    (product,) = dot_like(found.after)
    low = policy.low.dtype if policy.lowers else jnp.float32
    assert [v.aval.dtype for v in product.invars] == [low, low]
    assert product.outvars[0].aval.dtype == jnp.float32
    (before,) = dot_like(found.before)
    assert product.outvars[0].aval.size == before.outvars[0].aval.size
    if name != "uneven":
        assert product.outvars[0].aval.shape[-2:] == (8, 4)
    swapped, folded, lowered = counts(found)
    assert (swapped, lowered) == (1, policy.lowers) and folded == (4 if name == "three" else 1)
    want, got = fn(X, G), mixed(fn, policy)(X, G)
    assert jax.tree.map(jnp.shape, got) == jax.tree.map(jnp.shape, want)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), got, want))
    assert [v.aval for v in jaxpr_of(found.after).outvars] == [
        v.aval for v in jaxpr_of(found.before).outvars
    ]


@pytest.mark.release(keep=2)
@each_policy
@pytest.mark.parametrize("name", UNDONE)
def test_transposes_that_undo_one_another_are_dropped_without_a_swap(name: str, policy: Any):
    found = quiet(policy, UNDONE[name], X, G)
    assert not named(found.after, "transpose") or policy.lowers
    assert not behind(found.after)
    assert counts(found)[:2] == (0, 2)
    np.testing.assert_array_equal(mixed(UNDONE[name], policy)(X, G), UNDONE[name](X, G))


@pytest.mark.parametrize("name", STAYS)
def test_what_has_other_readers_or_another_order_stays(name: str):
    found = quiet(SWAPS, STAYS[name], X, G)
    assert found.after is found.before
    assert counts(found) == (0, 0, 0)


def test_a_product_between_a_chain_and_a_reader_keeps_its_order_low_too():
    found = quiet("AutoMixedBf16", several, X, G)
    assert behind(found.after) and counts(found) == (0, 0, 1)
    got, want = mixed(several, "AutoMixedBf16")(X, G), several(X, G)
    assert all(bool((a == b).all()) for a, b in zip(got, want, strict=True))


def test_a_chain_ends_where_its_last_transpose_has_several_readers():
    def fn(x, g):
        y = weight(x, g)
        return y, y.T

    found = quiet(SWAPS, fn, X, G)
    assert counts(found) == (1, 1, 0)
    assert len(named(found.after, "transpose")) == 1
    assert all((a == b).all() for a, b in zip(mixed(fn)(X, G), fn(X, G), strict=True))


@each_policy
def test_highest_precision_is_the_same_order_behind_the_exchange(policy: Any):
    def fn(x, g):
        return lax.dot_general(g, x, (((0, 1), (0, 1)), ((), ())), precision="highest").T

    found = quiet(policy, fn, X, G)
    assert counts(found) == (1, 1, 0)
    (product,) = products(found.after)
    assert set(product.params["precision"]) == {lax.Precision.HIGHEST}
    assert product.outvars[0].aval.shape == (8, 4)
    np.testing.assert_array_equal(mixed(fn, policy)(X, G), fn(X, G))


def test_always_f32_and_an_inner_policy_change_nothing():
    found = quiet("AlwaysF32", weight, X, G)
    assert found.after is found.before
    inner = pp.auto_mixed(weight, policy="AlwaysF32")
    assert counts(quiet(SWAPS, lambda x, g: inner(x, g) + 1.0, X, G)) == (0, 0, 0)
    with pp.use_policy(None):
        assert behind(jax.make_jaxpr(pp.auto_mixed(weight))(X, G))


def test_a_float64_region_keeps_its_order():
    def fn(x, g):
        with pp.keep("f64"):
            return weight(x, g)

    assert counts(quiet("AutoMixedBf16", fn, X, G))[:2] == (0, 0)
    np.testing.assert_array_equal(mixed(fn, "AutoMixedBf16")(X, G), weight(X, G))


# ---------------------------------------------------------------- gradients


@pytest.mark.release(keep=1)
@each_policy
@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_of_models_have_no_weight_behind_a_transpose(name: str, policy: Any):
    fn, args = GRADIENTS[name]
    found = quiet(policy, jax.grad(fn), *args)
    assert any(e.params["permutation"] == (1, 0) for e in behind(found.before))
    assert not any(e.params["permutation"] == (1, 0) for e in behind(found.after))
    want = jax.jit(jax.grad(fn))(*args)
    tolerance = {"Custom": 1e-6, "AlwaysBf16": 0.2}.get(policy.name, 0.02)
    assert_near(mixed(jax.grad(fn), policy)(*args), want, tolerance)


def test_a_tied_embedding_sums_both_gradients_without_a_transpose():
    fn, args = GRADIENTS["tied"]
    found = quiet(SWAPS, jax.grad(fn), *args)
    swapped, folded, _ = counts(found)
    assert (swapped, folded) == (0, 2), "the transposes of weight and gradient undo one another"


TRANSFORMS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "jvp": lambda f: lambda x, g: jax.jvp(f, (x, g), (jnp.cos(x), jnp.sin(g))),
    "vjp": lambda f: lambda x, g: jax.vjp(f, x, g)[1](jnp.cos(f(x, g))),
    "vmap": lambda f: jax.vmap(f, (0, 0)),
    "vmap of one": lambda f: jax.vmap(f, (0, None), out_axes=1),
    "hessian": lambda f: jax.hessian(lambda x, g: (f(x, g) ** 2).sum()),
    "remat": lambda f: jax.grad(lambda x, g: jnp.arctan(jax.checkpoint(f)(x, g)).sum(), (0, 1)),
}


@pytest.mark.release(keep=1)
@pytest.mark.parametrize("policy", [SWAPS, pp.AutoMixedBf16], ids=["Custom", "AutoMixedBf16"])
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("fn", [weight, heads], ids=["weight", "heads"])
def test_transforms_of_the_result(fn: Any, transform: str, policy: Any):
    x, g = normal_array(5, 3, 4, 8), normal_array(6, 3, 4, 4)
    if transform.startswith("vmap"):
        x = jnp.stack([x, -x])
        g = jnp.stack([g, g + 1.0]) if transform == "vmap" else g
    over = TRANSFORMS[transform]
    want = jax.jit(over(fn))(x, g)
    assert_near(jax.jit(over(mixed(fn, policy)))(x, g), want, 1e-5 if policy is SWAPS else 0.02)


def test_checkpoint_policies_save_as_many_bytes():
    from precpass.analysis.residuals import kept_bytes

    saves = jax.checkpoint_policies.dots_saveable

    def loss(ws, x):
        block = jax.checkpoint(lambda h, w: jnp.arctan(weight(h, w)), policy=saves)
        return block(x, ws).sum()

    found = quiet(SWAPS, jax.grad(loss), G, X)
    assert kept_bytes(found.after) == kept_bytes(found.before) > 0
    inner = jax.make_jaxpr(jax.grad(mixed(loss)))(G, X)
    assert len(dot_like(inner)) == len(dot_like(found.before))


def test_scopes_and_lines_are_kept():
    def fn(x, g):
        with jax.named_scope("head"):
            return weight(x, g)

    found = quiet(SWAPS, fn, X, G)
    (old,), (new,) = (products(j) for j in (found.before, found.after))
    assert str(new.source_info.name_stack) == "head"
    assert new.source_info.traceback is old.source_info.traceback


# ---------------------------------------------------------------- what the plan says


def test_nothing_is_lowered_by_it():
    with pytest.warns(pp.PrecisionWarning, match="lowered nothing"):
        policy = pp.AutoMixedBf16.with_rules(pp.Rule(primitive="dot_general", precision="f32"))
        found = pp.inspect(weight, policy)(X, G)
    assert counts(found) == (1, 1, 0)
    assert "0 of 2 equations lowered, 0 widened, 2 reordered, 0 as written" in found.diff()
    assert found.plan.changes and found.explain().verdict.swapped == 1
    assert found.explain().verdict.left_wide == 1
    assert count(found.after) == dataclass_like(count(found.before))


def dataclass_like(counts: Counts) -> Counts:
    """Counts without the bytes of the transpose's result."""
    import dataclasses

    return dataclasses.replace(counts, result_bytes={"f32": counts.result_bytes["f32"] / 2})


def test_diff_explain_and_json_name_it():
    found = quiet("AutoMixedBf16", weight, X, G)
    text = found.diff(color=False)
    assert "in bf16, accumulated in f32, operands exchanged" in text
    assert re.search(r"transpose .*: left out .*order of its result .*exchanged operands", text)
    assert "1 matrix product with exchanged operands" in found.explain().all
    from precpass.view.diff import changes

    actions = {c["primitive"]: (c["action"], c["swapped"]) for c in changes(found.plan)}
    assert actions == {"dot_general": ("lower", True), "transpose": ("drop", False)}
    assert "<svg" in found.draw().svg
    assert "operands exchanged" in quiet(SWAPS, weight, X, G).diff(color=False)
    lines = [line for line in found.diff("jaxpr", color=False).splitlines() if line[:1] in "+-"]
    assert any("transpose" in line and line.startswith("-") for line in lines)


@pytest.mark.release(keep=2)
@each_policy
def test_a_saved_plan_exchanges_them_again(policy: Any, tmp_path: Path):
    fn, args = GRADIENTS["scanned"]
    found = quiet(policy, jax.grad(fn), *args)
    path = tmp_path / "plan.json"
    found.plan.save(path)
    again = quiet(pp.Plan.load(path), jax.grad(fn), *args)

    def fates(plan: pp.Plan) -> list[Any]:
        return [(d.action, d.compute, d.product.exchanged) for d in plan.walk()]

    assert fates(again.plan) == fates(found.plan)
    assert str(again.after) == str(found.after)


@each_policy
@pytest.mark.parametrize("name", [*SWAPPED, *UNDONE, *STAYS])
def test_a_second_pass_finds_nothing(name: str, policy: Any):
    fn = {**SWAPPED, **UNDONE, **STAYS}[name]
    once = quiet(policy, fn, X, G)
    twice = quiet(policy, lambda x, g: jax.jit(mixed(fn, policy))(x, g), X, G)
    assert counts(twice)[:2] == (0, 0)
    assert len(behind(twice.after)) == len(behind(once.after))
    both = [jax.make_jaxpr(mixed(f, policy))(X, G) for f in (fn, mixed(fn, policy))]
    texts = [re.sub(r"\bname=\S+", "", str(jaxpr)) for jaxpr in both]
    assert texts[0].count("dot_general") == texts[1].count("dot_general")


@pytest.mark.parametrize("policy", [SWAPS, pp.AutoMixedBf16], ids=["Custom", "AutoMixedBf16"])
@pytest.mark.parametrize("name", GRADIENTS)
def test_a_fixed_point_to_the_text(name: str, policy: Any):
    fn, args = GRADIENTS[name]
    once = pp.auto_mixed(jax.grad(fn), policy=policy)
    twice = pp.auto_mixed(once, policy=policy)
    texts = [str(jax.make_jaxpr(f)(*args)) for f in (once, twice)]
    assert texts[0] == texts[1]


# ---------------------------------------------------------------- what XLA is given


@functools.cache
def small(name: str) -> Any:
    with jax.numpy_dtype_promotion("standard"):
        return MODELS[name]("small")


def slow_products(text: str) -> list[str]:
    """The matrix products of a compiled program whose left operand is summed over dimension 0 and
    whose right one over dimension 1; one of a single row is the same in any order."""
    slow = r"= \S+\[(\d+),(\d+)\]\S* dot\(.*lhs_contracting_dims=\{0\}, rhs_contracting_dims=\{1\}"
    found = [(line, re.search(slow, line)) for line in text.splitlines()]
    return [line for line, m in found if m and "1" not in m.groups()]


@pytest.mark.release(keep=1)
@pytest.mark.parametrize("key", ["auto-grad", "grad-auto", "swapped"])
@pytest.mark.parametrize("name", ["transformer", "unrolled", "lstm", "mlp", "moe"])
def test_no_compiled_product_of_a_model_has_a_transpose_in_it(name: str, key: str):
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        model = small(name)
        program = bench_columns.COLUMNS[key].program(model, "gradient")
        args = bench_columns.arguments(model, "gradient")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", pp.PrecisionWarning)
            compiled = execute.compiled(program, *args).compiled
    assert " dot(" in compiled.as_text()
    assert slow_products(compiled.as_text()) == []


@pytest.mark.parametrize("compose", COMPOSITIONS.values(), ids=COMPOSITIONS)
def test_a_flat_weight_gradient_runs_on_low_operands(compose: Any):
    """A matrix's transpose behind a barrier keeps the matrix's layout, and XLA:CPU then widens."""
    x, w = normal_array(7, 512, 384), normal_array(8, 384, 128)
    made = compose(lambda w, x: jnp.arctan(x @ w).sum())
    text = jax.jit(made).lower(w, x).compile().as_text()
    shapes = dict(re.findall(r"%?([\w.-]+) = (\w+)\[[\d,]*\]", text))
    operands = re.findall(r" dot\(([^)]*)\)", text)
    names = [re.findall(r"([\w.-]+)(?=,|$)", pair) for pair in operands]
    assert operands and {shapes.get(n.lstrip("%")) for pair in names for n in pair} == {"bf16"}
