"""Measures the examples of one batch: losses, gradient norms, alignment, projected gradients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from persample import _torch
from persample._internal.dtypes import widen
from persample._internal.graph import preserve_grads
from persample._internal.groups import group_by_module
from persample._internal.host import copy_to_host
from persample._internal.rng import seed_all
from persample._internal.state import preserve_state
from persample._internal.text import describe_value
from persample.batches import Batch, BatchDim
from persample.errors import PerSampleError
from persample.gradients import PerSampleGradients, ProjectionMethod, Stack, StreamedNorms, make_projection
from persample.gradients import Projection as RowProjection
from persample.losses import (
    LossFunction,
    check_inputs_and_targets,
    compute_loss,
    compute_sample_losses,
    takes_outputs,
)
from persample.recording import Coupled, Options, Selection, Verify, get_trainable, record
from persample.scanning.errors import NotFinite, ScanError
from persample.scanning.predictions import Outputs, Predictions
from persample.scanning.reduced import ReducedRows
from persample.scanning.source import find_labels, move_to_device

# What a scan measures by default. "alignment" is exact, and costs a second pass over the data.
QUANTITIES = ("loss", "norm", "group_norms", "self_influence", "estimated_alignment", "noise_scale", "predictions")
ALL_QUANTITIES = (*QUANTITIES, "alignment")
Shapes = tuple[tuple[str, torch.Size], ...]  # by parameter name
Groups = Callable[[str], str] | Mapping[str, Sequence[str]]

Gradient = dict[str, Tensor]  # by parameter name
Columns = dict[str, Tensor]  # by column name, one entry per example


@dataclass(frozen=True)
class Projection:
    """Arguments of `PerSampleGradients.project`.

    Each checkpoint has a seed of its own, so that the errors of the projections cancel in averages over checkpoints.
    """

    dim: int
    seed: int = 0
    method: ProjectionMethod = "kronecker"

    def make(self, checkpoint: int, shapes: Shapes, device: torch.device) -> RowProjection:
        """The projection of the gradients with a checkpoint, for parameters of these shapes."""
        return make_projection(self.method, self.dim, self.seed + checkpoint, shapes, device)


@dataclass(frozen=True)
class Recorded:
    """The losses, gradients and outputs of a batch. The gradients are None if the loss depends on no parameter."""

    losses: Tensor
    grads: PerSampleGradients | StreamedNorms | None
    outputs: Outputs


class Receiver(Protocol):
    """What gets the term of each parameter."""

    def receive(self, stack: Stack) -> None:
        """Take the term of one parameter, or of several."""


class Measurement:
    """Measures batches of examples with a model and a loss."""

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
        has_labels: bool = False,
        verify: Verify = "first",
        coupled: Coupled = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise ScanError(f"model must be an nn.Module, got {describe_value(model)}.")
        if unknown := set(quantities) - set(ALL_QUANTITIES):
            raise ScanError(f"Unknown quantities {sorted(unknown)}. Choose from {', '.join(ALL_QUANTITIES)}.")
        is_default = tuple(quantities) == QUANTITIES
        if coupled is not None:
            quantities, verify = _check_coupled(quantities, nonfinite), False
        if projection is None and "estimated_alignment" in quantities:
            if not is_default:
                raise ScanError(
                    "'estimated_alignment' is computed from projected gradients, and project=None keeps none. Ask for "
                    "'alignment', which needs a second pass over the data, or pass a number as `project`."
                )
            quantities = ["alignment" if name == "estimated_alignment" else name for name in quantities]
        if nonfinite not in ("raise", "keep"):
            raise ScanError(f"nonfinite must be 'raise' or 'keep', got {nonfinite!r}.")
        self.model, self.loss_fn = model, loss_fn
        self.quantities = tuple(q for q in ALL_QUANTITIES if q in quantities)
        self.projection = projection
        self.parameters = dict(Options(parameters=parameters).select(get_trainable(model)))
        if not self.parameters:
            raise ScanError("There is no parameter to scan: none of the chosen parameters requires grad.")
        self.checkpoint = 0  # the number of the one that is loaded
        self.shapes = tuple((name, p.shape) for name, p in self.parameters.items())
        self.groups = group_parameters(list(self.parameters), groups) if "group_norms" in quantities else {}
        self.nonfinite, self.has_labels = nonfinite, has_labels
        self._batch_dim, self._loss_reduction, self._verify = batch_dim, loss_reduction, verify
        self._coupled = coupled
        self.takes_pairs = takes_outputs(loss_fn)
        self._predictions = Predictions(loss_fn)
        self._keeps_terms = False  # until the backward pass has ended

    @property
    def needs_direction(self) -> bool:
        """Whether a quantity needs the mean gradient before examples are measured, and so a pass of its own."""
        return "alignment" in self.quantities

    @property
    def needs_sum(self) -> bool:
        """Whether a quantity needs the sum of all gradients. The noise scale does not if there are projections."""
        return self.needs_direction or ("noise_scale" in self.quantities and self.projection is None)

    @property
    def needs_projected_mean(self) -> bool:
        """Whether a quantity needs the mean of the projected gradients."""
        is_estimated = "noise_scale" in self.quantities and not self.needs_sum
        return "estimated_alignment" in self.quantities or is_estimated

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return next(iter(self.parameters.values())).device

    def measure_batch(self, ids: Sequence[int], batch: Any, direction: Gradient | None) -> Columns:
        """The columns of a batch: `id`, `label`, `loss`, `norm`, `norm/GROUP`, `alignment`, `projection`, predictions.

        `direction` is the mean gradient of all examples, scaled to length 1. Without it there is no `alignment`.
        """
        rows = self._make_rows(len(ids), direction if self.needs_direction else None, with_sum=False)
        return self._measure(ids, self._prepare(batch), rows, direction)

    def measure_and_sum(self, ids: Sequence[int], batch: Any) -> tuple[Columns, Gradient, int]:
        """`measure_batch` without a direction, and from the same pass `sum_gradients`."""
        batch = self._prepare(batch)
        rows = self._make_rows(len(ids), None, with_sum=True)
        columns = self._measure(ids, batch, rows, None)
        if not (columns["loss"].isfinite().all() and columns["norm"].isfinite().all()):
            return columns, *self.sum_gradients(ids, batch)
        return columns, rows.total, len(ids)

    def pass_terms(self, ids: Sequence[int], batch: Any, receiver: Receiver) -> None:
        """Pass the gradients of a batch to a receiver, each when it arrives, and those of a repeated pass again."""
        self._check_finite(ids, {"loss": self._record(ids, self._prepare(batch), receiver).losses})

    def _make_rows(self, count: int, direction: Gradient | None, with_sum: bool) -> ReducedRows:
        return ReducedRows(count, self.device, self._projection, direction, with_sum)

    @property
    def _projection(self) -> RowProjection | None:
        projection = self.projection
        return None if projection is None else projection.make(self.checkpoint, self.shapes, self.device)

    def _measure(self, ids: Sequence[int], batch: Any, rows: ReducedRows, direction: Gradient | None) -> Columns:
        count, recorded = len(ids), self._record(ids, batch, rows)
        grads = recorded.grads
        columns: Columns = {"id": torch.tensor(list(ids))}
        if self.has_labels:
            labels = find_labels(batch, count)
            columns["label"] = torch.full((count,), -1) if labels is None else labels.long()
        columns["loss"] = widen(recorded.losses)
        if "predictions" in self.quantities:
            columns |= self._predictions.describe(recorded.outputs.get(), batch, recorded.losses)
        columns |= self._compute_norms(grads, count)
        if direction is not None and self.needs_direction:
            least = torch.finfo(torch.float64).tiny
            columns["alignment"] = (rows.dot() / columns["norm"].clamp(min=least)).clamp(-1, 1)
        if self.projection is not None:
            columns["projection"] = rows.project()
        columns = {name: copy_to_host(column.detach()) for name, column in columns.items()}
        self._check_finite(ids, columns)
        return columns

    def _compute_norms(self, grads: PerSampleGradients | StreamedNorms | None, count: int) -> Columns:
        """`norm`, and `norm/GROUP` for each group."""
        if grads is None:
            return {name: torch.zeros(count).double() for name in ("norm", *(f"norm/{group}" for group in self.groups))}
        # By parameter, also without groups: `norms()` adds up in the order in which terms arrive, which may differ.
        squares = {name: norms.double().square() for name, norms in grads.norms(per_parameter=True).items()}
        columns = {"norm": torch.stack(list(squares.values())).sum(0).sqrt()}
        for group, names in self.groups.items():
            columns[f"norm/{group}"] = torch.stack([squares[name] for name in names]).sum(0).sqrt()
        return columns

    def sum_gradients(self, ids: Sequence[int], batch: Any) -> tuple[Gradient, int]:
        """Sum of the gradients of a batch by a plain backward pass, and the number of examples in the sum.

        Examples with a loss or gradient that is not finite raise an error, or are left out with `nonfinite="keep"`.
        """
        batch, count = self._prepare(batch), len(ids)
        loss, total = self._differentiate(ids, batch)
        sums = [part.detach().sum(dtype=torch.float64) for part in (loss, *total.values())]  # float16 could overflow
        if torch.stack(sums).isfinite().all():
            return total, count
        if count == 1:
            self._check_finite(ids, {"loss": loss.reshape(1), "norm": torch.stack(sums).sum().reshape(1)})
            return {}, 0
        parts = [self.sum_gradients(ids[i : i + 1], self._take_sample(batch, count, i)) for i in range(count)]
        names = {name for part, _ in parts for name in part}
        total = {name: torch.stack([part[name] for part, _ in parts if name in part]).sum(0) for name in names}
        return total, sum(size for _, size in parts)

    def _differentiate(self, ids: Sequence[int], batch: Any) -> tuple[Tensor, Gradient]:
        """What the loss function returned, or the loss of each sample; and the gradient of the sum of the losses."""
        if self._keeps_terms:  # autograd.grad does not reach the weights in a reentrant checkpoint
            rows = self._make_rows(len(ids), None, with_sum=True)
            return self._record(ids, batch, rows).losses, rows.total
        loss = self._compute_loss(ids, batch)
        if not loss.requires_grad:
            return loss, {}
        scaled = loss.sum() * self._get_scale(loss, len(ids))
        grads = torch.autograd.grad(scaled, list(self.parameters.values()), allow_unused=True)
        return loss, {name: grad for name, grad in zip(self.parameters, grads, strict=True) if grad is not None}

    def check_losses_alone(self, ids: Sequence[int], batch: Any, losses: Tensor) -> None:
        """Raise an error if the loss of a sample in its batch, in `losses`, differs from its loss in a batch of one."""
        if self._verify is False:
            return
        batch, count = self._prepare(batch), len(ids)
        with torch.no_grad():
            for i in {0, count - 1}:
                try:
                    alone, again = (self._compute_loss_alone(batch, count, i, seed) for seed in (0, 1))
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
    def find_nonfinite_losses(self, ids: Sequence[int], batch: Any) -> list[int]:
        """The examples of a batch whose loss is not finite, by a forward pass."""
        batch = self._prepare(batch)
        losses = self._get_losses(self._compute_loss(ids, batch), ids, batch, is_checked=False)
        return [ids[i] for i in (~losses.isfinite()).nonzero().flatten().tolist()]

    @torch.no_grad()
    def compute_any_loss(self, batch: Any) -> None:
        """Call the model and the loss with a batch, for an error that they raise."""
        compute_loss(self.model, move_to_device(batch, self.device), self.loss_fn)

    # ---- helpers ----

    def _record(self, ids: Sequence[int], batch: Any, rows: Receiver) -> Recorded:
        """Record a batch, and keep in `rows` what is needed of its gradients."""
        if not self._keeps_terms:
            try:
                return self._record_once(ids, batch, rows)
            except PerSampleError as error:
                # A reentrant checkpoint has backward passes of its own, so that terms are complete only at the end.
                if type(error) is not PerSampleError:
                    raise
            self._keeps_terms = True
        return self._record_once(ids, batch, rows)

    def _record_once(self, ids: Sequence[int], batch: Any, rows: Receiver) -> Recorded:
        outputs = Outputs(len(ids), self._batch_dim)
        with record(
            self.model,
            batch_dim=self._batch_dim,
            batch_size=len(ids),
            parameters=list(self.parameters),
            loss_reduction="sum",
            divisor="own"
            if self._coupled is None
            else "batch",  # rows must not depend on which examples are in a batch
            keep="everything" if self._keeps_terms else "norms",
            verify=self._verify,
            coupled=self._coupled,
            nonfinite="keep",  # what is not finite is noticed by example, not by sample of the batch
        ) as grads:
            if not self._keeps_terms:
                grads.pass_terms_to(rows.receive)
            with outputs.capture(self.model):
                loss = self._compute_loss(ids, batch)
            if loss.requires_grad:
                with preserve_grads(loss):  # the loss function may have parameters, too
                    (loss.sum() * self._get_scale(loss, len(ids))).backward()
        if self._keeps_terms and loss.requires_grad:
            grads.pass_terms_to(rows.receive)
        is_checked = not grads.has_own_means
        return Recorded(
            self._get_losses(loss.detach(), ids, batch, is_checked), grads if loss.requires_grad else None, outputs
        )

    def _prepare(self, batch: Any) -> Any:
        if self.takes_pairs:
            check_inputs_and_targets(self.loss_fn, batch)
        return move_to_device(batch, self.device)

    def _compute_loss(self, ids: Sequence[int], batch: Any) -> Tensor:
        """`(batch,)`, the loss of each sample, or a single number, depending on the loss function."""
        seed_all(ids[0])  # so that a scan that is continued draws the same random numbers
        dim = self._batch_dim if isinstance(self._batch_dim, int) else 0
        loss = compute_sample_losses(self.model, batch, self.loss_fn, dim)
        if not isinstance(loss, Tensor):
            raise ScanError(f"The loss function returned {describe_value(loss)}; it must return a tensor.")
        if self._coupled and loss.shape != (len(ids),):
            raise ScanError(
                f"With coupled={self._coupled!r}, the loss function must return one loss per sample, because samples "
                f"alone have other losses. It returned a tensor of shape {tuple(loss.shape)} for {len(ids)} examples."
            )
        if loss.shape != (len(ids),) and loss.numel() != 1:
            raise ScanError(
                f"The loss function returned a tensor of shape {tuple(loss.shape)} for {len(ids)} examples; it must "
                "return one loss per example, or a single number."
            )
        return loss

    def _get_scale(self, loss: Tensor, count: int) -> int:
        """The factor from the sum of what the loss function returned to the sum of the losses of the samples."""
        return 1 if loss.shape == (count,) or self._loss_reduction == "sum" else count

    @torch.no_grad()
    def _get_losses(self, loss: Tensor, ids: Sequence[int], batch: Any, is_checked: bool) -> Tensor:
        """`(batch,)`: the loss of each sample. A single number costs one forward pass per sample.

        `is_checked`: whether the losses must add up to that of the batch.
        """
        if loss.shape == (len(ids),):
            return loss
        losses = torch.stack([self._compute_loss_alone(batch, len(ids), i, ids[0]) for i in range(len(ids))])
        total, found = losses.double().sum(), loss.double().sum()
        if is_checked and not _is_close(total, found * self._get_scale(loss, len(ids)), losses.abs().sum()):
            other = "sum" if self._loss_reduction == "mean" else "mean"
            fits = _is_close(total, found * (1 if other == "sum" else len(ids)), losses.abs().sum())
            advice = f"Pass loss_reduction='{other}'." if fits else "Let the loss function return one loss per sample."
            raise ScanError(
                f"The loss of a batch is {float(found):.4g}, which is not the {self._loss_reduction} of the losses of "
                f"its {len(ids)} samples, {float(total if fits else total / len(ids)):.4g}. {advice}"
            )
        return losses

    def _compute_loss_alone(self, batch: Any, count: int, i: int, seed: int) -> Tensor:
        """The loss of sample `i` as a batch of one."""
        seed_all(seed)
        with _torch.DisableTorchFunction():
            return compute_loss(self.model, self._take_sample(batch, count, i), self.loss_fn).reshape(-1).sum()

    def _take_sample(self, batch: Any, size: int, i: int) -> Any:
        return Batch(batch, self._batch_dim, size, self.takes_pairs).take_samples(i, i + 1, lambda tensor: tensor)

    def _check_finite(self, ids: Sequence[int], columns: Columns) -> None:
        if self.nonfinite == "keep":
            return
        for name, quantity in (("loss", "loss"), ("norm", "gradient")):
            if name in columns and not columns[name].isfinite().all():
                raise NotFinite([ids[i] for i in (~columns[name].isfinite()).nonzero().flatten().tolist()], quantity)


def group_parameters(names: Sequence[str], groups: Groups | None) -> dict[str, list[str]]:
    """The parameter names of each group: as the user says, or by module at a depth that gives few groups.

    >>> group_parameters(["conv.weight", "conv.bias", "head.0.weight", "head.2.weight"], None)
    {'conv': ['conv.weight', 'conv.bias'], 'head.0': ['head.0.weight'], 'head.2': ['head.2.weight']}
    >>> group_parameters(["conv.weight", "conv.bias"], lambda name: name.rpartition(".")[2])
    {'weight': ['conv.weight'], 'bias': ['conv.bias']}
    """
    if isinstance(groups, Mapping):
        counts = Counter(name for members in groups.values() for name in members)
        if unknown := sorted(set(counts) - set(names)):
            raise ScanError(f"groups contains {unknown[0]!r}, which is not a scanned parameter.")
        if repeated := [name for name, count in counts.items() if count > 1]:
            raise ScanError(f"groups contains {repeated[0]!r} twice.")
        return {group: list(members) for group, members in groups.items()}
    if groups is None:
        return group_by_module(names)
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(groups(name), []).append(name)
    return found


@contextmanager
def prepare_model(measurement: Measurement, device: torch.device | None) -> Iterator[None]:
    """Put model and loss in evaluation mode, on `device` if given. Restore both at the end of the block.

    Modes, devices, buffers and the state of random number generators are restored.
    """
    modules = [part for part in (measurement.model, measurement.loss_fn) if isinstance(part, nn.Module)]
    modes = {module: module.training for part in modules for module in part.modules()}
    devices = {p.device for part in modules for p in (*part.parameters(), *part.buffers())}
    if device is not None and len(devices) > 1:
        raise ScanError(f"The model is on several devices ({', '.join(map(str, devices))}). Do not pass `device`.")
    with preserve_state(*modules), torch.inference_mode(False), torch.enable_grad():
        try:
            for part in modules:
                part.eval()
                if device is not None:
                    part.to(device)
            yield
        finally:
            for part in modules if device is not None and devices else ():
                part.to(next(iter(devices)))
            for module, training in modes.items():
                module.training = training


def _check_coupled(quantities: Sequence[str], nonfinite: str) -> Sequence[str]:
    """What can be measured of samples that influence each other, or an error if more was asked for."""
    if nonfinite != "raise":
        raise ScanError("coupled requires nonfinite='raise': samples that are not finite are part of all others.")
    if "self_influence" in quantities and tuple(quantities) != QUANTITIES:
        raise ScanError("'self_influence' is not available with coupled: a contribution is no gradient of a loss.")
    return [name for name in quantities if name != "self_influence"]


def _is_close(found: Tensor, expected: Tensor, scale: Tensor) -> bool:
    """Whether two numbers are equal up to rounding. True for numbers that are not finite: others check these."""
    tolerance = {torch.float64: 1e-6, torch.float32: 5e-3}.get(scale.dtype, 0.1)  # float32 may come from autocast
    return not bool((found - expected).abs() > tolerance * scale.double())
