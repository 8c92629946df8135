"""Design section 5: under `jax.grad(auto_mixed(f))` too every product has the lowered form."""

import functools
import itertools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun

import precpass as pp
from precpass import jaxpr as ir
from precpass.analysis.residuals import kept_bytes
from precpass.jaxpr.dimension_numbers import batched, transposed, untransposed
from precpass.measure.counts import count
from precpass.rewrite.low_product import Bilinear
from tests.rewrite import test_product_form
from tests.rewrite.test_product_form import CASES, ORDERS, ordered, weighed
from tests.support.jaxprs import contracts, named, products
from tests.support.values import assert_near, normal, normal_array, on_device

DOTS = [name for name in CASES if name.startswith("dot")]
WIDE_SUMS = [*DOTS, "ragged_dot"]


def integers(seed: int, *shape: int) -> jax.Array:
    """Whole numbers of few bits: their products and sums are exact in float32."""
    return on_device(np.random.default_rng(seed).integers(1, 16, shape).astype(np.float32))


def forms(jaxpr: Any) -> set[tuple[str, ...]]:
    """The types of the operands and results of the products."""
    found = [e for e in products(jaxpr) if contracts(e)]
    return {tuple(v.aval.dtype.name for v in (*e.invars[:2], *e.outvars)) for e in found}


LOWERED = {("bfloat16", "bfloat16", "float32")}


# JAX itself has no second transpose of a ragged_dot
@pytest.mark.parametrize(
    ("name", "order"),
    [
        (name, order)
        for name in WIDE_SUMS
        for order in ORDERS
        if (name, order) != ("ragged_dot", "reverse over reverse")
    ],
)
def test_every_product_of_a_derivative_has_the_lowered_form(name: str, order: str):
    fn, x, w = CASES[name]
    jaxpr = jax.make_jaxpr(ORDERS[order](weighed(ordered(fn))))(x, w)
    assert forms(jaxpr) <= LOWERED and (forms(jaxpr) or not contracting(fn, x, w))


def contracting(fn: Callable[..., Any], x: Any, w: Any) -> bool:
    return any(contracts(e) for e in products(jax.make_jaxpr(fn)(x, w)))


@pytest.mark.release(keep=2)
@pytest.mark.parametrize("name", WIDE_SUMS)
def test_a_gradient_is_rounded_in_its_operands_alone(name: str):
    """Low operands that are whole numbers: float32's very sums, which bfloat16 cannot hold."""
    fn, x, w = CASES[name]
    x, w = integers(0, *x.shape), integers(1, *w.shape)
    g = integers(2, *jax.eval_shape(fn, x, w).shape)
    got, want = jax.jit(lambda x, w, g: [jax.vjp(f, x, w)[1](g) for f in (ordered(fn), fn)])(
        x, w, g
    )
    assert [a.dtype for a in got] == [a.dtype for a in want]
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.release(keep=2)
@pytest.mark.parametrize("name", DOTS)
@pytest.mark.parametrize("side", [0, 1])
def test_the_transposed_dot_is_jaxs(name: str, side: int):
    """Its dimension numbers against JAX's own transposition."""
    fn, x, w = CASES[name]
    (eqn,) = products(jax.make_jaxpr(fn)(x, w))
    operands = integers(0, *x.shape), integers(1, *w.shape)
    g = integers(2, *eqn.outvars[0].aval.shape)
    dot = transposed(eqn.params["dimension_numbers"], [x.ndim, w.ndim], side)

    @jax.jit
    def both(g, *operands):
        pair = [g, operands[1 - side]]
        out = lax.dot_general(*(pair[::-1] if dot.side else pair), dot.numbers)
        out = out if dot.order is None else lax.transpose(out, dot.order)
        return out, jax.vjp(fn, *operands)[1](g)[side]

    np.testing.assert_array_equal(*both(g, *operands))


@pytest.mark.release(keep=2)
@pytest.mark.parametrize("name", DOTS)
@pytest.mark.parametrize("dims", [(0, None), (None, 0), (-1, -1), (1, 0)])
def test_a_dot_under_a_vmap_is_jaxs(name: str, dims: tuple[int | None, int | None]):
    fn, x, w = CASES[name]
    (eqn,) = products(jax.make_jaxpr(fn)(x, w))
    numbers = eqn.params["dimension_numbers"]
    args = [np.asarray(integers(i, *a.shape)) for i, a in enumerate((x, w))]
    where = list[int | None]()
    for i, (arg, dim) in enumerate(zip(list(args), dims, strict=True)):
        where.append(None if dim is None else dim % (arg.ndim + 1))
        args[i] = arg if dim is None else np.stack([arg, 2.0 * arg, arg + 1.0], dim)
    found, at = batched(numbers, [a.ndim for a in args], where)
    mapped = jax.vmap(fn, tuple(where), out_axes=at)
    np.testing.assert_array_equal(
        *jax.jit(lambda *args: (lax.dot_general(*args, found), mapped(*args)))(*args)
    )


