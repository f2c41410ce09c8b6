"""The files of a folder, on a disk or in object storage.

A folder in object storage, such as `s3://bucket/scan`, has a temporary folder on the disk. A file is written there, and
sent when it is complete; it is fetched when it is first read. All systems that fsspec knows can be used.
"""

from __future__ import annotations

import json
import math
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from persample._internal.files import SymlinkRefused, open_archive, refuse_symlinks, write_atomically
from persample.scanning.errors import ScanError, explain_write_errors

Array = NDArray[Any]


@contextmanager
def write_file(path: Path, root: Path) -> Iterator[BinaryIO]:
    """Write a file below `root` atomically; raise a `ScanError` if that is not possible, or at a symbolic link."""
    with explain_write_errors(path), write_atomically(path, root) as file:
        yield file


class Storage:
    """The copy of a folder in object storage. `directory` is the temporary folder on the disk."""

    def __init__(self, address: str) -> None:
        try:
            from fsspec.core import url_to_fs
        except ImportError as error:
            raise ScanError(f"{address} needs fsspec: pip install fsspec") from error
        try:
            self._system, self._root = url_to_fs(address)
        except (ImportError, ValueError) as error:  # a package is missing, or nobody knows this kind of storage
            raise ScanError(f"{address} cannot be opened: {error}") from error
        self._temporary = tempfile.TemporaryDirectory(prefix="persample-")
        self.directory = Path(self._temporary.name)
        self._times: dict[str, int] = {}  # of the files that are the same here and there
        self.refresh()

    def refresh(self) -> None:
        """Look for files that other processes have sent."""
        self._system.invalidate_cache()
        start = len(self._root.rstrip("/")) + 1
        self.names = {path[start:] for path in self._system.find(self._root)}

    def has(self, path: Path) -> bool:
        """Whether a file was sent."""
        return self._get_name(path) in self.names

    def fetch(self, path: Path) -> None:
        """Fetch a file, unless it is here."""
        name = self._get_name(path)
        if name in self.names and not path.exists():
            with write_atomically(path, self.directory) as file:
                file.write(self._system.cat_file(f"{self._root}/{name}"))
            self._times[name] = path.stat().st_mtime_ns

    def send(self, path: Path) -> None:
        """Send a file that is complete."""
        name = self._get_name(path)
        with explain_write_errors(path):
            self._system.makedirs(f"{self._root}/{name}".rpartition("/")[0], exist_ok=True)
            self._system.pipe_file(f"{self._root}/{name}", path.read_bytes())
        self.names.add(name)
        self._times[name] = path.stat().st_mtime_ns

    def send_new(self) -> None:
        """Send the files that are new or have changed."""
        for path in self.directory.rglob("*"):
            if path.is_file() and self._times.get(self._get_name(path)) != path.stat().st_mtime_ns:
                self.send(path)

    def remove(self, path: Path) -> None:
        """Remove a file."""
        if (name := self._get_name(path)) in self.names:
            self._system.rm_file(f"{self._root}/{name}")
            self.names.discard(name)

    def _get_name(self, path: Path) -> str:
        return path.relative_to(self.directory).as_posix()

    def __reduce__(self) -> Any:
        return Storage, (self._system.unstrip_protocol(self._root),)  # another process has a folder of its own


