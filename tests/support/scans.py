"""Models, data and losses for the tests of scans."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from persample.testing.oracle import stack_gradients

N, WORDS = 23, 11
QUICK: dict[str, Any] = {"batch_size": 4, "shard_size": 8, "project": 16, "progress": False}


class Language(nn.Module):
    """Language model with tied embeddings and position embeddings that all samples share."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 6)
        self.positions = nn.Parameter(torch.randn(5, 6))
        self.mix = nn.Linear(6, 6)
        self.drop = nn.Dropout(0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.drop(self.mix(self.words(tokens) + self.positions).relu()) @ self.words.weight.T


class Layers(nn.Module):
    """Language model with a stack of equal layers, in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, activation="gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(8, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.head(self.layers(self.words(tokens), mask, is_causal=True))


def language_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    outputs = model(batch["tokens"])
    return F.cross_entropy(outputs[:, :-1].mT, batch["tokens"][:, 1:], reduction="none").mean(1)


def image_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 3)
    )


def images(count: int = N) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    pictures = torch.randn(count, 1, 6, 6, generator=generator, dtype=torch.float64)
    classes = torch.randint(3, (count,), generator=generator) * torch.randint(2, (count,), generator=generator)
    return pictures, classes  # mostly of the first class, so that the mean gradient is large


def sentences() -> dict[str, Tensor]:
    return {"tokens": torch.randint(WORDS, (N, 5), generator=torch.Generator().manual_seed(2))}


CASES: dict[str, tuple[Callable[[], nn.Module], Any, Any, str]] = {
    "images": (image_model, images, nn.CrossEntropyLoss(), "mean"),
    "class weights": (image_model, images, nn.CrossEntropyLoss(weight=torch.tensor([0.5, 2.0, 1.0]).double()), "mean"),
    "the mean of a batch": (image_model, images, lambda m, b: F.cross_entropy(m(b[0]), b[1]), "mean"),
    "the sum of a batch": (image_model, images, lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction="sum"), "sum"),
    "language": (Language, sentences, language_loss, "mean"),
}


def build(case: str) -> tuple[nn.Module, Any, Any, str]:
    torch.manual_seed(0)
    make, data, loss_fn, reduction = CASES[case]
    return make().double(), data(), loss_fn, reduction


def build_layers() -> tuple[nn.Module, Any, Any]:
    """A stack of equal layers, in float32: the order of sums shows in the last digits."""
    torch.manual_seed(0)
    return Layers(), sentences(), language_loss


def take_one(data: Any, i: int) -> Any:
    """Example `i` as a batch of one."""
    return {k: v[i : i + 1] for k, v in data.items()} if isinstance(data, dict) else tuple(v[i : i + 1] for v in data)


def loop(model: nn.Module, data: Any, loss_fn: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and gradient of each example by plain autograd, one example at a time."""
    losses: list[Tensor] = []

    def compute_losses() -> Iterator[Tensor]:
        for i in range(N):
            batch = take_one(data, i)
            loss = loss_fn(model(batch[0]), batch[1]) if isinstance(loss_fn, nn.Module) else loss_fn(model, batch).sum()
            losses.append(loss.detach())
            yield loss

    model.eval()
    rows = stack_gradients(compute_losses(), dict(model.named_parameters()))
    return torch.stack(losses), rows


def assert_near(found: Any, expected: Tensor) -> None:
    torch.testing.assert_close(torch.as_tensor(found).double(), expected, rtol=1e-6, atol=1e-9)


# ---- interruption and continuation ----


def read_files(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


def make_stale(path: Path) -> None:
    """Set back the time of an unfinished file, so that it has no live writer for certain."""
    os.utime(path, (0, 0))
