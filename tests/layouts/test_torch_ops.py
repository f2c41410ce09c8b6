"""Where the engine says the samples are, over all functions that torch tests itself, against what they really do.

A dim of an argument is taken for the batch, and the function is called under the tracker. The truth is found without
it: with other values for all samples but one, such as the engine has not tried, what is said to be its own must stay;
what is said to be a sum must be one; what is said to depend on no sample must not. And where the samples are said to be
lost, no layout may give what the function gives for each sample alone, except for the functions listed in
declined_ops.txt, which `python -m tests.layouts.test_torch_ops --write` writes anew.
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
from persample.backward.collector import Collector
from persample.forward.tracker import Tracker
from persample.layouts import Layout, Lost, Reduced, Where, split_samples

DECLINED = Path(__file__).parent / "declined_ops.txt"
INPUTS = 2  # of each function, how many of torch's sample inputs, of the first LOOKED_AT
LOOKED_AT = 16
PLACEMENTS = 8
LARGEST = 700  # numbers in a tensor

# What they give is whatever lay in memory.
EMPTY = {
    "empty",
    "empty_like",
    "new_empty",
    "empty_strided",
    "new_empty_strided",
    "empty_permuted",
    "resize_",
    "resize_as_",
}

# It reads beyond the end of a weight that is too short, as that of one sample may be.
UNCHECKED = {"native_batch_norm"}

# It draws numbers for negative entries only, so that each draws what those before it have left.
DRAWS_BY_VALUE = {"rrelu"}

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch, about the inputs that it makes itself

Placement = Mapping[int, int]  # the number of a tensor -> the dim of its samples


@dataclass(frozen=True)
class Call:
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
        """The tensors that the function gives for copies of these."""
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
            with tracker:
                result = self.func(*args, **kwargs)
        return find_results(result, args)

    def told(self, tensors: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], list[Where | None]]:
        """What the function gives, and where the engine says the samples are in it."""
        tracker = Tracker(Collector([], lambda *_: None), batch=self.batch)
        results = self.run(tensors, tracker)
        return results, [tracker.find_layout(r) for r in results]

    def alone(self, n: int) -> tuple[Tensor, ...]:
        """What the function gives for one sample, a batch of one."""
        placed = self.placement
        return self.run([t.narrow(placed[i], n, 1) if i in placed else t for i, t in enumerate(self.tensors)])

    def mixed(
        self, base: Sequence[Tensor], other: Sequence[Tensor], changed: Iterable[int], exchange: bool = True
    ) -> list[Tensor]:
        """The tensors with the values of `other` for some samples, which exchange their integers among themselves."""
        made = list(base)
        index = torch.tensor(list(changed), dtype=torch.long)
        for i, dim in self.placement.items():
            floating = base[i].is_floating_point() or base[i].is_complex()
            if floating:
                made[i] = base[i].index_copy(dim, index, other[i].index_select(dim, index))
            elif exchange:
                made[i] = base[i].index_copy(dim, index, base[i].index_select(dim, index.roll(1)))
        return made

    def values(self) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
        """Values for the samples, and others: those of the call exchanged, scaled, and fresh ones of some ranges."""
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


# ---- the truth ----


def same(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.is_floating_point() or a.is_complex():
        return torch.allclose(a, b, rtol=1e-7, atol=1e-9, equal_nan=True)
    return torch.equal(a, b)


def rows_of(result: Tensor, layout: Layout, sample: int, batch: int) -> Tensor:
    """What a layout says to be of one sample (-1: of none), in the order in which it stands there."""
    if not result.dim():
        return result if (layout.ids or (0,))[0] == sample else result.new_empty(0)
    ids = layout.get_ids(result.shape[layout.dim], batch)
    return result.index_select(
        layout.dim, torch.tensor([j for j, n in enumerate(ids) if n == sample], dtype=torch.long)
    )


def result_shape(call: Call, number: int, where: Layout) -> int:
    shape = call.run(call.tensors)[number].shape
    return shape[where.dim] if shape else 1


def contradiction(call: Call, number: int, where: Where | None) -> str | None:
    """How the function contradicts what is said of one of its results; None: in no way that was found."""
    if isinstance(where, Layout) and where.ids and result_shape(call, number, where) != len(where.ids):
        return f"has not as many rows as {where} names"
    some = sorted({0, 1, call.batch // 2, call.batch - 1})
    others = {n: [m for m in range(call.batch) if m != n] for n in some}
    for base, other in call.values():
        try:
            before, whole = call.run(base)[number], call.run(other)[number]
            after = {n: call.mixed(base, other, others[n]) for n in others}
            results = {n: call.run(tensors)[number] for n, tensors in after.items()}
        except Exception:  # the function does not take such values
            continue
        if where is None:
            if not same(before, whole):
                return "depends on the samples, and is said not to"
        elif isinstance(where, Reduced):
            everybody = call.run(call.mixed(base, other, range(call.batch), False))[number]
            for n, rest in others.items():
                parts = [call.run(call.mixed(base, other, part, False))[number] for part in ([n], rest)]
                if not same(before + everybody, parts[0] + parts[1]):
                    return "is no sum over the samples, and is said to be one"
        elif isinstance(where, Layout) and not where.loose_index:
            loose = [where, *(where for _ in others)]
            if where.loose:  # where the rows stand depends on the values
                loose = [call.told(tensors)[1][number] for tensors in (base, *after.values())]
            for n, now in zip(others, loose[1:], strict=True):
                if not isinstance(now, Layout) or not isinstance(loose[0], Layout):
                    continue
                if not same(rows_of(before, loose[0], n, call.batch), rows_of(results[n], now, n, call.batch)):
                    return f"changes for sample {n} with the others, and is said to have it at {where}"
                if not where.loose and not same(
                    rows_of(before, where, -1, call.batch), rows_of(results[n], where, -1, call.batch)
                ):
                    return f"changes in rows that are said to be nobody's by {where}"
    return None


def layouts(result: Tensor, batch: int) -> Iterator[Layout]:
    for dim, size in enumerate(result.shape):
        each = size // batch
        if size and each * batch == size:
            yield from (Layout(dim, inner) for inner in range(1, each + 1) if each % inner == 0)


def possible(call: Call, number: int, result: Tensor) -> bool:
    """Whether a layout gives each sample what the function gives for it alone, or a number adds these up."""
    try:
        alone = [call.alone(n)[number] for n in range(call.batch)]
    except Exception:  # not for a batch of one
        return False
    if all(same(alone[0], a) for a in alone[1:]):  # of the shape alone, as zeros_like
        return False
    if not result.dim() and result.is_floating_point():
        return same(result, torch.stack(alone).sum(0)) and contradiction(call, number, Reduced("")) is None
    return any(
        all(same(split_samples(result, layout, call.batch)[n], a) for n, a in enumerate(alone))
        for layout in layouts(result, call.batch)
    )


# ---- calls of torch's functions ----


def placements(tensors: Sequence[Tensor]) -> Iterator[tuple[Placement, int]]:
    """Each dim of the first tensor, and of the second; then of all that have the same size there."""
    found: list[tuple[Placement, int]] = []
    for i, tensor in enumerate(tensors[:2]):
        found += [({i: dim}, size) for dim, size in enumerate(tensor.shape) if size > 1]
    for dim, size in enumerate(tensors[0].shape):
        for d in (dim, dim - tensors[0].dim()):
            there = [i for i, t in enumerate(tensors) if -t.dim() <= d < t.dim() and t.shape[d] == size]
            if len(there) > 1 and size > 1:
                found.append(({i: d % tensors[i].dim() for i in there}, size))
    yield from islice((p for i, p in enumerate(found) if p not in found[:i]), PLACEMENTS)


def usable(args: Any, kwargs: Any) -> bool:
    tensors = list(find_tensors((args, kwargs)))
    plain = all(t.layout is torch.strided and 0 < t.numel() <= LARGEST and not t.is_nested for t in tensors)
    return bool(tensors) and plain and any(t.dim() and max(t.shape) > 1 for t in tensors[:2])


def dtype_of(op: Any) -> torch.dtype | None:
    wanted = (torch.float64, torch.int64, torch.complex128, torch.bool)
    return next((dtype for dtype in wanted if dtype in op.supported_dtypes("cpu")), None)


def calls(op: Any) -> Iterator[tuple[str, Call]]:
    """The kind of each call: as a function, as a method, or in place."""
    torch.manual_seed(0)
    found = []
    # op.sample_inputs() looks at the whole stack for the name of a test, which takes longer than all the rest.
    for sample in islice(op.sample_inputs_func(op, "cpu", dtype_of(op), False), LOOKED_AT):
        args, kwargs = (sample.input, *sample.args), sample.kwargs
        if usable(args, kwargs):
            found.append((args, kwargs))
    step = max(1, len(found) // INPUTS)
    kinds = {"function": op.op, "method": op.method_variant, "in place": op.inplace_variant}
    for number, (args, kwargs) in enumerate(found[::step][:INPUTS]):
        args, kwargs = map_tensors(lambda t: t.detach().clone(), (args, kwargs))
        for placement, size in placements(list(find_tensors((args, kwargs)))):
            for kind, func in kinds.items():
                first = number == 0 and list(placement) == [0] and isinstance(args[0], Tensor)
                if func is not None and (kind == "function" or first):
                    yield kind, Call(func, args, kwargs, placement, size)


def said(call: Call) -> Iterator[tuple[int, Tensor, Where | None]]:
    """The results, by number, with where the engine says their samples are."""
    tensors = call.tensors
    try:
        call.run(tensors)
    except Exception:  # in place with another shape, or a method that takes the arguments in another way
        return
    try:
        results, where = call.told(tensors)
    except Exception as error:
        results, where = call.run(tensors)[:1], [Lost(type(error).__name__)]
    for number, (result, there) in enumerate(zip(results, where, strict=True)):
        if result.layout is torch.strided:
            yield number, result, there


def reason(lost: Lost) -> str:
    return re.sub(r"( of)?( \([\d, ]*\),?)+|(?<=followed) .*", "", lost.cause)


def reviewed(op: Any) -> tuple[list[str], set[tuple[str, str]]]:
    """What is said wrongly of a function, and where it is declined though possible: as which kind, and why."""
    wrong: list[str] = []
    declined: set[tuple[str, str]] = set()
    for kind, call in calls(op):
        for number, result, where in said(call):
            if not isinstance(where, Lost):
                found = contradiction(call, number, where)
                if found is not None:
                    wrong.append(f"{kind} {call}: result {number} {found}")
            elif where.cause.endswith("Error") or possible(call, number, result):
                declined.add((kind, reason(where)))
    return wrong, declined


def op_id(op: Any) -> str:
    return op.name + (f" ({op.variant_test_name})" if op.variant_test_name else "")


def is_public(op: Any) -> bool:
    name = op.name.rpartition(".")[2]
    return name not in EMPTY | UNCHECKED | DRAWS_BY_VALUE and (name.startswith("__") or not name.startswith("_"))


OPS = [op for op in op_db if dtype_of(op) is not None and is_public(op)]


@pytest.mark.parametrize("op", OPS, ids=op_id)
def test_layouts(op: Any) -> None:
    listed = {line.split("\t")[0] for line in DECLINED.read_text().splitlines()}
    wrong, declined = reviewed(op)
    assert not wrong, "\n".join(wrong)
    assert op_id(op) in listed or not declined, f"{op_id(op)} is declined, and not listed: {declined}"


if __name__ == "__main__" and sys.argv[1:] == ["--write"]:
    lines = set()
    for op in OPS:
        wrong, declined = reviewed(op)
        print(*wrong, sep="\n", end="\n" * bool(wrong))
        lines |= {"\t".join((op_id(op), *parts)) for parts in declined}
    DECLINED.write_text("".join(f"{line}\n" for line in sorted(lines)))
