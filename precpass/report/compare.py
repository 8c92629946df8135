"""`compare`: a function under several policies, measured side by side."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.core

from precpass import calling, measure, stateful
from precpass import jaxpr as ir
from precpass.api import auto_mixed
from precpass.leaves import Declared, arguments, dynamic_leaves, refused, unwrapped
from precpass.mixed import Mixed, owner_of
from precpass.policy import AlwaysF32, PrecisionPolicy
from precpass.report.comparison import Comparison, Row
from precpass.report.errors import (
    Leaf,
    as_written,
    error_of,
    fetched,
    in_float64,
    leaves_of,
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
            or off; the error of float32 shows too. Complex arithmetic, references and
            opaque primitives are in it as they are. "f32": the function under AlwaysF32.
        rounds: how many times each row is timed; 0 for no times.
        progress: is called with a text, the steps done and their number.

    Returns:
        A function that takes the arguments of `fn`, arrays, and gives a `Comparison`.

    Raises:
        TypeError: for a row that is neither policy nor function.
        ValueError: for an unknown policy or reference, a negative `rounds`, names that
            are given twice, no rows, and (of the returned function) a row whose results
            have other shapes than those of `fn`.
        RuntimeError: of the returned function, when `fn` cannot be evaluated in float64.

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
    if reference not in ("f64", "f32"):
        raise ValueError(f"unknown reference {reference!r}: legal are 'f64' and 'f32'")
    if not isinstance(rounds, int) or rounds < 0:  # pyright: ignore[reportUnnecessaryIsInstance] -- user input
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

    def fresh(self) -> tuple[Any, Any]:
        """Arguments that one run may overwrite."""
        if not self.executable.donates:
            return self.args, self.kwargs
        return _copied(self.declared, self.args, self.kwargs)

    def results(self) -> list[Leaf]:
        """The arrays that a run gives, on the host."""
        args, kwargs = self.fresh()
        found = leaves_of(self.declared, self.fn(*args, **kwargs), args, kwargs)
        return [leaf._replace(value=fetched(leaf.value)) for leaf in found]


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
        if self.reference == "f64":
            wanted = in_float64(written)
        else:
            wide = self._program("reference", AlwaysF32, declared, own_args, kwargs)
            named = zip(written.results, wide.results(), strict=True)
            wanted = [leaf._replace(value=got.value) for leaf, got in named]
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
            _check_shapes(name, self.name, results, wanted)
            programs.append(program)
            rows.append(_row(program, casts, results, wanted))
        if self.rounds:
            rows = self._timed(programs, rows, total)
        device = f"{jax.local_devices()[0].device_kind}, jax {jax.__version__}"
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
        if not isinstance(fn, (Mixed, _JITTED)) or _crosses_in_steps(declared, args, kwargs):
            fn, args = _on_arrays(fn, declared, args, kwargs)
            declared, kwargs = Declared(fn, {}), {}
        executable = measure.compiled(fn, *args, **kwargs)
        return _Program(name, policy, fn, declared, args, kwargs, executable)

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


_JITTED = type(jax.jit(lambda: None))


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


def _on_arrays(
    fn: Callable[..., Any], declared: Declared, args: Any, kwargs: Any
) -> tuple[Any, tuple[Any, ...]]:
    """The jit of a row's function of the arrays among its arguments, and these.

    What jit refuses is closed over; the results are those of `leaves_of`.
    """
    name = calling.name_of(fn)
    wrapped = arguments(declared, name, args, kwargs)
    leaves, put = dynamic_leaves(declared, *wrapped, keeps_numbers=False)

    def on_arrays(*xs: Any) -> list[Any]:
        args, kwargs = declared.map(lambda x, _: unwrapped(x), *put(xs))
        return [leaf.value for leaf in leaves_of(declared, fn(*args, **kwargs), args, kwargs)]

    on_arrays.__name__ = name
    return jax.jit(on_arrays), tuple(leaves)


def _check_shapes(name: str, fn: str, results: list[Leaf], wanted: list[Leaf]) -> None:
    got, want = ([x.value.shape for x in leaves] for leaves in (results, wanted))
    if got != want:
        raise ValueError(
            f"the row {name!r} has other results than {fn}: arrays of shapes {got}, not {want}"
        )


def _row(program: _Program, casts: int, results: list[Leaf], wanted: list[Leaf]) -> Row:
    counts = measure.count(program.executable.jaxpr)
    each = zip(results, wanted, strict=True)
    return Row(
        program.name,
        program.policy,
        counts,
        counts.casts - casts,
        program.executable.memory,
        None,
        None,
        error_of(results, wanted),
        tuple((want.path, error_of([got], [want])) for got, want in each),
    )
