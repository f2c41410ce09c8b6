"""Backpropagation through time: the backward scan over the time steps of one direction of a recurrent layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from persample.rules.recurrent.cells import Cell, RecurrentPass
from persample.terms import make_accumulator


@dataclass(frozen=True)
class GateGradients:
    """Gradients of the pre-activations of the gates, `(T, n, gates * H)`.

    A pre-activation is the sum of an input part and a state part (`RecurrentPass.compute_gates`). The gradients of the
    two parts differ in a GRU only; otherwise both are the same tensor.
    """

    input: Tensor
    state: Tensor
    unprojected: Tensor | None  # the hidden state of each step before the projection of an LSTM with proj_size


def scan_backwards(cell_class: type[Cell], forward: RecurrentPass, grads: Sequence[Tensor]) -> GateGradients:
    """Go through the time steps from last to first.

    `grads` are the gradients of the states as a `Cell` takes them, with the output first. They are completed in place:
    afterwards they include the gradients from all later steps, also for the initial state.
    """
    w_hh, w_hr = forward.weights[1], forward.projection
    output, *memory = grads
    hidden = output if w_hr is None else output.new_empty(*output.shape[:2], w_hr.shape[1])
    cell = cell_class(forward, [hidden, *memory])
    gates = cell.slopes.flatten(2)
    output_steps, gate_steps = output.unbind(), gates.unbind()
    add_product = make_accumulator(gate_steps[-1], w_hh)
    for t in reversed(range(len(gate_steps))):
        if w_hr is not None:
            hidden[t + 1] = output_steps[t + 1] @ w_hr
        cell.step(t)
        add_product(output_steps[t], gate_steps[t])
    return GateGradients(cell.compute_input_gradients(gates), gates, cell.hidden)
