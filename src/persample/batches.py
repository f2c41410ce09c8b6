"""The batch size, and where the samples lie in the arguments of a model."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from persample import _torch
from persample.forward.tracker import Tracker
from persample.layouts.layout import Layout
from persample.layouts.recurrent import packed_layout
from persample.recording.options import BatchDim

NO_TENSOR = (
    "Unable to find a tensor in the passed args and kwargs. They may not be pytree-able and so ExpandedWeights cannot "
    "compute the batch size from the inputs. Please specify it explicitly"
)


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The arguments of a call of `forward`, and where the samples lie in them."""

    forward: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    batch_dim: BatchDim

    def batch_size(self, caller: str) -> int:
        """The number of samples, on which all tensors in the arguments must agree."""
        found: int | None = None
        for leaf, dim in self._leaves():
            if isinstance(leaf, PackedSequence):
                size = int(leaf.batch_sizes[0])
            elif isinstance(leaf, Tensor) and dim is not None and leaf.dim() > dim:
                size = leaf.shape[dim]
            else:
                continue
            if found is not None and size != found:
                raise RuntimeError(
                    f"When computing batch size, found at least one input with batch size {found} and one with batch "
                    f"size {size}. Please specify it explicitly using the batch size kwarg in {caller}"
                )
            found = size
        if found is None:
            raise RuntimeError(NO_TENSOR)
        return found

    def tell(self, tracker: Tracker, told: bool) -> None:
        """Tells the tracker where the samples lie; `told`: their number was given by the user, not found here."""
        others: list[int] = []
        for leaf, dim in self._leaves():
            if isinstance(leaf, PackedSequence):
                if int(leaf.batch_sizes[0]) != tracker.batch:
                    raise RuntimeError(batch_size_error(int(leaf.batch_sizes[0]), tracker.batch))
                tracker.add_input(leaf.data, packed_layout(leaf.batch_sizes, leaf.sorted_indices, tracker.batch))
                continue
            if dim is None:
                continue
            for tensor in tensors_within(leaf):
                layout = _layout(tensor, tracker.batch, dim)
                if layout is not None and (told or layout.dim == dim):
                    tracker.add_input(tensor, layout)
                elif tensor.dim() > dim:
                    others.append(tensor.shape[dim])
        if others and (not told or not tracker.has_inputs):
            raise RuntimeError(batch_size_error(others[0], tracker.batch))
        if not tracker.has_inputs:
            raise RuntimeError(NO_TENSOR)

    def check_dims(self) -> None:
        """Refuses dims for arguments that there are not."""
        names = argument_names(self.forward)
        for key in self.batch_dim if isinstance(self.batch_dim, Mapping) else ():
            if isinstance(key, str) and key not in names and key not in self.kwargs:
                raise RuntimeError(f"batch_dim names an argument '{key}'; the model takes {names}")

    def _leaves(self) -> Iterator[tuple[Any, int | None]]:
        """Everything in the arguments that a pytree does not look into, with the dim of its samples."""
        names = argument_names(self.forward)
        positional = [(i, names[i] if i < len(names) else None, arg) for i, arg in enumerate(self.args)]
        named = [(names.index(name) if name in names else None, name, arg) for name, arg in self.kwargs.items()]
        for position, name, arg in [*positional, *named]:
            dim = self._dim(position, name)
            if isinstance(arg, Tensor):
                yield arg, dim
            else:
                leaves = _torch.pytree.tree_leaves(arg, is_leaf=lambda value: isinstance(value, PackedSequence))
                yield from ((leaf, dim) for leaf in leaves)

    def _dim(self, position: int | None, name: str | None) -> int | None:
        if isinstance(self.batch_dim, int):
            return self.batch_dim
        if isinstance(self.batch_dim, Mapping):
            return next((self.batch_dim[key] for key in (name, position) if key in self.batch_dim), 0)  # type: ignore[index]
        return self.batch_dim[position] if position is not None and position < len(self.batch_dim) else 0


_names: WeakKeyDictionary[Any, list[str]] = WeakKeyDictionary()


def argument_names(function: Callable[..., Any]) -> list[str]:
    """The names of a function's arguments, in order."""
    key = getattr(function, "__func__", function)
    found = _names.get(key)
    # A method has one argument less than its function, which may be called in both ways.
    names = list(inspect.signature(key).parameters) if found is None else found
    if found is None:
        _names[key] = names
    return names if key is function else names[1:]


def _layout(tensor: Tensor, batch: int, dim: int) -> Layout | None:
    """In `dim` if it has that size, else in the only other dim that has it, else nowhere."""
    dims = [d for d, size in enumerate(tensor.shape) if size == batch]
    if dim in dims:
        return Layout(dim, others=tuple(Layout(d) for d in dims if d != dim))
    return Layout(dims[0]) if len(dims) == 1 else None


def tensors_within(value: Any) -> Iterator[Tensor]:
    """The tensors in a pytree, and in the objects that it holds: what their attributes are."""
    for leaf in [value] if isinstance(value, Tensor) else _torch.pytree.tree_leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf
        elif hasattr(leaf, "__dict__") and not isinstance(leaf, (type, nn.Module)) and not callable(leaf):
            yield from tensors_within(list(vars(leaf).values()))


def batch_size_error(found: int, expected: int) -> str:
    """The message for an input that has another number of samples than was said."""
    return (
        f"Expected ExpandedWeights to have batch size matching input but got input batch size of {found} "
        f"with ExpandedWeight of batch size {expected}"
    )
