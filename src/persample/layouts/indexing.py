"""Calls in the form `base[item]` or `base[item] = value`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from persample.layouts.call import Call
from persample.layouts.ids import make_sample_ids
from persample.layouts.layout import Layout, Where

# The arguments of each indexing function, by the function's name without a trailing underscore.
_ARGUMENTS: dict[str, tuple[str, ...]] = {
    "__getitem__": ("input", "item"),
    "index_select": ("input", "dim", "index"),
    "gather": ("input", "dim", "index"),
    "take_along_dim": ("input", "index", "dim"),
    "masked_select": ("input", "item"),
    "repeat_interleave": ("input", "repeats", "dim"),
    "__setitem__": ("input", "item", "value"),
    "copy_": ("input", "value"),
    "index_copy": ("input", "dim", "index", "value"),
    "index_add": ("input", "dim", "index", "value"),
    "index_fill": ("input", "dim", "index", "value"),
    "index_reduce": ("input", "dim", "index", "value", "reduce"),
    "index_put": ("input", "item", "value", "accumulate"),
    "scatter": ("input", "dim", "index", "value"),
    "scatter_add": ("input", "dim", "index", "value"),
    "scatter_reduce": ("input", "dim", "index", "value", "reduce"),
    "masked_scatter": ("input", "item", "value"),
}

# Other names that torch uses for these arguments.
_SYNONYMS = {"mask": "item", "indices": "index", "source": "value", "src": "value", "values": "value"}


@dataclass(frozen=True)
class Selection:
    """The entries that an item selects from a base.

    Attributes:
        selected_by: for each entry of `base[item]` the sample whose index selects it; -1 if no sample provides the
            index, and the batch size if indices of several samples do.
        dims: the dimensions of the base that are indexed by tensors.
        loose: whether an index has loose rows.
        loose_index: whether an index consists of indices of loose rows.
        by_mask: whether a mask of samples selects only some entries.
    """

    selected_by: Tensor
    dims: frozenset[int]
    loose: bool
    loose_index: bool
    by_mask: bool

    def has_conflict(self, batch: int) -> bool:
        """Whether indices of several samples select one entry."""
        return bool((self.selected_by == batch).any())


class Indexing:
    """A call in the form `base[item]`, or `base[item] = value`.

    Attributes:
        writes: whether the call writes `value` into `base`.
        adds: whether it adds to the entries that are there, or combines them in another way.
        in_order: whether it uses the entries of `value` one after the other, as `masked_scatter` does.
    """

    def __init__(self, call: Call) -> None:
        self.call = call
        self._layouts = {id(t): where for t, where in call.pairs}
        name = call.facts.operator
        given = dict(zip(_ARGUMENTS[name], call.args, strict=False)) | call.kwargs
        arguments = {_SYNONYMS.get(key, key): value for key, value in given.items()}
        self.base: Tensor = arguments["input"]
        self.value = arguments.get("value")
        self.writes = "value" in _ARGUMENTS[name]
        is_sum = name in ("index_add", "scatter_add")
        self.adds = is_sum or bool(arguments.get("accumulate")) or "reduce" in arguments
        self.in_order = name == "masked_scatter"
        self.kept_dims: frozenset[int] = frozenset()  # dimensions in which an entry keeps its index
        self.item = self._make_item(name, arguments)

    def get_layout(self, tensor: Any) -> Where | None:
        """Where the samples lie in the base, the value or a part of the item."""
        return self._layouts.get(id(tensor))

    def _make_item(self, name: str, arguments: dict[str, Any]) -> tuple[Any, ...]:
        if name == "copy_":
            return (...,)
        if name in ("masked_select", "masked_scatter"):
            mask = arguments["item"]
            return (self._add_view(mask.expand(self.base.shape), mask),)
        if "item" in arguments:
            item = arguments["item"]
            # x[0, 2] has an item of two parts, x[[0, 2]] of one.
            has_parts = isinstance(item, tuple) or (isinstance(item, list) and name == "index_put")
            return tuple(item) if has_parts else (item,)
        if arguments.get("dim") is None:
            raise NotImplementedError("an index into the flattened tensor is not supported")
        dim = arguments["dim"] % max(1, self.base.dim())
        if name == "repeat_interleave":
            return (*[slice(None)] * dim, self._make_repeat_index(arguments["repeats"]))
        index = arguments["index"]
        if name in ("index_select", "index_copy", "index_add", "index_fill", "index_reduce"):
            return (*[slice(None)] * dim, self._add_view(index.reshape(-1), index))
        if name == "take_along_dim":
            shape = [index.shape[d] if d == dim else self.base.shape[d] for d in range(self.base.dim())]
            index = self._add_view(index.expand(shape), index)
        if self.writes and isinstance(self.value, Tensor) and self.value.dim():
            part = tuple(slice(size) for size in index.shape)
            self.value = self._add_view(self.value[part], self.value)
        grid = [torch.arange(size, device=index.device) for size in index.shape]
        self.kept_dims = frozenset(range(index.dim())) - {dim}
        return tuple(index if d == dim else row.view(-1, *[1] * (index.dim() - d - 1)) for d, row in enumerate(grid))

    def _add_view(self, view: Tensor, tensor: Tensor) -> Tensor:
        """Set the layout of a view of `tensor` that has more dimensions in front, or is cut at its ends."""
        where = self.get_layout(tensor)
        if isinstance(where, Layout):
            where = replace(where, dim=where.dim + view.dim() - tensor.dim()) if tensor.dim() else where
        self._layouts[id(view)] = where
        return view

    def _make_repeat_index(self, repeats: Tensor) -> Tensor:
        """The index by which `repeat_interleave` selects rows."""
        index = torch.arange(len(repeats), device=repeats.device).repeat_interleave(repeats)
        where = self.get_layout(repeats)
        if isinstance(where, Layout):
            ids = make_sample_ids(repeats, where, self.call.batch)[index]
            self._layouts[id(index)] = Layout(0, ids=tuple(ids.tolist()), loose=True)
        return index

    def iterate_parts(self) -> Iterator[Any]:
        """The parts of the item, with slices in place of `...` and tensors in place of lists."""
        parts = [torch.tensor(p, device=self.base.device) if isinstance(p, (list, range)) else p for p in self.item]
        if any(isinstance(p, bool) or (isinstance(p, Tensor) and is_mask(p) and not p.dim()) for p in parts):
            raise NotImplementedError("a bool as an index is not supported")
        indexing = [p for p in parts if p is not None and p is not ...]
        dims = sum(p.dim() if isinstance(p, Tensor) and is_mask(p) else 1 for p in indexing)
        for part in parts:
            if part is ...:
                yield from [slice(None)] * (self.base.dim() - dims)
            else:
                yield part

    def find_selection(self) -> Selection:
        """Which samples select the entries of `base[item]`."""
        parts: list[Any] = []
        dims: list[int] = []
        selected_by = torch.full((), -1, dtype=torch.int32, device=self.base.device)  # for each entry of the indices
        layouts: list[Layout] = []
        by_mask = False
        for part in self.iterate_parts():
            if not isinstance(part, Tensor):
                parts.append(part)
                continue
            where = self.get_layout(part)
            indices: Sequence[Tensor] = (part,)
            owner = make_sample_ids(part, where, self.call.batch)
            if is_mask(part):
                indices, owner = part.nonzero(as_tuple=True), owner[part.bool()]
                by_mask |= isinstance(where, Layout) and not bool(part.all())  # a mask of all rows keeps their order
            agrees = (owner < 0) | (owner == selected_by)
            selected_by = torch.where(selected_by < 0, owner, torch.where(agrees, selected_by, self.call.batch))
            layouts += [where] if isinstance(where, Layout) else []
            before = sum(p is not None for p in parts)
            dims += range(before, before + len(indices))
            parts += indices
        if dims:
            selected_by = selected_by.flatten()[self._find_index_entries(parts, dims[0], selected_by.shape)]
        loose = any(where.loose for where in layouts)
        loose_index = any(where.loose_index for where in layouts)
        return Selection(selected_by, frozenset(dims) - self.kept_dims, loose, loose_index, by_mask)

    def _find_index_entries(self, parts: Sequence[Any], dim: int, shape: torch.Size) -> Tensor:
        """For each entry of `base[item]` the number of the index entry that selects it.

        `shape` is the shape of the indices. The first index is replaced by numbers 0, 1, ..., and all others by zeros.
        This item is applied to a tensor that holds its own index along `dim`, the dimension of the first index.
        """
        numbers = torch.arange(shape.numel(), device=self.base.device).view(shape)
        first = next(i for i, part in enumerate(parts) if isinstance(part, Tensor))
        item = [torch.zeros_like(numbers) if isinstance(part, Tensor) else part for part in parts]
        item[first] = numbers
        sizes = list(self.base.shape)
        sizes[dim] = max(1, shape.numel())
        along = torch.arange(sizes[dim], device=self.base.device).view(-1, *[1] * (len(sizes) - dim - 1))
        return along.expand(sizes)[tuple(item)]


def is_mask(index: Tensor) -> bool:
    return index.dtype in (torch.bool, torch.uint8)
