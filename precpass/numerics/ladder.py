"""`Ladder`: raise the precision of an iterative method as it converges.

The accuracy that a method can attain in a precision is limited by its unit roundoff u: a
residual computed in it has an error of about u times the size of the subtracted terms (Barrett
et al. 1994, "Templates for the Solution of Linear Systems", section 4.2.3, "Accounting for
Floating Point Errors"; Higham & Mary 2022, "Mixed precision algorithms in numerical linear
algebra", Acta Numerica 31, https://doi.org/10.1017/S0962492922000022). So progress is judged in
units of u times a scale, never in absolute ones, and the precision is raised when there is no
progress. The state machine is that of extra-precise iterative refinement (Demmel et al. 2006,
https://doi.org/10.1145/1141885.1141894), which raises the precision of what stalls and goes on.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax import lax

from precpass import jaxpr as ir
from precpass.loss_scale import skip_nonfinite
from precpass.numerics.given import (
    check_positive,
    check_whole,
    is_known,
    is_real,
    refuse_modules,
    shown,
)
from precpass.numerics.rungs import Rung, parse_ladder
from precpass.policy.warned import quietly
from precpass.units import counted

__all__ = ["Ladder", "switches"]

_EASY_RATIO = 0.5
"""A step that halves the measure is easy; a slower one is "no progress" for Demmel et al. (0.5)."""

_LOST_RATIO = 10.0
"""A measure that is this many times the best one has diverged and not stalled."""

_STATIC = {"static": True}


class _Status(enum.IntEnum):
    """Whether the method goes on."""

    RUNNING = 0
    CONVERGED = 1
    ENDED = 2


class _Switch(enum.IntEnum):
    """Why the method goes to another rung; the numbers are those in the log."""

    STALLED = 1
    AT_ITS_ROUNDOFF = 2
    NOT_FINITE = 3
    EASY_PROGRESS = 4
    NEGATIVE = 5
    ENDED = 6


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Ladder:
    """The state of an iterative method whose precision rises as it converges.

    Call `create` to make one and `step` to take a step. It is a pytree of arrays of fixed shapes,
    for `lax.while_loop`, `lax.scan`, `jax.vmap` (under which the steps of all rungs are computed)
    and checkpoints. In a `jax.shard_map` the measure must be the same on all devices (`lax.psum`).

    The *measure* f of a state is a norm of its residual, or any other magnitude that is zero at the
    solution. One that is negative or not finite never counts as converged or as the best. On a rung
    with unit roundoff u the measure has an error of `factor` u `scale`. Therefore:

    - The rung is raised if in `patience` steps the best f of the rung has fallen by no more than
      `factor` u `scale` in all, and at once if f is no larger than that, negative or not finite.
      The method goes on from the present state, or from the best state if f is negative, not finite
      or ten times the best. So a rung takes at most about `patience` / (`factor` u) steps.
    - It has converged if f + `factor` u `scale` <= `tol` `scale`. So a rung never claims
      convergence that it cannot resolve, and `tol` is the same on every rung.
    - The method ends if the last rung would have to be raised: `running` and `converged` are then
      false.

    A measure that `step` computes separately, on the last rung (`measure=`), is more accurate than
    the step. Then progress is judged relative to f, by `factor` u f, and steps stay in low
    precision as long as they help, as in iterative refinement.

    Attributes:
        state: the state from which the next step starts.
        best: the state with the smallest measure. A state that was measured on a higher rung
            replaces those that were measured on lower ones.
        best_measure: its measure; inf before the first step.
        rung: the index of the rung of the next step, int32[].
        status: 0 while it runs, 1 converged, 2 ended without convergence; int32[].
        steps: the number of steps taken, int32[].
        used: the number of steps on each rung, int32[rungs].
        scale: the scale of the measure.
        switched: bool[], whether the last step ended with a switch.
        switches: the number of switches, int32[].
        log: the first switches, a dict of arrays: the `step` after which it happened, the new rung
            `to`, `why` (1 stalled, 2 at its roundoff, 3 not finite, 4 easy progress, 5 negative, 6
            the method ended) and the `measure`.
        reference: the best measure at the beginning of the present wait.
        waited: the steps since then.
        easy: the easy steps in a row.
        needed: how many easy steps lower the rung.
        rungs: as given to `create`.
        tol: as given to `create`.
        patience: as given to `create`.
        factor: as given to `create`.
        lower_after: as given to `create`.

    Examples:
        >>> from jax import lax
        >>> def step(x, a, b):
        ...     x = x + 0.5 * (b - a @ x)
        ...     return x, jnp.linalg.norm(b - a @ x)
        >>> a, b = jnp.asarray([[1.0, 0.3], [0.3, 1.2]]), jnp.asarray([1.0, 2.0])
        >>> ladder = Ladder.create(("bf16", "f32"), jnp.zeros(2), tol=1e-6)
        >>> ladder = lax.while_loop(lambda s: s.running, lambda s: s.step(step, a, b), ladder)
        >>> print(ladder.rungs[int(ladder.rung)].name, bool(ladder.converged))
        f32 True
        >>> bool(jnp.allclose(a @ ladder.best, b, rtol=1e-5))
        True
    """

    state: Any
    best: Any
    best_measure: Any
    rung: Any
    status: Any
    steps: Any
    used: Any
    scale: Any
    reference: Any
    waited: Any
    easy: Any
    needed: Any
    switched: Any
    switches: Any
    log: dict[str, Any]
    rungs: tuple[Rung, ...] = dataclasses.field(metadata=_STATIC)
    tol: float = dataclasses.field(metadata=_STATIC)
    patience: int = dataclasses.field(metadata=_STATIC)
    factor: float = dataclasses.field(metadata=_STATIC)
    lower_after: int | None = dataclasses.field(metadata=_STATIC)

    @classmethod
    def create(
        cls,
        ladder: Sequence[Any],
        state: Any,
        *,
        scale: Any = None,
        tol: float = 0.0,
        patience: int = 10,
        factor: float = 1.0,
        lower_after: int | None = None,
        log_size: int = 16,
    ) -> Ladder:
        """Return the first state, on the lowest rung.

        Args:
            ladder: two or more rungs, from the coarsest to the finest, as for `with_fallback`.
            state: the method's state, a pytree of arrays, which keeps its dtypes on every rung.
                With x64 off a float32 state limits the accuracy of an "f64" rung.
            scale: the size that the measure is relative to, a positive scalar, such as the norm of
                the right-hand side; by default the first measure. A traced scale cannot be checked:
                zero then counts as not given, and with one that is negative or not finite no
                measure ever counts as converged.
            tol: the measure, relative to the scale, at which it has converged; 0 goes on until the
                last rung stalls.
            patience: the steps without progress after which the rung is raised, or the method ends
                on the last rung; more than those for which the measure may rise before it falls.
            factor: the number of unit roundoffs that do not count as progress.
            lower_after: the steps in a row, each halving the measure, after which the rung is
                lowered again; None for never. After each futile attempt the number doubles.
            log_size: the number of switches in the log; `switches` counts all.

        Raises:
            ValueError: for a bad ladder, a tolerance that the last rung cannot resolve, a scale
                that is not a real scalar, or a number out of range.
        """
        rungs = parse_ladder("Ladder.create", ladder)
        check_whole("Ladder.create(patience", patience)
        check_whole("Ladder.create(log_size", log_size, 0)
        check_whole("Ladder.create(lower_after", 1 if lower_after is None else lower_after)
        check_positive("Ladder.create(factor", factor)
        _check_tolerance(tol, factor, rungs[-1])
        _check_scale(scale)
        state = jax.tree.map(_strong, state)
        wide = jnp.float64 if ir.in_x64() else jnp.float32
        # It is zero until the first measure is known.
        scale = jnp.asarray(0 if scale is None else scale).astype(wide)
        inf, zero = jnp.asarray(jnp.inf, wide), jnp.asarray(0, jnp.int32)
        logged = {key: jnp.zeros(log_size, jnp.int32) for key in ("step", "to", "why")}
        return cls(
            state=state,
            best=state,
            best_measure=inf,
            rung=zero,
            status=zero,
            steps=zero,
            used=jnp.zeros(len(rungs), jnp.int32),
            scale=jnp.where((scale >= 0) & jnp.isfinite(scale), scale, jnp.nan),
            reference=inf,
            waited=zero,
            easy=zero,
            needed=jnp.asarray(lower_after or 0, jnp.int32),
            switched=jnp.asarray(False),
            switches=zero,
            log={**logged, "measure": jnp.zeros(log_size, wide)},
            rungs=rungs,
            tol=float(tol),
            patience=int(patience),
            factor=float(factor),
            lower_after=lower_after,
        )

    @property
    def running(self) -> jax.Array:
        """Whether there is a step to take, bool[]."""
        return jnp.asarray(self.status) == _Status.RUNNING

    @property
    def converged(self) -> jax.Array:
        """Whether the tolerance was met, bool[]."""
        return jnp.asarray(self.status) == _Status.CONVERGED

    def step(
        self,
        fn: Callable[..., Any],
        *args: Any,
        measure: Callable[..., Any] | None = None,
        restart: Callable[..., Any] | None = None,
    ) -> Ladder:
        """Take one step on the present rung, with `fn`'s updates; an ended ladder does not change.

        Outside `jax.jit` it is compiled once for each `fn`, `measure` and `restart`, as by
        `jax.jit`, so other values that they read are fixed then. A function that you define anew
        before each call, such as a lambda in a Python loop, is compiled in each call.

        Args:
            fn: `(state, *args) -> (state, measure)`: one step, written as in float32 (or float64),
                and the measure of the new state, a real scalar that is not negative. With `measure`
                it only returns the state.
            args: arrays that it needs.
            measure: `(state, *args) -> measure`, computed on the last rung after each step.
            restart: `(state, *args) -> state`, computed on the new rung before the first step after
                a switch, for a method with memory: the residual and direction of conjugate
                gradients must be recomputed from the state.

        Raises:
            TypeError: if a function returns anything else, and for a module of flax nnx in `args`.
            ValueError: for a negative measure, outside `jax.jit`.
        """
        refuse_modules("Ladder.step", args)
        if ir.is_tracing() or not _are_hashable(fn, measure, restart):
            new, measured = self._stepped(fn, measure, restart, args)
        else:
            new, measured = _compiled_step(self, fn, measure, restart, args)
        if not isinstance(measured, jax.core.Tracer) and bool(self.running):
            _check_measure("Ladder.step", measured)
        return new

    def _stepped(
        self,
        fn: Callable[..., Any],
        measure: Callable[..., Any] | None,
        restart: Callable[..., Any] | None,
        args: tuple[Any, ...],
    ) -> tuple[Ladder, Any]:
        """The ladder after the step, and the measure."""
        runs = [self._on(rung, fn, measure is not None, restart, args) for rung in self.rungs]
        state, measured = lax.switch(self.rung, runs)
        if measure is not None:
            exact = self.rungs[-1].applied(measure)
            measured = self._scalar("measure", exact(state, *args))
        new = self._updated(measured, state, measure is not None)
        return jax.tree.map(functools.partial(lax.select, self.running), new, self), measured

    def _on(
        self,
        rung: Rung,
        fn: Callable[..., Any],
        is_measured: bool,
        restart: Callable[..., Any] | None,
        args: tuple[Any, ...],
    ) -> Callable[[], tuple[Any, Any]]:
        """The step on a rung: its state, and its measure, which is zero if computed separately."""

        def run() -> tuple[Any, Any]:
            state = self.state
            if restart is not None:
                again = rung.applied(restart)
                # A step may only copy, and then there is no product to lower.
                with quietly():
                    state = lax.cond(
                        self.switched,
                        lambda: self._like_state("restart", again(state, *args)),
                        lambda: state,
                    )
            out = rung.applied(fn)(state, *args)
            if is_measured:
                return self._like_state("the step", out), jnp.zeros((), self.scale.dtype)
            if not (isinstance(out, tuple) and len(out) == 2):
                raise TypeError(
                    "Ladder.step: the step is to return (state, measure), and returned "
                    f"{jax.tree.structure(out)}; give measure= for one that returns the state"
                )
            return self._like_state("the step", out[0]), self._scalar("the step", out[1])

        return run

    def _like_state(self, whose: str, state: Any) -> Any:
        """Checks that a state which a function returned has the type of the first state."""
        ours, theirs = jax.tree.structure(self.state), jax.tree.structure(state)
        if ours != theirs:
            raise TypeError(f"Ladder.step: {whose} returned {theirs}, and the state is {ours}")

        def checked(path: Any, was: Any, now: Any) -> Any:
            if (jnp.shape(was), jnp.result_type(was)) != (jnp.shape(now), jnp.result_type(now)):
                raise TypeError(
                    f"Ladder.step: {whose} returned state{jax.tree_util.keystr(path)} as "
                    f"{shown(now)}, and it was {shown(was)}"
                )
            return _strong(now)

        return jax.tree_util.tree_map_with_path(checked, self.state, state)

    def _scalar(self, whose: str, x: Any) -> jax.Array:
        """Checks a measure that a function returned."""
        is_array = isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.floating)
        if not is_array or x.shape:
            raise TypeError(
                f"Ladder.step: {whose} returned {shown(x)} as the measure, and it is to be a real "
                "scalar, such as the norm of the residual"
            )
        return x.astype(self.scale.dtype)

    def updated(
        self, measure: Any, state: Any, *, exact: bool = False, ended: Any = False
    ) -> Ladder:
        """Return the ladder after a step that you took on the rung `self.rung`.

        `step` calls this; call it yourself if you run the steps yourself.

        Args:
            measure: the measure of the new state, a real scalar that is not negative.
            state: the new state.
            exact: whether the measure has the accuracy of the last rung, not of the present one.
            ended: whether the method itself says that this rung leads no further, bool[].

        Raises:
            ValueError: for a negative measure, if its value is known.
        """
        _check_measure("Ladder.updated", measure)
        return self._updated(measure, state, exact, ended)

    def _updated(self, measure: Any, state: Any, exact: bool, ended: Any = False) -> Ladder:
        wide, last = self.scale.dtype, len(self.rungs) - 1
        f = jnp.asarray(measure).astype(wide)
        finite = jnp.isfinite(f)
        told = finite & (f >= 0)
        scale = jnp.where(self.scale == 0, jnp.where(told, f, 0), self.scale)
        units = self.factor * jnp.asarray([r.unit_roundoff for r in self.rungs], wide)
        floor = (units[last] if exact else units[self.rung]) * scale
        known = jax.tree.map(jnp.asarray, (self.best, self.best_measure))
        better = told & (f < self.best_measure)
        best, best_measure = skip_nonfinite(better, (state, f), known)

        met = told & (f + floor <= self.tol * scale)
        quantum = units[self.rung] * (0 if exact else scale)
        shrunk = self.reference * (1 - units[self.rung]) if exact else self.reference
        progress = best_measure < shrunk - quantum
        waited = jnp.where(progress, 0, self.waited + 1)
        at_floor = told & (f <= floor)
        why = jnp.where(waited >= self.patience, _Switch.STALLED, 0)
        why = jnp.where(at_floor, _Switch.AT_ITS_ROUNDOFF, why)
        why = jnp.where(ended, _Switch.ENDED, why)
        why = jnp.where(told, why, jnp.where(finite, _Switch.NEGATIVE, _Switch.NOT_FINITE))
        why = jnp.where(met, 0, why)
        # beyond the last rung there is nothing, and below its roundoff no measure tells
        ends = (why > 0) & ((self.rung == last) | (exact & at_floor))
        raised, over = (why > 0) & ~ends, jnp.where(ends, _Status.ENDED, _Status.RUNNING)
        easy = jnp.where(f <= _EASY_RATIO * self.best_measure, self.easy + 1, 0)
        lowered = jnp.asarray(False)
        if self.lower_after is not None:
            # two units above what the lower rung can tell, or it would be raised at once
            useful = exact | (f > 2 * units[jnp.maximum(self.rung - 1, 0)] * scale)
            lowered = (self.rung > 0) & (why == 0) & ~met & (easy >= self.needed) & useful
        why = jnp.where(lowered, _Switch.EASY_PROGRESS, why).astype(jnp.int32)
        switched = raised | lowered
        rung = jnp.where(lowered, self.rung - 1, jnp.where(raised, self.rung + 1, self.rung))
        # what only wanders in its rounding goes on; what was lost begins again at the best
        lost = raised & ~(told & (f <= _LOST_RATIO * best_measure))
        state = skip_nonfinite(lost, best, state)
        return dataclasses.replace(
            self,
            state=state,
            best=best,
            # what a higher rung measures outranks what a lower one did
            best_measure=best_measure if exact else jnp.where(raised, jnp.inf, best_measure),
            rung=rung,
            status=jnp.where(met, _Status.CONVERGED, over).astype(jnp.int32),
            steps=self.steps + 1,
            used=self.used.at[self.rung].add(1),
            scale=scale,
            reference=jnp.where(
                switched, jnp.inf, jnp.where(progress, best_measure, self.reference)
            ),
            waited=jnp.where(switched, 0, waited),
            easy=jnp.where(switched, 0, easy),
            needed=jnp.where(lowered, 2 * self.needed, self.needed),
            switched=switched,
            switches=self.switches + switched.astype(jnp.int32),
            log=self._logged(switched, rung, why, f),
        )

    def _logged(self, switched: Any, rung: Any, why: Any, measure: Any) -> dict[str, Any]:
        if not self.log["step"].shape[0]:
            return self.log
        entry = {"step": self.steps + 1, "to": rung, "why": why, "measure": measure}
        # out of the log's bounds nothing is written
        at = jnp.where(switched, self.switches, self.log["step"].shape[0])
        return {key: self.log[key].at[at].set(x, mode="drop") for key, x in entry.items()}

    def summary(self) -> str:
        """Return a summary: how it ended, the steps on each rung, and the switches."""
        names = [rung.name for rung in self.rungs]
        if not is_known(jax.tree.leaves((self.status, self.used, self.log, self.scale))):
            return f"on one of {', '.join(names)}: not known while it is traced"
        status, (steps, *lines) = np.asarray(self.status), switches(self)
        if status.ndim:
            counts = [
                int(np.sum(status == one))
                for one in (_Status.CONVERGED, _Status.ENDED, _Status.RUNNING)
            ]
            ends = "{} converged, {} ended without, {} run".format(*counts)
            return f"of {status.size}: {ends}; {steps}"
        ended = "ended without convergence" if self.tol else "at its limit"
        end = ("running", "converged", ended)[int(status)]
        taken, at = counted(int(np.asarray(self.steps)), "step"), names[int(np.asarray(self.rung))]
        if np.isnan(np.asarray(self.scale)):
            said = "its scale was no positive number, and no measure is small beside that"
            lines = [f"  {said}", *lines]
        return "\n".join([f"{end} in {at}, after {taken}: {steps}", *lines])

    __str__ = summary


def switches(ladder: Ladder) -> list[str]:
    """The steps on each rung of a ladder in words, then its switches; of a batch only the steps."""
    names = [rung.name for rung in ladder.rungs]
    used = np.asarray(ladder.used).reshape(-1, len(names)).sum(0)
    lines = [", ".join(f"{n} in {name}" for n, name in zip(used, names, strict=True))]
    if np.ndim(ladder.switches):
        return lines
    log = {key: np.asarray(x) for key, x in ladder.log.items()}
    size, count = log["step"].size, int(np.asarray(ladder.switches))
    known = float(np.asarray(ladder.scale))
    scale = known if known > 0 else 1.0
    for i in range(min(count, size)):
        why = _Switch(log["why"][i]).name.lower().replace("_", " ")
        at = f"{log['measure'][i] / scale:.2g}"
        lines.append(f"  after {log['step'][i]}: to {names[log['to'][i]]}, {why} at {at}")
    return [*lines, *([f"  and {count - size} more"] if count > size else [])]


def _check_tolerance(tol: Any, factor: float, last: Rung) -> None:
    if not (is_real(tol) and 0 <= tol < 1):
        raise ValueError(
            f"Ladder.create(tol={tol!r}): it is to be a number in [0, 1), relative to the scale"
        )
    least = factor * last.unit_roundoff
    if 0 < tol <= least:
        raise ValueError(
            f"Ladder.create(tol={tol!r}): {last.name}, the last rung, tells no measure below "
            f"{least:.2g} of the scale (factor * its unit roundoff). Take a higher rung, a larger "
            "tolerance, or tol=0, which goes on until the last rung stalls"
        )


def _check_scale(scale: Any) -> None:
    if scale is None:
        return
    try:
        aval: Any = jax.typeof(scale)
    except TypeError:
        aval = None
    kinds = jnp.floating, jnp.integer
    if aval is None or aval.shape or not any(jnp.issubdtype(aval.dtype, kind) for kind in kinds):
        raise ValueError(
            f"Ladder.create: scale is {shown(scale)}, and it is to be a real scalar, such as "
            "jnp.linalg.norm(b)"
        )
    if not (isinstance(scale, jax.core.Tracer) or 0 < float(scale) < math.inf):
        raise ValueError(
            f"Ladder.create(scale={float(scale)!r}): it is to be positive and finite; leave it out "
            "for the first measure"
        )


def _check_measure(name: str, measure: Any) -> None:
    if not isinstance(measure, jax.core.Tracer) and bool(jnp.all(jnp.asarray(measure) < 0)):
        raise ValueError(
            f"{name}: the measure is {float(measure)!r}, and it is to be a magnitude that is zero "
            "at the solution, such as the norm of the residual"
        )


def _strong(x: Any) -> jax.Array:
    """An array without a weak type, which a loop's carry would lose."""
    x = jnp.asarray(x)
    return lax.convert_element_type(x, x.dtype) if jnp.issubdtype(x.dtype, np.number) else x


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _compiled_step(ladder: Ladder, fn: Any, measure: Any, restart: Any, args: Any) -> Any:
    return ladder._stepped(fn, measure, restart, args)  # pyright: ignore[reportPrivateUsage] -- its own


def _are_hashable(*fns: Any) -> bool:
    try:
        hash(fns)
    except TypeError:
        return False
    return True
