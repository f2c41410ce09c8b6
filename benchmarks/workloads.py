"""The models that are measured, each with a batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Workload:
    """A model, its input, and the labels of each sample: `(B,)`, or `(B, T)` for a language model."""

    name: str
    make: Callable[[], tuple[nn.Module, Tensor, Tensor]]
    short: str = ""

    def build(self) -> tuple[nn.Module, Tensor, Tensor]:
        """Always the same weights and data, so that each engine can have a model of its own to put hooks on."""
        torch.manual_seed(0)
        return self.make()


def losses_of(output: Tensor, labels: Tensor) -> Tensor:
    """`(B,)`: each sample's own loss; a language model's is the mean over the sample's positions."""
    losses = F.cross_entropy(output.flatten(0, -2), labels.flatten(), reduction="none")
    return losses.view(len(labels), -1).mean(1)


def loss_of(output: Tensor, labels: Tensor) -> Tensor:
    """The sum of the samples' losses."""
    return losses_of(output, labels).sum()


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
    expand_positions = False  # position ids for each sample, (B, T), where an engine takes no others

    def __init__(self, width: int, layers: int, length: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, 4) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1])
        x = self.tokens(ids) + self.positions(places.repeat(len(ids), 1) if self.expand_positions else places)
        return self.head(self.norm(self.blocks(x)))


class Residual(nn.Module):
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
    def __init__(self, width: int) -> None:
        super().__init__()
        self.spatial = nn.Conv2d(width, width, 5, padding=2, groups=width)
        self.mix, self.norm = nn.Conv2d(width, width, 1), nn.GroupNorm(8, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mix(F.gelu(self.norm(self.spatial(x))))


class LastStep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(64, 128, batch_first=True), nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class BagOfWords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(20000, 64), nn.Linear(64, 10)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.words(ids).mean(1))


def _images(model: nn.Module, batch: int, side: int) -> tuple[nn.Module, Tensor, Tensor]:
    return model, torch.randn(batch, 3, side, side), torch.randint(10, (batch,))


def _pooled() -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten()]


def mlp() -> tuple[nn.Module, Tensor, Tensor]:
    model = nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    return model, torch.randn(256, 784), torch.randint(10, (256,))


def cnn() -> tuple[nn.Module, Tensor, Tensor]:
    layers: list[nn.Module] = []
    for before, after in ((3, 32), (32, 64), (64, 128)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(8, after), nn.ReLU(), nn.AvgPool2d(2)]
    return _images(nn.Sequential(*layers, *_pooled(), nn.Linear(128, 10)), 64, 32)


def resnet() -> tuple[nn.Module, Tensor, Tensor]:
    stages = [Residual(before, after) for before, after in ((32, 32), (32, 64), (64, 128), (128, 256))]
    stem = [nn.Conv2d(3, 32, 3, padding=1, bias=False), nn.GroupNorm(8, 32), nn.ReLU()]
    return _images(nn.Sequential(*stem, *stages, *_pooled(), nn.Linear(256, 10)), 32, 32)


def depthwise() -> tuple[nn.Module, Tensor, Tensor]:
    blocks = [Depthwise(64) for _ in range(4)]
    return _images(nn.Sequential(nn.Conv2d(3, 64, 4, 4), *blocks, *_pooled(), nn.Linear(64, 10)), 32, 64)


def gpt(width: int, layers: int, length: int, vocabulary: int, batch: int) -> tuple[nn.Module, Tensor, Tensor]:
    ids = torch.randint(vocabulary, (2, batch, length))
    return GPT(width, layers, length, vocabulary), ids[0], ids[1]


def lstm() -> tuple[nn.Module, Tensor, Tensor]:
    return LastStep(), torch.randn(32, 50, 64), torch.randint(10, (32,))


def bag_of_words() -> tuple[nn.Module, Tensor, Tensor]:
    return BagOfWords(), torch.randint(20000, (64, 100)), torch.randint(10, (64,))


WORKLOADS = [
    Workload("MLP 784-512-512-10, B 256", mlp, "MLP"),
    Workload("CNN 3-32-64-128, GroupNorm, 32x32, B 64", cnn, "CNN"),
    Workload("ResNet 32..256, GroupNorm, 32x32, B 32", resnet, "ResNet"),
    Workload("depthwise 5x5 + 1x1, 64, 64x64, B 32", depthwise, "depthwise"),
    Workload("GPT d256 L4 T64 V4096, B 16", partial(gpt, 256, 4, 64, 4096, 16), "GPT T 64"),
    Workload("GPT d128 L2 T512 V1024, B 4", partial(gpt, 128, 2, 512, 1024, 4), "GPT T 512"),
    Workload("LSTM 64-128, T 50, B 32", lstm, "LSTM"),
    Workload("bag of words V20000 d64 T100, B 64", bag_of_words, "bag of words"),
]
