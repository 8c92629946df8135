"""`quantized`: weights in 8 bits ahead of time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import export, lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import precpass as pp
from tests.support.jaxprs import named
from tests.support.values import f32, identical, normal_array, rel_error

D = 256
WS = [normal_array(i, D, D) / 16 for i in range(4)]
X = normal_array(9, D, D)


def layers(ws, x):
    for w in ws:
        x = jax.nn.relu(x @ w)
    return x


def turned(ws, x):
    """As equinox and torch have it: a weight's rows are the outputs."""
    for w in ws:
        x = jax.nn.relu(x @ w.T)
    return x


def kinds(tree):
    is_small = [
        isinstance(x, pp.quant.QuantizedArray) for x in jax.tree.leaves(tree, is_leaf=is_whole)
    ]
    return "".join("8" if small else "." for small in is_small)


def is_whole(x):
    return isinstance(x, pp.quant.QuantizedArray)


@pytest.mark.release
@pytest.mark.parametrize(("fn", "order"), [(layers, (1, 0)), (turned, ())])
def test_results_are_those_of_weights_that_are_rounded_in_each_call(fn, order):
    small = pp.quant.quantized(fn)(WS, X)
    assert kinds(small) == "8888"
    # What is summed is stored behind the columns.
    assert (small[1].values.dtype, small[1].scale.shape) == (np.int8, (D, 1))
    assert small[1].order == order
    mixed = pp.auto_mixed(fn, "int8")
    assert rel_error(mixed(small, X), mixed(WS, X)) < 1e-6
    assert rel_error(mixed(small, X), jax.jit(fn)(WS, X)) < 0.03


def rounded(mixed, *args):
    """The number of equations that round an array to 8 bits."""
    equations = named(jax.make_jaxpr(mixed)(*args), "precpass_scaling")
    return sum(v.aval.dtype.itemsize == 1 for e in equations for v in e.outvars)


def test_no_weight_is_rounded_again():
    mixed = pp.auto_mixed(layers, "int8")
    assert rounded(mixed, WS, X) == 8  # the products' weights and operands
    assert rounded(mixed, pp.quant.quantized(layers)(WS, X), X) == 4


def test_float8_has_one_scale():
    small = pp.quant.quantized(layers, "f8")(WS, X)
    assert (small[1].values.dtype, small[1].scale.shape) == (jnp.float8_e4m3fn, (1, 1))
    mixed = pp.auto_mixed(layers, "f8")
    assert rel_error(mixed(small, X), mixed(WS, X)) < 1e-6


def test_under_sixteen_bits_the_weights_alone_have_eight():
    small = pp.quant.quantized(layers)(WS, X)
    mixed = pp.auto_mixed(layers, "bf16")
    whole = jax.tree.map(lambda w: w.array() if is_whole(w) else w, small, is_leaf=is_whole)
    assert identical(mixed(small, X), mixed(whole, X))
    dots = named(jax.make_jaxpr(mixed)(small, X), "dot_general")
    assert {v.aval.dtype.name for dot in dots for v in dot.invars} == {"bfloat16"}


def test_an_array_that_something_else_reads_stays():
    def tied(ws, x):
        return layers(ws, x) + ws[1].sum(), ws[2]

    assert kinds(pp.quant.quantized(tied)(WS, X)) == "8..8"
    with pytest.warns(pp.PrecisionWarning, match="no array of argument 0"):
        pp.quant.quantized(tied)(WS, X[:1])  # the products of one row are too small


def test_an_array_that_is_summed_along_two_dimensions_stays():
    def both(ws, x):
        return layers([*ws[:2], ws[1].T, *ws[2:]], x)

    assert kinds(pp.quant.quantized(both)(WS, X)) == "8.88"


def test_it_takes_other_arguments_and_keywords_and_shapes():
    def applied(x, *, scale, params):
        return layers(params["ws"], x) * scale

    def swapped(mode, params, x, scale=1.0):
        assert mode == "eval"
        return applied(x, scale=scale, params=params)

    small = pp.quant.quantized(swapped, argnums=1)("eval", {"ws": WS, "n": 3}, X, scale=2.0)
    assert kinds(small["ws"]) == "8888" and small["n"] == 3
    shapes = pp.quant.quantized(swapped, argnums=1)("eval", {"ws": [f32(D, D)] * 4}, f32(D, D))
    assert jax.tree.map(lambda s: (s.shape, s.dtype), shapes["ws"][1]).values == ((D, D), np.int8)


