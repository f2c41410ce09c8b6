"""record() with fully_shard (FSDP2): settings, groups, states, mixed precision and refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from persample import PerSampleError, call_for_per_sample_grads, record
from persample.testing.oracle import compute_test_loss
from tests.support.cases import REAL_CASES
from tests.support.distributed import (
    D,
    assert_refused,
    assert_same,
    assert_same_grads,
    assert_same_sums,
    check_main_answers,
    check_ordinary_step,
    make_batch,
    make_net,
    shard,
)
from tests.support.processes import in_two_processes


def make_options(name: str) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard

    names = ("replicate", "shard")
    if name == "parameters stay whole after forward":
        return {"reshard_after_forward": False}
    if name == "parameters are sharded after forward":
        return {"reshard_after_forward": True}
    if name == "two replicas":
        return {"mesh": init_device_mesh("cpu", (2, 1), mesh_dim_names=names)}
    if name == "one replica in two shards":
        return {"mesh": init_device_mesh("cpu", (1, 2), mesh_dim_names=names)}
    return {"shard_placement_fn": lambda p: Shard(1) if p.dim() > 1 and p.shape[1] % 2 == 0 else None}


@pytest.mark.parametrize(
    "options",
    [
        "parameters stay whole after forward",
        "parameters are sharded after forward",
        "two replicas",
        "one replica in two shards",
        "shards in dimension 1",
    ],
)
@in_two_processes
def test_options_of_fully_shard(options: str) -> None:
    net, batch = shard(make_net(), **make_options(options)), make_batch(4, 2)
    check_main_answers(net, batch)
    check_ordinary_step(net, batch)


@in_two_processes
def test_several_modules_in_one_group() -> None:
    from torch.distributed.fsdp import fully_shard

    net, batch = make_net(), make_batch(4, 2)
    fully_shard([net.words, net.head], reshard_after_forward=True)
    check_main_answers(shard(net), batch)
    check_ordinary_step(net, batch)


@in_two_processes
def test_replicas_instead_of_shards() -> None:
    from torch.distributed._composable.replicate_with_fsdp import replicate

    net, batch = make_net(), make_batch(4, 2)
    for block in net.blocks:
        replicate(block)
    check_main_answers(replicate(net), batch)
    check_ordinary_step(net, batch)


@in_two_processes
def test_parameters_that_fsdp_does_not_manage() -> None:
    from torch.distributed.fsdp import fully_shard

    net, alone, batch = make_net(), make_net(), make_batch(4, 2)
    for block in net.blocks:
        fully_shard(block)
    grads = batch.record_own(net, keep_grad=True)
    assert_same_sums(grads.clip(0.1), batch.record_all(True).clip(0.1), net, "clip")
    batch.compute_loss(alone).backward()
    assert_same(net.places.grad, alone.places.grad, "grad that is not reduced")
    managed = "blocks.0.norm.bias"
    assert_same(net.blocks[0].norm.bias.grad, batch.compute_mean_gradient()[managed], "grad that is reduced")


@in_two_processes
def test_checkpointed_blocks() -> None:
    net, batch = shard(make_net(checkpointed=True)), make_batch(4, 2)
    check_main_answers(net, batch)
    check_ordinary_step(net, batch)


@in_two_processes
def test_parameters_that_are_whole_when_the_recording_begins() -> None:
    batch, net = make_batch(4, 2), shard(make_net(), reshard_after_forward=False)
    with torch.no_grad():
        net(batch.x)
    assert not hasattr(net.places, "full_tensor")
    grads = batch.record_own(net)
    assert not any(hasattr(p, "full_tensor") for p in grads.dense().values())
    assert_same_sums(grads.clip(0.1), batch.record_all(True).clip(0.1), net, "clip")


@in_two_processes
def test_gradients_that_accumulate_before_they_are_reduced() -> None:
    batch, net = make_batch(4, 2), shard(make_net(), reshard_after_forward=False)
    net.set_requires_gradient_sync(False)
    batch.record_own(net, keep_grad=True)
    batch.record_own(net)
    batch.compute_loss(net).backward()
    assert net.places.grad is None
    net.set_requires_gradient_sync(True)
    batch.record_own(net)
    assert net.places.grad is None
    batch.record_own(net, keep_grad=True)
    assert_same_grads(net, batch.compute_mean_gradient(), 3, "accumulated")


@in_two_processes
def test_reduction_of_unused_parameters() -> None:
    batch, net = make_batch(4, 2), shard(make_net(), reshard_after_forward=False)
    set_reduction = getattr(net, "set_reduce_scatter_unused_params", bool)  # torch 2.10 has no such method
    set_reduction(True)
    batch.record_own(net)
    assert all(p.grad is None for p in net.parameters())
    set_reduction(False)
    with record(net, keep_grad=True) as grads:
        loss = batch.compute_loss(net)
    loss.backward()
    assert_same_grads(net, batch.compute_mean_gradient(), 1, "after the block")
    assert_same_sums(grads.sum(), batch.record_all(True).sum(), net, "sum after the block")


@in_two_processes
def test_test_cases_with_the_same_samples_in_both_processes() -> None:
    """Some of the modules of tests.support.cases, with every child sharded separately."""
    from torch.distributed.fsdp import fully_shard

    compared = 0
    for case in REAL_CASES[::13]:
        plain, args, kwargs = case.build()
        with record(plain, **case.record_options) as alone:
            compute_test_loss(plain(*args, **kwargs), case.out_dim).backward()
        net, args, kwargs = case.build()
        try:
            for part in (*net.children(), net):
                if list(part.parameters()):
                    fully_shard(part, reshard_after_forward=True)
            with torch.no_grad():
                net(*args, **kwargs)
        except (NotImplementedError, RuntimeError, ValueError):  # fully_shard does not support this module
            continue
        with record(net, **case.record_options) as grads:
            compute_test_loss(net(*args, **kwargs), case.out_dim).backward()
        assert_same(grads.norms(), alone.norms(), case.name)
        for total, want in zip(grads.clip(1.0).values(), alone.clip(1.0).values(), strict=True):
            assert_same(total, 2 * want, case.name, tolerance=1e-6)
        compared += 1
    assert compared > 15


@in_two_processes
def test_mixed_precision() -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    batch = make_batch(4, 2)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    net = shard(make_net().float(), mp_policy=policy)
    grads, alone = batch.record_own(net, keep_grad=True), batch.record_all(True)
    assert torch.allclose(grads.norms().double(), alone.norms()[batch.own], rtol=0.1)
    for (name, p), total, want in zip(net.named_parameters(), grads.sum().values(), alone.sum().values(), strict=True):
        assert total.dtype == torch.float32 and total.placements == p.placements, name
        assert_same(total, want, name, tolerance=0.1)
        assert grads.dense([name])[name].dtype == torch.float32
    kept = {name: p.grad.full_tensor() for name, p in net.named_parameters() if p.grad is not None}
    net.zero_grad()
    batch.compute_loss(net).backward()
    for name, p in net.named_parameters():
        if p.grad is not None:
            assert p.grad.dtype == torch.float32
            assert_same(p.grad, kept[name], name, tolerance=0.02)


class Doubled(torch.autograd.Function):
    """A function of a weight that saves the weight."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return weight * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (weight,) = ctx.saved_tensors
        return grad * 2 + 0 * weight


class UsesDoubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, Doubled.apply(self.weight), self.bias)


@in_two_processes
def test_refusals() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, distribute_tensor

    x = torch.randn(4, D)
    assert_refused(fully_shard(UsesDoubled(D, 2)), x, "Save a clone")
    layer = nn.Linear(D, 2)
    weight = distribute_tensor(layer.weight.detach(), init_device_mesh("cpu", (2,)), [Replicate()])
    layer.weight = nn.Parameter(weight)
    assert_refused(layer, x, "Tensor parallelism")
    sharded = fully_shard(nn.Sequential(nn.Linear(D, D), nn.Linear(D, D)))
    assert_refused(sharded[0], x, "Record the whole")
    layer = fully_shard(nn.Linear(D, 2), reshard_after_forward=True)
    with pytest.raises(PerSampleError, match=r"use persample\.record"):
        call_for_per_sample_grads(layer)
    assert_refused(layer, x, "penalty", penalty=True)
    layer(x).sum().backward()
