"""Tensors from outside the model that a recording meets in the code around the model: targets, masks, weights.

Such a tensor is taken for one row per sample if it has the batch's size in its batch dimension. Otherwise it is a
constant, and so are the parameters and buffers of modules, tensors that the user declares, and everything that is
computed from constants alone.

Before the model is called for the first time, the batch size is not known. Until then, ops are followed for each
size that a tensor from outside has in its batch dimension. The call of the model decides which of them is the batch's.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary, ref

from torch import Tensor, nn

from persample import _torch
from persample._internal.functions import find_results
from persample._internal.precision import INDEX_DTYPES
from persample._internal.tree import find_tensors
from persample.forward.known_tensors import TensorMap
from persample.forward.remembered import RememberedConstants, find_site
from persample.layouts import (
    Call,
    Layout,
    Lost,
    SizesRead,
    Totals,
    Where,
    find_listed_total,
    find_motion,
    find_read_total,
    make_layout,
)

_BEFORE = "the code before the call of the model"
_MAX_SIZES = 8  # batch sizes that are followed before the model is called


class OutsideTensors:
    """What a tracker knows about tensors that do not come from its model.

    Args:
        model: the model; its parameters and buffers are constants.
        batch_dim: the batch dimension of tensors from outside; for tensors that have fewer dimensions it is 0.
        constants: tensors that are the same for all samples.
        is_block: whether all code from the preparation of the batch to the loss is seen.
        remembered: which tensors were constants in batches of other sizes; None: sizes alone decide.
    """

    def __init__(
        self,
        model: nn.Module | None,
        batch_dim: int = 0,
        constants: Iterable[Tensor] = (),
        is_block: bool = False,
        remembered: RememberedConstants | None = None,
    ) -> None:
        self.remembered = remembered
        self._model = None if model is None else ref(model)  # the tracker must not keep its model
        self._batch_dim = batch_dim
        self._constants: TensorMap[bool] = TensorMap()
        for tensor in constants:
            self._constants[tensor] = True
        self._assumed: dict[tuple[tuple[int, ...], int], None] = {}  # shapes and dimensions, in order
        self._drawn: TensorMap[bool] = TensorMap()  # random numbers, which may be the samples of a generator
        self._taken: TensorMap[bool] = TensorMap()  # the tensors that were taken for samples
        self._order: tuple[int, ...] | None = None  # the sample of each row of a tensor from outside; None: row n is n
        # What is known by other means of the tensors before the call of the model, for a batch size.
        self._list_layouts_before: Callable[[int], Iterable[tuple[Tensor, Where]]] | None = None
        self._early: dict[int, TensorMap[Where]] | None = {}  # by batch size; None once the model was called
        self._early_sites: list[tuple[int, ref[Tensor], Hashable]] = []  # the size of a tensor, and where it was used
        self._early_totals: dict[int, Totals] = {}  # by batch size: numbers that depend on all samples
        self._early_reads: set[int] = set()  # batch sizes for which values of samples were read
        self._counted: TensorMap[Lost] = TensorMap()  # tensors of numbers, which may have been counted among samples
        self.sizes: set[int] | None = set() if is_block else None  # that the code around the model has read
        self.has_reads = False  # whether the code around the model has read values of samples as numbers

    def declare_before(self, list_layouts: Callable[[int], Iterable[tuple[Tensor, Where]]]) -> None:
        """Set what lists, for a batch size, the layouts of tensors that are known before the call of the model."""
        self._list_layouts_before = list_layouts

    # ---- tensors from outside ----

    def find_layout(self, tensor: Tensor, batch: int) -> Layout | None:
        """Where the samples lie in a tensor from outside; None if it is a constant."""
        if tensor in self._constants:
            return None
        dim = self.find_dim(tensor, batch)
        if dim is None and self.remembered is not None and tensor.dim():
            self.remembered.note_constant(tensor)
        if dim is None or self._is_constant(tensor):
            return None
        if self.remembered is not None and self.remembered.is_constant(tensor):
            self._constants[tensor] = True
            return None
        self._assumed[tuple(tensor.shape), dim] = None
        self._taken[tensor] = True
        return self.reorder(Layout(dim))

    def reorder(self, layout: Layout) -> Layout:
        """The layout of a tensor from outside, given the one that it would have if its row n were sample n's."""
        if self._order is None or layout.ids is not None or layout.inner != 1:
            return layout
        return make_layout(layout.dim, self._order, len(self._order))

    def read_class_weights(self, call: Call) -> Call:
        """The same call, in which a tensor from outside that has an entry for each class is a constant."""
        weight = call.kwargs.get(call.facts.class_weights)
        if not isinstance(weight, Tensor) or weight not in self._taken:
            return call
        read = self._counted.get(weight)
        where = [read if t is weight else w for t, w in zip(call.tensors, call.where, strict=True)]
        return replace(call, where=tuple(where))

    def read_indices(self, call: Call) -> Call:
        """The same call, in which an index that was made from Python numbers or by numpy is a constant.

        Whatever decided which rows it selects, such as a matching, the samples of the selected rows are known.
        """
        if not (call.facts.picks_entries or call.facts.writes_entries):
            return call
        value = call.args[-1] if call.facts.writes_entries else None
        where = [
            None if i and t is not value and t.dtype in INDEX_DTYPES and self._is_imported(t, w) else w
            for i, (t, w) in enumerate(zip(call.tensors, call.where, strict=True))
        ]
        return replace(call, where=tuple(where))

    def _is_imported(self, tensor: Tensor, where: Where | None) -> bool:
        return tensor in self._counted or (isinstance(where, Lost) and where.imported)

    def add_constant(self, tensor: Tensor) -> None:
        """Note that a tensor is the same for all samples."""
        self._constants[tensor] = True

    def was_taken(self, tensor: Tensor) -> bool:
        """Whether a tensor was taken for samples because of its size."""
        return tensor in self._taken

    def is_declared(self, tensor: Tensor) -> bool:
        """Whether a tensor, or the tensor that it is a view of, is known to be the same for all samples."""
        return tensor in self._constants or (tensor._base is not None and tensor._base in self._constants)

    def is_drawn(self, tensor: Tensor) -> bool:
        """Whether a constant consists of random numbers: a part of the model may be called with them as samples."""
        return tensor in self._drawn

    def describe_assumed(self) -> str:
        """Which tensors were taken for samples because of their sizes, for an error message; empty if none was."""
        return f" ({_describe(self._assumed)})" if self._assumed else ""

    def find_dim(self, tensor: Tensor, batch: int) -> int | None:
        """The batch dimension of a tensor from outside, None if it has another size there."""
        dim = self._get_batch_dim(tensor)
        return dim if tensor.dim() > dim and tensor.shape[dim] == batch else None

    def _get_batch_dim(self, tensor: Tensor) -> int:
        return self._batch_dim if tensor.dim() > self._batch_dim else 0

    def _is_constant(self, tensor: Tensor) -> bool:
        """Whether a tensor was declared, or belongs to the model or to a module that is running."""
        if self.is_declared(tensor):
            return True
        if self.is_held(tensor):
            self._constants[tensor] = True
            return True
        return False

    def is_held(self, tensor: Tensor) -> bool:
        """Whether a tensor is a parameter, a buffer or an attribute of the model, or of a module that is running."""
        base = tensor if tensor._base is None else tensor._base
        model = None if self._model is None else self._model()
        if isinstance(tensor, nn.Parameter) or (model is not None and _has_buffer(model, base)):
            return True
        return any(_holds(module, base) for module in _torch.iterate_running_modules())

    def note_size(self, func: Any, args: Any, found: Any, known: TensorMap[tuple[Where | None, bool]]) -> SizesRead:
        """Note what a function has returned that reads the shape of a tensor outside the model; returns the sizes.

        `known` has the layouts of tensors.
        """
        sizes = frozenset((found,) if type(found) is int else found if isinstance(found, tuple) else ())
        if self.sizes is not None:
            self.sizes |= sizes
        entry = known.get(args[0]) if func is Tensor.size and len(args) == 2 else None
        where = entry[0] if entry is not None else None
        is_own = isinstance(where, Layout) and args[1] % args[0].dim() != where.dim
        return SizesRead(own=sizes) if is_own else SizesRead(sizes)

    # ---- calls without samples and weights ----

    def note_call(self, call: Call, result: Any, batch: int, is_inside: bool) -> None:
        """Note what a call without samples and weights makes."""
        if self._early is not None and not batch:
            if call.tensors:
                self._follow_early(call, result)
            for size in self._early_reads if call.facts.imports_data else ():
                if (lost := self.judge_import(result, size)) is not None:
                    self._early[size][result] = lost
        if call.facts.imports_data:
            return
        is_drawn = not is_inside and (call.facts.is_random or any(tensor in self._drawn for tensor in call.tensors))
        for made in find_tensors(result):
            if is_drawn:
                self._drawn[made] = True
            if is_inside and batch and self.find_dim(made, batch) is None:
                continue  # it is a constant by its size, and what the model makes of it is not judged
            if is_inside or all(map(self._is_constant, call.tensors)):
                self._constants[made] = True

    def judge_import(self, imported: Tensor, batch: int) -> Lost | None:
        """A tensor that was made from numbers after values of samples were read as numbers may be a statistic of them.

        Class weights may be counted by Python code. One row per sample is taken for what each sample has itself.
        """
        if not imported.dim():
            return None
        lost = Lost(
            f"a tensor of shape {tuple(imported.shape)} was made from Python numbers after values of the samples had "
            "been read as numbers (item, tolist, numpy), and may depend on all of them; compute it by torch functions "
            "or before the block, or pass it in constants=",
            imported=True,
        )
        if self.find_dim(imported, batch) is None:
            return lost
        self._counted[imported] = lost  # if it is used as class weights
        return None

    # ---- before the model is called ----

    def find_sizes(self, tensors: Iterable[Tensor]) -> dict[int, Tensor]:
        """The sizes that the batch may have according to these tensors, each with a tensor that shows it."""
        found: dict[int, Tensor] = {}
        for tensor in tensors:
            sizes = self.find_early_sizes(tensor)
            is_open = tensor in self._drawn or not self._is_constant(tensor)
            if tensor.dim() and (sizes or tensor.grad_fn is None) and is_open:
                sizes.append(tensor.shape[self._get_batch_dim(tensor)])
            found |= dict.fromkeys(sizes, tensor)
        return found

    def find_early_sizes(self, tensor: Tensor) -> list[int]:
        """Before the model is called: the batch sizes for which a tensor, or what it was made of, has samples."""
        return [size for size, known in (self._early or {}).items() if tensor in known]

    def _follow_early(self, call: Call, result: Any) -> None:
        """Find the layouts of the results, for each size that the batch may have."""
        assert self._early is not None
        for tensor in call.tensors:
            if tensor.dim() and not any(tensor in known for known in self._early.values()):
                self._add_early(tensor)
        results = find_results(result, call.args) if result is not None or call.is_inplace else ()
        for batch, known in self._early.items():
            where = tuple(known.get(tensor) for tensor in call.tensors)
            totals = self._early_totals.setdefault(batch, {})
            if call.facts.reads_values and any(where):
                self._early_reads.add(batch)
            if call.facts.reads_values:
                totals.update(find_read_total(call.tensors[0], where[0], result))
            if batch < 2 or not any(where) or not results:
                continue
            motion = find_motion(replace(call, where=where, batch=batch), results)
            for made, layout in zip(results, motion.results, strict=True):
                if isinstance(layout, Lost) and not layout.place:
                    layout = replace(layout, place=f"{_BEFORE} ({_describe(_list_assumed(call, known))})")
                if layout is not None:
                    known[made] = layout
                totals.update(find_listed_total(made, layout))
                if call.is_inplace and isinstance(layout, Lost) and made._base is not None:
                    known[made._base] = layout

    def _add_early(self, tensor: Tensor) -> None:
        """Take the size of a tensor from outside for the batch's, for now."""
        assert self._early is not None
        dim = self._get_batch_dim(tensor)
        size = tensor.shape[dim]
        if self._is_constant(tensor):
            return
        if self.remembered is not None:
            if self.remembered.is_constant(tensor):
                return
            self._early_sites.append((size, ref(tensor), find_site(tensor)))
        if size in self._early or len(self._early) < _MAX_SIZES:
            self._early.setdefault(size, TensorMap())[tensor] = Layout(dim)

    def forget_early(self) -> None:
        """Forget what was found by sizes before the first call of the model, whose arguments have other structures."""
        self._early = {} if self._early is not None else None
        self._early_totals.clear()

    def get_early_totals(self, batch: int) -> Totals:
        """Numbers that the code before the first call of the model has counted over all samples."""
        return self._early_totals.get(batch, {})

    def describe_repeats(self, arguments: Iterable[Tensor], batch: int) -> str:
        """For errors: which samples belong together, if the arguments have several rows for each row of other tensors.

        Such as augmentations, made by `repeat_interleave`, or the two halves of a batch of pairs, joined by `cat`.
        """
        for tensor in arguments:
            for size, known in (self._early or {}).items():
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

    def take_early(self, arguments: Iterable[Tensor], batch: int) -> Iterator[tuple[Tensor, Where]]:
        """The tensors whose layouts were found before the first call of the model, which has these arguments.

        If all arguments have the samples in another order than the tensors from outside (`x[torch.randperm(n)]`), the
        samples are counted in the order of the arguments.
        """
        if self._early is None:
            return
        if self._list_layouts_before is not None:
            self._early, found_before = None, self._list_layouts_before
            self._list_layouts_before = None
            yield from found_before(batch)
            return
        known = self._early.get(batch)
        self._early = None
        for size, found, site in self._early_sites:
            tensor = found()
            if self.remembered is not None and size != batch and tensor is not None:
                self.remembered.note_constant(tensor, site)
        self._early_sites.clear()
        self.has_reads = batch in self._early_reads
        if known is None:
            return
        orders = {
            where.get_ids(t.shape[where.dim], batch)
            for t in arguments
            if isinstance(where := known.get(t), Layout) and t.dim() > where.dim
        }
        order = next(iter(orders)) if len(orders) == 1 else ()
        new_number = {sample: n for n, sample in enumerate(order)}
        is_reordered = order != tuple(range(batch)) and len(order) == len(new_number) == batch and -1 not in order
        if is_reordered:
            self._order = tuple(new_number[n] for n in range(batch))
        for tensor, where in list(known.items()):
            if is_reordered and isinstance(where, Layout) and tensor.dim() > where.dim:
                if where.loose_index:  # the order is the batch's own now
                    self._constants[tensor] = True
                    continue
                before = where.get_ids(tensor.shape[where.dim], batch)
                ids = tuple(new_number.get(n, -1) for n in before)
                where = make_layout(where.dim, ids, batch, where.loose and before != order)
            yield tensor, where


