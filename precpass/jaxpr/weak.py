"""Two caches: one by identity that does not keep its keys alive, and one of the last few keys."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

__all__ = ["Recent", "WeakIdMap"]

V = TypeVar("V")


class WeakIdMap(Generic[V]):
    """Maps objects, by identity, to values that live as long as their object.

    A `weakref.WeakKeyDictionary` needs equality and a hash of its keys. Arrays and libraries'
    modules have none, or have them by content.

    Examples:
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
        """The value of an object; None if it has none."""
        entry = self._entries.get(id(key))
        return entry[1] if entry is not None and entry[0]() is key else None

    def setdefault(self, key: Any, value: V) -> V:
        """The value of an object; if it has none, that becomes `value`.

        Raises:
            TypeError: for an object that cannot be referred to weakly.
        """
        at, entries = id(key), self._entries

        def forget(gone: weakref.ref[Any]) -> None:
            # By the time the collector calls this, another object may have the same id.
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
    """A cache of the values that were asked for last.

    Args:
        most: the largest number of values in it.

    Examples:
        >>> values = Recent[int](2)
        >>> [values.get(key, lambda: len(key)) for key in ("a", "bb", "ccc")], len(values)
        ([1, 2, 3], 2)
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._values: dict[Hashable, V] = {}
        self._lock = threading.RLock()

    def get(self, key: Hashable, make: Callable[[], V]) -> V:
        """The value of a key, which `make` makes if there is none.

        Raises:
            TypeError: for a key that has no hash.
        """
        with self._lock:
            value = self._values.pop(key) if key in self._values else make()
            self._values[key] = value  # a dict has the newest key last
            while len(self._values) > self._most:
                del self._values[next(iter(self._values))]
            return value

    def __len__(self) -> int:
        return len(self._values)
