"""torch's own ExpandedWeights: `torch.nn.utils._per_sample_grad`."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils._per_sample_grad import call_for_per_sample_grads

from benchmarks.engines.base import RowsEngine, modules_of
from benchmarks.rows import Rows
from benchmarks.workloads import loss_of


class ExpandedWeights(RowsEngine):
    name = "ExpandedWeights"
    fused_recurrence = True

    def adapt(self) -> str:
        if modules_of(self.model, nn.LSTM):
            self.fused_recurrence = False
            return "without oneDNN, whose fused LSTM it does not take"
        return super().adapt()

    def dense(self) -> Rows:
        with torch.backends.mkldnn.flags(enabled=self.fused_recurrence):
            output = call_for_per_sample_grads(self.model, loss_reduction="sum")(self.x)
            loss_of(output, self.labels).backward()
        return self.named("grad_sample")

    def clear(self) -> None:
        super().clear()
        for p in self.model.parameters():
            p.grad_sample = None  # type: ignore[attr-defined]
