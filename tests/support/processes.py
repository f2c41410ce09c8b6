"""Tests that run in two processes at once, as distributed training does.

`in_two_processes` makes a pytest test of a function that both processes run. The processes are started once and shared
by all such tests of a session.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import coverage
import pytest
import torch
from torch.torch_version import TorchVersion

from tests.support.paths import ROOT

RANKS = (0, 1)
GRACE = 20.0  # seconds that the other process has to answer when one has failed; it may wait for the failed one


def in_two_processes(check: Callable[..., None]) -> Any:
    """Make a pytest test that runs `check` in two processes of one gloo process group, and reports both.

    Arguments, as from `pytest.mark.parametrize`, must be JSON values. Fixtures are not available inside the function.
    """
    own = list(inspect.signature(check).parameters.values())
    fixture = inspect.Parameter("processes", inspect.Parameter.POSITIONAL_OR_KEYWORD)

    @functools.wraps(check)
    def test(processes: TwoProcesses, **arguments: Any) -> None:
        processes.run(check, **arguments)

    test.__signature__ = inspect.Signature([fixture, *own])  # type: ignore[attr-defined]
    return pytest.mark.xdist_group("two processes")(test)


class TwoProcesses:
    """Two processes that run functions together. They start with the first function, and again after a failure."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._workers: list[subprocess.Popen[str]] = []
        self._starts = 0

    def run(self, function: Callable[..., Any], **arguments: Any) -> None:
        """Call a function of a module in both processes; fail with the traceback of each process in which it failed."""
        if not self._workers:
            self._start()
        name = {"module": function.__module__, "function": function.__qualname__}
        failures = {rank: text for rank, text in self._ask({**name, "arguments": arguments}).items() if text}
        if failures:
            self._kill()
            _skip_if_torch_lacks_a_name(failures.values())
            pytest.fail("\n\n".join(f"rank {rank}: {text}" for rank, text in sorted(failures.items())), pytrace=False)

    def stop(self) -> None:
        """End the processes, which write their coverage data on the way."""
        for worker in self._workers:
            assert worker.stdin is not None
            worker.stdin.close()
        for worker in self._workers:
            try:
                worker.wait(timeout=60)
            except subprocess.TimeoutExpired:
                worker.kill()
        self._workers = []

    def _start(self) -> None:
        self._starts += 1
        store = self._directory / f"store{self._starts}"  # a file, so that no port has to be free
        for rank in RANKS:
            with self._log(rank).open("w") as log:
                command = [*_python(), "tests.support.worker", str(rank), str(len(RANKS)), str(store)]
                self._workers.append(_start(command, stdin=subprocess.PIPE, stderr=log))

    def _log(self, rank: int) -> Path:
        return self._directory / f"stderr{self._starts}.{rank}"

    def _ask(self, request: Mapping[str, Any]) -> dict[int, str | None]:
        """What each process answers: None, or the traceback."""
        for worker in self._workers:
            assert worker.stdin is not None
            try:
                worker.stdin.write(json.dumps(request) + "\n")
                worker.stdin.flush()
            except BrokenPipeError:  # it has ended, which reading its answer shows
                pass
        waiting = {worker.stdout: rank for rank, worker in zip(RANKS, self._workers, strict=True)}
        answers: dict[int, str | None] = {}
        deadline: float | None = None
        while waiting:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready, _, _ = select.select(list(waiting), [], [], left)
            if not ready:
                return answers | dict.fromkeys(waiting.values(), "no answer, perhaps waiting for the other process")
            for pipe in ready:
                rank, line = waiting.pop(pipe), pipe.readline()
                answers[rank] = json.loads(line) if line else f"the process ended:\n{self._log(rank).read_text()}"
                if answers[rank] is not None and deadline is None:
                    deadline = time.monotonic() + GRACE
        return answers

    def _kill(self) -> None:
        for worker in self._workers:
            worker.kill()
            worker.wait()
        self._workers = []


def _skip_if_torch_lacks_a_name(failures: Collection[str]) -> None:
    """Skip a test of a feature that the installed torch is too old for. The pinned torch has all names."""
    missing = [re.search(r"needs ([\w.]+), a private name of torch that torch \S+ does not have", f) for f in failures]
    if any(missing) and not has_all_names():
        pytest.skip(next(f"torch {torch.__version__} has no {found[1]}" for found in missing if found))


def has_all_names() -> bool:
    """Whether the installed torch is the version of the constraints, or a newer one."""
    pinned = re.search(r"^torch==(.*)$", (ROOT / "constraints.txt").read_text(), re.M)
    assert pinned is not None
    return TorchVersion(torch.__version__) >= pinned[1]


def torchrun(module: str, *arguments: str, restarts: int = 0) -> str:
    """Run a module in two processes with torchrun, and return what they print."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(len(RANKS))]
    launcher += ["--max-restarts", str(restarts)]
    command = [*launcher, *_python()[1:], module, *arguments]
    process = _start(command, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        return process.communicate()[0]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def _python() -> list[str]:
    """The command that runs a module, and measures its coverage if that of this process is measured."""
    measured = coverage.Coverage.current() is not None
    return [sys.executable, "-m", *(["coverage", "run", "--parallel-mode", "-m"] if measured else [])]


def _start(command: list[str], **options: Any) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, **options)
