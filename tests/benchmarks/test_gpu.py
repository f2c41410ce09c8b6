"""The benchmark of GPUs, tried on a CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu, private
from benchmarks.check import check_engines
from benchmarks.engines import ENGINES, Engine
from benchmarks.workloads import Workload


class WrongNorms(ENGINES["ours"]):  # type: ignore[misc, name-defined]
    """Norms that are 5 % too large."""

    name = "wrong norms"

    def norms(self) -> torch.Tensor:
        return 1.05 * super().norms()


@pytest.fixture
def with_few_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "WITHOUT_LOOP", [ENGINES["ours"], ENGINES["torch.func"]])
    monkeypatch.setattr(private, "ENGINES", (private.Ours,))


@pytest.mark.usefixtures("with_few_engines")
def test_a_quick_run_writes_correct_results_and_the_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = gpu.main(["--device", "cpu", "--quick", "--output", str(tmp_path / "gpu.json")])
    written: dict[str, Any] = json.loads(path.read_text())
    assert {"steps", "waits", "private", "machine"} <= written.keys()
    assert {"processor", "torch", "device"} <= written["machine"].keys()
    (steps,) = written["steps"].values()
    for quantity in gpu.QUANTITIES:
        assert steps[quantity]["ours"]["ratio"] > 0, "measured only if correct"
    (waits,) = written["waits"].values()
    assert waits["clip"]["ops"] > 0
    (private_steps,) = written["private"].values()
    assert private_steps["ours"]["ratio"] > 0
    assert "Nothing was sent" in capsys.readouterr().out


@pytest.mark.usefixtures("with_few_engines")
def test_a_failure_is_named_in_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(workload: Workload) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(gpu, "count_waits", fail)
    path = gpu.main(["--device", "cpu", "--quick", "--rounds", "1", "--output", str(tmp_path / "gpu.json")])
    written = json.loads(path.read_text())
    assert "out of memory" in written["waits"]["GPT, tiny"]["text"]
    assert written["private"]["GPT, tiny"]["ours"]["ratio"] > 0, "the rest is measured"


def test_nothing_is_started_after_the_time(tmp_path: Path) -> None:
    path = gpu.main(["--device", "cpu", "--quick", "--minutes", "0", "--output", str(tmp_path / "gpu.json")])
    written = json.loads(path.read_text())
    assert all("minutes were over" in written[part]["GPT, tiny"]["failure"] for part in ("steps", "waits", "private"))


def test_a_device_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.accelerator.is_available():
        pytest.skip("there is one")
    with pytest.raises(SystemExit):
        gpu.main([])
    assert "--device cpu --quick" in capsys.readouterr().err


@pytest.mark.parametrize("engine", [ENGINES["ours"], WrongNorms])
def test_large_models_are_checked_without_rows(engine: type[Engine]) -> None:
    checked = check_engines(gpu.QUICK[0], [engine], ("norms", "clip"), gpu.LargeReference)
    failures = set(checked[engine.name].failures.values())
    assert failures == ({""} if engine is ENGINES["ours"] else {"wrong"})
