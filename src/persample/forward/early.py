"""What is known of tensors before the model is called for the first time, and the batch size is known.

Until then, ops are followed for each size that a tensor from outside has in its batch dimension. The call of the model
decides which of them is the batch's.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import ref

from torch import Tensor

from persample._internal.functions import find_results
from persample.forward.known import TensorMap
from persample.layouts import (
    Call,
    Layout,
    Lost,
    Reduced,
    Totals,
    Where,
    find_listed_total,
    find_motion,
    find_read_total,
    make_layout,
)

if TYPE_CHECKING:
    from persample.forward.outside import OutsideTensors

BEFORE = "the code before the call of the model"
_MAX_SIZES = 8  # batch sizes that are followed


class FollowedBatch(TensorMap[Where]):
    """Where the samples of a batch lie in tensors, before the model is called with it.

    Attributes:
        size: the number of samples.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def note(
        self, call: Call, results: Sequence[Tensor], layouts: Iterable[Where | None], place: Callable[[], str]
    ) -> None:
        """Note where the samples lie in what a call has made or changed; `place` names the code that runs."""
        for made, where in zip(results, layouts, strict=False):
            if isinstance(where, (Lost, Reduced)) and not where.place:
                where = replace(where, place=place())
            if where is None:
                self.discard(made)
            else:
                self[made] = where
            if call.is_inplace and isinstance(where, Lost) and made._base is not None:
                self[made._base] = where

    def renumber(self, order: tuple[int, ...]) -> Iterator[tuple[Tensor, Where]]:
        """The layouts in the batch whose row n is sample `order[n]`, as far as they are known."""
        for tensor, where in list(self.items()):
            if order != tuple(range(self.size)) and isinstance(where, Layout) and tensor.dim() > where.dim:
                renumbered = _renumber(where, tensor, self.size, order)
                if renumbered is not None:
                    yield tensor, renumbered
            else:
                yield tensor, where


def _renumber(where: Layout, tensor: Tensor, size: int, order: tuple[int, ...]) -> Where | None:
    """The layout in the batch whose row n is sample `order[n]`; the n-th row of a sample is the n-th there, too.

    None if a sample has fewer rows than there: it is not known which of them they are.
    """
    places: dict[int, list[int]] = {}
    for row, sample in enumerate(order):
        places.setdefault(sample, []).append(row)
    counts: dict[int, int] = {}
    before, ids = where.get_ids(tensor.shape[where.dim], size), []
    for sample in before:
        rows = places.get(sample)
        if rows is None and sample >= 0:
            return Lost("it has samples of the loader that are not among the arguments of the model", BEFORE)
        seen = counts.get(sample, 0)
        counts[sample] = seen + 1
        ids.append(-1 if rows is None or sample < 0 else rows[seen % len(rows)])
    if any(counts[sample] < len(rows) for sample, rows in places.items() if sample in counts):
        return None
    return make_layout(where.dim, tuple(ids), len(order), where.loose and before != order)


