"""Why a plan decides as it does about an equation, and how you change that.

A reason explains and decides nothing: code asks `Decision.decided_by`, never a reason.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from typing import Any

__all__ = ["ALL", "DecidedBy", "Reason", "Template"]


class DecidedBy(enum.Enum):
    """What decides about an equation; a member overrides those below it."""

    OWN_POLICY = "own policy"
    """A function inside that has a policy of its own."""
    TYPES = "types"
    """The primitive, or the dtypes of its operands and results, allow nothing else."""
    USER = "user"
    """The user wrote it so: a cast, or operands in another format than float32."""
    ORDER = "order"
    """The user's `precision=` of a product."""
    GUARD = "guard"
    """Its result would be wrong in low precision."""
    KEEP = "keep"
    """A `keep` region."""
    RULE = "rule"
    """A `Rule` of the policy."""
    SAVED_PLAN = "saved plan"
    """A saved plan (`Plan.load`)."""
    NEED = "need"
    """An equation that reads its result needs the accuracy of float32."""
    COST = "cost"
    """Low precision would gain nothing."""
    PRESET = "preset"
    """The policy's precision for this kind of equation."""

    # a plan of many equations hashes many of these, and an Enum's own hash is Python code
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return f"DecidedBy.{self.name}"


@dataclasses.dataclass(frozen=True)
class Template:
    """A kind of reason.

    Attributes:
        decided_by: who decides for this reason.
        text: the sentence, with `{}` for each part that differs between equations.
        remedy: how a user changes such a decision; None if nobody would want to.
        of_low: how a user changes one that lowers; None if that is done in the same way.
    """

    decided_by: DecidedBy
    text: str
    remedy: str | None = None
    of_low: str | None = None

    def __call__(self, *args: Any) -> Reason:
        """The reason for an equation."""
        return Reason(self, args)


@dataclasses.dataclass(frozen=True)
class Reason:
    """Why a plan decides as it does; `str` returns a sentence.

    Attributes:
        template: the kind of reason.
        args: the texts that fill the template, which may be the user's.
        more: what else is to be known, in words.

    Examples:
        >>> str(KEEP_REGION("f32").plus(STORED, "bf16", "12.6 MB saved"))
        "keep('f32'); stored in bf16: 12.6 MB saved"
    """

    template: Template
    args: tuple[Any, ...] = ()
    more: str = ""

    def plus(self, template: Template, *args: Any) -> Reason:
        """The reason with something more to be known."""
        return dataclasses.replace(self, more=self.more + template.text.format(*args))

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.template.text, self.args, self.more))

    def __hash__(self) -> int:
        # Cached, because every query about an equation holds a reason.
        return self._hash

    def __getstate__(self) -> dict[str, Any]:
        # The hash of a text differs between processes, so it is not pickled.
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    @property
    def of_compute(self) -> str:
        """Why the equation is computed as it is, without what else is to be known."""
        return self.template.text.format(*self.args)

    def __str__(self) -> str:
        return self.of_compute + self.more

    def __repr__(self) -> str:
        return repr(str(self))

    def remedy(self, *, is_low: bool = False) -> str | None:
        """Return how to change a decision that has this reason.

        Args:
            is_low: whether you want to undo that the equation runs in low precision.
        """
        return (is_low and self.template.of_low) or self.template.remedy


_OWN, _TYPES, _USER, _ORDER, _GUARD, _KEEP, _RULE, _SAVED_PLAN, _NEED, _COST, _PRESET = DecidedBy

# ---------------------------------------------------------------- what the user asked for

OFF = Template(_USER, "precpass is switched off", "leave use_policy(None), and unset PRECPASS")
FIXED = Template(
    _OWN,
    "inside an auto_mixed function that has a policy of its own",
    "change the policy of that function",
)
KEEP_REGION = Template(_KEEP, "keep('{}')", "leave the keep region, or narrow it")
RULE = Template(_RULE, "{}", "change that rule of the policy")
"""The sentence is the rule's own repr."""
RULE_BY_SIZE = Template(
    _PRESET,
    "by its size: {}",
    "change that rule of the policy, or add a Rule that comes before it",
)
SAVED_PLAN = Template(
    _SAVED_PLAN,
    "as in the saved plan",
    "add a Rule, which comes before the file, or save the plan anew",
)
USERS_ORDER = Template(
    _ORDER, "the user's order: {}", "leave the precision out, or set it by a Rule"
)
USERS_CAST = Template(_USER, "a cast that the user wrote", "leave the cast out")
USERS_PRECISION = Template(
    _USER,
    "the user's own precision",
    "make all its operands float32, or cast them yourself",
)
MIXED_TYPES = Template(
    _TYPES, "its operands have different types", "find what promotes one of them and cast it"
)
NOT_RETYPED = Template(
    _PRESET, "{} is not in the policy's retypes", "add the format by policy.with_retypes(...)"
)
OWN_FUNCTION = Template(
    _TYPES,
    "applies the user's own function in place",
    "write the function outside of .apply",
)

# ---------------------------------------------------------------- what would go wrong

