"""`persample.compile` and the compiled steps that it returns.

A step is traced once for each set of shapes, with tensors that have no values. The tracker, the rules and the terms run
as in a recording. What remains is a graph of tensor ops from the parameters, buffers and arguments to the answer. Code
that reads values is an error during the trace (`trace`). Everything that is not a tensor is constant in the graph; when
it changes, the step is traced again (`cache_key`).
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from persample import _torch
from persample._internal.dynamo import exclude_from_graph
from persample._internal.graph import refuse_parameter_hooks
from persample._internal.text import describe_value
from persample.batches import BatchDim
from persample.compiled.cache_key import StepState
from persample.compiled.forms import Arguments, Form, split_result
from persample.compiled.graph import Graph, describe_settings, disable_autocast, trace_graph
from persample.compiled.trace import Trace
from persample.distributed import Processes, find_processes
from persample.errors import PerSampleError
from persample.forward import FollowMode
from persample.gradients import PerSampleGradients
from persample.losses import compute_step_loss
from persample.recording import Options, Selection, get_trainable, record

_MAX_GRAPHS = 16  # that one step keeps


class StateChanged(PerSampleError):
    """The forward pass has changed something that is constant in a graph."""


def compile(
    model: nn.Module,
    loss_fn: Callable[..., Any],
    answer: Callable[[PerSampleGradients], Any],
    *,
    batch_size: int | None = None,
    batch_dim: BatchDim = 0,
    loss_reduction: str | None = None,
    parameters: Selection | None = None,
    backend: str | Callable[..., Any] = "inductor",
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> CompiledStep:
    """Compile a whole step: forward, backward, and a function of the per-sample gradients.

    The step is called with the arguments of `loss_fn` after the model. It returns the result of `loss_fn`, detached,
    and the result of `answer`. It reads the current parameters in each call, and does not change `p.grad`.

    There is one graph for each set of shapes, dtypes and settings (`training`, autocast, numbers in the arguments),
    made by `torch.compile(..., fullgraph=True)`. An error is raised if the step does something that a graph cannot
    repeat.

    Args:
        model: The model.
        loss_fn: `loss_fn(model, *args)` calls the model and returns the loss, or a tuple with the loss first. A loss
            module is called as `loss_fn(model(x), y)`.
        answer: A function of the gradients, such as `lambda grads: grads.clip(1.0)`.
        batch_size: As in `persample.record`.
        batch_dim: As in `persample.record`.
        loss_reduction: As in `persample.record`.
        parameters: As in `persample.record`.
        backend: As in `torch.compile`.
        mode: As in `torch.compile`.
        options: As in `torch.compile`.

    >>> model = nn.Linear(3, 2)
    >>> x, y = torch.randn(5, 3), torch.tensor([0, 1, 1, 0, 1])
    >>> step = compile(model, nn.CrossEntropyLoss(), lambda grads: grads.clip(1.0), backend="eager")
    >>> loss, clipped = step(x, y)
    >>> loss.shape, clipped["weight"].shape
    (torch.Size([]), torch.Size([2, 3]))
    """
    if not isinstance(model, nn.Module):
        raise PerSampleError(f"persample.compile takes an nn.Module, got {describe_value(model)}.")
    recording = {
        "batch_size": batch_size,
        "batch_dim": batch_dim,
        "loss_reduction": loss_reduction,
        "parameters": parameters,
    }
    return CompiledStep(model, loss_fn, answer, recording, {"backend": backend, "mode": mode, "options": options})


class CompiledStep:
    """The result of `compile`. It is called like the loss function, without the model.

    >>> step = compile(nn.Linear(3, 2), lambda model, x: model(x).sum(), lambda grads: grads.norms(), backend="eager")
    >>> isinstance(step, CompiledStep)
    True"""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Any],
        answer: Callable[[PerSampleGradients], Any],
        recording: dict[str, Any],
        compiler: dict[str, Any],
    ) -> None:
        self._model = model
        self._loss_fn = loss_fn
        self._answer = answer
        self._recording = recording  # options of `record`
        self._compiler = compiler  # options of `torch.compile`
        self._graphs: OrderedDict[Any, Graph] = OrderedDict()  # the most recently used one last

    def __repr__(self) -> str:
        return f"CompiledStep({type(self._model).__name__}, graphs: {len(self._graphs)})"

    @exclude_from_graph
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(mode, FollowMode) for mode in _torch.get_function_modes()):
            raise PerSampleError("A compiled step makes its own recording: call it outside of a recording.")
        arguments = Arguments(args, kwargs)
        state = self._get_state()
        if _torch.has_gradient_hooks(state.tensors):  # the tensors that are traced have none
            refuse_parameter_hooks(Options(**self._recording).select(get_trainable(self._model)))
        graph = self._graphs.get(_make_key(state, arguments))
        if graph is None:
            try:
                graph = self._make_graph(state, arguments)
            except StateChanged:  # the first call may prepare something once
                state = self._get_state()
                graph = self._make_graph(state, arguments)
            self._graphs[_make_key(state, arguments)] = graph
            self._drop_oldest()
        self._graphs.move_to_end(_make_key(state, arguments))
        return graph([*state.tensors, *arguments.tensors])

    def _drop_oldest(self) -> None:
        if len(self._graphs) > _MAX_GRAPHS:
            self._graphs.popitem(last=False)
            warnings.warn(
                f"A compiled step was called with more than {_MAX_GRAPHS} sets of shapes and settings. Each set needs "
                "its own graph; the oldest graph is dropped. Pad to fewer shapes, or drop the last batch.",
                stacklevel=3,
            )

    def _get_state(self, stand_ins: dict[int, int] | None = None) -> StepState:
        parts: list[Any] = [self._model, self._loss_fn, self._answer]
        modules = [part for part in parts if isinstance(part, nn.Module)]
        return StepState(modules, [part for part in parts if not isinstance(part, nn.Module)], stand_ins)

    def _make_graph(self, state: StepState, arguments: Arguments) -> Graph:
        if type(find_processes(self._model)) is not Processes:
            raise PerSampleError(
                "persample.compile does not support several processes. Use persample.record under torch.distributed."
            )
        trace = Trace(state.modules)
        forms: list[Form] = []

        def step(*tensors: Tensor) -> list[Tensor]:
            pairs = zip(tensors, state.tensors, strict=False)
            members = [given.detach().requires_grad_(own.requires_grad) for given, own in pairs]
            args, kwargs = arguments.fill(tensors[len(members) :])
            with trace.activate(), torch.enable_grad(), state.replace_tensors(members):
                result = self._record(args, kwargs, state.tensors)
                after = self._get_state({id(tensor): position for position, tensor in enumerate(members)})
            if trace.refusal is not None:  # the user's code has caught it
                raise trace.refusal
            if state.is_changed(after):
                raise StateChanged(
                    f"This step cannot be compiled: it changes {state.find_change(after)}, and the compiled graph "
                    "would not repeat that. Keep values that change in buffers, and change the buffers in place. If "
                    "the forward pass only prepares something in its first call, call the model once before."
                )
            form, outputs = split_result(result)
            forms.append(form)
            conditions = [condition.reshape(()) for condition, _ in trace.requirements]
            return [*outputs, torch.stack(conditions)] if conditions else outputs

        graph = trace_graph(step, state.tensors, arguments.tensors)
        run = torch.compile(graph, fullgraph=True, dynamic=False, **self._compiler)
        return Graph(run, forms[0], [message for _, message in trace.requirements])

    def _record(self, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[Tensor]) -> Any:
        """Run the step in a recording; return the results of `loss_fn` and `answer`."""
        with record(self._model, **self._recording) as grads:
            outcome, loss = compute_step_loss(self._model, self._loss_fn, args, kwargs)
            with disable_autocast(tensors):
                loss.backward()
        with disable_autocast(tensors):
            answer = self._answer(grads)
        return _torch.pytree.tree_map_only(Tensor, Tensor.detach, (outcome, answer))


def _make_key(state: StepState, arguments: Arguments) -> tuple[Any, ...]:
    return (arguments.key, state.key, describe_settings(state.tensors))
