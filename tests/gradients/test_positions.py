"""Parts of positions, against a loop in which each use of a weight has a gradient at one position only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from persample import PerSampleError, record
from persample.testing.oracle import assert_rows_close, perturb
from tests.support.answers import check_answers
from tests.support.modules import flatten_rows

B, T, D, WORDS = 3, 5, 4, 7
Use = Callable[..., Tensor]


def use_plainly(func: Callable[..., Tensor], x: Tensor, *weights: Tensor, dim: int | None = 1) -> Tensor:
    return func(x, *weights)


def make_masked_use(position: int | None) -> Use:
    """A use whose weights have gradients from one position of its result; None: from uses without positions.

    The gradients of the activations are those of the whole result.
    """

    def use(func: Callable[..., Tensor], x: Tensor, *weights: Tensor, dim: int | None = 1) -> Tensor:
        out = func(x, *[w.detach() for w in weights])
        for_weights = func(x.detach(), *weights)
        mask = torch.zeros(for_weights.shape, dtype=out.dtype)
        if dim is None:
            mask += position is None
        elif position is not None:
            mask.select(dim, position).fill_(1)
        return out + (for_weights - for_weights.detach()) * mask

    return use


class Text(nn.Module):
    """`use` is called for each use of a weight, with the dimension of the positions in its result."""

    def __init__(self) -> None:
        super().__init__()
        self.use: Use = use_plainly
        self.words, self.places = nn.Embedding(WORDS, D), nn.Embedding(9, D)
        self.table = nn.Parameter(torch.randn(1, 9, D))
        self.norm, self.qkv, self.gain = nn.LayerNorm(D), nn.Linear(D, 3 * D), nn.Parameter(torch.ones(D))
        self.layers = nn.ModuleList([nn.Linear(D, D) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        use = self.use
        h = use(F.embedding, x, self.words.weight)
        h = use(lambda h, w: h + F.embedding(torch.arange(T), w), h, self.places.weight)
        h = use(lambda h, w: h + w[:, 1 : T + 1], h, self.table)
        normed = use(lambda h, w, b: F.layer_norm(h, (D,), w, b), h, self.norm.weight, self.norm.bias)
        q, k, v = use(F.linear, normed, self.qkv.weight, self.qkv.bias).chunk(3, -1)
        h = h + F.scaled_dot_product_attention(q, k, v)
        for layer in self.layers:
            h = h + use(F.linear, h.flatten(0, 1), layer.weight, layer.bias, dim=0).view_as(h).tanh()
        h = use(lambda h, w: h * w, h, self.gain)
        return use(lambda h, w: h @ w.T, h, self.words.weight)


class Pooled(nn.Module):
    def __init__(self, width: int = D) -> None:
        super().__init__()
        self.use: Use = use_plainly
        self.words, self.body = nn.Embedding(WORDS, D), nn.Linear(D, width)
        self.gain, self.head = nn.Parameter(torch.ones(width)), nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.use(F.embedding, x, self.words.weight)
        h = self.use(F.linear, h, self.body.weight, self.body.bias).tanh().mean(1)
        h = self.use(lambda h, w: h * w, h, self.gain, dim=None)
        return self.use(F.linear, h, self.head.weight, self.head.bias, dim=None)


def make_model(kind: Callable[[], nn.Module]) -> tuple[Any, Tensor]:
    torch.manual_seed(0)
    model = kind().double()
    perturb(model)
    return model, torch.randint(0, WORDS, (B, T))


def compute_loss(model: nn.Module, x: Tensor) -> Tensor:
    out = model(x).flatten(1)
    return (out.square().sum(1) + out.sin().sum(1)).mean()


def loop_positions(model: Any, x: Tensor, position: int | None) -> dict[str, Tensor]:
    """`{name: (batch, *shape)}`: the part of a position, or of uses without positions."""
    parameters = dict(model.named_parameters())
    rows: dict[str, list[Tensor]] = {name: [] for name in parameters}
    for n in range(B):
        model.use = make_masked_use(position)
        found = torch.autograd.grad(compute_loss(model, x[n : n + 1]), parameters.values(), allow_unused=True)
        for (name, p), grad in zip(parameters.items(), found, strict=True):
            rows[name].append(torch.zeros_like(p).detach() if grad is None else grad)
    model.use = use_plainly
    return {name: torch.stack(part) for name, part in rows.items()}


def test_parts_of_each_position() -> None:
    model, x = make_model(Text)
    with record(model, positions=T) as grads:
        compute_loss(model, x).backward()
    parts = grads.by_position()
    expected = [loop_positions(model, x, t) for t in range(T)]
    stacked = {name: torch.stack([part[name] for part in expected], 1) for name in expected[0]}
    found = parts.dense()
    assert_rows_close(
        {name: part.flatten(0, 1) for name, part in found.items()},
        {name: part.flatten(0, 1) for name, part in stacked.items()},
    )
    matrix = flatten_rows({name: part.flatten(0, 1) for name, part in stacked.items()}).view(B, T, -1)
    torch.testing.assert_close(parts.norms(), matrix.norm(dim=2))
    direction = {name: torch.randn_like(p).detach() for name, p in model.named_parameters()}
    products = matrix @ torch.cat([direction[name].flatten() for name in stacked])
    torch.testing.assert_close(parts.dot(direction), products)
    values, positions = parts.top(2, direction)
    torch.testing.assert_close(values, products.topk(2, 1).values)
    assert torch.equal(positions, products.topk(2, 1).indices)
    assert parts.rest == []
    check_answers(grads, {name: part.sum(1) for name, part in found.items()})  # the parts add up to the rows
    with record(model) as whole:
        compute_loss(model, x).backward()
    assert_rows_close({name: part.sum(1) for name, part in found.items()}, whole.dense())


@pytest.mark.parametrize("width", [D, T])  # as many features as positions, too
def test_uses_without_positions_are_the_rest(width: int) -> None:
    model, x = make_model(lambda: Pooled(width))
    with record(model, positions=T) as grads:
        compute_loss(model, x).backward()
    with pytest.raises(PerSampleError, match=r"\['gain', 'head.bias', 'head.weight'\] are used without"):
        grads.by_position()
    parts = grads.by_position(allow_rest=True)
    assert parts.rest == ["gain", "head.bias", "head.weight"]
    for t in range(T):
        assert_rows_close({name: part[:, t] for name, part in parts.dense().items()}, loop_positions(model, x, t))
    rest = loop_positions(model, x, None)
    assert_rows_close(parts.rest_dense(), rest)
    torch.testing.assert_close(parts.rest_norms(), flatten_rows(rest).norm(dim=1))
    direction = {name: torch.randn_like(p).detach() for name, p in model.named_parameters()}
    torch.testing.assert_close(parts.dot(direction).sum(1) + parts.rest_dot(direction), grads.dot(direction))


def test_units_and_positions() -> None:
    model, x = make_model(Text)
    with record(model, positions=T, units=[1, 0, 1]) as grads:
        compute_loss(model, x).backward()
    with record(model, units=[1, 0, 1]) as expected:
        compute_loss(model, x).backward()
    torch.testing.assert_close(grads.norms(), expected.norms())
    assert grads.by_position().norms().shape == (B, T)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(reentrant: bool) -> None:
    class Checkpointed(Text):
        def forward(self, x: Tensor) -> Tensor:
            h = F.embedding(x, self.words.weight)
            return checkpoint(lambda h: self.layers[0](self.norm(h)).tanh(), h, use_reentrant=reentrant)

    model, x = make_model(Checkpointed)
    with record(model, positions=T) as grads:
        compute_loss(model, x).backward()
    parts = {name: part.sum(1) for name, part in grads.by_position().dense().items()}
    with record(model) as whole:
        compute_loss(model, x).backward()
    assert_rows_close(parts, whole.dense())


def test_other_sizes_belong_to_no_position() -> None:
    model, x = make_model(Text)
    with record(model, positions=T + 1) as grads:
        compute_loss(model, x).backward()
    assert set(grads.by_position(allow_rest=True).rest) == {name for name, _ in model.named_parameters()}


def test_ambiguous_dimensions_belong_to_no_position() -> None:
    """Heads and positions of the same number: a norm of each head's features could be of either."""

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(D)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x)

    model, x = Heads().double(), torch.randn(B, T, T, D, dtype=torch.float64)
    with record(model, positions=T) as grads:
        model(x).square().sum().backward()
    with pytest.raises(PerSampleError, match=r"norm\.bias"):
        grads.by_position()


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_layers_are_named(kind: Any) -> None:
    model, x = kind(D, D, batch_first=True).double(), torch.randn(B, T, D, dtype=torch.float64)
    with record(model, positions=T) as grads:
        model(x)[0].square().sum().backward()
    with pytest.raises(PerSampleError, match="weight_hh_l0"):
        grads.by_position()


def test_positions_need_the_option() -> None:
    model, x = make_model(Text)
    with record(model) as grads:
        compute_loss(model, x).backward()
    with pytest.raises(PerSampleError, match="positions=T"):
        grads.by_position()
    with pytest.raises(PerSampleError, match="keep='everything'"), record(model, positions=T, keep="norms"):
        pass
