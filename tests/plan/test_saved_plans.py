"""Plans as files: the round trip of every example, programs that change, and errors."""

import json
import pickle
import textwrap
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import precpass as pp
from precpass.testing import assert_plan
from tests.support import compositions
from tests.support.jaxprs import product_dtypes
from tests.support.values import f32
from tests.view.test_diff import PROGRAMS

X, W = f32(8, 8), f32(8, 8)


@jax.jit
def shared(x, w):
    return jnp.arctan(x @ w)


def scoped(x, w):
    with jax.named_scope("body"):
        x = shared(x, w)
    with jax.named_scope("head"):
        return shared(x, w) @ w


POLICIES = [
    pp.AutoMixedBf16,
    pp.AlwaysBf16,
    pp.AlwaysF32,
    pp.AutoMixed.with_rules(
        pp.Rule(scope="head", precision="f32"), pp.Rule(primitive="tanh", precision="f16")
    ),
    pp.AutoMixedBf16.with_output("bf16"),
]


def quiet(fn, policy, *args):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pp.PrecisionWarning)
        return pp.inspect(fn, policy)(*args)


def fates(plan):
    return [
        (d.action, d.compute, d.stored, [p.border_copies for p in d.inner]) for d in plan.walk()
    ]


def round_trip(fn, policy, args, path):
    saved = quiet(fn, policy, *args)
    saved.plan.save(path)
    return saved, quiet(fn, pp.Plan.load(path), *args)


# ---------------------------------------------------------------- the round trip


@pytest.mark.release(keep=2)
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("policy", POLICIES[1:4:2], ids=lambda p: p.name)
def test_a_saved_plan_is_the_plan(name, policy, tmp_path):
    saved, loaded = round_trip(PROGRAMS[name], policy, (X, W), tmp_path / "plan.json")
    assert fates(loaded.plan) == fates(saved.plan)
    assert loaded.plan.notes == saved.plan.notes
    assert str(loaded.after) == str(saved.after)


@pytest.mark.parametrize("name", sorted(compositions.PROGRAMS)[::5])
def test_the_plans_of_programs_from_elsewhere_are_saved(name, tmp_path):
    fn, args = compositions.PROGRAMS[name], (compositions.X, compositions.W)
    saved, loaded = round_trip(fn, pp.AutoMixedBf16, args, tmp_path / "plan.json")
    assert fates(loaded.plan) == fates(saved.plan)
    assert loaded.plan.notes == saved.plan.notes


@pytest.mark.parametrize("policy", [pp.AutoMixedBf16, pp.AlwaysF32])
def test_products_of_float64_with_float32_stay_as_written(policy, tmp_path):
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        wide = jnp.ones((8, 8), jnp.float64)
        saved, loaded = round_trip(lambda w, x: wide @ (w @ x), policy, (W, X), tmp_path / "p.json")
        assert fates(saved.plan) == fates(loaded.plan)
        assert str(saved.after) == str(loaded.after)


def test_what_is_loaded_does_not_hang_on_the_preset(tmp_path):
    """The file alone decides: its preset is changed to one that would decide otherwise."""
    path = tmp_path / "plan.json"
    saved, _ = round_trip(scoped, POLICIES[3], (X, W), path)
    whole = json.loads(path.read_text())
    whole["policy"] = pp.inspect(scoped, "AutoMixedConservative")(X, W).plan.origin.policy
    whole["policy"]["kinds"]["compute"] = "f32"
    path.write_text(json.dumps(whole))
    loaded = pp.inspect(scoped, pp.Plan.load(path))(X, W)
    assert fates(loaded.plan) == fates(saved.plan)
    assert product_dtypes(loaded.after) == product_dtypes(saved.after)


def test_a_shared_body_is_locked_by_each_scope_that_it_is_called_in(tmp_path):
    policy = pp.AutoMixedBf16.with_rules(pp.Rule(scope="head", precision="f32"))
    saved, loaded = round_trip(scoped, policy, (X, W), tmp_path / "plan.json")
    assert product_dtypes(saved.after) == product_dtypes(loaded.after)
    assert sorted(product_dtypes(loaded.after)) == ["bfloat16", "float32", "float32"]
    text = json.loads((tmp_path / "plan.json").read_text())["equations"]
    assert text["body|shared|dot_general"] == "bf16"
    assert text["head|shared|dot_general"] == "f32"
    assert text["head|scoped|dot_general"] == "f32"


