"""Several models as one module, so that one recording has the parameters of all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from persample.errors import PerSampleError


class SeveralModels(nn.Module):
    """Holds models under names, which are the prefixes of their parameters' names. It is never called itself."""


def combine_models(model: Any) -> nn.Module:
    """The module itself, or a list or mapping of modules as one module.

    >>> [name for name, _ in combine_models({"actor": nn.Linear(2, 1), "critic": nn.Tanh()}).named_parameters()]
    ['actor.weight', 'actor.bias']
    """
    if isinstance(model, nn.Module):
        return model
    named: Mapping[str, Any] = {}
    if isinstance(model, Mapping):
        named = model
    elif isinstance(model, Sequence) and not isinstance(model, str):
        named = {str(i): each for i, each in enumerate(model)}
    for name, each in named.items():
        if not isinstance(each, nn.Module):
            raise PerSampleError(f"Only an nn.Module can be recorded, got {type(each).__name__} as '{name}'.")
        if isinstance(each, nn.parallel.DistributedDataParallel):
            raise PerSampleError(f"'{name}' is under DistributedDataParallel: record one model at a time.")
    if not named:
        raise PerSampleError(
            f"Only an nn.Module can be recorded, or a list or dict of them, got {type(model).__name__}."
        )
    several = SeveralModels()
    for name, each in named.items():
        try:
            several.add_module(name, each)
        except (KeyError, TypeError) as error:
            raise PerSampleError(f"A model cannot be named {name!r}: {error.args[0]}.") from None
    return several
