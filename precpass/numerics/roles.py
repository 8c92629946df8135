"""Which precision each part of a nonlinear least-squares solve has."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from precpass.precision import Precision

__all__ = ["Roles"]

_LEGAL = {
    "residual": (Precision.F64, Precision.F32),
    "gradient": tuple(Precision),
    "jacobian": tuple(Precision),
    "solve": (Precision.F64, Precision.F32),
}


@dataclasses.dataclass(frozen=True)
class Roles:
    """The precision of each part of a step of nonlinear least squares.

    A step solves `(J^T J + ...) d = -J^T r`. Where it ends is decided by the residual and the
    gradient `J^T r`; an inexact `J` on the left only changes how it gets there. So these two are
    float64 by default, and the Jacobian, which costs as many products as there are unknowns, is
    float32. Where a gradient or a Jacobian in a lower format is not finite, that of the step is
    computed again in the precision of the residual.

    Attributes:
        residual: of the residual `r`, the unknowns, and what accepts a step and ends the solve;
            "f64" or "f32". The residual is linearised in this precision.
        gradient: of `J^T r`, one product with the transpose of that linearisation.
        jacobian: of `J` on the left side, one product with that linearisation for each unknown.
        solve: of the QR factorisation of `J` and of what follows from it; "f64" or "f32", since
            LAPACK has no other.

    Raises:
        ValueError: for an unknown precision, one that a role cannot have, or one above that of
            the residual.

    Example:
        >>> Roles(jacobian="bf16")
        Roles(residual='f64', gradient='f64', jacobian='bf16', solve='f64')
        >>> Roles.all("f32").solve
        Precision.F32
    """

    residual: Precision | str = Precision.F64
    gradient: Precision | str = Precision.F64
    jacobian: Precision | str = Precision.F32
    solve: Precision | str = Precision.F64

    def __post_init__(self) -> None:
        for role, legal in _LEGAL.items():
            try:
                precision = Precision.parse(getattr(self, role))
            except ValueError as error:
                raise ValueError(f"Roles({role}=...): {error}") from None
            if precision not in legal:
                raise ValueError(
                    f"Roles({role}={str(precision)!r}): legal are "
                    f"{', '.join(repr(str(p)) for p in legal)}"
                )
            object.__setattr__(self, role, precision)
        widest = Precision.parse(self.residual)
        for role in ("gradient", "jacobian", "solve"):
            if widest.is_narrower_than(precision := Precision.parse(getattr(self, role))):
                raise ValueError(
                    f"Roles({role}={str(precision)!r}) is wider than residual={str(widest)!r}, "
                    f"from which it comes: raise the residual or lower {role}"
                )

    @classmethod
    def all(cls, precision: Precision | str) -> Roles:
        """One precision throughout: "f64", which is the solver as it is, or "f32"."""
        return cls(precision, precision, precision, precision)

    @classmethod
    def of(cls, value: Roles | Mapping[str, Any]) -> Roles:
        """Reads roles from themselves or from a mapping, whose missing ones have their defaults.

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
        """Whether all have one precision."""
        return len({getattr(self, role) for role in _LEGAL}) == 1

    def __repr__(self) -> str:
        return f"Roles({', '.join(f'{role}={str(getattr(self, role))!r}' for role in _LEGAL)})"
