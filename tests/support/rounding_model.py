"""Programs with every rounding that a policy may order done by hand, in any direction.

A bound on the error of a lowered program must come from the roundings, not from what the
program happened to give. Here it is found by doing them: the original jaxpr is evaluated
in float32, and each operand and result of an equation that may run low is rounded to the
format's grid, in a direction of choice: to nearest, all up, all down, or up and down at
random. Rounding to nearest is off by at most half a gap and in each element by no more
than any of the others, so runs of this model scatter around the float32 result at least
as far as a right lowered program does, whatever the program amplifies or cancels; and
where they overflow, overflow is legitimate. With a grid of 20 digits in the place of the
format's the same runs give the noise of float32 itself (16 of its units).

Nothing here uses the package's planner or rewriter; which equations a policy may lower
is read from its table of primitives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

from precpass.policy.primitives import OpKind, op

LOW = frozenset((np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)))
F32 = np.dtype(np.float32)


class Rounding(NamedTuple):
    """A grid and a direction, as arrays: one compiled program serves them all.

    Attributes:
        digits: of the significand, the leading one included.
        lowest: the exponent of the smallest normal number.
        largest: the largest finite number.
        up: the probability of rounding up; negative for rounding to nearest.
        seed: of the random directions.
    """

    digits: Any
    lowest: Any
    largest: Any
    up: Any
    seed: Any


def rounding(dtype: Any, up: float, seed: int = 0) -> Rounding:
    """The grid of a floating dtype."""
    info = ml_dtypes.finfo(dtype)
    return _rounding(info.nmant + 1, info.minexp, float(info.max), up, seed)


def noise(seed: int) -> Rounding:
    """A grid 16 times as coarse as float32's, in random directions."""
    return _rounding(20, -126, float(np.finfo(np.float32).max), 0.5, seed)


def exact() -> Rounding:
    """Float32's own grid, on which every value lies."""
    return _rounding(24, -126, float(np.finfo(np.float32).max), -1.0, 0)


def _rounding(digits: int, lowest: int, largest: float, up: float, seed: int) -> Rounding:
    grid = np.int32(digits), np.int32(lowest), np.float32(largest)
    return Rounding(*grid, np.float32(up), np.int32(seed * 7919))


@jax.jit
def round_to(x: Any, to: Rounding, salt: Any) -> Any:
    """A float32 array on the grid, infinite where that is too small.

    Args:
        x: the array.
        to: the grid and the direction.
        salt: tells the random directions of several calls apart.
    """
    bits = lax.bitcast_convert_type(x, jnp.int32)
    exponent = ((bits >> 23) & 0xFF) - 127
    # below float32's smallest normal number its arithmetic flushes to zero
    gap_exponent = lax.max(lax.max(exponent, to.lowest) - to.digits + 1, np.int32(-126))
    gap = lax.bitcast_convert_type((gap_exponent + 127) << 23, jnp.float32)
    scaled = x / gap
    upward = _uniform(bits, to.seed + salt) < to.up
    directed = lax.select(upward, lax.ceil(scaled), lax.floor(scaled))
    nearest = lax.round(scaled, lax.RoundingMethod.TO_NEAREST_EVEN)
    rounded = lax.select(lax.full_like(upward, to.up < 0), nearest, directed) * gap
    rounded = lax.select(lax.abs(rounded) > to.largest, lax.sign(x) * np.float32(np.inf), rounded)
    return lax.select(lax.is_finite(x), rounded, x)


def _uniform(bits: Any, seed: Any) -> Any:
    """A hash of each element's position and bits, in [0, 1)."""
    shape = bits.shape
    position = lax.reshape(lax.iota(jnp.int32, int(np.prod(shape))), shape)
    mixed = ((bits ^ (position * np.int32(0x2C1B3C6D))) + seed) * np.int32(0x297A2D39)
    mixed = (mixed ^ (mixed >> 15)) * np.int32(0x1B873593)
    return lax.convert_element_type((mixed >> 8) & 0xFFFF, jnp.float32) * np.float32(2.0**-16)


# ---------------------------------------------------------------- evaluation


