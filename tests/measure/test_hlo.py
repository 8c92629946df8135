"""The reader of HLO text, and what is found in texts that no CPU here gives, written by hand."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from precpass.jit.region import configured
from precpass.measure.hlo import Module, Shape, bits, lowered_text
from precpass.report.audit.changes import changes

# As jax 0.10 and 0.12 print a program: a table of frames at the head, `%` before names.
TEXT = (Path(__file__).parents[1] / "data" / "hlo.txt").read_text(encoding="utf-8")


def test_computations_and_their_instructions():
    module = Module.parse(TEXT)
    assert module.entry == "main.1"
    assert list(module.computations) == ["region_0.1", "fused.1", "body.1", "cond.1", "main.1"]
    main = module.computations["main.1"]
    assert [i.opcode for i in main.instructions] == [
        *("parameter", "constant", "constant", "tuple", "while", "get-tuple-element"),
        *("custom-call", "get-tuple-element", "conditional", "reduce"),
    ]
    assert main.root is main.by_name["sum.1"]
    assert [i.name for i in main.readers["g.1"]] == ["b.2", "sum.1"]
    assert [i.name for i in main.operands(main.by_name["t.2"])] == ["c.1", "x.2", "w.2"]


def test_types_and_tuples():
    module = Module.parse(TEXT)
    state = module.computations["body.1"].by_name["s.1"]
    assert [str(s) for s in state.shapes] == ["s32[]", "f32[8,4]", "bf16[5]"]
    assert [s.size for s in state.shapes] == [1, 32, 5]
    assert [s.bits for s in state.shapes] == [0, 32, 16]
    assert module.computations["body.1"].by_name["y.1"].index == 2


def test_calls_of_every_kind():
    main = Module.parse(TEXT).computations["main.1"]
    assert main.by_name["l.1"].called == (("condition", "cond.1"), ("body", "body.1"))
    assert [name for _, name in main.by_name["b.2"].called] == ["one.1", "two.1"]
    assert main.by_name["sum.1"].called == (("to_apply", "region_0.1"),)
    assert main.by_name["k.1"].target == "__cublas$gemm"
    assert main.by_name["k.1"].operands == ("r.1",)


def test_names_and_lines():
    module = Module.parse(TEXT)
    low = module.computations["fused.1"].by_name["low.1"]
    assert (low.op_name, *low.calls[0]) == (
        *("jit(f)/convert", "/home/me/c.py", "f.<locals>.body"),
        17,
    )
    wide = module.computations["fused.1"].by_name["wide.1"]
    assert (wide.op_name, wide.file, wide.line) == ("", "", 0)
    assert module.computations["main.1"].by_name["x.2"].op_name == 'x["a, (b"]'


def test_the_walk_knows_loops_and_fusions_and_leaves_out_combiners():
    placed = {p.instruction.name: p for p in Module.parse(TEXT).walk()}
    assert "add.1" not in placed
    assert [len(placed[name].loops) for name in ("x.2", "z.1", "low.1")] == [0, 1, 1]
    assert placed["z.1"].caller is None
    assert placed["low.1"].caller is placed["z.1"].instruction


@pytest.mark.parametrize("text", ["", "HloModule m\n", "module @jit_f { }"])
def test_what_is_no_hlo_is_an_error(text):
    with pytest.raises(ValueError, match="this is not HLO text: give what"):
        Module.parse(text)


def test_bits_and_types():
    assert [bits(d) for d in ("f32", "bf16", "f8e4m3fn", "f4e2m1fn", "s32", "c64", "token")] == [
        *(32, 16, 8, 4, 0, 0, 0)
    ]
    assert str(Shape("f32")) == "f32[]"


def test_every_instruction_that_this_jax_prints_is_read():
    def fn(x, w):
        def body(c, w):
            return jnp.tanh(c @ w), jnp.sum(c)

        c, sums = jax.lax.scan(body, x, w)
        return jax.lax.cond(sums[0] > 0, jnp.sin, jnp.cos, c), jnp.sort(sums)

    # Without it a program in JAX's cache on disk has the lines of the day when it was compiled.
    with configured("jax_compilation_cache_include_metadata_in_key", True):
        lowered = jax.jit(fn).lower(jnp.ones((4, 4)), jnp.ones((3, 4, 4)))
        texts = lowered_text(lowered), lowered.compile().as_text()
    for text in texts:
        read = [i for c in Module.parse(text).computations.values() for i in c.instructions]
        body = text[text.index("\n\n\n") :] if "StackFrames" in text else text
        assert len(read) == sum(" = " in line for line in body.splitlines()) > 20
        assert all(i.shapes for i in read)
        assert any(i.line == fn.__code__.co_firstlineno + 2 for i in read)
        called = [name for i in read for _, name in i.called]
        assert len(called) > 3 and all(name in Module.parse(text).computations for name in called)


# ---------------------------------------------------------------- changes in texts

TABLES = "\n\n".join(
    f"{name}\n" + "\n".join(row.format(n=n) for n in range(rows[0], rows[1]))
    for name, rows, row in (
        ("FileNames", (1, 2), '{n} "a.py"'),
        ("FileLocations", (1, 10), "{n} {{file_name_id=1 function_name_id=1 line={n}}}"),
        ("StackFrames", (1, 10), "{n} {{file_location_id={n}}}"),
    )
)


def parsed(text: str) -> Module:
    """A module of a text without `%`, in which `@name:line` says where an instruction is from."""
    text = re.sub(r"(?m) @(.+):(\d+)$", r', metadata={op_name="\1" stack_frame_id=\2}', text)
    named = re.sub(r'(?<![\w.="/%])([a-z]\w*\.\d+)', r"%\1", text)
    return Module.parse(f"HloModule jit_f\n\n{TABLES}\n\n\n{named}")


def program(x: str, *lines: str) -> Module:
    """A module with parameters x.1 and w.1 of one type."""
    body = "\n".join(f"  {line}" for line in (f"x.1 = {x} parameter(0)", f"w.1 = {x} parameter(1)"))
    body += "".join(f"\n  {line}" for line in lines)
    return parsed(f"ENTRY main.1 (x: f32[]) -> f32[] {{\n{body}\n}}\n")


def found(planned: Module, compiled: Module) -> list[tuple[str, str, str, int]]:
    return [
        (c.kind, c.planned_dtype, c.compiled_dtype, c.source.line)
        for c in changes(planned, compiled).found
    ]


LOW = program("bf16[8,8]{1,0}", "ROOT d.1 = f32[8,8]{1,0} dot(x.1, w.1) @dot_general:3")


def test_a_librarys_kernel_on_the_planned_operands_is_as_planned():
    call = '(f32[8,8]{1,0}, s8[9]{0}) custom-call(x.1, w.1), custom_call_target="__cublas$gemm"'
    compiled = program("bf16[8,8]{1,0}", f"ROOT k.1 = {call} @dot_general:3")
    summary = changes(LOW, compiled)
    assert (summary.found, summary.as_planned, summary.products) == ((), 1, 1)


def test_a_librarys_kernel_on_widened_operands_is_not():
    compiled = program(
        "bf16[8,8]{1,0}",
        "a.1 = f32[8,8]{1,0} convert(x.1)",
        "b.1 = f32[8,8]{1,0} convert(w.1)",
        'ROOT k.1 = f32[8,8]{1,0} custom-call(a.1, b.1), custom_call_target="k" @dot_general:3',
    )
    assert found(LOW, compiled) == [("product widened", "bf16", "f32", 3)]


@pytest.mark.parametrize("target", ["__onednn$matmul", "__onednn$convolution"])
def test_a_kernel_without_a_name_is_that_of_what_reads_its_first_result(target: str):
    call = f'(f32[8,8]{{1,0}}, u8[9]{{0}}) custom-call(x.1, w.1), custom_call_target="{target}"'
    compiled = program(
        "bf16[8,8]{1,0}",
        f"k.1 = {call}",
        "r.1 = f32[8,8]{1,0} get-tuple-element(k.1), index=0",
        "ROOT t.1 = f32[8,8]{0,1} copy(r.1) @dot_general:3",
    )
    summary = changes(LOW, compiled)
    assert (summary.found, summary.as_planned, summary.merged) == ((), 1, 0)


def test_narrower_operands_are_found_unless_they_are_the_same_values():
    wide = program("f32[8,8]{1,0}", "ROOT d.1 = f32[8,8]{1,0} dot(x.1, w.1) @dot_general:3")
    rounded = program(
        "f32[8,8]{1,0}",
        "a.1 = bf16[8,8]{1,0} convert(x.1)",
        "b.1 = bf16[8,8]{1,0} convert(w.1)",
        "ROOT d.1 = f32[8,8]{1,0} dot(a.1, b.1) @dot_general:3",
    )
    assert found(wide, rounded) == [("product narrowed", "f32", "bf16", 3)]
    widened = program(
        "bf16[8,8]{1,0}",
        "a.1 = f32[8,8]{1,0} convert(x.1) @convert_element_type:2",
        "t.1 = f32[8,8]{0,1} transpose(a.1), dimensions={1,0}",
        "b.1 = f32[8,8]{1,0} convert(w.1) @convert_element_type:2",
        "ROOT d.1 = f32[8,8]{1,0} dot(t.1, b.1) @dot_general:3",
    )
    assert found(widened, LOW) == []
    assert changes(widened, LOW).as_planned == 1


def test_a_product_of_float64_that_is_emulated_is_said_to_be():
    wide = program("f64[8,8]{1,0}", "ROOT d.1 = f64[8,8]{1,0} dot(x.1, w.1) @dot_general:3")
    (change,) = changes(wide, LOW).found
    assert change.why == "the device emulates a product of f64 by several of bf16"


def test_a_product_whose_line_xla_lost_is_that_of_its_name():
    def both(line: int, *before: str) -> Module:
        product = f"b.1 = f32[8,8]{{1,0}} dot(y.1, y.1) @f/solve/dot_general:{line}"
        return program(
            "bf16[8,8]{1,0}", *before, "y.1 = f32[8,8]{1,0} convert(x.1)", f"ROOT {product}"
        )

    planned = both(0, "a.1 = bf16[8,8]{1,0} dot(x.1, w.1) @f/dot_general:3")
    summary = changes(planned, both(3))
    assert (summary.found, summary.as_planned, summary.merged) == ((), 1, 1)


def test_products_of_one_line_are_not_taken_for_those_of_other_sizes():
    part = "s.1 = bf16[{},8]{{1,0}} slice(x.1)"
    planned = program(
        "bf16[8,8]{1,0}",
        "a.1 = bf16[8,8]{1,0} dot(x.1, w.1) @dot_general:3",
        part.format(4),
        "ROOT b.1 = bf16[4,8]{1,0} dot(s.1, w.1) @dot_general:3",
    )
    compiled = program(
        "bf16[8,8]{1,0}",
        part.format(2),
        "y.1 = f32[2,8]{1,0} convert(s.1)",
        "v.1 = f32[8,8]{1,0} convert(w.1)",
        "b.1 = f32[2,8]{1,0} dot(y.1, v.1) @dot_general:3",
        "ROOT a.1 = f32[8,8]{1,0} dot(v.1, v.1) @dot_general:3",
    )
    pairs = [(c.planned[-9:], c.compiled[-8:]) for c in changes(planned, compiled).found]
    assert pairs == [("bf16[8,8]", "f32[8,8]"), ("bf16[4,8]", "f32[2,8]")]


def test_rounded_sums_are_found_unless_a_cast_rounds_them():
    low = program(
        "bf16[8,8]{1,0}",
        "d.1 = bf16[8,8]{1,0} dot(x.1, w.1) @dot_general:3",
        "ROOT s.1 = f32[8,8]{1,0} convert(d.1)",
    )
    assert found(LOW, low) == [("product narrowed", "f32", "bf16", 3)]
    cast = program(
        "bf16[8,8]{1,0}",
        "d.1 = f32[8,8]{1,0} dot(x.1, w.1) @dot_general:3",
        "ROOT s.1 = bf16[8,8]{1,0} convert(d.1) @convert_element_type:4",
    )
    fused = program("bf16[8,8]{1,0}", "ROOT d.1 = bf16[8,8]{1,0} dot(x.1, w.1) @dot_general:3")
    assert found(cast, fused) == []


ROUNDED = (
    "a.1 = bf16[8,8]{1,0} convert(x.1) @convert_element_type:5",
    "b.1 = f32[8,8]{1,0} convert(a.1) @convert_element_type:6",
    "ROOT m.1 = f32[8,8]{1,0} multiply(b.1, w.1) @mul:7",
)


def test_a_removed_rounding_is_found():
    planned = program("f32[8,8]{1,0}", *ROUNDED)
    without = program("f32[8,8]{1,0}", "ROOT m.1 = f32[8,8]{1,0} multiply(x.1, w.1) @mul:7")
    assert found(planned, without) == [("cast removed", "bf16", "f32", 5)]
    assert found(planned, planned) == []


def test_a_cast_of_what_was_widened_before_rounds_nothing():
    planned = program(
        "bf16[8,8]{1,0}",
        "k.1 = f32[8,8]{1,0} convert(x.1) @convert_element_type:4",
        "a.1 = bf16[8,8]{1,0} convert(k.1) @convert_element_type:5",
        "b.1 = f32[8,8]{1,0} convert(a.1) @convert_element_type:6",
        "ROOT m.1 = f32[8,8]{1,0} multiply(b.1, b.1) @mul:7",
    )
    compiled = program(
        "bf16[8,8]{1,0}",
        "k.1 = f32[8,8]{1,0} convert(x.1) @convert_element_type:4",
        "ROOT m.1 = f32[8,8]{1,0} multiply(k.1, k.1) @mul:7",
    )
    assert found(planned, compiled) == []


def test_an_equal_cast_that_remains_under_another_line_is_no_removal():
    planned = program(
        "f32[8,8]{1,0}",
        *ROUNDED[:2],
        "c.1 = bf16[8,8]{1,0} convert(x.1) @convert_element_type:8",
        "d.1 = f32[8,8]{1,0} convert(c.1) @convert_element_type:9",
        "ROOT m.1 = f32[8,8]{1,0} multiply(b.1, d.1) @mul:7",
    )
    compiled = program(
        "f32[8,8]{1,0}",
        "c.1 = bf16[8,8]{1,0} convert(x.1) @convert_element_type:8",
        "d.1 = f32[8,8]{1,0} convert(c.1) @convert_element_type:9",
        "ROOT m.1 = f32[8,8]{1,0} multiply(d.1, d.1) @mul:7",
    )
    assert found(planned, compiled) == []


def test_a_rounded_constant_that_is_computed_ahead_is_no_removal():
    constant = "k.1 = f32[8,8]{1,0} constant({...})"
    planned = program(
        "f32[8,8]{1,0}",
        constant,
        "a.1 = bf16[8,8]{1,0} convert(k.1) @convert_element_type:5",
        "b.1 = f32[8,8]{1,0} convert(a.1) @convert_element_type:6",
        "ROOT m.1 = f32[8,8]{1,0} multiply(b.1, w.1) @mul:7",
    )
    compiled = program(
        "f32[8,8]{1,0}", constant, "ROOT m.1 = f32[8,8]{1,0} multiply(k.1, w.1) @mul:7"
    )
    assert found(planned, compiled) == []


def test_asynchronous_collectives_are_found():
    planned = program(
        "bf16[8,8]{1,0}",
        "g.1 = bf16[32,8]{1,0} all-gather(x.1), dimensions={0} @all_gather:3",
        "ROOT c.1 = bf16[32,8]{1,0} copy(g.1)",
    )
    compiled = program(
        "bf16[8,8]{1,0}",
        "a.1 = f32[8,8]{1,0} convert(x.1)",
        "g.1 = (f32[8,8]{1,0}, f32[32,8]{1,0}) all-gather-start(a.1), dimensions={0} @all_gather:3",
        "d.1 = f32[32,8]{1,0} all-gather-done(g.1) @all_gather:3",
        "ROOT c.1 = bf16[32,8]{1,0} convert(d.1)",
    )
    assert found(planned, compiled) == [("collective widened", "bf16", "f32", 3)]


STARTS = {
    "all-gather": ("bf16[32,8]", "(f32[8,8], f32[32,8]) all-gather-start(a.1), dimensions={0}"),
    "all-reduce": ("bf16[8,8]", "f32[8,8] all-reduce-start(a.1), to_apply=%add"),
    "collective-permute": (
        "bf16[8,8]",
        "(f32[8,8], f32[8,8], u32[], u32[]) collective-permute-start(a.1)",
    ),
}


@pytest.mark.parametrize("name", STARTS)
@pytest.mark.parametrize("asked", [True, False], ids=["the users", "the partitioners"])
def test_the_start_of_a_collective_is_found_once(name, asked):
    shape, started = STARTS[name]
    wanted = f"{name}(x.1)" if asked else "multiply(x.1, x.1)"
    planned = program("bf16[8,8]", f"ROOT g.1 = {shape} {wanted} @made:3")
    compiled = program(
        "bf16[8,8]",
        "a.1 = f32[8,8] convert(x.1)",
        f"g.1 = {started} @made:3",
        f"d.1 = {shape.replace('bf16', 'f32')} {name}-done(g.1) @made:3",
        f"ROOT c.1 = {shape} convert(d.1)",
    )
    assert found(planned, compiled) == [("collective widened", "bf16", "f32", 3)]
    (change,) = changes(planned, compiled).found
    assert change.compiled == f"{name} {shape.replace('bf16', 'f32')}"


def test_a_collective_of_the_partitioner_has_the_types_of_its_operation():
    low = program("bf16[8,8]{1,0}", "ROOT d.1 = bf16[8,8]{1,0} dot(x.1, w.1) @dot_general:3")

    def partitioned(dtype: str) -> Module:
        return program(
            "bf16[8,8]{1,0}",
            f"d.1 = {dtype}[8,8]{{1,0}} dot(x.1, w.1) @dot_general:3",
            f"ROOT r.1 = {dtype}[8,8]{{1,0}} all-reduce(d.1), to_apply=%add @dot_general:3",
        )

    assert found(low, partitioned("f32")) == [("collective widened", "bf16", "f32", 3)]
    assert found(low, partitioned("bf16")) == []


@pytest.mark.parametrize("is_read_wide", [False, True])
@pytest.mark.parametrize("ends", ["", "-start"])
def test_a_gather_of_what_is_only_cast_behind_it_is_found(ends: str, is_read_wide: bool):
    planned = program(
        "f32[8,8]",
        "c.1 = bf16[8,8] convert(w.1) @convert_element_type:3",
        "ROOT d.1 = f32[8,8] dot(x.1, c.1) @dot_general:3",
    )
    gathered = "(f32[2,8], f32[8,8]) all-gather-start" if ends else "f32[8,8] all-gather"
    compiled = program(
        "f32[8,8]",
        f"g.1 = {gathered}(w.1), dimensions={{0}} @convert_element_type:3",
        *(["g.2 = f32[8,8] all-gather-done(g.1) @convert_element_type:3"] if ends else []),
        f"t.1 = f32[8,8] transpose(g.{2 if ends else 1})",
        "c.1 = bf16[8,8] convert(t.1) @convert_element_type:3",
        *(["m.1 = f32[8,8] multiply(t.1, x.1) @mul:4"] if is_read_wide else []),
        "d.1 = f32[8,8] dot(x.1, c.1) @dot_general:3",
        f"ROOT r.1 = f32[8,8] add(d.1, {'m.1' if is_read_wide else 'x.1'}) @add:5",
    )
    wanted = [] if is_read_wide else [("collective widened", "bf16", "f32", 3)]
    assert found(planned, compiled) == wanted


def test_a_sum_over_devices_may_be_wider_than_what_reads_it():
    planned = program("f32[8,8]", "ROOT c.1 = bf16[8,8] convert(x.1) @convert_element_type:3")
    compiled = program(
        "f32[8,8]",
        "g.1 = f32[8,8] all-reduce(x.1), to_apply=%add @convert_element_type:3",
        "ROOT c.1 = bf16[8,8] convert(g.1) @convert_element_type:3",
    )
    assert found(planned, compiled) == []


def test_a_widened_result_in_memory_is_found():
    planned = program(
        "bf16[8,8]{1,0}",
        "a.1 = bf16[8,8]{1,0} add(x.1, w.1) @add:3",
        "ROOT s.1 = bf16[8,8]{1,0} sort(a.1) @sort:4",
    )
    compiled = program(
        "bf16[8,8]{1,0}",
        "a.1 = f32[8,8]{1,0} add(x.1, w.1) @add:3",
        "ROOT s.1 = bf16[8,8]{1,0} sort(a.1) @sort:4",
    )
    assert found(planned, compiled) == [("buffer widened", "bf16", "f32", 3)]
    assert found(planned, planned) == []


LOOP = """
body.1 (s: f32[]) -> f32[] {
  s.1 = (s32[], bf16[8,8], W) parameter(0)
  i.1 = s32[] get-tuple-element(s.1), index=0
  c.1 = bf16[8,8] get-tuple-element(s.1), index=1
  w.2 = W get-tuple-element(s.1), index=2
  INSIDE
  n.1 = bf16[8,8] negate(c.1)
  ROOT t.2 = (s32[], bf16[8,8], W) tuple(i.1, n.1, w.2)
}

