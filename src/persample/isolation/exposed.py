"""Memory of samples that code outside torch has got, such as NumPy, and may write unseen."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from persample import _torch
from persample._internal.facts import facts

_MOST = 64  # tensors that are remembered


class ExposedMemory:
    """Copies of tensors whose memory was handed out, to see later whether somebody has written into it.

    >>> exposed, x = ExposedMemory(), torch.zeros(3)
    >>> exposed.note(Tensor.numpy, x)
    >>> x.numpy()[:] = 1
    >>> exposed.has_changed(lambda tensor: True)
    True
    """

    def __init__(self) -> None:
        # The tensor, its memory, and the copy, None if its memory was not handed out.
        self._noted: deque[tuple[Callable[[], Tensor | None], int, Tensor | None]] = deque(maxlen=_MOST)

    def watch(self, tensor: Tensor, copy: Tensor | None = None) -> None:
        """Note where a tensor has its memory: `set_` gives it another one, which function modes do not see."""
        find = ref(tensor) if copy is None else lambda: tensor  # `x.detach()` in `x.detach().numpy()` has no owner
        self._noted.append((find, _find_address(tensor), copy))

    def note(self, func: Callable[..., Any], tensor: Any) -> None:
        """Note a tensor, if the function hands out its memory."""
        if facts(func).exposes_memory and isinstance(tensor, Tensor) and tensor.device.type == "cpu":
            with _torch.DisableTorchFunction(), torch.no_grad():
                self.watch(tensor, tensor.detach().clone())

    def find_changed(self) -> Iterator[Tensor]:
        """The tensors that have other values than their copies, or another memory."""
        with _torch.DisableTorchFunction(), torch.no_grad():
            for find, address, copy in self._noted:
                tensor = find()
                if tensor is not None and (_find_address(tensor) != address or _differ(tensor, copy)):
                    yield tensor

    def has_changed(self, has_samples: Callable[[Tensor], bool]) -> bool:
        """Whether a tensor with samples of this step has changed. Those that have not are forgotten."""
        changed = [*self.find_changed()]
        self._noted.clear()
        return any(has_samples(tensor) for tensor in changed)


def _find_address(tensor: Tensor) -> int:
    with _torch.DisableTorchFunction():
        storage = _torch.find_storage(tensor)
        return 0 if storage is None else storage.data_ptr()


def _differ(tensor: Tensor, copy: Tensor | None) -> bool:
    return copy is not None and not torch.equal(torch.nan_to_num(tensor), torch.nan_to_num(copy))
