"""`precpass.testing`: a team's tests fail when a product becomes float32 again, and say why."""

import linecache
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import precpass as pp
from precpass.testing import assert_plan, assert_precision
from tests.support.values import f32

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
    assert_precision(model, [X], {"dot_general": "f16"}, "AutoMixed", kwargs={"w": W})
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
    first, where, what, how = str(failed.value).splitlines()
    assert first == "1 equation is not in the precision expected"
    assert "test_testing.py:" in where and where.endswith("lax.dot(x, w, precision=precision))")
    operands = "f32[8,8] f32[8,8] in net/body"
    assert what.startswith(f"  dot_general {operands}: in f32, not bf16 as 'net' asks")
    assert "the user's order" in what
    assert how == "    to change it: leave the precision out, or set it by a Rule"


def test_what_is_low_and_was_to_be_wide_is_kept_wide(tmp_path):
    path = tmp_path / "model.precision.json"
    pp.inspect(model, pp.AlwaysF32)(X, W).plan.save(path)
    how = "to change it: leave it as it was written by keep('f32'), or set another precision"
    for fails in (
        lambda: assert_precision(model, (X, W), {"dot_general": "f32"}),
        lambda: assert_precision(model, (X, W), {"dot_general": {"bf16": 1, "f32": 1}}),
        lambda: assert_plan(model, (X, W), path),
    ):
        with pytest.raises(AssertionError) as failed:
            fails()
        assert how in str(failed.value) and "ask for a low format" not in str(failed.value)
    with pytest.raises(AssertionError, match="ask for a low format by Custom"):
        assert_precision(model, (X, W), {"dot_general": "bf16"}, pp.AlwaysF32)


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


@pytest.mark.parametrize(
    "args, expected, error, why",
    [
        (X, {"dot_general": "bf16"}, TypeError, "args is the tuple of the positional arguments"),
        ((X, W), ["dot_general"], TypeError, "expected is a dict"),
        ((X, W), {3: "bf16"}, TypeError, "3 is not a pattern"),
        ((X, W), {"dot_general": {"bf16": -1}}, ValueError, "-1 is not a number of equations"),
        ((X, W), {"dot_general": {"f7": 1}}, ValueError, "f7"),
        ((X, W), {"test_testing.py:1": "bf16"}, ValueError, "no equation matches"),
    ],
)
def test_bad_input_is_named(args, expected, error, why):
    with pytest.raises(error, match=why):
        assert_precision(model, args, expected)


def test_arguments_may_have_the_names_of_the_checks_own(tmp_path):
    def fn(args, *, policy, path, expected, kwargs, fn):
        return args @ policy @ path @ expected @ kwargs @ fn

    kwargs = dict.fromkeys(("policy", "path", "expected", "kwargs", "fn"), X)
    assert_precision(fn, [X], {"dot_general": {"bf16": 5}}, kwargs=kwargs)
    pp.inspect(fn)(X, **kwargs).plan.save(tmp_path / "plan.json")
    assert_plan(fn, [X], tmp_path / "plan.json", kwargs=kwargs)


# ---------------------------------------------------------------- patterns

LINE = model.__code__.co_firstlineno + 3  # the first product


@pytest.mark.parametrize(
    "pattern",
    [f"test_testing.py:{LINE}", f"testing/test_testing.py:{LINE}", f"*_testing.py:{LINE}"],
)
def test_a_line_has_its_products(pattern):
    assert_precision(model, (X, W), {pattern: {"bf16": 1}})
    with pytest.raises(AssertionError, match=f"not f32 as '.*{LINE}' asks") as failed:
        assert_precision(model, (X, W), {pattern: "f32"})
    assert "lax.dot(x, w, precision=precision)" in str(failed.value)


def test_a_file_and_a_kind_have_theirs():
    assert_precision(model, (X, W), {"test_testing.py": "bf16"})
    assert_precision(model, (X, W), {pp.types.OpKind.COMPUTE: {"bf16": 2}, "tanh": "f32"})
    with pytest.raises(AssertionError, match=r"not f32 as OpKind.COMPUTE asks"):
        assert_precision(model, (X, W), {pp.types.OpKind.COMPUTE: "f32"})


