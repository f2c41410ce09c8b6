"""The data of a scan: examples by index, in batches that are the same in every run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, groupby, islice
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
from persample.scanning.screening import LABEL_KEYS, Screen, Sieve, Sifted, Unreadable, say_why_unreadable

Collate = Callable[[list[Any]], Any]

# Options of a user's DataLoader that the scan's own loader takes over.
_LOADER_OPTIONS = ("num_workers", "worker_init_fn", "pin_memory", "timeout", "multiprocessing_context")
_EXAMPLES_IN_DIGEST = 32
DEFAULT_BATCH_SIZE = 64


@dataclass(frozen=True)
class ShardBatch:
    """A collated batch with the ids of its examples and the shard that they belong to.

    `skipped` says why examples between them are left out. The batch is None if it has no other examples.
    """

    shard: int
    ids: Sequence[int]
    batch: Any
    skipped: Mapping[int, str] = field(default_factory=dict)


class Source:
    """The examples `0 .. size - 1` of a dataset in dataset order, also if a loader shuffles them.

    `data` is a Dataset or another sequence of examples; a tensor, or a tuple or dict of tensors, with the examples in
    dimension 0; a DataLoader; or an iterable that can be iterated several times.

    With `skip_bad`, an example that cannot be read is `Unreadable`, and batches have no examples that do not pass the
    `screen`, which is to be set before batches are read.
    """

    def __init__(
        self,
        data: Any,
        batch_size: int | None = None,
        collate: Collate | None = None,
        ids: Ids | None = None,
        skip_bad: bool = False,
    ) -> None:
        self.skips_bad, self.screen = skip_bad, Screen() if skip_bad else None
        self._loader_options: dict[str, Any] = {}
        if isinstance(data, DataLoader):
            _check_loader(data)
            self._loader_options = {name: getattr(data, name) for name in _LOADER_OPTIONS}
            batch_size = data.batch_size if batch_size is None else batch_size
            collate = collate or data.collate_fn
            data = data.dataset
        self.has_default_batch_size = batch_size is None
        self.batch_size = DEFAULT_BATCH_SIZE if batch_size is None else batch_size
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

    @property
    def shape_hint(self) -> str:
        """What the user can choose about the shape of an example, if the dataset knows; else empty."""
        return str(getattr(self._data, "shape_hint", ""))

    def iterate_batches(self, shard_size: int, is_wanted: Callable[[int], bool]) -> Iterator[ShardBatch]:
        """The batches of the wanted shards. Shard s holds `shard_size` examples from `s * shard_size` on.

        With a collate function of their own, examples that have a length (texts, tokens) are sorted by it within their
        shard, so that few of them are padded to the length of a much longer one.
        """
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
        if self._can_slice:
            for shard, ids in ranges:
                yield ShardBatch(shard, ids, _slice_examples(self._data, ids))
            return
        by_length = self.is_sorted_by_length
        loader: DataLoader[Any] = DataLoader(
            _SeededDataset(self._data, self.skips_bad),
            batch_sampler=cast(Any, [ids for _, ids in ranges]),  # typed as lists, but ranges work
            collate_fn=list if by_length else self._sieve if self.skips_bad else self.collate,
            **self._loader_options,
        )
        batches = zip(ranges, loader, strict=True)
        if not by_length:
            for (shard, ids), batch in batches:
                yield _make_batch(shard, ids, batch) if self.skips_bad else ShardBatch(shard, ids, batch)
            return
        for shard, parts in groupby(batches, key=lambda item: item[0][0]):
            numbered = [pair for (_, ids), examples in parts for pair in zip(ids, examples, strict=True)]
            yield from self._sort_and_collate(shard, numbered)

    def _iterate_stream(self, shard_size: int, is_wanted: Callable[[int], bool]) -> Iterator[ShardBatch]:
        seed_all(0)
        by_length = self.is_sorted_by_length
        seed_all(0)
        examples, at = iter(self._data), 0
        for shard in count():
            stop = at + shard_size
            if not is_wanted(shard):
                at += sum(1 for _ in islice(examples, shard_size))
            elif by_length:
                numbered = list(zip(range(at, stop), examples, strict=False))
                at += len(numbered)
                yield from self._sort_and_collate(shard, numbered)
            while at < stop and (part := list(islice(examples, min(self.batch_size, stop - at)))):
                yield _make_batch(shard, range(at, at + len(part)), self._sieve(part))
                at += len(part)
            if at < stop:
                return

    def _sort_and_collate(self, shard: int, numbered: Sequence[tuple[int, Any]]) -> Iterator[ShardBatch]:
        """The batches of a shard of examples with their ids, longest first."""
        ordered = sorted(numbered, key=lambda pair: -(find_length(pair[1]) or 0))
        for start in range(0, len(ordered), self.batch_size):
            ids, examples = zip(*ordered[start : start + self.batch_size], strict=True)
            yield _make_batch(shard, ids, self._sieve(examples))

    @property
    def _sieve(self) -> Sieve:
        return Sieve(self.collate, self.screen)

    @property
    def is_sorted_by_length(self) -> bool:
        """Whether examples are sorted by length within their shards.

        Only texts and sequences of numbers are: the examples of a shard are then in memory at the same time.
        """
        if self.collate is default_collate:  # it pads nothing
            return False
        return any(find_length(example) is not None and _is_sequence(example) for example in self.read_first())

    @property
    def has_equal_shapes(self) -> bool:
        """Whether all examples have the same shape, as `default_collate` requires. Streams are not looked into."""
        return self.collate is default_collate and _is_indexable(self._data)

    @property
    def _can_slice(self) -> bool:
        """Whether a batch is a slice of tensors, which saves the time to read and collate single examples."""
        # A subclass may return other examples than its tensors contain.
        is_plain = type(self._data) in (Tensor, TensorDataset, _TensorDict) and self.collate is default_collate
        return is_plain and not self.skips_bad

    def read_examples(self, ids: Iterable[int]) -> dict[int, Any]:
        """Single examples by id, as the dataset returns them, or `Unreadable` if bad examples are skipped."""
        wanted = set(ids)
        with preserve_rng():
            if _is_indexable(self._data):
                seeded = _SeededDataset(self._data, self.skips_bad)
                return {i: seeded[i] for i in sorted(wanted)}
            seed_all(0)
            last = max(wanted, default=-1)
            return {i: example for i, example in enumerate(islice(self._data, last + 1)) if i in wanted}

    def read_originals(self, ids: Iterable[int]) -> dict[int, Any]:
        """Single examples as `read_examples`, or as their dataset has them before it resizes or converts them."""
        read = getattr(self._data, "read_original", None)
        return self.read_examples(ids) if read is None else {i: read(i) for i in ids}

    def read_first(self) -> list[Any]:
        """The first example that can be read, and that passes the screen, in a list; an empty list if there is none."""
        screen, failed = self.screen or Screen(), None
        for i in range(len(self._data) if _is_indexable(self._data) else 1):
            try:
                found = list(self.read_examples([i]).values())
            except Exception as error:
                failed = failed or error
                continue
            if self.screen is None or not found or screen.find_fault(found[0]) is None:
                return found
        if failed is not None:
            raise failed
        return []

    def read_sample(self) -> dict[int, Any]:
        """At most 32 or so examples from first to last by id; of a stream, the first one."""
        step = 1 if self.size is None else max(1, self.size // _EXAMPLES_IN_DIGEST)
        return self.read_examples([0] if self.size is None else range(0, self.size, step))

    def compute_digest(self) -> str:
        """Digest of the data: of everything for tensors, of some examples from first to last for other datasets."""
        if isinstance(self._data, (Tensor, TensorDataset, _TensorDict)):
            return compute_digest(getattr(self._data, "tensors", self._data))
        return compute_digest({i: _hide_reason(example) for i, example in self.read_sample().items()})

    def compute_digest_of(self, i: int) -> str:
        """Digest of one example."""
        return compute_digest(_hide_reason(self.read_examples([i])[i]))

    def has_labels(self) -> bool:
        """Whether the first example has a class label."""
        first = self.read_first()
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


def find_length(example: Any) -> int | None:
    """The length of a text or of a sequence of tokens, which may be the first item of a tuple or a value of a dict.

    None if the example has no length by which batches are padded.

    >>> find_length(("some text", 1)), find_length({"label": 0, "input_ids": [4, 2, 7]}), find_length(torch.ones(3, 4))
    (9, 3, None)
    """
    if isinstance(example, Mapping):
        return next((n for value in example.values() if (n := find_length(value)) is not None), None)
    if isinstance(example, str):
        return len(example)
    if isinstance(example, Tensor):
        return len(example) if example.dim() == 1 and not example.is_floating_point() else None
    if isinstance(example, np.ndarray):
        return len(example) if example.ndim == 1 and example.dtype.kind in "iu" else None
    if isinstance(example, (tuple, list)) and example:
        is_tokens = all(isinstance(part, int) for part in example)
        return len(example) if is_tokens and isinstance(example, list) else find_length(example[0])
    return None


def _is_sequence(example: Any) -> bool:
    """Whether an example consists of texts, numbers and arrays of one dimension only."""
    leaves = _torch.pytree.tree_leaves(example)
    return all(
        leaf.ndim <= 1 if isinstance(leaf, (Tensor, np.ndarray)) else isinstance(leaf, (str, int, float, type(None)))
        for leaf in leaves
    )


def _slice_examples(data: Any, ids: range) -> Any:
    """A batch of tensors as `default_collate` makes it: a copy, because user code may change it."""
    if isinstance(data, Tensor):
        return data[ids.start : ids.stop].clone()
    if isinstance(data, _TensorDict):
        return {name: tensor[ids.start : ids.stop].clone() for name, tensor in data.tensors.items()}
    return [tensor[ids.start : ids.stop].clone() for tensor in data.tensors]


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


def _hide_reason(example: Any) -> Any:
    """An example without the reason why it cannot be read, which may contain a path."""
    return None if isinstance(example, Unreadable) else example


def _make_batch(shard: int, ids: Sequence[int], sifted: Sifted) -> ShardBatch:
    """The batch of the good ones among the examples `ids`."""
    kept = ids if len(sifted.kept) == len(ids) else [ids[k] for k in sifted.kept]
    return ShardBatch(shard, kept, sifted.batch, {ids[k]: reason for k, reason in sifted.faults.items()})


class _SeededDataset(Dataset[Any]):
    """A dataset that seeds each example by its index, so that random augmentation is the same in every run.

    An example that cannot be read raises an error, or is `Unreadable`.
    """

    def __init__(self, data: Any, keeps_unreadable: bool) -> None:
        self._data, self._keeps_unreadable = data, keeps_unreadable

    def __getitem__(self, i: int) -> Any:
        seed_all(i)
        try:
            return self._data[i]
        except Exception as error:
            if not self._keeps_unreadable:
                raise
            return Unreadable(say_why_unreadable(error))


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
    if hasattr(data, "columns") and hasattr(data, "dtypes"):  # a data frame
        raise ScanError(
            "A data frame does not say which column is the target: pass persample.scanning.FeatureTable(frame, "
            "target='NAME') for features, or TextTable(frame, text='NAME', label='NAME') for texts."
        )
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
