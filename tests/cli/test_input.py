"""What the command line is given: targets, arguments as text, policies and files; and errors."""

import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from precpass.cli import main, target as targets
from precpass.cli.target import DTYPES, drawn, parse_args
from tests.support.command_line import SHAPES, ran, written


@pytest.fixture
def model(tmp_path, monkeypatch):
    yield from written(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    "target, text",
    [
        ("a_model.py", "names no function: write module:function or file.py:function"),
        (":loss", "names no function"),
        ("none.py:loss", "file none.py does not exist"),
        ("no_such_module:loss", "there is no module 'no_such_module'"),
        ("a_model.py:number", "is not a function: it is int"),
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
        ("f32[3] f32[3]", "argument 1 of 'f32[3] f32[3]': it does not read as Python does"),
        ("(f32[3]", "'(' was never closed"),
        ("{w f32[3]}", "it does not read as Python does"),
        ("x=f32[3], f32[3]", "positional argument follows keyword argument"),
        ("nonsense", "'nonsense' is no array, number, string"),
        ("f32[\u00b2]", "invalid character"),
        ("f32[-1]", "a shape is whole numbers"),
        ("f32[3", "does not match opening parenthesis '['"),
        ("i4[3]", "no dtype 'i4'"),
        ("object[3]", "no dtype 'object'"),
        ("x=", "it does not read as Python does"),
        ("x=f32[3], x=f32[3]", "argument 2 of 'x=f32[3], x=f32[3]': 'x' is given twice"),
        ("{a: f32[3], a: f32[3]}", "'a' is given twice"),
        ("f32[3],,f32[3]", "argument 2 of"),
        ("(,)", "it does not read as Python does"),
        ("'abc", "unterminated string literal"),
        ("1+2", "'1 + 2' is no array"),
        ("__import__('os')", "\"__import__('os')\" is no array"),
        ("**w", "`**` is not read"),
        ("{1.5: f32[3]}", "a key is a name, a text or a whole number"),
        (") + (", "it is not a list of arguments"),
        ("(" * 5000, "too many nested parentheses"),
    ],
)
def test_arguments_that_do_not_read(text, why, model, capsys):
    status, _, err = ran(capsys, "explain", "a_model.py:loss", "--args", text)
    assert status == 2 and why in err and "Write --args such as" in err


def test_policies_and_files_that_are_none(model, capsys):
    given = ["a_model.py:loss", "--args", SHAPES]
    status, _, err = ran(capsys, "explain", *given, "--policy", "AutoMixd")
    assert status == 2 and "Did you mean 'AutoMixed'?" in err
    status, _, err = ran(capsys, "compare", *given, "--policies", "")
    assert status == 2 and "''" in err and "Legal are AlwaysF32" in err
    status, _, err = ran(capsys, "explain", *given, "--plan", "none.json")
    assert (status, err) == (2, "precpass: file none.json does not exist\n")
    for option, name in (("policy", "explain"), ("policies", "compare"), ("between", "diff")):
        status, _, err = ran(capsys, name, *given, f"--{option}", "none.json")
        assert status == 2 and f"--{option} none.json: a saved plan is given by --plan" in err
    (model.parent / "x.json").write_text("{}")
    status, _, err = ran(capsys, "check", *given, "--plan", "x.json")
    assert status == 2 and "x.json is not a plan of precpass" in err
    status, _, err = ran(capsys, "check", *given, "--expect", "dot_general")
    assert status == 2 and "write PATTERN=PRECISION" in err
    status, _, err = ran(capsys, "check", *given, "--expect", "no_scope=bf16")
    assert status == 2 and "no equation matches 'no_scope'" in err


def test_shapes_that_do_not_fit_show_the_users_error(model, capsys):
    status, _, err = ran(capsys, "explain", "a_model.py:loss", "--args", "f32[3,4], f32[5,6]")
    assert status == 3
    assert "a_model.py" in err and "contracting dimensions" in err and "precpass/" not in err


