"""Measures the examples of one batch: losses, gradient norms, alignment, projected gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from persample._internal.graph import preserve_grads
from persample._internal.host import copy_to_host
from persample._internal.precision import widen
from persample._internal.state import preserve_state
from persample._internal.text import describe_value
from persample.batches import BatchDim
from persample.errors import PerSampleError
from persample.gradients import PerSampleGradients, Stack, StreamedNorms
from persample.gradients import Projection as RowProjection
from persample.losses import LossFunction
from persample.recording import Coupled, Options, Selection, Verify, get_trainable, record
from persample.scanning.batch_losses import BatchLosses
from persample.scanning.errors import NotFinite, ScanError
from persample.scanning.factors import Projection
from persample.scanning.groups import Groups, group_parameters
from persample.scanning.predictions import Outputs, Predictions
from persample.scanning.reduced import ReducedRows
from persample.scanning.source import find_labels

# What a scan measures by default. "alignment" is exact, and costs a second pass over the data.
QUANTITIES = ("loss", "norm", "group_norms", "self_influence", "estimated_alignment", "noise_scale", "predictions")
ALL_QUANTITIES = (*QUANTITIES, "alignment")

Gradient = dict[str, Tensor]  # by parameter name
Columns = dict[str, Tensor]  # by column name, one entry per example


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
        quantities = _choose_quantities(quantities, projection, coupled, nonfinite)
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
        verify = verify if coupled is None else False
        self.losses = BatchLosses(model, loss_fn, self.parameters, batch_dim, loss_reduction, verify, coupled)
        # Rows must not depend on which examples are in a batch, and what is not finite is noticed by example.
        self._options: dict[str, Any] = {
            "batch_dim": batch_dim, "parameters": list(self.parameters), "loss_reduction": "sum", "coupled": coupled,
            "divisor": "own" if coupled is None else "batch", "verify": verify, "nonfinite": "keep",
        }  # fmt: skip
        self._predictions = Predictions(loss_fn)
        self._keeps_terms = False  # until the backward pass has ended

    @property
    def is_sharded(self) -> bool:
        """Whether each process has a part of the weights (FSDP2), so that all of them take part in each pass."""
        return any(hasattr(p, "full_tensor") for p in self.model.parameters())

    @property
    def needs_direction(self) -> bool:
        """Whether a quantity needs the mean gradient before examples are measured, and so a pass of its own."""
        return "alignment" in self.quantities

    @property
    def needs_sum(self) -> bool:
        """Whether a quantity needs the sum of all gradients. Plain projections estimate the noise scale without it."""
        return self.needs_direction or ("noise_scale" in self.quantities and not _estimates(self.projection))

    @property
    def needs_projected_mean(self) -> bool:
        """Whether a quantity needs the mean of the projected gradients."""
        is_estimated = "noise_scale" in self.quantities and not self.needs_sum
        return "estimated_alignment" in self.quantities or is_estimated

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return self.losses.device

    def measure_batch(self, ids: Sequence[int], batch: Any, direction: Gradient | None) -> Columns:
        """The columns of a batch: `id`, `label`, `loss`, `norm`, `norm/GROUP`, `alignment`, `projection`, predictions.

        `direction` is the mean gradient of all examples, scaled to length 1. Without it there is no `alignment`.
        """
        rows = self._make_rows(len(ids), direction if self.needs_direction else None, with_sum=False)
        return self._measure(ids, self.losses.prepare(batch), rows, direction)

    def measure_and_sum(self, ids: Sequence[int], batch: Any) -> tuple[Columns, Gradient, int]:
        """`measure_batch` without a direction, and from the same pass `sum_gradients`."""
        batch = self.losses.prepare(batch)
        rows = self._make_rows(len(ids), None, with_sum=True)
        columns = self._measure(ids, batch, rows, None)
        if not (columns["loss"].isfinite().all() and columns["norm"].isfinite().all()):
            return columns, *self.sum_gradients(ids, batch)
        return columns, rows.total, len(ids)

    def pass_terms(self, ids: Sequence[int], batch: Any, receiver: Receiver) -> None:
        """Pass the gradients of a batch to a receiver, each when it arrives, and those of a repeated pass again."""
        self._check_finite(ids, {"loss": self._record(ids, self.losses.prepare(batch), receiver).losses})

    def _make_rows(self, count: int, direction: Gradient | None, with_sum: bool) -> ReducedRows:
        return ReducedRows(count, self.losses.device, self._projection, direction, with_sum)

    @property
    def _projection(self) -> RowProjection | None:
        projection = self.projection
        return None if projection is None else projection.make(self.checkpoint, self.shapes, self.losses.device)

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
        batch, count = self.losses.prepare(batch), len(ids)
        loss, total = self._differentiate(ids, batch)
        sums = [part.detach().sum(dtype=torch.float64) for part in (loss, *total.values())]  # float16 could overflow
        if torch.stack(sums).isfinite().all():
            return total, count
        if count == 1:
            self._check_finite(ids, {"loss": loss.reshape(1), "norm": torch.stack(sums).sum().reshape(1)})
            return {}, 0
        parts = [self.sum_gradients(ids[i : i + 1], self.losses.take_sample(batch, count, i)) for i in range(count)]
        names = {name for part, _ in parts for name in part}
        total = {name: torch.stack([part[name] for part, _ in parts if name in part]).sum(0) for name in names}
        return total, sum(size for _, size in parts)

    def _differentiate(self, ids: Sequence[int], batch: Any) -> tuple[Tensor, Gradient]:
        """What the loss function returned, or the loss of each sample; and the gradient of the sum of the losses."""
        if self._keeps_terms:  # autograd.grad does not reach the weights in a reentrant checkpoint
            rows = self._make_rows(len(ids), None, with_sum=True)
            return self._record(ids, batch, rows).losses, rows.total
        loss = self.losses.compute(ids, batch)
        if not loss.requires_grad:
            return loss, {}
        scaled = loss.sum() * self.losses.get_scale(loss, len(ids))
        grads = torch.autograd.grad(scaled, list(self.parameters.values()), allow_unused=True)
        return loss, {name: grad for name, grad in zip(self.parameters, grads, strict=True) if grad is not None}

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
        outputs = Outputs(len(ids), self.losses.batch_dim)
        keep: Literal["everything", "norms"] = "everything" if self._keeps_terms else "norms"
        with record(self.model, batch_size=len(ids), keep=keep, **self._options) as grads:
            if not self._keeps_terms:
                grads.pass_terms_to(rows.receive)
            with outputs.capture(self.model):
                loss = self.losses.compute(ids, batch)
            if loss.requires_grad:
                with preserve_grads(loss):  # the loss function may have parameters, too
                    (loss.sum() * self.losses.get_scale(loss, len(ids))).backward()
        if self._keeps_terms and loss.requires_grad:
            grads.pass_terms_to(rows.receive)
        is_checked = not grads.has_own_means
        return Recorded(
            self.losses.split(loss.detach(), ids, batch, is_checked), grads if loss.requires_grad else None, outputs
        )

    def _check_finite(self, ids: Sequence[int], columns: Columns) -> None:
        if self.nonfinite == "keep":
            return
        for name, quantity in (("loss", "loss"), ("norm", "gradient")):
            if name in columns and not columns[name].isfinite().all():
                raise NotFinite([ids[i] for i in (~columns[name].isfinite()).nonzero().flatten().tolist()], quantity)


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


def _choose_quantities(
    quantities: Sequence[str], projection: Projection | None, coupled: Coupled, nonfinite: str
) -> Sequence[str]:
    """What is measured, or an error if something was asked for that cannot be."""
    if unknown := set(quantities) - set(ALL_QUANTITIES):
        raise ScanError(f"Unknown quantities {sorted(unknown)}. Choose from {', '.join(ALL_QUANTITIES)}.")
    is_default = tuple(quantities) == QUANTITIES
    if coupled is not None:
        quantities = _check_coupled(quantities, nonfinite)
        if projection is not None and projection.whitening is not None:
            raise ScanError("precondition is not available with coupled: a contribution is no gradient of a loss.")
    if _estimates(projection) or "estimated_alignment" not in quantities:
        return quantities
    if not is_default:
        reason = "project=None keeps none" if projection is None else "precondition changes their directions"
        raise ScanError(
            f"'estimated_alignment' is computed from projected gradients, and {reason}. Ask for 'alignment', which "
            "needs a second pass over the data" + (", or pass a number as `project`." if projection is None else ".")
        )
    exact = "alignment" if projection is None else ""
    return [exact if name == "estimated_alignment" else name for name in quantities]


def _estimates(projection: Projection | None) -> bool:
    """Whether projected gradients stand for the gradients themselves."""
    return projection is not None and projection.whitening is None


def _check_coupled(quantities: Sequence[str], nonfinite: str) -> Sequence[str]:
    """What can be measured of samples that influence each other, or an error if more was asked for."""
    if nonfinite != "raise":
        raise ScanError("coupled requires nonfinite='raise': samples that are not finite are part of all others.")
    if "self_influence" in quantities and tuple(quantities) != QUANTITIES:
        raise ScanError("'self_influence' is not available with coupled: a contribution is no gradient of a loss.")
    return [name for name in quantities if name != "self_influence"]
