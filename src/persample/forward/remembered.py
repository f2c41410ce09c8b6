"""What the sizes of tensors from outside told in batches of other sizes: which of them are the same for all samples.

A constant may happen to have the batch's size: weights of T positions in a batch of T samples, a queue as long as the
batch, the boxes of one image where there are as many images. In other steps, or for other images, it had another size.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable
from pathlib import Path
from types import FrameType
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

_LIBRARIES = str(Path(torch.__file__).parent), str(Path(__file__).parents[1])

_MAX_ENTRIES = 1000  # of each kind, for each model
_MAX_FRAMES = 3  # of the user's code, which tell apart the calls of a helper


class RememberedConstants:
    """The tensors from outside, and places in the code around a model, that were seen with constants."""

    def __init__(self) -> None:
        self._tensors: dict[int, ref[Tensor]] = {}
        self._sites: dict[Hashable, None] = {}  # forms of tensors, and places in the code
        self._names: dict[tuple[int, str], None] = {}  # of arguments of the model and of its parts
        self._noted: list[tuple[dict[Any, Any], Hashable]] = []  # in this step

    def start_step(self) -> None:
        """Keep what was noted in earlier steps."""
        self._noted.clear()

    def forget_step(self) -> None:
        """Forget what was noted in this step: the batch is larger than it seemed."""
        for entries, key in self._noted:
            entries.pop(key, None)
        self._noted.clear()

    def note_constant(self, tensor: Tensor, site: Hashable = None) -> None:
        """Note that a tensor has another size than the batch; `site`: where it was used, if not here."""
        if not self._is_known(tensor):
            self._keep(self._tensors, id(tensor), ref(tensor))
        site = site or find_site(tensor)
        if site not in self._sites:
            self._keep(self._sites, site, None)

    def is_constant(self, tensor: Tensor) -> bool:
        """Whether a tensor with the batch's size is a constant: it, or others at this place, had another size."""
        return self._is_known(tensor) or find_site(tensor) in self._sites

    def _is_known(self, tensor: Tensor) -> bool:
        known = self._tensors.get(id(tensor))
        return known is not None and known() is tensor

    def note_name(self, module: nn.Module, name: str) -> None:
        """Note that an argument of a module had another size than the batch."""
        self._keep(self._names, (id(module), name), None)

    def list_names(self, module: nn.Module) -> list[str]:
        """The arguments of a module that were constants in a batch of another size."""
        return [name for number, name in self._names if number == id(module)]

    def _keep(self, entries: dict[Any, Any], key: Hashable, value: object) -> None:
        if len(entries) >= _MAX_ENTRIES:
            entries.pop(next(iter(entries)))
        entries[key] = value
        self._noted.append((entries, key))


def find_site(tensor: Tensor) -> Hashable:
    """The form of a tensor, and the place in the user's code that uses it now."""
    return tensor.dim(), tensor.dtype, tensor.shape[1:], *_find_places()


def _find_places() -> list[Hashable]:
    """The places in the user's code that are running, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    places: list[Hashable] = []
    while frame is not None and len(places) < _MAX_FRAMES:
        if not frame.f_code.co_filename.startswith(_LIBRARIES):
            places.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return places
