"""Influence and its evaluation from the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from persample import Scan
from persample.cli import main

TASKS = """
import torch
from torch import nn

torch.manual_seed(0)
x = torch.randn(70, 4)
y = (x[:, 0] > 0).long()


def to_scan():
    torch.manual_seed(0)
    return nn.Linear(4, 2), (x, y), nn.CrossEntropyLoss()


def test():
    return x[:2], y[:2]


def logit(model, batch):
    return model(batch[0])[:, 1]


def train(data, seed):
    torch.manual_seed(seed)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    for _ in range(20):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(data[0]), data[1]).backward()
        optimizer.step()
    return model


def to_evaluate():
    return train, (x[:50], y[:50]), (x[50:], y[50:]), nn.CrossEntropyLoss()
"""


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "influence_tasks.py").write_text(TASKS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


def query(capsys: pytest.CaptureFixture[str], *question: str) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert main(["query", "out", *question, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.usefixtures("tasks")
def test_questions_about_influence(capsys: pytest.CaptureFixture[str]) -> None:
    import influence_tasks as tasks

    assert main(["scan", "influence_tasks:to_scan", "--out", "out", "--project", "32", "--quiet"]) == 0
    model, _, loss_fn = tasks.to_scan()
    found = Scan("out", model, loss_fn)
    asked = ["influence", "influence_tasks:test", "--module", "influence_tasks:to_scan", "-k", "3"]
    for method in ("whitened", "trak", "tracin", "cosine"):
        answer = query(capsys, *asked, "--method", method, "--damping", "0.5")
        expected = found.influence(tasks.test(), 3, method, damping=0.5)
        assert [e["example"] for e in answer if e["pushes"] == "for"] == expected.for_ids.flatten().tolist()
    answer = query(capsys, *asked, "--measure", "influence_tasks:logit", "--parameters", "bi*")
    expected = found.influence(tasks.test(), 3, measure=tasks.logit, parameters=["bias"])
    assert [e["score"] for e in answer if e["pushes"] == "for"] == pytest.approx(expected.for_scores.flatten().tolist())
    own = query(capsys, "self-influence", "--method", "trak", "-k", "4")
    assert [e["example"] for e in own] == found.self_influence("trak", 4).ids.tolist()
    outliers = query(capsys, "outliers", "--damping", "0.01")
    assert [e["example"] for e in outliers] == found.outliers(damping=0.01).ids.tolist()


@pytest.mark.usefixtures("tasks")
@pytest.mark.parametrize("damping", ["0", "-1", "small", "inf", "nan"])
def test_wrong_damping(damping: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["query", "out", "outliers", f"--damping={damping}"])
    assert "expected a positive number or 'auto'" in capsys.readouterr().err


# ---- evaluate ----


@pytest.mark.usefixtures("tasks")
def test_evaluate(capsys: pytest.CaptureFixture[str]) -> None:
    command = [
        "evaluate",
        "influence_tasks:to_evaluate",
        "--subsets",
        "4",
        "--repeats",
        "2",
        "--project",
        "16",
        "--quiet",
    ]
    assert main([*command, "--methods", "whitened", "tracin"]) == 0
    output = capsys.readouterr().out
    assert "LDS over 4 subsets (2 trainings each) and 20 test samples" in output and "Flipped labels" in output
    assert main([*command, "--flipped", "0", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["lds"].keys() == {"tracin", "cosine", "whitened", "trak"} and not answer["mislabel_auc"]
    assert answer["lds"]["whitened"].keys() == {"value", "low", "high"}


@pytest.mark.usefixtures("tasks")
@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["influence_tasks:to_scan"], "must return (train, data, test_batch, loss_fn)"),
        (["influence_tasks:to_evaluate", "--subsets", "2"], "at least 3 subsets"),
        (["influence_tasks:to_evaluate", "--part", "1"], "part must be between 0 and 1"),
        (["influence_tasks:to_evaluate", "--methods", "magic", "--subsets", "3"], "method must be one of"),
    ],
)
def test_errors_of_evaluate(command: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", *command, "--quiet", "--project", "8"]) == 2
    assert message in capsys.readouterr().err
