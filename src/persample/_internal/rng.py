"""Seeding and restoring the random number generators that user code may draw from."""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import RLock
from typing import Any

import torch


def seed_torch(seed: int) -> None:
    """Seed torch's default generators. Does what `torch.manual_seed` does, a hundred times faster."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)


def seed_all(seed: int) -> None:
    """Seed the generators of torch, of Python's `random` and of numpy, if numpy is loaded.

    >>> seed_all(0); first = torch.rand(1), random.random()
    >>> seed_all(0); first == (torch.rand(1), random.random())
    True
    """
    seed_torch(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


# The generators are shared by all threads: only one thread at a time may seed and restore them.
_lock = RLock()


@contextmanager
def fork_rng() -> Iterator[None]:
    """Restore the state of torch's generators, on all devices, at the end of the block."""
    with _lock, torch.random.fork_rng(range(torch.cuda.device_count())):
        yield


@contextmanager
def preserve_rng() -> Iterator[None]:
    """Restore the state of all generators that `seed_all` seeds at the end of the block.

    >>> seed_all(0); expected = random.random(), float(torch.rand(1))
    >>> seed_all(0)
    >>> with preserve_rng():
    ...     _ = random.random(), torch.rand(1)
    >>> (random.random(), float(torch.rand(1))) == expected
    True
    """
    with _lock:
        before = RngState()
        try:
            yield
        finally:
            before.restore()


def is_generator(value: Any) -> bool:
    """Whether a value is a random number generator of torch, Python or numpy."""
    numpy: Any = sys.modules.get("numpy.random")
    kinds = (numpy.Generator, numpy.RandomState, numpy.BitGenerator) if numpy else ()
    return isinstance(value, (torch.Generator, random.Random, *kinds))


def _read(generator: Any) -> Any:
    """The state of a generator, in a form that can be compared."""
    if isinstance(generator, torch.Generator):
        return generator.get_state().tolist()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if hasattr(generator, "get_state"):
        return pickle.dumps(generator.get_state())
    return pickle.dumps(getattr(generator, "bit_generator", generator).state)  # a dict, with arrays in it


def _write(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(torch.tensor(state, dtype=torch.uint8))
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    elif hasattr(generator, "set_state"):
        generator.set_state(pickle.loads(state))
    else:
        getattr(generator, "bit_generator", generator).state = pickle.loads(state)


class RngState:
    """The states of all generators that `seed_all` seeds, and of further ones, at one moment.

    >>> before = RngState()
    >>> number = random.random()
    >>> RngState() == before
    False
    >>> before.restore()
    >>> RngState() == before, random.random() == number
    (True, True)
    """

    def __init__(self, generators: Sequence[Any] = ()) -> None:
        numpy: Any = sys.modules.get("numpy.random")  # loading it takes a while
        of_cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        self.devices = [torch.get_rng_state(), *of_cuda]
        methods = [random.getstate, *([numpy.get_state] if numpy else [])]
        self._shared = [(method.__self__, _read(method.__self__)) for method in methods]
        self._given = [(each, _read(each)) for each in generators]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RngState):
            return NotImplemented
        is_same = [state for _, state in self._given] == [state for _, state in other._given]
        # One has no numpy if it was loaded in between, which draws nothing.
        is_same = is_same and all(a == b for (_, a), (_, b) in zip(self._shared, other._shared, strict=False))
        is_same = is_same and len(self.devices) == len(other.devices)
        return is_same and all(map(torch.equal, self.devices, other.devices))

    __hash__ = None  # type: ignore[assignment]

    def is_current(self) -> bool:
        """Whether the generators have these states now."""
        return self == RngState([each for each, _ in self._given])

    def restore(self) -> None:
        """Set all generators to these states."""
        torch.set_rng_state(self.devices[0])
        if len(self.devices) > 1:
            torch.cuda.set_rng_state_all(self.devices[1:])
        for generator, state in (*self._shared, *self._given):
            _write(generator, state)
