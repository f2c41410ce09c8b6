"""Tensors from outside the model that a recording meets in the code around the model: targets, masks, weights.

Such a tensor is taken for one row per sample if it has the batch's size in its batch dimension. Otherwise it is a
constant, and so are the parameters and buffers of modules, tensors that the user declares, and everything that is
computed from constants alone.

A constant may happen to have the batch's size: weights of T positions in a batch of T samples, a queue as long as the
batch, the boxes of one image where there are as many images. In other steps, or for other images, it had another size.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from persample import _torch
from persample._internal.calling_code import is_first_argument_written_out
from persample._internal.precision import INDEX_DTYPES
from persample._internal.tree import find_tensors
from persample.forward.early import EarlyTensors, describe_readings
from persample.forward.known import KnownTensors, TensorMap
from persample.layouts import (
    Call,
    Layout,
    Lost,
    SizesRead,
    Where,
    make_layout,
)

_LIBRARIES = str(Path(torch.__file__).parent), str(Path(__file__).parents[1])

_MAX_ENTRIES = 1000  # of each kind, for each model
_MAX_FRAMES = 3  # of the user's code, which tell apart the calls of a helper


class RememberedConstants:
    """The tensors from outside, and places in the code around a model, that were seen with constants."""

    def __init__(self) -> None:
        self._tensors: dict[int, ref[Tensor]] = {}
        self._sites: dict[Hashable, None] = {}  # forms of tensors, and places in the code
        self._names: dict[tuple[int, str], None] = {}  # of arguments of the model and of its parts
        self._noted: list[tuple[dict[Any, Any], Hashable]] = []  # in this step

    def start_step(self) -> None:
        """Keep what was noted in earlier steps."""
        self._noted.clear()

    def forget_step(self) -> None:
        """Forget what was noted in this step: the batch is larger than it seemed."""
        for entries, key in self._noted:
            entries.pop(key, None)
        self._noted.clear()

    def note_constant(self, tensor: Tensor, site: Hashable = None) -> None:
        """Note that a tensor has another size than the batch; `site`: where it was used, if not here."""
        if not self._is_known(tensor):
            self._keep(self._tensors, id(tensor), ref(tensor))
        site = site or self.find_site(tensor)
        if site not in self._sites:
            self._keep(self._sites, site, None)

    def is_constant(self, tensor: Tensor) -> bool:
        """Whether a tensor with the batch's size is a constant: it, or others at this place, had another size."""
        return self._is_known(tensor) or self.find_site(tensor) in self._sites

    def _is_known(self, tensor: Tensor) -> bool:
        known = self._tensors.get(id(tensor))
        return known is not None and known() is tensor

    def note_name(self, module: nn.Module, name: str) -> None:
        """Note that an argument of a module had another size than the batch."""
        self._keep(self._names, (id(module), name), None)

    def list_names(self, module: nn.Module) -> list[str]:
        """The arguments of a module that were constants in a batch of another size."""
        return [name for number, name in self._names if number == id(module)]

    def _keep(self, entries: dict[Any, Any], key: Hashable, value: object) -> None:
        if len(entries) >= _MAX_ENTRIES:
            entries.pop(next(iter(entries)))
        entries[key] = value
        self._noted.append((entries, key))

    @staticmethod
    def find_site(tensor: Tensor) -> Hashable:
        """The form of a tensor, and the places in the user's code that use it now, the innermost first."""
        frame: FrameType | None = sys._getframe(1)
        places: list[Hashable] = []
        while frame is not None and len(places) < _MAX_FRAMES:
            if not frame.f_code.co_filename.startswith(_LIBRARIES):
                places.append((frame.f_code, frame.f_lasti))
            frame = frame.f_back
        return tensor.dim(), tensor.dtype, tensor.shape[1:], *places


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
        self.early: EarlyTensors | None = None  # what is known before the model is called
        self._model = None if model is None else ref(model)  # the tracker must not keep its model
        self._batch_dim = batch_dim
        self._constants: TensorMap[bool] = TensorMap()
        for tensor in constants:
            self._constants[tensor] = True
        self._assumed: dict[tuple[tuple[int, ...], int], None] = {}  # shapes and dimensions, in order
        self._drawn: TensorMap[bool] = TensorMap()  # random numbers and literals, which may be samples for the model
        self._taken: TensorMap[bool] = TensorMap()  # the tensors that were taken for samples
        self._order: tuple[int, ...] | None = None  # the sample of each row of a tensor from outside; None: row n is n
        self._newest = 0  # the size of the last batch of several, whose samples `_order` has
        self._counted: TensorMap[Lost] = TensorMap()  # tensors of numbers, which may have been counted among samples
        self.sizes: set[int] | None = set() if is_block else None  # that the code around the model has read
        self.has_reads = False  # whether the code around the model has read values of samples as numbers

    # ---- tensors from outside ----

    def find_layout(self, tensor: Tensor, batch: int) -> Layout | None:
        """Where the samples lie in a tensor from outside; None if it is a constant."""
        if tensor in self._constants:
            return None
        dim = self.find_dim(tensor, self._newest or batch)
        if dim is None and self.remembered is not None and tensor.dim():
            self.remembered.note_constant(tensor)
        if dim is None or self.is_constant(tensor):
            return None
        if self.remembered is not None and self.remembered.is_constant(tensor):
            self._constants[tensor] = True
            return None
        self._assumed[tuple(tensor.shape), dim] = None
        self._taken[tensor] = True
        return self.reorder(Layout(dim))

    def start_another(self, numbers: Iterable[int]) -> None:
        """Take tensors from outside that are not known yet for those of another batch, with the last samples."""
        self._order = tuple(numbers)
        self._newest = len(self._order)

    def reorder(self, layout: Layout) -> Layout:
        """The layout of a tensor from outside, given the one that it would have if its row n were sample n's."""
        if self._order is None or layout.ids is not None or layout.inner != 1:
            return layout
        return make_layout(layout.dim, self._order, 1 + max(self._order))

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
        return f" ({describe_readings(self._assumed)})" if self._assumed else ""

    def find_dim(self, tensor: Tensor, batch: int) -> int | None:
        """The batch dimension of a tensor from outside, None if it has another size there."""
        dim = self.get_batch_dim(tensor)
        return dim if tensor.dim() > dim and tensor.shape[dim] == batch else None

    def get_batch_dim(self, tensor: Tensor) -> int:
        """The batch dimension of a tensor from outside, whatever its size is there."""
        return self._batch_dim if tensor.dim() > self._batch_dim else 0

    def is_constant(self, tensor: Tensor) -> bool:
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

    def note_size(self, func: Any, args: Any, found: Any, known: KnownTensors) -> SizesRead:
        """Note what a function has returned that reads the shape of a tensor outside the model; returns the sizes."""
        sizes = frozenset((found,) if type(found) is int else found if isinstance(found, tuple) else ())
        if self.sizes is not None:
            self.sizes |= sizes
        where = known.get_layout(args[0]) if func is Tensor.size and len(args) == 2 else None
        is_own = isinstance(where, Layout) and args[1] % args[0].dim() != where.dim
        return SizesRead(own=sizes) if is_own else SizesRead(sizes)

    # ---- calls without samples and weights ----

    def note_call(self, call: Call, result: Any, batch: int, is_inside: bool) -> None:
        """Note what a call without samples and weights makes."""
        if call.facts.imports_data and not is_inside and is_first_argument_written_out():
            self._drawn[result] = self._constants[result] = True
        if not batch:
            self.early = self.early or EarlyTensors()
            self.early.note_call(call, result, self)
        if call.facts.imports_data:
            return
        is_drawn = not is_inside and (call.facts.is_random or any(tensor in self._drawn for tensor in call.tensors))
        for made in find_tensors(result):
            if is_drawn:
                self._drawn[made] = True
            if is_inside and batch and self.find_dim(made, batch) is None:
                continue  # it is a constant by its size, and what the model makes of it is not judged
            if is_inside or all(map(self.is_constant, call.tensors)):
                self._constants[made] = True

    def judge_import(self, imported: Tensor, batch: int) -> Lost | None:
        """A tensor that was made from numbers after values of samples were read as numbers may be a statistic of them.

        Class weights may be counted by Python code. One row per sample is taken for what each sample has itself.
        """
        if not imported.dim() or imported in self._constants:
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
            sizes = [] if self.early is None else self.early.find_sizes(tensor)
            is_open = tensor in self._drawn or not self.is_constant(tensor)
            if tensor.dim() and (sizes or _torch.find_node(tensor) is None) and is_open:
                sizes.append(tensor.shape[self.get_batch_dim(tensor)])
            found |= dict.fromkeys(sizes, tensor)
        return found

    def declare_early(self, list_layouts: Callable[[int], Iterable[tuple[Tensor, Where]]]) -> None:
        """Set what lists, for a batch size, the layouts of tensors that are known before the call of the model."""
        self.early = self.early or EarlyTensors()
        self.early.list_layouts = list_layouts

    def take_early(self, arguments: Iterable[Tensor], batch: int) -> Sequence[tuple[Tensor, Where]]:
        """The tensors whose layouts were found before the first call of the model, which has these arguments."""
        early, self.early = self.early, None
        if early is None:
            return ()
        found = list(early.take(arguments, batch, self))
        self.has_reads, self._order = batch in early.reads, early.order
        for tensor in early.constants:
            self._constants[tensor] = True
        return found


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
