"""Private training with the Trainer of Hugging Face transformers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer
from transformers.trainer_utils import get_last_checkpoint

from persample._internal.files import write_atomically
from persample.errors import PerSampleError
from persample.private.budget import Budget
from persample.private.checkpoints import check_loadable, load_safely
from persample.private.engine import PrivacyEngine
from persample.private.noise import SecretNumbers
from persample.private.optimizer import PrivateOptimizer
from persample.private.sampling import (
    PartSampler,
    WithAttributes,
    copy_with_sampler,
    make_generator_of_process,
    make_secret_generator,
)
from persample.private.stepping import LossFunction, Step

_ACCOUNTANT = "privacy_accountant.pt"


class PrivateTrainer(Trainer):
    """A Trainer for private training.

    Batches are drawn by Poisson sampling, with entropy of the operating system or with the argument `data_seed`, but
    not with `seed`. Their expected size is `per_device_train_batch_size` in each process, times
    `gradient_accumulation_steps`: each batch is divided into so many parts. The loss must be a mean or sum over the
    samples. For a language model with sequences of different lengths, use `compute_loss_func=mean_of_sequences`.

    With several processes (`torchrun`), each trains a copy of the model that is not wrapped, and the private optimizer
    adds up the sums of all processes.

    Args:
        max_grad_norm: bound of the gradient of a sample.
        noise_multiplier: standard deviation of the noise, relative to `max_grad_norm`.
        target_epsilon: epsilon that all steps together spend; an alternative to `noise_multiplier`. It includes what
            the engine has spent before, as in a training that is resumed.
        target_delta: delta of `target_epsilon` and of the epsilon in the logs.
        engine: a `PrivacyEngine`, for example with another accountant.
        private: further arguments of `PrivacyEngine.make_private`, such as `clipping`, `passes` or `batch_dim`.
        losses: called with the model and the inputs of a batch; returns the loss of each sample, `(B,)`. Each step is
            then a `persample.private.Step`, which checks losses and rows again and again. It replaces `compute_loss`.
            It needs `gradient_accumulation_steps=1`.

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
        losses: LossFunction | None = None,
        **kwargs: Any,
    ) -> None:
        self.budget = Budget(noise_multiplier, target_epsilon, target_delta)
        super().__init__(*args, **kwargs)
        self.engine = engine or PrivacyEngine()
        self._private = {"max_grad_norm": max_grad_norm, **(private or {})}
        self._loader: Any = None  # of whole batches; the Trainer has the parts
        self._is_resumed = False
        self._losses = losses
        self._step: Step | None = None
        self._check_arguments()
        self.args.max_grad_norm = 0.0  # the Trainer itself must not clip the sum
        if self.label_smoother is not None:
            self.label_smoother = SampleLabelSmoother(self.label_smoother.epsilon)  # type: ignore[assignment]
        self.model_accepts_loss_kwargs = False  # else the loss of a sample depends on the lengths of other samples
        self.loss_is_scaled_for_ga = True  # else the gradient of each sample is divided before it is clipped
        if self._is_distributed:  # the optimizer adds up the sums, so the model is not wrapped by DDP
            self.accelerator.prepare_model = partial(self.accelerator.prepare_model, evaluation_mode=True)

    @property
    def _is_distributed(self) -> bool:
        return self.args.world_size > 1

    def _check_arguments(self) -> None:
        if self.args.fp16:
            raise PerSampleError("fp16 scales the loss, and so the gradient of each sample before clipping: use bf16.")
        if self._losses is not None and self.args.gradient_accumulation_steps > 1:
            raise PerSampleError("losses= makes a step of each batch: it needs gradient_accumulation_steps=1.")
        if self._is_distributed and (self.is_fsdp_enabled or self.is_deepspeed_enabled):
            raise PerSampleError(
                "PrivateTrainer supports copies of the model in several processes, not FSDP or DeepSpeed. For FSDP2, "
                "use PrivacyEngine."
            )

    def get_train_dataloader(self) -> Any:
        """The loader of the Trainer with Poisson sampling, in parts if gradients are accumulated."""
        parts = self.args.gradient_accumulation_steps
        whole = self._get_whole_loader()
        return whole if parts == 1 else copy_with_sampler(whole, PartSampler(whole.batch_sampler, parts))

    def _get_whole_loader(self) -> Any:
        if self._loader is None:
            loader: Any = super().get_train_dataloader()
            steps = math.ceil(len(loader) / self.args.gradient_accumulation_steps)
            seed = self.args.data_seed  # everybody knows the default `seed` of the Trainer, and so the batches of it
            self._loader = self.engine._prepare_data_loader(
                WithAttributes(loader, steps, generator=make_secret_generator()),  # type: ignore[arg-type]
                poisson_sampling=True,
                distributed=self._is_distributed,
                source=SecretNumbers() if seed is None else make_generator_of_process(seed),
            )
        return self._loader

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        optimizer = super().create_optimizer(*args, **kwargs)
        if isinstance(optimizer, PrivateOptimizer):
            return optimizer
        private = self.optimizer = self.budget.make_private(
            self.engine,
            self._count_steps(),
            module=self.model,
            optimizer=optimizer,
            data_loader=self._get_whole_loader(),
            distributed=self._is_distributed,
            **self._private,
        )
        private.parts_per_step = self.args.gradient_accumulation_steps
        if self._is_resumed:
            private.draw_new_keys()
        if self._losses is not None:
            self._step = Step(private.module, self._losses, private)
        return self.optimizer

    def _count_steps(self) -> int:
        """Number of steps that the Trainer is going to make, without those before the checkpoint it resumes from."""
        all_steps = self.set_initial_training_values(self.args, self.get_train_dataloader())[-1]
        return max(1, all_steps - self.state.global_step)

    def _get_private_optimizer(self) -> PrivateOptimizer | None:
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)  # accelerate may have wrapped it
        return optimizer if isinstance(optimizer, PrivateOptimizer) else None

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train privately. Afterwards the model trains without clipping and noise again."""
        if resume_from_checkpoint:
            self._load_accountant(resume_from_checkpoint)
        try:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        finally:
            optimizer = self._get_private_optimizer()
            if optimizer is not None:
                optimizer.release()
                self.optimizer = optimizer.original_optimizer

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Save a checkpoint as the Trainer does. The accountant is saved first, so that no checkpoint is without it."""
        folder = Path(self._get_output_dir(trial=None)) / f"checkpoint-{self.state.global_step}"
        state = {**self.engine.accountant.state_dict(), "lineage": self.engine.history.lineage}
        if self.args.should_save:
            with write_atomically(folder / _ACCOUNTANT) as file:
                torch.save(state, file)
                check_loadable(file)
        super()._save_checkpoint(*args, **kwargs)

    def _load_accountant(self, checkpoint: str | bool) -> None:
        folder = get_last_checkpoint(self.args.output_dir) if checkpoint is True else checkpoint
        path = Path(str(folder)) / _ACCOUNTANT
        if not path.exists():
            raise PerSampleError(
                f"{folder} has no {_ACCOUNTANT}, so the privacy budget spent so far is unknown. Resume only from "
                "checkpoints that PrivateTrainer wrote."
            )
        state = load_safely(path)
        self.engine.history.load_state_dict(state, state.pop("lineage", None))
        self._is_resumed = True

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Make the training step of the Trainer, in which each sample's loss is its own.

        The number of labels of the whole batch is left out: if it divided the loss, each sample would depend on the
        others. An empty batch is not computed; its step still adds noise.
        """
        if not any(isinstance(value, Tensor) and value.numel() for value in inputs.values()):
            return torch.zeros((), device=self.args.device)
        if self._step is not None:
            model.train()
            inputs = self._prepare_inputs(inputs)
            self._step.optimizer.add_samples(inputs)
            with self.compute_loss_context_manager():
                return self._step.backward(inputs).mean()
        loss = super().training_step(model, inputs, None, *args, **kwargs)
        return loss / self.args.gradient_accumulation_steps  # the Trainer logs the sum over the parts

    def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute the loss as the Trainer does. The tensors of the batch, labels included, are declared as samples."""
        optimizer = self._get_private_optimizer()
        if optimizer is not None and self._step is None and torch.is_grad_enabled():  # not in an evaluation
            optimizer.add_samples(inputs)
        return super().compute_loss(model, inputs, *args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log as the Trainer does, and add the epsilon spent so far."""
        if len(self.engine.accountant):
            logs = {**logs, "epsilon": self.budget.spent(self.engine)}
        super().log(logs, *args, **kwargs)


def mean_of_sequences(outputs: Any, labels: Tensor, num_items_in_batch: Any = None, ignore_index: int = -100) -> Tensor:
    """Loss of a causal language model: mean over the sequences of the mean loss of their next tokens."""
    return _compute_mean_of_samples(outputs["logits"][:, :-1], labels[:, 1:], ignore_index=ignore_index)


class SampleLabelSmoother:
    """The Trainer's loss with label smoothing, as a mean over the samples of the mean over their labels.

    The Trainer's own one is a mean over all labels of the batch. Both are equal if all samples have as many labels.
    """

    def __init__(self, epsilon: float, ignore_index: int = -100) -> None:
        self.epsilon = epsilon
        self.ignore_index = ignore_index

    def __call__(
        self, model_output: Any, labels: Tensor, shift_labels: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        logits = model_output["logits"] if isinstance(model_output, dict) else model_output[0]
        if shift_labels:
            logits, labels = logits[..., :-1, :], labels[..., 1:]
        labels = labels.squeeze(-1) if labels.dim() == logits.dim() else labels
        return _compute_mean_of_samples(logits, labels, ignore_index=self.ignore_index, label_smoothing=self.epsilon)


def _compute_mean_of_samples(logits: Tensor, labels: Tensor, ignore_index: int, label_smoothing: float = 0.0) -> Tensor:
    losses = nn.functional.cross_entropy(
        logits.flatten(0, -2).float(),
        labels.flatten(),
        reduction="none",
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
    ).view(labels.shape)
    if labels.dim() == 1:
        return losses.mean()
    counts = (labels != ignore_index).flatten(1).sum(1).clamp(min=1)
    return (losses.flatten(1).sum(1) / counts).mean()