@pytest.mark.parametrize(
    "content, why",
    [
        (b'{"format": 1, "jax"', "is not a plan of precpass"),
        (b"\xff\xfe\x00", "is not a plan of precpass"),
        (b'{"format": 99}', "has format 99, and this precpass reads 1: update precpass"),
        (b'{"format": 1}', "is damaged"),
        (b"[" * 100_000, "is not a plan of precpass"),
        (None, "is a folder, and a file is needed"),
    ],
    ids=["truncated", "bytes", "newer", "empty", "deep", "directory"],
)
def test_files_that_are_no_plans(content, why, model, capsys):
    path = model.parent / "x.json"
    path.mkdir() if content is None else path.write_bytes(content)
    given = ["a_model.py:loss", "--args", SHAPES]
    for name in ("explain", "check"):
        status, out, err = ran(capsys, name, *given, "--plan", "x.json")
        assert (status, out) == (2, "") and why in err and "x.json" in err
        assert len(err.splitlines()) == 1


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read all")
def test_a_plan_that_may_not_be_read(model, capsys):
    path = model.parent / "x.json"
    path.touch(mode=0)
    status, _, err = ran(capsys, "check", "a_model.py:loss", "--args", SHAPES, "--plan", "x.json")
    assert status == 2 and "this user has no permission to open x.json" in err


def test_a_module_that_may_not_be_read(model, capsys, monkeypatch):
    def opened(path):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(targets, "open", opened, raising=False)  # root may read all
    status, _, err = ran(capsys, "explain", "a_model.py:loss", "--args", SHAPES)
    assert (status, err) == (2, "precpass: this user has no permission to open a_model.py\n")


def test_a_plan_of_another_program_is_refused(model, capsys):
    assert ran(capsys, "lock", "a_model.py:loss", "--args", SHAPES, "-o", "x.json")[0] == 0
    for name in ("explain", "check"):
        given = ["a_model.py:ranged", "--args", "f32[4,8], f32[8,4]", "--plan", "x.json"]
        status, _, err = ran(capsys, name, *given)
        assert status == 2 and "saved from another program (loss)" in err


@pytest.mark.parametrize("name", ["draw", "lock", "explain"])
@pytest.mark.parametrize(
    "output, why",
    [("no/such/x", "there is no folder no/such"), (".", ". is a folder, and a file is needed")],
)
def test_files_that_cannot_be_written(name, output, why, model, capsys):
    status, out, err = ran(capsys, name, "a_model.py:loss", "--args", SHAPES, "-o", output)
    assert (status, out) == (2, "") and why in err


# ---------------------------------------------------------------- options


@pytest.mark.parametrize(
    "line, why",
    [
        ("compare --policy c=f16", "compare takes --policies 'c=f16', not --policy"),
        ("compare --example example --seed 3", "--example gives arrays: leave it out"),
        ("diff --json --level lines", "--json has an entry for each equation"),
        ("diff --json --level jaxpr", "--json has an entry for each equation"),
        ("diff --json --between c=f16", "--between has no JSON"),
        ("diff --no-compile", "--no-compile is for a --target"),
        ("explain --no-compile", "without one nothing is compiled"),
        ("diff --bookkeeping", "--bookkeeping is of jaxprs: give --level jaxpr too"),
        ("diff --between c=f16 --level jaxpr", "give --level lines or --level equations"),
        ("explain --json --color always", "--json has no colours"),
        ("check", "check needs --plan FILE or --expect PATTERN=PRECISION"),
        ("draw --boxes 0", "at least one box is drawn"),
        ("bisect --tolerance -1", "--tolerance -1.0: an error is a finite number, 0 or above"),
        ("bisect --tolerance inf", "--tolerance inf: an error is a finite number"),
        ("bisect --tolerance 1 --budget 0", "--budget 0: bisect makes at least one run"),
        ("compare --rounds -1", "--rounds -1: a whole number, 0 for no times"),
        ("explain --output -", "--output '-' names no file"),
        ("lock --output=", "--output '' names no file"),
    ],
)
def test_options_that_would_say_nothing_are_refused_before_anything_is_imported(
    line, why, model, capsys
):
    name, *more = line.split()
    status, out, err = ran(capsys, name, "none.py:f", *more)
    assert (status, out) == (2, "") and why in err and "none.py" not in err


@pytest.mark.parametrize(
    "line, why",
    [
        ("explain --seed 3", "explain has no --seed 3: --seed is of compare, bisect"),
        ("bisect --tolerance 1 --color never", "--color is of explain, diff, audit"),
        ("lock --pol c=f16", "lock has no --pol c=f16"),
        ("diff f32[8]", "diff has no f32[8]: arguments of the function are given by --args"),
    ],
)
def test_options_of_other_commands_are_refused(line, why, model, capsys):
    name, *more = line.split()
    with pytest.raises(SystemExit) as left:
        main([name, "a_model.py:loss", *more])
    assert left.value.code == 2 and why in capsys.readouterr().err


