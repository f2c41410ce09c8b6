"""Private training with the Trainer of Hugging Face transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer
from transformers.trainer_utils import get_last_checkpoint

from persample.errors import PerSampleError
from persample.private.budget import Budget
from persample.private.engine import PrivacyEngine
from persample.private.optimizer import PrivateOptimizer

_ACCOUNTANT = "privacy_accountant.pt"


class PrivateTrainer(Trainer):
    """A Trainer for private training.

    Batches are drawn by Poisson sampling with expected size `per_device_train_batch_size`. The loss must be a mean or
    sum over the samples. For a language model with sequences of different lengths, use
    `compute_loss_func=mean_of_sequences`.

    Args:
        max_grad_norm: bound of the gradient of a sample.
        noise_multiplier: standard deviation of the noise, relative to `max_grad_norm`.
        target_epsilon: epsilon that all epochs together spend; an alternative to `noise_multiplier`.
        target_delta: delta of `target_epsilon` and of the epsilon in the logs.
        engine: a `PrivacyEngine`, for example with another accountant.
        private: further arguments of `PrivacyEngine.make_private`, such as `clipping`, `passes` or `batch_dim`.

    The other arguments are the arguments of `Trainer`.
    """

    def __init__(
        self,
        *args: Any,
        max_grad_norm: float | Sequence[float] = 1.0,
        noise_multiplier: float | None = None,
        target_epsilon: float | None = None,
        target_delta: float = 1e-5,
        engine: PrivacyEngine | None = None,
        private: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.budget = Budget(noise_multiplier, target_epsilon, target_delta)
        super().__init__(*args, **kwargs)
        self.engine = engine or PrivacyEngine()
        self._private = {"max_grad_norm": max_grad_norm, **(private or {})}
        self._loader: Any = None
        self._check_arguments()
        self.args.max_grad_norm = 0.0  # the Trainer itself must not clip the sum
        self.model_accepts_loss_kwargs = False  # else the loss of a sample depends on the lengths of other samples

    def _check_arguments(self) -> None:
        args = self.args
        if args.gradient_accumulation_steps > 1:
            raise PerSampleError(
                "gradient_accumulation_steps adds up independent Poisson samples, which private training does not "
                "allow: set gradient_accumulation_steps=1."
            )
        if args.fp16:
            raise PerSampleError("fp16 scales the loss, and so the gradient of each sample before clipping: use bf16.")
        if args.world_size > 1:
            raise PerSampleError(
                "PrivateTrainer supports one process only. For several processes, use PrivacyEngine with DDP or FSDP2."
            )

    def get_train_dataloader(self) -> Any:
        """The loader of the Trainer with Poisson sampling."""
        if self._loader is None:
            self._loader = self.engine._prepare_data_loader(
                super().get_train_dataloader(), poisson_sampling=True, distributed=False
            )
        return self._loader

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        optimizer = super().create_optimizer(*args, **kwargs)
        if isinstance(optimizer, PrivateOptimizer):
            return optimizer
        self.optimizer = self.budget.make_private(
            self.engine,
            self._count_epochs(),
            module=self.model,
            optimizer=optimizer,
            data_loader=self.get_train_dataloader(),
            **self._private,
        )
        return self.optimizer

    def _count_epochs(self) -> float:
        steps = self.args.max_steps
        return steps / len(self.get_train_dataloader()) if steps > 0 else self.args.num_train_epochs

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train privately. Afterwards the model trains without clipping and noise again."""
        if resume_from_checkpoint:
            self._load_accountant(resume_from_checkpoint)
        try:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        finally:
            optimizer = getattr(self.optimizer, "optimizer", self.optimizer)  # accelerate may have wrapped it
            if isinstance(optimizer, PrivateOptimizer):
                optimizer.release()
                self.optimizer = optimizer.original_optimizer

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Save a checkpoint as the Trainer does. The accountant is saved first, so that no checkpoint is without it."""
        folder = Path(self._get_output_dir(trial=None)) / f"checkpoint-{self.state.global_step}"
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(self.engine.accountant.state_dict(), folder / _ACCOUNTANT)
        super()._save_checkpoint(*args, **kwargs)

    def _load_accountant(self, checkpoint: str | bool) -> None:
        folder = get_last_checkpoint(self.args.output_dir) if checkpoint is True else checkpoint
        path = Path(str(folder)) / _ACCOUNTANT
        if not path.exists():
            raise PerSampleError(
                f"{folder} has no {_ACCOUNTANT}, so the privacy budget spent so far is unknown. Resume only from "
                "checkpoints that PrivateTrainer wrote."
            )
        self.engine.accountant.load_state_dict(torch.load(path, weights_only=False))

    def training_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Skip the computation for an empty batch; its step still adds noise."""
        if not any(isinstance(value, Tensor) and value.numel() for value in inputs.values()):
            return torch.zeros((), device=self.args.device)
        return super().training_step(model, inputs, *args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log as the Trainer does, and add the epsilon spent so far."""
        if len(self.engine.accountant):
            logs = {**logs, "epsilon": self.budget.spent(self.engine)}
        super().log(logs, *args, **kwargs)


def mean_of_sequences(outputs: Any, labels: Tensor, num_items_in_batch: Any = None, ignore_index: int = -100) -> Tensor:
    """Loss of a causal language model: mean over the sequences of the mean loss of their next tokens."""
    logits, targets = outputs["logits"][:, :-1], labels[:, 1:]
    losses = nn.functional.cross_entropy(
        logits.flatten(0, 1).float(), targets.flatten(), reduction="none", ignore_index=ignore_index
    )
    counts = (targets != ignore_index).sum(1).clamp(min=1)
    return (losses.view(targets.shape).sum(1) / counts).mean()
