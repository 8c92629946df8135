"""The programs of a function are found again, and go when it goes (precpass/jit/program.py)."""

import gc
import weakref
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P

import precpass as pp
from tests.support.jaxprs import product_dtypes, touches_low, walk
from tests.support.passes import quiet
from tests.support.values import normal, rel_error

X = jnp.asarray(normal(0, 8, 8))


def counted():
    """A plain function and the list that it appends to when it is traced."""
    traces = []

    def fn(x):
        traces.append(x.shape)
        return jnp.tanh(x @ x).sum()

    return fn, traces


# ---------------------------------------------------------------- found again

USES = {
    "call": lambda f: pp.auto_mixed(f)(X),
    "policy in two forms": lambda f: (
        pp.auto_mixed(f, policy="AutoMixedF16")(X),
        pp.auto_mixed(f, policy=pp.AutoMixedF16)(X),
        pp.auto_mixed(policy="c=f16")(f)(X),
    ),
    "options": lambda f: pp.auto_mixed(f, static_argnums=(), keep_unused=True)(X),
    "shardings": lambda f: pp.auto_mixed(
        f, in_shardings=NamedSharding(jax.make_mesh((1,), ("x",)), P())
    )(X),
    "lower": lambda f: pp.auto_mixed(f).lower(X),
    "eval_shape": lambda f: pp.auto_mixed(f).eval_shape(X),
    "grad": lambda f: jax.grad(pp.auto_mixed(f))(X),
    "inspect": lambda f: pp.inspect(f)(X),
    "monitor": lambda f: pp.monitor(f)(X),
    "a mixed function again": lambda f: pp.auto_mixed(pp.auto_mixed(f), policy="AutoMixed")(X),
}


@pytest.mark.release(keep=3)
@pytest.mark.parametrize("use", USES)
def test_a_function_is_traced_once_however_often_it_is_wrapped(use):
    fn, traces = counted()
    for _ in range(5):
        USES[use](fn)
    assert len(traces) == 1


def test_and_compiled_once():
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: compiled.append(event) if "backend_compile" in event else None
    )
    fn, _ = counted()
    pp.auto_mixed(fn)(X)
    pp.monitor(fn, every=2).init(X)
    compiled.clear()
    for _ in range(3):
        pp.auto_mixed(fn)(X)
    assert compiled == []
    pp.auto_mixed(fn, policy="AutoMixed")(X)
    assert len(compiled) == 1, "the listener sees what is compiled"


def test_the_policy_and_the_region_of_a_call_count_as_before():
    fn, traces = counted()

    def dtypes(policy=None):
        return product_dtypes(pp.auto_mixed(fn, policy=policy).trace(X).jaxpr)

    for _ in range(2):
        assert (dtypes(), dtypes("AutoMixed")) == (["bfloat16"], ["float16"])
        for region, dtype in (
            (pp.use_policy("AutoMixed"), "float16"),
            (pp.use_policy("AlwaysF32"), "float32"),
            (pp.use_policy(None), "float32"),
            (pp.keep("f32"), "float32"),
        ):
            with quiet(), region:
                assert dtypes() == [dtype]
    assert len(traces) <= 6


def test_rules_that_differ_in_their_evidence_alone_keep_their_own():
    fn, _ = counted()
    for text in ("seen once", "seen twice"):
        rule = pp.Rule(primitive="dot_general", precision="f32", evidence=text)
        with quiet():
            plan = pp.inspect(fn, pp.AutoMixedBf16.with_rules(rule))(X).plan
        assert text in next(str(d.reason) for d in plan.walk() if "Rule" in str(d.reason))


def test_options_are_told_apart():
    seen = []

    def fn(x, n):
        seen.append(type(n))
        return (x @ x) * n

    for _ in range(2):
        pp.auto_mixed(fn)(X, 2)
        pp.auto_mixed(fn, static_argnums=1)(X, 2)
        pp.auto_mixed(fn, static_argnames="n")(X, n=2)
    assert sorted(cls is int for cls in seen) == [False, True, True]


def test_donation_belongs_to_the_function_that_asked_for_it():
    fn = lambda x: x @ x + 1  # noqa: E731
    for donates in (False, True, False, True):
        x = jnp.ones((64, 64))
        pp.auto_mixed(fn, **({"donate_argnums": 0} if donates else {}))(x)
        assert x.is_deleted() == donates


