"""Which leaves of arguments are static by themselves (`refusal`), and what an object holds."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import gc
import inspect
import operator
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np

from precpass.jaxpr.weak import WeakIdMap

__all__ = ["found_in", "refusal"]

_WHAT_TO_DO = (
    "Register its class as a pytree (jax.tree_util.register_dataclass, flax.struct.dataclass, an "
    "equinox.Module), give its arrays as arguments, filter it with its own library "
    "(equinox.partition, flax.nnx.split), or declare it by static_argnums or static_argnames if "
    "it never changes"
)


def refusal(x: Any) -> str | None:
    """Why a leaf that jit does not take cannot be static by itself; None if it can.

    A program is found again for every static leaf that equals that of its trace. So a leaf may be
    static if it has a hash, holds no array, and cannot change and still be equal: if it has an
    `__eq__` of its own, or is a function, a class, a module, a member of an enum or an object of
    JAX. A partial function, a bound method, a tuple, a frozenset and a frozen dataclass are what
    their parts are.

    Args:
        x: the leaf; the caller puts its name before the text.
    """
    if _is_foreign_array(x):
        return (
            f" of {type(x)}, an array of another library: convert it by jax.numpy.asarray or "
            "numpy.asarray"
        )
    try:
        hash(x)
    except TypeError as error:
        return (
            f" = {x!r} of {type(x)}: jit cannot trace it, and it cannot be static, since it has no "
            f"hash ({error}). Pass an array, a pytree of arrays, or something hashable (a tuple "
            "for a list, a frozenset for a set), or close over it"
        )
    where = _array_in(x)
    if where is not None:
        return (
            f" of {type(x)}, which holds arrays ({where.strip().removeprefix('.')}) and is not a "
            "pytree: as a static argument its arrays would be constants of the program, and "
            f"assigning others would go unnoticed. {_WHAT_TO_DO}"
        )
    changing = _changing_part(x, "")
    if changing is None:
        return None
    path, part = changing
    where = f", whose {path.lstrip('.')} is of {type(part)}" if path else ""
    how = "has no hash" if type(part).__hash__ is None else "is compared by identity"
    return (
        f" of {type(x)}{where}, which {how}: it could change, and the program of before would "
        f"still be used. {_WHAT_TO_DO}"
    )


def _is_array(x: Any) -> bool:
    if isinstance(x, np.ndarray):
        return x.dtype != object  # a mesh has an array of devices
    return isinstance(x, jax.Array) or _is_foreign_array(x)


def _is_foreign_array(x: Any) -> bool:
    if isinstance(x, (type, np.generic, np.ndarray, jax.Array)):
        return False
    return hasattr(type(x), "__array__") or hasattr(type(x), "__dlpack__")


_known = WeakIdMap[tuple[str | None]]()


def _array_in(x: Any) -> str | None:
    """The path to an array that a leaf holds; None for none. That of a function is remembered."""
    known = _known.get(x)
    if known is None:
        known = (found_in(x, _is_array),)
        if isinstance(x, types.FunctionType):
            known = _known.setdefault(x, known)
    return known[0]


# ---------------------------------------------------------------- by what a leaf is compared

_NEVER_CHANGE = (
    *(type, types.ModuleType, types.NoneType, types.EllipsisType, types.NotImplementedType),
    *(operator.itemgetter, operator.attrgetter, operator.methodcaller, np.ufunc, enum.Enum),
)
_BOUND = (types.MethodType, types.BuiltinMethodType, types.MethodWrapperType)


def _changing_part(x: Any, path: str) -> tuple[str, Any] | None:
    """The first part of a leaf that can change while the leaf stays equal, and its path."""
    if isinstance(x, _NEVER_CHANGE) or _is_of_jax(x):
        return None
    parts = _compared_parts(x)
    if parts is not None:
        found = (_changing_part(part, path + step) for step, part in parts)
        return next((part for part in found if part is not None), None)
    by_value = type(x).__eq__ is not object.__eq__
    return None if by_value and type(x).__hash__ not in (None, object.__hash__) else (path, x)


def _compared_parts(x: Any) -> Iterable[tuple[str, Any]] | None:
    """The parts that a value is made of, if it can never have others."""
    if isinstance(x, functools.partial):
        bound = {**dict(enumerate(x.args)), **x.keywords}
        return [(".func", x.func), *((f"({at})", part) for at, part in bound.items())]
    if isinstance(x, _BOUND):  # the `__self__` of a builtin is its module
        return [(".__self__", x.__self__)]
    if inspect.isroutine(x) or (callable(x) and hasattr(x, "__wrapped__")):
        return ()
    if isinstance(x, (tuple, frozenset)):
        return [(f"[{i}]", item) for i, item in enumerate(x)]
    if dataclasses.is_dataclass(x) and type(x).__dataclass_params__.frozen:  # pyright: ignore[reportAttributeAccessIssue] -- as `is_dataclass` says
        fields = dataclasses.fields(x)
        return [(f".{field.name}", getattr(x, field.name, None)) for field in fields]
    return None


def _is_of_jax(x: Any) -> bool:
    """Whether it is a device, a mesh, a sharding, a type or a jitted function: all are values."""
    return type(x).__module__.partition(".")[0] in ("jax", "jaxlib")


# ---------------------------------------------------------------- what an object holds

_LEAVES = (type, types.ModuleType, np.generic, np.dtype)
_EXACT_LEAVES = frozenset((str, bytes, int, float, complex, bool, types.NoneType, types.CodeType))
"""Types whose objects have no parts. A user's subclass of one may have attributes."""


