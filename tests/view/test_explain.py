"""`explain`: the verdict in figures, what stays wide and why, rules, and advice from the graph."""

import json
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import precpass as pp
from precpass.analysis.residuals import kept_bytes
from precpass.policy.warned import quietly
from precpass.view.rows import rows
from tests.support.devices import for_a_gpu
from tests.support.values import f32

X, W = f32(8, 8), f32(8, 8)


def mixed_by_hand(x, w):
    h = jnp.tanh(x @ w)
    h = lax.dot(h, w, precision="highest")
    with jax.numpy_dtype_promotion("standard"):
        odd = x.astype(jnp.bfloat16) / np.float32(8.0)
    return (h @ w + odd + x.astype(jnp.bfloat16).astype(jnp.float32)).sum()


def line_of(fn, text):
    import inspect

    lines, start = inspect.getsourcelines(fn)
    return start + next(i for i, line in enumerate(lines) if text in line)


# ---------------------------------------------------------------- the verdict


def test_the_verdict_counts_products_flops_and_casts():
    found = pp.explain(mixed_by_hand)(X, W)
    verdict = found.verdict
    assert (verdict.after.low, verdict.after.products, verdict.left_wide) == (2, 3, 1)
    products = 2 * 8**3
    # three products, a tanh, a division, two additions, and the sum's operands
    assert verdict.after.low_flops == pytest.approx(2 * products / (3 * products + 5 * 64))
    # x, h and w, which two products share
    assert verdict.after.casts - verdict.before.casts == 3
    assert verdict.after.cast_bytes - verdict.before.cast_bytes == 3 * 64 * 2


def test_loops_weigh_what_runs_in_them():
    def fn(x, w):
        return lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, length=10)[0]

    verdict = pp.explain(fn)(X, W).verdict
    assert (verdict.after.low, verdict.after.products) == (1, 1)
    # the carry in each trip, and the loop's constant once before it
    assert verdict.after.cast_bytes == (10 + 1) * 64 * 2
    assert verdict.crossed == 1
    assert verdict.after.flops["bf16"] == 10 * 2 * 8**3


def test_what_is_kept_for_the_backward_pass():
    def loss(x, w):
        return jnp.sin(jnp.exp(x @ w)).sum()

    verdict = pp.explain(jax.grad(loss))(X, W).verdict
    # exp and its cosine; the operands are arguments
    assert verdict.kept_before == 2 * 64 * 4
    # and the low copy of w, which the products of both passes read
    assert verdict.kept_after == 2 * 64 * 4 + 64 * 2
    assert pp.explain(loss)(X, W).verdict.kept_before == 0
    assert "Saved for the backward pass: " in pp.explain(jax.grad(loss))(X, W).text()
    assert "Saved for the backward pass: " not in pp.explain(loss)(X, W).text()


def test_what_a_scan_stacks_is_kept_whole_and_remat_keeps_less():
    def body(c, w):
        return jnp.sin(c @ w), None

    def loss(x, ws, body=body):
        return lax.scan(body, x, ws)[0].sum()

    def rematted(x, ws):
        return loss(x, ws, jax.checkpoint(body))

    ws = f32(5, 8, 8)
    plain, less = (kept_bytes(jax.make_jaxpr(jax.grad(f, 1))(X, ws)) for f in (loss, rematted))
    assert plain >= 2 * 5 * 64 * 4
    assert less == 5 * 64 * 4


def test_what_is_stored_low_is_kept_as_its_16_bits():
    def loss(x, w):
        return lax.scan(lambda c, _: (jnp.tanh(c @ w) @ w, None), x, length=5)[0].sum()

    found = pp.inspect(jax.grad(loss, 1))(X, W)
    forward = next(row for row in rows(found.plan) if row.info.primitive == "scan").info
    stacks = sum(value.shape == (5, 8, 8) for value in forward.results)
    low = sum(c.alone and c.value.shape == (5, 8, 8) for c in forward.crossed)
    assert stacks == 3 and low > 0
    verdict = found.explain().verdict
    # each is stacked in both forms, of which one is read; and the loops share the low copy of w
    assert verdict.kept_before == stacks * 5 * 64 * 4
    assert verdict.kept_after == (stacks - low) * 5 * 64 * 4 + low * 5 * 64 * 2 + 64 * 2
    assert verdict.stored == sum(row.decision.stores_low for row in rows(found.plan)) > 0
    inserted = sum(len(row.info.casts) for row in rows(found.plan))
    assert verdict.unread_casts == inserted - (verdict.after.casts - verdict.before.casts) > 0
    text = found.explain().all
    assert f"; {verdict.unread_casts} of them only for derivatives" in text
    assert (
        f"{verdict.stored} results stored in 16 bits; {verdict.crossed} values in 16 bits" in text
    )
    # what is stored low does not stay as written
    assert not any("stored in" in reason for _, reason, *_ in found.explain().others)


