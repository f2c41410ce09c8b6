"""The rule of `recurrent_layer`: given the gradients of its gates, each weight has the term of a linear map."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from persample._internal.recurrent import State, recurrent_layer
from persample.rules.recurrent.bptt import GateGradients, scan_backwards
from persample.rules.recurrent.cells import CELLS, RecurrentPass
from persample.rules.recurrent.sequences import Sequences
from persample.rules.registry import Terms, register_rule
from persample.terms import Dense, Folded, Outer, SharedProducts, Sum, Term


@register_rule(
    recurrent_layer,
    accepts=lambda input, dim: True,
    batched=("input", "state", "valid"),
    whole=True,
    further=False,
)
def compute_layer_terms(
    grads: Sequence[Tensor | None],
    results: Sequence[Tensor],
    func: Callable[..., Any],
    input: Tensor,
    state: State,
    weights: Sequence[Tensor],
    sizes: Tensor | None,
    valid: Tensor | None,
    has_biases: bool,
    bidirectional: bool,
) -> Terms:
    batch, directions, each, _ = state[0].shape
    sequences = Sequences(batch, each, None if valid is None else valid.flatten(1).sum(1))
    split = partial(_split, sequences, weights[0].dtype)
    x, first, last_grads = split(input), [*map(split, state)], [*map(split, grads[1:])]
    outputs = split(results[0]).chunk(directions, -1)
    output_grads: Any = [None] * directions if grads[0] is None else split(grads[0]).chunk(directions, -1)
    weight_terms: list[Term] = []
    input_terms: list[Outer] = []
    first_grads: list[list[Tensor]] = []
    for d in range(directions):
        orient = sequences.reverse if d else _keep
        own_weights = weights[d * len(weights) // directions : (d + 1) * len(weights) // directions]
        own_first = [part[d] for part in first]
        forward = _restore_pass(orient(x), own_first, orient(outputs[d]), own_weights, has_biases)
        of_output = None if output_grads[d] is None else orient(output_grads[d])
        of_last = [None if last is None else last[d] for last in last_grads]
        state_grads = _spread_state_gradients(len(x), own_first, of_output, of_last, sequences)
        gates = scan_backwards(CELLS[func], forward, state_grads)
        weight_terms += _compute_weight_terms(forward, gates, state_grads[0][1:], sequences)
        input_terms.append(Outer(own_weights[0].expand(batch, -1, -1), sequences.join(orient(gates.input)).mT))
        first_grads.append([rows[0].unflatten(0, (batch, each)) for rows in state_grads])
    shape = input.shape[1:]
    return {
        "input": Sum([Folded(term, shape, range(len(shape) - 1)) for term in input_terms]),
        "state": [Dense(torch.stack(parts, 1)) for parts in zip(*first_grads, strict=True)],
        "weights": weight_terms,
    }


def _split(sequences: Sequences, dtype: torch.dtype, rows: Tensor | None) -> Any:
    """The sequences in the dtype of the weights. Under autocast, results and gradients have another dtype."""
    return None if rows is None else sequences.split(rows).to(dtype)


def _restore_pass(
    x: Tensor, first: Sequence[Tensor], after: Tensor, weights: Sequence[Tensor], has_biases: bool
) -> RecurrentPass:
    """One direction of the forward pass, from its initial state and the states after each step."""
    before = torch.cat([first[0].unsqueeze(0), after[:-1]])
    return RecurrentPass(x.contiguous(), before, after, first[1:], weights, has_biases)


def _spread_state_gradients(
    steps: int,
    first: Sequence[Tensor],
    of_output: Tensor | None,
    of_last: Sequence[Tensor | None],
    sequences: Sequences,
) -> list[Tensor]:
    """The gradients of the initial state and of the states after each step, as a `Cell` takes them."""
    found = [part.new_zeros(1 + steps, *part.shape) for part in first]
    if of_output is not None:
        found[0][1:] = of_output
    for rows, last in zip(found, of_last, strict=True):
        if last is not None:
            rows[sequences.ends] += last
    return found


def _compute_weight_terms(
    forward: RecurrentPass, gates: GateGradients, output_grad: Tensor, sequences: Sequences
) -> list[Term]:
    """The terms of the weights of one direction; each weight belongs to a linear map."""
    state_grad = sequences.join(gates.state)
    input_grad = state_grad if gates.input is gates.state else sequences.join(gates.input)
    shared = SharedProducts(state_grad) if input_grad is state_grad else None
    terms: list[Term] = [
        Outer(sequences.join(forward.input), input_grad, shared),
        Outer(sequences.join(forward.before), state_grad, shared),
    ]
    if forward.has_biases:
        b_hh_grad = state_grad.sum(1)
        terms += [Dense(b_hh_grad if input_grad is state_grad else input_grad.sum(1)), Dense(b_hh_grad)]
    if gates.unprojected is not None:
        terms.append(Outer(sequences.join(gates.unprojected), sequences.join(output_grad)))
    return terms


def _keep(rows: Tensor) -> Tensor:
    return rows
