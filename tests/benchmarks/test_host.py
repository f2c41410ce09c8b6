"""The benchmark of host time: it measures what it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import host


@pytest.mark.parametrize(("name", "parameters"), [("MLP", 6), ("ResNet, 66 parameters", 66), ("GPT, 12 layers", 150)])
def test_models_have_the_named_sizes(name: str, parameters: int) -> None:
    model, _, _ = host.MODELS[name]()
    assert len(list(model.parameters())) == parameters


def test_result_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(host, "MODELS", {"MLP": host.make_mlp})
    monkeypatch.setattr(host, "RESULT", tmp_path / "host.json")
    monkeypatch.setattr("sys.argv", ["host", "--rounds", "2", "--write"])
    host.main()
    assert json.loads((tmp_path / "host.json").read_text())["MLP"]["ratio"] > 0
