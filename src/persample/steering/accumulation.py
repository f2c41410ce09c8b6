"""A batch size that follows the noise scale, by the number of batches that are accumulated for a step."""

from __future__ import annotations

from persample.monitoring import Monitor


class AccumulationScheduler:
    """Says how many batches to accumulate, so that a step has about as many samples as the noise scale.

    Below the noise scale twice the batch needs almost half the steps; above it, more samples save little. The number
    changes only when the interval of the noise scale is known, and by a factor of at most `growth` at once.

    Args:
        watching: a monitor of the model. `persample.monitor(model, parameters=...)` with the weights of norm layers
            alone costs least.
        batch_size: the number of samples of one batch, over all processes.
        most: the largest number of batches.
        growth: the largest change at once, as a factor.
        factor: the wanted batch size as a multiple of the noise scale.

    >>> import torch, persample
    >>> model = torch.nn.Linear(3, 1)
    >>> with persample.monitor(model, every=1) as watching:
    ...     scheduler = AccumulationScheduler(watching, batch_size=8, most=4)
    ...     for _ in range(4):
    ...         for _ in range(scheduler.batches):
    ...             model(torch.randn(8, 3)).square().mean().div(scheduler.batches).backward()
    ...         _ = scheduler.step()
    >>> 1 <= scheduler.batches <= 4
    True
    """

    def __init__(
        self, watching: Monitor, batch_size: int, *, most: int, growth: float = 2.0, factor: float = 1.0
    ) -> None:
        self._watching, self._batch_size, self._most = watching, batch_size, most
        self._growth, self._factor = growth, factor
        self.batches = 1

    def step(self) -> int:
        """Choose the number of batches of the next step, and return it. Call it after `optimizer.step()`."""
        scale = self._watching.noise_scale
        if scale is None:
            return self.batches
        wanted = scale.value if scale.value is not None and scale.high < float("inf") else None
        if wanted is None:  # only a lower bound is known
            wanted = max(scale.low, self.batches * self._batch_size / self._factor)
        target = self._factor * wanted / self._batch_size
        limited = min(max(target, self.batches / self._growth), self.batches * self._growth, self._most)
        self.batches = max(1, round(limited))
        return self.batches
