"""Calls whose effect holds at any size, so that it is kept under a key without sizes.

Most calls of a forward pass are of functions whose motion does not depend on sizes (`layouts.SIZE_FREE`). The first
such call with a key takes the steps (`steps`), and later ones do not. Functions that change shapes (`view`, `x[:, 0]`)
have no key: their layout is computed from the shapes each time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from persample._internal.facts import all_with
from persample._internal.functions import find_results
from persample.backward import Plan
from persample.forward.use import Use
from persample.layouts import (
    HAS_PARAMETERS,
    HAS_SAMPLES,
    MEMO,
    Call,
    Effect,
    Key,
    Layout,
    Motion,
    find_size_free_layout,
    get_argument,
)
from persample.rules import RULES_VERSION, Rewrite, get_handler

if TYPE_CHECKING:
    from persample.forward.tracker import Tracker

# Functions that need not be followed.
WITHOUT_TENSORS = all_with("reads_metadata")


def keep_effect(call: Call, result: Any, key: Key, contents: int, tracker: Tracker) -> None:
    """After a call that took the steps: keep what it did under its key without sizes, if that holds at any size.

    `contents` says what the tensors of the call are.
    """
    if not contents & HAS_SAMPLES or isinstance(get_handler(call.func), Rewrite) or not torch.is_grad_enabled():
        return
    if call.facts.statistics_at and get_argument(call, 5, "training", "use_input_stats", default=True):
        return
    if call.is_inplace or call.kwargs.get("requires_grad"):  # the audit compares what was written
        return
    results = find_results(result, call.args)
    layout = find_size_free_layout(call, results)
    if layout is None or any(not tracker.is_known(each) or tracker.get_known(each) != layout for each in results):
        return
    motion = Motion((layout,))
    if contents & HAS_PARAMETERS:
        use = MEMO.get(call.key)
        if not isinstance(use, Use) or use.rules_version is None:
            return
        if _has_fixed_weights(call, use.plan, layout, results[0]):
            MEMO.add(key, Use(motion, use.rules_version, plan=use.plan, weights=use.weights))
    elif all(isinstance(each, Tensor) for each in (result if isinstance(result, (tuple, list)) else [result])):
        MEMO.add(key, Effect(motion, RULES_VERSION.number))


def _has_fixed_weights(call: Call, plan: Plan, layout: Layout, result: Tensor) -> bool:
    """Whether no weight of a use can have rows for each sample, whatever its size is.

    `layout` is where the samples lie in the result.
    """
    dims = [call.tensors[i].dim() for i, _ in plan.weights_at]
    if any(plan.layouts[i] is not None for i, _ in plan.weights_at):
        return False
    if call.facts.shares_weights:
        return True
    if call.facts.operator in ("matmul", "mm"):
        return max(dims) <= 2
    if call.facts.operator == "addmm":
        return all(dim == (1 if i == 0 else 2) for (i, _), dim in zip(plan.weights_at, dims, strict=True))
    # Functions of entries: dimensions are counted from the last one.
    return call.facts.is_pointwise and all(dim < result.dim() - layout.dim for dim in dims)
