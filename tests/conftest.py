from collections.abc import Iterator

import pytest
import torch

from persample.rules.registry import FURTHER_RULES, HANDLED_FUNCTIONS
from tests.support.processes import TwoProcesses


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def restore_rules() -> Iterator[None]:
    """Remove the rules that a test has registered."""
    registries = [(registry, dict(registry)) for registry in (HANDLED_FUNCTIONS, FURTHER_RULES)]
    yield
    for registry, before in registries:
        registry.clear()
        registry.update(before)


@pytest.fixture(scope="session")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoProcesses]:
    """Two processes for the tests of `in_two_processes`."""
    both = TwoProcesses(tmp_path_factory.mktemp("processes"))
    yield both
    both.stop()
