"""Why a plan decides about an equation as it does, and how a user changes that.

A decision's reason is a sentence that knows the template that it was made from, so that its
remedy is found by the template and not by the words, some of which are the user's.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

__all__ = ["ALL", "Reason", "Template", "of_compute", "remedy"]


class Reason(str):
    """A sentence of a plan.

    Attributes:
        template: what it was made from.
        particulars: what stands in the places of the template.

    Example:
        >>> reason = NOT_RETYPED("f64")
        >>> reason, reason.template is NOT_RETYPED, reason.particulars
        ("f64 is not in the policy's retypes", True, ('f64',))
    """

    __slots__ = ("particulars", "template")

    template: Template
    particulars: tuple[Any, ...]

    def __new__(cls, template: Template, *particulars: Any) -> Reason:
        """The sentence of a template and its particulars."""
        made = super().__new__(cls, template.text.format(*particulars))
        made.template, made.particulars = template, particulars
        return made

    def __reduce__(self) -> Any:
        return _again, (self.template.text, self.particulars)


@dataclasses.dataclass(frozen=True)
class Template:
    """A kind of reason.

    Attributes:
        text: the sentence, with `{}` in the place of what differs between equations.
        remedy: how a user changes such a decision.
        of_low: how one that lowers; "" where that is no other way.
    """

    text: str
    remedy: str
    of_low: str = ""

    def __call__(self, *particulars: Any) -> Reason:
        """The reason for an equation."""
        return Reason(self, *particulars) if particulars else self._alone

    def gave(self, sentence: str) -> bool:
        """Whether a sentence was made from this template."""
        return isinstance(sentence, Reason) and sentence.template is self

    @functools.cached_property
    def _alone(self) -> Reason:
        return Reason(self)


def _again(text: str, particulars: tuple[Any, ...]) -> Reason:
    templates = (value for value in globals().values() if isinstance(value, Template))
    return next(template for template in templates if template.text == text)(*particulars)


# ---------------------------------------------------------------- what is asked of storage

# the first of all: the reason before it may be any other one
STORED = Template(
    "{}; stored in {}: {}",
    "keep what makes it wide by keep('f32') or a Rule",
    "keep what makes it wide by keep('f32') or a Rule",
)

# ---------------------------------------------------------------- what the user asked for

OFF = Template("precpass is switched off", "leave use_policy(None), and unset PRECPASS")
FIXED = Template(
    "of an auto_mixed function with a policy of its own",
    "change the policy of that function",
)
KEEP_REGION = Template("keep('{}')", "leave the keep region, or narrow it")
RULE = Template("{}", "change that rule of the policy")
"""A rule's own repr is the sentence."""
SAVED_PLAN = Template(
    "as in the saved plan",
    "add a Rule, which comes before the file, or save the plan anew",
)
USERS_ORDER = Template("the user's order: {}", "leave the order out, or make it by a Rule")
USERS_CAST = Template("a cast that the user wrote", "leave the cast out")
USERS_PRECISION = Template(
    "the user's own precision",
    "make all its operands float32, or cast them yourself",
)
MIXED_TYPES = Template(
    "its operands have different types", "find what promotes one of them and cast it"
)
NOT_RETYPED = Template(
    "{} is not in the policy's retypes", "add the format by policy.with_retypes(...)"
)
OWN_FUNCTION = Template(
    "applies the user's own function in place",
    "write the function outside of .apply",
)

# ---------------------------------------------------------------- what would go wrong

