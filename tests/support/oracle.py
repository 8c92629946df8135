"""Interpreters of jaxprs on numpy values: as written, under a plan, and with noise.

`Plain` evaluates a jaxpr as it stands; `Planned` evaluates the original at the precisions
that a plan names, which is what a rewritten program must come to; `Noisy` evaluates the
original with products disturbed by a multiple of the low format's rounding, which tells how
far a value may lie from float32's.
"""

import contextlib
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import precpass as pp
from tests.support.jaxprs import LOW, PRODUCTS, opened
from tests.support.kernels import F64, Array, cast, is_float, leaf, retyped, to_numpy

Call = Callable[[int, Any, Sequence[Array]], list[Array]]

CALLS = {
    "jit": "jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
    "eval_jaxpr": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vmap_call": "call",
    "linear_call": "callee",
    "remat_opt": "fwd_jaxpr",
    "precpass_float64": "jaxpr",
}
CALLBACKS = frozenset({"debug_callback", "io_callback", "pure_callback"})
BODIES = frozenset({*CALLS, "scan", "while", "cond", "custom_linear_solve"})


def is_literal(atom: Any) -> bool:
    return hasattr(atom, "val")


def scan_split(params: Any) -> tuple[int, int]:
    """The numbers of constants and carries; 0.11 replaced the counts by a tree."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(list(consts)), len(list(carry))


def enter(eqn: Any, args: Sequence[Array], call: Call) -> list[Array]:
    """The results of an equation with bodies; `call(k, jaxpr, args)` evaluates the k-th one."""
    name, params = eqn.primitive.name, eqn.params
    if name == "scan":
        return _scan(eqn, args, call)
    if name == "while":
        return _while(eqn, args, call)
    if name == "cond":
        which = int(np.clip(int(args[0]), 0, len(params["branches"]) - 1))
        return call(which, params["branches"][which], args[1:])
    if name == "custom_linear_solve":
        lengths, jaxprs = params["const_lengths"], params["jaxprs"]
        before = [j for j in jaxprs[:2] if j is not None]
        start, stop = sum(lengths[:2]), sum(lengths[:3])
        return call(len(before), jaxprs.solve, [*args[start:stop], *args[sum(lengths) :]])
    # 0.12 calls eval_jaxpr's jaxpr as closed_call's
    key = next(key for key in (CALLS[name], "jaxpr", "call_jaxpr") if key in params)
    return call(0, params[key], args)


def _scan(eqn: Any, args: Sequence[Array], call: Call) -> list[Array]:
    consts, carries = scan_split(eqn.params)
    held, carry = list(args[:consts]), list(args[consts : consts + carries])
    xs, body = args[consts + carries :], eqn.params["jaxpr"]
    rows: list[list[Array]] = []
    order = range(eqn.params["length"])
    for i in reversed(order) if eqn.params["reverse"] else order:
        out = call(0, body, [*held, *carry, *(to_numpy(x[i]) for x in xs)])
        carry = out[:carries]
        rows.append(out[carries:])
    if eqn.params["reverse"]:
        rows.reverse()
    ys: list[Array] = []
    for at, var in enumerate(eqn.outvars[carries:]):
        stacked = [row[at] for row in rows]
        if not stacked:
            ys.append(np.zeros(var.aval.shape, var.aval.dtype))
        elif isinstance(stacked[0], jax.Array):
            ys.append(jnp.stack(stacked))
        else:
            ys.append(np.stack(stacked))
    return carry + ys


def _while(eqn: Any, args: Sequence[Array], call: Call) -> list[Array]:
    n_cond, n_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    tests, consts = list(args[:n_cond]), list(args[n_cond : n_cond + n_body])
    carry = list(args[n_cond + n_body :])
    while True:
        (going,) = call(0, eqn.params["cond_jaxpr"], [*tests, *carry])
        if not going.any():
            return carry
        new = call(1, eqn.params["body_jaxpr"], [*consts, *carry])
        # a predicate with batch dimensions: what is done waits for the rest
        carry = [_chosen(going, a, b) for a, b in zip(new, carry, strict=True)]


def _chosen(going: Array, new: Array, old: Array) -> Array:
    if going.all():
        return new
    return np.where(going.reshape(going.shape + (1,) * (new.ndim - going.ndim)), new, old)


DECIDING = {"eq", "ne", "lt", "le", "gt", "ge", "eq_to", "le_to", "lt_to", "is_finite"}
DECIDING |= {"argmax", "argmin", "floor", "ceil", "round", "sign"}
SELECTING = {"max", "min", "clamp", "abs", "reduce_max", "reduce_min", "cummax", "cummin"}
SELECTING |= {"sort", "top_k", "rem", "scatter-min", "scatter-max", "reduce_window_max"}
SELECTING |= {"reduce_window_min", "select_and_gather_add", "select_and_scatter_add"}


class Plain:
    """A jaxpr as it stands.

    Attributes:
        decisions: what every comparison and selection decided, in order: two runs whose
            decisions differ stand on two sides of a discontinuity.
    """

    def __init__(self) -> None:
        self.decisions: list[bytes] = []

    def run(self, jaxpr: Any, args: Sequence[Any]) -> list[Array]:
        """Its results."""
        with np.errstate(all="ignore"):
            return self.body(jaxpr, [to_numpy(x) for x in args])

    def body(self, jaxpr: Any, args: Sequence[Array]) -> list[Array]:
        inner, env = opened(jaxpr), entered(jaxpr, args)
        for eqn in inner.eqns:
            given = [read(env, v) for v in eqn.invars]
            out = self.equation(eqn, given)
            for var, value in zip(eqn.outvars, out, strict=True):
                assert (value.shape, value.dtype) == (var.aval.shape, var.aval.dtype), eqn
                env[var] = value
        return [read(env, v) for v in inner.outvars]

    def equation(self, eqn: Any, args: Sequence[Array]) -> list[Array]:
        if eqn.primitive.name in CALLBACKS:
            return [*map(np.asarray, eqn.params["callback"](*args) or ())]
        if eqn.primitive.name in BODIES:
            in_x64 = eqn.primitive.name == "precpass_float64"
            with jax.enable_x64(True) if in_x64 else contextlib.nullcontext():
                return enter(eqn, args, lambda _, jaxpr, xs: self.body(jaxpr, xs))
        return self.leaf(eqn, args)

    def leaf(self, eqn: Any, args: Sequence[Array]) -> list[Array]:
        out, name = leaf(eqn, args), eqn.primitive.name
        if name in DECIDING or (name == "convert_element_type" and _truncates(eqn)):
            self.decisions.append(out[0].tobytes())
        elif name in SELECTING and is_float(eqn.invars[0].aval):
            self.decisions.append(_selection(name, args))
        return out


def entered(jaxpr: Any, args: Sequence[Array]) -> dict[Any, Array]:
    """The values of a jaxpr's arguments and constants."""
    consts = map(to_numpy, map(jnp.asarray, getattr(jaxpr, "consts", ())))
    of_consts = zip(opened(jaxpr).constvars, consts, strict=False)
    return {**dict(zip(opened(jaxpr).invars, args, strict=True)), **dict(of_consts)}


