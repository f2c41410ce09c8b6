"""Keep the steps of private training apart: no sample may influence a later step except through the noisy sum.

A tensor that was computed from samples and that outlives its step (an attribute of a module, a variable of the loop)
is lost in later steps: it may be logged, but it is refused where a weight meets it or where a gradient comes back
through it. Parameters and buffers are part of each checkpoint, so that samples must not be written into them at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import ref

import torch.nn.functional as F
from torch import Tensor, nn

from persample import _torch
from persample._internal.state import find_state_tensors
from persample.errors import SamplesMixed, get_op_name
from persample.forward.known import KnownTensors, TensorMap
from persample.forward.loss_code import LossCode
from persample.forward.places import Places
from persample.forward.results import is_refused
from persample.layouts import Call, Layout, Lost, Motion, Reduced, get_argument, make_call

if TYPE_CHECKING:
    from persample.forward.audit import Audit
    from persample.forward.tracker import Tracker

# Tensors of earlier steps that are remembered; the oldest are forgotten first. A list of all losses may grow for ever.
_MAX_CARRIED = 4096

_MAX_GIVEN = 256  # the same for tensors of the data

# Functions that may change a weight by the indices that occur, and the position of their argument `max_norm`.
_WITH_MAX_NORM: dict[Any, int] = {F.embedding: 3, F.embedding_bag: 3}

_CARRIED = (
    "a tensor of shape {shape} was computed from the samples of an earlier step. In private training a sample must not "
    "influence later steps: compute it anew in each forward pass, or without gradients and for logging only"
)

_ADVICE = (
    "Later steps and every checkpoint would see it without noise, so that the privacy guarantee would not hold. Remove "
    "the state (track_running_stats=False, max_norm=None, no running averages or code books of samples), keep the "
    "module in eval(), or compute it from the weights alone or from public data outside private training."
)


# By the id of a tensor, in the form of `TensorMap.entries`: that it is lost, and whether it required grad.
_Entries = dict[int, tuple[ref[Tensor], tuple[Lost, bool]]]


def _make_entry(tensor: Tensor, place: str) -> tuple[ref[Tensor], tuple[Lost, bool]]:
    """The entry of a tensor that holds samples of an earlier step."""
    return ref(tensor), (Lost(_CARRIED.format(shape=tuple(tensor.shape)), place), tensor.requires_grad)


class Isolation:
    """What private training refuses although it has per-sample gradients. One object serves all steps of a model.

    Attributes:
        places: refuses constants that depend on a sample's number in the batch.
        loss_code: refuses steps in which numbers of samples may have changed the loss.
    """

    def __init__(self) -> None:
        self.places = Places()
        self.loss_code = LossCode()
        self._given: TensorMap[bool] = TensorMap()  # tensors from outside, in the current step
        # Tensors from outside in earlier steps, and those of them that are hidden now.
        self._given_before: _Entries = {}
        self._hidden: _Entries = {}
        self._carried: _Entries = {}  # tensors of earlier steps
        # The dicts in which modules keep their buffers, with the paths of the modules; and copies of these dicts.
        self._buffers: list[tuple[str, dict[str, Tensor | None]]] = []
        self._buffers_of: ref[nn.Module] | None = None
        self._before: list[tuple[str, dict[str, Tensor | None], dict[str, Tensor | None]]] = []

    # ---- tensors that outlive their step ----

    def start_step(self, tracker: Tracker) -> None:
        """Tell the tracker of a new step which tensors hold samples of earlier steps."""
        self.places.start_step()
        self.loss_code.start_step()
        alive = [(key, entry) for key, entry in self._given_before.items() if entry[0]() is not None]
        self._given_before = dict(alive[-_MAX_GIVEN:])
        self._given_before |= {id(tensor): _make_entry(tensor, "an earlier step") for tensor, _ in self._given.items()}
        self._given = TensorMap()
        tracker.known.entries.update(self._carried)

    def note_given(self, tensor: Tensor) -> None:
        """Note that a tensor comes from outside: the next step may have the same data."""
        self._given[tensor] = True

    def hide_data(self, tracker: Tracker) -> None:
        """Count tensors from earlier batches as samples of those, except tensors that this batch contains again."""
        with _torch.DisableTorchFunction():
            # A loop that keeps its batches has many of them. Those without gradients go into the tracker as they are.
            is_saving = _torch.get_saved_tensor_hooks() is not None
            hidden: _Entries = {}
            for key, entry in self._given_before.items():
                tensor = entry[0]()
                if tensor is None or tensor in tracker.known:
                    continue
                if tensor.requires_grad or entry[1][1] or is_saving:
                    tracker.set_layout(tensor, entry[1][0])
                    self._hidden[key] = entry
                else:
                    hidden[key] = entry
            tracker.known.entries.update(hidden)
            self._hidden |= hidden

    def show_data(self, tracker: Tracker) -> None:
        """In the code around the model, the same data may be used again, as in training on one batch."""
        tracker.known.forget_all(self._hidden)
        self._hidden = {}

    def end_step(self, tracker: Tracker) -> None:
        """Note the tensors of a step that are still alive."""
        with _torch.DisableTorchFunction():
            self.show_data(tracker)
            carried = self._carried
            for tensor, (where, _) in tracker.known.items():
                if where is None or tensor in self._given:
                    continue
                if (entry := carried.get(id(tensor))) is not None and entry[0]() is tensor:
                    continue
                self._carried[id(tensor)] = _make_entry(tensor, getattr(where, "place", "") or "an earlier step")
            if len(self._carried) > _MAX_CARRIED // 2:
                alive = [(key, entry) for key, entry in self._carried.items() if entry[0]() is not None]
                self._carried = dict(alive[-_MAX_CARRIED:])

    # ---- parameters and buffers ----

    def start_forward(self, model: nn.Module) -> None:
        """Note the buffers of the model, which is about to be called."""
        self.loss_code.note_model()
        if self._buffers_of is None or self._buffers_of() is not model:
            self._find_buffers(model)
        self._before = [(name, own, own.copy()) for name, own in self._buffers]

    def _find_buffers(self, model: nn.Module) -> None:
        self._buffers_of = ref(model)
        self._buffers = [(path, own) for path, module in model.named_modules() if (own := _torch.get_buffers(module))]

    def restore_buffers(self) -> None:
        """Put back buffers that were replaced in the forward pass."""
        for _, own, before in self._before:
            own.clear()
            own.update(before)

    def check_call(self, call: Call, tracker: Tracker) -> None:
        """Refuse a call with samples that changes weights, before it does so."""
        position = _WITH_MAX_NORM.get(call.func)
        if position is not None and get_argument(call, position, "max_norm") is not None:
            raise SamplesMixed(
                f"{get_op_name(call.func)}(max_norm=...), in {tracker.place()}, scales down the rows of the weight "
                f"that occur in the batch. The weight would hold values that depend on samples. {_ADVICE}"
            )

    def note_statistics(self, call: Call, tracker: Tracker) -> None:
        """After a norm layer with running statistics: these hold samples, if it updates them."""
        if not (first := call.facts.statistics_at):
            return
        if not get_argument(call, 5, "training", "use_input_stats", default=call.func is not F.batch_norm):
            return
        for position, name in ((first, "running_mean"), (first + 1, "running_var")):
            statistic = get_argument(call, position, name)
            if isinstance(statistic, Tensor):
                tracker.set_layout(statistic, Lost(f"{get_op_name(call.func)} adds the samples to running statistics"))

    def check_backward(self, outputs: Sequence[Tensor], gradients: Sequence[Tensor], tracker: Tracker) -> None:
        """Check what the code around the model has done, and what `backward` starts from."""
        self.check_state(tracker)
        if any(is_refused(tracker.find_known_layout(output)) for output in outputs):
            return
        for output, gradient in zip(outputs, gradients, strict=False):
            self._check_gradient(output, gradient, tracker)
        self.loss_code.check_backward((outputs, gradients), tracker)

    def _check_gradient(self, output: Tensor, gradient: Tensor, tracker: Tracker) -> None:
        """Refuse gradients of an output that depend on several samples, and constants that differ between samples."""
        if isinstance(where := tracker.find_known_layout(gradient), (Lost, Reduced)):
            raise SamplesMixed(
                "The gradient that is passed to backward() was computed from the samples, and would change the "
                f"gradients of all of them: {where.cause}. Call backward() without it."
            )
        if output.shape == gradient.shape and isinstance(layout := tracker.find_layout(output), Layout):
            call = make_call(Tensor.backward, (output, gradient), {}, tracker.batch, tracker.find_layout)
            self.places.check(call, Motion((layout,), ((1, layout),)), tracker)

    def check_state(self, tracker: Tracker) -> None:
        """Refuse samples in parameters and buffers of the model."""
        if (model := tracker.model) is None:
            return
        with _torch.DisableTorchFunction():
            if (audit := tracker.path.audit) is not None:
                self._find_buffers(model)  # a module may have got its first buffer
            self._check_buffers(model, tracker.known)
            if audit is not None:
                self._check_memory(model, audit, tracker)

    def _check_buffers(self, model: nn.Module, known: KnownTensors) -> None:
        for path, own in self._buffers:
            for name, buffer in own.items():
                where = None if buffer is None else known.get_layout(buffer)
                if buffer is not None and where is not None and buffer not in self._given:
                    cause = getattr(where, "cause", "they were written into it")
                    refuse_state(f"{path}.{name}" if path else name, cause, model)

    def _check_memory(self, model: nn.Module, audit: Audit, tracker: Tracker) -> None:
        """The same by what the audit of the pass has seen, also for other tensors that the modules hold."""
        named = {id(t): name for name, t in [*model.named_parameters(), *model.named_buffers()]}
        for tensor in find_state_tensors(model):
            if tensor in self._given or (cause := audit.memories.find_samples(tensor)) is None:
                continue
            if id(tensor) in named:
                refuse_state(named[id(tensor)], cause, model)
            if tensor not in tracker.known:
                tracker.set_layout(tensor, Lost(cause, tracker.place()))


def refuse_state(name: str, cause: str, model: nn.Module) -> NoReturn:
    """Raise: a parameter or a buffer holds values that were computed from samples."""
    kind = "parameter" if name in dict(model.named_parameters()) else "buffer"
    owner = type(model.get_submodule(name.rpartition(".")[0])).__name__
    raise SamplesMixed(
        f"The {kind} '{name}' (of {owner}) holds values that were computed from samples: {cause}. {_ADVICE}"
    )
