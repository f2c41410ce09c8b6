"""BackPACK: rows with `BatchGrad`, norms with `BatchL2Grad`, clipped sums with norms and a second backward pass."""

from __future__ import annotations

from torch import Tensor

from benchmarks.engines.base import RowsEngine
from benchmarks.rows import Rows, compute_clip_factors


class BackPACK(RowsEngine):
    name = "BackPACK"

    def setup(self) -> None:
        from backpack import extend

        extend(self.model)

    def dense(self) -> Rows:
        from backpack import backpack
        from backpack.extensions import BatchGrad

        loss = self.compute_loss()
        with backpack(BatchGrad()):
            loss.backward()
        return self.collect("grad_batch")

    def norms(self) -> Tensor:
        return self._compute_norms(self.compute_losses(), retain_graph=False)

    def clip(self) -> Rows:
        losses = self.compute_losses()
        norms = self._compute_norms(losses, retain_graph=True)
        self.model.zero_grad()
        (compute_clip_factors(norms) * losses).sum().backward()
        return self.collect("grad")

    def _compute_norms(self, losses: Tensor, retain_graph: bool) -> Tensor:
        from backpack import backpack
        from backpack.extensions import BatchL2Grad

        with backpack(BatchL2Grad(), retain_graph=retain_graph):
            losses.sum().backward(retain_graph=retain_graph)
        return sum(self.collect("batch_l2").values(), start=losses.new_zeros(())).sqrt()

    def clear(self) -> None:
        super().clear()
        for p in self.model.parameters():
            for attribute in ("grad_batch", "batch_l2"):
                if hasattr(p, attribute):
                    delattr(p, attribute)