REACHES = Template(
    _GUARD,
    "{} reaches {}, above {}'s largest value {}",
    "scale the values, or use bfloat16, which has float32's range",
)
VANISHES = Template(_GUARD, "{} {} vanishes in {} (smallest normal {})", REACHES.remedy)
INTEGERS = Template(
    _GUARD,
    "{} has integers up to {}; {} is exact only to {}",
)
GRID = Template(
    _GUARD,
    "{} has numbers in steps of {} up to {}; {} tells them apart only to {}",
)
CANCELS = Template(
    _GUARD,
    "an operand is a table of both signs whose large elements cancel",
    "subtract the large elements from each other before the product",
)
RANDOM_BITS = Template(
    _GUARD,
    "follows random bits: a sampler's digits",
)
PREDICATE = Template(
    _GUARD,
    "decides whether a loop continues, so it is computed in {}",
)
ACCUMULATES = Template(
    _GUARD,
    "accumulates in a loop's carry",
)
TERMS = Template(
    _GUARD,
    "each device holds one term of a sum, which is added up as it was written",
)
COTANGENTS = Template(
    _GUARD,
    "adds up the cotangents of a value that is read several times",
)
FULL_PRECISION_SET = Template(
    _GUARD,
    "in the set of primitives that stay in {}",
    "to lower it, add a Rule that names the primitive",
)
EXACT_DTYPES = Template(_TYPES, "keeps its exact dtypes: {}")
FLOAT64_REGION = Template(
    _TYPES,
    "a float64 region as it was planned before",
    "leave the keep('f64') region, or narrow it",
)

NEEDED = Template(_NEED, "needed exactly: {}")

# ---------------------------------------------------------------- what would gain nothing

NO_FLOATS = Template(_TYPES, "no floating-point values")
COMPLEX = Template(
    _TYPES,
    "complex numbers keep their precision",
    "compute the real and imaginary parts by real products",
)
CONSTANTS = Template(
    _COST,
    "built from constants, computed once",
)
ELEMENTWISE_PRODUCT = Template(
    _COST,
    "an elementwise product: it sums over one term, or uses each element once",
    "to lower it, add a Rule or a keep region",
)
SELECTS = Template(
    _COST,
    "selects or compares: runs in its widest operand's precision",
)
READERS_ROUND = Template(
    _COST,
    "every equation that reads the result rounds it to {}",
)
MAY_RUN = Template(
    _COST,
    "may run in {}; {} costs nothing inside a fusion",
    "to lower it, add a Rule that names the primitive",
)
PRODUCTS_ALONE = Template(
    _TYPES,
    "{} says how products are multiplied, and this is none",
    "set another precision by a Rule",
)
PRESET = Template(
    _PRESET,
    "{}: {} in {}",
    "ask for a low format by Custom({...}) or a Rule",
    "leave it as it was written by keep('f32'), or set another precision by a Rule",
)

ALL = tuple(value for value in globals().values() if isinstance(value, Template))
"""Every template of a reason for which a plan does not lower an equation."""

# ---------------------------------------------------------------- what is changed

ENTERED = Template(_TYPES, "entered")
MOVES_LOW = Template(
    _COST,
    "moves a value that is stored in 16 bits",
    "compute it in float32 by keep('f32') or a Rule",
)
WIDE_AGAIN = Template(
    _PRESET, "the equation that it was made for is in float32 again", "lower that equation"
)
EXACT_CASTS = Template(
    _COST,
    "narrows what was just widened: exact without both casts",
)
REMOVES_LOW = Template(
    _PRESET,
    "AlwaysF32 computes in float32 what was written in 16 bits",
    "use a policy that leaves casts as they are",
)
NO_LOW_KERNELS = Template(
    _KEEP,
    "has no 16-bit kernel, and its region is in f64",
    "leave the keep('f64') region, or narrow it",
)
EXCHANGED = Template(
    _COST,
    "the order of its result is that of the product's exchanged operands",
)
UNDONE = Template(
    _COST,
    "undoes what another transpose of the same product does",
)

# ---------------------------------------------------------------- what else is to be known
# Each follows another reason (`Reason.plus`).

STORED = Template(
    _COST,
    "; stored in {}: {}",
    "compute it in float32 by keep('f32') or a Rule",
)
UNCHECKED = Template(
    _COST,
    "; a constant whose values cannot be read here is unchecked",
    "pass the constant as an argument, or keep its reader by keep('f32') or a Rule",
)
LOW_BACKWARD = Template(
    _COST,
    "; what its derivative saves and makes is in {}",
    "leave it as it was written by keep('f32')",
)
SUMMED = Template(
    _PRESET,
    "; {} over devices is in {}",
    'leave the sum in float32 by with_reduce("auto")',
)
SUMMED_WIDE = Template(
    _PRESET,
    "; {} over devices is in f32: they cannot divide the terms among them",
)
RUNS_AS = Template(
    _COST,
    "; {} is not on a {}, and {} runs instead",
)
NOT_SCALED = Template(
    _COST,
    "; in bf16 and not in {}: {}",
    "to run it in 8 bits, add a Rule that names it",
    "compute it in float32 by keep('f32') or a Rule",
)
