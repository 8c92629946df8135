"""`PrecisionPolicy`: which precision each kind of equation has, and the table of its options."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import DTypeLike

from precpass.policy.precision import FORMATS, Precision, advice_for
from precpass.policy.primitives import OpKind
from precpass.policy.rules import REDUCES, Rule, check_keys

__all__ = [
    "OPTIONS",
    "SUFFIX",
    "PolicyLike",
    "PrecisionPolicy",
    "SavedPrecisions",
    "cast_leaves",
    "parse_option",
    "plain_options",
    "without_known_scales",
]

SUFFIX = ".toml"
"""How the name of a policy's file ends."""

_POSITION = {kind: i for i, kind in enumerate(OpKind)}

Tree = TypeVar("Tree")


def _option(default: Any, legal: Mapping[Any, str], former: Mapping[str, str] | None = None) -> Any:
    """A field of `PrecisionPolicy` that `with_NAME` sets.

    Checks, `repr`, dicts, files, saved plans and the command line follow from these fields.

    Args:
        default: a legal value, or a set of legal values.
        legal: the legal values, each with a remark for messages.
        former: values that were legal, each with what to write instead.
    """
    return dataclasses.field(default=default, metadata={"legal": legal, "former": former or {}})


_FORMATS = {precision: precision.dtype.name for precision in FORMATS}
_BEST = "whole programs are compiled, and the cheapest form counts"
_INSTEAD = f"is no longer supported: write 'best' ({_BEST}) or 'always'"


