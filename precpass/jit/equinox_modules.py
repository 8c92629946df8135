"""equinox modules, whose Python numbers are static, as under `equinox.filter_jit`.

A `Dropout` branches on its `inference`, and a rate that were traced would be a parameter to
`equinox.filter_grad`, which trains every inexact array. Nothing here imports equinox.
"""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.core

from precpass.jit.nnx import is_node

__all__ = ["HoldsNumbers", "is_module", "is_number", "may_hold_numbers"]


class HoldsNumbers(Exception):
    """Raised by a trace that meets numbers of modules. The call is then made with these static."""


def is_module(x: Any) -> bool:
    """Whether a value is an equinox module."""
    module = getattr(sys.modules.get("equinox"), "Module", None)  # None while it is loading
    return module is not None and isinstance(x, module)


def is_number(x: Any) -> bool:
    """Whether a leaf of a module is a number of Python's own."""
    return type(x) in (bool, int, float, complex)


def may_hold_numbers(tree: Any) -> bool:
    """Whether a module in traced arguments has a scalar, which may have been a number."""
    if "equinox" not in sys.modules:
        return False
    found = jax.tree.leaves(tree, is_leaf=lambda x: is_module(x) or is_node(x))
    leaves = jax.tree.leaves([x for x in found if is_module(x)], is_leaf=is_node)
    return any(isinstance(x, jax.core.Tracer) and x.shape == () for x in leaves)
