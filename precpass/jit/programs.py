"""A cache of the programs of each function, by policy and options, while the function lives."""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Hashable
from typing import Any

import jax

from precpass.jaxpr.weak import Recent, WeakIdMap
from precpass.jit import nnx as stateful
from precpass.jit.arguments import Declared, Static, results, unwrapped
from precpass.jit.calls import Crossing, name_of
from precpass.jit.equinox_modules import HoldsNumbers, may_hold_numbers
from precpass.jit.layers import name_root_modules
from precpass.jit.program import Program
from precpass.jit.region import Region
from precpass.policy.policy import PrecisionPolicy

__all__ = ["Programs", "calls_users_code", "programs_of"]


class Programs:
    """The state that all `Mixed` objects with one function, policy and options share.

    It holds no reference to the function, which belongs to the `Mixed` objects. So the function
    is freed with the last of them, with the arrays that it closes over and its compiled
    programs, and without the cycle collector.

    Attributes:
        crossing: how calls cross into jit and back.
        calls: region -> the function that a call there runs, for each region with a call so far.
        staged: other functions made of the traces (`staged.Staged`), by their keys.
        whole: the program for arguments and results without modules of flax nnx.

    Args:
        fn: the function.
        policy: its own policy, or None.
        profitability: its own, or None.
        options: those of `jax.jit`.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        policy: PrecisionPolicy | None,
        profitability: str | None,
        options: dict[str, Any],
    ) -> None:
        self._shardings = {
            name: options[name]
            for name in ("in_shardings", "out_shardings")
            if options.get(name) is not None
        }
        self.crossing = Crossing(
            name_of(fn), Declared(fn, options), self._shardings.get("in_shardings")
        )
        # Shardings of modules are dealt with when modules are split.
        kept = {k: stateful.without_modules(shardings) for k, shardings in self._shardings.items()}
        self._options = options = {**options, **kept}
        self.calls: dict[Region, Callable[..., Any]] = {}
        self.staged: dict[Hashable, dict[tuple[Program, Region], Any]] = {}
        crossed = _crossed(fn, self.crossing)
        self._of = functools.partial(
            Program,
            name=self.crossing.name,
            declared=self.crossing.declared,
            policy=policy,
            profitability=profitability,
        )
        self._crossed = crossed
        self.whole = self._of(_without_modules(crossed, self.crossing), options=options)

    @functools.cached_property
    def split(self) -> Program:
        """The program for split modules."""
        of_results = self._shardings.get("out_shardings")
        fn = stateful.functional(self._crossed, self.crossing.declared.map, of_results)
        options = dict(self._options)
        if of_results is not None:
            options["out_shardings"] = (None, options["out_shardings"])
        return self._of(fn, options=options)

    def clear_cache(self) -> None:
        """Forgets every trace and compiled program."""
        self.whole.clear_cache()
        self.calls.clear()
        self.staged.clear()
        if "split" in self.__dict__:
            self.split.clear_cache()


_MOST = 64
"""The most policies and sets of options that are cached for a function. A search that tries one
policy after the other leaves no more programs behind."""
_known = WeakIdMap[Recent[Programs]]()


def programs_of(
    fn: Callable[..., Any],
    policy: PrecisionPolicy | None,
    profitability: str | None,
    options: dict[str, Any],
) -> Programs:
    """The programs of a function; equal arguments give the same object while the function lives.

    Args:
        fn: the function.
        policy: its own policy, or None.
        profitability: its own, or None.
        options: those of `jax.jit`.
    """

    def make() -> Programs:
        return Programs(fn, policy, profitability, options)

    leaves, tree = jax.tree.flatten(options)
    # what equal policies may print otherwise
    printed = policy and (policy.title, *(rule.evidence for rule in policy.rules))
    key = (policy, printed, profitability, tree, *((type(x), x) for x in leaves))
    try:
        hash(key)
        of_fn = _known.setdefault(fn, Recent(_MOST))
    except TypeError:  # unhashable options, or an object that takes no weak reference
        return make()
    return of_fn.get(key, make)


class _Borrowed:
    """A callable for a function, without a strong reference to it.

    JAX reads a function's signature and line, which it finds through `__wrapped__`.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        try:
            self._fn: Callable[[], Any] = weakref.ref(fn)
        except TypeError:  # it takes no weak reference, so its programs are not cached
            self._fn = lambda: fn

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        fn = self._fn()
        if fn is None:
            raise ReferenceError("a program is traced after its function has gone")
        return fn


def _crossed(fn: Callable[..., Any], crossing: Crossing) -> Callable[..., Any]:
    """`fn` with arguments and results in the form of `precpass.jit.arguments`."""
    borrowed = _Borrowed(fn)

    def crossed(*args: Any, **kwargs: Any) -> Any:
        if crossing.direct and may_hold_numbers((args, kwargs)):
            raise HoldsNumbers
        args, kwargs = crossing.declared.map(
            lambda x, _: unwrapped(x), args, kwargs, static=_unwrapped_static
        )
        fn = borrowed.__wrapped__
        name_root_modules(fn, args, kwargs)
        out, passes_through = results(fn(*args, **kwargs), crossing.name)
        if passes_through:
            crossing.direct = False
        return out

    # Its attributes are not copied, because they may hold arrays.
    functools.update_wrapper(crossed, fn, updated=())
    crossed.__name__ = crossing.name
    vars(crossed)["__wrapped__"] = borrowed
    return crossed


def _unwrapped_static(x: Any) -> Any:
    return x.value if type(x) is Static else x


def _without_modules(crossed: Callable[..., Any], crossing: Crossing) -> Callable[..., Any]:
    """A function that refuses modules among its arguments and results."""

    @functools.wraps(crossed)
    def without_modules(*args: Any, **kwargs: Any) -> Any:
        def refuse(x: Any, _name: str) -> None:
            if stateful.has_nodes(x):
                raise stateful.HoldsState

        crossing.declared.map(refuse, args, kwargs)
        out = crossed(*args, **kwargs)
        refuse(out, "")
        return out

    return without_modules


def calls_users_code(code: types.CodeType) -> bool:
    """Whether a frame with this code is the one in which the user's function is called."""
    return code in _crossed.__code__.co_consts and code.co_name == "crossed"
