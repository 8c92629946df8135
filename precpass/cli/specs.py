"""Arguments as text: `f32[8,128], {w: i32[8]}, scale=0.5` read into shapes, arrays and numbers."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from precpass import jaxpr as ir

__all__ = ["DTYPES", "drawn", "parse_args"]

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
"""The dtypes by their names in text."""

_TOKEN = re.compile(r"""\s*(?:(\w+\s*\[[^\]]*\])|('[^']*'|"[^"]*")|([\w.+-]+)|(.))""")


def parse_args(text: str) -> tuple[list[Any], dict[str, Any]]:
    """The arguments that a text stands for.

    An argument is a dtype and a shape, "f32[8,128]" or "f32[]"; a Python number or string,
    True, False or None, which stay what they are; a tuple "(..., ...)", a list
    "[..., ...]" or a dict "{name: ..., ...}" of these. "name=" before one makes it a
    keyword argument.

    Returns:
        The positional arguments and the others; arrays as `jax.ShapeDtypeStruct`s.

    Raises:
        ValueError: for a text that does not read; it says which argument and how.

    Example:
        >>> parse_args("f32[2,3], {n: 4}, flag=True")
        ([ShapeDtypeStruct(shape=(2, 3), dtype=float32), {'n': 4}], {'flag': True})
    """
    return _Reader(text).arguments()


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
        while self.peek() != "}":
            name = self.next().strip("'\"")
            if self.next() != ":":
                self.fail(f"':' is missing behind {name!r}")
            yield name, self.value()
            if self.peek() == ",":
                self.next()
            elif self.peek() != "}":
                self.fail("'}' is missing")
        self.next()

    def array(self, token: str) -> Any:
        name, _, sizes = token.rstrip("]").partition("[")
        name = name.strip()
        if name not in DTYPES:
            self.fail(f"{token!r}: no dtype {name!r}; legal are {', '.join(DTYPES)}")
        dims = [size.strip() for size in sizes.split(",") if size.strip()]
        if not all(dim.isdigit() for dim in dims):
            self.fail(f"{token!r}: a shape is whole numbers, such as {name}[8,128]")
        dtype = np.dtype(DTYPES[name])
        if dtype.itemsize == 8 and dtype.kind in "fiu" and not ir.in_x64():
            self.fail(f"{token!r} needs x64: set JAX_ENABLE_X64=1")
        return jax.ShapeDtypeStruct(tuple(map(int, dims)), dtype)

    def fail(self, why: str) -> NoReturn:
        raise ValueError(
            f"argument {self.number} of {self.text!r}: {why}. Write --args such as "
            '"f32[8,128], {w: i32[8]}, scale=0.5"'
        )


def _tokens(text: str) -> Iterator[str]:
    for found in _TOKEN.finditer(text.strip()):
        yield next(group for group in found.groups() if group is not None).strip()


def drawn(tree: Any, seed: int = 0) -> Any:
    """Arrays in the place of shapes.

    Floats and complex numbers are drawn from the normal distribution, integers are 0
    and 1, which are positions in any array.
    """
    rng = np.random.default_rng(seed)

    def array(x: Any) -> Any:
        if not isinstance(x, jax.ShapeDtypeStruct):
            return x
        if jnp.issubdtype(x.dtype, jnp.inexact):
            values = rng.standard_normal(x.shape)
            if jnp.issubdtype(x.dtype, jnp.complexfloating):
                values = values + 1j * rng.standard_normal(x.shape)
        else:
            values = rng.integers(0, 2, x.shape)
        return jnp.asarray(values, x.dtype)

    return jax.tree.map(array, tree)
