"""What is the user's stays as it was: modules, optimizers, references, donated buffers."""

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import errors, nnx

import precpass as pp
from precpass import testing
from tests.support.public import public_names


@pytest.fixture(autouse=True)
def optax_promotes_types():
    with jax.numpy_dtype_promotion("standard"):
        yield


X = jnp.linspace(-1.0, 1.0, 32).reshape(8, 4)


class Net(nnx.Module):
    """It has parameters, statistics, a key and a counter."""

    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x: Any) -> Any:
        self.calls[...] += 1
        return self.dropout(self.norm(self.linear(x)))


def train(model: Net, optimizer: nnx.Optimizer, x: Any) -> Any:
    value, gradient = nnx.value_and_grad(lambda m: (m(x) ** 2).mean())(model)
    optimizer.update(model, gradient)
    return value


def accumulate(total: Any, x: Any) -> Any:
    total[...] = total[...] + (x @ x.T) @ total[...]
    return (x @ x.T).sum()


def update(w: Any, x: Any) -> Any:
    gradient = x.T @ jnp.tanh(x @ w)
    return w - 0.1 * gradient, (gradient**2).sum()


def forward(model: Net, x: Any) -> Any:
    return (model(x) ** 2).mean()


def of_module() -> Any:
    return forward, (Net(nnx.Rngs(0)), X), {}


def of_modules() -> Any:
    model = Net(nnx.Rngs(0))
    return train, (model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param), X), {}


def of_references() -> Any:
    return accumulate, (jax.new_ref(jnp.ones(8)), X), {}


def of_donated_buffers() -> Any:
    return update, (jnp.eye(4) * 2, X), {"donate_argnums": 0}


def of_buffers_that_jit_donates() -> Any:
    return jax.jit(update, donate_argnums=0), (jnp.eye(4) * 2, X), {}


KINDS: dict[str, Callable[[], Any]] = {
    "a module": of_module,
    "a module and its optimizer": of_modules,
    "references": of_references,
    "donated buffers": of_donated_buffers,
    "buffers that jax.jit donates": of_buffers_that_jit_donates,
}
HELD = [kind for kind in KINDS if "buffers" not in kind]


def content(args: Any) -> list[Any]:
    """The type and the bytes of all that is held; reading a buffer that was donated raises."""
    held: list[Any] = []
    structure: list[Any] = []
    for arg in args:
        if isinstance(arg, jax.Ref):
            held.append(arg[...])
        elif isinstance(arg, nnx.Module | nnx.Optimizer):
            graphdef, state = nnx.split(arg)
            structure.append(graphdef)
            held += jax.tree.leaves(state)
        else:
            held.append(arg)
    assert all(isinstance(x, jax.Array) for x in held)
    keys = [jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in held]
    arrays = [jax.random.key_data(x) if key else x for x, key in zip(held, keys, strict=True)]
    return [structure, *((x.dtype, np.asarray(x).tobytes()) for x in arrays)]


def plan_of(fn: Any, args: Any, tmp_path: Any, use: Any = testing.assert_plan) -> Any:
    pp.inspect(fn)(*args).plan.save(tmp_path / "plan.json")
    return use(fn, args, tmp_path / "plan.json")


def scaled(f: Any, args: Any) -> Any:
    """The loss and its gradient with respect to a factor in front of it."""

    def loss(factor: Any, *xs: Any) -> Any:
        out = f(*xs)
        return factor * (out[1] if isinstance(out, tuple) else out)

    return pp.loss_scale.scaled_value_and_grad(loss)(
        pp.loss_scale.StaticLossScale(2.0), jnp.float32(1.0), *args
    )


def stepped(f: Any, args: Any) -> Any:
    def step(state: Any, *xs: Any) -> Any:
        out = f(*xs)
        return state / 2, jnp.abs(out[1] if isinstance(out, tuple) else out)

    return pp.numerics.Ladder.create(("bf16", "f32"), jnp.ones(3)).step(step, *args)


