"""A model, its data and its loss, for the command line:

    persample scan examples/scan_digits.py:to_scan --out scans/digits --report
    persample query scans/digits top --by loss
    persample query scans/digits influence examples/scan_digits.py:test_batch -k 3
"""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset

TEST = 297  # of the 1797 images, the last ones


def images() -> tuple[Tensor, Tensor]:
    """All images as (N, 1, 8, 8) in [0, 1], and their classes."""
    digits = load_digits()
    return torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(digits.target)


def to_scan() -> tuple[nn.Module, TensorDataset, nn.Module]:
    """A net that a few epochs have trained, always the same, with its training data and its loss."""
    torch.manual_seed(0)
    x, y = (part[:-TEST] for part in images())
    model = nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(144, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(5):
        for index in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[index]), y[index]).backward()
            optimizer.step()
    return model, TensorDataset(x, y), nn.CrossEntropyLoss()


def test_batch() -> tuple[Tensor, Tensor]:
    """Three images that the net was not trained on."""
    x, y = images()
    return x[-3:], y[-3:]
