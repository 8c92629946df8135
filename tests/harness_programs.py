"""JAX's own primitive harnesses, and the check of one program under every preset.

A harness is one use of one primitive, with arguments, as JAX tests itself; its list
depends on x64 at import. What is checked of a program:

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
import functools
import re
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from helpers import ALWAYS_LOW, LOW, POLICIES
from rounding_model import exact, model, noise, rounding

import precpass as pp

FACTOR = 2.0
"""A result may be this much further from float32's than the worst run of the model."""
NOISE = 2.0**-20
"""What float32 itself may add, relative to a result's norm: 16 of its units."""


@dataclasses.dataclass
class Report:
    """What was found of one program, or of many."""

    failures: list[str] = dataclasses.field(default_factory=list)
    counts: Counter[str] = dataclasses.field(default_factory=Counter)

    def add(self, other: Report) -> None:
        """Adds up two reports."""
        self.failures += other.failures
        self.counts += other.counts


# ---------------------------------------------------------------- harnesses


@functools.cache
def harnesses() -> list[Any]:
    """Those that JAX implements on CPU, for x64 as it is at the first call."""
    from jax._src.internal_test_util import test_harnesses

    return [h for h in test_harnesses.all_harnesses if h.filter("cpu")]


def short_id(harness: Any) -> str:
    """A name for reports: the full ones have several hundred letters."""
    return f"{harness.group_name}-{zlib.crc32(harness.fullname.encode()):08x}"


@functools.cache
def _by_id() -> dict[str, Any]:
    return {short_id(h): h for h in harnesses()}


