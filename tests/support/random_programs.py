"""Random JAX programs: a small tree of steps that hypothesis draws and shrinks, and its function.

Each step names an ingredient (`INGREDIENTS`, filled by `random_ops` and `random_flow`) and holds
a number that says which variant and which operands it takes: every list of steps is a program, and
smaller numbers make a simpler one.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from jax import lax

Steps = tuple["Step", ...]
Fn = Callable[..., Any]

SETTINGS = hypothesis.settings(
    derandomize=True,
    database=None,
    deadline=None,
    phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],
    suppress_health_check=list(hypothesis.HealthCheck),
)
"""The same programs in every run."""
SHAPES = ((4, 4), (3, 4), (2, 3, 4), (4,), ())
OPERANDS = {"x": (3, 4), "y": (3, 4), "w": (4, 4), "u": (4, 4), "z": (2, 3, 4), "v": (4,)}
"""The shapes of the arguments of an operation, by their names; `Scope.operand` has others."""


@dataclasses.dataclass(frozen=True)
class Step:
    """One ingredient, the number it chooses by, and the steps of its bodies."""

    name: str
    number: int = 0
    bodies: tuple[Steps, ...] = ()


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


@dataclasses.dataclass(frozen=True)
class Ingredient:
    """What a step of one name does to a `Scope`, its number of bodies, and how often it is drawn.

    Those with x64 are drawn in programs that have it on.
    """

    run: Callable[["Scope", "Picks", tuple[Steps, ...]], None]
    bodies: int = 0
    weight: int = 2
    x64: bool = False


INGREDIENTS: dict[str, Ingredient] = {}


def ingredient(bodies: int = 0, weight: int = 2) -> Any:
    """Registers a function `(scope, picks, bodies)` under its name."""

    def register(fn: Any) -> Any:
        INGREDIENTS[fn.__name__] = Ingredient(fn, bodies, weight)
        return fn

    return register


def operations(name: str, weight: int, *fns: Fn, x64: bool = False) -> None:
    """Registers functions of operands, which their parameters' names choose, as one ingredient."""

    def run(scope: Scope, picks: Picks, _: Any) -> None:
        fn, shape = picks.of(fns), picks.of(SHAPES)
        given = inspect.signature(fn).parameters.values()
        names = [p.name for p in given if p.default is p.empty]
        for out in jax.tree.leaves(fn(*[scope.operand(name, picks, shape) for name in names])):
            scope.add(out)

    INGREDIENTS[name] = Ingredient(run, 0, weight, x64)


MOST_STEPS = (5, 3, 2, 2)
"""Of a function, and of bodies by their depth."""


@functools.cache
def _steps(depth: int, x64: bool) -> st.SearchStrategy[Steps]:
    innermost = depth == len(MOST_STEPS) - 1
    names = [
        name
        for name, what in sorted(INGREDIENTS.items(), key=lambda item: item[1].bodies)
        for _ in range(what.weight)
        if not (innermost and what.bodies) and (x64 or not what.x64)
    ]

    def step(name: str) -> st.SearchStrategy[Step]:
        bodies = [_steps(depth + 1, x64) for _ in range(INGREDIENTS[name].bodies)]
        return st.builds(Step, st.just(name), st.integers(0, 2**24 - 1), st.tuples(*bodies))

    drawn = st.sampled_from(names).flatmap(step)
    return st.lists(drawn, min_size=1, max_size=MOST_STEPS[depth]).map(tuple)


def programs(x64: bool = False) -> st.SearchStrategy[Program]:
    """The programs as a strategy."""
    helpers = st.lists(_steps(len(MOST_STEPS) - 1, x64), max_size=2).map(tuple)
    return st.builds(Program, _steps(0, x64), helpers, st.integers(0, 63), st.just(x64))