def read(env: dict[Any, Array], atom: Any) -> Array:
    return np.asarray(atom.val, atom.aval.dtype) if is_literal(atom) else env[atom]


MOVING = frozenset({"slice", "reshape", "broadcast_in_dim", "transpose", "squeeze"})


class Noisy(Plain):
    """Products' operands and results are disturbed, and so is what the user made low.

    Args:
        formats: those in which a product may be.
        amplitude: of the disturbance, in unit roundoffs.
        seed: of the disturbance.
    """

    def __init__(self, formats: Collection[np.dtype], amplitude: float, seed: int) -> None:
        self.formats, self.amplitude = formats, amplitude
        self.rng = np.random.default_rng(seed)
        super().__init__()

    def _disturbed(self, x: Array, formats: Collection[np.dtype]) -> Array:
        infos = [jnp.finfo(dtype) for dtype in formats]
        roundoff = max(float(info.eps) / 2 for info in infos)
        smallest = max(float(info.smallest_subnormal) for info in infos)
        noise = self.rng.uniform(-1, 1, x.shape) * self.amplitude
        wide = x.astype(F64)
        return (wide + noise * np.maximum(np.abs(wide) * roundoff, smallest)).astype(x.dtype)

    def leaf(self, eqn: Any, args: Sequence[Array]) -> list[Array]:
        name = eqn.primitive.name
        given = list(args)
        is_product = name in PRODUCTS and is_float(eqn.outvars[0].aval)
        if is_product:
            given[:2] = [self._disturbed(x, self.formats) for x in given[:2]]
        out = super().leaf(eqn, given)
        held = eqn.outvars[0].aval.dtype if eqn.outvars else None
        if is_product:
            out[0] = self._disturbed(out[0], self.formats)
        if held in LOW and name not in MOVING:
            out[0] = self._disturbed(out[0], (held,))
        return out


def _truncates(eqn: Any) -> bool:
    return is_float(eqn.invars[0].aval) and not is_float(eqn.outvars[0].aval)


def _selection(name: str, args: Sequence[Array]) -> bytes:
    if name in ("max", "min"):
        return (args[0] >= args[1]).tobytes()
    if name == "clamp":
        return ((args[1] >= args[0]).astype(np.int8) + (args[1] >= args[2])).tobytes()
    if name == "abs":
        return (args[0] >= 0).tobytes()
    # which elements were chosen: the order of the operand's own elements
    return np.argsort(args[0].astype(F64), axis=None, kind="stable").tobytes()


