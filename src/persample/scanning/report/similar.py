"""Examples with similar gradients, for the suspects of a report."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from persample.scanning.results import Scan
from persample.scanning.stored_gradients import StoredGradients

_COUNT = 4  # of an example
_DUPLICATE = 0.995  # cosine
_MAX_EXAMPLES = 200_000  # of a scan; more would delay the report


def find_similar(scan: Scan, ids: Sequence[int]) -> dict[int, list[tuple[int, float, bool]]]:
    """For some examples, others with similar gradients: id, cosine, and whether it is a duplicate.

    Empty if the scan has no projected gradients, or too many examples. All examples are answered in one pass.
    """
    if scan.settings["project"] is None or not ids or not 1 < len(scan) <= _MAX_EXAMPLES:
        return {}
    rows = StoredGradients(scan.store, len(scan.settings["checkpoints"]) - 1)
    chosen = torch.tensor(list(ids))
    own, k = rows[chosen], min(_COUNT, len(scan) - 1)
    best, places = torch.full((len(ids), k), -2.0), torch.full((len(ids), k), -1)
    for start, block in rows.iterate_blocks():
        numbers = torch.arange(start, start + len(block))
        cosines = (own @ block.T).masked_fill(chosen[:, None] == numbers, -2.0)
        best, order = torch.cat([best, cosines], 1).topk(k, 1)
        places = torch.cat([places, numbers.expand(len(ids), -1)], 1).gather(1, order)
    return {
        i: [
            (int(j), float(cosine), bool(cosine >= _DUPLICATE))
            for j, cosine in zip(places[at], best[at], strict=True)
            if cosine > 0
        ]
        for at, i in enumerate(ids)
    }
