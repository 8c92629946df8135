"""How often a compiled loop runs, by its counter: the start, the step and the bound."""

from __future__ import annotations

from typing import NamedTuple

from precpass.measure.hlo import Computation, Instruction, Module

__all__ = ["trips_of"]


class _Place(NamedTuple):
    """An instruction, and the computation that it stands in."""

    computation: Computation
    instruction: Instruction

    def operand(self, number: int) -> _Place | None:
        """The instruction that an operand names."""
        names = self.instruction.operands
        read = self.computation.by_name.get(names[number]) if number < len(names) else None
        return None if read is None else _Place(self.computation, read)


def trips_of(module: Module, loop: Instruction) -> int | None:
    """How often a while loop runs; None if only run time knows.

    The compilers for CPUs and GPUs write it down. A TPU's does not, so it is read from a loop
    that compares an integer with a constant and adds a constant to it, from a constant on, as
    those of `jax.lax.scan` and `fori_loop` do.

    Args:
        module: the program.
        loop: the while loop, one of its instructions.
    """
    if loop.trips is not None:
        return loop.trips
    condition, body = _called(module, loop, "condition"), _called(module, loop, "body")
    if condition is None or body is None or condition.root is None:
        return None
    compared = _Place(condition, condition.root)
    if compared.instruction.opcode != "compare":
        return None
    for counter, bound, direction in (
        (compared.operand(0), compared.operand(1), compared.instruction.text),
        (compared.operand(1), compared.operand(0), _MIRRORED.get(compared.instruction.text, "")),
    ):
        number = _state(counter)
        if number is None or bound is None:
            continue
        last = _value(module, bound)
        first = _value(module, _element(module, _initial(module, loop), number))
        step = _step(module, body, number)
        if first is not None and last is not None and step:
            return _count(first, last, step, direction)
    return None


_MIRRORED = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE", "NE": "NE"}
_MOVES = frozenset(("bitcast", "copy", "copy-done", "copy-start", "opt-barrier", "reshape"))


def _count(first: int, last: int, step: int, direction: str) -> int | None:
    """How many steps a counter makes before it is at its bound; None if it never gets there."""
    if direction == "NE":
        trips, rest = divmod(last - first, step)
        return trips if not rest and trips >= 0 else None
    if direction not in (("LT", "LE") if step > 0 else ("GT", "GE")):
        return None
    ahead = (last - first) * (1 if step > 0 else -1) + (direction in ("LE", "GE"))
    return max(0, -(-ahead // abs(step)))


def _called(module: Module, loop: Instruction, what: str) -> Computation | None:
    name = dict(loop.called).get(what, "")
    return module.computations.get(name)


def _initial(module: Module, loop: Instruction) -> _Place | None:
    """The tuple of a loop's first state."""
    return _Place(module.homes[loop.name], loop).operand(0)


def _moved(place: _Place | None) -> _Place | None:
    """What an instruction copies, through all copies."""
    while place is not None and place.instruction.opcode in _MOVES:
        place = place.operand(0)
    return place


def _state(place: _Place | None) -> int | None:
    """Which element of a loop's state an instruction reads; None if it reads something else."""
    place = _moved(place)
    if place is None or place.instruction.opcode != "get-tuple-element":
        return None
    read = place.operand(0)
    is_state = read is not None and read.instruction.opcode == "parameter"
    return place.instruction.index if is_state else None


def _step(module: Module, body: Computation, number: int) -> int | None:
    """What a loop's body adds to an integer of its state; None if it does something else."""
    root = None if body.root is None else _Place(body, body.root)
    made = _moved(_element(module, root, number))
    if made is None or made.instruction.opcode not in ("add", "subtract"):
        return None
    left, right = made.operand(0), made.operand(1)
    if made.instruction.opcode == "add" and _state(right) == number:
        left, right = right, left
    step = _value(module, right) if _state(left) == number else None
    return -step if step and made.instruction.opcode == "subtract" else step


def _element(module: Module, place: _Place | None, number: int) -> _Place | None:
    """What an element of a tuple is; of a loop's state only what no trip changes."""
    place = _moved(place)
    if place is None:
        return None
    computation, instruction = place
    if instruction.opcode == "tuple":
        return place.operand(number)
    if instruction.opcode == "while":
        body = _called(module, instruction, "body")
        kept = body is not None and _is_kept(module, body, number)
        return _element(module, _initial(module, instruction), number) if kept else None
    callers = module.callers.get(computation.name, ())
    if instruction.opcode != "parameter" or len(callers) != 1:
        return None
    return _element(module, _Place(*callers[0]), number)


def _is_kept(module: Module, body: Computation, number: int) -> bool:
    """Whether a loop's body hands on an element of its state as it is."""
    root = _moved(None if body.root is None else _Place(body, body.root))
    if root is None or root.instruction.opcode != "tuple":
        return False
    return _state(root.operand(number)) == number


def _value(module: Module, place: _Place | None) -> int | None:
    """The integer that an instruction holds in every run; None if that is not known."""
    place = _moved(place)
    if place is None:
        return None
    instruction = place.instruction
    if instruction.opcode == "constant":
        is_integer = instruction.shapes[0].dtype[0] in "su" and not instruction.shapes[0].dims
        return int(instruction.text) if is_integer else None
    if instruction.opcode == "get-tuple-element":
        return _value(module, _element(module, place.operand(0), instruction.index))
    return None