def test_numbers_of_equations_are_held_against_those_of_the_program():
    assert_precision(model, (X, W), {"dot_general": {"bf16": 2, "f32": 0}})
    with pytest.raises(AssertionError) as failed:
        assert_precision(broken, (X, W), {"dot_general": {"bf16": 2}})
    first, second, where, what, _ = str(failed.value).splitlines()
    assert first == "'dot_general' has 1 in f32, 1 in bf16, not 2 in bf16"
    assert second == "1 equation is not in the precision expected"
    assert f"test_testing.py:{LINE}" in where
    assert "in f32, and 'dot_general' asks for 0 there, not 1  [the user's order" in what
    with pytest.raises(AssertionError, match=r"^'dot_general' has 2 in bf16, not 3 in bf16$"):
        assert_precision(model, (X, W), {"dot_general": {"bf16": 3}})


def test_a_body_that_two_scopes_share_is_in_both():
    @jax.jit
    def layer(x, w):
        return jnp.tanh(x @ w)

    def fn(x, w):
        for i in range(3):
            with jax.named_scope(f"layer_{i}"):
                x = layer(x, w)
        return x

    assert_precision(fn, (X, W), {"layer_0": "bf16", "layer_2": {"bf16": 1}})
    assert_precision(fn, (X, W), {"dot_general": {"bf16": 3}})
    policy = pp.AutoMixedBf16.with_rules(pp.Rule(scope="layer_1", precision="f32"))
    with pytest.raises(AssertionError) as failed:
        assert_precision(fn, (X, W), {"dot_general": "bf16"}, policy)
    text = str(failed.value)
    assert text.startswith("1 equation is") and "in layer_1: in f32, not bf16" in text
    assert "to change it: change that rule of the policy" in text


def test_equal_equations_are_one_line():
    def fn(x, w):
        for _ in range(4):
            x = lax.dot(x, w, precision="highest")
        return x

    with pytest.raises(AssertionError) as failed:
        assert_precision(fn, (X, W), {"dot_general": "bf16"})
    first, _, what, _ = str(failed.value).splitlines()
    assert first.startswith("4 equations are") and what.endswith("(4 times)")


def test_equal_layers_are_one_line():
    def fn(x, w):
        for i in range(12):
            with jax.named_scope(f"layer_{i}"), jax.named_scope("attention"):
                x = x @ w
        with jax.named_scope("head_3"):
            return x @ w

    with pytest.raises(AssertionError) as failed:
        assert_precision(fn, (X, W), {"dot_general": "f32"})
    first, _, layers, _, _, head, _ = str(failed.value).splitlines()
    assert first == "13 equations are not in the precision expected"
    assert " in layer_*/attention: in bf16, not f32" in layers and layers.endswith("(12 times)")
    assert " in head_3: in bf16, not f32" in head and not head.endswith("times)")


# ---------------------------------------------------------------- saved plans


def test_a_missing_file_says_how_it_is_written(tmp_path):
    path = tmp_path / "plan.json"
    with pytest.raises(FileNotFoundError, match=r"PRECPASS_UPDATE_PLANS=1 in the environment"):
        assert_plan(model, (X, W), path)


def test_files_are_written_anew_where_the_environment_says_so(tmp_path, monkeypatch):
    path = tmp_path / "plan.json"
    monkeypatch.setenv("PRECPASS_UPDATE_PLANS", "1")
    assert_plan(model, (X, W), path)
    saved = path.read_text()
    path.write_text(saved.replace(jax.__version__, "0.0"))
    assert_plan(model, (X, W), path)
    assert '"0.0"' in path.read_text()  # what holds is left alone
    assert_plan(broken, (X, W), path)
    assert path.read_text() != saved
    monkeypatch.setenv("PRECPASS_UPDATE_PLANS", "0")
    assert_plan(broken, (X, W), path)
    text = not_in_plan(model, path)
    assert text.splitlines()[-1].startswith("if this is meant: PRECPASS_UPDATE_PLANS=1 in the env")
    # one of another program, and one that is none
    monkeypatch.setenv("PRECPASS_UPDATE_PLANS", "1")
    for bad in ("{}", None):
        if bad:
            path.write_text(bad)
        assert_plan(lambda x: x @ x, [X], path)
        assert "<lambda>" in path.read_text()


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
    assert "in f16, not bf16 as it was saved  [AutoMixed (float16): compute in f16]" in text
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
    assert "dot_general in longer at " in text