def test_it_runs_and_gives_the_same_digits(tmp_path):
    x, w = jax.random.normal(jax.random.key(0), (2, 8, 8))
    policy = pp.AutoMixedBf16.with_rules(pp.Rule(scope="head", precision="f32"))
    pp.inspect(scoped, policy)(x, w).plan.save(tmp_path / "plan.json")
    mixed = pp.auto_mixed(scoped, policy=pp.Plan.load(tmp_path / "plan.json"))
    np.testing.assert_array_equal(mixed(x, w), pp.auto_mixed(scoped, policy=policy)(x, w))
    grad = jax.grad(lambda x: mixed(x, w).sum())(x)
    assert np.isfinite(grad).all()


def test_custom_rules_of_a_locked_program_are_lowered(tmp_path):
    from tests.view.test_diff import doubled

    def fn(x, w):
        return doubled(x, w).sum()

    pp.inspect(fn)(X, W).plan.save(tmp_path / "plan.json")
    mixed = pp.auto_mixed(fn, policy=pp.Plan.load(tmp_path / "plan.json"))
    jaxpr = jax.make_jaxpr(jax.grad(mixed))(jnp.ones((8, 8)), jnp.ones((8, 8)))
    assert set(product_dtypes(jaxpr)) == {"bfloat16"}


def test_a_plan_that_was_pickled_can_be_saved(tmp_path):
    plan = pickle.loads(pickle.dumps(pp.inspect(scoped)(X, W).plan))
    plan.save(tmp_path / "plan.json")
    assert fates(pp.inspect(scoped, pp.Plan.load(tmp_path / "plan.json"))(X, W).plan) == fates(plan)


def test_the_lock_of_a_loaded_plan_goes_to_another_policy(tmp_path):
    pp.inspect(scoped)(X, W).plan.save(tmp_path / "plan.json")
    lock = pp.Plan.load(tmp_path / "plan.json").lock
    assert pp.AutoMixedF16.with_lock(lock).lock == lock
    with pytest.raises(TypeError, match=r"Plan\.load\(file\)\.lock, not 'plan\.json'"):
        pp.AutoMixedF16.with_lock("plan.json")


def test_a_loaded_policy_is_hashable_equal_and_pickled(tmp_path):
    pp.inspect(scoped)(X, W).plan.save(tmp_path / "plan.json")
    one, other = (pp.Plan.load(tmp_path / "plan.json") for _ in range(2))
    assert one == other and hash(one) == hash(other)
    assert pickle.loads(pickle.dumps(one)) == one
    assert one != pp.AutoMixedBf16 and "with_lock(<" in repr(one)
    # one trace and one program for equal policies
    traced = []

    def fn(x, w):
        traced.append(1)
        return scoped(x, w)

    pp.inspect(fn)(X, W).plan.save(tmp_path / "plan.json")
    one, other = (pp.Plan.load(tmp_path / "plan.json") for _ in range(2))
    mixed = pp.auto_mixed(fn)
    mixed.clear_cache()
    traced.clear()
    for policy in (one, other):
        with pp.use_policy(policy):
            mixed(jnp.ones((8, 8)), jnp.ones((8, 8)))
    assert len(traced) == 1


