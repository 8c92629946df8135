"""Programs that are measured side by side: a function under policies, and other functions."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.core

from precpass import jaxpr as ir
from precpass.api import auto_mixed
from precpass.devices.detect import planned_for
from precpass.devices.targets import abstract_on, check_places
from precpass.jit.arguments import Declared, copied, needs_steps
from precpass.jit.functions import name_of, shown_name
from precpass.jit.mixed import Mixed
from precpass.jit.nnx import has_nodes
from precpass.measure.execute import (
    Executable,
    Timing,
    check_sizes,
    compiled,
    interleaved,
    is_jitted,
)
from precpass.policy.float16 import unscaled_on_purpose
from precpass.policy.policy import PolicyLike, PrecisionPolicy
from precpass.policy.precision import Precision
from precpass.policy.presets import PRESETS, is_precision, shown
from precpass.report.compare.errors import Leaf, fetched, leaves_of, on_arrays
from precpass.rewrite.device_products import with_products_of

__all__ = [
    "Made",
    "Policies",
    "Program",
    "Progress",
    "Subject",
    "entries",
    "rounds_of",
    "timed",
]

Progress = Callable[[str, int, int], None]
Entry = PolicyLike | Callable[..., Any]
Policies = (
    Entry | Iterable[Entry | tuple[str, Entry]] | Mapping[str, PrecisionPolicy | Callable[..., Any]]
)


Made = tuple[str, PrecisionPolicy | Callable[..., Any]]
"""A row's name, and its policy or function."""


def rounds_of(rounds: Any, target: Any) -> int:
    """How many rounds are timed: by default 10, and none on a device that is not there.

    Raises:
        ValueError: for a value that is no number of rounds, and for rounds on a target.
    """
    if rounds is None:
        return 10 if target is None else 0
    if target is not None and rounds:
        raise ValueError(
            f"rounds={rounds!r} with a target: a program for a device that need not be there is "
            "compiled and not timed: leave rounds out"
        )
    if not isinstance(rounds, int) or isinstance(rounds, bool) or rounds < 0:
        raise ValueError(f"rounds={rounds!r}: a whole number, 0 for no times")
    return rounds


# ---------------------------------------------------------------- what the rows are


def entries(policies: Any) -> list[Made]:
    """The rows' names, made unique, each with its policy or function.

    Args:
        policies: the rows as the user gave them; None for a row of each preset.
    """
    if policies is None:
        policies = PRESETS
    if isinstance(policies, Mapping):
        items = [*policies.items()]
        for name, _ in items:
            if not isinstance(name, str):
                raise TypeError(f"compare: a dict has the rows' names as its keys, not {name!r}")
    else:
        several = isinstance(policies, Iterable) and not isinstance(policies, str)
        items: list[Any] = [*policies] if several else [policies]
    entries: list[Made] = []
    texts: list[str] = []
    for item in items:
        match item:
            case (str() as name, entry):
                texts.append(name)
            case entry:
                name = None
        parsed = _parsed(entry)
        entries.append((name or _name(entry), parsed))
    if not entries:
        raise ValueError("compare: no rows; give at least one policy or function")
    twice = [name for name, n in Counter(texts).items() if n > 1]
    if twice:
        raise ValueError(f"compare: the name {twice[0]!r} is given twice")
    return list(zip(_numbered([name for name, _ in entries]), (e for _, e in entries), strict=True))


def _parsed(entry: Any) -> PrecisionPolicy | Callable[..., Any]:
    # The classes of dtypes can be called, and are precisions.
    if is_precision(entry) or not callable(entry):
        return PrecisionPolicy.parse(entry)
    return entry


def _name(entry: Any) -> str:
    if isinstance(entry, str):
        return shown(entry)
    if is_precision(entry):
        return str(Precision.parse(entry))
    if not isinstance(entry, PrecisionPolicy):
        return shown_name(entry)
    # the rule by which a preset multiplies in 8 bits is in its name
    rules = len((entry.with_scaled(None) if entry.alias else entry).rules)
    return entry.title + (f" with {rules} rule{'s' * (rules > 1)}" if rules else "")


def _numbered(names: list[str]) -> list[str]:
    """The names, with a number behind each repetition."""
    found: list[str] = []
    for name in names:
        unique, n = name, 1
        while unique in found:
            n += 1
            unique = f"{name} ({n})"
        found.append(unique)
    return found


# ---------------------------------------------------------------- the programs


