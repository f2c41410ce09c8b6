"""Single time steps: `torch.lstm_cell`, `torch.gru_cell`, `torch.rnn_tanh_cell` and `torch.rnn_relu_cell`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from persample.rules.recurrent.cells import Cell, Gru, Lstm, RecurrentPass, Relu, Tanh
from persample.rules.registry import Terms, register_rule
from persample.terms import Dense, Outer


def _make_step_rule(cell_class: type[Cell]) -> Callable[..., Terms]:
    """The rule of one step. `grads` is the gradient of the next state, or of each of its parts."""

    def step(
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

        def add_time(rows: Tensor) -> Tensor:
            """`(batch, each, ·)` to `(1, n, ·)`, in the dtype of the weights."""
            return rows.to(w_ih.dtype).flatten(0, 1).unsqueeze(0)

        x, before, *memory = map(add_time, (input, *state))
        zeros = [torch.zeros_like(part) for part in (before, *memory)]
        last_grads = [z if g is None else add_time(g) for z, g in zip(zeros, next_grads, strict=True)]
        first_memory = [part.squeeze(0) for part in memory]
        forward = RecurrentPass(x, before, None, first_memory, [w_ih, w_hh, *biases], has_biases=True)
        cell = cell_class(forward, [torch.cat(parts) for parts in zip(zeros, last_grads, strict=True)])
        cell.step(0)
        state_grad = cell.slopes.view(batch, each, -1)
        input_grad = cell.compute_input_gradients(cell.slopes.flatten(2)).view(batch, each, -1)
        return {
            "w_ih": Outer(input, input_grad), "w_hh": Outer(state[0], state_grad),
            "b_ih": Dense(input_grad.sum(1)), "b_hh": Dense(state_grad.sum(1)),
        }  # fmt: skip

    return step


for _function, _cell_class in (
    (torch.lstm_cell, Lstm), (torch.gru_cell, Gru), (torch.rnn_tanh_cell, Tanh), (torch.rnn_relu_cell, Relu),
):  # fmt: skip
    register_rule(_function, batched=("input", "hx"), accepts=lambda input, dim: dim == 0 and input.dim() == 2)(
        _make_step_rule(_cell_class)
    )
