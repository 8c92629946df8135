"""Design section 3, line 15: `jax.export`, symbolic dimensions, several platforms."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import precpass as pp
from precpass.analysis.graph import Graph
from precpass.analysis.sizes import NOMINAL_SIZE
from tests.support.calls import W, X
from tests.support.jaxprs import low_products, low_values, products
from tests.support.passes import quiet
from tests.support.values import rel_error


def loss(w, x):
    h = jnp.tanh(x @ w)
    return jnp.mean(jax.nn.softmax(h @ w) ** 2)


def scanned(w, x):
    def body(h, _):
        return jnp.tanh(h @ w), h.sum()

    return jax.lax.scan(body, x, None, length=3)


def symbolic(*shapes, scope=None):
    scope = scope or export.SymbolicScope()
    return tuple(
        jax.ShapeDtypeStruct(export.symbolic_shape(shape, scope=scope), jnp.float32)
        for shape in shapes
    )


W_SPEC = jax.ShapeDtypeStruct((8, 8), jnp.float32)
ALL = ("cpu", "cuda", "rocm", "tpu")


@pytest.mark.release(keep=2)
@pytest.mark.parametrize("fn", [loss, scanned, jax.value_and_grad(loss)], ids=["f", "scan", "grad"])
def test_round_trip_with_a_symbolic_batch(fn):
    # one row is a cache line here: of what is less, another plan is made than of the nominal size;
    # so is it of a batch of one, whose weight gradient is an outer product
    w, x = (np.tile(np.asarray(a), (2, 2)) / 2 for a in (W, X))
    mixed = pp.auto_mixed(fn)
    w_spec = jax.ShapeDtypeStruct(w.shape, jnp.float32)
    exported = export.export(mixed)(w_spec, *symbolic("batch, 16"))
    assert "xbf16>" in exported.mlir_module()
    again = export.deserialize(exported.serialize())
    for rows in (2, 5, 8):
        got, low, plain = jax.jit(lambda *args: [f(*args) for f in (again.call, mixed, fn)])(
            w, x[:rows]
        )
        assert rel_error(got, low) < 1e-5
        assert rel_error(got, plain) < 2e-2


def test_the_exported_gradient_is_low_too():
    exported = export.export(pp.auto_mixed(loss))(W_SPEC, *symbolic("batch, 8"))
    again = export.deserialize(exported.serialize(vjp_order=1))
    assert again.has_vjp()
    assert "xbf16>" in again.vjp().mlir_module()
    got, want = jax.jit(lambda *args: [jax.grad(f)(*args) for f in (again.call, loss)])(W, X)
    assert rel_error(got, want) < 2e-2


def test_what_is_exported_can_be_called_under_the_pass():
    exported = export.export(jax.jit(loss))(W_SPEC, jax.ShapeDtypeStruct((8, 8), jnp.float32))
    with pytest.warns(pp.PrecisionWarning) as heard:
        found = pp.inspect(exported.call)(W, X)
    unentered, nothing = (str(w.message) for w in heard)
    assert re.search(r"call_exported .* contains 2 product", unentered)
    assert "what is not entered holds its products" in nothing
    with quiet():
        out = pp.auto_mixed(exported.call)(W, X)
    assert low_values(found.after) == [], "an exported program is opaque: its types are fixed"
    np.testing.assert_array_equal(out, jax.jit(loss)(W, X))


# ---------------------------------------------------------------- symbolic dimensions


def test_symbolic_dimensions_count_with_the_nominal_size():
    def product(x):
        return x @ x.T

    jaxpr = jax.make_jaxpr(product)(*symbolic("n, 8"))
    graph = Graph.build(jaxpr)
    (row,) = (i for i, name in enumerate(graph.primitives) if name == "dot_general")
    assert graph.flops[row] == 2 * NOMINAL_SIZE * NOMINAL_SIZE * 8
    known = dict(zip((v for v, _ in graph.values), graph.value_bytes, strict=True))
    opened = getattr(jaxpr, "jaxpr", jaxpr)
    assert known[opened.invars[0]] == NOMINAL_SIZE * 8 * 4


@pytest.mark.release(keep=2)
@pytest.mark.parametrize("policy", ["AutoMixedBf16", "AutoMixed", "AlwaysBf16", "AlwaysF16"])
def test_a_symbolic_program_gets_the_plan_of_a_concrete_one(policy):
    with quiet():
        found = pp.inspect(jax.grad(loss), policy)(W_SPEC, *symbolic("batch, 8"))
        concrete = pp.inspect(jax.grad(loss), policy)(W, X)

    def decided(inspection):
        pairs = ((e.primitive.name, d.compute) for e, d, _ in inspection.decisions())
        return [pair for pair in pairs if pair[0] in ("dot_general", "tanh", "exp", "reduce_sum")]

    assert decided(found) == decided(concrete) != []
    assert len(low_products(found.after)) == len(products(found.after)) == 5


def test_arithmetic_on_symbolic_dimensions():
    def fn(x, y):
        joined = jnp.concatenate([x, y])
        return joined.reshape(-1) @ joined.reshape(-1), (x @ y.T).sum() / x.shape[0]

    specs = symbolic("a, 8", "b, 8")
    again = export.deserialize(export.export(pp.auto_mixed(fn))(*specs).serialize())
    for a, b in ((1, 2), (3, 5)):
        some = np.asarray(X)[:a], np.asarray(W)[:b]
        got, want = jax.jit(lambda *args: (again.call(*args), fn(*args)))(*some)
        assert rel_error(got, want) < 2e-2


# ---------------------------------------------------------------- platforms


def module(fn, *platforms):
    exported = export.export(pp.auto_mixed(fn), platforms=platforms)(W_SPEC, W_SPEC)
    assert exported.platforms == platforms
    return exported.mlir_module()


@pytest.mark.release(keep=2)
@pytest.mark.parametrize("fn", [loss, jax.grad(loss), scanned], ids=["f", "grad", "scan"])
def test_the_form_of_a_product_is_that_of_its_platform(fn):
    assert "optimization_barrier" in (text := module(fn, "cpu"))
    assert "stablehlo.case" not in text
    for platform in ("cuda", "rocm", "tpu"):
        text = module(fn, platform)
        assert "optimization_barrier" not in text, f"{platform}: a barrier would cost the fusion"
        assert "xbf16>" in text
        assert "stablehlo.case" not in text, f"{platform}: a program for one has no cases"


def test_one_program_for_several_platforms():
    mixed = pp.auto_mixed(jax.grad(loss))
    exported = export.export(mixed, platforms=ALL)(W_SPEC, *symbolic("batch, 8"))
    text = exported.mlir_module()
    assert "optimization_barrier" in text
    assert "stablehlo.case" in text
    again = export.deserialize(exported.serialize())
    got, want = jax.jit(lambda *args: (again.call(*args), mixed(*args)))(W, X)
    assert rel_error(got, want) < 1e-5


def test_the_trace_is_the_same_for_every_platform():
    mixed = pp.auto_mixed(jax.grad(loss))
    traced = mixed.trace(W, X)
    for platform in ALL:
        assert "xbf16>" in traced.lower(lowering_platforms=(platform,)).as_text()
    with jax.default_device(jax.devices()[1]):
        assert str(mixed.trace(W, X).jaxpr) == str(traced.jaxpr)


def test_every_layout_of_a_product_runs_on_this_platform():
    """No form relies on a kernel that the platform lacks (design section 6, transposes)."""

    def fn(w, x):
        y = jnp.einsum("bi,io->bo", x, w)
        z = jnp.einsum("bi,bo->io", x, y)
        return z.T @ jnp.einsum("bi,bo->oi", y, x).T

    exported = export.export(pp.auto_mixed(jax.grad(lambda w, x: fn(w, x).sum())), platforms=ALL)
    again = export.deserialize(exported(W_SPEC, W_SPEC).serialize())
    plain = jax.grad(lambda w, x: fn(w, x).sum())
    got, want = jax.jit(lambda *args: (again.call(*args), plain(*args)))(W, X)
    assert rel_error(got, want) < 2e-2
