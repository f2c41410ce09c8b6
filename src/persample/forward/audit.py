"""What no function mode sees: writes through aliases, transforms of torch.func, scripted functions, shared memory.

The tracker knows tensors by identity and sees torch functions only. The audit knows memory, and sees every aten op. It
is on in the first forward pass of a model, and again from the first function on that differs from every audited pass.

Inside a torch function that the tracker follows, the tracker's answer is noted afterwards. Any other op (in vmap, in a
scripted function, in `autograd.grad`) is followed here. A tensor that the tracker takes for a constant although its
memory holds samples gets the layout that its memory has (`memory`), or is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from persample import _torch
from persample._internal.facts import all_with, facts
from persample._internal.functions import find_results, is_inplace
from persample._internal.precision import INDEX_DTYPES
from persample._internal.tree import find_tensors
from persample.errors import get_op_name, refuse_forward_mode
from persample.forward.memory import Geometry, Memories, Memory, Origins, is_view_of_any, is_whole_of_new_memory
from persample.forward.program import AuditedSequence, Program, Site
from persample.forward.repeats import run_by_keys
from persample.forward.unseen import has_parameters_behind, refuse_nested
from persample.forward.written import find_writes, has_own_dispatch, has_wrappers, make_aten_call, reads_shape
from persample.layouts import (
    Layout,
    Lost,
    Motion,
    Reduced,
    Where,
    find_motion,
)

if TYPE_CHECKING:
    from persample.forward.tracker import Tracker


# Ops for which `find_writes` has found nothing: a set is faster than a cached function.
_WITHOUT_WRITES: set[Any] = set()

# Functions that run other ops than those of their own forward: these are followed one by one.
_RUNNING_OTHERS = {*all_with("differentiates"), *_torch.DUAL_FUNCTIONS}


_UNSEEN = "in code that is not made of torch functions (torch.func, vmap, a scripted function, autograd.grad)"

_ELSEWHERE = "was written in another thread, or where no mode of torch is active"

# The private base class may be missing. Then the first use of the audit raises, and not the import.
_Mode: Any = _torch.TorchDispatchMode if isinstance(_torch.TorchDispatchMode, type) else object


class Audit(_Mode):
    """While it is on, every aten op of a forward pass is seen, and the memory of samples is known.

    Args:
        tracker: the tracker of the pass.
        program: the audited passes of its model.
        site: where the pass is in the program.
    """

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: it would import the compiler, which takes seconds. A recording compiles nothing anyway."""
        return False

    def __init__(self, tracker: Tracker, program: Program, site: Site) -> None:
        super().__init__()
        self._tracker = tracker
        self.sequence = AuditedSequence(program, site)
        self.is_stopped = False
        self._is_differentiating = False  # whether autograd.grad is running
        self._depth = 0  # of torch functions that the tracker follows
        self._has_samples = False  # whether the running function has samples among its arguments
        self._is_dual = False  # whether it runs in forward-mode AD, which computes tangents inside of functions
        self.memories = Memories(program.written_outside)
        self._origins = Origins()

    def start(self) -> None:
        """Note where the samples lie now, and enter the mode."""
        self.add_known_tensors()
        buffers, model = self._tracker.buffers.list_all(), self._tracker.model
        self._origins.start([*buffers, *([] if model is None else model.parameters())], buffers)
        _torch.insert_outermost_dispatch_mode(self)

    def stop(self) -> None:
        """Leave the mode, and note whether later passes of the same sequence must be audited."""
        self.is_stopped = True
        _torch.remove_dispatch_mode(self)
        self._origins.stop()
        self.sequence.end()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Inside the block, the mode is off."""
        _torch.remove_dispatch_mode(self)
        try:
            yield
        finally:
            _torch.insert_outermost_dispatch_mode(self)

    def add_known_tensors(self) -> None:
        """Note the memory of each tensor whose layout the tracker knows."""
        for tensor, (where, _) in self._tracker.known.items():
            if where is not None:
                self._note(tensor, where)

    # ---- torch functions ----

    def run(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a torch function under the tracker, and note what the tracker found."""
        self.sequence.advance(func)
        if func in _RUNNING_OTHERS:
            outer, self._is_differentiating = self._is_differentiating, True
            try:
                return func(*args, **kwargs)
            finally:
                self._is_differentiating = outer
        if has_wrappers(args, kwargs):
            return func(*args, **kwargs)
        return self.follow(func, args, kwargs)

    def follow(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`run` for a function that the tracker follows as a whole."""
        if facts(func).exposes_memory:
            self.memories.expose(args[0], self.find_layout(args[0]) is not None, self._tracker.buffers.list_all())
        with self.follow_whole():
            changed = self._save_known(args) if is_inplace(func) else None
            result = run_by_keys(func, args, kwargs, self._tracker, self.find_layout)
            if self._is_dual:
                self._refuse_lost_tangents((args, kwargs))
            if not self._has_samples:
                for made in find_tensors(result):
                    self._origins.note(made)
            elif is_inplace(func) or result is None:
                self._note_changed(args)
                if changed is not None:
                    self._restore_known(*changed)
            else:
                for made in find_tensors(result):
                    self._note_result(made, (args, kwargs))
        return result

    def _note_result(self, made: Tensor, arguments: Any) -> None:
        """Note the layout of a result.

        A view of a constant (`table[i]` with an index of samples) belongs to the samples that selected it, but its
        memory holds no values of samples.
        """
        where = self._tracker.known.get_layout(made)
        memory, _ = self.memories.locate(made)
        if where is not None and (memory is None or not memory.has_samples) and is_view_of_any(made, arguments):
            memory, geometry = self.memories.locate(made, make=True)
            if memory is not None:
                memory.selected.add(geometry)
        else:
            self._note(made, where)
            if (
                memory is not None
                and memory.cause
                and isinstance(where, Layout)
                and is_whole_of_new_memory(made, arguments)
            ):
                memory.cause = ""  # written by ops inside the call, such as the addition of a bias

    def _refuse_lost_tangents(self, arguments: Any) -> None:
        """Refuse forward-mode AD through a use of a weight: the tap has no forward derivative."""
        tensors = list(find_tensors(arguments))
        if not any(map(self._tracker.is_weight, tensors)) or not any(map(self._tracker.find_known_layout, tensors)):
            return
        with _torch.DisableTorchFunction():
            has_tangent = any(map(_torch.has_tangent, tensors))
        if has_tangent:
            self.sequence.has_finding = True
            refuse_forward_mode(self._tracker.place())

    @contextmanager
    def follow_whole(self) -> Iterator[None]:
        """Inside the block, ops are part of a call whose results the tracker follows."""
        outer = self._has_samples, self._is_dual
        self._depth, self._has_samples, self._is_dual = self._depth + 1, False, _torch.is_inside_forward_ad()
        try:
            yield
        finally:
            self._depth -= 1
            self._has_samples, self._is_dual = outer[0] or self._has_samples, outer[1]

    def find_layout(self, tensor: Tensor) -> Where | None:
        """Where the samples lie in an argument of a torch function, None if it does not depend on the batch."""
        tracker = self._tracker
        memory, geometry = self.memories.locate(tensor)
        if memory is None or not memory.has_samples:
            where = tracker.find_known_layout(tensor)
            is_foreign = memory is None and self._is_foreign(tensor)
            is_changed = tensor in tracker.buffers and self._origins.is_changed(tensor)
            if where is None and (is_foreign or is_changed):
                where = _name_place(self._tracker, Lost(f"a tensor of shape {tuple(tensor.shape)} {_ELSEWHERE}"))
                self.sequence.has_finding = True
            if where is not None and (memory is None or geometry not in memory.selected):
                self._note(tensor, where)
        elif _torch.find_node(tensor) is not None and not (tensor in tracker.known or tensor._base in tracker.known):
            where = self._find_layout_of_unseen(tensor, memory, geometry)
        else:
            where = self._find_layout_in_memory(tensor, memory, geometry, tracker.find_known_layout(tensor))
        is_imported = isinstance(where, Lost) and where.imported and tensor.dtype in INDEX_DTYPES
        if where is not None and not (is_imported and not tracker.is_isolated):  # else it selects rows
            self._has_samples = True
        return where

    def _is_foreign(self, tensor: Tensor) -> bool:
        """Whether a constant was made during the forward pass by no op that was seen, so in another thread.

        In the code of a loss, threads make tensors of their own, such as the targets of a loader. The arguments of a
        function inside another one were made there.
        """
        if self._depth > 1 or not self._tracker.is_inside or not (tensor.is_floating_point() or tensor.is_complex()):
            return False
        return self._origins.is_foreign(tensor)

    def _find_layout_of_unseen(self, tensor: Tensor, memory: Memory, geometry: Geometry) -> Where | None:
        """The layout of a tensor with a gradient that no torch function returned."""
        where = self._find_layout_in_memory(tensor, memory, geometry, None)
        if where is not None and has_parameters_behind(tensor, self._tracker):
            cause = f"a tensor of shape {tuple(tensor.shape)} was computed from weights and samples {_UNSEEN}"
            where = Lost(cause, memory.place)
        self._tracker.set_layout(tensor, where)
        return where

    def _find_layout_in_memory(
        self, tensor: Tensor, memory: Memory, geometry: Geometry, found: Where | None
    ) -> Where | None:
        """The layout of a tensor whose memory holds samples; the tracker has `found` one."""
        known = memory.known.get(geometry)
        where = found
        is_rest = not self._tracker.is_inside and self._tracker.known.is_given(tensor)
        is_followed = isinstance(found, Layout) and not memory.cause
        if known is None and found is None and not memory.cause and is_rest:
            return None  # the rest of a tensor of which the model has got a part
        if known is None and not is_followed and (memory.cause or memory.overlaps(geometry)):
            where = self.memories.find_layout_by_base(tensor, memory, self._tracker.batch)
        elif known is None:  # inputs and targets may be parts of one tensor, also with entries in common
            self._note(tensor, found)
        elif found not in known:
            where = known[-1]
        if where is not None and id(tensor) in self._tracker.collector.parameters:
            where = Lost(memory.cause or "samples were written into the parameter")
        if where != found:
            self.sequence.has_finding = True
        return _name_place(self._tracker, where)

    def _save_known(self, args: tuple[Any, ...]) -> tuple[Tensor, Where | None, Memory, dict[Geometry, Any]] | None:
        """What is known about the memory that a call is about to write to."""
        tensor = next(find_tensors(args[:1]), None)
        memory = None if tensor is None else self.memories.locate(tensor)[0]
        if tensor is None or memory is None or memory.cause:
            return None
        return tensor, self.find_layout(tensor), memory, {key: list(known) for key, known in memory.known.items()}

    def _restore_known(
        self, tensor: Tensor, where: Where | None, memory: Memory, known: dict[Geometry, list[Where | None]]
    ) -> None:
        """After a write that left each entry with its sample: other tensors in this memory are as they were."""
        if isinstance(where, Layout) and self._tracker.known.get_layout(tensor) == where:
            memory.known, memory.cause = {**known, **memory.known}, ""

    def _note_changed(self, args: tuple[Any, ...]) -> None:
        """Note what the tracker found for a tensor that a call with samples wrote to, and for its base."""
        for tensor in find_tensors(args[:1]):
            for changed in (tensor, tensor._base):
                if changed is not None and changed in self._tracker.known:
                    self._note(changed, self._tracker.known.get_layout(changed))

    # ---- aten ops ----

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Stopped in another thread, so that the mode is still on the stack of this one; or the recording was given up.
        if self.is_stopped or self._tracker.has_ended:
            return func(*args, **(kwargs or {}))
        if self._depth and not types and not self._is_dual and func in _WITHOUT_WRITES:  # by far the most frequent case
            return func(*args, **kwargs) if kwargs else func(*args)
        kwargs = kwargs or {}
        if any(map(has_own_dispatch, types)):
            return NotImplemented
        if _torch.get_backward_pass() >= 0 and not self._is_differentiating:
            return func(*args, **kwargs)
        with _torch.DisableTorchFunction():
            if not hasattr(func, "overloadpacket"):
                return self._run_higher_order(func, args, kwargs)
            if not self._depth or self._is_dual:
                return self._run_op(func, args, kwargs)
            result = func(*args, **kwargs)
            if find_writes(func):
                self._note_writes(func, args, kwargs, self._has_samples)
            else:
                _WITHOUT_WRITES.add(func)
            return result

    def _run_higher_order(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op that calls functions, such as torch.cond: the ops inside are not seen."""
        has_samples = any(map(self._find_layout_of_operand, find_tensors((args, kwargs))))
        result = op(*args, **kwargs)
        if has_samples and not self._depth:
            for made in find_tensors(result):
                self._note(made, _name_place(self._tracker, Lost(f"{op} runs ops that are not seen")))
        return result

    def _run_op(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run and follow an op that is not part of a torch function that the tracker follows."""
        where = tuple(map(self._find_layout_of_operand, find_tensors((args, kwargs))))
        result = op(*args, **kwargs)
        self._note_writes(op, args, kwargs, any(where))
        if op.overloadpacket.__name__ == "set_":
            self.sequence.has_finding |= any(where)  # no function mode sees it, so in later passes only an audit does
            self.memories.note_rebuilt(args[0])
        elif any(where) and (isinstance(where[0], Layout) or not reads_shape(op)):
            call = make_aten_call(op, args, kwargs, where, self._tracker.batch)
            results = find_results(result, args)
            motion = find_motion(call, results) if results else Motion(())
            for ask in self._tracker.detectors.check_motion if results else ():
                ask(call, motion, self._tracker)
            layouts = motion.results
            for made, layout in zip(results, layouts, strict=True):
                if isinstance(layout, Lost) and not layout.place:
                    layout = replace(layout, cause=f"{layout.cause}, {_UNSEEN}")
                self._note(made, _name_place(self._tracker, layout))
                if (memory := self.memories.locate(made)[0]) is not None:
                    memory.place = self._tracker.place()
        else:
            for made in find_tensors(result):
                self._origins.note(made)
            if self._tracker.detectors.after:
                call = make_aten_call(op, args, kwargs, (None,) * len(where), self._tracker.batch)
                for ask in self._tracker.detectors.after:
                    ask(call, result, self._tracker)
        return result

    def _find_layout_of_operand(self, tensor: Tensor) -> Where | None:
        memory, geometry = self.memories.locate(tensor)
        if memory is None or not memory.has_samples:
            return self._tracker.known.get_layout(tensor)
        known = memory.known.get(geometry)
        return self.memories.find_layout_by_base(tensor, memory, self._tracker.batch) if known is None else known[-1]

    def _note_writes(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], has_samples: bool) -> None:
        """Forget what was known about memory that an op has written to."""
        cause = ""
        if has_samples and find_writes(op):
            name, place = get_op_name(op.overloadpacket), self._tracker.place()
            cause = f"{name}, in {place}, wrote samples into its memory through another tensor"
        for position, name in find_writes(op):
            written = args[position] if position < len(args) else kwargs.get(name)
            for tensor in find_tensors(written):
                self._origins.note_write(tensor)
                self.memories.note_write(tensor, cause)

    def _note(self, tensor: Tensor, where: Where | None) -> None:
        """Note where the samples lie in a tensor."""
        if tensor.is_nested:
            refuse_nested(self._tracker.place())
        if where is None:
            self._origins.note(tensor)
        self.memories.note(tensor, where)


def _name_place(tracker: Tracker, where: Where | None) -> Where | None:
    """The layout; one that says why samples are mixed also says where."""
    is_nameless = isinstance(where, (Lost, Reduced)) and not where.place
    return replace(where, place=tracker.place()) if is_nameless else where  # type: ignore[type-var]
