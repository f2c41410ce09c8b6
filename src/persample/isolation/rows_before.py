"""Follows the rows of batches from the moment a loader hands them out until the model is called.

In private training, each row of the model's arguments must be one sample of the loader, and the recording must know
which: to give it to its unit, and to see that samples were mixed or that arguments and targets have different orders.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from persample import _torch
from persample._internal.dynamo import exclude_from_graph, skip_compilation
from persample._internal.facts import facts
from persample._internal.functions import find_results, is_inplace
from persample._internal.tree import find_tensors, iterate_tensors
from persample.errors import PerSampleError, get_op_name
from persample.forward import BEFORE, FollowedBatch, TensorMap
from persample.isolation.exposed import ExposedMemory
from persample.layouts import Layout, Lost, Where, find_motion, make_call, make_layout
from persample.recording import DeclaredBatches

_FEW_BATCHES = 16  # that are followed without a look whether a program still has tensors of them
_MOST_BATCHES = 1024  # that are followed at a time
_MOST_TENSORS = 4096  # of one batch

_SET_DATA: Any = Tensor.data.__set__  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Rows:
    """The samples of a batch of a loader that the rows of the model's arguments are.

    Attributes:
        number: of the batch among those that were handed out.
        size: the number of its samples.
        order: the sample of each row of the arguments.
    """

    number: int
    size: int
    order: tuple[int, ...]

    @property
    def has_repeats(self) -> bool:
        """Whether a sample is in several rows."""
        own = [sample for sample in self.order if sample >= 0]
        return len({*own}) < len(own)


class RowsBefore(TorchFunctionMode, DeclaredBatches):
    """Follows tensors of batches that are handed out, and what is computed from them. It is entered and left anywhere.

    Args:
        exposed: memory of samples that code outside torch has got.

    Attributes:
        number: of the batch that was declared last.
        rows: what the rows of the arguments of the last call are, as far as that is known.
        is_following: whether a loader has handed out batches whose rows can be followed.
    """

    def __init__(self, exposed: ExposedMemory) -> None:
        TorchFunctionMode.__init__(self)
        DeclaredBatches.__init__(self)
        self._exposed = exposed
        self.number = 0
        self.rows: Rows | None = None
        self.is_following = False
        self._found: Rows | None = None  # the same, if the call begins a step
        self._is_paused = False  # as a loader prepares other data
        self._followed: dict[int, FollowedBatch] = {}  # by the number of the batch
        self._limit = _FEW_BATCHES
        self._count = 0
        self._used = 0

    def add(self, batch: Any, batch_dim: int) -> TensorMap[int]:
        declared = super().add(batch, batch_dim)
        self.number = self._start_batch([tensor for tensor, _ in declared.items()], batch_dim)
        return declared

    def _start_batch(self, tensors: Iterable[Tensor], dim: int) -> int:
        """Follow the tensors of a batch, with samples in `dim` or else in dimension 0; return its number."""
        given = [t for t in tensors if not t.is_nested and t.dim()]
        before = self.find_batches(given)
        if len(before) == 1 and (number := before.pop()):
            return number  # it is declared again
        if len(self._followed) >= self._limit:
            self._forget()
        self._count += 1
        for each in (dim, 0):
            layouts = [Layout(each if t.dim() > each else 0) for t in given]
            sizes = {t.shape[where.dim] for t, where in zip(given, layouts, strict=True)}
            if len(sizes) == 1:
                self._followed[self._count] = followed = FollowedBatch(sizes.pop())
                self.is_following = True
                for tensor, where in zip(given, layouts, strict=True):
                    self._exposed.watch(tensor)
                    followed[tensor] = where
                break
        self.enter()
        return self._count

    def _forget(self) -> None:
        """Forget batches of which the program has no tensor any more."""
        for followed in self._followed.values():
            followed.keep_last(_MOST_TENSORS)
        alive = [(number, followed) for number, followed in self._followed.items() if followed]
        self._followed = dict(alive[-_MOST_BATCHES:])
        self._limit = max(_FEW_BATCHES, 2 * len(self._followed))  # a program may keep many, such as all labels

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Inside the block, nothing is followed."""
        was_paused, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = was_paused

    def enter(self) -> None:
        """Follow from now on."""
        if not any(mode is self for mode in _torch.get_function_modes()):
            _torch.insert_outermost_mode(self)

    def stop(self) -> None:
        _torch.remove_mode(self)

    def start_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.stop()
        self._found = self._find_rows(iterate_tensors((args, kwargs)))
        self.rows = self._found or self.rows

    def start_step(self) -> None:
        self.rows = self._found

    def get_layouts(self) -> Callable[[int], Iterable[tuple[Tensor, Where]]]:
        return partial(self._list_layouts, self.rows)

    def resume(self) -> None:
        if self._used < self._count:
            self.enter()

    @property
    def followed(self) -> Collection[int]:
        """The numbers of the batches that may still come to the model."""
        return self._followed.keys()

    def find_batches(self, tensors: Iterable[Tensor]) -> set[int]:
        """The numbers of the batches that tensors belong to, or were computed from; 0 for other tensors."""
        return {self._find_batch(tensor) for tensor in tensors}

    def _find_batch(self, tensor: Tensor) -> int:
        return next((number for number, followed in reversed(self._followed.items()) if tensor in followed), 0)

    def _find_rows(self, arguments: Iterable[Tensor]) -> Rows | None:
        """What the rows of these arguments are; None if nothing is known of them, or if they have different orders."""
        for tensor in self._exposed.find_changed():
            self._lose_memory(tensor, "its memory was replaced, or written by code outside torch")
        orders: set[Rows] = set()
        for tensor in arguments:
            number = self._find_batch(tensor)
            self._used = max(self._used, number)
            where = self._followed[number].get(tensor) if number else None
            if isinstance(where, Layout) and tensor.dim() > where.dim:
                size = self._followed[number].size
                orders.add(Rows(number, size, where.get_ids(tensor.shape[where.dim], size)))
        return orders.pop() if len(orders) == 1 else None

    def _list_layouts(self, rows: Rows | None, batch: int) -> Iterator[tuple[Tensor, Where]]:
        """The tensors that are followed, and their layouts in a batch with the samples of these rows."""
        followed = self._followed.get(self._used if rows is None else rows.number)
        if followed is None:
            return
        order = tuple(range(followed.size)) if rows is None else rows.order
        for tensor, where in followed.renumber(order):
            if len(order) == batch or not isinstance(where, Layout):
                yield tensor, where

    # ---- each op ----

    @exclude_from_graph
    @skip_compilation(with_callees=True)
    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not self._is_paused:
            if func == _SET_DATA or facts(func).replaces_memory:
                self._lose_memory(args[0], "its data were replaced")
            elif result is not None or is_inplace(func):
                self._follow(func, args, kwargs, result)
            if any(self._find_batch(tensor) for tensor in find_tensors(args)):
                self._exposed.note(func, args[0])
        return result

    def _follow(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        number = max(self.find_batches(find_tensors((args, kwargs))), default=0)
        if not number or not (results := find_results(result, args)):
            return
        followed = self._followed[number]

        def find_layout(tensor: Tensor) -> Where | None:
            where = followed.get(tensor)
            if where is None and self._find_batch(tensor):
                return Lost("two batches of the loader meet", BEFORE)
            return where

        call = make_call(func, args, kwargs, followed.size, find_layout)
        if followed.size == 1:
            layouts: Iterable[Where | None] = [_make_layout_of_one(made) for made in results]
        else:
            try:
                layouts = find_motion(call, results).results
            except PerSampleError as error:
                layouts = [Lost(str(error))] * len(results)
        if call.is_inplace or kwargs.get("out") is not None:
            layouts = list(layouts)
            for made, where in zip(results, layouts, strict=False):
                if not isinstance(where, Layout) or where != followed.get(made):
                    self._lose_memory(made, f"{get_op_name(func)} has written into a tensor of the batch")
        followed.note(call, results, layouts, lambda: BEFORE)

    def _lose_memory(self, written: Tensor, cause: str) -> None:
        """Forget where the samples lie in tensors that share the memory of a tensor, and in that one."""
        with _torch.DisableTorchFunction():
            memory = _torch.find_storage_id(written)
            for followed in self._followed.values():
                for tensor, _ in list(followed.items()):
                    if tensor is written or (memory is not None and memory == _torch.find_storage_id(tensor)):
                        followed[tensor] = Lost(cause, BEFORE)


def _make_layout_of_one(made: Tensor) -> Layout | None:
    return make_layout(0, (0,) * made.shape[0], 1) if made.dim() else None
