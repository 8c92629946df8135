"""Policies: the presets' table, their algebra, their text, and what is refused."""

import dataclasses
import pickle
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import precpass as pp
from precpass import (
    AlwaysBf16,
    AlwaysF16,
    AlwaysF32,
    AutoMixedBf16,
    AutoMixedConservativeF16,
    AutoMixedF16,
    Custom,
    Rule,
)
from precpass.policy.presets import PRESETS, AutoMixedF8, AutoMixedInt8
from precpass.types import OpKind, Precision, PrecisionPolicy
from tests.support.values import stable_id

KINDS = (
    OpKind.COMPUTE,
    OpKind.REDUCTION,
    OpKind.ELEMENTWISE,
    OpKind.DATA_MOVEMENT,
    OpKind.BOUNDARY,
)
# The table of the design's section 7, row by row; columns as in KINDS.
TABLE = {
    "AlwaysF32": (AlwaysF32, "f32 f32 f32 f32 f32"),
    "AlwaysF16": (AlwaysF16, "f16 f16 f16 f16 f32"),
    "AlwaysBf16": (AlwaysBf16, "bf16 bf16 bf16 bf16 f32"),
    "AutoMixedConservativeF16": (AutoMixedConservativeF16, "f16 f32 f16 f16 f32"),
    "AutoMixedF16": (AutoMixedF16, "f16 f16 f16 f16 f32"),
    "AutoMixedBf16": (AutoMixedBf16, "bf16 bf16 bf16 bf16 f32"),
}
CELLS = [
    (preset, kind, Precision.parse(cell))
    for preset, row in TABLE.values()
    for kind, cell in zip(KINDS, row.split(), strict=True)
]
each_preset = pytest.mark.parametrize("name", TABLE)

RULES = (Rule(scope="*/head", precision="f32"), Rule(primitive="tanh", precision="bf16"))
COMPOSED = [
    AutoMixedBf16.with_rules(*RULES),
    AutoMixedF16.with_output("f16"),
    AlwaysF16.with_retypes("f64", "f32"),
    AlwaysF32.with_rules(Rule(file="*/attention.py", function="score*", precision="f64")),
    AutoMixedBf16.with_rules(Rule(file="*/attention.py", line=7, precision="f32")),
    AutoMixedConservativeF16.with_rules(RULES[0]).with_output("bf16").with_retypes("f32"),
    Custom({OpKind.COMPUTE: Precision.BF16}),
    Custom({}),
    Custom({"compute": "bf16", "reduction": "f32"}, rules=RULES).with_output("f64"),
    Custom({kind: "f16" for kind in KINDS[:4]}),
    AutoMixedF8,
    AutoMixedInt8.with_rules(RULES[0]),
    Custom({OpKind.COMPUTE: "int8"}),
]
each_policy = pytest.mark.parametrize("policy", [*PRESETS.values(), *COMPOSED], ids=stable_id)


PRECISIONS = [f"{p.value!r}" for p in Precision]
FORMATS = [f"{p.value!r}" for p in Precision if p.is_format]


# ---------------------------------------------------------------- the presets


@pytest.mark.parametrize(("preset", "kind", "expected"), CELLS)
def test_a_preset_has_the_precisions_of_the_designs_table(preset, kind, expected):
    assert preset.precision_for(kind) is expected
    assert preset.precision_for(kind.value) is expected


def test_there_are_exactly_six_presets():
    assert {name: preset for name, (preset, _) in TABLE.items()} == PRESETS
    assert set(KINDS) == set(OpKind)


