"""Queries on many stored gradients: time and memory of one pass, from 1e4 to 1e6 rows.

    python -m benchmarks.stored_rows [--write] [--dim 4096] [--folder DIRECTORY]

The rows are synthetic: random numbers with a decaying spectrum, in float16 as a scan stores them. Each number of rows
is measured in a process of its own, because memory is the highest resident memory of the process. Files are removed
from the page cache before a query that is called cold. "read" reads the same files into memory and does nothing else:
the speed of the disk. All in one thread. A million rows of 4,096 numbers take 8 GB in
the folder, which is removed at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import describe_machine
from benchmarks.memory import read_status
from benchmarks.output import RESULTS, write_json
from persample.scanning import queries
from persample.scanning.influence import StoredModel, TestGradients, make_scores
from persample.scanning.store import Store
from persample.scanning.stored_gradients import StoredGradients

COUNTS = (10_000, 100_000, 1_000_000)
SHARD, SAMPLES, K = 1024, 16, 10
Times = dict[str, float]


def write_rows(store: Store, count: int, dim: int) -> None:
    """Fill a store with random gradients."""
    generator = torch.Generator().manual_seed(0)
    spectrum = torch.arange(1, dim + 1) ** -0.5
    for shard, start in enumerate(range(0, count, SHARD)):
        rows = torch.randn(min(SHARD, count - start), dim, generator=generator) * spectrum
        lengths = rows.norm(dim=1)
        columns = {"length": lengths.double().numpy(), "loss": lengths.double().numpy()}
        store.write_shard(0, shard, columns, (rows / lengths[:, None]).half().numpy())


def measure_one(folder: Path, dim: int) -> dict[str, Any]:
    """Time the queries on the rows in a folder, in this process."""
    store, files = Store(folder), sorted((folder / "0").glob("*.npy"))
    tests = torch.randn(SAMPLES, dim, generator=torch.Generator().manual_seed(1)) * torch.arange(1, dim + 1) ** -0.5
    gradients = TestGradients(tests, torch.ones(SAMPLES), 1.0)
    before = read_status("VmHWM")

    def rank(method: Any, model: StoredModel) -> None:
        make_scores([model], [gradients], method, "auto", of_loss=True).rank(K)

    times: dict[str, Times] = {
        "read, cold": time_cold(lambda: read_files(files), files),
        "read, warm": time_call(lambda: read_files(files)),
    }
    stored = StoredGradients(store, 0)
    model = StoredModel(stored)
    queried: dict[str, Callable[[], Any]] = {
        "neighbours of one": lambda: queries.find_neighbours(stored, len(stored) // 2, K),
        f"influence on {SAMPLES}, tracin": lambda: rank("tracin", model),
    }
    for name, query in queried.items():
        times[f"{name}, cold"] = time_cold(query, files)
        times[f"{name}, warm"] = time_call(query)
    once = "whitening: second moment and damping, once"
    times[once] = time_call(lambda: model.whiten(tests.double(), "whitened", 3.0))
    times[f"influence on {SAMPLES}, whitened, cold"] = time_cold(lambda: rank("whitened", model), files)
    times[f"influence on {SAMPLES}, whitened, warm"] = time_call(lambda: rank("whitened", model))
    size = sum(path.stat().st_size for path in files)
    return {
        "rows": len(stored),
        "bytes": size,
        "times": times,
        "peak_bytes": read_status("VmHWM"),
        "bytes_after_imports": before,
        "bytes_per_second_of_disk": size / times["read, cold"]["seconds"],
    }


def read_files(files: list[Path]) -> None:
    """Read all files into one buffer."""
    buffer = bytearray(1 << 24)
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def time_cold(call: Callable[[], Any], files: list[Path]) -> Times:
    """Times of a call after the files were removed from the page cache."""
    for path in files:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return time_call(call)


def time_call(call: Callable[[], Any]) -> Times:
    """Seconds of one call, and seconds of the processor, which do not depend on what else the machine does."""
    start, start_processor = time.perf_counter(), time.process_time()
    call()
    return {"seconds": time.perf_counter() - start, "processor": time.process_time() - start_processor}


def main() -> None:
    """Measure all numbers of rows, and print or write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/stored_rows.json")
    parser.add_argument("--dim", type=int, default=4096, help="numbers in a row (default: 4096)")
    parser.add_argument("--rows", type=int, nargs="+", default=COUNTS, help="numbers of rows")
    parser.add_argument("--folder", type=Path, help="where to write the rows (default: the folder of temporary files)")
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)  # one store, in a process started by this function
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.one:
        print(json.dumps(measure_one(options.one, options.dim)))
        return
    results: dict[str, Any] = {"machine": describe_machine(), "dim": options.dim, "dtype": "float16", "sizes": []}
    for count in options.rows:
        folder = Path(tempfile.mkdtemp(prefix="rows-", dir=options.folder))
        try:
            needed = 2 * count * options.dim
            if shutil.disk_usage(folder).free < 1.2 * needed:
                raise SystemExit(f"{count} rows need {needed / 1e9:.1f} GB of free disk space")
            write_rows(Store(folder), count, options.dim)
            os.sync()  # pages that are not on the disk cannot be removed from the cache
            command = [sys.executable, "-m", "benchmarks.stored_rows", "--dim", str(options.dim), "--one", str(folder)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        finally:
            shutil.rmtree(folder)
        results["sizes"].append(json.loads(done.stdout.splitlines()[-1]))
        print(json.dumps(results["sizes"][-1], indent=1), flush=True)
    if options.write:
        write_json(RESULTS / "stored_rows.json", results)


if __name__ == "__main__":
    main()
