"""Whole steps for `torch.compile`: forward, backward and an answer from the per-sample gradients, as one graph.

A step is traced once for each set of shapes, with tensors that have no values: the tracker, the rules and the terms run
as in a recording, and leave a graph of plain tensor ops that takes the parameters, the buffers and the arguments.
Whatever goes by values is an error there (`tracing`). Whatever is no tensor is fixed in the graph, and another graph is
made when it has changed (`fixed`).
"""

from __future__ import annotations

import logging
import random
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from persample import _torch
from persample._internal.dynamo import disable_compilation, exclude_from_graph
from persample._internal.text import describe_value
from persample.batches import BatchDim
from persample.compiled.cache_key import NUMBERS, State, described_tensor
from persample.compiled.trace import Trace
from persample.distributed import Processes, find_processes
from persample.errors import PerSampleError
from persample.forward.tracker import Tracker
from persample.gradients import PerSampleGradients
from persample.losses import compute_step_loss
from persample.recording.options import Selection
from persample.recording.record import record

# How many graphs a step keeps.
_MOST_GRAPHS = 16

_one_at_a_time = Lock()


class StateChanged(PerSampleError):
    """A forward pass has changed something that a graph takes for fixed."""


def compile(
    model: nn.Module,
    loss_fn: Callable[..., Any],
    answer: Callable[[PerSampleGradients], Any],
    *,
    batch_size: int | None = None,
    batch_dim: BatchDim = 0,
    loss_reduction: str = "mean",
    parameters: Selection | None = None,
    backend: str | Callable[..., Any] = "inductor",
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> CompiledStep:
    """A step that computes a loss and an answer from its per-sample gradients, compiled as a whole.

    `loss_fn(model, *args)` calls the model and gives the loss, or a tuple with the loss first; a loss module is called
    with the model's output and the target, `loss_fn(model(x), y)`. `answer` is a function of the gradients, such as
    `lambda grads: grads.clip(1.0)`. The step is called with `args`; it gives what `loss_fn` gave, detached, and what
    `answer` gave. Parameters are read afresh in each call, and no `p.grad` is touched.

    A graph is made by `torch.compile(..., fullgraph=True)`, with this `backend`, `mode` and `options`, for each set of
    shapes, types and settings (`training`, autocast, numbers in the arguments). What a graph cannot do is refused. The
    other arguments are those of `record`.

    >>> model = nn.Linear(3, 2)
    >>> x, y = torch.randn(5, 3), torch.tensor([0, 1, 1, 0, 1])
    >>> step = compile(model, nn.CrossEntropyLoss(), lambda grads: grads.clip(1.0), backend="eager")
    >>> loss, clipped = step(x, y)
    >>> loss.shape, clipped["weight"].shape
    (torch.Size([]), torch.Size([2, 3]))
    """
    if not isinstance(model, nn.Module):
        raise PerSampleError(f"compile takes an nn.Module, got {describe_value(model)}")
    recording = {
        "batch_size": batch_size,
        "batch_dim": batch_dim,
        "loss_reduction": loss_reduction,
        "parameters": parameters,
    }
    return CompiledStep(model, loss_fn, answer, recording, {"backend": backend, "mode": mode, "options": options})


class CompiledStep:
    """What `compile` gives: it is called as the loss function is, without the model."""

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
        self._recording = recording
        self._compiler = compiler
        self._graphs: OrderedDict[Any, Graph] = OrderedDict()

    def __repr__(self) -> str:
        return f"CompiledStep({type(self._model).__name__}, graphs: {len(self._graphs)})"

    @exclude_from_graph
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(mode, Tracker) for mode in _torch.get_function_modes()):
            raise PerSampleError("A compiled step records by itself: call it outside of a recording.")
        arguments = Arguments(args, kwargs)
        state = self._state()
        graph = self._graphs.get(self._key(state, arguments))
        if graph is None:
            try:
                graph = self._traced(state, arguments)
            except StateChanged:  # perhaps for good, as in a first call
                state = self._state()
                graph = self._traced(state, arguments)
            self._graphs[self._key(state, arguments)] = graph
            self._forget_the_oldest()
        self._graphs.move_to_end(self._key(state, arguments))
        return graph([*state.tensors, *arguments.tensors])

    def _key(self, state: State, arguments: Arguments) -> Any:
        return (arguments.key, state.key, _settings(state.tensors))

    def _forget_the_oldest(self) -> None:
        if len(self._graphs) > _MOST_GRAPHS:
            self._graphs.popitem(last=False)
            warnings.warn(
                f"A compiled step has met more than {_MOST_GRAPHS} sets of shapes and settings, each of which takes a "
                "graph of its own, and forgets the oldest. Pad to fewer shapes, or drop the last batch.",
                stacklevel=3,
            )

    def _state(self, known_as: dict[int, int] | None = None) -> State:
        parts: list[Any] = [self._model, self._loss_fn, self._answer]
        modules = [part for part in parts if isinstance(part, nn.Module)]
        return State(modules, [part for part in parts if not isinstance(part, nn.Module)], known_as)

    # ---- tracing ----

    def _traced(self, state: State, arguments: Arguments) -> Graph:
        if type(find_processes(self._model)) is not Processes:
            raise PerSampleError("A compiled step knows of no other processes: use record under torch.distributed.")
        trace = Trace(state.modules)
        forms: list[Form] = []

        def step(*tensors: Tensor) -> list[Tensor]:
            pairs = zip(tensors, state.tensors, strict=False)
            held = [given.detach().requires_grad_(own.requires_grad) for given, own in pairs]
            args, kwargs = arguments.fill(tensors[len(held) :])
            with trace.active(), torch.enable_grad(), state.replaced_by(held):
                result = self._run(args, kwargs, state.tensors)
                after = self._state({id(tensor): number for number, tensor in enumerate(held)})
            if trace.refused is not None:  # and the user's code has gone another way
                raise trace.refused
            if state.key[1:] != after.key[1:]:
                raise StateChanged(
                    f"This step cannot be compiled: it changes {state.changed(after)}, which a graph does not repeat. "
                    "Keep such things in buffers, and change them in place; what a first call prepares is there if the "
                    "model is called before."
                )
            form, outputs = Form.of(result)
            forms.append(form)
            holds: list[Tensor] = [requirement.reshape(()) for requirement, _ in trace.requirements]
            return [*outputs, torch.stack(holds)] if holds else outputs

        mode = _torch.FakeTensorMode(allow_fallback_kernels=False)
        # Each for itself: a tensor that is given twice is two arguments, which are two tensors the next time.
        fakes = [mode.from_tensor(tensor.detach()) for tensor in (*state.tensors, *arguments.tensors)]
        given = [(fake, fake._version) for fake in fakes[len(state.tensors) :]]
        try:
            with _one_at_a_time, disable_compilation(), _seen_through(), _quietly(), _no_other_random_numbers(), mode:
                graph = make_fx(step)(*fakes)
        except PerSampleError:
            raise
        except Exception as error:
            raise PerSampleError(f"This step cannot be compiled: {error}") from error
        if any(fake._version != version for fake, version in given):
            raise PerSampleError("This step cannot be compiled: it changes one of its arguments in place.")
        run = torch.compile(_simplified(graph), fullgraph=True, dynamic=False, **self._compiler)
        return Graph(run, forms[0], [message for _, message in trace.requirements])

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[Tensor]) -> Any:
        """What the step gives, by a recording."""
        with record(self._model, **self._recording) as grads:
            outcome, loss = compute_step_loss(self._model, self._loss_fn, args, kwargs)
            with _without_autocast(tensors):
                loss.backward()
        with _without_autocast(tensors):
            answer = self._answer(grads)
        return _torch.pytree.tree_map_only(Tensor, Tensor.detach, (outcome, answer))


