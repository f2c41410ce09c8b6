"""The models that are measured, each with a batch of random data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Workload:
    """A model with a batch on a device. The labels have shape `(B,)`, or `(B, T)` for a language model."""

    name: str
    make: Callable[[], tuple[nn.Module, Tensor, Tensor]]
    short: str = ""
    device: str = "cpu"

    def build(self) -> tuple[nn.Module, Tensor, Tensor]:
        """Return a new model, its input and the labels. Weights and data are the same at each call."""
        torch.manual_seed(0)
        model, x, labels = self.make()
        return model.to(self.device), x.to(self.device), labels.to(self.device)


def compute_losses(output: Tensor, labels: Tensor) -> Tensor:
    """`(B,)`: the loss of each sample. For a language model this is the mean over the positions of the sample."""
    losses = F.cross_entropy(output.flatten(0, -2), labels.flatten(), reduction="none")
    return losses.view(len(labels), -1).mean(1)


def compute_loss(output: Tensor, labels: Tensor) -> Tensor:
    """Sum of the losses of the samples."""
    return compute_losses(output, labels).sum()


class Block(nn.Module):
    """A pre-norm transformer block with causal attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A decoder-only transformer with learned positions."""

    expand_positions = False  # pass position ids as (B, T) instead of (T,), for engines that require a batch dimension

    def __init__(self, width: int, layers: int, length: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, 4) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        index = torch.arange(ids.shape[1], device=ids.device)
        x = self.tokens(ids) + self.positions(index.repeat(len(ids), 1) if self.expand_positions else index)
        return self.head(self.norm(self.blocks(x)))


class Residual(nn.Module):
    """Two convolutions with group norm and a skip connection; halves the size if the width changes."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        stride = 1 if before == after else 2
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.GroupNorm(8, after), nn.GroupNorm(8, after)
        self.skip = nn.Identity() if before == after else nn.Conv2d(before, after, 1, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inside = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.skip(x) + self.norm2(self.conv2(inside)))


class Depthwise(nn.Module):
    """A depthwise and a pointwise convolution with a skip connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.spatial = nn.Conv2d(width, width, 5, padding=2, groups=width)
        self.mix, self.norm = nn.Conv2d(width, width, 1), nn.GroupNorm(8, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mix(F.gelu(self.norm(self.spatial(x))))


class LastStep(nn.Module):
    """An LSTM, and a linear layer on its last output."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(64, 128, batch_first=True), nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class BagOfWords(nn.Module):
    """The mean of word embeddings, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(20000, 64), nn.Linear(64, 10)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.words(ids).mean(1))


def _add_images(model: nn.Module, batch: int, side: int) -> tuple[nn.Module, Tensor, Tensor]:
    return model, torch.randn(batch, 3, side, side), torch.randint(10, (batch,))


def _make_pooling() -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten()]


def make_mlp() -> tuple[nn.Module, Tensor, Tensor]:
    model = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    return model, torch.randn(256, 784), torch.randint(10, (256,))


def make_cnn() -> tuple[nn.Module, Tensor, Tensor]:
    layers: list[nn.Module] = []
    for before, after in ((3, 32), (32, 64), (64, 128)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(8, after), nn.ReLU(), nn.AvgPool2d(2)]
    return _add_images(nn.Sequential(*layers, *_make_pooling(), nn.Linear(128, 10)), 64, 32)


def make_resnet() -> tuple[nn.Module, Tensor, Tensor]:
    stages = [Residual(before, after) for before, after in ((32, 32), (32, 64), (64, 128), (128, 256))]
    stem = [nn.Conv2d(3, 32, 3, padding=1, bias=False), nn.GroupNorm(8, 32), nn.ReLU()]
    return _add_images(nn.Sequential(*stem, *stages, *_make_pooling(), nn.Linear(256, 10)), 32, 32)


def make_depthwise() -> tuple[nn.Module, Tensor, Tensor]:
    blocks = [Depthwise(64) for _ in range(4)]
    return _add_images(nn.Sequential(nn.Conv2d(3, 64, 4, 4), *blocks, *_make_pooling(), nn.Linear(64, 10)), 32, 64)


def make_gpt(width: int, layers: int, length: int, vocabulary: int, batch: int) -> tuple[nn.Module, Tensor, Tensor]:
    ids = torch.randint(vocabulary, (2, batch, length))
    return GPT(width, layers, length, vocabulary), ids[0], ids[1]


def make_lstm() -> tuple[nn.Module, Tensor, Tensor]:
    return LastStep(), torch.randn(32, 50, 64), torch.randint(10, (32,))


def make_bag_of_words() -> tuple[nn.Module, Tensor, Tensor]:
    return BagOfWords(), torch.randint(20000, (64, 100)), torch.randint(10, (64,))


WORKLOADS = [
    Workload("MLP 784-512-512-10, B 256", make_mlp, "MLP"),
    Workload("CNN 3-32-64-128, GroupNorm, 32x32, B 64", make_cnn, "CNN"),
    Workload("ResNet 32..256, GroupNorm, 32x32, B 32", make_resnet, "ResNet"),
    Workload("depthwise 5x5 + 1x1, 64, 64x64, B 32", make_depthwise, "depthwise"),
    Workload("GPT d256 L4 T64 V4096, B 16", partial(make_gpt, 256, 4, 64, 4096, 16), "GPT T 64"),
    Workload("GPT d128 L2 T512 V1024, B 4", partial(make_gpt, 128, 2, 512, 1024, 4), "GPT T 512"),
    Workload("LSTM 64-128, T 50, B 32", make_lstm, "LSTM"),
    Workload("bag of words V20000 d64 T100, B 64", make_bag_of_words, "bag of words"),
]


def select_workloads(text: str = "") -> list[Workload]:
    """The workloads with `text` in their name or short name. Case does not matter."""
    return [workload for workload in WORKLOADS if text.lower() in f"{workload.name} {workload.short}".lower()]