def model(jaxpr: Any, widens: bool = False, outside: bool = False) -> Callable[..., list[Any]]:
    """A jaxpr as a function of (rounding at products, rounding elsewhere, *operands).

    Args:
        jaxpr: closed.
        widens: whether 16-bit values are held in float32, casts to them left out, as
            AlwaysF32 has them; the results are then left wide too.
        outside: whether it is a derivative that JAX takes of a program under the pass. A
            cotangent then passes every cast of the program, also where the derivative has
            no equation, and the results of its products are rounded.
    """

    def run(products: Rounding, elsewhere: Rounding, *args: Any) -> list[Any]:
        it = _Run(products, elsewhere, widens, outside)
        if not outside:
            return it.jaxpr(jaxpr, args)
        results = it.jaxpr(jaxpr, [it.rounded(x, elsewhere) for x in args])
        return [it.rounded(x, elsewhere) for x in results]

    return run


# Evaluated in their caller's place: the name of the param with the jaxpr.
_INLINED = {
    "jit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "eval_jaxpr": "jaxpr",
    "checkpoint": "jaxpr",
    "remat2": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vmap_call": "call",
    "linear_call": "callee",
    "composite": "jaxpr",
}
_DTYPES = ("new_dtype", "preferred_element_type", "out_dtype")


class _Run:
    def __init__(
        self, products: Rounding, elsewhere: Rounding, widens: bool, outside: bool
    ) -> None:
        self.products = products
        self.elsewhere = elsewhere
        self.widens = widens
        self.outside = outside
        self.salt = 0

    def jaxpr(self, jaxpr: Any, args: Sequence[Any], consts: Sequence[Any] = ()) -> list[Any]:
        opened = getattr(jaxpr, "jaxpr", jaxpr)
        consts = getattr(jaxpr, "consts", consts)
        env: dict[Any, Any] = {}
        env.update(zip(opened.constvars, map(self.held, consts), strict=False))
        env.update(zip(opened.invars, map(self.held, args), strict=True))

        def read(atom: Any) -> Any:
            if not isinstance(atom, jex.Literal):
                return env[atom]
            return self.held(jnp.asarray(atom.val, atom.aval.dtype))

        for eqn in opened.eqns:
            with eqn.ctx.manager:
                results = self.eqn(eqn, [read(v) for v in eqn.invars])
            env.update(zip(eqn.outvars, results, strict=True))
        return [read(v) for v in opened.outvars]

    def held(self, x: Any) -> Any:
        """A value as this run holds it: never weakly typed, float32 for 16 bits where widening."""
        dtype = getattr(x, "dtype", None)
        if self.widens and dtype in LOW:
            return lax.convert_element_type(x, jnp.float32)
        if dtype is None or jnp.issubdtype(dtype, jax.dtypes.extended):
            return x
        return lax.convert_element_type(x, dtype)

    def eqn(self, eqn: Any, args: list[Any]) -> list[Any]:
        name, params = eqn.primitive.name, eqn.params
        if name in _INLINED:
            found = params.get(_INLINED[name], params.get("call_jaxpr"))
            return self.jaxpr(found, args)
        control = _CONTROL.get(name)
        return self.leaf(eqn, args) if control is None else control(self, params, args)

    def leaf(self, eqn: Any, args: list[Any]) -> list[Any]:
        row = op(eqn.primitive.name)
        # a function of the user's own, applied to elements in place
        applies = eqn.primitive.name == "scatter" and eqn.params["update_jaxpr"] is not None
        if row.kind is OpKind.BOUNDARY or applies:
            pairs = zip(args, eqn.invars, strict=True)
            args = [_cast(x, v.aval.dtype) if self.widens else x for x, v in pairs]
            return [self.held(x) for x in _bind(eqn, args, eqn.params)]
        at = self.products if row.kind is OpKind.COMPUTE else self.elsewhere
        if not row.selects:
            args = [self.rounded(x, at) for x in args]
        results = _bind(eqn, args, self.params(eqn.params))
        # the product of two low operands may come out wide
        comes_wide = eqn.primitive.name == "dot_general" and not self.outside
        after = self.elsewhere if comes_wide else at
        return results if row.selects else [self.rounded(x, after) for x in results]

    def params(self, params: dict[str, Any]) -> dict[str, Any]:
        if not self.widens:
            return params
        wide = {name: F32 for name in _DTYPES if params.get(name) in LOW}
        combiner = params.get("update_jaxpr")
        if combiner is not None and any(v.aval.dtype in LOW for v in combiner.invars):
            wide["update_jaxpr"] = _widened(combiner)
        return {**params, **wide}

    def rounded(self, x: Any, to: Rounding) -> Any:
        if getattr(x, "dtype", None) != F32:
            return x
        self.salt += 1
        return round_to(x, to, np.int32(self.salt * 104729))

    # ------------------------------------------------------------ control flow

    def scan(self, params: dict[str, Any], args: list[Any]) -> list[Any]:
        if "num_consts" in params:
            n_consts, n_carry = params["num_consts"], params["num_carry"]
        else:  # 0.11 replaced the two counts by a tree of (consts, carry, xs)
            consts, carry, _ = params["ft_in"].unpack()
            n_consts, n_carry = len(list(consts)), len(list(carry))
        consts, init, xs = _split(args, n_consts, n_carry)

        def body(carry: Any, x: Any) -> Any:
            results = self.jaxpr(params["jaxpr"], [*consts, *carry, *x])
            return results[:n_carry], results[n_carry:]

        options = {name: params[name] for name in ("length", "reverse", "unroll")}
        carry, ys = lax.scan(body, init, xs, **options)
        return [*carry, *ys]

    def while_(self, params: dict[str, Any], args: list[Any]) -> list[Any]:
        of_cond, of_body, init = _split(args, params["cond_nconsts"], params["body_nconsts"])
        return lax.while_loop(
            lambda carry: self.jaxpr(params["cond_jaxpr"], [*of_cond, *carry])[0],
            lambda carry: self.jaxpr(params["body_jaxpr"], [*of_body, *carry]),
            init,
        )

    def cond(self, params: dict[str, Any], args: list[Any]) -> list[Any]:
        index, *operands = args
        branches = [lambda *xs, b=b: self.jaxpr(b, xs) for b in params["branches"]]
        return lax.switch(lax.convert_element_type(index, jnp.int32), branches, *operands)

    def linear_solve(self, params: dict[str, Any], args: list[Any]) -> list[Any]:
        lengths, jaxprs = params["const_lengths"], params["jaxprs"]
        start = lengths.matvec + lengths.vecmat
        consts = args[start : start + lengths.solve]
        return self.jaxpr(jaxprs.solve, [*consts, *args[sum(lengths) :]])


