"""Modules that cannot be trained privately, and their replacements."""

from __future__ import annotations

from copy import deepcopy
from itertools import chain

import torch
from opacus.validators.module_validator import ModuleValidator
from torch import nn

from persample.private.errors import UnsupportedModule

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


def refuse_unsupported(module: nn.Module) -> None:
    """Raise for modules that are known to mix samples or to keep statistics of samples."""
    for name, found in find_unsupported(module).items():
        if isinstance(found, _EMBEDDINGS):
            raise UnsupportedModule(
                f"'{name}' ({type(found).__name__}) cannot be trained privately: max_norm scales down the rows of "
                "the weight that occur in the batch, without noise. Set max_norm=None, for example with "
                "PrivacyEngine.get_compatible_module(model) before you make the optimizer."
            )
        raise UnsupportedModule(
            f"'{name}' ({type(found).__name__}) cannot be trained privately: it normalises with statistics of the "
            "batch, or it keeps statistics of samples. Replace it by GroupNorm, for example with "
            "PrivacyEngine.get_compatible_module(model) before you make the optimizer, or keep it in eval() mode."
        )


def find_unsupported(module: nn.Module) -> dict[str, nn.Module]:
    """Submodules that use statistics of the batch, or write samples into their state, by name."""
    found: dict[str, nn.Module] = {}
    for name, part in module.named_modules():
        uses_batch = isinstance(part, _BATCH_NORMS) and (part.training or part.running_mean is None)
        keeps_samples = isinstance(part, _INSTANCE_NORMS) and part.track_running_stats and part.training
        if uses_batch or keeps_samples or (isinstance(part, _EMBEDDINGS) and part.max_norm is not None):
            found[name] = part
    return found


def replace_unsupported(module: nn.Module) -> nn.Module:
    """A copy of a module, with modules that are refused replaced by the fixers of Opacus."""
    module = deepcopy(module)
    for name, part in find_unsupported(module).items():
        if isinstance(part, _EMBEDDINGS):
            part.max_norm = None
            continue
        like = next(chain(part.parameters(), part.buffers()), torch.empty(0))
        replacement = ModuleValidator.FIXERS[type(part)](part).to(like.device, like.dtype)
        if not name:
            return replacement
        parent, _, last = name.rpartition(".")
        setattr(module.get_submodule(parent), last, replacement)
    return module
