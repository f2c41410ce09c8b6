"""Models and losses for the tests of torch.compile, and the comparison of a compiled step with the loop."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import persample
from persample.testing.oracle import assert_rows_close, perturb, stack_gradients
from tests.support.modules import flatten_rows

B = 4
Rows = dict[str, Tensor]


def compute_rows(model: nn.Module, loss_fn: Callable[..., Tensor], *args: Tensor) -> Rows:
    """Per-sample gradients by a loop over the samples with plain autograd."""
    losses = (loss_fn(model, *(arg[n : n + 1] for arg in args)) for n in range(len(args[0])))
    return stack_gradients(losses, dict(model.named_parameters()))


def clip(rows: Rows, limit: float) -> Rows:
    norms = flatten_rows(rows).norm(dim=1)
    factors = (limit / norms).clamp(max=1)
    return {name: torch.tensordot(factors, r, 1) for name, r in rows.items()}


def make_mlp() -> nn.Module:
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    perturb(model)
    return model


def make_batch() -> tuple[Tensor, Tensor]:
    return torch.randn(B, 5).double(), torch.randint(3, (B,))


def compute_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def compute_token_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


# ---- whole steps ----


def make_traced_step(model: nn.Module, loss_fn: Any, *args: Tensor, **options: Any) -> Any:
    """A compiled step that was traced with zeros."""
    step = persample.compile(
        model, loss_fn, lambda grads: (grads.dense(), grads.norms(), grads.clip(1.0)), **{"backend": "eager", **options}
    )
    step(*(torch.zeros_like(arg) for arg in args))
    return step


def check_step(model: nn.Module, loss_fn: Any, *args: Tensor, **options: Any) -> Any:
    """Compare a compiled step with the loop, for values that it was not traced with; nothing else may change."""
    step = make_traced_step(model, loss_fn, *args, **options)
    plain = (lambda m, x, y: loss_fn(m(x), y)) if isinstance(loss_fn, nn.Module) else loss_fn
    before = copy.deepcopy(model.state_dict())
    rng_state = torch.get_rng_state()
    for _ in range(2):
        expected = compute_rows(model, plain, *args)
        loss, (rows, norms, sums) = step(*args)
        assert_rows_close(rows, expected)
        torch.testing.assert_close(norms, flatten_rows(expected).norm(dim=1))
        for name, want in clip(expected, 1.0).items():
            torch.testing.assert_close(sums[name], want)
        torch.testing.assert_close(loss, plain(model, *args).detach())
        assert not loss.requires_grad
        args = tuple(arg.roll(1, 0) if not arg.is_floating_point() else arg * 0.9 for arg in args)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(p.grad is None and isinstance(p, nn.Parameter) and type(p.data) is Tensor for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), rng_state)
    assert not any(m._forward_pre_hooks for m in model.modules())
    assert "graphs: 1" in repr(step)
    return step


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        wide = 2 * width
        self.mix = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, wide), nn.GELU(), nn.Linear(wide, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mix(x)


class GPT(nn.Module):
    """A language model with position embeddings and a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(11, 8), nn.Embedding(6, 8)
        self.block, self.norm = Block(8), nn.LayerNorm(8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        return self.head(self.norm(self.block(x)))


class LastStep(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.recurrent, self.head = kind(5, 6, batch_first=True), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.recurrent(x)[0][:, -1])


class Vision(nn.Module):
    """A vision transformer with a class token."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.token = nn.Conv2d(2, 8, 4, 4), nn.Parameter(torch.randn(1, 1, 8))
        self.block, self.head = Block(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.patches(x).flatten(2).mT
        return self.head(self.block(torch.cat([self.token.expand(len(x), -1, -1), patches], 1))[:, 0])


def make_cnn() -> nn.Module:
    first = [nn.Conv2d(2, 8, 3, padding=1), nn.GroupNorm(4, 8), nn.ReLU(), nn.AvgPool2d(2)]
    return nn.Sequential(*first, nn.Conv2d(8, 8, 3, groups=2), nn.ReLU(), nn.Flatten(), nn.Linear(32, 3))


def make_transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Embedding(11, 8), nn.TransformerEncoder(layer, 1), nn.Linear(8, 11))


def make_weight_norm() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(5, 8)), nn.ReLU(), nn.Linear(8, 3))


IMAGES = lambda: (torch.randn(B, 2, 8, 8).double(), torch.randint(3, (B,)))  # noqa: E731
SERIES = lambda: (torch.randn(B, 6, 5).double(), torch.randint(3, (B,)))  # noqa: E731
TOKENS = lambda: (torch.randint(11, (B, 6)), torch.randint(11, (B, 6)))  # noqa: E731

MODELS: dict[str, tuple[Callable[[], nn.Module], Any, Any]] = {
    "MLP": (make_mlp, make_batch, nn.CrossEntropyLoss()),
    "CNN with GroupNorm": (make_cnn, IMAGES, compute_loss),
    "GPT, tied": (GPT, TOKENS, compute_token_loss),
    "LSTM": (lambda: LastStep(nn.LSTM), SERIES, compute_loss),
    "GRU": (lambda: LastStep(nn.GRU), SERIES, compute_loss),
    "class token": (Vision, IMAGES, compute_loss),
    "TransformerEncoder": (make_transformer, TOKENS, compute_token_loss),
    "weight norm": (make_weight_norm, make_batch, compute_loss),
    "compiled already": (lambda: torch.compile(make_mlp(), backend="eager"), make_batch, compute_loss),
}


def build(name: str) -> tuple[nn.Module, Any, Any]:
    make, data, loss_fn = MODELS[name]
    model = make().double()
    perturb(model)
    return model, data(), loss_fn


COMPILER = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="inductor needs a C++ compiler"
)