# ---------------------------------------------------------------- the documentation's example

PAGES = Path(__file__).parents[2] / "docs" / "pages"
PAGE = (PAGES / "how-to" / "lock.md").read_text(encoding="utf-8")
FIRST = "import jax\nimport jax.numpy as jnp\nimport precpass as pp\n\n\n"


def test_the_documentations_example_runs_and_fails_as_it_says(tmp_path, monkeypatch):
    (example,) = re.findall(r"```python\n(from pathlib.*?)```", PAGE, re.DOTALL)
    (said,) = re.findall(r"test fails with\n\n(.*?)\n\n(?! )", PAGE, re.DOTALL)
    (written,) = re.findall(r"^def loss\(w, x\):\n.*?\n$", PAGE, re.DOTALL | re.MULTILINE)
    (shapes,) = re.findall(r"^SHAPES = .*\n", PAGE, re.MULTILINE)
    monkeypatch.chdir(tmp_path)

    def run(text):
        (tmp_path / "model.py").write_text(FIRST + text)
        namespace = {"__file__": str(tmp_path / "test_model.py")}
        code = compile(FIRST + text, str(tmp_path / "model.py"), "exec")
        exec(code, namespace)
        exec(shapes + example, namespace)
        linecache.checkcache()
        namespace["test_the_gradient_stays_low"]()

    with monkeypatch.context() as update:
        update.setenv("PRECPASS_UPDATE_PLANS", "1")
        run(written)
    run(written)
    assert (tmp_path / "loss.precision.json").exists()
    with pytest.raises(AssertionError) as failed:
        run(written.replace("x @ w", 'jnp.dot(x, w, precision="highest")'))
    expected = "\n".join(line.removeprefix("    ") for line in said.splitlines())
    pattern = re.escape(expected).replace(re.escape("..."), ".*")
    assert re.fullmatch(pattern, str(failed.value)), str(failed.value)


# ---------------------------------------------------------------- a device that is not there


def rectified(x, w):
    return lax.max(x @ w, 0.0) @ w


def test_a_plan_is_expected_of_a_target(tmp_path: Path):
    """What a fusion writes is selected in 16 bits on a GPU."""
    fn, args = pp.auto_mixed(rectified), (f32(512, 512), f32(512, 512))
    assert_precision(fn, args, {"max": "bf16"}, target="h100")
    assert_precision(fn, args, {"max": "f32"})
    pp.inspect(fn, target="h100")(*args).plan.save(tmp_path / "h100.precision.json")
    assert_plan(fn, args, tmp_path / "h100.precision.json", target="h100")
    with pytest.raises(AssertionError, match="in f32, not bf16 as it was saved"):
        assert_plan(fn, args, tmp_path / "h100.precision.json")
    with pytest.raises(ValueError, match="unknown target 'b300'"):
        assert_precision(fn, args, {"max": "bf16"}, target="b300")


def test_a_product_in_8_bits_is_named_by_its_own_format(tmp_path: Path):
    args = jnp.ones((256, 256)), jnp.ones((256, 256))
    pp.inspect(jnp.dot, "AutoMixedF8")(*args).plan.save(tmp_path / "plan.json")
    with pytest.raises(AssertionError, match="in int8, not f8e4m3 as it was saved"):
        pp.testing.assert_plan(jnp.dot, args, tmp_path / "plan.json", policy="AutoMixedInt8")
