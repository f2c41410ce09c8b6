"""The losses of a batch of examples, whether the loss function returns one for each or a single number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from persample import _torch
from persample._internal.rng import seed_all
from persample._internal.text import describe_value
from persample.batches import Batch, BatchDim
from persample.losses import (
    LossFunction,
    check_inputs_and_targets,
    compute_loss,
    compute_sample_losses,
    takes_outputs,
)
from persample.recording import Coupled, Verify
from persample.scanning.errors import ScanError
from persample.scanning.source import move_to_device


class BatchLosses:
    """Computes the losses of batches with a model."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction,
        parameters: Mapping[str, Tensor],
        batch_dim: BatchDim,
        loss_reduction: str,
        verify: Verify,
        coupled: Coupled,
    ) -> None:
        self.model, self.loss_fn, self._parameters = model, loss_fn, parameters
        self.batch_dim, self.loss_reduction = batch_dim, loss_reduction
        self.coupled = coupled
        self.takes_pairs = takes_outputs(loss_fn)
        self._verify = verify

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return next(iter(self._parameters.values())).device

    def prepare(self, batch: Any) -> Any:
        """The batch on the device of the parameters; an error if the loss cannot take it."""
        if self.takes_pairs:
            check_inputs_and_targets(self.loss_fn, batch)
        return move_to_device(batch, self.device)

    def compute(self, ids: Sequence[int], batch: Any) -> Tensor:
        """`(batch,)`, the loss of each sample, or a single number, depending on the loss function."""
        seed_all(ids[0])  # so that a scan that is continued draws the same random numbers
        dim = self.batch_dim if isinstance(self.batch_dim, int) else 0
        loss = compute_sample_losses(self.model, batch, self.loss_fn, dim)
        if not isinstance(loss, Tensor):
            raise ScanError(f"The loss function returned {describe_value(loss)}; it must return a tensor.")
        if self.coupled and loss.shape != (len(ids),):
            raise ScanError(
                f"With coupled={self.coupled!r}, the loss function must return one loss per sample, because samples "
                f"alone have other losses. It returned a tensor of shape {tuple(loss.shape)} for {len(ids)} examples."
            )
        if loss.shape != (len(ids),) and loss.numel() != 1:
            raise ScanError(
                f"The loss function returned a tensor of shape {tuple(loss.shape)} for {len(ids)} examples; it must "
                "return one loss per example, or a single number."
            )
        return loss

    def get_scale(self, loss: Tensor, count: int) -> int:
        """The factor from the sum of what the loss function returned to the sum of the losses of the samples."""
        return 1 if loss.shape == (count,) or self.loss_reduction == "sum" else count

    @torch.no_grad()
    def split(self, loss: Tensor, ids: Sequence[int], batch: Any, is_checked: bool) -> Tensor:
        """`(batch,)`: the loss of each sample. A single number costs one forward pass per sample.

        `is_checked`: whether the losses must add up to that of the batch.
        """
        if loss.shape == (len(ids),):
            return loss
        if any(hasattr(p, "full_tensor") for p in self._parameters.values()):
            raise ScanError("With sharded weights (FSDP2), the loss function must return one loss per sample.")
        losses = torch.stack([self.compute_alone(batch, len(ids), i, ids[0]) for i in range(len(ids))])
        total, found = losses.double().sum(), loss.double().sum()
        if is_checked and not _is_close(total, found * self.get_scale(loss, len(ids)), losses.abs().sum()):
            other = "sum" if self.loss_reduction == "mean" else "mean"
            fits = _is_close(total, found * (1 if other == "sum" else len(ids)), losses.abs().sum())
            advice = f"Pass loss_reduction='{other}'." if fits else "Let the loss function return one loss per sample."
            raise ScanError(
                f"The loss of a batch is {float(found):.4g}, which is not the {self.loss_reduction} of the losses of "
                f"its {len(ids)} samples, {float(total if fits else total / len(ids)):.4g}. {advice}"
            )
        return losses

    def compute_alone(self, batch: Any, count: int, i: int, seed: int) -> Tensor:
        """The loss of sample `i` as a batch of one."""
        seed_all(seed)
        with _torch.DisableTorchFunction():
            return compute_loss(self.model, self.take_sample(batch, count, i), self.loss_fn).reshape(-1).sum()

    def take_sample(self, batch: Any, size: int, i: int) -> Any:
        """Sample `i` as a batch of one. A list with an entry for each sample, such as boxes, keeps one entry."""
        places = _find_lists(batch, size)
        rest = _replace_entries(batch, {place: None for place in places})
        alone = Batch(rest, self.batch_dim, size, self.takes_pairs).take_samples(i, i + 1, lambda tensor: tensor)
        return _replace_entries(alone, {place: [batch[place][i]] for place in places})

    def check_alone(self, ids: Sequence[int], batch: Any, losses: Tensor) -> None:
        """Raise an error if the loss of a sample in its batch, in `losses`, differs from its loss in a batch of one."""
        if self._verify is False:
            return
        batch, count = self.prepare(batch), len(ids)
        with torch.no_grad():
            for i in {0, count - 1}:
                try:
                    alone, again = (self.compute_alone(batch, count, i, seed) for seed in (0, 1))
                except Exception:  # the model does not accept a batch of one
                    return
                if not torch.equal(alone, again):  # the loss is random
                    return
                if not _is_close(losses[i].double(), alone.double(), losses.abs().max()):
                    raise ScanError(
                        f"The loss of example {ids[i]} is {losses[i]:.4g} in its batch, but {alone:.4g} alone. Either "
                        "samples interact in the loss, or batch_dim is wrong, or the batch contains lists with one "
                        "item per sample, which cannot be split. Let the loss function return one loss per sample."
                    )

    @torch.no_grad()
    def find_nonfinite(self, ids: Sequence[int], batch: Any) -> list[int]:
        """The examples of a batch whose loss is not finite, by a forward pass."""
        batch = self.prepare(batch)
        losses = self.split(self.compute(ids, batch), ids, batch, is_checked=False)
        return [ids[i] for i in (~losses.isfinite()).nonzero().flatten().tolist()]

    @torch.no_grad()
    def compute_any(self, batch: Any) -> None:
        """Call the model and the loss with a batch, for an error that they raise."""
        compute_loss(self.model, move_to_device(batch, self.device), self.loss_fn)


