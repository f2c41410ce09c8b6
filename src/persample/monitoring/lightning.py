"""Monitors, values and dynamics in a training with Lightning. Requires `pip install 'persample[lightning]'`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import lightning.pytorch as pl
from torch import Tensor

from persample.monitoring.learning import Dynamics, dynamics
from persample.monitoring.run import Monitor, monitor
from persample.monitoring.values import Values, value

S = TypeVar("S", Values, Dynamics)


class MonitorCallback(pl.Callback):
    """Measures every `every`-th call of the model in `trainer.fit(...)`, and logs the numbers by the module's `log`.

    Args:
        every: as in `persample.monitor`.
        module: the name of a submodule, such as "net", to measure it alone. By default the whole LightningModule;
            `training_step` may call it or its submodules.

    The other options are those of `persample.monitor`. `callback.monitor` is the `Monitor` of the last fit.
    """

    def __init__(self, *, every: int = 20, module: str = "", **options: Any) -> None:
        self._module, self._options = module, {"every": every, **options}
        self.monitor: Monitor | None = None
        self._logged = 0  # measured steps so far

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Start to measure."""
        self.monitor, self._logged = monitor(pl_module.get_submodule(self._module), **self._options), 0

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Number the steps as the trainer does."""
        if self.monitor is not None:
            self.monitor.step = trainer.global_step

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log a step that was measured."""
        if self.monitor is not None:
            for found in self.monitor.history[self._logged :]:
                pl_module.log_dict({f"gradients/{name}": value for name, value in found.list_scalars().items()})
            self._logged = len(self.monitor.history)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """End the measuring."""
        self._stop()
        if self.monitor is not None and not self.monitor.history:
            warnings.warn(
                "No step was measured: training_step calls neither the module that is monitored nor a part of it, or "
                "each step was refused, as the log of persample.monitoring says.",
                stacklevel=2,
            )

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """End the measuring."""
        self._stop()

    def _stop(self) -> None:
        if self.monitor is not None:
            self.monitor.stop()


class _StepsCallback(pl.Callback, Generic[S]):
    """Runs a measuring of steps in `trainer.fit(...)`, with checkpoints.

    Attributes:
        steps: what measures the last fit; None before it.
    """

    def __init__(self, start: Callable[[Any, Any], S], ids: Callable[[Any], Any]) -> None:
        self._start: Callable[[Any, Any], S] = start  # from the trainer and the LightningModule
        self._ids = ids
        self._state: dict[str, Any] | None = None
        self.steps: S | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Start to measure, from the checkpoint if there is one."""
        self.steps = self._start(trainer, pl_module)
        if self._state:
            self.steps.load_state_dict(self._state)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Number the steps as the trainer does, and take the ids of the batch."""
        if self.steps is not None:
            self.steps.step, self.steps.ids = trainer.global_step, self._ids(batch)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """End the measuring."""
        if self.steps is not None:
            self.steps.stop()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """End the measuring."""
        self.on_train_end(trainer, pl_module)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs."""
        return {} if self.steps is None else self.steps.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        self._state = state_dict


class ValueCallback(_StepsCallback[Values]):
    """Measures what each example does to a validation loss in `trainer.fit(...)`: see `persample.value`.

    Args:
        validation: a function of the LightningModule that returns the loss of a validation batch.
        ids: a function of the batch of `training_step` that returns the ids of its examples.
        module: the name of the submodule that is trained, by default the whole LightningModule.

    The other options are those of `persample.value`. `callback.steps` is the `Values` of the last fit.
    """

    def __init__(
        self, *, validation: Callable[[Any], Tensor], ids: Callable[[Any], Any], module: str = "", **options: Any
    ) -> None:
        def start(trainer: Any, pl_module: Any) -> Values:
            found = pl_module.get_submodule(module)
            return value(found, validation=lambda _: validation(pl_module), optimizer=trainer.optimizers, **options)

        super().__init__(start, ids)


class DynamicsCallback(_StepsCallback[Dynamics]):
    """Measures how each example is learnt in `trainer.fit(...)`: see `persample.dynamics`.

    `training_step` returns a dict with the loss, the `logits` `(batch, classes)` and the `labels` `(batch,)`.

    Args:
        ids: a function of the batch of `training_step` that returns the ids of its examples.
        module: the name of the submodule that is trained, by default the whole LightningModule.

    The other options are those of `persample.dynamics`. `callback.steps.write(directory)` makes a scan of the last fit.
    """

    def __init__(self, *, ids: Callable[[Any], Any], module: str = "", **options: Any) -> None:
        super().__init__(lambda trainer, pl_module: dynamics(pl_module.get_submodule(module), **options), ids)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Take the outputs of the step."""
        if self.steps is not None:
            self.steps.note(outputs["logits"], outputs["labels"])
