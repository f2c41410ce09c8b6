"""Train on part of the data, chosen by a scan: `python examples/prune_digits.py`.

A net that has seen the digits of scikit-learn for two epochs is scanned. GraNd is the gradient norm of an example then,
EL2N the distance of the predicted probabilities from its label (Paul et al., 2021). A new net is trained on
the examples with the largest values, and for comparison on as many random ones, with the same number of steps.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import persample

STEPS, BATCH, SEEDS = 400, 32, 3
SHARES = (0.5, 0.25)


def load_data() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images and labels for training, then for testing."""
    digits = load_digits()
    x, y = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16, torch.tensor(digits.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, test = order[:1200], order[1200:]
    return x[train], y[train], x[test], y[test]


def train(x: Tensor, y: Tensor, steps: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(steps):
        batch = torch.randint(len(x), (BATCH,))
        optimizer.zero_grad()
        F.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()
    return model


def main() -> None:
    x, y, test_x, test_y = load_data()
    early = train(x, y, 2 * len(x) // BATCH, seed=100)
    found = persample.scan(
        early, nn.CrossEntropyLoss(), (x, y), quantities=["loss", "norm", "predictions"], project=None, progress=False
    )
    print(f"accuracy on test images, mean of {SEEDS} seeds, {STEPS} steps each")
    for share in (1.0, *SHARES):
        count = int(share * len(x))
        chosen = {
            "random": torch.randperm(len(x), generator=torch.Generator().manual_seed(1))[:count],
            "largest GraNd": found.ranked("norm", count).ids,
            "largest EL2N": found.ranked("el2n", count).ids,
        }
        for name, ids in chosen.items():
            models = [train(x[ids], y[ids], STEPS, seed) for seed in range(SEEDS)]
            accuracies = [float((model(test_x).argmax(1) == test_y).float().mean()) for model in models]
            print(f"  {count:4} examples, {name:14} {100 * sum(accuracies) / SEEDS:.1f}%")
            if share == 1:
                break


if __name__ == "__main__":
    main()
