"""Both programs as text: by JAX's printer, with equal names, without what derivatives need."""

import re
import subprocess
from collections import Counter

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import pytest
from jax import lax

import precpass as pp
from precpass.jaxpr.printing import _without_identities
from tests.support.values import f32
from tests.view.test_diff import POLICIES, PROGRAMS, doubled, inspected

X, W = f32(8, 8), f32(8, 8)


def two_layers(x, w):
    return jnp.tanh(x @ w) @ w


def carried(x, w):
    def step(c, _):
        return jnp.tanh(c @ w) + c, c @ w

    return lax.scan(step, x, length=5)


EVERY = {
    **PROGRAMS,
    "two layers": two_layers,
    "carried": carried,
    "gradient of the carried": jax.grad(lambda x, w: carried(x, w)[0].sum(), 1),
    "second derivative": jax.hessian(lambda x, w: two_layers(x, w).sum()),
    "a function of another policy": pp.auto_mixed(two_layers),
    "mapped": jax.vmap(two_layers, in_axes=(None, 0)),
}


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: p.name)
def test_a_listing_is_a_whole_program_without_bookkeeping(name, policy):
    args = (X, f32(3, 8, 8)) if name == "mapped" else (X, W)
    found = inspected(EVERY[name], policy, *args)
    jex.check_jaxpr(_without_identities(found.after))
    text = found.listing()
    assert "precpass_" not in text
    given = Counter(re.findall(r"(?<![-.\w])([a-z]+):\w+\[", text))
    assert set(given.values()) == {1}, "a name is given twice"
    read = re.findall(r"(?: = \w+|\]) ((?:[a-z]+\b(?!:) ?)+)$", text, re.M)
    assert set(" ".join(read).split()) <= given.keys()


def changed(found):
    lines = found.diff("jaxpr", color=False).splitlines()[2:]
    return [[line[1:].strip() for line in lines if line[0] == sign] for sign in "-+"]


@pytest.mark.parametrize("name", ["two layers", "branches", "while"])
def test_a_product_is_two_casts_and_a_product_of_the_same_name(name):
    taken, given = changed(pp.inspect(EVERY[name])(X, W))
    names = [
        [line.split(" = ")[0] for line in lines if " dot_g" in line] for lines in (taken, given)
    ]
    # what reads it stays as it is
    assert names[0] == names[1] != []
    assert {line.split(" = ")[1].split("[")[0] for line in given if " = " in line} <= {
        *("dot_general", "convert_element_type", "bitcast_convert_type"),
    }


def test_a_loop_carries_what_is_stored_low_in_16_bits_alone():
    found = pp.inspect(PROGRAMS["gradient of a scan"])(X, W)
    scan, whole = (
        re.search(r"((?:.*\n)?.*) = scan\[", found.listing(bookkeeping=flag))[1]
        for flag in (False, True)
    )
    low = scan.count("u16[3,8,8]")
    assert low == whole.count("u16[3,8,8]") == whole.count("f32[3,8,8]") - scan.count("f32[3,8,8]")
    assert low > 1


def test_git_applies_the_diff_of_the_listings(tmp_path):
    found = pp.inspect(PROGRAMS["gradient of a scan"])(X, W)
    patch = found.diff("jaxpr", color=False) + "\n"
    assert patch.startswith("--- a/scanned\n+++ b/scanned\n")
    as_written = inspected(PROGRAMS["gradient of a scan"], "AlwaysF32", X, W).listing()
    (tmp_path / "scanned").write_text(as_written + "\n")
    subprocess.run(["git", "apply", "-p1", "-"], input=patch, text=True, cwd=tmp_path, check=True)
    assert (tmp_path / "scanned").read_text() == found.listing() + "\n"


def test_nothing_changed_is_an_empty_diff():
    assert pp.inspect(two_layers, "AlwaysF32")(X, W).diff("jaxpr") == ""


def test_bookkeeping_is_shown_where_it_is_asked_for():
    found = pp.inspect(two_layers)(X, W)
    assert "precpass_carrier" in found.diff("jaxpr", bookkeeping=True)
    assert found.listing(bookkeeping=True).count("\n") >= str(found.after).count("precpass_")
    assert "precpass_" not in found.diff("jaxpr") and "precpass_" not in found._repr_html_()
    with pytest.raises(ValueError, match="level 'lines' has no bookkeeping to show: give level="):
        found.diff("lines", bookkeeping=True)


@pytest.mark.parametrize("fn", [lambda x, w: jax.nn.relu(x @ w), doubled])
def test_a_custom_derivative_that_is_rewritten_is_shown_as_it_was(fn):
    taken, given = changed(pp.inspect(fn)(X, W))
    assert any("bf16" in line for line in given)
    assert "custom_" not in str(taken + given) and "rewritten" not in str(given)
