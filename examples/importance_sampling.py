"""Draw examples by their gradient norms, and compare with uniform draws: `python examples/importance_sampling.py`.

The data are scikit-learn's digits, mostly zeros and ones: few examples matter. Both runs make the same number of steps
with the same batch size and learning rate. It reports the mean loss of all examples.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import RandomSampler

import persample

EPOCHS, BATCH, SEEDS = 4, 16, 3


def load_data() -> tuple[Tensor, Tensor]:
    """Digits of which 90 % of the classes 2 to 9 were removed."""
    digits = load_digits()
    x, y = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16, torch.tensor(digits.target)
    keep = (y < 2) | (torch.rand(len(y), generator=torch.Generator().manual_seed(0)) < 0.1)
    return x[keep], y[keep]


def train(x: Tensor, y: Tensor, importance: bool, seed: int) -> list[float]:
    """The loss over all examples after each epoch."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sampler = persample.ImportanceSampler(len(x)) if importance else RandomSampler(x)
    losses = []
    for _ in range(EPOCHS):
        for ids in torch.tensor(list(sampler)).split(BATCH):
            inputs, targets = x[ids], y[ids]
            weights = sampler.weights(ids) if importance else torch.ones(len(ids))
            optimizer.zero_grad()
            with persample.record(model, keep="norms", keep_grad=True) as grads:
                each = F.cross_entropy(model(inputs), targets, reduction="none")
                (weights * each).mean().backward()
            if importance:
                sampler.update(ids, grads.norms() / weights)  # the norms of the examples' own losses
            optimizer.step()
        with torch.no_grad():
            losses.append(float(F.cross_entropy(model(x), y)))
    return losses


def main() -> None:
    x, y = load_data()
    print(f"{len(x)} examples, batches of {BATCH}, mean loss over {SEEDS} seeds after each epoch")
    for importance in (False, True):
        runs = torch.tensor([train(x, y, importance, seed) for seed in range(SEEDS)])
        name = "by gradient norm" if importance else "uniform"
        print(f"  {name:17}", "  ".join(f"{loss:.3f}" for loss in runs.mean(0)))
    print("Norms cost about the price of a plain step, so equal steps are about equal time (docs/benchmarks.md).")


if __name__ == "__main__":
    main()
