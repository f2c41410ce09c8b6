"""Grouped matrix products, the building block of mixtures of experts: each group of rows times its own matrix."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from persample import _torch
from persample.rules.registry import HANDLED_FUNCTIONS, Rewrite


def grouped_mm(input: Tensor, weight: Tensor, offs: Tensor | None = None, **others: Any) -> Tensor:
    """Multiply the rows `input[offs[i - 1]:offs[i]]` by `weight[i]`; rows after the last offset give zeros."""
    if input.dim() != 2 or weight.dim() != 3 or offs is None or any(v is not None for v in others.values()):
        return NotImplemented
    sizes = offs.diff(prepend=offs.new_zeros(1)).tolist()
    *parts, rest = input.split([*sizes, len(input) - sum(sizes)])
    products = [part @ matrix for part, matrix in zip(parts, weight.unbind(), strict=True)]
    return torch.cat([*products, (rest @ weight[0]) * 0] if len(rest) else products)


for name in (F.grouped_mm, _torch.grouped_mm, "transformers::grouped_mm_fallback"):
    HANDLED_FUNCTIONS[name] = Rewrite(grouped_mm)
