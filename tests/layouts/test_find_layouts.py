"""Layouts: how samples are split and joined, and where calls of torch functions put them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from persample._internal.functions import find_results
from persample._internal.tree import find_tensors
from persample.layouts import (
    MEMO,
    Call,
    Layout,
    Lost,
    Reduced,
    find_motion,
    join_samples,
    make_layout,
    motion,
    place_rows,
    split_samples,
)
from persample.layouts.ids import find_layout_of_ids
from tests.support.cases import B, D, T


def find_layout(func: Callable[..., Any], *args: Any, where: dict[int, Layout], batch: int = B, **kwargs: Any) -> Any:
    """Where the samples lie in the first result of a call, given where they lie in its tensors."""
    tensors = tuple(find_tensors((args, kwargs)))
    call = Call(func, args, kwargs, tensors, tuple(where.get(i) for i in range(len(tensors))), batch)
    result = func(*[a.clone() if isinstance(a, Tensor) else a for a in args], **kwargs)
    return find_motion(call, find_results(result, args)).results[0]


def make_ids(shape: tuple[int, ...], layout: Layout, batch: int) -> Tensor:
    """A tensor in which every entry is the id of its sample."""
    size = shape[layout.dim]
    row = torch.tensor(layout.get_ids(size, batch))
    return row.view(size, *[1] * (len(shape) - layout.dim - 1)).expand(shape)


layouts = st.builds(
    lambda dim, outer, inner, batch: (dim, outer, inner, batch),
    st.integers(0, 2), st.integers(1, 3), st.integers(1, 3), st.integers(1, 4),
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(layouts)
def test_split_and_joined_samples_are_equal(drawn: tuple[int, int, int, int]) -> None:
    dim, outer, inner, batch = drawn
    shape = [2, 3, 4]
    shape[dim] = outer * batch * inner
    layout = Layout(dim, inner)
    ids = make_ids(tuple(shape), layout, batch)
    rows = split_samples(ids, layout, batch)
    assert all((rows[n] == n).all() for n in range(batch))
    assert rows[0].shape[dim] == outer * inner
    values = torch.arange(ids.numel()).view(shape)
    explicit = Layout(dim, ids=layout.get_ids(shape[dim], batch))
    for same in (layout, explicit):
        samples = split_samples(values, same, batch)
        assert torch.equal(join_samples(samples, same, values.shape, batch), values)
        assert torch.equal(place_rows(samples, same, values.shape, batch).sum(0), values)
    assert batch == 1 or find_layout_of_ids(ids, batch) == layout
    assert batch == 1 or make_layout(dim, layout.get_ids(shape[dim], batch), batch) == layout


def test_shorter_samples_are_padded_with_zeros() -> None:
    ids = (2, 0, 2, -1, 2)
    values = torch.arange(1.0, 11.0).view(5, 2)
    rows = split_samples(values, Layout(0, ids=ids), 3)
    assert rows[:, :, 0].tolist() == [[3, 0, 0], [0, 0, 0], [1, 5, 9]]
    back = join_samples(rows, Layout(0, ids=ids), values.shape, 3)
    assert back[:, 0].tolist() == [1, 3, 5, 0, 9]


def test_samples_along_no_single_dimension_are_lost() -> None:
    assert isinstance(find_layout_of_ids(torch.tensor([[0, 0], [0, 1], [1, 1]]), 2), Lost)
    assert find_layout_of_ids(torch.full((2, 3), -1), 2) is None


RESHAPES = [
    ((B, T, D), Layout(0), (B * T, D), Layout(0, T)),
    ((T, B, D), Layout(1), (T * B, D), Layout(0, 1)),
    ((B * T, D), Layout(0, T), (B, T, D), Layout(0)),
    ((T * B, D), Layout(0), (T, B, D), Layout(1)),
    ((B, T, D), Layout(0), (B, T * D), Layout(0)),
    ((B, 2, T, D), Layout(0), (B * 2, T, D), Layout(0, 2)),
    ((2, B, T), Layout(1), (2 * B * T,), Layout(0, T)),
    ((B, B), Layout(1), (B * B,), Layout(0)),
    ((B, B), Layout(0), (B * B,), Layout(0, B)),
]


@pytest.mark.parametrize(("shape", "before", "to", "after"), RESHAPES)
def test_reshaping(shape: tuple[int, ...], before: Layout, to: tuple[int, ...], after: Layout) -> None:
    assert find_layout(Tensor.reshape, torch.randn(shape), to, where={0: before}) == after


OPS: list[tuple[str, Callable[[Tensor], Any]]] = [
    ("softmax over the last", lambda t: t.softmax(-1)),
    ("sum over the last", lambda t: t.sum(-1)),
    ("max over the middle", lambda t: t.amax(1)),
    ("sort along the last", lambda t: t.sort(-1).values),
    ("cumsum along the middle", lambda t: t.cumsum(1)),
    ("norm over the last", lambda t: t.norm(dim=-1, keepdim=True)),
    ("outer product within", lambda t: torch.einsum("btd,bte->bde", t, t)),
    ("pad", lambda t: F.pad(t, (1, 2, 0, 1))),
    ("unfold", lambda t: t.unfold(1, 2, 1)),
    ("pooling", lambda t: F.avg_pool1d(t, 2)),
    ("comparison", lambda t: t > 0.5),
    ("interpolate", lambda t: F.interpolate(t, scale_factor=2.0)),
    ("repeat", lambda t: t.repeat(2, 1, 1)),
    ("repeat_interleave", lambda t: t.repeat_interleave(2, 0)),
    ("attention", lambda t: F.scaled_dot_product_attention(t, t, t)),
    ("topk", lambda t: t.topk(2, -1).values),
    ("glu", lambda t: F.glu(t, 1)),
]


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize(("name", "op"), OPS, ids=[name for name, _ in OPS])
def test_layouts_agree_with_changing_one_sample(name: str, op: Callable[[Tensor], Tensor], dim: int) -> None:
    """With each dimension as the batch dimension: if one sample changes, only its entries in the result change."""
    shape = [4, 4, 4]
    batch = shape[dim]
    values = torch.rand(shape, dtype=torch.float64) + 0.05
    found = find_layout(lambda t: op(t), values, where={0: Layout(dim)}, batch=batch)
    changed: list[Tensor] = []
    for n in range(batch):
        other = values.clone()
        other.select(dim, n).uniform_(0.05, 1.05)
        changed.append(op(other) != op(values))
    overlap = sum(c.int() for c in changed).max() > 1  # type: ignore[union-attr]
    if isinstance(found, Layout):
        rows = make_ids(tuple(op(values).shape), found, batch)
        assert all((rows[c] == n).all() for n, c in enumerate(changed)), found
    else:
        assert isinstance(found, (Lost, Reduced))
        assert overlap or name in ("pad", "unfold")  # these add constant rows, or drop rows


def test_motions_are_cached_by_shape() -> None:
    MEMO.clear()
    calls = []

    def op(t: Tensor) -> Tensor:
        calls.append(t.shape)
        return t * 2

    for _ in range(2):
        assert find_layout(op, torch.randn(B, D), where={0: Layout(0)}) == Layout(0)
    first = len(calls)
    assert first > 3
    assert find_layout(op, torch.randn(B, T), where={0: Layout(0)}) == Layout(0)
    assert len(calls) > first + 1


def test_the_cache_of_motions_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(motion, "_MAX_ENTRIES", 3)
    for size in range(2, 12):
        find_layout(torch.sin, torch.randn(B, size), where={0: Layout(0)})
    assert len(MEMO) <= 3


def test_unhashable_arguments_are_accepted() -> None:
    class Unhashable:
        __hash__ = None  # type: ignore[assignment]

    assert find_layout(lambda t, _: t + 1, torch.randn(B, D), Unhashable(), where={0: Layout(0)}) == Layout(0)


def test_a_function_that_accepts_only_certain_values_is_tried_on_the_given_values() -> None:
    values = torch.randint(0, 2, (B, D)).float()

    def op(t: Tensor) -> Tensor:
        assert set(t.unique().tolist()) <= {0.0, 1.0}
        return t * 3

    assert find_layout(op, values, where={0: Layout(0)}) == Layout(0)


def test_a_function_that_accepts_only_the_given_tensor_is_lost() -> None:
    values = torch.randn(B, D)
    seen: list[Tensor] = []

    def op(t: Tensor) -> Tensor:
        assert not seen or torch.equal(t, values)
        seen.append(t)
        return t * 3

    found = find_layout(op, values, where={0: Layout(0)})
    assert isinstance(found, Lost)
    assert "could not be tried" in found.cause
