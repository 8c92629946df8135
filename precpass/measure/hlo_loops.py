"""How often a compiled loop runs, by its counter."""

from __future__ import annotations

from collections.abc import Callable

from precpass.measure.hlo import Computation, Instruction, Module

__all__ = ["trips_of"]

State = Callable[[int], int | None]
"""The integer in each element of a loop's state; None for one that is not known."""

_MOVES = frozenset(("bitcast", "copy", "copy-done", "copy-start", "opt-barrier", "reshape"))
_SIGNS = {"LT": 1, "LE": 1, "NE": 1, "GT": -1, "GE": -1}


def trips_of(module: Module, home: Computation, loop: Instruction) -> int | None:
    """How often a while loop runs; None if only run time knows.

    The compilers for CPUs and GPUs write it down. A TPU's does not, so it is computed for a loop
    that compares two integers, whose difference changes by the same number in each trip, as in
    `jax.lax.scan` and `fori_loop`.

    Args:
        module: the program.
        home: the computation that the loop stands in.
        loop: the while loop.
    """
    if loop.trips is not None:
        return loop.trips
    condition = module.computations[dict(loop.called)["condition"]]
    compared = condition.root
    if compared.text not in _SIGNS:
        return None
    ahead: list[int] = []  # of the bound, in the first three trips
    for trip in range(3):
        state = _state(module, home, loop, trip)
        left, right = (_integer(module, condition, name, state) for name in compared.operands)
        if left is None or right is None:
            return None
        ahead.append((right - left) * _SIGNS[compared.text] + (compared.text in ("LE", "GE")))
    first, step = ahead[0], ahead[0] - ahead[1]
    if step != ahead[1] - ahead[2]:
        return None
    if compared.text == "NE":
        return first // step if step and not first % step and first // step >= 0 else None
    return 0 if first <= 0 else -(-first // step) if step > 0 else None


def _state(module: Module, home: Computation, loop: Instruction, trip: int) -> State:
    """The integers of a loop's state before a trip."""
    if trip == 0:
        outside = _constants(module, home)
        return lambda at: _element(module, home, loop.operands[0], at, outside)
    body = module.computations[dict(loop.called)["body"]]
    before = _state(module, home, loop, trip - 1)
    return lambda at: _element(module, body, body.root.name, at, before)


def _constants(module: Module, computation: Computation) -> State:
    """The integers that a computation is given in each run, if it is a loop's body."""
    callers = module.callers.get(computation.name, ())
    if len(callers) != 1 or callers[0][1].opcode != "while":
        return lambda _: None
    return lambda at: _kept(module, *callers[0], at)


def _kept(module: Module, home: Computation, loop: Instruction, at: int) -> int | None:
    """An integer of a loop's state that no trip changes."""
    first, second = (_state(module, home, loop, trip)(at) for trip in (0, 1))
    return first if first == second else None


def _element(
    module: Module, computation: Computation, name: str, at: int, state: State
) -> int | None:
    """The integer in an element of a tuple."""
    read = _source(computation, name)
    if read is None:
        return None
    if read.opcode == "tuple":
        return _integer(module, computation, read.operands[at], state)
    if read.opcode == "while":
        return _kept(module, computation, read, at)
    return state(at) if read.opcode == "parameter" else None


def _integer(module: Module, computation: Computation, name: str, state: State) -> int | None:
    """The integer that an instruction computes from those of a state; None if it is not known."""
    read = _source(computation, name)
    if read is None:
        return None
    if read.opcode == "constant":
        is_integer = read.shapes[0].dtype[0] in "su" and not read.shapes[0].dims
        return int(read.text) if is_integer else None
    if read.opcode == "get-tuple-element":
        return _element(module, computation, read.operands[0], read.index, state)
    if read.opcode in ("add", "subtract"):
        left, right = (_integer(module, computation, n, state) for n in read.operands)
        if left is not None and right is not None:
            return left + right if read.opcode == "add" else left - right
    return None


def _source(computation: Computation, name: str) -> Instruction | None:
    """What an instruction copies, through all copies."""
    read = computation.by_name.get(name)
    while read is not None and read.opcode in _MOVES:
        read = computation.by_name.get(read.operands[0])
    return read
