"""The loss of each sample, for the loss functions that users pass."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from persample.losses import compute_sample_losses

WEIGHT = torch.tensor([0.5, 2.0, 1.0])
CLASSES = torch.tensor([0, 1, 2, 1])
TOKEN_CLASSES = torch.tensor([[0, 1, -100, 2, 1], [1, 1, 1, -100, -100], [2, 0, 0, 0, 0], [0, 2, 1, 1, 2]])


def scores(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


LOSSES: dict[str, tuple[Any, Tensor, Tensor]] = {
    "cross entropy": (nn.CrossEntropyLoss(), scores(4, 3), CLASSES),
    "cross entropy, class weights": (nn.CrossEntropyLoss(weight=WEIGHT.double()), scores(4, 3), CLASSES),
    "cross entropy, ignored tokens": (nn.CrossEntropyLoss(), scores(4, 3, 5), TOKEN_CLASSES),
    "cross entropy, weights and ignored": (
        partial(F.cross_entropy, weight=WEIGHT.double()), scores(4, 3, 5), TOKEN_CLASSES,
    ),
    "cross entropy, sum": (nn.CrossEntropyLoss(reduction="sum"), scores(4, 3, 5), TOKEN_CLASSES),
    "cross entropy, smoothed": (nn.CrossEntropyLoss(label_smoothing=0.1), scores(4, 3), CLASSES),
    "cross entropy, one ignored": (nn.CrossEntropyLoss(ignore_index=1), scores(4, 3, 5), TOKEN_CLASSES.clamp(min=0)),
    "cross entropy of probabilities": (F.cross_entropy, scores(4, 3), scores(4, 3).softmax(1)),
    "likelihood": (nn.NLLLoss(), scores(4, 3).log_softmax(1), CLASSES),
    "squares": (nn.MSELoss(), scores(4, 3, 2), scores(4, 3, 2).flip(0)),
    "squares of one number": (F.mse_loss, scores(4), scores(4).flip(0)),
    "squares, sum": (partial(F.mse_loss, reduction="sum"), scores(4, 3), scores(4, 3).flip(0)),
    "divergence": (nn.KLDivLoss(reduction="batchmean"), scores(4, 3).log_softmax(1), scores(4, 3).flip(0).softmax(1)),
    "yes or no": (nn.BCEWithLogitsLoss(pos_weight=WEIGHT.double()), scores(4, 3), (scores(4, 3) > 0).double()),
    "huber": (nn.SmoothL1Loss(beta=0.3), scores(4, 3), scores(4, 3).flip(0)),
    "margin": (nn.MultiMarginLoss(), scores(4, 3), CLASSES),
}  # fmt: skip


@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_torch_equal_the_losses_of_single_samples(name: str) -> None:
    loss_fn, outputs, targets = LOSSES[name]
    alone = [loss_fn(outputs[i : i + 1], targets[i : i + 1]) for i in range(4)]
    losses = compute_sample_losses(nn.Identity(), (outputs, targets), loss_fn)
    torch.testing.assert_close(losses, torch.stack(alone))
    assert getattr(loss_fn, "reduction", None) != "none", "the user's loss module was changed"


def test_results_of_other_functions_are_returned_unchanged() -> None:
    x, y = scores(4, 3), scores(4, 3).flip(0)
    rows = compute_sample_losses(
        nn.Identity(), {"x": x, "y": y}, lambda model, batch: (model(batch["x"]) - batch["y"]).sum(1)
    )
    torch.testing.assert_close(rows, (x - y).sum(1))

    class Odd(nn.Module):
        reduction = "mean"  # forward() ignores it

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return (x - y).abs().mean()

    torch.testing.assert_close(compute_sample_losses(nn.Identity(), (x, y), Odd()), (x - y).abs().mean())
