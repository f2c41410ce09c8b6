"""The time of a step that fills every `grad_sample`, as a ratio to a plain forward and backward.

The engines take turns; a figure is the median of the rounds' ratios. A step builds the wrapper, runs forward
and backward, and frees its gradients. "wrong": the rows do not add up to the batch gradient.
"""

import statistics
import sys
import time
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import _per_sample_grad

import persample

ROUNDS = 10
Engine = Callable[[nn.Module], Callable[[Tensor], Tensor]]
ENGINES: dict[str, Engine] = {
    "plain": lambda model: model,
    "persample": lambda model: persample.call_for_per_sample_grads(model, loss_reduction="sum"),
    "torch": lambda model: _per_sample_grad.call_for_per_sample_grads(model, loss_reduction="sum"),
}


class LastStep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(64, 128, batch_first=True)
        self.head = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class BagOfWords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20000, 64)
        self.head = nn.Linear(64, 10)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.words(ids).mean(1))


def workloads() -> Iterator[tuple[str, nn.Module, Tensor]]:
    """A name, a model and its input; every model has 10 outputs."""
    mlp = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    yield "MLP 784-512-512-10, B 256", mlp, torch.randn(256, 784)
    cnn = nn.Sequential(
        *(nn.Conv2d(3, 32, 3, padding=1), nn.GroupNorm(8, 32), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.GroupNorm(8, 64), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(64 * 8 * 8, 10)),
    )
    yield "CNN 32-64 with GroupNorm, 32x32, B 64", cnn, torch.randn(64, 3, 32, 32)
    # an input that requires grad, as one from an embedding would: torch's engine fails on others
    yield "LSTM 64-128, T 50, B 32", LastStep(), torch.randn(32, 50, 64, requires_grad=True)
    yield "bag of words V 20000 d 64, T 100, B 64", BagOfWords(), torch.randint(20000, (64, 100))


def clear(model: nn.Module, x: Tensor) -> None:
    x.grad = None
    for p in model.parameters():
        p.grad = None
        if hasattr(p, "grad_sample"):
            del p.grad_sample


def step(engine: Engine, model: nn.Module, x: Tensor, labels: Tensor) -> None:
    F.cross_entropy(engine(model)(x), labels, reduction="sum").backward()


def verdict(engine: Engine, model: nn.Module, x: Tensor, labels: Tensor) -> str:
    """What to print in place of a time; empty if the engine's rows add up to the batch gradient."""
    step(ENGINES["plain"], model, x, labels)
    expected = [p.grad for p in model.parameters()]
    clear(model, x)
    try:
        step(engine, model, x, labels)
        pairs = [(p.grad_sample.sum(0), e) for p, e in zip(model.parameters(), expected, strict=True)]
        return "" if all((t - e).abs().max() <= 1e-3 * e.abs().max() for t, e in pairs) else "wrong"
    except Exception as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return "error"
    finally:
        clear(model, x)


def measure(model: nn.Module, x: Tensor) -> list[str]:
    """The row of a workload: plain milliseconds, then each engine's ratio."""
    labels = torch.randint(10, (len(x),))
    cells = {n: verdict(e, model, x, labels) for n, e in ENGINES.items() if n != "plain"}
    running = [n for n in ENGINES if not cells.get(n)]
    times: dict[str, list[float]] = {n: [] for n in running}
    for _ in range(ROUNDS + 1):
        for name in running:
            start = time.perf_counter()
            step(ENGINES[name], model, x, labels)
            clear(model, x)
            times[name].append(time.perf_counter() - start)
    plain = times.pop("plain")[1:]  # the first round warms up
    for name, taken in times.items():
        cells[name] = f"{statistics.median(t / p for t, p in zip(taken[1:], plain, strict=True)):.2f}"
    return [f"{1000 * statistics.median(plain):.1f}", *cells.values()]


def main() -> None:
    torch.manual_seed(0)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {ROUNDS} rounds; ratios to plain")
    print(f"{'workload':40}{'plain ms':>10}{'persample':>11}{'torch':>8}")
    for name, model, x in workloads():
        plain, ours, theirs = measure(model, x)
        print(f"{name:40}{plain:>10}{ours:>11}{theirs:>8}", flush=True)


if __name__ == "__main__":
    main()