Use = Callable[[Any, Any, Any], Any]
POLICIES = ["AlwaysF32", "AutoMixedBf16"]
# Every public function that is given a function and its arguments, and each part of one.
LEAVES_THEM: dict[str, Use] = {
    "Mixed.lower": lambda f, args, _: pp.auto_mixed(f).lower(*args).compile(),
    "Mixed.trace": lambda f, args, _: pp.auto_mixed(f).trace(*args),
    "Mixed.eval_shape": lambda f, args, _: pp.auto_mixed(f).eval_shape(*args),
    "inspect": lambda f, args, _: pp.inspect(f)(*args).diff(),
    "explain": lambda f, args, _: str(pp.explain(f)(*args)),
    "between": lambda f, args, _: pp.report.between(
        *(pp.inspect(f, policy)(*args).plan for policy in POLICIES)
    ),
    "compare": lambda f, args, _: pp.compare(f, POLICIES, rounds=1)(*args),
    "audit": lambda f, args, _: pp.audit(f)(*args),
    "bisect": lambda f, args, _: pp.bisect(f, "AutoMixedBf16", lambda out: False)(*args),
    "monitor: init": lambda f, args, _: pp.monitor(f, every=2).init(*args),
    "cast_floating": lambda f, args, _: pp.cast_floating(args, "bf16"),
    "quantized": lambda f, args, _: pp.quant.quantized(f, argnums=len(args) - 1)(*args),
    "calibrate": lambda f, args, _: pp.numerics.calibrate(f, "AutoMixed", [args, args]),
    "testing.assert_precision": lambda f, args, _: testing.assert_precision(
        f, args, {"dot_general": "bf16"}
    ),
    "testing.precision_problems": lambda f, args, _: testing.precision_problems(
        f, args, {"dot_general": "bf16"}
    ),
    "testing.assert_plan": plan_of,
    "testing.plan_problems": lambda f, args, path: plan_of(f, args, path, testing.plan_problems),
}
# Calls of the function itself: it updates and donates what it does when it is called.
CALLS_IT: dict[str, Use] = {
    "auto_mixed": lambda f, args, _: pp.auto_mixed(f)(*args),
    "Mixed.__call__": lambda f, args, _: pp.types.Mixed(f, None, {})(*args),
    "monitor": lambda f, args, _: pp.monitor(f)(*args),
    "monitor: every": lambda f, args, _: (monitored := pp.monitor(f, every=2))(
        monitored.init(*args), *args
    ),
    "with_fallback": lambda f, args, _: pp.with_fallback(f, ("bf16", "f32"))(*args),
    "scaled_value_and_grad": lambda f, args, _: scaled(f, args),
    "Ladder.step": lambda f, args, _: stepped(f, args),
}
# A module is refused: its state would be updated once for each rung, or under a derivative.
REFUSES_MODULES: dict[str, tuple[type[Exception], str]] = {
    "with_fallback": (TypeError, r"with_fallback was given a module .* nnx\.split"),
    "Ladder.step": (TypeError, r"Ladder\.step was given a module .* nnx\.split"),
    "scaled_value_and_grad": (errors.TraceContextError, "Cannot mutate"),
}
# Given trees of arrays, or a function of the caller's arrays; `f` is not called.
GIVEN_ARRAYS: dict[str, Callable[[Any], Any]] = {
    "all_finite": pp.loss_scale.all_finite,
    "skip_nonfinite": lambda tree: pp.loss_scale.skip_nonfinite(
        True, tree, jax.tree.map(jnp.copy, tree)
    ),
    "scaled_optimizer": lambda tree: (o := pp.loss_scale.scaled_optimizer(optax.adam(1e-2))).update(
        tree, o.init(tree), tree
    ),
    "master_copies": lambda tree: (o := pp.loss_scale.master_copies(optax.adam(1e-2))).update(
        tree, o.init(tree), tree
    ),
    "least_squares": lambda tree: pp.numerics.least_squares(
        lambda w, x: (x @ w["w"]).sum(0), tree, X
    ),
    "solve": lambda tree: pp.numerics.solve(tree["w"], X[:4]),
    "in_compute_dtype": lambda tree: pp.in_compute_dtype(lambda given: given["w"] * 2)(tree),
}
# These hold what they are given, a policy's parts or a check's function, and call nothing.
CALL_NOTHING = {
    *("Custom", "keep", "use_policy", "Mixed", "IllConditioned", "Predicate", "Rule"),
    *("IllConditioned.bound", "NonFinite.bound", "OutOfRange.bound", "Predicate.bound"),
    *("PrecisionPolicy.with_retypes", "PrecisionPolicy.with_rules"),
}


def takes_functions_or_arguments(member: Any, *, constructor: bool = False) -> bool:
    """Whether a parameter is a function, or (of a method) any number of arguments."""
    parameters = inspect.signature(member).parameters.values()
    stars = not constructor and any(p.kind is p.VAR_POSITIONAL for p in parameters)
    return stars or any("Callable" in str(p.annotation) or p.name == "fn" for p in parameters)


def public_functions() -> set[str]:
    """Every public function, and the methods and classes that take functions or arguments."""
    found = set[str]()
    for place, value in public_names().items():
        name = place if place.startswith("testing.") else place.rpartition(".")[2]
        if inspect.isfunction(value):
            found.add(name)
        elif inspect.isclass(value):
            if takes_functions_or_arguments(value.__init__, constructor=True):
                found.add(name)
            for attribute, method in inspect.getmembers(value, inspect.isroutine):
                own = attribute == "__call__" or not attribute.startswith("_")
                if own and inspect.isfunction(method) and takes_functions_or_arguments(method):
                    found.add(f"{name}.{attribute}")
    return found


def test_every_public_function_is_here():
    listed = {name.partition(":")[0] for name in (*LEAVES_THEM, *CALLS_IT)}
    assert public_functions() == listed | GIVEN_ARRAYS.keys() | CALL_NOTHING


