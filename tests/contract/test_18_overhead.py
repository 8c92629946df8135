"""Design section 3, line 18: what a call and a trace cost, counted and not timed.

Times are for scripts/bench_overhead.py. What is counted here are the Python functions that
run: all of them in a call, those of the package in a trace.
"""

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import precpass as pp
from precpass.planner.planner import Planner
from precpass.rewrite.rewriter import Rewriter
from tests.support.jaxprs import low_products
from tests.support.passes import quiet

PACKAGE = str(Path(pp.__file__).parent)
X = jnp.ones((2, 2))
CALL = {"<lambda>": 1, "__call__": 1, "current": 1, "value": 1}
"""What a call runs: the region's lookup, and JAX's property for jit's cache key."""


def functions_run(run: Callable[[], Any], folder: str = "") -> Counter[str]:
    """How often each Python function, defined below `folder`, begins or goes on."""
    found: Counter[str] = Counter()

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(folder):
            found[frame.f_code.co_name] += 1

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(before)
    return found


def work(fn: Callable[..., Any], policy: Any, *args: Any) -> int:
    """The functions of the package that a trace runs."""
    traced = pp.auto_mixed(fn, policy=policy)

    def run() -> None:
        # JAX's checks of each jaxpr call what the package gave them
        with quiet(), jax.enable_checks(False):
            traced.trace(*args)

    return functions_run(run, PACKAGE).total()


# ---------------------------------------------------------------- calls


def test_a_call_with_arrays_touches_no_leaf():
    mixed = pp.auto_mixed(lambda *xs: xs[0] @ xs[-1])
    counts = []
    for n in (1, 10, 300):
        args = [X] * n
        mixed(*args)
        counts.append(functions_run(lambda args=args: mixed(*args)))
    assert counts[0] == counts[1] == counts[2]
    assert counts[0] == CALL


def test_a_call_costs_the_same_in_every_region():
    mixed = pp.auto_mixed(lambda x: x @ x)
    for _ in range(2):
        counts = []
        for policy in ("AutoMixed", None, "AlwaysF32"):
            with pp.use_policy(policy):
                counts.append(functions_run(lambda: mixed(X)))
    assert counts == [CALL] * 3


def test_a_call_with_a_tree_costs_what_jits_does():
    def fn(tree: Any) -> Any:
        return jax.tree.map(lambda x: x @ x, tree)

    mixed, plain = pp.auto_mixed(fn), jax.jit(fn)
    trees = [{i: X for i in range(n)} for n in (2, 200)]
    extra = []
    for tree in trees:
        mixed(tree), plain(tree)
        own = functions_run(lambda tree=tree: mixed(tree)).total()
        extra.append(own - functions_run(lambda tree=tree: plain(tree)).total())
    assert extra[0] == extra[1] == 3


# ---------------------------------------------------------------- traces


def flat(n: int) -> Callable[..., Any]:
    def fn(x: Any, w: Any) -> Any:
        for row in range(n):
            x = lax.dot(x, w) if row % 10 == 0 else lax.tanh(lax.mul(x, w))
        return x

    return fn


def wide_loop(n: int) -> Callable[..., Any]:
    """A scan that carries `n` sums and steps that go through each other."""

    def fn(x: Any, w: Any) -> Any:
        def body(carry: Any, _: Any) -> Any:
            return [c + (c @ w) * 0.5 for c in carry], None

        return lax.scan(body, [x] * n, None, length=2)[0]

    return fn


def nested_loops(n: int) -> Callable[..., Any]:
    def fn(x: Any, w: Any) -> Any:
        def level(depth: int) -> Callable[..., Any]:
            if depth == 0:
                return lambda c: c + c @ w
            inner = level(depth - 1)
            return lambda c: lax.fori_loop(0, 2, lambda _, c: c + inner(c), c)

        return level(n)(x)

    return fn


