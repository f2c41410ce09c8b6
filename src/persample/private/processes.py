"""The processes of private training: sums over all of them, and the failure of one."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from itertools import chain, count
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from persample import _torch
from persample.errors import PerSampleError

_numbers = count()  # of the private optimizers of a process; all processes make theirs in the same order
_LONGEST_SLEEP = 0.02  # seconds between two looks at the other processes


class Peers:
    """The processes that train a model together, or one process alone.

    A process whose step fails does not take part in the sum over all processes. It reports this in the store of the
    process group, so that the others raise an error instead of waiting.
    """

    def __init__(self, distributed: bool) -> None:
        self.count = torch.distributed.get_world_size() if distributed else 1
        self.rank = torch.distributed.get_rank() if distributed else 0
        self._number = next(_numbers) if distributed else 0
        self._steps = 0
        self._has_reported = False

    def add_up(self, totals: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Add up the tensors of all processes, in place."""
        return self._communicate(totals, torch.distributed.all_reduce)

    def send_from_first(self, totals: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Replace tensors by those of the first process, in place."""
        return self._communicate(totals, lambda total: torch.distributed.broadcast(total, 0))

    def _communicate(self, totals: Mapping[int, Tensor], send: Callable[[Tensor], Any]) -> dict[int, Tensor]:
        if self.count > 1:
            self._wait_for_all()
            for total in totals.values():
                send(total)
            self._steps += 1
        return dict(totals)

    def report_failure(self, error: BaseException | None) -> None:
        """Tell the other processes that the step of this process has failed."""
        store = self._get_store()
        if store is not None and error is not None and not self._has_reported:
            self._has_reported = True
            store.set(self._make_key(self.rank), f"{type(error).__name__}: {error}")

    def withdraw_failure(self) -> None:
        """Tell the other processes that this process has begun its step again."""
        if self._has_reported:
            self._has_reported = False
            store = self._get_store()
            if store is not None:
                store.delete_key(self._make_key(self.rank))

    def _wait_for_all(self) -> None:
        """Wait until all processes are here; raise if one of them has failed."""
        group = torch.distributed.group.WORLD
        device = "cpu" if torch.distributed.get_backend(group) == "gloo" else torch.accelerator.current_accelerator()
        work: Any = torch.distributed.all_reduce(torch.zeros(1, device=device), async_op=True)
        store, sleep, waited = self._get_store(), 1e-5, 0.0
        while not work.is_completed():
            time.sleep(sleep)
            waited += sleep
            sleep = min(2 * sleep, _LONGEST_SLEEP)
            if store is not None and waited > 0.2:
                waited = 0.0
                for rank in range(self.count):
                    if rank != self.rank and store.check([self._make_key(rank)]):
                        raise PerSampleError(
                            f"The step of process {rank} has failed, so this process cannot end its step either. "
                            f"There: {store.get(self._make_key(rank)).decode()}"
                        )
        work.wait()

    def _get_store(self) -> Any:
        return _torch.get_default_store() if self.count > 1 and torch.distributed.is_initialized() else None

    def _make_key(self, rank: int) -> str:
        return f"persample/failed/{self._number}/{self._steps}/{rank}"


def refuse_inner_module(module: nn.Module) -> None:
    """Refuse a module inside a DistributedDataParallel: its sums would not be added up over the processes."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    for found in gc.get_objects():
        if not issubclass(type(found), DistributedDataParallel) or found is module:
            continue
        if any(part is module for part in found.modules()):
            raise PerSampleError(
                f"This {type(module).__name__} is inside a DistributedDataParallel. Pass the DistributedDataParallel "
                "itself, not its .module: otherwise each process would train on its own, with its own noise."
            )


@torch.no_grad()
def send_from_first(module: nn.Module) -> None:
    """Replace the parameters and buffers of a module by those of the first process."""
    for tensor in chain(module.parameters(), module.buffers()):
        torch.distributed.broadcast(tensor, 0)
