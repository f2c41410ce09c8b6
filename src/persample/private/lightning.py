"""Private training with Lightning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
from opacus.data_loader import DPDataLoader
from torch.utils.data import DataLoader

from persample.errors import PerSampleError
from persample.private.budget import Budget
from persample.private.engine import PrivacyEngine, noise_source, noise_state
from persample.private.optimizer import PrivateOptimizer
from persample.private.sampling import know_empty_batches


def poisson(loader: DataLoader[Any]) -> DataLoader[Any]:
    """A loader whose batches are sampled as the privacy of the steps takes it; of the same size on average."""
    sampled = DPDataLoader.from_data_loader(loader)
    know_empty_batches(sampled)
    return sampled


class PrivateTraining(pl.Callback):
    """Makes the training of a LightningModule private: `Trainer(callbacks=[PrivateTraining(...)])`.

    Pass `poisson(loader)` to `fit`. `noise_multiplier`, or `target_epsilon` with `epochs`, says how much noise there
    is. `module` names the attribute of the LightningModule that its training_step calls, if that is not itself.
    `private` has further arguments of `PrivacyEngine.make_private`. The epsilon spent is logged after each epoch.
    """

    def __init__(
        self,
        *,
        max_grad_norm: float | Sequence[float] = 1.0,
        noise_multiplier: float | None = None,
        target_epsilon: float | None = None,
        target_delta: float = 1e-5,
        epochs: int | None = None,
        module: str | None = None,
        engine: PrivacyEngine | None = None,
        **private: Any,
    ) -> None:
        self.budget = Budget(noise_multiplier, target_epsilon, target_delta)
        self.engine = engine or PrivacyEngine()
        self._epochs = epochs
        self._optimizer: Any = None
        self._noise_state: Any = None  # of a checkpoint, until there is an optimizer
        self._module = module
        self._private = {"max_grad_norm": max_grad_norm, **private}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Puts private optimizers in the place of the module's own, when these and the data are there."""
        loader = trainer.train_dataloader
        self._check(trainer, loader)
        if isinstance(trainer.optimizers[0], PrivateOptimizer):
            return
        self._optimizer = self.budget.make_private(
            self.engine,
            self._epochs or _epochs_of(trainer, loader),
            module=pl_module.get_submodule(self._module) if self._module else pl_module,
            optimizer=trainer.optimizers[0],
            data_loader=loader,
            **self._private,
        )
        trainer.strategy.optimizers = [self._optimizer]
        if self._noise_state is not None:
            noise_source(self._optimizer).set_state(self._noise_state)
            self._noise_state = None

    def _check(self, trainer: Any, loader: Any) -> None:
        if not isinstance(loader, DPDataLoader):
            raise PerSampleError(
                f"The training data come from a {type(loader).__name__}: give fit() a loader made by "
                "persample.private.lightning.poisson(loader), whose batches are sampled at random."
            )
        if len(trainer.optimizers) != 1:
            raise PerSampleError(f"Private training takes one optimizer, and there are {len(trainer.optimizers)}.")
        if trainer.accumulate_grad_batches > 1:
            raise PerSampleError("accumulate_grad_batches adds up batches that are sampled by themselves: use 1.")
        if trainer.world_size > 1:
            raise PerSampleError("PrivateTraining is for one process: for several, use PrivacyEngine with DDP or FSDP2")
        if self.engine.secure_mode:
            raise PerSampleError("secure_mode samples by a generator of the engine's own: use PrivacyEngine itself.")
        if trainer.gradient_clip_val:
            raise PerSampleError("gradient_clip_val would clip the sum: max_grad_norm clips each sample's gradient.")

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps: the steps that were made, and where the noise was, which must not repeat."""
        return {"accountant": self.engine.accountant.state_dict(), "noise": noise_state(self._optimizer)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on from there."""
        self.engine.accountant.load_state_dict(state_dict["accountant"])
        self._noise_state = state_dict["noise"]

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Logs what is spent."""
        pl_module.log("epsilon", self.budget.spent(self.engine), prog_bar=True)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Makes the model an ordinary one again."""
        self._release(trainer)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """The same, if training has failed."""
        self._release(trainer)

    def _release(self, trainer: Any) -> None:
        optimizer = next(iter(trainer.optimizers), None)
        if isinstance(optimizer, PrivateOptimizer):
            optimizer.release()
            trainer.strategy.optimizers = [optimizer.original_optimizer]


def _epochs_of(trainer: Any, loader: Any) -> float:
    if trainer.max_steps and trainer.max_steps > 0:
        return trainer.max_steps / len(loader)
    return trainer.max_epochs or 0