class EarlyTensors:
    """The layouts of tensors for each size that the batch may have.

    Attributes:
        list_layouts: lists, for a batch size, the layouts that are known by other means, and replace these.
        reads: batch sizes for which values of samples were read.
        order: after `take`: the sample of each row of a tensor from outside; None: row n is sample n.
        constants: after `take`: tensors that are the same for all samples.
    """

    def __init__(self) -> None:
        self.reads: set[int] = set()
        self.order: tuple[int, ...] | None = None
        self.constants: list[Tensor] = []
        self._known: dict[int, FollowedBatch] = {}
        self._sites: list[tuple[int, ref[Tensor], Hashable]] = []  # the size of a tensor, and where it was used
        self._totals: dict[int, Totals] = {}  # numbers that depend on all samples
        self.list_layouts: Callable[[int], Iterable[tuple[Tensor, Where]]] | None = None

    def find_sizes(self, tensor: Tensor) -> list[int]:
        """The batch sizes for which a tensor, or what it was made of, has samples."""
        return [size for size, known in self._known.items() if tensor in known]

    def get_totals(self, batch: int) -> Totals:
        """Numbers that were counted over all samples."""
        return self._totals.get(batch, {})

    def forget(self) -> None:
        """Forget what was found by sizes: the arguments of the model have other structures."""
        self._known.clear()
        self._totals.clear()

    # ---- calls ----

    def note_call(self, call: Call, result: Any, outside: OutsideTensors) -> None:
        """Note what a call makes."""
        if call.tensors:
            self._follow(call, result, outside)
        for size in self.reads if call.facts.imports_data else ():
            if (lost := outside.judge_import(result, size)) is not None:
                self._known[size][result] = lost

    def _follow(self, call: Call, result: Any, outside: OutsideTensors) -> None:
        """Find the layouts of the results."""
        for tensor in call.tensors:
            if tensor.dim() and not self.find_sizes(tensor):
                self._add(tensor, outside)
        results = find_results(result, call.args) if result is not None or call.is_inplace else ()
        for batch, known in self._known.items():
            where = tuple(known.get(tensor) for tensor in call.tensors)
            totals = self._totals.setdefault(batch, {})
            if call.facts.reads_values and any(where):
                self.reads.add(batch)
            if call.facts.reads_values:
                totals.update(find_read_total(call.tensors[0], where[0], result))
            if batch < 2 or not any(where) or not results:
                continue
            motion = find_motion(replace(call, where=where, batch=batch), results)
            for made, layout in zip(results, motion.results, strict=True):
                totals.update(find_listed_total(made, layout))
            known.note(call, results, motion.results, partial(_describe_place, call, known))

    def _add(self, tensor: Tensor, outside: OutsideTensors) -> None:
        """Take the size of a tensor from outside for the batch's, for now."""
        dim = outside.get_batch_dim(tensor)
        size = tensor.shape[dim]
        if outside.is_constant(tensor):
            return
        if (remembered := outside.remembered) is not None:
            if remembered.is_constant(tensor):
                return
            self._sites.append((size, ref(tensor), remembered.find_site(tensor)))
        if size in self._known or len(self._known) < _MAX_SIZES:
            self._known.setdefault(size, FollowedBatch(size))[tensor] = Layout(dim)

    # ---- the first call of the model ----

    def describe_repeats(self, arguments: Iterable[Tensor], batch: int) -> str:
        """For errors: which samples belong together, if the arguments have several rows for each row of other tensors.

        Such as augmentations, made by `repeat_interleave`, or the two halves of a batch of pairs, joined by `cat`.
        """
        for tensor in arguments:
            for size, known in self._known.items():
                where, rows = known.get(tensor), batch // max(1, size)
                if not (isinstance(where, Layout) and where.is_pattern and where.inner in (1, rows)):
                    continue
                if 1 < size < batch and batch % size == 0:
                    units = str(rows) if where.inner == rows else f"torch.arange({size}).repeat({rows})"
                    return (
                        f" The {batch} samples were made of {size}, {rows} of each; if the samples of each belong "
                        f"together, pass units={units}."
                    )
        return ""

    def take(self, arguments: Iterable[Tensor], batch: int, outside: OutsideTensors) -> Iterator[tuple[Tensor, Where]]:
        """The tensors whose layouts are known now that the model is called with these arguments.

        If all arguments have the samples in another order than the tensors from outside (`x[torch.randperm(n)]`), the
        samples are counted in the order of the arguments.
        """
        if self.list_layouts is not None:
            self.reads.clear()
            yield from self.list_layouts(batch)
            return
        for size, found, site in self._sites:
            tensor = found()
            if outside.remembered is not None and size != batch and tensor is not None:
                outside.remembered.note_constant(tensor, site)
        known = self._known.get(batch) or FollowedBatch(batch)
        orders = {
            where.get_ids(t.shape[where.dim], batch)
            for t in arguments
            if isinstance(where := known.get(t), Layout) and t.dim() > where.dim
        }
        order, rows = next(iter(orders)) if len(orders) == 1 else (), tuple(range(batch))
        if order == rows or sorted(order) != [*rows]:
            yield from known.items()
            return
        self.order = tuple(map(order.index, rows))
        for tensor, where in known.renumber(order):
            if isinstance(own := known.get(tensor), Layout) and own.loose_index:  # the order is the batch's own now
                self.constants.append(tensor)
            else:
                yield tensor, where


def _describe_place(call: Call, known: TensorMap[Where]) -> str:
    found = [(tuple(t.shape), where.dim) for t in call.tensors if isinstance(where := known.get(t), Layout)]
    return f"{BEFORE} ({describe_readings(dict.fromkeys(found))})"


def describe_readings(assumed: Iterable[tuple[tuple[int, ...], int]]) -> str:
    """Both readings of some tensors, given by their shapes and batch dimensions, for an error message."""
    parts = [
        f"the tensor of shape {shape} has the batch's size in dimension {dim} and was taken as one row per sample"
        for shape, dim in list(assumed)[:3]
    ]
    return "; ".join([*parts, "if it is the same for all samples, pass it in constants="])
