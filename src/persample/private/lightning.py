"""Private training with Lightning."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_info
from opacus.data_loader import DPDataLoader
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from persample.errors import PerSampleError
from persample.private.budget import Budget
from persample.private.engine import PrivacyEngine
from persample.private.optimizer import PrivateOptimizer
from persample.private.sampling import (
    PartSampler,
    PoissonSampler,
    WithAttributes,
    check_loader,
    find_source,
    make_secret_generator,
    put_sampler,
)


def poisson(loader: DataLoader[Any], parts: int = 1) -> DataLoader[Any]:
    """Copy a loader with Poisson sampling. The expected batch size is `parts` times the batch size of the loader.

    Args:
        parts: the number of parts into which each batch is divided, for `Trainer(accumulate_grad_batches=parts)`.

    With several processes, each process has the batch size of the loader.
    """
    check_loader(loader)
    source = find_source(loader, None, None)
    sampled = DPDataLoader.from_data_loader(loader, generator=loader.generator or make_secret_generator())
    sampler = PoissonSampler(len(loader.dataset), math.ceil(len(loader) / parts), source)  # type: ignore[arg-type]
    return put_sampler(sampled, PartSampler(sampler, parts))


class PrivateTraining(pl.Callback):
    """Callback for private training: `Trainer(callbacks=[PrivateTraining(...)])`, `fit(module, poisson(loader))`.

    The epsilon spent so far is logged after each epoch.

    Args:
        max_grad_norm: bound of the gradient of a sample.
        noise_multiplier: standard deviation of the noise, relative to `max_grad_norm`.
        target_epsilon: epsilon that `epochs` epochs spend; an alternative to `noise_multiplier`. It includes what the
            engine has spent before, as in an earlier fit() or a training that is resumed.
        target_delta: delta of `target_epsilon` and of the epsilon in the logs.
        epochs: number of epochs for `target_epsilon`; by default all steps of the Trainer.
            The training ends when they have been made.
        module: name of the submodule to train privately, if it is not the whole LightningModule. Not for DDP.
        engine: a `PrivacyEngine`, for example with another accountant.
        private: further arguments of `PrivacyEngine.make_private`.
    """

    def __init__(
        self,
        *,
        max_grad_norm: float | Sequence[float] = 1.0,
        noise_multiplier: float | None = None,
        target_epsilon: float | None = None,
        target_delta: float = 1e-5,
        epochs: float | None = None,
        module: str | None = None,
        engine: PrivacyEngine | None = None,
        **private: Any,
    ) -> None:
        self.budget = Budget(noise_multiplier, target_epsilon, target_delta)
        self.engine = engine or PrivacyEngine()
        self._epochs = epochs
        self._optimizer: Any = None
        self._is_restored = False  # from the checkpoint of this call of fit()
        self._module = module
        self._private = {"max_grad_norm": max_grad_norm, **private}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Replace the optimizer by a private optimizer, once the optimizer and the data exist."""
        loader = trainer.train_dataloader
        self._check_trainer(trainer, loader)
        if isinstance(trainer.optimizers[0], PrivateOptimizer):
            return
        self._optimizer = self.budget.make_private(
            self.engine,
            self._count_steps(trainer, loader) if self.budget.target_epsilon is not None else 0,
            module=self._find_module(trainer, pl_module),
            optimizer=trainer.optimizers[0],
            data_loader=WithAttributes(loader, len(loader) // trainer.accumulate_grad_batches),
            **self._private,
        )
        self._optimizer.parts_per_step = self._optimizer.loss_divisor = trainer.accumulate_grad_batches
        trainer.strategy.optimizers = [self._optimizer]
        if self._is_restored:
            self._optimizer.draw_new_keys()

    def _find_module(self, trainer: Any, pl_module: Any) -> Any:
        """What the Trainer calls: the module, a part of it, or with several processes the module under DDP."""
        called = trainer.strategy.model
        if isinstance(called, DistributedDataParallel):
            return called
        if trainer.world_size > 1:
            raise PerSampleError(
                f"Several processes need strategy='ddp', got {type(trainer.strategy).__name__}. For FSDP2, use "
                "PrivacyEngine."
            )
        return pl_module.get_submodule(self._module) if self._module else pl_module

    def _count_steps(self, trainer: Any, loader: Any) -> int:
        """Number of steps to plan for, without those before the checkpoint that the training resumes from."""
        planned = trainer.estimated_stepping_batches
        if self._epochs is not None:
            planned = math.ceil(self._epochs * (len(loader) // trainer.accumulate_grad_batches))
        if math.isinf(planned) or planned < 0:
            raise PerSampleError(
                "The noise for target_epsilon depends on the number of steps, and this Trainer has no end. Set "
                "max_epochs or max_steps of the Trainer, or epochs of PrivateTraining."
            )
        return max(1, int(planned) - trainer.global_step)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Declare the tensors of the batch as samples."""
        self._optimizer.add_samples(batch)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """End the training when the planned steps have been made."""
        limit = self._optimizer.check_step
        if limit is not None and not limit.allowed and not trainer.should_stop:
            trainer.should_stop = True
            rank_zero_info("PrivateTraining: the planned steps have been made, so the training ends.")

    def _check_trainer(self, trainer: Any, loader: Any) -> None:
        if not isinstance(loader, DPDataLoader):
            raise PerSampleError(
                f"The training data come from a {type(loader).__name__}, without Poisson sampling. Pass "
                "persample.private.lightning.poisson(loader) to fit()."
            )
        if trainer.ckpt_path and not self._is_restored:
            raise PerSampleError(
                f"{trainer.ckpt_path} has no state of PrivateTraining, so the privacy budget spent so far is unknown. "
                "Resume only from checkpoints of private training. To start from weights that were trained without "
                "private data, load them into the module instead of passing ckpt_path."
            )
        if len(trainer.optimizers) != 1:
            raise PerSampleError(f"PrivateTraining supports one optimizer, got {len(trainer.optimizers)}.")
        if trainer.world_size > 1 and not isinstance(loader.batch_sampler, PartSampler):
            raise PerSampleError(
                "Lightning has replaced the Poisson sampling of the loader. Pass use_distributed_sampler=False to the "
                "Trainer: poisson(loader) divides the data over the processes itself."
            )
        parts = getattr(loader.batch_sampler, "parts", 1)
        if trainer.accumulate_grad_batches != parts:
            raise PerSampleError(
                f"accumulate_grad_batches={trainer.accumulate_grad_batches} must be the number of parts into which the "
                "loader divides a batch: other batches are independent Poisson samples, which must not be added up. "
                f"Pass poisson(loader, parts={trainer.accumulate_grad_batches}) to fit()."
            )
        if self.engine.secure_mode:
            raise PerSampleError(
                "PrivateTraining does not support secure_mode, where the engine samples with its own generator. Use "
                "PrivacyEngine directly."
            )
        if trainer.gradient_clip_val:
            raise PerSampleError(
                "gradient_clip_val clips the sum of the gradients, not the gradient of each sample. Remove it and set "
                "max_grad_norm of PrivateTraining."
            )

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint: the accountant. Noise and batches are drawn anew when a training is resumed."""
        return {"accountant": self.engine.accountant.state_dict(), "lineage": self.engine.history.lineage}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the accountant."""
        self.engine.history.load_state_dict(state_dict["accountant"], state_dict.get("lineage"))
        self._is_restored = True

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Log the epsilon spent so far."""
        pl_module.log("epsilon", self.budget.spent(self.engine), prog_bar=True)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Forget which checkpoint an earlier call of fit() was resumed from."""
        self._is_restored = False

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """End private training and restore the original optimizer."""
        self._release(trainer)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """End private training after an error."""
        self._release(trainer)

    def _release(self, trainer: Any) -> None:
        optimizer = next(iter(trainer.optimizers), None)
        if isinstance(optimizer, PrivateOptimizer):
            optimizer.release()
            trainer.strategy.optimizers = [optimizer.original_optimizer]
