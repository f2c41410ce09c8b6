"""record() with DistributedDataParallel: settings, nesting, no_sync and refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from persample import call_for_per_sample_grads, record
from tests.support.distributed import (
    WORDS,
    D,
    assert_refused,
    assert_same,
    assert_same_grads,
    assert_same_sums,
    check_main_answers,
    check_ordinary_step,
    make_batch,
    make_net,
)
from tests.support.processes import in_two_processes


def read_settings(wrapper: Any) -> tuple[bool, ...]:
    return (
        wrapper.require_backward_grad_sync,
        wrapper.require_forward_param_sync,
        wrapper.find_unused_parameters,
        wrapper.static_graph,
    )


@pytest.mark.parametrize("option", ["find_unused_parameters", "static_graph", "gradient_as_bucket_view"])
@in_two_processes
def test_options_of_the_wrapper(option: str) -> None:
    finds_unused = option == "find_unused_parameters"
    batch = make_batch(4, 2, routed=1) if finds_unused else make_batch(4, 2)
    wrapper = DistributedDataParallel(make_net(unused_trains=finds_unused), **{option: True})
    before = read_settings(wrapper)
    check_main_answers(wrapper, batch, finds_unused)
    assert read_settings(wrapper) == before
    for _ in range(3):
        check_ordinary_step(wrapper, batch)
    check_main_answers(wrapper, batch, finds_unused)
    check_ordinary_step(wrapper, batch)


@in_two_processes
def test_module_is_recorded_and_its_wrapper_is_called() -> None:
    batch, net = make_batch(4, 2), make_net(unused_trains=False)
    wrapper, alone = DistributedDataParallel(net), batch.record_all(False)
    with record(net) as grads:
        batch.compute_loss(wrapper).backward()
    assert_same(grads.project(8), alone.project(8)[batch.own], "project")
    assert_same_sums(grads.clip(0.1), alone.clip(0.1), net, "clip")
    check_ordinary_step(wrapper, batch)


@in_two_processes
def test_module_is_recorded_and_called_without_its_wrapper() -> None:
    """Each process has the answers for its own samples only."""
    batch, net = make_batch(4, 2), make_net(unused_trains=False)
    wrapper, alone = DistributedDataParallel(net), batch.record_all(False)
    with record(net, keep_grad=True) as grads:
        batch.compute_loss(net).backward()
    assert float((grads.clip(0.1)["head.bias"] - alone.clip(0.1)["head.bias"]).abs().max()) > 1e-3
    own = torch.autograd.grad(batch.compute_loss(net), net.head.bias)[0]
    assert_same(net.head.bias.grad, own, "grad of one process")
    net.zero_grad()
    check_ordinary_step(wrapper, batch)


@in_two_processes
def test_wrapper_inside_the_recorded_module() -> None:
    batch, net = make_batch(4, 2), make_net(unused_trains=False)
    wrapper, alone = DistributedDataParallel(net), batch.record_all(False)
    outer = nn.Sequential(wrapper)
    assert_same_sums(batch.record_own(outer).clip(0.1), alone.clip(0.1), outer, "clip of a module with a wrapper")
    check_ordinary_step(wrapper, batch)


@in_two_processes
def test_call_for_per_sample_grads_of_the_wrapped_module() -> None:
    batch, net = make_batch(4, 2), make_net(unused_trains=False)
    wrapper = DistributedDataParallel(net)
    check_ordinary_step(wrapper, batch)
    rows = call_for_per_sample_grads(net, loss_reduction="sum")(batch.x[batch.own])
    F.cross_entropy(rows.flatten(0, 1), batch.y[batch.own].flatten(), reduction="sum").backward()
    assert net.head.bias.grad_sample.shape == (batch.own.stop - batch.own.start, WORDS)


@in_two_processes
def test_keep_grad_within_no_sync() -> None:
    batch = make_batch(4, 2)
    wrapper = DistributedDataParallel(make_net(unused_trains=False))
    with wrapper.no_sync():
        batch.record_own(wrapper, keep_grad=True)
        own = torch.autograd.grad(batch.compute_loss(wrapper), wrapper.module.head.bias)[0]
    assert_same(wrapper.module.head.bias.grad, own, "grad within no_sync")
    batch.compute_loss(wrapper).backward()
    assert_same_grads(wrapper, batch.compute_mean_gradient(), 2, "after no_sync")
    wrapper.zero_grad()
    with record(wrapper, keep_grad=True, batch_dim={"x": 0}) as grads:
        loss = batch.compute_loss(wrapper)
    loss.backward()
    assert_same_grads(wrapper, batch.compute_mean_gradient(), 1, "after the block")
    assert_same_sums(grads.sum(), batch.record_all(False).sum(), wrapper, "sum after the block")


@in_two_processes
def test_refusals() -> None:
    from torch.distributed._composable import replicate

    x = torch.randn(4, D)
    one, other = (DistributedDataParallel(nn.Linear(D, D), process_group=dist.new_group([0, 1])) for _ in range(2))
    assert_refused(nn.Sequential(one, other), x, "different process groups")
    whole = DistributedDataParallel(nn.Sequential(one.module, nn.Linear(D, D)))
    assert_refused(one.module, x, "part of what", called=whole)
    one.mixed_precision = object()
    assert_refused(one, x, "mixed_precision")
    one.mixed_precision = None
    assert read_settings(one) == read_settings(other) == (True, True, False, False)
    assert_refused(replicate(nn.Linear(D, D)), x, "is distributed in a way that recordings do not support")
