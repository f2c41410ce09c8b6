"""A weight that, wherever a function with a rule uses it, gets per-sample gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from persample import _torch
from persample._internal.facts import T, all_with
from persample.rules import CELLS, HANDLED_FUNCTIONS

# What answers for the original weight: its metadata, none of its entries.
_METADATA = all_with("reads_metadata") | {T.data.__get__, T.grad.__get__, T.data_ptr, T.type}


class ExpandedWeight(Tensor):
    """Shares the storage of `orig_weight`; backward leaves `orig_weight.grad_sample`, of shape `(batch_size, *shape)`.

    Used by itself it knows no more than that the batch is in dim 0 of a function's first argument (dim 1 with
    `set_batch_first(False)`), so it takes part in the functions that have a rule and refuses all others.

    >>> import persample, torch, torch.nn.functional as F
    >>> x, w = torch.ones(2, 3), torch.ones(4, 3, requires_grad=True)
    >>> F.linear(x, persample.ExpandedWeight(w, 2, "sum")).sum().backward()
    >>> w.grad_sample.shape
    torch.Size([2, 4, 3])
    """

    handled_functions = HANDLED_FUNCTIONS
    orig_weight: Tensor
    batch_size: int
    loss_reduction: str
    batch_first: bool
    allow_smaller_batches: bool
    receive: Callable[[Tensor], None] | None

    def __new__(cls, orig_weight: Tensor, batch_size: int, loss_reduction: str) -> ExpandedWeight:
        if not isinstance(orig_weight, Tensor):
            raise RuntimeError(f"Can only make Expanded Weights of Tensors, got {type(orig_weight).__name__}")
        if not orig_weight.requires_grad:
            raise RuntimeError("Can only build ExpandedWeights objects of tensors that require_grad")
        return _torch.make_subclass(cls, orig_weight, True)

    def __init__(self, orig_weight: Tensor, batch_size: int, loss_reduction: str) -> None:
        self.orig_weight = orig_weight
        self.batch_size = batch_size
        self.loss_reduction = loss_reduction
        self.batch_first = True
        self.allow_smaller_batches = False
        self.receive = None  # set where a contribution is not to go to orig_weight.grad_sample at once

    def set_batch_first(self, is_batch_first: bool = True) -> None:
        """Says whether the batch is in dim 0 of the input (True) or in dim 1 (False)."""
        self.batch_first = is_batch_first

    def set_allow_smaller_batches(self, new_allow_smaller_batches: bool) -> None:
        """Says whether an input may have fewer samples than `batch_size`, as the later steps of a PackedSequence do."""
        self.allow_smaller_batches = new_allow_smaller_batches

    def __repr__(self) -> str:  # type: ignore[override]
        more = f"batch_size={self.batch_size}, loss_reduction={self.loss_reduction!r}"
        return f"ExpandedWeight({self.orig_weight!r}, {more})"

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        from persample.expanded_weights.bare import call_with_rule

        kwargs = kwargs or {}
        if func in _METADATA:
            return func(args[0].orig_weight, *args[1:], **kwargs)
        if func is _torch.cudnn_rnn_flatten_weight:
            return None
        if func in CELLS or func in cls.handled_functions:
            return call_with_rule(func, args, kwargs)
        raise RuntimeError(
            f"Expanded Weights encountered but cannot handle function {getattr(func, '__name__', func)}. By itself an "
            "ExpandedWeight cannot know where the batch lies in such a function: call the whole module with "
            "call_for_per_sample_grads, or register a rule with implements_per_sample_grads."
        )