def test_unhashable_options_are_taken_without_being_found_again():
    fn, traces = counted()
    options = {"compiler_options": {"xla_cpu_enable_fast_math": [False][0]}}
    for _ in range(2):
        pp.auto_mixed(fn, **options)(X)
    assert len(traces) == 1
    names = [np.array(["x"])]  # no option of jit's takes it
    with pytest.raises((TypeError, ValueError)):
        pp.auto_mixed(fn, static_argnames=names)(X)


def test_a_bound_method_is_that_of_its_object():
    """Each `model.apply` is an object of its own, for `jax.jit` too: no weights are mistaken."""

    class Model:
        def __init__(self, scale):
            self.scale = scale

        def apply(self, x):
            return (x @ x).sum() * self.scale

    one, two = Model(1.0), Model(2.0)
    for _ in range(2):
        ratio = pp.auto_mixed(two.apply)(X) / pp.auto_mixed(one.apply)(X)
        assert float(ratio) == pytest.approx(2.0)
    one.scale = 5.0
    assert float(pp.auto_mixed(one.apply)(X) / pp.auto_mixed(two.apply)(X)) == pytest.approx(2.5)


class Slots:
    __slots__ = ("traces",)

    def __init__(self):
        self.traces = 0

    def __call__(self, x):
        self.traces += 1
        return (x @ x).sum()


class RefusesEquality:
    def __init__(self):
        self.traces = 0

    def __call__(self, x):
        self.traces += 1
        return (x @ x).sum()

    def __eq__(self, other):
        if isinstance(other, RefusesEquality):
            raise RuntimeError("never equal")
        return NotImplemented

    __hash__ = object.__hash__


def test_objects_that_are_called_are_found_by_identity():
    fn = RefusesEquality()
    for _ in range(3):
        pp.auto_mixed(fn)(X)
    assert fn.traces == 1


def test_an_object_without_weak_references_is_called_all_the_same():
    fn = Slots()
    for _ in range(3):
        assert rel_error(pp.auto_mixed(fn)(X), (X @ X).sum()) < 2e-2
    mixed, fn = pp.auto_mixed(fn), None
    gc.collect()
    assert rel_error(mixed(X), (X @ X).sum()) < 2e-2


def test_modules_and_static_leaves_are_found_again():
    traces = []

    def step(model, mode):
        traces.append(mode)
        model.count[...] += 1
        return model(X).sum()

    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    model.count = nnx.Variable(jnp.zeros(()))
    for _ in range(4):
        pp.auto_mixed(step)(model, "train")
    assert float(model.count[...]) == 4
    assert len(traces) <= 2  # one is of the call that meets the module
    seen = len(traces)
    for _ in range(2):
        pp.auto_mixed(step)(model, "train")
    assert len(traces) == seen


def test_clear_cache_forgets_what_all_of_a_function_share():
    fn, traces = counted()
    pp.auto_mixed(fn)(X)
    pp.auto_mixed(fn).clear_cache()
    pp.auto_mixed(fn)(X)
    assert len(traces) == 2


def test_the_lines_and_names_of_the_function_stay_jaxs():
    def loss_of_mine(weights):
        return (weights @ weights).sum()

    jaxpr = pp.auto_mixed(loss_of_mine).trace(X).jaxpr
    plain = jax.jit(loss_of_mine).trace(X).jaxpr
    one, other = (getattr(j, "jaxpr", j).debug_info for j in (jaxpr, plain))
    assert one.func_src_info == other.func_src_info
    assert one.arg_names == other.arg_names == ("weights",)
    assert "loss_of_mine" in pp.auto_mixed(loss_of_mine).lower(X).as_text()


# ---------------------------------------------------------------- and let go


@jax.custom_vjp
def custom(x, w):
    return x @ w


custom.defvjp(lambda x, w: (x @ w, (x, w)), lambda r, g: (g @ r[1].T, r[0].T @ g))

