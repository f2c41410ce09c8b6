"""Clip the gradient of each sample by group of layers: the body and the head have bounds of their own.

python examples/cookbook/clip_by_group.py
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import persample


def main() -> None:
    torch.manual_seed(0)
    digits = load_digits()
    x, y = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(digits.target)
    model = nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(144, 10))
    groups = {"body": ["0.weight", "0.bias"], "head": ["4.weight", "4.bias"]}
    bounds = {"body": 1.0, "head": 1.0}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for epoch in range(1, 6):
        clipped = dict.fromkeys(groups, 0)
        for ids in torch.randperm(len(x)).split(64):
            with persample.record(model) as grads:
                F.cross_entropy(model(x[ids]), y[ids]).backward()
            for group, names in groups.items():
                part = grads.select(names)  # the same recording, seen through these parameters
                norms = part.norms()
                for name, total in part.clip(bounds[group]).items():
                    model.get_parameter(name).grad = total / len(ids)
                clipped[group] += int((norms > bounds[group]).sum())
                bounds[group] = 0.9 * bounds[group] + 0.1 * float(norms.median())  # not private: it follows the data
            optimizer.step()
        shares = ", ".join(f"{name} {clipped[name] / len(x):.0%} (bound {bounds[name]:.2f})" for name in groups)
        print(f"epoch {epoch}: clipped {shares}")
    with torch.no_grad():
        print(f"accuracy on the training data {float((model(x).argmax(1) == y).float().mean()):.1%}")


if __name__ == "__main__":
    main()
