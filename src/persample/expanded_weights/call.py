"""Calling a module so that backward leaves the per-sample gradients in its parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from persample.collector import Collector
from persample.errors import PerSampleError
from persample.expanded_weights.delivery import legacy_use, to_grad_sample
from persample.expanded_weights.helpers import batch_size_error
from persample.layout import Layout
from persample.rules.recurrent import packed_layout
from persample.tracker import Tracker


def call_for_per_sample_grads(
    module: nn.Module, *, batch_size: int | None = None, loss_reduction: str = "sum", batch_first: bool = True
) -> Callable[..., Any]:
    """A function that gives what `module(...)` gives, and whose backward fills `p.grad_sample`.

    After `.backward()` on a loss of the result, every trainable parameter p that was used has `p.grad_sample`, of
    shape `(batch, *p.shape)`; `p.grad` is left alone. The samples lie in dim 0 of the arguments, or in dim 1 with
    `batch_first=False`. `loss_reduction` is how the loss combines the samples: with "mean", what is stored is
    multiplied by the batch size, so that a row is always the gradient of its sample's own loss.

    Backward passes add to `grad_sample`, as they add to `p.grad`; clear it (`del p.grad_sample`) before the next call.

    >>> model = nn.Linear(3, 2)
    >>> x, y = torch.randn(5, 3), torch.tensor([0, 1, 1, 0, 1])
    >>> logits = call_for_per_sample_grads(model, loss_reduction="mean")(x)
    >>> nn.functional.cross_entropy(logits, y).backward()
    >>> model.weight.grad_sample.shape
    torch.Size([5, 2, 3])
    """
    if loss_reduction not in ("sum", "mean"):
        raise RuntimeError(f"Expected loss_reduction argument to be sum or mean, got {loss_reduction}")
    if not isinstance(module, nn.Module):
        raise RuntimeError(f"Module passed must be nn.Module, got {type(module).__name__}")
    if batch_size is not None and (not isinstance(batch_size, int) or isinstance(batch_size, bool)):
        raise RuntimeError(f"Batch size passed must be None or an integer, got {type(batch_size).__name__}")
    if batch_size is not None and batch_size < 1:
        raise RuntimeError(f"Batch size must be positive, got {batch_size}")
    for name, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            raise PerSampleError(f"A ScriptModule hides its ops: pass the module '{name}' as it was before scripting")
    _check_cleared(module)
    batch_dim = 0 if batch_first else 1

    @wraps(module.forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        _check_cleared(module)
        batch = batch_size if batch_size is not None else _common_batch_size((args, kwargs), batch_dim)
        trainable = [p for p in module.parameters() if p.requires_grad]
        collector = Collector(trainable, to_grad_sample(batch, loss_reduction))
        tracker = Tracker(batch, collector, module, legacy_use(loss_reduction))
        _add_inputs(tracker, (args, kwargs), batch_dim, told=batch_size is not None)
        rng_state = torch.get_rng_state()
        try:
            with tracker:
                outputs = module(*args, **kwargs)
        except BaseException:
            tracker.restore()
            torch.set_rng_state(rng_state)
            raise
        tracker.check_outputs(_tensors_within(outputs))
        return outputs

    return call


def _check_cleared(module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        if getattr(parameter, "grad_sample", None) is not None:
            raise RuntimeError(
                "Current Expanded Weights accumulates the gradients, which will be incorrect for multiple calls "
                f"without clearing gradients. Please clear out the grad_sample parameter of {name}"
            )


def _common_batch_size(arguments: Any, batch_dim: int) -> int:
    """The size of `batch_dim`, on which all tensors in the arguments must agree."""
    found: int | None = None
    for leaf in pytree.tree_leaves(arguments, is_leaf=_is_packed):
        if isinstance(leaf, PackedSequence):
            size = int(leaf.batch_sizes[0])
        elif isinstance(leaf, Tensor) and leaf.dim() > batch_dim:
            size = leaf.shape[batch_dim]
        else:
            continue
        if found is not None and size != found:
            raise RuntimeError(
                f"When computing batch size, found at least one input with batch size {found} and one with batch size "
                f"{size}. Please specify it explicitly using the batch size kwarg in call_for_per_sample_grads"
            )
        found = size
    if found is None:
        raise RuntimeError(
            "Unable to find a tensor in the passed args and kwargs. They may not be pytree-able and so ExpandedWeights "
            "cannot compute the batch size from the inputs. Please specify it explicitly"
        )
    if found == 0:
        raise RuntimeError("0 is not a valid batch size for Expanded Weights but got input tensor of that batch size")
    return found


def _is_packed(value: Any) -> bool:
    return isinstance(value, PackedSequence)


def _add_inputs(tracker: Tracker, arguments: Any, batch_dim: int, told: bool) -> None:
    """Tells the tracker where the samples lie in the arguments; `told`: their number was given, not found."""
    others: list[int] = []
    for leaf in pytree.tree_leaves(arguments, is_leaf=_is_packed):
        if isinstance(leaf, PackedSequence):
            if int(leaf.batch_sizes[0]) != tracker.batch:
                raise RuntimeError(batch_size_error(int(leaf.batch_sizes[0]), tracker.batch))
            tracker.add_input(leaf.data, packed_layout(leaf.batch_sizes, leaf.sorted_indices, tracker.batch))
            continue
        for tensor in _tensors_within(leaf):
            layout = _input_layout(tensor, tracker.batch, batch_dim)
            if layout is not None and (told or layout.dim == batch_dim):
                tracker.add_input(tensor, layout)
            elif tensor.dim() > batch_dim:
                others.append(tensor.shape[batch_dim])
    if others and (not told or not tracker.inputs):
        raise RuntimeError(batch_size_error(others[0], tracker.batch))


def _input_layout(tensor: Tensor, batch: int, batch_dim: int) -> Layout | None:
    """In `batch_dim` if it has that size, else in the only other dim that has it, else nowhere."""
    dims = [d for d, size in enumerate(tensor.shape) if size == batch]
    if batch_dim in dims:
        return Layout(batch_dim, others=tuple(Layout(d) for d in dims if d != batch_dim))
    return Layout(dims[0]) if len(dims) == 1 else None


def _tensors_within(value: Any) -> Iterator[Tensor]:
    """The tensors in a pytree, and in the dataclasses and plain objects that it holds."""
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            yield from _tensors_within(vars(leaf))
