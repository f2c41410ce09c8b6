"""A step as a graph of tensor ops: traced once without values, compiled, and run with the values of each call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from persample import _torch
from persample._internal.dynamo import disable_compilation
from persample.compiled.environment import (
    disable_autocast,
    refuse_untraced_random_numbers,
    silence_fake_tensors,
    trace_compiled_functions,
)
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
            trace_compiled_functions(),
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
