"""Models trained on parts of a dataset, and on wrong labels, with the user's training function."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset

from persample._internal.text import describe_value
from persample.losses import LossFunction, compute_sample_losses
from persample.scanning.checkpoints import State
from persample.scanning.errors import ScanError
from persample.scanning.screening import LABEL_KEYS
from persample.scanning.source import Source

Train = Callable[[Any, int], Any]


@dataclass(frozen=True)
class SubsetRuns:
    """Trainings on random subsets: `members` `(subsets, size)` are ids of examples, `losses` those of the tests.

    `losses` is `(subsets, repeats, tests)`; the repeats have the same members and different seeds.
    """

    members: Tensor
    losses: Tensor

    def predict(self, scores: Tensor) -> Tensor:
        """`(tests, subsets)`: the sum of each subset's influence scores `(tests, examples)`."""
        return torch.stack([scores[:, members].double().sum(1) for members in self.members], 1)

    @property
    def effects(self) -> Tensor:
        """`(tests, subsets)`: what scores should predict, minus the mean loss of the repeats."""
        return -self.losses.double().mean(1).T


def draw_subsets(examples: int, count: int, part: float, generator: torch.Generator) -> Tensor:
    """`(count, size)`: random subsets of the examples, each sorted."""
    size = round(part * examples)
    if not 0 < size < examples:
        raise ScanError(f"part must be between 0 and 1, and leave examples in and out; {part} of {examples} does not.")
    subsets = [torch.randperm(examples, generator=generator)[:size].sort().values for _ in range(count)]
    return torch.stack(subsets)


def train_model(train: Train, data: Any, seed: int) -> tuple[nn.Module, list[State]]:
    """Call the training function; return the model and its checkpoints, by default the model's own state."""
    torch.manual_seed(seed)
    result = train(data, seed)
    model, checkpoints = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    if not isinstance(model, nn.Module):
        raise ScanError(
            f"The training function must return a model, or a model and its checkpoints, got {describe_value(result)}."
        )
    states = [copy.deepcopy(model.state_dict())] if checkpoints is None else list(checkpoints)
    return model.eval(), states


@torch.no_grad()
def compute_test_losses(model: nn.Module, batch: Any, loss_fn: LossFunction) -> Tensor:
    """`(tests,)`: the loss of each sample of a batch."""
    losses = compute_sample_losses(model, batch, loss_fn)
    if not isinstance(losses, Tensor) or losses.dim() != 1:
        raise ScanError(f"The loss function must return one loss per sample, but returned {describe_value(losses)}.")
    return losses.double().cpu()


def take_examples(data: Any, ids: Tensor) -> Any:
    """Some examples of a dataset in the form of the dataset: tensors stay tensors, others become a `Subset`."""
    if isinstance(data, (Tensor, np.ndarray)):
        return data[ids if isinstance(data, Tensor) else ids.numpy()]
    if isinstance(data, tuple) and all(isinstance(part, (Tensor, np.ndarray)) for part in data):
        return tuple(take_examples(part, ids) for part in data)
    if isinstance(data, Mapping):
        return {key: take_examples(part, ids) for key, part in data.items()}
    return Subset(data, ids.tolist())


# ---- wrong labels ----


def flip_labels(data: Any, part: float, generator: torch.Generator) -> tuple[Any, Tensor] | None:
    """A copy of the data with a part of its labels moved to other classes, and which ones; None without labels."""
    labels = _read_labels(data)
    if labels is None:
        return None
    count, classes = len(labels), int(labels.max()) + 1
    if classes < 2:
        return None
    chosen = torch.randperm(count, generator=generator)[: max(1, round(part * count))]
    wrong = labels.clone()
    wrong[chosen] = (labels[chosen] + torch.randint(1, classes, chosen.shape, generator=generator)) % classes
    if isinstance(data, tuple):
        data = (data[0], torch.as_tensor(data[1]).clone().copy_(wrong), *data[2:])
    elif isinstance(data, Mapping):
        key = _find_key(data)
        data = {**data, key: data[key].clone().copy_(wrong)}
    else:
        data = _Relabelled(data, wrong)
    return data, wrong != labels


class _Relabelled(Dataset[Any]):
    """A dataset with other labels."""

    def __init__(self, data: Any, labels: Tensor) -> None:
        self._data, self._labels = data, labels.tolist()

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, i: int) -> Any:
        example, label = self._data[i], self._labels[i]
        if isinstance(example, Mapping):
            key = _find_key(example)
            return {**example, key: torch.as_tensor(label).to(torch.as_tensor(example[key]).dtype)}
        return (example[0], label, *example[2:])


def _find_key(example: Mapping[str, Any]) -> str:
    return next(key for key in LABEL_KEYS if key in example)


def _read_labels(data: Any) -> Tensor | None:
    source = Source(data)
    if source.size is None:
        raise ScanError("evaluate needs a dataset with a length, because it draws random subsets of it.")
    if not source.has_labels():
        return None
    if isinstance(data, (tuple, Mapping)):
        found = torch.as_tensor(data[1] if isinstance(data, tuple) else data[_find_key(data)])
        return found.long().clone()
    examples: Sequence[Any] = [data[i] for i in range(source.size)]
    labels = [example[_find_key(example)] if isinstance(example, Mapping) else example[1] for example in examples]
    return torch.tensor([int(label) for label in labels])
