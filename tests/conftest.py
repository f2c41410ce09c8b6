from collections.abc import Iterator

import pytest
import torch

from tests.support.processes import TwoProcesses


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoProcesses]:
    """Two processes for the tests of `in_two_processes`."""
    both = TwoProcesses(tmp_path_factory.mktemp("processes"))
    yield both
    both.stop()
