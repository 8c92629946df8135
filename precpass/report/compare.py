"""`compare`: a function under several policies, measured side by side."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp

from precpass import calling, measure, stateful
from precpass import jaxpr as ir
from precpass.api import auto_mixed
from precpass.leaves import Declared, refused
from precpass.mixed import Mixed, owner_of
from precpass.policy import PrecisionPolicy
from precpass.precision import Precision
from precpass.report.comparison import REFERENCES, Comparison, Row
from precpass.report.errors import (
    Leaf,
    as_written,
    errors_of,
    evaluated,
    fetched,
    leaves_of,
    on_arrays,
)

__all__ = ["compare"]

Progress = Callable[[str, int, int], None]
Entry = PrecisionPolicy | str | Callable[..., Any]
Policies = (
    Entry | Iterable[Entry | tuple[str, Entry]] | Mapping[str, PrecisionPolicy | Callable[..., Any]]
)


def compare(
    fn: Callable[..., Any],
    policies: Policies,
    *,
    reference: str = "f64",
    rounds: int = 10,
    progress: Progress = lambda _what, _done, _total: None,
) -> Callable[..., Comparison]:
    """A function under several policies, side by side: counts, memory, time and error.

    Each row is traced and compiled, run once for its results and then timed in rounds in
    which every row takes its turn. Arguments are put on the device before; where a row
    donates some, all are copied before each run of it, outside of its time. Modules of
    flax nnx are given as their arrays, and stay as they are; what their updates would be
    counts as results. A function with effects has them in every run.

    Args:
        fn: the function, or what `auto_mixed` made of it, whose options then count.
        policies: what the rows are: policies, by value, name or string, and other functions of
            the same signature (a model that is written in bfloat16, one cast by jmp,
            one under `jax.default_matmul_precision`), whose counts are those of their
            own traces. An item may be a pair (name, policy or function); a dict has
            names as its keys. `fn` itself as an item is the function as it is written.
        reference: what the results are held against. "f64": the program as traced, its
            equations evaluated in float64, casts to lower formats left out, with x64 on
            or off; the error of float32 shows too. Complex arithmetic, references,
            opaque primitives and casts to float8 are in it as they are. "f32": the same in
            float32. Neither has a policy in it, inner ones and their outputs included.
        rounds: how many times each row is timed; 0 for no times.
        progress: is called with a text, the steps done and their number.

    Returns:
        A function that takes the arguments of `fn`, arrays, and gives a `Comparison`.

    Raises:
        TypeError: for a row that is neither policy nor function, and a name that is no text.
        ValueError: for an unknown policy or reference, a negative `rounds`, names that
            are given twice, no rows, and (of the returned function) a row whose results
            have other shapes, names or kinds of numbers than those of `fn`.
        RuntimeError: of the returned function, when the reference cannot be evaluated.

    Example:
        >>> import jax.numpy as jnp
        >>> def f(x):
        ...     return jnp.tanh(x @ x)
        >>> found = compare(f, ["AlwaysF32", "AutoMixedBf16"], rounds=0)(jnp.eye(8) / 3)
        >>> [(row.name, row.counts.low) for row in found.rows]
        [('AlwaysF32', 0), ('AutoMixedBf16', 1)]
        >>> found.rows[0].errors.relative < 1e-6 < found.rows[1].errors.relative
        True
    """
    if reference not in REFERENCES:
        raise ValueError(f"unknown reference {reference!r}: legal are 'f64' and 'f32'")
    if not isinstance(rounds, int) or isinstance(rounds, bool) or rounds < 0:  # pyright: ignore[reportUnnecessaryIsInstance] -- user input
        raise ValueError(f"rounds={rounds!r}: a whole number, 0 for no times")
    entries = _entries(policies)
    fn, owner = owner_of(fn)
    subject = auto_mixed(fn)

    def compared(*args: Any, **kwargs: Any) -> Comparison:
        return _Run(subject, owner, reference, rounds, progress).run(entries, args, kwargs)

    return compared


# ---------------------------------------------------------------- what the rows are


def _entries(policies: Any) -> list[tuple[str, PrecisionPolicy | Callable[..., Any]]]:
    """The rows' names, made unique, and what they are."""
    if isinstance(policies, Mapping):
        items = [*policies.items()]
        for name, _ in items:
            if not isinstance(name, str):
                raise TypeError(f"compare: a dict has the rows' names as its keys, not {name!r}")
    else:
        several = isinstance(policies, Iterable) and not isinstance(policies, str)
        items: list[Any] = [*policies] if several else [policies]
    found: list[tuple[str, PrecisionPolicy | Callable[..., Any]]] = []
    given: list[str] = []
    for item in items:
        match item:
            case (str() as name, entry):
                given.append(name)
            case entry:
                name = None
        made = entry if callable(entry) else PrecisionPolicy.parse(entry)
        found.append((name or _name(entry), made))
    if not found:
        raise ValueError("compare: no rows; give at least one policy or function")
    twice = [name for name, n in Counter(given).items() if n > 1]
    if twice:
        raise ValueError(f"compare: the name {twice[0]!r} is given twice")
    return list(zip(_numbered([name for name, _ in found]), (e for _, e in found), strict=True))


