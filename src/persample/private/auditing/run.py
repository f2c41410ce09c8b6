"""One training with canaries, and their scores."""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from opacus.grad_sample import AbstractGradSampleModule
from opacus.optimizers import DPOptimizer
from torch import Tensor, nn
from torch.utils.data import default_collate

from persample.errors import PerSampleError
from persample.losses import LossFunction, compute_loss
from persample.private.auditing.canaries import GradientCanaries, WatchedData, make_samples
from persample.private.auditing.direct import DirectTest, get_parameters, get_unit
from persample.private.auditing.watching import StepWatch

_RIDGE = 1e-6  # makes parallel gradients of canaries distinguishable in theory, and their scores small


class Canaries:
    """The canaries of an audit: gradients, given samples, or samples that are made from the data.

    If the count is a limit, there are at most as many gradients as parameters.
    """

    def __init__(
        self,
        kind: str,
        count: int,
        samples: Sequence[Any] | None,
        generator: torch.Generator,
        is_limit: bool = False,
    ) -> None:
        self.kind, self.count, self.generator = kind, count, generator
        self._is_limit = is_limit
        self._samples = samples
        self._gradients: GradientCanaries | None = None
        self.sample_rate: float | None = None  # of all runs

    def get_samples(self, dataset: Any) -> Sequence[Any]:
        """The samples, which are made from the dataset of the first run unless they were given."""
        if self._samples is None:
            self._samples = make_samples(dataset, self.count, self.generator)
        return self._samples

    def get_gradients(self, parameters: Sequence[Tensor]) -> GradientCanaries:
        """The gradients, which are made for the parameters of the first run."""
        if self._gradients is None:
            if self._is_limit:
                self.count = min(self.count, sum(p.numel() for p in parameters))
            self._gradients = GradientCanaries(parameters, self.count, self.generator)
        return self._gradients


