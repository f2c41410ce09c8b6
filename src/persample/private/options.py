"""The options of `make_private` and `make_private_with_epsilon`."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

import torch
from torch import Tensor

from persample.batches import BatchDim
from persample.gradients import NonFinite, UnitReduction
from persample.private.errors import PrivateTrainingError
from persample.private.strategies import Strategy
from persample.recording import Constants, Verify

WITH_CRITERION = ("ghost", "ghost_fsdp")
WITH_ROWS = ("hooks", "functorch", "ew")
_MODES = (*WITH_ROWS, *WITH_CRITERION, "no_op")

_ADAPTIVE = (
    "target_unclipped_quantile",
    "clipbound_learning_rate",
    "max_clipbound",
    "min_clipbound",
    "unclipped_num_std",
)


class PrivateOptions(TypedDict, total=False):
    """The names and types of the options. `EngineOptions` documents them."""

    criterion: Callable[..., Any] | None
    batch_first: bool
    loss_reduction: str
    poisson_sampling: bool
    clipping: str
    noise_generator: torch.Generator | None
    grad_sample_mode: str | None
    wrap_model: bool
    rand_on_empty: bool
    distributed: bool | None
    normalize_clipping: bool
    target_unclipped_quantile: float | None
    clipbound_learning_rate: float | None
    max_clipbound: float | None
    min_clipbound: float | None
    unclipped_num_std: float | None
    grad_samples: bool | None
    unit_ids: Tensor | Sequence[Hashable] | None
    examples_per_unit: int | None
    units: int | None
    unit_reduction: UnitReduction
    batch_dim: BatchDim | None
    batch_size: int | None
    constants: Constants
    passes: Literal[1, 2] | None
    memory: int | None
    verify: Verify
    nonfinite: NonFinite
    strategy: Strategy | None
    sample_rate: float | None
    expected_batch_size: float | None


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """The options with their defaults, checked.

    Attributes:
        criterion: loss function for `grad_sample_mode="ghost"`; cross entropy by default.
        batch_first: whether the samples are in dimension 0 of the batches, as in Opacus; else in dimension 1.
        loss_reduction: whether the loss is the "mean" or the "sum" of the losses of the samples.
        poisson_sampling: whether batches are drawn as Poisson samples, which the accountant assumes.
        clipping: "flat", "per_layer" or "automatic", see `PrivateOptimizer`; "adaptive", see `AdaptiveOptimizer`.
        noise_generator: generator of the noise. By default the noise comes from the entropy of the operating system.
        grad_sample_mode: the gradients are the same in all modes. With "hooks", "functorch" or "ew" they are also
            written to `p.grad_sample`, as by Opacus, which takes its memory. With "ghost" or "ghost_fsdp", a
            criterion is returned between the optimizer and the data loader. "no_op" is the mode of Opacus itself:
            you fill `p.grad_sample`, and the optimizer of Opacus clips it. By default the fastest: nothing besides
            the clipped sum.
        wrap_model: the model is never wrapped. With False, the first result is a handle with `cleanup()`, as in
            Opacus, instead of the module.
        rand_on_empty: replace an empty batch by a random one of size 1, as in Opacus, and not by one of size 0.
        distributed: whether each process trains a copy of the module on its own samples. By default it does if the
            module is under DDP or FSDP2. With True, the module is not wrapped: the weights of the first process are
            sent to the others once, and the sums of all processes are added up in each step.
        normalize_clipping: divide the private gradient by `max_grad_norm`.
        target_unclipped_quantile: for `clipping="adaptive"`, as the next four; see `AdaptiveOptimizer`.
        clipbound_learning_rate: how fast the bound changes.
        max_clipbound: upper limit of the bound.
        min_clipbound: lower limit of the bound.
        unclipped_num_std: standard deviation of the noise of the number of samples that were not clipped.
        grad_samples: whether `p.grad_sample` and `optimizer.grad_samples` are filled; by default as
            `grad_sample_mode` says.
        unit_ids: the unit (user, patient, document) of each example of the dataset. Then the privacy is that of
            units: batches are Poisson samples of units, with the loader's batch size as the expected number of
            units, the gradient of each unit is clipped, and the accountant counts units.
        examples_per_unit: the largest number of examples of a unit in a batch; None: all of them.
        units: the number of consecutive samples of the model's batch that are one row, such as augmentations of one
            example.
        unit_reduction: whether the gradient of a unit is the "mean" or the "sum" of the gradients of its samples.
        batch_dim: the dimension of the samples in the arguments of the model, as in `persample.record`: 0 by
            default, or 1 with `batch_first=False`. An argument without the batch's size in that dimension has its
            samples in the only other dimension of that size, as an initial state `(layers, batch, features)` has.
        batch_size: the number of samples, if the arguments do not agree, as in `persample.record`.
        constants: tensors that are the same for all samples, as in `persample.record`.
        passes: 2 for two backward passes, which take less memory; by default, `memory` decides.
        memory: the bytes that one pass may keep before two passes are made; by default half of the free memory.
        verify: "first": two samples of the first batch run alone, and their outputs are compared with those of the
            batch. "always": in every batch. False: never. A number n: as "first", and again
            after 1 to n further batches.
        nonfinite: samples whose gradient is not finite are left out ("zero") or raise an error ("raise").
        strategy: noise that takes back parts of the noise of earlier steps, see `Strategy`. The batches are then
            Poisson samples of bins in turn.
        sample_rate: the probability of each example to be in a batch. By default it is one divided by the number of
            batches of the loader, which depends on the size of the data set.
        expected_batch_size: what sums are divided by. By default it is the size of the data set times the rate.
    """

    criterion: Callable[..., Any] | None = None
    batch_first: bool = True
    loss_reduction: str = "mean"
    poisson_sampling: bool = True
    clipping: str = "flat"
    noise_generator: torch.Generator | None = None
    grad_sample_mode: str | None = None
    wrap_model: bool = True
    rand_on_empty: bool = False
    distributed: bool | None = None
    normalize_clipping: bool = False
    target_unclipped_quantile: float | None = None
    clipbound_learning_rate: float | None = None
    max_clipbound: float | None = None
    min_clipbound: float | None = None
    unclipped_num_std: float | None = None
    grad_samples: bool | None = None
    unit_ids: Tensor | Sequence[Hashable] | None = None
    examples_per_unit: int | None = None
    units: int | None = None
    unit_reduction: UnitReduction = "mean"
    batch_dim: BatchDim | None = None
    batch_size: int | None = None
    constants: Constants = ()
    passes: Literal[1, 2] | None = None
    memory: int | None = None
    verify: Verify = "first"
    nonfinite: NonFinite = "zero"
    strategy: Strategy | None = None
    sample_rate: float | None = None
    expected_batch_size: float | None = None

    def __post_init__(self) -> None:
        if self.grad_sample_mode not in (None, *_MODES):
            raise PrivateTrainingError(f"grad_sample_mode must be one of {_MODES}, got {self.grad_sample_mode!r}")
        if self.grad_sample_mode == "no_op" and self.normalize_clipping:
            raise PrivateTrainingError("grad_sample_mode='no_op' does not support normalize_clipping.")
        if self.unit_ids is None and self.examples_per_unit is not None:
            raise PrivateTrainingError("examples_per_unit requires unit_ids.")
        if self.unit_ids is not None and not self.poisson_sampling:
            raise PrivateTrainingError("unit_ids requires poisson_sampling=True: the accountant counts sampled units.")
        self._check_sampling()
        if self.strategy is not None:
            self._check_strategy()
        given = {name: getattr(self, name) for name in _ADAPTIVE if getattr(self, name) is not None}
        if self.clipping == "adaptive" and len(given) < len(_ADAPTIVE):
            missing = ", ".join(name for name in _ADAPTIVE if name not in given)
            raise PrivateTrainingError(f"clipping='adaptive' requires {missing}.")
        if self.clipping != "adaptive" and given:
            names = ", ".join(given)
            raise PrivateTrainingError(f"{names} requires clipping='adaptive', got clipping={self.clipping!r}.")

    def _check_sampling(self) -> None:
        """Refuse rates and sizes that are not possible, or would not be used."""
        if self.grad_sample_mode == "no_op" and (self.sample_rate, self.expected_batch_size) != (None, None):
            raise PrivateTrainingError("grad_sample_mode='no_op' does not support sample_rate and expected_batch_size.")
        if self.expected_batch_size is not None and not 0 < self.expected_batch_size < math.inf:
            raise PrivateTrainingError(f"expected_batch_size must be positive, got {self.expected_batch_size}.")
        if self.sample_rate is None:
            return
        if not 0 < self.sample_rate <= 1:
            raise PrivateTrainingError(f"sample_rate must be a probability above 0, got {self.sample_rate}.")
        if not self.poisson_sampling or self.rand_on_empty or self.unit_ids is not None:
            raise PrivateTrainingError(
                "sample_rate requires Poisson samples of examples: it does not support poisson_sampling=False, "
                "rand_on_empty and unit_ids, which take their rate from the batch size of the loader."
            )
        if self.strategy is not None and abs(1 / self.sample_rate - round(1 / self.sample_rate)) > 1e-6:
            raise PrivateTrainingError(f"With a strategy, 1 / sample_rate must be an integer, got {self.sample_rate}.")

    def _check_strategy(self) -> None:
        """Refuse what has other batches, or other draws of noise, than correlated noise."""
        others = {
            "unit_ids": self.unit_ids is not None,
            "poisson_sampling=False": not self.poisson_sampling,
            "noise_generator": self.noise_generator is not None,
            "clipping='adaptive'": self.clipping == "adaptive",
            "grad_sample_mode='no_op'": self.grad_sample_mode == "no_op",
            "rand_on_empty": self.rand_on_empty,
        }
        found = [name for name, is_given in others.items() if is_given]
        if found:
            raise PrivateTrainingError(f"Correlated noise (strategy) does not support {' and '.join(found)}.")

    @property
    def adaptive(self) -> dict[str, Any]:
        """The options of adaptive clipping, none for another one."""
        return {name: getattr(self, name) for name in _ADAPTIVE} if self.clipping == "adaptive" else {}

    @property
    def recording(self) -> dict[str, Any]:
        """The options of the recording of each step."""
        has_units = self.unit_ids is not None or self.units is not None
        return {
            **({} if self.units is None else {"units": self.units}),
            **({"unit_reduction": self.unit_reduction} if has_units else {}),
            "batch_dim": (0 if self.batch_first else 1) if self.batch_dim is None else self.batch_dim,
            "batch_size": self.batch_size,
            "constants": self.constants,
            "passes": self.passes,
            "memory": self.memory,
            "verify": self.verify,
            "nonfinite": self.nonfinite,
        }

    @property
    def fills_rows(self) -> bool:
        """Whether `p.grad_sample` is filled."""
        return self.grad_sample_mode in WITH_ROWS if self.grad_samples is None else self.grad_samples
