"""A scan of samples that influence each other: contributions, by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import persample
from persample.scanning import ScanError

B, D = 4, 3
COUPLED: Any = "contributions"


def compute_losses(model: nn.Module, batch: Any) -> Tensor:
    one, other = (F.normalize(model(x), dim=1) for x in batch)
    return F.cross_entropy(one @ other.T / 0.2, torch.arange(len(one)), reduction="none")


def make() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(D, 5), nn.Tanh(), nn.Linear(5, 4)).double()
    return model, tuple(torch.randn(2, 2 * B, D, dtype=torch.float64))  # type: ignore[return-value]


def test_norms_are_those_of_contributions(tmp_path: Path) -> None:
    model, data = make()
    found = persample.scan(
        model, compute_losses, data, out=tmp_path, batch_size=B, project=8, coupled=COUPLED, progress=False
    )
    for start in (0, B):
        batch = [x[start : start + B] for x in data]
        with persample.record(model, coupled=COUPLED) as grads:
            compute_losses(model, batch).sum().backward()
        norms = torch.from_numpy(found.column("norm")[start : start + B])
        torch.testing.assert_close(norms.double(), grads.norms(), rtol=1e-5, atol=0)
    assert json.loads((tmp_path / "scan.json").read_text())["coupled"] == "contributions"
    assert "contributions" in repr(found) and not any("self_influence" in name for name in found.rankings)
    assert "contributions" in found.report(data=data).read_text()
    opened = persample.Scan(tmp_path, model, compute_losses)
    for ask in (opened.influence, opened.scores, lambda batch: opened.self_influence()):
        with pytest.raises(ScanError, match=r"Influence is not available.*coupled='contributions'"):
            ask([x[:2] for x in data])
    with pytest.raises(ScanError, match="cannot take other data"):
        persample.scanning.rescan(opened, model, compute_losses, data, before=data, out=tmp_path / "new")


@pytest.mark.parametrize(
    "loss_fn, options, message",
    [
        (lambda m, b: compute_losses(m, b).mean(), {}, "one loss per sample"),
        (compute_losses, {"nonfinite": "keep"}, "requires nonfinite='raise'"),
        (compute_losses, {"quantities": ["self_influence"]}, "no gradient of a loss"),
    ],
)
def test_what_has_no_meaning_is_refused(loss_fn: Any, options: dict[str, Any], message: str) -> None:
    model, data = make()
    with pytest.raises(ScanError, match=message):
        persample.scan(model, loss_fn, data, batch_size=B, project=8, coupled=COUPLED, progress=False, **options)
    assert not any(p.grad is not None for p in model.parameters())


def test_the_default_refuses_and_names_it() -> None:
    model, data = make()
    with pytest.raises(persample.PerSampleError, match="coupled='contributions'"):
        persample.scan(model, compute_losses, data, batch_size=B, project=8, progress=False)
