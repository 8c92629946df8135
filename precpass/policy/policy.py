"""`PrecisionPolicy`: which precision each kind of equation has."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any, TypeVar

from jax.typing import DTypeLike

from precpass.policy.casts import cast_leaves
from precpass.policy.precision import Precision
from precpass.policy.primitives import OpKind
from precpass.policy.profitability import parse_profitability
from precpass.policy.rules import Rule
from precpass.policy.saved import SavedPrecisions

__all__ = ["RETYPES", "PolicyLike", "PrecisionPolicy"]


_POSITION = {kind: i for i, kind in enumerate(OpKind)}


Tree = TypeVar("Tree")

RETYPES = frozenset({Precision.F32, Precision.BF16, Precision.F16})
"""The formats that may change if `with_retypes` says nothing else."""
MIN_FLOPS = 2**25
"""The operations of the smallest matrix product that `with_scaled` runs in 8 bits: one of
256 x 256 x 256. A smaller one spends more time on rounding its operands than it saves (CPU with
AMX, jax 0.10.2)."""


@dataclasses.dataclass(frozen=True, repr=False)
class PrecisionPolicy:
    """Which precision each kind of equation has. Pass it to `auto_mixed` or `use_policy`.

    Use a preset, `Custom`, or a preset changed by the `with_` methods.

    Attributes:
        name: the preset's name, or "Custom".
        kinds: the precision of each kind, in `OpKind`'s order.
        orders: the kinds whose precision is required; for the other kinds it is allowed, and the
            planner uses it where that pays.
        widens: whether values that you wrote in low precision become float32 (AlwaysF32).
        rules: the first that matches an equation decides its precision.
        retypes: the formats that the pass may change at all.
        output: the format of floating-point outputs, or None to keep each one's own.
        lock: the precisions of a saved plan; rules override them.
        profitability: which matrix products are lowered where no rule and no saved plan decides:
            "always" or "best", as for `auto_mixed`.
        results: the format in which low-precision matrix products return their results: "auto" is
            16 bits where the platform's kernels gain by it and no sum loses digits, "f32" is
            float32 everywhere.
        parameters: the format in which you store parameters; `cast_to_param` casts to it. The pass
            itself never changes the dtype of an argument.
        weight_gradients: the format in which the gradients of weights are multiplied where other
            derivatives multiply in float8: BF16, or None for float8 as well.
        alias: how reports print a policy that was given by another name, "AutoMixed (float16)" or
            "AutoMixedF8"; policies that differ only in it are equal.
    """

    name: str
    kinds: tuple[Precision, ...]
    orders: frozenset[OpKind] = frozenset()
    widens: bool = False
    rules: tuple[Rule, ...] = ()
    retypes: frozenset[Precision] = RETYPES
    output: Precision | None = None
    lock: SavedPrecisions | None = None
    profitability: str = "always"
    results: str = "auto"
    parameters: Precision = Precision.F32
    weight_gradients: Precision | None = None
    alias: str = dataclasses.field(default="", compare=False)

    @property
    def title(self) -> str:
        """The name that reports and messages print; that of a preset named AutoMixed says float16.

        Examples:
            >>> from precpass import AutoMixed, AutoMixedBf16
            >>> AutoMixed.title, AutoMixedBf16.title
            ('AutoMixed (float16)', 'AutoMixedBf16')
        """
        return self.alias or self.name

    def precision_for(self, kind: OpKind | str) -> Precision:
        """Return the precision of a kind of equation.

        Examples:
            >>> from precpass import AutoMixedBf16
            >>> AutoMixedBf16.precision_for(OpKind.COMPUTE)
            Precision.BF16
        """
        return self.kinds[_POSITION[kind if type(kind) is OpKind else OpKind.parse(kind)]]

    def with_rules(self, *rules: Rule) -> PrecisionPolicy:
        """Return this policy with more rules, which are tried before its own."""
        for rule in rules:
            if not isinstance(rule, Rule):  # pyright: ignore[reportUnnecessaryIsInstance] -- user input
                raise TypeError(f"with_rules takes Rule values, not {rule!r}")
        return dataclasses.replace(self, rules=(*rules, *self.rules))

    def with_retypes(self, *precisions: Precision | str) -> PrecisionPolicy:
        """Return this policy with only these formats allowed to change; name "f64" to allow it."""
        return dataclasses.replace(self, retypes=frozenset(map(Precision.parse_format, precisions)))

    def with_output(self, precision: Precision | str | None) -> PrecisionPolicy:
        """Return this policy with another format for floating outputs; None keeps their own."""
        output = None if precision is None else Precision.parse_format(precision, "output")
        return dataclasses.replace(self, output=output)

    def with_parameters(self, precision: Precision | str) -> PrecisionPolicy:
        """Return this policy with another format for parameters, to which `cast_to_param` casts."""
        return dataclasses.replace(self, parameters=Precision.parse_format(precision, "parameters"))

    def with_lock(self, lock: SavedPrecisions | None) -> PrecisionPolicy:
        """Return this policy with the precisions of a saved plan, or without them.

        Args:
            lock: `Plan.load(file).lock`, or None.

        Raises:
            TypeError: for anything else.
        """
        if not isinstance(lock, SavedPrecisions | None):  # pyright: ignore[reportUnnecessaryIsInstance] -- user input
            raise TypeError(
                f"with_lock takes the lock of a saved plan, Plan.load(file).lock, not {lock!r}"
            )
        return dataclasses.replace(self, lock=lock)

    def with_profitability(self, profitability: str) -> PrecisionPolicy:
        """Return this policy with "always" or "best" profitability.

        Raises:
            ValueError: for anything else.

        Examples:
            >>> from precpass import AutoMixedBf16
            >>> AutoMixedBf16.with_profitability("best")
            AutoMixedBf16.with_profitability('best')
        """
        return dataclasses.replace(self, profitability=parse_profitability(profitability))

    def with_results(self, results: str) -> PrecisionPolicy:
        """Return this policy with results of low-precision matrix products in "auto" or "f32".

        On a GPU a 16-bit result takes half the memory traffic, and XLA runs a convolution with a
        float32 result in float32. So "f32" gains accuracy and costs bandwidth.

        Raises:
            ValueError: for anything else.

        Examples:
            >>> from precpass import AutoMixedBf16
            >>> AutoMixedBf16.with_results("f32")
            AutoMixedBf16.with_results('f32')
        """
        if results not in ("auto", "f32"):
            raise ValueError(
                f"unknown results {results!r}: legal are 'auto' (16 bits where the platform's "
                "kernels gain by it) and 'f32'"
            )
        return dataclasses.replace(self, results=results)

    @property
    def scaled(self) -> Precision | None:
        """The format of 8 bits in which a rule runs large matrix products; None without one."""
        return next((rule.parsed for rule in self.rules if _is_of_scaled(rule)), None)

    def with_scaled(self, precision: Precision | str | None) -> PrecisionPolicy:
        """Return this policy with large matrix products in 8 bits, by a rule behind its others.

        Args:
            precision: "f8e4m3", "int8", or None to leave such rules out.

        Examples:
            >>> from precpass import AutoMixedBf16
            >>> AutoMixedBf16.with_scaled("int8").rules
            (Rule(primitive='dot_general', min_flops=33554432, precision='int8'),)
        """
        rules = tuple(rule for rule in self.rules if not _is_of_scaled(rule))
        if precision is None:
            return self if rules == self.rules else dataclasses.replace(self, rules=rules, alias="")
        scaled, others = Precision.parse(precision), self.precision_for(OpKind.COMPUTE)
        if not scaled.is_scaled:
            legal = ", ".join(repr(p.value) for p in Precision if p.is_scaled)
            raise ValueError(f"scaled = {precision!r}: legal are {legal} and None")
        if others is not Precision.BF16:
            raise ValueError(f"scaled = {precision!r}: the other products are bf16, not {others}")
        rule = Rule(primitive="dot_general", min_flops=MIN_FLOPS, precision=scaled)
        return dataclasses.replace(self, rules=(*rules, rule), alias="")

    def with_weight_gradients(self, precision: Precision | str | None) -> PrecisionPolicy:
        """Return this policy with weight gradients in "bf16" instead of float8; None for float8.

        Raises:
            ValueError: for anything else.

        Examples:
            >>> from precpass import AutoMixedF8
            >>> AutoMixedF8.with_weight_gradients("bf16")
            AutoMixedF8.with_weight_gradients('bf16')
        """
        parsed = None if precision is None else Precision.parse(precision)
        if parsed not in (None, Precision.BF16):
            raise ValueError(
                f"weight_gradients = {precision!r}: legal are 'bf16', and None for the format of "
                "the other products"
            )
        return dataclasses.replace(self, weight_gradients=parsed)

    @property
    def lowers(self) -> bool:
        """Whether the policy lowers anything, apart from its rules."""
        if any(p.is_low or p.is_multiplication for p in self.kinds):
            return True
        floats = (self.precision_for(kind) is Precision.F32 for kind in self.orders)
        return Precision.F64 in self.retypes and any(floats)

    @property
    def follows_readers(self) -> bool:
        """Whether matrix products whose results are needed exactly stay in float32.

        False for `Custom`, AlwaysF16 and AlwaysBf16, which require their precision.
        """
        return OpKind.ELEMENTWISE not in self.orders and self.name != "Custom"

    @property
    def low(self) -> Precision:
        """The format of low-precision matrix products; bfloat16 for a policy that lowers none."""
        compute = self.precision_for(OpKind.COMPUTE)
        return compute if compute.is_low else Precision.BF16

    def cast_to_param(self, tree: Tree) -> Tree:
        """Return a pytree with its floating-point arrays in the format of parameters, `p`.

        In a flax nnx module only the arrays of its `nnx.Param`s are cast. Running statistics and
        other state keep their format, because low precision would lose their small updates.

        Examples:
            >>> import numpy as np
            >>> PrecisionPolicy.parse("p=bf16").cast_to_param({"w": np.ones(2)})["w"].dtype
            dtype(bfloat16)
        """
        return cast_leaves(tree, self.parameters, params_only=True)

    def cast_to_compute(self, tree: Tree) -> Tree:
        """Return a pytree with its floating-point arrays in the format of matrix products, `c`."""
        return cast_leaves(tree, self.precision_for(OpKind.COMPUTE))

    def cast_to_output(self, tree: Tree) -> Tree:
        """Return a pytree with its floating-point arrays in the format of outputs, `o`.

        This is float32 for a policy under which each output keeps its own format.
        """
        return cast_leaves(tree, self.output or Precision.F32)

    @classmethod
    def parse(cls, value: PolicyLike) -> PrecisionPolicy:
        """Return the policy for a policy, a preset's name, a precision, or "p=f32,c=bf16,o=f32".

        A precision, such as "bf16", "bfloat16", `jnp.bfloat16` or "half" (float16), is that of
        matrix products; "bf16" gives AutoMixedBf16. In the text form `p` (`params`) is the format
        in which you store parameters (`cast_to_param`), `c` (`compute`) is that of matrix products,
        by default that of `p`, and `o` (`output`) is that of the outputs (f32: each keeps its own).

        Raises:
            ValueError: for an unknown name or form; the message lists the legal ones.
            TypeError: for a value that is not a policy, a precision or a text.

        Examples:
            >>> from precpass import AutoMixedF16
            >>> PrecisionPolicy.parse("c=f16") == PrecisionPolicy.parse("half") == AutoMixedF16
            True
        """
        from precpass.policy.text import parsed

        return value if isinstance(value, cls) else parsed(value)

    def to_dict(self) -> dict[str, Any]:
        """Return this policy as a dict of strings, lists and dicts, for a TOML file.

        Raises:
            ValueError: for a policy with a saved plan, or with a rule that has a predicate.

        Examples:
            >>> from precpass import AutoMixedBf16
            >>> AutoMixedBf16.with_rules(Rule(module="head", precision="f32")).to_dict()
            {'policy': 'AutoMixedBf16', 'rules': [{'module': 'head', 'precision': 'f32'}]}
        """
        from precpass.policy.config import to_dict

        return to_dict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> PrecisionPolicy:
        """Return the policy in a dict of the form of `to_dict`, such as part of a settings file.

        Raises:
            ValueError: for an unknown key or value; the message lists the legal ones.
            TypeError: for something that is not a dict.
        """
        from precpass.policy.config import from_dict

        return from_dict(data)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write this policy to a .toml file."""
        from precpass.policy.config import save

        save(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> PrecisionPolicy:
        """Read a policy from a .toml file, in the form that `save` writes.

        Raises:
            ValueError: for a file that is not a policy; the message names it.
        """
        from precpass.policy.config import load

        return load(path)

    def __str__(self) -> str:
        from precpass.policy.text import as_fields

        return as_fields(self) or repr(self)

    def _repr_html_(self) -> str:
        from precpass.view.page import policy_page

        return policy_page(self)

    def __repr__(self) -> str:
        from precpass.policy.text import as_code

        return as_code(self)


def _is_of_scaled(rule: Rule) -> bool:
    return rule.min_flops is not None and rule.parsed.is_scaled


PolicyLike = PrecisionPolicy | Precision | DTypeLike
"""What `PrecisionPolicy.parse` reads: a policy, a preset's name, a precision or dtype, a text."""
