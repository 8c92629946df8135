"""The leaves of arguments and results. One that `jax.jit` refuses is static, or handed through."""

from __future__ import annotations

import contextlib
import inspect
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.core

from precpass import jaxpr as ir
from precpass.jit.nnx import is_node, is_whole
from precpass.jit.static_leaves import found_in, refusal

__all__ = [
    "Declared",
    "HandedThrough",
    "Static",
    "arguments",
    "copied",
    "dynamic_leaves",
    "holds_modules",
    "needs_steps",
    "results",
    "unwrapped",
]

# ---------------------------------------------------------------- leaves

_NUMBERS = (bool, int, float, complex)


@jax.tree_util.register_static
class Static:
    """A leaf that jit refuses, as a part of the tree and so of jit's cache key."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Static) or type(self.value) is not type(other.value):
            return False
        return self.value is other.value or bool(self.value == other.value)

    def __hash__(self) -> int:
        return hash(self.value)


@jax.tree_util.register_static
class HandedThrough(Static):
    """A result that is no array, as it was when the function was traced."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)


def unwrapped(tree: Any) -> Any:
    """Arguments as the function takes them, or results as the caller gets them."""

    def whole(x: Any) -> Any:
        if isinstance(x, Static):
            return x.value
        return x.array() if isinstance(x, ir.QuantizedArray) else x

    wrappers = (Static, ir.QuantizedArray)
    return jax.tree.map(whole, tree, is_leaf=lambda x: isinstance(x, wrappers) or is_node(x))


def copied(tree: Any, *, arrays: bool = True) -> Any:
    """A tree with copies of its references, which a run may change, and of arrays to donate."""

    def copy(x: Any) -> Any:
        if isinstance(x, jax.core.Tracer):
            return x
        if isinstance(x, jax.Ref):
            return jax.new_ref(x[...])
        return x.copy() if arrays and isinstance(x, jax.Array) else x

    return jax.tree.map(copy, tree, is_leaf=is_node)


def _is_module(x: Any) -> bool:
    """Whether a value is an equinox module."""
    module = getattr(sys.modules.get("equinox"), "Module", None)  # None while it is loading
    return module is not None and isinstance(x, module)


def _is_taken(x: Any) -> bool:
    return isinstance(x, jax.Array) or ir.is_valid(x)


def _map_refused(fn: Callable[[Any, Any], Any], tree: Any) -> Any:
    """A tree with `fn(path, leaf)` in the place of each leaf that is not traced.

    jit refuses it; or it is a number in an equinox module, such as `Dropout.inference`, by which
    the module's own code branches, or a rate, which `equinox.filter_grad` would train.
    """

    def at(path: Any, x: Any) -> Any:
        if not _is_module(x):
            return x if is_node(x) or _is_taken(x) else fn(path, x)
        return jax.tree_util.tree_map_with_path(
            lambda inner, y: (
                fn((*path, *inner), y) if type(y) in _NUMBERS else at((*path, *inner), y)
            ),
            x,
            is_leaf=is_node,
        )

    return jax.tree_util.tree_map_with_path(at, tree, is_leaf=lambda x: is_node(x) or _is_module(x))


# ---------------------------------------------------------------- arguments


class Declared:
    """The arguments of a function that options of `jax.jit` declare static, found as jit does."""

    def __init__(self, fn: Callable[..., Any], options: Mapping[str, Any]) -> None:
        nums, names = options.get("static_argnums"), options.get("static_argnames")
        self.options = {
            k: v for k, v in options.items() if k in ("static_argnums", "static_argnames")
        }
        self._nums = (nums,) if isinstance(nums, int) else tuple(nums or ())
        self._names = {names} if isinstance(names, str) else set(names or ())
        self._parameters: list[inspect.Parameter] = []
        with contextlib.suppress(ValueError, TypeError):
            self._parameters = list(inspect.signature(fn).parameters.values())
        both = inspect.Parameter.POSITIONAL_OR_KEYWORD
        either = [(i, p.name) for i, p in enumerate(self._parameters) if p.kind is both]
        if nums is None:
            self._nums = tuple(i for i, name in either if name in self._names)
        elif names is None:
            count = len(self._parameters)
            positions = {i % count if count else i for i in self._nums}
            self._names = {name for i, name in either if i in positions}

    def map(
        self,
        fn: Callable[[Any, str], Any],
        args: Any,
        kwargs: Any,
        static: Callable[[Any], Any] = lambda x: x,
    ) -> tuple[Any, Any]:
        """The arguments as `fn(argument, its name)` gives them, those declared as `static` does."""
        at = {i % max(len(args), 1) for i in self._nums if i < len(args)}
        return (
            tuple(static(x) if i in at else fn(x, self._name(i)) for i, x in enumerate(args)),
            {k: static(x) if k in self._names else fn(x, k) for k, x in kwargs.items()},
        )

    def each(self, args: Any, kwargs: Any) -> list[Any]:
        """The arguments that are not declared static."""
        found: list[Any] = []
        self.map(lambda x, _: found.append(x), args, kwargs)
        return found

    def _name(self, position: int) -> str:
        for i, parameter in enumerate(self._parameters):
            if parameter.kind is inspect.Parameter.VAR_POSITIONAL and i <= position:
                return f"{parameter.name}[{position - i}]"
            if i == position:
                return parameter.name
        return f"args[{position}]"