REACHES = Template(
    "{} reaches {}, above {}'s largest value {}",
    "scale the values, or use bfloat16, which has float32's range",
)
VANISHES = Template("{} {} vanishes in {} (smallest normal {})", REACHES.remedy)
INTEGERS = Template(
    "{} has integers up to {}; {} is exact only to {}",
    "keep it so: positions and counts need the digits",
)
RANDOM_BITS = Template(
    "follows random bits: a sampler's digits",
    "nothing: samplers lose their digits in low precision",
)
PREDICATE = Template(
    "decides whether a loop goes on: computed wide",
    "nothing: a predicate in low precision loops wrongly often",
)
ACCUMULATES = Template(
    "accumulates in a loop's carry",
    "nothing: a carry that adds up loses what it adds",
)
TERMS = Template(
    "each device holds one term of a sum, which is added up as it was written",
    "nothing: a sum in a low format loses what it adds",
)
COTANGENTS = Template(
    "adds up the cotangents of a value that is read several times",
    "nothing: a sum in a low format loses what it adds",
)
FULL_PRECISION_SET = Template(
    "of the full-precision set", "order it by a Rule that names the primitive"
)
EXACT_DTYPES = Template(
    "keeps its exact dtypes: {}", "nothing: it is made for the dtypes that it has"
)
FLOAT64_REGION = Template(
    "a float64 region as it was planned before",
    "leave the keep('f64') region, or narrow it",
)

# ---------------------------------------------------------------- what would gain nothing

NO_FLOATS = Template("no floating-point values", "nothing: it has no floating-point values")
COMPLEX = Template(
    "complex numbers keep their precision",
    "compute the real and imaginary parts by real products",
)
CONSTANTS = Template(
    "made of constants alone: computed once, as written",
    "nothing: it is computed once",
)
ELEMENTWISE_PRODUCT = Template(
    "an elementwise product: nothing is contracted",
    "nothing to gain: it sums over nothing",
)
SELECTS = Template(
    "selects or compares: runs in its widest operand's precision",
    "nothing: it rounds nothing",
)
READERS_ROUND = Template("every reader rounds to {}", "nothing: what reads it rounds it")
MAY_RUN = Template(
    "may run in {}; wide costs nothing inside a fusion",
    "order it by a Rule that names the primitive",
)
DOES_NOT_PAY = Template(
    "does not pay {}: {} in {}, {} in {} ({})",
    "order it by a Rule, or every product by profitability='always'",
)
GAINS_LITTLE = Template(
    "pays here, but all that pays would save {} of the products' {}",
    "order it by a Rule, or every product by profitability='always'",
)
PRESET = Template(
    "{}: {} in {}",
    "ask for a low format by Custom({...}) or a Rule",
    "leave it as it was written by keep('f32'), or order another precision by a Rule",
)

ALL = tuple(value for value in globals().values() if isinstance(value, Template))
"""Every template of a reason for which a plan does not lower an equation."""

# ---------------------------------------------------------------- what is changed

ENTERED = Template("entered", "nothing: its body has decisions of its own")
MOVES_LOW = Template("moves a low value", "keep what makes it wide by keep('f32') or a Rule")
WIDE_AGAIN = Template("what it serves is wide again", "lower what it serves")
EXACT_CASTS = Template(
    "narrows what was just widened: exact without both casts",
    "nothing: no value changes",
)
REMOVES_LOW = Template(
    "AlwaysF32 removes low precision", "use a policy that leaves casts as they are"
)
NO_LOW_KERNELS = Template(
    "has no low kernels; its region is in f64",
    "leave the keep('f64') region, or narrow it",
)
UNCHECKED = Template(
    "{}; a constant whose values cannot be read here is unchecked",
    "pass the constant as an argument, or keep its reader by keep('f32') or a Rule",
)


def of_compute(sentence: str) -> str:
    """Why an equation is computed as it is, wherever its results are stored.

    Example:
        >>> of_compute(STORED(KEEP_REGION("f32"), "bf16", "12.6 MB saved"))
        "keep('f32')"
    """
    while isinstance(sentence, Reason) and sentence.template in (STORED, UNCHECKED):
        sentence = sentence.particulars[0]
    return sentence


def remedy(sentence: str, is_low: bool = False) -> str:
    """How a user changes a decision of this reason.

    Args:
        sentence: the reason.
        is_low: whether the equation is low, and not to be.
    """
    if not isinstance(sentence, Reason):
        return "order another precision by a Rule"
    template = sentence.template
    return (is_low and template.of_low) or template.remedy
