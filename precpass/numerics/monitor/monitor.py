"""`monitor`: run a function under a policy and record its numbers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

import jax.numpy as jnp
import numpy as np
from jax import lax

from precpass import jaxpr as ir
from precpass.analysis.graph import Graph
from precpass.analysis.liveness import unread
from precpass.api import mixed_of
from precpass.jit.staged import Staged, owner_of
from precpass.jit.traced import Traced
from precpass.numerics.given import check_whole
from precpass.numerics.monitor.figures import Recorder
from precpass.numerics.monitor.health import Health
from precpass.policy.policy import PolicyLike
from precpass.policy.warned import quietly
from precpass.units import a_value

__all__ = ["Monitored", "looked", "monitor"]

_RECORDER = Recorder()


P = ParamSpec("P")
R = TypeVar("R")


@overload
def monitor(
    fn: Callable[P, R],
    policy: PolicyLike | None = None,
    *,
    profitability: str | None = None,
    every: None = None,
) -> Monitored[P, R]: ...
@overload
def monitor(
    fn: Callable[P, R],
    policy: PolicyLike | None = None,
    *,
    profitability: str | None = None,
    every: int,
) -> Monitored[Concatenate[Health, P], R]: ...
def monitor(
    fn: Callable[..., Any],
    policy: PolicyLike | None = None,
    *,
    profitability: str | None = None,
    every: int | None = None,
) -> Monitored[..., Any]:
    """Run a function and record ranges, NaNs and infinities; its in-place updates take effect.

    A call runs the program of `auto_mixed(fn, policy=policy)`, and then the same program again from
    the same arguments, with a reduction at each equation whose results are floating or complex (for
    a complex number its larger part counts). So the output is bitwise the same as without
    monitoring. It uses no callbacks: the record is a small pytree. A program with effects
    (callbacks, references) runs only once, with the reductions in it.

    Equations inside scans, while loops, branches, `jax.checkpoint`, `shard_map`, custom rules and
    jits have rows. Of Pallas kernels, callbacks, `custom_vmap`, `composite`, float64 regions and
    the conditions of while loops only the results are recorded. Data movement has no row.

    Magnitudes are those of float32: a float64 number beyond its range counts as its largest or
    smallest.

    An equation counts as the origin of an infinity if its operands are finite, and of a NaN if no
    operand is NaN. Elementwise equations decide that for each element, all others (matrix products,
    sums, gathers) for all elements of the operands together.

    Args:
        fn: as for `auto_mixed`; `jax.grad(loss)` to see the gradient.
        policy: as for `auto_mixed`.
        profitability: as for `auto_mixed`.
        every: record only every so many calls, beginning with the first. The health is then the
            first argument too: `(out, health) = monitored(health, *args)`, starting with `health =
            monitored.init(*args)`. It accumulates. Under a `jax.vmap` over the health every call
            costs as much as a recorded one.

    Returns:
        A function of `fn`'s arguments that returns `(out, health)`; see `Health`.

    Raises:
        ValueError: if `every` is not a whole number of at least 1; in a call, for the health of
            another program.
        TypeError: in a call through which a derivative is taken, or without a `Health`.

    Examples:
        >>> import jax.numpy as jnp
        >>> monitored = monitor(lambda x: jnp.log(x).sum(), "AlwaysF32")
        >>> out, health = monitored(jnp.asarray([1.0, 0.0, -1.0]))
        >>> [(seen.place.primitive, seen.infinities, seen.nans) for seen in health.born()]
        [('log', 1, 1)]
    """
    return Monitored(fn, policy, profitability=profitability, every=every)


class Monitored(Generic[P, R]):
    """The function that `monitor` returns.

    Attributes:
        every: as for `monitor`.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        policy: PolicyLike | None,
        *,
        profitability: str | None = None,
        every: int | None = None,
    ) -> None:
        if every is not None:
            check_whole("monitor(every", every)
        fn, self._owner = owner_of(fn)
        mixed = mixed_of(fn, policy=policy, profitability=profitability)
        functools.update_wrapper(self, mixed, updated=())
        self.every = every
        self._always = Staged(mixed, lambda traced: looked(traced, _RECORDER), "monitor")
        sometimes = functools.partial(_in_turn, every)
        self._sometimes = Staged(mixed, sometimes, ("monitor", every))

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> tuple[R, Health]:
        """Return the output and the health."""
        given: tuple[Any, ...] = args
        if self.every is None:
            return self._always((), (*self._owner, *given), kwargs)
        health, *rest = given or (None,)
        if not isinstance(health, Health):
            raise TypeError(
                f"with every={self.every} the first argument is a health, not "
                f"{a_value(health)}: begin with monitored.init(*args)"
            )
        return self._sometimes((health,), (*self._owner, *rest), kwargs)

    def init(self, /, *args: Any, **kwargs: Any) -> Health:
        """Return the health to pass to the first call.

        Args:
            args: the arguments of a call, arrays or `jax.ShapeDtypeStruct`s.
            kwargs: the keyword arguments.
        """
        return Health.empty(self._always.shape((), (*self._owner, *args), kwargs)[1])

    def __repr__(self) -> str:
        return f"<monitor of {getattr(self, '__name__', '<unnamed function>')}>"


