"""Layouts of all functions in torch's own database of ops, compared with what the functions really do.

A dimension of an argument is taken as the batch dimension, and the function is called under the tracker. The layout
that the tracker finds is checked without it, with values that its trials do not use. If all samples but one get other
values, the entries of that sample must stay the same. A sum over the samples must be one. A result without samples must
not change. If the samples are lost, no layout may give the results of the samples alone, except for the functions in
declined_ops.txt. `python -m tests.layouts.test_torch_ops --write` writes that file.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db

from persample._internal.functions import find_results
from persample._internal.tree import find_tensors, map_tensors
from persample.backward import Collector, Receiver
from persample.forward import Tracker
from persample.layouts import Layout, Lost, Reduced, Where, split_samples

DECLINED = Path(__file__).parent / "declined_ops.txt"
MAX_INPUTS = 16  # that are read from torch's sample inputs of a function
USED_INPUTS = 2  # of these
MAX_PLACEMENTS = 8
MAX_ENTRIES = 700  # of a tensor

# They return uninitialised memory.
UNINITIALISED = {
    "empty",
    "empty_like",
    "new_empty",
    "empty_strided",
    "new_empty_strided",
    "empty_permuted",
    "resize_",
    "resize_as_",
}

# It reads beyond the end of a weight that is too short, as the weight of one sample may be.
READS_BEYOND_END = {"native_batch_norm"}

# It draws random numbers for negative entries only, so the numbers of an entry depend on the entries before it.
DRAWS_BY_VALUE = {"rrelu"}

pytestmark = pytest.mark.filterwarnings("ignore")  # about inputs that torch makes

Placement = Mapping[int, int]  # position of a tensor -> its batch dimension


@dataclass(frozen=True)
class PlacedCall:
    """A call of a function, with samples in some of its tensors."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    placement: Placement
    batch: int

    @property
    def tensors(self) -> list[Tensor]:
        return list(find_tensors((self.args, self.kwargs)))

    def run(self, tensors: Sequence[Tensor], tracker: Tracker | None = None) -> tuple[Tensor, ...]:
        """The tensors in the result of the call with copies of these tensors."""
        torch.default_generator.manual_seed(7)  # manual_seed takes longer than most functions
        copies = [t.clone() for t in tensors]
        supply = iter(copies)
        args, kwargs = map_tensors(lambda _: next(supply), (self.args, self.kwargs))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if tracker is None:
                return find_results(self.func(*args, **kwargs), args)
            for i, dim in self.placement.items():
                tracker.add_input(copies[i], Layout(dim))
            with tracker.mode:
                result = self.func(*args, **kwargs)
        return find_results(result, args)

    def run_tracked(self, tensors: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], list[Where | None]]:
        """The tensors in the result, and their layouts according to the tracker."""
        tracker = Tracker(Collector([], Receiver(lambda *_: None)), batch=self.batch)
        results = self.run(tensors, tracker)
        return results, [tracker.find_layout(r) for r in results]

    def run_alone(self, n: int) -> tuple[Tensor, ...]:
        """The tensors in the result of the call with one sample, as a batch of one."""
        placed = self.placement
        return self.run([t.narrow(placed[i], n, 1) if i in placed else t for i, t in enumerate(self.tensors)])

    def mix_values(
        self, base: Sequence[Tensor], other: Sequence[Tensor], changed: Iterable[int], exchange: bool = True
    ) -> list[Tensor]:
        """`base` with the values of `other` for the changed samples. Their integers are exchanged among them."""
        made = list(base)
        index = torch.tensor(list(changed), dtype=torch.long)
        for i, dim in self.placement.items():
            floating = base[i].is_floating_point() or base[i].is_complex()
            if floating:
                made[i] = base[i].index_copy(dim, index, other[i].index_select(dim, index))
            elif exchange:
                made[i] = base[i].index_copy(dim, index, base[i].index_select(dim, index.roll(1)))
        return made

    def iterate_values(self) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
        """Pairs of values for the samples: the given ones with these rolled or scaled, and random ones."""
        own = self.tensors
        placed = self.placement

        def each(change: Callable[[Tensor, int], Tensor]) -> list[Tensor]:
            return [change(t, placed[i]) if i in placed else t for i, t in enumerate(own)]

        def fresh(scale: float, shift: float) -> Callable[[Tensor, int], Tensor]:
            def change(t: Tensor, dim: int) -> Tensor:
                return torch.randn_like(t) * scale + shift if t.is_floating_point() or t.is_complex() else t

            return change

        torch.default_generator.manual_seed(11)
        yield own, each(lambda t, dim: t.roll(1, dim))
        yield own, each(lambda t, dim: t * 1.5 if t.is_floating_point() else t)
        for scale, shift in ((1.0, 0.0), (8.0, 3.0), (0.1, 0.5)):
            yield each(fresh(scale, shift)), each(fresh(scale, shift))

    def __str__(self) -> str:
        shapes = [tuple(t.shape) for t in self.tensors]
        return f"{getattr(self.func, '__name__', self.func)} of {shapes}, samples at {dict(self.placement)}"


