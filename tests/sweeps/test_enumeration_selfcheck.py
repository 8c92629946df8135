"""With a JAX newer than those tested, a pass that no longer works says so at its first use."""

import threading
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import precpass as pp
from precpass import jaxpr as ir
from precpass.jit import selfcheck
from precpass.rewrite import rewriter
from tests.support.jaxprs import named
from tests.support.passes import assert_all_low, config

X = jnp.eye(4)
CHECKED = tuple(selfcheck._PROGRAMS)
# What breaks each: a primitive that is no longer found.
ENTERED_AS = {"jit": "jit", "scan": "scan", "cond": "cond", "remat": "remat2"}
STAYS_WIDE = r"program with {}, \d of its \d products stay wide"


@pytest.fixture
def newer(monkeypatch: pytest.MonkeyPatch):
    """As if the installed JAX were newer than those tested, and nothing had been planned yet."""
    monkeypatch.setattr(selfcheck, "NEWEST_TESTED", (0, 1, 0))
    monkeypatch.setattr(selfcheck, "_passed", False)


def first_use():
    return pp.auto_mixed(lambda x: x @ x)(X)


def test_the_installed_jax_is_among_those_tested():
    assert selfcheck.OLDEST_TESTED <= jax.__version_info__[:3] <= selfcheck.NEWEST_TESTED


@pytest.mark.usefixtures("newer")
def test_a_healthy_pass_is_silent_and_checked_once(monkeypatch: pytest.MonkeyPatch):
    calls: list[str] = []
    check = selfcheck._check
    monkeypatch.setattr(selfcheck, "_check", lambda name, fn: (calls.append(name), check(name, fn)))
    first_use()
    assert tuple(calls) == CHECKED
    first_use()
    pp.inspect(lambda x: x @ x)(X)
    assert tuple(calls) == CHECKED


@pytest.mark.usefixtures("newer")
@pytest.mark.parametrize("name", ENTERED_AS)
def test_a_body_that_is_not_found_is_an_error(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(ir.ENTERED, ENTERED_AS[name])
    with pytest.raises(RuntimeError, match=STAYS_WIDE.format(name)):
        first_use()


@pytest.mark.usefixtures("newer")
@pytest.mark.parametrize("name", ["custom_jvp", "custom_vjp"])
def test_a_rule_that_is_not_rewritten_is_an_error(name: str, monkeypatch: pytest.MonkeyPatch):
    rewritten = ir.with_rewritten_rules

    def forgets(eqn: Any, params: dict, rewrite: Any):
        if eqn.primitive.name != f"{name}_call":
            rewritten(eqn, params, rewrite)

    monkeypatch.setattr(rewriter.ir, "with_rewritten_rules", forgets)
    with pytest.raises(RuntimeError, match=STAYS_WIDE.format(name)):
        first_use()


@pytest.mark.usefixtures("newer")
def test_a_rule_that_raises_is_an_error_that_says_what_to_do(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(ir.ENTERED, "scan", lambda eqn: eqn.params["a_name_of_yesterday"])
    with pytest.raises(RuntimeError) as caught:
        first_use()
    text = str(caught.value)
    for part in (
        f"jax {jax.__version__}",
        "program with scan",
        "KeyError: 'a_name_of_yesterday'",
        "tested with jax 0.10.2 to 0.1.0",
        "PRECPASS=off",
    ):
        assert part in text
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.usefixtures("newer")
def test_the_error_comes_again(monkeypatch: pytest.MonkeyPatch):
    """A failure is not remembered as a success, and one that is mended is forgotten."""
    with monkeypatch.context() as broken:
        broken.delitem(ir.ENTERED, "cond")
        for _ in range(2):
            with pytest.raises(RuntimeError, match="cond"):
                first_use()
        with pytest.raises(RuntimeError, match="cond"):
            pp.inspect(jnp.sin)(X)
    assert first_use().shape == X.shape


@pytest.mark.usefixtures("newer")
def test_switched_off_nothing_is_checked(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(ir.ENTERED, "cond")
    with pp.use_policy(None):
        assert first_use().shape == X.shape


@pytest.mark.usefixtures("newer")
def test_a_tested_release_is_not_checked(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(selfcheck, "NEWEST_TESTED", jax.__version_info__[:3])
    monkeypatch.delitem(ir.ENTERED, "cond")
    assert first_use().shape == X.shape


@pytest.mark.usefixtures("newer")
def test_nothing_is_staged_into_the_users_trace():
    assert str(jax.make_jaxpr(lambda x: first_use() + x)(X)).count("cond") == 0
    jaxpr = jax.make_jaxpr(jax.vmap(jax.grad(lambda x: pp.auto_mixed(lambda x: (x @ X).sum())(x))))(
        X
    )
    assert not named(jaxpr, "scan")
    assert_all_low(pp.auto_mixed(lambda x: x @ x), X)


@pytest.mark.release
@pytest.mark.usefixtures("newer")
@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("jax_default_matmul_precision", "highest"),
        ("jax_enable_x64", True),
        ("jax_numpy_dtype_promotion", "strict"),
        ("jax_debug_nans", True),
        ("jax_disable_jit", True),
    ],
)
def test_the_users_settings_do_not_make_it_fail(setting: str, value: object):
    with config(setting, value):
        selfcheck.check_jax()
    assert selfcheck._passed


@pytest.mark.usefixtures("newer")
def test_a_region_around_the_first_use_does_not_make_it_fail():
    with pp.keep("f32"), pp.use_policy("AlwaysF32"):
        first_use()
    assert selfcheck._passed


@pytest.mark.usefixtures("newer")
def test_threads_check_once_between_them(monkeypatch: pytest.MonkeyPatch):
    calls: list[str] = []
    check = selfcheck._check
    monkeypatch.setattr(selfcheck, "_check", lambda name, fn: (calls.append(name), check(name, fn)))
    failures: list[BaseException] = []

    def use(seed: int) -> None:
        try:
            pp.auto_mixed(lambda x: x @ x + seed)(X)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=use, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert tuple(calls) == CHECKED
