"""What the model predicts for each example, from the outputs of the forward pass that a scan makes anyway."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from persample._internal.host import copy_to_host
from persample.losses import LossFunction, get_function, is_class_loss, takes_outputs
from persample.recording import ModuleHook, is_paused
from persample.scanning.screening import LABEL_KEYS
from persample.scanning.source import find_labels

Kind = Literal["classes", "binary", "labels", "numbers"]

_BINARY_LOSSES = (nn.BCEWithLogitsLoss, nn.BCELoss, F.binary_cross_entropy_with_logits, F.binary_cross_entropy)
_NUMBER_LOSSES = (
    nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss,
)  # fmt: skip
_FROM_PROBABILITIES = (nn.BCELoss, F.binary_cross_entropy)
# A user's loss must fall with the probability of the label, or the outputs are no scores of classes.
_MIN_RANK_CORRELATION = 0.5
_MAX_NUMBERS = 32  # of a predicted vector; longer ones are rather pictures or embeddings


class Outputs:
    """The outputs of the model in one forward pass. Empty if the model was called more than once."""

    def __init__(self, size: int, batch_dim: Any) -> None:
        self._size, self._dim = size, batch_dim if isinstance(batch_dim, int) else 0
        self._found: list[Tensor] = []

    @contextmanager
    def capture(self, model: nn.Module) -> Iterator[None]:
        """Keep what the model returns in the block."""
        hook = model.register_forward_hook(ModuleHook(lambda module, args, output: self._keep(output)))
        try:
            yield
        finally:
            hook.remove()

    def _keep(self, output: Any) -> None:
        if is_paused():  # a verification calls the model, too
            return
        logits = find_logits(output)
        if logits is not None and logits.dim() > self._dim and logits.shape[self._dim] == self._size:
            # The loss may change its argument in place. Larger outputs are used by no column.
            self._found.append(logits.detach().movedim(self._dim, 0).clone() if logits.dim() <= 2 else logits.detach())

    def get(self) -> Tensor | None:
        """The output of the only call; None if there was another call, or no output with one entry per sample."""
        return self._found[0] if len(self._found) == 1 else None


class Predictions:
    """Describes the predictions of batches. The first batch decides what the outputs of the model are.

    - "classes": scores of classes. `other` is the most probable class beside the given one, `other_probability` and
      `given_probability` are the probabilities of both, `el2n` is the distance of all probabilities from the given
      label (Paul et al., 2021);
    - "binary": the same for a single score, with the label from the targets 0 and 1;
    - "labels": several labels that are on or off. `worst_label` is the label that the model contradicts most,
      `worst_given` says whether it was given, and `worst_probability` is the model's probability that it is on;
    - "numbers": `prediction` and `target`, one number per example, or a vector of at most 32 numbers. They are missing
      in batches with vectors of another length than the first batch.
    """

    def __init__(self, loss_fn: LossFunction) -> None:
        self._loss_fn = loss_fn
        self._kind: Kind | None = None
        self._columns: dict[str, Tensor] | None = None  # of the first batch, without entries

    @torch.no_grad()
    def describe(self, outputs: Tensor | None, batch: Any, losses: Tensor) -> dict[str, Tensor]:
        """The columns of a batch; none if the outputs of the first batch were not understood."""
        outputs = None if outputs is None else copy_to_host(outputs.detach()).double()
        targets = find_targets(batch, len(losses))
        targets = None if targets is None else copy_to_host(targets.detach())
        if self._columns is None:
            self._kind = self._decide(outputs, targets, copy_to_host(losses.detach()).double())
        columns = {} if outputs is None or targets is None else self._describe(outputs, targets)
        if self._columns is None:
            self._columns = {name: column[:0] for name, column in columns.items()}
        if columns and all(columns[name].shape[1:] == first.shape[1:] for name, first in self._columns.items()):
            return columns
        return {name: make_missing(len(losses), first) for name, first in self._columns.items()}

    def _describe(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        if self._kind is None:
            return {}
        count = len(outputs)
        if self._kind == "classes":
            return _describe_classes(compute_probabilities(outputs), targets.long())
        if self._kind == "numbers":
            shape = (count,) if outputs.numel() == count else (count, -1)
            return {"prediction": outputs.reshape(shape), "target": targets.reshape(shape).double()}
        on = outputs if self._is_from(_FROM_PROBABILITIES) else outputs.sigmoid()
        if self._kind == "labels":
            return _describe_labels(on, targets.double())
        labels = targets.reshape(count).long()
        return {"label": labels, **_describe_classes(torch.stack([1 - on, on], -1).reshape(count, 2), labels)}

    def _decide(self, outputs: Tensor | None, targets: Tensor | None, losses: Tensor) -> Kind | None:
        if outputs is None or targets is None or outputs.dim() > 2:
            return None
        count, is_known = len(losses), takes_outputs(self._loss_fn)
        if outputs.numel() == targets.numel() and bool(((targets == 0) | (targets == 1)).all()):
            is_binary = self._is_from(_BINARY_LOSSES) or (not is_known and _is_binary_loss(outputs, targets, losses))
            if is_binary:
                return "binary" if outputs.numel() == count else "labels"
        if not targets.is_floating_point():
            if outputs.dim() != 2 or outputs.shape[1] < 2 or targets.dim() != 1 or targets.max() >= outputs.shape[1]:
                return None
            is_class = is_class_loss(self._loss_fn) if is_known else _falls_with_probability(outputs, targets, losses)
            return "classes" if is_class else None
        if outputs.numel() == targets.numel() == count:
            return "numbers" if not is_known or self._is_from(_NUMBER_LOSSES) else None
        if outputs.shape != targets.shape or outputs.shape[1] > _MAX_NUMBERS:
            return None
        compares_numbers = self._is_from(_NUMBER_LOSSES) if is_known else _is_distance(outputs, targets, losses)
        return "numbers" if compares_numbers else None

    def _is_from(self, functions: tuple[Any, ...]) -> bool:
        """Whether the loss is one of some modules and functions of torch."""
        func = get_function(self._loss_fn)
        return any(isinstance(func, f) if isinstance(f, type) else func is f for f in functions)


def find_logits(output: Any) -> Tensor | None:
    """The scores in the output of a model: a tensor, the first of a tuple, or `logits` of an object or a dict.

    Models of torchvision for segmentation return their scores as `out` of a dict.
    """
    found: Any = output
    if isinstance(output, Mapping):
        found = output.get("logits", output.get("out"))
    elif hasattr(output, "logits"):
        found = output.logits
    elif isinstance(output, (tuple, list)) and output:
        found = output[0]
    return found if isinstance(found, Tensor) and found.is_floating_point() else None


def compute_probabilities(outputs: Tensor) -> Tensor:
    """`(batch, classes)`: probabilities from scores, from logarithms of probabilities, or from probabilities.

    >>> compute_probabilities(torch.tensor([[0.25, 0.75]])), compute_probabilities(torch.tensor([[0.0, 0.0]]))
    (tensor([[0.2500, 0.7500]]), tensor([[0.5000, 0.5000]]))
    """
    if (outputs >= 0).all() and ((outputs.sum(1) - 1).abs() < 1e-4).all():
        return outputs
    return outputs.softmax(1)


def _describe_classes(probabilities: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Labels outside the classes, such as -100, are not given: `other` is then the most probable of all classes."""
    is_given = (labels >= 0) & (labels < probabilities.shape[1])
    at = labels.where(is_given, 0)[:, None]
    given = probabilities.gather(1, at)[:, 0].where(is_given, torch.nan)
    hidden = torch.where(is_given[:, None], -1.0, probabilities.gather(1, at))
    other = probabilities.scatter(1, at, hidden).max(1)
    squares = probabilities.square().sum(1)
    el2n = (squares - 2 * given + 1).clamp(min=0).sqrt()  # |p - e|² for the label e
    return {
        "other": other.indices.int(),
        "other_probability": other.values.float(),
        "given_probability": given.float(),
        "el2n": el2n.float(),
    }


