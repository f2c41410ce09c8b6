"""The columns of a shard, from those of its batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from persample.scanning.measure import Columns
from persample.scanning.predictions import make_missing
from persample.scanning.store import Array

SKIPPED = "skipped"  # column with what is wrong with an example that was not measured; empty for all others


def pack_shard(
    batches: Sequence[Columns], dtype: str, skipped: Mapping[int, str] | None = None
) -> tuple[dict[str, Array], Array | None]:
    """The columns of a shard, and its projected gradients.

    Projected gradients are scaled to length 1, so that float16 neither overflows nor underflows. Their lengths become a
    column; it is 0 for gradients that are not finite, which then influence nothing.

    `skipped` says what is wrong with examples that are not in the batches; None if the scan skips none.
    """
    batches = [*batches, _describe_skipped(list(skipped), batches[0])] if skipped else batches
    columns = {name: torch.cat([part[name] for part in batches]) for name in batches[0]}
    order = columns["id"].argsort()  # batches may have been sorted by length
    columns = {name: column[order] for name, column in columns.items()}
    rows: Array | None = None
    if (projected := columns.pop("projection", None)) is not None:
        lengths = torch.linalg.vector_norm(projected, dim=1, dtype=torch.float64).nan_to_num(nan=0.0, posinf=0.0)
        rows = _scale_to_unit_length(projected, lengths).to(getattr(torch, dtype)).numpy()
        columns["length"] = lengths
    packed = {name: column.numpy() for name, column in columns.items()}
    if skipped is not None:
        packed[SKIPPED] = np.array([skipped.get(i, "").encode("utf-8", "replace") for i in packed["id"].tolist()])
    return packed, rows


def _describe_skipped(ids: Sequence[int], like: Columns) -> Columns:
    """The columns of examples that were not measured: NaN, or -1."""
    return {name: torch.tensor(ids) if name == "id" else make_missing(len(ids), part) for name, part in like.items()}


def _scale_to_unit_length(rows: Tensor, lengths: Tensor) -> Tensor:
    """Divide each row by its length. A row with the length 0 becomes zeros, also if it is not finite."""
    limits = torch.finfo(rows.dtype)
    if bool(((lengths > limits.max) | ((lengths > 0) & (lengths < limits.tiny / limits.eps))).any()):
        rows = rows.double()
    scaled = rows / lengths[:, None].to(rows.dtype)
    return scaled if bool((lengths > 0).all()) else torch.where(lengths[:, None] > 0, scaled, 0.0)
