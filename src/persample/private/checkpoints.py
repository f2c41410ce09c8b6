"""Checkpoint files of private training. Reading one runs no code of its author.

`torch.load(weights_only=True)` reads tensors, numbers, strings and containers, and refuses everything else that pickle
could make. Files are checked when they are written, so that every file can be read again.
"""

from __future__ import annotations

import pickle
import secrets
import warnings
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import serialization

from persample.errors import PerSampleError

_HOW_TO_CONVERT = (
    "If you trust the author of the file, convert it once: read it with torch.load(..., weights_only=False), replace "
    "its objects by numbers, strings and tensors, and write it with torch.save. Or declare the types that you trust "
    "with torch.serialization.add_safe_globals."
)


def load_safely(path: Any, options: Mapping[str, Any] | None = None) -> Any:
    """`torch.load` with `weights_only=True`. `options` are further arguments of it."""
    options = dict(options or {})
    if not options.pop("weights_only", True):
        raise PerSampleError(f"weights_only=False is not supported. {_HOW_TO_CONVERT}")
    try:
        with _allow_numbers():
            return torch.load(path, **options, weights_only=True)
    except pickle.UnpicklingError as error:
        raise PerSampleError(
            f"{path} is not a checkpoint, or contains objects that can run code when they are read: "
            f"{_find_cause(error)} {_HOW_TO_CONVERT}"
        ) from error


def check_loadable(file: Any) -> None:
    """Raise if `load_safely` will refuse a file that `torch.save` has just written. No object is made from it."""
    end = file.tell()
    file.seek(0)
    with _allow_numbers():
        unsafe = serialization.get_unsafe_globals_in_checkpoint(file)
    file.seek(end)
    if unsafe:
        raise PerSampleError(
            f"The checkpoint contains objects of {', '.join(sorted(unsafe))}. They could not be loaded again, because "
            "reading objects can run code. Save numbers, strings, tensors and containers of them, or declare the types "
            "with torch.serialization.add_safe_globals."
        )


Steps = tuple[float, float, int]  # noise multiplier, sample rate, number of steps


Lineage = list[tuple[str, int]]  # the name of each branch, and the number of steps before it


class History:
    """The steps of an accountant, of which none is lost when a checkpoint is loaded.

    Steps after the checkpoint were released, too, and so were those of other continuations of it. Each load begins a
    branch with a random name. The branches that a checkpoint and the accountant have in common tell how many of their
    first steps are the same.

    >>> from opacus.accountants import RDPAccountant
    >>> accountant = RDPAccountant()
    >>> history = History(accountant)
    >>> accountant.history = [(1.0, 0.1, 10)]
    >>> before, lineage = accountant.state_dict(), history.lineage
    >>> accountant.history = [(1.0, 0.1, 15)]
    >>> history.load_state_dict(before, lineage)
    >>> accountant.history
    [(1.0, 0.1, 15)]
    """

    def __init__(self, accountant: Any) -> None:
        self.accountant = accountant
        self.lineage: Lineage = [(secrets.token_hex(16), 0)]

    def load_state_dict(self, state: Mapping[str, Any], lineage: Lineage | str | None) -> None:
        """Load the steps of a checkpoint, and keep those of the accountant that it does not have."""
        own = list(self.accountant.history)
        self.accountant.load_state_dict(state)
        loaded = list(self.accountant.history)
        branches = [(lineage, 0)] if isinstance(lineage, str) else lineage or []
        given = [(name, start) for name, start in branches]
        shared = _count_shared((given, _count(loaded)), (self.lineage, _count(own)))
        if _join(_cut(own, 0, shared)) != _join(_cut(loaded, 0, shared)):
            shared = 0
        self.accountant.history = _join(loaded + _cut(own, shared))
        self.lineage = [*given, (secrets.token_hex(16), _count(loaded) if given else 0)]


