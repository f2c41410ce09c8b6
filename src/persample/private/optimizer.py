"""Optimizer of private training: the clipped sum plus noise, divided by the expected batch size."""

from __future__ import annotations

import inspect
import logging
import math
import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NoReturn
from weakref import ref

import torch
from opacus.optimizers import DPOptimizer
from opacus.optimizers.optimizer import _generate_noise
from torch import Tensor, nn
from torch.optim import Optimizer

from persample import _torch
from persample._internal.dtypes import widen
from persample.errors import PerSampleError
from persample.gradients import LEAST_BOUND, StreamedClip
from persample.private.errors import PrivateTrainingError
from persample.private.handed_out import HandedOut
from persample.private.noise import Noise, add_noise_of
from persample.private.processes import Peers, refuse_inner_module
from persample.private.units import BatchUnits, get_content
from persample.recording import Verify, Watch

_CLIPPING = ("flat", "per_layer", "automatic")
AUTOMATIC_STABILISER = 0.01  # from Bu et al. (2023); its value has little effect on their results

_log = logging.getLogger("persample.private")

Sums = dict[int, Tensor]  # of parameters, by the id of the parameter


@dataclass(frozen=True)
class _Settings:
    """Bound and noise of a step. They are fixed when its first samples arrive."""

    max_grad_norm: float
    noise_multiplier: float

    def __post_init__(self) -> None:
        if not LEAST_BOUND <= self.max_grad_norm < math.inf:
            raise PrivateTrainingError(
                f"max_grad_norm must be positive, finite and at least {LEAST_BOUND}, so that squares of norms do not "
                f"vanish, got {self.max_grad_norm}."
            )
        if not 0 <= self.noise_multiplier < math.inf:
            raise PrivateTrainingError(
                f"noise_multiplier must be finite and not negative, got {self.noise_multiplier}."
            )


