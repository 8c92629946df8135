"""Avals that state how a value is sharded, as they do on a mesh with explicit axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from precpass.jaxpr.types import Aval, Eqn

__all__ = [
    "holds_terms",
    "is_reduced",
    "is_sharded_by_type",
    "is_unreduced",
    "permuted",
    "resharded_along",
    "resharded_to",
    "sharding_before",
    "sharding_under_vmap",
    "shards",
    "summed_up",
    "with_sizes",
    "without_reduced",
]


def is_sharded_by_type(x: Any) -> bool:
    """Whether the type of a value says how it is sharded."""
    return _has_explicit_axes(_mesh_of(jax.typeof(x)))


def is_reduced(aval: Aval) -> bool:
    """Whether a value is the same on all devices along an axis, so that its cotangent is a sum.

    Each device computes one term of the cotangent; JAX types such a value as unreduced.
    """
    return bool(getattr(_spec_of(aval), "reduced", None))


def is_unreduced(aval: Aval) -> bool:
    """Whether a value is a sum of which each device holds one term."""
    return bool(getattr(_spec_of(aval), "unreduced", None))


def holds_terms(eqn: Eqn) -> bool:
    """Whether an equation reads or makes a sum of which each device holds one term."""
    atoms = (*eqn.invars, *eqn.outvars)
    try:  # every equation is asked: no call of Python's for each value
        return any([v.aval.sharding.spec.unreduced for v in atoms])
    except AttributeError:  # a token, or a reference
        return any(is_unreduced(v.aval) for v in atoms)


def shards(aval: Aval) -> int:
    """The number of parts into which a value is divided over devices."""
    spec = _spec_of(aval)
    parts = () if spec is None else spec.partitions
    axes = [axis for part in parts for axis in (part if isinstance(part, tuple) else (part,))]
    return math.prod(_mesh_of(aval).shape[axis] for axis in axes if isinstance(axis, str))


def permuted(sharding: Any, order: Sequence[int]) -> Any:
    """The sharding of a value whose dimension `i` was dimension `order[i]`."""
    partitions = sharding.spec.partitions
    parts = (*partitions, *[None] * (len(order) - len(partitions)))
    return sharding.update(spec=_respelled(sharding.spec, [parts[i] for i in order]))


def sharding_before(aval: Aval, order: Sequence[int] | None) -> Any:
    """The sharding that a value must have before a transpose, to have a given type after it.

    Args:
        aval: the type after the transpose.
        order: the permutation of the transpose; None for no transpose.

    Returns:
        The sharding; None if types do not state shardings.
    """
    sharding = getattr(aval, "sharding", None)
    if sharding is None or sharding.mesh.empty:
        # A value without a mesh is replicated over the mesh of the context.
        mesh = jax.sharding.get_abstract_mesh()
        return NamedSharding(mesh, _nowhere(aval.ndim)) if _has_explicit_axes(mesh) else None
    if not _has_explicit_axes(sharding.mesh):
        return None
    return sharding if order is None else permuted(sharding, [*map(order.index, range(aval.ndim))])


def sharding_under_vmap(
    sharding: Any, avals: Sequence[Aval], dims: Sequence[int | None], at: int
) -> Any:
    """The `out_sharding` of a product under a vmap.

    Args:
        sharding: the `out_sharding` without the batch dimension; None for none.
        avals: the types of the operands.
        dims: the batch dimension of each operand; None for an operand without one.
        at: the batch dimension of the result.
    """
    if sharding is None:
        return None
    aval, dim = next((a, d) for a, d in zip(avals, dims, strict=True) if d is not None)
    spec = _spec_of(aval)
    parts, operand_parts = [*sharding.spec.partitions], () if spec is None else spec.partitions
    parts[at:at] = [operand_parts[dim] if dim < len(operand_parts) else None]
    return sharding.update(spec=_respelled(sharding.spec, parts))


def without_reduced(aval: Aval) -> Any:
    """The type without its reduced and unreduced axes."""
    if not (is_reduced(aval) or is_unreduced(aval)):
        return aval
    plain = PartitionSpec(*_spec_of(aval).partitions)
    return aval.update(sharding=aval.sharding.update(spec=plain))


def resharded_to(x: Any, aval: Aval) -> Any:
    """A value resharded as a type says; the same value if it has that sharding."""
    if _spec_of(jax.typeof(x)) == _spec_of(aval):
        return x
    return jax.reshard(x, aval.sharding)


def resharded_along(x: Any, aval: Aval, dims: Sequence[int | None]) -> Any:
    """A value each dimension of which is sharded as a dimension of another value is.

    The same value is returned on a mesh without explicit axes.

    Args:
        x: the value.
        aval: the other value's type.
        dims: for each dimension of `x` that of the other value; None for one that is not sharded.
    """
    if not _has_explicit_axes(_mesh_of(aval)):
        return x
    parts = [None if dim is None else aval.sharding.spec.partitions[dim] for dim in dims]
    return jax.reshard(x, aval.sharding.update(spec=PartitionSpec(*parts)))


def with_sizes(aval: Aval, shape: Sequence[int], dtype: Any) -> Any:
    """An aval with another dtype and shape. A dimension whose size changes is not sharded.

    Args:
        aval: the aval.
        shape: of the same rank, or () for a scalar.
        dtype: the dtype.
    """
    changes: dict[str, Any] = {"shape": tuple(shape), "dtype": dtype, "weak_type": False}
    if not _mesh_of(aval).empty:
        parts = (*aval.sharding.spec.partitions, *[None] * aval.ndim)
        sizes = zip(parts, shape, aval.shape, strict=False)
        kept = [part if new == old else None for part, new, old in sizes]
        changes["sharding"] = aval.sharding.update(spec=_respelled(aval.sharding.spec, kept))
    return aval.update(**changes)


def summed_up(x: Any) -> Any:
    """A value whose terms on different devices are added up.

    JAX has rules for only a few operations on values whose type is reduced or unreduced.
    """
    return resharded_to(x, without_reduced(jax.typeof(x)))


def _mesh_of(aval: Aval) -> Any:
    return getattr(getattr(aval, "sharding", None), "mesh", None)


def _spec_of(aval: Aval) -> Any:
    return getattr(getattr(aval, "sharding", None), "spec", None)


def _has_explicit_axes(mesh: Any) -> bool:
    return any(kind == AxisType.Explicit for kind in getattr(mesh, "axis_types", ()))


def _nowhere(ndim: int) -> PartitionSpec:
    return PartitionSpec(*[None] * ndim)


def _respelled(spec: Any, parts: Sequence[Any]) -> PartitionSpec:
    """A partition spec with other dimensions and the same reduced and unreduced axes."""
    return PartitionSpec(*parts, unreduced=spec.unreduced, reduced=spec.reduced)