class AuditRun:
    """What the user's function receives: it adds canaries to a training, and observes the steps.

    The score of a canary is its log-likelihood ratio: how much more probable the released gradients are with the canary
    than without it, if clipping, noise and sampling are as claimed and other samples add nothing along its gradient.

    `audit` has a complete example. The function of the user begins like this:

    >>> def train(run):
    ...     loader = DataLoader(run.add_canaries(dataset), batch_size=64)
    ...     ...                                                         # make the model and the optimizer private
    ...     run.observe(optimizer, sample_rate=1 / len(loader), model=model, loss_fn=torch.nn.functional.cross_entropy)
    """

    def __init__(self, canaries: Canaries, included: Tensor) -> None:
        self._canaries, self._included = canaries, included
        self._scores = torch.zeros(canaries.count, dtype=torch.float64)
        self._samples: Sequence[Any] | None = None
        self._data: WatchedData | None = None
        self._watch: StepWatch | None = None
        self._observed: list[Any] = []  # handles of hooks
        self.steps = 0

    # ---- for the user's function ----

    def add_canaries(self, dataset: Any) -> Any:
        """The dataset to train on: with the canaries of this run, if they are samples.

        The last samples of the dataset are left out, as many as there are canaries in and out of the training, so that
        the canaries do not change the number of batches.
        """
        if self._canaries.kind == "gradient":
            self._data = WatchedData(dataset, len(dataset))
            return self._data
        rest = len(dataset) - self._canaries.count
        if rest < 1:
            raise PerSampleError(
                f"The dataset has {len(dataset)} samples, too few to replace some by {self._canaries.count} canaries."
            )
        self._samples = self._canaries.get_samples(dataset)
        included = [self._samples[i] for i in self._included.nonzero().flatten().tolist()]
        self._data = WatchedData(dataset, rest, included)
        return self._data

    def observe(
        self,
        optimizer: Any,
        *,
        sample_rate: float,
        model: nn.Module | None = None,
        loss_fn: LossFunction | None = None,
        collate: Callable[[list[Any]], Any] = default_collate,
    ) -> None:
        """Observe the steps of a private optimizer, of persample or of Opacus, and insert gradient canaries.

        First, direct tests make some steps of their own, without samples and with an outlier. They change neither the
        parameters nor the accountant.

        Args:
            optimizer: the optimizer that `make_private` has returned. Each step must follow one backward pass, or one
                batch that `BatchMemoryManager` has split.
            sample_rate: probability of each sample to be in a batch: `1 / len(loader)`.
            model: the model that is trained. Canaries that are samples need it.
            loss_fn: its loss, which is called as in `persample.check`. Canaries that are samples need it.
            collate: makes a batch of a list of samples.
        """
        is_first = self._canaries.sample_rate is None
        self._check_observed(optimizer, sample_rate)
        self._canaries.sample_rate = sample_rate
        step: _Step
        if self._canaries.kind == "gradient":
            step = _GradientStep(optimizer, self._canaries, self._included, sample_rate)
            self._scores = self._scores[: self._canaries.count]
        else:
            if model is None or loss_fn is None:
                raise PerSampleError("For canaries that are samples, pass model= and loss_fn= to observe().")
            if self._samples is None:
                raise PerSampleError("Train on run.add_canaries(dataset), and call it before observe().")
            batches = [collate([sample]) for sample in self._samples]
            step = _SampleStep(optimizer, model, loss_fn, batches, sample_rate)
        if is_first:
            self._watch = StepWatch(optimizer, sample_rate, self._data, model)
            self._watch.start(loss_fn, collate)

        def observe_step(*args: Any) -> None:
            if self._watch is not None:
                self._watch.note_step()
            self._scores += step.run()
            self.steps += 1

        self._observed.append(optimizer.original_optimizer.register_step_pre_hook(observe_step))

    def _check_observed(self, optimizer: Any, sample_rate: float) -> None:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            raise PerSampleError("An audit supports one process only.")
        if not 0 < sample_rate <= 1:
            raise PerSampleError(f"sample_rate must be the probability of a sample to be in a batch, got {sample_rate}")
        if self._canaries.sample_rate not in (None, sample_rate):
            raise PerSampleError(
                f"The sample rate differs between runs ({self._canaries.sample_rate} and {sample_rate}), which shows "
                "whether the canary was in. Use a fixed rate."
            )
        if not isinstance(optimizer, DPOptimizer):
            raise PerSampleError(
                f"observe() takes the private optimizer that make_private returns, got a {type(optimizer).__name__}."
            )
        if getattr(optimizer, "mechanism", None) is not None:
            raise PerSampleError(
                "An audit tests independent noise and the budget of each step alone. It does not support correlated "
                "noise (strategy)."
            )

    # ---- for the audit ----

    def stop(self) -> None:
        """Stop observing."""
        for handle in self._observed:
            handle.remove()
        if self._watch is not None:
            self._watch.stop()

    def test(self, returned: Any, claimed: float | None, delta: float) -> tuple[list[DirectTest], dict[str, str]]:
        """The direct tests of the steps, and why others were not made."""
        assert self._watch is not None
        return self._watch.test(returned, claimed, delta)

    def get_scores(self) -> Tensor:
        """The scores of all canaries."""
        if not self.steps:
            raise PerSampleError(
                "The training function made no step that the audit has seen. Call run.observe(optimizer, ...) with the "
                "optimizer that make_private returns, before the first step."
            )
        return self._scores


class _Step(ABC):
    """The released gradient of a step, in units of the bound."""

    def __init__(self, optimizer: Any, sample_rate: float) -> None:
        self._optimizer, self._sample_rate = optimizer, sample_rate
        self.parameters = get_parameters(optimizer)

    @abstractmethod
    def run(self) -> Tensor:
        """The log-likelihood ratios of the canaries from the released gradient of this step."""

    def read_gradient(self) -> Tensor:
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        return torch.cat([part.detach().flatten().float() for part in parts]) / get_unit(self._optimizer)

    def compute_ratios(self, lengths: Tensor, norms: Tensor | float = 1.0, spread: Tensor | float = 1.0) -> Tensor:
        """Log-likelihood ratios of canaries with clipped `norms`, of which the released gradient contains `lengths`.

        `spread` is the variance of `lengths` relative to that of the noise.
        """
        variance = (float(self._optimizer.noise_multiplier) ** 2 or 1.0) * spread
        exponents = (lengths * norms - norms * norms / 2) / variance
        if self._sample_rate == 1:
            return exponents
        rest = torch.tensor(math.log1p(-self._sample_rate), dtype=torch.float64)
        return torch.logaddexp(rest, exponents + math.log(self._sample_rate))