# For each model, the dicts in which its modules keep their buffers. Buffers may be replaced. The buffers of a module
# that gets its first one later are not known, and judged by their sizes.
_buffers: WeakKeyDictionary[nn.Module, list[dict[str, Tensor | None]]] = WeakKeyDictionary()


def _has_buffer(model: nn.Module, tensor: Tensor) -> bool:
    """Whether a tensor is a buffer of a model, or an attribute of the model itself."""
    found = _buffers.get(model)
    if found is None:
        found = _buffers[model] = [own for module in model.modules() if (own := _torch.get_buffers(module))]
    return any([value is tensor for own in found for value in own.values()]) or _holds(model, tensor)


def _holds(module: nn.Module, tensor: Tensor) -> bool:
    """Whether a tensor is a buffer or another attribute of a module."""
    own = [*_torch.get_buffers(module).values(), *vars(module).values()]
    return any([value is tensor for value in own])


def _list_assumed(call: Call, known: TensorMap[Where]) -> list[tuple[tuple[int, ...], int]]:
    found = [(tuple(t.shape), where.dim) for t in call.tensors if isinstance(where := known.get(t), Layout)]
    return list(dict.fromkeys(found))


def _describe(assumed: Iterable[tuple[tuple[int, ...], int]]) -> str:
    """Both readings of some tensors, given by their shapes and batch dimensions, for an error message."""
    parts = [
        f"the tensor of shape {shape} has the batch's size in dimension {dim} and was taken as one row per sample"
        for shape, dim in list(assumed)[:3]
    ]
    return "; ".join([*parts, "if it is the same for all samples, pass it in constants="])
