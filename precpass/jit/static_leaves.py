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
from collections.abc import Callable, Iterator
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
_accepted = WeakIdMap[bool]()


def refusal(x: Any) -> str | None:
    """Why a leaf that jit does not take cannot be static by itself; None if it can.

    A program is found again for every static leaf that equals that of its trace. So a leaf may be
    static if it has a hash, nothing that it holds is an array, and nothing by which it is compared
    can change while it stays equal. The caller puts the leaf's name before the text.
    """
    if _accepted.get(x):
        return None
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
    changing = None
    for path, part, is_compared in _held(x):
        if _is_array(part):
            return (
                f" of {type(x)}, which holds arrays ({path.strip().removeprefix('.')}) and is not "
                "a pytree: as a static argument its arrays would be constants of the program, and "
                f"assigning others would go unnoticed. {_WHAT_TO_DO}"
            )
        if changing is None and is_compared and _can_change(part):
            changing = path, part
    if changing is None:
        if isinstance(x, types.FunctionType):  # a search in a large closure takes its time
            _accepted.setdefault(x, True)
        return None
    path, part = changing
    where = f", whose {path.lstrip('.')} is of {type(part)}" if path else ""
    how = "has no hash" if type(part).__hash__ is None else "is compared by identity"
    return (
        f" of {type(x)}{where}, which {how}: it could change, and the program of before would "
        f"still be used. {_WHAT_TO_DO}"
    )


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
    return next((path for path, part, _ in _held(x) if test(part)), None)


def _is_array(x: Any) -> bool:
    if isinstance(x, np.ndarray):
        return x.dtype != object  # a mesh has an array of devices
    return isinstance(x, jax.Array) or _is_foreign_array(x)


def _is_foreign_array(x: Any) -> bool:
    if isinstance(x, (type, np.generic, np.ndarray, jax.Array)):
        return False
    return hasattr(type(x), "__array__") or hasattr(type(x), "__dlpack__")


_BOUND = (types.MethodType, types.BuiltinMethodType, types.MethodWrapperType)
# What is compared by its parts, which it always has, or by identity and is always the same.
_NEVER_CHANGE = (
    *(type, types.ModuleType, types.NoneType, types.EllipsisType, types.NotImplementedType),
    *(operator.itemgetter, operator.attrgetter, operator.methodcaller, np.ufunc, enum.Enum),
    *(tuple, frozenset, functools.partial, *_BOUND),
)


def _can_change(x: Any) -> bool:
    """Whether an object may change, apart from its parts, and still equal what it was."""
    is_function = inspect.isroutine(x) or (callable(x) and hasattr(x, "__wrapped__"))
    if is_function or isinstance(x, _NEVER_CHANGE) or _is_frozen(x) or _is_of_jax(x):
        return False
    is_by_value = type(x).__eq__ is not object.__eq__
    return not is_by_value or type(x).__hash__ in (None, object.__hash__)


def _is_frozen(x: Any) -> bool:
    parameters = getattr(type(x), "__dataclass_params__", None)
    return parameters is not None and parameters.frozen


def _is_of_jax(x: Any) -> bool:
    """Whether it is a device, a mesh, a sharding, a type or a jitted function: all are values."""
    return type(x).__module__.partition(".")[0] in ("jax", "jaxlib")


# ---------------------------------------------------------------- what an object holds

_LEAVES = (type, types.ModuleType, np.generic, np.dtype)
_EXACT_LEAVES = frozenset((str, bytes, int, float, complex, bool, types.NoneType, types.CodeType))
"""Types whose objects have no parts. A user's subclass of one may have attributes."""


def _held(x: Any) -> Iterator[tuple[str, Any, bool]]:
    """An object and all that it holds: path, value, and whether the object is compared by it."""
    todo, seen = [("", x, True)], set[tuple[int, bool]]()
    while todo:
        path, value, is_compared = todo.pop()
        is_leaf = type(value) in _EXACT_LEAVES or isinstance(value, _LEAVES)
        if is_leaf or (id(value), is_compared) in seen:
            continue
        yield path, value, is_compared
        seen.add((id(value), is_compared))
        if not _is_of_jax(value):
            parts = [(path + s, part, is_compared and c) for s, part, c in _parts(value)]
            todo += reversed(parts)


def _parts(x: Any) -> Iterator[tuple[str, Any, bool]]:
    """What an object holds, how that is written behind its name, and if the object equals by it."""
    if isinstance(x, dict):
        yield from ((f"[{key!r}]", value, False) for key, value in x.items())
        return
    names: list[str] = []
    fields = {field.name for field in dataclasses.fields(x)} if _is_frozen(x) else set[str]()
    if isinstance(x, (list, tuple, set, frozenset)):
        is_fixed = isinstance(x, (tuple, frozenset))
        yield from ((f"[{i}]", value, is_fixed) for i, value in enumerate(x))
    elif isinstance(x, types.FunctionType):
        for name, cell in zip(x.__code__.co_freevars, x.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # a variable may have no value yet
                yield f" closes over {name}", cell.cell_contents, False
        names = ["__defaults__", "__kwdefaults__"]
    elif isinstance(x, functools.partial):
        yield ".func", x.func, True
        yield from ((f".args[{i}]", value, True) for i, value in enumerate(x.args))
        yield from ((f".keywords[{key!r}]", value, True) for key, value in x.keywords.items())
    elif isinstance(x, _BOUND):  # the `__self__` of a builtin is its module
        yield ".__self__", x.__self__, True
    else:
        slots = getattr(type(x), "__slots__", ())
        names = [slots] if isinstance(slots, str) else list(slots)
    for name, value in getattr(x, "__dict__", {}).items():
        yield f".{name}", value, name in fields
    for name in names:
        with contextlib.suppress(AttributeError):  # a slot may have no value, or a private name
            yield f".{name}", getattr(x, name), name in fields
    if not isinstance(x, types.FunctionType):  # all else that this refers to are globals
        # what no name leads to, as the items of a deque
        yield from ((f" in a {type(x).__name__}", value, False) for value in gc.get_referents(x))
