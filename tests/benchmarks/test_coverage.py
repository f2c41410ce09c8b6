"""The coverage tool: how many calls of a model are known, tried and refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import persample
from benchmarks import coverage
from benchmarks.coverage import Subject, list_subjects, main, measure
from tests.support.cases import Calls


def make_subject(forward: Callable[..., Tensor]) -> Subject:
    def run() -> None:
        model = Calls(forward, a=nn.Linear(4, 4), norm=nn.BatchNorm1d(4))
        with persample.record(model, loss_reduction="sum"):
            model(torch.randn(3, 4)).sum().backward()

    return Subject("test", "test", run)


def test_calls_are_known_tried_or_refused() -> None:
    known = measure(make_subject(lambda m, x: m.a(x).tanh()))
    assert (known.calls, known.tried.total(), known.refused.total()) == (3, 0, 0)  # linear, tanh, sum
    tried = measure(make_subject(lambda m, x: torch.block_diag(m.a(x))))
    assert (tried.calls, tried.tried) == (3, {"block_diag": 1})
    refused = measure(make_subject(lambda m, x: m.norm(x)))
    assert refused.calls == 1 and refused.refused == {"batch_norm": 1} and "SamplesMixed" in refused.error


def test_cached_calls_are_counted_too() -> None:
    subject = make_subject(lambda m, x: m.a(m.a(m.a(x))))
    subject.run()
    assert measure(subject).calls == 4


def test_models_of_the_zoo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    chosen = [s for s in list_subjects() if s.name in ("Llama, T == B", "encoder layer")]
    assert len(chosen) == 2
    monkeypatch.setattr(coverage, "list_subjects", lambda: chosen)
    monkeypatch.setattr(coverage, "RESULT", tmp_path / "coverage.json")
    main(["--write"])
    assert "all transformers" in capsys.readouterr().out
    found = json.loads((tmp_path / "coverage.json").read_text())
    assert found["all"]["calls"] > 100 and found["all"]["known"] == found["all"]["calls"]
    assert found["models"]["awkward modules"]["encoder layer"]["calls"] > 10


def test_published_share_of_tried_calls_is_below_one_percent() -> None:
    found = json.loads(coverage.RESULT.read_text())["all"]
    assert found["tried"] < 0.01 * found["calls"] and found["calls"] > 10_000
