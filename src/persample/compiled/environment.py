"""Settings of torch and Python around a compiled step."""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from persample import _torch
from persample._internal.precision import find_autocast
from persample.errors import PerSampleError


def describe_settings(tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    """The settings of torch that change how ops are computed."""
    devices = _find_device_types(tensors)
    autocast = [(device, dtype) for device in devices if (dtype := find_autocast(device)) is not None]
    return (torch.get_default_dtype(), torch.get_default_device(), *autocast)


def _find_device_types(tensors: Sequence[Tensor]) -> set[str]:
    return {tensor.device.type for tensor in tensors}


@contextmanager
def disable_autocast(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Turn autocast off, on the devices of these tensors."""
    with ExitStack() as stack:
        for device in _find_device_types(tensors):
            if find_autocast(device) is not None:
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


def trace_compiled_functions() -> AbstractContextManager[Any]:
    """Let a trace follow functions that are compiled already, which torch would refuse."""
    return _torch.allow_nested_trace() if _torch.is_dynamo_loaded() else nullcontext()


@contextmanager
def silence_fake_tensors() -> Iterator[None]:
    """Keep torch from logging ops that cannot run without values: another way is tried, or an error is raised."""
    logger = logging.getLogger(_torch.FAKE_TENSOR_LOGGER)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


@contextmanager
def refuse_untraced_random_numbers() -> Iterator[None]:
    """Refuse random numbers of Python and numpy, which a graph would repeat in each run, and seeds."""
    before = _get_rng_states()
    yield
    if _get_rng_states() != before:
        raise PerSampleError(
            "This step cannot be compiled: it draws random numbers with Python or numpy, or it sets a seed. The "
            "compiled graph would not repeat that. Draw random numbers with torch, and set seeds outside the step."
        )


def _get_rng_states() -> Any:
    numpy = sys.modules.get("numpy")
    of_numpy = str(numpy.random.get_state(legacy=False)["state"]) if numpy is not None else ""
    return random.getstate(), torch.get_rng_state().tolist(), of_numpy
