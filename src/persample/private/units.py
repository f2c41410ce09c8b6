"""Privacy of units, such as users: a sampler that draws units, and batches that know the unit of each sample."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from opacus.data_loader import wrap_collate_with_empty
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from persample.errors import PerSampleError
from persample.gradients import UnitIds
from persample.isolation import Rows
from persample.private.sampling import PoissonSampler, Source, copy_loader, draw_numbers, show_example

_MOST_BATCHES = 16  # whose units are kept


class UnitBatch(NamedTuple):
    """A batch of data with the unit of each sample. The loader hands out its `content` only."""

    units: Tensor
    content: Any


def get_content(batch: Any) -> Any:
    """The batch that a training loop sees."""
    return batch.content if isinstance(batch, UnitBatch) else batch


class UnitSampler(PoissonSampler):
    """Poisson samples of units: all examples of a unit, or some of them, are in a batch together.

    Args:
        units: the number of the unit of each example, from 0 on.
        batches: the number of batches of an epoch.
        examples_per_unit: the largest number of examples of a unit in a batch, drawn anew for each batch; None: all.
        **others: the arguments of `PoissonSampler`.
    """

    def __init__(
        self, units: Sequence[int], batches: int, *, examples_per_unit: int | None = None, **others: Any
    ) -> None:
        self.units = list(units)
        members: dict[int, list[int]] = {}
        for example, unit in enumerate(self.units):
            members.setdefault(unit, []).append(example)
        super().__init__(len(members), batches, **{"processes": 1, **others})
        self._limit = examples_per_unit
        self._members = [torch.tensor(members[unit]) for unit in sorted(members)]
        largest = max(map(len, self._members))
        self.largest_unit = min(largest, examples_per_unit or largest)

    def _choose(self, own: Tensor, rate: float) -> list[int]:
        return [example for unit in super()._choose(own, rate) for example in self._draw_examples(unit)]

    def _draw_examples(self, unit: int) -> list[int]:
        examples = self._members[unit]
        if self._limit is None or len(examples) <= self._limit:
            return examples.tolist()
        return examples[draw_numbers(self._source, len(examples)).argsort()[: self._limit]].tolist()


class SplitUnitSampler(Sampler[list[int]]):
    """The batches of a `UnitSampler` in parts of at most `max_size` samples, each with whole units.

    Calls `signal(True)` before each part that is not the last of its batch, and `signal(False)` before the last.
    """

    def __init__(self, sampler: UnitSampler, max_size: int, signal: Callable[[bool], None]) -> None:
        if sampler.largest_unit > max_size:
            raise PerSampleError(
                f"A unit can have {sampler.largest_unit} samples in a batch, more than max_physical_batch_size="
                f"{max_size}, and a unit must not be split: its parts would be clipped one by one. Pass a smaller "
                "examples_per_unit to make_private, or a larger max_physical_batch_size."
            )
        self._sampler, self._max_size, self._signal = sampler, max_size, signal

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[list[int]]:
        for batch in self._sampler:
            parts = self._split(batch)
            for i, part in enumerate(parts):
                self._signal(i < len(parts) - 1)
                yield part

    def _split(self, batch: list[int]) -> list[list[int]]:
        parts: list[list[int]] = [[]]
        of_units: dict[int, list[int]] = {}
        for example in batch:
            of_units.setdefault(self._sampler.units[example], []).append(example)
        for examples in of_units.values():
            if len(parts[-1]) + len(examples) > self._max_size and parts[-1]:
                parts.append([])
            parts[-1] += examples
        return parts


class _WithUnits(Dataset[tuple[int, Any]]):
    """A dataset whose items come with the number of their unit."""

    def __init__(self, dataset: Any, units: Sequence[int]) -> None:
        self._dataset, self._units = dataset, units

    def __len__(self) -> int:
        return len(self._units)

    def __getitem__(self, index: int) -> tuple[int, Any]:
        return self._units[index], self._dataset[index]


class _CollateUnits:
    """Collates items of `_WithUnits` to a `UnitBatch`."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, items: list[tuple[int, Any]]) -> UnitBatch:
        units = torch.tensor([unit for unit, _ in items], dtype=torch.long)
        return UnitBatch(units, self._collate([item for _, item in items]))


