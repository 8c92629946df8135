"""Fallback: run a function in low precision, and again in a higher one if a check fires.

It is one program with a `lax.cond` for each rung above the first, so a higher rung that is not
taken only costs its compilation. It has no state and prints nothing: the report is a pytree,
returned beside the result.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from precpass import jaxpr as ir
from precpass.api import auto_mixed
from precpass.jit.functions import check_function
from precpass.jit.mixed import Mixed
from precpass.jit.region import keep
from precpass.loss_scale import Axes
from precpass.numerics.checks import Check, NonFinite, parse_checks
from precpass.numerics.given import is_known, refuse_modules
from precpass.numerics.masked_derivatives import differentiated_if_chosen
from precpass.numerics.rungs import Rung, parse_ladder
from precpass.policy.presets import Custom

__all__ = ["FallbackReport", "with_fallback"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FallbackReport:
    """The rung that a result of `with_fallback` comes from, and why. `print` it for a summary.

    Under `jax.vmap` and `jax.lax.scan` the arrays have the batch's dimensions in front.

    Attributes:
        rung: the index of the rung in the ladder, int32[].
        stable: bool[], whether no check fired on that rung. It can only be false on the last rung,
            whose result is returned in any case.
        fired: bool[rungs, checks], which checks fired; false on rungs that were not reached.
        evidence: float32[rungs, checks], each check's number, the largest along `axis_name`: how
            many values are not finite, a magnitude, a condition number; zero on rungs not reached.
        stopped: bool[rungs], whether a loop was stopped on the rung after `max_trips` trips; false
            on the last rung, which stops no loop.
        ladder: the names of the rungs.
        checks: the text of each check, with "{:.3g}" in the place of the number.
        max_trips: as `with_fallback` was given it.
    """

    rung: Any
    stable: Any
    fired: Any
    evidence: Any
    stopped: Any
    ladder: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    checks: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    max_trips: int | None = dataclasses.field(metadata={"static": True})

    def summary(self) -> str:
        """Return the rung and the checks that fired below it; for a batch the results per rung."""
        if not is_known((self.rung, self.stable, self.fired, self.evidence)):
            return f"one of {', '.join(self.ladder)}: not known while it is traced"
        rungs = np.asarray(self.rung)
        if rungs.ndim:
            return self._of_many(rungs.ravel())
        fired, evidence = np.asarray(self.fired), np.asarray(self.evidence)
        lines: list[str] = []
        for i, name in enumerate(self.ladder):
            said = [c.format(evidence[i, j]) for j, c in enumerate(self.checks) if fired[i, j]]
            if np.asarray(self.stopped)[i]:
                said.append(f"a loop did not end in {self.max_trips} trips")
            if said:
                lines.append(f"{name}: {', '.join(said)}")
        chosen = self.ladder[int(rungs)]
        return f"{chosen} [{'; '.join(lines)}]" if lines else chosen

    def _of_many(self, rungs: Any) -> str:
        counts = [(name, int(np.sum(rungs == i))) for i, name in enumerate(self.ladder)]
        text = f"{', '.join(f'{count} in {name}' for name, count in counts)}, of {rungs.size}"
        bad = int(np.sum(~np.asarray(self.stable)))
        return f"{text}; a check fires on {bad} of those in {self.ladder[-1]} too" if bad else text

    __str__ = summary


P = ParamSpec("P")
R = TypeVar("R")


def with_fallback(
    fn: Callable[P, R],
    ladder: Sequence[Any] = ("bf16", "f32", "f64"),
    unstable: Any = None,
    *,
    axis_name: Axes = None,
    max_trips: int | None = 10_000,
    **jit_options: Any,
) -> Mixed[P, tuple[R, FallbackReport]]:
    """Run `fn` in low precision, and again in a higher one if a check fires; updates take effect.

    A rung named by a precision runs `fn` under a policy. "bf16" and "f16" are `AutoMixedBf16` and
    `AutoMixedF16`, which lower matrix products and what is stored for them, and leave a program
    without matrix products as it is, with a `PrecisionWarning`; "f32" is `AlwaysF32`; "f64"
    evaluates `fn` in float64, with x64 on or off. If `fn` itself has float64 values (x64 on),
    "bf16", "f16" and "f32" lower their matrix products too. The result has `fn`'s dtypes on every
    rung: with x64 off, that of "f64" is rounded to float32, once. A function inside `fn` that
    `auto_mixed` made with its own policy uses it on all rungs but "f64". Under `use_policy(None)`
    every rung runs `fn` as you wrote it.

    You can differentiate it to any order, also through "f64" with x64 off; the derivative is that
    of the rung that was taken. (On jax 0.10, reverse mode over reverse mode through a loop is NaN
    if a lower rung overflowed, unless the loop's body is in a `jax.checkpoint`. If `fn` has a
    `lax.cond`, or calls another such function, the gradient of its `jax.vmap` raises JAX's
    `NotImplementedError` if the predicate is batched, jax-ml/jax#39219; the `jax.vmap` of its
    gradient does not.) Complex numbers do not change on any rung. The rungs above the first save
    only their arguments for the backward pass, and run again there. Under `jax.vmap` every rung
    runs for the whole batch (`lax.cond` becomes a select), and each result is from its own rung.
    `fn` should be a pure function: its side effects happen on each rung that runs.

    Args:
        fn: returns a pytree of arrays.
        ladder: two or more rungs, from the coarsest to the finest, each a precision ("bf16", "f16",
            "f32", "f64") or a policy.
        unstable: one check or several: `NonFinite()`, which is the default, `OutOfRange(limit)`,
            `IllConditioned(matrix)`, `Predicate(fn)`, or a function of the result that returns a
            boolean scalar. A rung's result is rejected if any of them fires. `IllConditioned`
            checks the arguments, so the rung does not run at all. On the last rung checks only
            report.
        axis_name: as for `precpass.loss_scale.all_finite`: along these axes all take the same rung.
            You need it if `fn` has collectives, and for derivatives of arguments that devices
            share.
        max_trips: the most trips of a `while_loop` on any rung but the last; None for no bound. In
            low precision a loop may never end, because its residual stays above the tolerance. A
            loop whose end depends on floating values is stopped there, and the rung is rejected as
            if a check had fired. How many trips float32 needs is not known before it runs: give a
            multiple of what you expect. (In a function with its own derivative rule, the results of
            a stopped loop become NaN instead, which `NonFinite` detects.)
        jit_options: the options of `jax.jit` (`static_argnums`, `donate_argnums`, ...).

    Returns:
        `(*args, **kwargs) -> (result, FallbackReport)`, called like a function of `auto_mixed`.

    Raises:
        ValueError: for an invalid ladder, check or bound; the message lists the legal ones.
        TypeError: if `fn` is not a function; when it is traced, if it returns anything but arrays.

    Examples:
        >>> from precpass.numerics import IllConditioned
        >>> guarded = with_fallback(jnp.linalg.solve, ("f32", "f64"), IllConditioned("a"))
        >>> a = jnp.asarray([[1.0, 1.0], [1.0, 1.0 + 2.0**-20]])
        >>> x, report = guarded(a, a.sum(1))
        >>> print(x, int(report.rung), bool(report.stable))
        [1. 1.] 1 True
        >>> print(report)
        f64 [f32: a condition number of 4.19e+06 leaves less than 1 digit]
    """
    check_function(fn)
    owner = "with_fallback"
    rungs = parse_ladder(owner, ladder)
    checks = parse_checks(owner, NonFinite() if unstable is None else unstable, fn)
    if max_trips is not None and not 0 < max_trips <= ir.UNBOUNDED:
        raise ValueError(
            f"{owner}: max_trips={max_trips!r}: give the most trips of a loop on a rung below the "
            f"last, from 1 to {ir.UNBOUNDED}, or None for no bound"
        )
    static = {k: v for k, v in jit_options.items() if k in ("static_argnums", "static_argnames")}
    runs = [rung.applied(fn, **static) for rung in rungs]

    @functools.wraps(fn)
    def guarded(*args: Any, **kwargs: Any) -> tuple[Any, FallbackReport]:
        refuse_modules("with_fallback", (args, kwargs))
        return _Climb(rungs, checks, runs, axis_name, max_trips, args, kwargs).result()

    # The outer function decides nothing, because every rung has a policy of its own.
    return auto_mixed(guarded, policy=Custom({}), **jit_options)


class _State(NamedTuple):
    """The state between rungs: the result, None if nothing has run, and a report of the rungs."""

    out: Any
    done: Any
    rung: Any
    fired: Any
    evidence: Any
    stopped: Any


@dataclasses.dataclass
class _Climb:
    """One call: the rungs in order, each of which runs unless an earlier one gave the result."""

    rungs: tuple[Rung, ...]
    checks: tuple[Check, ...]
    runs: Sequence[Callable[..., Any]]
    axis_name: Axes
    max_trips: int | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __post_init__(self) -> None:
        self.last = len(self.rungs) - 1
        with keep("f32"):
            self.known = [
                lax.stop_gradient(c.number(None, self.args, self.kwargs)) if c.before else None
                for c in self.checks
            ]

    def result(self) -> tuple[Any, FallbackReport]:
        """The result of the first rung on which nothing fires, or of the last."""
        shape = len(self.rungs), len(self.checks)
        rows = jnp.zeros(shape, bool), jnp.zeros(shape, jnp.float32), jnp.zeros(shape[0], bool)
        state = self._from(0, _State(None, jnp.asarray(False), 0, *rows))
        return state.out, FallbackReport(
            state.rung,
            state.done,
            state.fired,
            state.evidence,
            state.stopped,
            tuple(rung.name for rung in self.rungs),
            tuple(check.text for check in self.checks),
            self.max_trips,
        )

    def _from(self, i: int, state: _State) -> _State:
        """The state after the rungs from `i` on, if no earlier one has given the result."""
        state = self._run(i, state)
        if i == self.last:
            return state

        def higher(state: _State) -> _State:
            return self._from(i + 1, state)

        # The conds are nested, so the derivative of a result on the first rung passes one branch.
        rest = higher if i else jax.checkpoint(higher)
        return lax.cond(state.done, lambda kept: kept, rest, state)

    def _run(self, i: int, state: _State) -> _State:
        """The state after a rung, unless the arguments rule it out."""
        if not any(check.before for check in self.checks):
            return self._attempt(i, state)
        if state.out is None:
            # Nothing has run yet. These zeros in the result's place are never returned.
            state = jax.tree.map(_zeros, jax.eval_shape(lambda: self._attempt(0, state)))
        fired, evidence = self._asked(i, None, before=True)
        state = state._replace(
            fired=state.fired.at[i].set(fired), evidence=state.evidence.at[i].set(evidence)
        )
        if i == self.last:
            return self._attempt(i, state)
        attempt = functools.partial(self._attempt, i)
        return lax.cond(jnp.any(fired), lambda kept: kept, attempt, state)

    def _attempt(self, i: int, state: _State) -> _State:
        def attempted() -> tuple[Any, Any]:
            out, stopped = self._evaluated(i)
            fired, evidence = self._asked(i, lax.stop_gradient(out), before=False)
            done = ~jnp.any(fired | state.fired[i]) & ~stopped
            # Under `jax.vmap` a rung also runs for elements that have their result already.
            chosen = ~state.done if i == self.last else ~state.done & done
            return (out, done, fired, evidence, stopped), chosen

        out, done, fired, evidence, stopped = differentiated_if_chosen(attempted)
        # Outside the checkpoint, because the backward pass runs that again from its operands.
        rows = (
            state.fired.at[i].max(fired),
            state.evidence.at[i].add(evidence),
            state.stopped.at[i].max(stopped),
        )
        return _State(out, done, jnp.asarray(i, jnp.int32), *rows)

    def _evaluated(self, i: int) -> tuple[Any, Any]:
        """The result on a rung, and whether a loop was stopped."""
        trees: list[Any] = []

        def run() -> list[Any]:
            out = self.runs[i](*self.args, **self.kwargs)
            _check_arrays(out)
            leaves, tree = jax.tree.flatten(out)
            trees[:] = [tree]
            return leaves

        jaxpr, stopped = ir.trace(run), jnp.asarray(False)
        if i == self.last or self.max_trips is None or not ir.has_loops(jaxpr):
            leaves = ir.evaluate(jaxpr, ())
        else:
            leaves, loops, _ = ir.with_bounded_loops(jaxpr, (), self.max_trips, keeps_rules=True)
            stopped = self._anywhere(jnp.any(loops[:, 1] > 0))
        return jax.tree.unflatten(trees[0], leaves), stopped

    def _asked(self, i: int, out: Any, *, before: bool) -> tuple[jax.Array, jax.Array]:
        """Which checks reject the result, or with `before` the arguments, and their numbers."""
        rows: list[tuple[Any, Any]] = []
        # A keep region around this call would round the values that are compared here.
        with keep("f32"):
            for check, known in zip(self.checks, self.known, strict=True):
                fires: Any = jnp.asarray(False)
                number: Any = jnp.zeros(())
                if check.before == before:
                    number = known if before else check.number(out, self.args, self.kwargs)
                    fires = check.rejects(number, self.rungs[i])
                rows.append((fires, number.astype(jnp.float32)))
            fired, evidence = map(jnp.stack, zip(*rows, strict=True))
            return self._anywhere(fired), self._largest(evidence)

    def _anywhere(self, flags: Any) -> Any:
        """Whether flags are set anywhere along the axes that agree."""
        return self._largest(flags.astype(jnp.int32)) > 0

    def _largest(self, numbers: Any) -> Any:
        """The largest along the axes that agree."""
        return numbers if self.axis_name is None else lax.pmax(numbers, self.axis_name)


def _zeros(aval: Any) -> jax.Array:
    """Zeros of this type, typed as varying along the same axes of a `jax.shard_map`."""
    zeros = lax.full(aval.shape, 0, aval.dtype)
    manual = aval.manual_axis_type
    axes = tuple(manual.varying) if manual is not None else ()
    return lax.pcast(zeros, axes, to="varying") if axes else zeros


def _check_arrays(out: Any) -> None:
    for path, x in jax.tree_util.tree_leaves_with_path(out):
        if not isinstance(x, jax.Array):
            raise TypeError(
                f"with_fallback takes a function that returns arrays, and result"
                f"{jax.tree_util.keystr(path)} is {x!r}, a {type(x).__name__}"
            )
