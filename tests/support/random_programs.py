"""Random JAX programs: a small tree that is drawn, printed, rebuilt from its print, and run.

A program is a list of `Step`s. Each step names an ingredient (`INGREDIENTS`, filled by
`random_ops` and `random_flow`) and holds the numbers by which it chooses its operands and
its variant, each read modulo the number of choices: so every list of steps is a program, and
a shorter one or smaller numbers make a simpler one.
"""

import contextlib
import dataclasses
import functools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from jax import lax

Steps = tuple["Step", ...]

NUMBERS = 64
LOW = (jnp.bfloat16, jnp.float16)
SHAPES = ((4, 4), (3, 4), (2, 3, 4), (4,), ())


@dataclasses.dataclass(frozen=True)
class Step:
    """One ingredient, the numbers it chooses by, and the steps of its bodies."""

    name: str
    numbers: tuple[int, ...] = ()
    bodies: tuple[Steps, ...] = ()

    def __repr__(self) -> str:
        given = [repr(self.name)]
        if self.numbers or self.bodies:
            given.append(repr(self.numbers))
        if self.bodies:
            given.append(repr(self.bodies))
        return f"Step({', '.join(given)})"


@dataclasses.dataclass(frozen=True)
class Program:
    """A function of a dict of arrays, as data.

    Attributes:
        steps: the function's body.
        helpers: functions under `jax.jit` that steps at any depth call; each may call those
            before it.
        seed: of the arguments' values.
        x64: whether it runs with x64 on, and has float64 arguments.
    """

    steps: Steps
    helpers: tuple[Steps, ...] = ()
    seed: int = 0
    x64: bool = False

    def names(self) -> Iterator[str]:
        """The ingredients, those of bodies and helpers included."""
        stack = [*self.steps, *(s for helper in self.helpers for s in helper)]
        while stack:
            step = stack.pop()
            yield step.name
            stack.extend(s for body in step.bodies for s in body)

    @contextlib.contextmanager
    def context(self) -> Iterator[None]:
        """The configuration under which it is traced and run."""
        with jax.enable_x64(True) if self.x64 else contextlib.nullcontext():
            yield

    def args(self) -> tuple[Any, ...]:
        """Its arguments: `(differentiable, others)`."""
        return _args(self.seed, self.x64)


@functools.cache
def _args(seed: int, x64: bool) -> tuple[Any, ...]:
    rng = np.random.default_rng(seed)

    def floats(*shape: int) -> Any:
        return jnp.asarray(rng.standard_normal(shape).astype(np.float32))

    params = {"w": floats(4, 4) * 0.5, "x": [floats(3, 4), floats(2, 3, 4)], "b": floats(4)}
    others = {
        "ids": jnp.asarray(rng.integers(0, 4, (4,)), jnp.int32),
        "key": jax.random.key(seed),
        "low": floats(3, 4).astype(jnp.bfloat16),
        "weak": 0.5 + seed % 3,
        "n": seed % 5,
        "none": None,
        "flag": jnp.asarray(bool(seed % 2)),
        "empty": jnp.zeros((4, 0)),
    }
    if x64:
        others["wide"] = jnp.asarray(rng.standard_normal((3, 4)), jnp.float64)
    return params, others


# ---------------------------------------------------------------- drawing


class Chooser(Protocol):
    """Where choices come from: hypothesis, which shrinks them, or a seeded generator."""

    def number(self, below: int) -> int: ...


class _Drawn:
    def __init__(self, draw: Any) -> None:
        self.draw = draw

    def number(self, below: int) -> int:
        return self.draw(st.integers(0, below - 1))


class _Seeded:
    def __init__(self, seed: str) -> None:
        self.rng = random.Random(seed)

    def number(self, below: int) -> int:
        return self.rng.randrange(below)


@dataclasses.dataclass(frozen=True)
class Ingredient:
    """What a step of one name does.

    Attributes:
        run: acts on a `Scope`.
        bodies: how many bodies it takes.
        weight: how often it is drawn.
        x64: whether it needs x64.
    """

    run: Callable[["Scope", "Picks", tuple[Steps, ...]], None]
    bodies: int = 0
    weight: int = 2
    x64: bool = False


INGREDIENTS: dict[str, Ingredient] = {}


def ingredient(bodies: int = 0, weight: int = 2, x64: bool = False) -> Any:
    """Registers a function `(scope, picks, bodies)` under its name."""

    def register(fn: Any) -> Any:
        INGREDIENTS[fn.__name__] = Ingredient(fn, bodies, weight, x64)
        return fn

    return register


@dataclasses.dataclass(frozen=True)
class Size:
    """How large a program may become: each number is the most that is drawn.

    Attributes:
        steps: of the function.
        outer, inner: of a body at the top, and of one further in.
        depth: of bodies in bodies.
        helpers: functions under `jax.jit`.
    """

    steps: int = 5
    outer: int = 3
    inner: int = 2
    depth: int = 3
    helpers: int = 2


LARGE, SMALL = Size(), Size(3, 2, 1, 2, 1)


def _steps(choose: Chooser, size: Size, depth: int, x64: bool) -> Steps:
    names = [
        name
        for name, what in sorted(INGREDIENTS.items())
        for _ in range(what.weight)
        if (depth < size.depth or not what.bodies) and (x64 or not what.x64)
    ]
    most = (size.steps, size.outer)[depth] if depth < 2 else size.inner
    return tuple(
        _step(choose, size, names[choose.number(len(names))], depth, x64)
        for _ in range(choose.number(most) + 1)
    )


