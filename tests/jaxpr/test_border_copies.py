"""What crosses the borders of loops, branches and calls on 16 bits, and what is stored so."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import precpass as pp
from tests.support.jaxprs import low_products, named, opened
from tests.support.passes import low_and_near
from tests.support.values import assert_near, identical, normal_array, rel_error

BITS, LOW = np.dtype(np.uint16), np.dtype(jnp.bfloat16)


def rewritten(fn: Callable[..., Any], *args: Any, policy: Any = pp.AutoMixedBf16) -> Any:
    return pp.inspect(fn, policy=policy)(*args).after


def bits_in(eqn: Any) -> list[tuple[int, ...]]:
    """The shapes of the operands that are 16 bits of a value."""
    return [v.aval.shape for v in eqn.invars if getattr(v.aval, "dtype", None) == BITS]


def bits_out(eqn: Any) -> list[tuple[int, ...]]:
    return [v.aval.shape for v in eqn.outvars if getattr(v.aval, "dtype", None) == BITS]


def narrowing(jaxpr: Any, shape: tuple[int, ...]) -> list[Any]:
    """The casts of values of a shape to the low format, bodies included."""
    casts = named(jaxpr, "convert_element_type")
    return [e for e in casts if e.outvars[0].aval.dtype == LOW and e.outvars[0].aval.shape == shape]


def recurrent(w: jax.Array, x: jax.Array) -> jax.Array:
    """A loop constant that a product reads, by itself and transposed."""

    def cell(h: jax.Array, row: jax.Array) -> Any:
        h = jnp.tanh(h @ w + row @ w.T)
        return h, None

    return lax.scan(cell, jnp.zeros((4, 8)), x)[0]


def test_a_loop_constant_is_cast_once_outside():
    w, x = 0.3 * normal_array(0, 8, 8), normal_array(1, 6, 4, 8)
    jaxpr = rewritten(recurrent, w, x)
    (scan,) = named(jaxpr, "scan")
    assert (8, 8) in bits_in(scan)
    inside = scan.params["jaxpr"]
    assert len(low_products(inside)) == 2
    assert not narrowing(inside, (8, 8))
    assert len(narrowing(jaxpr, (8, 8))) == 1
    low_and_near(pp.auto_mixed(recurrent), recurrent, w, x, least=2)


@pytest.mark.release
@pytest.mark.parametrize("shape", [(24, 16), (8, 48)], ids=["as is", "moved"])
@pytest.mark.parametrize("policy", [None, "dots_saveable"])
def test_nor_does_a_checkpoint_cast_it_again_in_the_backward_loop(
    policy: str | None, shape: tuple[int, ...]
):
    def read(w: jax.Array) -> jax.Array:
        return w if w.shape == (24, 16) else w.reshape(24, 16)

    kept = None if policy is None else getattr(jax.checkpoint_policies, policy)

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        def cell(h: jax.Array, row: jax.Array) -> jax.Array:
            return jnp.tanh(jnp.tanh(h @ read(w)) @ read(w).T + row)

        layer = jax.jit(jax.checkpoint(cell, policy=kept))
        h, _ = lax.scan(lambda h, row: (layer(h, row), None), jnp.ones((5, 24)), x)
        return jnp.sum(h**2)

    w, x = 0.3 * normal_array(0, *shape), normal_array(1, 6, 5, 24)
    for gradient in (jax.grad(pp.auto_mixed(loss)), pp.auto_mixed(jax.grad(loss))):
        parts = jax.jit(gradient).lower(w, x).compile().as_text().split("\n\n")
        inside = [part for part in parts if "while/body" in part and "ENTRY" not in part]
        cast = re.compile(r"bf16\[(8,48|24,16|384)\]\S* convert\(")
        assert inside and not [part for part in inside if cast.search(part)]
        assert_near(gradient(w, x), jax.jit(jax.grad(loss))(w, x), 0.03)


def chosen(trips: int) -> Callable[..., Any]:
    """A loop that takes one of a few matrices in each trip."""

    def fn(ws: jax.Array, x: jax.Array) -> jax.Array:
        def cell(h: jax.Array, i: jax.Array) -> Any:
            return h + 0.1 * jnp.tanh(h @ ws[i % ws.shape[0]].T), None

        return lax.scan(cell, x, jnp.arange(trips))[0]

    return fn


@pytest.mark.release
def test_of_few_matrices_that_a_loop_chooses_from_all_are_cast_outside():
    ws, x = 0.3 * normal_array(0, 2, 8, 8), normal_array(1, 4, 8)
    often, once = (rewritten(chosen(trips), ws, x) for trips in (12, 2))
    (scan,) = named(often, "scan")
    assert bits_in(scan) == [(2, 8, 8)] and len(low_products(scan.params["jaxpr"])) == 1
    assert not narrowing(scan.params["jaxpr"], (8, 8)) and len(narrowing(often, (2, 8, 8))) == 1
    # where each is taken once, the casts inside are as many as those outside
    (scan,) = named(once, "scan")
    assert not bits_in(scan) and len(narrowing(scan.params["jaxpr"], (8, 8))) == 1
    low_and_near(pp.auto_mixed(chosen(12)), chosen(12), ws, x)
    for transform in (jax.grad, lambda f: jax.vmap(f, (0, None))):
        args = (ws, x) if transform is jax.grad else (jnp.stack([ws, 0.5 * ws]), x)
        plain = transform(lambda *xs: (chosen(12)(*xs) ** 2).sum())
        outside = transform(lambda *xs: (pp.auto_mixed(chosen(12))(*xs) ** 2).sum())
        assert_near(jax.jit(outside)(*args), jax.jit(plain)(*args))
        low_and_near(pp.auto_mixed(plain), plain, *args)


def test_what_is_chosen_and_kept_for_the_backward_pass_is_rounded_by_itself():
    """Its stack has 16 bits, and the matrices that it is chosen from are not copied beside it."""
    ws, x = 0.3 * normal_array(0, 2, 8, 8), normal_array(1, 4, 8)
    gradient = jax.grad(lambda *xs: (chosen(12)(*xs) ** 2).sum(), (0, 1))
    forward, backward = named(rewritten(gradient, ws, x), "scan")
    assert (12, 8, 8) in bits_out(forward) and (12, 8, 8) in bits_in(backward)
    assert (2, 8, 8) not in bits_in(forward)
    low_and_near(pp.auto_mixed(gradient), gradient, ws, x, least=3)


def test_the_gradient_of_a_loop_constant_adds_up_wide():
    def total(w: jax.Array, x: jax.Array) -> jax.Array:
        return lax.scan(lambda s, row: (s + jnp.sum(row @ w), None), 0.0, x)[0]

    w, x = jnp.ones((4, 4)), jnp.ones((4096, 1, 4))
    (scan,) = named(rewritten(total, w, x), "scan")
    assert (4, 4) in bits_in(scan)
    for gradient in (jax.grad(pp.auto_mixed(total)), pp.auto_mixed(jax.grad(total))):
        assert identical(gradient(w, x), jnp.full((4, 4), 4096.0))


def stacked(x: jax.Array, w: jax.Array) -> jax.Array:
    def layer(x: jax.Array, w: jax.Array) -> Any:
        return x + jnp.tanh(x @ w), None

    return jnp.sum(lax.scan(layer, x, w)[0] ** 2)


@pytest.mark.release
def test_what_the_backward_scan_reads_is_stacked_on_16_bits():
    x, w = normal_array(0, 16, 8), 0.3 * normal_array(1, 5, 8, 8)
    gradient = jax.grad(stacked, argnums=(0, 1))
    forward, backward = named(rewritten(gradient, x, w), "scan")
    assert (5, 16, 8) in bits_out(forward)
    assert (5, 16, 8) in bits_in(backward)
    got, want = pp.auto_mixed(gradient)(x, w), gradient(x, w)
    assert_near(got, want)


def test_xla_drops_the_wide_stacks_that_nothing_reads():
    x, w = normal_array(0, 512, 64), normal_array(1, 8, 64, 64)
    gradient = jax.grad(stacked, argnums=(0, 1))
    wide = jax.jit(gradient).lower(x, w).compile().memory_analysis()
    mixed = jax.jit(pp.auto_mixed(gradient)).lower(x, w).compile()
    low = mixed.memory_analysis()
    assert "u16[8,512,64]" in mixed.as_text()
    assert low.temp_size_in_bytes < wide.temp_size_in_bytes


@pytest.mark.release
def test_a_stack_is_differentiated_through_its_wide_form():
    """The second derivative takes its way past the 16 bits, as does that of vmap."""
    x, w = normal_array(0, 4, 8), 0.3 * normal_array(1, 3, 8, 8)
    gradient = jax.grad(stacked)
    mixed = pp.auto_mixed(gradient)
    assert bits_out(named(rewritten(gradient, x, w), "scan")[0])
    assert_near(jax.jacrev(mixed)(x, w), jax.jit(jax.jacrev(gradient))(x, w), 0.03)
    assert_near(jax.jacfwd(mixed)(x, w), jax.jit(jax.jacfwd(gradient))(x, w), 0.03)
    xs = normal_array(2, 2, 4, 8)
    mapped = jax.vmap(mixed, (0, None))(xs, w)
    assert_near(mapped, jax.vmap(gradient, (0, None))(xs, w))
    along = jax.jvp(mixed, (x, w), (jnp.ones_like(x), jnp.ones_like(w)))
    assert_near(along, jax.jvp(gradient, (x, w), (jnp.ones_like(x), jnp.ones_like(w))), 0.03)


def test_a_state_that_only_products_read_is_carried_on_16_bits():
    def states(h: jax.Array, w: jax.Array, x: jax.Array) -> jax.Array:
        def cell(h: jax.Array, row: jax.Array) -> Any:
            return jnp.tanh(h @ w + row), None

        return lax.scan(cell, jnp.tanh(h), x)[0] @ w

    args = normal_array(0, 4, 8), normal_array(1, 8, 8), normal_array(2, 5, 4, 8)
    (scan,) = named(rewritten(states, *args), "scan")
    assert (4, 8) in bits_in(scan)
    assert (4, 8) in bits_out(scan)
    low_and_near(pp.auto_mixed(states), states, *args, least=2)


@pytest.mark.parametrize("reads", ["adds", "reads wide"])
def test_a_state_that_adds_up_or_is_read_wide_is_carried_wide(reads: str):
    def states(h: jax.Array, w: jax.Array, x: jax.Array) -> jax.Array:
        def cell(h: jax.Array, row: jax.Array) -> Any:
            new = h + row @ w if reads == "adds" else jnp.tanh(h @ w) * jnp.exp(h)
            return new, None

        return lax.scan(cell, jnp.tanh(h), x)[0] @ w

    args = normal_array(0, 4, 8), normal_array(1, 8, 8), normal_array(2, 5, 4, 8)
    (scan,) = named(rewritten(states, *args), "scan")
    assert (4, 8) not in bits_out(scan)


def test_ones_that_a_carry_adds_are_all_counted():
    def count(w: jax.Array, x: jax.Array) -> jax.Array:
        return lax.scan(lambda s, row: (s + row @ w, s @ w), jnp.zeros((1, 2)), x)[0]

    w, x = jnp.full((2, 2), 0.5), jnp.ones((16384, 1, 2))
    assert float(pp.auto_mixed(count)(w, x)[0, 0]) == 16384.0


# ---------------------------------------------------------------- each kind of border


def by_while(w: jax.Array, x: jax.Array) -> jax.Array:
    def step(state: Any) -> Any:
        i, x = state
        return i + 1, jnp.tanh(x @ w) + 0.1 * x

    return lax.while_loop(lambda state: state[0] < 4, step, (0, x))[1]


def by_fori(w: jax.Array, x: jax.Array) -> jax.Array:
    return lax.fori_loop(0, 4, lambda i, x: jnp.tanh(x @ w) + 0.1 * x, x)


def by_branches(w: jax.Array, x: jax.Array) -> jax.Array:
    def step(x: jax.Array, i: jax.Array) -> Any:
        x = lax.cond(i % 2 == 0, lambda x: jnp.tanh(x @ w), lambda x: jnp.sin(x) @ w.T, x)
        return x, x

    return lax.scan(step, x, jnp.arange(5))[1]


def by_calls(w: jax.Array, x: jax.Array) -> jax.Array:
    inner = jax.jit(lambda w, x: jnp.tanh(x @ w))
    outer = jax.checkpoint(lambda w, x: inner(w, x) + inner(w.T, x))
    return lax.scan(lambda x, _: (outer(w, x), None), x, length=4)[0]


def by_nested_loops(w: jax.Array, x: jax.Array) -> jax.Array:
    def outer(x: jax.Array, _: Any) -> Any:
        x = lax.fori_loop(0, 3, lambda i, x: jnp.tanh(x @ w), x)
        return lax.scan(lambda x, _: (jnp.arctan(x @ w), x), x, length=2)[0], None

    return lax.scan(outer, x, length=3)[0]


def by_switch_of_literals(w: jax.Array, x: jax.Array) -> jax.Array:
    def step(x: jax.Array, i: jax.Array) -> Any:
        branches = [lambda x, s: x @ w * s, lambda x, s: x * s, lambda x, s: jnp.zeros((4, 8))]
        return lax.switch(i % 3, branches, x, 0.5), None

    return lax.scan(step, x, jnp.arange(6))[0]


BORDERS = [by_while, by_fori, by_branches, by_calls, by_nested_loops, by_switch_of_literals]


@pytest.mark.release(keep=1)
@pytest.mark.parametrize("program", BORDERS)
def test_a_low_copy_crosses_the_borders_between(program: Callable[..., Any]):
    w, x = 0.3 * normal_array(0, 8, 8), normal_array(1, 4, 8)
    jaxpr = rewritten(program, w, x)
    loops = [*named(jaxpr, "scan"), *named(jaxpr, "while")]
    assert any((8, 8) in bits_in(loop) for loop in loops)
    for loop in loops:
        inside = loop.params.get("jaxpr", loop.params.get("body_jaxpr"))
        assert not narrowing(inside, (8, 8))
    assert low_products(jaxpr)
    assert_near(pp.auto_mixed(program)(w, x), jax.jit(program)(w, x), 0.02)


@pytest.mark.release
@pytest.mark.parametrize("program", [p for p in BORDERS if p is not by_while])
def test_and_is_differentiated_on_both_sides(program: Callable[..., Any]):
    w, x = normal_array(0, 8, 8) * 0.3, normal_array(1, 4, 8)

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(program(w, x) ** 2)

    want = jax.jit(jax.grad(loss, (0, 1)))(w, x)
    assert_near(jax.grad(pp.auto_mixed(loss), (0, 1))(w, x), want, 0.05)
    mixed = pp.auto_mixed(jax.grad(loss, (0, 1)))
    assert_near(mixed(w, x), want, 0.05)
    mapped = jax.vmap(mixed, (None, 0))(w, jnp.stack([x, 2 * x]))
    assert_near(jax.tree.map(lambda g: g[0], mapped), want, 0.05)


# ---------------------------------------------------------------- what is not rounded


def loop_over(value: Callable[[jax.Array], jax.Array]) -> Callable[..., Any]:
    """The gradient of a scan whose body keeps `value` of a state for the backward pass."""

    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
        def body(x: jax.Array, w: jax.Array) -> Any:
            return x @ w + value(x), None

        return jnp.sum(lax.scan(body, x, w)[0])

    return jax.grad(loss)


def test_an_argument_of_the_full_precision_set_is_not_rounded():
    """cos of a large angle has no digit left where the angle is rounded."""
    gradient = loop_over(lambda x: jnp.sin(1000.0 * x))
    x, w = normal_array(0, 4, 8), 0.1 * normal_array(1, 3, 8, 8)
    jaxpr = rewritten(gradient, x, w)
    for cos in named(jaxpr, "cos"):
        assert cos.invars[0].aval.dtype == np.float32
    rounded = {v for e in named(jaxpr, "precpass_rounded") for v in e.outvars}
    assert not rounded & {e.invars[0] for e in named(jaxpr, "cos")}


def test_keep_and_rules_hold_what_is_stored():
    x, w = normal_array(0, 16, 8), normal_array(1, 5, 8, 8)

    def kept(x: jax.Array, w: jax.Array) -> jax.Array:
        with pp.keep("f32"):
            found = stacked(x, w)
        return found + jnp.sum(x @ w[0])

    assert not any(bits_out(s) for s in named(rewritten(jax.grad(kept), x, w), "scan"))
    rule = pp.Rule(where=lambda eqn: eqn.kind is pp.types.OpKind.ELEMENTWISE, precision="f32")
    policy = pp.AutoMixedBf16.with_rules(rule)
    ruled = named(rewritten(jax.grad(stacked), x, w, policy=policy), "scan")
    free = named(rewritten(jax.grad(stacked), x, w), "scan")
    assert len(bits_out(ruled[0])) < len(bits_out(free[0]))


def test_results_of_the_program_keep_their_digits():
    def states(x: jax.Array, w: jax.Array) -> Any:
        return lax.scan(lambda x, w: (jnp.tanh(x @ w), jnp.sin(x)), x, w)

    x, w = normal_array(0, 16, 8), normal_array(1, 5, 8, 8)
    _, sines = pp.auto_mixed(states)(x, w)
    assert identical(sines[0], jnp.sin(x))


def test_the_plan_says_what_was_weighed():
    x, w = normal_array(0, 16, 8), normal_array(1, 5, 8, 8)
    plan = pp.inspect(jax.grad(stacked), policy=pp.AutoMixedBf16)(x, w).plan
    stored = [d for d in plan.walk() if any(d.stored) and d.action is not pp.types.Action.ENTER]
    assert stored
    assert all(
        re.search(r"stored in bf16: .*\d (bytes|kB|MB) saved( x \d+ iterations)?$", str(d.reason))
        for d in stored
    )


def test_float32_stays_what_it_was():
    x, w = normal_array(0, 16, 8), normal_array(1, 5, 8, 8)
    gradient = jax.grad(stacked)
    assert rel_error(pp.auto_mixed(gradient, policy=pp.AlwaysF32)(x, w), gradient(x, w)) == 0


# ---------------------------------------------------------------- casts and movement


def test_a_cast_comes_before_what_repeats():
    def program(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.broadcast_to(x[:, None], (8, 5, 8)) @ w

    jaxpr = rewritten(program, normal_array(0, 8, 8), normal_array(1, 8, 8))
    assert narrowing(jaxpr, (8, 8))
    assert not narrowing(jaxpr, (8, 5, 8))
    low_and_near(pp.auto_mixed(program), program, normal_array(0, 8, 8), normal_array(1, 8, 8))


def test_and_after_what_shrinks():
    def program(table: jax.Array, ids: jax.Array, w: jax.Array) -> jax.Array:
        return table[ids] @ w, table[2:4] @ w

    args = normal_array(0, 100, 8), jnp.asarray([3, 5]), normal_array(1, 8, 8)
    jaxpr = rewritten(program, *args)
    assert len(narrowing(jaxpr, (2, 8))) == 2
    assert not narrowing(jaxpr, (100, 8))


def test_the_gradient_of_what_is_repeated_adds_up_wide():
    def total(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.sum(jnp.broadcast_to(x, (16384, 1, 2)) @ w)

    x, w = jnp.ones((1, 2)), jnp.full((2, 2), 0.5)
    assert float(jax.grad(pp.auto_mixed(total))(x, w)[0, 0]) == 16384.0
    assert float(pp.auto_mixed(jax.grad(total))(x, w)[0, 0]) == 16384.0


def test_an_all_gather_sends_16_bits():
    mesh = jax.make_mesh((4,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("i")

    @jax.shard_map(mesh=mesh, in_specs=(spec, spec), out_specs=spec)
    def program(x: jax.Array, w: jax.Array) -> jax.Array:
        return x @ lax.all_gather(jnp.tanh(w), "i", tiled=True)

    x, w = normal_array(0, 4, 8), normal_array(1, 8, 8)
    jaxpr = rewritten(program, x, w)
    (gathered,) = [e for e in named(jaxpr, "all_gather") if e.outvars[0].aval.dtype == LOW]
    assert gathered.invars[0].aval.dtype == LOW


def test_a_function_with_its_own_policy_is_given_no_twins():
    inner = pp.auto_mixed(lambda w, x: jnp.tanh(x @ w), policy=pp.AutoMixedBf16)

    def program(w: jax.Array, x: jax.Array) -> jax.Array:
        return lax.scan(lambda x, _: (inner(w, x) + jnp.arctan(x @ w), None), x, length=3)[0]

    w, x = 0.3 * normal_array(0, 8, 8), normal_array(1, 4, 8)
    jaxpr = rewritten(program, w, x)
    (scan,) = named(jaxpr, "scan")
    assert (8, 8) in bits_in(scan)
    calls = [e for e in named(scan.params["jaxpr"], "jit") if "lambda" in str(e.params["name"])]
    assert calls
    assert not any(bits_in(call) for call in calls)


def test_what_another_border_hands_back_keeps_its_digits():
    """One jitted body, whose result is stacked here and is a result of the program there."""
    shared = jax.jit(lambda x: jnp.sin(x))

    @jax.custom_jvp
    def ruled(x: jax.Array) -> jax.Array:
        return shared(x)

    ruled.defjvp(lambda xs, ts: (shared(xs[0]), ts[0]))

    def program(x: jax.Array, w: jax.Array) -> Any:
        rows = lax.scan(lambda c, w: (jnp.tanh(c @ w), shared(c)), x, w)[1]
        return lax.scan(lambda c, r: (jnp.tanh(c + r @ w[0]), None), x, rows)[0], ruled(x)

    x, w = normal_array(0, 16, 8), 0.3 * normal_array(1, 5, 8, 8)
    _, sines = pp.auto_mixed(program)(x, w)
    assert identical(sines, jnp.sin(x))


def test_scalars_are_not_worth_a_cast():
    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
        def body(s: jax.Array, w: jax.Array) -> Any:
            return jnp.tanh(s) * jnp.sum(x @ w), None

        return lax.scan(body, 1.0, w)[0]

    after = rewritten(jax.grad(loss), normal_array(0, 4, 8), normal_array(1, 5, 8, 8))
    scans = named(after, "scan")
    assert len(scans) == 2
    for scan in scans:
        assert not [shape for shape in bits_out(scan) if shape == (5,)]


def test_a_checkpoint_holds_no_wide_form_that_nothing_reads():
    """Its barrier would keep in memory what stands behind it."""

    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
        policy = jax.checkpoint_policies.dots_saveable
        layer = jax.checkpoint(lambda x, w: jnp.tanh(x @ w) @ w, policy=policy)
        for _ in range(3):
            x = layer(x, w)
        return jnp.sum(x)

    x, w = normal_array(0, 16, 8), 0.3 * normal_array(1, 8, 8)
    gradient = jax.grad(loss, (0, 1))
    crossed = [e for e in named(rewritten(gradient, x, w), "remat2") if bits_in(e)]
    assert crossed
    for eqn in crossed:
        bars = dict(zip(eqn.invars, eqn.params["prevent_cse"], strict=True))
        inside = opened(eqn.params["jaxpr"])
        inner = dict(zip(inside.invars, eqn.invars, strict=True))
        hidden = [e.invars[1] for e in inside.eqns if e.primitive.name == "precpass_rounded"]
        assert [v for v in hidden if v in inner]
        assert not any(bars[inner[v]] for v in hidden if v in inner)
        assert all(bars[v] for v in eqn.invars if v.aval.dtype == BITS)
    forms = pp.auto_mixed(gradient), jax.grad(pp.auto_mixed(loss), (0, 1)), gradient
    inside, outside, wanted = jax.jit(lambda *args: [form(*args) for form in forms])(x, w)
    assert_near(inside, wanted, 0.03)
    assert_near(outside, wanted, 0.03)
