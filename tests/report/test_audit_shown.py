"""What `audit` takes as a function and arguments, and how it shows what it found."""

import dataclasses
import json
import linecache
import types
import warnings
import xml.etree.ElementTree as ET
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import pytest

import precpass as pp
from precpass.measure import execute
from tests.support.audits import audited, f16, f32, kinds, of
from tests.support.example_programs import mlp_args, mlp_loss
from tests.support.jaxprs import products

# ---------------------------------------------------------------- arguments


def product(x: Any, w: Any) -> Any:
    return x @ w


def test_arrays_and_shapes_give_the_same_audit():
    arrays = pp.audit(product)(jnp.ones((8, 8)), jnp.ones((8, 8)))
    shapes = pp.audit(product)(of(f32, 8, 8), of(f32, 8, 8))
    assert arrays.to_dict() == shapes.to_dict()


def test_the_function_is_traced_once():
    traces: list[None] = []

    def fn(x, w):
        traces.append(None)
        return x @ w

    pp.audit(fn)(jnp.ones((8, 8)), jnp.ones((8, 8)))
    assert len(traces) == 1


class Config:
    """A static argument that calls a method `shape`."""

    def shape(self) -> tuple[int, int]:
        return 8, 8


def test_a_static_arguments_shape_is_no_arrays():
    def reshaped(x: jax.Array, config: Config) -> jax.Array:
        return x.reshape(config.shape()) @ x.reshape(config.shape()).T

    mixed = pp.auto_mixed(reshaped, static_argnames="config")
    assert pp.audit(mixed)(jnp.ones(64), Config()).products == 1


def test_symbolic_dimensions_are_refused_by_name():
    n, m = jax.export.symbolic_shape("n, 2*m")
    wide = of(f32, 8, 8)
    with pytest.raises(TypeError, match=r"w\['kernel'\] has the symbolic dimension 2\*m: give a"):
        pp.audit(lambda x, w: x @ w["kernel"])(wide, {"kernel": of(f32, 8, m)})
    x = jax.ShapeDtypeStruct((n, 4), jnp.float32)
    compared = pp.compare(lambda x: x @ x.T, ["AutoMixedBf16"], columns="temp")
    with pytest.raises(TypeError, match=r"compare compiles .* x has the symbolic dimension n"):
        compared(x)
    with pytest.raises(TypeError, match="x has the symbolic dimension n"):
        pp.audit(pp.auto_mixed(product))(w=wide, x=of(f32, n, 8))
    assert pp.inspect(product)(of(f32, n, 8), wide).plan


def test_the_backend_is_the_one_that_was_compiled_for(monkeypatch):
    compiled = execute.compiled

    def on_another(*args, **kwargs):
        return dataclasses.replace(
            compiled(*args, **kwargs),
            device=types.SimpleNamespace(platform="tpu", device_kind="TPU v5"),
        )

    monkeypatch.setattr(execute, "compiled", on_another)
    found = pp.audit(product)(of(f32, 8, 8), of(f32, 8, 8))
    assert (found.backend, found.device_kind) == ("tpu", "TPU v5")
    assert "1 of 1 matrix product as planned" in str(found) and "for TPU v5;" in str(found)


def test_transformed_functions_are_audited():
    def loss(w, x):
        return jnp.sum(jnp.tanh(x @ w))

    mapped = jax.vmap(jax.grad(loss), in_axes=(None, 0))
    found = audited(mapped, of(f32, 8, 8), of(f32, 3, 8, 8), policy=pp.AutoMixedBf16)
    assert found.products == len(products(found.inspection.after)) == 2


def test_options_of_auto_mixed_count():
    mixed = pp.auto_mixed(
        lambda x, n, how: jnp.tanh(x @ x) * n if how == "tanh" else x,
        policy="AutoMixed",
        static_argnums=1,
        donate_argnums=0,
    )
    found = pp.audit(mixed)(jnp.ones((8, 8)), 3, "tanh")
    assert found.inspection.policy == pp.AutoMixed
    assert found.products == 1
    # XLA:CPU has no kernel for float16
    assert kinds(found) == ["product widened"]
    assert "AutoMixed (float16): " in found.findings[0].reason
    # and its own policy gives way to one that is asked for
    assert pp.audit(mixed, "AutoMixedBf16")(jnp.ones((8, 8)), 3, "tanh").ok


def test_bound_methods_are_taken():
    @jax.tree_util.register_static
    class Model:
        @pp.auto_mixed
        def call(self, x, w):
            return x @ w

    assert pp.audit(Model().call)(of(f32, 8, 8), of(f32, 8, 8)).as_planned == 1


def test_the_users_error_shows_first():
    def fn(x):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        pp.audit(fn)(of(f32, 8))


