"""Texts of different lengths: sorted within their shards, so that little is padded, and stored in dataset order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, IterableDataset

import persample
from persample.scanning.source import Source, find_length
from tests.support.scans import read_files

COUNT, WORDS = 30, 13
OPTIONS: dict[str, Any] = {"batch_size": 4, "shard_size": 12, "project": 32, "progress": False}


def make_texts() -> list[tuple[Tensor, int]]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, 20, (COUNT,), generator=generator).tolist()
    return [(torch.randint(1, WORDS, (length,), generator=generator), length % 3) for length in lengths]


def collate(examples: list[tuple[Tensor, int]]) -> dict[str, Tensor]:
    tokens = pad_sequence([tokens for tokens, _ in examples], batch_first=True)
    return {"tokens": tokens, "label": torch.tensor([label for _, label in examples])}


class Reader(nn.Module):
    """Mean of embeddings, without the padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 8, padding_idx=0)
        self.mix, self.head = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = (tokens != 0).unsqueeze(-1)
        hidden = self.mix(self.embedding(tokens)).tanh() * mask
        return self.head(hidden.sum(1) / mask.sum(1))


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return Reader().double()


PADDED: list[tuple[int, int]] = []  # shapes of the batches that the loss has seen


def compute_losses(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    PADDED.append(tuple(batch["tokens"].shape))  # type: ignore[arg-type]
    return F.cross_entropy(model(batch["tokens"]), batch["label"], reduction="none")


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(make_texts())


SOURCES: dict[str, Any] = {
    "list": lambda: make_texts(),
    "stream": lambda: Stream(),
    "loader with workers": lambda: DataLoader(make_texts(), collate_fn=collate, batch_size=4, num_workers=2),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("source", SOURCES)
def test_batches_have_similar_lengths_and_rows_are_in_dataset_order(source: str, tmp_path: Path) -> None:
    model, texts = make_model(), make_texts()
    PADDED.clear()
    options = {**OPTIONS, "quantities": ["loss", "norm", "alignment", "estimated_alignment", "noise_scale"]}
    found = persample.scan(model, compute_losses, SOURCES[source](), collate=collate, out=tmp_path, **options)
    lengths = [len(tokens) for tokens, _ in texts]
    windows = [sorted(lengths[i : i + 12], reverse=True) for i in range(0, COUNT, 12)]
    expected = [(len(part[i : i + 4]), part[i]) for part in windows for i in range(0, len(part), 4)]
    assert PADDED[-len(expected) :] == expected
    losses, rows = [], []
    for example in texts:
        loss = compute_losses(model, collate([example])).sum()
        losses.append(loss.item())
        rows.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))]))
    matrix = torch.stack(rows)
    assert found.column("id").tolist() == list(range(COUNT))
    assert found.column("label").tolist() == [label for _, label in texts]
    np.testing.assert_allclose(found.column("loss"), losses, rtol=1e-9)
    np.testing.assert_allclose(found.column("norm"), matrix.norm(dim=1), rtol=1e-9)
    cosines = F.cosine_similarity(matrix, matrix.mean(0)[None])
    np.testing.assert_allclose(found.column("alignment"), cosines, rtol=1e-8, atol=1e-10)
    assert found.summary["mean_gradient_norm"] == pytest.approx(float(matrix.mean(0).norm()), rel=1e-9)


@pytest.mark.parametrize("stops", [(1, 9), (7, 4), (11, 2)])
def test_interrupted_scan_continues(stops: tuple[int, ...], tmp_path: Path) -> None:
    model, left = make_model(), [10**9]

    def stop_at_times(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        left[0] -= 1
        if left[0] < 0:
            raise InterruptedError
        return F.cross_entropy(model(batch["tokens"]), batch["label"], reduction="none")

    persample.scan(model, stop_at_times, make_texts(), collate=collate, out=tmp_path / "whole", **OPTIONS)
    for count in stops:
        left[0] = count
        with pytest.raises(InterruptedError):
            persample.scan(model, stop_at_times, make_texts(), collate=collate, out=tmp_path / "stopped", **OPTIONS)
    left[0] = 10**9
    persample.scan(model, stop_at_times, make_texts(), collate=collate, out=tmp_path / "stopped", **OPTIONS)
    assert read_files(tmp_path / "stopped") == read_files(tmp_path / "whole")


@pytest.mark.parametrize(
    ("example", "length"),
    [
        ("text", 4),
        (["text", 3], 4),
        ({"label": 1, "tokens": torch.tensor([1, 2, 3])}, 3),
        (np.array([1, 2]), 2),
        ([1, 2, 3], 3),
        ((1, 2), None),
        (torch.ones(3), None),
        (torch.ones(3, 4, dtype=torch.long), None),
        (5, None),
        ([], None),
    ],
)
def test_find_length(example: Any, length: int | None) -> None:
    assert find_length(example) == length


def test_captions_of_images_are_not_sorted() -> None:
    """A shard of images may not fit into memory."""
    examples = [{"caption": "a" * i, "image": torch.ones(3, 4)} for i in range(5)]
    assert find_length(examples[2]) == 2
    assert not Source(examples, 2, collate=lambda examples: examples).is_sorted_by_length


def test_examples_of_one_length_keep_their_order() -> None:
    images = [(torch.ones(3, 4), 0) for _ in range(5)]
    assert not Source(images, 2, collate=lambda examples: examples).is_sorted_by_length
    assert not Source(torch.ones(5, 3, dtype=torch.long), 2).is_sorted_by_length
