"""The code of the README and of the docs runs as printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from persample.expanded_weights import HANDLED_FUNCTIONS

README = Path(__file__).parents[2] / "README.md"


def blocks_of(page: Path) -> list[str]:
    """The Python code on a page."""
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


def test_the_code_of_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    before = dict(HANDLED_FUNCTIONS)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.LayerNorm(5))
    w, gain = torch.randn(6, 4, requires_grad=True), torch.randn(4, requires_grad=True)
    x, y = torch.randn(3, 4), torch.tensor([0, 4, 2])
    names = {
        "torch": torch, "model": model, "x": x, "y": y, "w": w,
        "dataset": TensorDataset(torch.randn(40, 4), torch.arange(40) % 5),
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "loader": DataLoader(TensorDataset(x, y)),
    }  # fmt: skip
    blocks = blocks_of(README)
    assert len(blocks) >= 3
    try:
        for block in blocks:
            exec(block, names)  # as a reader would paste it
            names |= {"x": x, "y": y}
        assert (tmp_path / "scan" / "report.html").exists()
        assert w.grad_sample.shape == (3, 6, 4)
        assert all(p.grad is not None for p in model.parameters())
        torch.mul(torch.ones(3, 2, 4), names["persample"].ExpandedWeight(gain, 3, "sum")).sum().backward()
        assert torch.equal(gain.grad_sample, torch.full((3, 4), 2.0))
    finally:
        HANDLED_FUNCTIONS.clear()
        HANDLED_FUNCTIONS.update(before)


def test_the_code_about_scans_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Linear(4, 5)
    for epoch in (1, 2):
        torch.save(model.state_dict(), f"epoch{epoch}.pt")
    dataset = TensorDataset(torch.randn(40, 4), torch.arange(40) % 5)
    names = {"model": model, "loss_fn": torch.nn.CrossEntropyLoss(), "dataset": dataset, "test_batch": dataset[:3]}
    for block in blocks_of(README.parent / "docs" / "scan.md"):
        exec(block, names)
    assert Path("scans/mine/report.html").exists()
