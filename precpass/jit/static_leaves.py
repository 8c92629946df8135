"""Which leaves of arguments are static by themselves, and which are refused.

A static leaf is a part of a compiled program, and the program is found again for any leaf that
equals it. So two leaves may be equal only if they make the same program: equality must be that of
values. An object that is compared by identity could change and still be found again, and then its
old arrays would be used without a word.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import gc
import operator
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from precpass.jaxpr.weak import WeakIdMap

__all__ = ["found_in", "is_array", "refusal"]

_WHAT_TO_DO = (
    "Register its class as a pytree (jax.tree_util.register_dataclass, flax.struct.dataclass, an "
    "equinox.Module), give its arrays as arguments, filter it with its own library "
    "(equinox.partition, flax.nnx.split), or declare it by static_argnums or static_argnames if "
    "it never changes"
)
_AS_A_CONSTANT = (
    "as a static argument its arrays would be constants of the program, and assigning others "
    "would go unnoticed"
)


def refusal(x: Any) -> str | None:
    """Why a leaf that jit does not take cannot be static by itself; None if it can.

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
    part = _part_without_value(x)
    if part is None:
        return None
    path, blamed = part
    array_path = found_in(blamed, is_array)
    if array_path is not None:
        where = (path + array_path).strip().removeprefix(".")
        return (
            f" of {type(x)}, which holds arrays ({where}) and is not a pytree: {_AS_A_CONSTANT}. "
            f"{_WHAT_TO_DO}"
        )
    where = f", whose {path.lstrip('.')} is of {type(blamed)}" if path else ""
    how = "has no hash" if type(blamed).__hash__ is None else "is compared by identity"
    return (
        f" of {type(x)}{where}, which {how}: it could change, and the program of before would "
        f"still be used. {_WHAT_TO_DO}"
    )


def is_array(x: Any) -> bool:
    """Whether a value is an array, of JAX, NumPy or another library."""
    if isinstance(x, np.ndarray):
        return x.dtype != object  # a mesh has an array of devices
    return isinstance(x, jax.Array) or _is_foreign_array(x)


def _is_foreign_array(x: Any) -> bool:
    if isinstance(x, (type, np.generic, np.ndarray, jax.Array)):
        return False
    return hasattr(type(x), "__array__") or hasattr(type(x), "__dlpack__")


# ---------------------------------------------------------------- values

# These compare by identity, but they exist once, or hold nothing that can change.
_UNIQUE = (
    *(type, types.ModuleType, types.NoneType, types.EllipsisType, types.NotImplementedType),
    *(operator.itemgetter, operator.attrgetter, operator.methodcaller),
)
_OF_JAX = ("jax", "jaxlib")
"""The packages whose hashable objects are values: devices, meshes, shardings, types of arrays."""
_FUNCTIONS = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.MethodWrapperType,
    types.ClassMethodDescriptorType,
    functools.partial,
    np.ufunc,
)


def _part_without_value(x: Any, path: str = "") -> tuple[str, Any] | None:
    """The first part of a leaf that is compared by identity and can change, and its path."""
    if is_array(x):
        return path, x
    if isinstance(x, _UNIQUE) or type(x).__module__.partition(".")[0] in _OF_JAX:
        return None
    if _is_function(x) and _arrays_of(x) is not None:
        return path, x
    parts = _immutable_parts(x)
    if parts is not None:
        paths = (_part_without_value(item, path + step) for step, item in parts)
        return next((part for part in paths if part is not None), None)
    by_value = type(x).__eq__ is not object.__eq__ and type(x).__hash__ is not None
    is_value = by_value and type(x).__hash__ is not object.__hash__
    if (is_value or isinstance(x, enum.Enum)) and found_in(x, is_array) is None:
        return None
    return path, x


