"""Who measures the shards: this process, those of torch.distributed, or the workers of a Ray cluster."""

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
from torch import Tensor, distributed

from persample.scanning.errors import ScanError
from persample.scanning.measure import Measurement
from persample.scanning.source import Source

if TYPE_CHECKING:
    from persample.scanning.scan_run import ScanRun


class ScanWorkers:
    """The processes of torch.distributed, or this process alone if there is no process group."""

    def __init__(self) -> None:
        self._has_group = distributed.is_available() and distributed.is_initialized()
        self.count = distributed.get_world_size() if self._has_group else 1
        self.rank = distributed.get_rank() if self._has_group else 0

    @property
    def is_first(self) -> bool:
        """Whether this process writes the files that exist once per scan."""
        return self.rank == 0

    def assign_shards(self, count: int | None) -> range:
        """The shards of this process: a contiguous part of `count` shards, or every n-th shard of an unknown number."""
        if count is None:
            return range(self.rank, sys.maxsize, self.count)
        return range(count * self.rank // self.count, count * (self.rank + 1) // self.count)

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum of a tensor over all processes."""
        if self._has_group:
            total = tensor.to(self._get_device())
            distributed.all_reduce(total)
            tensor = total.to(tensor.device)
        return tensor

    def any(self, condition: bool) -> bool:
        """Whether a condition holds in some process."""
        return bool(self.sum(torch.tensor(float(condition))) > 0)

    def wait(self) -> None:
        """Wait until all processes have called this method."""
        if self._has_group:
            distributed.all_reduce(torch.zeros(1, device=self._get_device()))

    def _get_device(self) -> torch.device:
        """Device of tensors that the process group can reduce."""
        on_gpu = distributed.get_backend() == "nccl"
        return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


# ---- Ray ----


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
