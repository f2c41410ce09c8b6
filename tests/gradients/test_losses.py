"""Rows for each sample and loss, and comparisons of losses, against a loop in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from persample import PerSampleError, record, watch
from persample.testing.oracle import loop_gradients, perturb
from tests.support.answers import check_answers
from tests.support.modules import flatten_rows

pytestmark = pytest.mark.quick

B, T, D = 5, 3, 4


class TwoHeads(nn.Module):
    def __init__(self, reentrant: bool = False) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.first, self.body = nn.Linear(D, D), nn.Linear(D, D)
        self.layers = nn.ModuleList([nn.Linear(D, D) for _ in range(3)])
        self.a, self.b = nn.Linear(D, 2), nn.Linear(D, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.first(x)
        h = checkpoint(self.body, h, use_reentrant=True) if self.reentrant else self.body(h)
        for layer in self.layers:
            h = layer(h).tanh()
        return self.a(h), self.b(h)


LOSSES = {
    "a": lambda outputs: outputs[0].flatten(1).square().sum(1).mean(),
    "b": lambda outputs: outputs[1].flatten(1).sin().sum(1).sum(),
    "c": lambda outputs: (outputs[0].flatten(1).sum(1) - outputs[1].flatten(1).cos().sum(1)).mean(),
}


def make_case(reentrant: bool = False) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = TwoHeads(reentrant).double()
    perturb(model)
    return model, torch.randn(B, T, D, dtype=torch.float64)


def record_losses(model: nn.Module, x: Tensor, **options: Any) -> Any:
    with record(model, losses=list(LOSSES), **options) as grads:
        outputs = model(x)
        for name, loss in LOSSES.items():
            loss(outputs).backward(retain_graph=name != "c")
    return grads


def loop_losses(model: nn.Module, x: Tensor) -> dict[str, dict[str, Tensor]]:
    rows = {name: loop_gradients(model, x, lambda m, x, f=loss: f(m(x))) for name, loss in LOSSES.items()}
    zeros = {name: p.detach().new_zeros(B, *p.shape) for name, p in model.named_parameters()}
    return {name: {**zeros, **part} for name, part in rows.items()}


@pytest.mark.parametrize("reentrant", [False, True])
def test_every_answer_for_each_loss(reentrant: bool) -> None:
    model, x = make_case(reentrant)
    expected = loop_losses(model, x)
    for _ in range(2):
        grads = record_losses(model, x)
        for name in LOSSES:
            check_answers(grads[name], expected[name])
    assert grads["a"].loss_reduction == "mean" and grads["b"].loss_reduction == "sum"
    assert (len(grads), list(grads)) == (3, ["a", "b", "c"])


def test_comparisons_of_losses() -> None:
    model, x = make_case()
    grads = record_losses(model, x)
    rows = torch.stack([flatten_rows(part) for part in loop_losses(model, x).values()], 1)  # (B, losses, P)
    gram = rows @ rows.mT
    torch.testing.assert_close(grads.gram(), gram)
    norms = rows.norm(dim=2)
    torch.testing.assert_close(grads.cosines(), gram / (norms[:, :, None] * norms[:, None, :]))
    torch.testing.assert_close(grads.conflicts(), (gram < 0).double().mean(0))
    means = rows.mean(0)
    torch.testing.assert_close(grads.mean_gram(), means @ means.mT)
    weights = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    total = torch.cat([part.flatten() for part in grads.mean(weights).values()])
    torch.testing.assert_close(total, weights @ means)


@pytest.mark.parametrize(
    ("options", "members"),
    [
        ({"units": [1, 0, 1, 0, 1]}, [[1, 3], [0, 2, 4]]),
        ({"units": [3, 1, 3, 3, 3], "num_units": 5}, [[], [1], [], [0, 2, 3, 4], []]),
    ],
    ids=["ragged", "empty"],
)
def test_losses_of_units(options: dict[str, Any], members: list[list[int]]) -> None:
    model, x = make_case()
    grads, rows = record_losses(model, x, **options), loop_losses(model, x)
    units = {
        loss: {name: torch.stack([part[own].sum(0) for own in members]) for name, part in parts.items()}
        for loss, parts in rows.items()
    }
    for loss, expected in units.items():
        check_answers(grads[loss], expected)
    matrix = torch.stack([flatten_rows(part) for part in units.values()], 1)
    torch.testing.assert_close(grads.gram(), matrix @ matrix.mT)


def test_watched_model() -> None:
    """A step ends with the backward pass of the last loss."""
    model, x = make_case()
    expected, found = record_losses(model, x), []
    with watch(model, found.append, {"losses": list(LOSSES)}):
        for _ in range(2):
            outputs = model(x)
            for name, loss in LOSSES.items():
                loss(outputs).backward(retain_graph=name != "c")
    assert len(found) == 2
    torch.testing.assert_close(found[1].gram(), expected.gram())


def test_missing_and_further_passes_are_refused() -> None:
    model, x = make_case()
    with record(model, losses=["a", "b"]) as grads:
        LOSSES["a"](model(x)).backward()
    with pytest.raises(PerSampleError, match="1 of 2 backward passes"):
        grads.gram()
    with pytest.raises(PerSampleError, match="another one has begun"), record(model, losses=["a"]) as grads:
        outputs = model(x)
        LOSSES["a"](outputs).backward(retain_graph=True)
        LOSSES["b"](outputs).backward()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"losses": []}, "different names"),
        ({"losses": ["a", "a"]}, "different names"),
        ({"losses": "ab"}, "different names"),
        ({"losses": ["a"], "keep": "norms"}, "keep='everything'"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    model, _ = make_case()
    with pytest.raises(PerSampleError, match=message), record(model, **options):
        pass


def test_unknown_loss_is_refused() -> None:
    model, x = make_case()
    with pytest.raises(PerSampleError, match="not one of the losses"):
        record_losses(model, x)["d"]
