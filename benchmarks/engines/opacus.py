"""Opacus: `GradSampleModule` (hooks), and ghost clipping, which computes norms and clipped sums without rows."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.engines.base import Engine, RowsEngine, find_modules
from benchmarks.rows import MAX_NORM, Rows
from benchmarks.workloads import compute_loss, compute_losses


def replace_lstms(model: nn.Module) -> bool:
    """Replace each LSTM by a DPLSTM of Opacus with the same weights; return whether there was one."""
    from opacus.layers import DPLSTM

    layers = find_modules(model, nn.LSTM)
    for parent, name, layer in layers:
        assert isinstance(layer, nn.LSTM)
        replacement = DPLSTM(layer.input_size, layer.hidden_size, layer.num_layers, layer.bias, layer.batch_first)
        replacement.load_state_dict(layer.state_dict())
        setattr(parent, name, replacement.to(layer.weight_ih_l0.device))
    return bool(layers)


def wrap_for_ghost_clipping(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch_size: int, noise_multiplier: float, max_norm: float
) -> tuple[Any, Any, Any]:
    """Set up ghost clipping; return the wrapped model, the wrapped optimizer and the loss function."""
    from opacus.grad_sample import GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    def criterion(output: Tensor, labels: Tensor) -> Tensor:
        return compute_losses(output, labels)

    criterion.reduction = "sum"  # type: ignore[attr-defined]
    with _quiet():
        wrapped = GradSampleModuleFastGradientClipping(model, loss_reduction="sum", max_grad_norm=max_norm)
        private = DPOptimizerFastGradientClipping(
            optimizer,
            noise_multiplier=noise_multiplier,
            max_grad_norm=max_norm,
            expected_batch_size=batch_size,
            loss_reduction="sum",
        )
    return wrapped, private, DPLossFastGradientClipping(wrapped, private, criterion, loss_reduction="sum")


class OpacusHooks(RowsEngine):
    name = "Opacus hooks"

    def adapt(self) -> str:
        return "DPLSTM in place of LSTM" if replace_lstms(self.model) else super().adapt()

    def setup(self) -> None:
        from opacus.grad_sample import GradSampleModule

        with _quiet():
            self.wrapped = GradSampleModule(self.model, loss_reduction="sum")

    def dense(self) -> Rows:
        compute_loss(self.wrapped(self.x), self.labels).backward()
        return self.collect("grad_sample")

    def clear(self) -> None:
        self.wrapped.zero_grad(set_to_none=True)


class OpacusGhost(Engine):
    name = "Opacus ghost"
    quantities = ("norms", "clip")

    def adapt(self) -> str:
        return "DPLSTM in place of LSTM" if replace_lstms(self.model) else super().adapt()

    def setup(self) -> None:
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.wrapped, _, self.compute_clipped_loss = wrap_for_ghost_clipping(
            self.model, optimizer, len(self.x), noise_multiplier=0.0, max_norm=MAX_NORM
        )

    def norms(self) -> Tensor:
        compute_loss(self.wrapped(self.x), self.labels).backward()
        return self.wrapped.get_norm_sample()

    def clip(self) -> Rows:
        self.compute_clipped_loss(self.wrapped(self.x), self.labels).backward()
        return self.collect("grad")


class _quiet(warnings.catch_warnings):
    """Suppress warnings of Opacus at construction (e.g. about secure random numbers), which matter in training only."""

    def __enter__(self) -> None:
        super().__enter__()
        warnings.simplefilter("ignore")
        logging.getLogger("opacus").setLevel(logging.ERROR)
