"""Reuse and release of memory."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import persample
from persample import record
from persample.backward.collector import Collector
from persample.forward import Tracker
from persample.gradients import buffers
from persample.testing.oracle import compute_test_loss
from tests.support.case import Case
from tests.support.cases import CASES

CPU = torch.device("cpu")


def make_large() -> Tensor:
    return buffers.empty((600, 600), torch.float32, CPU)


@pytest.fixture(autouse=True)
def release_memory() -> Iterator[None]:
    persample.release_memory()
    yield
    persample.release_memory()


def test_freed_memory_is_reused() -> None:
    first = make_large()
    address = first.data_ptr()
    del first
    assert make_large().data_ptr() == address


@pytest.mark.parametrize("keep", [lambda t: t, lambda t: t[3], Tensor.untyped_storage, lambda t: t.view(-1)[5:9]])
def test_memory_in_use_is_not_reused(keep: Any) -> None:
    first = make_large().fill_(7)
    address, kept = first.data_ptr(), keep(first)
    del first
    others = [make_large().zero_() for _ in range(3)]
    assert len({address, *(t.data_ptr() for t in others)}) == 4
    if isinstance(kept, Tensor):
        assert bool((kept == 7).all())


def test_memory_of_another_size_is_not_reused() -> None:
    first = make_large()
    address = first.data_ptr()
    del first
    assert buffers.empty((600, 300), torch.float32, CPU).data_ptr() != address
    assert buffers.empty((600, 900), torch.float32, CPU).data_ptr() != address
    assert buffers.empty((300, 600), torch.float64, CPU).data_ptr() == address


def test_memory_is_released_on_request_and_after_some_rounds() -> None:
    kept, dropped = make_large(), make_large()
    del dropped
    assert persample.release_memory() == 600 * 600 * 4
    assert persample.release_memory() == 0
    del kept
    for _ in range(10):
        buffers.start_round()
    assert persample.release_memory() == 0


@pytest.mark.parametrize("allocations", range(1, 13))
def test_memory_that_the_collector_frees_at_any_time(allocations: int) -> None:
    """Also while free blocks are searched, counted and removed."""

    def age() -> None:
        for _ in range(buffers._PATIENCE + 2):
            buffers.start_round()

    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()  # so that collections are quick
    try:
        for use in (make_large, age, persample.release_memory):
            kept = [make_large() for _ in range(3)]
            garbage: list[Any] = [make_large()]
            garbage.append(garbage)
            gc.disable()
            del garbage, kept
            gc.set_threshold(gc.get_count()[0] + allocations, 1, 1)
            gc.enable()
            use()
    finally:
        gc.set_threshold(*thresholds)
        gc.enable()
        gc.unfreeze()


def test_dense_gradients_reuse_memory() -> None:
    model, x = nn.Linear(300, 300), torch.randn(8, 300)
    addresses = []
    for _ in range(3):
        with record(model, loss_reduction="sum") as grads:
            model(x).square().sum().backward()
        rows = grads.dense()
        again = grads.dense()
        assert rows["weight"].data_ptr() != again["weight"].data_ptr()
        torch.testing.assert_close(rows["weight"], again["weight"])
        addresses.append({rows["weight"].data_ptr(), again["weight"].data_ptr()})
        del rows, again
    assert addresses[0] == addresses[1] == addresses[2]


def find_recordings() -> list[Any]:
    """All parts of recordings that exist and are not frozen."""
    return [o for o in gc.get_objects() if type(o) in (Collector, Tracker)]


@pytest.mark.parametrize("keep", ["everything", "norms", "clip"])
@pytest.mark.parametrize("case", CASES[::7], ids=str)
def test_recordings_need_no_garbage_collection(case: Case, keep: Any) -> None:
    """A reference cycle in a recording would keep its activations until the next garbage collection."""
    if keep != "everything" and ("reentrant" in case.name or "complex" in case.name):
        pytest.skip("not for recordings of one quantity")
    module, args, kwargs = case.build()

    def step() -> None:
        options = {"max_norm": 1.0} if keep == "clip" else {}
        with record(module, **case.record_options, keep=keep, **options) as grads:
            compute_test_loss(module(*args, **kwargs), case.out_dim).backward()
        grads.norms()

    step()
    gc.disable()
    gc.freeze()  # what exists is not looked at: torch may keep the exceptions of other tests, and so their recordings
    try:
        step()
        assert not find_recordings()
    finally:
        gc.unfreeze()
        gc.enable()
