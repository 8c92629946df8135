"""The command line: as a process with its exit statuses, and its commands one by one."""

import json
import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from precpass.cli import main
from precpass.cli.progress import Progress
from precpass.cli.specs import DTYPES, drawn, parse_args

MODEL = """
import jax
import jax.numpy as jnp
import precpass as pp


def loss(w, x):
    return jnp.square(jnp.tanh(x @ w)).mean()


grad = jax.grad(loss)
half = pp.auto_mixed(loss, policy="AutoMixed")


def example():
    return jnp.ones((64, 32)), jnp.ones((16, 64))


def keywords():
    return {"params": {"w": jnp.ones((8, 4)), "b": jnp.zeros(4)}, "x": jnp.ones((2, 8))}


def dense(params, x, scale=1.0):
    return scale * (x @ params["w"] + params["b"][None])


def broken(x):
    raise KeyError("the user's own")


def ranged(x, w):
    return jnp.exp(8 * (x @ w))


number = 3
"""
SHAPES = "f32[64,32], f32[16,64]"


@pytest.fixture
def model(tmp_path, monkeypatch):
    path = tmp_path / "a_model.py"
    path.write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield path
    sys.modules.pop("a_model", None)


def ran(capsys, *argv):
    """Exit status, standard output, standard error."""
    status = main(argv)
    said = capsys.readouterr()
    return status, said.out, said.err


# ---------------------------------------------------------------- as a process


def process(*argv, cwd=None):
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "precpass", *argv]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=env, check=False)


def test_the_exit_statuses_of_the_process(model):
    fine = process("explain", "a_model.py:grad", "--args", SHAPES, cwd=model.parent)
    assert (fine.returncode, fine.stderr) == (0, "")
    assert "2 of 2 products low" in fine.stdout and "\x1b[" not in fine.stdout
    raised = process("diff", "a_model.py:broken", "--args", "f32[3]", cwd=model.parent)
    assert raised.returncode == 3
    assert 'KeyError: "the user\'s own"' in raised.stderr
    assert 'raise KeyError("the user\'s own")' in raised.stderr
    assert "precpass/" not in raised.stderr and "jax/_src" not in raised.stderr


def test_the_exit_statuses_of_the_commands(model, capsys):
    expect = ["--example", "example", "--expect", "dot_general=f32"]
    status, out, _ = ran(capsys, "check", "a_model:loss", *expect)
    assert status == 1 and "in bf16, not f32 as 'dot_general' asks" in out
    status, out, err = ran(capsys, "explain", "a_model.py:lost")
    assert (status, out) == (2, "")
    assert err == "precpass: a_model.py has no 'lost'; it has loss\n"


def test_the_help_is_one_screen(capsys):
    with pytest.raises(SystemExit) as left:
        main(["--help"])
    assert left.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= 90
    for command in ("explain", "diff", "compare", "audit", "bisect", "draw", "lock", "check"):
        assert any(line.strip().startswith(command) for line in lines)


# ---------------------------------------------------------------- the commands


def test_explain_as_json(model, capsys):
    status, out, _ = ran(capsys, "explain", "a_model.py:grad", "--args", SHAPES, "--json")
    found = json.loads(out)
    assert status == 0 and found["verdict"]["after"]["low"] == 2


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
    assert status == 0 and out.endswith("1 of 5 equations differ\n")
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


def test_audit_is_zero_where_xla_does_as_planned(model, capsys):
    status, out, _ = ran(capsys, "audit", "a_model.py:loss", "--args", SHAPES, "--json")
    found = json.loads(out)
    assert status == (0 if found["ok"] else 1)
    assert found["products"]["planned"] == 1


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
    assert ran(capsys, "check", *given, "--policy", "p.json", "--plan", "p.json")[0] == 0
    status, out, _ = ran(capsys, "check", *given, "--plan", "p.json", "--policy", "c=f16", "--json")
    assert status == 1 and "not bf16 as it was saved" in json.loads(out)["problems"]
    status, _, err = ran(capsys, "check", *given)
    assert (
        status == 2 and err == "precpass: check needs --plan FILE or --expect PATTERN=PRECISION\n"
    )


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


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    "target, text",
    [
        ("a_model.py", "names no function: write module:function or file.py:function"),
        (":loss", "names no function"),
        ("none.py:loss", "there is no file none.py"),
        ("no_such_module:loss", "there is no module 'no_such_module'"),
        ("a_model.py:number", "is no function: it is int"),
        ("a_model.py:grad.none", "has no 'none'"),
    ],
)
def test_a_target_that_is_none(model, capsys, target, text):
    status, out, err = ran(capsys, "explain", target, "--args", SHAPES)
    assert (status, out) == (2, "") and err.startswith("precpass: ") and text in err


