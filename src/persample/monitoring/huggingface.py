"""Monitors, values and dynamics in a Hugging Face Trainer. Requires `pip install 'persample[trainer]'`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor
from transformers import Trainer, TrainerCallback

from persample.errors import PerSampleError
from persample.monitoring.learning import Dynamics, dynamics
from persample.monitoring.run import Monitor, monitor
from persample.monitoring.values import Values, value

S = TypeVar("S", Values, Dynamics)

# What takes the ids of the examples of each batch.
_TAKERS: WeakKeyDictionary[Trainer, list[Callable[[Any], None]]] = WeakKeyDictionary()


def add_monitor(trainer: Trainer, *, every: int = 20, **options: Any) -> MonitorCallback:
    """Measure every `every`-th call of the model in `trainer.train()`.

    The numbers go to `trainer.log`, and so to TensorBoard, W&B and whatever else `report_to` names. The options are
    those of `persample.monitor`; `out="run.jsonl"` writes a file for `persample monitor`.

    Returns:
        The callback; `callback.monitor` is the `Monitor` of the last training.
    """
    callback = MonitorCallback(every=every, **options)
    callback.trainer = ref(trainer)
    trainer.add_callback(callback)
    return callback


class MonitorCallback(TrainerCallback):
    """A callback of the Trainer that measures gradients. Use `add_monitor` to have its numbers logged, too."""

    def __init__(self, *, every: int = 20, **options: Any) -> None:
        self._options = {"every": every, **options}
        self.trainer: ref[Trainer] | None = None
        self.monitor: Monitor | None = None
        self._logged = 0  # measured steps so far

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Start to measure."""
        trainer = self.trainer() if self.trainer is not None else None
        options = dict(self._options)
        if args.gradient_accumulation_steps > 1 and getattr(trainer, "model_accepts_loss_kwargs", False):
            # The model divides by the number of tokens of all accumulated batches: the loss is a sum with a factor.
            # If that number is a multiple of the batch size, the loss cannot be told from a mean.
            options.setdefault("loss_reduction", "sum")
        self.monitor, self._logged = monitor(model, **options), 0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Number the steps as the Trainer does."""
        if self.monitor is not None:
            self.monitor.step = state.global_step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Log a step that was measured."""
        trainer = self.trainer() if self.trainer is not None else None
        if self.monitor is None or trainer is None:
            return
        for found in self.monitor.history[self._logged :]:
            trainer.log({f"gradients/{name}": value for name, value in found.list_scalars().items()})
        self._logged = len(self.monitor.history)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the measuring."""
        if self.monitor is not None:
            self.monitor.stop()


class StepsCallback(TrainerCallback, Generic[S]):
    """Runs `persample.value` or `persample.dynamics` in a Trainer, with checkpoints. `add_values` makes one.

    Attributes:
        steps: what measures the last training; None before it.
    """

    def __init__(self, start: Callable[[Any, Any], S], file: str) -> None:
        self._start: Callable[[Any, Any], S] = start
        self._file = file
        self.steps: S | None = None

    def take_ids(self, ids: Any) -> None:
        """Take the ids of the next call of the model."""
        if self.steps is not None:
            self.steps.ids = ids

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        """Start to measure, from the checkpoint if the training is resumed."""
        self.steps = self._start(model, optimizer)
        path = self._find_file(args, state)
        if state.global_step and path.is_file():
            self.steps.load_state_dict(torch.load(path, weights_only=True))

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Number the steps as the Trainer does."""
        if self.steps is not None:
            self.steps.step = state.global_step

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write what was found so far into the checkpoint."""
        if self.steps is not None:
            torch.save(self.steps.state_dict(), self._find_file(args, state))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the measuring."""
        if self.steps is not None:
            self.steps.stop()

    def _find_file(self, args: Any, state: Any) -> Path:
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        return folder / f"{self._file}-{args.process_index}.pt"


class ValuesCallback(StepsCallback[Values]):
    """What `add_values` adds."""


class DynamicsCallback(StepsCallback[Dynamics]):
    """What `add_dynamics` adds."""


def add_values(
    trainer: Trainer,
    *,
    validation: Mapping[str, Any] | Callable[[Any], Tensor],
    ids: str = "id",
    optimizer: bool = True,
    **options: Any,
) -> ValuesCallback:
    """Measure what each example does to a validation loss in `trainer.train()`: see `persample.value`.

    Args:
        trainer: the Trainer.
        validation: a batch as the model takes it, with labels; or a function of the model that returns the loss.
        ids: the column of the training data with the number of each example. It does not reach the model.
        optimizer: whether values are decreases of the loss by the optimizer's steps, or plain inner products.

    The other options are those of `persample.value`.

    Returns:
        The callback; `callback.steps` is the `Values` of the last training.
    """

    def compute_loss(model: Any) -> Tensor:
        if callable(validation):
            return validation(model)
        batch = {name: part.to(trainer.args.device) for name, part in validation.items()}
        with trainer.compute_loss_context_manager():
            loss: Tensor = model(**batch)["loss"]
            return loss

    def start(model: Any, used: Any) -> Values:
        return value(model, validation=compute_loss, optimizer=used if optimizer else None, **options)

    callback = ValuesCallback(start, "values")
    _add(trainer, callback, ids)
    return callback


def add_dynamics(trainer: Trainer, *, ids: str = "id", **options: Any) -> DynamicsCallback:
    """Measure how each example is learnt in `trainer.train()`: see `persample.dynamics`.

    The model must be a classifier: its outputs have `logits` `(batch, classes)`, and a batch has `labels` `(batch,)`.

    Args:
        trainer: the Trainer.
        ids: the column of the training data with the number of each example. It does not reach the model.

    Returns:
        The callback; `callback.steps.write(directory)` makes a scan of the last training.
    """
    callback = DynamicsCallback(lambda model, used: dynamics(model, **options), "dynamics")
    _add(trainer, callback, ids)
    original = trainer.compute_loss

    def compute_loss(model: Any, inputs: Any, return_outputs: bool = False, **given: Any) -> Any:
        labels = inputs.get("labels")  # some losses take them away
        loss, outputs = original(model, inputs, return_outputs=True, **given)
        if callback.steps is not None and model.training and labels is not None:
            callback.steps.note(outputs["logits"], labels)
        return (loss, outputs) if return_outputs else loss

    patched: Any = trainer
    patched.compute_loss = compute_loss
    return callback


def _add(trainer: Trainer, callback: StepsCallback[Any], column: str) -> None:
    """Add a callback, and pass it the ids of each batch."""
    trainer.add_callback(callback)
    if trainer in _TAKERS:
        _TAKERS[trainer].append(callback.take_ids)
        return
    takers = _TAKERS[trainer] = [callback.take_ids]
    patched: Any = trainer
    patched._set_signature_columns_if_needed()
    patched._signature_columns.append(column)
    original = trainer.training_step

    def step(model: Any, inputs: Any, *args: Any, **given: Any) -> Any:
        if column not in inputs:
            raise PerSampleError(
                f"The batches of the Trainer have no '{column}'. Give each example of the training data its number: "
                f"dataset.add_column('{column}', range(len(dataset))). A collator of your own must pass it on."
            )
        inputs = dict(inputs)
        found = inputs.pop(column)
        for take in takers:
            take(found)
        return original(model, inputs, *args, **given)

    patched.training_step = step
