"""Imports of the process from which the processes of `benchmarks.memory` are forked. Computes nothing."""

import contextlib
import importlib
import warnings

import torch.func  # noqa: F401

import benchmarks.memory  # noqa: F401

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    for peer in ("opacus.grad_sample", "opacus.optimizers", "opacus.utils.fast_gradient_clipping_utils", "backpack"):
        with contextlib.suppress(ImportError):
            importlib.import_module(peer)
