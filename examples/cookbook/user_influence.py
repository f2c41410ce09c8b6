"""What does each user's data do to the model? One of 10 users has labelled at random.

python examples/cookbook/user_influence.py
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import persample

USERS, BAD = 10, 7


def train(x: Tensor, y: Tensor) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(30):
        for ids in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            F.cross_entropy(model(x[ids]), y[ids]).backward()
            optimizer.step()
    return model


def main() -> None:
    torch.manual_seed(0)
    digits = load_digits()
    x, y = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16, torch.tensor(digits.target)
    (x, x_val), (y, y_val) = x.split([1400, 397]), y.split([1400, 397])
    users = torch.arange(1400) % USERS
    y = torch.where(users == BAD, torch.randint(10, y.shape), y)
    model = train(x, y)

    names = [name for name, _ in model.named_parameters()]
    direction = torch.autograd.grad(F.cross_entropy(model(x_val), y_val), list(model.parameters()))
    with persample.record(model, units=users) as grads:  # a row for each user
        F.cross_entropy(model(x), y).backward()
    values = grads.dot(dict(zip(names, direction, strict=True)))  # a step on a user's data lowers the loss by this
    for row in values.argsort()[:3].tolist():
        print(f"user {int(grads.units[row]):2}: value {values[row]:8.4f}, norm {grads.norms()[row]:.4f}")

    worst = int(grads.units[int(values.argmin())])
    kept = users != worst
    for name, net in (("all users", model), (f"without user {worst}", train(x[kept], y[kept]))):
        with torch.no_grad():
            print(f"{name:16} validation loss {float(F.cross_entropy(net(x_val), y_val)):.3f}")


if __name__ == "__main__":
    main()
