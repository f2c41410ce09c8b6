"""Freed memory is kept for the next step."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

# Allocates and frees large tensors in each step, and prints the pages that the system has cleared for ten steps.
COUNT = """
import resource, sys, torch
from persample._internal.memory import keep_freed_memory
def step():
    parts = [torch.zeros(2**20) for _ in range(2)] + [torch.zeros(2**16) for _ in range(8)]
if sys.argv[1] == "keep":
    keep_freed_memory()
step(), step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def count_cleared_pages(mode: str, **settings: str) -> int:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", COUNT, mode]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**environment, **settings})
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_freed_memory_is_used_again() -> None:
    assert count_cleared_pages("keep") < 100


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_settings_of_the_user_stay() -> None:
    assert count_cleared_pages("keep", MALLOC_TRIM_THRESHOLD_="131072", MALLOC_MMAP_THRESHOLD_="131072") > 1000
