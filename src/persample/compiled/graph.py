"""A step as a graph of tensor ops: traced once without values, compiled, and run with the values of each call."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from persample import _torch
from persample._internal.dynamo import disable_compilation
from persample._internal.precision import find_autocast
from persample._internal.rng import RngState
from persample.compiled.forms import Form
from persample.errors import PerSampleError

# Held while a step is traced. What a trace changes belongs to the process, not to the thread: the settings of
# torch.compile, torch's logger, the random number generators, and the parameters of the model, which fake tensors
# replace for that time.
_trace_lock = Lock()


@dataclass(frozen=True)
class Graph:
    """A compiled graph. It takes the parameters and buffers, then the tensors of the arguments."""

    run: Callable[..., Any]
    form: Form  # of the result
    messages: Sequence[str]  # the errors for the conditions that the run computes as its last output

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        with torch.no_grad(), disable_autocast(tensors):
            outputs = list(self.run(*[tensor.detach() for tensor in tensors]))
        if self.messages:
            conditions = outputs.pop().tolist()
            if not all(conditions):
                raise PerSampleError(self.messages[conditions.index(False)])
        return self.form.fill(outputs)


def trace_graph(
    step: Callable[..., list[Tensor]], members: Sequence[Tensor], arguments: Sequence[Tensor]
) -> GraphModule:
    """Run `step(*members, *arguments)` once on tensors without values; return the graph of its tensor ops.

    `members` are the parameters and buffers of the model. The step may change them in place, but not its arguments.
    """
    mode = _torch.FakeTensorMode(allow_fallback_kernels=False)
    # Each tensor is converted on its own: a tensor that is passed twice may be two tensors in the next call.
    fakes = [mode.from_tensor(tensor.detach()) for tensor in (*members, *arguments)]
    versions = [(fake, fake._version) for fake in fakes[len(members) :]]
    try:
        with (
            _trace_lock,
            disable_compilation(),
            # Functions that are compiled already can be followed, which torch would refuse.
            _torch.allow_nested_trace() if _torch.is_dynamo_loaded() else nullcontext(),
            silence_fake_tensors(),
            refuse_untraced_random_numbers(),
            mode,
        ):
            graph = make_fx(step)(*fakes)
    except PerSampleError:
        raise
    except Exception as error:
        raise PerSampleError(f"This step cannot be compiled: {error}") from error
    if any(fake._version != version for fake, version in versions):
        raise PerSampleError(
            "This step cannot be compiled: it changes one of its arguments in place. Change a clone of it instead."
        )
    return _remove_detach(graph)


def _remove_detach(graph: GraphModule) -> GraphModule:
    """Remove `detach` from a graph. It has no effect outside autograd."""
    for node in graph.graph.nodes:
        if node.target is torch.ops.aten.detach.default:
            node.replace_all_uses_with(node.args[0])
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


# ---- settings of torch and Python around a step ----


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
    before = RngState()
    yield
    if not before.is_current():
        raise PerSampleError(
            "This step cannot be compiled: it draws random numbers with Python or numpy, or it sets a seed. The "
            "compiled graph would not repeat that. Draw random numbers with torch, and set seeds outside the step."
        )
