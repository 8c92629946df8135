"""flax nnx modules, whose state updates cross a trace as under `nnx.jit`.

Nothing here imports flax: without it there is no module to be passed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

import jax
import jax.core

from precpass import jaxpr as ir

__all__ = [
    "Updated",
    "has_nodes",
    "is_node",
    "is_whole",
    "on_merged",
    "result_paths",
    "split",
    "updated",
    "without_modules",
]

_TAG = "precpass"
# The type of a function that maps a function over the arguments that are not declared static.
Map = Callable[[Callable[[Any, str], Any], Any, Any], tuple[Any, Any]]


class Updated(NamedTuple):
    """What a function of split modules returns: their new states, and its results."""

    modules: Any
    out: Any


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["state"], meta_fields=["graphdef"]
)
@dataclasses.dataclass
class _Split:
    graphdef: Any
    state: Any


def _nnx() -> Any:
    return sys.modules.get("flax.nnx")


def is_node(x: Any) -> bool:
    """Whether a value is a module, a variable or another node of nnx's graphs."""
    nnx = _nnx()
    # A reference is a node to nnx, but jit takes it. Containers and arrays are asked for most.
    if nnx is None or type(x) in (tuple, list, dict) or isinstance(x, (jax.Array, jax.Ref)):
        return False
    if isinstance(x, getattr(nnx.variablelib, "HijaxVariable", ())):
        return False  # a hi-type of its own, which jit takes unchanged
    return isinstance(x, nnx.Variable) or nnx.graph.is_graph_node(x)


def has_nodes(tree: Any) -> bool:
    """Whether a pytree holds any node. What `nnx.split` returns is plain data, as for `jax.jit`."""
    return bool(_nodes(tree))


def _nodes(tree: Any) -> list[Any]:
    return [x for x in jax.tree.leaves(tree, is_leaf=is_whole) if is_node(x)]


def is_whole(x: Any) -> bool:
    """Whether a value is not searched for nodes: it is one, or plain data that `nnx.split` gave."""
    nnx = _nnx()
    return nnx is not None and (is_node(x) or isinstance(x, nnx.State))


def _map_nodes(fn: Callable[[Any], Any], tree: Any) -> Any:
    return jax.tree.map(lambda x: fn(x) if is_node(x) else x, tree, is_leaf=is_whole)


def _is_split(x: Any) -> bool:
    return isinstance(x, _Split)


def _split(context: Any, tree: Any) -> Any:
    return _map_nodes(lambda x: _Split(*context.flatten(x)), tree)


def _merge(context: Any, tree: Any) -> Any:
    def whole(x: Any) -> Any:
        return context.unflatten(x.graphdef, x.state) if _is_split(x) else x

    return jax.tree.map(whole, tree, is_leaf=_is_split)


def _given(map_arguments: Map, args: Any, kwargs: Any) -> list[Any]:
    found: list[Any] = []
    map_arguments(lambda x, _: found.extend(_nodes(x)), args, kwargs)
    return found


@contextlib.contextmanager
def split(
    map_arguments: Map, args: Any, kwargs: Any, in_shardings: Any, *, on_copies: bool
) -> Generator[tuple[Any, Any, bool]]:
    """A context, around a call, with its arguments with modules split, and whether there are any.

    The arrays of modules are put where `in_shardings`, the option of `jax.jit`, has shardings for
    them. With `on_copies`, copies that share what the modules share take the updates.

    Raises:
        flax.errors.TraceContextError: in a derivative or another transform around the call, for
            a module from outside of it, which is then left as it was.
    """
    nnx, modules = _nnx(), _given(map_arguments, args, kwargs)
    if not modules:
        yield args, kwargs, False
        return
    if on_copies:
        modules = nnx.clone(modules)
        each = iter(modules)
        args, kwargs = map_arguments(lambda x, _: _map_nodes(lambda _: next(each), x), args, kwargs)
    with _restored_on_error(modules), nnx.update_context(_TAG):
        with nnx.split_context(_TAG) as context:
            args, kwargs = map_arguments(lambda x, _: _split(context, x), args, kwargs)
        if isinstance(in_shardings, (tuple, list)):
            each = iter(in_shardings)  # one for each argument that is not static

            def placed(x: Any, _name: str) -> Any:
                return _for_modules(_placed, next(each, None), x)

            args, _ = map_arguments(placed, args, {})
        yield args, kwargs, True


@contextlib.contextmanager
def _restored_on_error(modules: list[Any]) -> Generator[None]:
    """A context in which an update that fails leaves modules as they were.

    An update takes a module's attributes away and puts them back one after the other, and flax
    refuses to change a variable of another trace. Outside of all traces there is none.
    """
    if not ir.is_tracing():
        yield
        return
    parts = [part for _, part in _nnx().iter_graph(modules) if is_node(part)]
    before = [(part, dict(vars(part))) for part in parts if hasattr(part, "__dict__")]
    try:
        yield
    except Exception:
        for part, attributes in before:
            vars(part).clear()
            vars(part).update(attributes)
        raise


def on_merged(
    fn: Callable[..., Any], map_arguments: Map, out_shardings: Any, args: Any, kwargs: Any
) -> Any:
    """`fn` of split modules: its results with modules split, in an `Updated` with their new states.

    Of `out_shardings`, the option of `jax.jit`, the parts given for modules are used.
    """
    nnx = _nnx()
    is_split = any(map(_is_split, jax.tree.leaves((args, kwargs), is_leaf=_is_split)))
    if is_split:
        with nnx.merge_context(_TAG, inner=True) as context:
            args, kwargs = map_arguments(lambda x, _: _merge(context, x), args, kwargs)
    elif _given(map_arguments, args, kwargs):
        raise TypeError("jit took a module apart, and would lose its updates")
    out = fn(*args, **kwargs)
    if not (is_split or has_nodes(out)):
        return out
    _for_modules(_constrain, out_shardings, out)
    with nnx.split_context(_TAG if is_split else None) as context:
        if not is_split:
            return _split(context, out)
        modules = _split(context, _given(map_arguments, args, kwargs))
        return Updated(modules, _split(context, out))


