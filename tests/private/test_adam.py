"""DP-AdamBC: the second moment without that of the noise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from persample import PerSampleError
from persample.private import AdamBC, BandedInverse, PrivacyEngine

pytestmark = pytest.mark.filterwarnings("ignore")  # of Opacus

STEPS = 8


def make_private(count: int, **options: Any) -> tuple[nn.Module, Any, Any, AdamBC]:
    """A model with `count` weights whose gradients are zero."""
    model = nn.Linear(count, 1, bias=False)
    inner = AdamBC(model.parameters(), lr=0.01)
    data = DataLoader(TensorDataset(torch.zeros(32, count)), batch_size=8)
    _, optimizer, loader = PrivacyEngine(accountant="rdp").make_private(
        module=model, optimizer=inner, data_loader=data, noise_multiplier=2.0, max_grad_norm=0.5, **options
    )
    return model, optimizer, loader, inner


@pytest.mark.parametrize("strategy", [None, BandedInverse(STEPS, 4, bands=3)], ids=str)
@pytest.mark.parametrize("normalize", [False, True])
def test_the_second_moment_of_pure_noise_is_zero(strategy: Any, normalize: bool) -> None:
    """The mean of v - noise over many coordinates is 0 within 5 standard errors, also if the bound changes."""
    model, optimizer, loader, inner = make_private(100_000, strategy=strategy, normalize_clipping=normalize)
    steps = 0
    while steps < STEPS:
        for (x,) in loader:
            optimizer.zero_grad()
            if len(x):
                model(x).sum(1).mean().backward()
            optimizer.max_grad_norm *= 1.5
            optimizer.step()
            steps += 1
            (state,) = inner.state.values()
            difference = state["exp_avg_sq"].double() - state["noise_sq"]
            assert abs(difference.mean()) < 5 * difference.std() / 100_000**0.5
            assert difference.std() > 0


def test_without_noise_it_is_adam() -> None:
    torch.manual_seed(0)
    p, q = (nn.Parameter(torch.ones(5, dtype=torch.float64)) for _ in range(2))
    ours, adam = AdamBC([p], lr=0.1, floor=1e-30), torch.optim.Adam([q], lr=0.1, eps=0.0)
    ours.noise_deviation = 0.0
    for _ in range(6):
        p.grad = q.grad = torch.randn(5, dtype=torch.float64)
        ours.step()
        adam.step()
    torch.testing.assert_close(p, q)


def test_without_a_private_optimizer() -> None:
    p = nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    with pytest.raises(PerSampleError, match="does not know the noise"):
        AdamBC([p]).step()


def test_after_release_there_is_no_noise() -> None:
    model, optimizer, loader, inner = make_private(3)
    (x,) = next(iter(loader))
    model(x[:1]).sum(1).mean().backward()
    optimizer.step()
    assert inner.noise_deviation == pytest.approx(2.0 * 0.5 / 8)
    optimizer.release()
    assert inner.noise_deviation == 0.0


def test_state_can_be_saved() -> None:
    model, optimizer, _, inner = make_private(3)
    F.mse_loss(model(torch.zeros(4, 3)), torch.zeros(4, 1)).backward()
    optimizer.step()
    other = AdamBC(nn.Linear(3, 1, bias=False).parameters())
    other.load_state_dict(inner.state_dict())
    (state,), (want,) = other.state.values(), inner.state.values()
    assert state["noise_sq"] == want["noise_sq"] and torch.equal(state["exp_avg_sq"], want["exp_avg_sq"])


@pytest.mark.parametrize("options", [{"lr": -1.0}, {"floor": 0.0}, {"betas": (1.0, 0.9)}], ids=str)
def test_refused(options: dict[str, Any]) -> None:
    with pytest.raises(PerSampleError, match="AdamBC needs"):
        AdamBC([nn.Parameter(torch.ones(3))], **options)
