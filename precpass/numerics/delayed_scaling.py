"""`delayed_scaling`: the scales of products in 8 bits from earlier calls, as explicit state."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from precpass import jaxpr as ir
from precpass.analysis.graph import Graph
from precpass.api import mixed_of
from precpass.jit.staged import Staged, owner_of
from precpass.jit.traced import Traced
from precpass.policy.policy import PolicyLike
from precpass.policy.precision import Precision
from precpass.policy.presets import AutoMixedF8
from precpass.policy.scopes import clean_scope, join_scopes
from precpass.policy.warned import PrecisionWarning, quietly
from precpass.rewrite.scaled_product import GivenRounding, power_of_two_scale

__all__ = ["DelayedScales", "DelayedScaling", "delayed_scaling"]

P = ParamSpec("P")
R = TypeVar("R")

_PRECISIONS = {p.dtype: p for p in Precision if p.is_scaled}


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["history"], meta_fields=["places"]
)
@dataclasses.dataclass(frozen=True, repr=False)
class DelayedScales:
    """The largest magnitudes of the operands of scaled products, in some calls.

    It is a pytree of one array, which for example orbax saves.

    Attributes:
        history: float32 `[operands, calls]`, the newest call first; 0 for a call that was not made,
            and for an operand without a finite number that is not zero.
        places: for each operand its format, its shape, and the name scopes of its product.
    """

    history: Any
    places: tuple[str, ...]

    def __repr__(self) -> str:
        operands, calls = self.history.shape
        return f"<DelayedScales of {operands} operands, {calls} calls>"

    def saturated(self) -> list[str]:
        """The places where the newest call had values beyond the largest number of the format.

        They became that number, because the calls before had smaller ones. Only what has 8 bits by
        an earlier scale can be beyond it, so the first call is none.
        """
        newest, before = np.asarray(self.history[:, 0]), np.asarray(self.history[:, 1:])
        scales = np.asarray(_scales(jnp.asarray(before), self.places))
        most = np.asarray([_precision_at(place).max for place in self.places], np.float32)
        known = before.any(axis=1) & (newest > scales * most)
        return [place for place, is_beyond in zip(self.places, known, strict=True) if is_beyond]


def delayed_scaling(
    fn: Callable[P, R], policy: PolicyLike = AutoMixedF8, *, history: int = 16
) -> DelayedScaling[P, R]:
    """Takes the scales of products in 8 bits from earlier calls; a call makes fn's updates.

    A scale of the present values costs a pass over them before they can be rounded. With delayed
    scaling (Micikevicius et al., "FP8 Formats for Deep Learning", 2022) the scale is that of the
    largest magnitude in the last calls, so that a value is rounded where it is computed. What is
    larger than in all of these calls becomes the largest number of its format.

    `scales = scaled.init(*args)` runs one call with scales of the present values, and records the
    largest magnitudes. `out, scales = scaled(scales, *args)` is a call that also records its own.
    `scaled.frozen(scales)` is a function of the arguments alone, with scales that stay as they are.

    An operand of a product inside a loop has one scale for all trips, and int8 one for the whole
    array. Products inside a `shard_map` and in a while loop's condition keep scales of the
    present values, and so do the `QuantizedArray`s, which have 8 bits before the call.

    Args:
        fn: as for `auto_mixed`; the whole `jax.value_and_grad(loss)` for training.
        policy: a policy with products in 8 bits.
        history: how many calls are remembered.

    Raises:
        ValueError: for a `history` that is no whole number of at least 1; in a call, for the scales
            of another program.
        TypeError: in a call through which a derivative is taken, or without `DelayedScales`.

    Warns:
        PrecisionWarning: in `init`, if the program has no products in 8 bits.

    Examples:
        >>> def layers(ws, x):
        ...     for w in ws:
        ...         x = jnp.tanh(x @ w)
        ...     return x
        >>> ws, x = [jnp.eye(256)] * 3, jnp.ones((256, 256))
        >>> scaled = delayed_scaling(layers)
        >>> scales = scaled.init(ws, x)
        >>> out, scales = scaled(scales, ws, x)
        >>> scales.places
        ('f8e4m3[256,256]', 'f8e4m3[256,256]')
    """
    return DelayedScaling(fn, policy, history)


class DelayedScaling(Generic[P, R]):
    """The function that `delayed_scaling` returns.

    Attributes:
        history: as for `delayed_scaling`.
    """

    def __init__(self, fn: Callable[..., Any], policy: PolicyLike, history: int) -> None:
        whole = isinstance(history, int) and not isinstance(history, bool)  # pyright: ignore[reportUnnecessaryIsInstance] -- user input
        if not (whole and history >= 1):
            raise ValueError(
                f"delayed_scaling(history={history!r}): it is to be a whole number of 1 or more"
            )
        fn, self._owner = owner_of(fn)
        mixed = mixed_of(fn, policy=policy)
        functools.update_wrapper(self, mixed, updated=())
        self.history = history
        first = functools.partial(_first, history)
        self._first = Staged(mixed, first, ("delayed scaling, first", history), on_copies=True)
        self._next = Staged(mixed, _next, "delayed scaling")
        self._frozen = Staged(mixed, _frozen, "frozen scales")

    def init(self, /, *args: P.args, **kwargs: P.kwargs) -> DelayedScales:
        """The scales of one call, which runs with scales of the present values.

        Under `jax.eval_shape` it gives the shapes to restore a checkpoint into.
        """
        given: tuple[Any, ...] = args
        scales = self._first((), (*self._owner, *given), kwargs)[1]
        if not scales.places:
            warnings.warn(
                f"delayed_scaling: {getattr(self, '__name__', 'the function')} has no products in "
                "8 bits here: explain says why",
                PrecisionWarning,
                stacklevel=2,
            )
        return scales

    def calibrated(self, batches: Iterable[tuple[Any, ...]]) -> DelayedScales:
        """The scales for all of some batches, each a tuple of arguments, for `frozen`.

        Raises:
            ValueError: for no batches.
            TypeError: for a batch that is no tuple.
        """
        found: DelayedScales | None = None
        for batch in batches:
            if not isinstance(batch, tuple):  # pyright: ignore[reportUnnecessaryIsInstance] -- user input
                raise TypeError(
                    f"calibrated: a batch is a {type(batch).__name__}, and is to be a tuple of the "
                    "function's arguments: (batch,) for one"
                )
            scales = self._first((), (*self._owner, *batch), {})[1]
            if found is not None:
                _check(found, scales.places)
                largest = jnp.maximum(found.history, scales.history)
                scales = dataclasses.replace(scales, history=largest)
            found = scales
        if found is None:
            raise ValueError("calibrated: there are no batches: give at least one")
        return found

    def __call__(
        self, scales: DelayedScales, /, *args: P.args, **kwargs: P.kwargs
    ) -> tuple[R, DelayedScales]:
        """The output, and the scales with this call's largest magnitudes."""
        given: tuple[Any, ...] = args
        return self._next((_checked(scales),), (*self._owner, *given), kwargs)

    def frozen(self, scales: DelayedScales) -> Callable[P, R]:
        """The function with these scales in every call; it records nothing."""
        checked, owner = _checked(scales), self._owner

        def with_frozen_scales(*args: P.args, **kwargs: P.kwargs) -> R:
            given: tuple[Any, ...] = args
            return self._frozen((checked,), (*owner, *given), kwargs)[0]

        return with_frozen_scales

    def __repr__(self) -> str:
        return f"<delayed scaling of {getattr(self, '__name__', '<unnamed function>')}>"


