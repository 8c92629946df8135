"""Arguments as text: `f32[8,128], {w: i32[8]}, scale=0.5` read into shapes, arrays and numbers."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
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
"""The dtypes by their names in text; numpy's names, such as float8_e4m3fn, are read too."""

_LONG = 200
_KEY = "key"
"""A PRNG key, whose dtype only JAX knows."""

_TOKEN = re.compile(r"""\s*(?:(\w+\s*\[[^\]]*\])|('[^']*'|"[^"]*")|([\w.+-]+)|(.))""")


def parse_args(text: str) -> tuple[list[Any], dict[str, Any]]:
    """The arguments that a text stands for.

    An argument is a dtype and a shape, "f32[8,128]" or "f32[]" ("key[]" for a PRNG key); a
    Python number or string, True, False or None, which stay what they are; a tuple
    "(..., ...)", a list "[..., ...]" or a dict "{name: ..., ...}" of these. "name=" before
    one makes it a keyword argument.

    Returns:
        The positional arguments and the others; arrays as `jax.ShapeDtypeStruct`s.

    Raises:
        ValueError: for a text that does not read; it says which argument and how.

    Example:
        >>> parse_args("f32[2,3], {n: 4}, flag=True")
        ([ShapeDtypeStruct(shape=(2, 3), dtype=float32), {'n': 4}], {'flag': True})
    """
    reader = _Reader(text)
    try:
        return reader.arguments()
    except RecursionError:
        reader.fail("it is nested too deeply")


class _Reader:
    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = list(_tokens(text))
        self.at = 0
        self.number = 1

    def arguments(self) -> tuple[list[Any], dict[str, Any]]:
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        while self.peek():
            if self.at + 1 < len(self.tokens) and self.tokens[self.at + 1] == "=":
                name = self.next()
                self.next()
                if not name.isidentifier():
                    self.fail(f"{name!r} is no name of an argument")
                if name in kwargs:
                    self.fail(f"{name!r} is given twice")
                kwargs[name] = self.value()
            elif kwargs:
                self.fail("a positional argument stands behind one with a name")
            else:
                args.append(self.value())
            if self.peek() and self.next() != ",":
                self.fail("a comma was expected before what follows")
            self.number += 1
        return args, kwargs

    def peek(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def next(self) -> str:
        token = self.peek()
        self.at += 1
        return token

    def value(self) -> Any:
        token = self.next()
        if token == "(":
            return tuple(self.items(")"))
        if token == "[":
            return list(self.items("]"))
        if token == "{":
            return dict(self.pairs())
        if re.match(r"\w+\s*\[", token):
            return self.array(token)
        try:
            return ast.literal_eval(token)
        except (ValueError, SyntaxError):
            self.fail(f"{token!r} is no array, number, string, True, False or None")

    def items(self, end: str) -> Iterator[Any]:
        while self.peek() != end:
            yield self.value()
            if self.peek() == ",":
                self.next()
            elif self.peek() != end:
                self.fail(f"{end!r} is missing")
        self.next()

    def pairs(self) -> Iterator[tuple[Any, Any]]:
        seen = set[Any]()
        while self.peek() != "}":
            text = self.next()
            # {0: ...} is what a tree of layers may look like
            name = int(text) if text.isdecimal() else text.strip("'\"")
            if self.next() != ":":
                self.fail(f"':' is missing behind {name!r}")
            if name in seen:
                self.fail(f"{name!r} is given twice")
            seen.add(name)
            yield name, self.value()
            if self.peek() == ",":
                self.next()
            elif self.peek() != "}":
                self.fail("'}' is missing")
        self.next()

    def array(self, token: str) -> Any:
        name, _, sizes = token.rstrip("]").partition("[")
        name = name.strip()
        dtype = self.dtype(name, token)
        dims = [size.strip() for size in sizes.split(",") if size.strip()]
        if not all(dim.isdecimal() for dim in dims):
            self.fail(f"{token!r}: a shape is whole numbers, such as {name}[8,128]")
        return jax.ShapeDtypeStruct(tuple(map(int, dims)), dtype)

    def dtype(self, name: str, token: str) -> Any:
        if name == _KEY:
            return jax.eval_shape(lambda: jax.random.key(0)).dtype
        try:
            dtype = np.dtype(DTYPES.get(name, name))
            # raises for what is no array's: object, datetime64
            canonical = jax.eval_shape(lambda: jnp.zeros((), jax.dtypes.canonicalize_dtype(dtype)))
            canonical = canonical.dtype
        except TypeError:
            dtype = canonical = None
        # numpy's short names count bytes, i8 is int64, and those here bits
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


def _tokens(text: str) -> Iterator[str]:
    for found in _TOKEN.finditer(text.strip()):
        yield next(group for group in found.groups() if group is not None).strip()


def drawn(tree: Any, seed: int = 0) -> Any:
    """Arrays in the place of shapes.

    Floats and complex numbers are drawn from the normal distribution, integers are 0
    and 1, which are positions in any array, and PRNG keys are split off one.

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
    """Whether there are shapes in the place of arrays."""
    return any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(tree))
