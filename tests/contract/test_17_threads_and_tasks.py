"""Design section 3, line 17: many callers at once; a region belongs to its thread or task."""

import asyncio
import concurrent.futures
import contextlib
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import precpass as pp
from tests.support.calls import W, X
from tests.support.jaxprs import product_dtypes
from tests.support.values import rel_error


def square(x):
    return x @ x


def kinds(fn):
    return product_dtypes(fn.trace(X).jaxpr)


def together(count, fn):
    """The results of `fn(0), fn(1), ...`, each in a thread of its own, started at one moment."""
    barrier = threading.Barrier(count)

    def run(i):
        barrier.wait()
        return fn(i)

    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


# ---------------------------------------------------------------- threads


def test_concurrent_first_calls_share_one_program():
    mixed = pp.auto_mixed(jax.grad(lambda x: jnp.tanh(x @ W).sum()))
    results = together(8, lambda i: np.asarray(mixed(X)))
    assert rel_error(results[0], jax.grad(lambda x: jnp.tanh(x @ W).sum())(X)) < 2e-2
    for result in results:
        np.testing.assert_array_equal(result, results[0])
    assert len({id(j) for j in together(4, lambda i: mixed.trace(X).jaxpr)}) == 1


def test_policies_of_threads_do_not_meet():
    mixed, policies = pp.auto_mixed(square), ["AutoMixed", "AutoMixedBf16", None, "AlwaysF32"]
    dtypes = ["float16", "bfloat16", "float32", "float32"]
    wanted = [np.asarray(pp.auto_mixed(square, policy=p or "AlwaysF32")(X)) for p in policies]
    assert len({w.tobytes() for w in wanted}) == 3

    def run(i):
        found = []
        for turn in range(40):
            at = (i + turn) % 4
            with pp.use_policy(policies[at]):
                found.append(np.array_equal(mixed(X), wanted[at]))
                if turn < 2:
                    found.append(kinds(mixed) == [dtypes[at]])
        return all(found)

    assert all(together(4, run))


@pytest.mark.parametrize("policy", ["AutoMixed", None])
def test_no_region_outlives_clear_cache(policy):
    factor = 1.0
    mixed = pp.auto_mixed(lambda x: factor * (x @ x))
    with pp.use_policy(policy):
        before = mixed(X)
    factor = 2.0
    mixed.clear_cache()
    with pp.use_policy(policy):
        np.testing.assert_array_equal(mixed(X), 2.0 * before)


def test_static_leaves_and_results_from_many_threads():
    mixed = pp.auto_mixed(lambda x, mode: (x @ x, mode))
    results = together(6, lambda i: mixed(X, f"mode {i % 3}"))
    assert [mode for _, mode in results] == [f"mode {i % 3}" for i in range(6)]


# ---------------------------------------------------------------- asyncio


def test_a_region_belongs_to_its_task():
    mixed = pp.auto_mixed(square)
    found = {}

    async def task(name, policy, turns):
        async def at_once():
            found.setdefault(name, []).append(kinds(mixed)[0])
            y = mixed(X)
            assert rel_error(y, X @ X) < 2e-2

        if policy is None:
            for _ in range(turns):
                await at_once()
                await asyncio.sleep(0)
            return
        with pp.use_policy(policy):
            for _ in range(turns):
                await at_once()
                await asyncio.sleep(0)
        await at_once()

    async def main():
        # they open and close in no order
        await asyncio.gather(
            task("half", "AutoMixed", 3),
            task("plain", None, 5),
            task("wide", "AlwaysF32", 2),
            task("brain", "AutoMixedBf16", 4),
        )

    asyncio.run(main())
    assert found["half"] == ["float16"] * 3 + ["bfloat16"]
    assert found["plain"] == ["bfloat16"] * 5
    assert found["wide"] == ["float32"] * 2 + ["bfloat16"]
    assert found["brain"] == ["bfloat16"] * 5
    assert product_dtypes(jax.make_jaxpr(lambda x: mixed(x))(X)) == ["bfloat16"]


def test_a_thread_that_a_task_starts_has_its_region():
    mixed = pp.auto_mixed(square)

    async def main():
        with pp.use_policy("AutoMixed"):
            return await asyncio.to_thread(kinds, mixed)

    assert asyncio.run(main()) == ["float16"]


def beside(policy, run, inner=contextlib.nullcontext):
    """What `run` gives in a task while another one has a region open, and the key is its own."""

    async def other(entered, leave):
        with pp.use_policy(policy), inner():
            entered.set()
            await leave.wait()

    async def main():
        entered, leave = asyncio.Event(), asyncio.Event()
        task = asyncio.create_task(other(entered, leave))
        await entered.wait()
        try:
            return run()
        finally:
            leave.set()
            await task

    return asyncio.run(main())


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("policy", ["AutoMixed", None])
def test_the_first_call_that_meets_another_tasks_region(policy, compiled):
    traces = []
    mixed = pp.auto_mixed(lambda x: (traces.append(x.shape), x @ x)[1])
    wanted = np.asarray(pp.auto_mixed(square)(X))
    if compiled:
        mixed(X)
        with pp.use_policy(policy):
            mixed(X)
        traces.clear()
    for _ in range(3):
        np.testing.assert_array_equal(beside(policy, lambda: mixed(X)), wanted)
    assert len(traces) == (0 if compiled else 1)


def test_a_call_that_runs_as_written_brings_its_region_too():
    inner = pp.auto_mixed(square)
    outer = pp.auto_mixed(lambda x: inner(x))

    def run():
        with pp.use_policy(None):
            return beside("AutoMixed", lambda: outer(X))

    np.testing.assert_array_equal(run(), jax.jit(square)(X))


def test_keep_belongs_to_its_task():
    mixed = pp.auto_mixed(square)
    assert beside("AutoMixed", lambda: kinds(mixed), lambda: pp.keep("f16")) == ["bfloat16"]


def test_a_region_of_another_task_where_jit_is_disabled():
    mixed = pp.auto_mixed(square)

    def run():
        with jax.disable_jit():
            return mixed(X)

    wanted = run()
    np.testing.assert_array_equal(beside("AlwaysF32", run), wanted)


def test_what_jits_cache_cannot_tell_apart_is_an_error():
    mixed = pp.auto_mixed(square)
    jitted = jax.jit(lambda x: mixed(x))

    def run():
        with pytest.raises(RuntimeError, match="region of another asyncio task") as caught:
            jitted(X)
        assert caught.value.__context__ is None
        mixed(X)  # brings this task's region back
        return kinds(jitted)

    assert beside("AutoMixed", run) == ["bfloat16"]
    with pp.use_policy("AutoMixed"):
        assert kinds(jitted) == ["float16"]
