"""Projected gradients as plain arrays, for other programs."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from persample.scanning.errors import ScanError, explain_write_errors
from persample.scanning.folder import write_file
from persample.scanning.stored_gradients import StoredGradients


def write_rows(stored: StoredGradients, directory: Path, dtype: str) -> Path:
    """Write `rows.npy`, `ids.npy` and `lengths.npy` into a directory, block by block, and return the directory."""
    if dtype not in ("float16", "float32"):
        raise ScanError(f"dtype must be 'float16' or 'float32', got {dtype!r}.")
    with explain_write_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
    with write_file(directory / "rows.npy", directory) as file:
        shape = (len(stored), stored.dim)
        header = {"descr": np.lib.format.dtype_to_descr(np.dtype(dtype)), "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(file, header)
        for _, block in stored.iterate_blocks():
            file.write(block.numpy().astype(dtype).tobytes())
    for name, column in (("ids", np.arange(len(stored))), ("lengths", stored.lengths.numpy())):
        with write_file(directory / f"{name}.npy", directory) as file:
            np.save(file, column)
    return directory