def _name(entry: Any) -> str:
    if isinstance(entry, str):
        return entry
    if not isinstance(entry, PrecisionPolicy):
        return calling.name_of(entry)
    rules = len(entry.rules)
    return entry.name + (f" with {rules} rule{'s' * (rules > 1)}" if rules else "")


def _numbered(names: list[str]) -> list[str]:
    """The names, a number behind each that was there before."""
    found: list[str] = []
    for name in names:
        unique, n = name, 1
        while unique in found:
            n += 1
            unique = f"{name} ({n})"
        found.append(unique)
    return found


# ---------------------------------------------------------------- running them


class _Program(NamedTuple):
    """One row to be: a jitted function and its own arguments."""

    name: str
    policy: PrecisionPolicy | None
    fn: Any
    declared: Declared
    args: Any
    kwargs: Any
    executable: measure.Executable
    named: list[Leaf]

    def fresh(self) -> tuple[Any, Any]:
        """Arguments that one run may overwrite."""
        if not self.executable.donates:
            return self.args, self.kwargs
        return _copied(self.declared, self.args, self.kwargs)

    def results(self) -> list[Leaf]:
        """The arrays that a run gives, on the host."""
        args, kwargs = self.fresh()
        found = leaves_of(self.declared, self.fn(*args, **kwargs), args, kwargs)
        values = [fetched(leaf.value) for leaf in found]
        pairs = zip(self.named or found, values, strict=True)
        return [leaf._replace(value=value) for leaf, value in pairs]


def _copied(declared: Declared, args: Any, kwargs: Any) -> tuple[Any, Any]:
    def copied(x: Any, _name: str) -> Any:
        return jax.tree.map(lambda leaf: leaf.copy() if isinstance(leaf, jax.Array) else leaf, x)

    return declared.map(copied, args, kwargs)


