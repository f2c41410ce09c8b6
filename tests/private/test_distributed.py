"""Private training under DDP and FSDP2, in two processes.

Steps of a wrapped model, with the samples of this process, are compared with steps of a plain model that has the
samples of all processes and the same noise.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from persample import PerSampleError, SamplesMixed, _torch
from persample.private import PrivacyEngine, PrivateOptimizer, sampling
from tests.support.distributed import Batch, Net, assert_same, make_batch, make_net
from tests.support.paths import ROOT
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
def test_processes_with_one_seed_draw_independent_samples() -> None:
    """Pairs of samples that are always drawn together would tell of each other: no amplification by sampling."""
    data = TensorDataset(torch.zeros(400, 1))
    for options in ({}, {"sample_rate": 0.25}):
        net = nn.Linear(1, 1)
        _, optimizer, loader = PrivacyEngine(accountant="rdp").make_private(
            module=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), noise_multiplier=1.0, max_grad_norm=1.0,
            data_loader=DataLoader(data, batch_size=100, generator=torch.Generator().manual_seed(0)), distributed=True,
            **options,
        )  # fmt: skip
        optimizer.release()
        sizes: list[Any] = [None, None]
        dist.all_gather_object(sizes, [len(batch) for batch in loader.batch_sampler])
        assert sizes[0] != sizes[1]


def test_a_sampler_that_was_sent_to_the_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its generator, as Lightning does with `ddp_spawn`: the processes draw independent samples all the same."""
    monkeypatch.setattr(sampling, "count_processes", Mock(return_value=2))
    monkeypatch.setattr(dist, "get_world_size", Mock(return_value=2))
    sizes = []
    for rank in (0, 1):
        monkeypatch.setattr(dist, "get_rank", Mock(return_value=rank))
        sampler = sampling.PoissonSampler(400, 8, torch.Generator().manual_seed(0))
        sizes.append([len(batch) for batch in sampler])
    assert sizes[0] != sizes[1]


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


@in_two_processes
def test_a_failed_process_that_lives_on_ends_the_others() -> None:
    """The failed process does not reach its step, as in a notebook. Afterwards both go on."""
    net, batch = make_replicated(), make_batch(4, 2)
    optimizer = make_optimizer(net, True)
    make_step(net, optimizer, batch, None)
    optimizer.zero_grad()
    if dist.get_rank() == 1:
        with pytest.raises(SamplesMixed):
            net(batch.x[batch.own]).softmax(0).square().sum().backward()
        while not _torch.get_default_store().check(["test/noticed"]):
            time.sleep(0.05)
        dist.all_reduce(torch.zeros(1))  # the other process still waits for this one
    else:
        with pytest.raises(PerSampleError, match=r"The step of process 1 has failed.*samples of the batch are mixed"):
            make_step(net, optimizer, batch, None)
        assert all(p.grad is None for p in net.parameters())
        _torch.get_default_store().set("test/noticed", "yes")
    make_step(net, optimizer, batch, None)
    optimizer.release()


@pytest.mark.parametrize("kind", ["DDP", "FSDP2"])
def test_a_process_that_fails_ends_the_others(kind: str, tmp_path: Path) -> None:
    """Without an end, the first process would wait for half an hour."""
    command = [sys.executable, "-m", "tests.support.failing_process"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [*command, rank, str(tmp_path / "store"), kind],
            cwd=ROOT,
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in ("0", "1")
    ]
    try:
        errors = [process.communicate(timeout=600)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert "SamplesMixed" in errors[1]
    assert "The step of process 1 has failed" in errors[0] or "Connection closed by peer" in errors[0]
    assert [process.returncode for process in processes] == [1, 1]


@in_two_processes
def test_the_module_inside_ddp_is_refused() -> None:
    net = make_replicated()
    for module in (net.module, net.module.head):
        with pytest.raises(PerSampleError, match="Pass the DistributedDataParallel itself"):
            PrivacyEngine().make_private(
                module=module,
                optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
                data_loader=DataLoader(TensorDataset(torch.randn(12, 4)), batch_size=2),
                noise_multiplier=1.0,
                max_grad_norm=1.0,
            )
    assert not net.module._forward_hooks
