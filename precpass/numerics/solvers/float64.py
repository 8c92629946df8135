"""Programs in float64, whether x64 is on around them or not."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Generator
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from precpass import jaxpr as ir

__all__ = ["in_float64", "own_array", "own_arrays"]

Tree = Any
_NARROW = {
    np.dtype(wide): np.dtype(narrow)
    for wide, narrow in (
        (np.float64, np.float32),
        (np.int64, np.int32),
        (np.uint64, np.uint32),
        (np.complex128, np.complex64),
    )
}


def in_float64(fn: Callable[..., Tree], *args: Tree) -> Tree:
    """`fn(*args)`, traced and run with x64 on.

    Args:
        fn: a function of pytrees of arrays that returns a pytree of arrays.
        args: its arguments.

    Returns:
        With x64 on, the result of `fn`. With x64 off and outside all transforms, 64-bit arrays are
        numpy arrays; inside `jax.jit` and other transforms, which no 64-bit value can leave, they
        are rounded to 32 bits.
    """
    if ir.in_x64():
        return fn(*args)
    leaves, structure = jax.tree.flatten(args)
    traced = [isinstance(x, jax.core.Tracer) for x in leaves]
    if not any(traced) and not ir.is_tracing():
        with jax.enable_x64(True):
            return jax.tree.map(_as_numpy, fn(*args))
    shape: list[Any] = []

    def flat(*given: Any) -> list[Any]:
        operands = iter(given)
        # A value that is no tracer keeps its 64 bits as a constant of the program.
        mixed = [next(operands) if t else own_array(x) for t, x in zip(traced, leaves, strict=True)]
        out, tree = jax.tree.flatten(fn(*jax.tree.unflatten(structure, mixed)))
        shape.append(tree)
        return [_narrowed(jnp.asarray(x)) for x in out]

    results = ir.float64(flat, [x for t, x in zip(traced, leaves, strict=True) if t])
    return jax.tree.unflatten(shape[-1], results)


def own_array(x: Any) -> Any:
    """A JAX array from a copy of a numpy array, which no program of another x64 mode holds.

    As long as a program holds a numpy array, JAX caches one canonical form of it, in the x64 mode
    in which it first saw the array, and uses that in programs of the other mode too.
    """
    return jnp.array(np.array(x)) if isinstance(x, np.ndarray | np.generic) else x


# It is part of jit's cache key: what is traced with copies is traced anew.
_traced_with = jax.make_user_context(None)


@contextlib.contextmanager
def own_arrays(fn: Callable[..., Any]) -> Generator[None]:
    """A context in which a function reads copies of numpy arrays, with float32 as float64.

    They stand in its closure, its globals, its defaults, and in the functions, objects, lists and
    dicts that it finds there. See `own_array` for what copies are needed for.
    """
    copies: dict[int, tuple[Any, Any]] = {}
    undo: list[Callable[[], None]] = []
    seen: dict[int, Any] = {}

    def own(x: Any) -> Any:
        if type(x) is np.ndarray:
            wide = {"float32": np.float64, "complex64": np.complex128}.get(x.dtype.name, x.dtype)
            return copies.setdefault(id(x), (x, x.astype(wide)))[1]
        if isinstance(x, tuple):
            new: list[Any] = [own(y) for y in x]
            same = all(y is z for y, z in zip(x, new, strict=True))
            return x if same else getattr(type(x), "_make", tuple)(new)
        if id(x) not in seen and not isinstance(x, types.ModuleType | type):
            seen[id(x)] = x
            for key, held, put in _held(x):
                new = own(held)
                if new is not held:
                    undo.append(functools.partial(put, key, held))
                    put(key, new)
        return x

    try:
        own(fn)
        with _traced_with(object()):
            yield
    finally:
        for restore in undo:
            restore()


def _held(x: Any) -> list[tuple[Any, Any, Callable[[Any, Any], None]]]:
    """What an object refers to: the key, the value, and how to put another one there."""
    if isinstance(x, types.MethodType):
        return _held(x.__func__) + _held(x.__self__)
    if isinstance(x, dict | list):
        pairs: Any = x.items() if isinstance(x, dict) else enumerate(x)
        return [(key, value, x.__setitem__) for key, value in pairs]
    space: dict[str, Any] = getattr(x, "__dict__", {})
    held: list[Any] = [(key, value, space.__setitem__) for key, value in space.items()]
    if isinstance(x, functools.partial):

        def rebind(_: Any, args: Any) -> None:
            vars(functools.partial)["__setstate__"](x, (x.func, args, x.keywords, space))

        return [*held, (None, x.args, rebind), *_held([x.func]), *_held(x.keywords)]
    if not isinstance(x, types.FunctionType) or ir.is_foreign(x.__code__.co_filename):
        return held
    cells = [cell for cell in x.__closure__ or () if cell != types.CellType()]
    attributes = [(c, "cell_contents") for c in cells] + [(x, "__defaults__")]
    held += [(key, getattr(of, key), functools.partial(setattr, of)) for of, key in attributes]
    read = x.__globals__.keys() & {name for code in _codes(x.__code__) for name in code.co_names}
    held += [(name, x.__globals__[name], x.__globals__.__setitem__) for name in read]
    return held + _held(x.__kwdefaults__ or {})


def _codes(code: types.CodeType) -> list[types.CodeType]:
    """The code of a function and of those that are defined in it."""
    inner = [
        c for const in code.co_consts if isinstance(const, types.CodeType) for c in _codes(const)
    ]
    return [code, *inner]


def _as_numpy(x: Any) -> Any:
    return np.asarray(x) if isinstance(x, jax.Array) and x.dtype in _NARROW else x


def _narrowed(x: Any) -> Any:
    return x.astype(_NARROW.get(x.dtype, x.dtype))
