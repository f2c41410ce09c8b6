"""Private training under DDP and FSDP2, in two processes.

Steps of a wrapped model, with the samples of this process, are compared with steps of a plain model that has the
samples of all processes and the same noise.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from persample.private import PrivacyEngine, PrivateOptimizer
from tests.support.distributed import Batch, Net, assert_same, make_batch, make_net
from tests.support.processes import in_two_processes


def make_optimizer(model: nn.Module, distributed: bool, **options: Any) -> PrivateOptimizer:
    each = 3 if distributed else 3 * dist.get_world_size()
    settings: dict[str, Any] = {"noise_multiplier": 0.7, "max_grad_norm": 0.5, **options}
    return PrivateOptimizer(
        torch.optim.Adam(model.parameters(), lr=0.1),
        module=model,
        expected_batch_size=each,
        distributed=distributed,
        generator=torch.Generator().manual_seed(5),
        **settings,
    )


def make_step(model: nn.Module, optimizer: PrivateOptimizer, batch: Batch, own: slice | None) -> None:
    optimizer.zero_grad()
    batch.compute_loss(model, own).backward()
    optimizer.step()


def compare(wrapped: nn.Module, **options: Any) -> None:
    """Compare steps. In one a process has no samples; in another a process uses a layer that the other does not use."""
    alone = make_net()
    shared, single = make_optimizer(wrapped, True, **options), make_optimizer(alone, False, **options)
    for batch in (make_batch(4, 2), make_batch(0, 4), make_batch(4, 2, routed=1)):
        make_step(wrapped, shared, batch, None)
        make_step(alone, single, batch, slice(None))
        for (name, p), want in zip(wrapped.named_parameters(), alone.parameters(), strict=True):
            assert_same(p.detach(), want.detach(), f"{name} after {batch.sizes}, {options}")
    for optimizer in (shared, single):
        optimizer.release()


def make_sharded() -> Net:
    from torch.distributed.fsdp import fully_shard

    net = make_net()
    for block in net.blocks:
        fully_shard(block)
    return fully_shard(net)


def make_partly_sharded() -> Net:
    """Net with some parameters that are not sharded."""
    from torch.distributed.fsdp import fully_shard

    net = make_net()
    return fully_shard(net, ignored_params={net.head.bias, net.places, net.unused.weight})


def make_replicated() -> nn.Module:
    return DistributedDataParallel(make_net())


WRAPPERS = {"DDP": make_replicated, "FSDP2": make_sharded, "FSDP2, partly sharded": make_partly_sharded}
OPTIONS: dict[str, dict[str, Any]] = {
    "flat clipping": {},
    "two passes": {"recording": {"passes": 2}},
    "clipping per layer": {"clipping": "per_layer", "max_grad_norm": [0.05, 0.1, 0.15]},  # repeated for all parameters
    "automatic clipping": {"clipping": "automatic", "noise_multiplier": 0.0},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("wrapper", WRAPPERS)
@in_two_processes
def test_steps_equal_one_process(wrapper: str, options: str) -> None:
    given = dict(OPTIONS[options])
    if options == "clipping per layer":
        given["max_grad_norm"] = [given["max_grad_norm"][i % 3] for i, _ in enumerate(make_net().parameters())]
    compare(WRAPPERS[wrapper](), **given)


@in_two_processes
def test_one_process_splits_its_batch() -> None:
    """The other process does not split its batch, and no process waits."""
    wrapped, alone, batch = make_replicated(), make_net(), make_batch(4, 2)
    shared, single = make_optimizer(wrapped, True), make_optimizer(alone, False)
    parts = [slice(0, 1), slice(1, 4)] if dist.get_rank() == 0 else [slice(4, 6)]
    for i, part in enumerate(parts):
        shared.signal_skip_step(i < len(parts) - 1)
        make_step(wrapped, shared, batch, part)
    make_step(alone, single, batch, slice(None))
    for (name, p), want in zip(wrapped.named_parameters(), alone.parameters(), strict=True):
        assert_same(p.detach(), want.detach(), name)
    for optimizer in (shared, single):
        optimizer.release()


@in_two_processes
def test_engine_from_the_loader_to_the_accountant() -> None:
    """From the data loader to the accountant, with so few samples that some batches are empty."""
    torch.manual_seed(0)
    net = DistributedDataParallel(nn.Linear(4, 2))
    data = TensorDataset(torch.randn(12, 4), torch.randint(2, (12,)))
    engine = PrivacyEngine(accountant="rdp")
    model, optimizer, loader = engine.make_private(
        module=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=2),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    assert model is net
    assert optimizer.expected_batch_size == 1
    sizes = []
    for _ in range(3):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            sizes.append(len(x))
    fewest = torch.tensor(min(sizes))
    dist.all_reduce(fewest, dist.ReduceOp.MIN)
    assert fewest == 0
    assert sum(steps for _, _, steps in engine.accountant.history) == 18
    weight = net.module.weight.detach().clone()
    dist.broadcast(weight, 0)
    assert torch.equal(weight, net.module.weight)
    optimizer.release()
