"""The equations of the cells: forwards for all steps at once, backwards for one step.

The gradient of a step's gates (of their pre-activations) is the gradient of the state after the step times *slopes*,
which depend on the forward pass alone. So the slopes of all steps are made in a few large ops. A step backwards is left
with a few small ones, which turn its slopes into its gradients in place.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Run:
    """What the steps of `n` sequences had in the forward pass, `(n, T, ·)`, and the weights that they used."""

    input: Tensor
    before: Tensor  # the hidden state that each step began with
    after: Tensor | None  # the hidden state that it ended with, which is its output; None: it is not known
    memory: Sequence[Tensor]  # the other part of an LSTM's first state, (n, H)
    weights: Sequence[Tensor]  # w_ih and w_hh; the bias of each, if `has_biases`; w_hr, if the output is a projection
    has_biases: bool

    @property
    def biases(self) -> Sequence[Tensor]:
        return self.weights[2:4] if self.has_biases else ()

    @property
    def projection(self) -> Tensor | None:
        return self.weights[-1] if len(self.weights) % 2 else None

    def of_input(self, gates: int) -> Tensor:
        """What the input adds to the gates, `(n, T, gates, H)`."""
        return F.linear(self.input, self.weights[0], *self.biases[:1]).unflatten(-1, (gates, -1))

    def of_state(self, gates: int) -> Tensor:
        """What the hidden state adds to them."""
        return F.linear(self.before, self.weights[1], *self.biases[1:]).unflatten(-1, (gates, -1))

    def of_both(self, gates: int) -> Tensor:
        """The two together."""
        bias = [self.biases[0] + self.biases[1]] if self.has_biases else []
        rows = F.linear(self.input, self.weights[0], *bias).flatten(0, 1)
        rows.addmm_(self.before.flatten(0, 1), self.weights[1].t())
        return rows.view(*self.input.shape[:2], gates, -1)


class Cell(ABC):
    """The steps of a `Run`, to be gone through from the last to the first.

    `grads` has the gradients of the hidden state and of an LSTM's memory, each a `(n, T + 1, H)`: first that of the
    state before all steps, then those of the states after each, with whatever comes from outside. `step(t)` takes the
    gradient of the state after step t, and turns `slopes[:, t]`, which is `(n, gates, H)`, into the gradients of what
    the hidden state adds to the gates. What goes to the state before the step by another way is added there.
    """

    slopes: Tensor
    hidden: Tensor | None = None  # where the output is a projection: what was projected

    @abstractmethod
    def __init__(self, run: Run, grads: Sequence[Tensor]) -> None: ...

    @abstractmethod
    def step(self, t: int) -> None: ...

    def of_input(self, of_state: Tensor) -> Tensor:
        """After all steps: the gradients of what the input adds to the gates, given those of what the state adds."""
        return of_state


class Lstm(Cell):
    """`c = f c' + i g` and `h = o tanh(c)`; i, f and o are sigmoids of the gates, g is a tanh."""

    def __init__(self, run: Run, grads: Sequence[Tensor]) -> None:
        gates = run.of_both(4)
        i, f, g, o = gates.unbind(2)
        gates[:, :, :2].sigmoid_()
        g.tanh_()
        o.sigmoid_()
        self._c_by_c = _steps(f.clone())  # so that the gates themselves can be freed
        c = _memories(self._c_by_c, i, g, *run.memory)
        tanh_c = c[:, 1:].tanh()
        self.slopes = torch.empty_like(gates)
        at_i, at_f, at_g, at_o = self.slopes.unbind(2)
        _sigmoid_slope(g, i, out=at_i)
        _sigmoid_slope(c[:, :-1], f, out=at_f)
        _tanh_slope(i, g, out=at_g)
        _sigmoid_slope(tanh_c, o, out=at_o)
        self.hidden = o * tanh_c if run.projection is not None else None
        self._through_c, self._through_o = self.slopes[:, :, :3].unbind(1), self.slopes[:, :, 3:].unbind(1)
        self._h_by_c, self._dh, self._dc = map(_steps, (_tanh_slope(o, tanh_c), *grads))

    def step(self, t: int) -> None:
        dh, dc = self._dh[t + 1], self._dc[t + 1]
        dc.addcmul_(dh, self._h_by_c[t])
        self._through_c[t].mul_(dc)
        self._through_o[t].mul_(dh)
        self._dc[t].addcmul_(dc, self._c_by_c[t])


class Gru(Cell):
    """`h = n + u (h' - n)` and `n = tanh(x_n + r h_n)`; r and u are sigmoids of the gates, x_n and h_n two of them."""

    def __init__(self, run: Run, grads: Sequence[Tensor]) -> None:
        of_input, of_state = run.of_input(3), run.of_state(3)
        x_n, h_n = of_input[:, :, 2], of_state[:, :, 2]
        r, u = (of_input[:, :, :2] + of_state[:, :, :2]).sigmoid_().unbind(2)
        n = torch.addcmul(x_n, r, h_n).tanh_()
        self._at_x_n = _tanh_slope(1 - u, n)
        self.slopes = torch.empty_like(of_state)
        at_r, at_u, at_h_n = self.slopes.unbind(2)
        _sigmoid_slope(self._at_x_n * h_n, r, out=at_r)
        _sigmoid_slope(run.before - n, u, out=at_u)
        torch.mul(self._at_x_n, r, out=at_h_n)
        self._gates, self._h_by_h, self._grad = self.slopes.unbind(1), _steps(u.clone()), grads[0]
        self._dh = _steps(self._grad)

    def step(self, t: int) -> None:
        self._gates[t].mul_(self._dh[t + 1])
        self._dh[t].addcmul_(self._dh[t + 1], self._h_by_h[t])

    def of_input(self, of_state: Tensor) -> Tensor:
        r_and_u = self.slopes[:, :, :2].flatten(2)
        return torch.cat([r_and_u, self._at_x_n * self._grad[:, 1:]], -1)


class Elman(Cell):
    """`h = activation(gate)`, of which the slope is known from h itself."""

    activation: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor]

    def __init__(self, run: Run, grads: Sequence[Tensor]) -> None:
        h = self.activation(run.of_both(1)) if run.after is None else run.after.unsqueeze(2)
        self.slopes = self.slope(h)
        self._gates, self._dh = self.slopes.unbind(1), _steps(grads[0])

    def step(self, t: int) -> None:
        self._gates[t].mul_(self._dh[t + 1])


class Tanh(Elman):
    activation = staticmethod(torch.tanh)
    slope = staticmethod(lambda h: 1 - h * h)


class Relu(Elman):
    activation = staticmethod(torch.relu)
    slope = staticmethod(lambda h: (h > 0).to(h.dtype))


CELLS: dict[Any, type[Cell]] = {torch.lstm: Lstm, torch.gru: Gru, torch.rnn_tanh: Tanh, torch.rnn_relu: Relu}


def _memories(f: Sequence[Tensor], i: Tensor, g: Tensor, first: Tensor) -> Tensor:
    """`c[t + 1] = f[t] c[t] + i[t] g[t]` for all steps, and before them the first: `(n, T + 1, H)`."""
    all_steps = first.new_empty(len(first), 1 + len(f), first.shape[1])
    all_steps[:, 0] = first
    torch.mul(i, g, out=all_steps[:, 1:])
    c = _steps(all_steps)
    for t, factor in enumerate(f):
        c[t + 1].addcmul_(factor, c[t])
    return all_steps


def _steps(rows: Tensor) -> tuple[Tensor, ...]:
    """`(n, T, H)` as a `(n, 1, H)` for each step."""
    return rows.unsqueeze(2).unbind(1)


def _sigmoid_slope(factor: Tensor, s: Tensor, out: Tensor | None = None) -> Tensor:
    """`factor s (1 - s)`: the derivative of a factor times a sigmoid, of which s is the value."""
    out = torch.empty_like(s) if out is None else out
    return torch.ops.aten.sigmoid_backward.grad_input(factor, s, grad_input=out)


def _tanh_slope(factor: Tensor, s: Tensor, out: Tensor | None = None) -> Tensor:
    """`factor (1 - s²)`: that of a factor times a tanh."""
    out = torch.empty_like(s) if out is None else out
    return torch.ops.aten.tanh_backward.grad_input(factor, s, grad_input=out)
