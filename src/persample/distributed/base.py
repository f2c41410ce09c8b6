"""One process without others, and what DDP and FSDP have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from persample import _torch

T = TypeVar("T")


# Where the samples lie in a tensor; layouts are not known here.
LayoutT = TypeVar("LayoutT")


class Follower(Protocol[LayoutT]):
    """The part of the tracker that is needed here."""

    def find_layout(self, tensor: Tensor) -> LayoutT: ...

    def set_layout(self, tensor: Tensor, layout: LayoutT) -> None: ...


class Processes:
    """The processes that share a batch. This base class is for one process without others."""

    def get_used(self, parameter: Tensor) -> Tensor:
        """The tensor that the forward pass uses for a parameter."""
        return parameter

    def get_template(self, parameter: Tensor) -> Tensor:
        """A plain tensor with the shape, dtype and device of a parameter; its values have no meaning."""
        return parameter

    def get_called_module(self, model: nn.Module) -> nn.Module:
        """The module whose forward receives the arguments of a call of the model."""
        return model

    def add_up(self, name: str, part: Tensor, dtype: torch.dtype) -> Tensor:
        """The sum over all processes of what each has for a parameter; sharded if the parameter is sharded."""
        return part

    def count(self, number: int) -> int:
        """The sum of a number over all processes."""
        return number

    def find_largest(self, number: int) -> int:
        """The largest value of a number over all processes, for decisions that must be the same on all of them."""
        return number

    def get_rank(self) -> int:
        """The number of this process."""
        return 0

    def gather_objects(self, value: T) -> list[tuple[int, T]]:
        """The values of all processes with the numbers of the processes, in their order."""
        return [(self.get_rank(), value)]

    def add_tensors(self, tensor: Tensor) -> Tensor:
        """The sum over all processes of a tensor that has the same shape and dtype in each."""
        return tensor

    def gather(self, tensor: Tensor) -> Tensor:
        """The whole tensor, of which this process may have a shard."""
        return tensor

    def add_to_grad(self, used: Tensor, total: Tensor) -> None:
        """Add what this process found to the `grad` of a parameter, in the dtype that the parameter wants."""
        total = total.to(getattr(used, "grad_dtype", None) or total.dtype)
        used.grad = total if used.grad is None else used.grad + total

    def start_forward(self) -> None:
        """Note that the recorded model is about to run."""

    def restore_settings(self) -> None:
        """Give the model its settings back, after the last pass of a recording that goes on."""

    def prepare_recording(self, tracker: Follower[Any], anchor: Tensor | None) -> AbstractContextManager[Any]:
        """Context manager for a recording: torch must not wait for gradients of parameters, which do not arrive.

        `anchor` is a leaf that every recorded use depends on, if the recording adds to `grad`; else None.
        """
        return nullcontext()

    def saving_weights(self) -> AbstractContextManager[Any]:
        """Context manager for an op of weights alone: what it saves must live until the end of the backward pass."""
        return nullcontext()

    def check_saved(self, derived: Tensor) -> None:
        """Refuse a tensor computed from weights if its graph saves a weight without `saving_weights`."""


class Several(Processes, ABC):
    """Several processes. What a backward pass adds to `grad` is pending until its end, when all processes add up."""

    def __init__(self) -> None:
        self._pending: dict[int, tuple[Tensor, Tensor]] = {}
        self._passes: set[int] = set()  # the backward passes with a callback at their end
        self._adds_grads = False  # whether the processes add up gradients in each backward pass

    def add_to_grad(self, used: Tensor, total: Tensor) -> None:
        before = self._pending.get(id(used))
        self._pending[id(used)] = (used, total if before is None else before[1] + total)
        self._add_after_backward()

    def _watch_anchor(self, anchor: Tensor) -> Any:
        """Hook the anchor's node, which runs in each backward pass, even in an empty batch.

        Returns the node: it must be kept alive until there is a graph that refers to it.
        """
        self._adds_grads = True
        node: Any = get_gradient_edge(anchor).node
        node.register_prehook(lambda grads: self._add_after_backward())
        return node

    def _add_after_backward(self) -> None:
        """Add what is pending to the grads when this backward pass has ended."""
        backward_pass = _torch.get_backward_pass()
        if backward_pass not in self._passes:
            self._passes.add(backward_pass)
            _torch.call_after_backward(lambda: self._add_pending(backward_pass))

    def _add_pending(self, backward_pass: int) -> None:
        self._passes.remove(backward_pass)
        pending, self._pending = self._pending, {}
        with torch.no_grad():
            self._add_grads(pending)

    @abstractmethod
    def _add_grads(self, pending: dict[int, tuple[Tensor, Tensor]]) -> None:
        """Add what is pending on all processes to the grads."""

    def _find_used(self, parameters: Sequence[Tensor], pending: dict[int, tuple[Tensor, Tensor]]) -> list[Tensor]:
        """The parameters for which any process has something pending."""
        if not parameters:
            return []
        here = torch.tensor([id(p) in pending for p in parameters], dtype=torch.int32, device=parameters[0].device)
        return [p for p, times in zip(parameters, self._reduce(here).tolist(), strict=True) if times]

    def count(self, number: int) -> int:
        return int(self._reduce(torch.tensor(number, device=self._get_device())))

    def find_largest(self, number: int) -> int:
        return int(self._reduce(torch.tensor(number, device=self._get_device()), "MAX"))

    def get_rank(self) -> int:
        return torch.distributed.get_rank()

    def gather_objects(self, value: T) -> list[tuple[int, T]]:
        found = super().gather_objects(value)
        for group in self._get_groups():
            gathered: list[list[tuple[int, T]]] = [[] for _ in range(torch.distributed.get_world_size(group))]
            torch.distributed.all_gather_object(gathered, found, group)
            found = [pair for part in gathered for pair in part]
        return sorted(found, key=lambda pair: pair[0])

    def add_tensors(self, tensor: Tensor) -> Tensor:
        return self._reduce(tensor)

    def _reduce(self, tensor: Tensor, how: str = "SUM") -> Tensor:
        """The sum of a tensor over all processes, or the maximum ("MAX")."""
        reduced = tensor.clone(memory_format=torch.contiguous_format)
        for group in self._get_groups():
            torch.distributed.all_reduce(reduced, getattr(torch.distributed.ReduceOp, how), group)
        return reduced

    @abstractmethod
    def _get_groups(self) -> list[Any]:
        """Process groups; a sum over one after the other is a sum over all processes."""

    @abstractmethod
    def _get_device(self) -> torch.device:
        """The device of the parameters."""


def take_pending(pending: dict[int, tuple[Tensor, Tensor]], parameter: Tensor) -> Tensor:
    """Remove and return what is pending for a parameter, zeros if nothing is."""
    own = pending.pop(id(parameter), None)
    return torch.zeros_like(parameter) if own is None else own[1]
