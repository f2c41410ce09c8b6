"""The equations of the recurrent cells: forwards for all steps at once, backwards for one step at a time.

In each step, the gradient of the pre-activations of the gates is the gradient of the state after the step, times
*slopes* that depend on the forward pass only. So the slopes of all steps are computed in a few large ops. A backward
step takes a few small ops, which multiply its slopes by the gradient of the state, in place.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from persample.terms import compute_tanh, multiply


@dataclass(frozen=True)
class RecurrentPass:
    """The forward pass of one direction: inputs and states of `n` sequences, `(T, n, ·)`, and the weights."""

    input: Tensor
    before: Tensor  # the hidden state before each step
    after: Tensor | None  # the hidden state after each step, which is the output; None if it is not known
    memory: Sequence[Tensor]  # the initial cell state of an LSTM, (n, H); empty for other cells
    weights: Sequence[Tensor]  # w_ih, w_hh; b_ih, b_hh if `has_biases`; w_hr if the output is a projection
    has_biases: bool

    @property
    def biases(self) -> Sequence[Tensor]:
        return self.weights[2:4] if self.has_biases else ()

    @property
    def projection(self) -> Tensor | None:
        return self.weights[-1] if len(self.weights) % 2 else None

    def compute_input_gates(self, gates: int) -> Tensor:
        """The input part of the pre-activations, W_ih x + b_ih, as `(T, n, gates, H)`."""
        return F.linear(self.input, self.weights[0], *self.biases[:1]).unflatten(-1, (gates, -1))

    def compute_state_gates(self, gates: int) -> Tensor:
        """The state part of the pre-activations, W_hh h + b_hh, as `(T, n, gates, H)`."""
        return F.linear(self.before, self.weights[1], *self.biases[1:]).unflatten(-1, (gates, -1))

    def compute_gates(self, gates: int) -> Tensor:
        """The pre-activations, W_ih x + b_ih + W_hh h + b_hh, as `(T, n, gates, H)`."""
        bias = [self.biases[0] + self.biases[1]] if self.has_biases else []
        rows = multiply(self.input.flatten(0, 1), self.weights[0].t())
        for part in (multiply(self.before.flatten(0, 1), self.weights[1].t()), *bias):
            rows += part
        return rows.view(*self.input.shape[:2], gates, -1)


class Cell(ABC):
    """The backward steps of one kind of cell, to be taken from the last step to the first.

    `grads` are the gradients of the hidden state and of the memory of an LSTM, each `(T + 1, n, H)`: index 0 is the
    initial state, index t + 1 the state after step t. At first they hold the gradients from outside of the layer.
    `step(t)` reads the gradient of the state after step t. It turns `slopes[t]`, `(n, gates, H)`, into the gradients
    of the state part of the pre-activations, and adds to the gradient of the state before the step all that does not
    pass through W_hh.
    """

    slopes: Tensor
    hidden: Tensor | None = None  # the hidden state of each step, if the output is a projection of it

    @abstractmethod
    def __init__(self, forward: RecurrentPass, grads: Sequence[Tensor]) -> None: ...

    @abstractmethod
    def step(self, t: int) -> None: ...

    def compute_input_gradients(self, state_gradients: Tensor) -> Tensor:
        """After all steps: the gradients of the input part of the pre-activations, from those of the state part."""
        return state_gradients


class Lstm(Cell):
    """`c = f c' + i g` and `h = o tanh(c)`; i, f and o are sigmoids of their gates, g is the tanh of its gate."""

    def __init__(self, forward: RecurrentPass, grads: Sequence[Tensor]) -> None:
        gates = forward.compute_gates(4)
        i, f, at_g, o = gates.unbind(2)
        gates[:, :, :2].sigmoid_()
        o.sigmoid_()
        g = compute_tanh(at_g)
        c_by_c = f.clone()
        self._c_by_c = _split_steps(c_by_c)
        c = _compute_memory(self._c_by_c, i, g, *forward.memory)
        tanh_c = compute_tanh(c[1:])
        h_by_c = _compute_tanh_slope(o, tanh_c)
        self.hidden = o * tanh_c if forward.projection is not None else None
        # The slopes take the place of the gates.
        self.slopes = gates
        _compute_tanh_slope(i, g, out=at_g)
        _compute_sigmoid_slope(g, i, out=i)
        _compute_sigmoid_slope(c[:-1], c_by_c, out=f)
        _compute_sigmoid_slope(tanh_c, o, out=o)
        self._through_c, self._through_o = gates[:, :, :3].unbind(), gates[:, :, 3:].unbind()
        self._h_by_c, self._dh, self._dc = map(_split_steps, (h_by_c, *grads))

    def step(self, t: int) -> None:
        dh, dc = self._dh[t + 1], self._dc[t + 1]
        dc.addcmul_(dh, self._h_by_c[t])
        self._through_c[t].mul_(dc)
        self._through_o[t].mul_(dh)
        self._dc[t].addcmul_(dc, self._c_by_c[t])


class Gru(Cell):
    """`h = n + u (h' - n)` and `n = tanh(x_n + r h_n)`.

    r and u are sigmoids of their gates; x_n and h_n are the input part and the state part of the third gate.
    """

    def __init__(self, forward: RecurrentPass, grads: Sequence[Tensor]) -> None:
        input_gates, state_gates = forward.compute_input_gates(3), forward.compute_state_gates(3)
        x_n, h_n = input_gates[:, :, 2], state_gates[:, :, 2]
        r, u = (input_gates[:, :, :2] + state_gates[:, :, :2]).sigmoid_().unbind(2)
        n = torch.addcmul(x_n, r, h_n).tanh_()
        self._at_x_n = _compute_tanh_slope(1 - u, n)
        self.slopes = torch.empty_like(state_gates)
        at_r, at_u, at_h_n = self.slopes.unbind(2)
        _compute_sigmoid_slope(self._at_x_n * h_n, r, out=at_r)
        _compute_sigmoid_slope(forward.before - n, u, out=at_u)
        torch.mul(self._at_x_n, r, out=at_h_n)
        self._gates, self._h_by_h, self._grad = self.slopes.unbind(), _split_steps(u.clone()), grads[0]
        self._dh = _split_steps(self._grad)

    def step(self, t: int) -> None:
        self._gates[t].mul_(self._dh[t + 1])
        self._dh[t].addcmul_(self._dh[t + 1], self._h_by_h[t])

    def compute_input_gradients(self, state_gradients: Tensor) -> Tensor:
        r_and_u = self.slopes[:, :, :2].flatten(2)
        return torch.cat([r_and_u, self._at_x_n * self._grad[1:]], -1)


class Elman(Cell):
    """`h = activation(gate)`. The slope of the activation is a function of h."""

    activation: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor]

    def __init__(self, forward: RecurrentPass, grads: Sequence[Tensor]) -> None:
        h = self.activation(forward.compute_gates(1)) if forward.after is None else forward.after.unsqueeze(2)
        self.slopes = self.slope(h)
        self._gates, self._dh = self.slopes.unbind(), _split_steps(grads[0])

    def step(self, t: int) -> None:
        self._gates[t].mul_(self._dh[t + 1])


class Tanh(Elman):
    activation = staticmethod(torch.tanh)
    slope = staticmethod(lambda h: 1 - h * h)


class Relu(Elman):
    activation = staticmethod(torch.relu)
    slope = staticmethod(lambda h: (h > 0).to(h.dtype))


CELLS: dict[Any, type[Cell]] = {torch.lstm: Lstm, torch.gru: Gru, torch.rnn_tanh: Tanh, torch.rnn_relu: Relu}


def _compute_memory(f: Sequence[Tensor], i: Tensor, g: Tensor, first: Tensor) -> Tensor:
    """`(T + 1, n, H)`: `c[0] = first` and `c[t + 1] = f[t] c[t] + i[t] g[t]`."""
    memory = first.new_empty(1 + len(f), *first.shape)
    memory[0] = first
    torch.mul(i, g, out=memory[1:])
    c = _split_steps(memory)
    for t, factor in enumerate(f):
        c[t + 1].addcmul_(factor, c[t])
    return memory


def _split_steps(rows: Tensor) -> tuple[Tensor, ...]:
    """`(T, n, H)` as T views `(n, 1, H)`."""
    return rows.unsqueeze(2).unbind()


def _compute_sigmoid_slope(factor: Tensor, s: Tensor, out: Tensor | None = None) -> Tensor:
    """`factor s (1 - s)`: the derivative of factor · sigmoid, given s, the value of the sigmoid."""
    out = torch.empty_like(s) if out is None else out
    return torch.ops.aten.sigmoid_backward.grad_input(factor, s, grad_input=out)


def _compute_tanh_slope(factor: Tensor, s: Tensor, out: Tensor | None = None) -> Tensor:
    """`factor (1 - s²)`: the derivative of factor · tanh, given s, the value of the tanh."""
    out = torch.empty_like(s) if out is None else out
    return torch.ops.aten.tanh_backward.grad_input(factor, s, grad_input=out)
