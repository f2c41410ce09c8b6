from collections.abc import Iterator

import pytest

from persample.expanded_weights import HANDLED_FUNCTIONS


@pytest.fixture(autouse=True)
def restore_registry() -> Iterator[None]:
    """Remove the rules that a test has registered."""
    before = dict(HANDLED_FUNCTIONS)
    yield
    HANDLED_FUNCTIONS.clear()
    HANDLED_FUNCTIONS.update(before)
