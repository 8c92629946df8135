"""A program's time by a device's peaks: the sum of the rooflines of its kernels.

Each kernel takes the time of its arithmetic or of its memory traffic, whichever is longer
(Williams, Waterman and Patterson 2009, "Roofline", https://doi.org/10.1145/1498765.1498785).
Kernels are those of `precpass.measure.kernels`, run as often as the loops around them; XLA's
`cost_analysis` counts a loop's body once. Only the arithmetic of products counts; all other
arithmetic is assumed to be hidden behind memory traffic.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

from precpass import jaxpr as ir
from precpass.analysis.graph import Graph
from precpass.analysis.liveness import unread
from precpass.analysis.sizes import NOMINAL_SIZE, nbytes
from precpass.devices.peaks import Peaks, peaks_of_kind
from precpass.measure.counts import format_of
from precpass.measure.kernels import NOTHING, Kernel, Stretch, Value

__all__ = ["Work", "relative_time", "work_of"]

Env = dict[Any, Value]


@dataclasses.dataclass(frozen=True)
class Work:
    """The kernels of a program.

    Attributes:
        kernels: each kernel, with how often it runs.
        guesses: whether it has a loop whose trip count is only known at run time; it counts as
            `precpass.analysis.sizes.NOMINAL_SIZE`.
        by_bytes: the primitives whose arithmetic is not counted.
    """

    kernels: tuple[tuple[Kernel, float], ...]
    guesses: bool
    by_bytes: frozenset[str]

    @property
    def nbytes(self) -> float:
        """The bytes that all kernels together read and write."""
        return sum(kernel.nbytes * runs for kernel, runs in self.kernels)

    @property
    def product_flops(self) -> dict[str, float]:
        """Format -> the floating-point operations of products with operands in it."""
        by_format: dict[str, float] = {}
        for kernel, runs in self.kernels:
            if kernel.flops:
                name = _format(kernel.eqn)
                by_format[name] = by_format.get(name, 0.0) + runs * kernel.flops
        return by_format

    def seconds(self, peaks: Peaks) -> float | None:
        """The time at a device's peaks; None if it has no peak for some product (`without_peak`).

        Examples:
            >>> import jax, jax.numpy as jnp
            >>> from precpass.devices.peaks import peaks_of
            >>> x = jax.ShapeDtypeStruct((8192, 8192), jnp.bfloat16)
            >>> work = work_of(jax.make_jaxpr(jnp.dot)(x, x))
            >>> (a100,) = peaks_of("a100")
            >>> work.seconds(a100) == 2 * 8192**3 / a100.bf16
            True
        """
        total = 0.0
        for kernel, runs in self.kernels:
            flops = _peak(kernel, peaks) if kernel.flops else 1.0
            if flops is None:
                return None
            total += runs * max(kernel.flops / flops, kernel.nbytes / peaks.bandwidth)
        return total

    def without_peak(self, peaks: Peaks) -> frozenset[str]:
        """The formats of products for which a device has no published peak."""
        products = (kernel for kernel, _ in self.kernels if kernel.flops)
        return frozenset(_format(k.eqn) for k in products if _peak(k, peaks) is None)


def _peak(kernel: Kernel, peaks: Peaks) -> float | None:
    return peaks.flops(_format(kernel.eqn), ir.asked_precision(kernel.eqn))


def _format(eqn: ir.Eqn) -> str:
    """The format of a product, which is that of its wider operand."""
    widest = max((v.aval for v in eqn.invars[:2]), key=lambda aval: aval.dtype.itemsize)
    return format_of(widest) or str(widest.dtype)


def work_of(jaxpr: ir.Jaxpr | Graph) -> Work:
    """The work of a program.

    Equations that only serve later derivatives are left out (`precpass.analysis.liveness`), as
    are those that nothing needs. As in `precpass.measure.counts.count`, a while loop runs
    `precpass.analysis.sizes.NOMINAL_SIZE` times, all branches of a `cond` run, and a `shard_map`
    counts as one shard.

    Args:
        jaxpr: open or closed; or its graph.
    """
    return _Program(jaxpr).work()


def relative_time(before: Work, after: Work, kind: str) -> float | None:
    """The time of a changed program over that of the program before, by a device's peaks.

    Args:
        before: the work of the program before.
        after: that of the changed program.
        kind: JAX's `device_kind`. The result is None for one without published peaks.
    """
    peaks = peaks_of_kind("gpu", kind) or peaks_of_kind("tpu", kind)
    if peaks is None:
        return None
    seconds, wide = after.seconds(peaks), before.seconds(peaks)
    return seconds / wide if seconds and wide else None


class _Body(NamedTuple):
    """A body whose kernels are separate from those around it: a loop's or a branch.

    Attributes:
        row: its index in the graph.
        constants: how many of its first operands are a loop's constants.
        carried: the results that a loop carries, with the operand of each; None for other bodies.
        unread: the results that only later derivatives read outside.
    """

    row: int
    constants: int = 0
    carried: tuple[tuple[int, int], ...] | None = None
    unread: frozenset[int] = frozenset()


class _Found(NamedTuple):
    """A body's kernels, those that run before its loop, and the bodies that it runs."""

    kernels: list[Kernel]
    before: list[Kernel]
    inside: list[tuple[_Body | Work, float]]


