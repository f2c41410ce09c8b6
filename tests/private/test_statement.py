"""Statements of privacy: complete, computed again by readers, and refused if a condition was not met."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from persample.cli import main
from persample.private import AuditResult, PrivacyEngine, audit
from persample.private.errors import PrivateTrainingError
from tests.support.audited import Training

pytestmark = pytest.mark.filterwarnings("ignore")  # of Opacus

AUDIT = AuditResult(0.4, 9.0, 1e-5, 0.95, "one run", "gradient", None, {"canaries": 100}, [1.0], [0.0])


def train(accountant: str = "rdp", noise: float = 1.0, steps: int = 4, **options: Any) -> PrivacyEngine:
    engine, model = PrivacyEngine(accountant=accountant), nn.Linear(5, 3)
    data = TensorDataset(torch.randn(64, 5), torch.randint(3, (64,)))
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), noise_multiplier=noise, max_grad_norm=1.0,
        data_loader=DataLoader(data, batch_size=16), **options,
    )  # fmt: skip
    for (x, y), _ in zip(loader, range(steps), strict=False):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        if options.get("grad_sample_mode") == "no_op":
            for p in model.parameters():
                p.grad_sample = torch.zeros(len(x), *p.shape)
        optimizer.step()
    return engine


@pytest.mark.parametrize("accountant", ["rdp", "prv"])
def test_statement_is_written_and_computed_again(
    accountant: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine, path = train(accountant), tmp_path / "privacy.json"
    engine.write_statement(path, 1e-5, audit=AUDIT)
    statement = json.loads(path.read_text())
    assert statement["guarantee"]["epsilon"] == engine.get_epsilon(1e-5)
    assert statement["guarantee"]["unit"] == "one index of the data set"
    assert statement["accounting"]["history"] == [[1.0, 0.25, 4]] and statement["algorithm"]["steps"] == 4
    assert sum(statement["verification"]["backward passes of this process"].values()) == 4
    assert statement["audit"]["epsilon"] == 0.4 and "scores_in" not in statement["audit"]
    assert main(["privacy-statement", str(path)]) == 0
    printed = capsys.readouterr().out
    assert "verified with 2 samples: 4" in printed and "is as" not in printed and ", as stated." in printed
    assert main(["privacy-statement", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["is as stated"] is True


@pytest.mark.parametrize(
    "section, name, value", [("guarantee", "epsilon", 0.5), ("accounting", "history", [[1, 1, 9]])]
)
def test_changed_statement_is_found(
    section: str, name: str, value: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "privacy.json"
    train().write_statement(path, 1e-5)
    statement = json.loads(path.read_text())
    statement[section][name] = value
    path.write_text(json.dumps(statement))
    assert main(["privacy-statement", str(path)]) == 1
    assert f"but {statement['guarantee']['epsilon']} is stated" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["", "[]", '{"format": 2}', '{"format": 1}', None])
def test_other_files_are_refused(text: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "privacy.json"
    if text is not None:
        path.write_text(text)
    assert main(["privacy-statement", str(path)]) == 2
    assert capsys.readouterr().err.startswith("persample privacy-statement: error: ")


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"steps": 0}, "has made no step"),
        ({"poisson_sampling": False}, "no Poisson samples"),
        ({"noise_generator": torch.Generator()}, "noise_generator, whose seed"),
        ({"noise": 0.0}, "no noise"),
        ({"accountant": "gdp"}, "'gdp' computes an approximation"),
        ({"grad_sample_mode": "no_op"}, "filled in from outside"),
    ],
)
def test_unmet_conditions_are_refused(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(PrivateTrainingError, match=message):
        train(**settings).write_statement(tmp_path / "privacy.json", 1e-5)
    assert not list(tmp_path.iterdir())


def test_failed_audit_is_refused_and_a_right_one_is_part(tmp_path: Path) -> None:
    engine = train()
    with pytest.raises(PrivateTrainingError, match="the audit contradicts"):
        engine.write_statement(tmp_path / "privacy.json", 1e-5, audit=replace(AUDIT, claimed=0.1))
    engine.write_statement(tmp_path / "privacy.json", 1e-5, audit=audit(Training()))
    tests = json.loads((tmp_path / "privacy.json").read_text())["audit"]["tests"]
    assert {"noise", "clipping"} <= {test["name"] for test in tests}


def test_trainings_of_one_engine_must_protect_the_same_units(tmp_path: Path) -> None:
    engine = train()
    engine.optimizers += train().optimizers
    engine.write_statement(tmp_path / "privacy.json", 1e-5)
    found = json.loads((tmp_path / "privacy.json").read_text())
    assert found["algorithm"]["bound"] == [1.0, 1.0]
    assert sum(found["verification"]["backward passes of this process"].values()) == 8
    engine.optimizers += train(unit_ids=torch.arange(64) // 2).optimizers
    with pytest.raises(PrivateTrainingError, match="different units"):
        engine.write_statement(tmp_path / "privacy.json", 1e-5)


@pytest.mark.parametrize(
    "options, unit",
    [({"unit_ids": torch.arange(64) // 2}, "all examples that unit_ids"), ({"units": 1}, "with 1 samples made of it")],
)
def test_unit_is_stated(options: dict[str, Any], unit: str, tmp_path: Path) -> None:
    train(**options).write_statement(tmp_path / "privacy.json", 1e-5)
    assert unit in json.loads((tmp_path / "privacy.json").read_text())["guarantee"]["unit"]
