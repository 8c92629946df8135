"""The values of a jaxpr while it is rewritten, each in the format that it was computed in.

Every cast that the rewrite inserts is made here, when an equation reads a value in another format
than the value has.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from precpass import jaxpr as ir
from precpass.analysis.equations import (
    grows,
    handed_on_operand,
    is_wide,
    moved_operand,
)
from precpass.analysis.sizes import nbytes
from precpass.backends.cpu_layouts import Layouts
from precpass.eight_bits.copies import EightBits, eight_bit_avals
from precpass.eight_bits.scaled_product import Rounding
from precpass.plan.borders import Border, BorderCopy, across
from precpass.plan.plan import BackwardForm
from precpass.policy.precision import Precision
from precpass.policy.primitives import named
from precpass.policy.warned import PrecisionWarning, user_stacklevel
from precpass.rewrite.copies import low_copy

__all__ = ["Env", "border_avals", "crossing_aval"]

_ROUNDED = (
    "is a constant of a float64 region, and was rounded to float32: the function cannot be traced "
    "with x64 on. Take float32 arrays and dtypes out of it, or call it under jax.enable_x64 with "
    "float64 arguments"
)
_MAY_BE_NOTED = {*named("repeats"), "convert_element_type", "concatenate", "rev", "transpose"}
"""What `Env` may note: their operands may have low copies, or be such, however they are stored."""


class Env:
    """The values of a jaxpr that is being rewritten, as atoms of the new jaxpr.

    Attributes:
        opened: the jaxpr.
        build: where new equations are added.
        values: variable -> the atom that stands for it in the new jaxpr, in any format; a variable
            that is not in here stands for itself.
        low_copies: (atom, format) -> its copy in a low format, through which no derivative passes.
        wide_copies: (atom, format) -> its copy in a wider format, which all readers share.
        eight_bits: the values in 8 bits.
        border_copies: (atom, format) -> its low copy in the form in which it crosses the borders
            of bodies: as unsigned integers, or as it is.
        rounded: the variables whose digits are those of bfloat16, in any format.
        low_sources: variable -> the equation that makes it, if a low copy of the variable is
            better computed from a low copy of that equation's operand.
    """

    def __init__(self, opened: ir.Jaxpr, build: ir.Builder) -> None:
        self.opened = opened
        self.build = build
        self._layouts = Layouts(opened)
        self.values: dict[Any, Any] = {}
        self.low_copies: dict[tuple[Any, Precision], Any] = {}
        self.wide_copies: dict[tuple[Any, Precision], Any] = {}
        self.eight_bits = EightBits(opened, build)
        self.border_copies: dict[tuple[Any, Precision], Any] = {}
        self.rounded = set[Any]()
        self.low_sources: dict[Any, Any] = {}

    def enter(self, var: ir.Var, border: Border) -> Any:
        """The new operand for `var`, in the format in which it crosses the border."""
        crossing = crossing_aval(var.aval, border)
        if crossing is var.aval:
            return var
        self.values[var] = new = ir.new_variable(crossing)
        return new

    def enter_border_copy(self, var: ir.Var, border_copy: BorderCopy) -> list[Any]:
        """The new operands that are the border copy of `var`."""
        new = [ir.new_variable(aval) for aval in border_avals(var.aval, border_copy)]
        self.receive(var, new, border_copy)
        return new

    def receive(self, var: ir.Var, copies: Sequence[Any], border_copy: BorderCopy) -> None:
        """Takes a border copy as the low copy of `var`."""
        if border_copy.precision.is_scaled:
            self.eight_bits.receive(var, copies, border_copy)
            return
        (self.border_copies[var, border_copy.precision],) = copies
        if border_copy.rounds:
            self.round(var, border_copy.precision)

    def border_copy(self, atom: ir.Atom, border_copy: BorderCopy) -> list[Any]:
        """A value's border copy: its low copy, the bits of that, or 8 bits and a scale."""
        if border_copy.precision.is_scaled:
            return self.eight_bits.crossing(atom, self.read(atom), border_copy)
        key = (atom, border_copy.precision)
        crosses = self.build.bits if _as_bits(atom.aval, border_copy) else self.build.detach
        if ir.is_literal(atom):
            return [crosses(self.read_as(atom, border_copy.precision))]
        if key not in self.border_copies:
            self.border_copies[key] = crosses(self.low_copy(atom, border_copy.precision))
        return [self.border_copies[key]]

    def round(
        self, var: ir.Var, precision: Precision, *, keeps: bool = False, pins: bool = False
    ) -> None:
        """Rounds a value to a low format, so that every reader reads the rounded value.

        Args:
            var: the value.
            precision: the format.
            keeps: whether XLA is kept from leaving the rounding out (`Decision.keeps_rounding`).
            pins: whether a TPU computes the value only once (`Decision.pins_rounding`).
        """
        low = self.low_copy(var, precision)
        if keeps:
            low = self.build.detach(low, keeps_rounding=True, pinned=pins)
            self.low_copies[var, precision] = low
        self.values[var] = self.build.rounded(low, self.values.get(var, var))
        self.note_rounded(var, precision)

    def note_rounded(self, var: ir.Var, precision: Precision) -> None:
        """Notes that a value has no more digits than a format."""
        if precision is Precision.BF16:
            self.rounded.add(var)

    def add_backward_form(self, eqn: ir.Eqn, form: BackwardForm, precision: Precision) -> None:
        """Adds the equations by which the derivative of an equation saves or makes low values.

        Args:
            eqn: an elementwise equation, which has been added.
            form: says which values these are.
            precision: their format.
        """
        (var,), dtype = eqn.outvars, precision.dtype
        is_rounded = (var, precision) in self.low_copies
        function = ir.function_of(eqn, dtype, form.low_factors, is_rounded=is_rounded)
        if form.low_factors and function is not None:
            operands = [self.read(v) for v in eqn.invars]
            out = self.build.low_derivative(self.values.get(var, var), operands, function)
            self.values[var] = out
        if form.low_cotangent:
            self.values[var] = self.build.low_cotangent(self.values.get(var, var), dtype)

    def keep(self, eqn: ir.Eqn) -> None:
        """Takes over an equation unchanged."""
        # Most equations come here, so this makes no call for each value.
        values, is_literal = self.values, ir.is_literal
        if self.border_copies or eqn.primitive.name in _MAY_BE_NOTED:
            self._note(eqn)
        for v in eqn.invars:
            if not is_literal(v) and v in values:
                self.build.at(eqn)
                self.build.keep(eqn, [self.read(v) for v in eqn.invars])
                return
        self.build.eqns.append(eqn)

    def _note(self, eqn: ir.Eqn) -> None:
        """Notes an equation if low copies of its results may be made from its operands' copies."""
        name = eqn.primitive.name
        before = self.low_sources.get(moved_operand(eqn)) if name == "transpose" else None
        may_be_noted = (
            _cast_belongs_before(eqn)
            or name == "concatenate"
            # `jax.lax.conv_transpose` transposes a kernel that it has reversed
            or (before is not None and before.primitive.name == "rev")
            or (self.border_copies and handed_on_operand(eqn) is not None)
            or ir.widening(eqn) is not None
        )
        if may_be_noted:
            self.low_sources.update(dict.fromkeys(eqn.outvars, eqn))

    @functools.cached_property
    def shared(self) -> set[Any]:
        """The variables with several readers, where a body and the border count as readers."""
        shared_values, once, is_literal = set[Any](), set[Any](), ir.is_literal
        for eqn in self.opened.eqns:
            for v in eqn.invars:
                if not is_literal(v):
                    (shared_values if v in once else once).add(v)
            if ir.bodies(eqn):
                shared_values.update([v for v in eqn.invars if not is_literal(v)])
        shared_values.update([v for v in self.opened.outvars if not is_literal(v)])
        return shared_values

    def write(self, var: ir.Var, value: Any, stored: Precision | None) -> None:
        """Records a result.

        A 16-bit result with several readers is recorded in its widened form, which is exact. Each
        reader then casts for itself, so the readers' cotangents add up in float32.
        """
        if value is not var:
            self.values[var] = value
        native = ir.precision_of(var.aval)
        if stored is None or native is None or stored is native:
            return
        self.note_rounded(var, stored)
        if var in self.shared and stored.is_narrower_than(native):
            self.values[var] = self.build.convert(value, var.aval.dtype)

    def read(self, atom: ir.Atom) -> Any:
        """A value in the precision in which the original program has it."""
        if ir.is_literal(atom):
            return atom
        value = self.values.get(atom, atom)
        is_as_written = value is atom or value.aval.dtype == atom.aval.dtype
        return value if is_as_written else self.build.convert(value, atom.aval.dtype)

    def crossing(self, atom: ir.Atom, border: Border) -> Any:
        """A value in the format in which it crosses a border."""
        return (
            self.read_as(atom, across(border, ir.parts_of(atom.aval)))
            if border
            else self.read(atom)
        )

    def read_as(self, atom: ir.Atom, precision: Precision | None) -> Any:
        """A value in another precision.

        All readers share one cast to a wider format, so their cotangents add up in that format.
        Each reader has a narrowing cast of its own, for the same reason.
        """
        native = ir.parts_of(atom.aval)
        is_complex = native is not None and ir.precision_of(atom.aval) is None
        if precision is None or native is None or (is_complex and precision is not Precision.F64):
            return self.read(atom)
        dtype = ir.dtype_in(atom.aval.dtype, precision)
        if ir.is_literal(atom):
            # A literal may hold more digits than the program computes with.
            number = np.asarray(atom.val, atom.aval.dtype)
            if precision is Precision.F64:
                number = self._exact(atom.val, number)
            return ir.literal(number.astype(dtype), atom)
        near = self._nearest(atom, precision) if self.low_sources else atom
        value = self.values.get(near, near)
        present = ir.parts_of(value.aval)
        if present is precision or present is None:
            return value
        if not present.is_narrower_than(precision):
            return self.build.convert(value, dtype)
        key = (atom, precision)
        if key not in self.wide_copies:
            self.wide_copies[key] = self.build.convert(value, dtype)
        return self.wide_copies[key]

    def enter_constant(self, var: ir.Var, value: Any) -> None:
        """Takes a constant of the program, in a float64 span, as it was before it was rounded."""
        if ir.is_rounded_type(value):
            self.values[var] = self.build.constant(self._exact(value, value))

    def _exact(self, value: Any, rounded: Any) -> Any:
        """A constant as it was before JAX rounded it to float32, or with a warning as it is."""
        exact = ir.exact(value)
        if exact is None and ir.is_rounded_type(rounded):
            shown = rounded if rounded.ndim == 0 else f"a numpy array of shape {rounded.shape}"
            text = f"{self.build.source()}: {shown} {_ROUNDED}"
            warnings.warn(text, PrecisionWarning, stacklevel=user_stacklevel())
        return rounded if exact is None else exact

    def as_(self, value: Any, precision: Precision | None) -> Any:
        """A value cast to another precision."""
        if precision is None or ir.precision_of(value.aval) in (None, precision):
            return value
        return self.build.convert(value, precision.dtype)

    def _nearest(self, atom: ir.Atom, precision: Precision) -> Any:
        """The value that an atom was widened from, if it has the precision; else the atom."""
        maker = self.low_sources.get(atom)
        pair = None if maker is None else ir.widening(maker)
        widened = pair is not None and ir.precision_of(pair[1].aval) is precision
        return pair[1] if pair and widened else atom

    def low_copy(self, atom: ir.Atom, precision: Precision) -> Any:
        """A low copy that all products share; no derivative passes through it."""
        if ir.is_literal(atom):
            return self.read_as(atom, precision)
        key = (atom, precision)
        if key not in self.low_copies and key in self.border_copies:
            copy, build = self.border_copies[key], self.build
            self.low_copies[key] = (
                build.detach(copy)
                if ir.precision_of(copy.aval)
                else build.from_bits(copy, precision.dtype, atom.aval)
            )
        if key not in self.low_copies and (maker := self.low_sources.get(atom)) is not None:
            self._move_low(maker, precision)
        if key not in self.low_copies:
            near = self._nearest(atom, precision)
            value, flat = self.values.get(near, near), atom in self._layouts.out_of_order
            self.low_copies[key] = low_copy(self.build, value, precision, flat=flat)
        return self.low_copies[key]

    def quantized_copy(self, atom: ir.Atom, rounding: Rounding) -> list[Any]:
        """As `EightBits.copy`."""
        is_low = rounding.largest is not None and not ir.is_literal(atom) and atom in self.rounded
        read = self.low_copy(atom, Precision.BF16) if is_low else self.read(atom)
        return self.eight_bits.copy(atom, read, rounding)

    def without_transposes(self, eqn: ir.Eqn, precision: Precision) -> Any:
        """As `Layouts.without_transposes`."""
        return self._layouts.without_transposes(
            eqn, lambda v: v in self.values or self._is_copied(v, precision)
        )

    def has_low(self, atom: ir.Atom, precision: Precision) -> bool:
        """Whether a low copy of a value exists, or is better made before the value is moved."""
        if self._is_copied(atom, precision):
            return True
        maker = self.low_sources.get(atom)
        return maker is not None and self._is_moved_low(maker, precision)

    def _is_copied(self, atom: ir.Atom, precision: Precision) -> bool:
        """Whether a low copy of a value exists."""
        key = (atom, precision)
        return key in self.low_copies or key in self.border_copies

    def _is_moved_low(self, eqn: ir.Eqn, precision: Precision) -> bool:
        """Whether low copies of the operands are moved in the place of a cast of the result."""
        if ir.widening(eqn) is not None:
            return False
        if eqn.primitive.name != "concatenate":
            return _cast_belongs_before(eqn) or self.has_low(handed_on_operand(eqn), precision)
        # The parts' makers are asked no further. A chain of concatenations that read one value
        # twice has a number of paths that doubles with each of them.
        low = [v for v in eqn.invars if self._is_low_part(v, precision)]
        return all(map(is_wide, eqn.invars)) and 2 * _nbytes(low) > _nbytes(eqn.invars)

    def _is_low_part(self, atom: ir.Atom, precision: Precision) -> bool:
        """Whether a part of a concatenation has a low copy, or is cast before it is moved."""
        if ir.is_literal(atom):
            return False
        maker = self.low_sources.get(atom)
        return self._is_copied(atom, precision) or (
            maker is not None and _cast_belongs_before(maker)
        )

    def _move_low(self, eqn: ir.Eqn, precision: Precision) -> None:
        """Moves low copies of the operands, where that is better than a cast of the result."""
        if not self._is_moved_low(eqn, precision):
            return
        moved = eqn.invars if eqn.primitive.name == "concatenate" else eqn.invars[:1]
        low = [self.low_copy(v, precision) for v in moved]
        if eqn.primitive.name == "sharding_constraint":
            # Otherwise XLA's partitioner gathers the value before the cast.
            low = [self.build.detach(v, keeps_rounding=True, pinned=True) for v in low]
        others = [self.read(v) for v in eqn.invars[len(low) :]]
        results = low if ir.keeps_bits(eqn) else self.build.bind(eqn, [*low, *others])
        for var, value in zip(eqn.outvars, results, strict=True):
            self.low_copies[var, precision] = low_copy(
                self.build, value, precision, flat=var in self._layouts.out_of_order
            )

    def output(self, atom: ir.Atom, border: Border) -> Any:
        """A result of the jaxpr as it crosses the border."""
        native = ir.parts_of(atom.aval)
        crossing = across(border, native)
        if crossing is not native:
            return self.read_as(atom, crossing)
        value = self.read(atom)
        if ir.is_array(atom.aval) and atom.aval.weak_type != value.aval.weak_type:
            value = self.build.convert(value, atom.aval.dtype, atom.aval.weak_type)
        return value


