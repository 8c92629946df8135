"""`Plan`: the precision of every equation, as data that you can read, compare and hash."""

from __future__ import annotations

import dataclasses
import enum
import functools
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from precpass.plan.borders import NO_BORDER_COPIES, Border, BorderCopies
from precpass.plan.eqn_info import EqnInfo, PlanSource
from precpass.plan.reasons import DecidedBy, Reason
from precpass.policy.policy import PrecisionPolicy
from precpass.policy.precision import Precision
from precpass.policy.primitives import OpKind
from precpass.policy.rules import Rule
from precpass.units import counted

__all__ = [
    "Action",
    "Decision",
    "DeviceSum",
    "Plan",
    "ProductForm",
]


def _own_state(value: Decision | Plan) -> dict[str, object]:
    """The state to pickle: without the cached hash, which only holds in this process."""
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


class Action(enum.Enum):
    """What the rewriter does with an equation."""

    KEEP = "keep"
    """Evaluate it in the precision it was written in. Its results may still be stored in 16 bits
    (`Decision.stored`), and a matrix product's operands exchanged (`Decision.product`)."""
    LOWER = "lower"
    """Evaluate it in a lower precision."""
    MULTIPLY = "multiply"
    """Multiply the float32 operands of a matrix product in another way than JAX's default, with
    a float32 result (`Precision.is_multiplication`)."""
    WIDEN = "widen"
    """Evaluate it in a higher precision than it was written in."""
    DROP = "drop"
    """Replace it by its operand: a cast to the format that the operand already has, or a
    transpose into the order that the matrix product before it already gives."""
    ENTER = "enter"
    """Rewrite its bodies, which have plans of their own."""

    # A plan of many equations hashes many of these, and an Enum's own hash is Python code.
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return f"Action.{self.name}"


class ProductForm(NamedTuple):
    """How a matrix product is evaluated, apart from its precision.

    Attributes:
        exchanged: whether its operands are exchanged, which replaces transposes of its result.
        recast_in_backward: for each operand, whether the backward pass casts it again, for a
            product in a branch in a loop whose operand is computed before the loop: a 16-bit copy
            would be saved in every trip.
        low_result: whether its kernel rounds its result to the 16-bit format of its operands.
        low_cotangents: for each operand, whether the dot that computes its cotangent rounds it to
            16 bits.
        scaled: the format of 8 bits in which it multiplies (`precpass.eight_bits.scaled_product`).
        not_scaled: the format of 8 bits that the policy asks for, if it does not multiply so.
        scaled_cotangents: for each operand, whether the product for its cotangent is scaled.
        wide_outer: whether a cotangent that is an outer product, and so sums over one term, is
            computed in float32. A preset leaves such products in float32.
        summed_last: whether a scaled product and those for its cotangents read operands whose
            contracted dimensions are the last ones.
        largest: for each operand of a scaled product the largest magnitude that its scale is made
            for; None to take it from the operand in each call.
    """

    exchanged: bool = False
    recast_in_backward: tuple[bool, bool] = (False, False)
    low_result: bool = False
    low_cotangents: tuple[bool, bool] = (False, False)
    scaled: Precision | None = None
    not_scaled: Precision | None = None
    scaled_cotangents: tuple[bool, bool] = (True, True)
    wide_outer: bool = False
    summed_last: bool = False
    largest: tuple[float | None, float | None] = (None, None)

    def with_sides_exchanged(self) -> ProductForm:
        """The form of the product whose operands have been exchanged."""
        return self._replace(
            recast_in_backward=self.recast_in_backward[::-1],
            low_cotangents=self.low_cotangents[::-1],
            scaled_cotangents=self.scaled_cotangents[::-1],
            largest=self.largest[::-1],
        )


AS_WRITTEN = ProductForm()


class BackwardForm(NamedTuple):
    """What the derivative of an elementwise equation saves and computes in bfloat16.

    Attributes:
        low_factors: for each operand, whether the factor by which its derivative multiplies is
            saved in bfloat16; () if none is.
        low_cotangent: whether the cotangent of the result is rounded.
    """

    low_factors: tuple[bool, ...] = ()
    low_cotangent: bool = False


class DeviceSum(NamedTuple):
    """How devices send each other the terms of a sum in bfloat16.

    Attributes:
        of_cotangents: whether the equation's derivative is the sum, and not the equation.
        dim: the dimension along which each device gets a part of the terms, adds it up in float32,
            and sends it on; None if the devices add up in bfloat16.
    """

    of_cotangents: bool = False
    dim: int | None = None


