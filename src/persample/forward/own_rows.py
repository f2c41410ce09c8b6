"""Rows that are the same for all samples and are selected as one for each sample."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from persample._internal import tracing
from persample.layouts import Call, Layout, Where


def select_own_rows(call: Call) -> Call:
    """Replace `frames[:batch_size, ...]` by each sample's first row, if the values are equal.

    In a tensor `(B * T, ...)` of T rows for each sample, the first B rows belong to the first samples. A model that
    selects them as one row for each sample relies on rows that are the same for all samples, such as a class token
    that was expanded to them. The row of each sample itself has the same value, and the right gradient.
    """
    where = call.where[0]
    if (
        len(call.tensors) > 1
        or tracing.get_trace() is not None
        or not selects_first_rows(where, call.args[1], call.batch)
    ):
        return call
    assert isinstance(where, Layout)
    rows, item = call.args
    if len(rows) != where.inner * call.batch:
        return call
    parts = item if isinstance(item, tuple) else (item,)
    own = (slice(None, None, where.inner), *parts[1:])
    with torch.no_grad():
        is_same = torch.equal(Tensor.__getitem__(rows, item), Tensor.__getitem__(rows, own))
    return replace(call, args=(rows, own)) if is_same else call


def selects_first_rows(where: Where | None, item: Any, batch: int) -> bool:
    """Whether an item selects as many first rows as there are samples, although each sample has several rows."""
    if not isinstance(where, Layout) or where.dim or where.inner == 1 or where.ids is not None:
        return False
    first = item[0] if isinstance(item, tuple) and item else item
    return isinstance(first, slice) and first in (slice(batch), slice(0, batch))
