"""Modules of torch that take a faster way in eval() where nobody needs gradients: they are followed as a whole.

Under a mode they would not take it, and it does not always give the same: padded positions come out as zeros. Nor would
they take it if they had hooks, so that it is `forward` that is replaced on such modules while a tracker is active.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from persample import _torch
from persample._internal.functions import find_results
from persample._internal.tree import find_tensors
from persample.layouts import Motion, Op
from persample.layouts.by_trial import by_trial, in_other_orders
from persample.layouts.find import described
from persample.layouts.layout import Layout, Lost, Reduced
from persample.layouts.motion import everywhere

_FAST = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)

_found: WeakKeyDictionary[nn.Module, dict[Any, Motion]] = WeakKeyDictionary()


class WholeModules:
    """Until it is removed, such modules of a tracker's model run without the tracker, and it is told of the result."""

    def __init__(self, tracker: Any) -> None:
        self.tracker = tracker
        self.modules = [m for m in tracker.model.modules() if isinstance(m, _FAST) and "forward" not in vars(m)]
        for module in self.modules:
            vars(module)["forward"] = self._forward(module)

    def remove(self) -> None:
        for module in self.modules:
            vars(module).pop("forward", None)

    def _forward(self, module: nn.Module) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if not _needs_no_gradients(module, args, kwargs):
                return type(module).forward(module, *args, **kwargs)
            with _torch.DisableTorchFunction():
                output = type(module).forward(module, *args, **kwargs)
                self._tell(module, args, kwargs, output)
            return output

        return forward

    def _tell(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        tensors = tuple(find_tensors((args, kwargs)))
        where = tuple(map(self.tracker.where, tensors))
        if any(where):
            op = Op(_Forward(module), args, kwargs, tensors, where, self.tracker.batch)
            results = find_results(output, args)
            with torch.no_grad():
                motion = self._motion(module, op, results)
            for made, place in zip(results, motion.results, strict=True):
                self.tracker.tell(made, place)

    def _motion(self, module: nn.Module, op: Op, results: tuple[Tensor, ...]) -> Motion:
        """As it was for arguments of these shapes."""
        for where in op.where:
            if isinstance(where, (Lost, Reduced)):
                return everywhere(Lost(where.cause, where.place), results)
        if in_other_orders(op):
            return everywhere(Lost(f"{type(module).__name__} takes the samples in different orders"), results)
        found = _found.setdefault(module, {})
        key = described(op)[1:]  # without the module, which would keep itself alive
        if key not in found:
            # Masks are not changed in trials: whether the fast way is taken depends on how all of them look.
            kept = [None if t.dtype == torch.bool else w for t, w in zip(op.tensors, op.where, strict=True)]
            layouts = [w for w in kept if isinstance(w, Layout)]
            found[key] = by_trial(Op(op.func, op.args, op.kwargs, op.tensors, tuple(kept), op.batch), results)
            if not layouts:
                found[key] = everywhere(Lost(f"{type(module).__name__} has samples in its mask only"), results)
        return found[key]


class _Forward:
    """The forward of a module, as a function with a name."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.__name__ = type(module).__name__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return type(self.module).forward(self.module, *args, **kwargs)


def _needs_no_gradients(module: nn.Module, args: Any, kwargs: Any) -> bool:
    """Whether torch may take the fast way; it does not where a hook would see what is inside."""
    if module.training or any(map(_torch.has_forward_hooks, list(module.modules())[1:])):
        return False
    given = [*find_tensors((args, kwargs)), *module.parameters()]
    return not (torch.is_grad_enabled() and any(t.requires_grad for t in given))