@pytest.mark.parametrize(
    ("text", "title", "precision"),
    [
        ("AutoMixedF8", "AutoMixedF8", "f8e4m3"),
        ("automixedint8", "AutoMixedInt8", "int8"),
        ("c=int8", "AutoMixedInt8", "int8"),
        ("fp8", "AutoMixedF8", "f8e4m3"),
    ],
)
def test_eight_bits_are_asked_for_by_name_and_are_a_rule(text, title, precision):
    policy = PrecisionPolicy.parse(text)
    rule = Rule(primitive="dot_general", min_flops=2**25, precision=precision)
    assert policy == AutoMixedBf16.with_rules(rule) == AutoMixedBf16.with_scaled(precision)
    assert repr(policy) == f"AutoMixedBf16.with_rules({rule!r})"
    assert policy.title == title and str(policy.scaled) == precision
    assert policy.with_scaled(None) == AutoMixedBf16
    assert policy.with_rules(*RULES).with_scaled(None) == AutoMixedBf16.with_rules(*RULES)
    assert policy.with_rules(*RULES).with_scaled("int8").rules[-1].parsed is Precision.INT8
    assert all(other.scaled is None for other in PRESETS.values())


def test_eight_bits_beside_other_products_than_bfloat16_are_refused():
    refused(ValueError, "'int8'", ["bf16", "f16"], AutoMixedF16.with_scaled, "int8")
    refused(ValueError, "'bf16'", ["f8e4m3", "int8"], AutoMixedBf16.with_scaled, "bf16")
    refused(ValueError, "int8", ["OpKind.COMPUTE"], Custom, {OpKind.REDUCTION: "int8"})


@each_preset
def test_a_preset_is_found_by_its_name_in_any_case(name):
    preset = TABLE[name][0]
    assert preset.name == name
    assert PrecisionPolicy.parse(name) is preset
    assert PrecisionPolicy.parse(name.lower()) is preset
    assert PrecisionPolicy.parse(preset) is preset


@pytest.mark.parametrize("preset", [AlwaysF16, AlwaysBf16])
def test_always_orders_every_kind_but_the_boundary(preset):
    assert preset.orders == set(OpKind) - {OpKind.BOUNDARY}


@pytest.mark.parametrize("preset", [AutoMixedConservativeF16, AutoMixedF16, AutoMixedBf16])
def test_auto_mixed_orders_products_and_permits_the_rest(preset):
    assert preset.orders == {OpKind.COMPUTE}


@each_preset
def test_only_always_f32_widens(name):
    assert TABLE[name][0].widens == (name == "AlwaysF32")


@each_preset
def test_a_preset_changes_the_three_formats_up_to_float32(name):
    assert TABLE[name][0].retypes == {Precision.F32, Precision.BF16, Precision.F16}


# ---------------------------------------------------------------- Custom


def test_custom_gives_each_kind_as_asked_and_leaves_the_others():
    policy = Custom({OpKind.COMPUTE: Precision.BF16, "reduction": "float16"})
    assert [policy.precision_for(kind) for kind in KINDS] == [
        Precision.BF16,
        Precision.F16,
        *[Precision.F32] * 3,
    ]
    assert policy.orders == {OpKind.COMPUTE, OpKind.REDUCTION}


def test_custom_takes_rules():
    assert Custom({OpKind.COMPUTE: "bf16"}, rules=RULES).rules == RULES


def test_an_empty_custom_lowers_nothing():
    assert not Custom({}).lowers
    assert Custom({"elementwise": "f16"}).lowers


# ---------------------------------------------------------------- the with_ methods


def test_later_rules_are_tried_first():
    first, second = RULES
    assert AutoMixedF16.with_rules(first).with_rules(second).rules == (second, first)
    assert AutoMixedF16.with_rules(first, second).rules == (first, second)


@pytest.mark.parametrize(
    "change",
    [
        lambda p: p.with_rules(*RULES),
        lambda p: p.with_retypes("f64"),
        lambda p: p.with_output("f16"),
    ],
    ids=["rules", "retypes", "output"],
)
def test_a_change_gives_another_policy_and_leaves_the_preset(change):
    before = dataclasses.replace(AutoMixedBf16)
    changed = change(AutoMixedBf16)
    assert changed != before
    assert before == AutoMixedBf16
    assert [changed.precision_for(k) for k in KINDS] == [before.precision_for(k) for k in KINDS]


