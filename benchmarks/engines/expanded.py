"""ExpandedWeights of torch: `torch.nn.utils._per_sample_grad`."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils._per_sample_grad import call_for_per_sample_grads

from benchmarks.engines.base import RowsEngine, find_modules
from benchmarks.rows import Rows
from benchmarks.workloads import compute_loss


class ExpandedWeights(RowsEngine):
    name = "ExpandedWeights"
    use_onednn = True

    def adapt(self) -> str:
        if find_modules(self.model, nn.LSTM):
            self.use_onednn = False
            return "without oneDNN (its fused LSTM is not supported)"
        return super().adapt()

    def dense(self) -> Rows:
        with torch.backends.mkldnn.flags(enabled=self.use_onednn):
            output = call_for_per_sample_grads(self.model, loss_reduction="sum")(self.x)
            compute_loss(output, self.labels).backward()
        return self.collect("grad_sample")

    def clear(self) -> None:
        super().clear()
        for p in self.model.parameters():
            p.grad_sample = None  # type: ignore[attr-defined]
