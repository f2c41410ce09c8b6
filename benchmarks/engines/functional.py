"""torch.func: `vmap(grad(loss of one sample))`."""

from __future__ import annotations

from torch import Tensor
from torch.func import functional_call, grad, vmap

from benchmarks.engines.base import RowsEngine
from benchmarks.rows import Rows
from benchmarks.workloads import compute_loss


class TorchFunc(RowsEngine):
    name = "torch.func"

    def dense(self) -> Rows:
        parameters = {name: p.detach() for name, p in self.model.named_parameters()}
        return vmap(grad(self._compute_sample_loss), in_dims=(None, 0, 0))(parameters, self.x, self.labels)

    def _compute_sample_loss(self, parameters: Rows, x: Tensor, label: Tensor) -> Tensor:
        return compute_loss(functional_call(self.model, parameters, (x[None],)), label[None])
