"""The data that is scanned: examples by their numbers, in batches that are always the same."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate
from torch.utils.data.distributed import DistributedSampler
from torch.utils.data.sampler import RandomSampler, SequentialSampler

from persample.losses import described
from persample.scanning.errors import ScanError

Collate = Callable[[list[Any]], Any]

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
        self.workers = 0
        if isinstance(data, DataLoader):
            _check_loader(data)
            self.workers = data.num_workers
            batch_size, collate = batch_size or data.batch_size, collate or data.collate_fn
            data = data.dataset
        self.batch_size = batch_size or 64
        self._data = _as_dataset(data)
        self._collate = collate or default_collate

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
        starts = range(0, len(self._data), shard_size)
        found = [
            (shard, range(at, min(at + self.batch_size, start + shard_size, len(self._data))))
            for shard, start in enumerate(starts)
            if wanted(shard)
            for at in range(start, min(start + shard_size, len(self._data)), self.batch_size)
        ]
        batches = [list(ids) for _, ids in found]
        loader: DataLoader[Any] = DataLoader(
            self._data, batch_sampler=batches, collate_fn=self._collate, num_workers=self.workers
        )
        for (shard, ids), batch in zip(found, loader, strict=True):
            yield Piece(shard, ids, batch)

    def _streamed(self, shard_size: int, wanted: Callable[[int], bool]) -> Iterator[Piece]:
        examples, at = iter(self._data), 0
        for shard in count():
            stop = at + shard_size
            if not wanted(shard):
                skipped = sum(1 for _ in islice(examples, shard_size))
                at += skipped
            while at < stop and (part := list(islice(examples, min(self.batch_size, stop - at)))):
                yield Piece(shard, range(at, at + len(part)), self._collate(part))
                at += len(part)
            if at < stop:
                return

    def examples(self, ids: Iterable[int]) -> dict[int, Any]:
        """Some examples by themselves, as the data gives them."""
        wanted = set(ids)
        if _has_places(self._data):
            return {i: self._data[i] for i in sorted(wanted)}
        last = max(wanted, default=-1)
        return {i: example for i, example in enumerate(islice(self._data, last + 1)) if i in wanted}

    def digest(self) -> str:
        """What tells these data from others: that of the first example."""
        found = self.examples([0])
        return digest_of(found.get(0))


def label_of(batch: Any) -> Tensor | None:
    """The classes of a batch's samples, or None: of `(inputs, targets)`, or by a usual name in a dict.

    >>> label_of((torch.ones(2, 3), torch.tensor([1, 0]))), label_of({"x": torch.ones(2), "y": torch.tensor([4, 5])})
    (tensor([1, 0]), tensor([4, 5]))
    """
    found = None
    if isinstance(batch, Mapping):
        found = next((batch[name] for name in _LABELS if name in batch), None)
    elif isinstance(batch, (tuple, list)) and len(batch) > 1:
        found = batch[-1]
    whole = isinstance(found, Tensor) and found.dim() == 1 and not (found.is_floating_point() or found.is_complex())
    return found if whole else None


def digest_of(value: Any) -> str:
    """A short name for the contents of a nest of tensors, numbers and text."""
    digest = hashlib.sha256()

    def add(part: Any) -> None:
        if isinstance(part, Tensor):
            digest.update(f"{part.dtype}{tuple(part.shape)}".encode())
            digest.update(part.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        elif isinstance(part, Mapping):
            for key, inner in part.items():
                add(str(key))
                add(inner)
        elif isinstance(part, (tuple, list)):
            for inner in part:
                add(inner)
        elif isinstance(part, (str, int, float, bool, bytes)):
            digest.update(repr(part).encode())
        elif hasattr(part, "tobytes"):  # of numpy, or a picture
            digest.update(part.tobytes())

    add(value)
    return digest.hexdigest()[:16]


class _Columns(Dataset[dict[str, Any]]):
    """Rows of a dict of tensors."""

    def __init__(self, columns: Mapping[str, Tensor]) -> None:
        self._columns = columns

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())))

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {name: column[i] for name, column in self._columns.items()}


def _has_places(data: Any) -> bool:
    return not isinstance(data, IterableDataset) and hasattr(data, "__getitem__") and hasattr(data, "__len__")


def _as_dataset(data: Any) -> Any:
    tensors = data.values() if isinstance(data, Mapping) else data if isinstance(data, tuple) else ()
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
        raise ScanError(f"The data have to be a Dataset, a DataLoader or tensors, got {described(data)}.")
    return data


def _check_loader(loader: DataLoader[Any]) -> None:
    """Refuses a loader whose dataset is not what it gives."""
    if loader.batch_size is None and (loader.batch_sampler is None or isinstance(loader.dataset, IterableDataset)):
        raise ScanError("The loader does not batch: pass its dataset, with batch_size and, if it needs one, collate.")
    sampler: Any = getattr(loader.batch_sampler, "sampler", loader.sampler)
    if isinstance(loader.dataset, IterableDataset) or isinstance(sampler, (SequentialSampler, DistributedSampler)):
        return
    everything = isinstance(sampler, RandomSampler) and not sampler.replacement
    if not everything or (isinstance(sampler, RandomSampler) and sampler.num_samples != len(sampler.data_source)):
        raise ScanError(
            f"The loader's {type(sampler).__name__} chooses among the examples of its dataset. Pass the dataset that "
            "is to be scanned, such as a torch.utils.data.Subset."
        )


def moved(value: Any, device: torch.device) -> Any:
    """`value` with its tensors on a device."""
    return tree_map(lambda part: part.to(device) if hasattr(part, "to") else part, value)
