"""Shards as tasks of a Ray cluster: any worker may measure any shard, and Ray repeats what a lost worker has begun."""

from __future__ import annotations

import logging
import os
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from persample.scanning.errors import ScanError
from persample.scanning.measure import Measurement
from persample.scanning.source import Source

if TYPE_CHECKING:
    from persample.scanning.scan_run import ScanRun


class RayTasks:
    """The cluster that this process is connected to, or that `ray.init()` finds or starts on this machine."""

    def __init__(self) -> None:
        try:
            import ray
        except ImportError as error:
            raise ScanError("engine='ray' needs Ray: pip install 'persample[ray]'") from error
        self._ray: Any = ray
        if not ray.is_initialized():
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a cluster that is started here sends nothing
            ray.init(include_dashboard=False, logging_level=logging.ERROR)

    def measure(self, run: ScanRun, shards: Sequence[int], device: torch.device) -> Iterator[int]:
        """Have shards measured by copies of a run, and yield each shard that is stored.

        A task takes as many CPUs as this process has threads, on which the last digits of the results depend, and a GPU
        if the model is on one.
        """
        ray, threads = self._ray, torch.get_num_threads()
        task = ray.remote(_measure_shard).options(num_cpus=threads, num_gpus=int(device.type == "cuda"))
        work, key = ray.put(ray.cloudpickle.dumps(run)), uuid.uuid4().hex
        place = os.getcwd(), list(sys.path), threads
        tasks = {shard: task.remote(key, [work], place, shard) for shard in shards}
        try:
            for shard, found in tasks.items():
                try:
                    failure = ray.get(found)
                except ray.exceptions.RayError as error:
                    failure = str(error).strip().splitlines()[-1]
                else:
                    if failure is not None:
                        run.measure_shard(shard)  # for the error itself, with all that its handlers look at
                if failure is not None:
                    raise ScanError(
                        f"Ray gave up shard {shard}: {failure}. Each worker needs the data, the code and the directory "
                        "of the scan at the same paths. Finished shards are kept: run the scan again to continue."
                    )
                yield shard
        finally:
            for found in tasks.values():
                with suppress(Exception):  # the cluster may be gone
                    ray.cancel(found)


def start_ray(source: Source, measurement: Measurement) -> RayTasks:
    """The tasks of a scan; an error if its shards depend on each other."""
    if source.size is None:
        raise ScanError("engine='ray' needs data with a length: a stream has no shards that tasks could start at.")
    if measurement.needs_sum:
        raise ScanError(
            "engine='ray' has no sum over all gradients, which 'alignment' needs, and 'noise_scale' with project=None "
            "or precondition. Leave them out of `quantities`, or start the scan with torchrun."
        )
    return RayTasks()


_KEPT: dict[str, ScanRun] = {}  # in a worker: the run whose shards it measures


def _measure_shard(key: str, work: Sequence[Any], place: tuple[str, list[str], int], shard: int) -> str | None:
    """Measure a shard in a worker, which unpacks the run for its first shard only. Return why that fails."""
    try:
        if key not in _KEPT:
            import ray

            folder, paths, threads = place
            sys.path += [path for path in paths if path not in sys.path]  # for the modules of the user
            if Path(folder).is_dir():
                os.chdir(folder)
            torch.set_num_threads(threads)
            _KEPT.clear()
            _KEPT[key] = ray.cloudpickle.loads(ray.get(work[0]))
        _KEPT[key].measure_shard(shard)
    except Exception as error:  # not every exception can be sent back
        return f"{type(error).__name__}: {error}".rstrip(".")
    return None