@pytest.mark.parametrize(
    "text, why",
    [
        ("f33[3]", "argument 1 of 'f33[3]': 'f33[3]': no dtype 'f33'; legal are f64, f32"),
        ("f32[3], f32[x]", "argument 2 of 'f32[3], f32[x]': 'f32[x]': a shape is whole numbers"),
        ("f32[3] f32[3]", "argument 1 of 'f32[3] f32[3]': a comma was expected"),
        ("(f32[3]", "')' is missing"),
        ("{w f32[3]}", "':' is missing behind 'w'"),
        ("x=f32[3], f32[3]", "a positional argument stands behind one with a name"),
        ("nonsense", "'nonsense' is no array, number, string"),
    ],
)
def test_arguments_that_do_not_read(text, why, model, capsys):
    status, _, err = ran(capsys, "explain", "a_model.py:loss", "--args", text)
    assert status == 2 and why in err and "Write --args such as" in err


def test_policies_and_files_that_are_none(model, capsys):
    given = ["a_model.py:loss", "--args", SHAPES]
    status, _, err = ran(capsys, "explain", *given, "--policy", "AutoMixd")
    assert status == 2 and "Did you mean 'AutoMixed'?" in err
    status, _, err = ran(capsys, "explain", *given, "--policy", "none.json")
    assert status == 2 and "none.json" in err
    (model.parent / "x.json").write_text("{}")
    status, _, err = ran(capsys, "check", *given, "--plan", "x.json")
    assert status == 2 and "x.json is no plan of precpass" in err
    status, _, err = ran(capsys, "check", *given, "--expect", "dot_general")
    assert status == 2 and "write PATTERN=PRECISION" in err
    status, _, err = ran(capsys, "check", *given, "--expect", "no_scope=bf16")
    assert status == 2 and "no equation matches 'no_scope'" in err


def test_an_error_while_the_module_is_imported_is_the_users(model, capsys):
    (model.parent / "c_model.py").write_text("import jax\nraise OSError('mine')\n")
    status, _, err = ran(capsys, "explain", "c_model.py:f")
    assert status == 3 and "OSError: mine" in err and "c_model.py" in err


def test_shapes_that_do_not_fit_show_the_users_error(model, capsys):
    status, _, err = ran(capsys, "explain", "a_model.py:loss", "--args", "f32[3,4], f32[5,6]")
    assert status == 3
    assert "a_model.py" in err and "contracting dimensions" in err and "precpass/" not in err


# ---------------------------------------------------------------- arguments as text


def test_every_dtype_reads():
    with jax.enable_x64(True):
        for name, dtype in DTYPES.items():
            ((x,), kwargs) = parse_args(f"{name}[2, 3]")
            assert (x.shape, x.dtype, kwargs) == ((2, 3), np.dtype(dtype), {})
    with pytest.raises(ValueError, match="needs x64: set JAX_ENABLE_X64=1"):
        parse_args("f64[3]")


def test_trees_numbers_and_names_read():
    args, kwargs = parse_args("(f32[], [i32[0]]), {'a b': 3, c: (1.5, None)}, 'text', n=-2, f=True")
    assert args[0][0].shape == () and args[0][1][0].shape == (0,)
    assert args[1:] == [{"a b": 3, "c": (1.5, None)}, "text"]
    assert kwargs == {"n": -2, "f": True}
    assert parse_args("") == ([], {})


def test_what_is_drawn_has_the_shapes_and_is_the_same_again():
    given = {"x": jax.ShapeDtypeStruct((3, 4), jnp.bfloat16), "n": 3}
    given["i"] = jax.ShapeDtypeStruct((5,), jnp.int32)
    one, again, other = drawn(given), drawn(given), drawn(given, seed=1)
    assert one["x"].dtype == jnp.bfloat16 and one["n"] == 3
    assert set(np.asarray(one["i"])) <= {0, 1}
    np.testing.assert_array_equal(one["x"], again["x"])
    assert not np.array_equal(one["x"], other["x"])


def test_what_takes_long_is_said_once_in_a_log(capsys):
    with Progress("at once", patience=30):
        pass
    assert capsys.readouterr().err == ""
    with Progress("it", patience=0.0) as progress:
        progress.say("the next thing")
        deadline = time.monotonic() + 20
        while not (said := capsys.readouterr().err) and time.monotonic() < deadline:
            time.sleep(0.01)
    assert said in ("precpass: it ...\n", "precpass: the next thing ...\n")
