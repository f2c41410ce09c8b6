"""The noise of all tests of private training is the same in each run of the tests."""

import random

import pytest


@pytest.fixture(autouse=True)
def fixed_entropy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys of the noise differ from each other, but not between two runs of a test."""
    monkeypatch.setattr("persample.private.noise.urandom", random.Random(0).randbytes)
