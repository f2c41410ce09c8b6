"""Keep the steps of private training apart: no sample may influence a later step except through the noisy sum.

A tensor that was computed from samples and that outlives its step (an attribute of a module, a variable of the loop)
is lost in later steps: it may be logged, but it is refused where a weight meets it or where a gradient comes back
through it. Parameters and buffers are part of each checkpoint, so that samples must not be written into them at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import ref

import torch.nn.functional as F
from torch import Tensor, nn

from persample import _torch
from persample._internal.state import find_state_tensors
from persample.errors import STATE_ADVICE, SamplesMixed, get_op_name, refuse_state
from persample.forward import Audit, Context, Detector, TensorMap
from persample.layouts import Call, Lost, get_argument

# Tensors of earlier steps that are remembered; the oldest are forgotten first. A list of all losses may grow for ever.
_MAX_CARRIED = 4096

_MAX_GIVEN = 256  # the same for tensors of the data

# Functions that may change a weight by the indices that occur, and the position of their argument `max_norm`.
_WITH_MAX_NORM: dict[Any, int] = {F.embedding: 3, F.embedding_bag: 3}


def _make_lost(tensor: Tensor, place: str) -> Lost:
    """The layout of a tensor that holds samples of an earlier step."""
    return Lost(
        f"a tensor of shape {tuple(tensor.shape)} was computed from the samples of an earlier step. In private "
        "training a sample must not influence later steps: compute it anew in each forward pass, or without gradients "
        "and for logging only",
        place or "an earlier step",
    )


class LaterSteps(Detector):
    """Refuses samples that reach later steps of a model."""

    def __init__(self) -> None:
        self._given: TensorMap[bool] = TensorMap()  # tensors from outside, in the current step
        # Lost tensors, as the tracker keeps them:
        self._given_before: TensorMap[tuple[Lost, bool]] = TensorMap()  # tensors from outside in earlier steps
        self._hidden: dict[int, tuple[ref[Tensor], tuple[Lost, bool]]] = {}  # those of them that are lost now
        self._carried: TensorMap[tuple[Lost, bool]] = TensorMap()  # what was computed in earlier steps
        # The dicts in which modules keep their buffers, with the paths of the modules; and copies of these dicts.
        self._buffers: list[tuple[str, dict[str, Tensor | None]]] = []
        self._buffers_of: ref[nn.Module] | None = None
        self._before: list[tuple[dict[str, Tensor | None], dict[str, Tensor | None]]] = []

    # ---- tensors that outlive their step ----

    def start(self, context: Context) -> None:
        self._given_before.keep_last(_MAX_GIVEN)
        for tensor, _ in self._given.items():
            self._given_before[tensor] = _make_lost(tensor, ""), tensor.requires_grad
        self._given = TensorMap()
        context.known.entries.update(self._carried.entries)

    def note_given(self, tensor: Tensor) -> None:
        self._given[tensor] = True  # the next step may have the same data

    def start_call(self, context: Context) -> None:
        """Count tensors from earlier batches as samples of those, except tensors that this batch contains again."""
        with _torch.DisableTorchFunction():
            is_saving = _torch.get_saved_tensor_hooks() is not None
            for key, entry in self._given_before.entries.items():
                tensor = entry[0]()
                if tensor is None or tensor in context.known:
                    continue
                self._hidden[key] = entry
                if tensor.requires_grad or is_saving:
                    context.set_layout(tensor, entry[1][0])
                else:  # a loop that keeps its batches has many of them
                    context.known.entries[key] = entry
            self._note_buffers(context)

    def end_call(self, has_failed: bool, context: Context) -> None:
        """In the code around the model, the same data may be used again, as in training on one batch."""
        if not has_failed:
            self._check_state(context)
        self._show_data(context)

    def _show_data(self, context: Context) -> None:
        for key, (reference, _) in self._hidden.items():
            found = context.known.entries.get(key)
            if found is not None and found[0]() is reference():
                del context.known.entries[key]
        self._hidden.clear()

    def end(self, context: Context) -> None:
        """Note the tensors of a step that are still alive."""
        with _torch.DisableTorchFunction():
            self._show_data(context)
            for tensor, (where, _) in context.known.items():
                if where is not None and tensor not in self._given and tensor not in self._carried:
                    self._carried[tensor] = _make_lost(tensor, getattr(where, "place", "")), tensor.requires_grad
            if len(self._carried.entries) > _MAX_CARRIED // 2:
                self._carried.keep_last(_MAX_CARRIED)

    # ---- parameters and buffers ----

    def _note_buffers(self, context: Context) -> None:
        """Note the buffers of the model, which is about to be called."""
        if (model := context.model) is not None and (self._buffers_of is None or self._buffers_of() is not model):
            self._find_buffers(model)
        self._before = [(own, own.copy()) for _, own in self._buffers]

    def _find_buffers(self, model: nn.Module) -> None:
        self._buffers_of = ref(model)
        self._buffers = [(path, own) for path, module in model.named_modules() if (own := _torch.get_buffers(module))]

    def restore(self, context: Context) -> None:
        """Put back buffers that were replaced in the forward pass."""
        for own, before in self._before:
            own.clear()
            own.update(before)
        context.path.note_refusal()

    def prepare(self, call: Call, context: Context) -> Call:
        """Refuse a call with samples that changes weights, before it does so."""
        position = _WITH_MAX_NORM.get(call.func)
        if position is not None and get_argument(call, position, "max_norm") is not None:
            raise SamplesMixed(
                f"{get_op_name(call.func)}(max_norm=...), in {context.place()}, scales down the rows of the weight "
                f"that occur in the batch. The weight would hold values that depend on samples. {STATE_ADVICE}"
            )
        return call

    def after(self, call: Call, result: Any, context: Context) -> None:
        """After a norm layer with running statistics: these hold samples, if it updates them."""
        if not (first := call.facts.statistics_at) or not any(call.where):
            return
        if not get_argument(call, 5, "training", "use_input_stats", default=call.func is not F.batch_norm):
            return
        for position, name in ((first, "running_mean"), (first + 1, "running_var")):
            statistic = get_argument(call, position, name)
            if isinstance(statistic, Tensor):
                context.set_layout(statistic, Lost(f"{get_op_name(call.func)} adds the samples to running statistics"))

    def before_backward(self, outputs: Sequence[Tensor], gradients: Sequence[Tensor], context: Context) -> None:
        """Check what the code around the model has done."""
        self._check_state(context)

    def _check_state(self, context: Context) -> None:
        """Refuse samples in parameters and buffers of the model."""
        if (model := context.model) is None:
            return
        with _torch.DisableTorchFunction():
            if context.path.audit is not None:
                self._find_buffers(model)  # a module may have got its first buffer
            for path, own in self._buffers:
                for name, buffer in own.items():
                    where = None if buffer is None else context.known.get_layout(buffer)
                    if buffer is not None and where is not None and buffer not in self._given:
                        cause = getattr(where, "cause", "they were written into it")
                        refuse_state(f"{path}.{name}" if path else name, cause, model)
            if context.path.audit is not None:
                self._check_memory(model, context.path.audit, context)

    def _check_memory(self, model: nn.Module, audit: Audit, context: Context) -> None:
        """The same by what the audit of the pass has seen, also for other tensors that the modules hold."""
        named = {id(t): name for name, t in [*model.named_parameters(), *model.named_buffers()]}
        for tensor in find_state_tensors(model):
            if tensor in self._given or (cause := audit.memories.find_samples(tensor)) is None:
                continue
            if id(tensor) in named:
                refuse_state(named[id(tensor)], cause, model)
            if tensor not in context.known:
                context.set_layout(tensor, Lost(cause, context.place()))
