"""What is measured of each example: one batch at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from persample.checking.subject import untouched
from persample.gradients import PerSampleGradients
from persample.losses import LossFunction, check_pair, described, loss_of, losses_of, takes_outputs
from persample.options import BatchDim, Chosen, chosen, trainable_of
from persample.record import record
from persample.samples import Batch
from persample.scanning.errors import NotFinite, ScanError
from persample.scanning.source import label_of, moved

QUANTITIES = ("loss", "norm", "group_norms", "self_influence", "alignment", "noise_scale")
Groups = Callable[[str], str] | Mapping[str, Sequence[str]]

# Where the user does not say which parameters belong together: modules, as deep as gives at most so many groups.
MOST_GROUPS = 16

Direction = dict[str, Tensor]
Columns = dict[str, Tensor]


@dataclass(frozen=True)
class Projection:
    """How gradients are projected: see `PerSampleGradients.project`."""

    dim: int
    seed: int = 0
    method: Literal["tensor", "sparse"] = "tensor"


class Measurement:
    """A model and its loss, and what is to be known of each example."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction,
        *,
        quantities: Sequence[str] = QUANTITIES,
        projection: Projection | None = None,
        groups: Groups | None = None,
        parameters: Chosen | None = None,
        batch_dim: BatchDim = 0,
        loss_reduction: str = "mean",
        nonfinite: Literal["raise", "keep"] = "raise",
    ) -> None:
        if not isinstance(model, nn.Module):
            raise ScanError(f"A scan takes an nn.Module, got {described(model)}.")
        if unknown := set(quantities) - set(QUANTITIES):
            raise ScanError(f"There are no quantities {sorted(unknown)}; there are {', '.join(QUANTITIES)}.")
        if nonfinite not in ("raise", "keep"):
            raise ScanError(f"nonfinite must be 'raise' or 'keep', got {nonfinite!r}.")
        self.model, self.loss_fn = model, loss_fn
        self.quantities = tuple(q for q in QUANTITIES if q in quantities)
        self.projection = projection
        self.parameters = dict(chosen(trainable_of(model), parameters))
        if not self.parameters:
            raise ScanError("The model has no parameter that requires grad.")
        self.groups = grouped(list(self.parameters), groups) if "group_norms" in quantities else {}
        self.nonfinite = nonfinite
        self._batch_dim, self._loss_reduction = batch_dim, loss_reduction
        self.takes_pairs = takes_outputs(loss_fn)

    @property
    def needs_mean(self) -> bool:
        """Whether the mean gradient of all examples has to be known first."""
        return bool({"alignment", "noise_scale"} & set(self.quantities))

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(iter(self.parameters.values())).device

    def of_batch(self, ids: range, batch: Any, mean: Direction | None) -> Columns:
        """The columns of a batch: `id`, `label`, `loss`, `norm`, `norm/GROUP`, `alignment`, and the `projection`."""
        batch = self._given(batch)
        found: Columns = {"id": torch.tensor(list(ids))}
        if (labels := label_of(batch)) is not None:
            found["label"] = labels
        losses, grads = self.recorded(ids, batch)
        if len(losses) != len(ids):
            raise ScanError(f"The loss of a batch of {len(ids)} examples is one of {len(losses)} samples.")
        found["loss"] = losses
        norms = grads.norms(per_parameter=True)
        assert isinstance(norms, dict)
        found["norm"] = _together(norms, norms)
        found |= {f"norm/{group}": _together(norms, names) for group, names in self.groups.items()}
        self._check_finite(ids, found)
        if mean is not None and "alignment" in self.quantities:
            found["alignment"] = _cosines(grads.dot(mean), found["norm"], mean)
        if self.projection is not None:
            dim, seed, method = self.projection.dim, self.projection.seed, self.projection.method
            found["projection"] = grads.project(dim, seed, method)
        return {name: column.detach().cpu() for name, column in found.items()}

    def sum_of_batch(self, ids: range, batch: Any) -> tuple[Direction, int]:
        """The sum of the gradients of a batch's examples by a plain backward pass, and how many they are."""
        batch, count = self._given(batch), len(ids)
        losses, loss = self._losses(ids, batch)
        self._check_finite(ids, {"loss": losses})
        total = loss.sum() * self._scale(losses, loss)
        grads = torch.autograd.grad(total, list(self.parameters.values()), allow_unused=True)
        found = {name: grad for name, grad in zip(self.parameters, grads, strict=True) if grad is not None}
        if torch.stack([grad.sum() for grad in found.values()]).isfinite().all():
            return found, count
        if count == 1:  # what is no number is no part of the mean
            return {}, 0
        each = [self.sum_of_batch(ids[i : i + 1], self._sample(batch, count, i)) for i in range(count)]
        sums = [part for part, size in each if size]
        return {name: torch.stack([part[name] for part in sums]).sum(0) for name in found if sums}, len(sums)

    def recorded(self, ids: range, batch: Any) -> tuple[Tensor, PerSampleGradients]:
        """The losses and the gradients of a batch that is where the model is."""
        with record(
            self.model,
            batch_dim=self._batch_dim,
            batch_size=len(ids),
            parameters=list(self.parameters),
            loss_reduction="sum",
            keep="everything" if self.projection or "alignment" in self.quantities else "norms",
        ) as grads:
            losses, loss = self._losses(ids, batch)
            (loss.sum() * self._scale(losses, loss)).backward()
        return losses.detach(), grads

    def _scale(self, losses: Tensor, loss: Tensor) -> float:
        """What makes the sum of the samples' losses of what backward is called on."""
        return 1.0 if loss is losses or self._loss_reduction == "sum" else float(len(losses))

    def _given(self, batch: Any) -> Any:
        if self.takes_pairs:
            check_pair(self.loss_fn, batch)
        return moved(batch, self.device)

    def _losses(self, ids: range, batch: Any) -> tuple[Tensor, Tensor]:
        """Each sample's loss, and what to call backward on: the same, or the one number that the user's loss is."""
        torch.manual_seed(ids.start)  # what draws random numbers draws the same when a scan goes on
        loss = losses_of(self.model, batch, self.loss_fn)
        if not isinstance(loss, Tensor):
            raise ScanError(f"The loss function gave {described(loss)}; a tensor is needed.")
        if loss.shape == (len(ids),):
            return loss, loss
        if loss.numel() != 1:
            raise ScanError(
                f"The loss function gave a tensor of shape {tuple(loss.shape)} for {len(ids)} examples; a loss for "
                "each is needed, or one number."
            )
        return self._one_by_one(batch, len(ids)), loss

    @torch.no_grad()
    def _one_by_one(self, batch: Any, size: int) -> Tensor:
        """Each sample's loss by a forward pass of its own, where the loss function tells their sum or mean only."""
        with torch._C.DisableTorchFunction():
            losses = [loss_of(self.model, self._sample(batch, size, i), self.loss_fn).reshape(()) for i in range(size)]
        return torch.stack(losses)

    def _sample(self, batch: Any, size: int, i: int) -> Any:
        return Batch(batch, self._batch_dim, size, self.takes_pairs).part(i, i + 1, lambda tensor: tensor)

    def _check_finite(self, ids: range, found: Columns) -> None:
        if self.nonfinite == "keep":
            return
        for name, what in (("loss", "loss"), ("norm", "gradient")):
            if name in found and not found[name].isfinite().all():
                raise NotFinite([ids[i] for i in (~found[name].isfinite()).nonzero().flatten().tolist()], what)