def make_unit_loader(
    loader: DataLoader[Any],
    unit_ids: Tensor | Sequence[Hashable],
    *,
    examples_per_unit: int | None,
    source: Source,
    place: Mapping[str, int],
    batch_first: bool,
) -> DataLoader[Any]:
    """A loader of batches of units. The batch size of the given loader is the expected number of units in a batch."""
    units = _number_units(unit_ids, len(loader.dataset))  # type: ignore[arg-type]
    if loader.batch_size is None:
        raise PerSampleError("unit_ids needs a loader with a batch_size: the expected number of units in a batch.")
    if examples_per_unit is not None and examples_per_unit < 1:
        raise PerSampleError(f"examples_per_unit must be positive, got {examples_per_unit}.")
    batches = max(1, round(len({*units}) / (loader.batch_size * place["processes"])))
    sampler = UnitSampler(units, batches, examples_per_unit=examples_per_unit, source=source, **place)
    collate = wrap_collate_with_empty(collate_fn=loader.collate_fn, batch_first=batch_first)
    show_example(collate, loader.dataset)
    return copy_loader(loader, _WithUnits(loader.dataset, units), sampler, _CollateUnits(collate), loader.generator)


def split_unit_loader(loader: DataLoader[Any], max_size: int, signal: Callable[[bool], None]) -> DataLoader[Any]:
    """The loader of `make_unit_loader` with parts of batches, each with whole units."""
    sampler: Any = loader.batch_sampler
    split = SplitUnitSampler(sampler, max_size, signal)
    return copy_loader(loader, loader.dataset, split, loader.collate_fn, loader.generator)


def _number_units(unit_ids: Tensor | Sequence[Hashable], count: int) -> list[int]:
    listed: list[Any] = unit_ids.tolist() if hasattr(unit_ids, "tolist") else list(unit_ids)
    if len(listed) != count:
        raise PerSampleError(f"unit_ids has {len(listed)} ids, and the dataset has {count} examples.")
    numbers: dict[Any, int] = {}
    return [numbers.setdefault(unit, len(numbers)) for unit in listed]


class BatchUnits:
    """The units of the batches that a loader has handed out, for the next call of the model.

    Args:
        size: the model is called with this number of samples for each example of a batch, such as augmentations: they
            are the units. None: the batches come with the unit of each sample.
        find_rows: returns what the rows of the model's arguments are, None if nothing is known of them.
    """

    def __init__(self, size: int | None, find_rows: Callable[[], Rows | None]) -> None:
        self._size, self._find_rows = size, find_rows
        self._units: dict[int, list[int]] = {}  # of the last batches, by their numbers
        self._has_batches = False

    def add(self, batch: Any, number: int) -> None:
        """Note the units of a batch that is handed out."""
        self._has_batches = True
        if isinstance(batch, UnitBatch):
            self._units[number] = batch.units.tolist()
            self._units.pop(number - _MOST_BATCHES, None)

    def take(self, batch_size: int) -> UnitIds:
        """The unit of each sample of the batch that the model is called with."""
        rows = self._find_rows()
        if rows is None and self._size is not None and not self._has_batches:  # batches from elsewhere
            return self._size
        units = None if rows is None else range(rows.size) if self._size else self._units.get(rows.number)
        if not batch_size:
            return []
        if rows is None or units is None or len(rows.order) != batch_size or min(rows.order) < 0:
            raise PerSampleError(
                f"The model is called with {batch_size} samples, and it is not known which samples of the loader they "
                "are. Call it with the rows of each batch of the loader that make_private returns. Functions of torch "
                "may change their order. What numpy or Python does with them cannot be followed: do it in the dataset."
            )
        if self._size is not None and any(rows.order.count(unit) != self._size for unit in units):
            raise PerSampleError(
                f"The model is called with {batch_size} samples of the {rows.size} examples of a batch. With units="
                f"{self._size}, call it with that number of samples for each example."
            )
        return [units[sample] for sample in rows.order]
