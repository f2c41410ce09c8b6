"""How an op moves the samples that puts entries where an index says; and whose index it is.

Every such op is `source[item]` or `base[item] = value` (or `+=`), with an item of slices, masks and tensors of indices.
The numbers of the samples are moved in the same way. Where the samples themselves give the index or the mask, each may
choose among its own entries only: the owner of an entry and of the index that chose it must be the same.

Rows that a mask picked, or a sort ordered, are *loose*: at which index they stand depends on everybody. An index of
such rows (the `places` of a sort's inverse, `nonzero` of a loose mask) may be used for them alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from persample._internal import tracing
from persample.errors import op_name
from persample.layouts.call import Op
from persample.layouts.layout import Layout, Lost, Where, from_ids, sample_ids
from persample.layouts.motion import Motion

# Of each function that goes by an index: the names of its arguments.
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
    "index_put": ("input", "item", "value", "accumulate"),
    "scatter": ("input", "dim", "index", "value"),
    "scatter_add": ("input", "dim", "index", "value"),
    "scatter_reduce": ("input", "dim", "index", "value", "reduce"),
    "masked_scatter": ("input", "item", "value"),
}
_OTHER_NAMES = {"mask": "item", "indices": "index", "source": "value", "src": "value", "values": "value"}


@dataclass(frozen=True)
class Chosen:
    """The entries that an item chose of a tensor: who told it to (-1: nobody), and along which dims."""

    told: Tensor
    dims: frozenset[int]
    loose: bool
    places: bool
    by_mask: bool


class Indexing:
    """A call in its normal form: `base[item]`, or `base[item] = value`."""

    def __init__(self, op: Op) -> None:
        self.op = op
        self.owner = {id(t): where for t, where in zip(op.tensors, op.where, strict=True)}
        name = op_name(op.func)
        name = name if name in _ARGUMENTS else name.rstrip("_")
        given = dict(zip(_ARGUMENTS[name], op.args, strict=False)) | op.kwargs
        call = {_OTHER_NAMES.get(key, key): value for key, value in given.items()}
        self.base: Tensor = call["input"]
        self.value = call.get("value")
        self.writes = "value" in _ARGUMENTS[name]
        self.adds = name in ("index_add", "scatter_add") or bool(call.get("accumulate")) or "reduce" in call
        self.in_order = name == "masked_scatter"  # the value's entries are used up one after the other
        self.item = self._item(name, call)

    def _item(self, name: str, call: dict[str, Any]) -> tuple[Any, ...]:
        if name == "copy_":
            return (...,)
        if name in ("masked_select", "masked_scatter"):
            return (self._known(call["item"].expand(self.base.shape), call["item"]),)
        if "item" in call:
            item = call["item"]
            return tuple(item) if isinstance(item, (tuple, list)) and _is_nested(item, name) else (item,)
        if call.get("dim") is None:
            raise NotImplementedError("an index of the flattened tensor")
        dim = call["dim"] % max(1, self.base.dim())
        if name == "repeat_interleave":
            return (*[slice(None)] * dim, self._repeated(call["repeats"]))
        index = call["index"]
        if name in ("index_select", "index_copy", "index_add"):
            return (*[slice(None)] * dim, self._known(index.reshape(-1), index))
        if name == "take_along_dim":
            shape = [index.shape[d] if d == dim else self.base.shape[d] for d in range(self.base.dim())]
            index = self._known(index.expand(shape), index)
        if self.writes and isinstance(self.value, Tensor) and self.value.dim():
            part = tuple(slice(size) for size in index.shape)
            self.value = self._known(self.value[part], self.value)
        grid = [torch.arange(size, device=index.device) for size in index.shape]
        return tuple(
            index if d == dim else row.view(-1, *[1] * (index.dim() - d - 1)) for d, row in enumerate(grid)
        )

    def _known(self, made: Tensor, like: Tensor) -> Tensor:
        """A tensor of the same samples as `like`, of which it is a view: grown in front, or cut at its ends."""
        where = self.owner.get(id(like))
        if isinstance(where, Layout):
            where = replace(where, dim=where.dim + made.dim() - like.dim()) if like.dim() else where
        self.owner[id(made)] = where
        return made

    def _repeated(self, repeats: Any) -> Tensor:
        size = len(repeats)
        index = torch.arange(size, device=repeats.device).repeat_interleave(repeats)
        where = self.owner.get(id(repeats))
        if isinstance(where, Layout):
            ids = sample_ids(repeats, where, self.op.batch)[index]
            self.owner[id(index)] = Layout(0, ids=tuple(ids.tolist()), loose=True)
        return index

    def chosen(self) -> Chosen:
        """Who chose each entry of `base[item]`."""
        parts: list[Any] = []
        dims: list[int] = []  # of the base, that indices go along
        told = torch.full((), -1, dtype=torch.int32, device=self.base.device)  # of each entry of the indices
        kinds: list[Layout] = []
        by_mask = False
        for part in self._spelled_out():
            if not isinstance(part, Tensor):
                parts.append(part)
                continue
            where = self.owner.get(id(part))
            indices: Sequence[Tensor] = (part,)
            owner = sample_ids(part, where, self.op.batch)
            if _is_mask(part):
                indices, owner = part.nonzero(as_tuple=True), owner[part.bool()]
                by_mask |= isinstance(where, Layout) and not bool(part.all())  # who all stay, stay in their places
            told = torch.where(told < 0, owner, torch.where((owner < 0) | (owner == told), told, self.op.batch))
            kinds += [where] if isinstance(where, Layout) else []
            before = sum(p is not None for p in parts)
            dims += range(before, before + len(indices))
            parts += indices
        if dims:
            told = told.flatten()[self._numbers_of_index(parts, dims[0], told.shape)]
        return Chosen(told, frozenset(dims), any(w.loose for w in kinds), any(w.places for w in kinds), by_mask)

    def _numbers_of_index(self, parts: Sequence[Any], dim: int, shape: torch.Size) -> Tensor:
        """For each entry of `base[item]` the number of the entry of the indices that chose it.

        Found by choosing in the same way, with the numbers for the first index, from a tensor that has them along the
        dim that this index goes along; all other indices are zeros.
        """
        numbers = torch.arange(shape.numel(), device=self.base.device).view(shape)
        first = next(i for i, part in enumerate(parts) if isinstance(part, Tensor))
        item = [torch.zeros_like(numbers) if isinstance(part, Tensor) else part for part in parts]
        item[first] = numbers
        sizes = list(self.base.shape)
        sizes[dim] = max(1, shape.numel())
        along = torch.arange(sizes[dim], device=self.base.device).view(-1, *[1] * (len(sizes) - dim - 1))
        return along.expand(sizes)[tuple(item)]

    def _spelled_out(self) -> Iterator[Any]:
        """The parts of the item, with `...` as slices and lists as tensors."""
        parts = [torch.tensor(p, device=self.base.device) if isinstance(p, (list, range)) else p for p in self.item]
        if any(isinstance(p, bool) or (isinstance(p, Tensor) and _is_mask(p) and not p.dim()) for p in parts):
            raise NotImplementedError("a single truth value as an index")
        named = [p for p in parts if p is not None and p is not ...]
        dims = sum(p.dim() if isinstance(p, Tensor) and _is_mask(p) else 1 for p in named)
        for part in parts:
            if part is ...:
                yield from [slice(None)] * (self.base.dim() - dims)
            else:
                yield part


def _is_mask(index: Tensor) -> bool:
    return index.dtype in (torch.bool, torch.uint8)


def _is_nested(item: Sequence[Any], name: str) -> bool:
    """Whether a sequence is an item of several parts; `x[[0, 2]]` is one of a single part."""
    return name == "index_put" or isinstance(item, tuple)


UNKNOWN_VALUES = "puts samples where values say that are not known when a step is compiled"


def by_index(op: Op) -> Motion:
    """How the samples move in an op that goes by an index."""
    call = Indexing(op)
    trace = tracing.get_trace()
    if trace is not None and _depends_on(call, trace):
        return Motion((_masked(call) or Lost(f"{op_name(op.func)} {UNKNOWN_VALUES}"),))
    return Motion((_written(call) if call.writes else _picked(call),), by_values=True)


def _depends_on(call: Indexing, trace: tracing.Trace) -> bool:
    """Whether made-up values say whose an entry is: a mask, or an index along the samples."""
    owners = [call.owner.get(id(t)) for t in (call.base, call.value) if isinstance(t, Tensor)]
    along: set[int] = set()  # the dims that must not go by such values
    dim = 0
    for part in call._spelled_out():
        if isinstance(part, Tensor) and trace.is_invented(part):
            if _is_mask(part):
                return True
            along.add(dim)
            owners += [call.owner.get(id(part))] if call.writes else []
        dim += part.dim() if isinstance(part, Tensor) and _is_mask(part) else part is not None
    if call.writes and not op_name(call.op.func).startswith("scatter"):  # what is written has a shape of its own
        return bool(along) and any(isinstance(where, Layout) for where in owners[1:])
    return any(isinstance(where, Layout) and where.dim in along for where in owners)


def _masked(call: Indexing) -> Layout | None:
    """Where the samples stay, whatever a mask says, if one constant is written over entries of their own."""
    (mask,) = call.item if len(call.item) == 1 else (None,)
    where = call.owner.get(id(call.base))
    one = not isinstance(call.value, Tensor) or (call.value.numel() == 1 and call.owner.get(id(call.value)) is None)
    if not (call.writes and one and isinstance(mask, Tensor) and _is_mask(mask) and isinstance(where, Layout)):
        return None
    says = call.owner.get(id(mask))
    own = isinstance(says, Layout) and (says.dim, says.inner, says.ids) == (where.dim, where.inner, where.ids)
    return where if (says is None or own) and not where.loose else None


def _mixed(op: Op, cause: str) -> Lost:
    shapes = ", ".join(str(tuple(t.shape)) for t in op.tensors)
    return Lost(f"{op_name(op.func)} of {shapes} {cause}")


def _picked(call: Indexing) -> Where | None:
    source = call.owner.get(id(call.base))
    chosen = call.chosen()
    moved = sample_ids(call.base, source, call.op.batch)[call.item]
    if not _fits(source, chosen):
        return _mixed(call.op, "goes by places that depend on other samples")
    if _disagree(moved, chosen.told) or _several(chosen, call.op.batch):
        return _mixed(call.op, "lets samples choose entries of others")
    owner = torch.where(moved < 0, chosen.told, moved)
    return _layout(owner, call.op.batch, chosen.loose or chosen.by_mask, isinstance(source, Layout) and source.places)


def _written(call: Indexing) -> Where | None:
    batch = call.op.batch
    where = call.owner.get(id(call.base))
    value = call.value if isinstance(call.value, Tensor) else None
    given = call.owner.get(id(value))
    chosen = call.chosen()
    covered = torch.zeros(call.base.shape, dtype=torch.bool, device=call.base.device)
    covered[call.item] = True
    told = bool((chosen.told >= 0).any())
    if isinstance(where, Layout) and where.loose and not told and not _in_all_rows(where, covered, value, given):
        return _mixed(call.op, "writes to the places of rows that depend on all samples")
    if not call.adds and bool(covered.all()):  # nothing is left of what was there
        where = None
    base = sample_ids(call.base, where, batch).clone()
    before = base[call.item]
    if before.numel() == 0 and where is not None:  # nothing is written
        return where
    ids = sample_ids(value, given, batch) if value is not None else torch.full_like(before, -1)
    if call.in_order:
        ids = base.masked_scatter(call.item[0], ids)[call.item]
    ids = ids.expand_as(before)
    if not _fits(where, chosen):
        return _mixed(call.op, "goes by places that depend on other samples")
    mixes = _disagree(ids, chosen.told) or _disagree(before, chosen.told) or (call.adds and _disagree(before, ids))
    if mixes or _several(chosen, batch):
        return _mixed(call.op, "writes entries of a sample over those of another")
    # What belongs to nobody belongs, once it is written, to whom it was written over, or to whom said where.
    base[call.item] = owner = torch.where(ids >= 0, ids, torch.where(chosen.told >= 0, chosen.told, before))
    if not torch.equal(base[call.item], owner):
        return _mixed(call.op, "writes entries of several samples into one")
    # Constants that differ from row to row: who gets which depends on how many there are of the others.
    varies = value is not None and value.numel() > 1 and (call.in_order or value.dim() == before.dim())
    counted = varies and given is None and (chosen.loose or chosen.by_mask)
    if counted and value is not None and value.is_floating_point():
        return _mixed(call.op, "writes constants to places that depend on other samples")
    (mask,) = call.item if len(call.item) == 1 else (None,)
    if isinstance(mask, Tensor) and mask.dtype == torch.bool:  # who says where, says where not
        says = sample_ids(mask, call.owner.get(id(mask)), batch).view(*mask.shape, *[1] * (base.dim() - mask.dim()))
        base = torch.where(base < 0, says, base)
    loose = not told and any(isinstance(w, Layout) and w.loose for w in (where, given))
    return _layout(base, batch, loose, counted)


def _in_all_rows(where: Layout, covered: Tensor, value: Tensor | None, given: Where | None) -> bool:
    """Whether the same is written into every row of a loose tensor, or rows that are as loose."""
    rows = covered.movedim(where.dim, 0)
    in_a_row = value is None or value.numel() == 1 or value.dim() < covered.dim() - where.dim
    same = in_a_row or isinstance(given, Layout)
    return same and (rows.numel() == 0 or bool((rows == rows[:1]).all()))


def _fits(source: Where | None, chosen: Chosen) -> bool:
    """Whether places of loose rows are used as an index of such rows, and nothing else is."""
    along = isinstance(source, Layout) and source.dim in chosen.dims
    loose = isinstance(source, Layout) and source.loose
    if chosen.places:
        return along and loose
    return not (along and loose) or chosen.by_mask or bool((chosen.told < 0).all())


def _several(chosen: Chosen, batch: int) -> bool:
    """Whether an entry was chosen by indices of several samples."""
    return bool((chosen.told == batch).any())


def _disagree(a: Tensor, b: Tensor) -> bool:
    """Whether two samples claim one entry."""
    return bool(((a >= 0) & (b >= 0) & (a != b)).any())


def _layout(owner: Tensor, batch: int, loose: bool, places: bool) -> Where | None:
    found = from_ids(owner, batch, loose)
    return replace(found, places=True) if places and isinstance(found, Layout) else found


# ---- lists of indices ----


def listed(op: Op, results: Sequence[Tensor]) -> Motion:
    """Where the samples lie in the indices that `nonzero` gives."""
    return Motion(tuple(_listed(op, op.where[0], i, len(results)) for i in range(len(results))), by_values=True)


def _listed(op: Op, where: Where | None, result: int, results: int) -> Where | None:
    if not isinstance(where, Layout):
        cause = where.cause if where else ""
        return Lost(f"{op_name(op.func)} lists what occurs in a tensor in which {cause}", listed=True)
    if op_name(op.func).startswith("unique"):
        return Lost("unique lists what occurs in any of the samples", listed=True)
    owner = sample_ids(op.tensors[0], where, op.batch)[op.tensors[0].bool()]
    in_loose_dim = where.loose and (results == 1 or result == where.dim)
    return Layout(0, ids=tuple(owner.tolist()), loose=True, places=in_loose_dim)


def by_order(op: Op, results: Sequence[Tensor]) -> Motion | None:
    """Where the samples lie after a sort along the batch; None if it is along another dim, or does not keep all."""
    where, tensor, order = op.where[0], op.tensors[0], results[-1]
    if not isinstance(where, Layout):
        return None
    numbers = [a for a in (*op.args[1:], op.kwargs.get("dim", -1)) if type(a) is int]
    if op_name(op.func) == "topk" and "k" not in op.kwargs:
        numbers = numbers[1:]
    if not tensor.dim() or numbers[0] % tensor.dim() != where.dim or order.shape != tensor.shape:
        return None
    owner = sample_ids(tensor, where, op.batch).gather(where.dim, order)
    keys = tensor.gather(where.dim, order)
    by_number = tensor.dim() == 1 and torch.equal(keys, torch.arange(len(keys), device=keys.device))
    found = from_ids(owner, op.batch, loose=not by_number)  # sorted by its own number, a row's place is its own
    if not isinstance(found, Layout):
        return None
    places = replace(found, places=where.loose)
    return Motion((found, places) if len(results) == 2 else (places,), by_values=True)
