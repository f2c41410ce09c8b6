"""Values in two processes: their sums over both equal the first-order change of the mean validation loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import persample
from persample import PerSampleError
from tests.support.processes import in_two_processes

OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-3, betas=(0.0, 0.9)),
}


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def draw(seed: int, rank: int) -> Tensor:
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(10 * seed + rank), dtype=torch.float64)


def validate(model: Any, rank: int | None = None) -> Tensor:
    """Each process has another validation batch."""
    x = draw(99, dist.get_rank() if rank is None else rank)
    return model(x).square().sum(1).mean()


@pytest.mark.parametrize("name", ["SGD", "Adam"])
@in_two_processes
def test_sums_over_processes_equal_the_change_of_the_mean_loss(name: str) -> None:
    model = DistributedDataParallel(make_model())
    optimizer = OPTIMIZERS[name](model.parameters())
    with persample.value(model, validation=validate, optimizer=optimizer) as values:
        expected, before = 0.0, torch.zeros(())
        for t in range(3):
            values.ids = [f"{dist.get_rank()}/{n}" for n in range(4)]
            optimizer.zero_grad()
            model(draw(t, dist.get_rank())).square().sum(1).mean().backward()
            twin = make_model()
            twin.load_state_dict(model.module.state_dict())
            loss = (validate(twin, 0) + validate(twin, 1)) / 2
            gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(twin.parameters()))])
            before = torch.cat([p.detach().flatten() for p in model.parameters()])
            optimizer.step()
            after = torch.cat([p.detach().flatten() for p in model.parameters()])
            expected -= float(gradient @ (after - before))
    totals = values.totals(over_processes=True)
    assert len(totals) == 8 and len(values.totals()) == 4
    assert set(values.counts(over_processes=True).values()) == {3}
    assert sum(totals.values()) == pytest.approx(expected, rel=1e-9)


@in_two_processes
def test_fsdp_is_refused() -> None:
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(make_model())
    with pytest.raises(PerSampleError, match="not available under FSDP2"):
        persample.value(model, validation=validate)
