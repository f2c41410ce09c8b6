"""The step of private training: the clipped sum, plus noise, divided by the expected batch, to any optimizer."""

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
from persample.gradients import PerSampleGradients
from persample.recording.watch import Watch

_BLOCK = 2**18  # numbers of noise that are drawn at once: 1 MB in float32
AUTOMATIC_STABILISER = 0.01  # that of Bu et al. (2023), whose results it does not change much


class PrivateOptimizer(DPOptimizerFastGradientClipping):
    """Opacus' optimizer for clipped sums, with persample watching the model: each backward pass adds one to `p.grad`.

    `step()` takes what has come, adds the noise, once, and lets the optimizer it wraps make its step. Where a batch is
    split (`BatchMemoryManager`), only the last part's step does so. Several processes: the sums of all are added up,
    and the noise, which the first of them draws, is that of one process.

    `clipping`: "flat", where a sample's whole gradient is bounded by `max_grad_norm`; "per_layer", each parameter's
    part by one of a list of bounds; "automatic", where every gradient is scaled to nearly the bound. `recording` has
    further options of `record`.
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
            raise PerSampleError(f"clipping is 'flat', 'per_layer' or 'automatic', got {clipping!r}")
        super().__init__(
            optimizer,
            noise_multiplier=noise_multiplier,
            max_grad_norm=max_grad_norm,  # of several, it is replaced by their norm
            expected_batch_size=expected_batch_size,
            loss_reduction=loss_reduction,
            generator=generator,
            secure_mode=secure_mode,
        )
        self.clipping = clipping
        self.poisson_sampling = poisson_sampling
        self._names = _names_of(module, self.params)
        self._bounds: dict[str, float] = {}
        if clipping == "per_layer":
            self._bounds = self._bounds_of(max_grad_norm)
            self.max_grad_norm = _norm(self._bounds.values())
        elif not isinstance(max_grad_norm, (int, float)):
            raise PerSampleError(f"{clipping} clipping takes one max_grad_norm, got {max_grad_norm}")
        self._recording = dict(recording or {})
        self._processes = torch.distributed.get_world_size() if distributed else 1
        self._rank = torch.distributed.get_rank() if distributed else 0
        self._arrived = 0  # backward passes since the last step
        self._spent = False  # whether what is in `grad` has been used for a step
        is_sharded = bool(_torch.get_fsdp_states(module))
        self._shards = {id(p): p for p in self.params if is_sharded and hasattr(p, "full_tensor")}
        self._watch = Watch(module, self._receive, self._options)

    def _bounds_of(self, bounds: float | Sequence[float]) -> dict[str, float]:
        """The bound of each parameter, by its name; they come in the order of the optimizer's parameters."""
        if isinstance(bounds, (int, float)) or len(bounds) != len(self.params):
            raise PerSampleError(
                f"per_layer clipping takes a list of max_grad_norms, one for each of the {len(self.params)} trainable "
                f"parameters of the optimizer; got {bounds}"
            )
        return {self._names[id(p)]: float(bound) for p, bound in zip(self.params, bounds, strict=True)}

    def _options(self) -> Mapping[str, Any]:
        """What the next step is recorded with: a scheduler may have changed the bound since the last."""
        bound = float(self.max_grad_norm)
        by_name = {name: part * bound / _norm(self._bounds.values()) for name, part in self._bounds.items()}
        return {
            "keep": "clip",
            "max_norm": by_name or bound,
            "stabiliser": AUTOMATIC_STABILISER if self.clipping == "automatic" else None,
            "loss_reduction": self.loss_reduction,
            "parameters": [self._names[id(p)] for p in self.params],
            **self._recording,
        }

    def release(self) -> None:
        """Ends the watch: the model trains without privacy from now on."""
        self._watch.stop()

    # ---- gradients come ----

    @torch.no_grad()
    def _receive(self, grads: PerSampleGradients) -> None:
        if self._arrived and self.poisson_sampling:
            raise PerSampleError(
                "A second backward pass before step(): batches that are sampled by themselves must not be added up, as "
                "the privacy spent would be another. Step after each, split large batches by BatchMemoryManager, or "
                "set poisson_sampling=False."
            )
        if self._spent and any(p.grad is not None for p in self.params):
            raise PerSampleError(
                "The gradients of the last step, with their noise, are still there: call optimizer.zero_grad() before "
                "the next backward pass."
            )
        self._spent = False
        self._arrived += 1
        clipped = grads.clip(own=not self._shards)  # type: ignore[call-arg]  # the bound is the recording's
        for p in self.params:
            part = clipped[self._names[id(p)]].to(p.dtype).view_as(p)
            p.grad = part if p.grad is None else p.grad + part

    @property
    def accumulated_iterations(self) -> int:
        """How many batches the next step is of."""
        return max(1, self._arrived)

    # ---- a step ----

    def accumulate(self) -> None:
        """Takes what has come to the part of the batch that came before."""
        for p in self.params:
            if p.grad is not None:
                p.summed_grad = p.grad if p.summed_grad is None else p.summed_grad + p.grad
            p.grad = None

    def pre_step(self, closure: Callable[[], float] | None = None) -> bool:
        """All of a step but that of the wrapped optimizer, which follows if this is true."""
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
        """Adds noise of `noise_multiplier * max_grad_norm` to the sums. Of several processes the first draws it."""
        std = self.noise_multiplier * self.max_grad_norm
        for p in self.params:
            # Where no sample used it there is no sum, but noise as everywhere.
            p.grad = torch.zeros_like(p) if p.summed_grad is None else p.summed_grad
            p.summed_grad = None
            if id(p) in self._shards:
                p.grad += self._noise_of_shard(std, p)
            elif self._rank == 0 and std:
                p.grad = self._noised(p.grad, std)

    def _noised(self, total: Tensor, std: float) -> Tensor:
        """The sum with noise, block after block: what is drawn stays in cache."""
        if self.secure_mode:
            return total + _generate_noise(std=std, reference=total, generator=self.generator, secure_mode=True)
        total = total.contiguous()
        numbers = total.view(-1)
        blocks = max(1, len(numbers) // _BLOCK)
        drawn = torch.empty(min(len(numbers), 2 * _BLOCK), dtype=total.dtype, device=total.device)
        for i in range(blocks):  # the last one takes the rest
            block = numbers[i * _BLOCK : (i + 1) * _BLOCK if i < blocks - 1 else None]
            block += drawn[: len(block)].normal_(0, std, generator=self.generator)
        return total

    def _noise_of_shard(self, std: float, p: Tensor) -> Tensor:
        from torch.distributed.tensor import distribute_tensor

        whole = torch.zeros(p.shape, dtype=p.dtype, device=p.device)
        if self._rank == 0 and std:
            whole = self._noised(whole, std)
        return distribute_tensor(whole, p.device_mesh, p.placements)  # type: ignore[attr-defined]

    def _reduce(self) -> None:
        """Adds up what the processes have. With FSDP2 all sums are over all of them already: those of parameters that
        are no shards lack the noise that the first process has.
        """
        for p in self.params if self._processes > 1 else ():
            if not self._shards:
                torch.distributed.all_reduce(p.grad)
            elif id(p) not in self._shards:
                torch.distributed.broadcast(p.grad, 0)

    def scale_grad(self) -> None:
        """Divides by the expected number of samples, if the loss is a mean."""
        if self.loss_reduction == "mean":
            for p in self.params:
                assert p.grad is not None
                p.grad /= self.expected_batch_size * self.accumulated_iterations * self._processes


def _names_of(module: nn.Module, parameters: Iterable[Tensor]) -> dict[int, str]:
    names = {id(p): name for name, p in module.named_parameters()}
    if any(id(p) not in names for p in parameters):
        raise PerSampleError("The optimizer has parameters that are none of the module's.")
    return names


def _norm(numbers: Iterable[float]) -> float:
    return math.hypot(*numbers)
