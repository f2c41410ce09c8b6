"""The cache of motions."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock

from persample.layouts.call import CallKey
from persample.layouts.motion import Motion

_MAX_ENTRIES = 20_000


class MotionCache:
    """Motions by the keys of calls. A key holds everything that a motion depends on, so no entry becomes invalid.

    There is one cache for the process (`CACHE`), shared by all threads. All entries are dropped when there are more
    than 20,000.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._by_key: dict[CallKey, Motion] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def clear(self) -> None:
        """Drop all entries."""
        with self._lock:
            self._by_key.clear()

    def get(self, key: CallKey) -> Motion | None:
        """The motion of calls with this key."""
        try:
            return self._by_key.get(key)
        except TypeError:  # an argument is unhashable
            return None

    def add(self, key: CallKey, motion: Motion) -> Motion:
        """Store the motion of a call, and return it."""
        with self._lock:
            if len(self._by_key) >= _MAX_ENTRIES:
                self._by_key.clear()
            self._by_key[key] = motion
        return motion

    def get_or_find(self, key: CallKey, find: Callable[[], Motion]) -> Motion:
        """The motion of calls with this key; `find()` is called and its result stored if there is none."""
        found = self._by_key.get(key)
        return self.add(key, find()) if found is None else found


CACHE = MotionCache()
