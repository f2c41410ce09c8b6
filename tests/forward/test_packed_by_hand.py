"""Recurrent layers that slice the rows of packed sequences by hand: Opacus' layers, and a cell in a loop."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from persample import SamplesMixed, record
from persample.testing.oracle import assert_rows_close, perturb, stack_gradients

B, D, H = 3, 4, 5

# How a model receives sequences of different lengths, and the lengths; "given": the batch is a PackedSequence.
FORMS: dict[str, tuple[int, ...] | None] = {
    "padded": None,
    "sorted": (5, 2, 2),
    "unsorted": (2, 5, 1),
    "given, sorted": (5, 3, 2),
    "given, unsorted": (2, 5, 1),
    "T == B": (1, 3, 2),
}


class Packing(nn.Module):
    """A recurrent layer on padded or packed sequences; returns the samples in dimension 0."""

    def __init__(self, layer: nn.Module, batch_first: bool, is_sorted: bool) -> None:
        super().__init__()
        self.layer, self.batch_first, self.is_sorted = layer, batch_first, is_sorted

    def forward(self, x: Any, lengths: Tensor | None = None, h: Tensor | None = None, c: Tensor | None = None) -> Any:
        given = [state.transpose(0, 1) for state in (h, c) if state is not None]
        if lengths is not None:
            x = pack_padded_sequence(x, lengths, batch_first=self.batch_first, enforce_sorted=self.is_sorted)
        out, state = self.layer(x, (tuple(given) if len(given) > 1 else given[0]) if given else None)
        if isinstance(out, PackedSequence):
            out = pad_packed_sequence(out, batch_first=True)[0]
        elif not self.batch_first:
            out = out.transpose(0, 1)
        return out, [s.transpose(0, 1) for s in (state if isinstance(state, tuple) else (state,))]


def compute_loss(outputs: Any) -> Tensor:
    """A loss whose weights do not depend on the length of the longest sequence."""
    out, states = outputs
    total = (out * torch.arange(1, 1 + out[0].numel()).sin().view(1, *out.shape[1:])).sum() + out.square().sum()
    for state in states:
        total = total + (state * torch.arange(1, 1 + state[0].numel()).cos().view(1, *state.shape[1:])).sum()
    return total


def check(model: Packing, form: str, has_state: bool, layers: int, states: int = 2) -> None:
    """Compare the recorded gradients with those of a loop over the samples."""
    perturb(model)
    lengths = FORMS[form]
    x = torch.randn(B, max(lengths or (5,)), D)
    given = [torch.randn(B, layers, H) for _ in range(states)] if has_state else []
    is_given = form.startswith("given")

    def make_arguments(at: slice) -> list[Any]:
        rows, counts = x[at], None if lengths is None else torch.tensor(lengths[at])
        rows = rows if counts is None else rows[:, : int(counts.max())]
        if is_given:
            rows = pack_padded_sequence(rows, counts, batch_first=True, enforce_sorted=False)  # type: ignore[assignment,arg-type]
            counts = None
        elif not model.batch_first:
            rows = rows.transpose(0, 1)
        return [rows, counts, *(state[at] for state in given)]

    losses = (compute_loss(model(*make_arguments(slice(n, n + 1)))) for n in range(B))
    expected = stack_gradients(losses, dict(model.named_parameters()))
    with record(model, loss_reduction="sum", batch_dim=[0 if model.batch_first else 1, 0, 0, 0]) as grads:
        compute_loss(model(*make_arguments(slice(None)))).backward()
    assert_rows_close(grads.dense(), expected)


@pytest.fixture(autouse=True)
def use_float64() -> Any:
    """Opacus' layers make their last states in the default dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(before)


SETTINGS = [
    (name, form, *flags)
    for number, (name, form, *flags) in enumerate(
        itertools.product(("DPRNN", "DPGRU", "DPLSTM"), FORMS, (True, False), (1, 2), (False, True), (True, False))
    )
    if number % 3 == 0  # each pair of settings occurs
]


@pytest.mark.parametrize("name, form, batch_first, layers, bidirectional, bias", SETTINGS)
def test_recurrent_layers_of_opacus(
    name: str, form: str, batch_first: bool, layers: int, bidirectional: bool, bias: bool
) -> None:
    layer = getattr(pytest.importorskip("opacus.layers"), name)
    module = layer(D, H, num_layers=layers, batch_first=batch_first, bidirectional=bidirectional, bias=bias)
    model = Packing(module, batch_first, is_sorted=form == "sorted")
    check(model, form, layers == 2, layers * (1 + bidirectional), states=1 + (name == "DPLSTM"))


