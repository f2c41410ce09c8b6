"""PrivacyEngine of Opacus with the gradients of persample and without a wrapper around the model."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from copy import deepcopy
from itertools import chain
from typing import Any, Literal

import opacus
import torch
from opacus.validators.module_validator import ModuleValidator
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from persample import _torch
from persample._internal.files import remove_unfinished, write_atomically
from persample.batches import BatchDim
from persample.gradients import NonFinite, UnitReduction
from persample.private.adaptive import AdaptiveOptimizer
from persample.private.checkpoints import (
    ModuleWithPrefix,
    StateWithoutFunctions,
    check_loadable,
    load_safely,
    restore_parts,
)
from persample.private.criterion import Criterion
from persample.private.errors import PrivateTrainingError, UnsupportedModule
from persample.private.limit import EPSILON_TOLERANCE, StepLimit, find_noise_multiplier
from persample.private.loader import hand_out_batches
from persample.private.optimizer import PrivateOptimizer
from persample.private.processes import send_from_first
from persample.private.sampling import make_secret_generator, prepare_empty_batches, replace_sampler
from persample.private.units import make_unit_loader
from persample.private.wrapping import Handle, show_as_wrapped
from persample.recording.options import Constants, Verify

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_WITH_CRITERION = ("ghost", "ghost_fsdp")
_WITH_ROWS = ("hooks", "functorch", "ew")
_MODES = (*_WITH_ROWS, *_WITH_CRITERION)


class PrivacyEngine(opacus.PrivacyEngine):
    """Makes the training of a model differentially private.

    The engine has the interface of `opacus.PrivacyEngine`, and its accountants, samplers, schedulers and checkpoints.
    The gradients come from persample: any model that runs in PyTorch can be trained, the model is not wrapped, and a
    step takes one backward pass.

    >>> import warnings; warnings.simplefilter("ignore")
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

    def make_private(
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer,
        criterion: Callable[..., Any] | None = None,
        data_loader: DataLoader[Any],
        noise_multiplier: float,
        max_grad_norm: float | Sequence[float],
        batch_first: bool = True,
        loss_reduction: str = "mean",
        poisson_sampling: bool = True,
        clipping: str = "flat",
        noise_generator: torch.Generator | None = None,
        grad_sample_mode: str | None = None,
        wrap_model: bool = True,
        rand_on_empty: bool = False,
        distributed: bool | None = None,
        normalize_clipping: bool = False,
        target_unclipped_quantile: float | None = None,
        clipbound_learning_rate: float | None = None,
        max_clipbound: float | None = None,
        min_clipbound: float | None = None,
        unclipped_num_std: float | None = None,
        grad_samples: bool | None = None,
        unit_ids: Tensor | Sequence[Hashable] | None = None,
        examples_per_unit: int | None = None,
        units: int | None = None,
        unit_reduction: UnitReduction = "mean",
        batch_dim: BatchDim | None = None,
        batch_size: int | None = None,
        constants: Constants = (),
        passes: Literal[1, 2] | None = None,
        memory: int | None = None,
        verify: Verify = "first",
        nonfinite: NonFinite = "zero",
    ) -> tuple[Any, ...]:
        """Return the module, a private optimizer and a data loader for private training.

        The module is the same object as the argument; `module._module`, the model inside the wrapper of Opacus, is the
        module itself. `optimizer.release()` ends private training: the model then trains as before.

        Args:
            criterion: loss function for `grad_sample_mode="ghost"`; cross entropy by default.
            clipping: "flat", "per_layer" or "automatic", see `PrivateOptimizer`; "adaptive", see `AdaptiveOptimizer`.
            grad_sample_mode: the gradients are the same in all modes. With "hooks", "functorch" or "ew" they are also
                written to `p.grad_sample`, as by Opacus, which takes its memory. With "ghost" or "ghost_fsdp", a
                criterion is returned between the optimizer and the data loader. "no_op" is the mode of Opacus itself:
                you fill `p.grad_sample`, and the optimizer of Opacus clips it. By default the fastest: nothing besides
                the clipped sum.
            wrap_model: the model is never wrapped. With False, the first result is a handle with `cleanup()`, as in
                Opacus, instead of the module.
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
                batch. "always": in every batch. False: never.
            nonfinite: samples whose gradient is not finite are left out ("zero") or raise an error ("raise").

        The other arguments are the arguments of `opacus.PrivacyEngine.make_private`.
        """
        if noise_generator is not None and self.secure_mode:
            raise ValueError("Passing seed is prohibited in secure mode")
        adaptive: dict[str, Any] = {
            "target_unclipped_quantile": target_unclipped_quantile,
            "clipbound_learning_rate": clipbound_learning_rate,
            "max_clipbound": max_clipbound,
            "min_clipbound": min_clipbound,
            "unclipped_num_std": unclipped_num_std,
        }
        _check_adaptive_arguments(clipping, adaptive)
        if grad_sample_mode == "no_op":
            if normalize_clipping:
                raise PrivateTrainingError("grad_sample_mode='no_op' does not support normalize_clipping.")
            return self._make_private_by_opacus(
                module=module,
                optimizer=optimizer,
                data_loader=data_loader,
                noise_multiplier=noise_multiplier,
                max_grad_norm=max_grad_norm,
                batch_first=batch_first,
                loss_reduction=loss_reduction,
                poisson_sampling=poisson_sampling,
                clipping=clipping,
                noise_generator=noise_generator,
                wrap_model=wrap_model,
                rand_on_empty=rand_on_empty,
                **(adaptive if clipping == "adaptive" else {}),
            )
        if grad_sample_mode not in (None, *_MODES):
            raise PrivateTrainingError(
                f"grad_sample_mode must be one of {(*_MODES, 'no_op')}, got {grad_sample_mode!r}"
            )
        if isinstance(optimizer, PrivateOptimizer):
            optimizer.release()
            optimizer = optimizer.original_optimizer
        own = set(module.parameters())
        if any(p not in own for p in chain.from_iterable(group["params"] for group in optimizer.param_groups)):
            raise PrivateTrainingError("Module parameters are different than optimizer Parameters")
        self.validate(module=module, optimizer=optimizer, data_loader=data_loader)

        if distributed is None:
            distributed = is_distributed(module)
        elif distributed and not is_distributed(module):
            send_from_first(module)
        if unit_ids is not None:
            if not poisson_sampling:
                raise PrivateTrainingError(
                    "unit_ids requires poisson_sampling=True: the accountant counts sampled units."
                )
            data_loader = make_unit_loader(
                data_loader,
                unit_ids,
                examples_per_unit=examples_per_unit,
                generator=self.secure_rng if self.secure_mode else data_loader.generator,
                distributed=distributed,
                batch_first=batch_first,
            )
        elif examples_per_unit is not None:
            raise PrivateTrainingError("examples_per_unit requires unit_ids.")
        else:
            data_loader = self._prepare_data_loader(
                data_loader,
                distributed=distributed,
                poisson_sampling=poisson_sampling,
                batch_first=batch_first,
                rand_on_empty=rand_on_empty,
            )
        sample_rate = 1 / len(data_loader)
        count = len(data_loader.dataset) if unit_ids is None else data_loader.batch_sampler.unit_count  # type: ignore
        expected_batch_size = int(count * sample_rate)
        common: dict[str, Any] = {
            "module": module,
            "noise_multiplier": noise_multiplier,
            "max_grad_norm": max_grad_norm,
            "expected_batch_size": expected_batch_size / (torch.distributed.get_world_size() if distributed else 1),
            "loss_reduction": loss_reduction,
            "poisson_sampling": poisson_sampling,
            "distributed": distributed,
            "normalize_clipping": normalize_clipping,
            "grad_samples": grad_sample_mode in _WITH_ROWS if grad_samples is None else grad_samples,
            "has_units": unit_ids is not None,
            "recording": {
                **({} if units is None else {"units": units}),
                **({} if unit_ids is None and units is None else {"unit_reduction": unit_reduction}),
                "batch_dim": (0 if batch_first else 1) if batch_dim is None else batch_dim,
                "batch_size": batch_size,
                "constants": constants,
                "passes": passes,
                "memory": memory,
                "verify": verify,
                "nonfinite": nonfinite,
            },
            "generator": self.secure_rng if self.secure_mode else noise_generator,
            "secure_mode": self.secure_mode,
        }
        private: PrivateOptimizer
        if clipping == "adaptive":
            private = AdaptiveOptimizer(optimizer, **adaptive, **common)
        else:
            private = PrivateOptimizer(optimizer, clipping=clipping, **common)
        private.attach_step_hook(self.accountant.get_optimizer_hook_fn(sample_rate=sample_rate))
        data_loader = hand_out_batches(data_loader, private)
        model = Handle(module, private) if not wrap_model else show_as_wrapped(module)
        if grad_sample_mode in _WITH_CRITERION:
            return model, private, Criterion(criterion or nn.CrossEntropyLoss(), loss_reduction), data_loader
        return model, private, data_loader

    def _make_private_by_opacus(self, *, noise_generator: torch.Generator | None, **arguments: Any) -> tuple[Any, ...]:
        """`make_private` of Opacus for gradients that the user fills in, with noise that no seed reaches."""
        if noise_generator is None and not self.secure_mode:
            noise_generator = make_secret_generator()
        return super().make_private(grad_sample_mode="no_op", noise_generator=noise_generator, **arguments)

    def make_private_with_epsilon(
        self,
        *,
        module: nn.Module,
        optimizer: Optimizer,
        criterion: Callable[..., Any] | None = None,
        data_loader: DataLoader[Any],
        target_epsilon: float,
        target_delta: float,
        epochs: float | None = None,
        steps: int | None = None,
        epsilon_tolerance: float = EPSILON_TOLERANCE,
        max_grad_norm: float | Sequence[float],
        batch_first: bool = True,
        loss_reduction: str = "mean",
        poisson_sampling: bool = True,
        clipping: str = "flat",
        noise_generator: torch.Generator | None = None,
        grad_sample_mode: str | None = None,
        wrap_model: bool = True,
        rand_on_empty: bool = False,
        distributed: bool | None = None,
        normalize_clipping: bool = False,
        target_unclipped_quantile: float | None = None,
        clipbound_learning_rate: float | None = None,
        max_clipbound: float | None = None,
        min_clipbound: float | None = None,
        unclipped_num_std: float | None = None,
        grad_samples: bool | None = None,
        unit_ids: Tensor | Sequence[Hashable] | None = None,
        examples_per_unit: int | None = None,
        units: int | None = None,
        unit_reduction: UnitReduction = "mean",
        batch_dim: BatchDim | None = None,
        batch_size: int | None = None,
        constants: Constants = (),
        passes: Literal[1, 2] | None = None,
        memory: int | None = None,
        verify: Verify = "first",
        nonfinite: NonFinite = "zero",
    ) -> tuple[Any, ...]:
        """`make_private` with the noise that spends (target_epsilon, target_delta) in `epochs` epochs or `steps` steps.

        What the engine has spent before is part of the target. A step that would exceed it raises an error.
        `epsilon_tolerance` is how far below the target the search for the noise may end.
        """
        if (epochs is None) == (steps is None):
            raise PrivateTrainingError("Pass either epochs or steps: the noise for target_epsilon depends on it.")
        if not (steps if epochs is None else epochs) > 0:  # type: ignore[operator]
            raise PrivateTrainingError(
                f"epochs must be positive, because the noise for target_epsilon depends on it, got {epochs}"
                if steps is None
                else f"steps must be positive, because the noise for target_epsilon depends on it, got {steps}"
            )
        found = self.make_private(
            module=module,
            optimizer=optimizer,
            criterion=criterion,
            data_loader=data_loader,
            noise_multiplier=0.0,
            max_grad_norm=max_grad_norm,
            batch_first=batch_first,
            loss_reduction=loss_reduction,
            poisson_sampling=poisson_sampling,
            clipping=clipping,
            noise_generator=noise_generator,
            grad_sample_mode=grad_sample_mode,
            wrap_model=wrap_model,
            rand_on_empty=rand_on_empty,
            distributed=distributed,
            normalize_clipping=normalize_clipping,
            target_unclipped_quantile=target_unclipped_quantile,
            clipbound_learning_rate=clipbound_learning_rate,
            max_clipbound=max_clipbound,
            min_clipbound=min_clipbound,
            unclipped_num_std=unclipped_num_std,
            grad_samples=grad_samples,
            unit_ids=unit_ids,
            examples_per_unit=examples_per_unit,
            units=units,
            unit_reduction=unit_reduction,
            batch_dim=batch_dim,
            batch_size=batch_size,
            constants=constants,
            passes=passes,
            memory=memory,
            verify=verify,
            nonfinite=nonfinite,
        )
        private, batches = found[1], len(found[-1])
        try:
            if steps is None:
                assert epochs is not None
                steps = math.ceil(round(epochs * batches, 6))  # a product such as 12.000000000000002 is 12
            budget = {"target_epsilon": target_epsilon, "target_delta": target_delta, "sample_rate": 1 / batches}
            noise_multiplier = find_noise_multiplier(
                self.accountant, steps=steps, tolerance=epsilon_tolerance, **budget
            )
            private.noise_multiplier = noise_multiplier
            if isinstance(private, PrivateOptimizer):
                private.check_noise_multiplier()
                private.check_step = StepLimit(
                    self.accountant, steps=steps, noise_multiplier=noise_multiplier, **budget
                )
        except BaseException:
            if isinstance(private, PrivateOptimizer):
                private.release()
            raise
        return found

    def _prepare_data_loader(self, data_loader: DataLoader[Any], **options: Any) -> DataLoader[Any]:
        prepared = super()._prepare_data_loader(data_loader, **options)
        if not options["poisson_sampling"]:
            return prepared
        prepare_empty_batches(prepared)
        return replace_sampler(prepared) if options["distributed"] else prepared

    # ---- modules that cannot be trained privately ----

    def validate(
        self, *, module: nn.Module, optimizer: Optimizer | None = None, data_loader: DataLoader[Any] | None = None
    ) -> None:
        """Raise for modules that are known to mix samples or to keep statistics of samples."""
        for name, found in _find_unsupported(module).items():
            if isinstance(found, _EMBEDDINGS):
                raise UnsupportedModule(
                    f"'{name}' ({type(found).__name__}) cannot be trained privately: max_norm scales down the rows of "
                    "the weight that occur in the batch, without noise. Set max_norm=None, for example with "
                    "PrivacyEngine.get_compatible_module(model) before you make the optimizer."
                )
            raise UnsupportedModule(
                f"'{name}' ({type(found).__name__}) cannot be trained privately: it normalises with statistics of the "
                "batch, or it keeps statistics of samples. Replace it by GroupNorm, for example with "
                "PrivacyEngine.get_compatible_module(model) before you make the optimizer, or keep it in eval() mode."
            )

    def is_compatible(
        self, *, module: nn.Module, optimizer: Optimizer | None = None, data_loader: DataLoader[Any] | None = None
    ) -> bool:
        """Whether `validate` accepts the module."""
        return not _find_unsupported(module)

    @classmethod
    def get_compatible_module(cls, module: nn.Module) -> nn.Module:
        """Copy the module, with modules that `validate` refuses replaced by the fixers of Opacus."""
        module = deepcopy(module)
        for name, part in _find_unsupported(module).items():
            if isinstance(part, _EMBEDDINGS):
                part.max_norm = None
                continue
            like = next(chain(part.parameters(), part.buffers()), torch.empty(0))
            replacement = ModuleValidator.FIXERS[type(part)](part).to(like.device, like.dtype)
            if not name:
                return replacement
            parent, _, last = name.rpartition(".")
            setattr(module.get_submodule(parent), last, replacement)
        return module

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
        """Save a checkpoint as Opacus does, atomically and with the state of the noise generator.

        Without that state, a script that sets its seed at the start would draw the same noise again after a restart.
        Contents that `load_checkpoint` would refuse raise an error. Functions of schedulers are left out.

        Args:
            for_opacus: write the names of the module's parameters as the wrapped models of Opacus have them, with
                "_module." in front. `load_checkpoint` reads both.
        """
        together = {**(checkpoint_dict or {}), **get_private_state(optimizer)}
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
        """Load a checkpoint as Opacus does; with an optimizer, also restore the state of its noise generator.

        Checkpoints of Opacus itself can be loaded. The file may come from somebody else: objects that could run code
        are refused (`weights_only=True`).
        """
        checkpoint = restore_parts(
            load_safely(path, torch_load_kwargs),
            accountant=self.accountant,
            module=module,
            optimizer=optimizer,
            noise_scheduler=noise_scheduler,
            grad_clip_scheduler=grad_clip_scheduler,
            module_options=module_load_dict_kwargs,
        )
        set_private_state(optimizer, checkpoint)
        return checkpoint


