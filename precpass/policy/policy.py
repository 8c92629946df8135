"""Policies: which precision each kind of equation should have."""

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


@dataclasses.dataclass(frozen=True, repr=False)
class PrecisionPolicy:
    """Which precision each kind of equation should have.

    Use a preset, `Custom`, or a preset changed by the `with_` methods.

    Attributes:
        name: the preset's name, or "Custom".
        kinds: the precision of each kind, in `OpKind`'s order.
        orders: the kinds whose precision is an order; for the others it is a
            permission, which the planner uses if that pays.
        widens: whether values that the user made low are widened (AlwaysF32).
        rules: the first that matches an equation decides its precision.
        retypes: the formats that may change at all.
        output: the format of floating outputs, or None to keep each one's own.
        lock: the precisions of a saved plan, over which rules win.
        profitability: which products are lowered if no rule and no saved plan decides: "always"
            all of them, "assumed" those that pay by the table of devices, "measured" those that
            pay when they are timed on the device, "compiled" all or none, in the form whose
            compiled program is the cheapest.
        results: the formats of lowered products' results: "auto" has 16 bits where the platform's
            kernels gain by it and no sum loses digits, "f32" has float32 everywhere.
        parameters: the format in which the caller stores parameters, which `cast_to_param` gives
            them. The pass itself never changes the dtype of an argument.
        scaled: the format of 8 bits in which those products that are lowered to bfloat16 and are
            eligible multiply (`precpass.planner.eligible`); None for none.
        scales: the values that share a scale in products of 8 bits: "auto" is a row or column in
            int8 and the whole array in float8, "row" is a row or column in both.
        weight_gradients: the format in which the gradients of weights are multiplied where other
            derivatives multiply in float8: BF16, or None for float8 as well.
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
    scaled: Precision | None = None
    scales: str = "auto"
    weight_gradients: Precision | None = None

    def precision_for(self, kind: OpKind | str) -> Precision:
        """The precision of a kind.

        Examples:
            >>> from precpass import AutoMixedBf16
            >>> AutoMixedBf16.precision_for(OpKind.COMPUTE)
            Precision.BF16
        """
        return self.kinds[_POSITION[kind if type(kind) is OpKind else OpKind.parse(kind)]]

    def with_rules(self, *rules: Rule) -> PrecisionPolicy:
        """This policy with more rules, tried before those that it has."""
        for rule in rules:
            if not isinstance(rule, Rule):  # pyright: ignore[reportUnnecessaryIsInstance] -- user input
                raise TypeError(f"with_rules takes Rule values, not {rule!r}")
        return dataclasses.replace(self, rules=(*rules, *self.rules))

    def with_retypes(self, *precisions: Precision | str) -> PrecisionPolicy:
        """This policy with other formats that may change, such as "f64" too."""
        return dataclasses.replace(self, retypes=frozenset(map(Precision.parse_format, precisions)))

    def with_output(self, precision: Precision | str | None) -> PrecisionPolicy:
        """This policy with another format for the floating outputs; None keeps their own."""
        output = None if precision is None else Precision.parse_format(precision, "output")
        return dataclasses.replace(self, output=output)

    def with_parameters(self, precision: Precision | str) -> PrecisionPolicy:
        """This policy with another format for parameters, which `cast_to_param` gives them."""
        return dataclasses.replace(self, parameters=Precision.parse_format(precision, "parameters"))

    def with_lock(self, lock: SavedPrecisions | None) -> PrecisionPolicy:
        """This policy with the precisions of a saved plan, or without them.

        Args:
            lock: that of the policy which `Plan.load` gives, `Plan.load(file).lock`, or None.

        Raises:
            TypeError: for anything else.
        """
        if not isinstance(lock, SavedPrecisions | None):  # pyright: ignore[reportUnnecessaryIsInstance] -- user input
            raise TypeError(
                f"with_lock takes the lock of a saved plan, Plan.load(file).lock, not {lock!r}"
            )
        return dataclasses.replace(self, lock=lock)

    def with_profitability(self, profitability: str) -> PrecisionPolicy:
        """This policy with another profitability: "measured", "compiled", "assumed" or "always".

        Raises:
            ValueError: for anything else.

        Examples:
            >>> from precpass import AutoMixedBf16
            >>> AutoMixedBf16.with_profitability("measured")
            AutoMixedBf16.with_profitability('measured')
        """
        return dataclasses.replace(self, profitability=parse_profitability(profitability))

    def with_results(self, results: str) -> PrecisionPolicy:
        """This policy with other formats of lowered products' results: "auto" or "f32".

        A GPU's kernels write a result of 16 bits in half the time, and XLA runs a convolution with
        a float32 result in float32 there, so "f32" buys digits with bandwidth.

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

    def with_scaled(self, precision: Precision | str | None) -> PrecisionPolicy:
        """This policy with eligible products in 8 bits or fewer.

        Args:
            precision: "f8e4m3", "f8e5m2", "int8", "mxfp8", "nvfp4", or None for bfloat16.

        Examples:
            >>> from precpass import AutoMixedBf16
            >>> AutoMixedBf16.with_scaled("int8").scaled
            Precision.INT8
        """
        if precision is None:
            return dataclasses.replace(self, scaled=None)
        scaled, others = Precision.parse(precision), self.precision_for(OpKind.COMPUTE)
        if not scaled.is_scaled:
            legal = ", ".join(repr(p.value) for p in Precision if p.is_scaled)
            raise ValueError(f"scaled = {precision!r}: legal are {legal} and None")
        if others is not Precision.BF16:
            raise ValueError(f"scaled = {precision!r}: the other products are bf16, not {others}")
        return dataclasses.replace(self, scaled=scaled)

    def with_scales(self, scales: str) -> PrecisionPolicy:
        """This policy with other scales of products in 8 bits: "auto" or "row".

        "row" gives float8 a scale for each row of the left operand and each column of the right
        one, as int8 has. One large value then flushes the small ones of its own row alone.

        Raises:
            ValueError: for anything else.

        Examples:
            >>> from precpass import AutoMixedF8
            >>> AutoMixedF8.with_scales("row")
            AutoMixedF8.with_scales('row')
        """
        if scales not in ("auto", "row"):
            raise ValueError(
                f"unknown scales {scales!r}: legal are 'auto' (float8 has one scale for an array, "
                "int8 one for a row or column) and 'row' (both have one for a row or column)"
            )
        return dataclasses.replace(self, scales=scales)

    def with_weight_gradients(self, precision: Precision | str | None) -> PrecisionPolicy:
        """This policy with the gradients of weights in "bf16" where others are in float8; or None.

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
        """Whether the policy, apart from its rules, lowers anything."""
        if any(p.is_low or p.is_multiplication for p in self.kinds):
            return True
        floats = (self.precision_for(kind) is Precision.F32 for kind in self.orders)
        return Precision.F64 in self.retypes and any(floats)

    @property
    def follows_readers(self) -> bool:
        """Whether a product stays float32 whose result is needed exactly: an AutoMixed preset's do.

        What the other policies say of products is an order.
        """
        return OpKind.ELEMENTWISE not in self.orders and self.name != "Custom"

    @property
    def low(self) -> Precision:
        """The format that products are lowered to; bfloat16 for a policy that lowers none."""
        compute = self.precision_for(OpKind.COMPUTE)
        return compute if compute.is_low else Precision.BF16

    def cast_to_param(self, tree: Tree) -> Tree:
        """A pytree with its floating arrays in the format of parameters, `p` of the text form.

        Of a flax nnx module these are the arrays of its `nnx.Param`s. Running statistics and what
        else is no parameter keep their format, in which their small updates are not lost.

        Examples:
            >>> import numpy as np
            >>> PrecisionPolicy.parse("p=bf16").cast_to_param({"w": np.ones(2)})["w"].dtype
            dtype(bfloat16)
        """
        return cast_leaves(tree, self.parameters, params_only=True)

    def cast_to_compute(self, tree: Tree) -> Tree:
        """A pytree with its floating arrays in the format of products, `c` of the text form."""
        return cast_leaves(tree, self.precision_for(OpKind.COMPUTE))

    def cast_to_output(self, tree: Tree) -> Tree:
        """A pytree with its floating arrays in the format of outputs, `o` of the text form.

        That is float32 for a policy under which each output keeps its own format.
        """
        return cast_leaves(tree, self.output or Precision.F32)

    @classmethod
    def parse(cls, value: PolicyLike) -> PrecisionPolicy:
        """Reads a policy from itself, a preset's name, a precision, or "p=f32,c=bf16,o=f32".

        A precision, such as "bf16", "bfloat16", `jnp.bfloat16` or "half" (float16), is that of
        the products: AutoMixedBf16 here. In the text form `p` (`params`) is the format in which
        the caller stores parameters, see `cast_to_param`; `c` (`compute`) is that of the products,
        and that of `p` if it is left out; `o` (`output`) is that of the outputs (f32: each keeps
        its own).

        Raises:
            ValueError: for an unknown name or form; the text lists the legal ones.
            TypeError: for a value that is neither policy nor precision nor text.

        Examples:
            >>> from precpass import AutoMixedF16
            >>> PrecisionPolicy.parse("c=f16") == PrecisionPolicy.parse("half") == AutoMixedF16
            True
        """
        from precpass.policy.text import parsed

        return value if isinstance(value, cls) else parsed(value)

    def to_dict(self) -> dict[str, Any]:
        """This policy as a dict of texts, lists and dicts, for a TOML or YAML file.

        Raises:
            ValueError: for a policy that follows a saved plan, or has a rule with a predicate.

        Examples:
            >>> from precpass import AutoMixedBf16
            >>> AutoMixedBf16.with_rules(Rule(module="head", precision="f32")).to_dict()
            {'policy': 'AutoMixedBf16', 'rules': [{'module': 'head', 'precision': 'f32'}]}
        """
        from precpass.policy.config import to_dict

        return to_dict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> PrecisionPolicy:
        """The policy of `to_dict`: as a file of a program's own settings has it.

        Raises:
            ValueError: for an unknown key or value; the text lists the legal ones.
            TypeError: for something that is no dict.
        """
        from precpass.policy.config import from_dict

        return from_dict(data)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes this policy to a .toml file, or with PyYAML to a .yaml file."""
        from precpass.policy.config import save

        save(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> PrecisionPolicy:
        """The policy in a .toml or .yaml file, as `save` writes it.

        Raises:
            ValueError: for a file that is none; the text names it.
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


PolicyLike = PrecisionPolicy | Precision | DTypeLike
"""What `PrecisionPolicy.parse` reads: a policy, a preset's name, a precision or dtype, a text."""
