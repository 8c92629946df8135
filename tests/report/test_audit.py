"""`audit` against programs that XLA is known to change, and against those that it runs as planned.

What XLA does differs between releases: whether it changed a program is asked of the compiled
program's text, or of its numbers, by means that have nothing to do with the audit's.
"""

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import AxisType, PartitionSpec

import precpass as pp
from tests.support.audits import audited, bf16, f16, f32, factor_dtypes, kinds, of
from tests.support.example_programs import PROGRAMS, attention
from tests.support.jaxprs import products
from tests.support.values import normal

P = PartitionSpec

# ---------------------------------------------------------------- products


def dot(x: Any, w: Any, out: Any = None) -> Any:
    return lax.dot_general(x, w, (((x.ndim - 1,), (0,)), ((), ())), preferred_element_type=out)


def batched(x: Any, w: Any) -> Any:
    return lax.dot_general(x, w, (((2,), (1,)), ((0,), (0,))), preferred_element_type=f32)


def convolution(x: Any, k: Any) -> Any:
    numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=numbers)


FORMS = {
    "low -> low": (functools.partial(dot, out=None), (8, 16), (16, 24)),
    "low -> f32": (functools.partial(dot, out=f32), (8, 16), (16, 24)),
    "vector": (functools.partial(dot, out=f32), (8, 16), (16,)),
    "batched": (batched, (3, 8, 16), (3, 16, 24)),
    "convolution": (convolution, (2, 6, 6, 4), (3, 3, 4, 8)),
}


@pytest.mark.release(keep=2)
@pytest.mark.parametrize("dtype", [bf16, f16], ids=["bf16", "f16"])
@pytest.mark.parametrize("form", FORMS)
def test_a_product_is_found_exactly_where_xla_widens_its_operands(form, dtype):
    fn, *shapes = FORMS[form]
    found = audited(fn, *(of(dtype, *shape) for shape in shapes))
    (pair,) = factor_dtypes(found.hlo)
    low = {bf16: "bf16", f16: "f16"}[dtype]
    assert set(pair) <= {low, "f32"}
    if set(pair) == {low}:
        assert (found.findings, found.as_planned, found.products) == ((), 1, 1)
        return
    (finding,) = found.findings
    assert (finding.kind, finding.planned_dtype, finding.compiled_dtype) == (
        "product widened",
        low,
        "f32",
    )
    assert finding.source.line == fn_line(fn)
    assert (found.as_planned, found.products, found.ok) == (0, 1, False)


def fn_line(fn: Callable[..., Any]) -> int:
    """The line of the product in one of the functions above: the last of its text."""
    code = getattr(fn, "func", fn).__code__
    return max(line for _, _, line in code.co_lines() if line)


def test_both_answers_occur_among_these_products():
    answers = {
        audited(fn, *(of(dtype, *shape) for shape in shapes)).ok
        for dtype, form in ((f16, "low -> low"), (bf16, "low -> f32"))
        for fn, *shapes in [FORMS[form]]
    }
    # XLA:CPU has no kernel for float16, and one for (bfloat16, bfloat16) -> float32
    assert answers == {True, False}


def test_equal_products_of_a_line_are_told_apart_by_size():
    def fn(x, v, y):
        return [a @ b for a, b in ((x, v), (y, y))]

    found = audited(fn, of(f16, 8, 16), of(f16, 16, 4), of(f32, 5, 5))
    assert found.products == 2
    assert found.as_planned == 1
    (finding,) = found.findings
    assert finding.planned.startswith("f16[8,16] f16[16,4]")


def test_equal_products_are_one_finding_with_their_number():
    def fn(x):
        for _ in range(3):
            x = x @ x
        return x

    (finding,) = audited(fn, of(f16, 8, 8)).findings
    assert finding.times == 3
    assert "(3 times)" in str(finding)