def test_the_plans_warnings_come_once():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pp.audit(lambda x: jnp.tanh(x))(of(f32, 8))
    assert [w.category for w in caught] == [pp.PrecisionWarning]


def test_a_reason_is_that_of_the_planned_precision():
    def fn(x, y):
        out = []
        for a, precision in ((x, "f16"), (y, "f32")):
            with pp.keep(precision):
                out.append(a @ a)
        return out

    found = audited(fn, of(f32, 8, 8), of(f32, 8, 8), policy=pp.AlwaysF32)
    assert (found.products, found.as_planned) == (2, 1)
    assert [f.reason for f in found.findings] == ["keep('f16')"]


def test_what_a_jitted_function_of_jax_does_stands_at_its_call():
    jax.clear_caches()  # a function that is traced already has the lines of its first call

    def once(x):
        return jnp.convolve(x, x)

    def twice(x):
        y = jnp.convolve(x, x)
        return jnp.convolve(y, y)

    found = audited(once, of(f32, 8), policy=pp.AutoMixed)
    line = once.__code__.co_firstlineno + 1
    assert {(f.source.line, f.operation) for f in found.findings} == {
        (line, "conv_general_dilated")
    }
    assert all("AutoMixed (float16): compute in f16" in f.reason for f in found.findings)
    # of two calls none is better than a wrong one
    assert {f.source.line for f in audited(twice, of(f32, 8), policy=pp.AutoMixed).findings} == {0}


# ---------------------------------------------------------------- what is shown


@pytest.fixture(scope="module")
def changed() -> pp.report.Audit:
    """One product that runs in float32 and one as planned."""

    def fn(x, w):
        with jax.named_scope("head"):
            y = x @ x
        return y, w @ w

    return audited(fn, of(f16, 8, 8), of(f32, 4, 4))


def test_findings_stand_under_their_source_line(changed):
    totals, heading, finding = str(changed).splitlines()
    assert heading.endswith("y = x @ x")
    assert "test_audit_shown.py:" in heading
    assert finding.startswith("  dot_general in head: product widened: planned f16[8,8] f16[8,8]")
    assert totals.startswith("switched off: 1 of 2 matrix products as planned; 1 finding. ")
    assert "Compiled by jax" in totals and "for cpu;" in totals


def test_dict_is_json(changed):
    found = json.loads(json.dumps(changed.to_dict()))
    assert found["products"] == {"planned": 2, "as_planned": 1, "changed": 1, "merged": 0}
    assert found["ok"] is False
    (finding,) = found["findings"]
    assert finding["source"]["line"] == changed.findings[0].source.line
    assert finding["planned_dtype"] == "f16"


def test_html_is_well_formed_and_says_the_same(changed):
    root = ET.fromstring(changed._repr_html_())
    text = " ".join("".join(root.itertext()).split())
    lines = str(changed).splitlines()
    assert len(lines) == 3
    for line in lines:
        assert " ".join(line.split()) in text


def test_the_repr_is_one_line(changed):
    assert "\n" not in repr(changed)
    assert repr(changed).startswith("<Audit: ")


def test_a_gradient_that_is_not_as_planned_names_each_line():
    found = audited(jax.grad(mlp_loss), *mlp_args(), policy=pp.AutoMixed)
    decisions = found.inspection.decisions()
    planned = [s for eqn, _, s in decisions if eqn.primitive.name == "dot_general"]
    assert len(planned) == found.products == 5
    # XLA:CPU has no kernel for float16: each product of the plan is widened
    widened = [f for f in found.findings if f.kind == "product widened"]
    assert {f.source for f in widened} == set(planned)
    assert sum(f.times for f in widened) == len(planned)
    headings = [line for line in str(found).splitlines() if not line.startswith("  ")][1:]
    for source in set(planned):
        text = linecache.getline(source.file, source.line).strip()
        (heading,) = [line for line in headings if line.endswith(f"{source.function}  {text}")]
        assert f"example_programs.py:{source.line} " in heading
    assert len(headings) == len({f.source for f in found.findings}) >= 2
    # names of JAX's transforms are no part of the user's scopes
    assert "jvp" not in str(found) and "dot_general, backward: product widened" in str(found)


def test_findings_of_layers_that_differ_in_their_numbers_are_one_line():
    def stack(x, w):
        for i in range(3):
            with jax.named_scope(f"layer_{i}"):
                x = x @ w[i]
        return x

    found = pp.audit(stack, "AutoMixed")(of(f32, 8, 8), of(f32, 3, 8, 8))
    assert [finding.scope for finding in found.findings] == ["layer_0", "layer_1", "layer_2"]
    totals, _, line = found.text().splitlines()
    assert "dot_general in layer_*: product widened" in line and line.endswith("(3 times)")
    assert "3 findings" in totals
