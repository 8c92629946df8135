"""`delayed_scaling`: take the scales of 8-bit products from earlier calls, as explicit state."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, NoReturn, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from precpass import jaxpr as ir
from precpass.api import mixed_of
from precpass.jit.staged import Staged, owner_of
from precpass.jit.traced import Traced
from precpass.numerics.delayed_records import LARGEST, LOST, PRECISIONS, LostValues, room_above
from precpass.policy.policy import PolicyLike
from precpass.policy.precision import Precision
from precpass.policy.presets import AutoMixedF8
from precpass.policy.scopes import clean_scope
from precpass.policy.warned import PrecisionWarning, quietly
from precpass.rewrite.scaled_product import GivenRounding
from precpass.rewrite.scales import power_of_two_scale
from precpass.units import counted, listed

__all__ = ["DelayedScales", "DelayedScaling", "delayed_scaling"]

P = ParamSpec("P")
R = TypeVar("R")


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["history"], meta_fields=["formats", "places"]
)
@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class DelayedScales:
    """The largest magnitudes of the operands of scaled products in recent calls.

    It is a pytree of one array, which for example orbax saves.

    Attributes:
        history: float32 `[operands, calls]`, the newest call first; 0 for a call that was not made,
            and for an operand without a finite nonzero number.
        formats: the format of each operand.
        places: for each operand the format, the name scopes and the line of its matrix product,
            and the loops and branches around it, in words.
    """

    history: Any
    formats: tuple[Precision, ...]
    places: tuple[str, ...]

    def __repr__(self) -> str:
        return f"<DelayedScales of {counted(len(self.places), 'operand')}>"

    def saturated(self) -> list[str]:
        """Return the places where the newest call exceeded the largest number of the format.

        Such values became that number, because all earlier values were smaller. With a history
        of one call no place is known. `DelayedScaling.lost` returns the share of these values.
        """
        history = np.asarray(self.history)
        newest, before = history[..., 0], history[..., 1:]
        if not before.any():
            return []
        largest = np.where(before.any(-1), before.max(-1, initial=0.0), np.float32(1.0))
        # A power of two may leave room above the largest magnitude.
        most = np.asarray([p.max for p in self.formats]) * np.asarray(
            _scales(largest, self.formats)
        )
        room = np.asarray(list(map(room_above, self.formats)))
        is_beyond = newest > most * (1.0 + room)
        return self._where(is_beyond)

    def unseen(self) -> list[str]:
        """Return the places that had no finite nonzero number in any remembered call.

        They are in a branch that was not taken, or are zero, as a weight may be at first. Their
        scale is that of a largest magnitude of 1.
        """
        return self._where(~np.asarray(self.history).any(-1))

    def _where(self, chosen: Any) -> list[str]:
        """The places that are chosen, in one of the states if `jax.vmap` made several."""
        if not self.places:
            return []
        each: list[bool] = np.any(np.reshape(chosen, (-1, len(self.places))), axis=0).tolist()
        return [place for place, is_chosen in zip(self.places, each, strict=True) if is_chosen]


def delayed_scaling(
    fn: Callable[P, R], policy: PolicyLike = AutoMixedF8, *, history: int = 16
) -> DelayedScaling[P, R]:
    """Run 8-bit matrix products with scales from earlier calls; in-place updates take effect.

    A scale of the present values costs a pass over them before they can be rounded. With delayed
    scaling (Micikevicius et al., "FP8 Formats for Deep Learning", 2022) the scale is that of the
    largest magnitude in the last calls, so a value is rounded where it is computed. A value that is
    larger than in all of these calls becomes the largest number of its format.

    `scales = scaled.init(*args)` runs one call with scales of the present values, and records the
    largest magnitudes. `out, scales = scaled(scales, *args)` runs a call and also records its own.
    `scaled.frozen(scales)` is a function of the arguments alone, whose scales do not change.

    An operand of a product inside a loop has one scale for all trips, and in int8 one for the whole
    array. Products inside a `shard_map` and in a while loop's condition use scales of the present
    values, and so do `QuantizedArray`s, which have 8 bits before the call. An operand that was zero
    in all remembered calls is rounded as if its largest magnitude were 1.

    Args:
        fn: as for `auto_mixed`; the whole `jax.value_and_grad(loss)` for training.
        policy: a policy with matrix products in 8 bits.
        history: how many calls are remembered.

    Raises:
        ValueError: if `history` is not a whole number of at least 1; in a call, for the scales of
            another program.
        TypeError: in a call through which a derivative is taken, or without `DelayedScales`.

    Warns:
        PrecisionWarning: in `init`, if the program has no matrix products in int8 or float8.

    Examples:
        >>> def layers(ws, x):
        ...     for w in ws:
        ...         x = jnp.tanh(x @ w)
        ...     return x
        >>> ws, x = [jnp.eye(256)] * 3, jnp.ones((256, 256))
        >>> scaled = delayed_scaling(layers)
        >>> scales = scaled.init(ws, x)
        >>> out, scales = scaled(scales, ws, x)
        >>> scales
        <DelayedScales of 2 operands>
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
        self._lost = Staged(mixed, _lost, "lost values")

    def init(self, /, *args: P.args, **kwargs: P.kwargs) -> DelayedScales:
        """Run one call with scales of the present values, and return its scales.

        With shapes in the place of arrays it returns the shapes to restore a checkpoint into.
        """
        given: tuple[Any, ...] = args
        leaves = jax.tree.leaves((given, kwargs))
        is_shape = any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves)
        run = self._first.shape if is_shape else self._first
        scales = run((), (*self._owner, *given), kwargs)[1]
        if not scales.places:
            warnings.warn(
                f"delayed_scaling: {getattr(self, '__name__', 'the function')} has no products "
                "in int8 or f8e4m3 here: explain says why",
                PrecisionWarning,
                stacklevel=2,
            )
        return scales

    def calibrated(self, batches: Iterable[tuple[Any, ...]]) -> DelayedScales:
        """Return scales for all of some batches, each a tuple of arguments, to use in `frozen`.

        Raises:
            ValueError: for no batches.
            TypeError: for a batch that is not a tuple.
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
                if len(found.places) != len(scales.places):
                    _refuse(found, len(scales.places))
                largest = jnp.maximum(found.history, scales.history)
                scales = dataclasses.replace(scales, history=largest)
            found = scales
        if found is None:
            raise ValueError("calibrated: there are no batches: give at least one")
        return found

    def __call__(
        self, scales: DelayedScales, /, *args: P.args, **kwargs: P.kwargs
    ) -> tuple[R, DelayedScales]:
        """Run the function, with its in-place updates, and return its output and updated scales.

        The scales have this call's largest magnitudes added.
        """
        given: tuple[Any, ...] = args
        return self._next((_checked(scales),), (*self._owner, *given), kwargs)

    def lost(self, scales: DelayedScales, /, *args: P.args, **kwargs: P.kwargs) -> list[LostValues]:
        """Run the function, with its in-place updates, and return what these scales lose.

        That is the share of each operand's values that they saturate or flush.

        Examples:
            >>> scaled = delayed_scaling(lambda ws, x: x @ ws[0] @ ws[1] @ ws[2])
            >>> ws, x = [jnp.eye(256)] * 3, jnp.ones((256, 256))
            >>> larger = [100 * w for w in ws]  # 255 in 256 of their elements are zero
            >>> [each.saturated for each in scaled.lost(scaled.init(ws, x), larger, x)]
            [1.0, 0.00390625]
        """
        given: tuple[Any, ...] = args
        counted = self._lost((_checked(scales),), (*self._owner, *given), kwargs)[1]
        saturated, flushed, total = np.moveaxis(np.asarray(counted, np.float64), -1, 0)
        # No value at all is rounded in a branch that is not taken.
        parts = zip(saturated / np.maximum(total, 1), flushed / np.maximum(total, 1), strict=True)
        each = zip(scales.places, parts, strict=True)
        return [LostValues(place, float(a), float(b)) for place, (a, b) in each]

    def frozen(self, scales: DelayedScales) -> Callable[P, R]:
        """Return the function with these scales in every call; it records nothing."""
        checked, owner = _checked(scales), self._owner
        unseen: list[str] = []
        if not isinstance(scales.history, jax.ShapeDtypeStruct):
            with contextlib.suppress(jax.errors.TracerArrayConversionError):
                unseen = checked.unseen()
        if unseen:
            warnings.warn(
                f"frozen: {counted(len(unseen), 'operand')} had no number but zero in these calls, "
                f"and will be rounded as if the largest were 1: {listed(unseen, 3)}",
                PrecisionWarning,
                stacklevel=2,
            )

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


# ---------------------------------------------------------------- one call


def _first(history: int, traced: Traced) -> tuple[list[Any], DelayedScales]:
    results, largest, places = _Program(traced).run(None)
    before = jnp.zeros((len(places), history - 1), np.float32)
    magnitudes = jnp.concatenate([largest[:, None], before], 1)
    return results, DelayedScales(magnitudes, _formats(places), tuple(map(_text, places)))


def _next(traced: Traced, scales: DelayedScales) -> tuple[list[Any], DelayedScales]:
    results, largest = _with_scales(traced, scales)
    if traced.policy is None:  # the pass is switched off
        return results, scales
    history = jnp.concatenate([largest[:, None], scales.history[:, :-1]], 1)
    return results, dataclasses.replace(scales, history=history)


def _frozen(traced: Traced, scales: DelayedScales) -> tuple[list[Any], None]:
    # What was recorded is not read, and so not computed.
    return _with_scales(traced, scales)[0], None


def _lost(traced: Traced, scales: DelayedScales) -> tuple[list[Any], Any]:
    if traced.policy is None:  # the pass is switched off, and nothing is rounded
        return _Program(traced).run(None)[0], jnp.zeros((len(scales.places), 3), np.float32)
    return _with_scales(traced, scales, LOST)


def _with_scales(
    traced: Traced, scales: DelayedScales, look: Any = LARGEST
) -> tuple[list[Any], Any]:
    """The results of a call with given scales, and what a look records of the operands."""
    program = _Program(traced)
    if traced.policy is None:
        return program.run(None)[:2]
    if scales.history.shape[:-1] != (program.count,):
        _refuse(scales, program.count)
    largest = jnp.max(scales.history, axis=1)
    known = jnp.where(largest > 0, largest, np.float32(1.0))
    results, record, places = program.run(_scales(known, scales.formats), look)
    if scales.formats != _formats(places):
        _refuse(scales, program.count)
    return results, record


def _refuse(scales: DelayedScales, count: int) -> NoReturn:
    its = counted(len(scales.places), "operand")
    raise ValueError(
        f"these DelayedScales are of another program: they have {its}, and this one has {count}, "
        "or other formats; begin with scaled.init(*args)"
    )


def _scales(largest: Any, formats: Sequence[Precision]) -> Any:
    """The scale of each operand, of its largest magnitude."""
    most = np.asarray([p.max for p in formats], np.float32)
    is_int8 = np.asarray([p is Precision.INT8 for p in formats], bool)
    # int8 has no exponents, so a scale that is a power of two would waste up to half of its range.
    return jnp.where(is_int8, largest / most, power_of_two_scale(largest, most))


def _formats(places: Sequence[ir.Place]) -> tuple[Precision, ...]:
    return tuple(PRECISIONS[np.dtype(place.dtype)] for place in places)


class _Program:
    """The program of a traced call under its policy, with the operands that it rounds to 8 bits.

    Attributes:
        count: how many there are; those of a function that is called several times count in each.
    """

    def __init__(self, traced: Traced) -> None:
        self._jaxpr, self._operands = traced.under_policy(), traced.undifferentiated(_ADVICE)
        self.count = ir.rows_of(self._jaxpr, LARGEST)

    def run(self, scales: Any, look: Any = LARGEST) -> tuple[list[Any], Any, tuple[ir.Place, ...]]:
        """The results, what is recorded of each operand, and the places.

        Args:
            scales: the scale of each operand, or None for scales of the present values.
            look: what is recorded: the largest finite magnitudes, or the counts of lost values.
        """

        def rounded(eqn: ir.Eqn, operands: Sequence[Any], scale: Any) -> Sequence[Any]:
            if scales is None:
                return ir.bind(eqn, operands)
            low, of_low = eqn.outvars
            rounding = GivenRounding(PRECISIONS[low.aval.dtype], tuple(of_low.aval.shape))
            return ir.scaling(rounding, operands[0], scale)

        given = jnp.zeros(self.count, np.float32) if scales is None else scales
        with quietly():
            return ir.watched(self._jaxpr, self._operands, look, given=given, evaluate=rounded)


def _text(place: ir.Place) -> str:
    scopes = clean_scope(place.scope).split("/")
    own = "/".join(scope for scope in scopes if not scope.startswith("precpass."))
    parts = [str(PRECISIONS[np.dtype(place.dtype)]), f"in {own}" if own else ""]
    parts += [f"at {place.source}" if place.source.file else "", *place.inside]
    return " ".join(part for part in parts if part)


_ADVICE = (
    "no derivative is taken through delayed scaling: scale the gradient itself, "
    "delayed_scaling(jax.grad(loss)) for jax.grad(delayed_scaling(loss))"
)