def _checked(scales: Any) -> DelayedScales:
    if not isinstance(scales, DelayedScales):
        raise TypeError(
            f"the first argument is the DelayedScales, not a {type(scales).__name__}: begin with "
            "scales = scaled.init(*args)"
        )
    return scales


def _check(scales: DelayedScales, places: tuple[str, ...]) -> None:
    if scales.places != places:
        pairs = zip(scales.places, places, strict=False)
        other = next((f"{a!r} and not {b!r}" for a, b in pairs if a != b), "")
        raise ValueError(
            f"these DelayedScales are of another program: they have {len(scales.places)} operands "
            f"and this one {len(places)}{', and ' if other else ''}{other}; begin with "
            "scaled.init(*args)"
        )


# ---------------------------------------------------------------- one call


def _first(history: int, traced: Traced) -> tuple[list[Any], DelayedScales]:
    program = _Program(traced)
    results, largest = program.run(None)
    before = jnp.zeros((len(program.places), history - 1), np.float32)
    return results, DelayedScales(jnp.concatenate([largest[:, None], before], 1), program.places)


def _next(traced: Traced, scales: DelayedScales) -> tuple[list[Any], DelayedScales]:
    program = _Program(traced)
    if traced.policy is None:  # the pass is switched off
        return program.run(None)[0], scales
    _check(scales, program.places)
    results, largest = program.run(_scales(scales.history, scales.places))
    history = jnp.concatenate([largest[:, None], scales.history[:, :-1]], 1)
    return results, dataclasses.replace(scales, history=history)


def _frozen(traced: Traced, scales: DelayedScales) -> tuple[list[Any], None]:
    program = _Program(traced)
    if traced.policy is None:
        return program.run(None)[0], None
    _check(scales, program.places)
    # What was recorded is not read, and so not computed.
    return program.run(_scales(scales.history, scales.places))[0], None


