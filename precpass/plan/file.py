"""Plans as files: JSON that a person can review, and that later versions of a program can load."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax

from precpass.plan.eqn_info import EqnInfo
from precpass.plan.plan import Decision, Plan
from precpass.policy.policy import (
    OPTIONS,
    PrecisionPolicy,
    SavedPrecisions,
    parse_option,
    plain_options,
)
from precpass.policy.precision import FORMATS, Precision
from precpass.policy.presets import OTHER_NAMES
from precpass.policy.primitives import COMPUTING, OpKind
from precpass.policy.rules import Rule
from precpass.policy.scopes import clean_scope, innermost_keep, join_scopes
from precpass.units import are, counted, listed

__all__ = [
    "FORMAT",
    "Names",
    "differences",
    "equations",
    "locked_precision",
    "policy_data",
    "policy_from",
    "read",
    "rules_left_out",
    "written",
]

FORMAT = 1
"""The version of the files that this module writes, and the newest that it reads."""

_FLOATS = frozenset(map(str, FORMATS))


class Names:
    """Names the equations of a program: scope, source function, primitive, and occurrence."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._places: dict[str, str] = {}

    def add(self, scope: str, function: str, primitive: str, place: str = "") -> tuple[str, int]:
        """The key of the next equation, and how many before it have the same one.

        Args:
            scope: its whole name stack.
            function: the user's function that it is made in; "" where JAX recorded none.
            primitive: its name.
            place: the file and line of the equation; "" where JAX recorded none.
        """
        key = _outside_keeps(f"{clean_scope(scope)}|{function}|{primitive}")
        self.counts[key] += 1
        self._places[key] = place
        return key, self.counts[key] - 1

    def placed(self, key: str) -> str:
        """A key in words, with the line of the last equation that has it, if there is one."""
        return _words(key, self._places.get(key, ""))


def _words(key: str, place: str = "") -> str:
    scope, function, primitive = key.rsplit("|", 2)
    words = (function and f"in {function}", place and f"at {place}", scope and f"under {scope}")
    return " ".join((primitive, *filter(None, words)))


def _outside_keeps(key: str) -> str:
    """A key without `keep` regions: an equation is the same one in and outside of them."""
    scope, function, primitive = key.rsplit("|", 2)
    parts = (part for part in scope.split("/") if not innermost_keep(part))
    return f"{'/'.join(parts)}|{function}|{primitive}"


def written(plan: Plan) -> str:
    """The text of a plan's file.

    Raises:
        ValueError: for a plan without `EqnInfo`, which `inspect` did not make.
    """
    origin = plan.origin
    if origin is not None and origin.policy is None:
        raise ValueError("this plan cannot be saved: the pass is switched off, and planned nothing")
    if origin is None:
        raise ValueError(
            "this plan cannot be saved, as it does not say where its equations stand: take the "
            ".plan of precpass.inspect(f)(*args)"
        )
    entries: dict[str, list[str]] = {}
    names = Names()
    for info, decision, scope, function in equations(plan, origin.scope):
        key, _ = names.add(scope, function, info.primitive)
        compute = locked_precision(decision)
        entries.setdefault(key, []).append(str(compute) if compute else "-")
    whole = {
        "format": FORMAT,
        "jax": jax.__version__,
        "function": origin.name,
        "policy": origin.policy,
        **({"costs": plan.costs} if plan.costs else {}),
        "equations": {key: _shortened(entries[key]) for key in sorted(entries)},
    }
    return json.dumps(whole, indent=1) + "\n"


def locked_precision(decision: Decision) -> Precision | None:
    """The precision that a saved plan orders for an equation."""
    return None if decision.kind is OpKind.BOUNDARY else decision.product.scaled or decision.compute


def read(text: str, where: str) -> PrecisionPolicy:
    """The policy in a file's text.

    Args:
        text: the file's content.
        where: the file's name, for errors.

    Raises:
        ValueError: for a text that is no plan, or one of a newer format.
    """
    try:
        whole = json.loads(text)
        version: Any = whole["format"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(
            f"{where} is not a plan of precpass: save one by "
            "inspect(f, policy)(*args).plan.save(path), or in a shell by precpass lock"
        ) from error
    if type(version) is not int or version != FORMAT:
        raise ValueError(
            f"{where} has format {version}, and this precpass reads {FORMAT}: "
            "update precpass, or save the plan anew"
        )
    try:
        texts = whole["equations"]
        # Older files have the regions of `keep` in their keys. They stay there if two keys differ
        # in nothing else: which of their equations came first is not known.
        bare = Counter(map(_outside_keeps, texts))
        keys = (new if bare[new := _outside_keeps(key)] == 1 else key for key in texts)
        entries = tuple(
            (key, tuple(_lengthened(t))) for key, t in zip(keys, texts.values(), strict=True)
        )
        policy = policy_from(whole["policy"])
        left_out = tuple(map(str, whole["policy"]["rules_left_out"]))
        costs = str(whole.get("costs", ""))
        return policy.with_lock(SavedPrecisions(str(whole["function"]), entries, left_out, costs))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"{where} is damaged: {error}; save the plan anew") from error


class Named(NamedTuple):
    """An equation as a plan's file names it.

    Attributes:
        info: its place in the program.
        decision: the decision for it.
        scope: its whole name stack.
        function: the user's function that makes it; if JAX recorded none, the caller's in this
            scope.
    """

    info: EqnInfo
    decision: Decision
    scope: str
    function: str


