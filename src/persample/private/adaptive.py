"""Adaptive clipping: the bound follows a quantile of the norms (Andrew et al., 2021, https://arxiv.org/abs/1905.03871)."""

from __future__ import annotations

import math
from typing import Any

import torch
from opacus.optimizers import AdaClipDPOptimizer
from torch.optim import Optimizer

from persample.gradients import LEAST_BOUND, StreamedClip
from persample.private.errors import PrivateTrainingError
from persample.private.one_step import Sums
from persample.private.optimizer import PrivateOptimizer

_UNCLIPPED = 0  # key of the count among the sums; no object has this id


class AdaptiveOptimizer(PrivateOptimizer, AdaClipDPOptimizer):
    """A private optimizer whose bound is adapted after each step, as in `opacus.optimizers.AdaClipDPOptimizer`.

    Each step also counts the samples whose gradient was not clipped, with noise of its own. The bound is multiplied by
    `exp(-clipbound_learning_rate * (share - target_unclipped_quantile))`. The gradients get so much more noise that
    both results together spend what `noise_multiplier` says, which is what the accountant counts.

    A sample counts as 1/2 if it was not clipped and as -1/2 if it was, so that it changes the count by 1/2, as Andrew
    et al. (2021) assume. The share is relative to the expected batch size. Opacus counts 1 and 0, so that a sample
    changes the count by 1, and divides by the number of samples in the batch, which is private under Poisson sampling.

    Args:
        target_unclipped_quantile: the share of samples that should not be clipped.
        clipbound_learning_rate: how fast the bound changes.
        max_clipbound: upper limit of the bound.
        min_clipbound: lower limit of the bound.
        unclipped_num_std: standard deviation of the noise of the count. `noise_multiplier` must be smaller than twice
            this value.

    The other arguments are the arguments of `PrivateOptimizer`; `max_grad_norm` is the bound of the first step.

    >>> import torch
    >>> model = torch.nn.Linear(3, 2)
    >>> optimizer = AdaptiveOptimizer(
    ...     torch.optim.SGD(model.parameters(), lr=0.1), module=model, noise_multiplier=1.0, max_grad_norm=1.0,
    ...     expected_batch_size=5, target_unclipped_quantile=0.5, clipbound_learning_rate=0.2, max_clipbound=10.0,
    ...     min_clipbound=0.1, unclipped_num_std=2.0)
    >>> model(torch.randn(5, 3)).square().mean().backward()
    >>> optimizer.step()
    >>> optimizer.max_grad_norm != 1.0
    True
    >>> optimizer.release()
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        target_unclipped_quantile: float,
        clipbound_learning_rate: float,
        max_clipbound: float,
        min_clipbound: float,
        unclipped_num_std: float,
        noise_multiplier: float,
        expected_batch_size: float,
        distributed: bool = False,
        **others: Any,
    ) -> None:
        _check_limits(min_clipbound, max_clipbound)
        if distributed:
            raise PrivateTrainingError(
                "clipping='adaptive' supports one process only, as in Opacus. Use 'flat' or 'automatic'."
            )
        _compute_noise_scale(noise_multiplier, unclipped_num_std)  # raises if it is not possible
        super().__init__(
            optimizer,
            noise_multiplier=noise_multiplier,
            expected_batch_size=expected_batch_size,
            adaptive={
                "target_unclipped_quantile": target_unclipped_quantile,
                "clipbound_learning_rate": clipbound_learning_rate,
                "max_clipbound": max_clipbound,
                "min_clipbound": min_clipbound,
                "unclipped_num_std": unclipped_num_std,
            },
            **others,
        )
        self.clipping = "adaptive"
        self.unclipped_num = 0.0  # of the last step, with noise
        self._unclipped_share = target_unclipped_quantile  # of the samples of the last step
        self._centred_count = 0.0  # the same, minus half of the samples

    def get_noise_scale(self, noise_multiplier: float) -> float:
        return _compute_noise_scale(noise_multiplier, self.unclipped_num_std)

    def _count_samples(self, grads: StreamedClip) -> Sums:
        settings = self._step.settings
        assert settings is not None  # fixed by the call of the model
        is_unclipped = grads.norms() * self.loss_divisor <= settings.max_grad_norm
        return {_UNCLIPPED: (is_unclipped.float() - 0.5).sum()}

    @torch.no_grad()
    def _take_noised_sums(self, std: float) -> Sums:
        count = (self._step.parts or {}).pop(_UNCLIPPED, torch.zeros(()))
        totals = super()._take_noised_sums(std)
        count = count.reshape(1).clone()
        self.releaser.draw([count], self.unclipped_num_std)
        self._centred_count = float(count)
        return totals

    def _prepare_step(self) -> None:
        arrived = self.accumulated_iterations
        super()._prepare_step()
        assert self.expected_batch_size is not None
        expected = self.expected_batch_size * arrived
        self.unclipped_num = self._centred_count + expected / 2
        self._unclipped_share = self.unclipped_num / expected
        self.update_max_grad_norm()

    def update_max_grad_norm(self) -> None:
        """Adapt the bound to the share of unclipped samples in the last step, as each step does at its end."""
        difference = self._unclipped_share - self.target_unclipped_quantile
        bound = self.max_grad_norm * math.exp(-self.clipbound_learning_rate * difference)
        self.max_grad_norm = min(max(bound, self.min_clipbound), self.max_clipbound)


def _check_limits(min_clipbound: float, max_clipbound: float) -> None:
    if max_clipbound <= min_clipbound:
        raise PrivateTrainingError("max_clipbound must be larger than min_clipbound.")
    if not (min_clipbound >= LEAST_BOUND and max_clipbound < math.inf):
        raise PrivateTrainingError(
            f"min_clipbound must be at least {LEAST_BOUND}, so that squares of norms do not vanish, and max_clipbound "
            f"finite, got {min_clipbound} and {max_clipbound}: a later step would fail."
        )


def _compute_noise_scale(noise_multiplier: float, unclipped_num_std: float) -> float:
    """Standard deviation of the noise of the gradients, beside the count, relative to the bound."""
    if noise_multiplier >= 2 * unclipped_num_std:
        raise PrivateTrainingError(
            f"noise_multiplier ({noise_multiplier:g}) must be smaller than 2 * unclipped_num_std "
            f"({2 * unclipped_num_std:g}): otherwise the count of unclipped samples spends more than that."
        )
    if not noise_multiplier:
        return 0.0
    return float((noise_multiplier**-2 - (2 * unclipped_num_std) ** -2) ** -0.5)
