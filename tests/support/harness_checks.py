"""What must hold of one program under every preset; `scripts/sweep harnesses` runs it on JAX's.

- Nothing raises that the plain program does not raise, and the pass adds no warning but
  its own.
- The tree, shapes, dtypes and weak types of the results are the plain program's.
- A plan that changes nothing gives back the jaxpr object itself; the function under the
  pass then traces to the same text, and nothing needs to run.
- AlwaysF32 changes a program only where it has 16-bit values. The results are then at
  least as accurate as the plain program's, against the program held in float32, or within
  one rounding to 16 bits of it.
- The AutoMixed policies: what was finite stays finite, integers and booleans are equal,
  and the error is at most one rounding of the result, or twice that of the roundings of
  the products' operands done by hand (`rounding_model`), plus float32's own noise.
- AlwaysF16 and AlwaysBf16 order every operation low, so that a value above 65504 is
  rightly infinite in float16, and an integer made from a float may change. So results that
  are off by more than one rounding are compared where every run of the rounding model is
  finite: there they must be finite and within twice the model's error; integers are
  compared where all runs agree, and there they must be equal.
"""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import precpass as pp
from tests.support.harness_programs import derivative, harness, program
from tests.support.harness_values import compare, to_numpy
from tests.support.jaxprs import LOW, assert_well_typed, jaxprs_in, opened
from tests.support.passes import ALWAYS_LOW, POLICIES
from tests.support.rounding_model import exact, model, noise, rounding


@dataclasses.dataclass
class Report:
    """What was found of one program, or of many."""

    failures: list[str] = dataclasses.field(default_factory=list)
    counts: Counter[str] = dataclasses.field(default_factory=Counter)

    def add(self, other: Report) -> None:
        """Adds up two reports."""
        self.failures += other.failures
        self.counts += other.counts


class Plain:
    """A program as JAX alone runs it, and the runs of its model; each made once, when asked for."""

    def __init__(self, fn: Callable[..., Any], args: Sequence[Any], outside: bool = False) -> None:
        self.args = tuple(args)
        self.outside = outside
        self.traced = jax.jit(fn).trace(*self.args)
        self.traces_the_same = False
        self._result: Any = None
        self._models: dict[bool, Any] = {}
        self._runs: dict[Any, list[list[np.ndarray]]] = {}

    @property
    def result(self) -> Any:
        if self._result is None:
            self._result = self.traced.lower().compile()(*self.args)
        return self._result

    @property
    def has_low_values(self) -> bool:
        return any(d in LOW for d in dtypes_of(self.traced.jaxpr))

    def run(self, key: Any, pairs: Sequence[Any], widens: bool) -> list[list[np.ndarray]]:
        """Runs of the model: for each pair of roundings, the results."""
        if key not in self._runs:
            if widens not in self._models:
                self._models[widens] = jax.jit(model(self.traced.jaxpr, widens, self.outside))
            leaves = jax.tree.leaves(self.args)
            ran = [self._models[widens](*pair, *leaves) for pair in pairs]
            self._runs[key] = [[to_numpy(x) for x in run] for run in ran]
        return self._runs[key]

    def rounded(self, policy: Any) -> list[list[np.ndarray]]:
        """Runs in which what the policy orders low is rounded in several directions."""
        dtype = policy.low.dtype
        grids = [rounding(dtype, up, seed) for seed, up in enumerate((-1.0, 0.0, 1.0, *[0.5] * 4))]
        if policy in ALWAYS_LOW:
            return self.run(policy.name, [(grid, grid) for grid in grids], False)
        return self.run(dtype, [(g, noise(i)) for i, g in enumerate(grids)], False)

    def wide(self) -> tuple[list[np.ndarray], list[list[np.ndarray]]]:
        """The program held in float32, and runs with its noise."""
        pairs = [(grid, grid) for grid in (exact(), *map(noise, range(4)))]
        first, *others = self.run("wide", pairs, True)
        return first, others


def check(fn: Callable[..., Any], args: Sequence[Any], name: str = "program") -> Report:
    """Everything in this module's text, of one program under every preset."""
    with warnings.catch_warnings(record=True) as before:
        warnings.simplefilter("always")
        try:
            plain = Plain(fn, args)
        except Exception:
            return Report(counts=Counter({"not traced by JAX itself": 1}))
        if not any(jnp.issubdtype(d, jnp.floating) for d in dtypes_of(plain.traced.jaxpr)):
            # auto_mixed refuses a function without floats, and says so
            fn, args = _beside_a_float(fn), (np.float32(1.0), *args)
            plain = Plain(fn, args)
    known = {str(w.message) for w in before}
    report = Report(counts=Counter({"programs": 1}))
    for policy in POLICIES:
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            try:
                found = _under(policy, plain, fn, report)
            except Exception as error:
                if not _runs(plain):
                    return Report(counts=Counter({"not run by JAX itself": 1}))
                found = [f"raises {type(error).__name__}: {_first_line(error)}"]
        found += [
            f"warns {w.category.__name__}: {_first_line(w.message)}"
            for w in heard
            if w.category is not pp.PrecisionWarning and str(w.message) not in known
        ]
        report.failures += [f"{name}: {policy.name} {text}" for text in found]
    return report


