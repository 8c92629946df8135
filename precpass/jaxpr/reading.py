"""Reading jaxprs and equations: values, source lines, scopes, the user's precisions."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import math
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax.extend import source_info_util

from precpass.jaxpr.types import Aval, Eqn, Jaxpr
from precpass.policy.precision import BY_DTYPE, PARTS, Precision
from precpass.policy.scopes import escaped

_OWN_FOLDER = os.path.dirname(os.path.dirname(__file__))
source_info_util.register_exclusion(_OWN_FOLDER)

# Looked up once, because they are used for every value of every program.
_Literal, _of, _cast_p = jex.Literal, BY_DTYPE.get, jex.primitives.convert_element_type_p


def open_jaxpr(jaxpr: Jaxpr) -> Any:
    """The object with `eqns`, `invars` and `outvars` (0.11 merged ClosedJaxpr into Jaxpr)."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def consts_of(jaxpr: Jaxpr) -> Sequence[Any]:
    """The values of `constvars`; () for an open jaxpr, which has none of its own."""
    return getattr(jaxpr, "consts", ())


def without_consts(jaxpr: Jaxpr) -> Any:
    """A jaxpr without its constants, which the caller supplies: so it holds no tracer."""
    opened = open_jaxpr(jaxpr)
    consts = [None] * len(consts_of(opened))
    return opened.with_consts(consts) if consts else opened  # 0.11 merged the two classes


is_literal: Callable[[Any], bool] = _Literal.__instancecheck__
"""Whether an operand is a value written into the equation: `isinstance`, without a Python call."""


def in_avals(jaxpr: Jaxpr) -> list[Any]:
    """The avals of the operands, weak types included."""
    return [v.aval for v in open_jaxpr(jaxpr).invars]


def out_avals(jaxpr: Jaxpr) -> list[Any]:
    """The avals of the results."""
    return [v.aval for v in open_jaxpr(jaxpr).outvars]


def precision_of(aval: Aval) -> Precision | None:
    """The precision of a floating value in a known format; None for any other value."""
    try:
        return _of(aval.dtype)
    except AttributeError:  # a token
        return None


def is_inexact(x: Any) -> bool:
    """Whether a value holds floating or complex numbers; a token or a reference does not."""
    return _is_kind(getattr(x, "dtype", None), jnp.inexact) and not hasattr(x, "inner_aval")


def is_integer(x: Any) -> bool:
    """Whether a value holds whole numbers."""
    return _is_kind(getattr(x, "dtype", None), jnp.integer)


@functools.cache
def _is_kind(dtype: Any, kind: type) -> bool:
    return dtype is not None and bool(jnp.issubdtype(dtype, kind))


def parts_of(aval: Aval) -> Precision | None:
    """As `precision_of`, and of a complex value the precision of its parts."""
    return PARTS.get(getattr(aval, "dtype", None))


def dtype_in(dtype: Any, precision: Precision) -> Any:
    """The dtype of a floating or complex value whose parts are to have a precision."""
    is_complex = jnp.issubdtype(dtype, jnp.complexfloating)
    return np.dtype(np.complex128) if is_complex else precision.dtype


@dataclasses.dataclass(frozen=True)
class Source:
    """A line of your code. `file` is empty if JAX recorded none."""

    file: str = ""
    function: str = ""
    line: int = 0

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.file else "<unknown>"

    @property
    def place(self) -> str:
        """The file's name and the line, as "solve.py:14"; "" if JAX recorded none."""
        return f"{os.path.basename(self.file)}:{self.line}" if self.file else ""


_FOREIGN = (os.path.dirname(jax.__file__) + os.sep, _OWN_FOLDER + os.sep, "<frozen")


def is_own(file: str) -> bool:
    """Whether a file is one of this package's."""
    return file.startswith(_OWN_FOLDER + os.sep)


def is_foreign(file: str) -> bool:
    """Whether a file is one of JAX's, of this package's, or of Python's import system."""
    return file.startswith(_FOREIGN)


