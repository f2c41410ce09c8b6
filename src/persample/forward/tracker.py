"""What follows the samples through a forward pass: it knows where they lie in each tensor, and how far the pass is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any, Protocol
from weakref import WeakKeyDictionary, ref

from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from persample import _torch
from persample._internal import tracing
from persample._internal.models import Members
from persample.backward import Collector
from persample.distributed import Processes
from persample.errors import ELSEWHERE, Complain, find_place
from persample.forward.contributions import make_advice, own_tensor
from persample.forward.detectors import Detector, Detectors
from persample.forward.known import KnownTensors
from persample.forward.mode import FollowMode
from persample.forward.outside import OutsideTensors
from persample.forward.path import Path, Progress, Stage
from persample.forward.results import is_refused, make_gradient_refusal
from persample.forward.sums import watch_sum
from persample.forward.unseen import check_backward, check_custom_function, find_unseen_layout, refuse_nested
from persample.forward.written import Buffers
from persample.layouts import (
    Call,
    CountedSizes,
    Crossed,
    DivisorMode,
    Layout,
    Lost,
    Reduced,
    SampleUnits,
    Where,
    find_layout_of_view,
    lose_entries,
)


class FrontEnd(Protocol):
    """What a tracker asks of the recording that it belongs to."""

    def run_backward(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run a call of `backward`."""

    def start_by_use(self, call: Call) -> bool:
        """Find samples in a call, outside of calls of modules, that combines weights with tensors from outside."""


