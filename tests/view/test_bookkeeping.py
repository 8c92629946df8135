"""Diffs and listings without the pass's bookkeeping: closed, typed, and what one would write."""

import re
import subprocess

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import precpass as pp
from tests.support.values import f32
from tests.view.test_diff import POLICIES, PROGRAMS, inspected

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
each_program = pytest.mark.parametrize("name", EVERY)
each_policy = pytest.mark.parametrize("policy", POLICIES, ids=lambda p: p.name)


def arguments(name):
    return (X, f32(3, 8, 8)) if name == "mapped" else (X, W)


def operands_of(text):
    """The operands of a printed equation, behind its primitive and its params."""
    name = re.match(r"[\w.-]+", text)[0]
    rest, depth = text[len(name) :], 0
    for i, c in enumerate(rest):
        depth += (c in "[(") - (c in "])")
        if depth == 0:
            return rest[i + 1 :].split() if rest[0] == "[" else rest.split()
    return []


def parsed(text):
    """Each printed jaxpr: the types of its operands, (types of results, right side), results."""
    found = {}
    for block in re.findall(r"^jaxpr\d+ = \{.*?\}$", text, re.M | re.S):
        head, *lines, end = block.splitlines()
        name, consts, operands = re.match(r"(jaxpr\d+) = \{ lambda (.*?); (.*?)\.$", head).groups()
        equations = [line.strip().split(" = ", 1) for line in lines]
        typed = [part.split(":", 1) for part in f"{consts} {operands}".split()]
        results = [x for x in re.match(r"  in \((.*)\) \}", end)[1].split(", ") if x]
        found[name] = (typed, operands.split(), equations, results)
    return found


@each_program
@each_policy
def test_a_listing_is_closed_and_has_no_bookkeeping(name, policy):
    text = inspected(EVERY[name], policy, *arguments(name)).listing()
    assert "precpass_" not in text and "uint16" not in text
    blocks = parsed(text)
    assert blocks
    for typed, _, equations, results in blocks.values():
        known = {var for var, _ in typed}
        assert len(known) == len(typed)
        for left, right in equations:
            for operand in operands_of(right):
                assert ":" in operand or operand in known, (operand, right)
            made = [part.split(":")[0] for part in left.split()]
            assert not (set(made) - {"_"}) & known, "a name is given twice"
            known.update(made)
        assert all(":" in r or r in known for r in results)


@each_program
def test_bodies_take_and_return_what_their_equations_give_and_get(name):
    blocks = parsed(inspected(EVERY[name], pp.AutoMixedBf16, *arguments(name)).listing())
    checked = 0
    for _, _, equations, _ in blocks.values():
        for left, right in equations:
            body = re.search(r"\b(?:jaxpr|call_jaxpr|body_jaxpr)=(jaxpr\d+)", right)
            if body is None or body[1] not in blocks:
                continue
            _, operands, _, results = blocks[body[1]]
            given = operands_of(right)
            if right.startswith("while"):
                given = given[int(re.search(r"cond_nconsts=(\d+)", right)[1]) :]
            assert len(operands) == len(given), right
            assert len(results) == len(left.split()), right
            if right.startswith("scan"):
                carry = int(re.search(r"num_carry=(\d+)", right)[1])
                consts = int(re.search(r"num_consts=(\d+)", right)[1])
                types = [operand.split(":", 1)[1] for operand in operands]
                outs = [part.split(":", 1)[1] for part in left.split()]
                assert outs[:carry] == types[consts : consts + carry]
            checked += 1
    assert checked or name not in ("gradient of a scan", "carried", "while", "remat")


def test_a_product_is_two_casts_and_a_product_of_the_same_name():
    found = pp.inspect(two_layers)(X, W)
    text = found.diff("jaxpr", color=False)
    given = [line[3:] for line in text.splitlines() if re.match(r"\+  ", line)]
    taken = [line[3:] for line in text.splitlines() if re.match(r"-  ", line)]
    assert [line.split(" = ")[1].split("[")[0] for line in given] == [
        "convert_element_type",
        "convert_element_type",
        "dot_general",
        "convert_element_type",
        "dot_general",
    ]
    # both products keep their names, and with them what reads them stays as it is
    assert [line.split(" = ")[0] for line in taken] == [
        line.split(" = ")[0] for line in given if "dot_general" in line
    ]


def test_a_loop_carries_what_is_stored_low_in_16_bits_alone():
    found = pp.inspect(PROGRAMS["gradient of a scan"])(X, W)
    scans = [line for line in found.listing().splitlines() if " = scan[" in line]
    kept = [part.split(":")[1] for line in scans for part in line.split(" = ")[0].split()]
    assert "uint16" in found.listing(bookkeeping=True)
    assert any(part.startswith("bf16[") for part in kept)


def test_the_diff_is_that_of_the_listings(tmp_path):
    found = pp.inspect(PROGRAMS["gradient of a scan"])(X, W)
    as_written = inspected(PROGRAMS["gradient of a scan"], "AlwaysF32", X, W).listing()
    (tmp_path / "scanned").write_text(as_written + "\n")
    patch = found.diff("jaxpr", color=False) + "\n"
    subprocess.run(["git", "apply", "-p1", "-"], input=patch, text=True, cwd=tmp_path, check=True)
    assert (tmp_path / "scanned").read_text() == found.listing() + "\n"


def test_bookkeeping_is_shown_where_it_is_asked_for_and_after_is_exact():
    found = pp.inspect(two_layers)(X, W)
    assert "precpass_carrier" in found.diff("jaxpr", bookkeeping=True)
    assert "precpass_carrier" in found.listing(bookkeeping=True)
    assert "precpass_carrier" in str(found.after)
    assert "precpass_" not in found.diff("jaxpr") and "precpass_" not in found._repr_html_()
    with pytest.raises(ValueError, match="level 'lines' has no bookkeeping to show: give level="):
        found.diff("lines", bookkeeping=True)


def test_a_users_own_bits_stay():
    def hashed(x, w):
        return lax.bitcast_convert_type((x @ w).astype(jnp.bfloat16), jnp.uint16)

    lines = pp.inspect(hashed)(X, W).listing()
    assert "uint16[8,8] = bitcast_convert_type" in lines and "precpass_" not in lines


@jax.custom_vjp
def with_a_rule(x, w):
    return jnp.tanh(x @ w)


with_a_rule.defvjp(
    lambda x, w: (with_a_rule(x, w), (x, w)),
    lambda kept, g: (g @ kept[1].T, kept[0].T @ g),
)


@pytest.mark.parametrize("fn", [lambda x, w: jax.nn.relu(x @ w), with_a_rule])
def test_a_custom_derivative_that_is_rewritten_is_shown_as_it_was(fn):
    text = pp.inspect(fn)(X, W).diff("jaxpr", color=False)
    changed = [line for line in text.splitlines() if line.startswith(("+", "-"))]
    assert any("bf16" in line for line in changed)
    assert not any("custom_" in line for line in changed)
    assert "rewritten" not in text and "Wrapped" not in text
