"""Hold what the pass makes of programs in one state of the package against another state.

A change that moves or renames code must not change what the pass writes; a change of a decision
must show where. Programs are the gradient and the training step of the benchmark's models, planned
for this CPU and for an H100 and a TPU v5e, and random programs in the form (value, gradient, jvp,
...) that the sweep gives them. Each is rewritten under several policies.

    scripts/rewritten_texts write FILE   writes what is made of each program (gzip, JSON)
    scripts/rewritten_texts diff FILE    makes it again and shows what differs from FILE

For a text that differs, `diff` lists the formats that differ: of each product's operands and
result, of each cast to 16 bits, and of what loops carry and stack, by name scope and source line.
`--texts` shows the texts too. To compare with another commit, check it out into a folder, run
`write` there with a copy of this file in its `scripts/`, and then `diff` here. The texts of two JAX
releases differ, so compare within one.
"""

import argparse
import collections
import difflib
import gzip
import itertools
import json
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import sweeping

POLICIES = ("AlwaysF32", "AlwaysBf16", "AutoMixedF16", "AutoMixedBf16")
TARGETS = ("h100", "tpu v5e")
RANDOM_PROGRAMS = 200
SEED = 0
SHOWN_LINES = 40
ADDRESS = re.compile(r"0x[0-9a-f]+")
"""Functions in the params of an equation are printed with their address."""


class Subject(NamedTuple):
    """A program to rewrite: its name, the function, its arguments, and what it is traced under."""

    name: str
    function: Any
    arguments: tuple[Any, ...]
    settings: Callable[[], AbstractContextManager[Any]] = nullcontext
    target: str | None = None


def benchmark_subjects() -> Iterator[Subject]:
    """The gradient and the training step of each model of the benchmark, for each device."""
    from bench_columns import COLUMNS, arguments
    from bench_models import MODELS

    for name, make in MODELS.items():
        model = make("small")
        for mode in ("gradient", "step"):
            program, given = COLUMNS["float32"].program(model, mode), arguments(model, mode)
            for target in (None, *TARGETS):
                whole = f"{name}, {mode}" + (f", {target}" if target else "")
                yield Subject(whole, program, given, target=target)
        # As `jax.grad(auto_mixed(f))` has it: what the derivative saves is planned without it.
        loss, given = COLUMNS["float32"].program(model, "forward"), arguments(model, "forward")
        for target in TARGETS:
            yield Subject(f"{name}, forward, {target}", loss, given, target=target)


def random_subjects(count: int) -> Iterator[Subject]:
    """The first random programs that hypothesis draws, without those that plain JAX refuses."""
    from tests.support.policy_checks import FORMS, cases
    from tests.support.random_programs import numbered

    for index, case in enumerate(numbered(cases(), count, SEED)):
        function, settings = FORMS[case.form](case.fn), partial(strictly, case.x64)
        with settings():
            try:
                jax.eval_shape(function, *case.args)
            except (NotImplementedError, TypeError, ValueError):
                continue
        target = (None, *TARGETS)[index % 3]
        yield Subject(f"random {index}, {case.form}", function, case.args, settings, target)


@contextmanager
def strictly(x64: bool) -> Iterator[None]:
    """The settings that the random programs are written for."""
    with (
        jax.enable_x64(x64),
        jax.numpy_dtype_promotion("strict"),
        jax.numpy_rank_promotion("raise"),
    ):
        yield


def rewritten(count: int) -> dict[str, dict[str, Any]]:
    """The text and the formats of each rewritten jaxpr, by the names of program and policy."""
    import precpass

    found: dict[str, dict[str, Any]] = {}
    for subject in itertools.chain(benchmark_subjects(), random_subjects(count)):
        for policy in POLICIES if subject.target is None else POLICIES[2:]:
            with subject.settings():
                inspect = precpass.inspect(
                    subject.function, getattr(precpass, policy), target=subject.target
                )
                after = inspect(*subject.arguments).after
            found[f"{subject.name}, {policy}"] = {
                "text": ADDRESS.sub("0x", str(after)),
                "formats": dict(collections.Counter(formats(after))),
            }
    return found


def formats(jaxpr: Any) -> Iterator[str]:
    """The formats of products, of what is cast to 16 bits, and of what loops carry and stack."""
    from precpass import jaxpr as ir

    for eqn in ir.all_eqns(jaxpr):
        name = eqn.primitive.name
        where = f"{ir.scope_of(eqn)} {ir.source_of(eqn).place}"
        operands, results = ([_typed(v) for v in atoms] for atoms in (eqn.invars, eqn.outvars))
        if name in ("dot_general", "ragged_dot_general", "conv_general_dilated"):
            yield f"{where} {name} {operands[0]} {operands[1]} -> {results[0]}"
        elif name in ("scan", "while"):
            yield f"{where} {name} {' '.join(sorted(operands))} -> {' '.join(sorted(results))}"
        elif name == "convert_element_type" and results[0].startswith(("bfloat16", "float16")):
            yield f"{where} cast {operands[0]} -> {results[0]}"


def _typed(atom: Any) -> str:
    return atom.aval.str_short() if hasattr(atom.aval, "str_short") else str(atom.aval)


def differences(before: dict[str, Any], after: dict[str, Any], texts: bool) -> Iterator[str]:
    """For each program that differs the formats that do, and perhaps a unified diff of its text."""
    empty: dict[str, Any] = {"text": "", "formats": {}}
    for name in sorted(before.keys() | after.keys()):
        old, new = before.get(name, empty), after.get(name, empty)
        if old["text"] == new["text"]:
            continue
        lines = [name]
        counts = collections.Counter(new["formats"])
        counts.subtract(old["formats"])
        lines += [f"  {n:+d} {what}" for what, n in sorted(counts.items()) if n]
        if texts:
            pair = old["text"].splitlines(), new["text"].splitlines()
            lines += difflib.unified_diff(*pair, name, name, lineterm="", n=1)
        yield "\n".join(lines[:SHOWN_LINES])


def main() -> int:
    """Runs the command."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("command", choices=("write", "diff"))
    options.add_argument("file", type=Path, help="where the programs are (gzip, JSON)")
    options.add_argument("--random", type=int, default=RANDOM_PROGRAMS, help="how many programs")
    options.add_argument("--texts", action="store_true", help="show what differs in the texts")
    given = options.parse_args()
    sweeping.set_up(jax_numpy_dtype_promotion="standard", jax_numpy_rank_promotion="allow")
    warnings.simplefilter("ignore")
    import precpass

    print(f"precpass of {Path(precpass.__file__).parent.name}, jax {jax.__version__}")
    found = rewritten(given.random)
    print(f"{len(found)} programs")
    if given.command == "write":
        given.file.write_bytes(gzip.compress(json.dumps(found).encode()))
        return 0
    before = json.loads(gzip.decompress(given.file.read_bytes()))
    shown = list(differences(before, found, given.texts))
    print("\n\n".join(shown))
    print(f"{len(shown)} of {len(found)} programs differ")
    return bool(shown)


if __name__ == "__main__":
    sys.exit(main())
