"""Single steps: `torch.lstm_cell` and its like."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from persample.rules.recurrent.cells import Cell, Gru, Lstm, Relu, Run, Tanh
from persample.rules.registry import Terms, register_rule
from persample.terms import Dense, Outer


def _step(kind: type[Cell]) -> Callable[..., Terms]:
    """The rule of one step: `grads` is that of the next state, or of each of its parts."""

    def terms(
        grads: Any,
        input: Tensor,
        hx: Any,
        w_ih: Tensor,
        w_hh: Tensor,
        b_ih: Tensor | None = None,
        b_hh: Tensor | None = None,
    ) -> Terms:
        batch, each, _ = input.shape
        state, next_grads = ([*parts] if isinstance(parts, Sequence) else [parts] for parts in (hx, grads))
        zero = w_ih.new_zeros(len(w_ih))
        biases = [zero if b_ih is None else b_ih, zero if b_hh is None else b_hh]

        def steps(rows: Tensor) -> Tensor:
            return rows.to(w_ih.dtype).flatten(0, 1).unsqueeze(1)  # (batch, each, ·) -> (n, 1, ·)

        x, before, *memory = map(steps, (input, *state))
        none = [torch.zeros_like(part) for part in (before, *memory)]
        given = [n if g is None else steps(g) for n, g in zip(none, next_grads, strict=True)]
        run = Run(x, before, None, [part.squeeze(1) for part in memory], [w_ih, w_hh, *biases], has_biases=True)
        cell = kind(run, [torch.cat(parts, 1) for parts in zip(none, given, strict=True)])
        cell.step(0)
        of_state = cell.slopes.view(batch, each, -1)
        of_input = cell.of_input(cell.slopes.flatten(2)).view(batch, each, -1)
        return {
            "w_ih": Outer(input, of_input), "w_hh": Outer(state[0], of_state),
            "b_ih": Dense(of_input.sum(1)), "b_hh": Dense(of_state.sum(1)),
        }  # fmt: skip

    return terms


for _function, _kind in (
    (torch.lstm_cell, Lstm), (torch.gru_cell, Gru), (torch.rnn_tanh_cell, Tanh), (torch.rnn_relu_cell, Relu),
):  # fmt: skip
    register_rule(_function, batched=("input", "hx"), accepts=lambda input, dim: dim == 0 and input.dim() == 2)(
        _step(_kind)
    )