def test_a_rule_that_is_added_comes_before_the_file(tmp_path):
    pp.inspect(scoped)(X, W).plan.save(tmp_path / "plan.json")
    policy = pp.Plan.load(tmp_path / "plan.json").with_rules(pp.Rule(scope="*", precision="f32"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pp.PrecisionWarning)
        assert set(product_dtypes(pp.inspect(scoped, policy)(X, W).after)) == {"float32"}


def test_guards_come_before_the_file(tmp_path):
    def fn(x, w, scale):
        return (x * scale) @ w

    pp.inspect(lambda x, w: fn(x, w, 2.0), "AutoMixed")(X, W).plan.save(tmp_path / "plan.json")
    policy = pp.Plan.load(tmp_path / "plan.json")
    large = quiet(lambda x, w: fn(jnp.clip(x, -1, 1), w, 1e9), policy, X, W)
    assert product_dtypes(large.after) == ["float32"]


# ---------------------------------------------------------------- programs that change


def edited(tmp_path, name, body):
    """A function of a module of its own, as an editor leaves it."""
    namespace = {"jax": jax, "jnp": jnp, "lax": lax}
    path = tmp_path / f"{name}.py"
    path.write_text(textwrap.dedent(body))
    exec(compile(path.read_text(), str(path), "exec"), namespace)
    return namespace["model"]


FIRST = """
    def attend(x, w):
        return jax.nn.softmax(x @ w) @ w

    def model(x, w):
        with jax.named_scope("enc"):
            x = attend(x, w)
        with jax.named_scope("head"):
            return x @ w
"""
EDITED = """
    # a comment above moves every line
    def norm(x):
        return x / jnp.sqrt(jnp.square(x).mean() + 1e-6)

    def attend(x, w):
        return jax.nn.softmax(x @ w) @ w

    def model(x, w):
        x = norm(x)
        with jax.named_scope("enc"):
            x = attend(x, w)
        with jax.named_scope("head"):
            return x @ w
"""


def test_keys_survive_unrelated_edits(tmp_path):
    policy = pp.AutoMixedBf16.with_rules(pp.Rule(scope="enc", precision="f32"))
    first, second = (edited(tmp_path, n, b) for n, b in (("a", FIRST), ("b", EDITED)))
    pp.inspect(first, policy)(X, W).plan.save(tmp_path / "plan.json")
    with pytest.warns(pp.PrecisionWarning, match=r"equations are not in the saved plan of model"):
        pp.inspect(second, pp.Plan.load(tmp_path / "plan.json"))(X, W)
    # the rule that was in the policy is in the file too: take it away to see the keys alone
    whole = json.loads((tmp_path / "plan.json").read_text())
    whole["policy"]["rules"] = []
    (tmp_path / "plan.json").write_text(json.dumps(whole))
    found = quiet(second, pp.Plan.load(tmp_path / "plan.json"), X, W)
    assert product_dtypes(found.after) == ["float32", "float32", "bfloat16"]


def test_what_is_gone_and_what_is_new_is_reported(tmp_path):
    first, second = (edited(tmp_path, n, b) for n, b in (("a", FIRST), ("b", EDITED)))
    pp.inspect(second)(X, W).plan.save(tmp_path / "plan.json")
    with pytest.warns(pp.PrecisionWarning, match=r"no longer there \(\w+ in norm\b") as said:
        pp.inspect(first, pp.Plan.load(tmp_path / "plan.json"))(X, W)
    assert len(said) == 1
    pp.inspect(first)(X, W).plan.save(tmp_path / "plan.json")
    text = r"are not in the saved plan of model and follow AutoMixedBf16 \(\w+ in norm at b\.py:\d"
    with pytest.warns(pp.PrecisionWarning, match=text):
        pp.inspect(second, pp.Plan.load(tmp_path / "plan.json"))(X, W)


def test_a_new_matrix_product_is_named_first_with_its_line(tmp_path):
    first = edited(tmp_path, "a", "def model(x, w):\n    return (x @ w) + 1\n")
    second = edited(
        tmp_path,
        "b",
        "import jax, jax.numpy as jnp\ndef model(x, w):\n    with jax.named_scope('head'):\n"
        "        y = jnp.tanh(jnp.sin(jnp.exp(jnp.cos(x * 2)))) @ w\n    return y + 1\n",
    )
    pp.inspect(first)(X, W).plan.save(tmp_path / "plan.json")
    with pytest.warns(pp.PrecisionWarning) as said:
        pp.inspect(second, pp.Plan.load(tmp_path / "plan.json"))(X, W)
    texts = [str(warning.message) for warning in said]
    assert any("(dot_general in model at b.py:4 under head, " in text for text in texts)


def test_precisions_that_may_have_shifted_are_reported(tmp_path):
    first = edited(tmp_path, "a", "def model(x, w):\n    return (x @ w) @ w\n")
    second = edited(tmp_path, "b", "def model(x, w):\n    return ((x @ w) @ w) @ w\n")
    pp.inspect(first)(X, W).plan.save(tmp_path / "plan.json")
    with pytest.warns(pp.PrecisionWarning) as said:
        pp.inspect(second, pp.Plan.load(tmp_path / "plan.json"))(X, W)
    new, shifted = (str(warning.message) for warning in said)
    assert new.startswith("1 equation is not in the saved plan of model and follows AutoMixedBf16")
    assert (
        "of some equations than the saved plan of model (dot_general in model at b.py:2)."
        in shifted
    )


def test_a_plan_of_another_program_is_an_error(tmp_path):
    pp.inspect(scoped)(X, W).plan.save(tmp_path / "plan.json")
    policy = pp.Plan.load(tmp_path / "plan.json")

    def other(x):
        return jnp.tanh(x) @ x

    with pytest.raises(ValueError, match=r"saved from another program \(scoped\): none of its"):
        pp.inspect(other, policy)(X)
    with pytest.raises(ValueError, match="saved from another program"):
        pp.auto_mixed(other, policy=policy)(jnp.ones((8, 8)))


# ---------------------------------------------------------------- files


def test_a_file_is_short_and_can_be_reviewed(tmp_path):
    def layers(x, w):
        for _ in range(100):
            x = jnp.tanh(x @ w)
        return x

    pp.inspect(layers)(X, W).plan.save(tmp_path / "plan.json")
    whole = json.loads((tmp_path / "plan.json").read_text())
    assert whole["equations"] == {"|layers|dot_general": "bf16*100", "|layers|tanh": "f32*100"}
    assert whole["function"] == "layers" and whole["policy"]["name"] == "AutoMixedBf16"


@pytest.mark.parametrize("text", ["", "{}", "[1]", "3", "not json", '"format"', "[" * 100_000])
def test_a_file_that_is_no_plan_is_an_error(text, tmp_path):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ValueError, match=r"x.json is not a plan of precpass: save one by"):
        pp.Plan.load(tmp_path / "x.json")


