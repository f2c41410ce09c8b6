"""Products of matrices by oneDNN, and the precision of products."""

from __future__ import annotations

import platform
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from persample._torch.lookup import Missing, find

# Computes `a @ b.mT` for two matrices.
Product = Callable[[Tensor, Tensor], Tensor]

_multiply_and_apply: Any = find("torch.ops.mkldnn._linear_pointwise", "A product of matrices by oneDNN")


@cache
def find_onednn_product() -> Product | None:
    """oneDNN's product of float32 matrices; None if this torch does not have it, or not on this kind of processor."""
    is_supported = platform.machine().lower() in ("x86_64", "amd64") and torch.backends.mkldnn.is_available()
    if not is_supported or isinstance(_multiply_and_apply, Missing):
        return None
    function = _multiply_and_apply.default
    return lambda a, b: function(a, b, None, "none", [], "")


# The precision of float32 operations of a backend ("none" and "ieee" are the full one), as it is in effect.
_get_precision: Callable[[str, str], str] = find("torch._C._get_fp32_precision_getter", "Every recording")
set_precision: Callable[[str, str, str], None] = find("torch._C._set_fp32_precision_setter", "Every recording")

_BACKENDS = ("mkldnn", "cuda") if torch.backends.cuda.is_built() else ("mkldnn",)
_PRODUCTS = tuple((backend, operation) for backend in _BACKENDS for operation in ("matmul", "conv"))


def find_reduced_precision() -> list[tuple[str, str, str]]:
    """The settings that let products of float32 round their factors: backend, operation, precision."""
    return [(*product, set_to) for product in _PRODUCTS if (set_to := _get_precision(*product)) not in ("none", "ieee")]


# Whether autocast is on for any device.
is_any_autocast_enabled: Callable[[], bool] = find("torch._C._is_any_autocast_enabled", "Every recording")
