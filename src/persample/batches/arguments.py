"""Where the samples lie in the arguments of a call of a model."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from persample import _torch
from persample._internal.copies import copy_values
from persample._internal.tree import has_attributes, iterate_tensors
from persample.batches.dims import (
    BatchDim,
    BatchSizesDiffer,
    Leaf,
    NoSamplesFound,
    WrongBatchSize,
    choose_dim,
    find_batch_size,
    find_sample_dim,
    find_state_dim,
)
from persample.errors import PerSampleError, refuse_forward_mode
from persample.forward import Tracker
from persample.layouts import Layout, make_packed_layout
from persample.ragged import (
    GRAPHS_ADVICE,
    GraphsShareNodes,
    Reading,
    find_reading_by_size,
    find_structured_reading,
    has_edges,
)

_ARGUMENTS = "the arguments of the model"


@dataclasses.dataclass(frozen=True)
class Arguments:
    """The arguments of a call of `forward`.

    `constants` are names of arguments that are the same for all samples, and tensors that are. `finds_states`: with one
    `batch_dim` for all arguments, a tensor may have its samples in another dimension, if all tensors then agree on the
    batch size; see `find_state_dim`. `reads_sizes`: arguments may have no dimension with one index for each sample; see
    `Reading`. `batch_size` is the number of samples if the user gave it.
    """

    forward: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    batch_dim: BatchDim
    constants: tuple[Tensor | str, ...] = ()
    finds_states: bool = False
    reads_sizes: bool = False
    batch_size: int | None = None

    @functools.cached_property
    def reading(self) -> Reading | None:
        """How to read the arguments, if not each tensor has the samples in its batch dimension."""
        if not self.reads_sizes or self.batch_dim != 0:
            return None
        constant_ids = {id(constant) for constant in self.constants}
        named = [(name, arg) for _, name, arg in self._named if name not in self.constants or id(arg) in constant_ids]
        found = find_structured_reading(named, self.batch_size)
        if found is not None or self.batch_size is not None:
            return found
        try:
            find_batch_size(self.leaves, _ARGUMENTS)
        except BatchSizesDiffer as error:
            is_known = any(map(self._fits, error.sizes)) and self._can_find_states
            return None if is_known else find_reading_by_size(named)
        except NoSamplesFound:
            pass
        return None

    def find_batch_size(self, opens_objects: bool = True) -> int:
        """The number of samples, on which all tensors in the arguments must agree.

        `opens_objects`: if there are no tensors, look into dataclasses and other objects.
        """
        if self.reading is not None:
            return self.reading.batch
        try:
            return find_batch_size(self.leaves, _ARGUMENTS)
        except NoSamplesFound:
            self._refuse_graphs()
            if not opens_objects:
                raise
            inside = ((t, dim) for leaf, dim in self.leaves if has_attributes(leaf) for t in iterate_tensors(leaf))
            return find_batch_size(inside, _ARGUMENTS)
        except BatchSizesDiffer as error:
            self._refuse_graphs()
            found = next(filter(self._fits, error.sizes), None) if self._can_find_states else None
            if found is None:
                raise
            return found

    @property
    def _can_find_states(self) -> bool:
        return self.finds_states and isinstance(self.batch_dim, int)

    def _fits(self, batch_size: int) -> bool:
        """Whether every leaf with a batch dimension has so many samples in one of its dimensions."""

        def has_samples(leaf: Any, dim: int | None) -> bool:
            if isinstance(leaf, PackedSequence):
                return int(leaf.batch_sizes[0]) == batch_size
            if not isinstance(leaf, Tensor) or dim is None or leaf.dim() <= dim:
                return True
            return find_state_dim(leaf, batch_size, dim) is not None

        return all(has_samples(leaf, dim) for leaf, dim in self.leaves)

    def add_to(self, tracker: Tracker, search: bool) -> None:
        """Tell the tracker where the samples lie.

        `search`: the user gave the batch size, so that a tensor with another size in its batch dimension is either
        constant or has its samples in the only other dimension of that size.
        """
        batch_size = tracker.batch
        if self.reading is not None:
            self._add_reading(tracker, self.reading)
            return
        rejected: list[int] = []
        for leaf, dim in self.leaves:
            if isinstance(leaf, PackedSequence):
                _add_packed(leaf, tracker)
                continue
            for tensor in iterate_tensors(leaf):
                if dim is None:
                    tracker.add_constant(tensor)
                elif (layout := self._find_layout(tensor, dim, batch_size, search)) is not None:
                    tracker.add_input(tensor, layout)
                elif tensor.dim() > dim:
                    rejected.append(tensor.shape[dim])
        if has_edges((name, arg) for _, name, arg in self._named):
            tracker.replace_advice(GRAPHS_ADVICE)
        self._advise_on_lists(tracker)
        if rejected and (not search or not tracker.known.has_inputs):
            self._refuse_graphs()
            raise WrongBatchSize(rejected[0], batch_size)
        if not tracker.known.has_inputs:
            self._refuse_graphs()
            raise NoSamplesFound(_ARGUMENTS)

    def _find_layout(self, tensor: Tensor, dim: int, batch_size: int, search: bool) -> Layout | None:
        """Where the samples lie in a tensor; None if it has another size in its batch dimension, `dim`."""
        if _torch.has_tangent(tensor):
            refuse_forward_mode("an argument of the model")
        found = find_sample_dim(tensor, batch_size, dim, search)
        if found is None and not search and self._can_find_states and tensor.dim() > dim:
            found = find_state_dim(tensor, batch_size, dim)
        if found is None and search and batch_size == 1 and tensor.numel():  # all of it is the sample
            return Layout(0, len(tensor) if tensor.dim() else 1)
        return None if found is None else _make_layout(tensor, batch_size, found, dim)

    def _advise_on_lists(self, tracker: Tracker) -> None:
        """For errors: a list of tensors may also have one entry for each sample."""
        for name, arg in ((name, arg) for _, name, arg in self._named) if self.reads_sizes else ():
            is_list = isinstance(arg, (list, tuple)) and len(arg) > 1 and all(isinstance(t, Tensor) for t in arg)
            if is_list and self.batch_size is None:
                tracker.add_advice(
                    f" '{name}' is a list of {len(arg)} tensors, each of which was read as a batch of {tracker.batch} "
                    f"samples; if it has one tensor for each sample, pass batch_size={len(arg)}."
                )

    def _add_reading(self, tracker: Tracker, reading: Reading) -> None:
        for leaf, dim in self.leaves:
            for tensor in iterate_tensors(leaf):
                if _torch.has_tangent(tensor):
                    refuse_forward_mode("an argument of the model")
                layout = None if dim is None else reading.layouts.get(id(tensor))
                if layout is None:
                    tracker.add_constant(tensor)
                else:
                    tracker.add_input(tensor, layout)

    def has_known(self, tracker: Tracker) -> bool:
        """Whether a tensor depends on samples that the tracker follows."""
        packed = [leaf.data for leaf, _ in self.leaves if isinstance(leaf, PackedSequence)]
        return any([tracker.known.get_layout(tensor) is not None for tensor in (*packed, *self.tensors)])

    def has_rows(self, tracker: Tracker) -> bool:
        """Whether a tensor consists of rows of some samples that the tracker follows: `x[3]`."""
        known = map(tracker.known.get_layout, self.tensors if tracker.known else ())
        return any([isinstance(where, Layout) and where.ids is not None for where in known])

    def without_constants(self, tracker: Tracker) -> Arguments:
        """The same arguments, in which tensors that are known to be the same for all samples are constants."""
        found = [t for t in self.tensors if tracker.is_constant(t) or tracker.is_weight(t)]
        return dataclasses.replace(self, constants=(*self.constants, *found)) if found else self

    def add_unknown_to(self, tracker: Tracker) -> None:
        """Tell the tracker of tensors with the batch's size in their batch dimension, unless it knows them."""
        for leaf, dim in self.leaves:
            if isinstance(leaf, Tensor) and dim is not None and leaf not in tracker.known and leaf.grad_fn is None:
                find = find_state_dim if self._can_find_states else partial(find_sample_dim, search=False)
                found = find(leaf, tracker.batch, dim)
                if found is not None and not tracker.is_constant(leaf):
                    tracker.add_input(leaf, _make_layout(leaf, tracker.batch, found, dim))

    def list_rows(self, batch_size: int) -> list[tuple[Tensor, int]]:
        """The tensors with this size in their batch dimension, and that dimension."""
        if self.reading is not None:
            return []
        leaves = [(leaf, dim) for leaf, dim in self.leaves if isinstance(leaf, Tensor) and dim is not None]
        return [(t, dim) for t, dim in leaves if t.dim() > dim and t.shape[dim] == batch_size]

    @functools.cached_property
    def tensors(self) -> list[Tensor]:
        """The tensors in arguments that have a batch dimension."""
        leaves = [leaf for leaf, dim in self.leaves if dim is not None and not isinstance(leaf, PackedSequence)]
        return [tensor for leaf in leaves for tensor in iterate_tensors(leaf)]

    def iterate_integers(self) -> Iterator[int]:
        """The integers among the arguments, also those in tensors without dimensions."""
        for value, _ in self.leaves:
            if isinstance(value, Tensor) and not value.dim() and value.dtype in (torch.int64, torch.int32):
                yield int(value)
            elif type(value) is int:
                yield value

    def copy(self) -> Arguments:
        """The same arguments in copies of all containers and objects; tensors are not copied.

        Raises:
            CannotCopy: an argument holds an object that cannot be copied.
        """
        if not self.kwargs and all([isinstance(arg, Tensor) for arg in self.args]):
            return self
        args, kwargs = copy_values((self.args, self.kwargs), lambda tensor: tensor)
        return dataclasses.replace(self, args=args, kwargs=kwargs)

    def check_names(self, model: nn.Module) -> None:
        """Refuse a `batch_dim` that names an argument which `forward` does not have; constants may be buffers too."""
        names = get_argument_names(self.forward)
        for name in self.constants:
            if not isinstance(name, str) or name in names or name in self.kwargs:
                continue
            if name not in dict(model.named_buffers()) and name not in dict(model.named_parameters()):
                raise PerSampleError(f"constants names '{name}', but the model takes {names}.")
        for key in self.batch_dim if isinstance(self.batch_dim, Mapping) else ():
            if isinstance(key, str) and key not in names and key not in self.kwargs:
                raise PerSampleError(f"batch_dim names an argument '{key}', but the model takes {names}.")

    def _refuse_graphs(self) -> None:
        if has_edges((name, arg) for _, name, arg in self._named):
            raise GraphsShareNodes() from None

    @functools.cached_property
    def _named(self) -> list[tuple[int | None, str | None, Any]]:
        """The position, name and value of each argument."""
        names = get_argument_names(self.forward)
        positional = [(i, names[i] if i < len(names) else None, arg) for i, arg in enumerate(self.args)]
        named = [(names.index(name) if name in names else None, name, arg) for name, arg in self.kwargs.items()]
        return [*positional, *named]

    @functools.cached_property
    def leaves(self) -> list[Leaf]:
        """The tensors and other objects in the arguments, with their batch dimensions."""
        given = [constant for constant in self.constants if isinstance(constant, str)]
        constant_ids = [id(constant) for constant in self.constants]
        found: list[Leaf] = []
        for position, name, arg in self._named:
            dim = None if name is not None and name in given else choose_dim(self.batch_dim, position, name)
            leaves = [arg]
            if not isinstance(arg, Tensor):
                leaves = _torch.pytree.tree_leaves(arg, is_leaf=lambda value: isinstance(value, PackedSequence))
            found += [(leaf, None if id(leaf) in constant_ids else dim) for leaf in leaves]
        return found


