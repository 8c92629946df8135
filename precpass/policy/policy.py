"""Policies: which precision each kind of equation should have."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from jax.typing import DTypeLike

from precpass.policy.casts import cast_leaves
from precpass.policy.precision import Precision
from precpass.policy.primitives import OpKind
from precpass.policy.profitability import parse_profitability
from precpass.policy.rules import Rule
from precpass.policy.saved import SavedPrecisions

__all__ = [
    "BY_COMPUTE",
    "EIGHT_BIT_PRESETS",
    "OTHER_NAMES",
    "PRESETS",
    "RETYPES",
    "AlwaysBf16",
    "AlwaysF16",
    "AlwaysF32",
    "AutoMixed",
    "AutoMixedBf16",
    "AutoMixedConservative",
    "AutoMixedConservativeF16",
    "AutoMixedF8",
    "AutoMixedF16",
    "AutoMixedInt8",
    "Custom",
    "PolicyLike",
    "PrecisionPolicy",
]


_POSITION = {kind: i for i, kind in enumerate(OpKind)}


def _parse_kind(kind: OpKind | str | Any) -> OpKind:
    if isinstance(kind, OpKind):
        return kind
    for candidate in OpKind:
        if isinstance(kind, str) and kind.lower() == candidate.value:
            return candidate
    raise ValueError(f"unknown kind {kind!r}: legal are {', '.join(map(repr, OpKind))}")


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

    def precision_for(self, kind: OpKind | str) -> Precision:
        """The precision of a kind.

        Examples:
            >>> AutoMixedBf16.precision_for(OpKind.COMPUTE)
            Precision.BF16
        """
        return self.kinds[_POSITION[kind if type(kind) is OpKind else _parse_kind(kind)]]

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
        """This policy with eligible products in 8 bits: "f8e4m3", "f8e5m2", "int8", or None.

        Examples:
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

    @property
    def lowers(self) -> bool:
        """Whether the policy, apart from its rules, lowers anything."""
        if any(p.is_low or p.is_multiplication for p in self.kinds):
            return True
        floats = (self.precision_for(kind) is Precision.F32 for kind in self.orders)
        return Precision.F64 in self.retypes and any(floats)

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


def Custom(
    kinds: Mapping[OpKind | str, Precision | str], rules: Iterable[Rule] = ()
) -> PrecisionPolicy:
    """A policy from a table of kinds; a kind that is missing is not lowered.

    Only float32, bfloat16 and float16 values may change, unless `with_retypes` says
    otherwise. `Custom({OpKind.COMPUTE: "f32"}).with_retypes("f64")` runs a float64
    program with float32 products: their operands are rounded to float32, their
    sums and everything else stay float64.

    Raises:
        ValueError: for an unknown kind or precision, or a precision for BOUNDARY,
            which has its original dtypes by definition.

    Examples:
        >>> Custom({OpKind.COMPUTE: "bf16"}).precision_for("reduction")
        Precision.F32
    """
    if not isinstance(kinds, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance] -- user input
        raise TypeError(f"Custom takes a dict of OpKind to Precision, not {kinds!r}")
    precisions = {_parse_kind(kind): Precision.parse(p) for kind, p in kinds.items()}
    if precisions.pop(OpKind.BOUNDARY, Precision.F32) is not Precision.F32:
        raise ValueError(
            "Custom: OpKind.BOUNDARY keeps its original dtypes; use with_output(...) for the "
            "format of the outputs"
        )
    for kind, precision in precisions.items():
        if not precision.is_format and kind is not OpKind.COMPUTE:
            raise ValueError(
                f"Custom: {precision} says how products are multiplied, so OpKind.COMPUTE alone "
                f"takes it, not {kind!r}"
            )
    scaled = precisions.get(OpKind.COMPUTE, Precision.F32)
    if scaled.is_scaled:
        precisions[OpKind.COMPUTE] = Precision.BF16
    table = tuple(precisions.get(kind, Precision.F32) for kind in OpKind)
    policy = PrecisionPolicy("Custom", table, frozenset(precisions)).with_rules(*rules)
    return policy.with_scaled(scaled if scaled.is_scaled else None)


def _preset(name: str, *kinds: Precision, order: bool = False) -> PrecisionPolicy:
    ordered = frozenset(OpKind) - {OpKind.BOUNDARY} if order else frozenset({OpKind.COMPUTE})
    return PrecisionPolicy(name, (*kinds, Precision.F32), ordered)


_F32, _F16, _BF16 = Precision.F32, Precision.F16, Precision.BF16

AlwaysF32 = dataclasses.replace(_preset("AlwaysF32", *[_F32] * 4), orders=frozenset(), widens=True)
AlwaysF16 = _preset("AlwaysF16", *[_F16] * 4, order=True)
AlwaysBf16 = _preset("AlwaysBf16", *[_BF16] * 4, order=True)
AutoMixedConservativeF16 = _preset("AutoMixedConservativeF16", _F16, _F32, _F16, _F16)
AutoMixedF16 = _preset("AutoMixedF16", *[_F16] * 4)
AutoMixedBf16 = _preset("AutoMixedBf16", *[_BF16] * 4)
AutoMixedF8 = dataclasses.replace(AutoMixedBf16, name="AutoMixedF8", scaled=Precision.F8E4M3)
AutoMixedInt8 = dataclasses.replace(AutoMixedBf16, name="AutoMixedInt8", scaled=Precision.INT8)
AutoMixed = AutoMixedF16
"""Another name of `AutoMixedF16`, which says its format."""
AutoMixedConservative = AutoMixedConservativeF16
"""Another name of `AutoMixedConservativeF16`, which says its format."""

PolicyLike = PrecisionPolicy | Precision | DTypeLike
"""What `PrecisionPolicy.parse` reads: a policy, a preset's name, a precision or dtype, a text."""

PRESETS: dict[str, PrecisionPolicy] = {
    preset.name: preset
    for preset in (
        AlwaysF32,
        AlwaysF16,
        AlwaysBf16,
        AutoMixedConservativeF16,
        AutoMixedF16,
        AutoMixedBf16,
    )
}
OTHER_NAMES = {"AutoMixed": AutoMixedF16, "AutoMixedConservative": AutoMixedConservativeF16}
"""The presets that have another name, by it."""
EIGHT_BIT_PRESETS = {preset.name: preset for preset in (AutoMixedF8, AutoMixedInt8)}
"""The presets with scaled products, by name."""
BY_COMPUTE = {
    Precision.F8E4M3: AutoMixedF8,
    Precision.F8E5M2: AutoMixedF8.with_scaled("f8e5m2"),
    Precision.INT8: AutoMixedInt8,
    _F32: AlwaysF32,
    _F16: AutoMixedF16,
    _BF16: AutoMixedBf16,
    **{p: Custom({OpKind.COMPUTE: p}) for p in Precision if p.is_multiplication},
}
"""The policy that a precision of products stands for."""