def test_a_policy_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        AutoMixedF16.output = Precision.F16


# ---------------------------------------------------------------- equality and text


@each_policy
def test_a_policy_survives_pickling_copying_and_its_own_repr(policy):
    for again in (
        pickle.loads(pickle.dumps(policy)),
        dataclasses.replace(policy),
        eval(repr(policy)),
        eval(repr(policy), {}, vars(pp) | vars(pp.types)),
    ):
        assert again == policy
        assert hash(again) == hash(policy)
        assert again.rules == policy.rules
        assert again.output is policy.output
        assert again.retypes == policy.retypes


def test_different_policies_are_unequal():
    policies = [*PRESETS.values(), *COMPOSED]
    assert len(set(policies)) == len(policies)


@each_policy
def test_the_text_of_a_policy_reads_as_a_preset_string_or_a_repr(policy):
    text = str(policy)
    assert (PrecisionPolicy.parse(text) if text.startswith("p=") else eval(text)) == policy


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("p=f32,c=bf16,o=f32", AutoMixedBf16),
        ("p=f32,c=f16,o=f32", AutoMixedF16),
        ("p=f32,c=f32,o=f32", AlwaysF32),
        ("p=f32,c=bf16,o=bf16", AutoMixedBf16.with_output("bf16")),
        ("p=f32,c=f16,o=f16", AutoMixedF16.with_output("f16")),
    ],
)
def test_the_string_form_makes_the_round_trip(text, expected):
    assert PrecisionPolicy.parse(text) == expected
    assert str(expected) == text
    assert str(PrecisionPolicy.parse(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        *("c=bf16", "c=bfloat16", " p=float32, c = bfloat16 , o=float32", "o=f32,c=bf16"),
        *("params=float32,compute=bfloat16,output=float32", "compute=bf16"),
        *("bf16", "bfloat16", "BFloat16"),
        *(jnp.bfloat16, np.dtype(jnp.bfloat16), Precision.BF16),
    ],
    ids=stable_id,
)
def test_the_string_form_may_be_short_long_spaced_and_in_any_order(text):
    assert PrecisionPolicy.parse(text) == AutoMixedBf16


@pytest.mark.parametrize("value", ["half", "f16", "float16", jnp.float16, np.float16, "c=half"])
def test_half_is_float16_however_it_is_written(value):
    assert PrecisionPolicy.parse(value) == AutoMixedF16


@pytest.mark.parametrize("value", ["f32", "full", jnp.float32, "p=f32", "compute=full"])
def test_float32_is_the_program_without_low_products(value):
    assert PrecisionPolicy.parse(value) == AlwaysF32


@pytest.mark.parametrize("old, new", [("AutoMixed", AutoMixedF16), ("automixed", AutoMixedF16)])
def test_the_other_names_of_presets_stay(old, new):
    assert PrecisionPolicy.parse(old) == new
    assert pp.AutoMixed == pp.AutoMixedF16
    assert hash(pp.AutoMixed) == hash(pp.AutoMixedF16)
    assert pp.AutoMixedConservative == pp.AutoMixedConservativeF16
    assert PrecisionPolicy.parse("AutoMixedConservative") is pp.AutoMixedConservative


def test_a_name_that_does_not_say_its_format_is_printed_with_it():
    assert pp.AutoMixed.title == "AutoMixed (float16)"
    assert pp.AutoMixedConservative.title == "AutoMixedConservative (float16)"
    assert PrecisionPolicy.parse(pp.AutoMixed.title) is pp.AutoMixed
    assert pp.AutoMixed.with_rules(Rule(primitive="tanh", precision="f32")).title == (
        "AutoMixed (float16)"
    )
    assert pickle.loads(pickle.dumps(pp.AutoMixed)).title == "AutoMixed (float16)"
    # a repr is code, and the name in it has the format
    assert repr(pp.AutoMixed) == "AutoMixedF16"
    assert "AutoMixed (float16)" in pp.AutoMixed._repr_html_()
    for policy in PRESETS.values():
        assert policy.title == policy.name
    with pytest.raises(
        ValueError, match=r"AutoMixed \(float16\), AutoMixedConservative \(float16\)"
    ):
        PrecisionPolicy.parse("unknown")


