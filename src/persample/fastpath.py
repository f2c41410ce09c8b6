"""Modules of torch that take a faster way in eval() where nobody needs gradients: they are followed as a whole.

Under a mode they would not take it, and it does not always give the same: padded positions come out as zeros.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from persample.motion import Motion, Op, results_of
from persample.motion.by_trial import by_trial
from persample.motion.find import described
from persample.tree import tensors_in

_FAST = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)

_found: WeakKeyDictionary[nn.Module, dict[Any, Motion]] = WeakKeyDictionary()


class WholeModules:
    """While it is there, such modules of a tracker's model run without the tracker, and it is told of the result."""

    def __init__(self, tracker: Any) -> None:
        self.tracker = tracker
        self.running: list[tuple[nn.Module, Any]] = []
        self.hooks: list[Any] = []
        for module in tracker.model.modules():
            if isinstance(module, _FAST):
                self.hooks.append(module.register_forward_pre_hook(self._before, with_kwargs=True))
                self.hooks.append(module.register_forward_hook(self._after, with_kwargs=True, always_call=True))

    def remove(self) -> None:
        for hook in self.hooks:
            hook.remove()

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if module.training or self.running:
            return
        given = [*tensors_in((args, kwargs)), *module.parameters()]
        if torch.is_grad_enabled() and any(t.requires_grad for t in given):
            return
        guard = torch._C.DisableTorchFunction()
        guard.__enter__()
        self.running.append((module, guard))

    def _after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if not self.running or self.running[-1][0] is not module:
            return
        self.running.pop()[1].__exit__(None, None, None)
        with torch._C.DisableTorchFunction(), torch.no_grad():
            tensors = tuple(tensors_in((args, kwargs)))
            # Masks are not changed in trials: whether the fast way is taken depends on how all of them look.
            where = tuple(None if t.dtype == torch.bool else self.tracker.where(t) for t in tensors)
            results = results_of(output, args)
            if any(where) and output is not None:
                op = Op(module.forward, args, kwargs, tensors, where, self.tracker.batch)
                for made, place in zip(results, self._motion(module, op, results).results, strict=True):
                    self.tracker.tell(made, place)

    def _motion(self, module: nn.Module, op: Op, results: tuple[Tensor, ...]) -> Motion:
        """As it was for arguments of these shapes."""
        found = _found.setdefault(module, {})
        key = described(op)[1:]  # without the module, which would keep itself alive
        if key not in found:
            found[key] = by_trial(op, results)
        return found[key]
