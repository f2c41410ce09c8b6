"""How a call moves the samples of a batch, and what calls do, kept by the keys of the calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock

from torch import Tensor

from persample.layouts.call import Key
from persample.layouts.layout import Layout, Where

# ---- motions ----


@dataclass(frozen=True)
class Motion:
    """How a call moves the samples: where they lie in each tensor of the result.

    Attributes:
        results: where the samples lie in each tensor of the result.
        aligned: arguments that do not depend on the batch, but have rows for each sample (a state made by
            `zeros(B, H)`, a learned token that was expanded to the batch): position among the tensors, and layout.
        depends_on_values: the motion was found from the values of the arguments, so it must not be kept.
        is_tried: the motion was found by trial, so it is observed and not known.
    """

    results: tuple[Where | None, ...]
    aligned: tuple[tuple[int, Layout], ...] = ()
    depends_on_values: bool = False
    is_tried: bool = False


def make_uniform_motion(where: Where | None, results: Sequence[Tensor]) -> Motion:
    """The motion with the same layout for each of the results."""
    return Motion(tuple(where for _ in results))


# ---- what is kept ----


_MAX_ENTRIES = 20_000


@dataclass(frozen=True, slots=True)
class Effect:
    """What a call does, and so does each call with the same key.

    The key says for what the effect is valid: at any size, for certain shapes, or under the same flags (`call`).

    Attributes:
        motion: how it moves the samples.
        rules_version: the state of the rules under which later calls may do without the steps of `persample.forward`:
            they only run, and their result gets its layout. None: later calls take the steps.
    """

    motion: Motion
    rules_version: int | None = None


class Memo:
    """The effects of calls by their keys. A key holds everything that decides, so no entry becomes invalid.

    There is one for the process (`MEMO`), shared by all threads. All entries are dropped when there are more than
    20,000.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._by_key: dict[Key, Effect] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def clear(self) -> None:
        """Drop all entries."""
        with self._lock:
            self._by_key.clear()

    def get(self, key: Key | None) -> Effect | None:
        """The effect of calls with this key; None if it is not known, or if there is no key."""
        try:
            return self._by_key.get(key)  # type: ignore[arg-type]
        except TypeError:  # an argument is unhashable
            return None

    def add(self, key: Key, effect: Effect) -> None:
        """Keep the effect of a call."""
        with self._lock:
            if len(self._by_key) >= _MAX_ENTRIES and key not in self._by_key:
                self._by_key.clear()
            self._by_key[key] = effect

    def get_or_find(self, key: Key | None, find: Callable[[], Motion]) -> Motion:
        """The motion of calls with this key. If it is not known, `find` finds it; it is kept if it may be."""
        known = self.get(key)
        if known is not None:
            return known.motion
        motion = find()
        if key is not None and not motion.depends_on_values:
            self.add(key, Effect(motion))
        return motion


MEMO = Memo()
