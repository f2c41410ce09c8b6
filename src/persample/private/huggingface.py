"""Private training with the Trainer of Hugging Face's transformers."""

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
    """A Trainer whose training is private. All arguments are the Trainer's, but these:

    `max_grad_norm` bounds what a sample adds to a step; `noise_multiplier`, or `target_epsilon` for all epochs, says
    how much noise there is; `target_delta` goes with it, and with the epsilon that is logged. `private` has further
    arguments of `PrivacyEngine.make_private`, such as `clipping`, `passes` or `batch_dim`. The expected size of a batch
    is `per_device_train_batch_size`: which samples it has is drawn for each.

    The model's loss has to be a mean, or a sum, of what each sample gives. For a language model with sequences of
    different lengths, `compute_loss_func=mean_of_sequences` is one.
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
        self.args.max_grad_norm = 0.0  # of the Trainer's own, which would clip the sum
        self.model_accepts_loss_kwargs = False  # or the loss of a sample would depend on how long the others are

    def _check_arguments(self) -> None:
        args = self.args
        if args.gradient_accumulation_steps > 1:
            raise PerSampleError("gradient_accumulation_steps adds up batches that are sampled by themselves: use 1.")
        if args.fp16:
            raise PerSampleError("fp16 scales the loss, and with it each sample's gradient: use bf16.")
        if args.world_size > 1:
            raise PerSampleError("PrivateTrainer is for one process. For several, use PrivacyEngine with DDP or FSDP2.")

    def get_train_dataloader(self) -> Any:
        """The Trainer's loader, with batches that are sampled as the privacy of the steps takes it."""
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
            self._epochs(),
            module=self.model,
            optimizer=optimizer,
            data_loader=self.get_train_dataloader(),
            **self._private,
        )
        return self.optimizer

    def _epochs(self) -> float:
        steps = self.args.max_steps
        return steps / len(self.get_train_dataloader()) if steps > 0 else self.args.num_train_epochs

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Trains; afterwards the model is an ordinary one again."""
        if resume_from_checkpoint:
            self._go_on_counting(resume_from_checkpoint)
        try:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        finally:
            optimizer = getattr(self.optimizer, "optimizer", self.optimizer)  # in accelerate's wrapper, or not yet
            if isinstance(optimizer, PrivateOptimizer):
                optimizer.release()
                self.optimizer = optimizer.original_optimizer

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """As the Trainer does; the steps that were made are written first, so that no checkpoint is without them."""
        folder = Path(self._get_output_dir(trial=None)) / f"checkpoint-{self.state.global_step}"
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(self.engine.accountant.state_dict(), folder / _ACCOUNTANT)
        super()._save_checkpoint(*args, **kwargs)

    def _go_on_counting(self, checkpoint: str | bool) -> None:
        folder = get_last_checkpoint(self.args.output_dir) if checkpoint is True else checkpoint
        path = Path(str(folder)) / _ACCOUNTANT
        if not path.exists():
            raise PerSampleError(f"{folder} does not tell which steps were made: PrivateTrainer did not write it.")
        self.engine.accountant.load_state_dict(torch.load(path, weights_only=False))

    def training_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Of a batch that has turned out empty there is nothing to compute; its step adds noise."""
        if not any(isinstance(value, Tensor) and value.numel() for value in inputs.values()):
            return torch.zeros((), device=self.args.device)
        return super().training_step(model, inputs, *args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """What the Trainer logs, and the epsilon that is spent."""
        if len(self.engine.accountant):
            logs = {**logs, "epsilon": self.budget.spent(self.engine)}
        super().log(logs, *args, **kwargs)


def mean_of_sequences(outputs: Any, labels: Tensor, num_items_in_batch: Any = None, ignore_index: int = -100) -> Tensor:
    """The loss of a causal language model: the mean of each sequence's own mean over its next tokens."""
    logits, targets = outputs["logits"][:, :-1], labels[:, 1:]
    losses = nn.functional.cross_entropy(
        logits.flatten(0, 1).float(), targets.flatten(), reduction="none", ignore_index=ignore_index
    )
    counts = (targets != ignore_index).sum(1).clamp(min=1)
    return (losses.view(targets.shape).sum(1) / counts).mean()
