"""Which samples the calls of a recording have, and where they lie in the arguments."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Any
from weakref import ref

from torch import Tensor, nn

from persample import _torch
from persample._internal import tracing
from persample._internal.models import SeveralModels
from persample.batches import Arguments, BatchSizesDiffer, NoSamplesFound
from persample.errors import PerSampleError, get_op_name
from persample.forward import CONTRIBUTIONS
from persample.layouts import Call, Layout, make_layout
from persample.recording.rows_in_memory import RowsInMemory
from persample.recording.verifier import Verifier
from persample.recording.wiring import Wiring

_PARTS_ADVICE = (
    " The calls of the model get different parts of one tensor, whose rows were read as different samples. If each "
    "call gets the whole batch, as with pairs, pass batch_size=."
)


class SampleFinder:
    """Finds the samples in the arguments of the calls of a recording, and tells the tracker.

    Attributes:
        batch: the number of samples, as soon as it is known.
        can_have_others: whether a backward pass may be followed by another batch.
    """

    def __init__(self, wiring: Wiring, verifier: Verifier) -> None:
        self.batch: int | None = None
        self._options, self._model, self._processes = wiring.options, wiring.model, wiring.processes
        self._batch_rows, self._collector, self._tracker = wiring.batch.rows, wiring.collector, wiring.tracker
        self._delivery = wiring.delivery
        self._outside, self._is_watched, self._verifier = wiring.outside, wiring.is_watched, verifier
        self._is_isolated = wiring.options.is_isolated
        self._readings = Readings(wiring.options.batch_size)
        self._rows = RowsInMemory()
        is_given = wiring.options.batch_size is not None or wiring.options.samples is not None
        is_traced = tracing.get_trace() is not None
        self.can_have_others = not (is_given or wiring.is_watched or self._is_isolated or is_traced)
        if wiring.options.samples is not None:
            self._declare(wiring.options.samples)

    # ---- calls ----

    def start_call(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], declared_size: int | None
    ) -> bool:
        """Tell the tracker where the samples lie in the arguments of a call that is about to run.

        A call without samples, such as that of an embedding of positions, belongs to the batch of other calls.

        Args:
            module: the model, or a submodule that is called in its place.
            declared_size: the size of the batch if the user has declared it.

        Returns:
            False if it is not known yet where the samples lie.
        """
        model = self._get_model()
        part = None if module is model else module
        is_whole = part is None or (isinstance(model, SeveralModels) and any(part is each for each in model.children()))
        knows_samples = self.batch is not None and (part is not None or self._options.samples is not None)
        with _torch.DisableTorchFunction():
            arguments = self._make_arguments(args, kwargs, part)
            if part is None:
                arguments.check_names(model)
            has_rows = not self._is_isolated and arguments.has_rows(self._tracker)
            if has_rows or (knows_samples and arguments.has_known(self._tracker)):
                self._continue_batch(arguments, module)
                return True
            if self._add_part_of_batch(arguments, module):
                return True
            if is_whole:
                self._start_batch(arguments, self._find_batch_size(arguments), module)
                return True
            arguments = arguments.without_constants(self._tracker)
            known = declared_size if self.batch is None else self.batch
            size = self._readings.choose(self._find_sizes(arguments), known, partial(_name_part, ref(module)))
            if size is not None:
                self._start_batch(arguments, size, module)
            elif known is not None:
                self._set_batch(known, ())
            return size is not None or known is not None

    def _start_batch(self, arguments: Arguments, batch_size: int, module: nn.Module) -> None:
        if self._outside.early is not None and arguments.reading is not None and arguments.reading.is_structural:
            self._outside.early.forget()
        self._set_batch(batch_size, arguments.tensors)
        if module is not self._model() and arguments.has_known(self._tracker):
            arguments.add_unknown_to(self._tracker)  # made of tensors from outside, inside the block
        else:
            arguments.add_to(self._tracker, search=self._options.batch_size is not None)
        self._note_rows(arguments.list_rows(batch_size), range(batch_size))
        if self._outside.remembered is not None and arguments.reading is not None:
            for name in arguments.reading.constants:
                self._outside.remembered.note_name(module, name)
        self._prepare_call(arguments, module)

    def _continue_batch(self, arguments: Arguments, module: nn.Module) -> None:
        arguments.add_unknown_to(self._tracker)
        self._prepare_call(arguments, module)

    def _prepare_call(self, arguments: Arguments, module: nn.Module) -> None:
        self._rows.called.add(id(module))
        self._tracker.counted.note_integers(arguments.iterate_integers())
        self._verifier.prepare(module, arguments)

    def _add_part_of_batch(self, arguments: Arguments, module: nn.Module) -> bool:
        """Follow a call with another part of the tensors of earlier calls; False if the arguments are no such part.

        The rows of one tensor are different samples. If the user gave the batch size, each call has a whole batch.
        """
        rows, numbers = self._find_part_of_batch(arguments)
        if self.batch is None:
            return False
        if numbers is None:
            rows, numbers = self._find_another_batch(arguments.without_constants(self._tracker), module)
        if numbers is None:
            return False
        if self._is_watched:
            raise PerSampleError(
                "Two calls in one step of a watched model get different parts of one tensor. If they are parts of one "
                "batch, call the model once, or use record(); if each call has a batch of its own, copy the parts "
                "(clone), or drop the outputs of the first call before the second."
            )
        self._processes.start_forward()
        total = max(self.batch, 1 + max(numbers))
        if total > self.batch:
            self._delivery.grow(total)
            self._tracker.grow(total, _PARTS_ADVICE)
            self._collector.grow(total)
            self.batch = total
        for tensor, dim in rows:
            self._tracker.add_input(tensor, make_layout(dim, tuple(numbers), total))
        self._note_rows(rows, numbers)
        self._prepare_call(arguments, module)
        return True

    def _find_another_batch(
        self, arguments: Arguments, module: nn.Module
    ) -> tuple[list[tuple[Tensor, int]], list[int] | None]:
        """The tensors with samples, and their samples, if a call has another batch than the calls before.

        So it is if the last batch was differentiated, and a module is called again with tensors that were not computed
        from it: accumulated gradients. Further calls with other tensors then belong to the last batch.
        """
        is_new = self._tracker.progress.is_between and id(module) in self._rows.called
        if not (is_new or self._rows.newest) or arguments.has_known(self._tracker):
            return [], None
        try:
            size = arguments.find_batch_size()
        except (NoSamplesFound, BatchSizesDiffer):
            return [], None
        rows = arguments.list_rows(size)
        if not is_new:
            return rows, self._rows.newest if size == len(self._rows.newest or ()) else None
        if self._options.coupled or not rows or self._delivery.has_zeroed:
            raise self._make_error_of_another_batch(type(module).__name__)
        assert self.batch is not None
        self._rows.newest = [*range(self.batch, self.batch + size)]
        self._outside.start_another(self._rows.newest)
        return rows, self._rows.newest

    def _make_error_of_another_batch(self, called: str) -> PerSampleError:
        return PerSampleError(
            f"After a backward pass, {called} is called with other tensors than before. If they are another batch, use "
            f"a recording for each batch; if they belong to the same samples, pass batch_size={self.batch}, and the "
            "rows of both passes are added up; if they are the same for all samples, name them in constants=."
        )

    def _find_part_of_batch(self, arguments: Arguments) -> tuple[list[tuple[Tensor, int]], list[int] | None]:
        """The tensors with samples in arguments, and the samples of their rows; None if they are no part of a batch."""
        is_followed = not (self._is_isolated or self._options.coupled) and tracing.get_trace() is None
        if self.batch is None or self._options.batch_size is not None or not is_followed:
            return [], None
        try:
            rows = arguments.list_rows(arguments.find_batch_size())
        except (NoSamplesFound, BatchSizesDiffer):
            return [], None
        numbers = self._rows.find(rows)
        return rows, None if numbers == list(range(self.batch)) else numbers

    # ---- without a call of a module ----

    def start_by_use(self, call: Call) -> bool:
        """Find the samples among the tensors of an op that uses weights outside of calls of modules."""
        with _torch.DisableTorchFunction():
            found = self._outside.find_sizes(call.tensors)
            place = f"{get_op_name(call.func)} with weights, outside of calls of modules"
            if found and self.batch is not None and self._tracker.progress.is_between:
                raise self._make_error_of_another_batch(f"{place},")
            batch = self._readings.choose(found, self.batch, lambda: place) if found else None
            if batch is None:
                return False
            if self.batch is not None and (batch > 1 or found[batch].requires_grad):
                raise PerSampleError(
                    f"A tensor of shape {tuple(found[batch].shape)} that requires grad, and has the size of the batch, "
                    f"is used in a call of {place}. Pass it in samples= if it has one row for each sample, or else in "
                    "constants=."
                )
            if self._options.verify == "always":
                raise PerSampleError(
                    f"The option verify='always' is given, but only calls of modules can be verified, and there is a "
                    f"call of {place}."
                )
            if self.batch is None:
                self._set_batch(batch, call.tensors)
                self._rows.called.add(id(self._get_model()))  # it may run the same code
            for tensor in call.tensors:
                if (dim := self._outside.find_dim(tensor, batch)) is not None and not self._tracker.is_constant(tensor):
                    self._tracker.add_input(tensor, Layout(dim))
            status = "not verified: weights are used outside of calls of modules"
            self._verifier.note_status(status if self._options.coupled is None else CONTRIBUTIONS)
        self._tracker.begin_audit()
        return True

    def _declare(self, data: Any) -> None:
        """Tell the tracker of tensors that have one row for each sample, before anything is called."""
        given = self._options.batch_dim
        constants = tuple(self._options.list_constants())
        arguments = Arguments(_take_samples, (data,), {}, given if isinstance(given, int) else 0, constants)
        batch = self._set_batch(self._find_batch_size(arguments), arguments.tensors)
        arguments.add_to(self._tracker, search=False)
        self._note_rows(arguments.list_rows(batch), range(batch))

    # ---- questions about a call ----

    def has_known(self, args: tuple[Any, ...], kwargs: dict[str, Any], part: nn.Module) -> bool:
        """Whether a submodule is called with a tensor that depends on samples of this step."""
        with _torch.DisableTorchFunction():
            return self._make_arguments(args, kwargs, part).has_known(self._tracker)

    def can_continue_with(self, args: tuple[Any, ...], kwargs: dict[str, Any], part: nn.Module) -> bool:
        """Whether the arguments of a submodule have no samples, or as many as this step, with the same units."""
        with _torch.DisableTorchFunction():
            size = self.batch
            sizes = self._find_sizes(self._make_arguments(args, kwargs, part).without_constants(self._tracker))
        return size is not None and (not sizes or (size in sizes and self._batch_rows.has_same_units(size)))

    def can_continue(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call of the model has parts of the tensors of this step, or as many samples and equal units."""
        with _torch.DisableTorchFunction():
            arguments = self._make_arguments(args, kwargs, None)
            size = self._find_batch_size(arguments)
            is_same = size == self.batch and self._batch_rows.has_same_units(size)
            return is_same or self._find_part_of_batch(arguments)[1] is not None

    # ---- tools ----

    def _set_batch(self, batch_size: int, tensors: Iterable[Tensor]) -> int:
        self._processes.start_forward()
        self.batch = self._batch_rows.start(batch_size)
        self._collector.start_batch(self.batch)
        has_units = self._options.units is not None and not (self._is_isolated or self._options.coupled)
        self._tracker.start_batch(batch_size, tensors, self._batch_rows.make_sample_units() if has_units else None)
        return self.batch

    def _note_rows(self, rows: Sequence[tuple[Tensor, int]], numbers: Sequence[int]) -> None:
        if not self._is_isolated:
            self._rows.add(rows, numbers)
            for tensor, dim in rows:
                self._tracker.known.note_given(tensor)
                if (base := tensor._base) is not None and base.dim() == tensor.dim():
                    self._tracker.counted.note_whole({base.shape[dim]} - {tensor.shape[dim]})

    def _find_batch_size(self, arguments: Arguments) -> int:
        given = self._options.batch_size
        return arguments.find_batch_size() if given is None else given

    def _find_sizes(self, arguments: Arguments) -> set[int]:
        """The batch sizes that fit the arguments of a part."""
        try:
            found = {arguments.find_batch_size()}
        except NoSamplesFound:
            found = set()
        except BatchSizesDiffer as error:
            found = {*error.sizes}
        if self._outside.early is None:
            return found
        return found.union(*map(self._outside.early.find_sizes, arguments.tensors))

    def _make_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any], part: nn.Module | None) -> Arguments:
        called = part or self._get_model()
        constants = tuple(self._options.list_constants())
        if self._outside.remembered is not None and self._options.batch_size is None:
            constants += tuple(self._outside.remembered.list_names(called))
        return Arguments(
            (part or self._processes.get_called_module(called)).forward,
            args,
            kwargs,
            self._options.batch_dim,
            constants,
            finds_states=True,
            reads_sizes=not self._is_isolated,
            batch_size=self._options.batch_size,
        )

    def _get_model(self) -> nn.Module:
        model = self._model()
        assert model is not None  # it is being called
        return model

    def close(self) -> None:
        """Forget the memory of the batch."""
        self._rows = RowsInMemory()


