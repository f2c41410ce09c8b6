"""Reuse of memory for large dense results.

On a CPU, memory that comes fresh from the system takes several times as long to fill as memory that was used before. So
the memory of a dense result is kept when its last tensor (or view) has been freed, and is given to the next result of
about the same size. It never belongs to two results at a time. On other devices torch's own allocator does the same.
"""

from __future__ import annotations

import mmap
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock

import torch
from torch import Tensor

from persample._internal import tracing

_SMALLEST = 2**20  # bytes; malloc reuses smaller blocks itself
_PATIENCE = 4  # calls of dense() after which unused memory is returned to the system
_PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}


@dataclass(eq=False)
class _Block:
    memory: mmap.mmap
    freed_in: int  # the round in which it became free


# Free blocks of this process, shared by all threads. The garbage collector may add one at any time: read a copy.
_free: deque[_Block] = deque()
_lock = Lock()
_round = 0


def start_round() -> None:
    """Start a round of allocations, and return blocks that were not needed for some rounds to the system."""
    global _round
    with _lock:
        _round += 1
        for block in list(_free):
            if _round - block.freed_in > _PATIENCE:
                _free.remove(block)


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Like `torch.empty`, in memory that an earlier result has left if there is any.

    >>> a = empty((600, 600), torch.float32, torch.device("cpu"))
    >>> address = a.data_ptr()
    >>> del a
    >>> empty((600, 600), torch.float32, torch.device("cpu")).data_ptr() == address
    True
    """
    count = torch.Size(shape).numel()
    size = count * dtype.itemsize
    if device.type != "cpu" or size < _SMALLEST or tracing.get_trace() is not None:
        return torch.empty(shape, dtype=dtype, device=device)
    memory = _take_free(size) or mmap.mmap(-1, size, **_PRIVATE)
    view = memoryview(memory)
    # torch keeps the view alive as long as a tensor uses the memory.
    weakref.finalize(view, _give_back, memory).atexit = False
    return torch.frombuffer(view, dtype=dtype, count=count).view(shape)


def release_memory() -> int:
    """Return the memory that is kept for later results to the system, and its size in bytes.

    Memory that a tensor still uses is not affected.

    >>> release_memory() >= 0
    True
    """
    with _lock:
        count = sum(len(block.memory) for block in list(_free))
        _free.clear()
    return count


def _take_free(size: int) -> mmap.mmap | None:
    """Remove and return a free block of about this size, None if there is none."""
    with _lock:
        fitting = [block for block in list(_free) if size <= len(block.memory) <= 1.25 * size]
        if not fitting:
            return None
        best = min(fitting, key=lambda block: len(block.memory))
        _free.remove(best)
        return best.memory


def _give_back(memory: mmap.mmap) -> None:
    # Without the lock: this runs wherever a tensor is freed, possibly in a thread that holds the lock.
    _free.append(_Block(memory, _round))