def arguments(declared: Declared, name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments of the function `name` with static leaves wrapped in `Static`.

    Raises:
        TypeError: for a leaf that jit does not trace and that cannot be static.
    """

    def wrap(argument: Any, label: str) -> Any:
        def leaf(path: Any, x: Any) -> Any:
            why = refusal(x)
            if why is not None:
                raise TypeError(f"{name} was given {label}{jax.tree_util.keystr(path)}{why}")
            return Static(x)

        return _map_refused(leaf, argument)

    return declared.map(wrap, args, kwargs)


def holds_modules(tree: Any) -> bool:
    """Whether there are modules of flax nnx or equinox in a tree."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: is_whole(x) or _is_module(x))
    return any(is_node(x) or _is_module(x) for x in leaves)


def needs_steps(tree: Any) -> bool:
    """Whether a tree is not one that jit takes: it has modules, or leaves that are static."""
    return holds_modules(tree) or not all(map(_is_taken, jax.tree.leaves(tree)))


def dynamic_leaves(
    declared: Declared, name: str, args: Any, kwargs: Any, *, keeps_numbers: bool
) -> tuple[list[Any], Callable[[Sequence[Any]], tuple[Any, Any]]]:
    """The leaves of arguments that are traced, and a function that replaces them.

    It gives the arguments that are declared static as a `Static`, since JAX compares static
    arguments by `==` inside a trace. If it `keeps_numbers`, as under `jax.disable_jit`, Python's
    numbers are not traced.
    """
    wrapped = arguments(declared, name, args, kwargs)
    given = declared.map(lambda x, _: x, *wrapped, static=Static)
    leaves, tree = jax.tree.flatten(given)
    kept = _NUMBERS if keeps_numbers else ()
    traced = [i for i, x in enumerate(leaves) if not isinstance(x, kept)]
    operands = [leaves[i] for i in traced]

    def put(values: Sequence[Any]) -> tuple[Any, Any]:
        new = dict(zip(traced, values, strict=True))
        return jax.tree.unflatten(tree, [new.get(i, Static(x)) for i, x in enumerate(leaves)])

    return [x if isinstance(x, jax.core.Tracer) else ir.as_operand(x) for x in operands], put


# ---------------------------------------------------------------- results

_SUSPENDED = (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)


def results(out: Any, name: str) -> tuple[Any, bool]:
    """The results with leaves that are no arrays wrapped in `HandedThrough`, and whether any is.

    Raises:
        TypeError: for a generator or coroutine, which would go on after its trace has ended, and
            for an object that holds arrays of the trace.
    """
    has_others = False

    def leaf(_path: Any, x: Any) -> Any:
        nonlocal has_others
        if isinstance(x, _SUSPENDED):
            raise TypeError(
                f"{name} returned a {type(x).__name__}, whose body would run after its trace has "
                "ended: return a list or a tuple of arrays"
            )
        path = found_in(x, lambda part: isinstance(part, jax.core.Tracer))
        if path is not None:
            raise TypeError(
                f"{name} returned an object of {type(x)} that is not a pytree and holds arrays of "
                f"the trace ({path.strip().removeprefix('.') or 'itself'}), which end with it: "
                "return the arrays, or register its class as a pytree "
                "(jax.tree_util.register_dataclass)"
            )
        has_others = True
        return HandedThrough(x)

    if isinstance(out, _SUSPENDED):  # pytree libraries may warn if they see one
        leaf((), out)
    return _map_refused(leaf, out), has_others