class Arguments:
    """The arguments of a call, its tensors apart."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._leaves, self._spec = _torch.pytree.tree_flatten((args, kwargs))
        self.tensors = [leaf for leaf in self._leaves if isinstance(leaf, Tensor)]
        self.key = (self._spec, tuple([_described(leaf) for leaf in self._leaves]))

    def fill(self, tensors: Sequence[Tensor]) -> Any:
        """The same arguments with other tensors."""
        supply = iter(tensors)
        leaves = [next(supply) if isinstance(leaf, Tensor) else leaf for leaf in self._leaves]
        return _torch.pytree.tree_unflatten(leaves, self._spec)


def _described(leaf: Any) -> Any:
    if type(leaf) in (Tensor, nn.Parameter) and leaf.layout is torch.strided:
        return described_tensor(leaf)[:-1]  # whether it requires grad makes no difference: it gets none
    if type(leaf) not in NUMBERS:
        raise PerSampleError(
            "A compiled step takes plain tensors, numbers and strings, in lists, tuples and dicts, got "
            f"{describe_value(leaf)}."
        )
    return (type(leaf), leaf)


@dataclass(frozen=True)
class Form:
    """What a step gives, with None in the places of its tensors."""

    spec: Any
    leaves: Sequence[Any]
    places: Sequence[int]

    @staticmethod
    def of(result: Any) -> tuple[Form, list[Tensor]]:
        """The form of a result, and its tensors."""
        leaves, spec = _torch.pytree.tree_flatten(result)
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, _torch.FakeTensor)]
        rest = [None if i in places else leaf for i, leaf in enumerate(leaves)]
        strange = [leaf for leaf in rest if type(leaf) not in NUMBERS]
        if strange:
            raise PerSampleError(
                f"A compiled step gives tensors and numbers; this one gives {describe_value(strange[0])} too."
            )
        return Form(spec, rest, places), [leaves[i] for i in places]

    def fill(self, tensors: Sequence[Tensor]) -> Any:
        """A result of this form."""
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        return _torch.pytree.tree_unflatten(leaves, self.spec)


@dataclass(frozen=True)
class Graph:
    """A compiled graph: it takes the parameters and buffers, then the tensors of the arguments."""

    run: Callable[..., Any]
    form: Form
    requirements: Sequence[str]  # what to say if one of the truth values that come last does not hold

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        with torch.no_grad(), _without_autocast(tensors):
            outputs = list(self.run(*[tensor.detach() for tensor in tensors]))
        if self.requirements:
            holds = outputs.pop().tolist()
            if not all(holds):
                raise PerSampleError(self.requirements[holds.index(False)])
        return self.form.fill(outputs)


def _simplified(graph: GraphModule) -> GraphModule:
    """Without what makes no difference outside of autograd."""
    for node in graph.graph.nodes:
        if node.target is torch.ops.aten.detach.default:
            node.replace_all_uses_with(node.args[0])
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


# ---- what surrounds a step ----


def _settings(tensors: Sequence[Tensor]) -> Any:
    """The settings of torch that say how ops are computed."""
    autocast = [(d, torch.get_autocast_dtype(d)) for d in _device_types(tensors) if torch.is_autocast_enabled(d)]
    return (torch.get_default_dtype(), torch.get_default_device(), *autocast)


def _device_types(tensors: Sequence[Tensor]) -> set[str]:
    return {tensor.device.type for tensor in tensors}


@contextmanager
def _without_autocast(tensors: Sequence[Tensor]) -> Iterator[None]:
    with ExitStack() as stack:
        for device in _device_types(tensors):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


def _seen_through() -> AbstractContextManager[Any]:
    """Lets a trace look into what was compiled, instead of refusing it."""
    return _torch.allow_nested_trace() if _torch.is_dynamo_loaded() else nullcontext()


@contextmanager
def _quietly() -> Iterator[None]:
    """Keeps torch from logging what cannot be run without values: another way is tried, or the error says it all."""
    logger = logging.getLogger(_torch.FAKE_TENSOR_LOGGER)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


@contextmanager
def _no_other_random_numbers() -> Iterator[None]:
    """Refuses random numbers that are not torch's, which would be the same in each run, and seeds, which would not."""
    before = _random_states()
    yield
    if _random_states() != before:
        raise PerSampleError(
            "This step cannot be compiled: it draws random numbers of Python's or numpy's, or it sets a seed, which a "
            "graph does not repeat. Draw them with torch, and set seeds outside."
        )


def _random_states() -> Any:
    numpy = sys.modules.get("numpy")
    of_numpy = str(numpy.random.get_state(legacy=False)["state"]) if numpy is not None else ""
    return random.getstate(), torch.get_rng_state().tolist(), of_numpy
