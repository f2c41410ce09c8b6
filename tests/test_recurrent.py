"""RNN, LSTM and GRU in every form in which torch takes them."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from oracle import Grads, assert_rows_close
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from persample import ExpandedWeight, call_for_per_sample_grads

WIDTH, HIDDEN, PROJECTED = 5, 4, 3
LENGTHS = (2, 4, 3)

KINDS: dict[str, Callable[..., nn.RNNBase]] = {
    "tanh": lambda *a, **k: nn.RNN(*a, nonlinearity="tanh", **k),
    "relu": lambda *a, **k: nn.RNN(*a, nonlinearity="relu", **k),
    "lstm": nn.LSTM,
    "gru": nn.GRU,
    "projected": lambda *a, **k: nn.LSTM(*a, proj_size=PROJECTED, **k),
}
FUNCTIONS = {
    "tanh": torch.rnn_tanh,
    "relu": torch.rnn_relu,
    "lstm": torch.lstm,
    "gru": torch.gru,
    "projected": torch.lstm,
}
FORMS = ["tensor", "sorted", "unsorted"]

each_kind = pytest.mark.parametrize("kind", KINDS)
each_form = pytest.mark.parametrize("form", FORMS)


def build(kind: str, width: int = WIDTH, hidden: int = HIDDEN, **options: Any) -> nn.RNNBase:
    torch.manual_seed(0)
    return KINDS[kind](width, hidden, **{"dtype": torch.float64, **options})


# ---- batches ----


@dataclass(frozen=True)
class Batch:
    """`x` is `(B, T, width)`, of which sample n uses `lengths[n]` steps; `states` is empty where none are given."""

    x: Tensor
    lengths: tuple[int, ...]
    states: tuple[Tensor, ...] = ()

    def __len__(self) -> int:
        return len(self.x)

    def alone(self, n: int) -> Batch:
        """Sample n, as a batch of one."""
        length = self.lengths[n]
        states = tuple(state[:, n : n + 1] for state in self.states)
        return Batch(self.x[n : n + 1, :length], (length,), states)

    def fresh(self) -> Batch:
        """The same values, with no gradients and no history."""

        def leaf(tensor: Tensor) -> Tensor:
            return tensor.detach().clone().requires_grad_(tensor.requires_grad)

        return Batch(leaf(self.x), self.lengths, tuple(map(leaf, self.states)))

    def grads(self) -> dict[str, Tensor | None]:
        return {"x": self.x.grad} | {f"state {i}": state.grad for i, state in enumerate(self.states)}


def make_batch(
    rnn: nn.RNNBase,
    form: str = "tensor",
    lengths: Sequence[int] = LENGTHS,
    steps: int | None = None,
    states: str = "none",
    input_grad: bool = True,
) -> Batch:
    """Numbers for a module; a tensor has all steps, of `sorted` sequences the longest come first."""
    torch.manual_seed(1)
    dtype = rnn.weight_ih_l0.dtype
    steps = max(lengths) if steps is None else steps
    own = tuple(sorted(lengths, reverse=True)) if form == "sorted" else tuple(lengths)
    if form == "tensor":
        own = (steps,) * len(lengths)
    x = torch.randn(len(own), steps, rnn.input_size, dtype=torch.float64).to(dtype).requires_grad_(input_grad)
    batch = Batch(x, own)
    return batch if states == "none" else with_states(rnn, batch, requires_grad=states == "trained")


def with_states(rnn: nn.RNNBase, batch: Batch, requires_grad: bool) -> Batch:
    count = rnn.num_layers * (2 if rnn.bidirectional else 1)
    widths = [rnn.proj_size or rnn.hidden_size, rnn.hidden_size][: 2 if isinstance(rnn, nn.LSTM) else 1]
    states = tuple(
        torch.randn(count, len(batch), width, dtype=torch.float64).to(batch.x.dtype).requires_grad_(requires_grad)
        for width in widths
    )
    return replace(batch, states=states)


def packed(batch: Batch, form: str) -> PackedSequence:
    return pack_padded_sequence(batch.x, list(batch.lengths), batch_first=True, enforce_sorted=form == "sorted")


def arguments(rnn: nn.RNNBase, batch: Batch, form: str) -> tuple[Any, ...]:
    """What the module is called with."""
    input: Any = batch.x if rnn.batch_first else batch.x.transpose(0, 1)
    if form != "tensor":
        input = packed(batch, form)
    if not batch.states:
        return (input,)
    return input, (batch.states if isinstance(rnn, nn.LSTM) else batch.states[0])


# ---- losses, and the loop over samples ----


def weights_like(shape: Sequence[int]) -> Tensor:
    """A number for each entry, which depends on its place but not on the sizes of the dims before the last."""
    place = torch.zeros(())
    for factor, size in zip((29.0, 7.0, 1.0), shape, strict=True):
        place = place.unsqueeze(-1) + factor * torch.arange(size)
    return torch.sin(1 + place)


def loss_of(output: Any, states: Any, batch_first: bool) -> Tensor:
    """Depends on every step of the output and on all last states; a sum over the samples."""
    return losses_of(output, states, batch_first).sum()


def losses_of(output: Any, states: Any, batch_first: bool) -> Tensor:
    """The loss of each sample."""
    if isinstance(output, PackedSequence):
        output = pad_packed_sequence(output, batch_first=True)[0]
    elif not batch_first:
        output = output.transpose(0, 1)
    states = states if isinstance(states, tuple) else (states,)
    total: Any = 0
    for rows in (output, *(state.transpose(0, 1) for state in states)):
        weights = weights_like((1, *rows.shape[1:])).to(rows.dtype)
        total = total + (rows * weights + 0.5 * rows * rows).flatten(1).sum(1)
    return total


def looped(module: nn.Module, batch: Batch, loss_of_sample: Callable[[Batch], Tensor]) -> Grads:
    """The gradient of each sample's own loss, sample after sample, with plain autograd."""
    parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
    rows = [
        torch.autograd.grad(loss_of_sample(batch.alone(n)), list(parameters.values())) for n in range(len(batch))
    ]
    return {name: torch.stack(parts) for name, parts in zip(parameters, zip(*rows, strict=True), strict=True)}


