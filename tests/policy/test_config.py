"""Policies as data and in files: the round trip, and what is refused."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

import precpass as pp
from precpass import Rule
from precpass.plan.file import policy_data, policy_from
from precpass.policy.policy import OPTIONS
from precpass.policy.presets import PRESETS
from precpass.types import PrecisionPolicy
from tests.support.values import stable_id

RULES = (
    Rule(module="encoder/*/attention", precision="f32"),
    Rule(scope='a "quoted" \\ name\n\x7f\u00e9', precision="bf16", evidence="seen: 1e9"),
    Rule(primitive="dot_general", precision="int8", largest=(2, 0.5), evidence="reach 1 and 0.25"),
    Rule(primitive="tanh", precision="f16"),
    Rule(file="*/attention.py", line=41, function="f*", precision="f64"),
    Rule(module="mlp", min_flops=2**25, precision="f8e4m3"),
)
POLICIES = [
    *PRESETS.values(),
    pp.AutoMixedBf16.with_rules(*RULES).with_output("bf16").with_parameters("bf16"),
    pp.AutoMixedF16.with_retypes("f64", "f32").with_profitability("best").with_results("f32"),
    pp.AutoMixedInt8,
    pp.Custom({}),
    pp.Custom({"compute": "bf16", "reduction": "f32"}, RULES).with_retypes("f64"),
]
VALUES = [(name, value) for name in OPTIONS for value in OPTIONS[name].metadata["legal"]]
each_policy = pytest.mark.parametrize("policy", POLICIES, ids=stable_id)


@each_policy
def test_a_policy_survives_a_file(policy: PrecisionPolicy, tmp_path: Path):
    policy.save(tmp_path / "policy.toml")
    again = PrecisionPolicy.load(tmp_path / "policy.toml")
    assert again == policy and repr(again) == repr(policy)
    assert [rule.evidence for rule in again.rules] == [rule.evidence for rule in policy.rules]


@pytest.mark.parametrize(("name", "value"), VALUES, ids=stable_id)
def test_each_value_of_each_option_survives_as_text_data_and_plan(name: str, value: Any):
    base = pp.AutoMixedF8 if name == "scaled" else pp.AutoMixedBf16
    policy = getattr(base, f"with_{name}")(value)
    assert getattr(policy, name) in (value, {value})
    assert PrecisionPolicy.from_dict(policy.to_dict()) == policy
    assert PrecisionPolicy.from_dict({"policy": base.name, name: str(value).lower()}) == policy
    assert eval(repr(policy), dict(vars(pp))) == policy
    assert policy_from(policy_data(policy)) == policy


@pytest.mark.parametrize("name", OPTIONS)
def test_a_value_that_an_option_does_not_have_is_refused_with_the_legal_ones(name: str):
    for value in (True, "int4", "int32", ["int32"], 7):
        with pytest.raises(ValueError, match="legal are ") as refused:
            PrecisionPolicy.from_dict({name: value})
        for legal in OPTIONS[name].metadata["legal"]:
            assert str(legal) in str(refused.value)


def test_a_file_that_a_person_wrote():
    text = """
    [precision]
    policy = "params=bfloat16,compute=bfloat16"
    [[precision.rules]]
    module = "head"
    precision = "float32"
    """
    policy = PrecisionPolicy.from_dict(tomllib.loads(text)["precision"])
    wanted = pp.AutoMixedBf16.with_parameters("bf16")
    assert policy == wanted.with_rules(Rule(module="head", precision="f32"))
    assert PrecisionPolicy.from_dict({}) == pp.AutoMixedBf16
    assert PrecisionPolicy.from_dict({"policy": "AutoMixed"}) == pp.AutoMixedF16
    for of_8_bits in ({"scaled": "int8"}, {"policy": "AutoMixedInt8"}):
        assert PrecisionPolicy.from_dict(of_8_bits) == pp.AutoMixedInt8


@pytest.mark.parametrize(
    ("data", "error", "said"),
    [
        ({"polcy": "bf16"}, ValueError, "no key 'polcy': legal are policy, kinds"),
        ({"policy": "bf17"}, ValueError, "unknown policy 'bf17'"),
        ({"policy": "bf16", "kinds": {}}, ValueError, "is for policy = 'Custom'"),
        ({"output": "int8"}, ValueError, "output = 'int8': legal are 'f64'"),
        ({"scaled": "bf16"}, ValueError, "scaled = 'bf16': legal are 'f8e4m3', 'int8'"),
        ({"rules": [{"module": "x"}]}, ValueError, "has no precision: legal are 'f64', 'f32'"),
        ({"rules": [{"layer": "x"}]}, ValueError, "a rule has no key 'layer': legal are primitive"),
        ({"rules": [{"precision": "f32"}]}, ValueError, "without a pattern"),
        ({"rules": ["x"]}, TypeError, "a rule as data is a dict, not 'x'"),
        (
            {"rules": {"module": "x"}},
            TypeError,
            r"a list of dicts \(\[\[rules\]\] before each in TOML",
        ),
        ({"retypes": "f7"}, ValueError, "retypes = 'f7': legal are"),
        (["bf16"], TypeError, r"a policy as data is a dict, not \['bf16'\]"),
    ],
    ids=stable_id,
)
def test_bad_data_is_refused(data: Any, error: type[Exception], said: str):
    with pytest.raises(error, match=said):
        PrecisionPolicy.from_dict(data)


def test_what_a_file_cannot_hold_is_refused(tmp_path: Path):
    with_predicate = pp.AutoMixedBf16.with_rules(Rule(where=bool, precision="f32"))
    with pytest.raises(ValueError, match=r"Rule\(where=bool.*has a predicate"):
        with_predicate.save(tmp_path / "policy.toml")
    with pytest.raises(ValueError, match=r"policy\.ini: a policy's file is \.toml$"):
        pp.AutoMixedBf16.save(tmp_path / "policy.ini")
    with pytest.raises(ValueError, match=r"is \.toml; of YAML give PrecisionPolicy\.from_dict\("):
        PrecisionPolicy.load(tmp_path / "policy.yaml")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["policy = ", "policy = 3", "nothing = 1"])
def test_a_damaged_file_is_named(text: str, tmp_path: Path):
    (tmp_path / "policy.toml").write_text(text)
    with pytest.raises(ValueError, match=r"policy\.toml is not a policy: "):
        PrecisionPolicy.load(tmp_path / "policy.toml")