def _in_turn(every: int | None, traced: Traced, before: Health) -> tuple[list[Any], Health]:
    assert every is not None
    program = _Program(traced, _RECORDER)
    places: list[Any] = []

    def figures_of(operands: Any) -> Any:
        results, figures, extremes = program.watched(operands)
        places[:] = extremes
        return (results if program.effects else []), figures

    ir.trace(figures_of, program.operands)

    def plain(operands: Any) -> Any:
        results = ir.evaluate(program.jaxpr, operands) if program.effects else []
        return results, _RECORDER.none(len(places))

    turn = before.calls % np.int32(every) == 0
    behind = program.operands
    if not program.effects:
        behind = lax.optimization_barrier(behind)
    results, figures = lax.cond(turn, figures_of, plain, behind)
    if not program.effects:
        results = ir.evaluate(program.jaxpr, program.operands)
    now = Health(figures, jnp.int32(1), turn.astype(np.int32), tuple(places), traced.name)
    return results, before.merged(now)


def looked(
    traced: Traced, recorder: Recorder, *, to_the_bit: bool = True
) -> tuple[list[Any], Health]:
    """The results of a traced call under its policy, and the health of one recorded run.

    Args:
        traced: the call; nothing is rewritten if it has no policy.
        recorder: records the figures.
        to_the_bit: whether the results must equal those of the program alone to the last bit. XLA
            fuses a program differently if its values are recorded, which changes last bits, so
            the program then runs twice: once for the results and once for the record.
    """
    program = _Program(traced, recorder)
    if program.effects or not to_the_bit:
        results, figures, places = program.watched(program.operands)
    else:
        results = ir.evaluate(program.jaxpr, program.operands)
        _, figures, places = program.watched(lax.optimization_barrier(program.operands))
    return results, Health(figures, jnp.int32(1), jnp.int32(1), places, traced.name)


class _Program:
    """The program of a traced call under its policy.

    Attributes:
        jaxpr: the rewritten program.
        operands: its operands.
        effects: whether it has effects.
    """

    def __init__(self, traced: Traced, recorder: Recorder) -> None:
        self.jaxpr, self.operands = traced.under_policy(), traced.undifferentiated(_ADVICE)
        self.effects = bool(ir.open_jaxpr(self.jaxpr).effects)
        graph = Graph.build(self.jaxpr)
        rows = unread(graph).rows
        self._dead = frozenset(id(e) for e, dead in zip(graph.eqns, rows, strict=True) if dead)
        self._recorder = recorder

    def watched(self, operands: Any) -> tuple[list[Any], Any, tuple[ir.Place, ...]]:
        """The results and the recorded figures of an evaluation."""
        with quietly():
            return ir.watched(self.jaxpr, operands, self._recorder, self._dead)


_ADVICE = (
    "a monitored function is not differentiated: monitor the gradient itself, "
    "monitor(jax.grad(loss)) for jax.grad(monitor(loss))"
)