cond.1 (s: f32[]) -> pred[] {
  s.2 = (s32[], bf16[8,8], W) parameter(0)
  ROOT p.1 = pred[] constant(true)
}

ENTRY main.1 (x: f32[]) -> f32[] {
  x.1 = bf16[8,8] parameter(0)
  w.1 = bf16[8,8] parameter(1)
  k.1 = s32[] constant(0)
  BEFORE
  t.1 = (s32[], bf16[8,8], W) tuple(k.1, x.1, GIVEN)
  ROOT l.1 = (s32[], bf16[8,8], W) while(t.1), condition=%cond.1, body=%body.1 @while:2
}
"""


def test_a_cast_that_leaves_a_loop_and_the_state_that_it_widens_are_found():
    def loop(**parts: str) -> Module:
        text = LOOP
        for name, part in parts.items():
            text = text.replace(name, part)
        return parsed(text)

    cast = "v.1 = f32[8,8] convert({}) @while/body/convert:3"
    planned = loop(W="bf16[8,8]", INSIDE=cast.format("w.2"), BEFORE="", GIVEN="w.1")
    compiled = loop(W="f32[8,8]", INSIDE="", BEFORE=cast.format("w.1"), GIVEN="v.1")
    assert found(planned, compiled) == [
        ("loop state widened", "bf16", "f32", 2),
        ("cast moved", "bf16", "f32", 3),
    ]
    assert found(planned, planned) == []