def source_of(eqn: Eqn) -> Source:
    """The innermost line outside JAX and this package that made an equation."""
    return source_at(eqn.source_info)


def source_at(info: Any) -> Source:
    """The innermost line outside JAX and this package of a JAX source info."""
    return Source() if info.traceback is None else _first_user_frame(info.traceback)


@functools.lru_cache(maxsize=65536)
def _first_user_frame(traceback: Any) -> Source:
    for frame in traceback.frames:
        file = frame.file_name
        if not file.startswith(_FOREIGN):
            function = frame.function_name.rpartition(".")[2]
            return Source(file, function, frame.line_num)
    return Source()


def called_from(eqn: Eqn) -> Source:
    """The innermost line of the user's that made an equation, and no line of a library of layers.

    If all lines are in libraries, it is the innermost one outside JAX and this package.
    """
    traceback = eqn.source_info.traceback
    return Source() if traceback is None else _users_frame(traceback)


@functools.lru_cache(maxsize=65536)
def _users_frame(traceback: Any) -> Source:
    frames = [Source(f.file_name, f.function_name, f.line_num) for f in traceback.frames]
    # What is outside of the call by which this package traces the function is no part of it.
    own = (i for i in reversed(range(len(frames))) if is_own(frames[i].file))
    return in_users_code(frames[: next(own, None)]) or _first_user_frame(traceback)


def in_users_code(frames: Iterable[Source]) -> Source | None:
    """The first of some frames that is neither JAX's, nor this package's, nor a library's."""
    for frame in frames:
        if frame.file and not frame.file.startswith(_FOREIGN) and not _is_librarys(frame.file):
            return dataclasses.replace(frame, function=frame.function.rpartition(".")[2])
    return None


@functools.lru_cache(maxsize=4096)
def _is_librarys(file: str) -> bool:
    modules = (sys.modules.get(name) for name in ("flax", "equinox", "haiku", "keras", "optax"))
    files = (getattr(module, "__file__", None) for module in modules)
    return any(f is not None and file.startswith(os.path.dirname(f) + os.sep) for f in files)


_SAMPLERS = inspect.unwrap(jax.random.normal).__code__.co_filename


def is_sampler(eqn: Eqn) -> bool:
    """Whether an equation is a jit that one of `jax.random`'s functions calls."""
    traceback = eqn.source_info.traceback
    return eqn.primitive.name == "jit" and traceback is not None and _in_sampler(traceback)


@functools.lru_cache(maxsize=65536)
def _in_sampler(traceback: Any) -> bool:
    foreign_frames = itertools.takewhile(
        lambda f: f.file_name.startswith(_FOREIGN), traceback.frames
    )
    return any(frame.file_name == _SAMPLERS for frame in foreign_frames)


def scope_of(eqn: Eqn) -> str:
    """The equation's own name stack as JAX prints it, without the stacks of its callers.

    Parentheses are JAX's own marks; in the names of users' scopes they are escaped (`scope_names`).
    """
    stack = eqn.source_info.name_stack
    parts = stack.stack
    if not parts:
        return ""
    if any("(" in part.name or ")" in part.name for part in parts):
        parts = (p if _is_mark(p) else p._replace(name=escaped(p.name)) for p in parts)
        stack = dataclasses.replace(stack, stack=tuple(parts))
    return str(stack)


def _is_mark(part: Any) -> bool:
    return type(part).__name__ == "Transform"  # JAX exports neither it nor `Scope`


def is_checkpoint(eqn: Eqn) -> bool:
    """Whether an equation is a `jax.checkpoint`, whose body the backward pass computes again."""
    return eqn.primitive.name == "remat2"


def effects_of(eqn: Eqn) -> bool:
    """Whether an equation has effects. The axis names of a collective do not count."""
    return any(type(effect).__name__ != "NamedAxisEffect" for effect in eqn.effects)


_ORDERS = frozenset(("precision", "preferred_element_type", "out_dtype"))


