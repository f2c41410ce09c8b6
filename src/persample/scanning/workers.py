"""The processes that share a scan."""

from __future__ import annotations

import sys

import torch
from torch import Tensor, distributed


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
