"""Parses arguments from text, such as `f32[8,128], {w: i32[8]}, scale=0.5`."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["DTYPES", "drawn", "has_shapes", "parse_args"]

DTYPES: dict[str, Any] = {
    "f64": jnp.float64,
    "f32": jnp.float32,
    "bf16": jnp.bfloat16,
    "f16": jnp.float16,
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


def parse_args(text: str) -> tuple[list[Any], dict[str, Any]]:
    """The arguments that a text describes.

    An argument is a dtype and a shape, "f32[8,128]" or "f32[]" ("key[]" for a PRNG key); a
    Python number or string, True, False or None; a tuple
    "(..., ...)", a list "[..., ...]" or a dict "{name: ..., ...}" of these. "name=" before
    one makes it a keyword argument.

    Returns:
        The positional and the keyword arguments; arrays as `jax.ShapeDtypeStruct`s.

    Raises:
        ValueError: for a text that cannot be parsed; the message names the argument and why.

    Examples:
        >>> parse_args("f32[2,3], {n: 4}, flag=True")
        ([ShapeDtypeStruct(shape=(2, 3), dtype=float32), {'n': 4}], {'flag': True})
    """
    reader = _Reader(text)
    try:
        return reader.arguments()
    except RecursionError:
        reader.fail("it is nested too deeply")


_NO_SIZES = re.compile(r"""('[^']*'|"[^"]*")|(?<=\w)\s*\[\s*\]""")
"""The brackets of a shape without dimensions, which is no Python expression; not in a string."""


class _Reader:
    """Parses arguments as Python expressions, which they are except for the empty shape."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.source = f"_({_NO_SIZES.sub(lambda found: found[1] or '[()]', text)})"
        self.number = 1

    def arguments(self) -> tuple[list[Any], dict[str, Any]]:
        try:
            call = ast.parse(self.source, mode="eval").body
        except SyntaxError as error:
            before = self.source[2 : (error.offset or 3) - 1]
            self.number = 1 + re.sub(r"[\[({][^\])}]*[\])}]", "", before).count(",")
            self.fail(f"it does not read as Python does ({error.msg})")
        except (MemoryError, ValueError) as error:
            self.fail(str(error) or "it is nested too deeply")
        if not isinstance(call, ast.Call):
            self.fail("it is not a list of arguments")
        args, kwargs = list[Any](), dict[str, Any]()
        for self.number, node in enumerate(call.args, 1):
            args.append(self.value(node))
        for self.number, keyword in enumerate(call.keywords, 1 + len(args)):
            if keyword.arg is None:
                self.fail("`**` is not read")
            if keyword.arg in kwargs:
                self.fail(f"{keyword.arg!r} is given twice")
            kwargs[keyword.arg] = self.value(keyword.value)
        return args, kwargs

    def value(self, node: ast.expr) -> Any:
        match node:
            case ast.Tuple():
                return tuple(map(self.value, node.elts))
            case ast.List():
                return list(map(self.value, node.elts))
            case ast.Dict():
                return self.dictionary(node)
            case ast.Subscript(ast.Name(name), sizes):
                return self.array(node, name, sizes)
            case _:
                try:
                    return ast.literal_eval(node)
                except ValueError:
                    what = "no array, number, string, True, False or None"
                    self.fail(f"{self.shown(node)!r} is {what}")

    def dictionary(self, node: ast.Dict) -> dict[Any, Any]:
        values: dict[Any, Any] = {}
        for key, value in zip(node.keys, node.values, strict=True):
            match key:
                case ast.Name(name):
                    pass
                case ast.Constant(str() | int() as name):
                    pass  # {0: ...} may be a tree of layers
                case _:
                    self.fail(f"{self.shown(node)!r}: a key is a name, a text or a whole number")
            if name in values:
                self.fail(f"{name!r} is given twice")
            values[name] = self.value(value)
        return values

    def array(self, node: ast.expr, name: str, sizes: ast.expr) -> Any:
        dtype = self.dtype(name, self.shown(node))
        dims = [d.value for d in self.dims(sizes) if isinstance(d, ast.Constant)]
        if len(dims) < len(self.dims(sizes)) or not all(type(dim) is int for dim in dims):
            shown = self.shown(node)
            self.fail(f"{shown!r}: a shape is whole numbers, such as {name}[8,128]")
        return jax.ShapeDtypeStruct(tuple(dims), dtype)

    def dims(self, sizes: ast.expr) -> Sequence[ast.expr]:
        return sizes.elts if isinstance(sizes, ast.Tuple) else [sizes]

    def shown(self, node: ast.expr) -> str:
        return (ast.get_source_segment(self.source, node) or "").replace("[()]", "[]")

    def dtype(self, name: str, token: str) -> Any:
        if name == _KEY:
            return jax.eval_shape(lambda: jax.random.key(0)).dtype
        try:
            dtype = np.dtype(DTYPES.get(name, name))
            # Raises for dtypes that no JAX array has: object, datetime64.
            canonical = jax.eval_shape(lambda: jnp.zeros((), jax.dtypes.canonicalize_dtype(dtype)))
            canonical = canonical.dtype
        except TypeError:
            dtype = canonical = None
        # numpy's short names count bytes (i8 is int64), these names count bits.
        if dtype is None or (name not in DTYPES and dtype.name != name):
            self.fail(f"{token!r}: no dtype {name!r}; legal are {', '.join(DTYPES)}, {_KEY}")
        if canonical != dtype:
            self.fail(f"{token!r} would be {canonical}, as x64 is off: set JAX_ENABLE_X64=1")
        return dtype

    def fail(self, why: str) -> NoReturn:
        text = self.text if len(self.text) <= _LONG else f"{self.text[:_LONG]}..."
        raise ValueError(
            f"argument {self.number} of {text!r}: {why}. Write --args such as "
            '"f32[8,128], {w: i32[8]}, scale=0.5"'
        )


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
            return values_of(x)
        except (MemoryError, ValueError) as error:
            raise ValueError(f"{x.dtype}{list(x.shape)} cannot be drawn: {error}") from None

    def values_of(x: Any) -> Any:
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.split(jax.random.key(seed), x.shape)
        if jnp.issubdtype(x.dtype, jnp.inexact):
            values = rng.standard_normal(x.shape)
            if jnp.issubdtype(x.dtype, jnp.complexfloating):
                values = values + 1j * rng.standard_normal(x.shape)
        else:
            values = rng.integers(0, 2, x.shape)
        return jnp.asarray(values, x.dtype)

    return jax.tree.map(array, tree)


def has_shapes(tree: Any) -> bool:
    """Whether a tree has shapes in the place of arrays."""
    return any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(tree))
