"""Transformer layers of torch in eval() without gradients: run on torch's fast path, and followed as a whole.

Under a function mode torch would not take the fast path, and the two paths can differ: the fast one returns zeros at
padded positions. Hooks would prevent it too, so `forward` itself is replaced on such modules while a tracker is active.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor, nn

from persample import _torch
from persample._internal.functions import find_results
from persample._internal.tree import find_tensors
from persample.errors import PerSampleError, get_op_name, raise_or_complain
from persample.layouts import (
    MEMO,
    Call,
    Layout,
    Lost,
    Motion,
    Reduced,
    find_motion_by_trial,
    has_different_orders,
    make_uniform_motion,
)

if TYPE_CHECKING:
    from persample.forward.tracker import Tracker

LAYERS = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)


class WholeModules:
    """Until `remove`, runs the transformer layers of a tracker's model without the tracker and sets their layouts."""

    def __init__(self, tracker: Tracker, layers: Sequence[nn.Module]) -> None:
        self.tracker = tracker
        found = [module for module in layers if not _has_own_forward(module)]
        self._modules = list(map(ref, found))  # the tracker must not keep its model
        for module in found:
            vars(module)["forward"] = _WholeForward(self, module)

    def remove(self) -> None:
        for reference in self._modules:
            if (module := reference()) is not None:
                vars(module).pop("forward", None)

    def run(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Run the forward of a module, on torch's fast path if possible."""
        if self.tracker.has_ended or not _can_take_fast_path(module, args, kwargs):
            return type(module).forward(module, *args, **kwargs)
        with _torch.DisableTorchFunction(), self.tracker.path.follow_whole():
            output = type(module).forward(module, *args, **kwargs)
            try:
                self._set_layouts(module, args, kwargs, output)
            except PerSampleError as error:
                raise_or_complain(error, self.tracker.complain)
        return output

    def _set_layouts(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        tensors = tuple(find_tensors((args, kwargs)))
        # Nested tensors occur inside a larger module that is followed as a whole.
        where = tuple(None if t.is_nested else self.tracker.find_layout(t) for t in tensors)
        if any(where):
            call = Call(_Forward(ref(module), type(module).__name__), args, kwargs, tensors, where, self.tracker.batch)
            results = find_results(output, args)
            with torch.no_grad():
                motion = self._find_motion(module, call, results)
            for made, layout in zip(results, motion.results, strict=True):
                self.tracker.set_layout(made, layout)

    def _find_motion(self, module: nn.Module, call: Call, results: tuple[Tensor, ...]) -> Motion:
        """How the module moves the samples, found once for arguments of these shapes."""
        for where in call.where:
            if isinstance(where, (Lost, Reduced)):
                return make_uniform_motion(Lost(where.cause, where.place), results)
        if has_different_orders(call):
            cause = f"{type(module).__name__} has the samples in different orders in its arguments"
            return make_uniform_motion(Lost(cause), results)
        return MEMO.get_or_find(call.key, lambda: _find_motion_of_layer(call, results))


def _find_motion_of_layer(call: Call, results: tuple[Tensor, ...]) -> Motion:
    # Masks are not changed in trials: whether torch takes the fast path depends on the whole mask.
    where = [None if t.dtype == torch.bool else w for t, w in zip(call.tensors, call.where, strict=True)]
    motion = find_motion_by_trial(replace(call, where=tuple(where)), results)
    if not any(isinstance(w, Layout) for w in where):
        cause = f"{get_op_name(call.func)} depends on the samples only through its mask"
        return make_uniform_motion(Lost(cause), results)
    return motion


class _WholeForward:
    """Stands in for the forward of a module. A copy of the module, and a saved one, have their own forward instead."""

    def __init__(self, whole_modules: WholeModules, module: nn.Module) -> None:
        self._whole_modules = whole_modules
        self._module = ref(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        assert module is not None  # it is being called
        return self._whole_modules.run(module, args, kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._module(), "forward")  # the copy has no attributes yet, so this is its class's method


def _has_own_forward(module: nn.Module) -> bool:
    """Whether a module has another forward than its class."""
    forward = vars(module).get("forward")
    return forward is not None and getattr(forward, "__func__", None) is not type(module).forward


@dataclass(frozen=True)
class _Forward:
    """The forward of a module, as a function with a name; equal for one module."""

    module: ref[nn.Module]  # keys of calls must not keep it
    __name__: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.module()
        assert module is not None  # it is being called
        return type(module).forward(module, *args, **kwargs)


def _can_take_fast_path(module: nn.Module, args: Any, kwargs: Any) -> bool:
    """Whether torch may take its fast path: no gradients, eval(), and no hooks inside the module."""
    if module.training or any(map(_torch.has_forward_hooks, list(module.modules())[1:])):
        return False
    given = [*find_tensors((args, kwargs)), *module.parameters()]
    return not (torch.is_grad_enabled() and any(t.requires_grad for t in given))