def looped_rnn(rnn: nn.RNNBase, batch: Batch, form: str = "tensor") -> Grads:
    return looped(rnn, batch, lambda sample: loss_of(*rnn(*arguments(rnn, sample, form)), rnn.batch_first))


def taken_grad_samples(module: nn.Module) -> Grads:
    """What the parameters have received, which is then removed."""
    found = {}
    for name, parameter in module.named_parameters():
        assert parameter.grad is None, name
        if hasattr(parameter, "grad_sample"):
            found[name] = parameter.grad_sample
            del parameter.grad_sample
    return found


def assert_same_bits(actual: Any, expected: Any) -> None:
    actual, expected = flat(actual), flat(expected)
    assert len(actual) == len(expected)
    for got, want in zip(actual, expected, strict=True):
        assert (got is None) == (want is None)
        assert want is None or (got.dtype == want.dtype and torch.equal(got, want))


def flat(result: Any) -> list[Tensor | None]:
    return [result] if result is None or isinstance(result, Tensor) else [t for part in result for t in flat(part)]


def assert_same_grads(actual: Batch, expected: Batch, tolerance: float) -> None:
    for name, want in expected.grads().items():
        got = actual.grads()[name]
        assert (got is None) == (want is None), name
        if want is not None:
            torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def check(rnn: nn.RNNBase, batch: Batch, form: str = "tensor", tolerance: float = 1e-9, **options: Any) -> None:
    """Output, gradients of the activations and per-sample gradients of a wrapped call, with a sum for a loss."""
    plain = batch.fresh()
    expected = rnn(*arguments(rnn, plain, form))
    loss_of(*expected, rnn.batch_first).backward()
    rnn.zero_grad(set_to_none=True)
    given = batch.fresh()
    result = call_for_per_sample_grads(rnn, **options)(*arguments(rnn, given, form))
    assert_same_bits(result, expected)
    loss_of(*result, rnn.batch_first).backward()
    assert_rows_close(taken_grad_samples(rnn), looped_rnn(rnn, batch, form), tolerance)
    assert_same_grads(given, plain, tolerance)


def batch_options(rnn: nn.RNNBase, batch: Batch, form: str, told: bool) -> dict[str, Any]:
    """Options under which the size of the batch is given, or can be found: states have it in dim 1."""
    if told:
        return {"batch_size": len(batch), "batch_first": rnn.batch_first or form != "tensor"}
    return {"batch_first": rnn.batch_first if form == "tensor" else not batch.states}


# ---- the matrix ----

SHAPES = [
    pytest.param(
        {"num_layers": layers, "bidirectional": both, "bias": bias, "batch_first": batch_first},
        id=f"{layers}-{'both' if both else 'one'}-{'bias' if bias else 'nobias'}-{'btd' if batch_first else 'tbd'}",
    )
    for layers, both, bias, batch_first in itertools.product((1, 2), (False, True), (True, False), (True, False))
]


@each_kind
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("states", ["none", "given", "trained"])
def test_tensor(kind: str, shape: dict[str, Any], states: str) -> None:
    rnn = build(kind, **shape)
    batch = make_batch(rnn, states=states)
    told = rnn.batch_first and states != "none"
    check(rnn, batch, **batch_options(rnn, batch, "tensor", told))


@each_kind
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("states", ["none", "given", "trained"])
@pytest.mark.parametrize("form", ["sorted", "unsorted"])
@pytest.mark.parametrize("told", [True, False], ids=["told", "found"])
def test_packed(kind: str, shape: dict[str, Any], states: str, form: str, told: bool) -> None:
    rnn = build(kind, **shape)
    batch = make_batch(rnn, form, states=states)
    check(rnn, batch, form, **batch_options(rnn, batch, form, told))
