"""Files that are complete or absent, and files from somebody else.

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

Nothing here follows a symbolic link below a directory that the user named. A folder from somebody else may contain
links to the user's own files: they would be read into a report, overwritten, or removed.

- `write_atomically` creates its unfinished file exclusively, which fails at a link, and the rename replaces a link by
  the file. With `root`, directories below `root` must not be links either.
- `remove_unfinished` neither enters nor opens links.
- `refuse_symlinks` checks a path before it is read.

A new file has the permissions that the user's umask gives. `open_archive` refuses zip files that expand.
"""

from __future__ import annotations

import hashlib
import os
import platform
import secrets
import stat
import time
import uuid
import zipfile
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
_NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)  # not on Windows


class SymlinkRefused(OSError):
    """A file or directory is a symbolic link where none is expected."""


def refuse_symlinks(path: Path, root: Path) -> None:
    """Raise if `path`, or a directory between `root` and `path`, is a symbolic link. `root` itself may be one."""
    for part in [path, *path.parents]:
        if part == root:
            return
        if part.is_symlink():
            raise SymlinkRefused(
                f"{part} is a symbolic link. Links inside {root} are not followed, because they may lead to files of "
                "somebody else. Replace the link by a copy."
            )


@contextmanager
def write_atomically(path: str | os.PathLike[str], root: Path | None = None) -> Iterator[BinaryIO]:
    """Open a binary file that replaces `path` when the block ends, and is removed if the block raises.

    The file can be written and read. Parent directories are created. When the block has ended, the contents and the
    name are on the disk. If `path` is a symbolic link, the link is replaced, and its target stays as it is. Directories
    between `root` and `path` must not be symbolic links.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with write_atomically(f"{folder}/new/numbers.txt") as file:
    ...         _ = file.write(b"1 2 3")
    ...         before = Path(f"{folder}/new/numbers.txt").exists()
    ...     before, Path(f"{folder}/new/numbers.txt").read_bytes(), len(list(Path(folder, "new").iterdir()))
    (False, b'1 2 3', 1)
    """
    path = Path(path)
    if root is not None:
        refuse_symlinks(path.parent, root)
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
    versions of the file `path`. Symbolic links are left alone, and so is everything behind them.
    """
    path = Path(path)
    if path.is_symlink() and path.is_dir():
        found = []
    elif path.is_dir():
        found = [Path(folder, name) for folder, _, names in os.walk(path) for name in names]
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


@contextmanager
def open_archive(path: Path) -> Iterator[zipfile.ZipFile]:
    """Open a zip file that holds its contents uncompressed; raise `ValueError` if they are larger than the file.

    The sizes are those that the archive declares. Reading a member never yields more than its declared size.
    """
    with zipfile.ZipFile(path) as archive:
        declared, actual = sum(info.file_size for info in archive.infolist()), os.stat(path).st_size
        if declared > actual:
            raise ValueError(f"its contents would take {declared:,} bytes, but the file has only {actual:,}")
        yield archive


def _create_unfinished(path: Path) -> tuple[BinaryIO, Path]:
    while True:
        unfinished = path.with_name(f"{path.name}.{_get_machine()}.{secrets.token_hex(8)}{_SUFFIX}")
        file = open(unfinished, "x+b")  # noqa: SIM115  the caller closes it
        if _try_lock(file) is not False and unfinished.exists():
            return file, unfinished
        file.close()  # a cleaner was faster and removes the file


def _remove_if_abandoned(unfinished: Path) -> None:
    if not stat.S_ISREG(os.lstat(unfinished).st_mode):
        return  # no writer made it
    # NFS locks only files that are open for writing.
    with open(unfinished, "r+b", opener=lambda name, flags: os.open(name, flags | _NO_FOLLOW)) as file:
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
