"""One process, alone, and what the kinds of several processes have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from persample import _torch


class Follower(Protocol):
    """What is needed of the tracker that follows the samples of a recording."""

    anchor: Tensor

    def where(self, tensor: Tensor) -> Any: ...

    def tell(self, tensor: Tensor, where: Any) -> None: ...


class Processes:
    """One process, alone: all sums are its own."""

    def used(self, parameter: Tensor) -> Tensor:
        """The tensor that the forward pass uses for a parameter."""
        return parameter

    def face(self, parameter: Tensor) -> Tensor:
        """A plain tensor of a parameter's shape and type; nothing is said of its values."""
        return parameter

    def called(self, model: nn.Module) -> nn.Module:
        """The module whose forward takes the arguments of the model."""
        return model

    def total(self, name: str, part: Tensor, dtype: torch.dtype) -> Tensor:
        """The sum over all processes of what each has for a parameter, in shards if the parameter is."""
        return part

    def count(self, number: int) -> int:
        """The sum of a number over all processes."""
        return number

    def agreed(self, number: int) -> int:
        """The largest of a number over all processes, where they have to decide alike."""
        return number

    def whole(self, tensor: Tensor) -> Tensor:
        """All of a tensor, of which this process may have a shard."""
        return tensor

    def add_to_grad(self, used: Tensor, total: Tensor) -> None:
        """Adds what this process found to the `grad` of a parameter."""
        used.grad = total if used.grad is None else used.grad + total

    def forward_starts(self) -> None:
        """Says that the recorded model is about to run."""

    def recording(self, tracker: Follower, keep_grad: bool) -> AbstractContextManager[Any]:
        """The time of a recording, in which backward passes bring no ordinary gradients that could be waited for."""
        return nullcontext()

    def saving_weights(self) -> AbstractContextManager[Any]:
        """Goes around an op of weights alone; what it saves is needed when the backward pass has ended."""
        return nullcontext()

    def check_saved(self, derived: Tensor) -> None:
        """Refuses a tensor computed from weights by what saves them where `saving_weights` does not see it."""


class Several(Processes, ABC):
    """What a backward pass adds to `grad` is put aside until its end, when all processes add theirs together."""

    def __init__(self) -> None:
        self._aside: dict[int, tuple[Tensor, Tensor]] = {}
        self._passes: set[int] = set()  # the backward passes at whose end grads will be added

    def add_to_grad(self, used: Tensor, total: Tensor) -> None:
        before = self._aside.get(id(used))
        self._aside[id(used)] = (used, total if before is None else before[1] + total)
        self._add_at_the_end()

    def _watched(self, anchor: Tensor) -> Any:
        """The anchor's node, which runs in each backward pass, also where there are no samples.

        It has to be held until there is a graph that does.
        """
        node: Any = get_gradient_edge(anchor).node
        node.register_prehook(lambda grads: self._add_at_the_end())
        return node

    def _add_at_the_end(self) -> None:
        """Has what is aside added to the grads when this backward pass has ended, once."""
        backward_pass = _torch.get_backward_pass()
        if backward_pass not in self._passes:
            self._passes.add(backward_pass)
            _torch.call_after_backward(lambda: self._add_what_is_aside(backward_pass))

    def _add_what_is_aside(self, backward_pass: int) -> None:
        self._passes.remove(backward_pass)
        aside, self._aside = self._aside, {}
        with torch.no_grad():
            self._add_grads(aside)

    @abstractmethod
    def _add_grads(self, aside: dict[int, tuple[Tensor, Tensor]]) -> None:
        """Adds what all processes have aside to the grads."""

    def _used_by_any(self, parameters: Sequence[Tensor], aside: dict[int, tuple[Tensor, Tensor]]) -> list[Tensor]:
        """Those for which a process has something aside."""
        if not parameters:
            return []
        here = torch.tensor([id(p) in aside for p in parameters], dtype=torch.int32, device=parameters[0].device)
        return [p for p, times in zip(parameters, self._reduced(here).tolist(), strict=True) if times]

    def count(self, number: int) -> int:
        return int(self._reduced(torch.tensor(number, device=self._device())))

    def _reduced(self, tensor: Tensor, how: str = "SUM") -> Tensor:
        """The sum of a tensor over all processes, or the maximum."""
        reduced = tensor.clone(memory_format=torch.contiguous_format)
        for group in self._process_groups():
            torch.distributed.all_reduce(reduced, getattr(torch.distributed.ReduceOp, how), group)
        return reduced

    @abstractmethod
    def _process_groups(self) -> list[Any]:
        """A sum over the first, then over the next, is one over all processes."""

    @abstractmethod
    def _device(self) -> torch.device:
        """Where the parameters are."""


def take(aside: dict[int, tuple[Tensor, Tensor]], parameter: Tensor) -> Tensor:
    """What is aside for a parameter, or zeros."""
    own = aside.pop(id(parameter), None)
    return torch.zeros_like(parameter) if own is None else own[1]