PROGRAMS = {"flat": (flat, 100), "wide loop": (wide_loop, 30), "nested loops": (nested_loops, 6)}
POLICIES = (pp.AutoMixedBf16, pp.AlwaysBf16, pp.AlwaysF32)


@pytest.mark.release(keep=2)
@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: p.name)
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_work_grows_with_the_number_of_equations(name: str, policy: Any):
    """Differences leave out what every trace costs: each step adds as many equations."""
    make, n = PROGRAMS[name]
    work(make(n), policy, X, X)
    one, two, three = (work(make(k * n), policy, X, X) for k in (1, 2, 3))
    assert 0 < three - two <= 1.1 * (two - one)


@pytest.mark.release
def test_a_large_program_is_traced():
    """Ten thousand equations, and a bound on the functions per equation."""
    n = 10_000 // 19 * 10
    per_equation = work(flat(n), pp.AutoMixedBf16, X, X) / (1.9 * n)
    assert per_equation < 60, per_equation


def test_shared_layers_are_rewritten_once(monkeypatch: pytest.MonkeyPatch):
    rewritten: list[Any] = []
    rewrite = Rewriter._rewrite
    monkeypatch.setattr(
        Rewriter, "_rewrite", lambda self, *args: (rewritten.append(args[1]), rewrite(self, *args))
    )

    @jax.jit
    def layer(x: Any, w: Any) -> Any:
        return jnp.tanh(x @ w)

    def fn(x: Any, w: Any) -> Any:
        for _ in range(50):
            x = layer(x, w)
        return x

    jaxpr = jax.make_jaxpr(pp.auto_mixed(fn))(X, X)
    assert len(low_products(jaxpr)) == 1
    # the layer and the function
    assert len(rewritten) == 2


@pytest.mark.parametrize("compose", ("forward", "auto(grad)", "grad(auto)"))
def test_shared_layers_are_planned_once(compose: str, monkeypatch: pytest.MonkeyPatch):
    """What is known of a layer's operands is the same at every call here: more is planned apart."""
    decided: Counter[str] = Counter()
    begin = Planner._decisions

    def counted(self: Planner, facts: Any, *args: Any) -> Any:
        """Every body that is planned begins here."""
        node = self.graph.bodies[facts.body]
        leaves = (row for row in range(node.start, node.stop) if row not in self.graph.children)
        decided.update(self.graph.eqns[row].primitive.name for row in leaves)
        return begin(self, facts, *args)

    monkeypatch.setattr(Planner, "_decisions", counted)

    def planned(n: int) -> Counter[str]:
        @jax.jit
        def layer(x: Any, w: Any) -> Any:
            return jnp.tanh(x) @ w

        def loss(w: Any, x: Any) -> Any:
            for _ in range(n):
                x = layer(x, w)
            return jnp.sum(x)

        mixed = {
            "forward": lambda: pp.auto_mixed(loss),
            "auto(grad)": lambda: pp.auto_mixed(jax.grad(loss)),
            "grad(auto)": lambda: jax.grad(pp.auto_mixed(loss)),
        }
        decided.clear()
        jax.make_jaxpr(mixed[compose]())(X, X)
        # but for the sum over the layers of what each adds to the weights' gradient
        return Counter({name: k for name, k in decided.items() if name != "add_any"})

    assert planned(3) == planned(50)
    # JAX differentiates the first layer apart, whose operand needs no gradient
    assert decided["tanh"] == 1 or compose == "auto(grad)"


def test_a_call_of_a_shared_layer_costs_the_same_whatever_its_size():
    def per_call(size: int) -> float:
        @jax.jit
        def layer(x: Any, w: Any) -> Any:
            for _ in range(size):
                x = jnp.tanh(x @ w)
            return x

        def times(n: int) -> Callable[..., Any]:
            return lambda x, w: [x := layer(x, w) for _ in range(n)][-1]

        few, many = (work(times(n), pp.AutoMixedBf16, X, X) for n in (20, 60))
        return (many - few) / 40

    assert per_call(20) <= 1.05 * per_call(2)
