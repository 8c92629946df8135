"""One step of an iterative method on the present rung of a `Ladder`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from precpass.numerics.ladder.rungs import Rung
from precpass.policy.warned import quietly

__all__ = ["Step", "strong"]


class Step(NamedTuple):
    """The functions given to `Ladder.step`, and the types of their results.

    Attributes:
        fn, measure, restart: as for `Ladder.step`.
        like: a state with the type of all states.
        dtype: the dtype of the measure.
    """

    fn: Callable[..., Any]
    measure: Callable[..., Any] | None
    restart: Callable[..., Any] | None
    like: Any
    dtype: Any

    def taken(
        self, rungs: Sequence[Rung], rung: Any, state: Any, switched: Any, args: tuple[Any, ...]
    ) -> tuple[Any, Any]:
        """The state after a step on one of the rungs, and its measure."""
        runs = [self._on(each) for each in rungs]
        state, new_measure = lax.switch(rung, runs, state, switched, args)
        if self.measure is not None:
            new_measure = self._scalar("measure", rungs[-1].applied(self.measure, {})(state, *args))
        return state, new_measure

    def _on(self, rung: Rung) -> Callable[..., Any]:
        def run(state: Any, switched: Any, args: Any) -> tuple[Any, Any]:
            if self.restart is not None:
                again = rung.applied(self.restart, {})
                # A step may only copy, and then there is no product to lower.
                with quietly():
                    state = lax.cond(
                        switched,
                        lambda: self._like_state("restart", again(state, *args)),
                        lambda: state,
                    )
            out = rung.applied(self.fn, {})(state, *args)
            if self.measure is not None:
                return self._like_state("the step", out), jnp.zeros((), self.dtype)
            if not (isinstance(out, tuple) and len(out) == 2):
                raise TypeError(
                    "Ladder.step: the step is to return (state, measure), and returned "
                    f"{jax.tree.structure(out)}; give measure= for one that returns the state"
                )
            state, new_measure = out
            return self._like_state("the step", state), self._scalar("the step", new_measure)

        return run

    def _like_state(self, whose: str, state: Any) -> Any:
        """Checks that a state which a function returned has the type of the first state."""
        ours, theirs = jax.tree.structure(self.like), jax.tree.structure(state)
        if ours != theirs:
            raise TypeError(f"Ladder.step: {whose} returned {theirs}, and the state is {ours}")

        def checked(path: Any, was: Any, now: Any) -> Any:
            if (jnp.shape(was), jnp.result_type(was)) != (jnp.shape(now), jnp.result_type(now)):
                at = jax.tree_util.keystr(path)
                raise TypeError(
                    f"Ladder.step: {whose} returned state{at} as {jax.typeof(now).str_short()}, "
                    f"and it was {jax.typeof(was).str_short()}"
                )
            return strong(now)

        return jax.tree_util.tree_map_with_path(checked, self.like, state)

    def _scalar(self, whose: str, x: Any) -> jax.Array:
        is_real = isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.floating)
        if not is_real or x.shape:
            shown = jax.typeof(x).str_short() if isinstance(x, jax.Array) else repr(x)
            raise TypeError(
                f"Ladder.step: {whose} returned {shown} as the measure, and it is to be a real "
                "scalar, such as the norm of the residual"
            )
        return x.astype(self.dtype)


def strong(x: Any) -> jax.Array:
    """An array without a weak type, which a loop's carry would lose."""
    x = jnp.asarray(x)
    return lax.convert_element_type(x, x.dtype) if jnp.issubdtype(x.dtype, np.number) else x
