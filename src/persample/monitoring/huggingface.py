"""Monitors the training of a Hugging Face Trainer. Requires `pip install 'persample[trainer]'`."""

from __future__ import annotations

from typing import Any
from weakref import ref

from transformers import Trainer, TrainerCallback

from persample.monitoring.run import Monitor, monitor


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