LOW = jnp.bfloat16
X, W = normal_array(0, 4, 6, 8), normal_array(1, 8, 5)


def layer(w: Any, x: Any) -> Any:
    return jnp.arctan(x @ w).sum()


def test_no_transpose_stands_behind_the_gradient_of_a_weight():
    jaxpr = jax.make_jaxpr(jax.grad(pp.auto_mixed(layer), (0, 1)))(W, X)
    assert {e.outvars[0].aval.shape for e in products(jaxpr)} == {(4, 6, 5), (8, 5), (4, 6, 8)}
    assert all(e.outvars[0].aval.dtype == jnp.bfloat16 for e in named(jaxpr, "transpose"))


def test_the_gradient_of_a_weight_shared_by_a_vmap_is_one_product():
    """Not one for each example, to be added up."""
    mixed = pp.auto_mixed(layer)
    fn = jax.grad(lambda w, x: jax.vmap(mixed, (None, 0))(w, x).sum())
    shapes = [e.outvars[0].aval.shape for e in products(jax.make_jaxpr(fn)(W, X))]
    assert sorted(shapes) == [(4, 6, 5), (8, 5)]
    assert_near(*jax.jit(lambda *args: (fn(*args), jax.grad(layer)(*args)))(W, X))


def test_the_backward_pass_keeps_one_low_copy_of_what_a_product_read():
    def fn(w, x):
        return lax.scan(lambda h, _: (jnp.arctan(h @ w), None), x, None, length=3)[0].sum()

    w, x = normal_array(2, 8, 8), normal_array(3, 16, 8)
    kept = kept_bytes(jax.make_jaxpr(jax.grad(pp.auto_mixed(fn)))(w, x))
    # of each of three steps h in bfloat16 and the derivative of arctan; w once, in bfloat16
    assert kept <= 3 * (2 + 4) * x.size + 2 * w.size


@pytest.mark.release(keep=1)
@pytest.mark.parametrize(("rows", "casts"), [(1, 2), (3, 1)])
def test_both_passes_read_one_low_copy_of_a_weight(rows: int, casts: int):
    """One cast of it, and one back where XLA takes the product of a row in float32."""

    def loss(ws: Any, x: Any) -> Any:
        for w in ws:
            x = jnp.tanh(x @ w)
        return jnp.sum(x**2)

    ws, x = (
        [
            on_device(np.float32(0.3) * normal(4, 24, 16)),
            on_device(np.float32(0.3) * normal(5, 16, 40)),
        ],
        normal_array(6, rows, 24),
    )
    wanted = jax.jit(jax.grad(loss))(ws, x)
    for gradient in (jax.grad(pp.auto_mixed(loss)), pp.auto_mixed(jax.grad(loss))):
        compiled = jax.jit(gradient).lower(ws, x).compile()
        text = compiled.as_text()
        for shape in ("24,16|384", "16,40|640"):
            found = re.findall(rf"\b(b?f\d\d)\[(?:{shape})\]\S* convert\(", text)
            assert len(found) == casts, found
        assert_near(compiled(ws, x), wanted, 0.03)


@pytest.mark.release(keep=2)
@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("dims", list(itertools.product((0, 1, None), repeat=2)))
def test_low_copies_are_mapped_with_what_they_are_copies_of(dims: tuple[Any, Any], side: int):
    """Whatever the batch dimension that an operand has, and its copy."""
    operands = [normal(7, 5, 4, 6), normal(8, 5, 6, 3)]
    if None in dims:
        operands[side] = np.broadcast_to(operands[side][:1], operands[side].shape)
    (eqn,) = products(jax.make_jaxpr(jnp.matmul)(*(x[0].astype(LOW) for x in operands)))
    low, wide = np.dtype(LOW), np.dtype(np.float32)
    form = Bilinear(eqn.primitive, ir.sorted_params(eqn), low, wide, copied=True)
    axes = [0, 0, 0, 0]
    axes[side], axes[2 + side] = dims

    def placed(x: Any, dim: int | None) -> Any:
        return x[0] if dim is None else np.moveaxis(x, 0, dim)

    given = [placed(x, dim) for x, dim in zip([*operands, *operands], axes, strict=True)]
    copies = [x.astype(LOW) for x in given[2:]]

    def carried(x: Any, w: Any, low_x: Any, low_w: Any) -> Any:
        return ir.carry(form, jnp.zeros((4, 3)), x, w, [low_x, low_w])

    tangents = [normal(9, *x.shape) for x in given[:2]]

    @jax.jit
    def both(given: Any, copies: Any, tangents: Any) -> Any:
        mapped = jax.vmap(carried, axes)
        _, got = jax.jvp(lambda x, w: mapped(x, w, *copies), given, tangents)
        return got, jax.jvp(jax.vmap(jnp.matmul, axes[:2]), given, tangents)[1]

    assert_near(*both(given[:2], copies, tangents), 0.02)