@dataclasses.dataclass(frozen=True)
class Subject:
    """The function that a report is about, and its arguments.

    Attributes:
        fn: the function, as `auto_mixed` returned it.
        owner: the object that it is bound to, as arguments.
        declared: which of its arguments are static.
        args, kwargs: the arguments on a device, including `owner`.
        target: the device or `Target` that it is planned and compiled for; None for that on which
            it runs.
    """

    fn: Any  # a Mixed, which as a class's attribute would be read as a method
    owner: tuple[Any, ...]
    declared: Declared
    args: Any
    kwargs: Any
    target: Any = None

    @classmethod
    def at(
        cls,
        fn: Mixed[..., Any],
        owner: tuple[Any, ...],
        args: Any,
        kwargs: Any,
        *,
        takes_shapes: bool,
        target: Any,
    ) -> Subject:
        """A function at some arguments, which may be shapes if it `takes_shapes`.

        Raises:
            TypeError: for tracers, and for shapes where arrays are needed.
        """
        declared = Declared(fn.__wrapped__, fn.jit_options)

        def on_device(x: Any, name: str) -> Any:
            check_sizes("compare", x, name)

            def leaf(x: Any) -> Any:
                is_shape = isinstance(x, jax.ShapeDtypeStruct)
                if is_shape and takes_shapes:
                    return x
                if is_shape or isinstance(x, jax.core.Tracer):
                    raise TypeError(
                        f"compare runs the function: {name} must hold arrays, not "
                        f"{type(x).__name__}s (and it is called outside of jit); without columns "
                        'of times and errors, as columns=("flops", "temp", "kernels"), it takes '
                        "shapes"
                    )
                return ir.as_operand(x)

            return x if has_nodes(x) else jax.tree.map(leaf, x)

        check_places(target, (args, kwargs))
        args, kwargs = declared.map(on_device, (*owner, *args), kwargs)
        return cls(fn, owner, declared, args, kwargs, target)

    @property
    def name(self) -> str:
        """The function's name, as it is written."""
        return shown_name(self.fn.__wrapped__)

    def program(self, made: Made) -> Program:
        """The compiled program of a row."""
        name, entry = made
        policy = entry if isinstance(entry, PrecisionPolicy) else None
        fn: Any = entry if policy is None else auto_mixed(self.fn, policy=policy)
        args, declared = self.args, self.declared
        if policy is None:
            args = args[len(self.owner) :]
            declared = Declared(fn, {} if self.owner else declared.options)
        users_own = run = fn, declared, args, self.kwargs
        named: list[Leaf] = []
        # what crosses into jit in steps takes Python longer than a small program runs: no row pays
        in_steps = self.target is not None or any(
            map(needs_steps, declared.each(args, self.kwargs))
        )
        if in_steps or not is_jitted(fn):
            call, operands, named = on_arrays(fn, declared, name_of(fn), args, self.kwargs)
            on_arrays_alone = jax.jit(call)
            run = on_arrays_alone, Declared(on_arrays_alone, {}), operands, {}
        # Memory and bytes are those of the program that the user's own call runs, which may donate.
        # Without options of jit that is the program on arrays, which is compiled once then.
        has_options = any(option not in self.declared.options for option in self.fn.jit_options)
        is_own = is_jitted(fn) and (self.target is not None or has_options)
        compiled_fn, its_declared, args, kwargs = users_own if is_own else run
        if self.target is not None:
            args, kwargs = its_declared.map(lambda x, _: abstract_on(self.target, x), args, kwargs)
        with planned_for(self.target), unscaled_on_purpose():
            executable = compiled(compiled_fn, *args, **kwargs)
        return Program(name, policy, *run, named, executable, self.target)


_ALL_ROUNDINGS: dict[str, str | bool] = {"xla_allow_excess_precision": False}


class Program(NamedTuple):
    """A row's compiled program, and the call that runs it here.

    Attributes:
        name: the row's name.
        policy: its policy; None for a function given instead of one.
        fn: the jitted function.
        declared: which of its arguments are static.
        args, kwargs: its arguments.
        named: the leaves of its results, if it only returns their arrays.
        executable: what was compiled.
        target: what it was planned and compiled for; None for the device on which it runs.
    """

    name: str
    policy: PrecisionPolicy | None
    fn: Any
    declared: Declared
    args: Any
    kwargs: Any
    named: list[Leaf]
    executable: Executable
    target: Any

    def fresh(self) -> tuple[Any, Any]:
        """Arguments that one run may overwrite."""
        donates = self.executable.donates
        return self.declared.map(lambda x, _: copied(x, arrays=donates), self.args, self.kwargs)

    def results(self) -> list[Leaf]:
        """The arrays of a run's results, on the host.

        A program that is planned for a target runs here as it is rewritten for the target, with
        every rounding that it has, because XLA leaves out some of them on a CPU, and with float32
        products that have the digits that they have there.
        """
        args, kwargs = self.fresh()
        if self.target is None:
            result = self.fn(*args, **kwargs)
        else:
            with planned_for(self.target):
                jaxpr, shapes = jax.make_jaxpr(self.fn, return_shape=True)(*args, **kwargs)
                here = with_products_of(self.executable.device.platform, jaxpr)
                program = jax.jit(lambda *xs: ir.evaluate(here, xs))
                lowered = program.lower(*jax.tree.leaves((args, kwargs)))
            flat = lowered.compile(_ALL_ROUNDINGS)(*jax.tree.leaves((args, kwargs)))
            result = jax.tree.unflatten(jax.tree.structure(shapes), flat)
        leaves = leaves_of(self.declared, result, args, kwargs)
        values = [fetched(leaf.value) for leaf in leaves]
        pairs = zip(self.named or leaves, values, strict=True)
        return [leaf._replace(value=value) for leaf, value in pairs]


def timed(
    programs: Sequence[Program], rounds: int, progress: Progress, total: int
) -> list[tuple[Timing, float]]:
    """The times of programs in interleaved rounds, and their ratios to the first one.

    A ratio is the median over the rounds of those within a round.

    Args:
        programs: the programs; each takes its turn in each round.
        rounds: the number of rounds.
        progress: is called before each round.
        total: the number of steps of the whole report, of which the rounds are the last.
    """
    by_name = {program.name: program for program in programs}

    def tell(turn: int) -> None:
        text = "warm-up" if turn < 0 else f"round {turn + 1}"
        progress(text, total - rounds + max(turn, 0), total)

    found = interleaved(
        {p.name: lambda args, kwargs, fn=p.fn: fn(*args, **kwargs) for p in programs},
        rounds,
        prepare=lambda name: by_name[name].fresh(),
        progress=tell,
    )
    timings = [found[program.name] for program in programs]
    return [(timing, timing.ratios(timings[0]).median) for timing in timings]
