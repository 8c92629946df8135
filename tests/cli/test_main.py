"""The command line: as a process with its exit statuses, and its commands one by one."""

import json
import subprocess
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from precpass.cli import main
from precpass.devices import targets
from tests.support.command_line import SHAPES, command, environment, ran, written


@pytest.fixture
def model(tmp_path, monkeypatch):
    yield from written(tmp_path, monkeypatch)


# ---------------------------------------------------------------- as a process


@pytest.mark.release
def test_the_exit_statuses_of_the_process(model):
    lines = {
        "fine": ["explain", "a_model.py:grad", "--args", SHAPES],
        "raised": ["diff", "a_model.py:broken", "--args", "f32[3]"],
        "refused": ["lock", "a_model.py:lost"],
    }
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = {
        name: subprocess.Popen(command(*line), cwd=model.parent, env=environment(), **options)
        for name, line in lines.items()
    }
    said = {name: (*one.communicate(), one.returncode) for name, one in started.items()}
    out, err, status = said["fine"]
    assert (status, err) == (0, "")
    assert "2 of 2 matrix products run in bfloat16" in out and "\x1b[" not in out
    out, err, status = said["raised"]
    assert (status, out) == (3, "")
    assert 'KeyError: "the user\'s own"' in err and 'raise KeyError("the user\'s own")' in err
    assert "precpass/" not in err and "jax/_src" not in err
    out, err, status = said["refused"]
    assert (status, out) == (2, "") and err.startswith("precpass: a_model.py has no 'lost'")


def test_the_exit_statuses_of_the_commands(model, capsys):
    expect = ["--example", "example", "--expect", "dot_general=f32"]
    status, out, _ = ran(capsys, "check", "a_model:loss", *expect)
    assert status == 1 and "in bf16, not f32 as 'dot_general' asks" in out
    status, out, err = ran(capsys, "explain", "a_model.py:lost")
    assert (status, out) == (2, "")
    names = "loss, broken, dense, example, grad, half, keywords, mapped and 2 more"
    assert err == f"precpass: a_model.py has no 'lost'; it has {names}\n"


