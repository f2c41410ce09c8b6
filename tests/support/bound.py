"""How much one sample can change the private sum: adversarial models and data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from persample.gradients import StreamedClip
from persample.private import PrivateOptimizer

Loss = Callable[[nn.Module], Tensor]


class NotingOptimizer(PrivateOptimizer):
    """Notes the clipped sum of the last backward pass as it is: `p.grad` may have fewer digits."""

    clipped: dict[str, Tensor]

    def _receive(self, grads: StreamedClip) -> None:
        self.clipped = grads.clip(own=True)
        super()._receive(grads)


def compute_private_sum(module: nn.Module, loss: Loss, bound: Any = 1.0, **options: Any) -> Tensor:
    """The clipped sum before noise, in float64, as one vector of real numbers."""
    optimizer = NotingOptimizer(
        torch.optim.SGD(module.parameters(), lr=0.0),
        module=module,
        noise_multiplier=0.0,
        max_grad_norm=bound,
        expected_batch_size=1,
        **options,
    )
    optimizer.zero_grad()
    try:
        loss(module).backward()
    finally:
        optimizer.release()
    sums = [optimizer.clipped[name] for name, _ in module.named_parameters()]
    assert all(part.dtype not in (torch.float16, torch.bfloat16) for part in sums)
    return torch.cat([(torch.view_as_real(part) if part.is_complex() else part).double().flatten() for part in sums])


class Net(nn.Module):
    """`forward(x)` is `function(self, x)`; the keyword arguments are modules and parameters."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor], **members: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.function = function
        for name, member in members.items():
            setattr(self, name, member)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def _matrix(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape) / shape[-1] ** 0.5)


D, T = 6, 4  # width and positions of the small models


def _flip(x: Tensor) -> Tensor:
    """1 for even positions, -1 for odd ones, to broadcast over `(batch, positions, width)`."""
    return torch.tensor([1.0, -1.0]).repeat(x.shape[1])[: x.shape[1], None].to(x.dtype)


def _make_ids(x: Tensor, count: int) -> Tensor:
    return (x.abs() * 10).nan_to_num(0, 0, 0).long() % count


# Each model takes (batch, T, D) and returns (batch, T, outputs).
MODELS: dict[str, Callable[[], nn.Module]] = {
    "linear, ghost norms": lambda: nn.Linear(D, 64),
    "linear, dense norms": lambda: nn.Linear(D, 2),
    "two layers": lambda: nn.Sequential(nn.Linear(D, 32), nn.Tanh(), nn.Linear(32, 8)),
    "1x1 convolution": lambda: Net(lambda m, x: m.c(x.mT).mT, c=nn.Conv1d(D, 40, 1)),
    "convolution": lambda: Net(lambda m, x: m.c(x.mT).mT, c=nn.Conv1d(D, 64, 3, padding=1)),
    "depthwise": lambda: Net(lambda m, x: m.c(x.mT).mT, c=nn.Conv1d(D, D, 3, padding=1, groups=D)),
    "opposite signs": lambda: Net(lambda m, x: F.linear(x, m.w) - F.linear(x * 1.0001, m.w), w=_matrix(32, D)),
    "W and its transpose": lambda: Net(lambda m, x: F.linear(x, m.w) - F.linear(x, m.w.t()), w=_matrix(D, D)),
    "W, then its transpose": lambda: Net(lambda m, x: F.linear(F.linear(x, m.w), m.w.t()), w=_matrix(24, D)),
    "derived weight": lambda: Net(lambda m, x: F.linear(x, m.w * m.s), w=_matrix(16, D), s=_matrix(16, 1)),
    "parts of a weight": lambda: Net(lambda m, x: F.linear(x, m.w[:9]) - F.linear(x, m.w[9:]), w=_matrix(18, D)),
    "einsum": lambda: Net(lambda m, x: torch.einsum("bti,oi->bto", x, m.w), w=_matrix(20, D)),
    "norm": lambda: nn.Sequential(nn.LayerNorm(D), nn.Linear(D, 16)),
    "elementwise": lambda: Net(lambda m, x: (x * m.w + m.v) * _flip(x), w=_matrix(D), v=_matrix(D)),
    "recurrent": lambda: Net(lambda m, x: m.r(x)[0], r=nn.LSTM(D, 12, batch_first=True)),
    "tied embedding": lambda: Net(
        lambda m, x: F.linear(m.e(_make_ids(x * 100, 7))[:, :, 0] * x[..., :1], m.e.weight), e=nn.Embedding(7, 16)
    ),
    "embedding": lambda: Net(lambda m, x: m.e(_make_ids(x, 3))[:, :, 0] * x, e=nn.Embedding(3, D)),
}  # fmt: skip

LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "squares": lambda y, z: (y - z).square().flatten(1).sum(1),
    "linear": lambda y, z: (y * z).flatten(1).sum(1),
    "cross entropy": lambda y, z: F.cross_entropy(y.mT, z.argmax(-1), reduction="none").sum(1) * z.abs().amax((1, 2)),
}

OPTIONS: dict[str, dict[str, Any]] = {
    "one pass": {},
    "two passes": {"recording": {"passes": 2}},
    "automatic": {"clipping": "automatic"},
    "automatic, two passes": {"clipping": "automatic", "recording": {"passes": 2}},
    "per layer": {"clipping": "per_layer"},
}

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64, "float16": torch.float16}


def measure_change(
    model: str,
    loss: str,
    options: str,
    dtype: str,
    seed: int,
    *,
    scale: float,
    target: float,
    repeat: float,
    others: int,
) -> float:
    """The change of the private sum by one sample, as a multiple of the bound.

    The positions of the sample are nearly equal (`repeat` is their relative difference) with targets of opposite signs,
    so that what they contribute to the gradient cancels. `scale` and `target` are the sizes of its entries and targets.
    """
    torch.manual_seed(seed)
    module = MODELS[model]().to(DTYPES[dtype])
    kind = OPTIONS[options]
    count = len(list(module.parameters()))
    per_layer = kind.get("clipping") == "per_layer"
    bound = [1.0 / count**0.5] * count if per_layer else 1.0
    x = torch.randn(others + 1, T, D)
    x[0] = x[0, :1].expand(T, D) * (1 + repeat * torch.randn(T, 1)) * scale
    with torch.no_grad():
        y = module(x.to(DTYPES[dtype])).float()
    z = torch.randn_like(y)
    z[0] = torch.randn_like(y[0, :1]) * target * _flip(x) + (y[0].nan_to_num(0, 0, 0) if loss == "squares" else 0)
    x, z = x.to(DTYPES[dtype]), z.to(DTYPES[dtype])

    def compute(start: int) -> Tensor:
        def compute_loss(m: nn.Module) -> Tensor:
            return LOSSES[loss](m(x[start:]).float(), z[start:].float()).sum()

        return compute_private_sum(module, compute_loss, bound, loss_reduction="sum", **kind)

    with_sample = compute(0)
    without = compute(1) if others else torch.zeros_like(with_sample)
    return float((with_sample - without).norm())