@dataclasses.dataclass(frozen=True)
class _Run:
    """One run of `compare` (whose arguments these are)."""

    subject: Mixed
    owner: tuple[Any, ...]
    reference: str
    rounds: int
    progress: Progress

    @property
    def name(self) -> str:
        return calling.name_of(self.subject.__wrapped__)

    def run(
        self,
        entries: Sequence[tuple[str, PrecisionPolicy | Callable[..., Any]]],
        args: Any,
        kwargs: Any,
    ) -> Comparison:
        total = 1 + len(entries) + self.rounds
        declared = Declared(self.subject.__wrapped__, self.subject.jit_options)
        own_args, kwargs = declared.map(_on_device, (*self.owner, *args), kwargs)
        self.progress("the reference", 0, total)
        written = as_written(self.subject, declared, self.name, own_args, kwargs)
        wanted = evaluated(written, Precision.parse(self.reference))
        casts = measure.count(written.jaxpr).casts
        programs: list[_Program] = []
        rows: list[Row] = []
        for done, (name, entry) in enumerate(entries, 1):
            self.progress(name, done, total)
            try:
                program = self._program(name, entry, declared, own_args, kwargs)
                results = program.results()
            except Exception as error:
                error.add_note(f"in the row {name!r} of compare")
                raise
            _check_results(name, self.name, results, wanted)
            programs.append(program)
            rows.append(_row(program, casts, results, wanted))
        if self.rounds:
            rows = self._timed(programs, rows, total)
        device = f"{programs[0].executable.device.device_kind}, jax {jax.__version__}"
        return Comparison(self.name, tuple(rows), self.reference, self.rounds, device)

    def _program(
        self, name: str, entry: Any, declared: Declared, args: Any, kwargs: Any
    ) -> _Program:
        policy, fn = None, entry
        if isinstance(entry, PrecisionPolicy):
            policy, fn = entry, auto_mixed(self.subject, policy=entry)
        else:
            args = args[len(self.owner) :]
            declared = Declared(entry, {} if self.owner else declared.options)
        # what crosses into jit in steps takes Python longer than a small program runs: no row pays
        named: list[Leaf] = []
        if not measure.is_jitted(fn) or _crosses_in_steps(declared, args, kwargs):
            own = calling.name_of(fn)
            call, args, named = on_arrays(fn, declared, own, args, kwargs)
            fn, kwargs = jax.jit(call), {}
            declared = Declared(fn, {})
        executable = measure.compiled(fn, *args, **kwargs)
        return _Program(name, policy, fn, declared, args, kwargs, executable, named)

    def _timed(self, programs: list[_Program], rows: list[Row], total: int) -> list[Row]:
        by_name = {program.name: program for program in programs}

        def run_of(program: _Program) -> Callable[..., Any]:
            return lambda args, kwargs: program.fn(*args, **kwargs)

        def tell(turn: int) -> None:
            text = "warm-up" if turn < 0 else f"round {turn + 1}"
            self.progress(text, total - self.rounds + max(turn, 0), total)

        timings = measure.interleaved(
            {name: run_of(program) for name, program in by_name.items()},
            self.rounds,
            prepare=lambda name: by_name[name].fresh(),
            progress=tell,
        )
        base = timings[rows[0].name]
        return [
            dataclasses.replace(
                row, timing=timings[row.name], ratio=timings[row.name].ratios(base).median
            )
            for row in rows
        ]


def _on_device(x: Any, name: str) -> Any:
    def leaf(x: Any) -> Any:
        if isinstance(x, jax.ShapeDtypeStruct | jax.core.Tracer):
            raise TypeError(
                f"compare runs the function: {name} must hold arrays, not {type(x).__name__}s "
                "(and it is called outside of jit)"
            )
        return ir.as_operand(x)

    return x if stateful.has_nodes(x) else jax.tree.map(leaf, x)


def _crosses_in_steps(declared: Declared, args: Any, kwargs: Any) -> bool:
    """Whether there are modules, or leaves that jit refuses, among the arguments."""
    found: list[bool] = []

    def look(x: Any, _name: str) -> None:
        found.append(stateful.has_nodes(x) or any(map(refused, jax.tree.leaves(x))))

    declared.map(look, args, kwargs)
    return any(found)


def _check_results(name: str, fn: str, results: list[Leaf], wanted: list[Leaf]) -> None:
    got, want = ([x.value.shape for x in leaves] for leaves in (results, wanted))
    text = f"the row {name!r} has other results than {fn}"
    if got != want:
        raise ValueError(f"{text}: arrays of shapes {got}, not {want}")
    for mine, its in zip(results, wanted, strict=True):
        # a tuple in the place of a named one is as good, and a module may be given under any name
        one, other = (re.findall(r"[^\W\d]\w*", leaf.path) for leaf in (mine, its))
        if mine.path.startswith("output") and len(one) == len(other) and one != other:
            raise ValueError(f"{text}: {mine.path}, not {its.path}")
        if _numbers(mine.dtype) != _numbers(its.dtype):
            raise ValueError(f"{text}: {its.path} of {mine.dtype}, not of {its.dtype}")


def _numbers(dtype: Any) -> str:
    """What elements are, as far as an error of them depends on it."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return "complex"
    return "floating" if jnp.issubdtype(dtype, jnp.floating) else "discrete"


def _row(program: _Program, casts: int, results: list[Leaf], wanted: list[Leaf]) -> Row:
    counts = measure.count(program.executable.jaxpr)
    errors, each = errors_of(results, wanted)
    return Row(
        program.name,
        program.policy,
        counts,
        counts.casts - casts,
        program.executable.memory,
        None,
        None,
        errors,
        tuple((leaf.path, own) for leaf, own in zip(wanted, each, strict=True)),
    )