def program(harness: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A harness as a function and its arguments, the same in every run."""
    seed = zlib.adler32(harness.fullname.encode())
    args = tuple(harness.dyn_args_maker(np.random.RandomState(seed)))
    return lambda *xs: harness.dyn_fun(*xs), args


def sample() -> dict[str, list[Any]]:
    """Of every group a float32 harness and one of a 16-bit or integer type, where they exist.

    Which ones depends on their names alone.
    """
    groups: dict[str, list[Any]] = {}
    for h in sorted(harnesses(), key=lambda h: zlib.crc32(h.fullname.encode())):
        groups.setdefault(h.group_name, []).append(h)
    return {name: _chosen(groups[name]) for name in sorted(groups)}


def _chosen(group: list[Any]) -> list[Any]:
    def first(wanted: Callable[[np.dtype[Any]], bool]) -> list[Any]:
        return [h for h in group if h.dtype is not None and wanted(np.dtype(h.dtype))][:1]

    wide = first(lambda d: d == np.float32)
    low = first(lambda d: d in LOW)
    integer = first(lambda d: d.kind in "iub")
    found = wide + (low or integer)
    return (found + [h for h in group if h not in found])[: max(2, len(found))]


# ---------------------------------------------------------------- programs


def derivative(fn: Callable[..., Any], args: Sequence[Any]) -> Any:
    """The pullback of a program's floating results to its floating arguments, or the tangents.

    Returns:
        (function, its arguments, a function that takes the derivative of another form of
        the program); None where the plain program has neither.
    """
    leaves = jax.tree.leaves(args)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = jax.tree.leaves(jax.eval_shape(fn, *args))
    at = [i for i, x in enumerate(leaves) if jnp.issubdtype(jnp.result_type(x), jnp.floating)]
    out = [i for i, x in enumerate(results) if jnp.issubdtype(x.dtype, jnp.inexact)]
    if not at or not out:
        return None
    random = np.random.RandomState(len(leaves))

    def direction(like: Any) -> Any:
        return np.asarray(random.standard_normal(np.shape(like))).astype(jnp.result_type(like))

    for mode, towards in (
        (_pullback, [direction(results[i]) for i in out]),
        (_pushforward, [direction(leaves[i]) for i in at]),
    ):
        take = _taker(mode, at, out)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                jax.eval_shape(take(fn), towards, *args)
            except Exception:
                continue
        return take(fn), (towards, *args), take
    return None


def _taker(mode: Callable[..., Any], at: list[int], out: list[int]) -> Callable[..., Any]:
    def take(fn: Callable[..., Any]) -> Callable[..., Any]:
        def derived(towards: list[Any], *args: Any) -> Any:
            leaves, tree = jax.tree.flatten(args)

            def on_floats(*xs: Any) -> list[Any]:
                filled = list(leaves)
                for i, x in zip(at, xs, strict=True):
                    filled[i] = x
                results = jax.tree.leaves(fn(*jax.tree.unflatten(tree, filled)))
                return [results[i] for i in out]

            return mode(on_floats, [jnp.asarray(leaves[i]) for i in at], towards)

        return derived

    return take


def _pullback(fn: Callable[..., Any], primals: list[Any], cotangents: list[Any]) -> Any:
    return jax.vjp(fn, *primals)[1](cotangents)


def _pushforward(fn: Callable[..., Any], primals: list[Any], tangents: list[Any]) -> Any:
    return jax.jvp(fn, tuple(primals), tuple(tangents))[1]


# ---------------------------------------------------------------- the check


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
        plain.traces_the_same = text_of(traced.jaxpr) == text_of(plain.traced.jaxpr)
        found = _signature(traced, plain)
        if not plain.traces_the_same:
            found.append("changes nothing, but the function traces to another program")
        return found
    if policy is pp.AlwaysF32 and not plain.has_low_values:
        return ["changes a program without 16-bit values"]
    return _changed(policy, plain, pp.auto_mixed(fn, policy=policy).trace(*plain.args), report)


def _changed(policy: Any, plain: Plain, traced: Any, report: Report) -> list[str]:
    found = _signature(traced, plain)
    if found:
        return found
    report.counts["programs rewritten and run"] += 1
    return compare(policy, plain, traced.lower().compile()(*plain.args), report)


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
    fn, args = program(_by_id()[name])
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


# ---------------------------------------------------------------- values


@np.errstate(all="ignore")
def compare(policy: Any, plain: Plain, got: Any, report: Report | None = None) -> list[str]:
    """What is wrong with a policy's results.

    Results that are equal, or off by one rounding to the policy's low format, pass at
    once; the runs of the model decide on the others.
    """
    report = Report() if report is None else report
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(plain.result), strict=True)
    found: list[str] = []
    for i, (x, y) in enumerate(pairs):
        a, b, what = to_numpy(x), to_numpy(y), f"result {i}"
        if a.shape != b.shape or a.dtype != b.dtype:
            found.append(f"{what} is {a.dtype}{a.shape}, not {b.dtype}{b.shape}")
        elif a.tobytes() == b.tobytes():
            report.counts["results equal"] += 1
        elif policy is pp.AlwaysF32:
            report.counts["results compared with the float32 program"] += 1
            first, others = plain.wide()
            found += _as_accurate(a, b, first[i], [run[i] for run in others], what)
        elif _off_by_one_rounding(a, b, policy.low.unit_roundoff):
            report.counts["results within one rounding"] += 1
        else:
            report.counts["results within the model's error"] += 1
            runs = [run[i] for run in plain.rounded(policy)]
            found += _within(a, b, runs, what, policy not in ALWAYS_LOW, report)
    return found


def _off_by_one_rounding(a: np.ndarray, b: np.ndarray, unit: float) -> bool:
    """Whether two arrays are non-finite alike and differ by no more than a unit of their norm."""
    if not is_inexact(b):
        return False
    a, b = wide_numpy(a), wide_numpy(b)
    at = np.isfinite(b)
    alike = bool(np.all(at | _same_bits(a, b)))
    return alike and bool(np.all(np.isfinite(a[at]))) and norm((a - b)[at]) <= unit * norm(b[at])


def _within(
    a: np.ndarray, b: np.ndarray, runs: list[np.ndarray], what: str, strict: bool, report: Any
) -> list[str]:
    """Whether `a` is as near to `b` as the model's runs are."""
    if not is_inexact(b):
        settled = np.ones(b.shape, bool) if strict else np.all([r == b for r in runs], axis=0)
        wrong = int(np.sum((a != b) & settled))
        return [f"{what}: {wrong} of {b.size} integers or booleans differ"] if wrong else []
    a, b, *runs = (wide_numpy(x) for x in (a, b, *runs))
    finite = np.isfinite(b)
    modelled = finite & np.all([np.isfinite(r) for r in runs], axis=0)
    lost = int(np.sum((finite if strict else modelled) & ~np.isfinite(a)))
    if lost:
        return [f"{what}: {lost} of {b.size} values are no longer finite"]
    agreed = ~finite & np.all([_same_bits(r, b) for r in runs], axis=0)
    if not np.all(_same_bits(a, b)[agreed]):
        return [f"{what}: an infinity or NaN of the plain program is another value"]
    at = modelled & np.isfinite(a)
    size = norm(b[at])
    bound = FACTOR * max(norm((r - b)[at]) for r in runs) + NOISE * size + _tiny(b)
    error = norm((a - b)[at])
    report.counts["results with a bound above a tenth"] += bool(bound > 0.1 * size)
    ok = error <= bound
    return [] if ok else [f"{what}: error {error:.3g} > {bound:.3g}, of a norm of {size:.3g}"]


def _as_accurate(
    a: np.ndarray, b: np.ndarray, wide: np.ndarray, noisy: list[np.ndarray], what: str
) -> list[str]:
    """Whether `a` is as near to `wide` as `b` is, or as one rounding is."""
    if not is_inexact(b):
        settled = np.all([r == wide for r in noisy], axis=0)
        wrong = int(np.sum((a != wide) & (a != b) & settled))
        return [f"{what}: {wrong} of {b.size} integers or booleans differ"] if wrong else []
    unit = float(jnp.finfo(b.dtype).eps) / 2
    rounded = wide_numpy(wide.astype(b.dtype))
    a, b, wide, *noisy = (wide_numpy(x) for x in (a, b, wide, *noisy))
    expected = np.isfinite(rounded) & np.isfinite(wide)
    if not np.all(np.isfinite(a[expected & np.isfinite(b)])):
        return [f"{what}: values are no longer finite"]
    at = expected & np.isfinite(a) & np.isfinite(b)
    at &= np.all([np.isfinite(r) for r in noisy], axis=0)
    slack = FACTOR * max(norm((r - wide)[at]) for r in noisy) + NOISE * norm(wide[at]) + _tiny(b)
    error, plain_error = norm((a - wide)[at]), norm((b - wide)[at])
    bound = max(plain_error, unit * norm(wide[at])) + slack
    return [] if error <= bound else [f"{what}: error {error:.3g} > {bound:.3g}"]


def _tiny(x: np.ndarray) -> float:
    """What flushing to zero below the smallest normal number may add."""
    return float(2.0**-125 * np.sqrt(max(x.size, 1)))


def _same_bits(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a == b) | (np.isnan(a) & np.isnan(b))


def norm(x: np.ndarray) -> float:
    """The 2-norm, without overflow."""
    largest = float(np.max(np.abs(x), initial=0.0))
    return largest * float(np.linalg.norm((x / largest).ravel())) if largest else 0.0


def is_inexact(x: np.ndarray) -> bool:
    """Whether an array is floating or complex, ml_dtypes' types included."""
    return bool(jnp.issubdtype(x.dtype, jnp.inexact))


def to_numpy(x: Any) -> np.ndarray:
    """An array's elements; a key's bits."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x)


def wide_numpy(x: np.ndarray) -> np.ndarray:
    """Floats as float64, complex numbers as complex128."""
    return x.astype(np.complex128 if np.iscomplexobj(x) else np.float64)


# ---------------------------------------------------------------- jaxprs


def dtypes_of(jaxpr: Any) -> Iterator[Any]:
    """The dtypes of all values of a jaxpr and of the jaxprs in its equations."""
    opened = getattr(jaxpr, "jaxpr", jaxpr)
    for v in (*opened.constvars, *opened.invars, *opened.outvars):
        yield getattr(v.aval, "dtype", None)
    for eqn in opened.eqns:
        yield from (getattr(v.aval, "dtype", None) for v in eqn.outvars)
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                if hasattr(getattr(inner, "jaxpr", inner), "eqns"):
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