def updated(out: Any) -> Any:
    """The results of `on_merged`, after the caller's modules have been updated."""
    if isinstance(out, Updated):
        with _nnx().merge_context(_TAG, inner=False) as context:
            return _merge(context, out).out
    if not any(map(_is_split, jax.tree.leaves(out, is_leaf=_is_split))):
        return out
    with _nnx().merge_context() as context:
        return _merge(context, out)


def result_paths(results: Any) -> list[str]:
    """The paths of a program's results: "output[0]", or "blocks[1].bias" in an updated module."""
    parts = [("output", results)]
    if isinstance(results, Updated):
        parts = [("", results.modules), ("output", results.out)]
    paths: list[str] = []
    for name, tree in parts:
        leaves, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_split)
        for path, x in leaves:
            inside = f"{name}{jax.tree_util.keystr(path)}" if name else ""
            if _is_split(x):
                for keys, value in x.state:
                    at = "".join(f".{key}" if isinstance(key, str) else f"[{key}]" for key in keys)
                    paths += [f"{inside}{at}".lstrip(".")] * len(jax.tree.leaves(value))
            else:
                paths.append(inside)
    return paths


# ---------------------------------------------------------------- shardings of modules


def without_modules(shardings: Any) -> Any:
    """Shardings of `jax.jit`'s options, with None in the place of those given for modules."""
    return jax.tree.map(
        lambda x: None if _is_of_module(x) else x,
        shardings,
        is_leaf=lambda x: x is None or _is_of_module(x),
    )


def _is_of_module(x: Any) -> bool:
    """Whether shardings have the form of a module, of its state, or of nnx's state shardings."""
    nnx = _nnx()
    return nnx is not None and (is_node(x) or isinstance(x, (nnx.State, nnx.StateSharding)))


def _for_modules(act: Callable[[Callable[..., Any], Any], Any], shardings: Any, tree: Any) -> Any:
    """A tree whose modules are replaced by `act(find, module)` if shardings are given for them.

    `find` gives the sharding of a variable at a path. The shardings are a prefix of the tree.
    """
    if not any(map(_is_of_module, jax.tree.leaves(shardings, is_leaf=_is_of_module))):
        return tree

    def each(prefix: Any, part: Any) -> Any:
        return act(_finder(prefix), part) if _is_of_module(prefix) else part

    return jax.tree.map(each, shardings, tree, is_leaf=lambda x: x is None or _is_of_module(x))


def _finder(prefix: Any) -> Callable[..., Any]:
    """A function that finds a variable's sharding in shardings that are given for its module."""
    nnx = _nnx()
    if isinstance(prefix, nnx.StateSharding):
        return prefix.map_prefix
    state = prefix if isinstance(prefix, nnx.State) else nnx.split(prefix)[1]
    known = {
        path: leaf.get_raw_value() if isinstance(leaf, nnx.Variable) else leaf
        for path, leaf in nnx.to_flat_state(state)
    }

    def find(path: Any, variable: Any) -> Any:
        if path not in known:
            raise ValueError(
                f"the shardings of a module have none at {_shown(path)}, where it has a "
                f"{type(variable).__name__}: make them of the module itself, "
                "jax.tree.map(lambda _: sharding, module)"
            )
        return known[path]

    return find


def _placed(find: Callable[..., Any], split: _Split) -> _Split:
    """A split module whose arrays are on the devices where `jax.jit` would put them."""
    flat = [
        (path, variable.replace(_put(variable.get_raw_value(), find(path, variable), path)))
        for path, variable in split.state
    ]
    return dataclasses.replace(split, state=type(split.state)(flat, sort=False))


def _put(x: Any, sharding: Any, path: Any) -> Any:
    if sharding is None or not hasattr(x, "dtype") or isinstance(x, jax.Ref):
        return x
    if isinstance(sharding, jax.sharding.PartitionSpec):
        sharding = jax.sharding.NamedSharding(jax.sharding.get_mesh(), sharding)
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    if isinstance(x, jax.core.Tracer):
        return _constrained(x, sharding)
    is_there = x.sharding.is_equivalent_to(sharding, x.ndim)
    if getattr(x, "committed", False) and not is_there:
        raise ValueError(
            f"the array at {_shown(path)} of a module is committed to {x.sharding}, and "
            f"in_shardings has {sharding} for it: put it there by jax.device_put, or leave the "
            "sharding out"
        )
    return jax.device_put(x, sharding)


def _constrain(find: Callable[..., Any], module: Any) -> Any:
    """Constrains the arrays of a returned module to the sharding that `out_shardings` gives."""
    nnx = _nnx()
    for path, variable in nnx.iter_graph(module):
        if isinstance(variable, nnx.Variable):
            value, sharding = variable.get_raw_value(), find(path, variable)
            if sharding is not None and not isinstance(value, jax.Ref):
                variable.set_raw_value(_constrained(value, sharding))
    return module


def _constrained(x: Any, sharding: Any) -> Any:
    mesh = getattr(jax.typeof(x).sharding, "mesh", None)
    explicit = any(t == jax.sharding.AxisType.Explicit for t in getattr(mesh, "axis_types", ()))
    return (jax.reshard if explicit else jax.lax.with_sharding_constraint)(x, sharding)


def _shown(path: Any) -> str:
    return ".".join(map(str, path)) or "its root"
