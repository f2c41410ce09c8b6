"""Settings of the C library's allocator."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# Parameters of glibc's `mallopt`.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3

# The largest values that glibc chooses by itself.
_LARGEST_MMAP_THRESHOLD, _LARGEST_TRIM_THRESHOLD = 2**25, 2**26

_USER_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")


@contextmanager
def keep_freed_memory() -> Iterator[None]:
    """Inside the block, keep freed memory of the CPU for the next allocation. Return it to the system at the end.

    A loop over batches frees its tensors and allocates as many again. By default, glibc returns freed memory at the end
    of its heap, and the system clears every page of it when it is used again: for the CNN of `benchmarks.scan`, 1,400
    pages in each batch of 64, a quarter of the time of a recording. The peak of the memory is the same for batches of
    one shape, and was 6 to 10 % higher for sequences of different lengths.

    Nothing is changed if the user has chosen settings (`MALLOC_TRIM_THRESHOLD_` etc.), or without glibc.
    """
    library = _find_glibc()
    if library is None:
        yield
        return
    library.mallopt(_TRIM_THRESHOLD, -1)  # never
    if not library.mallopt(_MMAP_THRESHOLD, 2**30):  # older versions allow less
        library.mallopt(_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
    try:
        yield
    finally:
        library.mallopt(_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
        library.mallopt(_TRIM_THRESHOLD, _LARGEST_TRIM_THRESHOLD)
        library.malloc_trim(0)


def _find_glibc() -> Any | None:
    if platform.system() != "Linux" or any(name in os.environ for name in _USER_SETTINGS):
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "mallopt") and hasattr(library, "malloc_trim") else None