def test_what_is_drawn_hangs_on_the_seed(model, capsys):
    given = ["a_model.py:loss", "--args", SHAPES, "--policies", "c=bf16", "--rounds", "0"]
    default, zero, one = (
        ran(capsys, "compare", *given, *more)[1] for more in ([], ["--seed", "0"], ["--seed", "1"])
    )
    assert default == zero != one
    status, _, err = ran(capsys, "compare", "a_model.py:loss", "--args", "2.0, 3.0", "--seed", "1")
    assert status == 2 and "there are none in --args" in err
    status, _, err = ran(capsys, "compare", "a_model.py:loss", "--args", "f32[99999999,99999999]")
    assert status == 2 and "float32[99999999, 99999999] cannot be drawn" in err


def test_an_example_that_needs_arguments_and_a_method_without_its_object(model, capsys):
    status, _, err = ran(capsys, "explain", "a_model.py:loss", "--example", "powers")
    assert status == 2 and "--example powers: it is called without arguments" in err
    assert "powers(x, n)" in err
    (model.parent / "methods.py").write_text(
        "class Model:\n    def step(self, x):\n        return x @ x\n"
    )
    status, _, err = ran(capsys, "explain", "methods.py:Model.step", "--args", "f32[4,4]")
    assert status == 2 and "step(self, x) was given (f32[4,4])" in err
    assert "It is a method: name it by an instance, as in model.py:MODEL.step" in err


def test_static_arguments_are_named(model, capsys):
    given = ["a_model.py:powers", "--args", "f32[4,4], 3"]
    status, _, err = ran(capsys, "explain", *given)
    assert status == 3 and "for _ in range(n)" in err and "is named by --static NAME" in err
    status, out, _ = ran(capsys, "explain", *given, "--static", "n")
    assert status == 0 and "3 of 3 matrix products run in bfloat16" in out
    more = ["--static", "n", "--expect", "dot_general=bf16*3"]
    assert ran(capsys, "check", *given, *more)[0] == 0
    status, _, err = ran(capsys, "explain", *given, "--static", "m")
    assert status == 2 and "there is no argument 'm', but x, n" in err
    args = ["--args", "f32[4,4], [3]", "--static", "n"]
    status, _, err = ran(capsys, "explain", "a_model.py:powers", *args)
    assert status == 2 and "n is not a constant, but [3]" in err


# ---------------------------------------------------------------- targets

OBJECTS = """
import functools
from typing import NamedTuple
import equinox as eqx
import jax
import jax.numpy as jnp
from flax import nnx


class Model:
    def step(self, x):
        return x @ x

    @staticmethod
    def static(x):
        return x @ x

    @classmethod
    def made(cls, x):
        return x @ x

    @property
    def broken(self):
        raise RuntimeError("mine")


class State(NamedTuple):
    w: object
    n: object


model = Model()
partial = functools.partial(jnp.matmul, jnp.ones((3, 3)))
linear = nnx.Linear(3, 3, rngs=nnx.Rngs(0))
mlp = eqx.nn.MLP(3, 3, 4, 1, key=jax.random.key(0))


def of_module(m, x):
    return m(x).sum()


def modules():
    return linear, jnp.ones((2, 3))


def of_state(state):
    return state.w @ state.w


def state():
    return State(jnp.ones((3, 3)), 1)


def noise(key, x):
    return jax.random.normal(key, x.shape) @ x


def layers(ws, x):
    return x @ ws[0] @ ws[1]
"""


@pytest.mark.release(keep=1)
@pytest.mark.parametrize(
    "name, more, products",
    [
        ("model.step", ["--args", "f32[3,3]"], 1),
        ("Model.static", ["--args", "f32[3,3]"], 1),
        ("Model.made", ["--args", "f32[3,3]"], 1),
        ("partial", ["--args", "f32[3,3]"], 1),
        ("linear", ["--args", "f32[2,3]"], 1),
        ("mlp", ["--args", "f32[3]"], 2),
        ("of_module", ["--example", "modules"], 1),
        ("of_state", ["--example", "state"], 1),
        ("noise", ["--args", "key[], f32[3,3]"], 1),
        ("layers", ["--args", "{0: f32[3,3], 1: f32[3,3]}, f32[2,3]"], 2),
    ],
)
def test_targets_and_arguments_of_all_kinds(name, more, products, model, capsys):
    (model.parent / "objects.py").write_text(OBJECTS)
    status, out, _ = ran(capsys, "explain", f"objects.py:{name}", *more)
    assert status == 0 and f"{products} of {products} matrix product" in out


