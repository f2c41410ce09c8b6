"""Helpers for modules and their per-sample gradients."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


def make_mlp(
    *sizes: int, is_last_tanh: bool = False, seed: int | None = 0, dtype: torch.dtype = torch.float64
) -> nn.Sequential:
    """Linear layers of these sizes with Tanh between them. With a seed, their weights are always the same."""
    if seed is not None:
        torch.manual_seed(seed)
    layers = [part for pair in itertools.pairwise(sizes) for part in (nn.Linear(*pair), nn.Tanh())]
    return nn.Sequential(*(layers if is_last_tanh else layers[:-1])).to(dtype)


def read_state(module: nn.Module) -> dict[str, Any]:
    """Everything about a module that a recording must not change."""
    return {
        "parameters": {
            name: (id(p), p.detach().clone()) for name, p in module.named_parameters(remove_duplicate=False)
        },
        "grads": {name: p.grad for name, p in module.named_parameters()},
        "hooks": [len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in module.modules()],
        "training": [m.training for m in module.modules()],
        "keys": list(module.state_dict()),
    }


def flatten_rows(rows: Mapping[str, Tensor]) -> Tensor:
    """`{name: (batch, *shape)}` as one matrix with a row for each sample."""
    return torch.cat([r.reshape(len(r), -1) for r in rows.values()], 1)


def get_grad_samples(module: nn.Module) -> dict[str, Tensor]:
    """The `grad_sample` of each parameter that has one."""
    return {name: p.grad_sample for name, p in module.named_parameters() if hasattr(p, "grad_sample")}


def clear_grad_samples(module: nn.Module) -> None:
    for p in module.parameters():
        del p.grad_sample
