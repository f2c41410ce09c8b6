"""Guards: what does not learn in a training run is named after the first measured steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import persample

pytestmark = pytest.mark.quick


class LowRank(nn.Module):
    """A frozen linear layer with an adapter, which is perhaps not called."""

    def __init__(self, is_called: bool = True) -> None:
        super().__init__()
        self.base, self.is_called = nn.Linear(4, 4).requires_grad_(False), is_called
        self.down, self.up = nn.Linear(4, 2, bias=False), nn.Linear(2, 4, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + (self.up(self.down(x)) if self.is_called else 0.0)


class Experts(nn.Module):
    """Three linear maps of which the last one gets no tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4, 4))

    def forward(self, x: Tensor) -> Tensor:
        gate = (x[:, :1] > 0).to(x.dtype)
        first, second = (torch.einsum("bi,io->bo", x, self.weight[k]) for k in (0, 1))
        return gate * first + (1 - gate) * second


def train(model: nn.Module, trained: Any = None, rate: float = 0.1, steps: int = 8, **options: Any) -> list[str]:
    torch.manual_seed(1)
    parameters = [p for p in model.parameters() if p.requires_grad] if trained is None else trained
    optimizer = torch.optim.SGD(parameters, lr=rate)
    with persample.monitor(model, every=1, **options) as watching:
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(8, 4, dtype=next(model.parameters()).dtype)).square().mean().backward()
            optimizer.step()
    return [text for found in watching.history for text in found.warnings]


def make_partly_trained() -> list[str]:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    return train(model, model[0].parameters())


def make_rounded() -> list[str]:
    return train(nn.Linear(4, 4).bfloat16(), rate=1e-6)


CASES: dict[str, tuple[Callable[[], list[str]], list[str]]] = {
    "a model that learns": (lambda: train(nn.Linear(4, 4)), []),
    "an adapter that starts at zero": (lambda: train(LowRank()), []),
    "an adapter that is not called": (
        lambda: train(nn.Sequential(nn.Linear(4, 4), LowRank(is_called=False))),
        ["1.down.weight, 1.up.weight: no sample has had a gradient here"],
    ),
    "weights that are not in the optimizer": (make_partly_trained, ["1.weight, 1.bias: has gradients and"]),
    "updates that are lost in rounding": (make_rounded, ["weight, bias: has gradients and has not moved"]),
    "an expert without tokens": (lambda: train(Experts()), ["weight[2]: has not moved"]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_does_not_learn_is_named(name: str) -> None:
    torch.manual_seed(0)
    make, expected = CASES[name]
    found = make()
    assert len(found) == len(expected)
    assert all(text.startswith(start) for text, start in zip(found, expected, strict=True))


def test_samples_without_a_gradient_are_counted() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    with persample.monitor(model, every=1) as watching:
        (model(torch.randn(8, 4)).squeeze(1) * (torch.arange(8) > 5)).sum().backward()
    assert watching.history[0].zero == 6
    assert watching.history[0].warnings == ["6 of 8 samples have no gradient at all"]


def test_private_training_is_guarded() -> None:
    """The noise moves a weight that no sample reaches: only its gradients tell."""
    from persample.private import PrivacyEngine

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), LowRank(is_called=False))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    data = torch.utils.data.TensorDataset(torch.randn(64, 4))
    model, optimizer, loader = PrivacyEngine().make_private(
        module=model, optimizer=optimizer, data_loader=torch.utils.data.DataLoader(data, batch_size=8),
        noise_multiplier=1.0, max_grad_norm=1.0, poisson_sampling=False,
    )  # fmt: skip
    with persample.monitor(model, every=1) as watching:
        for (x,) in loader:
            optimizer.zero_grad()
            model(x).square().mean(1).mean().backward()
            optimizer.step()
    optimizer.release()
    warnings = [text for found in watching.history for text in found.warnings]
    assert warnings == ["1.down.weight, 1.up.weight: no sample has had a gradient here"]
