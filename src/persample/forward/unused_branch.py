"""`torch.where` with a branch that is not used."""

from __future__ import annotations

from dataclasses import replace

import torch

from persample._internal import tracing
from persample.layouts import Call, Layout, Lost, Reduced


def drop_unused_branch(call: Call) -> Call:
    """The same call with a constant in place of a branch in which samples are mixed, if no entry of it is used.

    Time series are scaled by a statistic of the batch where nothing was observed, for example. Where everything was
    observed, the batch does not matter. The values of the condition decide, so each call is looked at.
    """
    if len(call.args) != 3 or len(call.tensors) != 3 or call.kwargs or tracing.get_trace() is not None:
        return call
    at = 0 if call.func is torch.where else 1  # x.where(condition, y)
    if isinstance(call.where[at], (Lost, Reduced)):
        return call
    branches = [i for i in range(3) if i != at]
    for branch, is_unused in zip(branches, (~call.tensors[at].bool(), call.tensors[at].bool()), strict=True):
        where, other = call.where[branch], call.where[sum(branches) - branch]
        if not isinstance(where, (Lost, Reduced)) or isinstance(other, (Lost, Reduced)):
            continue
        if bool(is_unused.all()):
            tensors = [t.detach() if i == branch else t for i, t in enumerate(call.tensors)]
            args, kwargs = call.fill(tensors)
            layouts = tuple(None if i == branch else w for i, w in enumerate(call.where))
            return replace(call, args=args, kwargs=kwargs, tensors=tuple(tensors), where=layouts)
        if isinstance(call.where[at], Layout) or isinstance(other, Layout):
            used = int((~is_unused).sum())
            cause = (
                f"where takes entries from a tensor in which the samples are mixed, in {used} of "
                f"{is_unused.numel()} places ({where.cause}; choose a value there that does not depend on the batch)"
            )
            layouts = tuple(Lost(cause) if i == branch else w for i, w in enumerate(call.where))
            return replace(call, where=layouts)
    return call