def test_what_is_made_of_constants_alone_is_not_kept():
    def loss(x):
        return (jnp.sin(x) * jnp.cos(jnp.arange(8.0, dtype=jnp.float32) + 1)).sum()

    # the cosine of x, and none of the constants'
    assert kept_bytes(jax.make_jaxpr(jax.grad(loss))(f32(8))) == 8 * 4


def test_a_policy_that_lowers_nothing_is_explained_without_a_warning():
    text = pp.explain(jnp.tanh)(X).text()
    assert "It has no matrix products" in text


# ---------------------------------------------------------------- what stays wide


def test_each_product_left_wide_has_its_line_reason_and_remedy():
    (wide,) = pp.explain(mixed_by_hand)(X, W).wide
    assert wide.source.line == line_of(mixed_by_hand, "lax.dot")
    assert wide.what == "dot_general f32[8,8] f32[8,8] -> f32[8,8]"
    assert wide.reason.startswith("the user's order: precision=")
    assert wide.remedy == "leave the precision out, or set it by a Rule"


def test_equal_products_of_a_line_are_counted():
    def fn(x, w):
        with pp.keep("f32"):
            for _ in range(3):
                x = x @ w
        return x @ w

    (wide,) = pp.explain(fn)(X, W).wide
    assert wide.times == 3
    assert wide.remedy == "leave the keep region, or narrow it"


def test_equal_products_of_layers_that_differ_in_their_number_are_counted():
    def fn(x, w):
        for i in range(40):
            with jax.named_scope(f"layer_{i}"):
                x = lax.dot(x, w, precision="highest")
        with jax.named_scope("head_2"):
            return lax.dot(x, w, precision="highest") @ w

    layers, head = pp.explain(fn)(X, W).wide
    assert (layers.scope, layers.times) == ("layer_*", 40)
    assert (head.scope, head.times) == ("head_2", 1)


def outer(x, w):
    return jnp.einsum("i,j->ij", x[0], w[0]).sum() + (x @ w).sum()


def half(x, w):
    return x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)


def one_operand_low(x, w):
    return lax.dot(x.astype(jnp.bfloat16), w, preferred_element_type=jnp.float32)


def test_a_product_of_one_low_operand_is_left_wide():
    (wide,) = pp.explain(one_operand_low)(X, W).wide
    assert wide.reason == "the user's own precision"
    assert wide.remedy.endswith("make all its operands float32, or cast them yourself")


def test_all_else_is_summed_up_by_reason():
    found = pp.explain(mixed_by_hand)(X, W)
    kinds = {kind for kind, *_ in found.others}
    assert "compute" not in kinds  # each has an entry of its own
    assert sum(n for _, reason, n, _ in found.others if "the user wrote" in reason) == 4


def test_what_is_summed_up_has_its_lines():
    text = pp.explain(mixed_by_hand)(X, W).all
    (entry,) = re.findall(r"4 elementwise: a cast that the user wrote\n +at (.*)", text)
    casts = (line_of(mixed_by_hand, line) for line in ("odd = x", "x.astype(jnp.bfloat16).astype"))
    assert set(entry.partition("test_explain.py:")[2].split(", ")) == set(map(str, casts))


def test_of_many_lines_the_first_are_named_and_the_rest_counted():
    lines = "".join(f"    x = jnp.tanh(x) + {i}\n" for i in range(20))
    scope = {"jnp": jnp}
    exec(compile(f"def many(x):\n{lines}    return x @ x\n", "many.py", "exec"), scope)
    text = " ".join(pp.explain(scope["many"])(X).all.split())
    assert "40 elementwise" in text
    assert "at many.py:2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13 and 8 more" in text