_CONTROL: dict[str, Callable[[_Run, dict[str, Any], list[Any]], list[Any]]] = {
    "scan": _Run.scan,
    "while": _Run.while_,
    "cond": _Run.cond,
    "custom_linear_solve": _Run.linear_solve,
}


def _split(args: list[Any], first: int, second: int) -> tuple[list[Any], list[Any], list[Any]]:
    return args[:first], args[first : first + second], args[first + second :]


def _bind(eqn: Any, args: Sequence[Any], params: dict[str, Any]) -> list[Any]:
    out = eqn.primitive.bind(*args, **eqn.primitive.get_bind_params(params))
    return list(out) if eqn.primitive.multiple_results else [out]


def _cast(x: Any, dtype: Any) -> Any:
    same = x.dtype == dtype or not jnp.issubdtype(dtype, jnp.floating)
    return x if same else lax.convert_element_type(x, dtype)


def _widened(combiner: Any) -> Any:
    """A scatter's jaxpr of two scalars, in float32."""

    def combine(*xs: Any) -> list[Any]:
        env = dict(zip(combiner.invars, xs, strict=True))
        for eqn in combiner.eqns:
            results = _bind(eqn, [env[v] for v in eqn.invars], eqn.params)
            env.update(zip(eqn.outvars, results, strict=True))
        return [env[v] for v in combiner.outvars]

    scalars = [jax.ShapeDtypeStruct((), F32) for _ in combiner.invars]
    traced = jax.make_jaxpr(combine)(*scalars)
    return getattr(traced, "jaxpr", traced)