class _GradientStep(_Step):
    """Adds the canaries of the batch to the released gradient. Each is in a batch with the probability of a sample.

    That is the same as adding them to the clipped sum, because the noise does not depend on the sum.
    """

    def __init__(self, optimizer: Any, canaries: Canaries, included: Tensor, sample_rate: float) -> None:
        super().__init__(optimizer, sample_rate)
        self._canaries = canaries.get_gradients(self.parameters)
        self._included = included[: canaries.count]
        self._generator = canaries.generator

    @torch.no_grad()
    def run(self) -> Tensor:
        drawn = torch.rand(len(self._included), generator=self._generator) < self._sample_rate
        total = self._canaries.add_up(drawn & self._included) * get_unit(self._optimizer)
        parts = total.split([p.numel() for p in self.parameters])
        for p, part in zip(self.parameters, parts, strict=True):
            part = part.view_as(p).to(p.dtype)
            p.grad = part if p.grad is None else p.grad + part
        return self.compute_ratios(self._canaries.project(self.read_gradient()))


class _SampleStep(_Step):
    """Finds how much of each canary's gradient the released gradient contains.

    The gradients come from plain autograd on a copy of the model, independent of the code that is audited. Several
    canaries are told apart by least squares, because their gradients are not orthogonal.
    """

    def __init__(
        self, optimizer: Any, model: nn.Module, loss_fn: LossFunction, batches: Sequence[Any], sample_rate: float
    ) -> None:
        super().__init__(optimizer, sample_rate)
        self._copy = copy.deepcopy(model).eval()
        if isinstance(self._copy, AbstractGradSampleModule):  # of Opacus
            self._copy.disable_hooks()
        names = {id(p): name for name, p in model.named_parameters()}
        if any(id(p) not in names for p in self.parameters):
            raise PerSampleError("The optimizer has parameters that do not belong to the model that observe() got.")
        self._names = [names[id(p)] for p in self.parameters]
        self._model, self._loss_fn, self._batches = model, loss_fn, batches

    def run(self) -> Tensor:
        self._copy.load_state_dict(self._model.state_dict())
        found = dict(self._copy.named_parameters())
        own = [found[name] for name in self._names]
        rows = torch.stack([self._compute_gradient(batch, own) for batch in self._batches])
        norms = rows.norm(dim=1)
        directions = rows / norms.clamp(min=torch.finfo(norms.dtype).tiny)[:, None]
        gram = (directions @ directions.T).cpu() + _RIDGE * torch.eye(len(rows), dtype=torch.float64)
        inverse = torch.linalg.inv(gram)
        lengths = inverse @ (directions @ self.read_gradient().double()).cpu()
        clipped = (norms / float(self._optimizer.max_grad_norm)).clamp(max=1.0).cpu()
        return self.compute_ratios(lengths, clipped, inverse.diagonal())

    def _compute_gradient(self, batch: Any, own: Sequence[Tensor]) -> Tensor:
        """The gradient of a canary; zero if it is not finite."""
        with torch.enable_grad():
            loss = compute_loss(self._copy, batch, self._loss_fn)
            parts = torch.autograd.grad(loss.sum(), own, allow_unused=True)
        filled = [torch.zeros_like(p) if part is None else part for p, part in zip(own, parts, strict=True)]
        gradient = torch.cat([part.flatten().double() for part in filled])
        return gradient if bool(gradient.isfinite().all()) else torch.zeros_like(gradient)
