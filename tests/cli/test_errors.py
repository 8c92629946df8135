"""Whose an error is, and what exit status and text it has; what the user's code prints."""

import functools
import io
import json
import os
import sys
import sysconfig

import jax
import jax.numpy as jnp
import pytest

import precpass
from precpass.cli import commands, errors, main
from tests.support.command_line import SHAPES, ran, written


@pytest.fixture
def model(tmp_path, monkeypatch):
    yield from written(tmp_path, monkeypatch)


def module(model, name, text):
    path = model.parent / f"{name}.py"
    path.write_text(text)
    return f"{name}.py"


# ---------------------------------------------------------------- whose a file is


def test_only_what_stands_in_a_folder_is_of_the_package():
    whose = errors._whose
    package = os.path.dirname(precpass.__file__)
    stdlib = sysconfig.get_path("stdlib")
    assert whose(os.path.join(package, "view", "diff.py")) == "own"
    for name in (jax.__file__, jax.lax.__file__, functools.__file__, jnp.__file__):
        assert whose(name) == ""
    for name in (
        f"{package}_model.py",
        os.path.join(os.path.dirname(package), "precpass_x", "a.py"),
        os.path.dirname(jax.__file__) + "typing/_array_types.py",
        os.path.join(stdlib, "site-packages", "flax", "linen.py"),
        os.path.join(stdlib, "dist-packages", "flax.py"),
        __file__,
    ):
        assert whose(name) == "user", name


def test_a_file_that_is_named_like_the_package_is_the_users(model, capsys):
    name = module(model, "precpass_x", "def f(x):\n    raise ValueError('mine')\n")
    status, out, err = ran(capsys, "explain", f"{name}:f", "--args", "f32[3]")
    assert (status, out) == (3, "")
    assert "raise ValueError('mine')" in err and err.endswith("ValueError: mine\n")


# ---------------------------------------------------------------- bugs, and refusals


def fails_with(monkeypatch, fail):
    def explain(*_, **__):
        return lambda *args: fail()

    monkeypatch.setattr(commands, "explain", explain)


@pytest.mark.parametrize(
    "fail",
    [
        lambda: {}["a key"],
        lambda: list(zip([1], [], strict=True)),
        lambda: jnp.ones(3) @ jnp.ones(4),
        lambda: exec("assert False, 'an assumption'"),
    ],
    ids=["KeyError", "ValueError", "TypeError", "AssertionError"],
)
def test_an_error_of_the_package_has_its_traceback_and_a_status_of_its_own(
    fail, model, capsys, monkeypatch
):
    fails_with(monkeypatch, fail)
    # these lambdas stand for the package's own code
    monkeypatch.setattr(errors, "_OWN", os.path.dirname(precpass.__file__) + os.sep)
    whose = errors._whose
    monkeypatch.setattr(errors, "_whose", lambda f: "own" if f == __file__ else whose(f))
    status, out, err = ran(capsys, "explain", "a_model.py:loss", "--args", SHAPES)
    assert (status, out) == (4, "")
    assert err.startswith("Traceback (most recent call last):\n") and "cli/commands.py" in err
    assert "a bug in precpass" in err and "a_model.py:loss" in err


def test_what_the_package_refuses_in_words_has_no_traceback(model, capsys):
    text = "def f(i):\n    return i + 1\n\n\nasync def g(x):\n    return x\n"
    name = module(model, "ints", text)
    status, out, _ = ran(capsys, "explain", f"{name}:f", "--args", "i32[3]")
    assert status == 0 and "It has no matrix products" in out
    status, _, err = ran(capsys, "explain", f"{name}:g", "--args", "f32[3]")
    assert status == 2 and "whose body runs after its trace has ended" in err
    assert "Traceback" not in err


def test_what_the_users_code_is_refused_shows_its_line(model, capsys):
    text = "import precpass as pp\n\n\ndef f(x):\n    with pp.keep('f7'):\n        return x @ x\n"
    name = module(model, "kept", text)
    status, _, err = ran(capsys, "explain", f"{name}:f", "--args", "f32[3,3]")
    assert status == 3
    assert (
        "with pp.keep('f7'):" in err and "unknown precision 'f7'" in err and "context.py" not in err
    )


def test_an_error_that_jax_raises_of_the_users_function_is_the_users(model, capsys):
    """No line of a user's file: JAX calls nothing of the user's before it raises."""
    text = "import jax\n\nvectors = jax.grad(lambda x: x)\nsoftmax = jax.nn.softmax\n"
    name = module(model, "wrapped", text)
    status, _, err = ran(capsys, "explain", f"{name}:vectors", "--args", "f32[3]")
    assert status == 3 and "Gradient only defined for scalar-output functions" in err
    assert "a bug in precpass" not in err
    status, _, err = ran(capsys, "explain", "jax.numpy:dot", "--args", "f32[3], f32[4]")
    assert status == 3 and "a bug in precpass" not in err


