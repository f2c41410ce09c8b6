"""Files that are complete or absent.

`write_atomically` writes to an *unfinished* file beside the target, flushes it to the disk, and renames it. Readers
see the old contents or the new contents, never a part. A process that is killed while it writes leaves its unfinished
file behind; `remove_unfinished` removes such files.

Several processes, on one machine or on several machines that share a folder, may write and clean up at the same time.
A process id does not tell whether a writer is alive: ids are reused, and say nothing about another machine. So:

- Each unfinished file has a unique name, `NAME.MACHINE.RANDOM.unfinished`. No two writers share one, even if they
  write the same target: the last one to finish wins.
- A writer holds a lock (`flock`) on its unfinished file until the file has its final name. The operating system
  releases the lock when the writer ends for any reason.
- A file of this machine is removed if its lock is free: its writer has ended.
- A file of another machine, or from before a restart of this one, is removed if its lock is free and it has not changed
  for `STALE_AFTER` seconds. The lock alone is no proof here, as some network mounts keep locks local to each machine
  (NFS with `nolock` or `local_lock=flock`, Lustre with `localflock`). The same holds where locks are not supported. A
  day is far longer than any writer pauses, and than clocks of machines differ.

The lock of a new file is taken just after the file is created. If a cleaner takes it in between, the cleaner removes
the file, and the writer notices this and creates another one.
"""

from __future__ import annotations

import hashlib
import os
import platform
import secrets
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import BinaryIO

try:
    import fcntl
except ImportError:  # Windows: no locks, but open files cannot be removed
    fcntl = None  # type: ignore[assignment]

STALE_AFTER = 24 * 3600.0
_SUFFIX = ".unfinished"


@contextmanager
def write_atomically(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a binary file that replaces `path` when the block ends, and is removed if the block raises.

    Parent directories are created. When the block has ended, the contents and the name are on the disk.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with write_atomically(f"{folder}/new/numbers.txt") as file:
    ...         _ = file.write(b"1 2 3")
    ...         before = Path(f"{folder}/new/numbers.txt").exists()
    ...     before, Path(f"{folder}/new/numbers.txt").read_bytes(), len(list(Path(folder, "new").iterdir()))
    (False, b'1 2 3', 1)
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    file, unfinished = _create_unfinished(path)
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            if fcntl is not None:
                os.replace(unfinished, path)  # before the file is closed, which releases the lock
        if fcntl is None:
            os.replace(unfinished, path)  # Windows does not rename open files
        sync_directory(path.parent)
    finally:
        unfinished.unlink(missing_ok=True)


def is_unfinished(path: Path) -> bool:
    """Whether `path` is the name of an unfinished file of any writer, alive or not."""
    return path.name.endswith(_SUFFIX)


def remove_unfinished(path: str | os.PathLike[str]) -> None:
    """Remove unfinished files that have no live writer.

    If `path` is a directory, all unfinished files in it and its subdirectories are considered, else only the unfinished
    versions of the file `path`.
    """
    path = Path(path)
    if path.is_dir():
        found = list(path.rglob(f"*{_SUFFIX}"))
    elif path.parent.is_dir():
        found = [other for other in path.parent.iterdir() if other.name.startswith(f"{path.name}.")]
    else:
        found = []
    for unfinished in filter(is_unfinished, found):
        with suppress(OSError):  # another process removes or finishes it, or Windows knows that it is open
            _remove_if_abandoned(unfinished)


def sync_directory(directory: Path) -> None:
    """Flush the entries of a directory to the disk, so that a rename in it survives a power failure."""
    if hasattr(os, "O_DIRECTORY"):  # not on Windows
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _create_unfinished(path: Path) -> tuple[BinaryIO, Path]:
    while True:
        unfinished = path.with_name(f"{path.name}.{_get_machine()}.{secrets.token_hex(8)}{_SUFFIX}")
        file = open(unfinished, "xb")  # noqa: SIM115  the caller closes it
        if _try_lock(file) is not False and unfinished.exists():
            return file, unfinished
        file.close()  # a cleaner was faster and removes the file


def _remove_if_abandoned(unfinished: Path) -> None:
    with open(unfinished, "r+b") as file:  # NFS locks only files that are open for writing
        locked = _try_lock(file)
        is_local = f".{_get_machine()}." in unfinished.name
        is_old = time.time() - os.fstat(file.fileno()).st_mtime > STALE_AFTER
        if not ((locked and is_local) or (locked is not False and is_old)):
            return
        if fcntl is not None:
            unfinished.unlink()  # before the file is closed, which releases the lock
    if fcntl is None:
        unfinished.unlink()


def _try_lock(file: BinaryIO) -> bool | None:
    """Lock an open file. False: another process holds the lock. None: the file system has no locks."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    except OSError:
        return None


@cache
def _get_machine() -> str:
    """Name of this machine since its last start: processes with the same name see each other's locks."""
    try:
        identity = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        identity = f"{platform.node()} {uuid.getnode()}"
    return hashlib.sha256(identity.encode()).hexdigest()[:8]
