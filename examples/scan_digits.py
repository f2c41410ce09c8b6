"""A model, its data and its loss.

Use them from the command line:

    persample scan examples/scan_digits.py:to_scan --out scans/digits --report
    persample query scans/digits top --by loss
    persample query scans/digits influence examples/scan_digits.py:test_batch -k 3 \\
        --module examples/scan_digits.py:to_scan
"""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset

TEST_SIZE = 297  # the last of the 1797 images are not used for training


def load_images() -> tuple[Tensor, Tensor]:
    """All images as (N, 1, 8, 8) in [0, 1], and their classes."""
    digits = load_digits()
    return torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(digits.target)


def to_scan() -> tuple[nn.Module, TensorDataset, nn.Module]:
    """A network after a few epochs of training, with its training data and its loss. Every call gives the same."""
    torch.manual_seed(0)
    x, y = (part[:-TEST_SIZE] for part in load_images())
    model = nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(144, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(5):
        for index in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[index]), y[index]).backward()
            optimizer.step()
    return model, TensorDataset(x, y), nn.CrossEntropyLoss()


def test_batch() -> tuple[Tensor, Tensor]:
    """Three images that were not used for training."""
    x, y = load_images()
    return x[-3:], y[-3:]
