"""Monitors in two processes: each measures its own samples, and the run stays as it is."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import persample
from persample import SamplesMixed
from persample.testing import loop_gradients
from tests.support.modules import make_mlp
from tests.support.processes import in_two_processes


def make_model() -> nn.Module:
    return make_mlp(4, 6, 3)


def compute_loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().sum(1).mean()


def train(model: nn.Module, sizes: tuple[int, int]) -> tuple[list[Tensor], list[Tensor]]:
    """The weights at the end, and the largest norm of the samples of this process in each step."""
    optimizer, norms = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), []
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(5):
        x = torch.randn(sizes[dist.get_rank()], 4, generator=generator, dtype=torch.float64)
        if len(x):
            rows = loop_gradients(model.module, x, compute_loss)
            norms.append(torch.cat([part.flatten(1) for part in rows.values()], 1).norm(dim=1).max())
        optimizer.zero_grad()
        model(x).square().sum(1).sum().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()], norms


@pytest.mark.parametrize("sizes", [(4, 3), (4, 0), (0, 2)])
@in_two_processes
def test_the_run_stays_as_it_is(sizes: tuple[int, int]) -> None:
    expected, norms = train(DistributedDataParallel(make_model()), sizes)
    model = DistributedDataParallel(make_model())
    with persample.monitor(model, every=2) as watching:
        found, _ = train(model, sizes)
    torch.testing.assert_close(found, expected)
    assert [measured.step for measured in watching.history] == ([0, 2, 4] if sizes[dist.get_rank()] else [])
    for measured, largest in zip(watching.history, norms[::2], strict=True):
        assert measured.norms["most"] == pytest.approx(float(largest))


def accumulate(model: nn.Module, *, is_backward_outside: bool) -> list[Tensor]:
    """The weights after some steps, each with three batches, of which the last one is averaged over the processes."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(4):
        optimizer.zero_grad()
        for is_last in (False, False, True):
            if not isinstance(model, DistributedDataParallel):
                model.set_requires_gradient_sync(is_last)
            with nullcontext() if is_last or not isinstance(model, DistributedDataParallel) else model.no_sync():
                loss = compute_loss(model, torch.randn(3, 4, generator=generator, dtype=torch.float64))
                if not is_backward_outside:
                    loss.backward()
            if is_backward_outside:
                loss.backward()
        optimizer.step()
    return [p.full_tensor() if hasattr(p, "full_tensor") else p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("every", [1, 2, 3, 5])
@in_two_processes
def test_accumulation_under_fsdp(every: int) -> None:
    from torch.distributed.fsdp import fully_shard

    expected = accumulate(fully_shard(make_model()), is_backward_outside=False)
    model = fully_shard(make_model())
    with persample.monitor(model, every=every) as watching:
        found = accumulate(model, is_backward_outside=False)
    torch.testing.assert_close(found, expected)
    assert len(watching.history) == -(-12 // every)


@pytest.mark.parametrize("every", [1, 2, 3, 5])
@pytest.mark.parametrize("is_wrapper", [True, False])
@pytest.mark.parametrize("is_backward_outside", [False, True])
@in_two_processes
def test_accumulation_without_synchronisation(every: int, is_wrapper: bool, is_backward_outside: bool) -> None:
    expected = accumulate(DistributedDataParallel(make_model()), is_backward_outside=is_backward_outside)
    model = DistributedDataParallel(make_model())
    with persample.monitor(model if is_wrapper else model.module, every=every) as watching:
        found = accumulate(model, is_backward_outside=is_backward_outside)
    torch.testing.assert_close(found, expected)
    assert len(watching.history) == -(-12 // every)
    assert model.require_backward_grad_sync


@in_two_processes
def test_a_model_that_mixes_samples_is_refused() -> None:
    """What DistributedDataParallel would not average must not be left to autograd."""
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).double())
    with persample.monitor(model), pytest.raises(SamplesMixed, match="batch_norm"):
        model(torch.randn(4, 4).double()).sum().backward()
