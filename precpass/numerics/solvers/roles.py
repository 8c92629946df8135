"""`Roles`: the precision of each part of a nonlinear least-squares solve."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from precpass.policy.precision import FORMATS, Precision

__all__ = ["Roles"]

_LEGAL = {
    "residual": (Precision.F64, Precision.F32),
    "gradient": FORMATS,
    "jacobian": FORMATS,
    "solve": (Precision.F64, Precision.F32),
}


@dataclasses.dataclass(frozen=True)
class Roles:
    """The precision of each part of a step of nonlinear least squares.

    A step solves `(J^T J + ...) d = -J^T r`. The residual and the gradient `J^T r` decide where the
    solve ends; an inexact `J` on the left only changes the way there. So these two are float64 by
    default, and the Jacobian, which costs as many products as there are unknowns, is float32. If a
    gradient or a Jacobian in a lower format is not finite, it is computed again in the precision of
    the residual for that step.

    Attributes:
        residual: the precision of the residual `r`, of the unknowns, and of the tests that accept a
            step and end the solve; "f64" or "f32". The residual is linearised in it.
        gradient: the precision of `J^T r`, one product with the transposed linearisation.
        jacobian: the precision of `J` on the left side, one product with the linearisation for each
            unknown. A tuple such as ("bf16", "f32", "f64") is a ladder: the precision is raised if
            its steps no longer bring the residual and the Jacobian closer to a right angle, and
            when the solve would end (`Ladder`, with a patience of 10 steps).
        solve: the precision of the QR factorisation of `J` and of the step that it gives; "f64" or
            "f32", because LAPACK has no other.

    Raises:
        ValueError: for an unknown precision, one that a role cannot have, or one above that of the
            residual, a ladder that does not rise, or one for another role than the Jacobian.

    Examples:
        >>> Roles(jacobian="bf16")
        Roles(residual='f64', gradient='f64', jacobian='bf16', solve='f64')
        >>> Roles.all("f32").solve
        Precision.F32
    """

    residual: Precision | str = Precision.F64
    gradient: Precision | str = Precision.F64
    jacobian: Precision | str | tuple[Precision | str, ...] = Precision.F32
    solve: Precision | str = Precision.F64

    def __post_init__(self) -> None:
        for role in _LEGAL:
            value = getattr(self, role)
            if role == "jacobian" and isinstance(value, Sequence) and not isinstance(value, str):
                parsed: Any = _ladder([_parsed(role, p) for p in value])
            else:
                parsed = _parsed(role, value)
            object.__setattr__(self, role, parsed)
        widest = Precision.parse(self.residual)
        for role in ("gradient", "jacobian", "solve"):
            for precision in self.rungs if role == "jacobian" else (getattr(self, role),):
                if widest.is_narrower_than(precision):
                    raise ValueError(
                        f"Roles({role}={str(precision)!r}) is wider than residual={str(widest)!r}, "
                        f"from which it comes: raise the residual or lower {role}"
                    )

    @property
    def rungs(self) -> tuple[Precision, ...]:
        """The precisions of the Jacobian, beginning with that of the first step."""
        jacobian: Any = self.jacobian
        return jacobian if isinstance(jacobian, tuple) else (jacobian,)

    @classmethod
    def all(cls, precision: Precision | str) -> Roles:
        """Return roles with one precision: "f64", which does not change the solver, or "f32"."""
        return cls(precision, precision, precision, precision)

    @classmethod
    def of(cls, value: Roles | Mapping[str, Any]) -> Roles:
        """Return roles from a `Roles` or a mapping, whose missing roles have their defaults.

        Raises:
            ValueError: for an unknown role, and as `Roles` does.
            TypeError: for anything else.
        """
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise TypeError(
                f"roles={value!r}: it is to be Roles(...) or a dict such as {{'jacobian': 'f32'}}"
            )
        for role in value:
            if role not in _LEGAL:
                raise ValueError(f"unknown role {role!r}: legal are {', '.join(map(repr, _LEGAL))}")
        return cls(**value)

    @property
    def is_uniform(self) -> bool:
        """Whether all roles have one precision."""
        return {self.residual, self.gradient, self.solve, *self.rungs} == {self.residual}

    def __repr__(self) -> str:
        rungs = tuple(str(p) for p in self.rungs)
        shown = {role: str(getattr(self, role)) for role in _LEGAL}
        shown |= {"jacobian": rungs[0] if len(rungs) == 1 else rungs}
        return f"Roles({', '.join(f'{role}={name!r}' for role, name in shown.items())})"


def _parsed(role: str, given: Any) -> Precision:
    legal = _LEGAL[role]
    try:
        precision = Precision.parse(given)
    except ValueError as error:
        raise ValueError(f"Roles({role}=...): {error}") from None
    if precision not in legal:
        raise ValueError(
            f"Roles({role}={str(precision)!r}): legal are {', '.join(repr(str(p)) for p in legal)}"
        )
    return precision


def _ladder(rungs: list[Precision]) -> Precision | tuple[Precision, ...]:
    if not rungs:
        raise ValueError("Roles(jacobian=()): give a precision, or several that rise")
    for low, high in itertools.pairwise(rungs):
        if high.unit_roundoff >= low.unit_roundoff:
            raise ValueError(
                f"Roles(jacobian=...): a ladder rises, and {str(high)!r} (unit roundoff "
                f"{high.unit_roundoff:.2g}) comes after {str(low)!r} ({low.unit_roundoff:.2g})"
            )
    return rungs[0] if len(rungs) == 1 else tuple(rungs)
