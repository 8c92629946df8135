"""The checks of `with_fallback`, which decide whether a result is rejected."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from precpass import jaxpr as ir
from precpass.api import auto_mixed
from precpass.jit.region import keep
from precpass.numerics.given import check_positive, shown
from precpass.numerics.rungs import Rung
from precpass.policy.precision import Precision
from precpass.policy.presets import AlwaysF32

__all__ = [
    "Check",
    "IllConditioned",
    "NonFinite",
    "OutOfRange",
    "Predicate",
    "condition_number",
    "parse_checks",
]

Tree = Any


class Check:
    """A check: a number that it finds in a result, and whether that number rejects it.

    Attributes:
        before: whether it only needs the arguments. A rung on which it rejects then does not run.
    """

    before = False

    def bound(self, fn: Callable[..., Any]) -> Check:
        """Return the check for the arguments of a function."""
        return self

    def number(self, out: Tree, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the number, a scalar; with `before` from the arguments alone."""
        raise NotImplementedError

    def rejects(self, number: Any, rung: Rung) -> Any:
        """Return whether the number rejects the result of a rung, a boolean scalar."""
        raise NotImplementedError

    @property
    def text(self) -> str:
        """The text that the report has if it rejects; "{:.3g}" stands for the number."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class NonFinite(Check):
    """Reject a result that has an infinity or a NaN; the report has their number.

    Examples:
        >>> NonFinite().text.format(3)
        'values not finite: 3'
    """

    def number(self, out: Tree, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return how many values are not finite."""
        counts = [jnp.sum(~jnp.isfinite(x)).astype(jnp.float32) for x in _inexact(out)]
        return sum(counts, jnp.zeros((), jnp.float32))

    def rejects(self, number: Any, rung: Rung) -> Any:
        """Return whether there are any."""
        return number > 0

    @property
    def text(self) -> str:
        """The text, with their number."""
        return "values not finite: {:.3g}"


@dataclasses.dataclass(frozen=True)
class OutOfRange(Check):
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
        check_positive("OutOfRange(limit", self.limit)

    def number(self, out: Tree, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the largest magnitude, or a NaN."""
        # In 16 bits the limit would be another number, or an infinity.
        wide = jnp.float64 if ir.in_x64() else jnp.float32
        sizes = [jnp.max(jnp.abs(x).astype(wide), initial=0) for x in _inexact(out)]
        return functools.reduce(jnp.maximum, sizes, jnp.zeros((), wide))

    def rejects(self, number: Any, rung: Rung) -> Any:
        """Return whether it is beyond the limit, which is at most the format's largest number."""
        # `<=` is false for a NaN.
        return ~(number <= min(float(self.limit), float(jnp.finfo(number.dtype).max)))

    @property
    def text(self) -> str:
        """The text, with the largest magnitude."""
        return f"a magnitude of {{:.3g}}, above {self.limit:g}"


@dataclasses.dataclass(frozen=True)
class Predicate(Check):
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

    def number(self, out: Tree, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the function's result."""
        said = self.fn(out, *args, **kwargs) if self.takes_args else self.fn(out)
        is_array = isinstance(said, bool | np.bool_ | jax.Array | np.ndarray)
        if not is_array or jnp.shape(said) or not jnp.issubdtype(jnp.result_type(said), jnp.bool_):
            raise TypeError(
                f"the check {self._called!r} returned {shown(said)}, and is to return a boolean "
                "scalar: use jnp.any or jnp.all"
            )
        return jnp.asarray(said)

    def rejects(self, number: Any, rung: Rung) -> Any:
        """Return the function's result."""
        return number

    @property
    def text(self) -> str:
        """Its name."""
        return self._called.replace("{", "{{").replace("}", "}}")

    @property
    def _called(self) -> str:
        return self.name or getattr(self.fn, "__name__", repr(self.fn))


@dataclasses.dataclass(frozen=True)
class IllConditioned(Check):
    """Skip a rung that is too coarse for the condition number of a matrix.

    With the condition number kappa and the rung's unit roundoff u, the relative error of a stable
    solution of a linear system is about kappa u (Higham 2002, "Accuracy and Stability of Numerical
    Algorithms", chapter 7), so the check fires if kappa > 10^-digits / u. kappa is computed once,
    from the arguments (`precpass.numerics.checks.condition_number`).

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

    def number(self, out: Tree, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the condition number."""
        assert not isinstance(self.matrix, str)
        return condition_number(self.matrix(*args, **kwargs))

    def rejects(self, number: Any, rung: Rung) -> Any:
        """Return whether the condition number is too large for the rung."""
        return ~(number <= 10**-self.digits / rung.unit_roundoff)

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


# ---------------------------------------------------------------- the condition number

_RESOLVED = 0.01 / Precision.F32.unit_roundoff
"""The largest condition number that a float32 inverse resolves: its error grows as kappa u."""


def condition_number(matrix: Any) -> jax.Array:
    """The condition number |A| |A^-1| of a real square matrix, in the 1-norm.

    The inverse is computed in float32, or in float64 if float32 does not resolve the number, with
    x64 on or off. The second one is only computed if it is needed (under `jax.vmap` always).

    Args:
        matrix: of a floating dtype, [..., n, n].

    Returns:
        A float32 scalar, the largest of a batch; inf if a matrix is singular or not finite.

    Raises:
        TypeError: for a matrix that is not real and floating.
        ValueError: for one that is not square.

    Examples:
        >>> float(condition_number(jnp.diag(jnp.asarray([1.0, 0.5, 0.25]))))
        4.0
    """
    a = jnp.asarray(lax.stop_gradient(matrix))
    if not jnp.issubdtype(a.dtype, jnp.floating):
        raise TypeError(f"condition_number takes a real floating matrix, not one of {a.dtype}")
    if a.ndim < 2 or a.shape[-1] != a.shape[-2]:
        raise ValueError(f"condition_number takes a square matrix, not one of shape {a.shape}")
    if not a.size:
        return jnp.zeros((), jnp.float32)
    a = a.reshape(-1, *a.shape[-2:])
    if a.dtype != jnp.float64:
        a = a.astype(jnp.float32)
    # A multiple of a matrix has the same condition number, and its elements fit float32.
    largest = jnp.max(jnp.abs(a), (1, 2), keepdims=True)
    a = a / jnp.where(largest > 0, largest, 1)
    with keep("f32"):
        rough = _largest(a.astype(jnp.float32))
    return lax.cond(rough <= _RESOLVED, lambda: rough, lambda: _in_float64(a))


@auto_mixed(policy=AlwaysF32)
def _in_float64(a: jax.Array) -> jax.Array:
    with keep("f64"):
        return _largest(a)


def _largest(matrices: jax.Array) -> jax.Array:
    largest = jnp.max(jnp.linalg.cond(matrices, 1))
    return jnp.where(jnp.isnan(largest), jnp.inf, largest).astype(jnp.float32)
