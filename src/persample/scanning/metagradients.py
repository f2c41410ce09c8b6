"""Exact influence on a whole training: the training is replayed backwards (metagradients; MAGIC, Ilyas et al., 2025).

The training is a function of the weights `w` of its examples: step t minimises the mean over its batch of `w_i` times
the loss of example i. Its derivative at `w = 1` is computed in reverse, one step at a time, from the states between the
steps. Every k-th state is kept, for k near the root of the number of steps, and those in between are computed again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import Optimizer

from persample._internal.rng import seed_all
from persample._internal.state import preserve_state
from persample.losses import LossFunction, compute_sample_losses
from persample.scanning.errors import ScanError
from persample.scanning.source import Source, move_to_device
from persample.scanning.updates import State, make_update

# A training counts as smooth from this value on: docs/guides/attribution.md.
LEAST_SMOOTHNESS = 0.4


@dataclass(frozen=True)
class Replay:
    """What `replay` found.

    Attributes:
        scores: `(queries, examples)`: minus the derivative of each query's loss after the training with respect to the
            weight of an example. More weight on an example with a positive score lowers the loss of the query.
        losses: `(steps,)`: the mean loss of the batch of each step.
        state: the trained parameters, by name.
    """

    scores: Tensor
    losses: Tensor
    state: Mapping[str, Tensor]


@dataclass(frozen=True)
class Smoothness:
    """Whether derivatives of a training predict what other weights of its examples do.

    Attributes:
        value: from -1 to 1: how well the change by one step of the weights predicts the change by the next step, for
            the losses of the queries; 1 for a training that is linear in the weights, near 0 for a chaotic one.
        of_parameters: the same for the trained parameters.
    """

    value: float
    of_parameters: float

    @property
    def advice(self) -> str:
        """Which method fits this training."""
        if self.value >= LEAST_SMOOTHNESS:
            return "smooth: the derivative that replay() computes holds for other weights, too"
        return (
            "not smooth: the derivative of this one training says little about others. Average over checkpoints or "
            "trainings (score or scan with checkpoints), or train with a lower learning rate, larger batches or more "
            "steps of warm-up"
        )


def replay(
    model: nn.Module,
    loss_fn: LossFunction,
    data: Any,
    queries: Any,
    *,
    optimizer: Optimizer,
    batches: Sequence[Sequence[int]],
    rates: Sequence[float] | None = None,
    seed: int = 0,
) -> Replay:
    """Train a model, and compute the derivative of the losses of queries with respect to the weight of each example.

    >>> model = nn.Linear(3, 2)
    >>> x, y = torch.randn(20, 3), torch.randint(2, (20,))
    >>> optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    >>> batches = torch.arange(20).view(5, 4).tolist()
    >>> replay(model, nn.CrossEntropyLoss(), (x, y), (x[:2], y[:2]), optimizer=optimizer, batches=batches).scores.shape
    torch.Size([2, 20])

    It costs about three times the training for the first query, and about twice for each further one. The model keeps
    its weights: those of the training are in `Replay.state`.

    Args:
        model: with the weights at the start of the training, in the mode in which it is trained. Buffers must not
            change in the training, as those of BatchNorm do.
        loss_fn: as for `scan`; it must return one loss per sample.
        data: the training data, as for `scan`.
        queries: a batch of samples with their targets.
        optimizer: SGD, Adam or AdamW on the parameters of the model, for its options. Its state counts as new.
        batches: the ids of the examples of each step, in the order of the training.
        rates: the learning rate of each step, if it changes; it replaces that of all parameter groups.
        seed: step t draws its random numbers, such as those of dropout, from this seed and t.
    """
    training = _Training(model, loss_fn, data, optimizer, batches, rates, seed)
    with _prepare(model):
        stride = max(1, math.isqrt(len(batches)))
        kept, losses = training.run(training.start(), 0, len(batches), stride, torch.ones(training.size))
        final = kept[len(batches)]
        cotangents, scores = training.differentiate_queries(final, queries)
        end = len(batches)
        for start in sorted((t for t in kept if t < end), reverse=True):
            states, _ = training.run(kept[start], start, end, 1, torch.ones(training.size))
            _check_same(states[end], kept[end])
            for step in range(end - 1, start - 1, -1):
                cotangents = training.reverse(states[step], step, cotangents, scores)
            end = start
    return Replay(scores, torch.stack(losses), training.name(final))


def measure_smoothness(
    model: nn.Module,
    loss_fn: LossFunction,
    data: Any,
    queries: Any,
    *,
    optimizer: Optimizer,
    batches: Sequence[Sequence[int]],
    rates: Sequence[float] | None = None,
    seed: int = 0,
    directions: int = 2,
    size: float = 0.1,
) -> Smoothness:
    """Whether influence can predict a training: metasmoothness (Engstrom et al., 2025).

    It takes one training, and two for each direction.

    >>> model = nn.Linear(3, 2)
    >>> x, y = torch.randn(20, 3), torch.randint(2, (20,))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    >>> batches = torch.arange(20).view(5, 4).tolist()
    >>> measure_smoothness(
    ...     model, nn.CrossEntropyLoss(), (x, y), (x[:2], y[:2]), optimizer=optimizer, batches=batches
    ... ).value > 0.9
    True

    Args:
        directions: random directions, in each of which the weight of every example goes up or down.
        size: the size of the two steps in a direction.
    """
    training = _Training(model, loss_fn, data, optimizer, batches, rates, seed)
    generator = torch.Generator().manual_seed(seed)
    values: list[tuple[float, float]] = []
    with _prepare(model):
        before = training.train(torch.ones(training.size), queries)
        for _ in range(directions):
            signs = torch.randint(2, (training.size,), generator=generator) * 2.0 - 1
            ends = [training.train(1 + k * size * signs, queries) for k in (1, 2)]
            one, other = ([b - a for a, b in zip(*pair, strict=True)] for pair in ((before, ends[0]), ends))
            values.append((_compare_signs(one[0], other[0]), _compare_signs(one[1], other[1])))
    means = torch.tensor(values, dtype=torch.float64).mean(0).tolist()
    return Smoothness(*means)


def _compare_signs(one: Tensor, other: Tensor) -> float:
    """The mean agreement of signs, weighted by the sizes of the first."""
    weights = one.abs() / one.abs().sum().clamp(min=torch.finfo(one.dtype).tiny)
    return float((one.sign() * other.sign() * weights).sum())


class _Training:
    """A training as a function of the weights of its examples."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction,
        data: Any,
        optimizer: Optimizer,
        batches: Sequence[Sequence[int]],
        rates: Sequence[float] | None,
        seed: int,
    ) -> None:
        source = Source(data)
        if source.size is None or not batches:
            raise ScanError("A replay needs a dataset with a length, and the batches of at least one step.")
        if rates is not None and len(rates) != len(batches):
            raise ScanError(f"Got {len(rates)} learning rates for {len(batches)} batches.")
        self._model, self._loss_fn, self._source, self._seed = model, loss_fn, source, seed
        self._batches, self._rates, self.size = batches, rates, source.size
        self._update = make_update(optimizer, dict(model.named_parameters()))
        self._names = self._update.names
        self._fixed = {name: p.detach() for name, p in model.named_parameters() if name not in self._names}
        self._buffers = dict(model.named_buffers())
        self._unused: list[bool] | None = None  # the parameters without a gradient

    def start(self) -> State:
        """The state before the first step."""
        weights = dict(self._model.named_parameters())
        return self._update.start([weights[name].detach().clone() for name in self._names])

    def name(self, state: State) -> dict[str, Tensor]:
        """The parameters of a state, by name."""
        return dict(zip(self._names, state[0], strict=True))

    def run(
        self, state: State, start: int, end: int, stride: int, weights: Tensor
    ) -> tuple[dict[int, State], list[Tensor]]:
        """Take some steps; return the states at multiples of the stride, the last one, and the losses."""
        kept, losses = {start: state}, []
        for step in range(start, end):
            chosen = weights[list(self._batches[step])]
            state, loss = self.step(state, step, chosen, is_differentiable=False)
            losses.append(loss)
            if (step + 1) % stride == 0 or step + 1 == end:
                kept[step + 1] = state
        return kept, losses

    def step(self, state: State, step: int, weights: Tensor, is_differentiable: bool) -> tuple[State, Tensor]:
        """The state after a step, and the mean loss of its batch."""
        parameters = state[0] if is_differentiable else [p.detach().requires_grad_() for p in state[0]]
        ids = list(self._batches[step])
        examples = self._source.read_examples(ids)
        seed_all(self._seed + step)
        losses = self._compute_losses(parameters, self._source.collate([examples[i] for i in ids]), len(ids))
        loss = (losses * weights.to(losses)).mean()
        grads = torch.autograd.grad(loss, parameters, create_graph=is_differentiable, allow_unused=True)
        unused = [grad is None for grad in grads]
        if self._unused is not None and unused != self._unused:
            name = self._names[[a != b for a, b in zip(unused, self._unused, strict=True)].index(True)]
            raise ScanError(f"{name!r} has a gradient in some steps only, which a replay has no formula for.")
        self._unused = unused
        rate = None if self._rates is None else self._rates[step]
        after = self._update.apply((parameters, *state[1:]), grads, step, rate)
        return (after if is_differentiable else _detach(after)), losses.detach().mean()

    def train(self, weights: Tensor, queries: Any) -> tuple[Tensor, Tensor]:
        """The losses of the queries after a training with these weights, and the trained parameters as one row."""
        count = len(self._batches)
        kept, _ = self.run(self.start(), 0, count, count, weights)
        with torch.no_grad():
            losses = self._compute_query_losses(kept[count][0], queries)
        return losses.double(), torch.cat([p.flatten() for p in kept[count][0]]).double()

    def differentiate_queries(self, state: State, queries: Any) -> tuple[list[State], Tensor]:
        """For each query the derivatives of its loss in the state, and scores that are zero."""
        parameters = [p.detach().requires_grad_() for p in state[0]]
        losses = self._compute_query_losses(parameters, queries)
        found: list[State] = []
        for k, loss in enumerate(losses):
            grads = torch.autograd.grad(loss, parameters, retain_graph=k + 1 < len(losses), allow_unused=True)
            own = [torch.zeros_like(p) if grad is None else grad for p, grad in zip(parameters, grads, strict=True)]
            found.append((own, *([torch.zeros_like(part) for part in parts] for parts in state[1:])))
        return found, torch.zeros(len(losses), self.size, dtype=torch.float64)

    def reverse(self, state: State, step: int, cotangents: Sequence[State], scores: Tensor) -> list[State]:
        """The derivatives in the state before a step from those after it. Those in the weights are added to scores."""
        before = tuple([part.detach().requires_grad_() for part in parts] for parts in state)
        ids = torch.tensor(list(self._batches[step]))
        weights = torch.ones(len(ids), requires_grad=True)
        after, _ = self.step(before, step, weights, is_differentiable=True)
        inputs = [part for parts in before for part in parts]
        outputs = [part for parts in after for part in parts]
        found: list[State] = []
        for k, cotangent in enumerate(cotangents):
            given = [part for parts in cotangent for part in parts]
            pairs = [(out, part) for out, part in zip(outputs, given, strict=True) if out.requires_grad]
            *own, of_weights = torch.autograd.grad(
                [out for out, _ in pairs], [*inputs, weights], [part for _, part in pairs],
                retain_graph=k + 1 < len(cotangents), allow_unused=True,
            )  # fmt: skip
            if of_weights is not None:
                scores[k].index_add_(0, ids, -of_weights.double().cpu())
            filled = [torch.zeros_like(p) if grad is None else grad for p, grad in zip(inputs, own, strict=True)]
            count = len(self._names)
            found.append(tuple(filled[i : i + count] for i in range(0, len(filled), count)))
        return found

    def _compute_query_losses(self, parameters: Sequence[Tensor], queries: Any) -> Tensor:
        modes = {module: module.training for module in self._model.modules()}
        self._model.eval()
        try:
            return self._compute_losses(parameters, queries, None)
        finally:
            for module, is_training in modes.items():
                module.train(is_training)  # parents come before their children

    def _compute_losses(self, parameters: Sequence[Tensor], batch: Any, count: int | None) -> Tensor:
        """`(batch,)`: the losses with these parameters."""
        buffers = {name: buffer.clone() for name, buffer in self._buffers.items()}
        given = {**self._fixed, **dict(zip(self._names, parameters, strict=True)), **buffers}

        def call(*args: Any, **kwargs: Any) -> Any:
            return torch.func.functional_call(self._model, given, args, kwargs)

        batch = move_to_device(batch, parameters[0].device)
        losses = compute_sample_losses(call, batch, self._loss_fn)  # type: ignore[arg-type]
        if not isinstance(losses, Tensor) or losses.dim() != 1 or (count is not None and len(losses) != count):
            raise ScanError("A replay needs a loss function that returns one loss per sample.")
        if any(not torch.equal(given[name], buffer) for name, buffer in self._buffers.items()):
            raise ScanError(
                "The training changes buffers of the model, such as the statistics of BatchNorm, which a replay does "
                "not differentiate. Use GroupNorm or LayerNorm, or put these layers in eval() mode."
            )
        return losses


@contextmanager
def _prepare(model: nn.Module) -> Iterator[None]:
    """Restore buffers and random numbers; use attention that can be differentiated twice."""
    with preserve_state(model), torch.inference_mode(False), torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        yield


def _check_same(found: State, expected: State) -> None:
    """Raise unless steps that were taken again gave the same bits."""
    for one, other in zip(found, expected, strict=True):
        if not all(torch.equal(a, b) for a, b in zip(one, other, strict=True)):
            raise ScanError(
                "The training is not deterministic: steps that were taken again gave other weights. Make the model, "
                "the loss and the data deterministic: torch.use_deterministic_algorithms(True) names random kernels."
            )


def _detach(state: State) -> State:
    return tuple([part.detach() for part in parts] for parts in state)
