"""Memory for large results that is used again, once nobody has the result any more.

On a CPU, memory that comes fresh from the system costs several times what it takes to write the result into it. So what
`dense()` gives lies in memory that is kept when the last tensor in it has gone (a view counts), and goes to the next
result of its size. It never belongs to two results at a time. On other devices torch's own allocator does the same.
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

_SMALLEST = 2**20  # bytes; below that, malloc has memory at hand
_PATIENCE = 4  # how many times dense() may be asked before unused memory is given back
_PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}


@dataclass
class _Piece:
    memory: mmap.mmap
    since: int  # the round in which it became free


_free: deque[_Piece] = deque()
_lock = Lock()
_round = 0


def next_round() -> None:
    """Says that results are about to be asked for; gives back what nobody has wanted for some rounds."""
    global _round
    with _lock:
        _round += 1
        for piece in list(_free):
            if _round - piece.since > _PATIENCE:
                _free.remove(piece)


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """As `torch.empty`.

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
    memory = _taken(size) or mmap.mmap(-1, size, **_PRIVATE)
    view = memoryview(memory)
    weakref.finalize(view, _give_back, memory).atexit = False  # torch holds the view as long as there is a tensor in it
    return torch.frombuffer(view, dtype=dtype, count=count).view(shape)


def release_memory() -> int:
    """Gives the memory that is kept for results to come back to the system; returns how many bytes.

    What a tensor still lies in stays.

    >>> release_memory() >= 0
    True
    """
    with _lock:
        count = sum(len(piece.memory) for piece in _free)
        _free.clear()
    return count


def _taken(size: int) -> mmap.mmap | None:
    """A free piece of about this size."""
    with _lock:
        fitting = [piece for piece in list(_free) if size <= len(piece.memory) <= 1.25 * size]
        if not fitting:
            return None
        best = min(fitting, key=lambda piece: len(piece.memory))
        _free.remove(best)
        return best.memory


def _give_back(memory: mmap.mmap) -> None:
    _free.append(_Piece(memory, _round))  # without the lock: this runs wherever a tensor dies, perhaps inside of it