def numbered(strategy: st.SearchStrategy[Any], count: int, seed: int = 0) -> list[Any]:
    """The first examples that hypothesis draws, the same ones in every run of one release of it."""
    found: list[Any] = []

    @hypothesis.seed(seed)
    @hypothesis.settings(SETTINGS, derandomize=False, max_examples=count)
    @hypothesis.given(strategy)
    def collect(example: Any) -> None:
        found.append(example)

    collect()
    return found


# ---------------------------------------------------------------- running


class Picks:
    """The choices that a step's number stands for: the remainders of divisions."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __call__(self, below: int) -> int:
        self.number, found = divmod(self.number, below)
        return found

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
        log: where effects report to; None where they are not allowed.
    """

    floats: list[Any]
    ints: list[Any]
    bools: list[Any]
    keys: list[Any]
    kept: list[Any] = dataclasses.field(default_factory=list)
    helpers: Sequence[Fn] = ()
    log: list[Any] | None = None

    def float(self, picks: Picks, shape: Any = None) -> Any:
        """One of the float32 values, brought to a shape."""
        x = self.floats[-1 - picks(len(self.floats))]
        return x if shape is None else fit(x, shape)

    def int(self, picks: Picks) -> Any:
        """One of the vectors of four integers between 0 and 3."""
        return self.ints[-1 - picks(len(self.ints))]

    def operand(self, name: str, picks: Picks, shape: Any) -> Any:
        """What an operation's argument of a name is."""
        match name:
            case "ids":
                return self.int(picks)
            case "key":
                key, other = jax.random.split(self.keys[-1])
                self.keys.append(key)
                return other
            case "d":
                found = [x for x in self.kept if x.dtype == jnp.float64 and x.shape == (3, 4)]
                return found[-1] if found else self.float(picks, (3, 4)).astype(jnp.float64)
            case "a":
                return unit(self.float(picks, shape))
            case "b":
                return self.float(picks, shape)
            case "m":  # of two or three dimensions
                return unit(self.float(picks, shape if len(shape) > 1 else (3, 4)))
        return self.float(picks, OPERANDS[name])

    def add(self, x: Any) -> None:
        """Keeps a result where later steps find it."""
        if x.dtype == jnp.float32 and x.size:
            self.floats.append(x)
        elif x.dtype in (jnp.int32, jnp.int64) and x.shape == (4,):
            self.ints.append(lax.convert_element_type(x, jnp.int32))
        elif x.dtype == bool and not x.shape:
            self.bools.append(x)
        else:
            self.kept.append(x)

    def inner(self, *floats: Any) -> "Scope":
        """The scope of a body: what it is given, and all that stands around it."""
        lists = [*self.floats, *floats], list(self.ints), list(self.bools), list(self.keys)
        return Scope(*lists, helpers=self.helpers)

    def run(self, steps: Steps) -> Any:
        """The newest float32 value after some steps."""
        for step in steps:
            INGREDIENTS[step.name].run(self, Picks(step.number), step.bodies)
        return self.floats[-1]


def alone(x: Any, ids: Any, helpers: Sequence[Fn]) -> Scope:
    """The scope of a function that sees its arguments alone."""
    keys = [jax.random.fold_in(jax.random.key(3), ids[0])]
    return Scope([x], [ids], [jnp.sum(x) > 0], keys, helpers=helpers)


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


def build(program: Program) -> tuple[Fn, list[Any]]:
    """The function of a program, and the log into which its effects report."""
    log: list[Any] = []
    helpers: list[Fn] = []
    for steps in program.helpers:
        before = tuple(helpers)
        called = lambda x, ids, steps=steps, before=before: alone(x, ids, before).run(steps)  # noqa: E731
        helpers.append(jax.jit(called))

    def fn(params: Any, others: Any) -> Any:
        scope = Scope(
            [params["b"], *params["x"], params["w"]],
            [others["ids"]],
            [others["flag"]],
            [others["key"]],
            [others["low"], *([others["wide"]] if "wide" in others else [])],
            helpers,
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