def _under(policy: Any, plain: Plain, fn: Callable[..., Any], report: Report) -> list[str]:
    inspected = pp.inspect(fn, policy)(*plain.args)
    if inspected.after is inspected.before:
        report.counts["plans that change nothing"] += 1
        if plain.traces_the_same:
            return []  # one plan of this kind stands for all: nothing of the policy is left
        traced = pp.auto_mixed(fn, policy=policy).trace(*plain.args)
        # With no argument to trace, the function is called as a jit of its own.
        forms = map(text_of, (traced.jaxpr, _called(traced.jaxpr)))
        plain.traces_the_same = text_of(plain.traced.jaxpr) in forms
        found = _signature(traced, plain)
        if not plain.traces_the_same:
            found.append("changes nothing, but the function traces to another program")
        return found
    if policy is pp.AlwaysF32 and not plain.has_low_values:
        return ["changes a program without 16-bit values"]
    assert_well_typed(inspected.after)
    return _changed(policy, plain, pp.auto_mixed(fn, policy=policy).trace(*plain.args), report)


def _called(jaxpr: Any) -> Any:
    eqns = getattr(jaxpr, "jaxpr", jaxpr).eqns
    return eqns[0].params["jaxpr"] if [e.primitive.name for e in eqns] == ["jit"] else jaxpr


def _changed(policy: Any, plain: Plain, traced: Any, report: Report) -> list[str]:
    found = _signature(traced, plain)
    if found:
        return found
    report.counts["programs rewritten and run"] += 1
    return compare(policy, plain, traced.lower().compile()(*plain.args), report.counts)


def check_outside(
    fn: Callable[..., Any], args: Sequence[Any], derived: Any, name: str = "program"
) -> Report:
    """The check of a derivative taken outside of the pass, as in `jax.grad(auto_mixed(f))`.

    Its results are compared with runs that also round what crosses the program's border:
    see `rounding_model.model`.

    Args:
        fn: the program.
        args: its arguments.
        derived: what `derivative` gave for it.
        name: for the report.
    """
    report = Report()
    plain_derivative, its_args, take = derived
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = Plain(plain_derivative, its_args, outside=True)
        for policy in POLICIES:
            try:
                inspected = pp.inspect(fn, policy)(*args)
                if inspected.after is inspected.before:
                    continue
                outside = jax.jit(take(pp.auto_mixed(fn, policy=policy)))
                found = _changed(policy, plain, outside.trace(*its_args), report)
            except Exception as error:
                if not _runs(plain):
                    return Report()
                found = [f"raises {type(error).__name__}: {_first_line(error)}"]
            report.failures += [f"{name}: {policy.name} {text}" for text in found]
    return report


def check_harness(name: str, grad: bool = False) -> Report:
    """The check of one harness, given by its short id, and with `grad` of its derivatives."""
    fn, args = program(harness(name))
    report = check(fn, args, name)
    derived = derivative(fn, args) if grad and report.counts["programs"] else None
    if derived is not None:
        report.add(check(*derived[:2], f"{name}: derivative inside"))
        report.add(check_outside(fn, args, derived, f"{name}: derivative outside"))
    return report


def _beside_a_float(fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda _unused, *args: fn(*args)


def _runs(plain: Plain) -> bool:
    try:
        jax.block_until_ready(plain.result)
    except Exception:
        return False
    return True


def _first_line(error: object) -> str:
    return str(error).strip().partition("\n")[0][:200]


def _signature(traced: Any, plain: Plain) -> list[str]:
    got, want = (
        [str(v.aval) + " weak" * is_weak(v.aval) for v in getattr(j, "jaxpr", j).outvars]
        for j in (traced.jaxpr, plain.traced.jaxpr)
    )
    trees = [jax.tree.structure(t.out_info) for t in (traced, plain.traced)]
    if trees[0] != trees[1]:
        return [f"gives {trees[0]}, not {trees[1]}"]
    return [] if got == want else [f"gives {got}, not {want}"]


# ---------------------------------------------------------------- jaxprs


def dtypes_of(jaxpr: Any) -> Iterator[Any]:
    """The dtypes of all values of a jaxpr and of the jaxprs in its equations."""
    outer = opened(jaxpr)
    for v in (*outer.constvars, *outer.invars, *outer.outvars):
        yield getattr(v.aval, "dtype", None)
    for eqn in outer.eqns:
        yield from (getattr(v.aval, "dtype", None) for v in eqn.outvars)
        for inner in jaxprs_in(eqn.params):
            yield from dtypes_of(inner)


def text_of(jaxpr: Any) -> str:
    """A jaxpr as text without addresses; JAX's own printer refuses some of the harnesses'."""
    opened = getattr(jaxpr, "jaxpr", jaxpr)
    names: dict[Any, str] = {}

    def name(atom: Any) -> str:
        if hasattr(atom, "val"):
            return f"{atom.val!r}:{atom.aval}"
        return names.setdefault(atom, f"v{len(names)}:{atom.aval}{' weak' * is_weak(atom.aval)}")

    def param(value: Any) -> str:
        if hasattr(getattr(value, "jaxpr", value), "eqns"):
            return "{" + text_of(value) + "}"
        if isinstance(value, tuple | list):
            return f"({', '.join(map(param, value))})"
        return re.sub(r"0x[0-9a-f]+", "0x", repr(value))

    lines = [" ".join(map(name, (*opened.constvars, *opened.invars)))]
    for eqn in opened.eqns:
        params = ", ".join(f"{k}={param(v)}" for k, v in sorted(eqn.params.items()))
        read, made = " ".join(map(name, eqn.invars)), " ".join(map(name, eqn.outvars))
        lines.append(f"{made} = {eqn.primitive.name}[{params}] {read}")
    return "\n".join([*lines, " ".join(map(name, opened.outvars))])


def is_weak(aval: Any) -> bool:
    """Whether an aval is weakly typed."""
    return getattr(aval, "weak_type", False)
