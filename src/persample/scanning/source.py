"""The data of a scan: examples by index, in batches that are the same in every run."""

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
from persample._internal.text import describe_value
from persample.scanning.digest import compute_digest
from persample.scanning.errors import ScanError
from persample.scanning.names import Ids, Names, find_classes

Collate = Callable[[list[Any]], Any]

# Options of a user's DataLoader that the scan's own loader takes over.
_LOADER_OPTIONS = ("num_workers", "worker_init_fn", "pin_memory", "timeout", "multiprocessing_context")
_EXAMPLES_IN_DIGEST = 32
LABEL_KEYS = ("label", "labels", "target", "targets", "y")


@dataclass(frozen=True)
class ShardBatch:
    """A collated batch with the ids of its examples and the shard that they belong to."""

    shard: int
    ids: range
    batch: Any


class Source:
    """The examples `0 .. size - 1` of a dataset in dataset order, also if a loader shuffles them.

    `data` is a Dataset or another sequence of examples; a tensor, or a tuple or dict of tensors, with the examples in
    dimension 0; a DataLoader; or an iterable that can be iterated several times.
    """

    def __init__(
        self, data: Any, batch_size: int | None = None, collate: Collate | None = None, ids: Ids | None = None
    ) -> None:
        self._loader_options: dict[str, Any] = {}
        if isinstance(data, DataLoader):
            _check_loader(data)
            self._loader_options = {name: getattr(data, name) for name in _LOADER_OPTIONS}
            batch_size = data.batch_size if batch_size is None else batch_size
            collate = collate or data.collate_fn
            data = data.dataset
        self.batch_size = 64 if batch_size is None else batch_size
        if self.batch_size < 1:
            raise ScanError(f"batch_size must be positive, got {batch_size}.")
        self.columns = find_columns(data)
        if self.columns is not None and collate is None:
            data = format_as_torch(data)
        self._data = _make_dataset(data)
        self.collate = collate or default_collate
        self.names = Names(data, ids, self.size, self.read_examples)

    @property
    def size(self) -> int | None:
        """The number of examples; None for a stream, where only the end tells."""
        return len(self._data) if _is_indexable(self._data) else None

    @property
    def classes(self) -> list[str] | None:
        """The class names, if the dataset knows them."""
        return find_classes(self._data)

    def iterate_batches(self, shard_size: int, is_wanted: Callable[[int], bool]) -> Iterator[ShardBatch]:
        """The batches of the wanted shards. Shard s holds `shard_size` examples from `s * shard_size` on."""
        if not _is_indexable(self._data):
            yield from self._iterate_stream(shard_size, is_wanted)
            return
        size = len(self._data)
        ranges = [
            (shard, range(at, min(at + self.batch_size, start + shard_size, size)))
            for shard, start in enumerate(range(0, size, shard_size))
            if is_wanted(shard)
            for at in range(start, min(start + shard_size, size), self.batch_size)
        ]
        loader: DataLoader[Any] = DataLoader(
            _SeededDataset(self._data),
            batch_sampler=cast(Any, [ids for _, ids in ranges]),  # typed as lists, but ranges work
            collate_fn=self.collate,
            **self._loader_options,
        )
        for (shard, ids), batch in zip(ranges, loader, strict=True):
            yield ShardBatch(shard, ids, batch)

    def _iterate_stream(self, shard_size: int, is_wanted: Callable[[int], bool]) -> Iterator[ShardBatch]:
        seed_all(0)
        examples, at = iter(self._data), 0
        for shard in count():
            stop = at + shard_size
            if not is_wanted(shard):
                at += sum(1 for _ in islice(examples, shard_size))
            while at < stop and (part := list(islice(examples, min(self.batch_size, stop - at)))):
                yield ShardBatch(shard, range(at, at + len(part)), self.collate(part))
                at += len(part)
            if at < stop:
                return

    def read_examples(self, ids: Iterable[int]) -> dict[int, Any]:
        """Single examples by id, as the dataset returns them."""
        wanted = set(ids)
        with preserve_rng():
            if _is_indexable(self._data):
                seeded = _SeededDataset(self._data)
                return {i: seeded[i] for i in sorted(wanted)}
            seed_all(0)
            last = max(wanted, default=-1)
            return {i: example for i, example in enumerate(islice(self._data, last + 1)) if i in wanted}

    def compute_digest(self) -> str:
        """Digest of the data: of everything for tensors, of some examples from first to last for other datasets."""
        if isinstance(self._data, (Tensor, TensorDataset, _TensorDict)):
            return compute_digest(getattr(self._data, "tensors", self._data))
        if self.size is None:
            return compute_digest(self.read_examples([0]))
        return compute_digest(self.read_examples(range(0, self.size, max(1, self.size // _EXAMPLES_IN_DIGEST))))

    def has_labels(self) -> bool:
        """Whether the first example has a class label."""
        first = list(self.read_examples([0]).values())
        return bool(first) and find_labels(self.collate(first), 1) is not None


def find_labels(batch: Any, size: int) -> Tensor | None:
    """The class labels in a batch: the second item of a tuple, or a usual key of a dict. None if there are none.

    >>> find_labels((torch.ones(2, 3), torch.tensor([1, 0])), 2), find_labels({"x": 0, "y": torch.tensor([4])}, 1)
    (tensor([1, 0]), tensor([4]))
    """
    labels = None
    if isinstance(batch, Mapping):
        labels = next((batch[key] for key in LABEL_KEYS if key in batch), None)
    elif isinstance(batch, (tuple, list)) and len(batch) > 1:
        labels = batch[1]
    is_label = isinstance(labels, Tensor) and labels.shape == (size,) and not labels.is_floating_point()
    return labels if is_label else None


def move_to_device(value: Any, device: torch.device) -> Any:
    """`value` with all its tensors on `device`."""
    return _torch.pytree.tree_map(lambda part: part.to(device) if hasattr(part, "to") else part, value)


def find_columns(data: Any) -> list[str] | None:
    """The columns of a dataset of Hugging Face; None for other data."""
    is_dataset = hasattr(data, "with_format") and hasattr(data, "features")
    names = getattr(data, "column_names", None) if is_dataset else None
    return list(names) if isinstance(names, list) else None


def format_as_torch(data: Any) -> Any:
    """A dataset of Hugging Face with tensors as entries, unless its user has chosen a format."""
    kind = (getattr(data, "format", None) or {}).get("type")
    return data if kind is not None else data.with_format("torch")


class _SeededDataset(Dataset[Any]):
    """A dataset that seeds each example by its index, so that random augmentation is the same in every run."""

    def __init__(self, data: Any) -> None:
        self._data = data

    def __getitem__(self, i: int) -> Any:
        seed_all(i)
        return self._data[i]


class _TensorDict(Dataset[dict[str, Any]]):
    """A dict of tensors as a dataset of dicts."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors

    def __len__(self) -> int:
        return len(next(iter(self.tensors.values())))

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {name: tensor[i] for name, tensor in self.tensors.items()}


def _is_indexable(data: Any) -> bool:
    return not isinstance(data, IterableDataset) and hasattr(data, "__getitem__") and hasattr(data, "__len__")


def _make_dataset(data: Any) -> Any:
    if isinstance(data, tuple) and data and all(isinstance(part, (Tensor, np.ndarray)) for part in data):
        data = tuple(map(torch.as_tensor, data))
    tensors = data.values() if isinstance(data, Mapping) else data if isinstance(data, tuple) else ()
    if isinstance(data, Mapping) and not (tensors and all(isinstance(part, Tensor) for part in tensors)):
        raise ScanError("All values of a dict of data must be tensors, with the examples in dimension 0.")
    if tensors and all(isinstance(part, Tensor) for part in tensors):
        sizes = {len(part) if part.dim() else None for part in tensors}
        if len(sizes) > 1 or None in sizes:
            raise ScanError(f"The tensors of the data have different numbers of examples: {sorted(map(str, sizes))}.")
        return _TensorDict(data) if isinstance(data, Mapping) else TensorDataset(*data)
    if _is_indexable(data):
        return data
    if isinstance(data, Iterator):
        raise ScanError(
            "The data is an iterator, which can be read only once. A scan reads the data twice, and again when it is "
            "continued. Pass a Dataset, or an object with an __iter__ that starts from the first example."
        )
    if not isinstance(data, Iterable):
        raise ScanError(f"The data must be a Dataset, a DataLoader or tensors, got {describe_value(data)}.")
    return data


def _check_loader(loader: DataLoader[Any]) -> None:
    """Refuse a loader that does not yield each example of its dataset once, in batches."""
    if loader.batch_size is None and (loader.batch_sampler is None or isinstance(loader.dataset, IterableDataset)):
        raise ScanError("The loader does not batch. Pass its dataset, with batch_size and, if needed, collate.")
    sampler: Any = getattr(loader.batch_sampler, "sampler", loader.batch_sampler)
    if isinstance(loader.dataset, IterableDataset) or isinstance(sampler, (SequentialSampler, DistributedSampler)):
        return
    if not isinstance(sampler, RandomSampler) or sampler.replacement or sampler.num_samples != len(sampler.data_source):
        raise ScanError(
            f"The {type(sampler).__name__} of the loader selects examples of its dataset. Pass the dataset that you "
            "want to scan instead, for example a torch.utils.data.Subset."
        )