def grouped(names: Sequence[str], groups: Groups | None) -> dict[str, list[str]]:
    """The parameters of each group: as the user says, or of the modules at the depth that gives a readable number.

    >>> grouped(["conv.weight", "conv.bias", "head.0.weight", "head.2.weight"], None)
    {'conv': ['conv.weight', 'conv.bias'], 'head.0': ['head.0.weight'], 'head.2': ['head.2.weight']}
    >>> grouped(["conv.weight", "conv.bias"], lambda name: name.rpartition(".")[2])
    {'weight': ['conv.weight'], 'bias': ['conv.bias']}
    """
    if isinstance(groups, Mapping):
        twice = [name for name, count in Counter(n for part in groups.values() for n in part).items() if count > 1]
        unknown = sorted({name for part in groups.values() for name in part} - set(names))
        if twice or unknown:
            raise ScanError(f"groups names {(unknown or twice)[0]!r}, {'no parameter' if unknown else 'twice'}.")
        return {group: list(part) for group, part in groups.items()}
    if groups is None:
        modules = [name.split(".")[:-1] or [name] for name in names]
        depths = range(max(map(len, modules)), 0, -1)
        fits = (d for d in depths if len({tuple(m[:d]) for m in modules}) <= MOST_GROUPS)
        depth = next(fits, 1)
        keys = [".".join(module[:depth]) for module in modules]
    else:
        keys = [groups(name) for name in names]
    found: dict[str, list[str]] = {}
    for key, name in zip(keys, names, strict=True):
        found.setdefault(key, []).append(name)
    return found


@contextmanager
def undisturbed(model: nn.Module, device: torch.device | None) -> Iterator[None]:
    """Has the model in evaluation mode, on a device; all of it is as it was afterwards, random numbers too."""
    flags = {module: module.training for module in model.modules()}
    places = {p.device for p in model.parameters()}
    if device is not None and len(places) > 1:
        raise ScanError(f"The model is on several devices ({', '.join(map(str, places))}): leave `device` out.")
    with untouched(model), torch.inference_mode(False), torch.enable_grad():
        try:
            model.eval()
            if device is not None:
                model.to(device)
            yield
        finally:
            if device is not None and places:
                model.to(next(iter(places)))
            for module, training in flags.items():
                module.training = training


def _together(norms: Mapping[str, Tensor], names: Any) -> Tensor:
    return torch.stack([norms[name].double().square() for name in names]).sum(0).sqrt()


def _cosines(dots: Tensor, norms: Tensor, mean: Direction) -> Tensor:
    length = torch.stack([part.double().square().sum() for part in mean.values()]).sum().sqrt()
    return (dots.double() / (norms * length).clamp(min=torch.finfo(torch.float64).tiny)).clamp(-1, 1)
