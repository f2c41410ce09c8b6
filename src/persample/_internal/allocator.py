"""How much freed memory the C library keeps for the next allocations."""

from __future__ import annotations

# A little less than the largest block, with its header, that raises glibc's threshold.
_LARGEST_BLOCK = 2**25 - 2**16


def keep_freed_memory() -> None:
    """Let the C library keep up to 64 MB of freed memory, from now on.

    A loop frees its tensors and allocates as many again. glibc starts with thresholds of 128 KB: it returns more free
    memory than that to the system, which clears every page again when it is used. This took up to a quarter of a step.
    glibc raises its thresholds to the size of each larger block that is freed, up to 32 MB, and keeps twice as much.
    So freeing one such block is enough. The block is never written and takes no memory.

    A user's own settings (`MALLOC_TRIM_THRESHOLD_` etc.) turn this mechanism off, and so stay. Other libraries are not
    affected.
    """
    bytes(_LARGEST_BLOCK)