@pytest.mark.parametrize("lengths", [(2, 5, 1), (1, 3, 2)])
def test_a_loss_that_puts_the_samples_in_the_packed_order(lengths: tuple[int, ...]) -> None:
    model = nn.GRU(D, H)
    x = torch.randn(B, max(lengths), D)
    losses = (model(x[n, :size, None])[0].abs().mean() for n, size in enumerate(lengths))
    expected = stack_gradients(losses, dict(model.named_parameters()))
    packed = pack_padded_sequence(x, torch.tensor(lengths), batch_first=True, enforce_sorted=False)
    with record(model) as grads:
        out = model(packed)[0]
        rows = pad_packed_sequence(out, batch_first=True)[0][out.sorted_indices]
        sizes = sorted(lengths, reverse=True)
        sum(row[:size].abs().mean() for row, size in zip(rows, sizes, strict=True)).div(B).backward()
    assert_rows_close(grads.dense(), expected)


class CellInLoop(nn.Module):
    """A GRU cell that runs over the steps of a packed sequence, forwards or backwards."""

    def __init__(self, backwards: bool, learns_state: bool = False) -> None:
        super().__init__()
        self.cell, self.backwards = nn.GRUCell(D, H), backwards
        self.first = nn.Parameter(torch.randn(H)) if learns_state else None

    def forward(self, x: PackedSequence, first: Tensor | None = None) -> tuple[PackedSequence, Tensor]:
        sizes = x.batch_sizes.tolist()
        steps = x.data.split(sizes)
        state = torch.zeros(sizes[0], H) if self.first is None else self.first.repeat(sizes[0], 1)
        start, state = state, state[: sizes[-1]] if self.backwards else state
        outputs = []
        last = torch.zeros(sizes[0], H)
        for step, size in list(zip(steps, sizes, strict=True))[:: -1 if self.backwards else 1]:
            if size > len(state):
                state = torch.cat([state, start[len(state) : size]])
            state = self.cell(step, state[:size])
            outputs.append(state)
            last[:size] = state
        out = torch.cat(outputs[:: -1 if self.backwards else 1])
        packed = PackedSequence(out, x.batch_sizes, x.sorted_indices, x.unsorted_indices)
        return packed, last[None] if x.unsorted_indices is None else last[None].index_select(1, x.unsorted_indices)


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("form", [form for form in FORMS if form != "padded"])
def test_a_cell_in_a_loop_over_steps(form: str, backwards: bool) -> None:
    check(Packing(CellInLoop(backwards), True, is_sorted=form == "sorted"), form, has_state=False, layers=1)


@pytest.mark.parametrize("form", ["sorted", "given, unsorted"])
@pytest.mark.parametrize("backwards", [False, True])
def test_a_learned_first_state(form: str, backwards: bool) -> None:
    model = Packing(CellInLoop(backwards, learns_state=True), True, is_sorted=form == "sorted")
    check(model, form, has_state=False, layers=1)


def write_first(rows: Tensor) -> Tensor:
    base = torch.zeros(len(rows), H)
    base[0] = rows[0]
    return base


def write_elsewhere(rows: Tensor) -> Tensor:
    base = torch.zeros(len(rows), H)
    for i in range(len(rows)):
        base[i] = rows[len(rows) - 1 - i]
    return base


def replace_two(rows: Tensor) -> Tensor:
    base = rows.clone()
    base[:2] = 2 * rows[:2]
    return base


BY_RANK: dict[str, Callable[[Tensor], Tensor]] = {
    "the longest": lambda rows: rows[0],
    "all but the longest": lambda rows: rows[1:],
    "the two longest": lambda rows: rows[:2],
    "the longest, scaled": lambda rows: rows[0] * 2,
    "only the longest is kept": write_first,
    "in the opposite order": write_elsewhere,
    "the longest for all": lambda rows: rows + rows[0],
    "the longest two replaced": replace_two,
    "scaled by rank": lambda rows: rows * torch.arange(1.0, 1 + len(rows))[:, None],
}


@pytest.mark.parametrize("name", BY_RANK)
def test_choices_by_rank_are_refused(name: str) -> None:
    """Samples are packed by length, so what a sample gets by its rank depends on the lengths of the others."""

    class Ranked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(D, H)

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            return BY_RANK[name](self.a(packed.data[: int(packed.batch_sizes[0])]))

    model = Ranked()
    with pytest.raises(SamplesMixed, match="position"), record(model, loss_reduction="sum"):
        model(torch.randn(B, 5, D), torch.tensor([5, 4, 5])).square().sum().backward()
