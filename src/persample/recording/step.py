"""A step of a watched model: its recording, the calls that belong to it, and what is alive of it."""

from __future__ import annotations

from contextlib import ExitStack
from threading import get_ident
from typing import Any
from weakref import ref

from torch import Tensor, nn

from persample import _torch
from persample._internal.tree import iterate_tensors
from persample.errors import PerSampleError
from persample.forward import TensorMap
from persample.layouts import Layout
from persample.recording.declared import DeclaredBatches
from persample.recording.session import Recording, leave_ended_modes


class WatchedStep(Recording):
    """The recording of a step that has begun with a call of the model, or of a part.

    Args:
        first: what the first call is of.
        declared: what was declared as samples.
        link: what the recording tells of its backward passes.
        options: as for `Recording`.
    """

    def __init__(
        self, model: nn.Module, first: nn.Module, declared: DeclaredBatches, link: object, *options: Any
    ) -> None:
        super().__init__(model, *options)
        self.link = link
        self._first, self._declared = ref(first), declared
        self._opened = ExitStack()
        self._outputs: list[ref[Tensor]] = []
        self._used: list[TensorMap[int]] = []  # the declared batches of which the step has samples
        self._thread = get_ident()  # in which the step began

    def open(self, keep_grad: bool) -> None:
        """Follow the code in this thread from now on."""
        self._opened.enter_context(self.prepare_processes(keep_grad))
        mode = self.tracker.mode
        mode.start()
        self._opened.callback(mode.stop)
        _torch.insert_outermost_mode(mode)
        self._opened.callback(_torch.remove_mode, mode)

    def end(self) -> None:
        """End the step. In the modes of another thread, its mode stays until `leave_ended_modes`."""
        self.tracker.progress.end()
        self._opened.close()
        leave_ended_modes()
        self.close()

    # ---- calls ----

    def begin_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Follow a call of the model or of a part; False if it is not known where its samples lie."""
        tracker, declared = self.tracker, self._declared
        list_layouts = declared.get_layouts()
        if list_layouts is not None and tracker.outside is not None and self.samples.batch is None:
            tracker.outside.declare_early(list_layouts)
        if not self.start_call(module, args, kwargs, declared.find_size(args, kwargs)):
            return False
        self._used = self._used or declared.find(args, kwargs)
        for batch in declared.batches:
            self.add_samples(batch)
        for ask in tracker.detectors.start_call:
            ask(tracker)
        if tracker.complain is not None and not self.grads.batch_size:
            raise PerSampleError("The batch has no samples.")  # nothing would add zeros to `grad`
        return True

    def add_samples(self, declared: TensorMap[int]) -> None:
        """Declare tensors of the data: one row per sample in the batch dimension, or else in 0, if it has that size."""
        batch = self.tracker.batch
        with _torch.DisableTorchFunction():
            for tensor, dim in declared.items() if batch else ():
                dims = [each for each in (dim, 0) if tensor.dim() > each and tensor.shape[each] == batch]
                if dims:
                    self.tracker.add_input(tensor, Layout(dims[0]))

    def continues_with_part(self, part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the call of a submodule belongs to this step."""
        if not self._is_alive():
            return False
        if self.samples.has_known(args, kwargs, part):
            return True
        if self._declared.find(args, kwargs):
            return False
        return self._first() is not part or self.samples.can_continue_with(args, kwargs, part)

    def continues(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call of the model belongs to this step: results are alive, and batch size and units are equal.

        Samples of another batch that was declared do not belong to it. Other parts of its tensors do, and are refused.
        """
        if not self._is_alive():
            return False
        declared = self._declared.find(args, kwargs)
        if declared and self._used and not any(a is b for a in declared for b in self._used):
            return False
        return self.samples.can_continue(args, kwargs)

    def note_output(self, output: Any) -> None:
        """Note the output of a call."""
        self._outputs += [ref(t) for t in iterate_tensors(output) if t.requires_grad]

    def _is_alive(self) -> bool:
        """Whether an output of this step is alive, or something that was computed from it."""
        tracker = self.tracker
        if tracker.has_ended or self._thread != get_ident():
            return False
        if any(output() is not None for output in self._outputs):
            return True
        return any(t.requires_grad for t, _ in tracker.known.items())
