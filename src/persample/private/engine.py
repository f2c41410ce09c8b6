"""PrivacyEngine of Opacus with the gradients of persample and without a wrapper around the model."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Hashable, Sequence
from copy import deepcopy
from itertools import chain
from typing import Any

import opacus
import torch
from opacus.validators.module_validator import ModuleValidator
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from persample import _torch
from persample._internal.files import remove_unfinished, write_atomically
from persample.errors import PerSampleError, SamplesMixed
from persample.private.checkpoints import StateWithoutFunctions, check_loadable, load_safely, restore_parts
from persample.private.criterion import Criterion
from persample.private.limit import StepLimit, find_noise_multiplier
from persample.private.loader import hand_out_batches
from persample.private.optimizer import PrivateOptimizer
from persample.private.sampling import prepare_empty_batches, replace_sampler
from persample.private.units import make_unit_loader

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_WITH_CRITERION = ("ghost", "ghost_fsdp")
_MODES = ("hooks", "functorch", "ew", *_WITH_CRITERION)


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
        grad_sample_mode: str = "hooks",
        wrap_model: bool = True,
        rand_on_empty: bool = False,
        unit_ids: Tensor | Sequence[Hashable] | None = None,
        examples_per_unit: int | None = None,
        **recording: Any,
    ) -> tuple[Any, ...]:
        """Return the module, a private optimizer and a data loader for private training.

        The module is the same object as the argument. `optimizer.release()` ends private training: the model then
        trains as before.

        Args:
            criterion: loss function for `grad_sample_mode="ghost"`; cross entropy by default.
            clipping: "flat", "per_layer" or "automatic"; see `PrivateOptimizer`.
            grad_sample_mode: accepted for compatibility with Opacus; the gradients are the same in all modes. With
                "ghost" or "ghost_fsdp", a criterion is returned between the optimizer and the data loader.
            wrap_model: accepted for compatibility with Opacus, without effect.
            unit_ids: the unit (user, patient, document) of each example of the dataset. Then the privacy is that of
                units: batches are Poisson samples of units, with the loader's batch size as the expected number of
                units, the gradient of each unit is clipped, and the accountant counts units.
            examples_per_unit: the largest number of examples of a unit in a batch; None: all of them.
            recording: options of `persample.record`, such as `batch_dim` for inputs without a batch dimension,
                `passes=2` for two backward passes with less memory, or `memory`, which decides between one and two.
                `verify` is "first" by default: two samples of the first batch run alone, and their outputs are
                compared with those of the batch.

        The other arguments are the arguments of `opacus.PrivacyEngine.make_private`.
        """
        if noise_generator is not None and self.secure_mode:
            raise ValueError("Passing seed is prohibited in secure mode")
        if grad_sample_mode not in _MODES:
            raise PerSampleError(f"grad_sample_mode must be one of {_MODES}, got {grad_sample_mode!r}")
        if isinstance(optimizer, PrivateOptimizer):
            optimizer.release()
            optimizer = optimizer.original_optimizer
        own = set(module.parameters())
        if any(p not in own for p in chain.from_iterable(group["params"] for group in optimizer.param_groups)):
            raise ValueError("Module parameters are different than optimizer Parameters")
        self.validate(module=module, optimizer=optimizer, data_loader=data_loader)

        recording.setdefault("batch_dim", 0 if batch_first else 1)
        distributed = is_distributed(module)
        if unit_ids is not None:
            if not poisson_sampling:
                raise PerSampleError("unit_ids requires poisson_sampling=True: the accountant counts sampled units.")
            data_loader = make_unit_loader(
                data_loader,
                unit_ids,
                examples_per_unit=examples_per_unit,
                generator=self.secure_rng if self.secure_mode else data_loader.generator,
                distributed=distributed,
                batch_first=batch_first,
            )
        elif examples_per_unit is not None:
            raise PerSampleError("examples_per_unit requires unit_ids.")
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
        private = PrivateOptimizer(
            optimizer,
            module=module,
            noise_multiplier=noise_multiplier,
            max_grad_norm=max_grad_norm,
            expected_batch_size=expected_batch_size / (torch.distributed.get_world_size() if distributed else 1),
            loss_reduction=loss_reduction,
            clipping=clipping,
            poisson_sampling=poisson_sampling,
            distributed=distributed,
            recording=recording,
            has_units=unit_ids is not None,
            generator=self.secure_rng if self.secure_mode else noise_generator,
            secure_mode=self.secure_mode,
        )
        private.attach_step_hook(self.accountant.get_optimizer_hook_fn(sample_rate=sample_rate))
        data_loader = hand_out_batches(data_loader, private.make_receiver())
        if grad_sample_mode in _WITH_CRITERION:
            return module, private, Criterion(criterion or nn.CrossEntropyLoss(), loss_reduction), data_loader
        return module, private, data_loader

    def make_private_with_epsilon(
        self,
        *,
        data_loader: DataLoader[Any],
        target_epsilon: float,
        target_delta: float,
        epochs: float | None = None,
        steps: int | None = None,
        **others: Any,
    ) -> tuple[Any, ...]:
        """`make_private` with the noise that spends (target_epsilon, target_delta) in `epochs` epochs or `steps` steps.

        What the engine has spent before is part of the target. A step that would exceed it raises an error.
        """
        if (epochs is None) == (steps is None):
            raise PerSampleError("Pass either epochs or steps: the noise for target_epsilon depends on it.")
        if not (steps if epochs is None else epochs) > 0:  # type: ignore[operator]
            raise PerSampleError(
                f"epochs must be positive, because the noise for target_epsilon depends on it, got {epochs}"
                if steps is None
                else f"steps must be positive, because the noise for target_epsilon depends on it, got {steps}"
            )
        found = self.make_private(data_loader=data_loader, noise_multiplier=0.0, **others)
        optimizer, batches = found[1], len(found[-1])
        try:
            if steps is None:
                assert epochs is not None
                steps = math.ceil(round(epochs * batches, 6))  # a product such as 12.000000000000002 is 12
            budget = {"target_epsilon": target_epsilon, "target_delta": target_delta, "sample_rate": 1 / batches}
            noise_multiplier = find_noise_multiplier(self.accountant, steps=steps, **budget)
            optimizer.noise_multiplier = noise_multiplier
            optimizer.check_step = StepLimit(self.accountant, steps=steps, noise_multiplier=noise_multiplier, **budget)
        except BaseException:
            optimizer.release()
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
                raise SamplesMixed(
                    f"'{name}' ({type(found).__name__}) cannot be trained privately: max_norm scales down the rows of "
                    "the weight that occur in the batch, without noise. Set max_norm=None, for example with "
                    "PrivacyEngine.get_compatible_module(model) before you make the optimizer."
                )
            raise SamplesMixed(
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

    def save_checkpoint(self, *, path: Any, optimizer: Any = None, checkpoint_dict: Any = None, **kwargs: Any) -> None:
        """Save a checkpoint as Opacus does, atomically and with the state of the noise generator.

        Without that state, a script that sets its seed at the start would draw the same noise again after a restart.
        Contents that `load_checkpoint` would refuse raise an error. Functions of schedulers are left out.
        """
        noise = {"persample_noise_state": get_noise_state(optimizer)}
        together = {**(checkpoint_dict or {}), **noise}
        for name in ("noise_scheduler", "grad_clip_scheduler"):
            if kwargs.get(name) is not None:
                kwargs[name] = StateWithoutFunctions(kwargs[name])
        if not isinstance(path, (str, os.PathLike)):
            super().save_checkpoint(path=path, optimizer=optimizer, checkpoint_dict=together, **kwargs)
            return
        remove_unfinished(path)
        with write_atomically(path) as file:
            super().save_checkpoint(path=file, optimizer=optimizer, checkpoint_dict=together, **kwargs)
            check_loadable(file)

    def load_checkpoint(
        self, *, path: Any, optimizer: Any = None, module_load_dict_kwargs: Any = None, torch_load_kwargs: Any = None,
        **parts: Any,
    ) -> dict[str, Any]:  # fmt: skip
        """Load a checkpoint as Opacus does; with an optimizer, also restore the state of its noise generator.

        The file may come from somebody else: objects that could run code are refused (`weights_only=True`).
        """
        checkpoint = restore_parts(
            load_safely(path, torch_load_kwargs),
            accountant=self.accountant,
            optimizer=optimizer,
            module_options=module_load_dict_kwargs,
            **parts,
        )
        state = checkpoint.pop("persample_noise_state", None)
        set_noise_state(optimizer, state)
        return checkpoint


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
    if optimizer is None or optimizer.secure_mode:
        return None
    return (optimizer.noise if optimizer.generator is None else optimizer.generator).get_state()


def set_noise_state(optimizer: Any, state: torch.Tensor | None) -> None:
    """Continue the noise of a checkpoint. Without its state, an optimizer without a generator keeps its new key."""
    if optimizer is not None and state is not None and not optimizer.secure_mode:
        (optimizer.noise if optimizer.generator is None else optimizer.generator).set_state(state)
