"""The loader and the optimizer of a private training, made together from the same sample rate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
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
from persample.private.optimizer import PrivateOptimizer
from persample.private.options import EngineOptions
from persample.private.processes import send_from_first
from persample.private.sampling import (
    WithAttributes,
    check_loader,
    copy_with_empty,
    make_cyclic_sampler,
    make_secret_generator,
    make_uniform_sampler,
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

    def make(self, optimizer: Optimizer, amount: Mapping[str, Any]) -> tuple[PrivateOptimizer, Any]:
        """The private optimizer and the loader that hands out its batches. `amount` is that of the noise and bound."""
        self.distributed = _prepare_processes(self.module, self.chosen.distributed)
        self._hide_batches()
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

    def _hide_batches(self) -> None:
        """Give the loader a generator that no seed of the program reaches, unless it has one itself."""
        chosen, loader = self.chosen, self.given
        if chosen.poisson_sampling:
            check_loader(loader)
        has_generator = self.engine.secure_mode or chosen.noise_generator is not None or loader.generator is not None
        if chosen.poisson_sampling and not has_generator:
            self.given = WithAttributes(loader, generator=make_secret_generator())
        elif chosen.poisson_sampling and self.distributed and loader.generator is not None:
            separate_processes(loader.generator)

    def _make_mechanism(self) -> CorrelatedMechanism | None:
        chosen = self.chosen
        if chosen.strategy is None:
            return None
        if self.engine.secure_mode or _torch.get_fsdp_states(self.module):
            raise PrivateTrainingError("Correlated noise (strategy) does not support secure_mode and FSDP2.")
        batches = round(1 / get_sample_rate(self.given, chosen))
        sampler = partial(make_cyclic_sampler, self.given, self.distributed, batches)
        return CorrelatedMechanism(chosen.strategy, sampler)

    def _make_loader(self, mechanism: CorrelatedMechanism | None) -> DataLoader[Any]:
        """The loader of Poisson samples, of examples or of units."""
        chosen = self.chosen
        if mechanism is not None:
            return copy_with_empty(self.given, mechanism.sampler, chosen.batch_first)
        if chosen.sample_rate is not None:
            sampler = make_uniform_sampler(self.given, chosen.sample_rate, self.distributed)
            return copy_with_empty(self.given, sampler, chosen.batch_first)
        if chosen.unit_ids is None:
            return self.engine._prepare_data_loader(
                self.given,
                distributed=self.distributed,
                poisson_sampling=chosen.poisson_sampling,
                batch_first=chosen.batch_first,
                rand_on_empty=chosen.rand_on_empty,
            )
        return make_unit_loader(
            self.given,
            chosen.unit_ids,
            examples_per_unit=chosen.examples_per_unit,
            generator=self.engine.secure_rng if self.engine.secure_mode else self.given.generator,
            distributed=self.distributed,
            batch_first=chosen.batch_first,
        )

    def _count_expected(self, loader: Any) -> float:
        """The expected number of samples (or units) in a batch of all processes."""
        if self.chosen.expected_batch_size is not None:
            return self.chosen.expected_batch_size
        count = len(loader.dataset) if self.chosen.unit_ids is None else loader.batch_sampler.unit_count
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
        if chosen.poisson_sampling and not secure and loader.generator is not None:
            private.generators.append(loader.generator)
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
