"""Choose the examples of each step on digits with wrong labels: `python examples/select_digits.py`.

Of a pool of four batches, a step takes one batch: drawn at random; the largest losses; the largest losses above those
of a model that was trained on clean held-out data (as RHO-loss); or the examples that agree with the gradient of that
data, and differ from each other (`persample.steering.select`, as GREATS). Beside them, training on the held-out data
alone. Cost is counted in passes of single examples: a forward pass is 1, forward and backward 3. All methods get the
same cost, and so different numbers of steps; the accuracy after as many steps is printed beside it.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import persample
from persample.steering import select, weighted_sum

BATCH, POOL, HELD_OUT, WRONG = 32, 128, 100, 0.4
STEPS, SEEDS = 150, 5  # steps of `select`

# Cost of a step, and of what comes before the training.
COSTS = {
    "held-out data alone": 3 * BATCH,
    "uniform": 3 * BATCH,
    "loss": POOL + 3 * BATCH,
    "loss above reference": POOL + 3 * BATCH,
    "select, values only": 3 * POOL + 3 * HELD_OUT,
    "select": 3 * POOL + 3 * HELD_OUT,
}
Data = tuple[Tensor, Tensor]


def load_data(seed: int) -> tuple[Data, Data, Data]:
    """Training data of which 40 % have a wrong label; clean held-out data; test data."""
    digits = load_digits()
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(digits.target), generator=generator)
    x, y = torch.tensor(digits.images, dtype=torch.float32).flatten(1)[order] / 16, torch.tensor(digits.target)[order]
    train, held_out, test = ((x[a:b], y[a:b]) for a, b in ((0, 1000), (1000, 1000 + HELD_OUT), (1100, len(y))))
    is_wrong = torch.rand(1000, generator=generator) < WRONG
    moved = (train[1] + torch.randint(1, 10, (1000,), generator=generator)) % 10
    return (train[0], torch.where(is_wrong, moved, train[1])), held_out, test


def make_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    return model, torch.optim.SGD(model.parameters(), lr=0.3)


def compute_reference_losses(data: Data, held_out: Data, steps: int = 100) -> tuple[Tensor, float]:
    """The loss of each training example under a model of the held-out data, and the cost."""
    model, optimizer = make_model()
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(held_out[0]), held_out[1]).backward()
        optimizer.step()
    with torch.no_grad():
        return F.cross_entropy(model(data[0]), data[1], reduction="none"), 3 * HELD_OUT * steps + len(data[1])


def train(method: str, steps: int | None, seed: int) -> float:
    """The accuracy after some steps, or after those that the cost of `select` pays for."""
    data, held_out, test = load_data(seed)
    if "alone" in method:
        data = held_out
    torch.manual_seed(seed)
    reference, spent = compute_reference_losses(data, held_out) if "reference" in method else (torch.zeros(1000), 0.0)
    if steps is None:
        steps = math.floor((STEPS * COSTS["select"] - spent) / COSTS[method])
    model, optimizer = make_model()
    for _ in range(steps):
        pool = torch.randperm(len(data[1]))[:POOL]
        optimizer.zero_grad()
        if method.startswith("select"):
            parts = torch.autograd.grad(F.cross_entropy(model(held_out[0]), held_out[1]), list(model.parameters()))
            direction = dict(zip(dict(model.named_parameters()), parts, strict=True))
            with persample.record(model) as grads:
                F.cross_entropy(model(data[0][pool]), data[1][pool]).backward()
            chosen = select(grads, BATCH, direction, diversity=0.0 if "only" in method else 0.1)
            for p, total in zip(model.parameters(), weighted_sum(grads, chosen).values(), strict=True):
                p.grad = total
        else:
            chosen = pool[:BATCH]
            if method.startswith("loss"):
                with torch.no_grad():
                    losses = F.cross_entropy(model(data[0][pool]), data[1][pool], reduction="none") - reference[pool]
                chosen = pool[losses.topk(BATCH).indices]
            F.cross_entropy(model(data[0][chosen]), data[1][chosen]).backward()
        optimizer.step()
    with torch.no_grad():
        return float((model(test[0]).argmax(1) == test[1]).double().mean())


def describe(accuracies: list[float]) -> str:
    found = torch.tensor(accuracies)
    return f"{found.mean():.1%} ± {found.std(correction=0):.1%}"


def main() -> None:
    print(f"Accuracy over {SEEDS} seeds (mean ± deviation), {WRONG:.0%} of the labels wrong")
    print(f"  {'':22}  {STEPS} steps     equal cost")
    for method in COSTS:
        found = [[train(method, steps, seed) for seed in range(SEEDS)] for steps in (STEPS, None)]
        print(f"  {method:22}  {describe(found[0])}  {describe(found[1])}")


if __name__ == "__main__":
    main()