@dataclasses.dataclass(frozen=True)
class Decision:
    """What a plan does with one equation, and why.

    Attributes:
        action: what the rewriter does.
        kind: the equation's kind.
        compute: the precision in which it is evaluated; None if it has no floating-point values
            that may change.
        stored: the precision in which each result is stored; None for a result that keeps its
            dtype. A result that is computed in float32, or by a matrix product, and stored in 16
            bits is rounded where it is defined: every reader reads the rounded value, and
            derivatives skip the rounding.
        reason: why; `str(decision.reason)` is a sentence.
        decided_by: what decided the precision in which it is computed.
        inner: the plans of its bodies.
        rules: the formats in which values enter and leave its custom rules, which are planned and
            rewritten when JAX traces them; None if the rules are not rewritten.
        in_float64_span: whether it belongs to a float64 region, whose equations run together in one
            span while x64 is off.
        product: the form of a matrix product, if it is not the one that was written.
        clipped: the operands of a lowered selection that are finite constants beyond the 16-bit
            format's largest number, and become that number instead of an infinity.
        numbers: the operands of a lowered selection whose elements are all one number, with the
            number. They are created in the 16-bit format instead of cast.
        keeps_rounding: whether XLA is kept from removing the rounding of its results. Otherwise XLA
            may drop a cast to 16 bits that is followed by one to float32.
        pins_rounding: whether all kernels of a TPU that need the rounded results read them from
            memory. Otherwise XLA may compute them again in some kernels.
        backward: what its derivative saves and computes in bfloat16, if JAX differentiates the
            rewritten program; None for nothing.
        device_sum: how devices add up terms in it, or in its derivative, if that is not in float32.
    """

    action: Action
    kind: OpKind
    compute: Precision | None
    stored: tuple[Precision | None, ...]
    reason: Reason
    decided_by: DecidedBy
    inner: tuple[Plan, ...] = ()
    rules: Border | None = None
    in_float64_span: bool = False
    product: ProductForm = AS_WRITTEN
    clipped: tuple[int, ...] = ()
    numbers: tuple[tuple[int, float], ...] = ()
    keeps_rounding: bool = False
    pins_rounding: bool = False
    backward: BackwardForm | None = None
    device_sum: DeviceSum | None = None

    @functools.cached_property
    def _hash(self) -> int:
        fields = self.action, self.compute, self.stored, self.reason, self.inner
        form = self.product, self.clipped, self.numbers, self.keeps_rounding, self.pins_rounding
        return hash((*fields, self.in_float64_span, *form, self.backward, self.device_sum))

    def __hash__(self) -> int:
        return self._hash

    def __getstate__(self) -> dict[str, object]:
        return _own_state(self)

    @functools.cached_property
    def converts(self) -> bool:
        """Whether a result is stored in another format than its own."""
        return any(self.stored)

    @property
    def stores_low(self) -> bool:
        """Whether its results are rounded to 16 bits, after it is computed in float32."""
        if self.keeps_rounding:
            return True
        is_product = self.action is Action.LOWER and self.kind is OpKind.COMPUTE
        return (is_product or self.action is Action.KEEP) and self.converts

    @property
    def adds_low(self) -> bool:
        """Whether devices add up terms in it in 16 bits."""
        return self.device_sum == DeviceSum()

    @property
    def reorders(self) -> bool:
        """Whether only the order of elements in memory changes.

        True for a matrix product with exchanged operands in the precision in which it was
        written, and for a transpose that is dropped.
        """
        if self.action is Action.DROP:
            return self.kind is OpKind.DATA_MOVEMENT
        return self.action is Action.KEEP and self.product.exchanged

    @functools.cached_property
    def changes(self) -> bool:
        """Whether the rewritten equation differs from the original."""
        if self.action is Action.ENTER:
            is_inside = self.rules is not None or any(plan.changes for plan in self.inner)
            return self.keeps_rounding or is_inside
        return self.alters

    @property
    def alters(self) -> bool:
        """Whether an equation without bodies is replaced, or its results are rounded."""
        if self.action is Action.ENTER:
            return False
        is_kept = self.action is Action.KEEP and not (self.backward or self.device_sum)
        return not is_kept or self.converts or self.product.exchanged


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """The decisions for a jaxpr, one per equation, in order. `inspect(...)(...).plan` is one.

    Attributes:
        decisions: one per equation.
        border: the formats in which values enter and leave the jaxpr, if these are not their own:
            float32 under AlwaysF32, float64 in a float64 region.
        border_copies: the 16-bit and 8-bit copies that cross beside its operands and results.
        notes: warnings for the user; only the root has them.
        unmatched: the rules that matched no equation; only the root has them.
        eqn_infos: where each equation stands, if `inspect` made the plan. Comparing two plans
            ignores this field and those below.
        body: a number that the plans of one jaxpr share.
        origin: the function and the policy that it was made from; only the root has it.
        costs: what the compiled forms cost, and on which device; only the root has it, and it is ""
            if nothing was compiled.
        form: the form of the policy that was chosen among compiled candidates
            (`precpass.autotune.compiled`); only the root has it, and "" is the policy itself.
        kept_wide: why values that the forward pass saves for the backward pass stay in float32,
            each with the bytes of these values; only the root has them.
    """

    decisions: tuple[Decision, ...]
    border: Border = ()
    border_copies: BorderCopies = NO_BORDER_COPIES
    notes: tuple[str, ...] = ()
    unmatched: tuple[Rule, ...] = ()
    eqn_infos: tuple[EqnInfo, ...] = ()
    body: int = 0
    origin: PlanSource | None = None
    costs: str = ""
    form: str = ""
    kept_wide: tuple[tuple[str, float], ...] = ()

    @functools.cached_property
    def changes(self) -> bool:
        """Whether the rewritten program differs from the original."""
        crosses = self.border or any(self.border_copies)
        return bool(crosses) or any(d.changes for d in self.decisions)

    @functools.cached_property
    def lowers(self) -> bool:
        """Whether an equation, here or in a body, is lowered or multiplied in another way."""
        return any(d.action in (Action.LOWER, Action.MULTIPLY) for d in self.walk())

    @functools.cached_property
    def has_float64_spans(self) -> bool:
        """Whether equations of this jaxpr itself belong to a float64 region."""
        return any(d.in_float64_span for d in self.decisions)

    @functools.cached_property
    def rewrites_rules(self) -> bool:
        """Whether it contains custom rules that are planned when JAX traces them."""
        return any(d.rules is not None for d in self.walk())

    @functools.cached_property
    def _key(self) -> tuple[object, ...]:
        return (self.decisions, self.border, self.border_copies, self.notes, self.unmatched)

    @functools.cached_property
    def _hash(self) -> int:
        return hash(self._key)

    def __hash__(self) -> int:
        return self._hash

    def __getstate__(self) -> dict[str, object]:
        return _own_state(self)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Plan) and hash(self) == hash(other) and self._key == other._key

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the precision of every equation to a JSON file.

        An equation is named by its name scopes, the function of yours that it is in, its primitive
        and its occurrence there, so the file survives edits elsewhere. The file does not record
        which values are stored in 16 bits or cross function and loop boundaries as 16-bit copies:
        that follows from these precisions and the policy.

        Raises:
            ValueError: for a plan that `inspect` did not make.
        """
        from precpass.plan.file import written

        Path(path).write_text(written(self), encoding="utf-8")

    @staticmethod
    def load(path: str | os.PathLike[str]) -> PrecisionPolicy:
        """Return a policy that gives every equation the precision in a file that `save` wrote.

        Pass it to `auto_mixed` or `inspect`. Equations that are not in the file follow the policy
        that it was saved under. When the function is traced, a `PrecisionWarning` names them, and
        those of the file that no longer exist. Rules that you add to the policy override the file;
        guards override both.

        Raises:
            ValueError: for a file that is not a plan, or has a newer format; and when a function is
                traced that has none of its equations.
            OSError: if it cannot be read.
        """
        from precpass.plan.file import read

        # a file that is not text is reported as one that is no plan
        text = Path(path).read_text(encoding="utf-8", errors="replace")
        return read(text, os.fspath(path))

    def walk(self) -> Iterator[Decision]:
        """Yield every decision; a body's follow its equation's, and a shared body comes once."""
        seen: set[int] = set()
        stack: list[Plan] = [self]
        while stack:
            plan = stack.pop()
            if id(plan) in seen:
                continue
            seen.add(id(plan))
            for decision in plan.decisions:
                yield decision
                stack.extend(decision.inner)

    def count(self) -> Counter[tuple[OpKind, Action]]:
        """Return the number of decisions of each kind and action, however results are stored.

        Examples:
            `plan.count()[OpKind.COMPUTE, Action.LOWER]` is the number of lowered products.
        """
        return Counter((d.kind, d.action) for d in self.walk())

    def _repr_html_(self) -> str:
        from precpass.view.pages import plan_page

        return plan_page(self)

    def __repr__(self) -> str:
        counts = self.count()
        lowered = sum(n for (_, action), n in counts.items() if action is Action.LOWER)
        products = sum(n for (kind, _), n in counts.items() if kind is OpKind.COMPUTE)
        low = counts[OpKind.COMPUTE, Action.LOWER]
        stored = sum(d.stores_low for d in self.walk())
        stored_text = f"{stored} stored in 16 bits, " if stored else ""
        if others := counts[OpKind.COMPUTE, Action.MULTIPLY]:
            stored_text = f"{others} multiplied in another way, {stored_text}"
        return (
            f"<Plan: {low} of {products} products lowered, {counted(lowered, 'equation')} lowered, "
            f"{stored_text}{sum(counts.values())} in all>"
        )
