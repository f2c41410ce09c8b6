"""RNN, LSTM and GRU.

A call with several layers is rewritten as one call of `layer` for each, with dropout between them, which is what torch
does inside. The rule of `layer` finds the gradients of the gates' pre-activations, zx and zh below; from there on every
weight is that of a linear map. As they give the gradient of the input too, torch's own backward of it is not run.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from persample.errors import op_name
from persample.layout import Layout, Lost, regular
from persample.motion import Motion, Op, motion
from persample.rules.registry import HANDLED_FUNCTIONS, Rewrite, Terms, rule
from persample.terms import Dense, Outer, Term

State = tuple[Tensor, ...]
Cell = Callable[[Tensor, Tensor, State], State]


# ---- the cells: from the pre-activations of input and hidden state, and the state, to the next state ----


def _lstm(zx: Tensor, zh: Tensor, state: State) -> State:
    i, f, g, o = (zx + zh).chunk(4, -1)
    c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def _gru(zx: Tensor, zh: Tensor, state: State) -> State:
    rx, zx, nx = zx.chunk(3, -1)
    rh, zh, nh = zh.chunk(3, -1)
    update = (zx + zh).sigmoid()
    new = (nx + (rx + rh).sigmoid() * nh).tanh()
    return (new + update * (state[0] - new),)


def _tanh(zx: Tensor, zh: Tensor, state: State) -> State:
    return ((zx + zh).tanh(),)


def _relu(zx: Tensor, zh: Tensor, state: State) -> State:
    return ((zx + zh).relu(),)


CELLS: dict[Any, Cell] = {torch.lstm: _lstm, torch.gru: _gru, torch.rnn_tanh: _tanh, torch.rnn_relu: _relu}


# ---- a call of torch, layer by layer ----


def _tensor_call(input, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first):  # type: ignore[no-untyped-def] # fmt: skip
    """The arguments of `torch.lstm` and its like for a tensor."""


def _packed_call(data, batch_sizes, hx, params, has_biases, num_layers, dropout, train, bidirectional):  # type: ignore[no-untyped-def] # fmt: skip
    """The arguments of `torch.lstm` and its like for a PackedSequence."""


def arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a recurrent function by their names, which differ between its two forms."""
    second = kwargs.get("batch_sizes", args[1] if len(args) > 1 else None)
    packed = isinstance(second, Tensor) and not second.is_floating_point()
    return inspect.signature(_packed_call if packed else _tensor_call).bind(*args, **kwargs).arguments


def packed_layout(sizes: Tensor, order: Tensor | None, batch: int, loose: bool = False) -> Layout:
    """Where the samples lie in the rows of a PackedSequence: step by step, the longest sample first."""
    samples = list(range(int(sizes[0]))) if order is None else order.tolist()
    return regular(0, tuple(n for size in sizes.tolist() for n in samples[:size]), batch, loose)


