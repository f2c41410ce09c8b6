"""Units under two processes: each process has the rows of its own units, and sums are over all."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from persample import PerSampleError, record
from tests.support.distributed import assert_same, assert_same_sums, make_batch, make_net, shard
from tests.support.processes import in_two_processes

UNITS = {0: [5, 2, 5, 5], 1: [7, 3]}


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@in_two_processes
def test_units_of_each_process(kind: str) -> None:
    rank, batch, net = dist.get_rank(), make_batch(4, 2), make_net()
    model = DistributedDataParallel(net, find_unused_parameters=True) if kind == "ddp" else shard(net)
    alone = make_net()
    with record(alone, units=UNITS[0] + UNITS[1], loss_reduction="mean") as expected:
        batch.compute_loss(alone, slice(None)).backward()
    own = [expected.units.index(unit) for unit in sorted(set(UNITS[rank]))]
    grads = batch.record_own(model, units=UNITS[rank])
    assert_same(grads.norms(), expected.norms()[own], "norms")
    limit = float(expected.norms().median())
    assert_same_sums(grads.clip(limit), expected.clip(limit), model, "clip")
    assert_same_sums(grads.mean(), expected.mean(), model, "mean")


@pytest.mark.parametrize(("options", "message"), [({}, r"Units \[5\] have samples"), ({"num_units": 9}, "num_units")])
@in_two_processes
def test_unit_in_two_processes_is_refused(options: dict[str, int], message: str) -> None:
    batch = make_batch(4, 2)
    model = DistributedDataParallel(make_net(), find_unused_parameters=True)
    units = [5, 2, 5, 5] if dist.get_rank() == 0 else [5, 3]
    with pytest.raises(PerSampleError, match=message), record(model, units=units, **options):
        batch.compute_loss(model).backward()