@dataclasses.dataclass(frozen=True)
class SavedPrecisions:
    """The precisions of a saved plan.

    Attributes:
        name: of the program that it was saved from.
        entries: pairs of a key and the precisions of the equations that have it, in
            their order; None for one whose precision nothing decides.
        left_out: the rules of its policy that a file cannot hold, as they print.
        costs: what the compiled forms cost, when it was made; "" where none were compiled.
    """

    name: str
    entries: tuple[tuple[str, tuple[Precision | None, ...]], ...]
    left_out: tuple[str, ...] = ()
    costs: str = dataclasses.field(default="", compare=False)

    @functools.cached_property
    def _by_key(self) -> dict[str, tuple[Precision | None, ...]]:
        return dict(self.entries)

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.name, self.entries, self.left_out))

    def __hash__(self) -> int:
        # a policy is part of what every call looks up
        return self._hash

    def __getstate__(self) -> dict[str, object]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def precision_of(self, key: str, occurrence: int) -> Precision | None:
        """The precision of an equation; None where the plan does not have it."""
        saved = self._by_key.get(key, ())
        return saved[occurrence] if occurrence < len(saved) else None


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
        reduce: the format in which devices add up what matrix products made, as for `with_reduce`.
        parameters: the format in which you store parameters; `cast_to_param` casts to it. The pass
            itself never changes the dtype of an argument.
        weight_gradients: the format in which the gradients of weights are multiplied where other
            derivatives multiply in float8: BF16 or F8E4M3. None is BF16 on NVIDIA GPUs before
            Blackwell, for products that no rule or region orders, and F8E4M3 elsewhere.
        alias: how reports print a policy that was given by another name, "AutoMixed (float16)" or
            "AutoMixedF8"; policies that differ only in it are equal.
    """

    name: str
    kinds: tuple[Precision, ...]
    orders: frozenset[OpKind] = frozenset()
    widens: bool = False
    rules: tuple[Rule, ...] = ()
    retypes: frozenset[Precision] = _option(
        frozenset({Precision.F32, Precision.BF16, Precision.F16}), _FORMATS
    )
    output: Precision | None = _option(None, {**_FORMATS, None: "each output keeps its own"})
    lock: SavedPrecisions | None = None
    profitability: str = _option(
        "always",
        {"always": "every product is lowered", "best": _BEST},
        {
            "compiled": "is now named 'best': write 'best'",
            "measured": _INSTEAD,
            "assumed": _INSTEAD,
        },
    )
    results: str = _option(
        "auto", {"auto": "16 bits where the platform's kernels gain by it", "f32": ""}
    )
    reduce: str = _option("auto", REDUCES)
    parameters: Precision = _option(Precision.F32, _FORMATS)
    weight_gradients: Precision | None = _option(
        None, {Precision.BF16: "", Precision.F8E4M3: "", None: "by device"}
    )
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

    def with_lock(self, lock: SavedPrecisions | None) -> PrecisionPolicy:
        """Return this policy with the precisions of a saved plan, or without them.

        Args:
            lock: `Plan.load(file).lock`, or None.
        """
        if not isinstance(lock, SavedPrecisions | None):  # pyright: ignore[reportUnnecessaryIsInstance] -- user input
            raise TypeError(
                f"with_lock takes the lock of a saved plan, Plan.load(file).lock, not {lock!r}"
            )
        return dataclasses.replace(self, lock=lock)

    def _with(self, name: str, given: Any) -> PrecisionPolicy:
        return dataclasses.replace(self, **{name: parse_option(name, given)})

    def with_retypes(self, *precisions: Precision | str) -> PrecisionPolicy:
        """Return this policy with only these formats allowed to change; name "f64" to allow it."""
        return self._with("retypes", precisions)

    def with_output(self, precision: Precision | str | None) -> PrecisionPolicy:
        """Return this policy with another format for floating outputs; None keeps their own."""
        return self._with("output", precision)

    def with_parameters(self, precision: Precision | str) -> PrecisionPolicy:
        """Return this policy with another format for parameters, to which `cast_to_param` casts."""
        return self._with("parameters", precision)

    def with_profitability(self, profitability: str) -> PrecisionPolicy:
        """Return this policy with "always" or "best" profitability.

        Examples:
            >>> from precpass import AutoMixedBf16
            >>> AutoMixedBf16.with_profitability("best")
            AutoMixedBf16.with_profitability('best')
        """
        return self._with("profitability", profitability)

    def with_results(self, results: str) -> PrecisionPolicy:
        """Return this policy with results of low-precision matrix products in "auto" or "f32".

        On a GPU a 16-bit result takes half the memory traffic, and XLA runs a convolution with a
        float32 result in float32. So "f32" gains accuracy and costs bandwidth.
        """
        return self._with("results", results)

    def with_reduce(self, reduce: str) -> PrecisionPolicy:
        """Return this policy with another format in which devices add up results of products.

        - "auto": gradients of weights in float32, and other sums in the format of the product's
          result.
        - "f32": all in float32. No matrix product has a 16-bit result then.
        - "bf16": gradients of weights in bfloat16 too.
        - "bf16 wire, f32 sum": in a `jax.shard_map` the terms are sent in bfloat16, and each device
          adds up a part of them in float32. Elsewhere it is "auto".

        It is for sums of what bfloat16 matrix products made. A loss or a norm stays in float32.

        Examples:
            >>> from precpass import AutoMixedBf16
            >>> AutoMixedBf16.with_reduce("bf16")
            AutoMixedBf16.with_reduce('bf16')
        """
        return self._with("reduce", reduce)

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
        """Return this policy with weight gradients in "bf16" or "f8e4m3"; None is by device."""
        return self._with("weight_gradients", precision)

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
        from precpass.policy.presets import parsed

        return value if isinstance(value, cls) else parsed(value)

    def _changes(self) -> tuple[PrecisionPolicy, dict[str, Any]]:
        """The preset or `Custom` that this policy was made from, and the options that differ."""
        from precpass.policy.presets import PRESETS, Custom

        base = PRESETS.get(self.name)
        if base is None or base.kinds != self.kinds:
            base = Custom(
                {kind: self.precision_for(kind) for kind in OpKind if kind in self.orders}
            )
        ours, theirs = plain_options(self), plain_options(base)
        return base, {name: value for name, value in ours.items() if value != theirs[name]}

    def to_dict(self) -> dict[str, Any]:
        """Return this policy as a dict of strings, lists and dicts, for a TOML file.

        Raises:
            ValueError: for a policy with a saved plan, or with a rule that has a predicate.

        Examples:
            >>> from precpass import AutoMixedBf16
            >>> AutoMixedBf16.with_rules(Rule(module="head", precision="f32")).to_dict()
            {'policy': 'AutoMixedBf16', 'rules': [{'module': 'head', 'precision': 'f32'}]}
        """
        if self.lock is not None:
            raise ValueError("a policy that follows a saved plan is a file already: keep that file")
        base, options = self._changes()
        data: dict[str, Any] = {"policy": base.name}
        if base.name == "Custom":
            data["kinds"] = {str(k): str(self.precision_for(k)) for k in OpKind if k in self.orders}
        data |= {name: "none" if value is None else value for name, value in options.items()}
        if self.rules:
            data["rules"] = [rule.to_dict() for rule in self.rules]
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> PrecisionPolicy:
        """Return the policy in a dict of the form of `to_dict`, such as part of a settings file.

        Its "policy" may be any text that `parse` takes.

        Raises:
            ValueError: for an unknown key or value; the message lists the legal ones.
            TypeError: for something that is not a dict.
        """
        from precpass.policy.presets import Custom

        if not isinstance(data, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance] -- user input
            raise TypeError(f"a policy as data is a dict, not {data!r}")
        check_keys(data, ("policy", "kinds", *OPTIONS, "scaled", "rules"), "a policy")
        name = data.get("policy", "Custom" if "kinds" in data else "AutoMixedBf16")
        if name != "Custom" and "kinds" in data:
            raise ValueError(
                f"kinds = {data['kinds']!r} is for policy = 'Custom', not for {name!r}"
            )
        policy = Custom(data.get("kinds", {})) if name == "Custom" else cls.parse(name)
        for option in OPTIONS.keys() & data.keys():
            policy = policy._with(option, data[option])
        if "scaled" in data:  # it adds a rule, and is written as that rule
            scaled = data["scaled"]
            policy = policy.with_scaled(None if scaled == "none" else scaled)
        rules = data.get("rules", [])
        if not isinstance(rules, list | tuple):
            raise TypeError(
                f"rules are a list of dicts ([[rules]] before each in TOML), not {rules!r}"
            )
        return policy.with_rules(*map(Rule.from_dict, cast("list[Any]", rules)))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write this policy to a .toml file."""
        _check_suffix(path)
        data = self.to_dict()
        rules = data.pop("rules", [])
        lines = [f"{key} = {_toml(value)}" for key, value in data.items()]
        for rule in rules:
            lines += ["", "[[rules]]", *(f"{key} = {_toml(value)}" for key, value in rule.items())]
        Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> PrecisionPolicy:
        """Read a policy from a .toml file, in the form that `save` writes.

        Raises:
            ValueError: for a file that is not a policy; the message names it.
        """
        _check_suffix(path)
        text = Path(path).read_text(encoding="utf-8")
        try:
            return cls.from_dict(tomllib.loads(text))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{os.fspath(path)} is not a policy: {error}") from error

    def __str__(self) -> str:
        from precpass.policy.presets import as_fields

        return as_fields(self) or repr(self)

    def __repr__(self) -> str:
        base, options = self._changes()
        text = base.name
        if base.name == "Custom":
            kinds = [f"{k!r}: {self.precision_for(k)!r}" for k in OpKind if k in self.orders]
            text = f"Custom({{{', '.join(kinds)}}})"
        for name, value in options.items():
            given = ", ".join(map(repr, value)) if isinstance(value, list) else repr(value)
            text += f".with_{name}({given})"
        if self.lock is not None:
            text += f".with_lock(<{len(self.lock.entries)} keys of {self.lock.name}>)"
        if self.rules:
            text += f".with_rules({', '.join(map(repr, self.rules))})"
        return text

    def _repr_html_(self) -> str:
        from precpass.view.pages import policy_page

        return policy_page(self)