PROGRAMS = {
    "product": lambda x, w: x @ w,
    "custom jvp": lambda x, w: jax.nn.relu(x @ w),
    "custom jvp in a jit": lambda x, w: jax.jit(lambda x: jax.nn.relu(x @ w))(x),
    "custom vjp": custom,
    "loop": lambda x, w: lax.scan(lambda c, _: (jax.nn.silu(c @ w), None), x, length=2)[0],
    "branch": lambda x, w: lax.cond(x[0, 0] > 0, lambda x: x @ w, lambda x: x, x),
    "checkpoint": lambda x, w: jax.checkpoint(lambda x: jnp.tanh(x @ w))(x),
    "float64": lambda x, w: pp.keep("f64")(jnp.matmul)(x, w),
    "nested": lambda x, w: pp.auto_mixed(lambda x: x @ w, policy="AutoMixed")(x),
}
WAYS = {
    "call": lambda f: pp.auto_mixed(f)(X),
    "grad(auto)": lambda f: jax.grad(pp.auto_mixed(f))(X),
    "auto(grad)": lambda f: pp.auto_mixed(jax.grad(f))(X),
    "compiled": lambda f: pp.auto_mixed(f).lower(X).compile(),
    "inspect": lambda f: pp.inspect(f)(X).diff(),
    "explain": lambda f: str(pp.explain(f)(X)),
    "compare": lambda f: str(pp.compare(f, ["AlwaysF32", "AutoMixedBf16"], rounds=1)(X)),
    "audit": lambda f: str(pp.audit(f)(X)),
    "monitor": lambda f: pp.monitor(f)(X)[1].summary(),
    "monitor, at times": lambda f: pp.monitor(f, every=2).init(X),
    "calibrate": lambda f: pp.numerics.calibrate(f, "AutoMixed", [(X,)]),
    "fallback": lambda f: pp.with_fallback(f)(X),
}


def held_without_the_collector(way, program):
    """Whether an array that a function closes over outlives it while the collector is off."""

    def use(w):
        with quiet():
            WAYS[way](lambda x: PROGRAMS[program](x, w).sum())
        return weakref.ref(w)

    gc.disable()
    try:
        return use(jnp.asarray(normal(1, 8, 8)))() is not None
    finally:
        gc.enable()


@pytest.mark.release(keep=2)
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("way", ["call", "grad(auto)", "auto(grad)"])
def test_what_a_function_closes_over_goes_with_it(way, program):
    assert not held_without_the_collector(way, program)


@pytest.mark.release(keep=1)
@pytest.mark.parametrize("way", WAYS)
def test_whatever_was_done_with_it(way):
    for program in ("custom jvp", "loop"):
        assert not held_without_the_collector(way, program)


def test_as_under_jit_with_the_function_that_still_holds_it():
    """The other way round: the test above sees what is held."""

    def made(w):
        return pp.auto_mixed(lambda x: x @ w), weakref.ref(w)

    mixed, held = made(jnp.asarray(normal(1, 8, 8)))
    mixed(X)
    assert held() is not None
    assert any(map(touches_low, walk(mixed.trace(X).jaxpr)))
    del mixed
    assert held() is None


@pytest.mark.release
def test_a_residual_of_least_squares_goes_too():
    def fitted(data):
        t = np.linspace(0.0, 2.0, 50)
        # optimistix alone leaves tracers behind, which jax_check_tracer_leaks would report
        with jax.numpy_dtype_promotion("standard"), jax.check_tracer_leaks(False):
            pp.numerics.least_squares(lambda b, _: b[0] * t - data, np.array([1.0]))
        return weakref.ref(data)

    held = fitted(jnp.asarray(normal(1, 50)))
    gc.collect()
    assert held() is None


def test_programs_go_with_their_function():
    from precpass.jit import program as programs

    before = len(programs._known)
    fn, _ = counted()
    pp.auto_mixed(fn)(X)
    pp.auto_mixed(partial(fn))(X)
    assert len(programs._known) == before + 1  # no one can ask for that of the partial again
    del fn
    gc.collect()
    assert len(programs._known) <= before


def test_a_search_among_policies_leaves_no_more_than_the_last_behind():
    from precpass.jit import program as programs

    fn, traces = counted()
    for line in range(1, 100):
        rule = pp.Rule(file="*/none.py", line=line, precision="f32")
        pp.auto_mixed(fn, policy=pp.AutoMixedBf16.with_rules(rule))
    assert len(programs._known.get(fn)) == 64
    assert traces == []
