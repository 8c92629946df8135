"""What is read in lowered text, and what of a jaxpr is compared with it: names and lines."""

import re
from collections.abc import Callable
from typing import Any

import jax

from tests.support.jaxprs import PRODUCTS, inner_jaxprs, opened, products


def stablehlo_products(fn: Callable[..., Any], *args: Any) -> int:
    text = jax.jit(fn).lower(*args).as_text()
    return len(re.findall(r"stablehlo\.(?:dot_general|dot|convolution)\b", text))


def function_count(lowered: Any) -> int:
    return lowered.as_text().count("func.func")


_MARK = re.compile(r"\b(?:jvp|transpose|vmap|checkpoint|remat|linearize)\(([^()]*)\)")
_FUNCTION = re.compile(r"\bp?jit\([^()]*\)")
_NO_SCOPE = frozenset(
    ("", "rematted_computation", "checkpoint", "closed_call", "eval_jaxpr", "while", "body")
)


def clean_stack(stack: str) -> str:
    """A name stack without the marks of JAX's transforms; only the scopes are left."""
    stack = _FUNCTION.sub("", stack)
    previous = None
    while previous != stack:
        previous, stack = stack, _MARK.sub(r"\1", stack)
    return "/".join(part for part in stack.split("/") if part not in _NO_SCOPE)


def product_stacks(jaxpr: Any, outer: str = "") -> set[str]:
    """The cleaned name stacks of a jaxpr's products, those of the callers in front."""
    found = set[str]()
    for eqn in opened(jaxpr).eqns:
        stack = f"{outer}/{eqn.source_info.name_stack}"
        if eqn.primitive.name in PRODUCTS:
            found.add(clean_stack(stack))
        for inner in inner_jaxprs(eqn):
            found |= product_stacks(inner, stack)
    return found


def lowered_stacks(lowered: Any) -> set[str]:
    """The cleaned name stacks of the products in the lowered text, where each function of the
    module begins a stack of its own."""
    text = lowered.as_text(debug_info=True)
    table = dict(re.findall(r"^(#loc\d*) = (loc\(.*\))$", text, re.MULTILINE))
    found = set[str]()
    for line in text.splitlines():
        if re.search(r"stablehlo\.(?:dot_general|convolution)\b", line):
            location = line[line.rindex("loc(") :]
            reference = re.search(r"#loc\d+", location)
            location = table[reference.group()] if reference else location
            name = re.search(r'"([^"]*)"', location)
            assert name, f"no name: {line}"
            found.add(clean_stack(name.group(1)))
    return found


def product_lines(jaxpr: Any, file: str) -> set[tuple[str, int]]:
    """(function, line) in `file` of every product: its innermost frame there."""
    lines = set[tuple[str, int]]()
    for eqn in products(jaxpr):
        traceback = eqn.source_info.traceback
        assert traceback is not None, f"no source line: {eqn}"
        own = [f for f in traceback.frames if f.file_name == file]
        assert own, f"no frame of the user's code: {eqn}"
        lines.add((own[0].function_name, own[0].line_num))
    return lines
