"""The way back through all steps of one direction of a recurrent layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from persample.rules.recurrent.cells import Cell, Run


@dataclass(frozen=True)
class Found:
    """The gradients of what the input and the hidden state add to the gates, `(n, T, gates * H)`."""

    of_input: Tensor
    of_state: Tensor
    projected: Tensor | None  # the hidden state of each step, where the output is a projection of it


def scanned(kind: type[Cell], run: Run, grads: Sequence[Tensor]) -> Found:
    """Goes back through all steps; `grads` is as a `Cell` takes it, with that of the output in front.

    In the end `grads` has what came from outside and from all later steps, also for the first state.
    """
    w_hh, w_hr = run.weights[1], run.projection
    output, *memory = grads
    hidden = output if w_hr is None else output.new_empty(*output.shape[:2], w_hr.shape[1])
    cell = kind(run, [hidden, *memory])
    gates = cell.slopes.flatten(2)
    at_output, at_gates = output.unbind(1), gates.unbind(1)
    for t in reversed(range(len(at_gates))):
        if w_hr is not None:
            hidden[:, t + 1] = at_output[t + 1] @ w_hr
        cell.step(t)
        at_output[t].addmm_(at_gates[t], w_hh)
    return Found(cell.of_input(gates), gates, cell.hidden)