def test_attributes_that_are_none_or_raise(model, capsys):
    (model.parent / "objects.py").write_text(OBJECTS)
    status, _, err = ran(capsys, "explain", "objects.py:model.broken", "--args", "f32[3,3]")
    assert status == 3 and "RuntimeError: mine" in err
    status, _, err = ran(capsys, "explain", "objects.py:model.stpe", "--args", "f32[3,3]")
    assert status == 2 and "has no 'stpe'; it has step" in err


@pytest.mark.parametrize(
    "name", ["with space/a b.py", "\u00fcber/mod\u00e8le.py", "random.py", "jax.py"]
)
def test_paths_with_spaces_and_other_characters_and_names_that_are_taken(name, model, capsys):
    import random

    path = model.parent / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("def f(x):\n    return x @ x\n")
    status, out, _ = ran(capsys, "diff", f"{name}:f", "--args", "f32[3,3]")
    assert status == 0 and f"{name}:2 f  return x @ x" in out
    assert sys.modules["random"] is random and sys.modules["jax"] is jax


def test_a_file_of_a_package_has_its_relative_imports(model, capsys):
    folder = model.parent / "a_package" / "inner"
    folder.mkdir(parents=True)
    for each in (folder, folder.parent):
        (each / "__init__.py").touch()
    (folder.parent / "base.py").write_text("def twice(x):\n    return 2 * x\n")
    text = "from ..base import twice\n\n\ndef f(x):\n    return twice(x) @ x\n"
    (folder / "model.py").write_text(text)
    for target in ("a_package/inner/model.py:f", "a_package.inner.model:f"):
        status, out, _ = ran(capsys, "explain", target, "--args", "f32[3,3]")
        assert status == 0 and "1 of 1 matrix product runs in bfloat16" in out


# ---------------------------------------------------------------- arguments as text


def test_every_dtype_reads():
    with jax.enable_x64(True):
        for name, dtype in DTYPES.items():
            ((x,), kwargs) = parse_args(f"{name}[2, 3]")
            assert (x.shape, x.dtype, kwargs) == ((2, 3), np.dtype(dtype), {})
    for name, given in (("f64", "float32"), ("c128", "complex64"), ("u64", "uint32")):
        why = f"would be {given}, as x64 is off: set JAX_ENABLE_X64=1"
        with pytest.raises(ValueError, match=why):
            parse_args(f"{name}[3]")
    assert parse_args("c64[3]")[0][0].dtype == np.complex64


def test_trees_numbers_and_names_read():
    args, kwargs = parse_args("(f32[], [i32[0]]), {'a b': 3, c: (1.5, None)}, 'text', n=-2, f=True")
    assert args[0][0].shape == () and args[0][1][0].shape == (0,)
    assert args[1:] == [{"a b": 3, "c": (1.5, None)}, "text"]
    assert kwargs == {"n": -2, "f": True}
    assert parse_args("") == ([], {})
    ((key, small, layers), _) = parse_args("key[4], float8_e4m3fn[2], {0: 1, '0': 2}")
    assert jnp.issubdtype(key.dtype, jax.dtypes.prng_key) and key.shape == (4,)
    assert small.dtype == jnp.float8_e4m3fn and layers == {0: 1, "0": 2}
    assert drawn(key).shape == (4,)


def test_what_is_drawn_has_the_shapes_and_is_the_same_again():
    given = {"x": jax.ShapeDtypeStruct((3, 4), jnp.bfloat16), "n": 3}
    given["i"] = jax.ShapeDtypeStruct((5,), jnp.int32)
    one, again, other = drawn(given), drawn(given), drawn(given, seed=1)
    assert one["x"].dtype == jnp.bfloat16 and one["n"] == 3
    assert set(np.asarray(one["i"])) <= {0, 1}
    np.testing.assert_array_equal(one["x"], again["x"])
    assert not np.array_equal(one["x"], other["x"])
