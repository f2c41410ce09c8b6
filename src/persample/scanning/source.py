"""The data that is scanned: examples by their numbers, in batches that are always the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count, islice
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate
from torch.utils.data.distributed import DistributedSampler
from torch.utils.data.sampler import RandomSampler, SequentialSampler

from persample import _torch
from persample._internal.rng import preserve_rng, seed_all
from persample.losses import describe_value
from persample.scanning.digest import digest_of
from persample.scanning.errors import ScanError

Collate = Callable[[list[Any]], Any]

_OF_LOADERS = ("num_workers", "worker_init_fn", "pin_memory", "timeout", "multiprocessing_context")
_COMPARED = 32  # examples of a dataset, to see whether it is still the same
_LABELS = ("label", "labels", "target", "targets", "y")


@dataclass(frozen=True)
class Piece:
    """A batch: the shard that it belongs to, the numbers of its examples, and what they were collated to."""

    shard: int
    ids: range
    batch: Any


class Source:
    """Examples `0 .. len - 1` in their own order, whatever the order of a loader is.

    `data` is a Dataset or any other sequence of examples, tensors with the examples in dim 0 (one, a tuple, or a dict),
    a DataLoader of a dataset, or what can be iterated over from the start again and again.
    """

    def __init__(self, data: Any, batch_size: int | None = None, collate: Collate | None = None) -> None:
        self._loading: dict[str, Any] = {}
        if isinstance(data, DataLoader):
            _check_loader(data)
            self._loading = {name: getattr(data, name) for name in _OF_LOADERS}
            batch_size = data.batch_size if batch_size is None else batch_size
            collate = collate or data.collate_fn
            data = data.dataset
        self.batch_size = 64 if batch_size is None else batch_size
        if self.batch_size < 1:
            raise ScanError(f"batch_size must be positive, got {batch_size}.")
        self._data = _as_dataset(data)
        self.collate = collate or default_collate

    @property
    def size(self) -> int | None:
        """The number of examples; None where only the end will tell."""
        return len(self._data) if _has_places(self._data) else None

    @property
    def classes(self) -> list[str] | None:
        """The names of the classes, where the dataset tells them as torchvision's do."""
        names = getattr(self._data, "classes", None)
        return [str(name) for name in names] if isinstance(names, (list, tuple)) else None

    def pieces(self, shard_size: int, wanted: Callable[[int], bool]) -> Iterator[Piece]:
        """The batches of the shards that are wanted: shard s has the examples from `s * shard_size` on."""
        if not _has_places(self._data):
            yield from self._streamed(shard_size, wanted)
            return
        size = len(self._data)
        ranges = [
            (shard, range(at, min(at + self.batch_size, start + shard_size, size)))
            for shard, start in enumerate(range(0, size, shard_size))
            if wanted(shard)
            for at in range(start, min(start + shard_size, size), self.batch_size)
        ]
        loader: DataLoader[Any] = DataLoader(
            _Steady(self._data),
            batch_sampler=cast(Any, [ids for _, ids in ranges]),  # ranges are as good as the lists that it expects
            collate_fn=self.collate,
            **self._loading,
        )
        for (shard, ids), batch in zip(ranges, loader, strict=True):
            yield Piece(shard, ids, batch)

    def _streamed(self, shard_size: int, wanted: Callable[[int], bool]) -> Iterator[Piece]:
        seed_all(0)
        examples, at = iter(self._data), 0
        for shard in count():
            stop = at + shard_size
            if not wanted(shard):
                skipped = sum(1 for _ in islice(examples, shard_size))
                at += skipped
            while at < stop and (part := list(islice(examples, min(self.batch_size, stop - at)))):
                yield Piece(shard, range(at, at + len(part)), self.collate(part))
                at += len(part)
            if at < stop:
                return

    def examples(self, ids: Iterable[int]) -> dict[int, Any]:
        """Some examples by themselves, as the data gives them."""
        wanted = set(ids)
        with preserve_rng():
            if _has_places(self._data):
                steady = _Steady(self._data)
                return {i: steady[i] for i in sorted(wanted)}
            seed_all(0)
            last = max(wanted, default=-1)
            return {i: example for i, example in enumerate(islice(self._data, last + 1)) if i in wanted}

    def digest(self) -> str:
        """What tells these data from others: all of them, where they are tensors, else some from first to last."""
        if isinstance(self._data, (Tensor, TensorDataset, _Columns)):
            return digest_of(getattr(self._data, "tensors", self._data))
        if self.size is None:
            return digest_of(self.examples([0]))
        return digest_of(self.examples(range(0, self.size, max(1, self.size // _COMPARED))))

    def is_labelled(self) -> bool:
        """Whether examples have a class."""
        first = list(self.examples([0]).values())
        return bool(first) and label_of(self.collate(first), 1) is not None


def label_of(batch: Any, size: int) -> Tensor | None:
    """The classes of a batch's samples, or None: of `(inputs, targets, ...)`, or by a usual name in a dict.

    >>> label_of((torch.ones(2, 3), torch.tensor([1, 0])), 2), label_of({"x": torch.ones(1), "y": torch.tensor([4])}, 1)
    (tensor([1, 0]), tensor([4]))
    """
    found = None
    if isinstance(batch, Mapping):
        found = next((batch[name] for name in _LABELS if name in batch), None)
    elif isinstance(batch, (tuple, list)) and len(batch) > 1:
        found = batch[1]
    whole = isinstance(found, Tensor) and found.shape == (size,) and not found.is_floating_point()
    return found if whole else None


class _Steady(Dataset[Any]):
    """Examples that come out the same each time, also where random numbers are drawn for them, in any process."""

    def __init__(self, data: Any) -> None:
        self._data = data

    def __getitem__(self, i: int) -> Any:
        seed_all(i)
        return self._data[i]


class _Columns(Dataset[dict[str, Any]]):
    """Rows of a dict of tensors."""

    def __init__(self, columns: Mapping[str, Tensor]) -> None:
        self.tensors = columns

    def __len__(self) -> int:
        return len(next(iter(self.tensors.values())))

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {name: column[i] for name, column in self.tensors.items()}


def _has_places(data: Any) -> bool:
    return not isinstance(data, IterableDataset) and hasattr(data, "__getitem__") and hasattr(data, "__len__")


def _as_dataset(data: Any) -> Any:
    if isinstance(data, tuple) and data and all(isinstance(part, (Tensor, np.ndarray)) for part in data):
        data = tuple(map(torch.as_tensor, data))
    tensors = data.values() if isinstance(data, Mapping) else data if isinstance(data, tuple) else ()
    if isinstance(data, Mapping) and not (tensors and all(isinstance(part, Tensor) for part in tensors)):
        raise ScanError("A dict of data has to hold tensors, with the examples in dim 0 of each; this holds others.")
    if tensors and all(isinstance(part, Tensor) for part in tensors):
        sizes = {len(part) if part.dim() else None for part in tensors}
        if len(sizes) > 1 or None in sizes:
            raise ScanError(f"The tensors of the data have different numbers of examples: {sorted(map(str, sizes))}.")
        return _Columns(data) if isinstance(data, Mapping) else TensorDataset(*data)
    if _has_places(data):
        return data
    if isinstance(data, Iterator):
        raise ScanError(
            "The data can be read once only, and a scan reads them twice, and again when it goes on after a stop. Pass "
            "a Dataset, or an object whose __iter__ starts from the first example."
        )
    if not isinstance(data, Iterable):
        raise ScanError(f"The data have to be a Dataset, a DataLoader or tensors, got {describe_value(data)}.")
    return data


def _check_loader(loader: DataLoader[Any]) -> None:
    """Refuses a loader whose dataset is not what it gives."""
    if loader.batch_size is None and (loader.batch_sampler is None or isinstance(loader.dataset, IterableDataset)):
        raise ScanError("The loader does not batch: pass its dataset, with batch_size and, if it needs one, collate.")
    sampler: Any = getattr(loader.batch_sampler, "sampler", loader.batch_sampler)
    if isinstance(loader.dataset, IterableDataset) or isinstance(sampler, (SequentialSampler, DistributedSampler)):
        return
    everything = isinstance(sampler, RandomSampler) and not sampler.replacement
    if not everything or (isinstance(sampler, RandomSampler) and sampler.num_samples != len(sampler.data_source)):
        raise ScanError(
            f"The {type(sampler).__name__} of the loader chooses among the examples of its dataset. Pass the dataset "
            "that is to be scanned, such as a torch.utils.data.Subset."
        )


def moved(value: Any, device: torch.device) -> Any:
    """`value` with its tensors on a device."""
    return _torch.pytree.tree_map(lambda part: part.to(device) if hasattr(part, "to") else part, value)