def _rewritten(func: Callable[..., Any]) -> Callable[..., Any]:
    def layers(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        call = arguments(args, kwargs)
        packed = "data" in call
        x, sizes = (call["data"], call["batch_sizes"]) if packed else (call["input"], None)
        given: State = tuple(call["hx"]) if isinstance(call["hx"], (tuple, list)) else (call["hx"],)
        state = tuple(batch_second(s) for s in given)
        swapped = bool(call.get("batch_first"))
        if swapped:
            x = x.transpose(0, 1)
        directions = 2 if call["bidirectional"] else 1
        per_layer = len(call["params"]) // call["num_layers"]
        last: list[State] = []
        for k in range(call["num_layers"]):
            if k and call["train"] and call["dropout"]:
                x = F.dropout(x, call["dropout"])
            own = tuple(s[k * directions : (k + 1) * directions] for s in state)
            weights = list(call["params"][k * per_layer : (k + 1) * per_layer])
            valid = torch.ones_like(x[:, :1], dtype=torch.bool) if packed else None
            x, *after = layer(func, x, own, weights, sizes, valid, call["has_biases"], directions == 2)
            last.append(tuple(after))
        states = tuple(torch.cat(parts) for parts in zip(*last, strict=True))
        return (x.transpose(0, 1) if swapped else x), *states

    return layers


HANDLED_FUNCTIONS.update({func: Rewrite(_rewritten(func)) for func in CELLS})


def batch_second(state: Tensor) -> Tensor:
    """The state itself: a `(layers, B, width)`, also where its shape alone would allow another reading."""
    if has_torch_function((state,)):
        return handle_torch_function(batch_second, (state,), state)
    return state


@motion(batch_second)
def _motion_of_state(op: Op) -> Motion:
    (where,) = op.where
    readings = [where, *where.others] if isinstance(where, Layout) else []
    return Motion((next((replace(r, others=()) for r in readings if r.dim == 1), where),))


def layer(
    func: Callable[..., Any],
    input: Tensor,
    state: State,
    weights: Sequence[Tensor],
    sizes: Tensor | None,
    valid: Tensor | None,
    has_biases: bool,
    bidirectional: bool,
) -> tuple[Tensor, ...]:
    """One layer, both its directions: `(T, B, in)` to `(T, B, out)`, or packed rows with `sizes` of them a step.

    `valid` is a one for each packed row: told apart by sample, it says how long each sample is.
    """
    tensors = (input, *state, *weights)
    if has_torch_function(tensors):
        return handle_torch_function(
            layer, tensors, func, input, state, weights, sizes, valid, has_biases, bidirectional
        )
    state = tuple(s.contiguous() for s in state)
    hx = state if func is torch.lstm else state[0]
    if sizes is None:
        return func(input, hx, weights, has_biases, 1, 0.0, False, bidirectional, False)
    return func(input, sizes, hx, weights, has_biases, 1, 0.0, False, bidirectional)


@motion(layer)
def _motion_of_layer(op: Op) -> Motion:
    func, input, state, _, sizes, *_ = op.args
    where = op.where[0]
    owners = op.samples()
    if len(owners) == 1 and isinstance(where, Layout):  # everything is of one sample, in whatever dim it was found
        rows = regular(1, (*owners,) * state[0].shape[1], op.batch)
        return Motion((where, *[rows] * len(state)), tuple((1 + i, rows) for i in range(len(state))))
    if isinstance(where, Layout) and where.dim != (1 if sizes is None else 0):
        where = Lost(f"{op_name(func)} runs along dim {where.dim}, where the samples lie")
    if not isinstance(where, Layout):
        return Motion((where,) * (1 + len(state)))
    ids = where.sample_of(input.shape[where.dim], op.batch)
    rows = regular(1, ids[: state[0].shape[1]], op.batch, where.loose)
    for own in op.where[1 : 1 + len(state)]:
        if own is not None and own != rows:
            lost = Lost(f"{op_name(func)} has the samples of its input and of its state in different places")
            return Motion((lost,) * (1 + len(state)))
    return Motion((where, *[rows] * len(state)), tuple((1 + i, rows) for i in range(len(state))))


@motion(torch._pack_padded_sequence)
def _motion_of_packing(op: Op) -> Motion:
    input, lengths, batch_first = op.args
    where = op.where[0]
    dim = 0 if batch_first else 1
    if op.batch == 1 and isinstance(where, Layout):
        return Motion((Layout(0, int(lengths[0])), None))
    if not isinstance(where, Layout) or where.dim != dim:
        return Motion((Lost("sequences were packed along another dim than that of the samples"), None))
    sizes = torch.tensor([int((lengths > t).sum()) for t in range(int(lengths[0]))])
    order = torch.tensor(where.sample_of(input.shape[dim], op.batch))
    return Motion((packed_layout(sizes, order, op.batch, where.loose), None))


@motion(torch._pad_packed_sequence)
def _motion_of_padding(op: Op) -> Motion:
    data, sizes, batch_first, *_ = op.args
    where = op.where[0]
    if not isinstance(where, Layout):
        return Motion((where, None))
    ids = where.sample_of(len(data), op.batch)
    return Motion((regular(0 if batch_first else 1, ids[: int(sizes[0])], op.batch, where.loose), None))


# ---- the rule ----


@rule(
    layer,
    accepts=lambda input, dim: True,
    batched=("input", "state", "valid"),
    whole=True,
    reads_result=False,
    further=False,
)
def layer_terms(
    grads: Sequence[Tensor | None],
    func: Callable[..., Any],
    input: Tensor,
    state: State,
    weights: Sequence[Tensor],
    sizes: Tensor | None,
    valid: Tensor | None,
    has_biases: bool,
    bidirectional: bool,
) -> Terms:
    if sizes is None and input.shape[2] > 1:
        return _merged(grads, func, input, state, weights, has_biases, bidirectional)
    shape, input = input.shape, input.detach().flatten(1, -2)  # (batch, T, in)
    length = torch.full((len(input),), input.shape[1], device=input.device)
    if valid is not None:
        length = valid.flatten(1).sum(1).long()
    directions = 2 if bidirectional else 1
    per_direction = len(weights) // directions
    terms: list[Term] = []
    states: list[list[Tensor]] = []
    input_grad = torch.zeros_like(input)
    for d in range(directions):
        own = weights[d * per_direction : (d + 1) * per_direction]
        grad = None if grads[0] is None else grads[0].flatten(1, -2).chunk(directions, -1)[d]
        # (batch, directions, 1, width) -> (batch, width)
        last = [None if g is None else g[:, d].flatten(1) for g in grads[1:]]
        order = _reversal(length, input.shape[1]) if d else None
        found, own_grad, state_grads = _direction(
            CELLS[func], _take(input, order), [s[:, d].flatten(1) for s in state], own, has_biases, length,
            None if grad is None else _take(grad, order), last,
        )  # fmt: skip
        terms += found
        input_grad += _take(own_grad, order)
        states.append(state_grads)
    rows = [torch.stack(parts, 1).unsqueeze(2) for parts in zip(*states, strict=True)]
    return {"input": Dense(input_grad.view(shape)), "weights": terms, "state": [Dense(r) for r in rows]}


def _merged(
    grads: Sequence[Tensor | None],
    func: Callable[..., Any],
    input: Tensor,
    state: State,
    weights: Sequence[Tensor],
    has_biases: bool,
    bidirectional: bool,
) -> Terms:
    """The terms where each sample has several sequences: those of every sequence, put together."""
    batch, _, each, _ = input.shape

    def apart(rows: Tensor) -> Tensor:
        return rows.movedim(2, 1).flatten(0, 1).unsqueeze(2)  # (batch, T, each, in) -> (batch * each, T, 1, in)

    def together(rows: Tensor) -> Tensor:
        return rows.squeeze(2).unflatten(0, (batch, each)).movedim(1, 2)

    def of_samples(term: Term) -> Term:
        if isinstance(term, Outer):
            factors = (t.unflatten(0, (batch, each)).flatten(1, 2) for t in (term.input, term.grad))
            return Outer(*factors)
        return Dense(term.dense().unflatten(0, (batch, each)).sum(1))

    found: Any = layer_terms(
        [None if g is None else apart(g) for g in grads], func, apart(input), tuple(map(apart, state)), weights, None,
        None, has_biases, bidirectional,
    )  # fmt: skip
    return {
        "input": Dense(together(found["input"].dense())),
        "weights": [of_samples(term) for term in found["weights"]],
        "state": [Dense(together(term.dense())) for term in found["state"]],
    }


def _direction(
    cell: Cell,
    input: Tensor,
    state: Sequence[Tensor],
    weights: Sequence[Tensor],
    has_biases: bool,
    length: Tensor,
    grad: Tensor | None,
    last_grads: Sequence[Tensor | None],
) -> tuple[list[Term], Tensor, list[Tensor]]:
    """The terms of one direction's weights, and the gradients of its input and of its first state."""
    w_ih, w_hh, *others = weights
    biases, w_hr = (others[:2], others[2:]) if has_biases else ([], others)
    with torch.enable_grad():
        first = tuple(s.detach().requires_grad_() for s in state)
        zx = F.linear(input, w_ih, biases[0] if biases else None).requires_grad_()
        # Zeros that are added where the gradients are wanted: to zh, and to the projected output.
        at_zh = torch.zeros_like(zx, requires_grad=True)
        at_out = input.new_zeros(*input.shape[:2], state[0].shape[-1], requires_grad=True)
        before, raw, outputs, memories = [], [], [], []
        now: State = first
        for x, e, r in zip(zx.unbind(1), at_zh.unbind(1), at_out.unbind(1), strict=True):
            before.append(now[0])
            h, *memory = cell(x, F.linear(now[0], w_hh, biases[1] if biases else None) + e, now)
            raw.append(h)
            h = (F.linear(h, w_hr[0]) if w_hr else h) + r
            now = (h, *memory)
            outputs.append(h)
            memories.append(memory)
        out = torch.stack(outputs, 1)
        at_end = torch.arange(out.shape[1], device=out.device) == (length - 1).unsqueeze(1)
        value = zx.new_zeros(())
        if grad is not None:
            value = value + (out * grad.conj()).sum()
        for i, last in enumerate(last_grads):
            if last is not None:
                sequence = out if i == 0 else torch.stack([m[0] for m in memories], 1)
                value = value + (sequence[at_end] * last.conj()).sum()
        dx, dh, dr, *dstate = torch.autograd.grad(value, [zx, at_zh, at_out, *first], allow_unused=True)
    dstate = [torch.zeros_like(s) if g is None else g for s, g in zip(first, dstate, strict=True)]
    terms: list[Term] = [Outer(input, dx), Outer(torch.stack(before, 1).detach(), dh)]
    if biases:
        terms += [Dense(dx.sum(1)), Dense(dh.sum(1))]
    if w_hr:
        terms.append(Outer(torch.stack(raw, 1).detach(), dr))
    return terms, dx @ w_ih, dstate


def _reversal(length: Tensor, steps: int) -> Tensor:
    """For each sample the steps as the backward direction reads them, from its own end; what is beyond it stays."""
    step = torch.arange(steps, device=length.device).expand(len(length), steps)
    mirrored = length.unsqueeze(1) - 1 - step
    return torch.where(mirrored >= 0, mirrored, step)


def _take(values: Tensor, order: Tensor | None) -> Tensor:
    """`values[n, order[n, t]]`."""
    return values if order is None else values.gather(1, order.unsqueeze(-1).expand_as(values))


# ---- single steps ----


def _step(cell: Cell) -> Callable[..., Terms]:
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
        state: State = tuple(hx) if isinstance(hx, (tuple, list)) else (hx,)
        with torch.enable_grad():
            zx = F.linear(input, w_ih, b_ih).detach().requires_grad_()
            zh = F.linear(state[0], w_hh, b_hh).detach().requires_grad_()
            after = cell(zx, zh, state)
        pairs = zip(after, grads if isinstance(grads, (tuple, list)) else [grads], strict=True)
        outputs, given = zip(*((h, g) for h, g in pairs if g is not None), strict=True)
        dx, dh = torch.autograd.grad(outputs, [zx, zh], given)
        return {
            "w_ih": Outer(input, dx), "w_hh": Outer(state[0], dh), "b_ih": Dense(dx.sum(1)), "b_hh": Dense(dh.sum(1)),
        }  # fmt: skip

    return terms


for _function, _cell in (
    (torch.lstm_cell, _lstm), (torch.gru_cell, _gru), (torch.rnn_tanh_cell, _tanh), (torch.rnn_relu_cell, _relu),
):  # fmt: skip
    rule(_function, batched=("input", "hx"), accepts=lambda input, dim: dim == 0 and input.dim() == 2)(_step(_cell))