def test_the_causes_of_the_users_error_are_shown(model, capsys):
    text = (
        "def f(x):\n    try:\n        {}['a']\n    except KeyError as error:\n"
        "        raise RuntimeError('mine') from error\n"
    )
    status, _, err = ran(
        capsys, "explain", f"{module(model, 'caused', text)}:f", "--args", "f32[3]"
    )
    assert status == 3 and err.index("KeyError: 'a'") < err.index("RuntimeError: mine")
    assert "jax/_src" not in err and "precpass/" not in err


@pytest.mark.parametrize(
    "given, why",
    [
        (["--args", "f32[3]"], "loss(w, x) was given (f32[3]): missing a required"),
        ([], "loss(w, x) was given (): missing a required argument: 'w'"),
        (["--args", "f32[3], y=f32[3]"], "(f32[3], y=f32[3]): missing a required argument"),
        (["--example", "keywords"], "(params=dict, x=f32[2,8]): missing a required argument: 'w'"),
    ],
)
@pytest.mark.parametrize("name", ["explain", "check"])
def test_arguments_that_the_function_does_not_take(name, given, why, model, capsys):
    more = ["--expect", "dot_general=bf16"] if name == "check" else []
    status, _, err = ran(capsys, name, "a_model.py:loss", *given, *more)
    assert status == 2 and why in err and "--args or --example" in err
    assert len(err.splitlines()) == 1


# ---------------------------------------------------------------- while it is imported


@pytest.mark.parametrize(
    "text, said",
    [
        ("def f(x:\n", "SyntaxError"),
        ("import sys\nsys.exit(0)\n", "SystemExit: 0"),
        ("raise SystemExit('mine')\n", "SystemExit: mine"),
        ("import no_such_dependency\n", "No module named 'no_such_dependency'"),
        ("1 / 0\n", "1 / 0"),
    ],
)
@pytest.mark.parametrize("target", ["bad.py:f", "bad:f"])
def test_what_the_module_raises_is_the_users(target, text, said, model, capsys):
    module(model, "bad", text)
    status, out, err = ran(capsys, "explain", target, "--args", "f32[3]")
    assert (status, out) == (3, "")
    assert said in err and "precpass/" not in err and "importlib" not in err


def test_an_interrupt_is_no_traceback(model, capsys):
    name = module(model, "slow", "raise KeyboardInterrupt\n")
    status, out, err = ran(capsys, "explain", f"{name}:f")
    assert (status, out, err) == (130, "", "precpass: interrupted\n")


def test_what_an_example_raises_is_the_users(model, capsys):
    text = "def f(x):\n    return x\n\n\ndef example():\n    raise LookupError('mine')\n"
    name = module(model, "examples", text)
    status, _, err = ran(capsys, "explain", f"{name}:f", "--example", "example")
    assert status == 3 and "raise LookupError('mine')" in err
    status, _, err = ran(capsys, "explain", f"{name}:f", "--example", "f")
    assert status == 2 and "--example f: it is called without arguments, and it is f(x)" in err


# ---------------------------------------------------------------- what is printed


PRINTS = """
import jax.numpy as jnp
import warnings

print("imported")


def f(x):
    print("traced")
    warnings.warn("the user's own", DeprecationWarning)
    return x @ x


def example():
    print("made")
    return jnp.full((3, 3), jnp.nan)
"""


def test_what_the_users_code_prints_is_no_part_of_the_report(model, capsys):
    name = module(model, "prints", PRINTS)
    with pytest.warns(DeprecationWarning, match="the user's own"):
        status, out, err = ran(capsys, "explain", f"{name}:f", "--example", "example", "--json")
    assert status == 0 and json.loads(out)["verdict"]["after"]["low"] == 1
    assert [line for line in err.splitlines() if "precpass" not in line][:2] == ["imported", "made"]
    assert "traced" in err


def test_json_is_json_where_numbers_are_not(model, capsys):
    name = module(model, "prints", PRINTS)

    def no_constant(text):
        raise ValueError(text)

    with pytest.warns(DeprecationWarning):
        given = ["--example", "example", "--policies", "c=bf16", "--rounds", "0", "--json"]
        status, out, _ = ran(capsys, "compare", f"{name}:f", *given)
    assert status == 0
    json.loads(out, parse_constant=no_constant)
    with pytest.warns(DeprecationWarning):
        given = ["--example", "example", "--tolerance", "0.1", "--json"]
        status, out, _ = ran(capsys, "bisect", f"{name}:f", *given)
    json.loads(out, parse_constant=no_constant)


def test_a_reader_that_goes_away_is_none_of_an_error(model, capsys, monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        status = main(["explain", "a_model.py:grad", "--args", SHAPES])
    assert (status, capsys.readouterr().err) == (141, "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device that Linux has")
def test_a_full_disk_is_an_error(model, capsys, monkeypatch):
    with open("/dev/full", "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        status = main(["explain", "a_model.py:grad", "--args", SHAPES])
    assert status == 2
    assert capsys.readouterr().err.startswith("precpass: the report cannot be written: ")


def test_a_terminal_without_the_characters_shows_others(model, monkeypatch):
    module(model, "greek", "def f(x):\n    return x @ x  # \u03bb\n")
    out = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, encoding="ascii"))
    assert main(["diff", "greek.py:f", "--args", "f32[3,3]"]) == 0
    assert b"x @ x  # \\u03bb" in out.getvalue()