@dataclasses.dataclass(frozen=True)
class _Frame:
    """A body or a call in it, while its equations are added.

    Attributes:
        row: its index in the graph.
        rows: the rows of its remaining equations.
        env: its values.
        leaving: for each result of a call the variable outside and the atom inside.
    """

    row: int
    rows: Iterator[int]
    env: Env
    leaving: tuple[tuple[Any, Any], ...] = ()


class _Program:
    def __init__(self, jaxpr: ir.Jaxpr | Graph) -> None:
        self.graph = jaxpr if isinstance(jaxpr, Graph) else Graph.build(jaxpr)
        self.unread = unread(self.graph).values
        self.guesses = False
        self.by_bytes: set[str] = set()
        self.found: dict[_Body, _Found] = {}

    def work(self) -> Work:
        """The work of the whole program."""
        kernels: list[tuple[Kernel, float]] = []
        # How often each body runs, and how often the kernels before its loop do.
        runs, entered = {_Body(0): 1.0}, {_Body(0): 1.0}
        for body in self._callers_first():
            body_work, times = self.found[body], runs[body]
            kernels += [(kernel, times) for kernel in body_work.kernels]
            kernels += [(kernel, entered[body]) for kernel in body_work.before]
            for inner, trips in body_work.inside:
                if isinstance(inner, Work):
                    kernels += [
                        (kernel, times * inner_times) for kernel, inner_times in inner.kernels
                    ]
                else:
                    runs[inner] = runs.get(inner, 0.0) + times * trips
                    entered[inner] = entered.get(inner, 0.0) + times
        return Work(tuple(kernels), self.guesses, frozenset(self.by_bytes))

    def _callers_first(self) -> list[_Body]:
        """The bodies that run, each after all bodies that run it."""
        order: list[_Body] = []
        walk = [(_Body(0), self._enter(_Body(0)))]
        while walk:
            body, inner = walk[-1]
            child = next(inner, None)
            if child is None:
                walk.pop()
                order.append(body)
            elif child not in self.found:
                walk.append((child, self._enter(child)))
        return order[::-1]

    def _enter(self, body: _Body) -> Iterator[_Body]:
        self.found[body] = self._kernels(body)
        inside = (inner for inner, _ in self.found[body].inside)
        return iter([inner for inner in inside if isinstance(inner, _Body)])

    def _kernels(self, body: _Body) -> _Found:
        node = self.graph.bodies[body.row]
        opened = ir.open_jaxpr(node.jaxpr)
        env = {v: Value(nbytes(v.aval)) for v in (*opened.constvars, *opened.invars)}
        for v in opened.invars[: body.constants]:
            env[v].is_constant = True
        positions = dict(zip(opened.invars, range(len(opened.invars)), strict=True))
        stretch = Stretch()
        self._fill(stretch, body.row, env)
        results: list[Value] = []
        copied: list[Kernel] = []
        for k, atom in enumerate(opened.outvars):
            value = self._value(body.row, env, atom)
            if not value.size or k in body.unread:
                continue
            results.append(value)
            is_given = (value.base or value).maker is None
            if (
                is_given
                and body.carried is not None
                and (positions.get(atom), k) not in body.carried
            ):
                copied.append(Kernel("copy", 2.0 * value.size))
        kernels, inside = stretch.kernels(results)
        self.by_bytes |= stretch.by_bytes
        return _Found(kernels + copied, stretch.outside(), inside)

    # ------------------------------------------------------------ its equations

    def _fill(self, stretch: Stretch, index: int, env: Env) -> None:
        """Adds the equations of a body, with those of the calls in it."""
        walk = [_Frame(index, self._rows(index), env)]
        while walk:
            frame = walk[-1]
            row = next(frame.rows, None)
            if row is None:
                walk.pop()
                for outside, inner in frame.leaving:
                    walk[-1].env[outside] = self._value(frame.row, frame.env, inner)
                continue
            eqn = self.graph.eqns[row]
            reads = [self._value(frame.row, frame.env, v) for v in eqn.invars]
            children = self.graph.children.get(row, ())
            if len(children) == 1 and _is_call(children[0][0]):
                walk.append(self._call(eqn, *children[0], reads))
                continue
            sizes = [nbytes(v.aval) for v in eqn.outvars]
            if children:
                results = stretch.kernel(
                    eqn, reads, sizes, [self._loop(eqn, frame.row, *c) for c in children]
                )
            elif ir.is_float64(eqn):
                results = stretch.kernel(eqn, reads, sizes, self._hidden(eqn))
            else:
                results = stretch.add(eqn, reads)
            frame.env.update(zip(eqn.outvars, results, strict=True))

    def _rows(self, index: int) -> Iterator[int]:
        node = self.graph.bodies[index]
        return iter(range(node.start, node.stop))

    def _value(self, row: int, env: Env, atom: ir.Atom) -> Value:
        """A value of a body; `NOTHING` for one that only later derivatives read."""
        if ir.is_literal(atom) or (atom, row) in self.unread:
            return NOTHING
        return env.get(atom, NOTHING)

    def _call(self, eqn: ir.Eqn, body: ir.Body, index: int, reads: list[Value]) -> _Frame:
        """Enters a call, whose equations count as the caller's own."""
        opened = ir.open_jaxpr(body.jaxpr)
        env = {v: Value(nbytes(v.aval)) for v in opened.constvars}
        # A shard_map passes a shard of each operand.
        pairs = zip(opened.invars, body.operands, strict=True)
        env |= {v: reads[k].part(nbytes(v.aval)) for v, k in pairs}
        leaving = zip(opened.outvars, body.results, strict=False)
        return _Frame(index, self._rows(index), env, tuple((eqn.outvars[k], v) for v, k in leaving))

    def _loop(self, eqn: ir.Eqn, around: int, body: ir.Body, index: int) -> tuple[_Body, float]:
        """A loop's body or a branch, with how often it runs."""
        trips = body.trips if isinstance(body.trips, int) else NOMINAL_SIZE
        self.guesses = self.guesses or not isinstance(body.trips, int)
        is_loop = body.trips != 1 or body.carry
        carried = {k for _, k in body.carry}
        dead = (k for k, at in enumerate(body.results) if (eqn.outvars[at], around) in self.unread)
        unread = frozenset(k for k in dead if k not in carried)
        loop = _Body(index, body.constants, body.carry if is_loop else None, unread)
        return loop, float(trips)

    def _hidden(self, eqn: ir.Eqn) -> list[tuple[Work, float]]:
        """A float64 span, whose jaxpr no graph enters."""
        works = [work_of(jaxpr) for jaxpr in ir.hidden_jaxprs(eqn)]
        for work in works:
            self.guesses = self.guesses or work.guesses
            self.by_bytes |= work.by_bytes
        return [(work, 1.0) for work in works]


def _is_call(body: ir.Body) -> bool:
    """Whether a body runs exactly once, so that a compiler inlines it."""
    return body.trips == 1 and not body.carry and not body.constants
