"""Units under two processes: each unit has one row, in one process, also if both have samples of it."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from persample import PerSampleError, record, watch
from persample.gradients import split_units
from tests.support.distributed import Batch, assert_same, assert_same_sums, make_batch, make_net, shard
from tests.support.processes import in_two_processes

# The units of the samples of both processes, and the units whose rows each process has.
UNITS: dict[str, tuple[list[list[int]], list[list[int]]]] = {
    "whole": ([[5, 2, 5, 5], [7, 3]], [[2, 5], [3, 7]]),
    "split": ([[5, 2, 5, 5], [5, 3]], [[2, 5], [3]]),
    "all split": ([[1, 0, 1, 0], [0, 1]], [[0, 1], []]),
    "ragged": ([[9, 3, 9, 9], [4, 9, 0, 3, 9, 9]], [[3, 9], [0, 4]]),
    "very ragged": ([[6] * 7 + [1], [6, 2, 3, 4]], [[1, 6], [2, 3, 4]]),
    "no samples in the second": ([[5, 2, 5], []], [[2, 5], []]),
    "no samples in the first": ([[], [5, 2, 5]], [[], [2, 5]]),
}


def make_model(kind: str) -> nn.Module:
    net = make_net()
    return DistributedDataParallel(net, find_unused_parameters=True) if kind == "ddp" else shard(net)


def record_alone(batch: Batch, units: list[int], **options: Any) -> Any:
    """A recording of one process that has the samples of both."""
    model = make_net()
    with record(model, units=units, loss_reduction="mean", **options) as grads:
        batch.compute_loss(model, slice(None)).backward()
    return grads


def check_every_answer(grads: Any, expected: Any, own: list[int], model: nn.Module) -> None:
    """Compare each answer: rows with those of `own` in `expected`, sums with sums over all rows."""
    rows = [expected.units.index(unit) for unit in own]
    assert grads.units == own and len(grads) == len(own)
    limit = float(expected.norms().max()) / 2
    weights = torch.linspace(-1, 2, len(expected), dtype=torch.float64)
    for name, part in grads.dense().items():
        assert_same(part, expected.dense()[name.removeprefix("module.")][rows], f"rows of {name}")
    assert_same(grads.norms(), expected.norms()[rows], "norms")
    parts = expected.norms(per_parameter=True)
    for name, norms in grads.norms(per_parameter=True).items():
        assert_same(norms, parts[name.removeprefix("module.")][rows], f"norms of {name}")
    assert_same(grads.clip_factors(limit), expected.clip_factors(limit)[rows], "factors")
    assert_same(grads.gram(), expected.gram()[rows][:, rows], "gram")
    direction = {name: torch.ones(part.shape[1:]).double() for name, part in expected.dense().items()}
    named = dict(zip(grads.names, direction.values(), strict=True))
    assert_same(grads.dot(named), expected.dot(direction)[rows], "dot")
    assert_same_sums(grads.clip(limit), expected.clip(limit), model, "clip")
    assert_same_sums(grads.clip(limit, per_parameter=True), expected.clip(limit, per_parameter=True), model, "by part")
    assert_same_sums(grads.sum(weights[rows]), expected.sum(weights), model, "sum")
    assert_same_sums(grads.mean(), expected.mean(), model, "mean")
    assert_same_sums(grads.second_moment(), expected.second_moment(), model, "second moment")
    assert_same_sums(grads.variance(), expected.variance(), model, "variance")
    assert_same(grads.noise_scale(), expected.noise_scale(), "noise scale")
    if model is not getattr(model, "module", model):
        return  # projections depend on the names of the parameters, which DistributedDataParallel changes
    assert_same(grads.project(8), expected.project(8)[rows], "projection")


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("units", UNITS)
@in_two_processes
def test_every_answer(kind: str, units: str) -> None:
    ids, own = UNITS[units]
    batch, model, rank = make_batch(*map(len, ids)), make_model(kind), dist.get_rank()
    reduction = "sum" if kind == "ddp" else "mean"
    expected = record_alone(batch, ids[0] + ids[1], unit_reduction=reduction)
    grads = batch.record_own(model, units=ids[rank], unit_reduction=reduction)
    check_every_answer(grads, expected, own[rank], model)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize(("ids", "own"), [
    ([[5, 1, 5, 5], [5, 3]], [[0, 1, 2, 4, 5, 6], [3]]),
    ([[0, 1, 2, 3, 4, 5, 6], []], [[0, 1, 2, 3, 4, 5, 6], []]),  # nothing is split in the first process
    ([[], [0, 1, 2, 3, 4, 5, 6]], [[], [0, 1, 2, 3, 4, 5, 6]]),
])  # fmt: skip
@in_two_processes
def test_units_without_samples_have_a_row_in_the_first_process(
    kind: str, ids: list[list[int]], own: list[list[int]]
) -> None:
    batch, model, rank = make_batch(*map(len, ids)), make_model(kind), dist.get_rank()
    expected = record_alone(batch, ids[0] + ids[1], num_units=7)
    grads = batch.record_own(model, units=ids[rank], num_units=7)
    check_every_answer(grads, expected, own[rank], model)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("units", ["whole", "ragged", "no samples in the first"])
@in_two_processes
def test_streamed_answers(units: str, kind: str) -> None:
    ids, own = UNITS[units]
    batch, rank = make_batch(*map(len, ids)), dist.get_rank()
    expected = record_alone(batch, ids[0] + ids[1])
    rows = [expected.units.index(unit) for unit in own[rank]]
    limit = float(expected.norms().median())
    model = make_model(kind)
    for keep_grad in (False, True):
        found = batch.record_own(model, units=ids[rank], keep="norms", keep_grad=keep_grad)
        assert_same(found.norms(), expected.norms()[rows], "norms")
        if keep_grad and ids[rank]:
            total = [part[rows].sum(0).flatten() for part in expected.dense().values()]
            assert_same(found.norm_of_sum(), torch.cat(total).norm(), "norm of the sum")
        for passes in (1, 2, None):
            options: dict[str, Any] = {"keep": "clip", "max_norm": limit, "passes": passes}
            memory = {} if passes else {"memory": 10**9 * (1 - rank)}  # the second process needs two passes
            found = batch.record_own(model, units=ids[rank], keep_grad=keep_grad, **options, **memory)
            assert_same(found.norms(), expected.norms()[rows], "norms")
            assert_same_sums(found.clip(), expected.clip(limit), model, f"clip in {passes} passes")


@in_two_processes
def test_two_backward_passes_are_added_up() -> None:
    batch, ids, rank = make_batch(4, 2), [[5, 2, 5, 5], [5, 3]], dist.get_rank()
    model = make_model("ddp")
    expected = record_alone(batch, ids[0] + ids[1])
    with record(model, units=ids[rank], loss_reduction="mean") as grads:
        loss = batch.compute_loss(model)
        (0.25 * loss).backward(retain_graph=True)
        (0.75 * loss).backward()
    assert_same(grads.norms(), expected.norms()[[[0, 2], [1]][rank]], "norms")


@pytest.mark.parametrize("nonfinite", ["zero", "raise"])
@in_two_processes
def test_unit_with_a_part_that_is_not_finite(nonfinite: Any) -> None:
    """The part is in the second process, and the row in the first."""
    model = DistributedDataParallel(nn.Linear(3, 2).double())
    rank = dist.get_rank()
    x = torch.arange(9.0).view(3, 3).double() + rank
    if rank == 1:
        x[0, 0] = torch.inf
    with record(model, units=[[0, 1, 1], [1, 2, 3]][rank], nonfinite=nonfinite, verify=False) as grads:
        model(x).sum(1).mean().backward()
    if nonfinite == "raise" and rank == 0:
        with pytest.raises(PerSampleError, match="not finite"):
            grads.norms()
    else:
        assert grads.norms().isfinite().all()
    if nonfinite == "zero":
        assert grads.nonfinite_count == 1 - rank
        used = torch.stack([torch.arange(3.0), torch.arange(3.0, 6.0) + 1, torch.arange(6.0, 9.0) + 1]).double()
        assert_same(grads.sum()["module.weight"], used.sum(0).expand(2, 3), "sum of the finite units")


@in_two_processes
def test_rows_that_do_not_fit_are_refused_in_both_processes() -> None:
    batch, rank = make_batch(4, 2), dist.get_rank()
    model = make_model("ddp")
    free = 10**9 if rank else 1000  # the row of the unit would be in the first process
    with (
        patch.object(split_units, "find_free_memory", lambda devices: free),
        pytest.raises(PerSampleError, match=r"1 units \(such as 5\) have samples in several processes"),
        record(model, units=[[5, 2, 5, 5], [5, 3]][rank]),
    ):
        batch.compute_loss(model).backward()


@in_two_processes
def test_units_of_watched_steps() -> None:
    """The units are given by a function, and differ from step to step."""
    batch, rank, found = make_batch(4, 2), dist.get_rank(), []
    model = make_model("ddp")
    steps = [[[5, 2, 5, 5], [5, 3]], [[1, 1, 2, 2], [2, 1]]]
    now: list[int] = []
    with watch(model, lambda grads: found.append(grads.norms()), units=lambda size: now, loss_reduction="mean"):
        for ids in steps:
            now[:] = ids[rank]
            batch.compute_loss(model).backward()
    for ids, norms, rows in zip(steps, found, [[[0, 2], [1]], [[0, 1], []]], strict=True):
        assert_same(norms, record_alone(batch, ids[0] + ids[1]).norms()[rows[rank]], "norms")
