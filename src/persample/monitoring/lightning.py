"""Monitors a training with Lightning. Requires `pip install 'persample[lightning]'`."""

from __future__ import annotations

import warnings
from typing import Any

import lightning.pytorch as pl

from persample.monitoring.run import Monitor, monitor


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