def test_the_name_of_each_preset_says_its_format():
    for name, policy in PRESETS.items():
        assert name.lower().endswith(policy.precision_for(OpKind.COMPUTE).value), name


def test_stored_parameters_may_be_low():
    policy = PrecisionPolicy.parse("p=bf16")
    assert policy == AutoMixedBf16.with_parameters("bf16") != AutoMixedBf16
    assert str(PrecisionPolicy.parse("p=f16,c=bf16")) == "p=f16,c=bf16,o=f32"
    assert policy.cast_to_param({"w": jnp.ones(2)})["w"].dtype == jnp.bfloat16


# ---------------------------------------------------------------- casts


LEAVES = {
    "jax": jnp.ones(2),
    "numpy": np.ones(2, np.float64),
    "scalar": np.float32(1.0),
    "low": jnp.ones(2, jnp.float16),
}
OTHERS = {
    "integer": jnp.arange(2),
    "complex": jnp.ones(2, jnp.complex64),
    "key": jax.random.key(0),
    "number": 1.5,
    "text": "x",
    "none": None,
}


def test_casts_change_floating_arrays_alone():
    policy = PrecisionPolicy.parse("p=f32,c=bf16,o=f16")
    wanted = {"param": np.float32, "compute": jnp.bfloat16, "output": np.float16}
    for name, dtype in wanted.items():
        got = getattr(policy, f"cast_to_{name}")({**LEAVES, **OTHERS})
        assert {got[key].dtype for key in LEAVES} == {np.dtype(dtype)}
        assert all(got[key] is OTHERS[key] for key in OTHERS)
        assert pp.cast_floating(LEAVES, name, policy).keys() == got.keys() - OTHERS.keys()
        assert pp.cast_floating(LEAVES, name, policy)["jax"].dtype == dtype
    assert LEAVES["numpy"].dtype == np.float64


def test_a_reference_is_left_to_its_owner():
    ref = jax.new_ref(jnp.ones(2))
    assert AutoMixedBf16.cast_to_compute([ref])[0] is ref


def test_cast_floating_takes_the_policy_of_use_policy_and_does_nothing_without_one():
    assert pp.cast_floating(LEAVES, "compute") is LEAVES
    with pp.use_policy("bf16"):
        assert pp.cast_floating(LEAVES, "compute")["jax"].dtype == jnp.bfloat16
        assert pp.cast_floating(LEAVES, "compute", "half")["jax"].dtype == np.float16
        with pp.use_policy(None):
            assert pp.cast_floating(LEAVES, "compute") is LEAVES
    assert pp.cast_floating(LEAVES, "f16")["jax"].dtype == np.float16
    assert pp.cast_floating(LEAVES, jnp.bfloat16)["jax"].dtype == jnp.bfloat16


def test_cast_floating_does_not_tie_a_trace_to_the_policy_around_it():
    cast = jax.jit(lambda x: pp.cast_floating(x @ x, "compute"))
    with pp.use_policy("bf16"):
        assert cast(jnp.eye(2)).dtype == jnp.bfloat16
        assert pp.auto_mixed(cast, "AlwaysF32")(jnp.eye(2)).dtype == np.float32
        assert pp.auto_mixed(cast, "c=f16")(jnp.eye(2)).dtype == jnp.float16
    assert cast(jnp.eye(2)).dtype == np.float32


def test_cast_floating_refuses_an_unknown_format():
    legal = ["'param'", "'compute'", "'output'", *FORMATS]
    refused(ValueError, "'params'", legal, pp.cast_floating, LEAVES, "params")


# ---------------------------------------------------------------- what is refused


