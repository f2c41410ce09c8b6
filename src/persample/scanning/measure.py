"""What is measured of each example: one batch at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from persample import _torch
from persample._internal.dtypes import widen
from persample._internal.graph import preserve_grads
from persample._internal.rng import seed_all
from persample._internal.state import preserve_state
from persample.batches import Batch, BatchDim
from persample.gradients import PerSampleGradients, StreamedNorms
from persample.losses import (
    LossFunction,
    check_inputs_and_targets,
    compute_loss,
    compute_sample_losses,
    describe_value,
    takes_outputs,
)
from persample.recording.options import Options, Selection
from persample.recording.record import record
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
        parameters: Selection | None = None,
        batch_dim: BatchDim = 0,
        loss_reduction: str = "mean",
        nonfinite: Literal["raise", "keep"] = "raise",
        labelled: bool = False,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise ScanError(f"A scan takes an nn.Module, got {describe_value(model)}.")
        if unknown := set(quantities) - set(QUANTITIES):
            raise ScanError(f"There are no quantities {sorted(unknown)}; there are {', '.join(QUANTITIES)}.")
        if nonfinite not in ("raise", "keep"):
            raise ScanError(f"nonfinite must be 'raise' or 'keep', got {nonfinite!r}.")
        self.model, self.loss_fn = model, loss_fn
        self.quantities = tuple(q for q in QUANTITIES if q in quantities)
        self.projection = projection
        self.parameters = dict(Options(parameters=parameters).select(model))
        if not self.parameters:
            raise ScanError("The model has no parameter that requires grad.")
        self.groups = grouped(list(self.parameters), groups) if "group_norms" in quantities else {}
        self.nonfinite, self.labelled = nonfinite, labelled
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
        """The columns of a batch: `id`, `label`, `loss`, `norm`, `norm/GROUP`, `alignment`, and the `projection`.

        `mean` is the direction of the mean gradient, of length 1.
        """
        batch, count = self._given(batch), len(ids)
        found: Columns = {"id": torch.tensor(list(ids))}
        if self.labelled:
            labels = label_of(batch, count)
            found["label"] = torch.full((count,), -1) if labels is None else labels.long()
        losses, grads = self._recorded(ids, batch)
        found["loss"] = widen(losses)
        norms = grads.norms(per_parameter=True) if grads else {name: torch.zeros(count) for name in self.parameters}
        found["norm"] = _together(norms, norms)
        found |= {f"norm/{group}": _together(norms, names) for group, names in self.groups.items()}
        self._check_finite(ids, found)
        if mean is not None and "alignment" in self.quantities:
            dots = grads.dot(mean) if grads else torch.zeros(count)
            least = torch.finfo(torch.float64).tiny
            found["alignment"] = (dots.double() / found["norm"].clamp(min=least)).clamp(-1, 1)
        if self.projection is not None:
            dim, seed, method = self.projection.dim, self.projection.seed, self.projection.method
            found["projection"] = grads.project(dim, seed, method) if grads else torch.zeros(count, dim)
        return {name: column.detach().cpu() for name, column in found.items()}

    def sum_of_batch(self, ids: range, batch: Any) -> tuple[Direction, int]:
        """The sum of the gradients of a batch's examples by a plain backward pass, and how many they are.

        Examples whose loss or gradient is not finite are left out, if they are not refused.
        """
        batch, count = self._given(batch), len(ids)
        loss = self._loss(ids, batch)
        found: Direction = {}
        if loss.requires_grad:
            scaled = loss.sum() * self._scale(loss, count)
            grads = torch.autograd.grad(scaled, list(self.parameters.values()), allow_unused=True)
            found = {name: grad for name, grad in zip(self.parameters, grads, strict=True) if grad is not None}
        sums = [part.detach().sum(dtype=torch.float64) for part in (loss, *found.values())]  # float16 could overflow
        if torch.stack(sums).isfinite().all():
            return found, count
        if count == 1:
            self._check_finite(ids, {"loss": loss.reshape(1), "norm": torch.stack(sums).sum().reshape(1)})
            return {}, 0
        each = [self.sum_of_batch(ids[i : i + 1], self._sample(batch, count, i)) for i in range(count)]
        names = {name for part, _ in each for name in part}
        total = {name: torch.stack([part[name] for part, _ in each if name in part]).sum(0) for name in names}
        return total, sum(size for _, size in each)

    def check_alone(self, ids: range, batch: Any) -> None:
        """Refuses a loss that is another for a sample in its batch than for the same sample alone."""
        batch, count = self._given(batch), len(ids)
        with torch.no_grad():
            losses = self._each(self._loss(ids, batch), ids, batch)
            for i in {0, count - 1}:
                try:
                    alone, again = (self._alone(batch, count, i, seed) for seed in (0, 1))
                except Exception:  # what takes a batch of several has nothing to compare with
                    return
                if not torch.equal(alone, again):  # nor has what draws random numbers
                    return
                if not _near(losses[i].double(), alone.double(), losses.abs().max()):
                    raise ScanError(
                        f"The loss of example {ids[i]} is {losses[i]:.4g} in its batch, and {alone:.4g} alone. Samples "
                        "meet in the loss, or lie in another dim (batch_dim), or the batch has lists that belong to "
                        "its samples and cannot be cut: have the loss function give a loss for each sample."
                    )

    # ---- inside ----

    def _recorded(self, ids: range, batch: Any) -> tuple[Tensor, PerSampleGradients | StreamedNorms | None]:
        """The losses and the gradients of a batch, or None where no loss depends on a parameter."""
        with record(
            self.model,
            batch_dim=self._batch_dim,
            batch_size=len(ids),
            parameters=list(self.parameters),
            loss_reduction="sum",
            keep="everything" if self.projection or "alignment" in self.quantities else "norms",
        ) as grads:
            loss = self._loss(ids, batch)
            if loss.requires_grad:
                with preserve_grads(loss):  # of a loss that has parameters too
                    (loss.sum() * self._scale(loss, len(ids))).backward()
        return self._each(loss.detach(), ids, batch), grads if loss.requires_grad else None

    def _given(self, batch: Any) -> Any:
        if self.takes_pairs:
            check_inputs_and_targets(self.loss_fn, batch)
        return moved(batch, self.device)

    def _loss(self, ids: range, batch: Any) -> Tensor:
        """Each sample's loss, or the one number that the user's loss is."""
        seed_all(ids.start)  # what draws random numbers draws the same when a scan goes on
        dim = self._batch_dim if isinstance(self._batch_dim, int) else 0
        loss = compute_sample_losses(self.model, batch, self.loss_fn, dim)
        if not isinstance(loss, Tensor):
            raise ScanError(f"The loss function gave {describe_value(loss)}; a tensor is needed.")
        if loss.shape != (len(ids),) and loss.numel() != 1:
            raise ScanError(
                f"The loss function gave a tensor of shape {tuple(loss.shape)} for {len(ids)} examples; a loss for "
                "each is needed, or one number."
            )
        return loss

    def _scale(self, loss: Tensor, count: int) -> float:
        """What makes a sum over the samples of the sum of what the loss function gave."""
        return 1.0 if loss.shape == (count,) or self._loss_reduction == "sum" else float(count)

    @torch.no_grad()
    def _each(self, loss: Tensor, ids: range, batch: Any) -> Tensor:
        """Each sample's loss: where the function tells their sum or mean only, by a forward pass for each."""
        if loss.shape == (len(ids),):
            return loss
        losses = torch.stack([self._alone(batch, len(ids), i, ids.start) for i in range(len(ids))])
        total, found = losses.double().sum(), loss.double().sum()
        if not _near(total, found * self._scale(loss, len(ids)), losses.abs().sum()):
            other = "sum" if self._loss_reduction == "mean" else "mean"
            fits = _near(total, found * (1 if other == "sum" else len(ids)), losses.abs().sum())
            advice = f"Pass loss_reduction='{other}'." if fits else "Have the function give a loss for each sample."
            raise ScanError(
                f"The loss of a batch is {float(found):.4g}, which is not the {self._loss_reduction} of its "
                f"{len(ids)} samples' own losses, {float(total if fits else total / len(ids)):.4g}. {advice}"
            )
        return losses

    def _alone(self, batch: Any, count: int, i: int, seed: int) -> Tensor:
        seed_all(seed)
        with _torch.DisableTorchFunction():
            return compute_loss(self.model, self._sample(batch, count, i), self.loss_fn).reshape(-1).sum()

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
def undisturbed(measurement: Measurement, device: torch.device | None) -> Iterator[None]:
    """Has the model in evaluation mode, on a device; all of it is as it was afterwards, random numbers too."""
    modules = [part for part in (measurement.model, measurement.loss_fn) if isinstance(part, nn.Module)]
    flags = {module: module.training for part in modules for module in part.modules()}
    places = {p.device for part in modules for p in (*part.parameters(), *part.buffers())}
    if device is not None and len(places) > 1:
        raise ScanError(f"The model is on several devices ({', '.join(map(str, places))}): leave `device` out.")
    with preserve_state(*modules), torch.inference_mode(False), torch.enable_grad():
        try:
            for part in modules:
                part.eval()
                if device is not None:
                    part.to(device)
            yield
        finally:
            for part in modules if device is not None and places else ():
                part.to(next(iter(places)))
            for module, training in flags.items():
                module.training = training


def _near(found: Tensor, expected: Tensor, scale: Tensor) -> bool:
    """Whether two numbers are the same but for rounding; what is not finite is told elsewhere."""
    tolerance = {torch.float64: 1e-6, torch.float32: 5e-3}.get(scale.dtype, 0.1)  # autocast may be behind a float32
    return not bool((found - expected).abs() > tolerance * scale.double())


def _together(norms: Mapping[str, Tensor], names: Any) -> Tensor:
    return torch.stack([norms[name].double().square() for name in names]).sum(0).sqrt()
