"""Memory of objects that does not keep them alive, by identity; and memory of the last few."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

__all__ = ["Recent", "WeakIdMap"]

V = TypeVar("V")


class WeakIdMap(Generic[V]):
    """Values of objects, each kept as long as its object lives.

    A `weakref.WeakKeyDictionary` asks its keys for equality and a hash, which arrays and modules
    of libraries do not have, or have by their content.

    Example:
        >>> values = WeakIdMap[str]()
        >>> key = {1, 2}
        >>> values.setdefault(key, "a set"), values.get(key), values.get({1, 2})
        ('a set', 'a set', None)
        >>> del key
        >>> len(values)
        0
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[Any], V]] = {}

    def get(self, key: Any) -> V | None:
        """The value of an object; None where it has none."""
        entry = self._entries.get(id(key))
        return entry[1] if entry is not None and entry[0]() is key else None

    def setdefault(self, key: Any, value: V) -> V:
        """The value of an object, which becomes `value` where it has none.

        Raises:
            TypeError: for an object that cannot be referred to weakly.
        """
        at, entries = id(key), self._entries

        def forget(gone: weakref.ref[Any]) -> None:
            # another object may have this id by now, in the collector's own time
            if (entry := entries.get(at)) is not None and entry[0] is gone:
                del entries[at]

        new = weakref.ref(key, forget), value
        entry = entries.setdefault(at, new)
        if entry[0]() is not key:
            entry = entries[at] = new
        return entry[1]

    def __len__(self) -> int:
        return len(self._entries)


class Recent(Generic[V]):
    """The values that were asked for last, by key.

    Args:
        most: how many are kept.

    Example:
        >>> values = Recent[int](2)
        >>> [values.get(key, lambda: len(key)) for key in ("a", "bb", "ccc")], len(values)
        ([1, 2, 3], 2)
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._values: dict[Hashable, V] = {}
        self._lock = threading.RLock()

    def get(self, key: Hashable, make: Callable[[], V]) -> V:
        """The value of a key, made where there is none.

        Raises:
            TypeError: for a key that has no hash.
        """
        with self._lock:
            value = self._values.pop(key) if key in self._values else make()
            self._values[key] = value  # the last in a dict's order
            while len(self._values) > self._most:
                del self._values[next(iter(self._values))]
            return value

    def __len__(self) -> int:
        return len(self._values)
