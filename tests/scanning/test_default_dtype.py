"""Scans in a program whose default dtype is float64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import persample


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_projected_scan(dtype: torch.dtype, tmp_path: Path) -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        data = [(torch.randn(4), n % 3) for n in range(6)]
        found = persample.scan(
            nn.Linear(4, 3), lambda m, b: F.cross_entropy(m(b[0]), b[1]), data, out=tmp_path, project=8, progress=False
        )
        assert found.column("norm").shape == (6,)
    finally:
        torch.set_default_dtype(before)
