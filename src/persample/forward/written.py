"""What a call of a torch function writes into."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from persample._internal.functions import is_inplace
from persample._internal.tree import find_tensors

# Functions that write into buffers among their arguments.
UPDATING = {nn.functional.batch_norm, nn.functional.instance_norm, torch.batch_norm, torch.instance_norm}

# Functions that replace the memory of their first argument.
REPLACING: set[Any] = {Tensor.data.__set__}  # type: ignore[attr-defined]


class Written:
    """What a function writes into, as it is before: a call that is refused may have run, or not.

    Attributes:
        tensor: the tensor that the function writes into and returns, None if there is none.
    """

    __slots__ = ("_statistics", "_version", "tensor")

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.tensor = args[0] if args and is_inplace(func) else kwargs.get("out")
        self._version = self.tensor._version if isinstance(self.tensor, Tensor) else 0
        self._statistics: Sequence[tuple[Tensor, Tensor]] = ()
        if func in UPDATING:
            vectors = [t for t in find_tensors((args, kwargs)) if t.dim() == 1 and not t.requires_grad]
            self._statistics = [(vector, vector.clone()) for vector in vectors]

    def has_changed(self) -> bool:
        """Whether the function has written into the tensor."""
        return isinstance(self.tensor, Tensor) and self.tensor._version != self._version

    def restore_statistics(self) -> None:
        """Give running statistics of a norm layer the values that they had before."""
        with torch.no_grad():
            for statistic, before in self._statistics:
                statistic.copy_(before)