class Folder:
    """The files of a folder: complete or absent, without symbolic links, and without code that reading them runs."""

    def __init__(self, address: str | Path) -> None:
        self.storage = Storage(str(address)) if "://" in str(address) else None
        self.address = str(address) if self.storage else str(Path(address))

    @property
    def directory(self) -> Path:
        """The folder on the disk."""
        return Path(self.address) if self.storage is None else self.storage.directory

    def synchronise(self) -> None:
        """Exchange files with the storage: those of other processes, and those that other code has written."""
        if self.storage is not None:
            self.storage.send_new()
            self.storage.refresh()

    @property
    def is_empty(self) -> bool:
        """Whether there is no file, or no folder."""
        if self.storage is not None:
            return not self.storage.names
        return not self.directory.exists() or not any(self.directory.iterdir())

    def locate(self, path: Path) -> str:
        """Where a file of the folder is, for the user."""
        is_inside = self.storage is not None and path.is_relative_to(self.directory)
        return f"{self.address}/{path.relative_to(self.directory).as_posix()}" if is_inside else str(path)

    def fetch(self, path: Path) -> None:
        """Have a file on the disk, if there is one."""
        if self.storage is not None:
            self.storage.fetch(path)

    def has(self, path: Path) -> bool:
        """Whether there is a file."""
        return path.is_file() if self.storage is None else self.storage.has(path)

    @contextmanager
    def writing(self, path: Path) -> Iterator[BinaryIO]:
        """Write a file atomically."""
        with write_file(path, self.directory) as file:
            yield file
        if self.storage is not None:
            self.storage.send(path)

    def write_arrays(self, name: str, arrays: Mapping[str, Array]) -> None:
        """Write a file of named arrays."""
        with self.writing(self.directory / name) as file:
            save_arrays(file, arrays)

    def has_arrays(self, name: str) -> bool:
        """Whether `write_arrays` has written a file of this name."""
        return self.has(self.directory / name)

    def read_arrays(self, name: str) -> dict[str, Array] | None:
        """The arrays that `write_arrays` wrote; None if there is no such file."""
        path = self.directory / name
        if not self.has_arrays(name):
            return None
        with self._reading(path):
            return load_arrays(path)

    def write_json(self, name: str, value: Any) -> None:
        """Write a JSON file."""
        with self.writing(self.directory / name) as file:
            file.write(json.dumps(value, indent=2).encode())

    def read_json(self, name: str) -> Any:
        """The value that `write_json` wrote."""
        path = self.directory / name
        with self._reading(path):
            return json.loads(path.read_bytes())

    def remove(self, pattern: str) -> None:
        """Remove the files that match a pattern. A symbolic link is removed, and never a file in a linked directory."""
        with explain_links():
            found = self._find(pattern)
        for path in found:
            path.unlink(missing_ok=True)
            if self.storage is not None:
                self.storage.remove(path)

    def _find(self, pattern: str) -> list[Path]:
        """The files that match a pattern; raise if one lies behind a symbolic link."""
        if self.storage is not None:
            return [self.directory / name for name in self.storage.names if fnmatchcase(name, pattern)]
        found = list(self.directory.glob(pattern))
        for path in found:
            refuse_symlinks(path.parent, self.directory)
        return found

    @contextmanager
    def _reading(self, path: Path) -> Iterator[None]:
        """Refuse symbolic links, and raise a `ScanError` that names the file if its contents cannot be read."""
        with explain_links():
            refuse_symlinks(path, self.directory)
        self.fetch(path)
        try:
            yield
        except (EOFError, ValueError, RecursionError, zipfile.BadZipFile) as error:
            raise ScanError(f"{path} is damaged ({error}). Remove it and scan again to compute it anew.") from error


@contextmanager
def explain_links() -> Iterator[None]:
    """Raise a refused symbolic link as a `ScanError`."""
    try:
        yield
    except SymlinkRefused as error:
        raise ScanError(str(error)) from error


def save_arrays(file: BinaryIO, arrays: Mapping[str, Array]) -> None:
    named: Any = dict(arrays)
    np.savez(file, **named)


def load_arrays(path: Path, names: Sequence[str] | None = None) -> dict[str, Array]:
    with open_archive(path) as archive:
        members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
        if missing := [name for name in names or () if name not in members]:
            raise ValueError(f"it has no array {missing[0]!r}")
        return {name: _read_array(archive, members[name]) for name in (members if names is None else names)}


def _read_array(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> Array:
    """Read an array whose header declares as many bytes as there are."""
    with archive.open(member) as file:
        version = np.lib.format.read_magic(file)
        read_header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        if version not in read_header:
            raise ValueError(f"{member.filename} has the unknown version {version}")
        shape, _, dtype = read_header[version](file)
        if math.prod(shape) * dtype.itemsize != member.file_size - file.tell():
            raise ValueError(f"{member.filename} declares the shape {shape}, which is not its size")
    with archive.open(member) as file:
        return np.lib.format.read_array(file, allow_pickle=False)
