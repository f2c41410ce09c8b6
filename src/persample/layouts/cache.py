"""What is remembered of how calls move the samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

from persample.layouts.call import without_batch_size
from persample.layouts.layout import Layout, Lost
from persample.layouts.motion import Motion

_MOST_REMEMBERED = 20_000


@dataclass
class _AtSizes:
    """The motion that was found for batches of these sizes; None if they differ."""

    motion: Motion | None
    sizes: set[int] = field(default_factory=set)


class MotionCache:
    """Remembers motions by the key of a call, which holds all that they depend on, so that no entry grows stale.

    There is one for the process (`CACHE`), shared by all threads. A motion that was found alike for batches of two
    sizes is taken for those of all other sizes: Poisson sampling gives each batch another one. Entries are dropped, all
    at once, when there are more than 20,000.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._by_key: dict[Any, Motion] = {}
        self._at_sizes: dict[Any, _AtSizes] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._by_key.clear()
            self._at_sizes.clear()

    def get(self, key: tuple[Any, ...]) -> Motion | None:
        """What was found for calls with this key, or with keys that differ in the size of the batch only."""
        try:
            found = self._by_key.get(key)
        except TypeError:  # an argument that cannot be hashed
            return None
        if found is None and (found := self._get_at_other_sizes(key)) is not None:
            self._keep(key, found)
        return found

    def add(self, key: tuple[Any, ...], motion: Motion) -> Motion:
        """Remember what was found for a call; returns what was found for another size of the batch if it is equal."""
        motion = self._compare_sizes(key, motion)
        self._keep(key, motion)
        return motion

    def get_or_find(self, key: tuple[Any, ...], find: Callable[[], Motion]) -> Motion:
        """What was found for a call of this key, and for no other; `find()` if there is nothing."""
        found = self._by_key.get(key)
        if found is None:
            found = find()
            self._keep(key, found)
        return found

    def _keep(self, key: tuple[Any, ...], motion: Motion) -> None:
        with self._lock:
            if len(self._by_key) >= _MOST_REMEMBERED:
                self._by_key.clear()
            self._by_key[key] = motion

    def _get_at_other_sizes(self, key: tuple[Any, ...]) -> Motion | None:
        general = without_batch_size(key)
        seen = None if general is None else self._at_sizes.get(general)
        return seen.motion if seen is not None and len(seen.sizes) > 1 else None

    def _compare_sizes(self, key: tuple[Any, ...], motion: Motion) -> Motion:
        general = without_batch_size(key)
        if general is None:
            return motion
        with self._lock:
            if len(self._at_sizes) >= _MOST_REMEMBERED:
                self._at_sizes.clear()
            seen = self._at_sizes.setdefault(general, _AtSizes(motion))
            if seen.motion is None or seen.motion != motion or not _is_free_of_size(motion):
                seen.motion = None
                return motion
            seen.sizes.add(key[1])
            return seen.motion


def _is_free_of_size(motion: Motion) -> bool:
    lists = any(isinstance(w, Lost) or (isinstance(w, Layout) and w.ids is not None) for w in motion.results)
    return not (lists or motion.following or motion.by_values)


CACHE = MotionCache()
