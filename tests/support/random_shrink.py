"""Making a random program that fails smaller, by leaving out what can be left out."""

import dataclasses
from collections.abc import Callable, Iterator

from tests.support.random_programs import Program, Steps


def smaller(program: Program) -> Iterator[Program]:
    """Simpler programs near one, simplest first."""
    for steps in _smaller(program.steps):
        yield dataclasses.replace(program, steps=steps)
    if program.helpers:
        yield dataclasses.replace(program, helpers=program.helpers[:-1])
    for at, helper in enumerate(program.helpers):
        for steps in _smaller(helper):
            helpers = (*program.helpers[:at], steps, *program.helpers[at + 1 :])
            yield dataclasses.replace(program, helpers=helpers)
    if program.x64:
        yield dataclasses.replace(program, x64=False)
    if program.seed:
        yield dataclasses.replace(program, seed=0)


def _smaller(steps: Steps) -> Iterator[Steps]:
    for at, step in enumerate(steps):
        before, after = steps[:at], steps[at + 1 :]
        if len(steps) > 1:
            yield before + after
        for body in step.bodies:
            yield before + body + after
        for k, body in enumerate(step.bodies):
            for inner in _smaller(body):
                bodies = (*step.bodies[:k], inner, *step.bodies[k + 1 :])
                yield (*before, dataclasses.replace(step, bodies=bodies), *after)
        for k, number in enumerate(step.numbers):
            if number:
                numbers = (*step.numbers[:k], 0, *step.numbers[k + 1 :])
                yield (*before, dataclasses.replace(step, numbers=numbers), *after)


def shrunk(program: Program, fails: Callable[[Program], bool], tries: int = 300) -> Program:
    """A simpler program that still fails, found by leaving out what can be left out."""
    found = True
    while found and tries > 0:
        found = False
        for candidate in smaller(program):
            tries -= 1
            if tries < 0:
                break
            if fails(candidate):
                program, found = candidate, True
                break
    return program