def user_order(eqn: Eqn) -> str | None:
    """The precision that the user gave a product, in words; None if they gave none."""
    params = eqn.params
    # every equation is asked
    if _ORDERS.isdisjoint(params):
        return None
    precision = params.get("precision")
    precisions = precision if isinstance(precision, tuple) else (precision,)
    if any(p is not None and p != jax.lax.Precision.DEFAULT for p in precisions):
        return f"precision={precision}"
    preferred = params.get("preferred_element_type")
    if preferred is not None and any(preferred != v.aval.dtype for v in eqn.invars[:2]):
        return f"preferred_element_type={np.dtype(preferred).name}"
    out_dtype = params.get("out_dtype")
    return f"out_dtype={np.dtype(out_dtype).name}" if out_dtype is not None else None


def summed_and_batch(eqn: Eqn) -> tuple[Any, Any] | None:
    """The contracted and the batch dimensions of each operand of a plain or ragged dot.

    The groups of a ragged dot are a batch of its right operand. None for a convolution.
    """
    ragged = eqn.params.get("ragged_dot_dimension_numbers")
    if ragged is not None:
        summed, (left, right) = ragged.dot_dimension_numbers
        return summed, (left, (*right, *ragged.rhs_group_dimensions))
    return eqn.params["dimension_numbers"] if eqn.primitive.name == "dot_general" else None


def kernel_features(eqn: Eqn) -> tuple[Any, Any]:
    """The numbers of output and input features of a convolution's kernel."""
    spec, shape = eqn.params["dimension_numbers"].rhs_spec, eqn.invars[1].aval.shape
    return shape[spec[0]], shape[spec[1]]


def symbol_in(arrays: Iterable[Any]) -> str:
    """The first symbolic dimension of arrays, for which XLA compiles nothing; "" if there is none.

    Args:
        arrays: arrays and avals. Other values have no dimensions, whatever they call their shape.
    """
    shapes = (getattr(x, "shape", None) for x in arrays)
    sizes = (d for shape in shapes if isinstance(shape, tuple) for d in shape)
    return next((str(d) for d in sizes if not isinstance(d, int)), "")


def lhs_dilation(eqn: Eqn) -> int:
    """How many times as large a convolution makes its first operand by zeros between the elements.

    It is more than 1 for the gradient of a strided convolution and for a transposed one, and 1 for
    all other equations.
    """
    return math.prod(eqn.params.get("lhs_dilation") or ())


def sorted_params(eqn: Eqn) -> tuple[tuple[str, Any], ...]:
    """The parameters of an equation, by name."""
    return tuple(sorted(eqn.params.items()))


def has_complex(eqn: Eqn) -> bool:
    """Whether an equation reads or makes complex values."""
    dtypes = (getattr(v.aval, "dtype", None) for v in (*eqn.invars, *eqn.outvars))
    return any(d is not None and jnp.issubdtype(d, jnp.complexfloating) for d in dtypes)


def has_algorithm(eqn: Eqn) -> bool:
    """Whether a product names a dot algorithm."""
    algorithms = (jax.lax.DotAlgorithm, jax.lax.DotAlgorithmPreset)
    return isinstance(eqn.params.get("precision"), algorithms)


def asked_precision(eqn: Eqn) -> str:
    """A product's precision: "default", "high", "highest", or the name of its algorithm."""
    setting = eqn.params.get("precision")
    if isinstance(setting, jax.lax.DotAlgorithmPreset):
        return setting.name if setting is not jax.lax.DotAlgorithmPreset.DEFAULT else "default"
    if isinstance(setting, jax.lax.DotAlgorithm):
        formats = setting.lhs_precision_type, setting.rhs_precision_type, setting.accumulation_type
        names = [str(_of(np.dtype(t)) or "any").upper() for t in formats]
        return f"{'_'.join(names)}_X{setting.num_primitive_operations}"
    each = setting if isinstance(setting, tuple) else (setting,)
    asked = [p for p in each if p is not None]
    return max(asked, key=lambda p: p.value).name.lower() if asked else "default"


