"""What scripts for Opacus expect of a private optimizer, besides its steps."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any, NoReturn

import torch
from opacus.optimizers import DPOptimizer
from torch import Tensor

from persample.errors import PerSampleError
from persample.private.arrivals import Arrivals
from persample.private.errors import PrivateTrainingError
from persample.private.mechanism import CorrelatedMechanism
from persample.private.noise import Noise
from persample.private.one_step import PrivateStep
from persample.private.processes import Peers
from persample.private.releasing import Releaser


class OpacusShape(DPOptimizer):
    """Attributes and methods of the optimizer of Opacus, as views of the parts of a private optimizer."""

    arrivals: Arrivals
    releaser: Releaser
    parts_per_step: int
    noise_multiplier: float

    @property
    def _step(self) -> PrivateStep:
        return self.arrivals.step

    @property
    def peers(self) -> Peers:
        """The processes that train together."""
        return self.releaser.peers

    @property
    def noise(self) -> Noise:
        """The source of the noise, unless a generator is given."""
        return self.releaser.noise

    @property
    def mechanism(self) -> CorrelatedMechanism | None:
        """The mechanism of correlated noise, if a strategy was given."""
        return self.releaser.mechanism

    @property
    def row_count(self) -> int:
        """The number of samples (or units) in the backward passes since the last call of `step()`."""
        return self._step.row_count

    @property
    def nonfinite_count(self) -> int:
        """The number of samples so far whose gradient was not finite. They add nothing to the sum."""
        return self.arrivals.nonfinite_count

    @property
    def verifications(self) -> Counter[str]:
        """What the verification says, and of how many backward passes."""
        return self.arrivals.verifications

    @property
    def passes(self) -> int | None:
        """The number of backward passes of the last batch, as given or as chosen by the free memory.

        A change is logged by the logger "persample.private".
        """
        return self.arrivals.passes

    @property
    def units(self) -> int | str | None:
        """ "ids" if the loader hands out the unit of each sample, or the number of samples of each unit, or None."""
        return self.arrivals.units

    @property
    def verify_mode(self) -> Any:
        """The option `verify`."""
        return self.arrivals.verify_mode

    @property
    def batch_dim(self) -> int:
        """The dimension of the samples in the batches of the loader."""
        return self.arrivals.batch_dim

    @property
    def process_count(self) -> int:
        """The number of processes that train together."""
        return self.peers.count

    @property
    def accumulated_iterations(self) -> int:
        """Number of batches that the next step adds up."""
        return max(1, math.ceil(self._step.arrived / self.parts_per_step))

    @property
    def grad_samples(self) -> list[Tensor]:
        """`(batch, *shape)` for each parameter: the gradient of each sample before clipping, if they were asked for."""
        return [self._get_flat_grad_sample(p) for p in self.params]

    def _get_flat_grad_sample(self, p: Tensor) -> Tensor:
        rows = getattr(p, "grad_sample", None)
        if rows is not None:
            return torch.cat(rows) if isinstance(rows, list) else rows
        if self.arrivals.keeps_rows:
            raise PrivateTrainingError(
                "A parameter has no grad_sample yet: read it after backward() and before zero_grad()."
            )
        raise PrivateTrainingError(
            "The gradients of single samples are clipped and added up without being written out. To have them in "
            "p.grad_sample and optimizer.grad_samples, call make_private with grad_samples=True, or with "
            "grad_sample_mode='hooks'."
        )

    # ---- what a private optimizer cannot do ----

    def add_noise(self) -> NoReturn:
        """Refused: a sum without noise is never in `p.grad`, so noise is not added to it separately."""
        raise PrivateTrainingError(
            "add_noise() and scale_grad() are not separate steps here: pre_step() adds the noise, divides by the "
            "expected batch size and calls the accountant. Call step()."
        )

    def scale_grad(self) -> NoReturn:
        """Refused, as `add_noise` is."""
        self.add_noise()

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
