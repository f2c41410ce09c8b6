"""record() under DDP and FSDP2: two processes, started by torchrun, run the checks of distributed_worker.py."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import coverage

ROOT = Path(__file__).parents[2]


def test_two_processes() -> None:
    assert_all_pass("tests.distributed.distributed_worker", at_least=10)


def assert_all_pass(worker: str, at_least: int) -> None:
    """All checks of a worker, on both processes."""
    path = ROOT / f"{worker.replace('.', '/')}.py"
    checks = re.findall(r"^def ((?:ddp|fsdp)_\w+)", path.read_text(), re.MULTILINE)
    assert len(checks) >= at_least
    output = torchrun(worker, *checks)
    for check in checks:
        for rank in (0, 1):
            assert f"{check} passed on {rank}" in output, output


def torchrun(module: str, *arguments: str) -> str:
    """What two processes print, which are measured if this one is."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    if coverage.Coverage.current() is not None:
        command += ["coverage", "run", "--parallel-mode", "-m"]
    process = subprocess.Popen(
        [*command, module, *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        return process.communicate(timeout=300)[0]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