def without_known_scales(policy: PrecisionPolicy) -> PrecisionPolicy:
    """A policy whose rules say nothing of magnitudes (`Rule.largest`)."""
    if not any(rule.largest for rule in policy.rules):
        return policy
    rules = (dataclasses.replace(rule, largest=None) for rule in policy.rules)
    return dataclasses.replace(policy, rules=tuple(rules))


OPTIONS = {
    field.name: field for field in dataclasses.fields(PrecisionPolicy) if "legal" in field.metadata
}
"""The options of a policy, by name."""


def parse_option(name: str, given: Any) -> Any:
    """An option's value for what a user or a file gives.

    Raises:
        ValueError: for anything else; the message lists the legal values.
    """
    if isinstance(OPTIONS[name].default, frozenset):
        several = isinstance(given, (list, tuple, set, frozenset))
        return frozenset(_parse(name, one) for one in (given if several else (given,)))
    return _parse(name, given)


def _parse(name: str, given: Any) -> Any:
    legal, former = OPTIONS[name].metadata["legal"], OPTIONS[name].metadata["former"]
    if None in legal and given in (None, "none"):  # TOML has no null
        return None
    if isinstance(given, str) and given in former:
        raise ValueError(f"{name} {given!r} {former[given]}")
    value = given
    if any(isinstance(one, Precision) for one in legal):
        with contextlib.suppress(ValueError):
            value = Precision.parse(given)
    if value in tuple(legal):
        return value
    *others, last = (repr(_plain(one)) + (why and f" ({why})") for one, why in legal.items())
    listed = f"{', '.join(others)} and {last}"
    raise ValueError(f"{name} = {given!r}: legal are {listed}.{advice_for(given)}")