def applies_function(eqn: Eqn) -> bool:
    """Whether an equation applies a function of the user's to elements in place.

    `x.at[i].apply(f)` is a plain scatter with `f` as its combiner; other plain scatters have none.
    """
    return eqn.primitive.name == "scatter" and eqn.params["update_jaxpr"] is not None


def keeps_bits(eqn: Eqn) -> bool:
    """Whether an equation rounds float32 to the precision of float32, and so changes nothing.

    JAX adds such an equation so that XLA does not compute again what a checkpoint policy saves.
    """
    if eqn.primitive.name != "reduce_precision":
        return False
    whole = jnp.finfo(np.float32)
    params, dtype = eqn.params, eqn.outvars[0].aval.dtype
    bits = params["exponent_bits"], params["mantissa_bits"]
    return dtype == np.float32 and bits == (whole.nexp, whole.nmant)


def picks_from_apart_windows(eqn: Eqn) -> bool:
    """Whether an equation takes one element of each window, and no two windows share an element.

    Such is a max pooling whose strides are its windows' sizes. Its derivative adds nothing up: each
    element of its result is one of the cotangent's, or zero.
    """
    if eqn.primitive.name not in _PICKS:
        return False
    sizes, strides = eqn.params["window_dimensions"], eqn.params["window_strides"]
    dilation = eqn.params.get("window_dilation", (1,) * len(sizes))
    spans = [(size - 1) * apart + 1 for size, apart in zip(sizes, dilation, strict=True)]
    return all(span <= stride for span, stride in zip(spans, strides, strict=True))


_PICKS = frozenset(("reduce_window_max", "reduce_window_min", "select_and_scatter_add"))


def iota_size(eqn: Eqn) -> Any:
    """The number of integers that an iota counts through."""
    return eqn.params["shape"][eqn.params["dimension"]]


def fill_of(eqn: Eqn) -> Any:
    """The number that a gather returns for an index out of bounds; None if that is NaN."""
    return eqn.params["fill_value"]


def reduced_sizes(eqn: Eqn) -> tuple[Any, ...]:
    """The sizes of the dimensions that a reduction takes away."""
    shape = eqn.invars[0].aval.shape
    return tuple([shape[axis] for axis in eqn.params["axes"]])


def reduced_axes(eqn: Eqn) -> tuple[int, ...]:
    """The dimensions that a reduction takes away."""
    return tuple(eqn.params["axes"])


def exponent(eqn: Eqn) -> int:
    """The exponent of an integer power; 2 for a square."""
    return eqn.params.get("y", 2)


def axis_size(eqn: Eqn) -> int | None:
    """The size of the mesh axis that an equation names; None where no mesh has it."""
    mesh = getattr(eqn.ctx, "cur_abstract_mesh", None)
    return dict(getattr(mesh, "shape", {})).get(eqn.params["axis_name"])


def cast_formats(eqn: Eqn) -> tuple[Precision, Precision] | None:
    """The floating formats that an equation casts from and to; None if it is no such cast."""
    if eqn.primitive is not _cast_p:
        return None
    before, after = precision_of(eqn.invars[0].aval), precision_of(eqn.outvars[0].aval)
    return (before, after) if before and after and before is not after else None


def casts(jaxpr: Jaxpr) -> list[Any]:
    """The casts of a jaxpr, without those in its bodies."""
    # Every body is searched, so this makes no call for each equation.
    return [eqn for eqn in open_jaxpr(jaxpr).eqns if eqn.primitive is _cast_p]


def is_plain_cast(eqn: Eqn) -> bool:
    """Whether an equation casts between floating formats and changes nothing else of the type."""
    if cast_formats(eqn) is None:
        return False
    return eqn.params["sharding"] is None and not eqn.params["weak_type"]


def widening(eqn: Eqn) -> tuple[Any, Any] | None:
    """The result and the operand of a cast to a wider format; None for any other equation."""
    formats = cast_formats(eqn)
    if formats is None or is_literal(eqn.invars[0]):
        return None
    widens = formats[0].is_low and not formats[1].is_low
    return (eqn.outvars[0], eqn.invars[0]) if widens else None
