"""How samples arrive in a private step: the recording of the model, and what the loader has handed out."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from persample._internal.precision import widen
from persample.gradients import StreamedClip
from persample.isolation import Isolation
from persample.private.bounds import Bounds
from persample.private.errors import PrivateTrainingError
from persample.private.handed_out import HandedOut
from persample.private.one_step import PrivateStep
from persample.private.turns import Pace, Turn
from persample.private.units import BatchUnits, get_content
from persample.recording import Verify, Watch

if TYPE_CHECKING:
    from persample.private.optimizer import PrivateOptimizer

_log = logging.getLogger("persample.private")


class Arrivals:
    """Watches the model of a private optimizer, and adds the clipped sum of each backward pass to its step.

    Args:
        optimizer: the optimizer, from which the bound and the noise of a step come.
        bounds: how the gradients are clipped.
        recording: further options of `persample.record`.
        has_units: whether the loader hands out batches with the unit of each sample.
        keeps_rows: whether `p.grad_sample` holds the gradient of each sample before clipping.

    Attributes:
        step: the step to which samples are added.
        units: "ids" if the loader hands out the unit of each sample, or the number of samples of each unit, or None.
        handed_out: what the loader has handed out.
        nonfinite_count: the number of samples so far whose gradient was not finite. They add nothing to the sum.
        passes: the number of backward passes of the last batch.
        isolation: keeps the samples and the steps apart.
        verifications: what the verification says, and of how many backward passes.
    """

    def __init__(
        self,
        optimizer: PrivateOptimizer,
        bounds: Bounds,
        recording: Mapping[str, Any],
        has_units: bool,
        keeps_rows: bool,
    ) -> None:
        self.step = PrivateStep()
        self.nonfinite_count = 0
        self.passes: int | None = None
        self.verifications: Counter[str] = Counter()
        self.keeps_rows = keeps_rows
        self._optimizer, self._bounds = optimizer, bounds
        self._recording = dict(recording)
        self.units: int | str | None = "ids" if has_units else self._recording.get("units")
        self._units = BatchUnits(self._recording.get("units"), lambda: self.isolation.rows.rows)
        self.handed_out = HandedOut()
        if has_units or "units" in self._recording:
            self._recording["units"] = self._units.take
            self._recording.setdefault("unit_reduction", "mean")
        self._admit: Callable[[StreamedClip], None] | None = None  # called before a backward pass counts; may raise
        self.isolation = Isolation()
        self.watch = self._begin(optimizer.module)

    def _begin(self, module: nn.Module) -> Watch:
        return Watch(module, self._receive, self._make_options, self._note_failure)

    def follow(self, around: nn.Module, admit: Callable[[StreamedClip], None], verify: Verify) -> Watch:
        """Watch a module around the model in place of the model, which computes the losses as well.

        Args:
            around: the module.
            admit: called with the gradients of each backward pass, before they count. It may raise.
            verify: the option of the recording.
        """
        self.watch.stop()
        self._bounds.rename(around)
        self._admit, self._recording["verify"] = admit, verify
        self.isolation = Isolation()
        self.handed_out.restart()
        self.watch = self._begin(around)
        return self.watch

    def _make_options(self) -> Mapping[str, Any]:
        """Options of `record` for a batch. The first batch of a step fixes its settings."""
        optimizer = self._optimizer
        optimizer.peers.withdraw_failure()
        settings = self.step.fix(optimizer.get_settings())
        return {
            "keep": "clip",
            **self._bounds.make_options(settings.max_grad_norm, optimizer.loss_divisor),
            "loss_reduction": optimizer.loss_reduction,
            "parameters": self._bounds.list_names(optimizer.params),
            "verify": "first",
            "nonfinite": "zero",
            "guard": self.isolation,
            "keep_rows": self.keeps_rows,
            **self._recording,
        }

    def _note_failure(self, error: BaseException | None) -> None:
        """Note that a call of the model, or the backward pass from its outputs, has failed."""
        if error is not None:
            self.step.failed += 1
            self._optimizer.peers.report_failure(error)

    @property
    def verify_mode(self) -> Any:
        """The option `verify`."""
        return self._recording.get("verify", "first")

    @property
    def batch_dim(self) -> int:
        """The dimension of the samples in the batches of the loader."""
        given = self._recording.get("batch_dim", 0)
        return given if isinstance(given, int) else 0

    def add_samples(self, batch: Any, batch_dim: int | None = None) -> None:
        """Declare the tensors of a batch of data; see `PrivateOptimizer.add_samples`."""
        batch_dim = self.batch_dim if batch_dim is None else batch_dim
        if self.watch.is_retired:
            return
        self.watch.add_samples(get_content(batch), batch_dim)
        number = self.isolation.rows.number
        self._units.add(batch, number)
        if isinstance(self._recording.get("batch_dim", 0), int) and "units" not in self._recording:
            self.handed_out.add(batch, batch_dim, number)

    def load(self, batches: Iterator[Any], loop: Turn | Pace | None, is_part: bool = False) -> Any:
        """The next batch of a loader. Its tensors are declared as samples; how they are loaded is no part of a step.

        Args:
            batches: the loader's iterator.
            loop: the loop that takes the batch.
            is_part: whether it is a further part of the batch before.
        """
        with self.watch.pause():
            batch = next(batches)
        self.add_samples(batch)
        if loop is not None:
            self.handed_out.take(loop, self.isolation.rows.number, is_part)
        return get_content(batch)

    # ---- backward passes ----

    @torch.no_grad()
    def _receive(self, grads: StreamedClip) -> None:
        """Add the clipped sum of a backward pass to the sum of this step, and show it in `p.grad`."""
        params = self._optimizer.params
        self._check(grads, params)
        clipped = grads.clip(own=not self._optimizer.releaser.shards)
        if self.isolation.loss_code.is_first and self._admit is None:  # else no code of the user is around the model
            self._leave_out()
            return
        self._count(grads)
        # A parameter that was frozen in the forward pass has no gradient in this step, only noise.
        recorded = {self._bounds.get_name(p): p for p in params if self._bounds.get_name(p) in clipped}
        found = {id(p): self._restore_scale(widen(clipped[name]).view_as(p)) for name, p in recorded.items()}
        self.step.add({**found, **self._optimizer._count_samples(grads)}, grads.row_count)
        if self.keeps_rows:
            self._show_rows(grads)
        self.step.show(list(recorded.values()))

    def _check(self, grads: StreamedClip, params: list[nn.Parameter]) -> None:
        """Raise if the samples of a backward pass must not be added to this step."""
        if self._admit is not None:
            self._admit(grads)
        rows = self.isolation.rows.rows
        if self._optimizer.poisson_sampling:
            self.handed_out.check_unused(0 if rows is None else rows.number)
        if "units" not in self._recording:
            self.handed_out.check(grads.batch_size, rows)
        self.step.drop_cleared(params)
        if self.step.arrived >= self._optimizer.parts_per_step and self._optimizer.poisson_sampling:
            raise PrivateTrainingError(
                "A second backward pass before step(): independent Poisson samples must not be added up, because the "
                "accountant would count the wrong privacy loss. Call step() after each backward pass, split large "
                "batches with BatchMemoryManager, or set poisson_sampling=False."
            )
        if self.step.is_grad_left(params):
            raise PrivateTrainingError(
                "p.grad still holds the gradients of the last step: call optimizer.zero_grad() before the next "
                "backward pass."
            )

    def _count(self, grads: StreamedClip) -> None:
        self.nonfinite_count += grads.nonfinite_count
        self.verifications[grads.verification] += 1
        if grads.passes != self.passes:
            self.passes = grads.passes
            _log.info("Private training clips in %s", grads.describe_passes())

    def _leave_out(self) -> None:
        """Add nothing for a backward pass after which nobody can tell what numbers of samples have changed."""
        _log.warning(
            "The samples of the first step add nothing to it: numbers of them were read before backward(), and may "
            "have changed the loss. Read them after backward() to use this step, too. Later steps must do the same."
        )
        self.step.add({}, rows=0)

    def _restore_scale(self, total: Tensor) -> Tensor:
        divisor = self._optimizer.loss_divisor
        return total if divisor == 1 else total * divisor

    def _show_rows(self, grads: StreamedClip) -> None:
        """Put the gradients of the samples into `p.grad_sample`: a tensor, or one for each backward pass."""
        for p in self._optimizer.params:
            rows = grads.rows.get(self._bounds.get_name(p))
            rows = p.new_zeros(grads.row_count, *p.shape) if rows is None else self._restore_scale(rows).to(p.dtype)
            before = getattr(p, "grad_sample", None)
            shown = rows if before is None else [*(before if isinstance(before, list) else [before]), rows]
            p.grad_sample = shown

    def note_step(self) -> None:
        """Note that a step is made; raise if a batch before it has made none."""
        if self._optimizer.poisson_sampling:
            self.handed_out.note_step()
        self.handed_out.forget_others(self.isolation.rows.followed)

    def check_complete(self) -> None:
        """Raise if the model was called for this step, and no backward pass has followed."""
        self.step.drop_cleared(self._optimizer.params)
        failed, self.step.failed = self.step.failed, 0
        if self.step.is_dropped and not self.step.arrived and self._optimizer.poisson_sampling:
            raise PrivateTrainingError(
                "The gradients of this step were cleared between backward() and step(), so that the samples of the "
                "batch are missing. If one of them decides that, it takes all others out of the sum. Call zero_grad() "
                "before the model."
            )
        recording = self.watch.find_recording()
        if not self.step.arrived and (failed or (recording is not None and not recording.tracker.has_ended)):
            raise PrivateTrainingError(
                "The model was called for this step, and no backward pass has followed, so that the samples of the "
                "batch are missing. If one sample is the cause, it takes all others out of the sum. Call backward() "
                "before each step(), and the model under torch.no_grad() if it is not trained."
            )
