"""BatchMemoryManager of Opacus, for batches of which a part may fail."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import opacus.utils.batch_memory_manager as opacus_manager
from torch.utils.data import DataLoader

from persample.private.optimizer import PrivateOptimizer
from persample.private.units import UnitSampler, split_unit_loader


class BatchMemoryManager(opacus_manager.BatchMemoryManager):
    """Splits large batches into parts of at most `max_physical_batch_size` samples, as in Opacus.

    `step()` is called for each part. If a part fails, or is left out with `continue`, the loop raises an error, because
    the sum of the other parts would not keep the bound. If a loop ends early, the rest of its batch does not count in
    the next loop. With the manager of Opacus, later parts would be added to the wrong batch. With `unit_ids`, a part
    has whole units only, because the gradient of a unit is clipped as a whole.

    >>> import warnings; warnings.simplefilter("ignore")
    >>> import torch
    >>> from torch.utils.data import TensorDataset
    >>> from persample.private import PrivacyEngine
    >>> model = torch.nn.Linear(4, 2)
    >>> data = DataLoader(TensorDataset(torch.randn(64, 4), torch.randint(2, (64,))), batch_size=32)
    >>> model, optimizer, loader = PrivacyEngine().make_private(
    ...     module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), data_loader=data, noise_multiplier=1.0,
    ...     max_grad_norm=1.0)
    >>> with BatchMemoryManager(data_loader=loader, max_physical_batch_size=8, optimizer=optimizer) as parts:
    ...     for x, y in parts:
    ...         assert len(x) <= 8
    ...         optimizer.zero_grad()
    ...         torch.nn.functional.cross_entropy(model(x), y).backward()
    ...         optimizer.step()
    """

    def __enter__(self) -> DataLoader[Any]:
        if not isinstance(self.optimizer, PrivateOptimizer):
            return super().__enter__()
        signals = _Signals()
        if isinstance(self.data_loader.batch_sampler, UnitSampler):
            split = split_unit_loader(self.data_loader, self.max_physical_batch_size, signals.signal_skip_step)
            return _SplitLoader(split, signals, self.optimizer)
        split = opacus_manager.wrap_data_loader(
            data_loader=self.data_loader,
            max_batch_size=self.max_physical_batch_size,
            optimizer=signals,
        )
        return _SplitLoader(split, signals, self.optimizer)


class _Signals:
    """Takes the signals of Opacus' sampler, which runs ahead of the loop if the loader has workers."""

    def __init__(self) -> None:
        self.waiting: deque[bool] = deque()  # for each part to come: whether the step is skipped after it

    def signal_skip_step(self, do_skip: bool = True) -> None:
        self.waiting.append(do_skip)


class _SplitLoader(DataLoader[Any]):
    """A data loader that tells the optimizer of each part when the loop receives it."""

    def __init__(self, loader: DataLoader[Any], signals: _Signals, optimizer: PrivateOptimizer) -> None:
        self.__dict__.update(loader.__dict__)
        self._signals = signals
        self._optimizer = optimizer

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self._signals.waiting.clear()
        self._optimizer.begin_batches()
        parts, loop, is_first = super().__iter__(), self._optimizer.arrivals.handed_out.begin_loop(), True
        while True:
            try:
                part = self._optimizer.arrivals.load(parts, loop, is_part=not is_first)
            except StopIteration:
                self._optimizer.check_part()
                return
            is_first = not self._signals.waiting.popleft()  # the next one; this one is the last of its batch
            self._optimizer.begin_part(is_last=is_first)
            yield part
