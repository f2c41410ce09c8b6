"""Optimizer of private training: the clipped sum plus noise, divided by the expected batch size."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from opacus.optimizers import DPOptimizerFastGradientClipping
from opacus.optimizers.optimizer import _generate_noise
from torch import Tensor, nn
from torch.optim import Optimizer

from persample import _torch
from persample.errors import PerSampleError
from persample.gradients import StreamedClip
from persample.recording.watch import Watch

_BLOCK = 2**18  # numbers that are drawn at a time: 1 MB in float32
AUTOMATIC_STABILISER = 0.01  # from Bu et al. (2023); its value has little effect on their results


class PrivateOptimizer(DPOptimizerFastGradientClipping):
    """Wraps an optimizer for private training. Each backward pass adds the clipped sum of its samples to `p.grad`.

    persample watches the model and clips the gradients. `step()` adds the noise to the sum and calls the wrapped
    optimizer. If a batch is split by `BatchMemoryManager`, only the last part does so; earlier parts add to the sum.
    With several processes, the sums of all processes are added up, and only the first process draws noise.

    Args:
        optimizer: the optimizer to wrap; its parameters must be parameters of `module`.
        max_grad_norm: bound of the gradient of a sample; with "per_layer", a list with a bound for each parameter.
        clipping: "flat": the gradient of a sample is scaled down to norm `max_grad_norm` if it is larger.
            "per_layer": the same for each parameter, with its own bound.
            "automatic": every gradient is scaled by `max_grad_norm / (norm + 0.01)`.
        poisson_sampling: whether batches are Poisson samples, which must not be added up before a step.
        distributed: whether the parameters belong to a module under DDP or FSDP2.
        recording: further options of `persample.record`.
        generator: generator of the noise; the default generator of the device if None.

    The other arguments are the arguments of `opacus.optimizers.DPOptimizer`.
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
        recording: Mapping[str, Any] | None = None,
        generator: torch.Generator | None = None,
        secure_mode: bool = False,
    ) -> None:
        if clipping not in ("flat", "per_layer", "automatic"):
            raise PerSampleError(f"clipping must be 'flat', 'per_layer' or 'automatic', got {clipping!r}")
        super().__init__(
            optimizer,
            noise_multiplier=noise_multiplier,
            max_grad_norm=max_grad_norm,  # a list of bounds is replaced by its norm below
            expected_batch_size=expected_batch_size,
            loss_reduction=loss_reduction,
            generator=generator,
            secure_mode=secure_mode,
        )
        self.clipping = clipping
        self.poisson_sampling = poisson_sampling
        self._names = _map_names(module, self.params)
        self._bounds: dict[str, float] = {}
        if clipping == "per_layer":
            self._bounds = self._map_bounds(max_grad_norm)
            self.max_grad_norm = math.hypot(*self._bounds.values())
        elif not isinstance(max_grad_norm, (int, float)):
            raise PerSampleError(f"clipping={clipping!r} requires one number as max_grad_norm, got {max_grad_norm}")
        self._recording = dict(recording or {})
        self._processes = torch.distributed.get_world_size() if distributed else 1
        self._rank = torch.distributed.get_rank() if distributed else 0
        self._arrived = 0  # backward passes since the last step
        self._spent = False  # whether `p.grad` has already been used for a step
        is_sharded = bool(_torch.get_fsdp_states(module))
        self._shards = {id(p): p for p in self.params if is_sharded and hasattr(p, "full_tensor")}
        self._watch = Watch(module, self._receive, self._make_options)

    def _map_bounds(self, bounds: float | Sequence[float]) -> dict[str, float]:
        """Bound of each parameter by its name. `bounds` has the order of the optimizer's parameters."""
        if isinstance(bounds, (int, float)) or len(bounds) != len(self.params):
            raise PerSampleError(
                "clipping='per_layer' requires a list as max_grad_norm, with one bound for each of the "
                f"{len(self.params)} trainable parameters of the optimizer, got {bounds}"
            )
        return {self._names[id(p)]: float(bound) for p, bound in zip(self.params, bounds, strict=True)}

    def _make_options(self) -> Mapping[str, Any]:
        """Options of `record` for the next step. A scheduler may have changed the bound since the last step."""
        bound = float(self.max_grad_norm)
        by_name = {name: part * bound / math.hypot(*self._bounds.values()) for name, part in self._bounds.items()}
        return {
            "keep": "clip",
            "max_norm": by_name or bound,
            "stabiliser": AUTOMATIC_STABILISER if self.clipping == "automatic" else None,
            "loss_reduction": self.loss_reduction,
            "parameters": [self._names[id(p)] for p in self.params],
            **self._recording,
        }

    def release(self) -> None:
        """End private training: from now on the model trains without clipping and noise."""
        self._watch.stop()

    # ---- backward passes ----

    @torch.no_grad()
    def _receive(self, grads: StreamedClip) -> None:
        """Add the clipped sum of a backward pass to `p.grad`."""
        if self._arrived and self.poisson_sampling:
            raise PerSampleError(
                "A second backward pass before step(): independent Poisson samples must not be added up, because the "
                "accountant would count the wrong privacy loss. Call step() after each backward pass, split large "
                "batches with BatchMemoryManager, or set poisson_sampling=False."
            )
        if self._spent and any(p.grad is not None for p in self.params):
            raise PerSampleError(
                "p.grad still holds the gradients of the last step: call optimizer.zero_grad() before the next "
                "backward pass."
            )
        self._spent = False
        self._arrived += 1
        clipped = grads.clip(own=not self._shards)
        for p in self.params:
            part = clipped[self._names[id(p)]].to(p.dtype).view_as(p)
            p.grad = part if p.grad is None else p.grad + part

    @property
    def accumulated_iterations(self) -> int:
        """Number of batches that the next step adds up."""
        return max(1, self._arrived)

    # ---- steps ----

    def accumulate(self) -> None:
        """Add `p.grad` to the sum over the parts of the batch, and clear it."""
        for p in self.params:
            if p.grad is not None:
                p.summed_grad = p.grad if p.summed_grad is None else p.summed_grad + p.grad
            p.grad = None

    def pre_step(self, closure: Callable[[], float] | None = None) -> bool:
        """Prepare the gradients for the wrapped optimizer; return whether it makes a step."""
        self._watch.rest()
        self.accumulate()
        if self._check_skip_next_step():
            self._is_last_step_skipped = True
            self._arrived = 0
            return False
        self.add_noise()
        self._reduce()
        self.scale_grad()
        if self.step_hook:
            self.step_hook(self)
        self._is_last_step_skipped = False
        self._arrived = 0
        self._spent = True
        return True

    def zero_grad(self, set_to_none: bool = False) -> None:
        self._arrived = 0
        self._spent = False
        super().zero_grad(set_to_none)

    @torch.no_grad()
    def add_noise(self) -> None:
        """Add noise with standard deviation `noise_multiplier * max_grad_norm`; only the first process draws it."""
        std = self.noise_multiplier * self.max_grad_norm
        for p in self.params:
            # A parameter that no sample used has no sum, but it needs noise as well.
            p.grad = torch.zeros_like(p) if p.summed_grad is None else p.summed_grad
            p.summed_grad = None
            if id(p) in self._shards:
                p.grad += self._draw_shard_noise(std, p)
            elif self._rank == 0 and std:
                p.grad = self._add_noise(p.grad, std)

    def _add_noise(self, total: Tensor, std: float) -> Tensor:
        """Add noise to a sum, in blocks that fit into the cache."""
        if self.secure_mode:
            return total + _generate_noise(std=std, reference=total, generator=self.generator, secure_mode=True)
        total = total.contiguous()
        numbers = total.view(-1)
        blocks = max(1, len(numbers) // _BLOCK)
        drawn = torch.empty(min(len(numbers), 2 * _BLOCK), dtype=total.dtype, device=total.device)
        for i in range(blocks):  # the last block includes the remainder
            block = numbers[i * _BLOCK : (i + 1) * _BLOCK if i < blocks - 1 else None]
            block += drawn[: len(block)].normal_(0, std, generator=self.generator)
        return total

    def _draw_shard_noise(self, std: float, p: Tensor) -> Tensor:
        """Noise for the shard of a parameter; the first process draws it for the whole parameter."""
        from torch.distributed.tensor import distribute_tensor

        whole = torch.zeros(p.shape, dtype=p.dtype, device=p.device)
        if self._rank == 0 and std:
            whole = self._add_noise(whole, std)
        return distribute_tensor(whole, p.device_mesh, p.placements)  # type: ignore[attr-defined]

    def _reduce(self) -> None:
        """Add up the sums of all processes.

        With FSDP2 each sum already covers all processes. Only parameters that are not sharded still need the noise of
        the first process.
        """
        for p in self.params if self._processes > 1 else ():
            if not self._shards:
                torch.distributed.all_reduce(p.grad)
            elif id(p) not in self._shards:
                torch.distributed.broadcast(p.grad, 0)

    def scale_grad(self) -> None:
        """Divide by the expected number of samples if the loss is a mean."""
        if self.loss_reduction == "mean":
            for p in self.params:
                assert p.grad is not None
                p.grad /= self.expected_batch_size * self.accumulated_iterations * self._processes


def _map_names(module: nn.Module, parameters: Iterable[Tensor]) -> dict[int, str]:
    names = {id(p): name for name, p in module.named_parameters()}
    if any(id(p) not in names for p in parameters):
        raise PerSampleError("The optimizer has parameters that do not belong to the module.")
    return names