def test_weights_under_a_rule():
    policy = pp.AutoMixedBf16.with_rules(pp.Rule(primitive="dot_general", precision="int8"))
    assert kinds(pp.quant.quantized(layers, policy)(WS, X[:1])) == "8888"


@pytest.mark.release
def test_they_are_saved_and_exported_like_other_arrays(tmp_path):
    checkpoints = pytest.importorskip("orbax.checkpoint")
    small = pp.quant.quantized(layers)(WS, X)
    with checkpoints.StandardCheckpointer() as saver:
        saver.save(tmp_path / "small", small)
        saver.wait_until_finished()
        again = saver.restore(tmp_path / "small", jax.tree.map(jnp.zeros_like, small))
    assert identical(again, small)
    mixed = jax.jit(pp.auto_mixed(layers, "int8"))
    exported = export.export(mixed)(small, X)
    assert identical(exported.call(small, X), mixed(small, X))


@pytest.mark.release
def test_under_vmap():
    small, mixed = pp.quant.quantized(layers)(WS, X), pp.auto_mixed(layers, "int8")
    batch = jnp.stack([X, 2 * X])
    got = jax.vmap(mixed, in_axes=(None, 0))(small, batch)
    assert rel_error(got, jax.vmap(layers, in_axes=(None, 0))(WS, batch)) < 0.03
    stacked = jax.tree.map(lambda a: jnp.stack([a, a]), small)
    assert rel_error(jax.vmap(mixed)(stacked, batch), got) < 1e-2


@pytest.mark.release
def test_the_array_of_a_quantized_one_under_transformations():
    values = jnp.arange(-8, 8, dtype=jnp.int8).reshape(4, 4)
    scale = jnp.full((1, 4), 0.5)

    def array(scale):
        return pp.quant.QuantizedArray(values, scale).array()

    wanted = values.astype(jnp.float32) * scale
    assert identical(array(scale), wanted)
    assert identical(jax.jit(array)(scale), wanted)
    assert identical(jax.jvp(array, (scale,), (2 * scale,)), (wanted, 2 * wanted))
    assert identical(
        jax.grad(lambda s: array(s).sum())(scale), values.astype(jnp.float32).sum(0)[None]
    )
    assert identical(jax.vmap(array)(jnp.stack([scale, scale])), jnp.stack([wanted, wanted]))
    of_scalars = jax.vmap(lambda v: pp.quant.QuantizedArray(v, jnp.float32(0.5)).array())
    assert identical(of_scalars(values[None]), wanted[None])
    stack = pp.quant.QuantizedArray(values[:, None], jnp.full((4, 1, 4), 0.5))
    summed, _ = lax.scan(lambda c, q: (c + q.array()[0], None), jnp.zeros(4), stack)
    assert identical(summed, wanted.sum(0))
    assert "QuantizedArray(" in repr(stack) and stack.shape == (4, 1, 4)


def scanned(params, x):
    def layer(x, p):
        return x + jnp.tanh(x @ p["up"]) @ p["down"], None

    x = jnp.sin(x)
    return lax.scan(jax.checkpoint(layer), x, params["layers"])[0] @ params["head"]


def looped(params, x):
    def twice(state):
        return state[0] + 1, jnp.tanh(state[1] @ params["ws"][1]) @ params["ws"][2]

    return lax.while_loop(lambda s: s[0] < 2, twice, (0, jnp.sin(x)))[1] @ params["ws"][0]


def branched(params, x):
    w = params["ws"]
    x = lax.cond(x.sum() > 0, lambda x: jnp.tanh(x @ w[1]), lambda x: x @ w[1].T.T, jnp.sin(x))
    return jax.jit(lambda x, w: x @ w)(x, w[2]) @ w[0]


STACKED = {"layers": {"up": jnp.stack(WS), "down": jnp.stack(WS[::-1])}, "head": WS[0]}


def turned_outside(params, x):
    inner = jax.jit(lambda w, x: jnp.tanh(x @ w))
    again = jax.checkpoint(lambda w, x: jnp.tanh(x @ w))
    w = params["ws"]
    x = again(w[1].T, inner(w[2].T, jnp.sin(x)))
    return lax.cond(x.sum() > 0, lambda w: x @ w, lambda w: jnp.sin(x @ w), w[3].T) @ w[0]