class Tracker:
    """While its mode is entered, the layout of each tensor that depends on the batch is known.

    A *use* is an op with a weight on one side (a parameter, or a tensor computed from parameters alone) and samples on
    the other. It runs with the weight detached, and a tap on its result finds the terms in backward. Ops of weights
    alone run under ordinary autograd, through which the collector pulls gradients back.

    Args:
        collector: takes the terms.
        model: the module whose forward is tracked, for names in errors, buffers and transformer layers.
        batch: the batch size; a recording sets it with `start_batch`.
        loss_reduction: how the loss combines the samples, if the user has said so.
        advice: what to do about samples that are mixed, for errors.
        processes: the processes that share the batch.
        outside: decides about tensors that the code around the model uses; by default they are constants.
        detectors: what watches besides, after `Reads`.
        is_isolated: whether nothing may depend on a coincidence, and nothing but the noisy sum may outlive the step.
        is_coupled: samples may influence each other; what the tracker follows is who owns each row.
        divisors: what is done with divisors of the loss that are counted over all samples.
        members: the members of the model, if the caller has just read them.
    """

    def __init__(
        self,
        collector: Collector,
        model: nn.Module | None = None,
        *,
        batch: int = 0,
        loss_reduction: str | None = None,
        advice: str | None = None,
        processes: Processes | None = None,
        outside: OutsideTensors | None = None,
        detectors: Sequence[Detector] = (),
        is_isolated: bool = False,
        is_coupled: bool = False,
        divisors: DivisorMode = "refuse",
        members: Members | None = None,
    ) -> None:
        self.batch = batch
        self.collector = collector
        self._model = None if model is None else ref(model)  # what is left of a dropped model's step must not keep it
        self.processes = processes or Processes()
        self.outside = outside
        self.is_coupled = is_coupled
        self.front: FrontEnd | None = None
        self.advice = make_advice() if advice is None else advice
        self.progress = Progress(is_inside=batch > 0)
        self.path = Path(model, is_isolated)
        self.detectors, self.is_isolated = Detectors([self.path.reads, *detectors]), is_isolated
        divisors = "refuse" if tracing.get_trace() is not None else divisors
        self.counted = CountedSizes(
            divisors, self.path.program.scales, loss_reduction, None if outside is None else outside.is_held
        )
        self.known = KnownTensors()
        self.mode = FollowMode(self, members)
        for ask in self.detectors.start:
            ask(self)

    @property
    def model(self) -> nn.Module | None:
        """The module whose forward is tracked, None if there is none or if it has been freed."""
        return None if self._model is None else self._model()

    @property
    def complain(self) -> Complain | None:
        """Takes refusals in place of raising them, and ends the recording."""
        return self.collector.receiver.complain

    # ---- the stages of the pass ----

    @property
    def is_inside(self) -> bool:
        """Whether a call of the model runs, as far as is known."""
        return self.progress.stage is Stage.INSIDE

    @property
    def has_ended(self) -> bool:
        """Whether nothing is followed any more."""
        return self.progress.has_ended

    def connect(self, front: FrontEnd | None) -> None:
        """Set the recording that runs backward passes and finds samples; None breaks the cycle."""
        self.front = front

    def begin_audit(self) -> None:
        """Compare the functions from now on with those of audited passes, and audit what is new."""
        self.path.begin(self)

    def end_audit(self) -> None:
        """Let the functions that follow pass without an audit: the forward pass has ended."""
        self.known.summed.entries.clear()  # it keeps activations
        self.path.end()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Inside the block, nothing is followed or audited: it runs passes that are not part of the recording."""
        with self.progress.pause(), self.path.pause():
            yield

    # ---- the batch ----

    def start_batch(self, batch: int, arguments: Iterable[Tensor], units: SampleUnits | None) -> None:
        """Set the batch size, for a call of the model that is about to run with these arguments."""
        self.batch, arguments = batch, [*arguments]
        self.counted.start_batch(units)
        if self.outside is not None and (early := self.outside.early) is not None:
            self.counted.totals.update(early.get_totals(batch))
            if not self.is_isolated and self.counted.units is None:
                self.add_advice(early.describe_repeats(arguments, batch))
            for tensor, layout in self.outside.take_early(arguments, batch):
                self.known[tensor] = (layout, tensor.requires_grad)
                if isinstance(layout, Layout):
                    for ask in self.detectors.note_given:
                        ask(tensor)

    def grow(self, batch: int, advice: str) -> None:
        """Add samples to the batch. The samples so far keep their numbers. `advice` is added to errors from now on."""
        self.add_advice(advice)
        before, self.batch = self.batch, batch
        if self.outside is not None and self.outside.remembered is not None:
            self.outside.remembered.forget_step()
        self.known.grow(before, batch)
        self.path.grow(before, batch)

    # ---- tensors from outside ----

    def add_input(self, tensor: Tensor, layout: Where) -> None:
        """Set the layout of a tensor from outside, unless the tracker has seen where it comes from."""
        self.known.has_inputs = True
        if tensor.requires_grad:
            self.collector.retained.forbid()  # a use may have no tap behind its activations
        self.collector.receiver.note_outside(tensor)
        for ask in self.detectors.note_given:
            ask(tensor)
        if tensor not in self.known:
            if self.outside is not None and isinstance(layout, Layout):
                layout = self.outside.reorder(layout)
            self.known[tensor] = (layout, tensor.requires_grad)

    def add_constant(self, tensor: Tensor) -> None:
        """Declare that a tensor is the same for all samples."""
        if self.outside is not None:
            self.outside.add_constant(tensor)

    def is_constant(self, tensor: Tensor) -> bool:
        """Whether a tensor from outside is known to be the same for all samples."""
        if self.outside is None or not self.outside.is_declared(tensor):
            return False
        return self.is_isolated or not self.outside.is_drawn(tensor)

    def _find_outside_layout(self, tensor: Tensor) -> Where | None:
        """The layout of a tensor that the code around the model uses, and that the tracker has not seen before."""
        assert self.outside is not None
        is_recomputation = _torch.get_backward_pass() >= 0
        if not self.batch or tensor.requires_grad or is_recomputation or self.progress.is_between:
            return None
        layout = self.outside.find_layout(tensor, self.batch)
        if layout is not None:
            self.known[tensor] = (layout, False)
            if not self.is_isolated:
                self.known.note_given(tensor)
            for ask in self.detectors.note_given:
                ask(tensor)
        return layout

    # ---- layouts ----

    def find_layout(self, tensor: Tensor) -> Where | None:
        """Where the samples lie in a tensor, None if it does not depend on the batch."""
        return self.path.find_layout(tensor, self.find_known_layout)

    def find_known_layout(self, tensor: Tensor) -> Where | None:
        """`find_layout`, as far as torch functions show it."""
        entry = self.known.entries.get(id(tensor))
        if entry is None or entry[0]() is not tensor:
            if tensor.is_nested:
                refuse_nested(self.place())
            base = tensor._base
            if base is not None and (of_base := self.known.get(base)) is not None:
                layout = find_layout_of_view(tensor, base, of_base[0], self.batch)
                check_backward(tensor, layout, self)
                return layout
            if _torch.find_node(tensor) is None:
                if tensor.requires_grad and id(tensor) not in self.collector.parameters:
                    self.collector.retained.forbid()  # no tap is behind what is computed from it
                return None if self.is_inside or self.outside is None else self._find_outside_layout(tensor)
            return find_unseen_layout(tensor, self)
        layout, had_grad = entry[1]
        if not had_grad and layout is not None and tensor.requires_grad:
            if _torch.find_node(tensor) is None:  # requires_grad_(): a use of it has no tap behind its activations
                self.collector.retained.forbid()
            else:
                check_custom_function(tensor, layout, self)
        if isinstance(_torch.find_node(tensor), BackwardCFunction):
            check_backward(tensor, layout, self)
        return layout

    def is_weight(self, tensor: Tensor) -> bool:
        """Whether a tensor that does not depend on the batch is a parameter, or computed from parameters."""
        if not tensor.requires_grad or id(tensor) in self.collector.parameters:
            return tensor.requires_grad
        known = self.known.get(tensor)
        return known is not None and known[0] is None

    def set_layout(self, tensor: Tensor, layout: Where | None) -> None:
        """Set where the samples lie in a tensor; None: nowhere, it was computed from weights alone."""
        if isinstance(layout, (Lost, Reduced)) and not layout.place:
            # A loss outside the model is in none of its modules: skip the search through the stack in each step.
            is_searched = self.is_inside or isinstance(layout, Lost)
            place = self.place() if is_searched else ELSEWHERE
            if isinstance(layout, Lost) and self.outside is not None and not self.is_inside:
                place += self.outside.describe_assumed()
            layout = replace(layout, place=place)
        if isinstance(layout, Crossed) and (self.is_isolated or self.is_coupled or tracing.get_trace()):
            layout = lose_entries(layout)  # a pair of different samples that overflows makes both gradients NaN
        if self.is_coupled:
            layout = own_tensor(tensor, layout, self.batch)
        if isinstance(layout, Lost) and is_refused(layout) and _torch.find_node(tensor) is not None:
            pairs = layout if isinstance(layout, Crossed) else None
            tensor.register_hook(make_gradient_refusal(f"{layout.cause}, in {layout.place}", self, pairs))
        note_loss = self.collector.receiver.note_loss
        if isinstance(layout, Reduced) and note_loss is not None and _torch.find_node(tensor) is not None:
            watch_sum(tensor, layout, self.collector.anchor_node, note_loss)
        self.known.set_layout(tensor, layout)
        if tensor.requires_grad and _torch.find_node(tensor) is None:  # rand_like(x, requires_grad=True)
            self.collector.retained.forbid()

    # ---- words and buffers ----

    def place(self) -> str:
        """The module whose code is running, in words."""
        return find_place(self._module_names)

    @cached_property
    def _module_names(self) -> WeakKeyDictionary[nn.Module, str]:
        modules = () if self.model is None else self.model.named_modules()
        return WeakKeyDictionary({module: name for name, module in modules})

    def add_advice(self, advice: str) -> None:
        """Say more in errors about mixed samples."""
        if advice not in self.advice:
            self.advice += advice

    def replace_advice(self, advice: str) -> None:
        """Say something else in errors about mixed samples."""
        self.advice = advice

    @cached_property
    def buffers(self) -> Buffers:
        """The buffers of the model, with copies of those that calls have changed."""
        return Buffers(self.model)

    def restore_buffers(self) -> None:
        """Give the model's buffers the values that they had before the forward pass."""
        if "buffers" in vars(self):
            self.buffers.restore()
        for ask in self.detectors.restore:
            ask(self)
