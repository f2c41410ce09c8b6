"""Scans of models with sharded weights (FSDP2): two processes, equal to one process with the whole model."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import persample
from persample.scanning import ScanError, scan_run
from persample.scanning.workers import ScanWorkers
from tests.support.processes import in_two_processes
from tests.support.scans import QUICK, Language, language_loss


@contextmanager
def share_folder() -> Iterator[Path]:
    """A temporary folder of both processes."""
    with tempfile.TemporaryDirectory() as own:
        names = [own]
        dist.broadcast_object_list(names)
        yield Path(names[0])
        dist.barrier()


class Alone(ScanWorkers):
    """One process, although there is a group."""

    def __init__(self) -> None:
        self._has_group, self.count, self.rank = False, 1, 0


def make_task(kind: str, count: int) -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(0)
    if kind == "tokens":  # tied weights, and random numbers
        return Language(), {"tokens": torch.randint(11, (count, 5))}, language_loss
    net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 3))
    return net, (torch.randn(count, 6), torch.arange(count) % 3), nn.CrossEntropyLoss()


def shard(model: nn.Module) -> nn.Module:
    for part in model.children():
        if isinstance(part, nn.Linear):
            fully_shard(part)
    return fully_shard(model)


@in_two_processes
@pytest.mark.parametrize("count", [7, 23])  # one shard: the second process has none; three: it has more
@pytest.mark.parametrize("kind", ["numbers", "tokens"])
def test_equal_to_one_process(kind: str, count: int) -> None:
    model, data, loss_fn = make_task(kind, count)
    whole = copy.deepcopy(model)
    options: dict[str, Any] = {**QUICK, "verify": "first"}
    with share_folder() as folder:
        found = persample.scan(shard(model), loss_fn, data, out=folder / "two", **options)
        if dist.get_rank() == 0:
            before, scan_run.ScanWorkers = scan_run.ScanWorkers, Alone  # type: ignore[misc]
            one = persample.scan(whole, loss_fn, data, out=folder / "one", **options)
            scan_run.ScanWorkers = before  # type: ignore[misc]
            for name in one.columns:
                if name not in ("label", "name"):
                    np.testing.assert_allclose(found.column(name), one.column(name), rtol=1e-5, atol=1e-6, err_msg=name)
            for number in range(one.store.count_shards(0)):
                rows = [scan.store.read_rows(0, number) for scan in (one, found)]
                np.testing.assert_allclose(*rows, atol=2e-3)
            assert found.settings["checkpoints"] == one.settings["checkpoints"], "digests of whole weights"
            assert found.settings["code"] == one.settings["code"]


@in_two_processes
def test_refused() -> None:
    model, data, loss_fn = make_task("numbers", 9)
    net = shard(model)

    def mean(model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    with share_folder() as folder:
        with pytest.raises(ScanError, match="does not support the exact mean gradient"):
            persample.scan(net, loss_fn, data, quantities=["loss", "alignment"], out=folder / "sum", **QUICK)
        with pytest.raises(ScanError, match="must return one loss per sample"):
            persample.scan(net, mean, data, out=folder / "mean", **QUICK)
