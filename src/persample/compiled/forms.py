"""Arguments and results of a step, with their tensors taken out: a graph takes and returns flat lists of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from persample import _torch
from persample._internal.text import describe_value
from persample.compiled.cache_key import describe_tensor
from persample.compiled.describe import PLAIN_TYPES
from persample.errors import PerSampleError


@dataclass(frozen=True)
class Form:
    """A nested value without its tensors."""

    spec: Any  # how the leaves are nested
    leaves: tuple[Any, ...]  # None in the place of a tensor
    positions: tuple[int, ...]  # of the tensors among the leaves

    def fill(self, tensors: Sequence[Tensor]) -> Any:
        """The nested value with these tensors."""
        leaves = list(self.leaves)
        for position, tensor in zip(self.positions, tensors, strict=True):
            leaves[position] = tensor
        return _torch.pytree.tree_unflatten(leaves, self.spec)

    def find_unsupported(self) -> Any:
        """A leaf that is neither a tensor nor a number, string or None; None if there is none."""
        return next((leaf for leaf in self.leaves if type(leaf) not in PLAIN_TYPES), None)


def take_out_leaves(value: Any, tensor_type: type[Tensor]) -> tuple[Form, list[Tensor]]:
    """Separate a nested value into its form and its tensors of one type."""
    leaves, spec = _torch.pytree.tree_flatten(value)
    positions = tuple([i for i, leaf in enumerate(leaves) if isinstance(leaf, tensor_type)])
    others = tuple([None if isinstance(leaf, tensor_type) else leaf for leaf in leaves])
    return Form(spec, others, positions), [leaves[i] for i in positions]


class Arguments:
    """The arguments of a call of a step; `key` holds everything about them except the values of the tensors."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._form, self.tensors = take_out_leaves((args, kwargs), Tensor)
        unsupported = [
            t for t in self.tensors if type(t) not in (Tensor, nn.Parameter) or t.layout is not torch.strided
        ]
        if unsupported or self._form.find_unsupported() is not None:
            found = unsupported[0] if unsupported else self._form.find_unsupported()
            raise PerSampleError(
                "The arguments of a compiled step must be plain tensors, numbers and strings, in lists, tuples and "
                f"dicts, got {describe_value(found)}."
            )
        leaves = tuple([(type(leaf), leaf) for leaf in self._form.leaves])
        # Whether an argument requires grad makes no difference: it gets no gradient.
        tensors = tuple([describe_tensor(t)[:-1] for t in self.tensors])
        self.key = (self._form.spec, self._form.positions, leaves, tensors)

    def fill(self, tensors: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The positional and keyword arguments with other tensors."""
        return self._form.fill(tensors)


def split_result(result: Any) -> tuple[Form, list[Tensor]]:
    """The form and the tensors of the result of a step that is traced."""
    form, tensors = take_out_leaves(result, _torch.FakeTensor)
    unsupported = form.find_unsupported()
    if unsupported is not None:
        raise PerSampleError(
            "A compiled step can return tensors, numbers and strings, but loss_fn or answer returned "
            f"{describe_value(unsupported)}."
        )
    return form, tensors
