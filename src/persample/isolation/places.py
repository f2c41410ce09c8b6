"""Refuse constants that depend on a sample's number in the batch.

A constant may have a row for each sample: an initial state `zeros(B, H)`, a learned token that was expanded to the
batch, noise `randn(B, D)`. If its rows differ, the result for a sample depends on the number of the sample in the
batch: `x * (-1) ** arange(B)[:, None]`, position embeddings along the batch dimension. In private training this breaks
the bound, because removing one sample changes the numbers of all later ones.

The tracker knows when a constant meets samples row by row (`Motion.aligned`). The values decide, in each step: the rows
of all samples must be equal. Random numbers that were drawn in the step are allowed. For weights, equal values are not
enough: each row must be the same function of the parameters (`pe[:B]` may start with zeros).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NoReturn

import torch
from torch import Tensor

from persample import _torch
from persample._internal.graph import find_leaves
from persample._internal.tree import find_tensors
from persample.errors import SamplesMixed, get_op_name
from persample.forward import Context, Detector, TensorMap, is_refused
from persample.layouts import Call, Indexing, Layout, Lost, Motion, Reduced, get_argument, make_call, make_layout

# Operators that put entries of several tensors beside each other.
_JOINS = {"cat", "stack", "hstack", "vstack", "dstack", "column_stack"}

_ADVICE = (
    "A sample's number in the batch must not influence its result: in private training the bound of a sample would not "
    "hold. Positions belong to another dimension than the batch dimension (batch_first, batch_dim); constants must be "
    "the same for all samples; random numbers must be drawn in the step by a function of torch; a tensor of the data "
    "must be an argument of the model, or be declared by add_samples; a mask by lengths is "
    "`torch.arange(T) < lengths[:, None]`."
)


class Places(Detector):
    """Checks the constants that meet samples in the steps of one model."""

    def __init__(self) -> None:
        self._random: TensorMap[bool] = TensorMap()  # drawn in this step
        self._equal: TensorMap[tuple[int, Layout]] = TensorMap()  # version and layout for which rows were equal
        self._before: Tensor | None = None  # a constant, before samples are written into it
        self._probed: set[Any] = set()  # keys of calls in which the rows of weights are the same functions

    def start(self, context: Context) -> None:
        """Forget the tensors of the last step: random numbers that are used again are constants."""
        self._random, self._equal, self._before = TensorMap(), TensorMap(), None

    # ---- random numbers ----

    def after(self, call: Call, result: Any, context: Context) -> None:
        """Note whether a call without samples draws random numbers, or computes with such numbers."""
        if any(call.where):
            return
        if call.facts.is_random:
            is_random = True
        elif not self._random or not call.tensors:
            return
        elif call.facts.writes_entries or call.facts.moves_entries:  # all parts must be drawn, but not an index
            values = self._list_values(call)
            is_random = all(tensor in self._random for tensor in values)
        else:
            is_random = any(tensor in self._random for tensor in call.tensors) and not self._has_places(call)
        for made in (*find_tensors(result), *(call.tensors[:1] if call.is_inplace else ())):
            if is_random:
                self._random[made] = True
            else:
                self._random.discard(made)

    def is_drawn(self, tensor: Tensor) -> bool:
        """Whether a constant consists of random numbers of this step."""
        return tensor in self._random

    def _list_values(self, call: Call) -> Sequence[Tensor]:
        """The tensors whose entries a call moves."""
        if call.facts.writes_entries:
            return [t for t in (call.tensors[0], call.tensors[-1]) if t.is_floating_point()] or call.tensors
        return call.tensors[:1] if call.facts.picks_entries else call.tensors

    def _has_places(self, call: Call) -> bool:
        """Whether a call combines random numbers with a constant that differs along their first dimension."""
        rank = max(tensor.dim() for tensor in call.tensors)
        return any(
            tensor.dim() == rank > 0
            and tensor.shape[0] >= call.batch > 1
            and tensor.shape[0] % call.batch == 0
            and tensor not in self._random
            and not has_equal_rows(tensor, Layout(0, tensor.shape[0] // call.batch), call.batch)
            for tensor in call.tensors
        )

    # ---- constants that meet samples ----

    def prepare(self, call: Call, context: Context) -> Call:
        """Before a call with samples: copy a constant that it changes in place."""
        if call.is_inplace and call.where[0] is None and call.batch > 1:
            self._before = call.tensors[0].clone()
        return call

    def check_motion(self, call: Call, motion: Motion, context: Context) -> None:
        """Refuse a call that moves samples as `motion` says if a constant among its tensors differs between samples."""
        before, self._before = self._before, None
        if call.batch < 2:
            return
        if call.facts.reads_positions and isinstance(where := call.where[0], Layout):
            if where.dim >= call.tensors[0].dim() - 2:
                self._refuse_row_numbers(call, context)
            return
        if all(where is not None for where in call.where):
            return
        if call.is_inplace and before is not None and before.shape == call.tensors[0].shape:
            call = call.with_tensors([before, *call.tensors[1:]])
        for position, layout in self._find_aligned(call, motion, context):
            tensor = call.tensors[position]
            if call.where[position] is not None or tensor is call.kwargs.get("out"):
                continue
            if tensor not in self._random and not (layout and self._has_same_rows(tensor, layout, call, context)):
                self._refuse(call, tensor, context)

    def _find_aligned(self, call: Call, motion: Motion, context: Context) -> Iterable[tuple[int, Layout | None]]:
        """The constants whose rows meet those of samples, by position; refuses calls that move them."""
        operator = call.facts.operator
        if operator in _JOINS:
            return _find_joined_rows(call, where) if isinstance(where := motion.results[0], Layout) else ()
        if operator == "index_fill":
            dim = get_argument(call, 1, "dim") % call.tensors[0].dim()
            if isinstance(call.where[0], Layout) and dim == call.where[0].dim and call.tensors[1] not in self._random:
                self._refuse_row_numbers(call, context)
        elif (call.facts.picks_entries or call.facts.writes_entries) and self._is_moved_by_place(call, motion):
            self._refuse(call, next(t for t, own in zip(call.tensors, call.where, strict=True) if not own), context)
        return motion.aligned

    def _refuse(self, call: Call, tensor: Tensor, context: Context) -> NoReturn:
        kind = "a weight" if tensor.requires_grad else "a constant"
        raise SamplesMixed(
            f"{get_op_name(call.func)}, in {context.place()}, combines each of the {call.batch} samples with its own "
            f"part of {kind} of shape {tuple(tensor.shape)}, and these parts differ. {_ADVICE}"
        )

    def _refuse_row_numbers(self, call: Call, context: Context) -> NoReturn:
        raise SamplesMixed(
            f"{get_op_name(call.func)}, in {context.place()}, treats each of the {call.batch} samples by its number in "
            f"the batch: they lie in dimension {getattr(call.where[0], 'dim', 0)} of a tensor of shape "
            f"{tuple(call.tensors[0].shape)}. {_ADVICE}"
        )

    def _has_same_rows(self, tensor: Tensor, layout: Layout, call: Call, context: Context) -> bool:
        """Whether a constant or a weight is the same for all samples."""
        if not tensor.dim() or tensor.shape[layout.dim] < 2:
            return True
        if tensor.stride(layout.dim) == 0:  # expanded
            return True
        found = self._equal.get(tensor)
        state = (0 if tensor.is_inference() else tensor._version, layout)
        if found == state:
            return True
        if not has_equal_rows(tensor, layout, call.batch):
            return False
        if tensor.requires_grad and not self._has_same_origin(tensor, layout, call, context):
            return False
        self._equal[tensor] = state
        return True

    def _has_same_origin(self, tensor: Tensor, layout: Layout, call: Call, context: Context) -> bool:
        """Whether the rows of all samples are the same function of the parameters.

        A gradient for the rows of one sample must reach the parameters as it would from the rows of any other.
        """
        if tensor.is_leaf:
            return False
        if call.key in self._probed:
            return True
        with _torch.DisableTorchFunction(), torch.no_grad():
            ids = layout.get_ids(tensor.shape[layout.dim], call.batch)
            reference = torch.tensor(_find_references(ids), device=tensor.device)
            generator = torch.Generator(tensor.device).manual_seed(0)
            gradient = torch.randn(tensor.shape, dtype=tensor.dtype, device=tensor.device, generator=generator)
            gradient = gradient.index_select(layout.dim, reference)  # the same for each sample
            weights = torch.rand(call.batch + 1, dtype=tensor.dtype, device=tensor.device, generator=generator) + 0.5
            first = min(n for n in ids if n >= 0)
            total = weights[sorted({n for n in ids if n >= 0})].sum()
            of_row = weights[torch.tensor(ids, device=tensor.device)]
            of_first = torch.tensor([float(n == first) for n in ids], dtype=tensor.dtype, device=tensor.device)
            shape = [-1 if d == layout.dim else 1 for d in range(tensor.dim())]
            leaves = [leaf for leaf in find_leaves(tensor) if leaf.requires_grad]
            with context.collector.pull_back():  # these are no gradients of a step
                found = [
                    torch.autograd.grad(tensor, leaves, gradient * s.view(shape), retain_graph=True, allow_unused=True)
                    for s in (of_row, total * of_first)
                ]
        is_same = all(
            a is b or (a is not None and b is not None and _are_close(_make_dense(a), _make_dense(b), 1e4))
            for a, b in zip(*found, strict=True)
        )
        if is_same:
            self._probed.add(call.key)
        return is_same

    def before_backward(self, outputs: Sequence[Tensor], gradients: Sequence[Tensor], context: Context) -> None:
        """Refuse gradients of outputs that depend on several samples, and constants that differ between samples."""
        if any(is_refused(context.find_known_layout(output)) for output in outputs):
            return  # the backward pass says why
        for output, gradient in zip(outputs, gradients, strict=False):
            if isinstance(where := context.find_known_layout(gradient), (Lost, Reduced)):
                raise SamplesMixed(
                    "The gradient that is passed to backward() was computed from the samples, and would change the "
                    f"gradients of all of them: {where.cause}. Call backward() without it."
                )
            if output.shape == gradient.shape and isinstance(layout := context.find_layout(output), Layout):
                call = make_call(Tensor.backward, (output, gradient), {}, context.batch, context.find_layout)
                self.check_motion(call, Motion((layout,), ((1, layout),)), context)

    # ---- constants that move entries ----

    def _is_moved_by_place(self, call: Call, motion: Motion) -> bool:
        """Whether constants select or write entries of a sample by the number of the sample.

        The entries of each sample are numbered alike, and moved. The results of all samples must be equal.
        """
        where = motion.results[0] or call.where[0]
        constants = [t for t, own in zip(call.tensors, call.where, strict=True) if own is None]
        if not isinstance(where, Layout) or where.loose or all(t in self._random for t in constants):
            return False
        has_rows = any(size >= call.batch and size % call.batch == 0 for t in constants for size in t.shape)
        indexing = Indexing(call)
        if not has_rows and not _is_indexed(indexing, call.where[0]):
            return False
        parts = [part for part in indexing.iterate_parts() if isinstance(part, Tensor)]
        if any(indexing.get_layout(part) is not None for part in parts) or indexing.in_order:
            return False  # each sample selects its own entries
        if any(part in self._random for part in parts):
            return False
        base = _number_entries(indexing.base, indexing.get_layout(indexing.base), call.batch)
        if not indexing.writes:
            moved = base[indexing.item]
            ids = where.get_ids(moved.shape[where.dim] if moved.dim() else 1, call.batch)
            if len({ids.count(sample) for sample in call.find_samples()}) > 1:  # some are left out, or repeated
                return True
            return not has_equal_rows(moved, where, call.batch)
        value: Any = indexing.value
        if isinstance(value, Tensor):
            if value in self._random:
                return False
            value = _number_entries(value, indexing.get_layout(value), call.batch) + 0.5
        if indexing.adds:
            base[indexing.item] += value
        else:
            base[indexing.item] = value
        return not has_equal_rows(base, where, call.batch)


def has_equal_rows(tensor: Tensor, layout: Layout, batch: int) -> bool:
    """Whether a tensor with rows for each sample, as `layout` says, has the same values for all samples.

    >>> has_equal_rows(torch.tensor([1, 2, 1, 2]), Layout(0, inner=2), batch=2)
    True
    >>> has_equal_rows(torch.tensor([1, 2, 1, 2]), Layout(0), batch=2)
    False
    """
    rows = tensor.detach()
    if not rows.numel() or rows.is_meta:  # without values
        return True
    if layout.ids is None and layout.inner == 1 and rows.shape[layout.dim] == batch:
        expected = rows.narrow(layout.dim, 0, 1).expand_as(rows)
    else:
        references = _find_references(layout.get_ids(rows.shape[layout.dim], batch))
        expected = rows.index_select(layout.dim, torch.tensor(references, device=rows.device))
    return torch.equal(rows, expected) or _are_close(rows, expected, 32)


def _are_close(a: Tensor, b: Tensor, roundings: float) -> bool:
    """Whether two tensors differ by rounding only; kernels add up in another order at the end of a block of rows."""
    if not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b)
    eps = torch.finfo(a.dtype).eps
    tolerance = min(roundings * eps, 0.02) * float(b.abs().max())
    return bool(((a - b).abs() <= tolerance).all() | torch.equal(a.isnan(), b.isnan()) & torch.equal(a, b))


def _make_dense(gradient: Tensor) -> Tensor:
    return gradient.to_dense() if gradient.is_sparse else gradient


@lru_cache(maxsize=256)
def _find_references(ids: tuple[int, ...]) -> tuple[int, ...]:
    """For each row, the first row of any sample that is the k-th row of that sample, as this one is."""
    first: dict[int, int] = {}
    counts: dict[int, int] = {}
    references = []
    for row, sample in enumerate(ids):
        rank = counts.get(sample, 0)
        counts[sample] = rank + 1
        references.append(row if sample < 0 else first.setdefault(rank, row))
    return tuple(references)


def _number_entries(tensor: Tensor, where: Any, batch: int) -> Tensor:
    """Numbers for the entries of samples, the same for each sample; the values of a constant."""
    if not isinstance(where, Layout):
        return (tensor.detach().abs() if tensor.is_complex() else tensor.detach()).double().clone()
    if not tensor.dim():
        return torch.zeros((), dtype=torch.float64, device=tensor.device)
    numbers = torch.arange(tensor.numel(), dtype=torch.float64, device=tensor.device).view(tensor.shape)
    references = _find_references(where.get_ids(tensor.shape[where.dim], batch))
    return numbers.index_select(where.dim, torch.tensor(references, device=tensor.device))


def _is_indexed(indexing: Indexing, where: Any) -> bool:
    """Whether an index lists rows along the dimension of the samples."""
    dim = 0
    for part in indexing.iterate_parts():
        size = part.dim() if isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8) else part is not None
        if isinstance(part, Tensor) and isinstance(where, Layout) and dim <= where.dim < dim + size:
            return True
        dim += size
    return False


def _find_joined_rows(call: Call, where: Layout) -> Iterator[tuple[int, Layout | None]]:
    """The constants that a call puts beside the rows of samples, by position, and the samples of their rows.

    `where` says where the samples lie in the result. The entries of each constant are numbered, to see where they get.
    None if the entries along no dimension belong to one sample each.
    """
    for position, constant in enumerate(call.tensors):
        if call.where[position] is not None or not constant.numel():
            continue
        numbers = [torch.full(tensor.shape, -1) for tensor in call.tensors]
        numbers[position] = torch.arange(constant.numel()).view(constant.shape)
        (joined,) = call.run(numbers)
        at = (joined >= 0).nonzero(as_tuple=True)
        owners = torch.full((constant.numel(),), -1)
        owners[joined[at]] = torch.tensor(where.get_ids(joined.shape[where.dim], call.batch))[at[where.dim]]
        if bool((owners >= 0).any()):
            yield position, _find_layout_of_owners(owners.view(constant.shape), where, call.batch)


def _find_layout_of_owners(owners: Tensor, where: Layout, batch: int) -> Layout | None:
    for dim, size in enumerate(owners.shape):
        of_rows = owners.movedim(dim, 0).reshape(size, -1)
        if bool((of_rows == of_rows[:, :1]).all()):
            return make_layout(dim, tuple(of_rows[:, 0].tolist()), batch, where.loose)
    return None