def equations(plan: Plan, scope: str) -> Iterator[Named]:
    """The equations that a plan decides, in the planner's order.

    The equations of a body come once for each scope that the body is called in.

    Args:
        plan: one that `inspect` made.
        scope: the name scope around the program.
    """
    met: dict[tuple[int, str], tuple[Plan, str]] = {}

    def meet(plan: Plan, scope: str, caller: str) -> None:
        if (plan.body, scope) in met:
            return
        met[plan.body, scope] = plan, caller
        for info, decision in zip(plan.eqn_infos, plan.decisions, strict=True):
            for inner in decision.inner:
                function = info.source.function if info.has_line else caller
                meet(inner, join_scopes(scope, info.scope), function)

    meet(plan, scope, "")
    for (_, around), (body, caller) in met.items():
        for info, decision in zip(body.eqn_infos, body.decisions, strict=True):
            values = (*info.operands, *info.results)
            if not decision.inner and any(value.dtype in _FLOATS for value in values):
                function = info.source.function if info.has_line else caller
                yield Named(info, decision, join_scopes(around, info.scope), function)


def _shortened(precisions: list[str]) -> str:
    runs = ((text, len(list(same))) for text, same in itertools.groupby(precisions))
    return " ".join(f"{text}*{n}" if n > 1 else text for text, n in runs)


def _lengthened(text: str) -> Iterator[Precision | None]:
    for run in text.split():
        name, _, n = run.partition("*")
        precision = None if name == "-" else Precision.parse(name)
        yield from itertools.repeat(precision, int(n or 1))


# ---------------------------------------------------------------- policies


def policy_data(policy: PrecisionPolicy) -> dict[str, Any]:
    """A policy as JSON values. A rule with a predicate has no JSON form, and is only named."""
    left_out = [repr(rule) for rule in policy.rules if rule.where is not None]
    if policy.lock is not None:
        left_out += [text for text in policy.lock.left_out if text not in left_out]
    return {
        "name": policy.name,
        "kinds": {str(kind): str(policy.precision_for(kind)) for kind in OpKind},
        "orders": sorted(map(str, policy.orders)),
        "widens": policy.widens,
        "rules": [rule.to_dict() for rule in policy.rules if rule.where is None],
        **plain_options(policy),
        "rules_left_out": left_out,
    }


def policy_from(whole: dict[str, Any]) -> PrecisionPolicy:
    """The policy of `policy_data`. Files that are older than an option lack it."""
    if whole.get("scales", "auto") != "auto":
        raise ValueError("float8 with one scale a row is no longer supported: use 'int8'")
    options = {name: whole[name] for name in OPTIONS if name in whole}
    # The plan is followed whatever its profitability says, so a former one stands for "best".
    if options.get("profitability") in OPTIONS["profitability"].metadata["former"]:
        options["profitability"] = "best"
    # Older files have the presets' other names, and 8 bits as an option instead of a rule.
    name = OTHER_NAMES[whole["name"]].name if whole["name"] in OTHER_NAMES else whole["name"]
    policy = PrecisionPolicy(
        name,
        tuple(Precision.parse(whole["kinds"][str(kind)]) for kind in OpKind),
        frozenset(kind for kind in OpKind if str(kind) in whole["orders"]),
        whole["widens"],
        tuple(map(Rule.from_dict, whole["rules"])),
        **{name: parse_option(name, given) for name, given in options.items()},
    )
    scaled = whole.get("scaled")
    return policy if scaled is None else policy.with_scaled(scaled)


def rules_left_out(saved: SavedPrecisions) -> Iterator[str]:
    """A warning that rules are missing in the file; "" if none is missing."""
    if saved.left_out:
        yield (
            f"the saved plan of {saved.name} is without {', '.join(saved.left_out)}, whose "
            "predicate a file cannot hold: equations that are new, and those of custom rules, "
            "do not follow it; add it by Plan.load(path).with_rules(...)"
        )


def differences(saved_plan: SavedPrecisions, names: Names, name: str, policy: str) -> Iterator[str]:
    """Warnings of equations that only the program, or only the saved plan, has.

    Args:
        saved_plan: the precisions in the file.
        names: those of the program's equations.
        name: the function's.
        policy: the policy for equations that the file does not have.

    Raises:
        ValueError: if they share no equation.
    """
    found = names.counts
    saved = Counter({key: len(precisions) for key, precisions in saved_plan.entries})
    if saved and not found & saved:
        raise ValueError(
            f"this plan was saved from another program ({saved_plan.name}): none of its "
            f"{counted(saved.total(), 'equation')} is in {name}; save the plan of {name} anew"
        )
    gone, new = saved - found, found - saved
    if gone:
        n = gone.total()
        yield (
            f"{counted(n, 'equation')} of the saved plan of {saved_plan.name} {are(n)} no longer "
            f"there ({_some(gone, _words)})"
        )
    if new:
        n = new.total()
        yield (
            f"{counted(n, 'equation')} {are(n)} not in the saved plan of {saved_plan.name} and "
            f"{'follows' if n == 1 else 'follow'} {policy} ({_some(new, names.placed)})"
        )
    shifted = Counter({key: n for key, n in found.items() if 0 != saved[key] != n})
    if shifted:
        yield (
            f"the program has more or fewer of some equations than the saved plan of "
            f"{saved_plan.name} ({_some(shifted, names.placed)}). They are matched by their order: "
            "check their precisions, or save the plan anew"
        )


_SOME = 3


def _some(keys: Iterable[str], words: Callable[[str], str]) -> str:
    """The first keys; those of matrix products come first, because a plan is saved for them."""
    order = sorted(keys, key=lambda key: key.rpartition("|")[2] not in COMPUTING)
    return listed(list(map(words, order)), _SOME)