def test_rules_that_match_nothing_are_said():
    policy = pp.AutoMixedBf16.with_rules(pp.Rule(scope="*/head", precision="f32"))
    found = pp.explain(mixed_by_hand, policy)(X, W)
    assert found.unmatched == ("Rule(scope='*/head', precision='f32')",)
    assert "  1. correct or remove Rule(scope='*/head'" in found.text()


def test_what_the_user_made_low_is_not_left_wide():
    found = pp.explain(half)(X, W)
    assert (found.verdict.after.low, found.verdict.left_wide, found.wide) == (1, 0, ())
    assert any(kind == "compute" for kind, *_ in found.others)


def test_what_sums_over_nothing_is_not_left_wide():
    found = pp.explain(outer)(X, W)
    assert (found.verdict.after.low, found.verdict.left_wide) == (1, 0)
    assert any("elementwise product" in reason for _, reason, *_ in found.others)
    # for whatever reason it stays
    verdict = pp.explain(outer, "AlwaysF32")(X, W).verdict
    assert (verdict.after.products, verdict.left_wide) == (1, 1)


def test_products_of_a_float64_program_are_narrowed():
    policy = pp.Custom({pp.types.OpKind.COMPUTE: "f32"}).with_retypes("f64")
    with jax.enable_x64(True):
        x = jax.ShapeDtypeStruct((8, 8), jnp.float64)
        found = pp.explain(lambda a: jnp.sin(a @ a) @ a, policy)(x)
    assert (found.verdict.narrowed, found.verdict.left_wide, found.wide) == (2, 0, ())
    assert "0 of 2 matrix products run in low precision, 2 in f32 instead of f64:" in found.all


def test_bytes_of_casts_are_those_of_the_program_that_runs():
    verdict = pp.explain(lambda a: a @ a, pp.AutoMixedBf16.with_output("bf16"))(X).verdict
    assert verdict.after.cast_bytes == 2 * 64 * 2

    def regions(a):
        with pp.keep("f64"):
            b = jnp.sin(a @ a)
        return b @ a

    found = pp.inspect(regions)(X)
    assert found.explain().verdict.after.cast_bytes == 64 * (8 + 4 + 2 + 2)
    assert "f32 -> f64[8,8] inserted" in found.diff() and "f64 -> f32[8,8] inserted" in found.diff()
    assert found.diff().splitlines()[0].endswith("; 4 casts inserted")
    undone = pp.explain(lambda a: half(a, a).astype(jnp.float32), "AlwaysF32")(X).verdict
    assert undone.after.cast_bytes == 0 < undone.before.cast_bytes
    none = pp.explain(lambda a: lax.scan(lambda h, _: (h @ h, None), a, length=0)[0])(X)
    assert none.verdict.after.cast_bytes == 0


def test_what_the_figures_take_for_granted_is_said():
    def loops(x, w):
        return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] @ w), (0, x))[1]

    assert "the figures count 128 iterations of each loop whose" in pp.explain(loops)(X, W).text()
    branches = pp.explain(lambda x, w: lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: x))
    assert "figures: all branches of a cond count" in branches(X, W).text()
    (n,) = jax.export.symbolic_shape("n")
    symbolic = jax.ShapeDtypeStruct((n, 8), jnp.float32)
    assert "figures: 128 for each symbolic" in pp.explain(lambda x, w: x @ w)(symbolic, W).text()
    assert "figures:" not in pp.explain(mixed_by_hand)(X, W).text()


# ---------------------------------------------------------------- advice


def advised(fn, *args, policy=None):
    return [item.text for item, _ in for_a_gpu(pp.inspect(fn, policy)(*args)).advice]


def test_dimensions_that_tensor_cores_pad_are_named():
    (text,) = advised(lambda x, w: x @ w, f32(16, 24), f32(24, 50))
    assert "pad 50 to 56" in text
    assert pp.explain(lambda x, w: x @ w)(f32(16, 24), f32(24, 50)).advice == ()  # for a CPU
    assert advised(lambda x, w: x @ w, f32(16, 24), f32(24, 48)) == []
    # a batch is no dimension of the product, a vector has nothing to pad
    assert advised(lambda x, w: x @ w, f32(7, 16, 24), f32(7, 24, 48)) == []
    assert advised(lambda x, w: x @ w, f32(24), f32(24, 48)) == []


