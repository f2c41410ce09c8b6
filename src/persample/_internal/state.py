"""Restoring state that a run of a model changes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from persample._internal.rng import preserve_rng


@contextmanager
def preserve_state(*modules: Any) -> Iterator[None]:
    """Restore random number generators and the buffers of `modules` at the end of the block.

    Arguments that are not modules are ignored: a loss may be a module or a function.

    >>> norm = nn.BatchNorm1d(2)
    >>> with preserve_state(norm):
    ...     _ = norm(torch.randn(8, 2) + 3)
    >>> norm.running_mean
    tensor([0., 0.])
    """
    buffers = [b for module in modules if isinstance(module, nn.Module) for b in module.buffers()]
    before = [(b, b._version, b.detach().clone()) for b in buffers]
    try:
        with preserve_rng():
            yield
    finally:
        with torch.no_grad():
            for buffer, version, value in before:
                # Batch norm updates its statistics without a new version.
                if buffer._version != version or not torch.equal(buffer, value):
                    buffer.copy_(value)
