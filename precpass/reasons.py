"""Why a plan leaves an equation as it was written, or only stores it low, and what to do about it.

A reason stands beside its remedy: who decides gives the one, `explain` finds the other.
"""

from __future__ import annotations

import dataclasses
import functools
import re

__all__ = ["ALL", "Reason", "of_compute", "remedy"]


@dataclasses.dataclass(frozen=True)
class Reason:
    """A sentence of a plan.

    Attributes:
        text: the sentence, with `{}` in the place of what differs between equations.
        remedy: how a user changes such a decision.
        of_low: how one that lowers; "" where that is no other way.

    Example:
        >>> NOT_RETYPED("f64")
        "f64 is not in the policy's retypes"
    """

    text: str
    remedy: str
    of_low: str = ""

    def __call__(self, *particulars: object) -> str:
        """The sentence for an equation."""
        return self.text.format(*particulars)

    def gave(self, sentence: str) -> bool:
        """Whether a sentence is this one, whatever its particulars."""
        return self._pattern.fullmatch(sentence) is not None

    @functools.cached_property
    def _pattern(self) -> re.Pattern[str]:
        return re.compile(".*".join(map(re.escape, self.text.split("{}"))), re.DOTALL)


# ---------------------------------------------------------------- what is asked of storage

# the first of all: the reason before it may be any other one
STORED = Reason(
    "{}; stored in {}: {}",
    "keep what makes it wide by keep('f32') or a Rule",
    "keep what makes it wide by keep('f32') or a Rule",
)

# ---------------------------------------------------------------- what the user asked for

OFF = Reason("precpass is switched off", "leave use_policy(None), and unset PRECPASS")
FIXED = Reason(
    "of an auto_mixed function with a policy of its own", "change the policy of that function"
)
KEEP_REGION = Reason("keep('{}')", "leave the keep region, or narrow it")
RULE = Reason("Rule({})", "change that rule of the policy")
"""A rule's own repr is the sentence."""
SAVED_PLAN = Reason(
    "as in the saved plan", "add a Rule, which comes before the file, or save the plan anew"
)
USERS_ORDER = Reason("the user's order: {}", "leave the order out, or make it by a Rule")
USERS_CAST = Reason("a cast that the user wrote", "leave the cast out")
USERS_PRECISION = Reason(
    "the user's own precision", "make all its operands float32, or cast them yourself"
)
MIXED_TYPES = Reason(
    "its operands have different types", "find what promotes one of them and cast it"
)
NOT_RETYPED = Reason(
    "{} is not in the policy's retypes", "add the format by policy.with_retypes(...)"
)
OWN_FUNCTION = Reason(
    "applies the user's own function in place", "write the function outside of .apply"
)

# ---------------------------------------------------------------- what would go wrong

REACHES = Reason(
    "{} reaches {}, above {}'s largest value {}",
    "scale the values, or use bfloat16, which has float32's range",
)
VANISHES = Reason("{} {} vanishes in {} (smallest normal {})", REACHES.remedy)
INTEGERS = Reason(
    "{} has integers up to {}; {} is exact only to {}",
    "keep it so: positions and counts need the digits",
)
RANDOM_BITS = Reason(
    "follows random bits: a sampler's digits",
    "nothing: samplers lose their digits in low precision",
)
PREDICATE = Reason(
    "decides whether a loop goes on: computed wide",
    "nothing: a predicate in low precision loops wrongly often",
)
ACCUMULATES = Reason(
    "accumulates in a loop's carry", "nothing: a carry that adds up loses what it adds"
)
COTANGENTS = Reason(
    "adds up the cotangents of a value that is read several times",
    "nothing: a sum in a low format loses what it adds",
)
FULL_PRECISION_SET = Reason(
    "of the full-precision set", "order it by a Rule that names the primitive"
)
EXACT_DTYPES = Reason(
    "keeps its exact dtypes: {}", "nothing: it is made for the dtypes that it has"
)
FLOAT64_REGION = Reason(
    "a float64 region as it was planned before", "leave the keep('f64') region, or narrow it"
)

# ---------------------------------------------------------------- what would gain nothing

NO_FLOATS = Reason("no floating-point values", "nothing: it has no floating-point values")
COMPLEX = Reason(
    "complex numbers keep their precision", "compute the real and imaginary parts by real products"
)
CONSTANTS = Reason(
    "made of constants alone: computed once, as written", "nothing: it is computed once"
)
ELEMENTWISE_PRODUCT = Reason(
    "an elementwise product: nothing is contracted", "nothing to gain: it sums over nothing"
)
SELECTS = Reason(
    "selects or compares: runs in its widest operand's precision", "nothing: it rounds nothing"
)
READERS_ROUND = Reason("every reader rounds to {}", "nothing: what reads it rounds it")
MAY_RUN = Reason(
    "may run in {}; wide costs nothing inside a fusion",
    "order it by a Rule that names the primitive",
)
DOES_NOT_PAY = Reason(
    "does not pay {}: {} in {}, {} in {} ({})",
    "order it by a Rule, or every product by profitability='always'",
)
GAINS_LITTLE = Reason(
    "pays here, but all that pays would save {} of the products' {}",
    "order it by a Rule, or every product by profitability='always'",
)
PRESET = Reason(
    "{}: {} in {}",
    "ask for a low format by Custom({...}) or a Rule",
    "leave it as it was written by keep('f32'), or order another precision by a Rule",
)

ALL = tuple(value for value in globals().values() if isinstance(value, Reason))
"""Every reason for which a plan does not lower an equation."""


def of_compute(sentence: str) -> str:
    """Why an equation is computed as it is, wherever its results are stored.

    Example:
        >>> of_compute(STORED("keep('f32')", "bf16", "12.6 MB saved"))
        "keep('f32')"
    """
    return sentence.partition(STORED.text.split("{}")[1])[0] if STORED.gave(sentence) else sentence


def remedy(sentence: str, is_low: bool = False) -> str:
    """How a user changes a decision of this reason.

    Args:
        sentence: the reason.
        is_low: whether the equation is low, and not to be.
    """
    found = ((is_low and reason.of_low) or reason.remedy for reason in ALL if reason.gave(sentence))
    return next(found, "order another precision by a Rule")
