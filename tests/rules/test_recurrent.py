"""RNN, LSTM and GRU with all options and forms of input that torch supports."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import persample
from persample import ExpandedWeight, call_for_per_sample_grads
from persample.terms import Folded
from persample.testing.oracle import Gradients, assert_rows_close, stack_gradients

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

# torch warns once per process, in the test that runs first
pytestmark = pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")

each_kind = pytest.mark.parametrize("kind", KINDS)
each_form = pytest.mark.parametrize("form", FORMS)


def build(kind: str, width: int = WIDTH, hidden: int = HIDDEN, **options: Any) -> nn.RNNBase:
    torch.manual_seed(0)
    return KINDS[kind](width, hidden, **{"dtype": torch.float64, **options})


# ---- batches ----


@dataclass(frozen=True)
class Batch:
    """`x` is `(B, T, width)`; sample n uses the first `lengths[n]` steps. `states` may be empty."""

    x: Tensor
    lengths: tuple[int, ...]
    states: tuple[Tensor, ...] = ()

    def __len__(self) -> int:
        return len(self.x)

    def select_sample(self, n: int) -> Batch:
        """Sample n, as a batch of one."""
        length = self.lengths[n]
        states = tuple(state[:, n : n + 1] for state in self.states)
        return Batch(self.x[n : n + 1, :length], (length,), states)

    def clone(self) -> Batch:
        """The same values as new leaves, without gradients."""

        def clone_leaf(tensor: Tensor) -> Tensor:
            return tensor.detach().clone().requires_grad_(tensor.requires_grad)

        return Batch(clone_leaf(self.x), self.lengths, tuple(map(clone_leaf, self.states)))

    def get_grads(self) -> dict[str, Tensor | None]:
        return {"x": self.x.grad} | {f"state {i}": state.grad for i, state in enumerate(self.states)}


def make_batch(
    rnn: nn.RNNBase,
    form: str = "tensor",
    lengths: Sequence[int] = LENGTHS,
    steps: int | None = None,
    states: str = "none",
    input_grad: bool = True,
) -> Batch:
    """A random batch. Samples of a "tensor" have all steps; "sorted" sequences are in order of decreasing length."""
    torch.manual_seed(1)
    dtype = rnn.weight_ih_l0.dtype
    steps = max(lengths) if steps is None else steps
    own = tuple(sorted(lengths, reverse=True)) if form == "sorted" else tuple(lengths)
    if form == "tensor":
        own = (steps,) * len(lengths)
    x = torch.randn(len(own), steps, rnn.input_size, dtype=torch.float64).to(dtype).requires_grad_(input_grad)
    batch = Batch(x, own)
    return batch if states == "none" else add_states(rnn, batch, requires_grad=states == "trained")


def add_states(rnn: nn.RNNBase, batch: Batch, requires_grad: bool) -> Batch:
    count = rnn.num_layers * (2 if rnn.bidirectional else 1)
    widths = [rnn.proj_size or rnn.hidden_size, rnn.hidden_size][: 2 if isinstance(rnn, nn.LSTM) else 1]
    states = tuple(
        torch.randn(count, len(batch), width, dtype=torch.float64).to(batch.x.dtype).requires_grad_(requires_grad)
        for width in widths
    )
    return replace(batch, states=states)


def pack(batch: Batch, form: str) -> PackedSequence:
    return pack_padded_sequence(batch.x, list(batch.lengths), batch_first=True, enforce_sorted=form == "sorted")


def make_arguments(rnn: nn.RNNBase, batch: Batch, form: str) -> tuple[Any, ...]:
    """The arguments of the module: the input and, if there are any, the states."""
    input: Any = batch.x if rnn.batch_first else batch.x.transpose(0, 1).contiguous()
    if form != "tensor":
        input = pack(batch, form)
    if not batch.states:
        return (input,)
    return input, (batch.states if isinstance(rnn, nn.LSTM) else batch.states[0])


# ---- losses, and the loop over samples ----


def make_loss_weights(shape: Sequence[int]) -> Tensor:
    """A fixed weight for each entry, which depends on the index of the entry but not on the size of the batch."""
    place = torch.zeros(())
    for factor, size in zip((29.0, 7.0, 1.0), shape, strict=True):
        place = place.unsqueeze(-1) + factor * torch.arange(size)
    return torch.sin(1 + place)


def compute_loss(output: Any, states: Any, batch_first: bool) -> Tensor:
    """A sum over the samples that depends on every step of the output and on all last states."""
    return compute_losses(output, states, batch_first).sum()


def compute_losses(output: Any, states: Any, batch_first: bool) -> Tensor:
    """The loss of each sample."""
    if isinstance(output, PackedSequence):
        output = pad_packed_sequence(output, batch_first=True)[0]
    elif not batch_first:
        output = output.transpose(0, 1)
    states = states if isinstance(states, tuple) else (states,)
    total: Any = 0
    for rows in (output, *(state.transpose(0, 1) for state in states)):
        weights = make_loss_weights((1, *rows.shape[1:])).to(rows.dtype)
        total = total + (rows * weights + 0.5 * rows * rows).flatten(1).sum(1)
    return total


def loop_over_samples(module: nn.Module, batch: Batch, compute_sample_loss: Callable[[Batch], Tensor]) -> Gradients:
    """The gradient of the loss of each sample, by plain autograd with one sample at a time."""
    losses = (compute_sample_loss(batch.select_sample(n)) for n in range(len(batch)))
    return stack_gradients(losses, dict(module.named_parameters()))


def loop_over_rnn(rnn: nn.RNNBase, batch: Batch, form: str = "tensor") -> Gradients:
    return loop_over_samples(
        rnn, batch, lambda sample: compute_loss(*rnn(*make_arguments(rnn, sample, form)), rnn.batch_first)
    )


def take_grad_samples(module: nn.Module) -> Gradients:
    """Remove `grad_sample` from all parameters and return it."""
    found = {}
    for name, parameter in module.named_parameters():
        assert parameter.grad is None, name
        if hasattr(parameter, "grad_sample"):
            found[name] = parameter.grad_sample
            del parameter.grad_sample
    return found


def assert_same_bits(actual: Any, expected: Any) -> None:
    actual, expected = flatten(actual), flatten(expected)
    assert len(actual) == len(expected)
    for got, want in zip(actual, expected, strict=True):
        assert (got is None) == (want is None)
        assert want is None or (got.dtype == want.dtype and torch.equal(got, want))


def flatten(result: Any) -> list[Tensor | None]:
    return [result] if result is None or isinstance(result, Tensor) else [t for part in result for t in flatten(part)]


def assert_same_grads(actual: Batch, expected: Batch, tolerance: float) -> None:
    for name, want in expected.get_grads().items():
        got = actual.get_grads()[name]
        assert (got is None) == (want is None), name
        if want is not None:
            torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def compute_outputs(rnn: nn.RNNBase, batch: Batch, form: str, **options: Any) -> tuple[Any, Any]:
    """The results of the wrapped call and of the plain module, with the same seed."""
    torch.manual_seed(2)
    expected = rnn(*make_arguments(rnn, batch.clone(), form))
    after = torch.get_rng_state()
    torch.manual_seed(2)
    result = call_for_per_sample_grads(rnn, **options)(*make_arguments(rnn, batch.clone(), form))
    assert torch.equal(torch.get_rng_state(), after)
    return result, expected


def check(rnn: nn.RNNBase, batch: Batch, form: str = "tensor", tolerance: float = 1e-9, **options: Any) -> None:
    """Check the gradients of the activations and the per-sample gradients of the weights, for a summed loss."""
    plain = batch.clone()
    compute_loss(*rnn(*make_arguments(rnn, plain, form)), rnn.batch_first).backward()
    rnn.zero_grad(set_to_none=True)
    given = batch.clone()
    result = call_for_per_sample_grads(rnn, **options)(*make_arguments(rnn, given, form))
    compute_loss(*result, rnn.batch_first).backward()
    assert_rows_close(take_grad_samples(rnn), loop_over_rnn(rnn, batch, form), tolerance)
    assert_same_grads(given, plain, tolerance)


def choose_batch_options(rnn: nn.RNNBase, batch: Batch, form: str, explicit: bool) -> dict[str, Any]:
    """Options that state the batch size (`explicit`), or with which it can be found: states have it in dim 1."""
    if explicit:
        return {"batch_size": len(batch), "batch_first": rnn.batch_first or form != "tensor"}
    return {"batch_first": rnn.batch_first if form == "tensor" else not batch.states}


# ---- all combinations ----


def make_shape(layers: int, directions: int, bias: bool, batch_first: bool) -> Any:
    name = f"{layers}layer-{directions}way-{'bias' if bias else 'nobias'}-{'btd' if batch_first else 'tbd'}"
    options = {"num_layers": layers, "bidirectional": directions == 2, "bias": bias, "batch_first": batch_first}
    return pytest.param(options, id=name)


SHAPES = [make_shape(*choice) for choice in itertools.product((1, 2), (1, 2), (True, False), (True, False))]
each_shape = pytest.mark.parametrize("shape", SHAPES)
each_state = pytest.mark.parametrize("states", ["none", "given", "trained"])
DEEP = {"num_layers": 2, "bidirectional": True, "batch_first": True}


@each_kind
@each_shape
@each_state
@each_form
def test_gradients(kind: str, shape: dict[str, Any], states: str, form: str) -> None:
    rnn = build(kind, **shape)
    batch = make_batch(rnn, form, states=states)
    check(rnn, batch, form, **choose_batch_options(rnn, batch, form, explicit=form != "tensor" or states != "none"))


@each_kind
@each_state
@pytest.mark.parametrize("form", ["sorted", "unsorted"])
def test_batch_size_is_found_in_a_packed_sequence(kind: str, states: str, form: str) -> None:
    rnn = build(kind, **DEEP)
    batch = make_batch(rnn, form, states=states)
    check(rnn, batch, form, **choose_batch_options(rnn, batch, form, explicit=False))


@each_kind
@each_state
def test_batch_size_is_found_in_time_first_tensors(kind: str, states: str) -> None:
    rnn = build(kind, num_layers=2, bidirectional=True)
    check(rnn, make_batch(rnn, states=states), batch_first=False)


@each_kind
@each_form
@pytest.mark.parametrize("batch_first", [True, False], ids=["btd", "tbd"])
def test_float32_without_a_gradient_of_the_input(kind: str, form: str, batch_first: bool) -> None:
    rnn = build(kind, num_layers=2, bidirectional=True, batch_first=batch_first, dtype=torch.float32)
    batch = make_batch(rnn, form, input_grad=False)
    check(rnn, batch, form, tolerance=1e-4, **choose_batch_options(rnn, batch, form, explicit=True))


@each_kind
@each_shape
@each_state
@each_form
def test_output_has_the_same_bits(kind: str, shape: dict[str, Any], states: str, form: str) -> None:
    rnn = build(kind, **shape)
    batch = make_batch(rnn, form, states=states)
    assert_same_bits(*compute_outputs(rnn, batch, form, **choose_batch_options(rnn, batch, form, explicit=True)))


@each_kind
@each_form
@each_state
def test_output_has_the_same_bits_without_a_gradient_of_the_input(kind: str, form: str, states: str) -> None:
    rnn = build(kind, **DEEP, dtype=torch.float32)
    batch = make_batch(rnn, form, states=states, input_grad=False)
    assert_same_bits(*compute_outputs(rnn, batch, form, batch_size=len(batch)))


@each_kind
def test_output_has_the_same_bits_for_a_transposed_input(kind: str) -> None:
    rnn = build(kind, num_layers=2)
    x = make_batch(rnn).x.transpose(0, 1)
    assert_same_bits(call_for_per_sample_grads(rnn, batch_first=False)(x), rnn(x))


# ---- dropout ----


@each_kind
@each_form
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("input_grad", [True, False], ids=["grad", "nograd"])
def test_dropout_draws_the_same_numbers(kind: str, form: str, training: bool, input_grad: bool) -> None:
    rnn = build(kind, num_layers=3, bidirectional=True, dropout=0.4).train(training)
    batch = make_batch(rnn, form, input_grad=input_grad)
    result, expected = compute_outputs(rnn, batch, form, **choose_batch_options(rnn, batch, form, explicit=True))
    assert_same_bits(result, expected)


@each_kind
@each_form
@pytest.mark.parametrize("batch_first", [True, False], ids=["btd", "tbd"])
def test_gradients_with_dropout(kind: str, form: str, batch_first: bool) -> None:
    """The oracle is the plain batch with the same seed, since the loss of a sample depends on its own masks only."""
    rnn = build(kind, num_layers=2, bidirectional=True, dropout=0.4, batch_first=batch_first)
    batch = make_batch(rnn, form)
    torch.manual_seed(2)
    losses = compute_losses(*rnn(*make_arguments(rnn, batch, form)), batch_first)
    rows = [torch.autograd.grad(loss, list(rnn.parameters()), retain_graph=True) for loss in losses]
    expected = {
        name: torch.stack(p) for (name, _), p in zip(rnn.named_parameters(), zip(*rows, strict=True), strict=True)
    }
    torch.manual_seed(2)
    options = choose_batch_options(rnn, batch, form, explicit=True)
    compute_loss(*call_for_per_sample_grads(rnn, **options)(*make_arguments(rnn, batch, form)), batch_first).backward()
    assert_rows_close(take_grad_samples(rnn), expected)


# ---- sizes ----

SIZES = {"T is B": (4, 4, 4, 4), "B is 1": (4,), "T is 1": (1, 1, 1), "B and T are 1": (1,), "B is layers": (3, 2)}


@each_kind
@pytest.mark.parametrize("form", ["btd", "tbd", "sorted", "unsorted"])
@pytest.mark.parametrize("states", ["none", "trained"])
@pytest.mark.parametrize("lengths", SIZES.values(), ids=[name.replace(" ", "-") for name in SIZES])
def test_ambiguous_sizes(kind: str, form: str, states: str, lengths: tuple[int, ...]) -> None:
    rnn = build(kind, num_layers=2, batch_first=form == "btd")
    form = form if "sorted" in form else "tensor"
    batch = make_batch(rnn, form, lengths, states=states)
    check(rnn, batch, form, **choose_batch_options(rnn, batch, form, explicit=True))


@each_kind
@pytest.mark.parametrize("states", ["given", "trained"])
def test_two_layers_and_two_samples_make_the_state_ambiguous(kind: str, states: str) -> None:
    rnn = build(kind, num_layers=2, batch_first=True)
    batch = make_batch(rnn, lengths=(4, 4), states=states)
    assert batch.states[0].shape[:2] == (2, 2)
    check(rnn, batch)


@each_kind
def test_very_different_lengths(kind: str) -> None:
    rnn = build(kind, bidirectional=True)
    check(rnn, make_batch(rnn, "unsorted", (1, 6, 2, 4)), "unsorted")


@each_kind
def test_a_loss_of_the_last_states_only(kind: str) -> None:
    rnn = build(kind, num_layers=2, bidirectional=True, batch_first=True)
    batch = make_batch(rnn, "unsorted")

    def loss(sample: Batch, call: Callable[..., Any]) -> Tensor:
        _, states = call(*make_arguments(rnn, sample, "unsorted"))
        return compute_loss(torch.zeros(len(sample), 1, 1), states, batch_first=True)

    loss(batch, call_for_per_sample_grads(rnn)).backward()
    assert_rows_close(take_grad_samples(rnn), loop_over_samples(rnn, batch, lambda sample: loss(sample, rnn)))


@each_kind
@each_form
def test_a_loss_of_the_output_only(kind: str, form: str) -> None:
    rnn = build(kind, num_layers=2, bidirectional=True, batch_first=True)
    batch = make_batch(rnn, form)

    def loss(sample: Batch, call: Callable[..., Any]) -> Tensor:
        output, _ = call(*make_arguments(rnn, sample, form))
        return compute_loss(output, (), batch_first=True)

    loss(batch, call_for_per_sample_grads(rnn)).backward()
    assert_rows_close(take_grad_samples(rnn), loop_over_samples(rnn, batch, lambda sample: loss(sample, rnn)))


# ---- frozen weights, reductions, wrong sizes ----


@each_kind
@each_form
@pytest.mark.parametrize("frozen", ["weight_ih", "weight_hh", "bias_ih", "bias_hh", "l0", "l1", "reverse"])
def test_frozen_weights_get_no_gradients(kind: str, form: str, frozen: str) -> None:
    rnn = build(kind, **DEEP)
    for name, parameter in rnn.named_parameters():
        parameter.requires_grad_(frozen not in name)
    check(rnn, make_batch(rnn, form), form)


@each_kind
def test_one_trainable_weight_among_frozen_ones(kind: str) -> None:
    rnn = build(kind, **DEEP).requires_grad_(False)
    rnn.weight_hh_l0.requires_grad_()
    check(rnn, make_batch(rnn, states="trained"), batch_size=3)


@each_kind
@each_form
def test_mean_reduction(kind: str, form: str) -> None:
    rnn = build(kind, **DEEP)
    batch, plain = make_batch(rnn, form), make_batch(rnn, form)
    (compute_loss(*rnn(*make_arguments(rnn, plain, form)), True) / len(batch)).backward()
    rnn.zero_grad(set_to_none=True)
    wrapped = call_for_per_sample_grads(rnn, loss_reduction="mean")
    (compute_loss(*wrapped(*make_arguments(rnn, batch, form)), True) / len(batch)).backward()
    assert_rows_close(take_grad_samples(rnn), loop_over_rnn(rnn, batch, form))
    assert_same_grads(batch, plain, 1e-9)


@each_kind
@pytest.mark.parametrize("form", ["sorted", "unsorted"])
@pytest.mark.parametrize("batch_size", [2, 4, 12])
def test_wrong_batch_size_for_a_packed_sequence(kind: str, form: str, batch_size: int) -> None:
    rnn = build(kind)
    message = (
        "Expected ExpandedWeights to have batch size matching input but got input batch size of 3 "
        f"with ExpandedWeight of batch size {batch_size}"
    )
    with pytest.raises(RuntimeError, match=message):
        call_for_per_sample_grads(rnn, batch_size=batch_size)(pack(make_batch(rnn, form), form))


@each_kind
def test_a_sequence_without_a_batch_dimension_is_refused(kind: str) -> None:
    rnn = build(kind)
    with pytest.raises(RuntimeError, match="samples of the batch are mixed"):
        output, _ = call_for_per_sample_grads(rnn)(make_batch(rnn).x[0])
        output.sum().backward()


# ---- lower precision ----


@each_kind
@each_form
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_low_precision(kind: str, form: str, dtype: torch.dtype) -> None:
    """Compare with a float64 module of the same rounded weights; inputs of a relu stay away from 0."""
    rnn = build(kind, num_layers=2, bidirectional=True, batch_first=True, dtype=dtype)
    batch = make_batch(rnn, form)
    if kind == "relu":
        for tensor in (batch.x, *rnn.parameters()):
            tensor.data.abs_()
    assert_same_bits(*compute_outputs(rnn, batch, form))
    compute_loss(*call_for_per_sample_grads(rnn)(*make_arguments(rnn, batch, form)), True).backward()
    found = take_grad_samples(rnn)
    assert {rows.dtype for rows in found.values()} == {dtype}
    exact = build(kind, num_layers=2, bidirectional=True, batch_first=True)
    exact.load_state_dict({name: value.double() for name, value in rnn.state_dict().items()})
    expected = loop_over_rnn(exact, replace(batch, x=batch.x.detach().double()), form)
    tolerance = 0.05 if dtype is torch.bfloat16 else 0.01
    assert_rows_close({name: rows.double() for name, rows in found.items()}, expected, tolerance)


# ---- inside a model ----


class Twice(nn.Module):
    """Apply the same weights to the input and to the output, with `carry` from the last states of the first call."""

    def __init__(self, kind: str, carry: bool) -> None:
        super().__init__()
        self.rnn = build(kind, PROJECTED if kind == "projected" else HIDDEN, HIDDEN, batch_first=True)
        self.carry = carry

    def forward(self, x: Tensor) -> Any:
        output, states = self.rnn(x)
        return self.rnn(output, states) if self.carry else self.rnn(output)


@each_kind
@pytest.mark.parametrize("carry", [True, False], ids=["carried", "afresh"])
def test_a_module_used_twice(kind: str, carry: bool) -> None:
    model = Twice(kind, carry)
    batch = make_batch(model.rnn)
    compute_loss(*call_for_per_sample_grads(model)(batch.x), True).backward()
    expected = loop_over_samples(model, batch, lambda sample: compute_loss(*model(sample.x), True))
    assert_rows_close(take_grad_samples(model), expected)


class Tagger(nn.Module):
    """Scores for each word of sequences of different lengths, and for each sequence."""

    def __init__(self, kind: str, time_first: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, WIDTH)
        self.rnn = build(kind, num_layers=2, bidirectional=True, batch_first=not time_first)
        width = 2 * (PROJECTED if kind == "projected" else HIDDEN)
        self.head, self.summary = nn.Linear(width, 3), nn.Linear(width, 2)
        self.double()

    def forward(self, words: Tensor, lengths: Any) -> tuple[Tensor, Tensor]:
        first = self.rnn.batch_first
        x = self.embedding(words if first else words.t())
        sequence = pack_padded_sequence(x, lengths, batch_first=first, enforce_sorted=False)
        output, states = self.rnn(sequence)
        padded, _ = pad_packed_sequence(output, batch_first=first)
        last = states[0] if isinstance(states, tuple) else states
        scores = self.head(padded)
        return scores if first else scores.transpose(0, 1), self.summary(torch.cat([last[-2], last[-1]], -1))


@each_kind
@pytest.mark.parametrize("time_first", [True, False], ids=["tbd", "btd"])
@pytest.mark.parametrize("lengths", [torch.tensor(LENGTHS), list(LENGTHS)], ids=["tensor", "list"])
def test_packing_inside_the_model(kind: str, time_first: bool, lengths: Any) -> None:
    model = Tagger(kind, time_first)
    words = torch.randint(11, (len(LENGTHS), max(LENGTHS)), generator=torch.Generator().manual_seed(3))

    def loss(scores: Tensor, summary: Tensor, own: Sequence[int]) -> Tensor:
        real = torch.arange(scores.shape[1]) < torch.tensor(own).unsqueeze(1)
        scores = scores * real.unsqueeze(-1)
        return compute_loss(scores, summary.unsqueeze(0), batch_first=True)

    def compute_sample_loss(n: int) -> Tensor:
        own = LENGTHS[n : n + 1]
        return loss(*model(words[n : n + 1, : own[0]], torch.tensor(own)), own)

    result = call_for_per_sample_grads(model)(words, lengths)
    assert_same_bits(result, model(words, lengths))
    loss(*result, LENGTHS).backward()
    parameters = dict(model.named_parameters())
    rows = [torch.autograd.grad(compute_sample_loss(n), list(parameters.values())) for n in range(len(words))]
    expected = {name: torch.stack(parts) for name, parts in zip(parameters, zip(*rows, strict=True), strict=True)}
    assert_rows_close(take_grad_samples(model), expected)


# ---- the backward pass ----


class Sentences(nn.Module):
    """The loss of each sample, where a sample has several sequences: the input is `(B, each, T, width)`."""

    def __init__(self, kind: str, time_first: bool, states: bool, change: bool = False, **options: Any) -> None:
        super().__init__()
        self.rnn = build(kind, bidirectional=True, batch_first=not time_first, **options)
        self.states, self.change = states, change

    def forward(self, x: Tensor) -> Tensor:
        count, each = x.shape[:2]
        rows = x.flatten(0, 1)
        if not self.rnn.batch_first:
            rows = rows.transpose(0, 1)
        given: Any = None
        if self.states:
            widths = [self.rnn.proj_size or HIDDEN, HIDDEN][: 2 if isinstance(self.rnn, nn.LSTM) else 1]
            layers = 2 * self.rnn.num_layers
            parts = [x.flatten(0, 1)[:, 0, :1].expand(layers, -1, width).contiguous() for width in widths]
            given = tuple(parts) if len(parts) > 1 else parts[0]
        output, states = self.rnn(rows, given)
        if self.change:
            output.mul_(2)
        states = states if isinstance(states, tuple) else (states,)
        output = output if self.rnn.batch_first else output.transpose(0, 1)
        total: Any = 0
        for rows in (output, *(part.transpose(0, 1) for part in states)):
            rows = rows.unflatten(0, (count, each))
            total = total + (rows * rows * make_loss_weights(rows.shape[-3:])).flatten(1).sum(1)
        return total


def check_record(model: nn.Module, x: Tensor, tolerance: float = 1e-9) -> persample.PerSampleGradients:
    """Check the dense per-sample gradients against the loop, and the gradient of the input."""
    parameters = dict(model.named_parameters())
    rows = [torch.autograd.grad(model(x[n : n + 1]).sum(), list(parameters.values())) for n in range(len(x))]
    expected = {name: torch.stack(parts) for name, parts in zip(parameters, zip(*rows, strict=True), strict=True)}
    plain, given = x.clone().requires_grad_(), x.clone().requires_grad_()
    model(plain).sum().backward()
    model.zero_grad(set_to_none=True)
    with persample.record(model, loss_reduction="sum") as grads:
        model(given).sum().backward()
    assert_rows_close(grads.dense(), expected, tolerance)
    torch.testing.assert_close(given.grad, plain.grad, rtol=tolerance, atol=tolerance)
    return grads


@each_kind
@pytest.mark.parametrize("time_first", [True, False], ids=["tbd", "btd"])
@pytest.mark.parametrize("states", [True, False], ids=["given", "zeros"])
@pytest.mark.parametrize("layers", [1, 2])
def test_several_sequences_per_sample(kind: str, time_first: bool, states: bool, layers: int) -> None:
    model = Sentences(kind, time_first, states, num_layers=layers)
    grads = check_record(model, torch.randn(3, 2, 4, WIDTH, dtype=torch.float64))
    squares = [rows.flatten(1).square().sum(1) for rows in grads.dense().values()]
    torch.testing.assert_close(grads.norms(), torch.stack(squares).sum(0).sqrt())


@each_kind
def test_the_output_may_be_changed_in_place(kind: str) -> None:
    """The rule reads the output of the layer before the change."""
    check_record(Sentences(kind, False, False, change=True), torch.randn(3, 1, 4, WIDTH, dtype=torch.float64))


@each_kind
@pytest.mark.parametrize("scale", [0.01, 1.0, 6.0])
def test_long_sequences_in_float32(kind: str, scale: float) -> None:
    """Gradients are as exact as torch's for almost linear gates and for almost closed gates."""
    rnn = build(kind, 8, 16, batch_first=True)
    if kind == "relu":
        scale = min(scale, 1.0)  # a factor of 6 in each step overflows
    with torch.no_grad():
        for parameter in rnn.parameters():
            parameter.mul_(scale)
    batch = make_batch(rnn, lengths=(60,) * 4)
    expected = loop_over_rnn(rnn, batch)
    single = build(kind, 8, 16, batch_first=True, dtype=torch.float32)
    single.load_state_dict({name: value.float() for name, value in rnn.state_dict().items()})
    own = replace(batch, x=batch.x.detach().float())
    plain = loop_over_rnn(single, own)
    compute_loss(*call_for_per_sample_grads(single)(own.x), True).backward()
    for name, rows in take_grad_samples(single).items():
        scale_of_rows = expected[name].abs().max()
        error, plain_error = ((r.double() - expected[name]).abs().max() / scale_of_rows for r in (rows, plain[name]))
        assert error <= 3 * plain_error + 1e-6, name