def _take_samples(samples: Any) -> None:
    """Has the signature that names the tensors of the option `samples`."""


def _name_part(part: ref[nn.Module]) -> str:
    """A submodule in words."""
    return f"{type(part()).__name__}, a part of the model"


# ---- the batch that several calls share: its size, and which parts of it they have ----


_ADVICE = (
    "Pass samples= with a tensor that has one row for each sample (for a watched model: add_samples), or batch_size=; "
    "name tensors that are the same for all samples in constants=."
)


class Readings:
    """Chooses the batch size by the tensors of calls, and refuses calls that disagree about it.

    A part may be called with a tensor that is the same for all samples, such as an index of positions. If nothing but
    calls of parts tells the batch size, it cannot be distinguished from the samples.
    """

    def __init__(self, given: int | None) -> None:
        self._given = given  # by the user
        self._first: tuple[int, Callable[[], str]] | None = None  # what the first call of a part has told

    def choose(self, sizes: Collection[int], batch: int | None, place: Callable[[], str]) -> int | None:
        """The batch size, None if a call shows no samples.

        Args:
            sizes: the sizes that the tensors of the call may have in their batch dimensions.
            batch: the batch size of the recording, None if it is not known.
            place: returns what is called, in words, for errors.

        Raises:
            PerSampleError: two sizes fit.
        """
        known = self._given if batch is None else batch
        if known is not None and known in sizes:
            return known
        several = sorted({*sizes} - {1}) or sorted(sizes)  # a dimension of size 1 is expanded to any other
        if known is not None and (not self._first or not several or several == [1]):
            return None
        if known is not None or len(several) > 1:
            first, first_place = self._first or (several.pop(0), None)
            before = f" as in the first call, of {first_place()}," if first_place is not None else ""
            raise PerSampleError(
                f"The size of the batch is ambiguous in a call of {place()}: {first} samples,{before} or {several[0]} "
                f"samples? {_ADVICE}"
            )
        if several:
            self._first = several[0], place
        return several[0] if several else None
