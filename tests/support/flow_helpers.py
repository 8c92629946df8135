"""Reading jaxprs and lowered text, without the package's own reader: what tests compare with."""

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import precpass as pp

PRODUCTS = frozenset({"dot_general", "ragged_dot_general", "ragged_dot", "conv_general_dilated"})
LOW = (jnp.bfloat16, jnp.float16)


COMPOSITIONS: dict[str, Callable[..., Any]] = {
    "grad_of_mixed": lambda f, d=jax.grad, policy=None: d(pp.auto_mixed(f, policy=policy)),
    "mixed_of_grad": lambda f, d=jax.grad, policy=None: pp.auto_mixed(d(f), policy=policy),
}
"""A derivative of a function under the pass, from either side of it."""


# ---------------------------------------------------------------- jaxprs


def jaxprs_in(value: Any, depth: int = 0) -> Iterator[Any]:
    """The open jaxprs in a param, wherever in tuples, lists, dicts and hi-primitives they stand."""
    if hasattr(value, "in_avals_flat"):  # a hi-primitive: its params are its attributes
        value = value.params
    value = getattr(value, "jaxpr", value)
    value = getattr(value, "jaxpr", value)  # on 0.10 a traced function's is a closed one
    if hasattr(value, "eqns") and hasattr(value, "invars"):
        yield value
    elif isinstance(value, dict) and depth < 4:
        for inner in value.values():
            yield from jaxprs_in(inner, depth + 1)
    elif isinstance(value, tuple | list) and depth < 4:
        for inner in value:
            yield from jaxprs_in(inner, depth + 1)


def equations(jaxpr: Any, seen: dict[int, Any] | None = None) -> Iterator[Any]:
    """Every equation of a jaxpr and of all jaxprs in params, each distinct jaxpr once."""
    seen = {} if seen is None else seen
    opened = getattr(jaxpr, "jaxpr", jaxpr)
    if id(opened) in seen:
        return
    seen[id(opened)] = opened
    for eqn in opened.eqns:
        yield eqn
        for value in eqn.params.values():
            for inner in jaxprs_in(value):
                yield from equations(inner, seen)


def named(jaxpr: Any, primitive: str) -> list[Any]:
    return [e for e in equations(jaxpr) if e.primitive.name == primitive]


def products(jaxpr: Any) -> list[Any]:
    return [e for e in equations(jaxpr) if e.primitive.name in PRODUCTS]


def is_low(eqn: Any, dtype: Any = None) -> bool:
    """Whether both data operands of a product are of a low format."""
    wanted = LOW if dtype is None else (dtype,)
    return all(v.aval.dtype in wanted for v in eqn.invars[:2])


def low_products(jaxpr: Any, dtype: Any = None) -> list[Any]:
    return [e for e in products(jaxpr) if is_low(e, dtype)]


def contracts(eqn: Any) -> bool:
    """Whether it sums over anything; else it is an elementwise product (design 3, line 7)."""
    return eqn.primitive.name != "dot_general" or bool(eqn.params["dimension_numbers"][0][0])


def split_products(jaxpr: Any, opaque: str) -> tuple[list[Any], list[Any]]:
    """The contracting products outside, and those inside, of a primitive that is not entered."""
    bodies = [j for e in named(jaxpr, opaque) for j in jaxprs_in(list(e.params.values()))]
    inside = {id(e) for body in bodies for e in products(body)}
    found = [e for e in products(jaxpr) if contracts(e)]
    return [e for e in found if id(e) not in inside], [e for e in found if id(e) in inside]


def check_all_low(jaxpr: Any, least: int = 1, dtype: Any = None) -> Any:
    found = products(jaxpr)
    wide = [str(e) for e in found if contracts(e) and not is_low(e, dtype)]
    assert len(found) >= least, f"{len(found)} products, not {least}:\n{jaxpr}"
    assert any(is_low(e, dtype) for e in found)
    assert not wide, f"{len(wide)} of {len(found)} products are wide:\n" + "\n".join(wide)
    return jaxpr


def assert_all_low(fn: Callable[..., Any], *args: Any, least: int = 1, dtype: Any = None) -> Any:
    """Every product in the jaxpr of `fn` is low, and there are `least` of them."""
    return check_all_low(jax.make_jaxpr(fn)(*args), least, dtype)


def run_low(fn: Callable[..., Any], *args: Any, least: int = 1, dtype: Any = None) -> Any:
    """`assert_all_low`, and what it gives when compiled and run, from one trace."""
    traced = jax.jit(fn).trace(*args)
    check_all_low(traced.jaxpr, least, dtype)
    return traced.lower().compile()(*args)


# ---------------------------------------------------------------- values


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def error(got: Any, want: Any) -> float:
    """The largest normwise relative error of the leaves."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    worst = 0.0
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.isfinite(x).all()
        norm = np.linalg.norm(y.ravel())
        worst = max(worst, float(np.linalg.norm((x - y).ravel()) / (norm if norm else 1.0)))
    return worst


def assert_near(got: Any, want: Any, tolerance: float = 0.01) -> None:
    found = error(got, want)
    assert found <= tolerance, f"relative error {found:.3g} > {tolerance}"


def low_and_near(
    mixed: Callable[..., Any],
    plain: Callable[..., Any],
    *args: Any,
    least: int = 1,
    tolerance: float = 0.01,
) -> None:
    """`assert_all_low` of one function, whose values are near those of the other.

    One compilation of both takes half the time of two.
    """
    assert_all_low(mixed, *args, least=least)
    got, want = jax.jit(lambda *xs: (mixed(*xs), plain(*xs)))(*args)
    assert_near(got, want, tolerance)


# ---------------------------------------------------------------- lowered text


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
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        stack = f"{outer}/{eqn.source_info.name_stack}"
        if eqn.primitive.name in PRODUCTS:
            found.add(clean_stack(stack))
        for value in eqn.params.values():
            for inner in jaxprs_in(value):
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


@contextlib.contextmanager
def config(name: str, value: Any) -> Iterator[None]:
    """One of JAX's settings for a while; traces made under it are forgotten."""
    before = getattr(jax.config, name)
    jax.config.update(name, value)
    try:
        yield
    finally:
        jax.config.update(name, before)
        jax.clear_caches()