@each_kind
def test_the_gradient_of_the_input_is_computed_only_if_needed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    computed = []
    dense = Folded.dense
    monkeypatch.setattr(Folded, "dense", lambda term: computed.append(term) or dense(term))
    rnn = build(kind, num_layers=2, batch_first=True)
    for input_grad, layers in ((False, 1), (True, 2)):
        computed.clear()
        batch = make_batch(rnn, input_grad=input_grad)
        compute_loss(*call_for_per_sample_grads(rnn)(batch.x), True).backward()
        take_grad_samples(rnn)
        assert len(computed) == layers


@each_kind
def test_the_same_shapes_with_other_options(kind: str) -> None:
    """The options of a layer are part of the cache key."""
    for options in ({"bias": True}, {"bias": False}, {"bidirectional": True}, {"bias": True}):
        rnn = build(kind, batch_first=True, **options)
        for states in ("none", "trained", "given"):
            for input_grad in (True, False):
                check(rnn, make_batch(rnn, states=states, input_grad=input_grad), batch_size=3)


@pytest.mark.parametrize(
    "kind", ["tanh", "relu", "gru", "projected"]
)  # torch has no autocast for a plain LSTM on a CPU
def test_autocast(kind: str) -> None:
    rnn = build(kind, num_layers=2, bidirectional=True, batch_first=True, dtype=torch.float32)
    batch = make_batch(rnn)
    if kind == "relu":  # keep its inputs away from 0, where rounding decides
        for tensor in (batch.x, *rnn.parameters()):
            tensor.data.abs_()
    with torch.autocast("cpu", torch.bfloat16):
        expected = rnn(batch.clone().x)
        result = call_for_per_sample_grads(rnn)(batch.x)
    assert_same_bits(result, expected)
    compute_loss(*result, True).backward()
    assert batch.x.grad is not None and batch.x.grad.dtype == torch.float32
    exact = build(kind, num_layers=2, bidirectional=True, batch_first=True)
    exact.load_state_dict({name: value.double() for name, value in rnn.state_dict().items()})
    rows = loop_over_rnn(exact, replace(batch, x=batch.x.detach().double()))
    found = {name: r.double() for name, r in take_grad_samples(rnn).items()}
    for name, want in rows.items():
        assert (found[name] - want).abs().max() <= 0.05 * want.abs().max(), name