def found_in(x: Any, test: Callable[[Any], bool]) -> str | None:
    """The path, in an object, to a value for which a test is true; None if there is none.

    Args:
        x: any object. Its attributes, items and closures are searched; modules, classes and
            objects of JAX are not.
        test: called with a value.

    Examples:
        >>> found_in(functools.partial(max, {"w": [np.zeros(3)]}), _is_array)
        ".args[0]['w'][0]"
    """
    todo, seen = [("", x)], set[int]()
    while todo:
        path, value = todo.pop()
        if type(value) in _EXACT_LEAVES or isinstance(value, _LEAVES) or id(value) in seen:
            continue
        if test(value):
            return path
        seen.add(id(value))
        if not _is_of_jax(value):
            todo += reversed([(path + step, part) for step, part in _parts(value)])
    return None


def _parts(x: Any) -> Iterator[tuple[str, Any]]:
    """What an object holds, and how that is written behind the object's name."""
    if isinstance(x, dict):
        yield from ((f"[{key!r}]", value) for key, value in x.items())
        return
    names: list[str] = []
    if isinstance(x, (list, tuple, set, frozenset)):
        yield from ((f"[{i}]", value) for i, value in enumerate(x))
    elif isinstance(x, types.FunctionType):
        for name, cell in zip(x.__code__.co_freevars, x.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # a variable may have no value yet
                yield f" closes over {name}", cell.cell_contents
        names = ["__defaults__", "__kwdefaults__"]
    elif isinstance(x, functools.partial):
        names = ["func", "args", "keywords"]
    elif isinstance(x, _BOUND):
        names = ["__self__"]
    else:
        slots = getattr(type(x), "__slots__", ())
        names = [slots] if isinstance(slots, str) else list(slots)
    yield from ((f".{name}", value) for name, value in getattr(x, "__dict__", {}).items())
    for name in names:
        with contextlib.suppress(AttributeError):  # a slot may have no value, or a private name
            yield f".{name}", getattr(x, name)
    if not isinstance(x, types.FunctionType):  # all else that this refers to are globals
        # what no name leads to, as the items of a deque
        yield from ((f" in a {type(x).__name__}", value) for value in gc.get_referents(x))
