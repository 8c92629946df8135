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
from flax import nnx

import precpass as pp
from precpass import testing


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


def of_modules() -> Any:
    model = Net(nnx.Rngs(0))
    return train, (model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param), X), {}


def of_references() -> Any:
    return accumulate, (jax.new_ref(jnp.ones(8)), X), {}


def of_donated_buffers() -> Any:
    return update, (jnp.eye(4) * 2, X), {"donate_argnums": 0}


KINDS: dict[str, Callable[[], Any]] = {
    "modules": of_modules,
    "references": of_references,
    "donated buffers": of_donated_buffers,
}


def content(args: Any) -> list[Any]:
    """The type and the bytes of all that is held; reading a buffer that was donated raises."""
    held: list[Any] = []
    for arg in args:
        if isinstance(arg, jax.Ref):
            held.append(arg[...])
        elif isinstance(arg, nnx.Module | nnx.Optimizer):
            held += jax.tree.leaves(nnx.split(arg)[1])
        else:
            held.append(arg)
    assert all(isinstance(x, jax.Array) for x in held)
    keys = [jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in held]
    arrays = [jax.random.key_data(x) if key else x for x, key in zip(held, keys, strict=True)]
    return [(x.dtype, np.asarray(x).tobytes()) for x in arrays]


def plan_of(fn: Any, args: Any, tmp_path: Any) -> Any:
    pp.inspect(fn)(*args).plan.save(tmp_path / "plan.json")
    return testing.assert_plan(fn, args, tmp_path / "plan.json")


Use = Callable[[Any, Any, Any], Any]
POLICIES = ["AlwaysF32", "AutoMixedBf16"]
# every public function that is given a function and its arguments, and each part of one
LEAVES_THEM: dict[str, Use] = {
    "auto_mixed: lower": lambda f, args, _: pp.auto_mixed(f).lower(*args).compile(),
    "auto_mixed: trace": lambda f, args, _: pp.auto_mixed(f).trace(*args),
    "auto_mixed: eval_shape": lambda f, args, _: pp.auto_mixed(f).eval_shape(*args),
    "inspect": lambda f, args, _: pp.inspect(f)(*args).diff(),
    "explain": lambda f, args, _: str(pp.explain(f)(*args)),
    "between": lambda f, args, _: pp.between(
        *(pp.inspect(f, policy)(*args).plan for policy in POLICIES)
    ),
    "compare": lambda f, args, _: pp.compare(f, POLICIES, rounds=2)(*args),
    "profile": lambda f, args, _: pp.profile(f, POLICIES, rounds=2)(*args),
    "audit": lambda f, args, _: pp.audit(f)(*args),
    "bisect": lambda f, args, _: pp.bisect(f, "AutoMixedBf16", lambda out: False)(*args),
    "monitor: init": lambda f, args, _: pp.monitor(f, every=2).init(*args),
    "cast_floating": lambda f, args, _: pp.cast_floating(args, "bf16"),
    "calibrate": lambda f, args, _: pp.calibrate(f, "AutoMixed", [args, args]),
    "testing.assert_precision": lambda f, args, _: testing.assert_precision(
        f, args, {"dot_general": "bf16"}
    ),
    "testing.assert_plan": plan_of,
}
# calls of the function itself: it updates and donates what it does when it is called
CALLS_IT: dict[str, Use] = {
    "auto_mixed": lambda f, args, _: pp.auto_mixed(f)(*args),
    "monitor": lambda f, args, _: pp.monitor(f)(*args),
    "with_fallback": lambda f, args, _: pp.with_fallback(f, ("bf16", "f32"))(*args),
    "scaled_value_and_grad": lambda f, args, _: pp.scaled_value_and_grad(
        lambda *xs: f(*xs)[1], argnums=0
    )(pp.StaticLossScale(2.0), *args),
}
# given arrays and pure functions of them, or nothing of a user's program at all
OTHERS = {
    *(
        "Custom",
        "all_finite",
        "keep",
        "least_squares",
        "master_copies",
        "scaled_optimizer",
        "skip_nonfinite",
        "solve",
    ),
    *("use_policy",),
}


def test_every_public_function_is_here():
    names = {*pp.__all__, "inspect", "bisect", "profile"}
    public = {name for name in names if inspect.isfunction(getattr(pp, name))}
    assert (
        public
        == {name.partition(":")[0] for name in (*LEAVES_THEM, *CALLS_IT)}
        - {
            "testing.assert_precision",
            "testing.assert_plan",
        }
        | OTHERS
    )
    of_testing = {name for name in testing.__all__ if name.startswith("assert_")}
    assert {f"testing.{name}" for name in of_testing} <= LEAVES_THEM.keys()


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


@pytest.mark.parametrize("name", CALLS_IT)
def test_what_calls_the_function_says_that_it_updates(name: str, tmp_path: Any):
    first = inspect.getdoc(getattr(pp, name)).partition("\n\n")[0]
    assert "update" in first, first
    for kind in KINDS:
        fn, args, options = KINDS[kind]()
        if kind == "modules" and name in ("with_fallback", "scaled_value_and_grad"):
            continue  # one refuses modules, and the gradient of the other is of arrays
        if name == "scaled_value_and_grad" and kind == "references":
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", pp.PrecisionWarning)
            mixed = fn if name == "with_fallback" else pp.auto_mixed(fn, **options)
            before = content(args)
            CALLS_IT[name](mixed, args, tmp_path)
        if kind != "donated buffers":
            assert content(args) != before, kind


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


def test_a_calibration_of_modules_is_that_of_each_batch():
    """The second batch is seen by the model of the first, which has not been trained meanwhile."""
    model, optimizer = of_modules()[1][:2]
    twice = pp.calibrate(train, "AutoMixed", [(model, optimizer, X), (model, optimizer, X)])
    once = pp.calibrate(train, "AutoMixed", [(model, optimizer, X)])
    assert twice == once