def refused(error, offender, legal, call, *args, **kwargs):
    """A call is refused with a text that quotes the offender and says what is legal."""
    with pytest.raises(error) as caught:
        call(*args, **kwargs)
    text = str(caught.value)
    assert offender in text
    for word in legal:
        assert word in text, f"{word!r} is missing from: {text}"


POLICIES = [*TABLE, "p=f32,c=bf16,o=f32", "Custom"]


@pytest.mark.parametrize("name", ["Auto", "mixed", "", "bf17", "always_f32"])
def test_an_unknown_policy_name_is_refused(name):
    refused(ValueError, repr(name), POLICIES, PrecisionPolicy.parse, name)


def test_a_near_miss_is_named():
    refused(
        ValueError, "'AutoMixdBf16'", ["'AutoMixedBf16'?"], PrecisionPolicy.parse, "AutoMixdBf16"
    )


@pytest.mark.parametrize("value", [16, OpKind.COMPUTE, float, np.tanh, ("c", "bf16")])
def test_what_is_no_policy_is_refused(value):
    refused(TypeError, repr(value), POLICIES, PrecisionPolicy.parse, value)


@pytest.mark.parametrize("taker", [pp.auto_mixed, pp.inspect], ids=["auto_mixed", "inspect"])
def test_every_taker_of_a_policy_refuses_an_unknown_one(taker):
    refused(ValueError, "'Quarter'", POLICIES, taker, lambda x: x, policy="Quarter")
    refused(TypeError, "3", POLICIES, taker, lambda x: x, policy=3)


@pytest.mark.parametrize(
    "text",
    ["c=", "=", "o=f32", "c=bf16,x=f32", "c=bf16;o=f32", "c=bf16,compute=f16", "c=bf16,,o=f32"],
)
def test_a_string_that_does_not_read_is_refused(text):
    refused(ValueError, repr(text), ["p=f32,c=bf16,o=f32"], PrecisionPolicy.parse, text)


@pytest.mark.parametrize("text", ["c=quarter", "c=bf16,o=int4", "p=fp32,c=bf16"])
def test_an_unknown_precision_inside_a_string_is_refused(text):
    offender = re.search("quarter|int4|fp32", text).group()
    refused(ValueError, repr(offender), PRECISIONS, PrecisionPolicy.parse, text)


def test_float64_products_are_refused():
    for value in ("f64", np.float64):
        refused(ValueError, repr(value), ["f32", "bf16", "Custom"], PrecisionPolicy.parse, value)
    refused(ValueError, "c=f64", ["f32", "bf16", "f16"], PrecisionPolicy.parse, "c=f64")


BAD_PRECISIONS = [None, "quarter", "int32", np.uint8, 3, ml_dtypes.float8_e3m4, "float8_e8m0fnu"]


@pytest.mark.parametrize("former", ["mxfp8", "nvfp4", "f8e5m2"])
@pytest.mark.parametrize(
    "take",
    [
        PrecisionPolicy.parse,
        lambda former: PrecisionPolicy.parse(f"c={former}"),
        AutoMixedBf16.with_scaled,
        lambda former: Rule(primitive="dot_general", precision=former),
        lambda former: PrecisionPolicy.from_dict({"policy": former}),
        lambda former: PrecisionPolicy.from_dict({"scaled": former}),
        lambda former: PrecisionPolicy.from_dict({"rules": [{"scope": "a", "precision": former}]}),
        lambda former: pp.keep(former).__enter__(),
        lambda former: pp.compare(np.tanh, [former])(1.0),
    ],
)
def test_a_format_that_is_no_longer_supported_is_refused_wherever_one_is_taken(take, former):
    said = [f"{former} is no longer supported: use 'f8e4m3' or 'int8'", "bf16", "int8"]
    refused(ValueError, former, said, take, former)


