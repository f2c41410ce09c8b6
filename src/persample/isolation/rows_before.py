"""Follows the rows of batches from the moment a loader hands them out until the model is called.

In private training, each row of the model's arguments must be one sample of the loader, and the recording must know
which: to give it to its unit, and to see that samples were mixed or that arguments and targets have different orders.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from persample import _torch
from persample._internal.dynamo import exclude_from_graph, skip_compilation
from persample._internal.functions import find_results
from persample._internal.tree import find_tensors, iterate_tensors
from persample.errors import PerSampleError
from persample.forward import TensorMap
from persample.layouts import Layout, Lost, Where, find_motion, make_call, make_layout
from persample.recording import DeclaredBatches

_MOST_BATCHES = 16  # that are followed at a time

_BEFORE = "the code before the call of the model"


@dataclass(frozen=True)
class Rows:
    """The samples of a batch of a loader that the rows of the model's arguments are.

    Attributes:
        number: of the batch among those that were handed out.
        size: the number of its samples.
        order: the sample of each row of the arguments.
    """

    number: int
    size: int
    order: tuple[int, ...]

    @property
    def has_repeats(self) -> bool:
        """Whether a sample is in several rows."""
        own = [sample for sample in self.order if sample >= 0]
        return len({*own}) < len(own)


class RowsBefore(TorchFunctionMode, DeclaredBatches):
    """Follows tensors of batches that are handed out, and what is computed from them. It is entered and left anywhere.

    Attributes:
        number: of the batch that was declared last.
        rows: what the rows of the arguments of the last call are, as far as that is known.
    """

    def __init__(self) -> None:
        TorchFunctionMode.__init__(self)
        DeclaredBatches.__init__(self)
        self.number = 0
        self.rows: Rows | None = None
        self._found: Rows | None = None  # the same, if the call begins a step
        self._is_paused = False  # as a loader prepares other data
        self._known: TensorMap[tuple[int, Where]] = TensorMap()  # the number of the batch, and where its samples lie
        self._sizes: dict[int, int] = {}
        self._count = 0
        self._used = 0

    def add(self, batch: Any, batch_dim: int) -> TensorMap[int]:
        declared = super().add(batch, batch_dim)
        self.number = self._start_batch([tensor for tensor, _ in declared.items()], batch_dim)
        return declared

    def _start_batch(self, tensors: Iterable[Tensor], dim: int) -> int:
        """Follow the tensors of a batch, with samples in `dim` or else in dimension 0; return its number."""
        given = [t for t in tensors if not t.is_nested and t.dim()]
        before = {self._find(t)[0] for t in given}
        if len(before) == 1 and (number := before.pop()) in self._sizes:
            return number  # it is declared again
        self._count += 1
        for each in (dim, 0):
            sizes = {t.shape[each if t.dim() > each else 0] for t in given}
            if len(sizes) == 1:
                self._sizes[self._count] = sizes.pop()
                for tensor in given:
                    self._known[tensor] = self._count, Layout(each if tensor.dim() > each else 0)
                break
        for old in [number for number in self._sizes if number <= self._count - _MOST_BATCHES]:
            del self._sizes[old]
        self.enter()
        return self._count

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Inside the block, nothing is followed."""
        was_paused, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = was_paused

    def enter(self) -> None:
        """Follow from now on."""
        if not any(mode is self for mode in _torch.get_function_modes()):
            _torch.insert_outermost_mode(self)

    def stop(self) -> None:
        _torch.remove_mode(self)

    def start_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.stop()
        self._found = self._find_rows(iterate_tensors((args, kwargs)))
        self.rows = self._found or self.rows

    def start_step(self) -> None:
        self.rows = self._found

    def get_layouts(self) -> Callable[[int], Iterable[tuple[Tensor, Where]]]:
        return partial(self._list_layouts, self.rows)

    def resume(self) -> None:
        if self._used < self._count:
            self.enter()

    @property
    def is_following(self) -> bool:
        """Whether a loader has handed out batches whose rows can be followed."""
        return bool(self._sizes)

    def find_batches(self, tensors: Iterable[Tensor]) -> set[int]:
        """The numbers of the batches that tensors belong to, or were computed from; 0 for other tensors."""
        return {self._find(tensor)[0] for tensor in tensors}

    def _find_rows(self, arguments: Iterable[Tensor]) -> Rows | None:
        """What the rows of these arguments are; None if nothing is known of them, or if they have different orders."""
        orders: set[Rows] = set()
        for tensor in arguments:
            number, where = self._find(tensor)
            self._used = max(self._used, number)
            if number in self._sizes and isinstance(where, Layout) and tensor.dim() > where.dim:
                size = self._sizes[number]
                orders.add(Rows(number, size, where.get_ids(tensor.shape[where.dim], size)))
        return orders.pop() if len(orders) == 1 else None

    def _list_layouts(self, rows: Rows | None, batch: int) -> Iterator[tuple[Tensor, Where]]:
        """The tensors that are followed, and their layouts in a batch with the samples of these rows."""
        number = self._used if rows is None else rows.number
        size = self._sizes.get(number, 0)
        whole = tuple(range(size))
        order = whole if rows is None else rows.order
        for tensor, (own, where) in list(self._known.items()):
            if own != number or not size:
                continue
            if not isinstance(where, Layout) or (order == whole and size == batch):
                yield tensor, where
            elif len(order) == batch and (moved := _reorder(where, tensor, size, order)) is not None:
                yield tensor, moved

    def _find(self, tensor: Tensor) -> tuple[int, Where | None]:
        return self._known.get(tensor) or (0, None)

    # ---- each op ----

    @exclude_from_graph
    @skip_compilation(with_callees=True)
    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not self._is_paused and result is not None and any(t in self._known for t in find_tensors((args, kwargs))):
            self._follow(func, args, kwargs, result)
        return result

    def _follow(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        number = max(self._find(t)[0] for t in find_tensors((args, kwargs)))
        size, results = self._sizes.get(number, 0), find_results(result, args)
        if not size or not results:
            return

        def find_layout(tensor: Tensor) -> Where | None:
            own, found = self._find(tensor)
            return found if own in (0, number) else Lost("two batches of the loader meet", _BEFORE)

        if size == 1:
            layouts: Iterable[Where | None] = [_make_layout_of_one(made) for made in results]
        else:
            try:
                layouts = find_motion(make_call(func, args, kwargs, size, find_layout), results).results
            except PerSampleError as error:
                layouts = [Lost(str(error), _BEFORE)] * len(results)
        for made, where in zip(results, layouts, strict=False):
            if where is not None:
                self._known[made] = number, _with_place(where)
            elif made in self._known:
                del self._known.entries[id(made)]


def _make_layout_of_one(made: Tensor) -> Layout | None:
    return make_layout(0, (0,) * made.shape[0], 1) if made.dim() else None


def _with_place(where: Where) -> Where:
    if isinstance(where, Layout) or where.place:
        return where
    return replace(where, place=_BEFORE)


def _reorder(where: Layout, tensor: Tensor, size: int, order: tuple[int, ...]) -> Where | None:
    """The layout in the batch whose row n is sample `order[n]`; the n-th row of a sample is the n-th there, too.

    None if a sample has fewer rows than there: it is not known which of them they are.
    """
    if tensor.dim() <= where.dim:
        return where
    places: dict[int, list[int]] = {}
    for row, sample in enumerate(order):
        places.setdefault(sample, []).append(row)
    counts: dict[int, int] = {}
    before, ids = where.get_ids(tensor.shape[where.dim], size), []
    for sample in before:
        rows = places.get(sample)
        if rows is None and sample >= 0:
            return Lost("it has samples of the loader that are not among the arguments of the model", _BEFORE)
        seen = counts.get(sample, 0)
        counts[sample] = seen + 1
        ids.append(-1 if rows is None or sample < 0 else rows[seen % len(rows)])
    if any(counts[sample] < len(rows) for sample, rows in places.items() if sample in counts):
        return None
    return make_layout(where.dim, tuple(ids), len(order), where.loose and before != order)