def test_bytes_that_are_no_text_are_no_plan(tmp_path):
    (tmp_path / "x.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"x.json is not a plan of precpass"):
        pp.Plan.load(tmp_path / "x.json")


def test_a_newer_format_is_an_error(tmp_path):
    (tmp_path / "x.json").write_text('{"format": 99}')
    with pytest.raises(ValueError, match="has format 99, and this precpass reads 1: update"):
        pp.Plan.load(tmp_path / "x.json")


@pytest.mark.parametrize(
    "change",
    [
        {"equations": {"a|b|c": "f7"}},
        {"equations": {"a|b|c": "f32*x"}},
        {"equations": 3},
        {"policy": {}},
        {"equations": {"a|b|c": "f32*99999999999999999999"}},
    ],
    ids=["precision", "count", "equations", "policy", "overflow"],
)
def test_a_damaged_file_is_an_error(change, tmp_path):
    pp.inspect(scoped)(X, W).plan.save(tmp_path / "x.json")
    whole = {**json.loads((tmp_path / "x.json").read_text()), **change}
    (tmp_path / "x.json").write_text(json.dumps(whole))
    with pytest.raises(ValueError, match=r"x.json is damaged: .*; save the plan anew"):
        pp.Plan.load(tmp_path / "x.json")


@pytest.mark.parametrize("former", ["mxfp8", "nvfp4", "f8e5m2"])
@pytest.mark.parametrize("where", ["equations", "policy"])
def test_a_format_that_is_no_longer_supported_is_an_error(former, where, tmp_path):
    pp.inspect(scoped)(X, W).plan.save(tmp_path / "x.json")
    whole = json.loads((tmp_path / "x.json").read_text())
    whole[where] |= {"equations": {"a|b|c": former}, "policy": {"scaled": former}}[where]
    (tmp_path / "x.json").write_text(json.dumps(whole))
    with pytest.raises(ValueError, match=f"{former} is no longer supported: use 'f8e4m3' or"):
        pp.Plan.load(tmp_path / "x.json")


def test_a_file_that_has_8_bits_as_an_option_has_the_rule_for_them(tmp_path):
    pp.inspect(scoped, "AutoMixedInt8")(X, W).plan.save(tmp_path / "x.json")
    whole = json.loads((tmp_path / "x.json").read_text())
    assert pp.Plan.load(tmp_path / "x.json").with_lock(None) == pp.AutoMixedInt8
    whole["policy"] |= {"name": "AutoMixedInt8", "rules": [], "scaled": "int8"}
    (tmp_path / "x.json").write_text(json.dumps(whole))
    assert pp.Plan.load(tmp_path / "x.json").with_lock(None) == pp.AutoMixedInt8


def test_scales_of_a_file_are_those_that_there_are(tmp_path):
    pp.inspect(scoped)(X, W).plan.save(tmp_path / "x.json")
    whole = json.loads((tmp_path / "x.json").read_text())
    assert "scales" not in whole["policy"]
    whole["policy"]["scales"] = "auto"
    (tmp_path / "x.json").write_text(json.dumps(whole))
    assert pp.Plan.load(tmp_path / "x.json").lock
    whole["policy"]["scales"] = "row"
    (tmp_path / "x.json").write_text(json.dumps(whole))
    with pytest.raises(ValueError, match="one scale a row is no longer supported: use 'int8'"):
        pp.Plan.load(tmp_path / "x.json")


def test_a_file_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        pp.Plan.load(tmp_path / "none.json")


def test_a_plan_that_inspect_did_not_make_says_so(tmp_path):
    plan = pp.inspect(scoped)(X, W).plan
    with pytest.raises(ValueError, match=r"take the .plan of precpass.inspect"):
        pp.Plan(plan.decisions).save(tmp_path / "x.json")
    with pytest.raises(ValueError, match="the pass is switched off"), pp.use_policy(None):
        pp.inspect(scoped)(X, W).plan.save(tmp_path / "x.json")


def with_predicate():
    def narrow(eqn):
        return eqn.primitive == "dot_general" and eqn.scope == "head"

    return pp.AutoMixedBf16.with_rules(pp.Rule(where=narrow, precision="f32"))


def test_a_rule_with_a_predicate_is_named_and_its_effect_is_kept(tmp_path):
    saved, loaded = round_trip(scoped, with_predicate(), (X, W), tmp_path / "plan.json")
    whole = json.loads((tmp_path / "plan.json").read_text())
    assert len(whole["policy"]["rules_left_out"]) == 1 and "narrow" in str(whole["policy"])
    assert product_dtypes(loaded.after) == product_dtypes(saved.after)
    assert "float32" in product_dtypes(loaded.after)


def test_a_rule_that_a_file_cannot_hold_is_reported_where_it_is_loaded(tmp_path):
    path = tmp_path / "plan.json"
    pp.inspect(scoped, with_predicate())(X, W).plan.save(path)
    text = r"saved plan of scoped is without Rule\(where=.*narrow.*with_rules"
    with pytest.warns(pp.PrecisionWarning, match=text) as said:
        loaded = pp.inspect(scoped, pp.Plan.load(path))(X, W)
    assert len(said) == 1
    (note,) = pp.explain(scoped, pp.Plan.load(path))(X, W).notes
    assert note == str(said[0].message)
    # and where the loaded plan is saved again
    loaded.plan.save(tmp_path / "again.json")
    with pytest.warns(pp.PrecisionWarning, match=text):
        pp.inspect(scoped, pp.Plan.load(tmp_path / "again.json"))(X, W)
    # the precisions are those of the file all the same
    assert_plan(scoped, (X, W), path, with_predicate())
    assert_plan(scoped, (X, W), path, pp.Plan.load(path))


def test_keys_that_a_message_leaves_out_are_counted(tmp_path):
    def layers(names):
        def model(x):
            for name in names:
                with jax.named_scope(name):
                    x = x @ x
            return x

        return model

    pp.inspect(layers("abcdefgh"))(jnp.ones((4, 4))).plan.save(tmp_path / "plan.json")
    policy = pp.Plan.load(tmp_path / "plan.json")
    with pytest.warns(pp.PrecisionWarning, match="no longer there") as said:
        pp.inspect(layers("a"), policy)(jnp.ones((4, 4)))
    (text,) = [str(w.message) for w in said if "no longer there" in str(w.message)]
    assert text.startswith("7 equations of the saved plan of model are") and " and 4 more)" in text


def test_a_layer_that_moves_into_a_keep_region_is_the_same_layer(tmp_path):
    first = edited(tmp_path, "a", "def model(x, w):\n    return (x @ w) @ w\n")
    second = edited(
        tmp_path,
        "b",
        "import precpass as pp\ndef model(x, w):\n    y = x @ w\n    with pp.keep('f32'):\n"
        "        return y @ w\n",
    )
    pp.inspect(first)(X, W).plan.save(tmp_path / "plan.json")
    with pytest.raises(AssertionError) as raised:
        pp.testing.assert_plan(second, (X, W), tmp_path / "plan.json")
    said = str(raised.value)
    assert "1 equation is not in the precision" in said and "no longer there" not in said
    assert "b.py:5" in said and "in f32, not bf16 as it was saved" in said


def test_an_older_file_with_keep_regions_in_its_keys_is_followed(tmp_path):
    def fn(x, w):
        with pp.keep("bf16"):
            return x @ w

    path = tmp_path / "plan.json"
    pp.inspect(fn)(X, W).plan.save(path)
    whole = json.loads(path.read_text())
    (key,) = whole["equations"]
    assert "keep" not in key
    for old in (["precpass.keep[f32]"], ["precpass.keep[f32]", "precpass.keep[bf16]"]):
        whole["equations"] = {f"{mark}{key}": "bf16" for mark in old}
        path.write_text(json.dumps(whole))
        entries = [name for name, _ in pp.Plan.load(path).lock.entries]
        assert entries == ([key] if len(old) == 1 else [f"{mark}{key}" for mark in old])
