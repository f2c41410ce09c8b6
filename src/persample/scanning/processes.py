"""The processes that share a scan: those of torch.distributed, or this one alone."""

from __future__ import annotations

import torch
from torch import Tensor, distributed


class Processes:
    """Who takes part, and what they have to do together."""

    def __init__(self) -> None:
        self._many = distributed.is_available() and distributed.is_initialized()
        self.count = distributed.get_world_size() if self._many else 1
        self.rank = distributed.get_rank() if self._many else 0

    @property
    def is_first(self) -> bool:
        """Whether this process writes what there is one of."""
        return self.rank == 0

    def share(self, number: int) -> range:
        """The part of `0 .. number - 1` that this process takes: neighbours together, all parts about as long."""
        return range(number * self.rank // self.count, number * (self.rank + 1) // self.count)

    def total(self, part: Tensor) -> Tensor:
        """The sum over all processes."""
        if self._many:
            shared = part.to(self._device())
            distributed.all_reduce(shared)
            part = shared.to(part.device)
        return part

    def wait(self) -> None:
        """Until all have come here."""
        if self._many:
            distributed.all_reduce(torch.zeros(1, device=self._device()))

    def _device(self) -> torch.device:
        """Where the processes can talk."""
        on_gpu = distributed.get_backend() == "nccl"
        return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