@pytest.mark.release(keep=1)
@pytest.mark.parametrize("policy", [pp.AlwaysF32, pp.AutoMixedBf16, pp.AlwaysBf16], ids=repr)
@pytest.mark.parametrize("name", ["pytrees", "attention", "loops", "gradient"])
def test_each_product_of_the_plan_is_audited(name, policy):
    (program,) = (p for p in PROGRAMS if p.name == name)
    found = audited(program.fn, *program.args(), policy=policy)
    assert found.products == len(products(found.inspection.after))
    widened = sum(f.times for f in found.findings if f.kind == "product widened")
    assert found.products == found.as_planned + widened + found.merged
    # what is planned low and runs wide, counted without names or lines
    planned_low = sum(
        {v.aval.dtype.name for v in eqn.invars[:2]} == {"bfloat16"}
        for eqn in products(found.inspection.after)
    )
    compiled_low = sum(set(pair) == {"bf16"} for pair in factor_dtypes(found.hlo))
    assert widened == planned_low - compiled_low
    assert found.merged == 0


# ---------------------------------------------------------------- casts


def test_a_rounding_that_xla_leaves_out_is_found():
    def fn(x, y):
        return (x * y).astype(f32)

    x, y = (jnp.asarray(normal(seed, 8, 8)).astype(bf16) for seed in (0, 1))
    found = audited(fn, x, y)
    out = np.asarray(jax.jit(fn)(x, y))
    is_rounded = np.array_equal(out, np.asarray(out.astype(bf16), np.float32))
    if is_rounded:
        assert found.ok
        return
    (finding,) = found.findings
    assert (finding.kind, finding.planned_dtype, finding.compiled_dtype) == (
        "cast removed",
        "bf16",
        "f32",
    )
    assert finding.source.line == fn.__code__.co_firstlineno + 1


@pytest.mark.parametrize("dtype", [bf16, f16], ids=["bf16", "f16"])
def test_a_cast_down_and_up_is_found_exactly_where_xla_removes_it(dtype):
    def fn(x):
        return x.astype(dtype).astype(f32) * np.float32(2)

    x = jnp.asarray(normal(0, 8, 8))
    found = audited(fn, x)
    out = np.asarray(jax.jit(fn)(x))
    is_rounded = np.array_equal(out / 2, np.asarray(x.astype(dtype).astype(f32)))
    assert kinds(found) == ([] if is_rounded else ["cast removed"])


def test_an_exact_cast_up_and_down_may_go():
    def fn(x):
        return x.astype(f32).astype(bf16) * bf16(2)

    assert audited(fn, of(bf16, 8, 8)).ok


# ---------------------------------------------------------------- loops


def stacks(c: Any, ws: Any) -> Any:
    def body(c, w):
        c = jnp.tanh(c @ w)
        return c, c

    return lax.scan(body, c, ws)


def test_loop_state_and_stacks_in_float32_are_found():
    found = audited(stacks, of(bf16, 8, 8), of(bf16, 5, 8, 8))
    (loop,) = (line for line in found.hlo.splitlines() if " while(" in line)
    held = loop.partition(" while(")[0]
    assert ("loop state widened" in kinds(found)) == ("f32[5,8,8]" in held)
    rewrites = re.search(r"= f32\[5,8,8\]\S* dynamic-update-slice\(", found.hlo)
    assert ("buffer widened" in kinds(found)) == (rewrites is not None)
    wide = [pair for pair in factor_dtypes(found.hlo) if set(pair) == {"f32"}]
    assert kinds(found).count("product widened") == len(wide)
    for finding in found.findings:
        assert (finding.planned_dtype, finding.compiled_dtype) == ("bf16", "f32")


def test_a_loop_invariant_that_xla_holds_widened_is_found():
    def fn(x):
        return lax.fori_loop(0, 5, lambda i, c: jnp.sin(c) * x, x)

    found = audited(fn, of(bf16, 8, 8))
    (loop,) = (line for line in found.hlo.splitlines() if " while(" in line)
    is_wide = "f32[8,8]" in loop.partition(" while(")[0]
    assert kinds(found) == (["loop state widened"] if is_wide else [])
    if is_wide:
        assert found.findings[0].planned == "loop input bf16[8,8]"


