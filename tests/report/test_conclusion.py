"""The sentence at the end of a comparison says which program to use, and why."""

from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import pytest

import precpass as pp
from precpass.report.compare.conclusion import conclusion
from tests.support.passes import quiet


def row(name: str, ratio: float | None = 1.0, low: int = 0, **others: Any) -> Any:
    facts: dict[str, Any] = {"temp": 100, "error": 1e-7, "nonfinite": 0, "refused": "", **others}
    own = {"[0]": facts["error"], **facts.get("leaves", {})}
    return SimpleNamespace(
        name=name,
        leaves=[(path, SimpleNamespace(relative=error)) for path, error in own.items()],
        ratio=ratio,
        roofline=facts.get("roofline"),
        traffic=facts.get("traffic"),
        refused=facts["refused"],
        counts=SimpleNamespace(low=low, low_flops=float(low > 0)),
        memory=SimpleNamespace(temp=facts["temp"]),
        error=facts["error"],
        errors=SimpleNamespace(nonfinite=facts["nonfinite"], differing=facts.get("differing", 0)),
        timing=SimpleNamespace(
            ratios=lambda _: SimpleNamespace(quartiles=facts.get("quartiles", (ratio, ratio)))
        ),
    )


WIDE = row("AlwaysF32")
FAST = row("AutoMixedBf16", 0.4, 3, temp=50, error=0.01)
SLOW = row("AutoMixedBf16", 1.3, 3, error=0.01)
HIDES = row("AutoMixedBf16", 0.4, 3, error=0.01, leaves={"['w']": 0.5, "['zero']": 1e4})
NOISY = row("AlwaysF32", leaves={"['w']": 1e-6, "['zero']": 1e3})
WRONG = row("c=bf16", 0.3, 3, error=3.9)
COUNTS = row("c=bf16", 0.4, 3, error=0.01, differing=76)
OVERLAPS = row("c=bf16", 0.6, 3, error=0.01, quartiles=(0.2, 1.5))
ESTIMATED = row("AlwaysF32", None, roofline=1e-3)
CYCLES = SimpleNamespace(cycles=500, without_cycles=0)
IN_CYCLES = row("AlwaysF32", None, roofline=1e-3, traffic=CYCLES)
NAN = row("AlwaysF16", 0.1, 3, nonfinite=4, error=float("inf"))


@pytest.mark.parametrize(
    ("rows", "without_bfloat16", "said"),
    [
        (
            [WIDE, FAST],
            False,
            "Use AutoMixedBf16: it takes 0.40 of the time of AlwaysF32 and 0.50 of its temporary "
            "memory, with a relative error of 1e-02.",
        ),
        (
            [NOISY, HIDES],
            False,
            "Use AutoMixedBf16: it takes 0.40 of the time of AlwaysF32, with a relative error of "
            "1e-02, and of 5e-01 in ['w'], for which `bisect` names the lines.",
        ),
        ([WIDE, SLOW, FAST], True, "Use AutoMixedBf16: it takes 0.40"),
        (
            [WIDE, SLOW],
            False,
            "Use AlwaysF32: no other program is faster here. AutoMixedBf16 runs",
        ),
        ([WIDE, SLOW], True, "AutoMixedBf16 is not faster here, because this CPU has no bfloat16"),
        ([WIDE, row("by hand", 1.01)], True, "Use AlwaysF32: no other program is faster here."),
        (
            [WIDE, row("AutoMixedBf16", None, 3)],
            False,
            "Nothing was timed. AutoMixedBf16 runs 100% of",
        ),
        (
            [ESTIMATED, row("AutoMixedBf16", None, 3, roofline=6e-4, temp=50, error=0.01)],
            False,
            "Use AutoMixedBf16: by the device's published peaks it takes 0.60 of the time of "
            "AlwaysF32 and 0.50 of its temporary memory, with a relative error of 1e-02. Nothing "
            "was timed.",
        ),
        (
            [IN_CYCLES, row("AutoMixedBf16", None, 3, roofline=6e-4, traffic=CYCLES)],
            False,
            "No gain is expected: by the compiler's estimate, AutoMixedBf16 takes 1.00 of the time",
        ),
        (
            [ESTIMATED, row("AutoMixedBf16", None, 3, roofline=1e-3, temp=50)],
            False,
            "No gain is expected: by the device's published peaks, AutoMixedBf16 takes 1.00 of the "
            "time of AlwaysF32. AutoMixedBf16 runs 100% of its FLOPs in low precision and takes "
            "0.50 of AlwaysF32's temporary memory",
        ),
        ([WIDE, NAN], False, "AlwaysF16 has values that are not finite."),
        ([WIDE, FAST, NAN], False, "Use AutoMixedBf16: it takes 0.40"),
        (
            [WIDE, WRONG],
            False,
            "c=bf16 has no correct digit, with a relative error of 4e+00: `bisect` names the lines",
        ),
        ([WIDE, COUNTS], False, "Use c=bf16: it takes 0.40"),
        (
            [WIDE, OVERLAPS],
            False,
            "It is not certain which is faster: c=bf16 takes 0.60 of the time of AlwaysF32, with "
            "quartiles of 0.20 and 1.50. Use more rounds, such as rounds=50.",
        ),
        ([WIDE, WRONG, FAST], False, "Use AutoMixedBf16: it takes 0.40"),
        ([row("AlwaysF32", error=1.0), WRONG], False, "Use c=bf16: it takes 0.30"),
        ([WIDE, row("a", 0.2, 3, refused="too large")], False, ""),
        ([WIDE], True, ""),
    ],
)
def test_what_to_use(rows: list[Any], without_bfloat16: bool, said: str):
    text = conclusion(rows, without_bfloat16)
    assert text.startswith(said) and bool(text) == bool(said)
    assert ("not finite" in text) == (NAN in rows)
    assert ("76 integers in the results of c=bf16 are other ones" in text) == (COUNTS in rows)
    assert ("not certain" in text) == (OVERLAPS in rows)
    assert ("no correct digit, with a" in text) == (WRONG in rows and WIDE in rows)


def test_it_stands_at_the_end_of_a_comparison():
    with quiet():
        found = pp.compare(lambda x: jnp.tanh(x @ x), ["AlwaysF32", "AutoMixedBf16"], rounds=0)(
            jnp.eye(8) / 3
        )
    assert found.conclusion.startswith("Nothing was timed. AutoMixedBf16 runs 94% of its FLOPs")
    assert str(found).splitlines()[-1] == found.conclusion
    assert found.conclusion in found._repr_html_()


@pytest.mark.parametrize("columns", ["time", "products,time,ratio", "ratio,error"])
def test_it_needs_no_column_of_errors(columns: str):
    with quiet():
        found = pp.compare(
            lambda x: jnp.tanh(x @ x), ["f32", "bf16"], columns=columns.split(","), rounds=3
        )(jnp.eye(64) / 3)
    assert found.conclusion and str(found).splitlines()[-1] in found.conclusion


def test_the_legend_is_of_the_columns_that_are_shown():
    with quiet():
        found = pp.compare(jnp.sin, ["f32", "bf16"], columns=["time", "error"], rounds=2)(1.0)
    text = str(found)
    assert "ms: median of 2" in text and "rel. error: |d|" in text
    assert not any(word in text for word in ("ratio: ", "max ULP: ", "non-finite: ", "casts added"))