def test_wide_again_under_always_f32():
    def outer(f):
        return lambda w, x: jax.jvp(jax.grad(f), (w, x), (w, x))

    low = jax.make_jaxpr(outer(pp.auto_mixed(layer)))(W, X)
    assert forms(low) == LOWERED and named(low, "precpass_pin")
    found = pp.inspect(jaxpr_as_fun(low), "AlwaysF32")(W, X)
    assert forms(found.after) == {("float32", "float32", "float32")}
    assert "precpass" not in str(found.after)
    again = jaxpr_as_fun(found.after)
    assert_near(*jax.jit(lambda *xs: (tuple(again(*xs)), outer(layer)(*xs)))(W, X), 1e-6)


def test_both_sides_of_the_pass_make_as_many_products():
    both = functools.partial(jax.grad, argnums=(0, 1))
    inside, outside = pp.auto_mixed(both(layer)), both(pp.auto_mixed(layer))
    found = [count(jax.make_jaxpr(f)(W, X)) for f in (inside, outside)]
    assert found[0].products == found[0].low == found[1].products == found[1].low == 3
    assert found[0].flops["bf16"] == found[1].flops["bf16"]


def test_a_convolution_has_jaxs_transposes():
    fn, x, w = test_product_form.CASES["conv strides"]
    jaxpr = jax.make_jaxpr(jax.grad(weighed(pp.auto_mixed(fn)), has_aux=True))(x, w)
    assert {form[:2] for form in forms(jaxpr)} == {("bfloat16", "bfloat16")}


def test_a_ragged_dot_is_transposed_without_a_product_that_nobody_reads():
    """In a loop over its weights, rematerialised: three products in each direction."""
    fn, x, w = CASES["ragged_dot"]

    def loss(f, x, w):
        def step(x, w):
            return jnp.tanh(jax.checkpoint(f)(x, w) @ jnp.ones((8, 24)) / 24), None

        return (lax.scan(step, x, jnp.stack([w, 0.5 * w]))[0] ** 2).sum()

    def ragged(jaxpr: Any) -> int:
        return sum(e.primitive.name.startswith("ragged") for e in products(jaxpr))

    low, wide = (jax.grad(functools.partial(loss, f), (0, 1)) for f in (pp.auto_mixed(fn), fn))
    assert ragged(jax.make_jaxpr(low)(x, w)) == ragged(jax.make_jaxpr(wide)(x, w))
    assert_near(*jax.jit(lambda *args: (low(*args), wide(*args)))(x, w))


NUMBERS = {
    "matrices": (((1,), (0,)), ((), ())),
    "rows with rows": (((1,), (1,)), ((), ())),
    "a batch": (((2,), (1,)), ((0,), (0,))),
    "a batch inside": (((0,), (2,)), ((2,), (1,))),
    "two summed": (((1, 2), (0, 2)), ((), ())),
    "two kept": (((1,), (2,)), ((), ())),
}


@pytest.mark.release(keep=2)
@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("name", NUMBERS)
def test_a_dot_reads_what_its_operand_is_a_transpose_of(name: str, side: int):
    """All orders of an operand: the same numbers where the result's order can stay."""
    numbers = NUMBERS[name]
    ndim = 2 if name in ("matrices", "rows with rows") else 3
    # equal sizes where sums and batches meet, whatever they are
    operands = [integers(seed, *[4] * ndim) for seed in (0, 1)]
    read: list[Callable[..., Any]] = []
    for order in itertools.permutations(range(ndim)):
        other = untransposed(numbers, side, order)
        summed, batch = numbers
        own = [order[d] for d in range(ndim) if d not in summed[side] and d not in batch[side]]
        assert (other is None) == (own != sorted(own))
        if other is not None:

            def both(*operands: Any, order: Any = order, other: Any = other) -> Any:
                pair = [x.transpose(order) if i == side else x for i, x in enumerate(operands)]
                return lax.dot_general(*pair, numbers), lax.dot_general(*operands, other)

            read.append(both)
    assert len(read) > 1
    for want, got in jax.jit(lambda *operands: [both(*operands) for both in read])(*operands):
        np.testing.assert_array_equal(want, got)


def test_a_transposed_operand_is_read_before_its_transpose():
    x, e = normal_array(0, 8, 16), normal_array(1, 24, 16)
    fn = pp.auto_mixed(lambda x, e: x @ e.T, policy="AutoMixedBf16")
    (product,) = products(jax.make_jaxpr(fn)(x, e))
    assert product.params["dimension_numbers"] == (((1,), (1,)), ((), ()))
    assert product.invars[1].aval.shape == e.shape