def _check_adaptive_arguments(clipping: str, given: Mapping[str, float | None]) -> None:
    missing = [name for name, value in given.items() if value is None]
    if clipping == "adaptive" and missing:
        raise PrivateTrainingError(f"clipping='adaptive' requires {', '.join(missing)}.")
    if clipping != "adaptive" and len(missing) < len(given):
        names = ", ".join(name for name, value in given.items() if value is not None)
        raise PrivateTrainingError(f"{names} requires clipping='adaptive', got clipping={clipping!r}.")


def is_distributed(module: nn.Module) -> bool:
    """Whether a module is wrapped by DDP, or sharded by FSDP2, in an initialised process group."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    wrappers = (DistributedDataParallel, opacus.distributed.DifferentiallyPrivateDistributedDataParallel)
    return isinstance(module, wrappers) or bool(_torch.get_fsdp_states(module))


def _find_unsupported(module: nn.Module) -> dict[str, nn.Module]:
    """Submodules that use statistics of the batch, or write samples into their state, by name."""
    found: dict[str, nn.Module] = {}
    for name, part in module.named_modules():
        uses_batch = isinstance(part, _BATCH_NORMS) and (part.training or part.running_mean is None)
        keeps_samples = isinstance(part, _INSTANCE_NORMS) and part.track_running_stats and part.training
        if uses_batch or keeps_samples or (isinstance(part, _EMBEDDINGS) and part.max_norm is not None):
            found[name] = part
    return found


def get_noise_state(optimizer: Any) -> torch.Tensor | None:
    """State of the noise of an optimizer; None in secure mode, where it cannot be saved."""
    if not isinstance(optimizer, PrivateOptimizer) or optimizer.secure_mode:
        return None
    return (optimizer.noise if optimizer.generator is None else optimizer.generator).get_state()


def set_noise_state(optimizer: Any, state: torch.Tensor | None) -> None:
    """Continue the noise of a checkpoint. Without its state, an optimizer without a generator keeps its new key."""
    if isinstance(optimizer, PrivateOptimizer) and state is not None and not optimizer.secure_mode:
        (optimizer.noise if optimizer.generator is None else optimizer.generator).set_state(state)


def get_private_state(optimizer: Any) -> dict[str, Any]:
    """Entries of a checkpoint besides those of Opacus: the noise, and a bound that the training has adapted."""
    bound = {"persample_max_grad_norm": optimizer.max_grad_norm} if isinstance(optimizer, AdaptiveOptimizer) else {}
    return {"persample_noise_state": get_noise_state(optimizer), **bound}


def set_private_state(optimizer: Any, checkpoint: dict[str, Any]) -> None:
    """Restore the entries of `get_private_state`, and take them out of the checkpoint."""
    set_noise_state(optimizer, checkpoint.pop("persample_noise_state", None))
    bound = checkpoint.pop("persample_max_grad_norm", None)
    if bound is not None and isinstance(optimizer, AdaptiveOptimizer):
        optimizer.max_grad_norm = bound