def _find_lists(batch: Any, size: int) -> list[Any]:
    """The places of lists with an entry for each sample: dicts, or tensors that are no batches themselves.

    Beside a list of dicts, such as the labels of a detector, every list of tensors has an entry for each sample.
    """
    parts = batch if isinstance(batch, (tuple, list)) else ()
    items = batch.items() if isinstance(batch, Mapping) else enumerate(parts)
    lists = {place: value for place, value in items if isinstance(value, list) and len(value) == size}
    dicts = [place for place, value in lists.items() if all(isinstance(part, Mapping) for part in value)]
    tensors = [place for place, value in lists.items() if all(isinstance(part, Tensor) for part in value)]
    return dicts + [place for place in tensors if dicts or any(part.shape[:1] != (size,) for part in lists[place])]


def _replace_entries(batch: Any, entries: Mapping[Any, Any]) -> Any:
    """A batch with other entries at some places."""
    if not entries:
        return batch
    if isinstance(batch, Mapping):
        return {**batch, **entries}
    return type(batch)(entries.get(place, value) for place, value in enumerate(batch))


def _is_close(found: Tensor, expected: Tensor, scale: Tensor) -> bool:
    """Whether two numbers are equal up to rounding. True for numbers that are not finite: others check these."""
    tolerance = {torch.float64: 1e-6, torch.float32: 5e-3}.get(scale.dtype, 0.1)  # float32 may come from autocast
    return not bool((found - expected).abs() > tolerance * scale.double())