def _immutable_parts(x: Any) -> Iterator[tuple[str, Any]] | None:
    """The parts that determine a value, if the value can never change them."""
    if isinstance(x, functools.partial):
        bound = {**dict(enumerate(x.args)), **x.keywords}
        return iter([(".func", x.func), *((f"({at})", part) for at, part in bound.items())])
    if isinstance(x, _BOUND):  # the `__self__` of a builtin is its module
        return iter([(".__self__", x.__self__)])
    if _is_function(x):
        return iter(())
    if isinstance(x, (tuple, frozenset)):
        items = [(f"[{i}]", item) for i, item in enumerate(x)]
        return iter([*items, *((f".{k}", v) for k, v in getattr(x, "__dict__", {}).items())])
    if dataclasses.is_dataclass(x) and type(x).__dataclass_params__.frozen:  # pyright: ignore[reportAttributeAccessIssue] -- as `is_dataclass` says
        names = (field.name for field in dataclasses.fields(x))
        return ((f".{name}", getattr(x, name, None)) for name in names)
    return None


def _is_function(x: Any) -> bool:
    """Whether a value is a function, or a wrapper by JAX or `functools.wraps` of one."""
    return isinstance(x, _FUNCTIONS) or (callable(x) and hasattr(x, "__wrapped__"))


_known = WeakIdMap[tuple[str | None]]()


def _arrays_of(fn: Any) -> str | None:
    """The path to an array that a function holds, in its closure or elsewhere; None for none."""
    known = _known.get(fn)
    if known is None:
        known = (found_in(fn, is_array),)
        if isinstance(fn, types.FunctionType):
            known = _known.setdefault(fn, known)
    return known[0]


# ---------------------------------------------------------------- what an object holds

_LEAVES = (type, types.ModuleType, np.generic, np.dtype)
_EXACT_LEAVES = frozenset((str, bytes, int, float, complex, bool, types.NoneType, types.CodeType))
"""Types whose objects have no parts. A user's subclass of one may have attributes."""


def found_in(x: Any, test: Callable[[Any], bool]) -> str | None:
    """The path, in an object, to a value for which a test is true; None if there is none.

    Args:
        x: any object. Its attributes, items and closures are searched; modules and classes are
            not.
        test: called with a value.

    Examples:
        >>> found_in(functools.partial(max, {"w": [np.zeros(3)]}), is_array)
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
        todo += reversed([(path + step, part) for step, part in _parts(value)])
    return None


_BOUND = (types.MethodType, types.BuiltinMethodType, types.MethodWrapperType)


def _parts(x: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(x, dict):
        yield from ((f"[{key!r}]", value) for key, value in x.items())
        return
    if isinstance(x, (list, tuple, set, frozenset)):
        yield from ((f"[{i}]", value) for i, value in enumerate(x))
    if isinstance(x, functools.partial):
        yield from ((f".{name}", getattr(x, name)) for name in ("func", "args", "keywords"))
    if isinstance(x, _BOUND):
        yield ".__self__", x.__self__
    if isinstance(x, types.MethodType):
        yield "", x.__func__
    if isinstance(x, types.FunctionType):
        yield from _parts_of_function(x)
    if isinstance(x, weakref.ref):
        yield "()", x()
    if isinstance(x, np.ndarray):  # of objects
        yield from ((f"[{i}]", value) for i, value in enumerate(x.flat))
    yield from ((f".{name}", value) for name, value in getattr(x, "__dict__", {}).items())
    if isinstance(x, types.FunctionType):  # all else it refers to are globals
        return
    yield from _parts_in_slots(x)
    # What no name leads to: the items of a deque, slots with private names.
    yield from ((f" in a {type(x).__name__}", value) for value in gc.get_referents(x))


def _parts_of_function(x: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(x.__code__.co_freevars, x.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # a variable may have no value yet
            yield f" closes over {name}", cell.cell_contents
    yield from ((f".{name}", getattr(x, name)) for name in ("__defaults__", "__kwdefaults__"))


def _parts_in_slots(x: Any) -> Iterator[tuple[str, Any]]:
    for cls in type(x).__mro__:
        slots = vars(cls).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__"):
                with contextlib.suppress(AttributeError):  # a slot may have no value yet
                    yield f".{name}", getattr(x, name)
