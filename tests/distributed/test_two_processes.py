"""The tests that run in two processes report the failure of each process."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from tests.support import processes as runner
from tests.support.processes import TwoProcesses, in_two_processes


def fail_in_one_process() -> None:
    assert dist.get_rank() == 0, "wrong numbers"
    dist.barrier()


@pytest.mark.xdist_group("two processes")
def test_failure_of_one_process_is_reported(processes: TwoProcesses, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other process waits for the failed one, and is stopped."""
    monkeypatch.setattr(runner, "GRACE", 0.5)
    with pytest.raises(pytest.fail.Exception) as caught:
        processes.run(fail_in_one_process)
    first, second = str(caught.value).split("\n\nrank 1: ")
    assert first.startswith("rank 0: ") and "waiting for the other process" in first
    assert second.startswith("Traceback") and "AssertionError: wrong numbers" in second


@in_two_processes
def test_processes_start_again_after_a_failure() -> None:
    assert dist.get_world_size() == 2
    dist.barrier()
