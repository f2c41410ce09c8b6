"""PrivacyEngine of Opacus with the gradients of persample and without a wrapper around the model."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, Unpack

import opacus
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from persample._internal.files import remove_unfinished, write_atomically
from persample._internal.options import make_options, show_options
from persample.private.accounting import make_event
from persample.private.adaptive import AdaptiveOptimizer
from persample.private.assembly import Assembly, get_sample_rate
from persample.private.auditing import AuditResult
from persample.private.checkpoints import (
    History,
    ModuleWithPrefix,
    StateWithoutFunctions,
    check_loadable,
    load_safely,
    restore_parts,
)
from persample.private.criterion import Criterion
from persample.private.errors import PrivateTrainingError
from persample.private.limit import EPSILON_TOLERANCE, StepLimit, find_noise_multiplier
from persample.private.modules import find_unsupported, refuse_unsupported, replace_unsupported
from persample.private.optimizer import PrivateOptimizer
from persample.private.options import WITH_CRITERION, EngineOptions, PrivateOptions
from persample.private.sampling import PoissonSampler, Source, find_place, make_secret_generator, put_sampler
from persample.private.statement import make_statement, write_statement
from persample.private.wrapping import Handle, show_as_wrapped


class PrivacyEngine(opacus.PrivacyEngine):
    """Makes the training of a model differentially private.

    The engine has the interface of `opacus.PrivacyEngine`, and its accountants, samplers, schedulers and checkpoints.
    The gradients come from persample: any model that runs in PyTorch can be trained, the model is not wrapped, and a
    step takes one backward pass.

    >>> import torch, warnings; warnings.simplefilter("ignore")
    >>> from torch.utils.data import TensorDataset
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> data = DataLoader(TensorDataset(torch.randn(64, 4), torch.randint(2, (64,))), batch_size=16)
    >>> engine = PrivacyEngine()
    >>> model, optimizer, data = engine.make_private(
    ...     module=model, optimizer=optimizer, data_loader=data, noise_multiplier=1.0, max_grad_norm=1.0)
    >>> for x, y in data:
    ...     optimizer.zero_grad()
    ...     nn.functional.cross_entropy(model(x), y).backward()
    ...     optimizer.step()
    >>> bool(0 < engine.get_epsilon(delta=1e-3) < 10)
    True
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.history = History(self.accountant)
        self.optimizers: list[Any] = []  # that make_private has returned

    @show_options(EngineOptions, PrivateOptions)
    def make_private(
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer,
        data_loader: DataLoader[Any],
        noise_multiplier: float,
        max_grad_norm: float | Sequence[float],
        **options: Unpack[PrivateOptions],
    ) -> tuple[Any, ...]:
        """Return the module, a private optimizer and a data loader for private training.

        The module is the same object as the argument; `module._module`, the model inside the wrapper of Opacus, is the
        module itself. `optimizer.release()` ends private training: the model then trains as before.

        Args:
            module: the model to train; it stays as it is.
            optimizer: the optimizer to wrap; its parameters must be parameters of `module`.
            data_loader: the loader of the dataset. Its batch size is the expected number of samples of a batch.
            noise_multiplier: standard deviation of the noise, relative to `max_grad_norm`.
            max_grad_norm: bound of the gradient of a sample; with `clipping="per_layer"`, a list of bounds.
            **options: see `EngineOptions`.
        """
        chosen = make_options(EngineOptions, "make_private", options, PrivateOptions)
        if chosen.noise_generator is not None and self.secure_mode:
            raise ValueError("Passing seed is prohibited in secure mode")
        amount = {"noise_multiplier": noise_multiplier, "max_grad_norm": max_grad_norm}
        if chosen.grad_sample_mode == "no_op":
            return self._make_private_by_opacus(
                chosen, module=module, optimizer=optimizer, data_loader=data_loader, **amount
            )
        optimizer = _release_private(optimizer)
        _check_parameters(module, optimizer)
        self.validate(module=module, optimizer=optimizer, data_loader=data_loader)
        private, data_loader = Assembly(self, chosen, module, data_loader).make(optimizer, amount)
        model = show_as_wrapped(module) if chosen.wrap_model else Handle(module, private)
        if chosen.grad_sample_mode in WITH_CRITERION:
            criterion = Criterion(chosen.criterion or nn.CrossEntropyLoss(), chosen.loss_reduction)
            return model, private, criterion, data_loader
        return model, private, data_loader

    def _make_private_by_opacus(self, chosen: EngineOptions, **arguments: Any) -> tuple[Any, ...]:
        """`make_private` of Opacus for gradients that the user fills in, with noise that no seed reaches."""
        noise_generator = chosen.noise_generator
        if noise_generator is None and not self.secure_mode:
            noise_generator = make_secret_generator()
        found = super().make_private(
            grad_sample_mode="no_op",
            batch_first=chosen.batch_first,
            loss_reduction=chosen.loss_reduction,
            poisson_sampling=chosen.poisson_sampling,
            clipping=chosen.clipping,
            noise_generator=noise_generator,
            wrap_model=chosen.wrap_model,
            rand_on_empty=chosen.rand_on_empty,
            **chosen.adaptive,
            **arguments,
        )
        self.optimizers.append(found[1])
        return found

    @show_options(EngineOptions, PrivateOptions)
    def make_private_with_epsilon(
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer,
        data_loader: DataLoader[Any],
        target_epsilon: float,
        target_delta: float,
        epochs: float | None = None,
        steps: int | None = None,
        epsilon_tolerance: float = EPSILON_TOLERANCE,
        max_grad_norm: float | Sequence[float],
        **options: Unpack[PrivateOptions],
    ) -> tuple[Any, ...]:
        """`make_private` with the noise that spends (target_epsilon, target_delta) in `epochs` epochs or `steps` steps.

        What the engine has spent before is part of the target. A step that would exceed it raises an error.

        Args:
            module: the model to train, as for `make_private`.
            optimizer: the optimizer to wrap.
            data_loader: the loader of the dataset.
            target_epsilon: epsilon that all steps together spend.
            target_delta: delta of `target_epsilon`.
            epochs: how many times the loader is gone through.
            steps: the number of steps, in place of `epochs`.
            epsilon_tolerance: how far below the target the search for the noise may end.
            max_grad_norm: bound of the gradient of a sample.
            **options: see `EngineOptions`.
        """
        chosen = make_options(EngineOptions, "make_private_with_epsilon", options, PrivateOptions)
        _check_length(epochs, steps)
        found = self.make_private(
            module=module,
            optimizer=optimizer,
            data_loader=data_loader,
            noise_multiplier=0.0,
            max_grad_norm=max_grad_norm,
            **options,
        )
        private, batches = found[1], len(found[-1])
        rate = get_sample_rate(found[-1], chosen)
        budget = {"target_epsilon": target_epsilon, "target_delta": target_delta, "sample_rate": rate}
        try:
            if steps is None:
                assert epochs is not None
                steps = math.ceil(round(epochs * batches, 6))  # a product such as 12.000000000000002 is 12
            self._set_noise(private, steps, epsilon_tolerance, budget)
        except BaseException:
            if isinstance(private, PrivateOptimizer):
                private.release()
            raise
        return found

    def _set_noise(self, private: Any, steps: int, tolerance: float, budget: Mapping[str, float]) -> None:
        """Give an optimizer the noise for a budget; a private one also refuses steps that would exceed it."""
        mechanism = getattr(private, "mechanism", None)
        if mechanism is not None:
            steps, budget = mechanism.strategy.count_entries(steps), {**budget, "sample_rate": mechanism.rate}
        noise_multiplier = find_noise_multiplier(self.accountant, steps=steps, tolerance=tolerance, **budget)
        private.noise_multiplier = noise_multiplier
        if not isinstance(private, PrivateOptimizer):
            return
        private.get_noise_scale(noise_multiplier)  # raises if it is not possible
        limit = StepLimit(self.accountant, steps=steps, noise_multiplier=noise_multiplier, **budget)
        if mechanism is None:
            private.check_step = limit
        else:
            mechanism.limit = limit

    def _prepare_data_loader(
        self, data_loader: DataLoader[Any], *, sampler: Any = None, source: Source = None, **options: Any
    ) -> DataLoader[Any]:
        """The loader of Opacus, whose Poisson samples come from `sampler`, or are drawn from `source`."""
        if not options["poisson_sampling"]:
            return super()._prepare_data_loader(data_loader, **options)
        place = find_place(options["distributed"])
        prepared = super()._prepare_data_loader(data_loader, **{**options, "distributed": False})
        sampler = sampler or PoissonSampler(len(data_loader.dataset), len(data_loader), source, **place)  # type: ignore[arg-type]
        return put_sampler(prepared, sampler)

    # ---- modules that cannot be trained privately ----

    def validate(
        self, *, module: nn.Module, optimizer: Optimizer | None = None, data_loader: DataLoader[Any] | None = None
    ) -> None:
        """Raise for modules that are known to mix samples or to keep statistics of samples."""
        refuse_unsupported(module)

    def is_compatible(
        self, *, module: nn.Module, optimizer: Optimizer | None = None, data_loader: DataLoader[Any] | None = None
    ) -> bool:
        """Whether `validate` accepts the module."""
        return not find_unsupported(module)

    @classmethod
    def get_compatible_module(cls, module: nn.Module) -> nn.Module:
        """Copy the module, with modules that `validate` refuses replaced by the fixers of Opacus."""
        return replace_unsupported(module)

    def to_dp_accounting(self) -> Any:
        """The steps so far as an event of dp-accounting, from which any of its accountants computes epsilon."""
        return make_event(self.accountant.history)

    def write_statement(self, path: Any, delta: float, audit: AuditResult | None = None) -> None:
        """Write what the training guarantees, how, and what was checked, as JSON for others.

        `persample privacy-statement` prints it and computes epsilon again. A condition of the guarantee that was not
        met raises an error, such as batches that are no Poisson samples or a known seed of the noise.

        Args:
            path: the file.
            delta: delta of epsilon.
            audit: the result of an audit of this training function; one that contradicts the claim is refused.
        """
        write_statement(path, make_statement(self, delta, audit))

    # ---- checkpoints ----

    def save_checkpoint(
        self,
        *,
        path: Any,
        module: nn.Module,
        optimizer: Any = None,
        noise_scheduler: Any = None,
        grad_clip_scheduler: Any = None,
        checkpoint_dict: dict[str, Any] | None = None,
        module_state_dict_kwargs: dict[str, Any] | None = None,
        torch_save_kwargs: dict[str, Any] | None = None,
        for_opacus: bool = False,
    ) -> None:
        """Save a checkpoint as Opacus does, atomically.

        It has no key of the noise or of the batches: both are drawn anew. Contents that `load_checkpoint` would refuse
        raise an error. Functions of schedulers are left out.

        Args:
            for_opacus: write the names of the module's parameters as the wrapped models of Opacus have them, with
                "_module." in front. `load_checkpoint` reads both.
        """
        lineage = {"persample_lineage": self.history.lineage}
        together = {**(checkpoint_dict or {}), **get_private_state(optimizer), **lineage}
        schedulers = {"noise_scheduler": noise_scheduler, "grad_clip_scheduler": grad_clip_scheduler}
        contents: dict[str, Any] = {
            "module": ModuleWithPrefix(module) if for_opacus else module,
            "optimizer": optimizer,
            "checkpoint_dict": together,
            "module_state_dict_kwargs": module_state_dict_kwargs,
            "torch_save_kwargs": torch_save_kwargs,
            **{name: part and StateWithoutFunctions(part) for name, part in schedulers.items()},
        }
        if not isinstance(path, (str, os.PathLike)):
            super().save_checkpoint(path=path, **contents)
            return
        remove_unfinished(path)
        with write_atomically(path) as file:
            super().save_checkpoint(path=file, **contents)
            check_loadable(file)

    def load_checkpoint(
        self,
        *,
        path: Any,
        module: nn.Module,
        optimizer: Any = None,
        noise_scheduler: Any = None,
        grad_clip_scheduler: Any = None,
        module_load_dict_kwargs: dict[str, Any] | None = None,
        torch_load_kwargs: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Load a checkpoint as Opacus does; with an optimizer, its noise and its batches are new from now on.

        The steps that this engine has made since the checkpoint stay in the history: they were released. Checkpoints
        of Opacus itself can be loaded. The file may come from somebody else: objects that could run code are refused
        (`weights_only=True`).
        """
        loaded = load_safely(path, torch_load_kwargs)
        if getattr(optimizer, "mechanism", None) is not None and self.accountant.history:
            raise PrivateTrainingError(
                "This engine has counted steps since, or before, the checkpoint. Noise of the checkpoint would be used "
                "twice, and counted once. Load it into a new PrivacyEngine and a new optimizer, and release nothing of "
                "the steps after it."
            )
        if isinstance(optimizer, PrivateOptimizer):
            optimizer.draw_new_keys(with_seeds="persample_lineage" in loaded)
        checkpoint = restore_parts(
            loaded,
            accountant=self.history,
            module=module,
            optimizer=optimizer,
            noise_scheduler=noise_scheduler,
            grad_clip_scheduler=grad_clip_scheduler,
            module_options=module_load_dict_kwargs,
        )
        set_private_state(optimizer, checkpoint)
        return checkpoint


def _check_length(epochs: float | None, steps: int | None) -> None:
    if (epochs is None) == (steps is None):
        raise PrivateTrainingError("Pass either epochs or steps: the noise for target_epsilon depends on it.")
    length, value = ("epochs", epochs) if steps is None else ("steps", steps)
    if value is None or not value > 0:
        raise PrivateTrainingError(
            f"{length} must be positive, because the noise for target_epsilon depends on it, got {value}"
        )


def _release_private(optimizer: Optimizer) -> Optimizer:
    """The optimizer inside of a private one, which is released; any other optimizer itself."""
    if not isinstance(optimizer, PrivateOptimizer):
        return optimizer
    optimizer.release()
    return optimizer.original_optimizer


def _check_parameters(module: nn.Module, optimizer: Optimizer) -> None:
    own = set(module.parameters())
    if any(p not in own for p in chain.from_iterable(group["params"] for group in optimizer.param_groups)):
        raise PrivateTrainingError("Module parameters are different than optimizer Parameters")


def get_private_state(optimizer: Any) -> dict[str, Any]:
    """Entries of a checkpoint besides those of Opacus: an adapted bound, or the state of correlated noise."""
    if isinstance(optimizer, AdaptiveOptimizer):
        return {"persample_max_grad_norm": optimizer.max_grad_norm}
    mechanism = getattr(optimizer, "mechanism", None)
    return {} if mechanism is None else mechanism.get_state(float(optimizer.noise_multiplier))


def set_private_state(optimizer: Any, checkpoint: dict[str, Any]) -> None:
    """Restore the entries of `get_private_state`, and take them out of the checkpoint."""
    bound = checkpoint.pop("persample_max_grad_norm", None)
    if bound is not None and isinstance(optimizer, AdaptiveOptimizer):
        optimizer.max_grad_norm = bound
    mechanism = getattr(optimizer, "mechanism", None)
    if mechanism is not None:
        mechanism.set_state(checkpoint, float(optimizer.noise_multiplier))
