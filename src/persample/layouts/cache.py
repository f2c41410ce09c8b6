"""The cache of motions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Lock

from persample.layouts.call import CallKey, get_batch_size, without_batch_size
from persample.layouts.layout import Layout, Lost
from persample.layouts.motion import Motion

_MAX_ENTRIES = 20_000


@dataclass
class _SeenSizes:
    """The motion of a call for batches of these sizes; None if the motion depends on the batch size."""

    motion: Motion | None
    sizes: set[int] = field(default_factory=set)


class MotionCache:
    """Motions by the keys of calls. A key holds everything that a motion depends on, so no entry becomes invalid.

    There is one cache for the process (`CACHE`), shared by all threads. A motion that was found to be the same for two
    batch sizes is used for all other sizes, because Poisson sampling gives each batch another size. All entries are
    dropped when there are more than 20,000.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._by_key: dict[CallKey, Motion] = {}
        self._by_general_key: dict[CallKey, _SeenSizes] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def clear(self) -> None:
        """Drop all entries."""
        with self._lock:
            self._by_key.clear()
            self._by_general_key.clear()

    def get(self, key: CallKey) -> Motion | None:
        """The motion of calls with this key, or of two calls whose keys differ from it only in the batch size."""
        try:
            found = self._by_key.get(key)
        except TypeError:  # an argument is unhashable
            return None
        if found is None and (found := self._get_for_any_size(key)) is not None:
            self._store(key, found)
        return found

    def add(self, key: CallKey, motion: Motion) -> Motion:
        """Store the motion of a call. Return the motion found for another batch size instead, if it is equal."""
        motion = self._compare_sizes(key, motion)
        self._store(key, motion)
        return motion

    def get_or_find(self, key: CallKey, find: Callable[[], Motion]) -> Motion:
        """The motion of calls with exactly this key; `find()` is called and its result stored if there is none."""
        found = self._by_key.get(key)
        if found is None:
            found = find()
            self._store(key, found)
        return found

    def _store(self, key: CallKey, motion: Motion) -> None:
        with self._lock:
            if len(self._by_key) >= _MAX_ENTRIES:
                self._by_key.clear()
            self._by_key[key] = motion

    def _get_for_any_size(self, key: CallKey) -> Motion | None:
        general = without_batch_size(key)
        seen = None if general is None else self._by_general_key.get(general)
        return seen.motion if seen is not None and len(seen.sizes) > 1 else None

    def _compare_sizes(self, key: CallKey, motion: Motion) -> Motion:
        general = without_batch_size(key)
        if general is None:
            return motion
        with self._lock:
            if len(self._by_general_key) >= _MAX_ENTRIES:
                self._by_general_key.clear()
            seen = self._by_general_key.setdefault(general, _SeenSizes(motion))
            if seen.motion is None or seen.motion != motion or not _can_hold_for_all_sizes(motion):
                seen.motion = None
                return motion
            seen.sizes.add(get_batch_size(key))
            return seen.motion


def _can_hold_for_all_sizes(motion: Motion) -> bool:
    if motion.aligned or motion.depends_on_values:
        return False
    return not any(isinstance(w, Lost) or (isinstance(w, Layout) and w.ids is not None) for w in motion.results)


CACHE = MotionCache()
