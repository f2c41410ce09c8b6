"""BackPACK: rows by its `BatchGrad`, norms by its `BatchL2Grad`, and clipped sums by a second backward after these."""

from __future__ import annotations

from torch import Tensor

from benchmarks.engines.base import RowsEngine
from benchmarks.rows import Rows, clip_factors


class BackPACK(RowsEngine):
    name = "BackPACK"

    def setup(self) -> None:
        from backpack import extend

        extend(self.model)

    def dense(self) -> Rows:
        from backpack import backpack
        from backpack.extensions import BatchGrad

        loss = self.loss()
        with backpack(BatchGrad()):
            loss.backward()
        return self.named("grad_batch")

    def norms(self) -> Tensor:
        return self._norms_by_backward(self.losses(), again=False)

    def clip(self) -> Rows:
        losses = self.losses()
        norms = self._norms_by_backward(losses, again=True)
        self.model.zero_grad()
        (clip_factors(norms) * losses).sum().backward()
        return self.named("grad")

    def _norms_by_backward(self, losses: Tensor, again: bool) -> Tensor:
        from backpack import backpack
        from backpack.extensions import BatchL2Grad

        with backpack(BatchL2Grad(), retain_graph=again):
            losses.sum().backward(retain_graph=again)
        return sum(self.named("batch_l2").values(), start=losses.new_zeros(())).sqrt()

    def clear(self) -> None:
        super().clear()
        for p in self.model.parameters():
            for attribute in ("grad_batch", "batch_l2"):
                if hasattr(p, attribute):
                    delattr(p, attribute)
