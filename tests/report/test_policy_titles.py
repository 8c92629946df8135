"""Every report prints AutoMixed with its format, since the name alone does not say float16."""

import warnings
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest

import precpass as pp
from precpass.cli import main

W, X = jnp.ones((64, 32)), jnp.ones((16, 64))
TITLE = "AutoMixed (float16)"


def loss(w: Any, x: Any) -> Any:
    return jnp.square(jnp.tanh(x @ w)).mean()


def without_products(x: Any) -> Any:
    return jnp.tanh(x)


def warned(policy: Any) -> str:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pp.auto_mixed(lambda x: without_products(x), policy)(X)
    return "\n".join(str(warning.message) for warning in caught)


REPORTS: dict[str, Callable[[Any], Any]] = {
    "diff": lambda policy: pp.inspect(loss, policy)(W, X).diff("lines"),
    "reasons": lambda policy: pp.inspect(loss, policy)(W, X).plan.decisions[0].reason,
    "inspection": lambda policy: repr(pp.inspect(loss, policy)(W, X)),
    "inspection's page": lambda policy: pp.inspect(loss, policy)(W, X)._repr_html_(),
    "explanation": lambda policy: pp.explain(loss, policy)(W, X),
    "explanation's page": lambda policy: pp.explain(loss, policy)(W, X)._repr_html_(),
    "explanation's data": lambda policy: pp.explain(loss, policy)(W, X).to_dict(),
    "comparison": lambda policy: pp.compare(loss, ["AlwaysF32", policy], rounds=0)(W, X),
    "comparison's rows": lambda policy: [
        row.name for row in pp.compare(loss, policy, rounds=0)(W, X).rows
    ],
    "audit": lambda policy: pp.audit(loss, policy)(W, X),
    "bisection": lambda policy: pp.bisect(loss, policy, 0.5)(W, X),
    "function": lambda policy: repr(pp.auto_mixed(loss, policy)),
    "rung": lambda policy: pp.with_fallback(loss, (policy, "f32"))(W, X)[1],
    "warning": warned,
}


@pytest.mark.parametrize("policy", ["AutoMixed", "automixed", pp.AutoMixed], ids=str)
@pytest.mark.parametrize("report", REPORTS)
def test_automixed_is_printed_with_its_format(report: str, policy: Any):
    text = str(REPORTS[report](policy))
    assert TITLE in text
    assert "AutoMixedF16" not in text
    assert text.count("AutoMixed") - text.count("AutoMixedBf16") == text.count(TITLE)


@pytest.mark.parametrize("report", REPORTS)
def test_a_name_that_says_its_format_stays(report: str):
    text = str(REPORTS[report]("AutoMixedF16"))
    assert "AutoMixedF16" in text and TITLE not in text


MODEL = """
import jax
import jax.numpy as jnp


def loss(w, x):
    return jnp.square(jnp.tanh(x @ w)).mean()


def example():
    return jnp.ones((64, 32)), jnp.ones((16, 64))
"""


@pytest.mark.parametrize(
    "command",
    [
        *("explain", "diff", "audit", "explain --json", "audit --json"),
        "bisect --tolerance 0.5",
        "compare --rounds 0",
    ],
)
def test_the_command_line_prints_it_so(command: str, tmp_path: Any, capsys: Any):
    (tmp_path / "named_model.py").write_text(MODEL)
    name, *options = command.split()
    policy = "--policies" if name == "compare" else "--policy"
    given = [f"{tmp_path / 'named_model.py'}:loss", "--example", "example", policy, "AutoMixed"]
    main([name, *given, *options])
    printed = capsys.readouterr().out
    assert TITLE in printed and "AutoMixedF16" not in printed


def test_two_names_of_one_policy_are_printed_as_they_were_given():
    for name, other in (("AutoMixed", "AutoMixedF16"), ("AutoMixedF16", "AutoMixed")):
        for given in (name, other):
            with pytest.warns(pp.PrecisionWarning) as caught:
                pp.auto_mixed(without_products, given)(jnp.ones(len(given) + len(name)))
            title = pp.types.PrecisionPolicy.parse(given).title
            assert str(caught[0].message).startswith(f"{title} lowered nothing")


def test_the_help_has_the_name_with_its_format(capsys: Any):
    with pytest.raises(SystemExit):
        main(["explain", "--help"])
    assert TITLE in " ".join(capsys.readouterr().out.split())