class Planned:
    """The original at the precisions of a plan.

    Operands of what is lowered are rounded, sums are taken wide, results rounded to the
    format in which they are said to be stored. What a float64 equation makes is float64 to
    other such equations, and rounded to whatever else reads it.

    Attributes:
        products: equation, decision and operands as they were before rounding, of every
            product that was run, but for those of the backward pass of a branch: what it reads
            shares its place with what another branch saves, which may be no whole numbers.
    """

    def __init__(self) -> None:
        self.products: list[tuple[Any, Any, list[Array]]] = []
        self._branches = 0

    def run(self, jaxpr: Any, plan: pp.Plan, args: Sequence[Any]) -> list[Array]:
        """Its results, with the avals of the original."""
        with np.errstate(all="ignore"):
            out = self.body(jaxpr, plan, [to_numpy(x) for x in args])
        return [cast(x, v.aval.dtype) for x, v in zip(out, opened(jaxpr).outvars, strict=True)]

    def body(self, jaxpr: Any, plan: pp.Plan, args: Sequence[Array]) -> list[Array]:
        inner, env = opened(jaxpr), entered(jaxpr, args)
        for eqn, decision in zip(inner.eqns, plan.decisions, strict=True):
            out = self.equation(env, eqn, decision)
            env.update(zip(eqn.outvars, out, strict=True))
        return _crossing([read(env, v) for v in inner.outvars], inner.outvars, plan)

    def equation(self, env: dict[Any, Array], eqn: Any, decision: pp.types.Decision) -> list[Array]:
        name = eqn.primitive.name
        held = [read(env, v) for v in eqn.invars]
        written = [cast(x, v.aval.dtype) for x, v in zip(held, eqn.invars, strict=True)]
        leaves_out = decision.action is pp.types.Action.DROP and name == "transpose"
        if decision.action is pp.types.Action.DROP and not leaves_out:
            return [cast(held[0], decision.compute.dtype)]
        if name in CALLBACKS:
            return [*map(np.asarray, eqn.params["callback"](*written) or ())]
        if name in BODIES and decision.action is pp.types.Action.ENTER:
            is_backward = name == "cond" and "transpose" in str(eqn.source_info.name_stack)
            self._branches += is_backward
            results = enter(eqn, held, self._caller(decision))
            self._branches -= is_backward
            return _stored(results, decision) if decision.keeps_rounding else results
        if decision.kind is pp.types.OpKind.COMPUTE and not self._branches:
            self.products.append((eqn, decision, written))
        if decision.action is pp.types.Action.WIDEN:
            wide = decision.compute.dtype
            given = [
                cast(x, wide) if is_float(v.aval) else x
                for x, v in zip(held, eqn.invars, strict=True)
            ]
            return leaf(retyped(eqn, wide), given)
        # a transpose that is left out still rounds where it was to be low
        rounds = decision.action is pp.types.Action.LOWER or (leaves_out and any(decision.stored))
        if not rounds:
            assert decision.action is pp.types.Action.KEEP or leaves_out
            return _stored(leaf(eqn, written), decision)
        low = decision.compute.dtype
        rounded = [
            cast(cast(x, low), x.dtype) if is_float(v.aval) else x
            for x, v in zip(written, eqn.invars, strict=True)
        ]
        largest = decision.compute.max
        for at in (*decision.clipped, *(at for at, _ in decision.numbers)):
            finite = np.isfinite(written[at])
            clipped = cast(np.clip(written[at], -largest, largest), low)
            rounded[at] = np.where(finite, cast(clipped, written[at].dtype), written[at])
        out = _stored(_leaf_in(eqn, low, rounded), decision)
        if decision.product.low_result:
            out = [cast(cast(x, low), x.dtype) for x in out]
        return out

    def _caller(self, decision: pp.types.Decision) -> Call:
        def call(k: int, jaxpr: Any, args: Sequence[Array]) -> list[Array]:
            plan, invars = decision.inner[k], opened(jaxpr).invars
            given = _rounded(_crossing(args, invars, plan), plan.border_copies.operands)
            return _rounded(self.body(jaxpr, plan, given), plan.border_copies.results)

        return call


def _leaf_in(eqn: Any, low: Any, args: Sequence[Array]) -> list[Array]:
    """The results of an equation whose steps, if JAX lowers it to several, are rounded each."""
    if eqn.primitive.name != "one_minus_square":  # since 0.12
        return leaf(eqn, args)
    one = np.asarray(1, args[0].dtype)
    more, less = (cast(cast(x, low), one.dtype) for x in (one + args[0], one - args[0]))
    return [more * less]


def _stored(values: Sequence[Array], decision: pp.types.Decision) -> list[Array]:
    """Results as they are left by the formats in which they are stored."""
    pairs = zip(values, decision.stored, strict=True)
    return [cast(cast(x, p.dtype), x.dtype) if p is not None else x for x, p in pairs]


def _rounded(values: Sequence[Array], border_copies: Any) -> list[Array]:
    """Values of which those that cross a border on 16 bits are what these left of them."""
    left = list(values)
    for border_copy in border_copies:
        if border_copy.rounds:
            position, low = border_copy.position, border_copy.precision
            left[position] = cast(cast(left[position], low.dtype), left[position].dtype)
    return left


def _crossing(values: Sequence[Array], atoms: Sequence[Any], plan: pp.Plan) -> list[Array]:
    """Values in the formats in which they cross the border of a plan's jaxpr."""
    border = {own.dtype: wide.dtype for own, wide in plan.border}
    dtypes = (getattr(v.aval, "dtype", None) for v in atoms)
    return [cast(x, border.get(d, d)) for x, d in zip(values, dtypes, strict=True)]
