"""Loads the user's function, and its arguments: `f32[8,128], {w: i32[8]}, scale=0.5`."""

from __future__ import annotations

import ast
import contextlib
import difflib
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Generator, Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from precpass.cli.errors import Raised, Refused, refusing
from precpass.policy.precision import FORMATS
from precpass.units import listed

__all__ = ["DTYPES", "arguments", "drawn", "load", "parse_args", "static_names", "unbound"]

_CANDIDATES = 8
"""The most functions that a message names."""


@contextlib.contextmanager
def _users_code() -> Generator[None]:
    """A context whose errors are the user's; a `SystemExit` in it must not end this process."""
    try:
        yield
    except (Exception, SystemExit) as error:
        raise Raised(error) from error


def load(target: str) -> tuple[Callable[..., Any], ModuleType]:
    """The function that `module:function` or `file.py:function` names, and its module.

    Raises:
        Refused: if there is no such function.
        Raised: if the module raises an error.
    """
    where, _, name = target.rpartition(":")
    if not where or not name:
        raise Refused(f"{target!r} names no function: write module:function or file.py:function")
    module = _file(where) if where.endswith(".py") else _module(where)
    return _attribute(module, name, where), module


def _file(where: str) -> ModuleType:
    with refusing():
        open(where).close()
    path = Path(where).resolve()
    folder, name = path.parent, path.stem
    while (folder / "__init__.py").is_file():
        # A file in a package is imported as its module, so that its relative imports work.
        folder, name = folder.parent, f"{folder.name}.{name}"
    # as Python runs a script: its neighbours can be imported
    sys.path.insert(0, str(folder))
    if "." in name:
        with _users_code():
            module = importlib.import_module(name.removesuffix(".__init__"))
        if module.__file__ is None or Path(module.__file__).resolve() != path:
            raise Refused(f"{where} is {name}, and another package of that name is imported")
        return module
    known = sys.modules.get(name)
    if known is not None and getattr(known, "__file__", None) != str(path):
        name = str(path)  # another module, perhaps of Python, has the name
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    with _users_code():
        spec.loader.exec_module(module)
    return module


def _module(where: str) -> ModuleType:
    sys.path.insert(0, "")
    if where.startswith("."):
        raise Refused(f"{where!r} is relative: name the module from its package on")
    try:
        with _users_code():
            return importlib.import_module(where)
    except Raised as raised:
        # The module may exist and lack another one that it imports.
        name = getattr(raised.error, "name", None)
        lacks = isinstance(raised.error, ModuleNotFoundError) and f"{where}.".startswith(f"{name}.")
        if not lacks:
            raise
        raise Refused(f"there is no module {where!r}: name one, or a file by its path") from None


def _attribute(module: ModuleType, name: str, where: str) -> Any:
    target: Any = module
    for part in name.split("."):
        with _users_code():
            has = hasattr(target, part)
        if not has:
            names = [n for n in dir(target) if not n.startswith("_") and _is_function(target, n)]
            close = difflib.get_close_matches(part, names, n=3)
            rest = [n for n in sorted(names) if n not in close]
            known = listed([*close, *rest], _CANDIDATES) or "no functions"
            raise Refused(f"{where} has no {part!r}; it has {known}")
        target = getattr(target, part)
    if not callable(target):
        raise Refused(f"{where}:{name} is not a function: it is {type(target).__name__}")
    return target


def _is_function(holder: Any, name: str) -> bool:
    # An attribute's error here must not replace the one that is being worded.
    with contextlib.suppress(Exception):
        return callable(getattr(holder, name))
    return False


def arguments(
    text: str | None, example: str | None, module: ModuleType
) -> tuple[list[Any], dict[str, Any]]:
    """The arguments that a text describes, or that a function of the module returns.

    Such a function returns a tuple of the positional arguments, a dict of keyword arguments,
    or the only argument.
    """
    if example is None:
        with refusing():
            return parse_args(text or "")
    function = _attribute(module, example, module.__name__)
    if unbound(function, [], {}):
        called = f"{example}{_parameters(function)}"
        raise Refused(f"--example {example}: it is called without arguments, and it is {called}")
    with _users_code():
        result = function()
    if isinstance(result, dict) and all(isinstance(key, str) for key in result):
        return [], dict(result)
    # A NamedTuple is one argument, such as the state of an optimizer.
    return list(result) if type(result) is tuple else [result], {}