# ---- checking a layout without the tracker ----


def is_close(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.is_floating_point() or a.is_complex():
        return torch.allclose(a, b, rtol=1e-7, atol=1e-9, equal_nan=True)
    return torch.equal(a, b)


def select_rows(result: Tensor, layout: Layout, sample: int, batch: int) -> Tensor:
    """The rows of one sample (-1: rows of no sample) according to a layout, in order."""
    if not result.dim():
        return result if (layout.ids or (0,))[0] == sample else result.new_empty(0)
    if not result.shape[layout.dim]:  # which torch does not select from
        return result
    ids = layout.get_ids(result.shape[layout.dim], batch)
    return result.index_select(
        layout.dim, torch.tensor([j for j, n in enumerate(ids) if n == sample], dtype=torch.long)
    )


def get_batch_dim_size(call: PlacedCall, number: int, where: Layout) -> int:
    shape = call.run(call.tensors)[number].shape
    return shape[where.dim] if shape else 1


def find_contradiction(call: PlacedCall, number: int, where: Where | None) -> str | None:
    """How the function contradicts the layout of one of its results, None if it does not."""
    if isinstance(where, Layout) and where.ids and get_batch_dim_size(call, number, where) != len(where.ids):
        return f"has another number of rows than {where}"
    some = sorted({0, 1, call.batch // 2, call.batch - 1})
    others = {n: [m for m in range(call.batch) if m != n] for n in some}
    for base, other in call.iterate_values():
        try:
            before, whole = call.run(base)[number], call.run(other)[number]
            after = {n: call.mix_values(base, other, others[n]) for n in others}
            results = {n: call.run(tensors)[number] for n, tensors in after.items()}
        except Exception:  # the function does not accept such values
            continue
        if where is None:
            if not is_close(before, whole):
                return "depends on the samples, but has no layout"
        elif isinstance(where, Reduced):
            power = 2 if where.kind == "root" else 1  # the square of such a norm is a sum
            all_changed = call.run(call.mix_values(base, other, range(call.batch), False))[number]
            for n, rest in others.items():
                parts = [call.run(call.mix_values(base, other, part, False))[number] for part in ([n], rest)]
                if not is_close(before**power + all_changed**power, parts[0] ** power + parts[1] ** power):
                    return "is not a sum over the samples, but is said to be one"
        elif isinstance(where, Layout) and not where.loose_index:
            loose = [where, *(where for _ in others)]
            if where.loose:  # the layout depends on the values
                loose = [call.run_tracked(tensors)[1][number] for tensors in (base, *after.values())]
            for n, now in zip(others, loose[1:], strict=True):
                if not isinstance(now, Layout) or not isinstance(loose[0], Layout):
                    continue
                rows = select_rows(before, loose[0], n, call.batch)
                if not is_close(rows, select_rows(results[n], now, n, call.batch)):
                    return f"changes for sample {n} with other samples, but is said to have it at {where}"
                if not where.loose and not is_close(
                    select_rows(before, where, -1, call.batch), select_rows(results[n], where, -1, call.batch)
                ):
                    return f"changes in rows that belong to no sample according to {where}"
    return None


def iterate_layouts(result: Tensor, batch: int) -> Iterator[Layout]:
    for dim, size in enumerate(result.shape):
        each = size // batch
        if size and each * batch == size:
            yield from (Layout(dim, inner) for inner in range(1, each + 1) if each % inner == 0)


def has_layout(call: PlacedCall, number: int, result: Tensor) -> bool:
    """Whether some layout gives the results of the samples alone, or the result is their sum."""
    try:
        alone = [call.run_alone(n)[number] for n in range(call.batch)]
    except Exception:  # the function does not accept a batch of one
        return False
    if all(is_close(alone[0], a) for a in alone[1:]):  # it depends on the shape alone, like zeros_like
        return False
    if not result.dim() and result.is_floating_point():
        return is_close(result, torch.stack(alone).sum(0)) and find_contradiction(call, number, Reduced("")) is None
    return any(
        all(is_close(split_samples(result, layout, call.batch)[n], a) for n, a in enumerate(alone))
        for layout in iterate_layouts(result, call.batch)
    )


# ---- calls of torch's functions ----


def iterate_placements(tensors: Sequence[Tensor]) -> Iterator[tuple[Placement, int]]:
    """Each dimension of the first two tensors, then the same dimension of all tensors that have the same size there."""
    found: list[tuple[Placement, int]] = []
    for i, tensor in enumerate(tensors[:2]):
        found += [({i: dim}, size) for dim, size in enumerate(tensor.shape) if size > 1]
    for dim, size in enumerate(tensors[0].shape):
        for d in (dim, dim - tensors[0].dim()):
            matching = [i for i, t in enumerate(tensors) if -t.dim() <= d < t.dim() and t.shape[d] == size]
            if len(matching) > 1 and size > 1:
                found.append(({i: d % tensors[i].dim() for i in matching}, size))
    yield from islice((p for i, p in enumerate(found) if p not in found[:i]), MAX_PLACEMENTS)


def is_usable(args: Any, kwargs: Any) -> bool:
    tensors = list(find_tensors((args, kwargs)))
    plain = all(t.layout is torch.strided and 0 < t.numel() <= MAX_ENTRIES and not t.is_nested for t in tensors)
    return bool(tensors) and plain and any(t.dim() and max(t.shape) > 1 for t in tensors[:2])


def choose_dtype(op: Any) -> torch.dtype | None:
    wanted = (torch.float64, torch.int64, torch.complex128, torch.bool)
    return next((dtype for dtype in wanted if dtype in op.supported_dtypes("cpu")), None)


def iterate_calls(op: Any) -> Iterator[tuple[str, PlacedCall]]:
    """Calls of an op with the way they are made: as a function, as a method, or in place."""
    torch.manual_seed(0)
    found = []
    # op.sample_inputs() searches the whole stack for the name of a test, which takes longer than everything else.
    for sample in islice(op.sample_inputs_func(op, "cpu", choose_dtype(op), False), MAX_INPUTS):
        args, kwargs = (sample.input, *sample.args), sample.kwargs
        if is_usable(args, kwargs):
            found.append((args, kwargs))
    step = max(1, len(found) // USED_INPUTS)
    kinds = {"function": op.op, "method": op.method_variant, "in place": op.inplace_variant}
    for number, (args, kwargs) in enumerate(found[::step][:USED_INPUTS]):
        args, kwargs = map_tensors(lambda t: t.detach().clone(), (args, kwargs))
        for placement, size in iterate_placements(list(find_tensors((args, kwargs)))):
            for kind, func in kinds.items():
                first = number == 0 and list(placement) == [0] and isinstance(args[0], Tensor)
                if func is not None and (kind == "function" or first):
                    yield kind, PlacedCall(func, args, kwargs, placement, size)


def iterate_results(call: PlacedCall) -> Iterator[tuple[int, Tensor, Where | None]]:
    """The tensors in the result of a call, by position, with their layouts."""
    tensors = call.tensors
    try:
        call.run(tensors)
    except Exception:  # in place with another shape, or a method with other arguments
        return
    try:
        results, where = call.run_tracked(tensors)
    except Exception as error:
        results, where = call.run(tensors)[:1], [Lost(type(error).__name__)]
    for number, (result, layout) in enumerate(zip(results, where, strict=True)):
        if result.layout is torch.strided:
            yield number, result, layout


def shorten_cause(lost: Lost) -> str:
    return re.sub(r"( of)?( \([\d, ]*\),?)+|(?<=followed) .*", "", lost.cause)


def review(op: Any) -> tuple[list[str], set[tuple[str, str]]]:
    """Wrong layouts of a function, and calls that are declined though a layout exists: kind of call, and cause."""
    wrong: list[str] = []
    declined: set[tuple[str, str]] = set()
    for kind, call in iterate_calls(op):
        for number, result, where in iterate_results(call):
            if not isinstance(where, Lost):
                found = find_contradiction(call, number, where)
                if found is not None:
                    wrong.append(f"{kind} {call}: result {number} {found}")
            elif where.cause.endswith("Error") or has_layout(call, number, result):
                declined.add((kind, shorten_cause(where)))
    return wrong, declined


def make_id(op: Any) -> str:
    return op.name + (f" ({op.variant_test_name})" if op.variant_test_name else "")


def is_public(op: Any) -> bool:
    name = op.name.rpartition(".")[2]
    if name in UNINITIALISED | READS_BEYOND_END | DRAWS_BY_VALUE:
        return False
    return name.startswith("__") or not name.startswith("_")


OPS = [op for op in op_db if choose_dtype(op) is not None and is_public(op)]


@pytest.mark.parametrize("op", OPS, ids=make_id)
def test_layouts(op: Any) -> None:
    listed = {line.split("\t")[0] for line in DECLINED.read_text().splitlines()}
    wrong, declined = review(op)
    assert not wrong, "\n".join(wrong)
    assert make_id(op) in listed or not declined, f"{make_id(op)} is declined, but not in the list: {declined}"


if __name__ == "__main__" and sys.argv[1:] == ["--write"]:
    lines = set()
    for op in OPS:
        wrong, declined = review(op)
        print(*wrong, sep="\n", end="\n" * bool(wrong))
        lines |= {"\t".join((make_id(op), *parts)) for parts in declined}
    DECLINED.write_text("".join(f"{line}\n" for line in sorted(lines)))
