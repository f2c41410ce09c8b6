from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from persample import _torch
from persample.isolation import RowsBefore
from persample.rules.registry import FURTHER_RULES, HANDLED_FUNCTIONS
from tests.support.processes import TwoProcesses

# The same examples in each run.
settings.register_profile("fixed", derandomize=True)
settings.load_profile("fixed")

# Some warnings of torch come once in a process: which test sees them must not depend on the order of the tests.
torch.set_warn_always(True)


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def end_private_loops() -> Iterator[None]:
    """A loop that a test leaves with an unused batch follows its rows until the garbage collector frees the loop."""
    yield
    for mode in _torch.get_function_modes():
        if isinstance(mode, RowsBefore):
            mode.stop()


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
