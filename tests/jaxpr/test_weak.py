"""`WeakIdMap` and `Recent` (precpass/jaxpr/weak.py)."""

import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from precpass.jaxpr.weak import Recent, WeakIdMap


class Key:
    def __eq__(self, other):
        raise AssertionError("a key was compared")

    __hash__ = None


def test_keys_are_told_apart_by_identity():
    values, one, other = WeakIdMap(), Key(), Key()
    assert values.setdefault(one, 1) == 1
    assert values.setdefault(one, 2) == 1
    assert (values.get(one), values.get(other), len(values)) == (1, None, 1)


def test_an_entry_goes_with_its_key():
    values = WeakIdMap()
    keys = [np.ones(3) for _ in range(100)]
    for i, key in enumerate(keys):
        values.setdefault(key, i)
    del key
    del keys[10:]
    assert len(values) == 10
    assert [values.get(key) for key in keys] == list(range(10))


def test_also_where_the_collector_frees_it():
    values, key = WeakIdMap(), Key()
    key.itself = key
    values.setdefault(key, 1)
    del key
    gc.collect()
    assert len(values) == 0


def test_an_id_that_is_used_again_is_another_key():
    values = WeakIdMap()
    for i in range(1000):  # the memory of one is that of the next
        key = Key()
        assert values.get(key) is None
        assert values.setdefault(key, i) == i
        del key


def test_what_cannot_be_referred_to_weakly_is_no_key():
    with pytest.raises(TypeError, match="weak reference"):
        WeakIdMap().setdefault((1, 2), 0)


def test_what_was_asked_for_last_is_kept():
    values, made = Recent(3), []

    def get(key):
        return values.get(key, lambda: made.append(key) or key * 10)

    assert [get(k) for k in (1, 2, 3, 1, 4)] == [10, 20, 30, 10, 40]
    assert made == [1, 2, 3, 4]
    assert get(1) == 10 and made == [1, 2, 3, 4], "asked for since, and kept"
    assert get(2) == 20 and made == [1, 2, 3, 4, 2], "the one that was left out"
    assert len(values) == 3
    with pytest.raises(TypeError, match="unhashable"):
        values.get([], list)


def test_threads_share_one_value():
    values, made, gate = Recent(8), [], threading.Barrier(8)

    def ask():
        gate.wait()
        return values.get("a", lambda: made.append(1) or object())

    with ThreadPoolExecutor(8) as pool:
        found = [f.result() for f in [pool.submit(ask) for _ in range(8)]]
    assert len(set(map(id, found))) == len(made) == 1