def test_features_of_a_convolution_are_named():
    def fn(x, k):
        return lax.conv_general_dilated(x, k, (1, 1), "SAME")

    (text,) = advised(fn, f32(1, 16, 9, 9), f32(33, 16, 3, 3))
    assert "pad 33 to 40" in text and "9" not in text


def test_a_constant_that_promotes_is_named_with_its_line():
    def fn(x, w):
        h = x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)
        with jax.numpy_dtype_promotion("standard"):
            return h / np.float32(8.0)

    ((item, n),) = pp.explain(fn)(X, W).advice
    assert n == 1 and item.source.line == line_of(fn, "np.float32")
    assert "becomes f32 beside the constant 8.0" in item.text


def test_a_round_trip_of_the_users_is_named():
    def fn(x, w):
        return x.astype(jnp.bfloat16).astype(jnp.float32) @ w

    (text,) = advised(fn, X, W)
    assert "from f32 to bf16 and back" in text


def test_a_derivative_from_outside_is_noted():
    said = []

    def loss(x, w):
        said.append(pp.explain(lambda x: x @ w)(x).text())
        return (x @ w).sum()

    jax.grad(loss)(jnp.ones((8, 8)), jnp.ones((8, 8)))
    assert "a derivative is taken around this call" in said[0]
    assert "a derivative is taken" not in pp.explain(lambda x: x @ x)(X).text()


# ---------------------------------------------------------------- forms


def test_it_is_text_html_and_json():
    found = pp.explain(mixed_by_hand)(X, W)
    assert str(found) == found.text() == found.text(color=False)
    assert re.sub(r"\x1b\[[\d;]*m", "", found.text(color=True)) == str(found)
    data = json.loads(json.dumps(found.to_dict()))
    assert data["verdict"]["left_wide"] == 1
    assert data["wide"][0]["source"]["line"] == line_of(mixed_by_hand, "lax.dot")
    assert data["advice"][0]["text"]
    html = found._repr_html_()
    assert "2 of 3 matrix products run in " in html


def test_an_inspection_explains_itself():
    assert pp.inspect(mixed_by_hand)(X, W).explain() == pp.explain(mixed_by_hand)(X, W)


def test_the_work_grows_with_the_program(monkeypatch):
    """What is asked of each equation of an unrolled model does not grow with the model."""
    from precpass.jaxpr import reading

    counted = []
    monkeypatch.setattr(
        pp.jaxpr, "is_literal", lambda a: counted.append(1) or reading.is_literal(a)
    )

    def layers(x, w):
        for _ in range(len(x)):
            x = jnp.tanh(x @ w)
        return x

    def asked(n):
        found = pp.inspect(layers)(f32(n, 8), W)
        counted.clear()
        found.explain()
        return len(counted)

    assert asked(64) < 4.4 * asked(16)


def test_complex_products_are_left_wide_and_those_of_integers_are_no_products():
    def three(x, w, n):
        z = lax.complex(x, w)
        return x @ w, z @ z, n @ n

    found = pp.explain(three, "AutoMixedBf16")(*jnp.ones((2, 8, 8)), jnp.ones((8, 8), jnp.int32))
    verdict = found.verdict
    assert (verdict.after.low, verdict.after.products, verdict.left_wide) == (1, 2, 1)
    assert found.wide[0].reason == "complex numbers keep their precision"
    assert "real products" in found.wide[0].remedy


def layers(x, w):
    for i in range(3):
        with jax.named_scope(f"layer_{i}"):
            x = lax.dot(lax.dot(x, w, precision="highest"), w[:, :4], precision="highest") @ w[:4]
    return x