@pytest.mark.parametrize("bad", BAD_PRECISIONS, ids=stable_id)
@pytest.mark.parametrize(
    "take",
    [
        lambda bad: Custom({OpKind.COMPUTE: bad}),
        lambda bad: Rule(primitive="tanh", precision=bad),
        lambda bad: pp.keep(bad).__enter__(),
    ],
    ids=["Custom", "Rule", "keep"],
)
def test_an_unknown_precision_is_refused_wherever_one_is_taken(take, bad):
    refused(ValueError, repr(bad), PRECISIONS, take, bad)


@pytest.mark.parametrize("bad", ["matmul", "", 7, None, Precision.F32], ids=stable_id)
def test_an_unknown_kind_is_refused(bad):
    kinds = [repr(kind) for kind in OpKind]
    refused(ValueError, repr(bad), kinds, AutoMixedF16.precision_for, bad)
    refused(ValueError, repr(bad), kinds, Custom, {bad: "bf16"})


def test_custom_refuses_a_precision_for_the_boundary():
    refused(ValueError, "BOUNDARY", ["with_output"], Custom, {OpKind.BOUNDARY: "bf16"})


@pytest.mark.parametrize("bad", ["bf16", [(OpKind.COMPUTE, "bf16")], None], ids=stable_id)
def test_custom_refuses_what_is_no_table(bad):
    refused(TypeError, repr(bad), ["OpKind", "Precision"], Custom, bad)


@pytest.mark.parametrize("bad", ["*/head", ("*/head", "f32"), None], ids=stable_id)
def test_with_rules_refuses_what_is_no_rule(bad):
    refused(TypeError, repr(bad), ["Rule"], AutoMixedF16.with_rules, bad)


def test_a_rule_without_a_pattern_is_refused():
    legal = ["primitive", "scope", "function", "file", "line", "min_flops", "where"]
    refused(ValueError, "Rule(", legal, Rule, precision="f32")


@pytest.mark.parametrize("bad", ["dot_genral", "matmul*", "DOT_GENERAL", "[x]"])
def test_a_rule_that_no_primitive_can_match_is_refused(bad):
    refused(ValueError, repr(bad), ["Legal are", "TABLE"], Rule, primitive=bad, precision="f32")


def test_a_misspelt_primitive_is_told_the_right_name():
    refused(
        ValueError, "'dot_genral'", ["'dot_general'"], Rule, primitive="dot_genral", precision="f32"
    )


@pytest.mark.parametrize("field", ["primitive", "scope", "function", "file"])
@pytest.mark.parametrize("bad", ["", 5, ["a"]], ids=stable_id)
def test_a_rule_refuses_a_pattern_that_is_no_glob(field, bad):
    refused(ValueError, f"{field}={bad!r}", ["glob"], Rule, precision="f32", **{field: bad})


@pytest.mark.parametrize("bad", ["shape", 5], ids=stable_id)
def test_a_rule_refuses_a_predicate_that_cannot_be_called(bad):
    refused(ValueError, f"where={bad!r}", ["function", "EqnView"], Rule, where=bad, precision="f32")


@pytest.mark.parametrize("bad", [0, -3, "7", 7.0, True], ids=stable_id)
def test_a_rule_refuses_what_is_no_line(bad):
    refused(ValueError, f"line={bad!r}", ["1"], Rule, file="*/a.py", line=bad, precision="f32")


@pytest.mark.parametrize("bad", [0, -1.0, "2**25", float("nan"), True], ids=stable_id)
def test_a_rule_refuses_what_is_no_number_of_operations(bad):
    refused(ValueError, f"min_flops={bad!r}", ["2**25"], Rule, min_flops=bad, precision="f32")


def test_a_line_asks_for_its_file():
    refused(ValueError, "line=7", ["file="], Rule, line=7, precision="f32")
    refused(ValueError, "line=7", ["file="], Rule, scope="head", line=7, precision="f32")


def test_a_rule_with_a_line_prints_as_it_is_written():
    rule = Rule(file="*/attention.py", line=7, precision="f32")
    assert repr(rule) == "Rule(file='*/attention.py', line=7, precision='f32')"
