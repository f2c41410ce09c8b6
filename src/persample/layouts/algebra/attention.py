"""Attention: each query combines all keys and values of its matrix."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from persample._internal import tracing
from persample.layouts.algebra.engine import broadcast, declare, get_argument, keep, lose, merge_rows, move
from persample.layouts.call import Call
from persample.layouts.layout import Layout
from persample.layouts.motion import Motion

# Scores that are lower by so much get a weight of exactly zero in a softmax.
_EXCLUDED = -1e9


def _is_by_sample(call: Call) -> bool:
    """Rows of queries may belong to samples, too."""
    return all(where is None or where.dim < tensor.dim() - 2 for tensor, where in call.pairs)  # type: ignore[union-attr]


@declare(F.scaled_dot_product_attention, is_size_free=True, size_free_if=_is_by_sample)
def attend(call: Call, results: Sequence[Tensor]) -> Motion | None:
    """Queries, keys and values are matrices; the dimensions before them are independent."""
    in_matrices = [isinstance(where, Layout) and where.dim >= tensor.dim() - 2 for tensor, where in call.pairs]
    if any(in_matrices[1:3]):
        return _attend_to_rows(call, results)
    if any(in_matrices):
        return _attend_from_rows(call, results)
    if get_argument(call, 8, "enable_gqa", default=False) and any(
        isinstance(where, Layout) and where.dim == tensor.dim() - 3 for tensor, where in call.pairs
    ):
        return None  # the samples lie in the dimension of the heads, in which keys are repeated
    return broadcast(call, results)


def _attend_from_rows(call: Call, results: Sequence[Tensor]) -> Motion | None:
    """Queries of samples attend to keys and values without samples: each query is computed by itself."""
    query, where = call.tensors[0], call.where[0]
    is_causal = get_argument(call, 5, "is_causal", default=False)
    if len(call.tensors) > 3 or any(call.where[1:]) or is_causal or not isinstance(where, Layout):
        return None
    return lose(call, results, "sums over the samples") if where.dim == query.dim() - 1 else keep(call, results)


def _attend_to_rows(call: Call, results: Sequence[Tensor]) -> Motion:
    """Several samples in one sequence: a mask must keep each query to the keys of its own sample."""
    lost = lose(call, results, "attends from each sample to the others")
    if len(call.tensors) != 4 or call.where[3] is not None or tracing.get_trace() is not None:
        return lost
    query, key, _, mask = call.tensors
    where, of_keys, of_values, _ = call.where
    rank = query.dim()
    if any(not isinstance(w, Layout) or t.dim() != rank for t, w in zip(call.tensors[:3], call.where[:3], strict=True)):
        return lost
    assert isinstance(where, Layout) and isinstance(of_keys, Layout) and isinstance(of_values, Layout)
    rows, columns = query.shape[-2], key.shape[-2]
    if {where.dim, of_keys.dim, of_values.dim} != {rank - 2} or where.loose or of_keys.loose or mask.dim() < 2:
        return lost
    if merge_rows(of_keys, of_values, columns, call.batch) is None or mask.shape[-2:] != (rows, columns):
        return lost
    of_query = torch.tensor(where.get_ids(rows, call.batch), device=mask.device)
    of_key = torch.tensor(of_keys.get_ids(columns, call.batch), device=mask.device)
    is_own = of_query[:, None] == of_key
    is_allowed = mask if mask.dtype == torch.bool else mask > _EXCLUDED
    # A query without an allowed key of its own may weigh all keys alike.
    if bool((is_allowed & ~is_own).any()) or not bool((is_allowed & is_own).any(-1).all()):
        return lost
    return Motion((move(where, where.dim),) * len(results), depends_on_values=True)
