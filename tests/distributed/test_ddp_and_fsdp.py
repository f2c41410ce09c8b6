"""record() under DDP and under FSDP2 equals one process that has all samples."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from persample import SamplesMixed, _torch, record
from tests.support.distributed import (
    Batch,
    assert_same,
    assert_same_grads,
    assert_same_sums,
    check_main_answers,
    check_ordinary_step,
    get_trainable,
    make_batch,
    make_net,
    shard,
)
from tests.support.processes import in_two_processes

# DDP refuses an ordinary backward pass that leaves a trainable layer out.
UNUSED_TRAINS = {"DDP": False, "FSDP2": True}
BATCHES: dict[str, dict[str, Any]] = {
    "batches of different sizes": {"sizes": (4, 2)},
    "a layer that one process does not use": {"sizes": (4, 2), "reduction": "sum", "routed": 1},
    "a process without samples": {"sizes": (0, 4)},
}
both_wrappers = pytest.mark.parametrize("wrapper", UNUSED_TRAINS)
every_batch = pytest.mark.parametrize("batch", BATCHES)


def find_batch(name: str) -> Batch:
    options = dict(BATCHES[name])
    return make_batch(*options.pop("sizes"), **options)


@contextmanager
def make_wrapped(wrapper: str) -> Iterator[Any]:
    """The wrapped model. Its settings must be unchanged afterwards, and an ordinary step must work."""
    net = make_net(unused_trains=UNUSED_TRAINS[wrapper])
    model = DistributedDataParallel(net) if wrapper == "DDP" else shard(net)
    before = read_settings(model)
    yield model
    check_ordinary_step(model, make_batch(4, 2))
    assert read_settings(model) == before


def read_settings(model: Any) -> Any:
    """What a recording changes for a while: flags of DDP and hooks, or flags and hooks of FSDP."""
    if isinstance(model, DistributedDataParallel):
        return (
            model.require_backward_grad_sync,
            model.require_forward_param_sync,
            model.find_unused_parameters,
            model.static_graph,
            any(m._forward_pre_hooks for m in model.modules()),
        )
    groups = [group for block in model.blocks for group in _torch.get_fsdp_groups(block._get_fsdp_state())]
    hooks = [group.__dict__.get("_register_post_backward_hook") for group in groups]
    return [group.reduce_grads for group in groups], hooks


@both_wrappers
@in_two_processes
def test_settings_of_a_new_wrapper(wrapper: str) -> None:
    """The values that the other tests expect to find again."""
    with make_wrapped(wrapper) as model:
        settings = read_settings(model)
    if wrapper == "DDP":
        assert settings == (True, True, False, False, False)
    else:
        assert settings == ([True, True], [None, None])


@every_batch
@both_wrappers
@in_two_processes
def test_all_answers(wrapper: str, batch: str) -> None:
    unused_trains = UNUSED_TRAINS[wrapper]
    with make_wrapped(wrapper) as model:
        check_all_answers(model, find_batch(batch), unused_trains)


def check_all_answers(model: nn.Module, batch: Batch, unused_trains: bool) -> None:
    alone, grads, own = batch.record_all(unused_trains), batch.record_own(model), batch.own
    assert_same(grads.norms(), alone.norms()[own], "norms")
    each = alone.norms(per_parameter=True)
    for part, whole in zip(grads.norms(per_parameter=True).values(), each.values(), strict=True):
        assert_same(part, whole[own], "norms per parameter")
    for (name, rows), whole in zip(grads.dense().items(), alone.dense().values(), strict=True):
        assert_same(rows, whole[own], f"rows of {name}")
    assert_same(grads.gram(), alone.gram()[own, own], "gram")
    assert grads.project(8).shape == (own.stop - own.start, 8)
    limit = float(alone.norms().median())
    for what, ask in {
        "sum": lambda g: g.sum(),
        "mean": lambda g: g.mean(),
        "clip": lambda g: g.clip(limit),
        "clip per parameter": lambda g: g.clip(limit / 4, per_parameter=True),
        "second moment": lambda g: g.second_moment(),
        "variance": lambda g: g.variance(),
        "mean of some": lambda g: g.select(g.names[:1]).mean(),
        "mean of scaled rows": lambda g: g.scale({}).mean(),
    }.items():
        assert_same_sums(ask(grads), ask(alone), model, what)
    assert_same_sums(grads.sum(batch.weights[own]), alone.sum(batch.weights), model, "weighted sum")
    assert_same(grads.noise_scale(), alone.noise_scale(), "noise scale")
    mean = alone.mean()
    assert_same(grads.dot(dict(zip(grads.names, mean.values(), strict=True))), alone.dot(mean)[own], "dot")
    assert_same(grads.dot(grads.mean()), alone.dot(mean)[own], "dot with the mean of the recording")
    parameters = get_trainable(make_net(unused_trains=unused_trains))
    assert_same(grads.dot(get_trainable(model)), alone.dot(parameters)[own], "dot with the parameters")
    assert all(p.grad is None for p in model.parameters())


@every_batch
@both_wrappers
@in_two_processes
def test_streamed_norms_and_clipping(wrapper: str, batch: str) -> None:
    unused_trains = UNUSED_TRAINS[wrapper]
    with make_wrapped(wrapper) as model:
        check_streamed_answers(model, find_batch(batch), unused_trains)


def check_streamed_answers(model: nn.Module, batch: Batch, unused_trains: bool) -> None:
    alone = batch.record_all(unused_trains)
    assert_same(batch.record_own(model, keep="norms").norms(), alone.norms()[batch.own], "norms only")
    limit = float(alone.norms().median()) / 2
    memory = 2**30
    for passes in (1, 2):
        grads = batch.record_own(model, keep="clip", max_norm=limit, memory=memory)
        assert grads.passes == passes or not len(batch.x[batch.own])
        assert_same(grads.norms(), alone.norms()[batch.own], f"norms, {passes} passes")
        assert_same_sums(grads.clip(), alone.clip(limit), model, f"clip, {passes} passes")
        assert all(torch.equal(a, b) for a, b in zip(grads.clip().values(), grads.clip().values(), strict=True))
        # A limit between what the two processes would keep: both must decide alike.
        memory = int(repr(grads).split(" bytes to keep")[0].split()[-1]) * 3 // 4
    assert all(p.grad is None for p in model.parameters())


@every_batch
@both_wrappers
@in_two_processes
def test_keep_grad_accumulates_as_an_ordinary_backward_pass(wrapper: str, batch: str) -> None:
    with make_wrapped(wrapper) as model:
        recorded = find_batch(batch)
        for times, options in enumerate(({}, {"keep": "norms"}, {"keep": "clip", "max_norm": 0.1, "passes": 2}), 1):
            recorded.record_own(model, keep_grad=True, **options)
            assert_same_grads(model, recorded.compute_mean_gradient(), times, f"{options}")
        model.zero_grad()


@pytest.mark.parametrize("when", ["before the forward pass", "between the passes", "after the backward pass"])
@both_wrappers
@in_two_processes
def test_recording_left_by_an_exception(wrapper: str, when: str) -> None:
    batch = make_batch(4, 2)
    with make_wrapped(wrapper) as model:
        with pytest.raises(KeyError), record(model, keep_grad=True):
            if when != "before the forward pass":
                loss = batch.compute_loss(model)
            if when == "after the backward pass":
                loss.backward()
            raise KeyError(when)
        model.zero_grad()
        check_ordinary_step(model, batch)
        check_main_answers(model, batch, UNUSED_TRAINS[wrapper])


@pytest.mark.parametrize("where", ["in the model", "in the loss"])
@both_wrappers
@in_two_processes
def test_recording_that_is_refused(wrapper: str, where: str) -> None:
    batch = make_batch(4, 2)
    with make_wrapped(wrapper) as model:
        block = (model.module if wrapper == "DDP" else model).blocks[1]
        if where == "in the model":
            block.mixes = True
            with pytest.raises(SamplesMixed):
                batch.record_own(model)
            block.mixes = False
        else:
            with pytest.raises(SamplesMixed), record(model, loss_reduction="sum"):
                out = model(batch.x[batch.own])
                (out.sum() + out.mean(0).square().sum()).backward()
        check_ordinary_step(model, batch)
        check_main_answers(model, batch, UNUSED_TRAINS[wrapper])


def test_importing_persample_does_not_import_dtensor() -> None:
    imports = "import sys, torch.distributed, torch.nn.parallel, persample\n"
    code = imports + "assert 'torch.distributed.tensor' not in sys.modules"
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)
