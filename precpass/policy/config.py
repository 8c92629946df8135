"""Policies as data, and as TOML files that a person writes.

policy = "AutoMixedBf16"
output = "bf16"

[[rules]]
module = "encoder/layers/*/attention"
precision = "f32"
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from precpass.policy.policy import PrecisionPolicy
from precpass.policy.precision import Precision
from precpass.policy.presets import Custom
from precpass.policy.primitives import OpKind
from precpass.policy.rules import PATTERNS, Rule

__all__ = ["SUFFIX", "from_dict", "load", "save", "to_dict"]

SUFFIX = ".toml"
"""How the name of a policy's file ends."""

_OPTIONS = ("output", "parameters", "retypes", "profitability", "results", "weight_gradients")
# `scaled` adds a rule, and is written as that rule.
_READ = (*_OPTIONS, "scaled")
_KEYS = ("policy", "kinds", *_READ, "rules")


def to_dict(policy: PrecisionPolicy) -> dict[str, Any]:
    """A policy as a dict of texts, lists and dicts, with what differs from its preset.

    Raises:
        ValueError: for a policy that follows a saved plan, or has a rule with a predicate.
    """
    if policy.lock is not None:
        raise ValueError("a policy that follows a saved plan is a file already: keep that file")
    for rule in policy.rules:
        if rule.where is not None:
            raise ValueError(f"{rule!r} has a predicate, which no file can hold: add it in Python")
    ordered = [kind for kind in OpKind if kind in policy.orders]
    kinds: dict[OpKind | str, Precision | str] = {
        str(kind): str(policy.precision_for(kind)) for kind in ordered
    }
    data: dict[str, Any] = {"policy": policy.name}
    if policy.name == "Custom":
        data["kinds"] = kinds
    preset = Custom(kinds) if policy.name == "Custom" else PrecisionPolicy.parse(policy.name)
    for name in _OPTIONS:
        value = getattr(policy, name)
        if value != getattr(preset, name):
            data[name] = sorted(map(str, value)) if name == "retypes" else str(value)
    if policy.rules:
        data["rules"] = [
            {
                **rule.patterns,
                "precision": str(rule.precision),
                **({"evidence": rule.evidence} if rule.evidence else {}),
            }
            for rule in policy.rules
        ]
    return data


def from_dict(data: Mapping[str, Any]) -> PrecisionPolicy:
    """The policy of `to_dict`. Its first entry may be any text that `PrecisionPolicy.parse` reads.

    Raises:
        ValueError: for an unknown key or value; the text lists the legal ones.
        TypeError: for something that is no dict.
    """
    if not isinstance(data, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance] -- user input
        raise TypeError(f"a policy as data is a dict, not {data!r}")
    _check_keys(data, _KEYS, "a policy")
    name = data.get("policy", "Custom" if "kinds" in data else "AutoMixedBf16")
    if name == "Custom":
        policy = Custom(data.get("kinds", {}))
    elif "kinds" in data:
        raise ValueError(f"kinds = {data['kinds']!r} is for policy = 'Custom', not for {name!r}")
    else:
        policy = PrecisionPolicy.parse(name)
    for option in _READ:
        if option in data:
            value = data[option]
            is_list = isinstance(value, list | tuple)
            if option == "retypes" and is_list:
                policy = policy.with_retypes(*cast("list[Any]", value))
            else:
                policy = getattr(policy, f"with_{option}")(value)
    rules = data.get("rules", [])
    if not isinstance(rules, list | tuple):
        raise TypeError(f"rules are a list of dicts ([[rules]] before each in TOML), not {rules!r}")
    return policy.with_rules(*map(_rule, cast("list[Any]", rules)))


def _rule(data: Any) -> Rule:
    if not isinstance(data, Mapping):
        raise TypeError(f"a rule as data is a dict, not {data!r}")
    fields = cast("Mapping[str, Any]", data)
    _check_keys(fields, (*PATTERNS, "precision", "evidence"), "a rule")
    if "precision" not in fields:
        legal = ", ".join(repr(str(precision)) for precision in Precision)
        raise ValueError(f"the rule {dict(fields)!r} has no precision: legal are {legal}")
    return Rule(**fields)


def _check_keys(data: Mapping[str, Any], legal: tuple[str, ...], what: str) -> None:
    for key in data:
        if key not in legal:
            raise ValueError(f"{what} has no key {key!r}: legal are {', '.join(legal)}")


# ---------------------------------------------------------------- files


def save(policy: PrecisionPolicy, path: str | os.PathLike[str]) -> None:
    """Writes a policy to a .toml file."""
    _check_suffix(path)
    Path(path).write_text(_toml(to_dict(policy)), encoding="utf-8")


def load(path: str | os.PathLike[str]) -> PrecisionPolicy:
    """The policy in a file, as `save` writes it.

    Raises:
        ValueError: for a file that is none; the text names it.
    """
    _check_suffix(path)
    text = Path(path).read_text(encoding="utf-8")
    try:
        return from_dict(tomllib.loads(text))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{os.fspath(path)} is not a policy: {error}") from error


def _check_suffix(path: str | os.PathLike[str]) -> None:
    suffix = Path(path).suffix
    if suffix != SUFFIX:
        hint = "; of YAML give PrecisionPolicy.from_dict(yaml.safe_load(text))"
        is_yaml = suffix in (".yaml", ".yml")
        raise ValueError(f"{os.fspath(path)}: a policy's file is {SUFFIX}{hint if is_yaml else ''}")


def _toml(data: dict[str, Any]) -> str:
    """A dict of `to_dict` as TOML, which Python reads and does not write."""
    lines = [f"{key} = {_value(value)}" for key, value in data.items() if key != "rules"]
    for rule in data.get("rules", ()):
        lines += ["", "[[rules]]", *(f"{key} = {_value(value)}" for key, value in rule.items())]
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    if isinstance(value, dict):
        table = cast("dict[str, Any]", value)
        return f"{{ {', '.join(f'{key} = {_value(item)}' for key, item in table.items())} }}"
    # The texts, lists and whole numbers of JSON are TOML's too, but for one character.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
