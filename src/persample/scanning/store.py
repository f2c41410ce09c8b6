"""The files of a scan.

    scan.json            settings of the scan: options, and digests of the model, the loss and the data
    mean-0.npz           mean gradient of all examples with checkpoint 0, if a quantity needs it
    sum-0-0of2.npz       sum of gradients so far in process 0 of 2, while the scan runs
    factors-0.npz        matrices that whiten and project gradients with checkpoint 0, with `precondition`
    alignment.npz        estimated alignment of each example
    0/00007.npy          projected gradients of shard 7 with checkpoint 0, each scaled to length 1
    0/00007.npz          columns of the same shard; written last, so the shard is complete if this file exists
    table.parquet        all columns, when the scan is complete (or table.csv)
    summary.json         written last: the scan is complete if this file exists

Every file is written atomically, see `persample._internal.files`. The directory may come from somebody else: symbolic
links in it are refused, arrays are read without pickle, and no array is larger than its file.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import numpy as np

from persample._internal.files import (
    is_unfinished,
    open_archive,
    remove_unfinished,
)
from persample.scanning.errors import ScanError
from persample.scanning.folder import Array as Array
from persample.scanning.folder import Folder, explain_links, load_arrays, save_arrays

FORMAT = 2
_MAX_KEPT = 256  # files


def describe_rows(dtype: str, size: int) -> dict[str, Any]:
    """The layout of the projected gradients, for scan.json: what other programs need to read them."""
    return {
        "files": "{checkpoint}/{shard:05d}.npy",
        "format": "npy, version 1.0, C order: one row per example, in dataset order",
        "dtype": dtype,
        "columns": size,
        "scale": "each row has length 1; its original length is the array 'length' in {checkpoint}/{shard:05d}.npz",
    }


class Store(Folder):
    """The files of one scan in a directory, or in object storage."""

    def __init__(self, address: str | Path) -> None:
        super().__init__(address)
        self._kept: dict[Path, Any] | None = None  # contents of files, inside `keep_contents`

    @contextmanager
    def keep_contents(self) -> Iterator[None]:
        """Inside the block, keep the contents of settings and of some shards: no other process may write them then."""
        self._kept = {}
        try:
            yield
        finally:
            self._kept = None

    # ---- settings ----

    @property
    def exists(self) -> bool:
        """Whether a scan was started here."""
        return self.has(self.directory / "scan.json")

    @property
    def is_complete(self) -> bool:
        """Whether a scan was finished here."""
        return self.has(self.directory / "summary.json")

    def start(self, settings: Mapping[str, Any], resume: bool) -> None:
        """Start a scan, or check that the scan that is here has the same settings. Remove unfinished files.

        A scan that has measured nothing yet starts over. One that raised at bad examples may go on and skip them.
        """
        if not self.exists or not resume or not self._has_results:
            self._clear()
            self.write_json("scan.json", {"format": FORMAT, **settings})
        elif self._check_settings(settings):
            self.write_json("scan.json", {"format": FORMAT, **settings})
        remove_unfinished(self.directory)

    @property
    def _has_results(self) -> bool:
        """Whether anything was measured."""
        return any(self.has(path) for pattern in _RESULTS for path in self._find(pattern))

    def read_settings(self) -> dict[str, Any]:
        """The settings that the scan was started with."""
        if not self.exists:
            raise ScanError(
                f"There is no scan in {self.address}: scan.json is missing. `persample scan` and "
                "persample.scan(..., out=...) write one."
            )
        path = self.directory / "scan.json"
        settings = self.read_json(path.name) if self._kept is None or path not in self._kept else self._kept[path]
        if settings.get("format") != FORMAT:
            raise ScanError(
                f"The scan in {self.address} was made by another version of persample: its format is "
                f"{settings.get('format')}, and this version reads format {FORMAT}."
            )
        if self._kept is not None:
            self._kept[path] = settings
        return settings

    def _check_settings(self, settings: Mapping[str, Any]) -> bool:
        """Raise if a setting that the results depend on has changed. Return whether bad examples do not raise now."""
        before = self.read_settings()
        now = json.loads(json.dumps(settings))
        is_looser = False
        for key, value in now.items():
            old = before.get(key, False if key == "skip_bad" else None)  # which older scans do not have
            if old != value and (old, value) == _LOOSER.get(key):
                is_looser = not self.is_complete
            elif old != value and key != "about":
                raise ScanError(
                    f"{_SETTINGS.get(key, f'The option {key!r}')} changed since the scan in {self.address} was "
                    f"started: {_shorten(old)} -> {_shorten(value)}. Choose another `out`, or start over "
                    "with resume=False."
                )
        return is_looser

    def _clear(self) -> None:
        """Remove the files of an earlier scan, and no other files."""
        if not self.exists:
            found = list(self.directory.iterdir()) if self.directory.is_dir() else []
            is_taken = self.directory.exists() and not self.directory.is_dir()
            if is_taken or not all(map(is_unfinished, found)) or (self.storage and not self.is_empty):
                raise ScanError(f"{self.address} exists and contains no scan. Choose an empty or a new directory.")
            return
        if self.directory.is_symlink():
            raise ScanError(
                f"{self.directory} is a symbolic link to a scan, and starting over would remove the files there. Pass "
                f"{self.directory.resolve()} if you want this, or choose another `out`."
            )
        with explain_links():
            for pattern in _FILES:
                self._find(pattern)  # before any file is removed
        for pattern in _FILES:
            self.remove(pattern)
        for path in self.directory.glob("[0-9]*"):
            with suppress(OSError):
                path.rmdir()

    # ---- shards ----

    def has_shard(self, checkpoint: int, shard: int) -> bool:
        """Whether a shard is complete."""
        return self.has(self._get_path(checkpoint, shard, "npz"))

    def count_shards(self, checkpoint: int) -> int:
        """Number of complete shards before the first missing one."""
        count = 0
        while self.has_shard(checkpoint, count):
            count += 1
        return count

    def write_shard(self, checkpoint: int, shard: int, columns: Mapping[str, Array], rows: Array | None) -> None:
        """Write the columns and the projected gradients of a shard."""
        if rows is not None:
            contents = io.BytesIO()  # np.save to a file does not raise an error if the disk is full
            np.save(contents, rows)
            with self.writing(self._get_path(checkpoint, shard, "npy")) as file:
                file.write(contents.getbuffer())
        with self.writing(self._get_path(checkpoint, shard, "npz")) as file:
            save_arrays(file, columns)

    def read_columns(self, checkpoint: int, shard: int, names: Sequence[str] | None = None) -> dict[str, Array]:
        """The columns of a shard, or only those in `names`."""
        path = self._get_path(checkpoint, shard, "npz")
        with self._reading(path):
            if self._kept is None or (path not in self._kept and len(self._kept) > _MAX_KEPT):
                return load_arrays(path, names)
            if path not in self._kept:
                self._kept[path] = load_arrays(path)
            arrays = self._kept[path]
            return dict(arrays) if names is None else {name: arrays[name] for name in names}

    def list_columns(self, checkpoint: int, shard: int) -> list[str]:
        """The names of the columns of a shard."""
        path = self._get_path(checkpoint, shard, "npz")
        with self._reading(path), open_archive(path) as archive:
            return [name.removesuffix(".npy") for name in archive.namelist()]

    def read_rows(self, checkpoint: int, shard: int) -> Array:
        """The projected gradients of a shard, each scaled to length 1. The file is mapped, not loaded."""
        path = self._get_path(checkpoint, shard, "npy")
        if not self.has(path):
            raise ScanError(f"{path} is missing. Start over with resume=False.")
        with self._reading(path):
            return np.load(path, mmap_mode="r", allow_pickle=False)

    def load_rows(self, checkpoint: int, shard: int, out: Array) -> int:
        """Read the projected gradients of a shard into the first rows of `out`, and return their number.

        One read into memory that exists is much faster than copying from a mapped file.
        """
        stored, path = self.read_rows(checkpoint, shard), self._get_path(checkpoint, shard, "npy")
        if stored.dtype != out.dtype or stored.shape[1:] != out.shape[1:] or len(stored) > len(out):
            raise ScanError(
                f"{path} does not have the shape and dtype of the first shard. Start over with resume=False."
            )
        part = out[: len(stored)]
        if not isinstance(stored, np.memmap) or not stored.flags.c_contiguous:
            part[...] = stored
            return len(part)
        with path.open("rb", buffering=0) as file:
            file.seek(stored.offset)
            view, done = part.data.cast("B"), 0
            while done < len(view):
                read = file.readinto(view[done:])
                if not read:
                    raise ScanError(f"{path} has changed while it was read.")
                done += read
        return len(part)

    def _get_path(self, checkpoint: int, shard: int, suffix: Literal["npy", "npz"]) -> Path:
        return self.directory / str(checkpoint) / f"{shard:05d}.{suffix}"


# The order in which an earlier scan is removed: first the summary, which marks it as complete, and last scan.json,
# which marks it as a scan. If the removal is interrupted, the scan can still be continued or removed.
_FILES = (
    "summary.json", "command.json", "table.*", "report.html", "[0-9]*/*.np[yz]", "mean-*.npz", "sum-*.npz",
    "factors-*.npz", "alignment.npz", "steps.npz", "scan.json",
)  # fmt: skip

_RESULTS = ("summary.json", "[0-9]*/*.np[yz]", "mean-*.npz", "sum-*.npz")

# Changes of settings that leave what was measured so far as it is.
_LOOSER = {"skip_bad": (False, True), "nonfinite": ("raise", "keep")}

_SETTINGS = {
    "batch_size": "The batch size",
    "checkpoints": "The weights of the model",
    "data": "The data",
    "names": "The ids of the examples",
    "code": "The code of the model, the loss or collate",
    "examples": "The number of examples",
    "parameters": "The choice of parameters",
}


def _shorten(value: Any, most: int = 80) -> str:
    text = repr(value)
    return text if len(text) <= most else text[: most - 3] + "..."
