"""The rule of `recurrent_layer`: from the gradients of its gates, the terms of its weights are those of linear maps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from persample._internal.recurrent import State, recurrent_layer
from persample.rules.recurrent.bptt import Found, scanned
from persample.rules.recurrent.cells import CELLS, Run
from persample.rules.recurrent.sequences import Sequences
from persample.rules.registry import Terms, register_rule
from persample.terms import Dense, Folded, Outer, Sum, Term


@register_rule(
    recurrent_layer, accepts=lambda input, dim: True, batched=("input", "state", "valid"), whole=True, further=False
)
def layer_terms(
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

    def apart(rows: Tensor | None) -> Any:
        """The sequences, in the type of the weights: under autocast, results and their gradients have another."""
        return None if rows is None else sequences.apart(rows).to(weights[0].dtype)

    x, first, last_grads = apart(input), [apart(part) for part in state], [apart(part) for part in grads[1:]]
    output, output_grad = apart(results[0]), apart(grads[0])
    terms: list[Term] = []
    input_terms: list[Outer] = []
    first_grads: list[list[Tensor]] = []
    for d in range(directions):
        turned = sequences.reversed if d else _unchanged
        own = weights[d * len(weights) // directions : (d + 1) * len(weights) // directions]
        after = turned(output.chunk(directions, -1)[d])
        before = torch.cat([first[0][:, d : d + 1], after[:, :-1]], 1)
        run = Run(turned(x), before, after, [part[:, d] for part in first[1:]], own, has_biases)

        of_states = [x.new_zeros(len(x), 1 + x.shape[1], part.shape[2]) for part in first]  # as a `Cell` takes them
        if output_grad is not None:
            of_states[0][:, 1:] = turned(output_grad.chunk(directions, -1)[d])
        for rows, last in zip(of_states, last_grads, strict=True):
            if last is not None:
                rows[sequences.ends] += last[:, d]

        found = scanned(CELLS[func], run, of_states)
        terms += _of_weights(run, found, of_states[0][:, 1:], sequences)
        input_terms.append(Outer(own[0].expand(batch, -1, -1), sequences.joined(turned(found.of_input)).mT))
        first_grads.append([rows[:, 0].unflatten(0, (batch, each)) for rows in of_states])
    shape = input.shape[1:]
    return {
        "input": Sum([Folded(term, shape, range(len(shape) - 1)) for term in input_terms]),
        "state": [Dense(torch.stack(parts, 1)) for parts in zip(*first_grads, strict=True)],
        "weights": terms,
    }


def _of_weights(run: Run, found: Found, output_grad: Tensor, sequences: Sequences) -> list[Term]:
    """The terms of a direction's weights, each that of a linear map."""
    of_state = sequences.joined(found.of_state)
    of_input = of_state if found.of_input is found.of_state else sequences.joined(found.of_input)
    terms: list[Term] = [Outer(sequences.joined(run.input), of_input), Outer(sequences.joined(run.before), of_state)]
    if run.has_biases:
        of_b_hh = of_state.sum(1)
        terms += [Dense(of_b_hh if of_input is of_state else of_input.sum(1)), Dense(of_b_hh)]
    if found.projected is not None:
        terms.append(Outer(sequences.joined(found.projected), sequences.joined(output_grad)))
    return terms


def _unchanged(rows: Tensor) -> Tensor:
    return rows