def test_the_help_is_one_screen(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as left:
        main(["--help"])
    assert left.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= 80
    assert "0 fine; 1 not as expected (audit, bisect, check); 2 refused" in " ".join(lines)
    for name in KEYS:
        assert any(line.strip().startswith(name) for line in lines)


# ---------------------------------------------------------------- the commands


KEYS = {
    "explain": "name policy device verdict wide multiplied others unmatched notes advice"
    " compiled not_compiled",
    "diff": "policy changes compiled not_compiled",
    "compare": "function rows columns reference rounds device without_bfloat16",
    "audit": "policy backend device_kind jax ok products findings memory compiled",
    "bisect": "policy found minimal verdict tolerance notes kept runs",
    "draw": "written",
    "lock": "written",
    "check": "ok mismatches notes",
}
MORE = {
    "compare": ["--policies", "c=bf16", "--rounds", "1"],
    "bisect": ["--tolerance", "1e-6"],
    "check": ["--expect", "dot_general=bf16"],
}


@pytest.mark.release(keep=2)
@pytest.mark.parametrize(
    "given",
    [
        ["a_model.py:grad", "--args", SHAPES],
        ["a_model:dense", "--example", "keywords"],
        ["a_model.py:dense", "--args", "{w: f32[8,4], b: f32[4]}, x=f32[2,8], scale=0.5"],
    ],
    ids=["file", "module", "tree"],
)
@pytest.mark.parametrize("name", KEYS)
def test_every_command_with_every_kind_of_target_and_arguments(name, given, model, capsys):
    status, out, err = ran(capsys, name, *given, *MORE.get(name, []), "--json")
    assert (status if name != "audit" else 0, err) == (0, "")
    assert list(json.loads(out)) == KEYS[name].split()
    status, out, err = ran(capsys, name, *given, *MORE.get(name, []))
    assert (status if name != "audit" else 0, err) == (0, "") and out.strip()


def test_a_plan_for_a_target_is_locked_and_checked(model, capsys):
    given = ["a_model.py:grad", "--args", SHAPES, "--target"]
    status, _, err = ran(capsys, "lock", *given, "h100", "-o", "h100.precision.json")
    assert (status, err) == (0, "")
    status, _, err = ran(capsys, "check", *given, "h100", "--plan", "h100.precision.json")
    assert (status, err) == (0, "")
    for name in ("lock", "check"):
        status, out, err = ran(capsys, name, *given, "b300", *MORE.get(name, []))
        assert (status, out) == (2, "") and "unknown target 'b300'" in err


@pytest.mark.parametrize("name", ["explain", "diff"])
def test_a_plan_for_a_target_is_shown_without_its_compiler(name, model, capsys, monkeypatch):
    monkeypatch.setattr(targets, "_is_installed", lambda _module: False)
    targets._topology.cache_clear()
    given = [name, "a_model.py:grad", "--args", SHAPES, "--target", "h100"]
    status, out, err = ran(capsys, *given)
    assert (status, err) == (0, "") and "not compiled  target 'h100' needs XLA's GPU" in out
    status, out, err = ran(capsys, *given, "--no-compile")
    assert (
        (status, err) == (0, "") and "planned for NVIDIA H100" in out and "not compiled" not in out
    )
    status, out, _ = ran(capsys, *given, "--json")
    found = json.loads(out)
    assert found["compiled"] is None and found["not_compiled"].startswith("target 'h100' needs")


def test_the_json_in_the_documentation_is_that_of_the_commands():
    pages = Path(__file__).parents[2] / "docs" / "pages"
    text = (pages / "reference" / "command-line.md").read_text(encoding="utf-8")
    for name, keys in KEYS.items():
        assert f"| `{name}` | `{'`, `'.join(keys.split())}` |" in text


def test_explain_as_json(model, capsys):
    status, out, _ = ran(capsys, "explain", "a_model.py:grad", "--args", SHAPES, "--json")
    found = json.loads(out)
    assert status == 0 and found["verdict"]["after"]["low"] == 2


def test_a_diff_of_jaxprs_has_the_bookkeeping_where_it_is_asked_for(model, capsys):
    given = ("diff", f"{model}:loss", "--args", SHAPES, "--level", "jaxpr")
    texts = [ran(capsys, *given, *more)[1] for more in ((), ("--bookkeeping",))]
    assert ["precpass_" in text for text in texts] == [False, True]
    assert all("+" in text and "convert_element_type" in text for text in texts)


def test_diff_at_each_level_and_between_policies(model, capsys):
    given = ["a_model.py:loss", "--example", "example"]
    for level in ("lines", "equations", "jaxpr"):
        status, out, _ = ran(capsys, "diff", *given, "--level", level)
        assert status == 0 and "dot_general" in out
    _, out, _ = ran(capsys, "diff", *given, "--json")
    (change,) = json.loads(out)["changes"]
    assert change["compute"] == "bf16" and change["source"]["function"] == "loss"
    assert change["casts"] == ["f32 -> bf16[16,64] inserted", "f32 -> bf16[64,32] inserted"]
    status, out, _ = ran(capsys, "diff", *given, "--between", "AutoMixed")
    assert status == 0 and out.startswith("1 of 5 equations differ\n")
    _, out, _ = ran(capsys, "diff", *given, "--color", "always")
    assert "\x1b[" in out


def test_the_functions_own_policy_counts(model, capsys):
    _, out, _ = ran(capsys, "diff", "a_model.py:half", "--example", "example")
    assert "in f16" in out
    _, out, _ = ran(capsys, "diff", "a_model.py:half", "--example", "example", "--policy", "c=bf16")
    assert "in bf16" in out


def test_compare_draws_arrays_for_shapes(model, capsys):
    given = [
        "a_model.py:loss",
        "--args",
        SHAPES,
        "--policies",
        "AlwaysF32; c=bf16",
        "--rounds",
        "0",
    ]
    status, out, _ = ran(capsys, "compare", *given, "--json")
    rows = json.loads(out)["rows"]
    assert status == 0 and len(rows) == 2
    assert 0 < rows[0]["relative_error"] < rows[1]["relative_error"] < 0.1


def test_compare_takes_shapes_where_no_column_needs_a_run(model, capsys):
    given = ["a_model.py:loss", "--args", "f32[65536,65536], f32[65536,65536]"]
    columns = ["--columns", "flops, arguments"]
    policies = ["--policies", "AlwaysF32; c=bf16", "--json"]
    status, out, _ = ran(capsys, "compare", *given, *policies, *columns)
    found = json.loads(out)
    assert status == 0 and found["columns"] == ["flops", "arguments"]
    assert [row["argument_bytes"] for row in found["rows"]] == [2 * 4 * 65536**2] * 2
    status, out, err = ran(capsys, "compare", *given, "--columns", "speed")
    assert (status, out) == (2, "") and "--columns: unknown column 'speed': legal are" in err


def test_the_former_profile_is_compare_with_columns(model, capsys):
    given = ["a_model.py:loss", "--args", SHAPES, "--rounds", "0"]
    status, out, err = ran(capsys, "profile", *given)
    assert status == 0 and "AutoMixedBf16" in out and "roofline ms" in out
    assert "profile goes away in 0.2: write precpass compare --policies" in err
    with pytest.raises(SystemExit):
        main(["profile", *given, "--devices", "h100"])
    assert "give --columns roofline,moved and --target h100" in capsys.readouterr().err


def test_audit_is_zero_where_xla_does_as_planned_and_one_elsewhere(model, capsys):
    given = ["a_model.py:mapped", "--args", "f32[3,8,16], f32[16,8]", "--json"]
    status, out, _ = ran(capsys, "audit", *given)
    found = json.loads(out)
    assert (status, found["ok"], found["findings"]) == (0, True, [])
    assert found["products"] == {"planned": 1, "as_planned": 1, "changed": 0, "merged": 0}
    # the CPU has no float16 kernel
    status, out, _ = ran(capsys, "audit", *given, "--policy", "AutoMixed")
    found = json.loads(out)
    assert (status, found["ok"], found["products"]["changed"]) == (1, False, 1)
    assert found["findings"][0]["kind"] == "product widened"


def test_bisect_finds_the_line_or_says_that_there_is_none(model, capsys):
    given = ["a_model.py:ranged", "--args", "f32[4,8], f32[8,4]", "--tolerance"]
    status, out, _ = ran(capsys, "bisect", *given, "1e-6", "--json")
    found = json.loads(out)
    assert status == 0 and found["found"] and len(found["kept"]) == 1
    status, _, err = ran(capsys, "bisect", *given, "1e-3", "--budget", "0")
    assert status == 2 and "budget" in err


def test_draw_lock_and_check(model, capsys, tmp_path):
    given = ["a_model.py:grad", "--example", "example"]
    assert ran(capsys, "draw", *given, "-o", "g.svg")[:2] == (0, "wrote g.svg\n")
    assert ET.parse(tmp_path / "g.svg").getroot().tag.endswith("svg")
    status, out, _ = ran(capsys, "lock", *given, "-o", "p.json")
    assert status == 0 and out.startswith("wrote p.json: <Plan: 2 of 2")
    assert ran(capsys, "check", *given, "--plan", "p.json")[:2] == (0, "as expected\n")
    for name in ("explain", "diff", "audit", "lock"):
        status, out, _ = ran(capsys, name, *given, "--plan", "p.json")
        assert status == 0, name
    status, out, _ = ran(capsys, "check", *given, "--plan", "p.json", "--policy", "c=f16", "--json")
    found = json.loads(out)
    assert status == 1 and found["ok"] is False and found["notes"] == []
    one, other = found["mismatches"]
    assert one["wanted"] == other["wanted"] == "not bf16 as it was saved"
    assert one["compute"] == "f16" and one["primitive"] == "dot_general"
    assert one["source"]["function"] == "loss"


def test_an_example_may_return_keywords(model, capsys):
    status, out, _ = ran(capsys, "diff", "a_model.py:dense", "--example", "keywords")
    assert status == 0 and "dot_general f32[2,8] f32[8,4]" in out
    text = "{w: f32[8,4], b: f32[4]}, x=f32[2,8], scale=0.5"
    status, out, _ = ran(capsys, "diff", "a_model.py:dense", "--args", text)
    assert status == 0 and "dot_general f32[2,8] f32[8,4]" in out


def test_warnings_are_a_line(model, capsys):
    status, _, err = ran(
        capsys, "diff", "a_model.py:loss", "--args", SHAPES, "--policy", "AlwaysF32"
    )
    assert (status, err) == (0, "")
    (model.parent / "b_model.py").write_text(
        "import jax.numpy as jnp\ndef f(x): return jnp.sin(x)\n"
    )
    status, _, err = ran(capsys, "diff", "b_model.py:f", "--args", "f32[3]")
    assert status == 0
    assert err == "precpass: AutoMixedBf16 lowered nothing in f: it has no products\n"
