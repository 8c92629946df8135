"""What compiled programs do: bytes by hand for small texts, and for programs that XLA compiled."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from precpass.measure.execute import compiled
from precpass.measure.traffic import MatrixKernel, traffic_of
from precpass.view.compiled import Compiled

GPU = """HloModule m

%cast (p: f32[8,16]) -> bf16[8,16] {
  %p = f32[8,16]{1,0} parameter(0)
  ROOT %c = bf16[8,16]{1,0} convert(%p)
}

%swap (p: f32[8,16]) -> f32[16,8] {
  %p = f32[8,16]{1,0} parameter(0)
  ROOT %t = f32[16,8]{0,1} transpose(%p), dimensions={1,0}
}

%part (p: f32[4,8,16], i: s32[]) -> f32[8,16] {
  %p = f32[4,8,16]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %z = s32[] constant(0)
  %s = f32[1,8,16]{2,1,0} dynamic-slice(%p, %i, %z, %z), dynamic_slice_sizes={1,8,16}
  %b = f32[8,16]{1,0} bitcast(%s)
  ROOT %n = f32[8,16]{1,0} negate(%b)
}

%put (p: f32[4,8,16], u: f32[8,16], i: s32[]) -> f32[4,8,16] {
  %p = f32[4,8,16]{2,1,0} parameter(0)
  %u = f32[8,16]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %z = s32[] constant(0)
  %b = f32[1,8,16]{2,1,0} bitcast(%u)
  ROOT %d = f32[4,8,16]{2,1,0} dynamic-update-slice(%p, %b, %i, %z, %z)
}

%sum (p: f32[8,16], q: f32[16]) -> bf16[8,16] {
  %p = f32[8,16]{1,0} parameter(0)
  %q = f32[16]{0} parameter(1)
  %w = f32[8,16]{1,0} broadcast(%q), dimensions={1}
  %a = f32[8,16]{1,0} add(%p, %w)
  ROOT %c = bf16[8,16]{1,0} convert(%a)
}

ENTRY %main (x: f32[8,16], w: bf16[16,16], xs: f32[4,8,16], i: s32[], v: f32[16]) -> f32[8,16] {
  %x = f32[8,16]{1,0} parameter(0)
  %w = bf16[16,16]{1,0} parameter(1)
  %xs = f32[4,8,16]{2,1,0} parameter(2)
  %i = s32[] parameter(3)
  %v = f32[16]{0} parameter(4)
BODY
}
"""
X, W = 4 * 8 * 16, 2 * 16 * 16


@pytest.mark.parametrize(
    ("line", "moved", "casts", "transposes"),
    [
        ("f32[8,16]{1,0} add(%x, %x)", 3 * X, 0, 0),
        ("f32[8,16]{1,0} bitcast(%x)", 0, 0, 0),
        ("bf16[8,16]{1,0} fusion(%x), kind=kLoop, calls=%cast", 1.5 * X, 1, 0),
        ("bf16[8,16]{1,0} convert(%x)", 1.5 * X, 1, 0),
        ("f32[16,8]{0,1} fusion(%x), kind=kLoop, calls=%swap", 2 * X, 0, 1),
        # a slice is read, and an update written, as large as they are
        ("f32[8,16]{1,0} fusion(%xs, %i), kind=kLoop, calls=%part", 2 * X + 4, 0, 0),
        ("f32[4,8,16]{2,1,0} fusion(%xs, %x, %i), kind=kLoop, calls=%put", 2 * X + 4, 0, 0),
        (
            "(f32[4,8,16]{2,1,0}, f32[8,16]{1,0}, s32[], f32[4,8,16]{2,1,0}, u32[]) "
            "fusion-start(%xs, %x, %i), kind=kLoop, calls=%put",
            2 * X + 4,
            0,
            0,
        ),
        ("f32[1,8,16]{2,1,0} dynamic-slice(%xs, %i, %i, %i)", 2 * X, 0, 0),
        ("f32[4,8,16]{2,1,0} dynamic-update-slice(%xs, %x, %i, %i, %i)", 2 * X, 0, 0),
        ("bf16[8,16]{1,0} fusion(%x, %v), kind=kLoop, calls=%sum", 1.5 * X + 64, 0, 0),
    ],
)
def test_the_bytes_of_a_kernel(line: str, moved: float, casts: int, transposes: int):
    traffic = traffic_of(GPU.replace("BODY", f"  ROOT %r = {line}"), "gpu")
    assert (traffic.moved, traffic.casts, traffic.transposes) == (moved, casts, transposes)
    assert (traffic.cast_bytes, traffic.cycles) == (moved * casts, None)


def test_a_library_call_is_a_product_without_its_workspace():
    body = """  %c = bf16[8,16]{1,0} fusion(%x), kind=kLoop, calls=%cast
  %p = (bf16[8,16]{1,0}, s8[4096]{0}) custom-call(%c, %w), custom_call_target="__cublas$lt$matmul"
  %b = (f32[8,16]{1,0}, u8[0]{0}) custom-call(%x, %x), custom_call_target="__cudnn$convForward"
  ROOT %r = bf16[8,16]{1,0} get-tuple-element(%p), index=0"""
    traffic = traffic_of(GPU.replace("BODY", body), "gpu")
    assert traffic.products == (
        MatrixKernel("cublas$lt$matmul", ("bf16", "bf16"), ("bf16",), 1),
        MatrixKernel("cudnn$convForward", ("f32", "f32"), ("f32",), 1),
    )
    assert (traffic.runs, traffic.low_runs) == (2, 1)
    assert str(traffic.products[0]) == "cublas$lt$matmul bf16 x bf16 -> bf16"
    assert traffic.moved == 1.5 * X + (X / 2 + W + X / 2) + 3 * X


LOOP = """HloModule m