def _scales(history: Any, places: Sequence[str]) -> Any:
    """The scale of each operand, of the largest magnitude in its history."""
    formats = [_precision_at(place) for place in places]
    most = np.asarray([p.max for p in formats], np.float32)
    is_int8 = np.asarray([p is Precision.INT8 for p in formats], bool)
    largest = jnp.max(history, axis=1, initial=np.float32(0))
    # int8 has no exponents, so a scale that is a power of two would waste up to half of its range.
    exact = jnp.where(largest > 0, largest / most, np.float32(1.0))
    return jnp.where(is_int8, exact, power_of_two_scale(largest, most))


def _precision_at(place: str) -> Precision:
    return Precision.parse(place.partition("[")[0])


class _Program:
    """The program of a traced call under its policy, with the operands that it rounds to 8 bits.

    Attributes:
        places: as in `DelayedScales`.
    """

    def __init__(self, traced: Traced) -> None:
        self._jaxpr, self._operands = traced.under_policy(), traced.undifferentiated(_ADVICE)
        graph = Graph.build(self._jaxpr)
        rows = [i for i, eqn in enumerate(graph.eqns) if ir.rounds_to_eight_bits(eqn)]
        self._positions = {id(graph.eqns[row]): at for at, row in enumerate(rows)}
        self.places = tuple(_place(graph, row) for row in rows)

    def run(self, scales: Any) -> tuple[list[Any], Any]:
        """The results, and the largest finite magnitude of each operand.

        Args:
            scales: the scale of each operand, or None for scales of the present values.
        """

        def evaluated(eqn: ir.Eqn, operands: Sequence[Any], given: Sequence[Any]) -> Sequence[Any]:
            if scales is None or id(eqn) not in self._positions:
                return ir.bind(eqn, operands)
            low, scale = eqn.outvars
            rounding = GivenRounding(_PRECISIONS[low.aval.dtype], tuple(scale.aval.shape))
            return ir.scaling(rounding, operands[0], given[0][self._positions[id(eqn)]])

        given = [jnp.zeros(len(self.places)) if scales is None else scales]
        look = _Largest(self._positions)
        with quietly():
            results, record, _ = ir.watched(
                self._jaxpr, self._operands, look, given=given, evaluate=evaluated
            )
        # A row that did not run is left out.
        at = jnp.where(record["at"] < 0, len(self.places), record["at"])
        largest = jnp.zeros(len(self.places), np.float32)
        return results, largest.at[at].max(record["largest"], mode="drop")


def _place(graph: Graph, row: int) -> str:
    eqn = graph.eqns[row]
    low, _ = eqn.outvars
    shape = ",".join(map(str, low.aval.shape))
    scopes = clean_scope(join_scopes(graph.scope(row), ir.scope_of(eqn))).split("/")
    own = "/".join(scope for scope in scopes if not scope.startswith("precpass."))
    where = f" in {own}" if own else ""
    return f"{_PRECISIONS[low.aval.dtype]}[{shape}]{where}"


@dataclasses.dataclass(frozen=True)
class _Largest:
    """The `ir.Look` that records the largest finite magnitudes of what is rounded to 8 bits.

    A row has the operand's position and its magnitude, -1 and 0 if it did not run.

    Attributes:
        positions: of each operand, by the identity of the equation that rounds it.
    """

    positions: dict[int, int]

    def sees(self, eqn: ir.Eqn) -> bool:
        return id(eqn) in self.positions

    def record(self, ran: Sequence[ir.Ran]) -> dict[str, Any]:
        # An array would be a constant, and the jaxpr of a checkpoint has none.
        at = [lax.full((), self.positions[id(step.eqn)], np.int32) for step in ran]
        largest = [_largest(step.operands[0]) for step in ran]
        return {"at": jnp.stack(at), "largest": jnp.stack(largest)}

    def none(self, places: int) -> dict[str, Any]:
        return {
            "at": lax.full((places,), -1, np.int32),
            "largest": lax.full((places,), 0, np.float32),
        }

    def joined(self, one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
        return jax.tree.map(lax.max, one, other)

    def in_trip(self, record: dict[str, Any], trip: Any) -> dict[str, Any]:
        del trip
        return record

    def over_shards(self, record: dict[str, Any], axes: tuple[str, ...]) -> dict[str, Any]:
        return jax.tree.map(lambda x: lax.pmax(x, axes), record)


def _largest(x: Any) -> Any:
    sizes = jnp.where(jnp.isfinite(x), jnp.abs(x), np.zeros((), x.dtype)).astype(np.float32)
    return jnp.max(sizes, initial=np.float32(0))


_ADVICE = (
    "no derivative is taken through delayed scaling: scale the gradient itself, "
    "delayed_scaling(jax.grad(loss)) for jax.grad(delayed_scaling(loss))"
)
