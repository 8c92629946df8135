"""The checks of `with_fallback`, which decide whether a result is rejected."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from precpass.numerics.fallback.condition import condition_number
from precpass.numerics.ladder.rungs import Rung

__all__ = ["Check", "IllConditioned", "NonFinite", "OutOfRange", "Predicate", "parse_checks"]

Verdict = tuple[Any, Any]
Call = Callable[[Callable[..., Any]], Any]
"""Calls a function of the user's arguments with them."""


@runtime_checkable
class Check(Protocol):
    """A check, which `with_fallback` asks before or after a function has run on a rung.

    Attributes:
        before: whether it only needs the arguments. A rung on which it fires then does not run.
    """

    before: bool

    def bound(self, fn: Callable[..., Any]) -> Check:
        """Return the check for the arguments of a function.

        Raises:
            ValueError: if it names an argument that the function does not have.
        """
        ...

    def seen(self, out: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the value that the check looks at; with `before`, the same one on every rung.

        Args:
            out: the result; None for a check with `before`.
            args: the positional arguments of the call.
            kwargs: the keyword arguments.
        """
        ...

    def fires(self, seen: Any, rung: Rung) -> Verdict:
        """Return whether it fires, a boolean scalar, and the number that shows why."""
        ...

    @property
    def text(self) -> str:
        """The text that the report has if it fires; "{:.3g}" stands for the number."""
        ...


class _OfResult:
    """A check of the result, which is the same for every function and every rung."""

    before = False

    def bound(self, fn: Callable[..., Any]) -> Any:
        return self

    def seen(self, out: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return out


@dataclasses.dataclass(frozen=True)
class NonFinite(_OfResult):
    """Reject a result that has an infinity or a NaN; the report has their number.

    Examples:
        >>> NonFinite().text.format(3)
        'values not finite: 3'
    """

    def fires(self, seen: Any, rung: Rung) -> Verdict:
        """Return whether values are not finite, and how many."""
        count = jnp.zeros((), jnp.float32)
        for x in _inexact(seen):
            count += jnp.sum(~jnp.isfinite(x)).astype(jnp.float32)
        return count > 0, count

    @property
    def text(self) -> str:
        """The text, with their number."""
        return "values not finite: {:.3g}"


@dataclasses.dataclass(frozen=True)
class OutOfRange(_OfResult):
    """Reject a result with an element that is a NaN, or larger than a limit in magnitude.

    Attributes:
        limit: the limit of |x|, a positive number.

    Raises:
        ValueError: for a limit that is not positive.

    Examples:
        >>> OutOfRange(limit=1e3).text.format(2e5)
        'a magnitude of 2e+05, above 1000'
    """

    limit: float

    def __post_init__(self) -> None:
        limit: Any = self.limit
        if not (isinstance(limit, int | float | np.number) and 0 < limit < math.inf):
            raise ValueError(f"OutOfRange(limit={self.limit!r}): it is to be positive and finite")

    def fires(self, seen: Any, rung: Rung) -> Verdict:
        """Return whether an element is out of range, and the largest magnitude."""
        largest, within = jnp.zeros((), jnp.float32), jnp.asarray(True)
        for x in _inexact(seen):
            # In 16 bits the limit would be another number, or an infinity.
            size = jnp.abs(x)
            size = size if size.dtype == jnp.float64 else size.astype(jnp.float32)
            # `<=` is false for a NaN. A limit beyond the format becomes its largest number.
            limit = min(float(self.limit), float(jnp.finfo(size.dtype).max))
            within &= jnp.all(size <= limit)
            largest = jnp.maximum(largest, jnp.max(size, initial=0).astype(jnp.float32))
        return ~within, largest

    @property
    def text(self) -> str:
        """The text, with the largest magnitude."""
        return f"a magnitude of {{:.3g}}, above {self.limit:g}"


@dataclasses.dataclass(frozen=True)
class Predicate(_OfResult):
    """Reject a result for which your function returns true.

    Attributes:
        fn: returns a boolean scalar, true if the result should be rejected. It runs as you wrote
            it, in the dtypes of the result.
        takes_args: whether it is called `fn(out, *args, **kwargs)` instead of `fn(out)`.
        name: its name in the report; the function's own name by default.

    Raises:
        TypeError: if `fn` is not a function; when it is traced, if it returns anything but a
            boolean scalar.

    Examples:
        >>> Predicate(lambda variance: jnp.any(variance < 0), name="negative").text
        'negative'
    """

    fn: Callable[..., Any]
    takes_args: bool = False
    name: str = ""

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise TypeError(f"Predicate({self.fn!r}): it is to be a function of the result")

    def seen(self, out: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the function's result."""
        said = self.fn(out, *args, **kwargs) if self.takes_args else self.fn(out)
        is_array = isinstance(said, bool | np.bool_ | jax.Array | np.ndarray)
        if not is_array or jnp.shape(said) or not jnp.issubdtype(jnp.result_type(said), jnp.bool_):
            shown = jax.typeof(said).str_short() if is_array else repr(said)
            raise TypeError(
                f"the check {self._called!r} returned {shown}, and is to return a boolean scalar: "
                "use jnp.any or jnp.all"
            )
        return said

    def fires(self, seen: Any, rung: Rung) -> Verdict:
        """Return the function's result, as a bool and as a number."""
        fires = jnp.asarray(seen)
        return fires, fires.astype(jnp.float32)

    @property
    def text(self) -> str:
        """Its name."""
        return self._called.replace("{", "{{").replace("}", "}}")

    @property
    def _called(self) -> str:
        return self.name or getattr(self.fn, "__name__", repr(self.fn))


@dataclasses.dataclass(frozen=True)
class IllConditioned:
    """Skip a rung that is too coarse for the condition number of a matrix.

    With the condition number kappa and the rung's unit roundoff u, the relative error of a stable
    solution of a linear system is about kappa u (Higham 2002, "Accuracy and Stability of Numerical
    Algorithms", chapter 7), so the check fires if kappa > 10^-digits / u. kappa is estimated once,
    from the arguments (`precpass.numerics.fallback.condition.condition_number`).

    Attributes:
        matrix: the name of an argument, or a function of all arguments that returns the matrix,
            real and [..., n, n]: `lambda x, y: x.T @ x`, or `lambda *args: args[0]`.
        digits: the decimal digits that must be left, 1 by default; 0 compares with 1 / u.

    Raises:
        ValueError: for a negative number of digits, a name that is not an argument of the function
            or is its *args or **kwargs, or a matrix that is not square.
        TypeError: for a matrix that is neither a name nor a function, or not real and floating.

    Examples:
        >>> IllConditioned("a").text.format(1e10)
        'a condition number of 1e+10 leaves less than 1 digit'
    """

    matrix: str | Callable[..., Any]
    digits: float = 1.0
    before = True

    def __post_init__(self) -> None:
        if not (isinstance(self.matrix, str) or callable(self.matrix)):
            raise TypeError(
                f"IllConditioned(matrix={self.matrix!r}): it is to be an argument's name or a "
                "function of the arguments"
            )
        if not 0 <= self.digits < math.inf:
            raise ValueError(f"IllConditioned(digits={self.digits!r}): it is to be 0 or more")

    def bound(self, fn: Callable[..., Any]) -> IllConditioned:
        """Return the check with its matrix as a function of the arguments."""
        name = self.matrix
        if not isinstance(name, str):
            return self
        owner = f"IllConditioned(matrix={name!r})"
        signature = inspect.signature(fn)
        if name not in signature.parameters:
            known = ", ".join(map(repr, signature.parameters)) or "none"
            raise ValueError(f"{owner}: the function's arguments are {known}")
        kind = signature.parameters[name].kind
        if kind in _STARS:
            stars = [_STARS.get(p.kind, "") + p.name for p in signature.parameters.values()]
            one = "0" if kind is inspect.Parameter.VAR_POSITIONAL else "'a'"
            raise ValueError(
                f"{owner}: {_STARS[kind]}{name} is any number of arguments, and the matrix is one: "
                "give a function of all arguments that returns it, such as "
                f"`lambda {', '.join(stars)}: {name}[{one}]`"
            )

        def named(*args: Any, **kwargs: Any) -> Any:
            arguments = signature.bind(*args, **kwargs)
            arguments.apply_defaults()
            return arguments.arguments[name]

        return dataclasses.replace(self, matrix=named)

    def seen(self, out: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the condition number."""
        assert not isinstance(self.matrix, str)
        return condition_number(self.matrix(*args, **kwargs))

    def fires(self, seen: Any, rung: Rung) -> Verdict:
        """Return whether the condition number is too large, and the condition number."""
        return ~(seen <= 10**-self.digits / rung.unit_roundoff), seen

    @property
    def text(self) -> str:
        """The text, with the condition number."""
        unit = "digit" if self.digits == 1 else "digits"
        return f"a condition number of {{:.3g}} leaves less than {self.digits:g} {unit}"


_STARS = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}


def parse_checks(owner: str, unstable: Any, fn: Callable[..., Any]) -> tuple[Check, ...]:
    """The checks that a user gave, bound to a function.

    Args:
        owner: the name of the function that takes them, for errors.
        unstable: a check, a function of the result, or a sequence of these.
        fn: the function.

    Raises:
        ValueError: if there is none, or one does not fit the function.
        TypeError: for an object that is no check.
    """
    several = unstable if isinstance(unstable, tuple | list) else (unstable,)
    if not several:
        raise ValueError(
            f"{owner}: unstable={unstable!r} has no check: leave it out for NonFinite()"
        )
    checks: list[Check] = []
    for check in several:
        if isinstance(check, type):
            raise TypeError(f"{owner}: unstable has the class {check.__name__}: give a value of it")
        if not isinstance(check, Check):
            if not callable(check):
                raise TypeError(
                    f"{owner}: unstable has {check!r}, which is not a check: legal are "
                    "NonFinite(), OutOfRange(limit), IllConditioned(matrix), Predicate(fn) of "
                    "precpass.numerics, and a function of the result that returns a boolean scalar"
                )
            check = Predicate(check)
        checks.append(check.bound(fn))
    return tuple(checks)


def _inexact(tree: Any) -> list[Any]:
    return [x for x in jax.tree.leaves(tree) if jnp.issubdtype(jnp.result_type(x), jnp.inexact)]