@pytest.mark.release(keep=1)
@pytest.mark.programs
@pytest.mark.parametrize(
    ("fn", "params", "small"),
    [
        (scanned, STACKED, "888"),
        (looped, {"ws": WS}, "888."),
        (branched, {"ws": WS}, "888."),
        (turned_outside, {"ws": WS}, "8888"),
    ],
    ids=["scanned", "looped", "branched", "turned outside"],
)
@pytest.mark.parametrize("policy", ["int8", "f8"])
def test_weights_that_bodies_read(fn, params, small, policy):
    quantized = pp.quant.quantized(fn, policy)(params, X)
    assert kinds(quantized) == small
    mixed = pp.auto_mixed(fn, policy)
    assert rel_error(mixed(quantized, X), mixed(params, X)) < 1e-5
    assert rel_error(mixed(quantized, X), jax.jit(fn)(params, X)) < (
        0.03 if policy == "int8" else 0.15
    )

    plain, ready = rounded(mixed, params, X), rounded(mixed, quantized, X)
    # In float8 both branches read one rounded copy of a weight.
    has_shared = policy == "f8" and fn in (branched, turned_outside)
    read = {scanned: 3, looped: 3, branched: 4, turned_outside: 5}[fn]
    assert plain - ready == read - has_shared
    if fn is not looped:  # JAX differentiates no while loop in reverse
        got = jax.grad(lambda x: mixed(quantized, x).sum())(X)
        assert rel_error(got, jax.grad(lambda x: mixed(params, x).sum())(X)) < 0.1
    assert rel_error(jax.vmap(mixed, (None, 0))(quantized, X[None])[0], mixed(quantized, X)) < 1e-2


@pytest.mark.release
def test_a_stack_that_is_turned_before_a_loop_is_read_as_it_is():
    def fn(params, x):
        ws = jnp.swapaxes(params["ws"], 1, 2)
        x, _ = lax.scan(lambda x, w: (jnp.tanh(x @ w), None), jnp.sin(x), ws)
        return x @ params["head"]

    params = {"ws": np.stack(WS), "head": WS[0]}
    for policy in ("int8", "f8"):
        small = pp.quant.quantized(fn, policy)(params, X)
        assert kinds(small) == "88"
        assert rounded(pp.auto_mixed(fn, policy), small, X) == 2  # the products' other operands
        assert rel_error(pp.auto_mixed(fn, policy)(small, X), jax.jit(fn)(params, X)) < 0.15