class PrivateOptimizer(DPOptimizer):
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
        if clipping not in _CLIPPING:
            raise PrivateTrainingError(f"clipping must be one of {_CLIPPING}, got {clipping!r}")
        _refuse_closures(optimizer)
        refuse_inner_module(module)
        super().__init__(
            optimizer,
            noise_multiplier=noise_multiplier,
            max_grad_norm=max_grad_norm,  # a list of bounds is replaced by its norm below
            expected_batch_size=expected_batch_size,
            loss_reduction=loss_reduction,
            generator=generator,
            secure_mode=secure_mode,
            **(adaptive or {}),
        )
        self.module = module
        self.noise_multiplier = float(noise_multiplier)
        self.clipping = clipping
        self.poisson_sampling = poisson_sampling
        self.parts_per_step = 1  # backward passes that share one Poisson sample
        self.loss_divisor = 1.0  # what a trainer divides the loss by, and so each row before it is clipped
        self.normalize_clipping = normalize_clipping
        self._has_grad_samples = self.shows_sums = grad_samples
        self.generators = [] if secure_mode or generator is None else [generator]  # of the noise and of the batches
        self.noise = Noise()  # unused if a generator is given
        # Called before a step with its noise multiplier; raises if the step is not allowed.
        self.check_step: Callable[[PrivateOptimizer, float], None] | None = None
        self._names = {id(p): name for name, p in module.named_parameters()}
        self._get_names()
        self._bounds: dict[str, float] = {}
        if clipping == "per_layer":
            self._bounds = self._map_bounds(max_grad_norm)
            self.max_grad_norm = math.hypot(*self._bounds.values())
        elif not isinstance(max_grad_norm, (int, float)):
            raise PrivateTrainingError(
                f"clipping={clipping!r} requires one number as max_grad_norm, got {max_grad_norm}"
            )
        self._get_current_settings()  # raises if they are not possible
        self._recording = dict(recording or {})
        self.units: int | str | None = "ids" if has_units else self._recording.get("units")
        self._units = BatchUnits(self._recording.get("units"), lambda: self._watch.declared.rows)
        self._handed_out = HandedOut()
        if has_units or "units" in self._recording:
            self._recording["units"] = self._units.take
            self._recording.setdefault("unit_reduction", "mean")
        self._peers = Peers(distributed)
        self._settings: _Settings | None = None  # of the step that has begun
        self._batch: Sums | None = None  # of the backward passes since the last call of step()
        self._shown: dict[int, tuple[ref[Tensor], int]] = {}  # what was put into `p.grad` for these, and its version
        self._parts: Sums | None = None  # of the parts of a split batch before these
        self._arrived = self.row_count = 0  # backward passes since the last call of step(), and their rows
        self._failed = 0  # calls of the model or backward passes that have failed since then
        self._spent = False  # whether `p.grad` has already been used for a step
        self.nonfinite_count = 0
        self.passes: int | None = None
        self.verifications: Counter[str] = Counter()
        self._is_released = False
        self._left: list[ref[Tensor]] = []  # sums without noise in `p.grad` when private training ended
        is_sharded = bool(_torch.get_fsdp_states(module))
        self._shards = {id(p): p for p in self.params if is_sharded and hasattr(p, "full_tensor")}
        self._admit: Callable[[StreamedClip], None] | None = None  # called before a backward pass counts; may raise
        self._watch = Watch(module, self._receive, self._make_options, self._note_failure)

    def follow(self, around: nn.Module, admit: Callable[[StreamedClip], None], verify: Verify) -> Watch:
        """Watch a module around the model, which computes the losses as well, in place of the model.

        Args:
            around: the module.
            admit: called with the gradients of each backward pass, before they count. It may raise.
            verify: the option of the recording.
        """
        self._watch.stop()
        bounds = {id(p): self._bounds.get(self._names[id(p)]) for p in self.params}
        self._names = {id(p): name for name, p in around.named_parameters()}
        self._bounds = {self._names[key]: bound for key, bound in bounds.items() if bound is not None}
        self._admit, self._recording["verify"] = admit, verify
        self._watch = Watch(around, self._receive, self._make_options, self._note_failure)
        return self._watch

    def _get_names(self) -> list[str]:
        """Names of the trainable parameters of the optimizer."""
        if any(id(p) not in self._names for p in self.params):
            raise PrivateTrainingError("The optimizer has parameters that do not belong to the module.")
        return [self._names[id(p)] for p in self.params]

    def _map_bounds(self, bounds: float | Sequence[float]) -> dict[str, float]:
        """Bound of each parameter by its name. `bounds` has the order of the optimizer's parameters."""
        if isinstance(bounds, (int, float)) or len(bounds) != len(self.params):
            raise PrivateTrainingError(
                "clipping='per_layer' requires a list as max_grad_norm, with one bound for each of the "
                f"{len(self.params)} trainable parameters of the optimizer, got {bounds}"
            )
        if not min(bounds, default=LEAST_BOUND) >= LEAST_BOUND:
            raise PrivateTrainingError(f"Each of the bounds must be at least {LEAST_BOUND}, got {min(bounds)}.")
        return {self._names[id(p)]: float(bound) for p, bound in zip(self.params, bounds, strict=True)}

    def _make_options(self) -> Mapping[str, Any]:
        """Options of `record` for a batch. The first batch of a step fixes its settings."""
        self._peers.withdraw_failure()
        if self._settings is None or (self._batch is None and self._parts is None):
            self._settings = self._get_current_settings()
        bound = self._settings.max_grad_norm / self.loss_divisor
        by_name = {name: part * bound / math.hypot(*self._bounds.values()) for name, part in self._bounds.items()}
        return {
            "keep": "clip",
            "max_norm": by_name or bound,
            "stabiliser": AUTOMATIC_STABILISER / self.loss_divisor if self.clipping == "automatic" else None,
            "loss_reduction": self.loss_reduction,
            "parameters": self._get_names(),
            "verify": "first",
            "nonfinite": "zero",
            "isolate": True,
            "keep_rows": self._has_grad_samples,
            **self._recording,
        }

    @property
    def verify_mode(self) -> Any:
        """The option `verify`."""
        return self._recording.get("verify", "first")

    @property
    def batch_dim(self) -> int:
        """The dimension of the samples in the batches of the loader."""
        given = self._recording.get("batch_dim", 0)
        return given if isinstance(given, int) else 0

    @property
    def process_count(self) -> int:
        """The number of processes that train together."""
        return self._peers.count

    def _get_current_settings(self) -> _Settings:
        return _Settings(float(self.max_grad_norm), float(self.noise_multiplier))

    def add_samples(self, batch: Any, batch_dim: int | None = None) -> None:
        """Declare the tensors of a batch of data, such as targets and masks, before the model is called with it.

        A tensor with the batch's size in dimension `batch_dim` has one row per sample. The default is the `batch_dim`
        of the recording. A step with more samples than the batch is refused.
        """
        given = self._recording.get("batch_dim", 0)
        batch_dim = self.batch_dim if batch_dim is None else batch_dim
        if isinstance(given, int) and "units" not in self._recording:
            self._handed_out.add(batch, batch_dim)
        if not self._is_released:
            self._units.add(batch, self._watch.declare(get_content(batch), batch_dim))

    def load(self, batches: Iterator[Any]) -> Any:
        """The next batch of a loader. Its tensors are declared as samples; how they are loaded is no part of a step."""
        with self._watch.pause():
            batch = next(batches)
        self.add_samples(batch)
        return get_content(batch)

    def draw_new_keys(self, with_seeds: bool = True) -> None:
        """Draw other noise from now on than without this call; `with_seeds`: also from generators of the user."""
        self.noise.mix()
        for generator in self.generators if with_seeds else ():
            generator.manual_seed(secrets.randbits(63))

    def release(self) -> None:
        """End private training: from now on the model and this optimizer train without clipping and noise."""
        if self._is_released:
            return
        self._watch.stop()
        if self._batch is not None:
            self._left = [ref(p.grad) for p in self.params if p.grad is not None]
        self._forget()
        self._clear_rows()
        self._is_released = True

    # ---- backward passes ----

    @torch.no_grad()
    def _receive(self, grads: StreamedClip) -> None:
        """Add the clipped sum of a backward pass to the sum of this step, and show it in `p.grad`."""
        if self._admit is not None:
            self._admit(grads)
        if "units" not in self._recording:
            self._handed_out.check(grads.batch_size, self._watch.declared.rows)
        if self._is_batch_cleared():
            self._drop_batch()
        if self._arrived >= self.parts_per_step and self.poisson_sampling:
            raise PrivateTrainingError(
                "A second backward pass before step(): independent Poisson samples must not be added up, because the "
                "accountant would count the wrong privacy loss. Call step() after each backward pass, split large "
                "batches with BatchMemoryManager, or set poisson_sampling=False."
            )
        if self._spent and self._is_grad_untouched():
            raise PrivateTrainingError(
                "p.grad still holds the gradients of the last step: call optimizer.zero_grad() before the next "
                "backward pass."
            )
        clipped = grads.clip(own=not self._shards)
        if self._watch.isolation.loss_code.is_first:
            self._leave_out()
            return
        self.nonfinite_count += grads.nonfinite_count
        if grads.passes != self.passes:
            self.passes = grads.passes
            _log.info("Private training clips in %s", grads.describe_passes())
        # A parameter that was frozen in the forward pass has no gradient in this step, only noise.
        recorded = [p for p in self.params if self._names[id(p)] in clipped]
        found = {id(p): self._restore_scale(widen(clipped[self._names[id(p)]]).view_as(p)) for p in recorded}
        self._batch = _add(self._batch, {**found, **self._count_samples(grads)})
        if self._has_grad_samples:
            self._show_rows(grads)
        self._spent = False
        self._arrived += 1
        self.row_count += grads.row_count
        self.verifications[grads.verification] += 1
        for p in recorded:
            p.grad = grad = _show(self._batch[id(p)], p)
            self._shown[id(p)] = (ref(grad), grad._version)

    def _leave_out(self) -> None:
        """Add nothing for a backward pass after which nobody can tell what numbers of samples have changed."""
        _log.warning(
            "The samples of the first step add nothing to it: numbers of them were read before backward(), and may "
            "have changed the loss. Read them after backward() to use this step, too. Later steps must do the same."
        )
        self._batch = self._batch or {}
        self._arrived += 1
        self._spent = False

    def _restore_scale(self, total: Tensor) -> Tensor:
        return total if self.loss_divisor == 1 else total * self.loss_divisor

    def _count_samples(self, grads: StreamedClip) -> Sums:
        """Further sums over the samples of a backward pass; keys are not ids of parameters."""
        return {}

    def _show_rows(self, grads: StreamedClip) -> None:
        """Put the gradients of the samples into `p.grad_sample`: a tensor, or one for each backward pass."""
        for p in self.params:
            rows = grads.rows.get(self._names[id(p)])
            rows = p.new_zeros(grads.row_count, *p.shape) if rows is None else self._restore_scale(rows).to(p.dtype)
            before = getattr(p, "grad_sample", None)
            shown = rows if before is None else [*(before if isinstance(before, list) else [before]), rows]
            p.grad_sample = shown

    @property
    def grad_samples(self) -> list[Tensor]:
        """`(batch, *shape)` for each parameter: the gradient of each sample before clipping, if they were asked for."""
        return [self._get_flat_grad_sample(p) for p in self.params]

    def _get_flat_grad_sample(self, p: Tensor) -> Tensor:
        rows = getattr(p, "grad_sample", None)
        if rows is not None:
            return torch.cat(rows) if isinstance(rows, list) else rows
        if self._has_grad_samples:
            raise PrivateTrainingError(
                f"'{self._names[id(p)]}' has no grad_sample yet: read it after backward() and before zero_grad()."
            )
        raise PrivateTrainingError(
            "The gradients of single samples are clipped and added up without being written out. To have them in "
            "p.grad_sample and optimizer.grad_samples, call make_private with grad_samples=True, or with "
            "grad_sample_mode='hooks'."
        )

    def _is_batch_cleared(self) -> bool:
        """Whether `p.grad` was set to None after the last backward pass, as by `model.zero_grad()`.

        The values of `p.grad` decide nothing: they depend on the samples.
        """
        return self._batch is not None and bool(self._shown) and all(p.grad is None for p in self.params)

    def _is_grad_untouched(self) -> bool:
        """Whether `p.grad` is still what the last step has left in it."""
        left = [(p.grad, *self._shown.get(id(p), (None, 0))) for p in self.params]
        return any(g is not None and made is not None and g is made() and g._version == v for g, made, v in left)

    def _note_failure(self, error: BaseException | None) -> None:
        """Note that a call of the model, or the backward pass from its outputs, has failed."""
        if error is not None:
            self._failed += 1
            self._peers.report_failure(error)

    @property
    def accumulated_iterations(self) -> int:
        """Number of batches that the next step adds up."""
        return max(1, math.ceil(self._arrived / self.parts_per_step))

    # ---- parts of a split batch ----

    def begin_batches(self) -> None:
        """Forget what is left of earlier batches. `BatchMemoryManager` calls it when its loop begins."""
        self._step_skip_queue.clear()
        self._failed = 0
        self._forget()

    def begin_part(self, is_last: bool) -> None:
        """Begin a part of a batch. `BatchMemoryManager` calls it for each part that it yields."""
        self.check_part()
        self.signal_skip_step(not is_last)

    def check_part(self) -> None:
        """Raise if the part before has failed: it has made no call of `step()`.

        Its samples are missing in the sum. If one of them is the cause, it changes the sum by all others of the part.
        No other sum keeps the bound either: a step without any sample of the batch lacks even more.
        """
        self._failed = 0
        if self._step_skip_queue:
            self._step_skip_queue.clear()
            self._forget()
            raise PrivateTrainingError(
                "A part of a batch has failed, or was left out: step() was not called for it. If one sample is the "
                "cause, it takes all other samples of the part out of the sum, which is more than max_grad_norm. "
                "Nothing of the batch counts. Let the error end the training, or mend the loop so that no part fails: "
                "check the samples when the data set is made."
            )

    def _drop_batch(self) -> None:
        self._batch = None
        self._shown.clear()
        self._arrived = self.row_count = 0

    def _forget(self) -> None:
        """Forget all samples that have arrived since the last step."""
        self._drop_batch()
        self._parts = self._settings = None
        self._is_last_step_skipped = False

    # ---- steps ----

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make a step with the sum of the clipped gradients and noise; with only a part of a batch, add to the sum."""
        if self._is_released:
            self._refuse_left_sums()
            return self.original_optimizer.step(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.pre_step():
            self.original_optimizer.step()
        return loss

    def _refuse_left_sums(self) -> None:
        left = {id(grad) for made in self._left if (grad := made()) is not None}
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
            self._watch.rest()
            self.accumulate()
            if self._check_skip_next_step():
                self._is_last_step_skipped = True
                self._drop_batch()
                return False
            self._prepare_step()
        except BaseException as error:
            self._forget()
            self._clear_grad()
            self._peers.report_failure(error)
            raise
        self._forget()
        self._shown = {id(p): (ref(p.grad), p.grad._version) for p in self.params if p.grad is not None}
        self._spent = True
        return True

    def _prepare_step(self) -> None:
        if self._parts is None or self._settings is None:  # no samples: the step is noise only
            self._settings = self._get_current_settings()
        settings = self._settings
        if self.check_step is not None:
            self.check_step(self, settings.noise_multiplier)
        totals = self._take_noised_sums(self._get_noise_scale(settings.noise_multiplier) * settings.max_grad_norm)
        divisor = self._get_divisor() * (settings.max_grad_norm if self.normalize_clipping else 1)
        for p in self.params:
            total = totals.pop(id(p)).detach()
            p.grad = (total if divisor == 1 else total.div_(divisor)).to(p.dtype)
        self._call_step_hook(settings)

    def _get_noise_scale(self, noise_multiplier: float) -> float:
        """Standard deviation of the noise relative to the bound."""
        return noise_multiplier

    def check_noise_multiplier(self) -> None:
        """Raise if the noise multiplier is not possible."""
        self._get_noise_scale(self.noise_multiplier)

    def _show_sums(self) -> None:
        """Put the clipped sums into `p.summed_grad`."""
        for p in self.params:
            total = (self._parts or {}).get(id(p))
            p.summed_grad = torch.zeros_like(p) if total is None else total.to(p.dtype, copy=True)

    def _check_complete(self) -> None:
        """Refuse a step in which samples are missing, because a part of a split batch or a backward pass has failed."""
        failed, self._failed = self._failed, 0
        if failed and len(self._step_skip_queue) > 1:  # the manager of Opacus
            self._step_skip_queue.clear()
            raise PerSampleError(
                "A part of a split batch has failed, and the optimizer does not know which of the parts that follow "
                "belong to the same batch. Use persample.private.BatchMemoryManager. The sum over this batch was "
                "dropped."
            )
        recording = self._watch.find_recording()
        if not self._arrived and (failed or (recording is not None and not recording.tracker.has_ended)):
            self._step_skip_queue.clear()
            raise PrivateTrainingError(
                "The model was called for this step, and no backward pass has followed, so that the samples of the "
                "batch are missing. If one sample is the cause, it takes all others out of the sum. Call backward() "
                "before each step(), and the model under torch.no_grad() if it is not trained."
            )

    def accumulate(self) -> None:
        """Add the sum of the last backward passes to the sum over the parts of the batch, and clear `p.grad`."""
        if self._is_batch_cleared():
            self._drop_batch()
        if self._batch is not None:
            self._parts = _add(self._parts, self._batch)
        self._batch = None
        if self.shows_sums:
            self._show_sums()
        self._clear_grad()

    def clip_and_accumulate(self) -> None:
        """As in Opacus; the samples were clipped in the backward pass, so this is `accumulate`."""
        self.accumulate()

    def add_noise(self) -> NoReturn:
        """Refused: a sum without noise is never in `p.grad`, so noise is not added to it separately."""
        raise PrivateTrainingError(
            "add_noise() and scale_grad() are not separate steps here: pre_step() adds the noise, divides by the "
            "expected batch size and calls the accountant. Call step()."
        )

    def scale_grad(self) -> NoReturn:
        """Refused, as `add_noise` is."""
        self.add_noise()

    def _clear_grad(self) -> None:
        """Set `p.grad` to None for every parameter, also for frozen ones, with gradients from before."""
        for p in chain.from_iterable(group["params"] for group in self.param_groups):
            p.grad = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear `p.grad`, and forget the samples since the last step, except parts of a split batch."""
        if self._is_released:
            self._left = []
        elif self._is_last_step_skipped:
            self._drop_batch()
        else:
            self._forget()
        self._spent = False
        self._clear_rows()
        self.original_optimizer.zero_grad(set_to_none)

    def _clear_rows(self) -> None:
        for p in self.params:
            if self._has_grad_samples:
                p.grad_sample = None
            if self.shows_sums and not self._is_last_step_skipped:
                p.summed_grad = None

    @torch.no_grad()
    def _take_noised_sums(self, std: float) -> Sums:
        """The sums over all processes with noise of deviation `std`, which only the first process draws.

        Sums and noise have at least 32 bits, whatever the dtype of the parameters, so that they are rounded once.
        """
        sums, self._parts = self._parts or {}, None
        # A parameter that no sample used has no sum, but it needs noise as well.
        totals = {id(p): sums.pop(id(p)) if id(p) in sums else widen(torch.zeros_like(p)) for p in self.params}
        whole = {key: total.contiguous() for key, total in totals.items() if key not in self._shards}
        if not self._shards:
            self._draw(list(whole.values()), std)
            return self._peers.add_up(whole)
        for p in self.params:
            if id(p) in self._shards:
                totals[id(p)] = totals[id(p)] + self._draw_shard_noise(std, p)
            else:
                self._draw([whole[id(p)]], std)
        return {**totals, **self._peers.send_from_first(whole)}  # each sum covers all processes, but not the noise

    def _draw(self, totals: list[Tensor], std: float) -> None:
        """Add noise to contiguous tensors, in place, if this is the first process."""
        if self._peers.rank or not std:
            self.noise.skip()
            return
        parts = [torch.view_as_real(total) if total.is_complex() else total for total in totals]
        if self.secure_mode:
            for part in parts:
                part += _generate_noise(std=std, reference=part, generator=self.generator, secure_mode=True)
        elif self.generator is None:
            self.noise.add_to(parts, std)
        else:
            for part in parts:
                add_noise_of(self.generator, part, std)

    def _draw_shard_noise(self, std: float, p: Tensor) -> Tensor:
        """Noise for the shard of a parameter; the first process draws it for the whole parameter."""
        from torch.distributed.tensor import distribute_tensor

        whole = widen(torch.zeros(p.shape, dtype=p.dtype, device=p.device))
        self._draw([whole], std)
        return distribute_tensor(whole, p.device_mesh, p.placements)  # type: ignore[attr-defined]

    def _get_divisor(self) -> float:
        """The expected number of samples if the loss is a mean, 1 if it is a sum."""
        if self.loss_reduction == "sum":
            return 1
        return self.expected_batch_size * self.accumulated_iterations * self._peers.count

    def _call_step_hook(self, settings: _Settings) -> None:
        """Call the hook of the accountant with the noise multiplier of this step."""
        if self.step_hook is None:
            return
        later: float = self.noise_multiplier
        self.noise_multiplier = settings.noise_multiplier
        try:
            self.step_hook(self)
        finally:
            if self.noise_multiplier == settings.noise_multiplier:  # else the hook has set another one
                self.noise_multiplier = later

    # ---- what a private optimizer cannot do ----

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """GradScaler asks for this before a step."""
        raise PerSampleError(
            "GradScaler scales the loss, and so the gradient of each sample before it is clipped: private training "
            "does not support it. Use bfloat16, which needs no scaling, or GradScaler(enabled=False)."
        )

    def _refuse_copy(self, *args: Any) -> NoReturn:
        raise PerSampleError(
            "A private optimizer cannot be copied or pickled: the copy would draw the same noise. Save its "
            "state_dict(), or copy the model and call make_private for the copy."
        )

    __deepcopy__ = __copy__ = __reduce_ex__ = _refuse_copy


def _refuse_closures(optimizer: Optimizer) -> None:
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise PerSampleError(
            f"{type(optimizer).__name__} evaluates the loss several times in a step, and each evaluation would need "
            "its own noise: private training does not support it. Use an optimizer whose step() takes one gradient."
        )


def _add(total: Sums | None, part: Sums) -> Sums:
    """Add sums by parameter. A parameter may be in one of them only."""
    if total is None:
        return part
    return {key: _add_both(total.get(key), part.get(key)) for key in total | part}


def _add_both(a: Tensor | None, b: Tensor | None) -> Tensor:
    if a is None or b is None:
        found = b if a is None else a
        assert found is not None
        return found
    return a + b


def _show(total: Tensor, p: Tensor) -> Tensor:
    """A copy of a sum for `p.grad`. It takes memory only if somebody changes it."""
    return _torch.clone_lazily(total) if total.dtype == p.dtype else total.to(p.dtype)
