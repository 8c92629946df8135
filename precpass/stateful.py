"""flax nnx modules: their state updates cross a trace as under `nnx.jit`.

Nothing here imports flax: without it there is no module to be passed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable, Generator
from typing import Any

import jax

__all__ = ["HoldsState", "cloned", "functional", "has_nodes", "is_node", "split_modules", "updated"]

_TAG = "precpass"
# maps a function over the arguments that are not declared static
Map = Callable[[Callable[[Any, str], Any], Any, Any], tuple[Any, Any]]


class HoldsState(Exception):
    """Raised by a trace that meets a module, so that the call is made again with it split."""


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
    return nnx is not None and (isinstance(x, nnx.Variable) or nnx.graph.is_graph_node(x))


def has_nodes(tree: Any) -> bool:
    """Whether a pytree holds any; what `nnx.split` made of one is plain data, as for `jax.jit`."""
    nnx = _nnx()
    if nnx is None:
        return False
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, nnx.State) or is_node(x))
    return any(map(is_node, leaves))


def _split(context: Any, tree: Any) -> Any:
    return jax.tree.map(
        lambda x: _Split(*context.split(x)) if is_node(x) else x, tree, is_leaf=is_node
    )


def _merge(context: Any, tree: Any) -> Any:
    def whole(x: Any) -> Any:
        return context.merge(x.graphdef, x.state) if isinstance(x, _Split) else x

    return jax.tree.map(whole, tree, is_leaf=lambda x: isinstance(x, _Split))


def _nodes(map_arguments: Map, args: Any, kwargs: Any) -> list[Any]:
    nodes: list[Any] = []

    def collect(x: Any, _name: str) -> None:
        nodes.extend(filter(is_node, jax.tree.leaves(x, is_leaf=is_node)))

    map_arguments(collect, args, kwargs)
    return nodes


def functional(fn: Callable[..., Any], map_arguments: Map) -> Callable[..., Any]:
    """`fn` of split modules; it returns them as `fn` left them, before the results of `fn`."""

    @functools.wraps(fn)
    def pure(*args: Any, **kwargs: Any) -> Any:
        nnx = _nnx()
        with nnx.merge_context(_TAG, inner=True) as context:
            args, kwargs = map_arguments(lambda x, _: _merge(context, x), args, kwargs)
        out = fn(*args, **kwargs)
        nodes = _nodes(map_arguments, args, kwargs)
        with nnx.split_context(_TAG) as context:
            return _split(context, nodes), _split(context, out)

    return pure


def cloned(map_arguments: Map, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments with copies of their modules, which share what the modules share."""
    clones = iter(_nnx().clone(_nodes(map_arguments, args, kwargs)))

    def replace(x: Any, _name: str) -> Any:
        return jax.tree.map(
            lambda leaf: next(clones) if is_node(leaf) else leaf, x, is_leaf=is_node
        )

    return map_arguments(replace, args, kwargs)


@contextlib.contextmanager
def split_modules(map_arguments: Map, args: Any, kwargs: Any) -> Generator[tuple[Any, Any]]:
    """The arguments of a `functional`, around its call."""
    nnx = _nnx()
    with nnx.update_context(_TAG):
        with nnx.split_context(_TAG) as context:
            args, kwargs = map_arguments(lambda x, _: _split(context, x), args, kwargs)
        yield args, kwargs


def updated(out: Any) -> Any:
    """The results of a `functional`, after the modules around it took their updates."""
    with _nnx().merge_context(_TAG, inner=False) as context:
        return _merge(context, out)[1]