def heads(params, x):
    """Two dimensions of a weight are summed, and not the last ones."""
    x = jnp.sin(x).reshape(-1, 4, D // 4)
    x = jnp.einsum("bhd,hdm->bm", x, params["out"].reshape(4, D // 4, D))
    x = jnp.einsum("bhd,hdm->bm", x.reshape(-1, 4, D // 4), params["heads"])
    return jnp.tanh(x) @ params["head"]


@pytest.mark.release
def test_the_summed_dimensions_are_stored_behind_the_others():
    params = {"out": WS[1], "heads": WS[2].reshape(4, D // 4, D), "head": WS[0]}
    for policy in ("int8", "f8"):
        small = pp.quant.quantized(heads, policy)(params, X)
        stored = small["heads"]
        assert (stored.values.shape, stored.order) == ((D, 4, D // 4), (2, 0, 1))
        assert stored.shape == stored.array().shape == (4, D // 4, D)
        assert rel_error(stored.array(), params["heads"]) < 0.05
        mixed = pp.auto_mixed(heads, policy)
        assert rel_error(mixed(small, X), mixed(params, X)) < 1e-5
        # A weight that is reshaped keeps one scale for all, and not one for each column.
        small_again = {"int8": 1, "f8": 0}[policy]
        assert rounded(mixed, small, X) == 3 + small_again
        assert rounded(mixed, params, X) == 6


def of_loop(fn, *args):
    """The jaxpr of a function of `auto_mixed`, its scan, and the jaxpr of the scan's body."""
    jaxpr = jax.make_jaxpr(fn)(*args)
    ((scan,),) = [named(jaxpr, "scan")]
    return jaxpr, scan, scan.params["jaxpr"]


@pytest.mark.release
@pytest.mark.parametrize("policy", ["int8", "f8"])
def test_a_stack_crosses_a_loops_border_as_it_is_stored(policy):
    def fn(params, x):
        x, _ = lax.scan(lambda x, w: (jnp.tanh(x @ w), None), jnp.sin(x), params["ws"])
        return x @ params["head"]

    params = {"ws": jnp.stack(WS)[:, :, : D // 2] @ jnp.eye(D // 2, D), "head": WS[0]}
    small = pp.quant.quantized(fn, policy)(params, X)
    assert small["ws"].order == (1, 0)
    mixed = pp.auto_mixed(fn, policy)
    _, scan, body = of_loop(mixed, small, X)
    eight = [v.aval for v in scan.invars if v.aval.dtype.itemsize == 1]
    assert [aval.shape for aval in eight] == [(len(WS), D, D)]
    # No copy is made of the stored values, neither before the loop nor in it.
    turned = [v.aval for v in named(body, "transpose") for v in v.outvars]
    assert all(aval.dtype.itemsize > 1 for aval in turned)
    (dot,) = named(body, "dot_general")
    assert dot.params["dimension_numbers"][0] == ((1,), (1,))
    assert rel_error(mixed(small, X), mixed(params, X)) < 1e-5


@pytest.mark.release
def test_a_stack_whose_first_dimension_is_another_one_outside_is_right():
    def fn(params, x):
        ws = jnp.moveaxis(params["ws"], 2, 0)
        x, _ = lax.scan(lambda x, w: (jnp.tanh(x @ w), None), jnp.sin(x), ws)
        return x @ params["head"]

    params = {"ws": np.stack(WS, axis=2), "head": WS[0]}
    for policy in ("int8", "f8"):
        small = pp.quant.quantized(fn, policy)(params, X)
        assert kinds(small) == "88" and small["ws"].shape == (D, D, len(WS))
        assert small["ws"].order == (1, 2, 0)
        # A stack in float32 crosses the loop's border in 16 bits.
        found = pp.auto_mixed(fn, policy)(small, X)
        assert rel_error(found, jax.jit(fn)(params, X)) < (0.03 if policy == "int8" else 0.15)


def test_layers_are_stacked_and_taken_from_a_stack():
    """The order is one of the last dimensions, so others may come and go before them."""
    small = pp.quant.quantized(layers)(WS, X)[1:3]
    stack = jax.tree.map(lambda *xs: jnp.stack(xs), *small)
    assert stack.order == (1, 0) and stack.shape == (2, D, D)
    again = jax.tree.map(lambda a: a[1], stack)
    assert identical(again, small[1])
    assert identical(stack.array()[1], small[1].array())


def test_a_weight_that_is_summed_along_both_dimensions_keeps_its_order():
    def tied(ws, x):
        w = ws[1]
        return jnp.tanh(jnp.tanh(jnp.sin(x) @ w) @ w.T) @ ws[0]

    small = pp.quant.quantized(tied, "f8")(WS[:2], X)
    assert kinds(small) == "88" and small[1].order == ()
    mixed = pp.auto_mixed(tied, "f8")
    assert rel_error(mixed(small, X), mixed(WS[:2], X)) < 1e-5
    # int8 has scales along either dimension, and one array cannot have both.
    assert kinds(pp.quant.quantized(tied)(WS[:2], X)) == "8."


def test_a_quantized_array_has_the_type_of_its_array():
    small = pp.quant.QuantizedArray(jnp.ones((4, 2), jnp.int8), jnp.ones((1, 2)))
    assert (small.shape, small.ndim, small.dtype) == ((4, 2), 2, jnp.float32)
    assert small.array().dtype == small.dtype
    for shape in [(2,), (4, 1, 2), (3, 2)]:
        with pytest.raises(ValueError, match=r"has a scale of shape .* legal are \(\)"):
            pp.quant.QuantizedArray(small.values, jnp.ones(shape)).array()


def test_an_explanation_knows_the_arrays_of_8_bits():
    text = str(pp.explain(layers, "int8")(pp.quant.quantized(layers)(WS, X), X))
    assert "unknown to precpass" not in text


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="AutoMixedBf16 multiplies nothing in 8 bits"):
        pp.quant.quantized(layers, "bf16")
    with pytest.raises(ValueError, match="argnums = 2: there is no such argument among the 2"):
        pp.quant.quantized(layers, argnums=2)(WS, X)
    for argnums in ((0,), "ws", True):
        with pytest.raises(TypeError, match="the position of one argument"):
            pp.quant.quantized(layers, argnums=argnums)
    with pytest.raises(ValueError, match="unknown policy"):
        pp.quant.quantized(layers, "int9")
    with pytest.raises(TypeError, match="takes a function, not None"):
        pp.quant.quantized(None)
    with pytest.raises(TypeError, match="holds QuantizedArrays already"):
        pp.quant.quantized(layers)(pp.quant.quantized(layers)(WS, X), X)


def test_a_module_of_flax_nnx_is_refused_and_its_state_taken():
    class Model(nnx.Module):
        def __init__(self, rngs):
            for i in range(3):
                setattr(self, f"layer{i}", nnx.Linear(D, D, rngs=rngs))

        def __call__(self, x):
            return self.layer2(nnx.relu(self.layer1(nnx.relu(self.layer0(x)))))

    model = Model(nnx.Rngs(0))

    def applied(model, x):
        return model(x)

    graph, state = nnx.split(model)
    for given in (model, state, {"kernel": model.layer0.kernel}):
        with pytest.raises(TypeError, match=r"nnx.to_pure_dict\(nnx.split\(model\)\[1\]\)"):
            pp.quant.quantized(applied)(given, X)

    def of_dict(pure, x):
        own = nnx.state(model)
        nnx.replace_by_pure_dict(own, pure)
        return nnx.merge(graph, own)(x)

    pure = nnx.to_pure_dict(state)
    small = pp.quant.quantized(of_dict)(pure, X)
    assert is_whole(small["layer1"]["kernel"])
    assert rel_error(pp.auto_mixed(of_dict, "int8")(small, X), model(X)) < 0.02


@pytest.mark.release
def test_a_stack_on_a_mesh_of_explicit_axes_is_read_as_it_is():
    axes = (AxisType.Explicit,) * 2
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=axes, devices=jax.devices()[:4])

    def fn(ws, x):
        def layer(x, w):
            return jnp.tanh(jnp.einsum("ij,jk->ik", x, w, out_sharding=P("data", None))), None

        return lax.scan(layer, jnp.sin(x), ws["stack"])[0] @ ws["head"]

    with jax.set_mesh(mesh):
        stack = jax.device_put(jnp.stack(WS), NamedSharding(mesh, P(None, None, "model")))
        ws = {"stack": stack, "head": jax.device_put(WS[0], NamedSharding(mesh, P(None, None)))}
        x = jax.device_put(X, NamedSharding(mesh, P("data", None)))
        for policy in ("int8", "f8"):
            small, mixed = pp.quant.quantized(fn, policy)(ws, x), pp.auto_mixed(fn, policy)
            assert kinds(small) == "88" and rounded(mixed, small, x) == 2
            got, want = (np.asarray(v) for v in (mixed(small, x), fn(ws, x)))
            assert rel_error(got, want) < 0.15


@pytest.mark.release
@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint], ids=["jit", "checkpoint"])
def test_one_function_for_several_layers(wrap):
    layer = wrap(lambda w, x: jnp.tanh(x @ w))

    def fn(ws, x):
        for w in ws:
            x = layer(w, x)
        return x

    for policy in ("int8", "f8"):
        small = pp.quant.quantized(fn, policy)(WS, X)
        assert kinds(small) == "8888"
        mixed = pp.auto_mixed(fn, policy)
        assert rounded(mixed, small, X) == 4
        assert rel_error(mixed(small, X), jax.jit(fn)(WS, X)) < (0.05 if policy == "int8" else 0.15)


@pytest.mark.release
def test_layers_of_float8_are_stacked_for_a_loop():
    def scanned(ws, x):
        first, stack, last = ws
        step = lambda x, w: (jnp.tanh(x @ w), None)  # noqa: E731
        return lax.scan(step, jnp.tanh(x @ first), stack)[0] @ last

    def unrolled(ws, x):
        for w in ws[:-1]:
            x = jnp.tanh(x @ w)
        return x @ ws[-1]

    small = pp.quant.quantized(unrolled, "f8")(WS, X)
    stack = jax.tree.map(lambda *xs: jnp.stack(xs), *small[1:3])
    got = pp.auto_mixed(scanned, "f8")((small[0], stack, small[-1]), X)
    assert rel_error(got, pp.auto_mixed(unrolled, "f8")(small, X)) < 0.05
    assert rel_error(got, jax.jit(unrolled)(WS, X)) < 0.15
    assert stack.array().shape == (2, D, D)


@pytest.mark.parametrize(
    ("policy", "said", "error"),
    [("int8", "int8", 0.02), ("f8", "no derivative with respect to them", 0.1)],
)
def test_a_gradient_with_respect_to_them_is_refused_and_to_others_is_near(policy, said, error):
    small, mixed = pp.quant.quantized(layers, policy)(WS, X), pp.auto_mixed(layers, policy)
    with pytest.raises(TypeError, match=said):
        jax.grad(lambda ws: mixed(ws, X).sum())(small)
    got = jax.grad(lambda x: mixed(small, x).sum())(X)
    assert rel_error(got, jax.grad(lambda x: mixed(WS, x).sum())(X)) < error