def test_a_line_stands_once_above_its_products_and_its_advice():
    text = for_a_gpu(pp.inspect(layers)(X, W)).all
    assert text.count("dot_general f32[8,8] f32[8,8] -> f32[8,8] in layer_* (3 times)") == 1
    assert text.count("dot_general f32[8,8] f32[8,4] -> f32[8,4] in layer_* (3 times)") == 1
    advice, wide = text.split("matrix products that are not in low precision\n")
    wide, _ = wide.split("everything else that stays as written\n")
    assert wide.count("test_explain.py:") == 1 and advice.count("test_explain.py:") == 2
    assert "  1. leave the precision out" in advice and "  2. pad 4 to 8 once" in advice


def test_a_pass_that_is_switched_off_is_in_the_title():
    with pp.use_policy(None):
        assert pp.explain(layers)(X, W).text().startswith("layers, switched off\n")
        assert "layers, switched off" in pp.inspect(layers)(X, W).draw().svg


def test_products_of_8_bits_are_counted_by_format():
    def layers(ws, x):
        for w in ws:
            x = jnp.tanh(x @ w)
        return x

    args = [f32(256, 256)] * 4, f32(256, 256)
    lowered = pp.explain(layers, "AutoMixedF8", target="tpu 7x")(*args)
    assert "4 in f8e4m3: by its size: Rule(primitive='dot_general', " in lowered.all


def test_a_program_in_16_bits_is_told_that_8_bits_are_not_for_it():
    x = jnp.ones((256, 256), jnp.bfloat16)
    with pytest.warns(pp.PrecisionWarning, match="AutoMixedF8 lowered nothing in .* the user's"):
        pp.auto_mixed(lambda x: x @ x @ x, "AutoMixedF8")(x)


# ---------------------------------------------------------------- other formats


def test_a_product_of_low_parameters_names_the_policy_that_lowers_it():
    def lora(x: Any, base: Any, a: Any, b: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"):
            return x @ base + x @ a @ b

    args = X, jax.ShapeDtypeStruct((8, 8), jnp.bfloat16), W, W
    (wide,) = pp.explain(lora)(*args).wide
    assert "policy.with_parameters('bf16')" in wide.remedy and "p=bf16" in wide.remedy
    for policy in (pp.AutoMixedBf16.with_parameters("bf16"), "p=bf16"):
        assert pp.explain(lora, policy)(*args).verdict.left_wide == 0


def test_float64_values_are_not_said_to_be_float32():
    def fn(x: Any, w: Any) -> Any:
        y = jnp.sum(jnp.exp(jnp.tanh(x @ w) + x))
        return y + lax.while_loop(lambda c: c.sum() < 3.0, lambda c: c @ w + c, x).sum()

    policies = (
        pp.AutoMixedBf16,
        pp.AutoMixedBf16.with_retypes("f64"),
        pp.Custom({pp.types.OpKind.COMPUTE: "f32"}).with_retypes("f64"),
    )
    with jax.enable_x64(True), quietly():
        x, w = jnp.ones((8, 8), jnp.float64), jnp.ones((8, 8), jnp.float64)
        texts = [pp.explain(fn, policy)(x, w).all for policy in policies]
    assert all("computed in float64" in text and "float32" not in text for text in texts)
    assert all("in f32" not in line or "may run" in line for line in texts[2].split("\n")[3:])


@pytest.mark.parametrize("orders", ["keep", "rule"])
def test_a_float64_product_that_is_ordered_low_in_vain_is_warned_of(orders: str):
    def fn(x: Any, w: Any) -> Any:
        with pp.keep("bf16") if orders == "keep" else jax.named_scope("low"):
            return x @ w

    rule = pp.Rule(scope="low", precision="bf16")
    policy = pp.AlwaysF32 if orders == "keep" else pp.AlwaysF32.with_rules(rule)
    with jax.enable_x64(True):
        x = jnp.ones((8, 8), jnp.float64) / 3
        with pytest.warns(pp.PrecisionWarning, match=r"py:\d+ stays in float64") as told:
            kept = pp.auto_mixed(fn, policy)(x, x)
        assert "with_retypes('f64'" in str(told[0].message)
        low = pp.auto_mixed(fn, policy.with_retypes("f64", "f32", "bf16", "f16"))(x, x)
    assert abs(float(kept[0, 0]) - 8 / 9) < 1e-15 < 1e-4 < abs(float(low[0, 0]) - 8 / 9)
