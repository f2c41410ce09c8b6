"""How much memory is free on a device, and how much freed memory the C library keeps for the next allocations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

# ---- freed memory ----


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


# ---- free memory ----


_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def find_free_memory(devices: Iterable[torch.device]) -> int | None:
    """Bytes that can be allocated on each of the devices, at least; None if that is not known for one of them.

    >>> find_free_memory([torch.device("meta")]) is None
    True
    """
    found = [_find_on_device(device) for device in {*devices}]
    known = [free for free in found if free is not None]
    return min(known) if known and len(known) == len(found) else None


def _find_on_device(device: torch.device) -> int | None:
    if device.type == "cpu":
        return find_free_host_memory()
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # What torch has reserved and does not use can be allocated as well.
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return None


def find_free_host_memory(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int | None:
    """Bytes that this process can allocate on the host; None if the system does not tell."""
    try:
        lines = (proc / "meminfo").read_text().splitlines()
        available = next(line for line in lines if line.startswith("MemAvailable:"))
        free = 1024 * int(available.split()[1])
    except (OSError, StopIteration, ValueError, IndexError):
        return None
    return min([free, *_iterate_container_limits(proc, cgroups)])


def _iterate_container_limits(proc: Path, cgroups: Path) -> Iterator[int]:
    """What each control group of this process still allows, for both versions of control groups."""
    try:
        groups = [line.split(":", 2) for line in (proc / "self" / "cgroup").read_text().splitlines()]
    except OSError:
        return
    for _, controllers, path in (group for group in groups if len(group) == 3):
        if controllers and "memory" not in controllers.split(","):
            continue
        root = cgroups / "memory" if controllers else cgroups
        limit, used = (
            ("memory.limit_in_bytes", "memory.usage_in_bytes") if controllers else ("memory.max", "memory.current")
        )
        # Inside a container, the path is often that of the host, and the container's own group is the root.
        own = root / path.strip("/")
        for folder in (own, *own.parents):
            allowed, taken = _read_number(folder / limit), _read_number(folder / used)
            if allowed is not None and taken is not None:
                yield max(0, allowed - taken + _read_cache(folder / "memory.stat"))
            if folder == root:
                break


def _read_number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):  # no such file, or "max"
        return None


def _read_cache(file: Path) -> int:
    """Bytes of files in memory that the system can drop. They count as used."""
    try:
        fields = dict(line.split(None, 1) for line in file.read_text().splitlines())
        return int(fields.get("total_inactive_file", fields.get("inactive_file", "0")))
    except (OSError, ValueError):
        return 0
