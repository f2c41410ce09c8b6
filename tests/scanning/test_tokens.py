"""The function that marks tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from persample import record
from persample.scanning.tokens import measure_tokens


def compute_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def test_measured_tokens_are_parts_of_the_gradient() -> None:
    torch.manual_seed(0)
    model, tokens = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7)).double(), torch.randint(7, (3, 5))
    direction = {name: torch.randn_like(p).detach() for name, p in model.named_parameters()}
    with record(model) as grads:
        compute_loss(model, tokens).backward()
    products = measure_tokens(model, compute_loss, tokens, 5, direction)
    torch.testing.assert_close(products.sum(1), grads.dot(direction))
    norms = measure_tokens(model, compute_loss, tokens, 5)
    assert norms.shape == (3, 5) and bool((norms.sum(1) >= grads.norms()).all())
