"""Opacus: `GradSampleModule` (hooks), and ghost clipping, which gives norms and clipped sums without rows."""

from __future__ import annotations

import logging
import warnings

import torch
from torch import Tensor, nn

from benchmarks.engines.base import Engine, RowsEngine, modules_of
from benchmarks.rows import MAX_NORM, Rows
from benchmarks.workloads import loss_of, losses_of


def with_dp_lstm(model: nn.Module) -> bool:
    """Puts Opacus's own LSTM in the place of torch's, with the same weights."""
    from opacus.layers import DPLSTM

    found = modules_of(model, nn.LSTM)
    for parent, name, layer in found:
        assert isinstance(layer, nn.LSTM)
        own = DPLSTM(layer.input_size, layer.hidden_size, layer.num_layers, layer.bias, layer.batch_first)
        own.load_state_dict(layer.state_dict())
        setattr(parent, name, own)
    return bool(found)


class OpacusHooks(RowsEngine):
    name = "Opacus hooks"

    def adapt(self) -> str:
        return "DPLSTM in place of LSTM" if with_dp_lstm(self.model) else super().adapt()

    def setup(self) -> None:
        from opacus.grad_sample import GradSampleModule

        with _quiet():
            self.wrapped = GradSampleModule(self.model, loss_reduction="sum")

    def dense(self) -> Rows:
        loss_of(self.wrapped(self.x), self.labels).backward()
        return self.named("grad_sample")

    def clear(self) -> None:
        self.wrapped.zero_grad(set_to_none=True)


class OpacusGhost(Engine):
    name = "Opacus ghost"
    offers = ("norms", "clip")

    def adapt(self) -> str:
        return "DPLSTM in place of LSTM" if with_dp_lstm(self.model) else super().adapt()

    def setup(self) -> None:
        from opacus.grad_sample import GradSampleModuleFastGradientClipping
        from opacus.optimizers import DPOptimizerFastGradientClipping
        from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

        def criterion(output: Tensor, labels: Tensor) -> Tensor:
            return losses_of(output, labels)

        criterion.reduction = "sum"  # type: ignore[attr-defined]
        with _quiet():
            self.wrapped = GradSampleModuleFastGradientClipping(
                self.model, loss_reduction="sum", max_grad_norm=MAX_NORM
            )
            optimizer = DPOptimizerFastGradientClipping(
                torch.optim.SGD(self.model.parameters(), lr=0.1), noise_multiplier=0.0, max_grad_norm=MAX_NORM,
                expected_batch_size=len(self.x), loss_reduction="sum",
            )  # fmt: skip
        self.clipped_loss = DPLossFastGradientClipping(self.wrapped, optimizer, criterion, loss_reduction="sum")

    def norms(self) -> Tensor:
        loss_of(self.wrapped(self.x), self.labels).backward()
        return self.wrapped.get_norm_sample()

    def clip(self) -> Rows:
        self.clipped_loss(self.wrapped(self.x), self.labels).backward()
        return self.named("grad")


class _quiet(warnings.catch_warnings):
    """Without the warnings at each construction (secure random numbers, and the like), which concern training."""

    def __enter__(self) -> None:
        super().__enter__()
        warnings.simplefilter("ignore")
        logging.getLogger("opacus").setLevel(logging.ERROR)
