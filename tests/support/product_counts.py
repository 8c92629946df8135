"""Tables of programs in the tests and the scripts, for counting their products.

Those of `tests/programs` are counted where they are checked (`libraries.check_program`).
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import bench_overhead
import demo_model
import jax

from tests.contract import test_12_everything_is_entered as entered
from tests.contract import test_long_sums as acceptance
from tests.policy import test_scopes
from tests.rewrite import test_product_form, test_transposition
from tests.support import compositions, example_programs, graph_programs
from tests.view import test_inspection

Made = tuple[Callable[..., Any], tuple[Any, ...]]


def _demo(name: str) -> Made:
    task = demo_model.make_task(demo_model.Shape(layers=2, width=16, heads=2, length=8, batch=2))
    tokens = jax.ShapeDtypeStruct((2, 9), "int32")
    args = {"loss": (task.params, tokens), "train_step": (task.params, task.opt_state, tokens)}
    return getattr(task, name), args[name]


def _table(prefix: str, fns: dict[str, Any], *args: Any) -> dict[str, Callable[[], Made]]:
    return {f"{prefix}: {name}": lambda fn=fn: (fn, args) for name, fn in fns.items()}


PROGRAMS: dict[str, Callable[[], Made]] = {
    **{f"examples: {p.name}": lambda p=p: (p.fn, p.args()) for p in example_programs.PROGRAMS},
    **_table("compositions", compositions.PROGRAMS, compositions.X, compositions.W),
    **_table(
        "graph", {f.__name__: f for f in graph_programs.PROGRAMS}, *[graph_programs.SQUARE] * 2
    ),
    **_table("inspection", test_inspection.PROGRAMS, test_inspection.X, test_inspection.W),
    **{
        f"scopes: {fn.__name__}, {name}": functools.partial(transform, fn)
        for fn in test_scopes.PROGRAMS
        for name, transform in test_scopes.TRANSFORMS.items()
    },
    **_table("transposition", test_transposition.PROGRAMS, test_transposition.X),
    **{
        f"acceptance: {name}": lambda fn=fn, args=args: (jax.value_and_grad(fn), args)
        for name, (fn, args, _) in acceptance.CASES.items()
    },
    **{
        f"product form: {name}": lambda fn=fn, x=x, w=w: (fn, (x, w))
        for name, (fn, x, w) in test_product_form.CASES.items()
    },
    **_table("entered", entered.PROGRAMS, entered.X, entered.W),
    "bench: loop": lambda: bench_overhead.transformer(2, False),
    "bench: scan": lambda: bench_overhead.transformer(2, True),
    "bench: flat": lambda: bench_overhead.flat(50),
    "bench: nested": lambda: bench_overhead.nested(10),
    "demo: loss": lambda: _demo("loss"),
    "demo: train step": lambda: _demo("train_step"),
}
"""Name -> what makes a function and its arguments."""

X64 = {f"examples: {p.name}" for p in example_programs.PROGRAMS if p.x64}


@contextlib.contextmanager
def settings(name: str) -> Iterator[None]:
    """What a program is traced under: the libraries' promotion for those of the scripts."""
    with contextlib.ExitStack() as stack:
        if name.startswith(("bench", "demo")):
            stack.enter_context(jax.numpy_dtype_promotion("standard"))
            stack.enter_context(jax.numpy_rank_promotion("allow"))
        if name in X64:
            stack.enter_context(jax.enable_x64(True))
        yield