def _describe_labels(on: Tensor, targets: Tensor) -> dict[str, Tensor]:
    on, targets = on.reshape(len(on), -1), targets.reshape(len(on), -1)
    worst = (on - targets).abs().argmax(1, keepdim=True)
    return {
        "worst_label": worst[:, 0].int(),
        "worst_given": targets.gather(1, worst)[:, 0].to(torch.int8),
        "worst_probability": on.gather(1, worst)[:, 0].float(),
    }


def find_targets(batch: Any, count: int) -> Tensor | None:
    """The labels of a batch, or its targets if they are no labels."""
    labels = find_labels(batch, count)
    if labels is not None:
        return labels
    found = None
    if isinstance(batch, Mapping):
        found = next((batch[key] for key in LABEL_KEYS if key in batch), None)
    elif isinstance(batch, (tuple, list)) and len(batch) == 2:
        found = batch[1]
    return found if isinstance(found, Tensor) and found.dim() and len(found) == count else None


def _is_binary_loss(outputs: Tensor, targets: Tensor, losses: Tensor) -> bool:
    """Whether a user's loss is the binary cross entropy of the outputs."""
    entries = F.binary_cross_entropy_with_logits(outputs.reshape(targets.shape), targets.double(), reduction="none")
    entries = entries.reshape(len(losses), -1)
    return any(torch.allclose(found, losses, rtol=1e-3, atol=1e-3) for found in (entries.mean(1), entries.sum(1)))


def _is_distance(outputs: Tensor, targets: Tensor, losses: Tensor) -> bool:
    """Whether a user's loss is a distance of outputs and targets, up to a factor."""
    for distance in (F.mse_loss, F.l1_loss, F.smooth_l1_loss):
        expected = distance(outputs, targets.double(), reduction="none").sum(1)
        factor = losses.sum() / expected.sum()
        if factor > 0 and torch.allclose(factor * expected, losses, rtol=1e-3, atol=1e-3 * float(losses.abs().max())):
            return True
    return False


def make_missing(count: int, like: Tensor) -> Tensor:
    """Entries of a column for examples without it: NaN, or -1."""
    return like.new_full((count, *like.shape[1:]), torch.nan if like.is_floating_point() else -1)


def _falls_with_probability(outputs: Tensor, labels: Tensor, losses: Tensor) -> bool:
    """Whether a user's loss agrees with the cross entropy of the outputs: as a number, or at least in its order."""
    if (labels < 0).any():
        outputs, losses, labels = outputs[labels >= 0], losses[labels >= 0], labels[labels >= 0]
    if not len(labels):
        return False
    expected = -compute_probabilities(outputs).gather(1, labels[:, None].long())[:, 0].log()
    if torch.allclose(expected, losses, rtol=1e-3, atol=1e-3):
        return True
    ranks = torch.stack([expected.argsort().argsort(), losses.argsort().argsort()]).double()
    by_chance = 3 / max(1, len(losses) - 1) ** 0.5  # three standard deviations of unrelated ranks
    return bool(torch.corrcoef(ranks)[0, 1] >= max(_MIN_RANK_CORRELATION, by_chance))