def plain_options(policy: PrecisionPolicy) -> dict[str, Any]:
    """A policy's options as JSON values, by name."""
    return {name: _plain(getattr(policy, name)) for name in OPTIONS}


def _plain(value: Any) -> Any:
    if isinstance(value, frozenset):
        return sorted(map(str, cast("frozenset[Any]", value)))
    return None if value is None else str(value)


def _is_of_scaled(rule: Rule) -> bool:
    return rule.min_flops is not None and rule.parsed.is_scaled


PolicyLike = PrecisionPolicy | Precision | DTypeLike
"""What `PrecisionPolicy.parse` reads: a policy, a preset's name, a precision or dtype, a text."""


def _check_suffix(path: str | os.PathLike[str]) -> None:
    suffix = Path(path).suffix
    if suffix != SUFFIX:
        hint = "; of YAML give PrecisionPolicy.from_dict(yaml.safe_load(text))"
        is_yaml = suffix in (".yaml", ".yml")
        raise ValueError(f"{os.fspath(path)}: a policy's file is {SUFFIX}{hint if is_yaml else ''}")


def _toml(value: Any) -> str:
    """A value of a policy's dict as TOML, which Python reads and does not write."""
    if isinstance(value, dict):
        table = cast("dict[str, Any]", value)
        return f"{{ {', '.join(f'{key} = {_toml(item)}' for key, item in table.items())} }}"
    # The texts, lists and whole numbers of JSON are TOML's too, but for one character.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def cast_leaves(tree: Tree, precision: Precision, *, params_only: bool = False) -> Tree:
    """A pytree with its floating arrays in a precision; the caller's tree does not change.

    Args:
        tree: a pytree. Integers, booleans, complex arrays, random keys, references, Python's
            numbers and whatever is no array stay as they are.
        precision: of the floating arrays, whatever format they are in.
        params_only: whether variables of flax nnx that are no `nnx.Param` keep their format.
    """
    # Imported here, because the help of the command line needs no JAX.
    import jax
    import jax.numpy as jnp

    nnx: Any = sys.modules.get("flax.nnx") if params_only else None

    def is_other(x: object) -> bool:
        return nnx is not None and isinstance(x, nnx.Variable) and not isinstance(x, nnx.Param)

    def cast(x: object) -> object:
        if is_other(x):
            return jax.tree.map(lambda part: part, x)  # a variable of the new tree's own
        if isinstance(x, jax.Ref) or not isinstance(x, jax.Array | np.ndarray | np.generic):
            return x
        return jnp.asarray(x, precision.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x

    return jax.tree.map(cast, tree, is_leaf=is_other)
