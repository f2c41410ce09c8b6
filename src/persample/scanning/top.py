"""The best of many scores that arrive in blocks."""

from __future__ import annotations

import torch
from torch import Tensor


class RunningTop:
    """The `k` best scores of each query and the ids of their examples, without keeping all scores.

    >>> top = RunningTop(2)
    >>> top.add(0, torch.tensor([[1.0, 5.0, 2.0]]))
    >>> top.add(3, torch.tensor([[3.0]]))
    >>> top.ids, top.scores
    (tensor([[1, 3]]), tensor([[5., 3.]]))
    """

    def __init__(self, k: int, largest: bool = True) -> None:
        self._k, self._is_largest = k, largest
        self.ids, self.scores = torch.empty(0, 0, dtype=torch.int64), torch.empty(0, 0)

    def add(self, start: int, scores: Tensor) -> None:
        """Take the scores `(queries, rows)` of the examples from `start` on."""
        best = scores.topk(min(self._k, scores.shape[1]), largest=self._is_largest)
        ids = best.indices + start
        if self.ids.numel():
            ids = torch.cat([self.ids, ids], 1)
            merged = torch.cat([self.scores, best.values], 1).topk(min(self._k, ids.shape[1]), largest=self._is_largest)
            self.ids, self.scores = ids.gather(1, merged.indices), merged.values
        else:
            self.ids, self.scores = ids, best.values
