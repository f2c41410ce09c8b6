"""The loader and the optimizer of a private training, made together from the same sample rate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import opacus
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from persample import _torch
from persample.private.adaptive import AdaptiveOptimizer
from persample.private.errors import PrivateTrainingError
from persample.private.loader import hand_out_batches
from persample.private.mechanism import CorrelatedMechanism
from persample.private.noise import SecretNumbers
from persample.private.optimizer import PrivateOptimizer
from persample.private.options import EngineOptions
from persample.private.processes import send_from_first
from persample.private.sampling import (
    CyclicSampler,
    PoissonSampler,
    Source,
    WithAttributes,
    check_loader,
    draw_seed,
    find_place,
    find_source,
    make_secret_generator,
    separate_processes,
)
from persample.private.units import make_unit_loader

if TYPE_CHECKING:
    from persample.private.engine import PrivacyEngine


@dataclass
class Assembly:
    """Makes the parts of a private training: loader, noise, optimizer, and what the accountant counts."""

    engine: PrivacyEngine
    chosen: EngineOptions
    module: nn.Module
    given: Any  # the loader of the user
    distributed: bool = False
    source: Source = None  # of the batches

    def make(self, optimizer: Optimizer, amount: Mapping[str, Any]) -> tuple[PrivateOptimizer, Any]:
        """The private optimizer and the loader that hands out its batches. `amount` is that of the noise and bound."""
        self.distributed = _prepare_processes(self.module, self.chosen.distributed)
        self._find_source()
        mechanism = self._make_mechanism()
        loader = self._make_loader(mechanism)
        private = self._make_optimizer(optimizer, loader, amount)
        accountant = self.engine.accountant
        if mechanism is None:
            rate = get_sample_rate(loader, self.chosen)
            private.attach_step_hook(accountant.get_optimizer_hook_fn(sample_rate=rate))
        else:
            private.correlate(mechanism)
            private.attach_step_hook(mechanism.make_hook(accountant))
        self.engine.optimizers.append(private)
        return private, hand_out_batches(loader, private)

    def _find_source(self) -> None:
        """Where batches are drawn from. The loader seeds its workers by a generator that no seed reaches either."""
        chosen, loader = self.chosen, self.given
        if not chosen.poisson_sampling:
            return
        check_loader(loader)
        self.source = find_source(loader, self.engine.secure_rng, chosen.noise_generator)
        if isinstance(self.source, SecretNumbers):
            self.given = WithAttributes(loader, generator=make_secret_generator())
        elif self.distributed and loader.generator is not None:
            separate_processes(loader.generator)

    def _make_mechanism(self) -> CorrelatedMechanism | None:
        chosen = self.chosen
        if chosen.strategy is None:
            return None
        if self.engine.secure_mode or _torch.get_fsdp_states(self.module):
            raise PrivateTrainingError("Correlated noise (strategy) does not support secure_mode and FSDP2.")
        batches = round(1 / get_sample_rate(self.given, chosen))
        given: Any = {"source": self.source, "seed": draw_seed(self.distributed), **find_place(self.distributed)}
        return CorrelatedMechanism(
            chosen.strategy, lambda **bins: CyclicSampler(len(self.given.dataset), batches, **bins, **given)
        )

    def _make_loader(self, mechanism: CorrelatedMechanism | None) -> DataLoader[Any]:
        """The loader of Poisson samples, of examples or of units."""
        chosen = self.chosen
        if chosen.unit_ids is not None:
            return make_unit_loader(
                self.given,
                chosen.unit_ids,
                examples_per_unit=chosen.examples_per_unit,
                source=self.source,
                place=find_place(self.distributed),
                batch_first=chosen.batch_first,
            )
        return self.engine._prepare_data_loader(
            self.given,
            distributed=self.distributed,
            poisson_sampling=chosen.poisson_sampling,
            batch_first=chosen.batch_first,
            rand_on_empty=chosen.rand_on_empty,
            sampler=self._make_sampler() if mechanism is None else mechanism.sampler,
        )

    def _make_sampler(self) -> PoissonSampler:
        """The sampler of examples; an epoch has as many batches as fit into one."""
        rate = self.chosen.sample_rate
        batches = len(self.given) if rate is None else int(1 / rate)
        return PoissonSampler(len(self.given.dataset), batches, self.source, rate=rate, **find_place(self.distributed))

    def _count_expected(self, loader: Any) -> float:
        """The expected number of samples (or units) in a batch of all processes."""
        if self.chosen.expected_batch_size is not None:
            return self.chosen.expected_batch_size
        count = len(loader.dataset) if self.chosen.unit_ids is None else loader.batch_sampler.count
        return int(count * get_sample_rate(loader, self.chosen))

    def _make_optimizer(self, optimizer: Optimizer, loader: Any, amount: Mapping[str, Any]) -> PrivateOptimizer:
        """The private optimizer, whose steps the accountant counts."""
        chosen, secure = self.chosen, self.engine.secure_mode
        processes = torch.distributed.get_world_size() if self.distributed else 1
        common: dict[str, Any] = {
            **amount,
            "module": self.module,
            "expected_batch_size": self._count_expected(loader) / processes,
            "loss_reduction": chosen.loss_reduction,
            "poisson_sampling": chosen.poisson_sampling,
            "distributed": self.distributed,
            "normalize_clipping": chosen.normalize_clipping,
            "grad_samples": chosen.fills_rows,
            "has_units": chosen.unit_ids is not None,
            "recording": chosen.recording,
            "generator": self.engine.secure_rng if secure else chosen.noise_generator,
            "secure_mode": secure,
        }
        if chosen.clipping == "adaptive":
            private: PrivateOptimizer = AdaptiveOptimizer(optimizer, **common, **chosen.adaptive)
        else:
            private = PrivateOptimizer(optimizer, clipping=chosen.clipping, **common)
        if chosen.poisson_sampling and not secure and self.source is not None:
            private.sources.append(self.source)
        return private


def get_sample_rate(loader: Any, chosen: EngineOptions) -> float:
    """The probability of a sample to be in a batch: the given one, or that of one batch of an epoch."""
    return 1 / len(loader) if chosen.sample_rate is None else chosen.sample_rate


def _prepare_processes(module: nn.Module, distributed: bool | None) -> bool:
    """Whether each process trains a copy of the module; the copies are made equal if nothing else does."""
    if distributed is None:
        return is_distributed(module)
    if distributed and not is_distributed(module):
        send_from_first(module)
    return distributed


def is_distributed(module: nn.Module) -> bool:
    """Whether a module is wrapped by DDP, or sharded by FSDP2, in an initialised process group."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    wrappers = (DistributedDataParallel, opacus.distributed.DifferentiallyPrivateDistributedDataParallel)
    return isinstance(module, wrappers) or bool(_torch.get_fsdp_states(module))