def static_names(
    names: Sequence[str], fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[str, ...]:
    """The names that --static gives, which are those of arguments that can be static."""
    if why := unbound(fn, args, kwargs):
        raise Refused(why)
    signature = _parameters(fn)
    bound = {} if signature is None else signature.bind(*args, **kwargs).arguments
    for name in names:
        if signature is not None and name not in signature.parameters:
            known = ", ".join(signature.parameters) or "none"
            raise Refused(f"--static: there is no argument {name!r}, but {known}")
        try:
            hash(bound.get(name))
        except TypeError:
            raise Refused(f"--static: {name} is not a constant, but {bound[name]!r}") from None
    return tuple(names)


def _parameters(fn: Callable[..., Any]) -> inspect.Signature | None:
    """The parameters of a function, as far as Python knows them."""
    try:
        return inspect.signature(fn)
    except (TypeError, ValueError):
        return None


def unbound(fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> str:
    """Why a function does not take some arguments; "" if it does, or if that is unknown."""
    if (signature := _parameters(fn)) is None:
        return ""
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        passed = [*map(_shown, args), *(f"{name}={_shown(x)}" for name, x in kwargs.items())]
        name = getattr(fn, "__name__", "the function")
        what = (
            "Give its arguments by --args or --example, which returns a tuple of arguments or a "
            "dict of keyword arguments"
        )
        if next(iter(signature.parameters), "") == "self":
            what = f"It is a method: name it by an instance, as in model.py:MODEL.{name}"
        return f"{name}{signature} was given ({', '.join(passed)}): {error}. {what}"
    return ""


def _shown(x: Any) -> str:
    if isinstance(x, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
        return jax.typeof(x).str_short(short_dtypes=True)
    return repr(x) if isinstance(x, bool | int | float | str) else type(x).__name__


# ---------------------------------------------------------------- arguments as text

DTYPES: dict[str, Any] = {
    **{str(precision): precision.dtype for precision in FORMATS},
    **{f"i{n}": np.dtype(f"int{n}") for n in (8, 16, 32, 64)},
    **{f"u{n}": np.dtype(f"uint{n}") for n in (8, 16, 32, 64)},
    "bool": np.dtype(bool),
    "c64": np.dtype(np.complex64),
    "c128": np.dtype(np.complex128),
}
"""The dtypes by their names in text; numpy's names, such as float8_e4m3fn, are also accepted."""

_LONG = 200
_KEY = "key"
"""A PRNG key, whose dtype only JAX knows."""
_NO_SIZES = re.compile(r"""('[^']*'|"[^"]*")|(?<=\w)\s*\[\s*\]""")
"""The brackets of a shape without dimensions, which is no Python expression; not in a string."""


def parse_args(text: str) -> tuple[list[Any], dict[str, Any]]:
    """The arguments that a text describes, which is Python but for the empty shape.

    An argument is a dtype and a shape, "f32[8,128]" or "f32[]" ("key[]" for a PRNG key); a Python
    number or string, True, False or None; a tuple "(..., ...)", a list "[..., ...]" or a dict
    "{name: ..., ...}" of these. "name=" before one makes it a keyword argument.

    Returns:
        The positional and the keyword arguments; arrays as `jax.ShapeDtypeStruct`s.

    Raises:
        ValueError: for a text that cannot be parsed; the message names the argument and why.

    Examples:
        >>> parse_args("f32[2,3], {n: 4}, flag=True")
        ([ShapeDtypeStruct(shape=(2, 3), dtype=float32), {'n': 4}], {'flag': True})
    """
    source = f"_({_NO_SIZES.sub(lambda found: found[1] or '[()]', text)})"
    args, kwargs = list[Any](), dict[str, Any]()
    try:
        call = ast.parse(source, mode="eval").body
        if not isinstance(call, ast.Call):
            raise ValueError("it is not a list of arguments")
        for node in call.args:
            args.append(_value(node))
        for keyword in call.keywords:
            if keyword.arg is None:
                raise ValueError("`**` is not read")
            if keyword.arg in kwargs:
                raise ValueError(f"{keyword.arg!r} is given twice")
            kwargs[keyword.arg] = _value(keyword.value)
        return args, kwargs
    except SyntaxError as error:
        before = source[2 : (error.offset or 3) - 1]
        args = re.sub(r"[\[({][^\])}]*[\])}]", "", before).split(",")[1:]
        why = f"it does not read as Python does ({error.msg})"
    except (RecursionError, MemoryError):
        why = "it is nested too deeply"
    except ValueError as error:
        why = str(error)
    shown = text if len(text) <= _LONG else f"{text[:_LONG]}..."
    raise ValueError(
        f"argument {1 + len(args) + len(kwargs)} of {shown!r}: {why}. Write --args such as "
        '"f32[8,128], {w: i32[8]}, scale=0.5"'
    )


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Tuple():
            return tuple(map(_value, node.elts))
        case ast.List():
            return list(map(_value, node.elts))
        case ast.Dict():
            return _dictionary(node)
        case ast.Subscript(ast.Name(name), sizes):
            dims = sizes.elts if isinstance(sizes, ast.Tuple) else [sizes]
            return _array(name, dims, _source(node))
        case _:
            try:
                return ast.literal_eval(node)
            except ValueError:
                what = "no array, number, string, True, False or None"
                raise ValueError(f"{_source(node)!r} is {what}") from None


def _source(node: ast.expr) -> str:
    return ast.unparse(node).replace("[()]", "[]")


def _dictionary(node: ast.Dict) -> dict[Any, Any]:
    values: dict[Any, Any] = {}
    for key, value in zip(node.keys, node.values, strict=True):
        match key:
            case ast.Name(name):
                pass
            case ast.Constant(str() | int() as name):
                pass  # {0: ...} may be a tree of layers
            case _:
                raise ValueError(f"{_source(node)!r}: a key is a name, a text or a whole number")
        if name in values:
            raise ValueError(f"{name!r} is given twice")
        values[name] = _value(value)
    return values


def _array(name: str, sizes: Iterable[ast.expr], shown: str) -> Any:
    dtype = _dtype(name, shown)
    dims = [size.value if isinstance(size, ast.Constant) else None for size in sizes]
    if not all(type(dim) is int for dim in dims):
        raise ValueError(f"{shown!r}: a shape is whole numbers, such as {name}[8,128]")
    return jax.ShapeDtypeStruct(tuple(dims), dtype)


def _dtype(name: str, shown: str) -> Any:
    if name == _KEY:
        return jax.eval_shape(lambda: jax.random.key(0)).dtype
    try:
        dtype = np.dtype(DTYPES.get(name, name))
        # Raises for dtypes that no JAX array has: object, datetime64.
        given = jax.eval_shape(lambda: jnp.zeros((), jax.dtypes.canonicalize_dtype(dtype))).dtype
    except TypeError:
        dtype = given = None
    # numpy's short names count bytes (i8 is int64), these names count bits.
    if dtype is None or (name not in DTYPES and dtype.name != name):
        raise ValueError(f"{shown!r}: no dtype {name!r}; legal are {', '.join(DTYPES)}, {_KEY}")
    if given != dtype:
        raise ValueError(f"{shown!r} would be {given}, as x64 is off: set JAX_ENABLE_X64=1")
    return dtype


def drawn(tree: Any, seed: int = 0) -> Any:
    """A tree with random arrays in the place of shapes.

    Floats and complex numbers are drawn from the normal distribution. Integers are 0 or
    1, which are valid indices of most arrays. PRNG keys are split off one key.

    Raises:
        ValueError: for a shape that does not fit into memory.
    """
    rng = np.random.default_rng(seed)

    def array(x: Any) -> Any:
        if not isinstance(x, jax.ShapeDtypeStruct):
            return x
        try:
            if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
                return jax.random.split(jax.random.key(seed), x.shape)
            is_complex = jnp.issubdtype(x.dtype, jnp.complexfloating)
            if jnp.issubdtype(x.dtype, jnp.inexact):
                values = rng.standard_normal(x.shape)
                values = values + 1j * rng.standard_normal(x.shape) if is_complex else values
            else:
                values = rng.integers(0, 2, x.shape)
            return jnp.asarray(values, x.dtype)
        except (MemoryError, ValueError) as error:
            raise ValueError(f"{x.dtype}{list(x.shape)} cannot be drawn: {error}") from None

    return jax.tree.map(array, tree)