@pytest.mark.release(keep=1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", LEAVES_THEM)
def test_arguments_are_left_as_they_were(name: str, kind: str, tmp_path: Any):
    fn, args, options = KINDS[kind]()
    before = content(args)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pp.PrecisionWarning)
        LEAVES_THEM[name](pp.auto_mixed(fn, **options), args, tmp_path)
    assert content(args) == before
    # and they are as good as new: the function itself runs on them
    jax.block_until_ready(pp.auto_mixed(fn, **options)(*args))


@pytest.mark.release(keep=1)
@pytest.mark.parametrize("name", GIVEN_ARRAYS)
@pytest.mark.parametrize("array", [jnp.asarray, np.asarray])
def test_trees_of_arrays_are_left_as_they_were(name: str, array: Any):
    tree = {"w": array(np.eye(4, dtype=np.float32) * 2)}
    GIVEN_ARRAYS[name](tree)
    assert list(tree) == ["w"]
    assert type(tree["w"]) is type(array(1.0))
    assert tree["w"].dtype == np.float32
    np.testing.assert_array_equal(tree["w"], np.eye(4) * 2)


@pytest.mark.parametrize("name", ["all_finite", "skip_nonfinite"])
def test_modules_given_as_trees_are_left_as_they_were(name: str):
    _, args, _ = of_modules()
    before = content(args)
    GIVEN_ARRAYS[name](nnx.state(args[0], nnx.Param))
    GIVEN_ARRAYS[name](nnx.state(args[1]).opt_state)
    assert content(args) == before


@pytest.mark.release(keep=1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CALLS_IT)
def test_what_calls_the_function_says_that_it_updates(name: str, kind: str, tmp_path: Any):
    places = {place.rpartition(".")[2]: value for place, value in public_names().items()}
    first, *parts = name.partition(":")[0].split(".")
    member = places[first]
    for part in parts:
        member = getattr(member, part)
    first = inspect.getdoc(member).partition("\n\n")[0]
    assert "update" in first, first
    fn, args, options = KINDS[kind]()
    mixed = pp.auto_mixed(fn, **options)
    before = content(args)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pp.PrecisionWarning)
        if name in REFUSES_MODULES and "module" in kind:
            error, match = REFUSES_MODULES[name]
            with pytest.raises(error, match=match):
                CALLS_IT[name](mixed, args, tmp_path)
            assert content(args) == before
            return
        CALLS_IT[name](mixed, args, tmp_path)
    if kind in HELD:
        assert content(args) != before
    else:  # what is not donated is there
        np.testing.assert_array_equal(args[1], X)


def test_arrays_that_are_no_modules_stay_too(tmp_path: Any):
    """Nothing that a function is given is written to, numpy's arrays among it."""
    w, x = np.eye(4, dtype=np.float32), np.asarray(X)
    before = w.copy(), x.copy()
    for use in LEAVES_THEM.values():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", pp.PrecisionWarning)
            use(update, (w, x), tmp_path)
    np.testing.assert_array_equal((w, x)[0], before[0])
    np.testing.assert_array_equal(x, before[1])


# ---------------------------------------------------------------- what is found is right, too


@pytest.mark.release
def test_a_monitor_begun_on_modules_and_references_goes_on():
    model, optimizer = of_modules()[1][:2]
    watched = pp.monitor(train, every=2)
    health = watched.init(model, optimizer, X)
    before = content((model,))
    for _ in range(3):
        value, health = watched(health, model, optimizer, X)
    assert jnp.isfinite(value) and int(model.calls[...]) == 3
    assert content((model,)) != before
    assert "2 of 3 calls" in health.summary()


def test_a_monitored_reference_is_updated_once():
    (fn, (total, x), _) = of_references()
    other = jax.new_ref(total[...])
    _, health = pp.monitor(fn)(total, x)
    pp.auto_mixed(fn)(other, x)
    np.testing.assert_array_equal(total[...], other[...])
    assert not health.born()


def test_a_comparison_of_references_sees_each_run_begin_anew():
    fn, args, _ = of_references()
    found = pp.compare(fn, ["AlwaysF32", "AutoMixedBf16"], rounds=2)(*args)
    wide, low = found.rows
    assert wide.errors.relative < 1e-6
    assert 1e-4 < low.errors.relative < 2e-2
    assert low.counts.low == low.counts.products > 0


@pytest.mark.release
def test_a_calibration_of_modules_is_that_of_each_batch():
    """The second batch is seen by the model of the first, which has not been trained meanwhile."""
    model, optimizer = of_modules()[1][:2]
    twice = pp.numerics.calibrate(
        train, "AutoMixed", [(model, optimizer, X), (model, optimizer, X)]
    )
    once = pp.numerics.calibrate(train, "AutoMixed", [(model, optimizer, X)])
    assert twice == once