def _add_packed(packed: PackedSequence, tracker: Tracker) -> None:
    """Tell the tracker where the samples lie in a packed sequence."""
    if int(packed.batch_sizes[0]) != tracker.batch:
        raise WrongBatchSize(int(packed.batch_sizes[0]), tracker.batch)
    layout = make_packed_layout(packed.batch_sizes, packed.sorted_indices, tracker.batch)
    tracker.add_input(packed.data, layout)
    tracker.counted.add_packed(layout.get_ids(len(packed.data), tracker.batch), packed.batch_sizes.tolist())
    for order in (packed.sorted_indices, packed.unsorted_indices, packed.batch_sizes):
        if order is not None:  # a loss that puts the samples in another order selects them by number
            tracker.add_constant(order)


def _make_layout(tensor: Tensor, batch_size: int, found: int, dim: int) -> Layout:
    if found != dim:
        return Layout(found)
    others = [d for d, size in enumerate(tensor.shape) if size == batch_size and d != dim]
    return Layout(found, alternatives=tuple(map(Layout, others)))


# The names of each function's arguments, for as long as the function exists.
_argument_names: WeakKeyDictionary[Any, list[str]] = WeakKeyDictionary()


def get_argument_names(function: Callable[..., Any]) -> list[str]:
    """The names of a function's arguments, in order."""
    key = getattr(function, "__func__", function)
    names = _argument_names.get(key)
    if names is None:
        names = _argument_names[key] = list(inspect.signature(key).parameters)
    return names if key is function else names[1:]  # a bound method has one argument less
