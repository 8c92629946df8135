"""`Builder`: builds a jaxpr from equations that are reused and from new ones that are traced."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.core
import jax.extend.core as jex
import numpy as np
from jax import lax
from jax.extend import source_info_util

from precpass.jaxpr.binding import DTYPE_PARAMS, bind, convert, trace
from precpass.jaxpr.border_copies import Crossing, border_copy_aval, named
from precpass.jaxpr.dots import reordered, transpose_p
from precpass.jaxpr.primitives.carrier import Form, carrier_p, detach_p
from precpass.jaxpr.primitives.float64 import in_x64
from precpass.jaxpr.primitives.low_cotangent import low_cotangent_p
from precpass.jaxpr.primitives.low_derivative import Function, low_derivative_p
from precpass.jaxpr.primitives.rounded import bits, low_value, rounded_p
from precpass.jaxpr.reading import (
    Source,
    consts_of,
    has_complex,
    is_literal,
    open_jaxpr,
    precision_of,
    source_at,
)
from precpass.jaxpr.shardings import is_reduced
from precpass.jaxpr.types import Atom, Aval, Eqn, Jaxpr, Var

# Looked up once, because they are used for every equation that changes.
_Var, _Eqn, _no_effects = jex.Var, jex.JaxprEqn, jex.no_effects
_cast_p = jex.primitives.convert_element_type_p
_bitcast_p = jex.primitives.bitcast_convert_type_p
_DTYPES = frozenset(DTYPE_PARAMS)

Templates = dict[Hashable, Any]
"""A cache of traced functions and of avals in other dtypes; the key is all that they depend on."""


class Builder:
    """The equations of a new jaxpr, whose values are atoms: variables and literals.

    Binding an equation again costs as much as tracing it did. So an equation that does not change
    is taken over as it is, and one that replaces another is traced once and copied for all that
    are alike. That takes a fifth to a half of the time.

    Args:
        templates: the cache that all builders of one program share.
        within: the equation whose body is built; new equations that belong to no equation of
            the body get its line.
    """

    def __init__(self, templates: Templates, within: Any = None) -> None:
        self.eqns: list[Any] = []
        self.constvars: list[Any] = []
        self.consts: list[Any] = []
        self._templates = templates
        self._within = within
        self._x64 = in_x64()
        self._source: Any = None
        self._ctx: Any = None
        self.leave()

    def at(self, eqn: Eqn) -> None:
        """Gives the equations that follow the line, name stack and configuration of `eqn`."""
        self._source, self._ctx = eqn.source_info, eqn.ctx

    def at_line_of(self, eqn: Eqn) -> None:
        """Gives the equations that follow the line of `eqn`, but not its name stack."""
        self.at(eqn)
        self._source = eqn.source_info.replace(name_stack=source_info_util.new_name_stack())

    def leave(self) -> None:
        """Says that the equations that follow belong to no equation of the original jaxpr."""
        if self._within is None:
            self._source = self._ctx = None
        else:
            self.at_line_of(self._within)

    def source(self) -> Source:
        """The line of the equations that follow."""
        return Source() if self._source is None else source_at(self._source)

    def keep(
        self,
        eqn: Eqn,
        operands: Sequence[Any],
        params: dict[str, Any] | None = None,
        avals: Sequence[Aval] | None = None,
    ) -> Sequence[Any]:
        """Takes an equation over.

        Args:
            eqn: the equation.
            operands: its own operands, or others of the same types.
            params: new params; None for its own.
            avals: the avals of its results, if they may differ from its own.

        Returns:
            Its results: its own variables, or new ones where the aval differs.
        """
        outvars = eqn.outvars
        if avals is not None:
            outvars = [
                v if v.aval is aval else _Var(aval)
                for v, aval in zip(eqn.outvars, avals, strict=True)
            ]
        self.eqns.append(_remade(eqn, operands, outvars, params))
        return outvars

    def emit(
        self, primitive: Any, operands: Sequence[Any], params: dict[str, Any], aval: Aval
    ) -> Any:
        """The result of a new equation without effects, whose only result has the aval `aval`."""
        out = _Var(aval)
        # `new_jaxpr_eqn` also looks for effects, which takes three times as long.
        make = jex.new_jaxpr_eqn if self._ctx is None else _Eqn
        eqn = make(operands, [out], primitive, params, _no_effects, self._source, self._ctx)
        self.eqns.append(eqn)
        return out

    def bind(
        self, eqn: Eqn, operands: Sequence[Any], params: dict[str, Any] | None = None
    ) -> Sequence[Any]:
        """The results of an equation at other operands.

        Args:
            eqn: the equation.
            operands: the floating ones have their own types, or all have one other type.
            params: new params; None for its own.
        """
        if params is None and not _names_dtypes(eqn.params) and not has_complex(eqn):
            dtype = _new_dtype(operands, eqn.invars)
            if dtype is None:
                return self.keep(eqn, operands)
            outvars = [
                v if precision_of(v.aval) is None else _Var(with_dtype(v.aval, dtype))
                for v in eqn.outvars
            ]
            self.eqns.append(_remade(eqn, operands, outvars))
            return outvars
        return self.call(lambda *xs: bind(eqn, xs, params), operands, alike(eqn, params))

    def constant(self, value: Any) -> Any:
        """A constant of the new jaxpr, in its own dtype."""
        value = np.array(value).view(_typed_array())
        self.constvars.append(_Var(jax.typeof(value)))
        self.consts.append(value)
        return self.constvars[-1]

    def convert(self, atom: Atom, dtype: Any, weak_type: bool = False) -> Any:
        """A value in another dtype."""
        # A program may have as many casts as equations, so casts share their params and avals.
        key = "convert", atom.aval, dtype, weak_type
        template = self._templates.get(key)
        if template is None:
            template = self._templates[key] = _cast(atom.aval, np.dtype(dtype), weak_type)
        params, aval = template
        if aval is None or self._ctx is None:
            return self.call(lambda x: [convert(x, dtype, weak_type)], [atom], key)[0]
        return self.emit(_cast_p, [atom], params, aval)

    def transpose(self, atom: Atom, order: tuple[int, ...]) -> Any:
        """A value with its dimensions in another order."""
        if self._ctx is None or not atom.aval.sharding.mesh.empty:
            return self.call(lambda x: [lax.transpose(x, order)], [atom], ("transpose", order))[0]
        aval = reordered(atom.aval, order)
        return self.emit(transpose_p, [atom], {"permutation": order}, aval)

    def detach(
        self,
        atom: Atom,
        *,
        pinned: bool = False,
        flat: bool = False,
        zeros: bool = False,
        keeps_rounding: bool = False,
    ) -> Any:
        """As `precpass.jaxpr.detach`."""
        params = {"pinned": pinned, "flat": flat, "zeros": zeros, "keeps_rounding": keeps_rounding}
        return self.emit(detach_p, [atom], params, atom.aval)

    def carry(self, form: Form, out: Any, lhs: Any, rhs: Any, rest: Sequence[Any] = ()) -> Any:
        """As `precpass.jaxpr.carry`."""
        params = {"form": form, "batched": ()}
        return self.emit(carrier_p, [out, lhs, rhs, *rest], params, out.aval)

    def rounded(self, low: Any, wide: Any) -> Any:
        """The rounded value in the dtype of the wide one, with the wide one's derivative."""
        return self.emit(rounded_p, [self.convert(low, wide.aval.dtype), wide], {}, wide.aval)

    def low_derivative(self, out: Any, operands: Sequence[Any], function: Function) -> Any:
        """`out`, a function's value, with a derivative whose factors are saved in 16 bits."""
        return self.emit(low_derivative_p, [out, *operands], {"function": function}, out.aval)

    def low_cotangent(self, atom: Atom, dtype: Any) -> Any:
        """A value whose cotangent is rounded to the dtype of 16 bits `dtype`."""
        return self.emit(low_cotangent_p, [atom], {"dtype": dtype}, atom.aval)

    def bits(self, atom: Atom) -> Any:
        """The 16 bits of a low value."""
        if is_reduced(atom.aval):
            return self.call(lambda x: [bits(x)], [atom], "bits")[0]
        return self._bitcast(atom, border_copy_aval(atom.aval))

    def from_bits(self, atom: Atom, dtype: Any, like: Any) -> Any:
        """The 16-bit float whose bits are given; no derivative passes through it.

        Args:
            atom: the bits.
            dtype: the dtype of the 16-bit float.
            like: the aval of the value whose bits were stored.
        """
        if is_reduced(like):
            key = "from bits", dtype, like
            return self.call(lambda x: [low_value(x, with_dtype(like, dtype))], [atom], key)[0]
        return self.detach(self._bitcast(atom, with_dtype(atom.aval, np.dtype(dtype))))

    def byte_bits(self, atom: Atom) -> Any:
        """A value of 8 bits as integers, through which no derivative passes."""
        return self._bitcast(atom, with_dtype(atom.aval, np.dtype(np.uint8)))

    def of_byte_bits(self, atom: Atom, dtype: Any) -> Any:
        """The value of 8 bits whose `byte_bits` are given; no derivative passes through it."""
        return self.detach(self._bitcast(atom, with_dtype(atom.aval, np.dtype(dtype))))

    def _bitcast(self, atom: Atom, aval: Aval) -> Any:
        return self.emit(_bitcast_p, [atom], {"new_dtype": aval.dtype}, aval)

    def cross(
        self,
        eqn: Eqn,
        crossing: Crossing,
        operands: Sequence[Any],
        outvars: Sequence[Var],
        params: dict[str, Any],
    ) -> None:
        """Adds an equation with border copies, in the order that `crossing` gives."""
        operands = [operands[i] for i in crossing.operands]
        outvars = [outvars[i] for i in crossing.results]
        params = {**params, **crossing.params}
        self.eqns.append(_remade(eqn, operands, outvars, params))

    def call(
        self, fn: Callable[..., Sequence[Any]], operands: Sequence[Any], key: Hashable = None
    ) -> list[Any]:
        """The results of a function that is traced at its operands.

        Args:
            fn: a function of arrays that returns a sequence of arrays.
            operands: atoms.
            key: everything that tells `fn` apart from other functions; for None it is traced anew.
        """
        template = self._template(fn, operands, key)
        opened = open_jaxpr(template)
        new: dict[Any, Any] = dict(zip(opened.invars, operands, strict=True))
        for var, const in zip(opened.constvars, consts_of(template), strict=True):
            new[var] = new_var = _Var(var.aval)
            self.constvars.append(new_var)
            self.consts.append(const)
        for eqn in opened.eqns:
            invars = [v if is_literal(v) else new[v] for v in eqn.invars]
            outvars = [_Var(v.aval) for v in eqn.outvars]
            new.update(zip(eqn.outvars, outvars, strict=True))
            source = self._placed(eqn.source_info)
            self.eqns.append(eqn.replace(invars=invars, outvars=outvars, source_info=source))
        return [v if is_literal(v) else new[v] for v in opened.outvars]

    def _template(
        self, fn: Callable[..., Sequence[Any]], operands: Sequence[Any], key: Hashable
    ) -> Any:
        avals = [v.aval for v in operands]
        whole = None if key is None else (key, self._x64, self._ctx, *avals)
        template = None if whole is None else self._templates.get(whole)
        if template is None:
            with self._configured():
                template = trace(fn, *avals)
            if whole is not None:
                self._templates[whole] = template
        return template

    def _configured(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._ctx is None else self._ctx.manager

    def _placed(self, own: Any) -> Any:
        if self._source is None:
            return own
        if not own.name_stack.stack:
            return self._source
        return self._source.replace(name_stack=self._source.name_stack + own.name_stack)

    def evaluate(
        self, like: Any, invars: Sequence[Atom], outvars: Sequence[Var], args: Sequence[Any]
    ) -> list[Any]:
        """Evaluates at `args` what was built from a part of the jaxpr `like`."""
        parts = {"constvars": self.constvars, "invars": list(invars), "outvars": list(outvars)}
        jaxpr = open_jaxpr(like).replace(**parts, eqns=self.eqns, effects=jex.no_effects)
        return jax.core.eval_jaxpr(jaxpr, self.consts, *args)

    def finish(self, like: Any, invars: Sequence[Atom], outvars: Sequence[Var]) -> Any:
        """The finished jaxpr.

        Args:
            like: the jaxpr that it is made from; the result is open or closed as this one is, and
                has the same effects.
            invars: its operands.
            outvars: its results.
        """
        opened = open_jaxpr(like)
        consts = [*consts_of(like), *self.consts]
        parts = {
            "constvars": [*opened.constvars, *self.constvars],
            "invars": list(invars),
            "outvars": list(outvars),
            "eqns": self.eqns,
            # JAX drops the names of arguments if their variables are new ones.
            "debug_info": opened.debug_info,
        }
        if len(invars) + len(outvars) > len(opened.invars) + len(opened.outvars):
            orders = range(len(invars)), range(len(outvars))
            parts["debug_info"] = named(opened, *orders)
        if not hasattr(like, "consts"):
            # on 0.10 the jaxpr of remat and shard_map is open
            if self.consts:
                raise NotImplementedError("an open jaxpr cannot hold the constants of its rewrite")
            return opened.replace(**parts)
        if opened is like or hasattr(opened, "with_consts"):  # 0.11 merged the two classes
            return opened.replace(**parts, consts=consts)
        return like.replace(jaxpr=opened.replace(**parts), consts=consts)


def with_results_in(jaxpr: Jaxpr, dtypes: Sequence[Any]) -> Any:
    """A jaxpr with its results cast to other dtypes; None leaves a result as it is."""
    opened = open_jaxpr(jaxpr)
    build = Builder({})
    build.eqns += opened.eqns
    results = [
        v if dtype is None or v.aval.dtype == dtype else build.convert(v, dtype)
        for v, dtype in zip(opened.outvars, dtypes, strict=True)
    ]
    if len(build.eqns) == len(opened.eqns):
        return jaxpr
    return build.finish(jaxpr, opened.invars, results)


def _remade(
    eqn: Eqn, operands: Sequence[Any], outvars: Sequence[Var], params: dict[str, Any] | None = None
) -> Any:
    params = eqn.params if params is None else params
    rest = eqn.effects, eqn.source_info, eqn.ctx
    return _Eqn(operands, outvars, eqn.primitive, params, *rest)


def new_variable(aval: Aval) -> Any:
    """A new variable for a jaxpr that is being built."""
    return _Var(aval)


def literal(value: Any, like: Any) -> Any:
    """A literal of `value`, in its own dtype, that takes the place of the literal `like`."""
    value = np.asarray(value)
    return jex.Literal(value.view(_typed_array()), with_dtype(like.aval, value.dtype))


@functools.cache
def _typed_array() -> type:
    """The class of a traced literal's value, which keeps its type whether or not x64 is on.

    JAX does not export it.
    """
    traced = trace(lambda: lax.add(np.float32(1.0), np.float32(2.0)))
    return type(open_jaxpr(traced).eqns[0].invars[0].val)


@functools.lru_cache(maxsize=65536)
def with_dtype(aval: Aval, dtype: Any, weak_type: bool = False) -> Any:
    """An aval in another dtype. It is cached, because making one takes longer than an equation."""
    return aval.update(dtype=dtype, weak_type=weak_type)


def _cast(aval: Aval, dtype: Any, weak_type: bool) -> tuple[dict[str, Any], Any]:
    """The parameters of a cast and its result's aval, which is None if a mesh decides on it."""
    params = {"new_dtype": dtype, "weak_type": weak_type, "sharding": None}
    return params, with_dtype(aval, dtype, weak_type) if aval.sharding.mesh.empty else None


def _names_dtypes(params: dict[str, Any]) -> bool:
    if _DTYPES.isdisjoint(params):
        return False
    return any(params[name] is not None for name in _DTYPES & params.keys())


def _new_dtype(operands: Sequence[Any], own: Sequence[Any]) -> Any:
    """The dtype to which floating operands have changed; None if all have their own."""
    for v, before in zip(operands, own, strict=True):
        if v is not before and precision_of(before.aval) and v.aval.dtype != before.aval.dtype:
            return v.aval.dtype
    return None


def alike(eqn: Eqn, params: dict[str, Any] | None = None) -> Hashable:
    """A key that equal equations share, operands apart; None for an equation that has no key."""
    key = (eqn.primitive, *(eqn.params if params is None else params).items())
    try:
        hash(key)
    except TypeError:
        return None
    return key