def _step(choose: Chooser, size: Size, name: str, depth: int, x64: bool) -> Step:
    numbers = tuple(choose.number(NUMBERS) for _ in range(4))
    bodies = tuple(_steps(choose, size, depth + 1, x64) for _ in range(INGREDIENTS[name].bodies))
    return Step(name, numbers, bodies)


def _program(choose: Chooser, size: Size, x64: bool) -> Program:
    helpers = tuple(_steps(choose, size, 2, x64) for _ in range(choose.number(size.helpers + 1)))
    return Program(_steps(choose, size, 0, x64), helpers, choose.number(NUMBERS), x64)


@st.composite
def programs(draw: Any, size: Size = LARGE, x64: bool = False) -> Program:
    """The programs as a strategy."""
    return _program(_Drawn(draw), size, x64)


def seeded_program(seed: int, index: int) -> Program:
    """The program number `index` of a sweep; one in eight has x64 on, one in 20 is large."""
    size = LARGE if index % 20 == 0 else SMALL
    return _program(_Seeded(f"{seed}/{index}"), size, x64=index % 8 == 7)


# ---------------------------------------------------------------- running


class Picks:
    """The numbers of a step, read in order; 0 once they are used up."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self.numbers = iter(numbers)

    def __call__(self, below: int) -> int:
        return next(self.numbers, 0) % below

    def of(self, choices: Sequence[Any]) -> Any:
        return choices[self(len(choices))]


@dataclasses.dataclass
class Scope:
    """The values that the steps of one body may use, newest last.

    Attributes:
        floats: float32 arrays of any shape.
        ints, bools, keys: as they say.
        kept: values that leave as they are: low, complex, float64, empty ones.
        helpers: the functions under `jax.jit` that may be called here.
        log: where effects report to.
        effects: whether effects are allowed here.
    """

    floats: list[Any]
    ints: list[Any]
    bools: list[Any]
    keys: list[Any]
    kept: list[Any]
    helpers: Sequence[Callable[..., Any]] = ()
    log: list[Any] | None = None
    effects: bool = True

    def float(self, picks: Picks, shape: Any = None) -> Any:
        """One of the float32 values, brought to a shape."""
        x = self.floats[-1 - picks(len(self.floats))]
        return x if shape is None else fit(x, shape)

    def int(self, picks: Picks) -> Any:
        """One of the vectors of four integers between 0 and 3."""
        return self.ints[-1 - picks(len(self.ints))]

    def inner(self, *floats: Any, effects: bool = True) -> "Scope":
        """The scope of a body: what it is given, and all that stands around it."""
        return Scope(
            [*self.floats, *floats],
            list(self.ints),
            list(self.bools),
            list(self.keys),
            [],
            self.helpers,
            self.log,
            self.effects and effects,
        )

    def run(self, steps: Steps) -> Any:
        """The newest float32 value after some steps."""
        for step in steps:
            INGREDIENTS[step.name].run(self, Picks(step.numbers), step.bodies)
        return self.floats[-1]


def alone(x: Any, ids: Any, helpers: Sequence[Callable[..., Any]]) -> Scope:
    """The scope of a function that sees its arguments alone, and reports nothing."""
    keys = [jax.random.fold_in(jax.random.key(3), ids[0])]
    return Scope([x], [ids], [jnp.sum(x) > 0], keys, [], helpers, effects=False)


def fit(x: Any, shape: tuple[int, ...]) -> Any:
    """A float32 array in another shape: repeated or cut, element by element."""
    if x.shape == shape:
        return x
    size = int(np.prod(shape, dtype=int))
    flat = lax.reshape(x, (x.size,))
    if 0 < x.size < size:
        flat = lax.concatenate([flat] * -(-size // x.size), 0)
    return lax.reshape(lax.slice(flat, (0,), (size,)), shape)


def unit(x: Any) -> Any:
    """The same values between -1 and 1, so that nothing grows without bound."""
    return lax.tanh(x)


def build(program: Program) -> tuple[Callable[..., Any], list[Any]]:
    """The function of a program, and the log into which its effects report."""
    log: list[Any] = []

    def helper(steps: Steps, before: Sequence[Any]) -> Callable[..., Any]:
        def called(x: Any, ids: Any) -> Any:
            return alone(x, ids, before).run(steps)

        return jax.jit(called)

    helpers: list[Any] = []
    for steps in program.helpers:
        helpers.append(helper(steps, tuple(helpers)))

    def fn(params: Any, others: Any) -> Any:
        floats = [params["b"], *params["x"], params["w"]]
        scope = Scope(
            floats,
            [others["ids"]],
            [others["flag"]],
            [others["key"]],
            [others["low"], *([others["wide"]] if "wide" in others else [])],
            tuple(helpers),
            log,
        )
        out = scope.run(program.steps)
        loss = jnp.mean(lax.square(out)) * others["weak"]
        for x in scope.floats[-3:]:
            loss = loss + jnp.sum(x) * 0.1
        rest = {
            "kept": scope.kept[-3:],
            "ints": (scope.ints[-1], [scope.bools[-1], others["n"] + 1]),
            "key": scope.keys[-1],
            "last": (out, others["none"], others["weak"] * 2),
            "empty": others["empty"] * 2,
        }
        return loss, rest

    return fn, log
