"""Settings of the allocator that hold inside a block."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from persample._internal import allocator
from persample._internal.allocator import keep_freed_memory

# Allocates and frees two large tensors in each step, and prints the pages that the system has cleared for ten steps.
# The thresholds are those with which glibc starts; it raises them by itself in some processes.
COUNT = """
import contextlib, ctypes, resource, sys, torch
for parameter in (-1, -3):
    ctypes.CDLL(None).mallopt(parameter, 2**17)
from persample._internal.allocator import keep_freed_memory
def step():
    parts = [torch.zeros(2**20) for _ in range(2)] + [torch.zeros(2**16) for _ in range(8)]
with keep_freed_memory() if sys.argv[1] == "keep" else contextlib.nullcontext():
    step(), step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        step()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_freed_memory_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in allocator._USER_SETTINGS:
        monkeypatch.delenv(name, raising=False)
    counts = {}
    for mode in ("keep", "default"):
        done = subprocess.run([sys.executable, "-c", COUNT, mode], capture_output=True, text=True, check=True)
        counts[mode] = int(done.stdout)
    assert counts["keep"] < 100 < counts["default"], counts


@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"])
def test_settings_of_the_user_stay(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "1000000")
    assert allocator._find_glibc() is None
    with keep_freed_memory():
        pass


def test_errors_leave_the_block() -> None:
    with pytest.raises(ValueError, match="inside"), keep_freed_memory():
        raise ValueError("inside")
