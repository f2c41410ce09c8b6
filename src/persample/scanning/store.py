"""A scan on disk: shards of examples, each whole or absent, and what tells one scan from another.

    scan.json            what was asked, of which model and data
    mean-0.npz           the mean gradient of all examples, where it is needed
    0/00007.npz          the columns of shard 7 by checkpoint 0: written last, its presence says that the shard is whole
    0/00007.npy          the projected gradients of its examples, each scaled to length 1
    table.parquet        all columns, when the scan has ended, or table.csv
    summary.json

Every file is written under another name, flushed to the disk, and given its own name then.
"""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
from numpy.typing import NDArray

from persample.scanning.errors import ScanError, writing

FORMAT = 1
Array = NDArray[Any]
_UNFINISHED = ".unfinished"


class Store:
    """The files of a scan in a directory."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)

    # ---- what was asked ----

    @property
    def exists(self) -> bool:
        """Whether a scan was begun here."""
        return (self.directory / "scan.json").is_file()

    @property
    def is_complete(self) -> bool:
        """Whether a scan has ended here."""
        return (self.directory / "summary.json").is_file()

    def begin(self, settings: Mapping[str, Any], resume: bool) -> None:
        """Starts a scan, or goes on with one of the same settings."""
        if not self.exists or not resume:
            self._clear()
            self.write_json("scan.json", {"format": FORMAT, **settings})
        else:
            self._check_same(settings)
        for leftover in self.directory.rglob(f"*{_UNFINISHED}"):
            if not _is_running(int(leftover.name.split(".")[-2])):
                leftover.unlink(missing_ok=True)

    def settings(self) -> dict[str, Any]:
        """What the scan was asked."""
        if not self.exists:
            raise ScanError(f"There is no scan in {self.directory}: it has no scan.json.")
        settings = self.read_json("scan.json")
        if settings.get("format") != FORMAT:
            raise ScanError(
                f"{self.directory} is of another version of persample (format {settings.get('format')}, not {FORMAT})."
            )
        return settings

    def _check_same(self, settings: Mapping[str, Any]) -> None:
        before = self.settings()
        now = json.loads(json.dumps(settings))
        differing = [key for key, value in now.items() if before.get(key) != value and key != "about"]
        if differing:
            key = differing[0]
            raise ScanError(
                f"{self.directory} holds a scan with another {_NAMES.get(key, key)}: {_short(before.get(key))}, and "
                f"now {_short(now[key])}. Choose another `out`, or start over with resume=False."
            )

    def _clear(self) -> None:
        """Removes an earlier scan, and nothing else that may lie in the directory."""
        if not self.exists:
            found = list(self.directory.iterdir()) if self.directory.is_dir() else []
            others = [path for path in found if not path.name.endswith(_UNFINISHED)]
            if others or (self.directory.exists() and not self.directory.is_dir()):
                raise ScanError(f"{self.directory} exists and holds no scan; choose an empty or a new directory.")
            return
        for pattern in _FILES:
            for path in self.directory.glob(pattern):
                path.unlink()
        for path in self.directory.glob("[0-9]*"):
            with suppress(OSError):
                path.rmdir()

    # ---- shards ----

    def has_shard(self, checkpoint: int, shard: int) -> bool:
        """Whether a shard is whole."""
        return self._shard(checkpoint, shard, "npz").is_file()

    def shards(self, checkpoint: int) -> int:
        """How many shards there are from the first on, all of them whole."""
        count = 0
        while self.has_shard(checkpoint, count):
            count += 1
        return count

    def write_shard(self, checkpoint: int, shard: int, columns: Mapping[str, Array], rows: Array | None) -> None:
        """Adds a shard: its columns, and its projected gradients."""
        if rows is not None:
            contents = io.BytesIO()  # numpy's own writing to files does not tell that a disk is full
            np.save(contents, rows)
            with self.whole_file(self._shard(checkpoint, shard, "npy")) as file:
                file.write(contents.getbuffer())
        with self.whole_file(self._shard(checkpoint, shard, "npz")) as file:
            _save(file, columns)

    def columns(self, checkpoint: int, shard: int, names: Sequence[str] | None = None) -> dict[str, Array]:
        """The columns of a shard, or some of them."""
        path = self._shard(checkpoint, shard, "npz")
        with _whole(path), np.load(path) as found:
            return {name: found[name] for name in (found.files if names is None else names)}

    def rows(self, checkpoint: int, shard: int) -> Array:
        """The projected gradients of a shard, each scaled to length 1: mapped, and read where they are used."""
        path = self._shard(checkpoint, shard, "npy")
        if not path.is_file():
            raise ScanError(f"{path} is missing: start over with resume=False.")
        with _whole(path):
            return np.load(path, mmap_mode="r")

    def _shard(self, checkpoint: int, shard: int, kind: Literal["npy", "npz"]) -> Path:
        return self.directory / str(checkpoint) / f"{shard:05d}.{kind}"

    # ---- single files ----

    def write_arrays(self, name: str, arrays: Mapping[str, Array]) -> None:
        """A file of named arrays."""
        with self.whole_file(self.directory / name) as file:
            _save(file, arrays)

    def read_arrays(self, name: str) -> dict[str, Array] | None:
        """What `write_arrays` wrote, or None."""
        if not (self.directory / name).is_file():
            return None
        with _whole(self.directory / name), np.load(self.directory / name) as found:
            return {key: found[key] for key in found.files}

    def remove(self, pattern: str) -> None:
        """Files that are no longer needed."""
        for path in self.directory.glob(pattern):
            path.unlink(missing_ok=True)

    def write_json(self, name: str, value: Any) -> None:
        """A file for people and programs."""
        with self.whole_file(self.directory / name) as file:
            file.write(json.dumps(value, indent=2).encode())

    def read_json(self, name: str) -> Any:
        """What `write_json` wrote."""
        with _whole(self.directory / name):
            return json.loads((self.directory / name).read_bytes())

    @contextmanager
    def whole_file(self, path: Path) -> Iterator[BinaryIO]:
        """A file that is there when all of it is written, and not before."""
        unfinished = path.with_name(f"{path.name}.{os.getpid()}{_UNFINISHED}")
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                with open(unfinished, "wb") as file:
                    yield file
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(unfinished, path)
                _flush_names(path.parent)
            finally:
                unfinished.unlink(missing_ok=True)


# The summary, which says that a scan has ended, first; scan.json, without which it is no scan, last.
_FILES = (
    "summary.json", "command.json", "table.*", "report.html", "[0-9]*/*.np[yz]", "mean-*.npz", "sum-*.npz", "scan.json",
)  # fmt: skip

_NAMES = {
    "batch_size": "batch size",
    "checkpoints": "model: its weights were",
    "data": "data: they were",
    "code": "model, loss or collate: their code was",
    "examples": "number of examples",
    "parameters": "choice of parameters",
}


@contextmanager
def _whole(path: Path) -> Iterator[None]:
    """Says which file is damaged."""
    try:
        yield
    except (EOFError, ValueError, zipfile.BadZipFile) as error:
        raise ScanError(f"{path} is damaged ({error}). Remove it and scan again: what it held is done anew.") from error


def _flush_names(directory: Path) -> None:
    """Has the names of files on the disk, too."""
    if hasattr(os, "O_DIRECTORY"):
        handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return process != os.getpid()


def _save(file: BinaryIO, arrays: Mapping[str, Array]) -> None:
    named: Any = dict(arrays)
    np.savez(file, **named)


def _short(value: Any, most: int = 80) -> str:
    text = json.dumps(value)
    return text if len(text) <= most else text[: most - 3] + "..."