%body (c: (s32[], f32[8,16])) -> (s32[], f32[8,16]) {
  %c = (s32[], f32[8,16]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %x = f32[8,16]{1,0} get-tuple-element(%c), index=1
  %n = f32[8,16]{1,0:T(8,128)S(1)} negate(%x), backend_config={"estimated_cycles":"100"}
  %m = f32[8,16]{1,0} negate(%n), backend_config={"estimated_cycles":"9223372036854775807"}
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  ROOT %t = (s32[], f32[8,16]{1,0}) tuple(%next, %m)
}

%cond (c: (s32[], f32[8,16])) -> pred[] {
  %c = (s32[], f32[8,16]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %n = s32[] constant(7)
  ROOT %l = pred[] compare(%i, %n), direction=LT
}

ENTRY %main (x: f32[8,16]) -> (s32[], f32[8,16]) {
  %x = f32[8,16]{1,0} parameter(0)
  %zero = s32[] constant(0)
  %c = (s32[], f32[8,16]{1,0}) tuple(%zero, %x)
  ROOT %w = (s32[], f32[8,16]{1,0}) while(%c), condition=%cond, body=%bodyMORE
}
"""


def test_a_loop_counts_times_its_trips():
    by_condition = traffic_of(LOOP.replace("MORE", ""), "gpu")
    assert (by_condition.moved, by_condition.guesses) == (7 * (4 * X + COUNT), False)
    written = ', backend_config={"known_trip_count":{"n":"3"}}'
    assert traffic_of(LOOP.replace("MORE", written), "gpu").moved == 3 * (4 * X + COUNT)


COUNT = 4 + 4 + 4 + 4 + 4 + 1
"""The bytes of a sum and of a comparison of two integers, which are kernels too."""


def test_a_tpus_loop_is_counted_by_its_start_its_step_and_its_bound():
    def trips(**written: str) -> int | None:
        text = LOOP.replace("MORE", "")
        found = {"start": "constant(0)", "step": "constant(1)", "bound": "constant(7)"}
        for name, old in found.items():
            assert text.count(old) == 1
            text = text.replace(old, written.get(name, old))
        for name, old in (("sum", "add(%i, %one)"), ("compared", "compare(%i, %n), direction=LT")):
            text = text.replace(old, written.get(name, old))
        traffic = traffic_of(text, "tpu")
        assert traffic.cycles is not None and (not traffic.guesses or traffic.cycles == 100)
        return None if traffic.guesses else traffic.cycles // 100

    down = {"start": "constant(20)", "step": "constant(-1)", "bound": "constant(3)"}
    assert trips() == 7
    assert trips(start="constant(5)", step="constant(2)", bound="constant(10)") == 3
    assert trips(start="constant(8)") == trips(compared="compare(%i, %n), direction=GT") == 0
    assert trips(sum="add(%one, %i)", compared="compare(%n, %i), direction=GT") == 7
    assert trips(compared="compare(%i, %n), direction=LE") == 8
    assert trips(**down, compared="compare(%i, %n), direction=GT") == 17
    assert trips(**down, compared="compare(%i, %n), direction=GE") == 18
    assert trips(compared="compare(%i, %n), direction=NE") == 7
    assert (
        trips(
            start="constant(9)", sum="subtract(%i, %one)", compared="compare(%n, %i), direction=LT"
        )
        == 2
    )
    # what only run time knows, and what never ends
    for unknown in (
        {"start": "negate(%x)"},
        {"step": "negate(%i)"},
        {"sum": "multiply(%i, %one)"},
        {"sum": "add(%i, %i)"},
        {"compared": "compare(%n, %n), direction=LE"},
        {"compared": "and(%i, %n)"},
        {"compared": "compare(%i, %n), direction=EQ"},
        {"start": "constant(8)", "compared": "compare(%i, %n), direction=GT"},
        {"step": "constant(3)", "compared": "compare(%i, %n), direction=NE"},
    ):
        assert trips(**unknown) is None


def test_a_loops_bound_may_stand_before_the_loops_around_it():
    """XLA moves constants out of a loop: they are then part of its state, which no trip changes."""
    state = "(s32[], f32[8,16]{1,0}, s32[])"
    text = LOOP.replace("MORE", "").replace("(s32[], f32[8,16]{1,0})", state)
    text = text.replace(
        "  %one = s32[] constant(1)\n",
        "  %k = s32[] get-tuple-element(%c), index=2\n  %one = s32[] constant(1)\n",
    )
    text = text.replace("tuple(%next, %m)", "tuple(%next, %m, %k)").replace(
        "tuple(%zero, %x)", "tuple(%zero, %x, %nine)"
    )
    text = text.replace("  %zero =", "  %nine = s32[] constant(9)\n  %zero =").replace(
        "s32[] constant(7)", "s32[] get-tuple-element(%c), index=2"
    )
    assert traffic_of(text, "tpu").cycles == 9 * 100
    changed = traffic_of(text.replace("tuple(%next, %m, %k)", "tuple(%next, %m, %next)"), "tpu")
    assert (changed.cycles, changed.guesses) == (100, True)


def test_what_stays_on_a_tpus_chip_moves_nothing_and_cycles_are_summed():
    traffic = traffic_of(LOOP.replace("MORE", ""), "tpu")
    assert traffic.moved == 7 * (2 * X + COUNT)
    assert traffic.cycles == 7 * 100


def test_a_tpus_kernels_without_an_estimate_are_counted():
    body = """  %b = bf16[4,16,16]{2,1,0} broadcast(%w), backend_config={"estimated_cycles":"10"}
  %c = bf16[8,16]{1,0} convert(%x), backend_config={"estimated_cycles":"20"}
  %n = s32[4]{0} custom-call(%i), custom_call_target="tpu_custom_call"
  %ragged-dot-metadata.1 = s32[4]{0} custom-call(%i), custom_call_target="tpu_custom_call"
  %ragged-dot-none.3 = f32[8,16]{1,0} custom-call(%n, %n, %n, %n, %n, /*index=5*/%c, %b), \
custom_call_target="tpu_custom_call", metadata={op_name="jit(f)/ragged_dot_general/ragged-dot-none"}
  %r = f32[8,16]{1,0} all-reduce(%ragged-dot-none.3), to_apply=%add
  ROOT %k = f32[8,16]{1,0} custom-call(%r), custom_call_target="AllocateBuffer\""""
    traffic = traffic_of(GPU.replace("BODY", body), "tpu")
    assert (traffic.cycles, traffic.without_cycles) == (30, 4)
    assert traffic.products == (MatrixKernel("ragged-dot", ("bf16", "bf16"), ("f32",), 1),)
    assert traffic_of(GPU.replace("BODY", body), "gpu").without_cycles == 0


def test_each_fifth_operand_of_a_fusion_counts_and_has_its_own_place():
    # as XLA prints them: "/*index=5*/" stands before the sixth
    shape = "f32[8,16]{1,0}"
    lines = [f"  %{name} = {shape} negate(%x)" for name in "abcdefg"]
    fusion = "fusion(%a, %b, %c, %d, %e, /*index=5*/%f, %g), kind=kLoop, calls=%all"
    parameters = [f"  %{name} = {shape} parameter({i})" for i, name in enumerate("abcdefg")]
    sums = f"  %z = {shape} add(%a, %f)\n  ROOT %y = {shape} add(%z, %g)"
    fused = "\n".join(["%all (p: f32[8,16]) -> f32[8,16] {", *parameters, sums, "}\n\n%cast ("])
    text = GPU.replace("BODY", "\n".join([*lines, f"  ROOT %r = {shape} {fusion}"]))
    text = text.replace("%cast (", fused, 1)
    assert traffic_of(text, "gpu").moved == 7 * 2 * X + 4 * X


def test_a_conditional_counts_as_its_largest_branch():
    text = """HloModule m

%one (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %n = f32[8]{0} negate(%p)
}

%two (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  %n = f32[8]{0} negate(%p)
  ROOT %m = f32[8]{0} add(%n, %p)
}

ENTRY %main (i: s32[], x: f32[8]) -> f32[8] {
  %i = s32[] parameter(0)
  %x = f32[8]{0} parameter(1)
  ROOT %c = f32[8]{0} conditional(%i, %x, %x), branch_computations={%one, %two}
}
"""
    assert traffic_of(text).moved == 64 + 96


def test_a_text_that_is_no_hlo_is_refused():
    with pytest.raises(ValueError, match="this is not HLO text"):
        traffic_of("module @m {}")


def test_a_scan_that_xla_compiled_here_moves_its_slices_once_per_trip():
    def fn(x: jax.Array, ws: jax.Array) -> jax.Array:
        return lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, ws)[0]

    n, trips = 256, 8
    program = compiled(fn, jnp.ones((n, n)), jnp.ones((trips, n, n)))
    traffic, array = program.traffic, 4.0 * n * n
    assert (traffic.runs, traffic.low_runs, traffic.guesses) == (trips, 0, False)
    # product and tanh by themselves: three arrays and two, and perhaps a copy of the slice
    assert 5 * trips * array <= traffic.moved <= 9 * trips * array


@pytest.mark.parametrize(("dtype", "is_low"), [("c64", False), ("s32", False), ("s8", True)])
def test_products_of_complex_numbers_and_integers_are_kernels_too(dtype: str, is_low: bool):
    (kernel,) = traffic_of(
        f"""HloModule m

ENTRY %main (a: f32[]) -> f32[] {{
  %a = {dtype}[64,64]{{1,0}} parameter(0)
  %b = {dtype}[64,64]{{1,0}} parameter(1)
  ROOT %c = {dtype}[64,64]{{1,0}} custom-call(%a, %b), custom_call_target="__cublas$lt$matmul"
}}
"""
    ).products
    assert kernel.operands == (dtype, dtype) and kernel.is_low is is_low


SENDS = """HloModule m

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}

ENTRY %main (x: bf16[8,16], y: f32[4], i: s32[4]) -> (bf16[32,16], f32[4], bf16[2,16]) {
  %x = bf16[8,16]{1,0} parameter(0)
  %y = f32[4]{0} parameter(1)
  %i = s32[4]{0} parameter(2)
  %g = (bf16[8,16]{1,0}, bf16[32,16]{1,0}) all-gather-start(%x), dimensions={0}
  %d = bf16[32,16]{1,0} all-gather-done(%g)
  %r = f32[4]{0} all-reduce(%y), to_apply=%add
  %n = s32[4]{0} all-reduce(%i), to_apply=%add
  %c = bf16[2,16]{1,0} reduce-scatter(%x), dimensions={0}, to_apply=%add
  ROOT %t = (bf16[32,16]{1,0}, f32[4]{0}, bf16[2,16]{1,0}) tuple(%d, %r, %c)
}
"""


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_what_is_sent_is_told_by_collective_and_format(platform):
    found = traffic_of(SENDS, platform)
    gathered, summed, scattered = 2 * 32 * 16, 4 * 4, 2 * 8 * 16
    assert dict(found.sent) == {
        "all-gather bf16": gathered,
        "all-reduce f32": summed,
        "reduce-scatter bf16": scattered,
    }
    assert found.sent_by_format == [("bf16", gathered + scattered), ("f32", summed)]
    said = "\n".join(Compiled("", None, found).lines())
    assert "sent between devices, sizes of whole arrays: all-gather bf16 1.02 kB, " in said