def _cast_belongs_before(eqn: ir.Eqn) -> bool:
    """Whether a cast of an equation's result belongs before it, on its operand.

    That is so if the equation repeats its operand, because there are fewer elements to cast, and if
    it reverses it: cuDNN has a kernel for the derivative of a convolution, and XLA finds the place
    for it by the reversed array that a convolution reads. If a cast stands between the two, XLA
    does not find it, and the gradient of a strided convolution becomes a convolution over an array
    that is filled up with zeros (jax 0.10.2 and 0.12.0.1).
    """
    return grows(eqn) or (eqn.primitive.name == "rev" and is_wide(eqn.invars[0]))


def _nbytes(atoms: Sequence[Any]) -> float:
    return sum(nbytes(v.aval) for v in atoms)


def border_avals(aval: ir.Aval, border_copy: BorderCopy) -> list[Any]:
    """The avals of the arrays of a value's border copy."""
    if border_copy.precision.is_scaled:
        return eight_bit_avals(aval, border_copy)
    if _as_bits(aval, border_copy):
        return [ir.border_copy_aval(aval)]
    return [ir.border_copy_aval(aval, border_copy.precision.dtype)]


def _as_bits(aval: ir.Aval, border_copy: BorderCopy) -> bool:
    # The copy of an array that is reduced over mesh axes is not: only bits have no derivative.
    return border_copy.as_bits or ir.is_reduced(aval)


def crossing_aval(aval: ir.Aval, border: Border) -> Any:
    """The aval with which a value of `aval` crosses a border."""
    if not border or ir.is_ref(aval):
        return aval
    native = ir.parts_of(aval)
    crossing = across(border, native)
    if crossing in (None, native):
        return aval
    return aval.update(dtype=ir.dtype_in(aval.dtype, crossing))
