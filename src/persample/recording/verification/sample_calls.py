"""The arguments of a call with other samples: one of them alone, or others in the places of those of the batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from persample import _torch
from persample._internal.copies import CannotCopy, copy_values
from persample._internal.tree import has_attributes, iterate_tensors
from persample.batches import Arguments
from persample.layouts import Layout, Where, replace_samples, take_sample
from persample.ragged import take_list_entries

# Positional and keyword arguments.
Call = tuple[tuple[Any, ...], dict[str, Any]]


class _CannotReplace(CannotCopy):
    """A tensor cannot be cut to one sample."""


class SampleCalls:
    """Makes calls with other samples from the arguments of a call.

    Args:
        arguments: the arguments; those of the calls are copies.
        batch: the number of samples.
        find_layout: says where the samples lie in a tensor.
    """

    def __init__(self, arguments: Arguments, batch: int, find_layout: Callable[[Tensor], Where | None]) -> None:
        self.whole: Call = (arguments.args, arguments.kwargs)
        self._arguments, self._reading = arguments, arguments.reading
        self._batch, self._find_layout = batch, find_layout
        self._versions = [(t, t._version) for t in iterate_tensors(self.whole) if not t.is_inference()]

    @property
    def has_changed(self) -> bool:
        """Whether arguments were changed in place since this object was made."""
        return any(tensor._version != version for tensor, version in self._versions)

    def take(self, sample: int) -> Call | None:
        """A call with one sample alone; None if the arguments cannot be cut."""
        return self._make([sample], is_cut=True)

    def replace(self, samples: Sequence[int]) -> Call | None:
        """A call with `samples[n]` in the place of sample n; None if the samples cannot be replaced."""
        return self._make(samples, is_cut=False)

    def are_samples_equal(self) -> bool:
        """Whether all samples are copies of one, as in a batch of zeros: then they change nothing for each other."""
        copies = self.replace([0] * self._batch)
        if copies is None:
            return False
        try:
            with _torch.DisableTorchFunction():
                pairs = zip(iterate_tensors(self.whole), iterate_tensors(copies), strict=True)
                return all(a is b or torch.equal(a, b) for a, b in pairs)
        except Exception:  # tensors of another kind, such as nested ones, cannot be compared
            return False

    def find_undivided(self) -> str:
        """What is said of an argument that may hold several samples and was not divided among them; else ''."""
        if self.has_list():
            return "a list in the arguments may hold one item for each sample"
        if self._reading is not None and self._reading.can_cut:
            return ""
        leaves = [(leaf, dim) for leaf, dim in self._arguments.leaves if not isinstance(leaf, PackedSequence)]
        for tensor, dim in ((t, dim) for leaf, dim in leaves if dim is not None for t in iterate_tensors(leaf)):
            is_integer = tensor.dtype in (torch.int64, torch.int32) and tensor.dim() > dim
            # Ids of several samples have another size, as those of bags do if the samples are offsets.
            if is_integer and tensor.shape[dim] not in (1, self._batch) and self._find_layout(tensor) is None:
                return (
                    f"an argument of shape {tuple(tensor.shape)} has no batch dimension and may hold ids of several "
                    "samples; if it is the same for all samples, pass it in constants="
                )
        return ""

    def has_list(self) -> bool:
        """Whether a list or array in the arguments has as many items as there are samples."""
        return _has_list(self.whole, self._batch)

    def _make(self, samples: Sequence[int], is_cut: bool) -> Call | None:
        """`is_cut`: the samples are cut to the only one of `samples`; else a PackedSequence cannot be replaced."""
        if self._reading is not None and not self._reading.can_cut:
            return None

        def replace(leaf: Any) -> Any:
            if isinstance(leaf, PackedSequence):
                if not is_cut:
                    raise _CannotReplace
                (sample,) = samples
                padded, lengths = pad_packed_sequence(leaf, batch_first=True)
                own, length = padded[sample : sample + 1].detach(), lengths[sample : sample + 1]
                return pack_padded_sequence(own, length, batch_first=True, enforce_sorted=False)
            layout = self._find_layout(leaf)
            if not isinstance(layout, (Layout, type(None))):
                raise _CannotReplace
            made = leaf.detach() if layout is None else self._change(leaf, layout, samples, is_cut)
            return made.clone().requires_grad_(leaf.requires_grad)

        args, kwargs = self.whole
        if self._reading is not None and self._reading.is_list:
            kwargs = {name: take_list_entries(arg, samples) for name, arg in kwargs.items()}
            args = tuple(take_list_entries(arg, samples) for arg in args)
        try:
            with _torch.DisableTorchFunction(), torch.no_grad():
                call: Call = copy_values((args, kwargs), replace, (Tensor, PackedSequence))
            return call
        except _CannotReplace:
            return None

    def _change(self, tensor: Tensor, layout: Layout, samples: Sequence[int], is_cut: bool) -> Tensor:
        """The part of a tensor that belongs to one sample, or with other samples in the places of all samples."""
        reading, own = self._reading, tensor.detach()
        if reading is not None and reading.is_list and layout.ids is not None:  # the entry of one sample
            return own
        if is_cut:
            cut = None if reading is None else reading.cuts.get(id(tensor))
            return take_sample(own, layout, samples[0], self._batch) if cut is None else cut(own, samples[0])
        changed = None if reading is not None and reading.cuts else replace_samples(own, layout, samples, self._batch)
        if changed is None:
            raise _CannotReplace
        return changed


def _has_list(value: Any, size: int) -> bool:
    """Whether a list or array of this length is found in a value that is not a tensor and holds no tensors."""
    if isinstance(value, Tensor):
        return False
    if isinstance(value, Mapping):
        return any(_has_list(part, size) for part in value.values())
    if isinstance(value, (list, tuple)):
        holds_items = not any(isinstance(part, (Tensor, list, tuple, Mapping)) for part in value)
        return (len(value) == size and holds_items) or any(_has_list(part, size) for part in value)
    if isinstance(getattr(value, "shape", None), tuple):
        return bool(value.shape) and value.shape[0] == size
    return has_attributes(value) and any(_has_list(part, size) for part in vars(value).values())


def has_unequal_sizes(arguments: Arguments) -> bool:
    """Whether the samples seem to have different sizes: lengths differ, or the padding at the end of ids and masks.

    Only then does padding to the longest sample show that samples depend on others.
    """
    with _torch.DisableTorchFunction(), torch.no_grad():
        return any(map(_differs_in_size, (leaf for leaf, dim in arguments.leaves if dim == 0)))


def _differs_in_size(leaf: object) -> bool:
    if isinstance(leaf, PackedSequence):
        return bool(leaf.batch_sizes[0] != leaf.batch_sizes[-1])
    if (
        not isinstance(leaf, Tensor)
        or leaf.is_floating_point()
        or leaf.is_complex()
        or leaf.is_nested
        or leaf.dim() not in (1, 2)
        or not leaf.numel()
    ):
        return False
    if leaf.dim() == 2:  # the lengths of runs of one value at the end
        leaf = (leaf == leaf[:, -1:]).flip(1).cumprod(1).sum(1)
    return bool((leaf != leaf[0]).any())
