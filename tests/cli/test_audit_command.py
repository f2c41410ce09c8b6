"""`persample audit`."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from persample.cli import main
from tests.support.paths import ROOT

pytestmark = pytest.mark.filterwarnings("ignore")  # of Opacus

TRAINING = """
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from persample.private import PrivacyEngine

DATA = TensorDataset(torch.randn(32, 10), torch.randint(4, (32,)))

def train(run, noise=2.0, model=None):
    print("a line of the user's own")
    model, engine = model or nn.Sequential(nn.Linear(10, 400), nn.Linear(400, 4)), PrivacyEngine(accountant="rdp")
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), noise_multiplier=noise, max_grad_norm=1.0,
        data_loader=DataLoader(run.add_canaries(DATA), batch_size=32))
    run.observe(optimizer, sample_rate=1 / len(loader), model=model, loss_fn=F.cross_entropy)
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return engine

def leaks(run):
    train(run, noise=0.01)
    return 0.5

def mixes(run):
    class Mixes(nn.Linear):
        def forward(self, x):
            return super().forward(x - x.mean(0))
    train(run, model=Mixes(10, 4))

def fails(run):
    raise ValueError("no data today")

def takes_nothing():
    pass
"""


@pytest.fixture(autouse=True)
def training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "training.py").write_text(TRAINING)
    monkeypatch.setattr("persample.private.noise.urandom", random.Random(0).randbytes)  # the same noise in each run


def test_audit_in_text_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "training.py:train", "--count", "40", "--plot", "plots/audit.svg"]) == 0
    printed = capsys.readouterr().out
    assert "claimed epsilon" in printed and "No contradiction to the claim was found." in printed
    assert "lower bound" in Path("plots/audit.svg").read_text()
    options = ["--canaries", "input", "--runs", "20", "--delta", "1e-3", "--confidence", "0.9", "--seed", "3", "--json"]
    assert main(["audit", "training.py:train", *options]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["method"] == "two worlds" and found["canaries"] == "input" and not found["exceeds"]
    assert len(found["scores_in"]) == len(found["scores_out"]) == 10 and found["claimed"] > 0


def test_leak_has_an_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "training.py:leaks", "--count", "40"]) == 1
    assert "leaks more than it claims" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, code, message",
    [
        (["training.py:missing"], 2, "has no function 'missing'"),
        (["training.py:takes_nothing"], 2, "must be callable as takes_nothing(run), but takes ()"),
        (["training.py:fails"], 2, "ValueError: no data today"),
        (["training.py:train", "--count", "9999"], 3, "too few for 9999 canaries"),
        (["training.py:train", "--runs", "3"], 3, "runs must be 1, or at least 20"),
        (["training.py:mixes", "--count", "9"], 3, "training.py:mixes: "),
    ],
)
def test_errors_are_one_line(arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", *arguments]) == code
    printed = capsys.readouterr().err
    assert message in printed and printed.count("\n") == 1 and printed.startswith("persample audit: error: ")


def test_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(ROOT / "examples/cookbook/audit_training.py") + ":train", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert 0 <= found["epsilon"] < found["claimed"]