def test_a_float32_loop_is_as_planned():
    found = audited(stacks, of(f32, 8, 8), of(f32, 5, 8, 8), policy=pp.AutoMixedBf16)
    assert found.ok, str(found)
    assert (found.as_planned, found.products) == (1, 1)


# ---------------------------------------------------------------- collectives


def over_devices(fn: Callable[..., Any], ins: Any, outs: Any) -> Callable[..., Any]:
    mesh = jax.make_mesh((4,), ("d",), axis_types=(AxisType.Auto,))
    return jax.shard_map(fn, mesh=mesh, in_specs=ins, out_specs=outs)


@pytest.mark.parametrize("dtype", [bf16, f32], ids=["bf16", "f32"])
def test_collectives_in_another_dtype_are_found(dtype):
    def fn(x):
        y = over_devices(lambda x: lax.psum(x, "d"), (P("d"),), P())(x)
        return over_devices(lambda y: lax.all_gather(y, "d"), (P("d"),), P(None, "d"))(y)

    found = audited(fn, of(dtype, 32, 8))
    sent = re.findall(r"= (\w+)\[\S* (?:all-reduce|all-gather)\(", found.hlo)
    assert len(sent) == 2
    wide = sent.count("f32") if dtype is bf16 else 0
    assert kinds(found) == ["collective widened"] * wide
    assert [f.compiled_dtype for f in found.findings] == ["f32"] * wide
    assert len({f.source.line for f in found.findings}) == wide


def test_products_and_wide_sums_over_devices_are_as_planned():
    def fn(x, w):
        summed = over_devices(lambda x, w: lax.psum(x @ w, "d"), (P(None, "d"), P("d", None)), P())
        return summed(x, w)

    found = audited(fn, of(f32, 32, 16), of(f32, 16, 8), policy=pp.AutoMixedBf16)
    assert set(factor_dtypes(found.hlo)) == {("bf16", "bf16")}
    assert (found.findings, found.as_planned, found.products) == ((), 1, 1)


# ---------------------------------------------------------------- as planned


@pytest.mark.release(keep=2)
@pytest.mark.parametrize("name", ["pytrees", "gradient", "attention", "loops", "keys", "scalars"])
def test_float32_programs_as_they_are_written_give_no_finding(name):
    (program,) = (p for p in PROGRAMS if p.name == name)
    found = audited(program.fn, *program.args(), policy=pp.AlwaysF32)
    assert found.ok, str(found)
    assert found.as_planned + found.merged == found.products > 0


def test_lowered_products_that_run_low_give_no_finding():
    found = audited(attention, *(of(f32, 6, 8) for _ in range(3)), policy=pp.AutoMixedBf16)
    assert factor_dtypes(found.hlo) == [("bf16", "bf16")] * 2
    assert (found.findings, found.as_planned, found.products) == ((), 2, 2)


def test_a_function_without_products():
    found = audited(lambda x: jnp.tanh(x) + 1, of(f32, 8))
    assert (found.findings, found.products, found.ok) == ((), 0, True)


CACHED = {
    "jax_compilation_cache_dir": None,
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}


def test_a_persistent_cache_of_programs_does_not_bring_back_old_lines(tmp_path):
    """A program that differs in its lines alone is in the cache, with the lines of another day."""
    was = {name: getattr(jax.config, name) for name in CACHED}
    compilation_cache.reset_cache()
    for name, value in {**CACHED, "jax_compilation_cache_dir": str(tmp_path / "cache")}.items():
        jax.config.update(name, value)
    try:
        found = []
        for edit in ("", "\n\n\n"):
            text = f"{edit}def fn(x, w):\n    return x @ w\n"
            module: dict[str, Any] = {}
            exec(compile(text, str(tmp_path / "model.py"), "exec"), module)
            found.append(pp.audit(module["fn"], "AutoMixed")(jnp.ones((8, 8)), jnp.ones((8, 8))))
        assert list((tmp_path / "cache").iterdir())
    finally:
        for name, value in was.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
    assert [(one.as_planned, one.findings[0].source.line) for one in found] == [(0, 2), (0, 5)]
