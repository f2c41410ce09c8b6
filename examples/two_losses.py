"""Train one model on two tasks, with weights from the Gram matrix of their gradients (MGDA: Désidéri, 2012).

    python examples/two_losses.py

The tasks are which digit an image shows, and how much ink it has. In each step the two losses have a backward pass
each, and the shortest convex combination of their mean gradients is the direction: it improves both losses if any does.
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import persample

STEPS, BATCH = 300, 128


def find_min_norm_weights(gram: Tensor) -> Tensor:
    """The weights, at least 0 with sum 1, for which the combination of vectors with this Gram matrix is shortest.

    Exact for a few vectors: for each set of vectors with positive weights, the best weights solve a linear system.

    >>> find_min_norm_weights(torch.tensor([[1.0, 0.0], [0.0, 3.0]], dtype=torch.float64))
    tensor([0.7500, 0.2500], dtype=torch.float64)
    """
    count, best, least = len(gram), torch.zeros(len(gram), dtype=gram.dtype), float("inf")
    scaled = gram / gram.diagonal().max().clamp(min=torch.finfo(gram.dtype).tiny)
    for size in range(1, count + 1):
        for chosen in itertools.combinations(range(count), size):
            index = list(chosen)
            border = torch.ones(size, 1, dtype=gram.dtype)
            system = torch.cat(
                [torch.cat([scaled[index][:, index], border], 1), torch.cat([border.T, border.new_zeros(1, 1)], 1)]
            )
            right = torch.zeros(size + 1, dtype=gram.dtype)
            right[-1] = 1
            weights = torch.linalg.lstsq(system, right[:, None], driver="gelsd").solution[:size, 0]
            value = float(weights @ scaled[index][:, index] @ weights)
            if bool((weights >= -1e-9).all()) and abs(float(weights.sum()) - 1) < 1e-6 and value < least - 1e-12:
                least, best = value, torch.zeros(count, dtype=gram.dtype)
                best[index] = weights.clamp(min=0)
    return best


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 32), nn.Tanh())
        self.digit, self.ink = nn.Linear(32, 10), nn.Linear(32, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.body(x)
        return self.digit(h), self.ink(h).squeeze(1)


def train(name: str, balanced: bool) -> tuple[float, float]:
    """Train from scratch; return the accuracy and the error of the ink."""
    digits = load_digits()
    images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    ink = (images.mean(1) - images.mean()) / images.mean(1).std()
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(images), generator=generator)
    train_ids, test_ids = order[360:], order[:360]
    torch.manual_seed(0)
    model = TwoHeads()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    conflicts, shares = [], []
    for _ in range(STEPS):
        ids = train_ids[torch.randint(len(train_ids), (BATCH,), generator=generator)]
        with persample.record(model, losses=["digit", "ink"]) as grads:
            logits, guess = model(images[ids])
            F.cross_entropy(logits, labels[ids]).backward(retain_graph=True)
            F.mse_loss(guess, ink[ids]).backward()
        weights = torch.tensor([0.5, 0.5], dtype=torch.float64)
        if balanced:
            weights = find_min_norm_weights(grads.mean_gram())
        conflicts.append(float(grads.conflicts()[0, 1]))
        shares.append(float(weights[0]))
        for parameter, grad in zip(model.parameters(), grads.mean(weights).values(), strict=True):
            parameter.grad = 2 * grad.to(parameter.dtype)
        optimizer.step()
    with torch.no_grad():
        logits, guess = model(images[test_ids])
        accuracy = float((logits.argmax(1) == labels[test_ids]).float().mean())
        error = float(F.mse_loss(guess, ink[test_ids]).sqrt())
    print(
        f"{name:10} accuracy {accuracy:6.1%}   error of the ink {error:.3f}   weight of the digits "
        f"{sum(shares) / STEPS:.2f}   samples in conflict {sum(conflicts) / STEPS:.0%}"
    )
    return accuracy, error


if __name__ == "__main__":
    train("equal", balanced=False)
    train("min-norm", balanced=True)
