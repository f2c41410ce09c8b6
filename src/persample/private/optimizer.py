"""Optimizer of private training: the clipped sum plus noise, divided by the expected batch size."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from persample.errors import PerSampleError
from persample.gradients import StreamedClip
from persample.private.adam import tell_noise
from persample.private.arrivals import Arrivals
from persample.private.bounds import Bounds
from persample.private.errors import PrivateTrainingError
from persample.private.mechanism import CorrelatedMechanism
from persample.private.noise import SecretNumbers
from persample.private.one_step import Settings, Stage, Sums
from persample.private.opacus_shape import OpacusShape
from persample.private.processes import Peers, refuse_inner_module
from persample.private.releasing import Releaser, find_shards
from persample.private.sampling import renew


class PrivateOptimizer(OpacusShape):
    """Wraps an optimizer for private training.

    persample watches the model and clips the gradients. The optimizer keeps the clipped sum of each backward pass
    itself. `p.grad` shows a copy, and changes to it have no effect. `step()` adds the noise to the sum, puts the result
    into `p.grad` and calls the wrapped optimizer. If a batch is split by `BatchMemoryManager`, only the last part does
    so; earlier parts add to the sum. With several processes, the sums of all processes are added up, and only the first
    process draws noise.

    The bound and the noise of a step are those at the call of the model: later changes have effect in the next step.

    Args:
        optimizer: the optimizer to wrap; its parameters must be parameters of `module`.
        max_grad_norm: bound of the gradient of a sample; with "per_layer", a list with a bound for each parameter.
        clipping: "flat": the gradient of a sample is scaled down to norm `max_grad_norm` if it is larger.
            "per_layer": the same for each parameter, with its own bound.
            "automatic": every gradient is scaled by `max_grad_norm / (norm + 0.01)`.
        poisson_sampling: whether batches are Poisson samples, which must not be added up before a step.
        distributed: whether the parameters belong to a module under DDP or FSDP2.
        normalize_clipping: divide the private gradient by `max_grad_norm`, so that a change of the bound does not
            change the size of the steps.
        grad_samples: whether `p.grad_sample` and `optimizer.grad_samples` hold the gradient of each sample before
            clipping, and `p.summed_grad` their clipped sum, until `zero_grad()`. They take the memory of a copy of the
            parameters for each sample.
        recording: further options of `persample.record`; `verify` is "first" by default. With `units`, the number of
            consecutive samples of each unit, the gradients of units are clipped; `unit_reduction` is "mean" by default.
        has_units: the loader hands out batches with the unit of each sample, whose gradients are clipped by unit.
        generator: generator of the noise, from which it is drawn as Opacus draws it, by one thread. By default the
            noise comes from the entropy of the operating system, and several threads draw it for large models.
        adaptive: the further arguments of `AdaClipDPOptimizer`, from `AdaptiveOptimizer`.

    Attributes:
        module: the module that is trained.
        units: "ids" if the loader hands out the unit of each sample, or the number of samples of each unit, or None.
        shows_sums: whether `p.summed_grad` holds the clipped sum from `step()` to `zero_grad()`, as in Opacus.
        sources: where noise and batches are drawn from, besides `noise`.
        row_count: the number of samples (or units) in the backward passes since the last call of `step()`.
        nonfinite_count: the number of samples so far whose gradient was not finite. They add nothing to the sum.
        verifications: what the verification says, and of how many backward passes.
        passes: the number of backward passes of the last batch, as given or as chosen by the free memory. A change is
            logged by the logger "persample.private".

    The other arguments are the arguments of `opacus.optimizers.DPOptimizer`.

    >>> model = nn.Linear(3, 2)
    >>> optimizer = PrivateOptimizer(
    ...     torch.optim.SGD(model.parameters(), lr=0.1), module=model, noise_multiplier=1.0, max_grad_norm=1.0,
    ...     expected_batch_size=5)
    >>> optimizer.zero_grad()
    >>> model(torch.randn(5, 3)).square().mean().backward()
    >>> optimizer.step()                                                # the sum of clipped gradients, with noise
    >>> optimizer.release()                                             # the model is an ordinary one again
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        module: nn.Module,
        noise_multiplier: float,
        max_grad_norm: float | Sequence[float],
        expected_batch_size: float | None,
        loss_reduction: str = "mean",
        clipping: str = "flat",
        poisson_sampling: bool = True,
        distributed: bool = False,
        normalize_clipping: bool = False,
        grad_samples: bool = False,
        recording: Mapping[str, Any] | None = None,
        has_units: bool = False,
        generator: torch.Generator | None = None,
        secure_mode: bool = False,
        adaptive: Mapping[str, float] | None = None,
    ) -> None:
        _refuse_closures(optimizer)
        refuse_inner_module(module)
        amount = {"noise_multiplier": float(noise_multiplier), "max_grad_norm": max_grad_norm, **(adaptive or {})}
        source = {"generator": generator, "secure_mode": secure_mode}
        sizes = {"expected_batch_size": expected_batch_size, "loss_reduction": loss_reduction}
        super().__init__(optimizer, **amount, **source, **sizes)
        bounds = Bounds(clipping, module, self.params, max_grad_norm)
        self.max_grad_norm = bounds.total
        self.get_settings()  # raises if they are not possible
        self.module, self.clipping, self.poisson_sampling = module, clipping, poisson_sampling
        self.parts_per_step = 1  # backward passes that share one Poisson sample
        self.loss_divisor = 1.0  # what a trainer divides the loss by, and so each row before it is clipped
        self.normalize_clipping = normalize_clipping
        self.shows_sums = grad_samples
        self.sources: list[SecretNumbers | torch.Generator] = [] if secure_mode or generator is None else [generator]
        # Called before a step with its noise multiplier; raises if the step is not allowed.
        self.check_step: Callable[[PrivateOptimizer, float], None] | None = None
        self._left: list[ref[Tensor]] | None = None  # after release(): sums without noise in `p.grad`
        self.releaser = Releaser(Peers(distributed), find_shards(module, self.params), generator, secure_mode)
        self.arrivals = Arrivals(self, bounds, recording or {}, has_units, grad_samples)

    def correlate(self, mechanism: CorrelatedMechanism) -> None:
        """Use the noise of a mechanism, which also decides which steps are allowed."""
        self.check_step, self.arrivals.handed_out.turns = mechanism.check, mechanism.turns
        self.releaser.mechanism, self.releaser.noise = mechanism, mechanism.noise

    def get_settings(self) -> Settings:
        """The bound and the noise of a step that begins now."""
        return Settings(float(self.max_grad_norm), float(self.noise_multiplier))

    def add_samples(self, batch: Any, batch_dim: int | None = None) -> None:
        """Declare the tensors of a batch of data, such as targets and masks, before the model is called with it.

        A tensor with the batch's size in dimension `batch_dim` has one row per sample. The default is the `batch_dim`
        of the recording. A step with more samples than the batch is refused.
        """
        self.arrivals.add_samples(batch, batch_dim)

    def draw_new_keys(self, with_seeds: bool = True) -> None:
        """Draw other noise from now on than without this call; `with_seeds`: also from generators of the user."""
        self.noise.mix()
        for source in self.sources if with_seeds else ():
            renew(source)

    def release(self) -> None:
        """End private training: from now on the model and this optimizer train without clipping and noise."""
        if self._left is not None:
            return
        self.arrivals.watch.stop()
        left = [ref(p.grad) for p in self.params if p.grad is not None] if self._step.has_samples else []
        self._step.forget()
        self._clear_rows()
        tell_noise(self.original_optimizer, 0.0)
        self._left = left

    def _count_samples(self, grads: StreamedClip) -> Sums:
        """Further sums over the samples of a backward pass; keys are not ids of parameters."""
        return {}

    # ---- parts of a split batch ----

    def begin_batches(self) -> None:
        """Forget what is left of earlier batches. `BatchMemoryManager` calls it when its loop begins."""
        self._step_skip_queue.clear()
        self._step.failed = 0
        self._step.forget()

    def begin_part(self, is_last: bool) -> None:
        """Begin a part of a batch. `BatchMemoryManager` calls it for each part that it yields."""
        self.check_part()
        self.signal_skip_step(not is_last)

    def check_part(self) -> None:
        """Raise if the part before has failed: it has made no call of `step()`.

        Its samples are missing in the sum. If one of them is the cause, it changes the sum by all others of the part.
        No other sum keeps the bound either: a step without any sample of the batch lacks even more.
        """
        self._step.failed = 0
        if self._step_skip_queue:
            self._step_skip_queue.clear()
            self._step.forget()
            raise PrivateTrainingError(
                "A part of a batch has failed, or was left out: step() was not called for it. If one sample is the "
                "cause, it takes all other samples of the part out of the sum, which is more than max_grad_norm. "
                "Nothing of the batch counts. Let the error end the training, or mend the loop so that no part fails: "
                "check the samples when the data set is made."
            )

    # ---- steps ----

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make a step with the sum of the clipped gradients and noise; with only a part of a batch, add to the sum."""
        if self._left is not None:
            self._refuse_left_sums(self._left)
            return self.original_optimizer.step(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.pre_step():
            self.original_optimizer.step()
        return loss

    def _refuse_left_sums(self, sums: list[ref[Tensor]]) -> None:
        left = {id(grad) for made in sums if (grad := made()) is not None}
        if any(id(p.grad) in left for p in self.params):
            raise PerSampleError(
                "p.grad still holds sums of private samples, without noise, from a backward pass before release(): "
                "call optimizer.zero_grad() before you train without privacy."
            )
        self._left = []

    def pre_step(self, closure: Callable[[], float] | None = None) -> bool:
        """Prepare the gradients for the wrapped optimizer; return whether it makes a step."""
        try:
            self._check_complete()
            self.arrivals.watch.rest()
            self.accumulate()
            self._is_last_step_skipped = self._check_skip_next_step()  # read by loops for Opacus
            if self._is_last_step_skipped:
                self._step.close_part()
                return False
            self._prepare_step()
        except BaseException as error:
            self._step.forget()
            self._clear_grad()
            self.peers.report_failure(error)
            raise
        self._step.close(self.params)
        return True

    def _prepare_step(self) -> None:
        settings = self._step.settings
        if self._step.parts is None or settings is None:  # no samples: the step is noise only
            settings = self.get_settings()
        self.arrivals.note_step()
        if self.check_step is not None:
            self.check_step(self, settings.noise_multiplier)
        std = self.get_noise_scale(settings.noise_multiplier) * settings.max_grad_norm
        totals = self._take_noised_sums(std)
        divisor = self._get_divisor() * (settings.max_grad_norm if self.normalize_clipping else 1)
        for p in self.params:
            total = totals.pop(id(p)).detach()
            p.grad = (total if divisor == 1 else total.div_(divisor)).to(p.dtype)
        tell_noise(self.original_optimizer, self.releaser.growth * std / divisor)
        self._call_step_hook(settings)

    @torch.no_grad()
    def _take_noised_sums(self, std: float) -> Sums:
        """The sums over all processes with noise of deviation `std`."""
        return self.releaser.release(self.params, self._step.take(), std)

    def get_noise_scale(self, noise_multiplier: float) -> float:
        """Standard deviation of the noise relative to the bound; of correlated noise, of the part that is new."""
        return noise_multiplier * (1.0 if self.mechanism is None else self.mechanism.scale)

    def _check_complete(self) -> None:
        """Refuse a step in which samples are missing, because a part of a split batch or a backward pass has failed."""
        if self._step.failed and len(self._step_skip_queue) > 1:  # the manager of Opacus
            self._step.failed = 0
            self._step_skip_queue.clear()
            raise PerSampleError(
                "A part of a split batch has failed, and the optimizer does not know which of the parts that follow "
                "belong to the same batch. Use persample.private.BatchMemoryManager. The sum over this batch was "
                "dropped."
            )
        try:
            self.arrivals.check_complete()
        except PrivateTrainingError:
            self._step_skip_queue.clear()
            raise

    def accumulate(self) -> None:
        """Add the sum of the last backward passes to the sum over the parts of the batch, and clear `p.grad`."""
        self._step.close_batch(self.params)
        if self.shows_sums:
            self._show_sums()
        self._clear_grad()

    def clip_and_accumulate(self) -> None:
        """As in Opacus; the samples were clipped in the backward pass, so this is `accumulate`."""
        self.accumulate()

    def _show_sums(self) -> None:
        """Put the clipped sums into `p.summed_grad`."""
        for p in self.params:
            total = (self._step.parts or {}).get(id(p))
            p.summed_grad = torch.zeros_like(p) if total is None else total.to(p.dtype, copy=True)

    def _clear_grad(self) -> None:
        """Set `p.grad` to None for every parameter, also for frozen ones, with gradients from before."""
        for p in chain.from_iterable(group["params"] for group in self.param_groups):
            p.grad = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear `p.grad`, and forget the samples since the last step, except parts of a split batch."""
        if self._left is not None:
            self._left = []
        self._step.clear()
        self._clear_rows()
        self.original_optimizer.zero_grad(set_to_none)

    def _clear_rows(self) -> None:
        for p in self.params:
            if self.arrivals.keeps_rows:
                p.grad_sample = None
            if self.shows_sums and self._step.stage is not Stage.BETWEEN_PARTS:
                p.summed_grad = None

    def _get_divisor(self) -> float:
        """The expected number of samples if the loss is a mean, 1 if it is a sum."""
        if self.loss_reduction == "sum":
            return 1
        return self.expected_batch_size * self.accumulated_iterations * self.peers.count

    def _call_step_hook(self, settings: Settings) -> None:
        """Call the hook of the accountant with the noise multiplier of this step."""
        if self.step_hook is None:
            return
        later = float(self.noise_multiplier)
        self.noise_multiplier = settings.noise_multiplier
        try:
            self.step_hook(self)
        finally:
            if self.noise_multiplier == settings.noise_multiplier:  # else the hook has set another one
                self.noise_multiplier = later


def _refuse_closures(optimizer: Optimizer) -> None:
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise PerSampleError(
            f"{type(optimizer).__name__} evaluates the loss several times in a step, and each evaluation would need "
            "its own noise: private training does not support it. Use an optimizer whose step() takes one gradient."
        )