def _count_shared(*histories: tuple[Lineage, int]) -> int:
    """The number of first steps that two histories have in common."""
    (a, steps_of_a), (b, steps_of_b) = histories
    common = 0
    while common < min(len(a), len(b)) and a[common] == b[common]:
        common += 1
    ends = [lineage[common][1] if common < len(lineage) else steps for lineage, steps in histories]
    return min(*ends, steps_of_a, steps_of_b) if common else 0


def _count(history: Iterable[Steps]) -> int:
    return sum(steps for _, _, steps in history)


def _cut(history: Iterable[Steps], start: int, end: float = float("inf")) -> list[Steps]:
    """The steps of a history from number `start` up to number `end`."""
    found, before = [], 0
    for noise, rate, steps in history:
        count = int(min(end, before + steps) - max(start, before))
        found += [(noise, rate, count)] if count > 0 else []
        before += steps
    return found


def _join(history: list[Steps]) -> list[Steps]:
    """The same history, with neighbouring steps of one kind as one entry."""
    groups = [(kind, [*steps]) for kind, steps in groupby(history, lambda entry: entry[:2])]
    return [(*kind, sum(steps for _, _, steps in entries)) for kind, entries in groups]


def restore_parts(
    checkpoint: dict[str, Any],
    *,
    accountant: History,
    module: Any,
    optimizer: Any = None,
    noise_scheduler: Any = None,
    grad_clip_scheduler: Any = None,
    module_options: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Load the parts of a checkpoint in the format of Opacus; return the checkpoint without the loaded states."""
    state = remove_prefix(checkpoint["module_state_dict"], module)
    module.load_state_dict(state, **(module_options or {}))
    accountant.load_state_dict(checkpoint["privacy_accountant_state_dict"], checkpoint.pop("persample_lineage", None))
    parts = {"optimizer": optimizer, "noise_scheduler": noise_scheduler, "grad_clip_scheduler": grad_clip_scheduler}
    for name, part in parts.items():
        state = checkpoint.pop(f"{name}_state_dict", None)
        if part is not None and state:
            part.load_state_dict(state)
        elif name == "optimizer" and (part is not None or state):
            missing = "the checkpoint has none" if part is not None else "no optimizer was passed"
            warnings.warn(f"The state of the optimizer is not restored: {missing}.", stacklevel=3)
    return checkpoint


_PREFIX = "_module."


def remove_prefix(state: Mapping[str, Any], module: Any) -> Mapping[str, Any]:
    """The state of a module without the names of Opacus' wrapper, unless the module has such names itself."""
    if not state or not all(name.startswith(_PREFIX) for name in state):
        return state
    if any(name.startswith(_PREFIX) for name in module.state_dict()):  # the wrapper itself, or a submodule "_module"
        return state
    return {name.removeprefix(_PREFIX): value for name, value in state.items()}


class ModuleWithPrefix:
    """A module whose state has the names of Opacus' wrapper."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def state_dict(self, prefix: str = "", **options: Any) -> dict[str, Any]:
        return dict(self._module.state_dict(prefix=prefix + _PREFIX, **options))


class StateWithoutFunctions:
    """A scheduler of Opacus whose state leaves out functions, such as that of LambdaNoise. Loading keeps them."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler

    def state_dict(self) -> dict[str, Any]:
        return {key: value for key, value in self._scheduler.state_dict().items() if not callable(value)}


def _allow_numbers() -> AbstractContextManager[Any]:
    """Allow numpy's numbers, which accountants may contain. They are made from bytes, and run no code."""
    make: Any = np.float64(0).__reduce__()[0]
    names = ["numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar"]  # in numpy 1 and numpy 2
    dtypes = [type(np.dtype(kind)) for kind in (np.float64, np.float32, np.int64, np.int32, np.bool_)]
    return serialization.safe_globals([*((make, name) for name in names), np.dtype, *dtypes])


def _find_cause(error: Exception) -> str:
    """The sentence of torch's message that names the object."""
    text = str(error).partition("WeightsUnpickler error: ")[2] or str(error)
    return text.strip().partition(". ")[0] + "."
