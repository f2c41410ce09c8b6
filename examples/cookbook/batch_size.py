"""Measure the gradient noise scale in a training, and choose a batch size and a clipping bound by it.

python examples/cookbook/batch_size.py
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import persample


def main() -> None:
    torch.manual_seed(0)
    digits = load_digits()
    x, y = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16, torch.tensor(digits.target)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with persample.monitor(model, every=2) as watching:
        for epoch in range(1, 11):
            for ids in torch.randperm(len(x)).split(64):
                optimizer.zero_grad()
                F.cross_entropy(model(x[ids]), y[ids]).backward()
                optimizer.step()
            if epoch % 5 == 0:
                print(f"after {epoch} epochs the noise scale is {watching.noise_scale}")
    print(watching.advise())


if __name__ == "__main__":
    main()
