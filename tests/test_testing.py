"""`precpass.testing`: a team's tests fail when a product becomes float32 again, and say why."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from unit_helpers import f32

import precpass as pp
from precpass.testing import assert_plan, assert_precision

X, W = f32(8, 8), f32(8, 8)


def model(x, w, precision=None):
    with jax.named_scope("net"):
        with jax.named_scope("body"):
            x = jnp.tanh(lax.dot(x, w, precision=precision))
        with jax.named_scope("head"):
            return lax.scan(lambda c, _: (c @ w, None), x, length=2)[0]


def broken(x, w):
    return model(x, w, "highest")


# ---------------------------------------------------------------- what is expected


def test_what_is_as_expected_passes():
    assert_precision(model, (X, W), {"dot_general": "bf16", "tanh": "f32"})
    assert_precision(jax.grad(lambda x, w: model(x, w).sum()), (X, W), {"dot_*": "bf16"})
    assert_precision(model, [X], {"dot_general": "f16"}, "AutoMixed", w=W)
    assert_precision(pp.auto_mixed(model, policy="AutoMixed"), (X, W), {"*/head": "f16"})


def test_the_last_pattern_counts():
    policy = pp.AutoMixedBf16.with_rules(pp.Rule(scope="*/head", precision="f32"))
    assert_precision(model, (X, W), {"dot_general": "bf16", "*/head": "f32"}, policy)
    with pytest.raises(AssertionError):
        assert_precision(model, (X, W), {"*/head": "f32", "dot_general": "bf16"}, policy)


def test_a_product_that_is_wide_again_fails_with_its_line_and_reason():
    assert_precision(model, (X, W), {"net": "bf16"})
    with pytest.raises(AssertionError) as failed:
        assert_precision(broken, (X, W), {"net": "bf16"})
    first, where, what = str(failed.value).splitlines()
    assert first == "1 equations are not in the precision expected"
    assert "test_testing.py:" in where and where.endswith("lax.dot(x, w, precision=precision))")
    assert what.startswith("  dot_general f32[8,8] f32[8,8]: in f32, not bf16 as 'net' asks")
    assert "the user's order" in what


def test_a_policy_that_is_switched_off_fails():
    with pytest.raises(AssertionError, match="switched off"), pp.use_policy(None):
        assert_precision(model, (X, W), {"dot_general": "bf16"})


@pytest.mark.parametrize("pattern", ["conv_general_dilated", "*/haed", "haed"])
def test_a_pattern_that_matches_nothing_is_an_error(pattern):
    with pytest.raises(ValueError, match=f"no equation matches '{pattern.replace('*', '.')}'"):
        assert_precision(model, (X, W), {pattern: "bf16"})


def test_nothing_expected_is_an_error():
    with pytest.raises(ValueError, match="nothing is expected: give patterns"):
        assert_precision(model, (X, W), {})


def test_an_unknown_precision_is_an_error():
    with pytest.raises(ValueError, match="f7"):
        assert_precision(model, (X, W), {"dot_general": "f7"})


# ---------------------------------------------------------------- saved plans


def test_a_saved_plan_that_holds_passes(tmp_path):
    pp.inspect(model)(X, W).plan.save(tmp_path / "plan.json")
    assert_plan(model, (X, W), tmp_path / "plan.json")


def test_an_edit_that_widens_a_product_fails_with_the_difference(tmp_path):
    pp.inspect(model)(X, W).plan.save(tmp_path / "plan.json")
    # another policy: everything stands in both, and is treated differently
    with pytest.raises(AssertionError) as failed:
        assert_plan(model, (X, W), tmp_path / "plan.json", "AutoMixed")
    text = str(failed.value)
    assert text.splitlines()[0].startswith("2 equations are not in the precision that ")
    assert "in f16, not bf16 as it was saved  [AutoMixed: compute in f16]" in text
    # an edit: the product is ordered to be wide
    text = not_in_plan(broken, tmp_path / "plan.json")
    assert text.splitlines()[1].endswith("lax.dot(x, w, precision=precision))")
    assert "in f32, not bf16 as it was saved  [the user's order" in text


def not_in_plan(fn, path):
    with pytest.raises(AssertionError) as failed:
        assert_plan(fn, (X, W), path)
    return str(failed.value)


def test_an_edit_that_takes_a_product_away_fails(tmp_path):
    def longer(x, w):
        return model(x, w) @ w

    pp.inspect(longer)(X, W).plan.save(tmp_path / "plan.json")
    assert "1 equation of the saved plan of longer is no longer there" in not_in_plan(
        model, tmp_path / "plan.json"
    )
    pp.inspect(model)(X, W).plan.save(tmp_path / "plan.json")
    text = not_in_plan(longer, tmp_path / "plan.json")
    assert "1 equation is not in the saved plan of model" in text
    assert "|longer|dot_general" in text