class PackedPairs(nn.Module):
    """Two sequences of each sample in one PackedSequence."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.rnn = build(kind)

    def forward(self, x: Tensor) -> Tensor:
        lengths = [4, 3, 3, 2, 2, 1][: 2 * len(x)]
        output, _ = self.rnn(pack_padded_sequence(x.flatten(0, 1), lengths, batch_first=True))
        return pad_packed_sequence(output, batch_first=True)[0].unflatten(0, (len(x), 2)).flatten(1).sum(1)


@each_kind
@pytest.mark.parametrize("count", [1, 3])
def test_several_packed_sequences_per_sample_are_refused(kind: str, count: int) -> None:
    model = PackedPairs(kind)
    with (
        pytest.raises(persample.PerSampleError, match="several packed sequences of one sample"),
        persample.record(model),
    ):
        model(torch.randn(count, 2, 4, WIDTH, dtype=torch.float64))


# ---- single steps ----

STEPS: dict[str, tuple[Callable[..., Any], int]] = {
    "lstm": (torch.lstm_cell, 4),
    "gru": (torch.gru_cell, 3),
    "tanh": (torch.rnn_tanh_cell, 1),
    "relu": (torch.rnn_relu_cell, 1),
}


class Steps(nn.Module):
    """Two steps of a cell by its torch function, with or without each bias."""

    def __init__(self, kind: str, b_ih: bool, b_hh: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.func, gates = STEPS[kind]
        rows = gates * HIDDEN
        self.w_ih, self.w_hh = (nn.Parameter(torch.randn(rows, n, dtype=torch.float64)) for n in (WIDTH, HIDDEN))
        self.b_ih, self.b_hh = (
            nn.Parameter(torch.randn(rows, dtype=torch.float64)) if there else None for there in (b_ih, b_hh)
        )

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        state: Any = rows[:, :HIDDEN] * 0.5
        state = (state, state * 2) if self.func is torch.lstm_cell else state
        for _ in range(2):
            state = self.func(rows, state, self.w_ih, self.w_hh, self.b_ih, self.b_hh)
        parts = state if isinstance(state, tuple) else (state,)
        return sum((part.unflatten(0, x.shape[:2]) ** 2).flatten(1).sum(1) for part in parts)  # type: ignore[return-value]


@pytest.mark.parametrize("kind", STEPS)
@pytest.mark.parametrize("biases", [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize("each", [1, 2])
def test_single_steps(kind: str, biases: tuple[bool, bool], each: int) -> None:
    check_record(Steps(kind, *biases), torch.randn(3, each, WIDTH, dtype=torch.float64))


@pytest.mark.parametrize("part", [0, 1])
def test_a_loss_of_one_part_of_the_state_after_a_step(part: int) -> None:
    class Part(Steps):
        def forward(self, x: Tensor) -> Tensor:
            rows = x.flatten(0, 1)
            state = (rows[:, :HIDDEN], rows[:, 1 : 1 + HIDDEN])
            return (torch.lstm_cell(rows, state, self.w_ih, self.w_hh, self.b_ih, self.b_hh)[part] ** 2).sum(1)

    check_record(Part("lstm", True, True), torch.randn(3, 1, WIDTH, dtype=torch.float64))


# ---- bare ExpandedWeights ----


def make_bare_call(rnn: nn.RNNBase, batch: Batch, form: str, weights: Sequence[Tensor]) -> dict[str, Any]:
    """The arguments of the torch function by name, in order."""
    state: Any = batch.states if isinstance(rnn, nn.LSTM) else batch.states[0]
    common = {"hx": state, "params": list(weights), "has_biases": rnn.bias, "num_layers": rnn.num_layers}
    common |= {"dropout": rnn.dropout, "train": rnn.training, "bidirectional": rnn.bidirectional}
    if form == "tensor":
        input = batch.x if rnn.batch_first else batch.x.transpose(0, 1)
        return {"input": input} | common | {"batch_first": rnn.batch_first}
    sequence = pack(batch, form)
    return {"data": sequence.data, "batch_sizes": sequence.batch_sizes} | common


def compute_bare_loss(
    kind: str, rnn: nn.RNNBase, batch: Batch, form: str, how: str, weights: Sequence[Tensor]
) -> Tensor:
    call = make_bare_call(rnn, batch, form, weights)
    if how == "positional":
        result = FUNCTIONS[kind](*call.values())
    elif how == "keywords":
        result = FUNCTIONS[kind](**call)
    else:
        names = list(call)[2 if form == "tensor" else 3 :]
        first = [call[name] for name in call if name not in names]
        result = FUNCTIONS[kind](*first, **{name: call[name] for name in reversed(names)})
    output, *states = result
    if form != "tensor":
        output = PackedSequence(output, call["batch_sizes"])
    return compute_loss(output, tuple(states), rnn.batch_first)


def expand_weights(rnn: nn.RNNBase, batch_size: int, loss_reduction: str = "sum") -> list[Tensor]:
    weights = [p for part in rnn.all_weights for p in part]
    return [ExpandedWeight(w, batch_size, loss_reduction) if w.requires_grad else w for w in weights]


each_way_to_call = pytest.mark.parametrize("how", ["positional", "keywords", "reversed"])


@each_kind
@each_way_to_call
@pytest.mark.parametrize("form", ["tensor", "sorted"])
@pytest.mark.parametrize("states", ["given", "trained"])
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[-4], SHAPES[-3], SHAPES[-1]])
def test_bare_function(kind: str, how: str, form: str, states: str, shape: dict[str, Any]) -> None:
    rnn = build(kind, **shape)
    batch = make_batch(rnn, form, states=states)
    plain = batch.clone()
    compute_bare_loss(kind, rnn, plain, form, "positional", [p for part in rnn.all_weights for p in part]).backward()
    rnn.zero_grad(set_to_none=True)
    compute_bare_loss(kind, rnn, batch, form, how, expand_weights(rnn, len(batch))).backward()
    assert_rows_close(take_grad_samples(rnn), loop_over_rnn(rnn, batch.clone(), form))
    assert_same_grads(batch, plain, 1e-9)


@each_kind
@pytest.mark.parametrize("form", ["tensor", "sorted"])
def test_bare_function_with_a_mean_loss_and_a_frozen_weight(kind: str, form: str) -> None:
    rnn = build(kind, num_layers=2, bidirectional=True)
    rnn.weight_hh_l1.requires_grad_(False)
    batch = make_batch(rnn, form, states="given")
    loss = compute_bare_loss(kind, rnn, batch, form, "positional", expand_weights(rnn, len(batch), "mean"))
    (loss / len(batch)).backward()
    assert_rows_close(take_grad_samples(rnn), loop_over_rnn(rnn, batch, form))


@each_kind
def test_bare_function_in_float32_without_a_gradient_of_the_input(kind: str) -> None:
    rnn = build(kind, dtype=torch.float32)
    batch = make_batch(rnn, states="given", input_grad=False)
    compute_bare_loss(kind, rnn, batch, "tensor", "positional", expand_weights(rnn, len(batch))).backward()
    assert_rows_close(take_grad_samples(rnn), loop_over_rnn(rnn, batch), tolerance=1e-4)


@each_kind
@pytest.mark.parametrize("batch_first", [True, False], ids=["btd", "tbd"])
def test_bare_weights_with_batch_first_set(kind: str, batch_first: bool) -> None:
    rnn = build(kind, num_layers=2, batch_first=batch_first)
    batch = make_batch(rnn, states="given")
    weights = expand_weights(rnn, len(batch))
    for weight in weights:
        weight.set_batch_first(batch_first)
    compute_bare_loss(kind, rnn, batch, "tensor", "positional", weights).backward()
    assert_rows_close(take_grad_samples(rnn), loop_over_rnn(rnn, batch))


@each_kind
@each_state
@pytest.mark.parametrize("form", ["tensor", "sorted"])
def test_expanded_weights_swapped_into_a_module(kind: str, states: str, form: str) -> None:
    rnn = build(kind, **DEEP)
    batch = make_batch(rnn, form, states=states)
    weights = {name: ExpandedWeight(p, len(batch), "sum") for name, p in rnn.named_parameters()}
    result = torch.func.functional_call(rnn, weights, make_arguments(rnn, batch, form))
    compute_loss(*result, True).backward()
    assert_rows_close(take_grad_samples(rnn), loop_over_rnn(rnn, batch.clone(), form))


@each_kind
@pytest.mark.parametrize("form", ["tensor", "sorted"])
def test_bare_function_refuses_another_batch_size(kind: str, form: str) -> None:
    rnn = build(kind)
    message = "got input batch size of 3 with ExpandedWeight of batch size 4"
    with pytest.raises(RuntimeError, match=message):
        compute_bare_loss(kind, rnn, make_batch(rnn, form, states="given"), form, "positional", expand_weights(rnn, 4))


@each_kind
def test_bare_function_refuses_a_mixture_with_trainable_weights(kind: str) -> None:
    rnn = build(kind)
    weights = expand_weights(rnn, 3)
    weights[1] = rnn.weight_hh_l0
    with pytest.raises(RuntimeError, match="mixture of ExpandedWeight parameters and normal Parameters"):
        compute_bare_loss(kind, rnn, make_batch(rnn, states="given"), "tensor", "positional", weights)


@each_kind
def test_bare_function_refuses_different_reductions(kind: str) -> None:
    rnn = build(kind)
    weights = [*expand_weights(rnn, 3)[:1], *expand_weights(rnn, 3, "mean")[1:]]
    with pytest.raises(RuntimeError, match="to all have the same loss_reduction argument but got one with sum and one"):
        compute_bare_loss(kind, rnn, make_batch(rnn, states="given"), "tensor", "positional", weights)
