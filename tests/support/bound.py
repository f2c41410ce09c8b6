"""How much one sample can change the private sum: adversarial models and data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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

    def _count_samples(self, grads: StreamedClip) -> dict[int, Tensor]:
        self.clipped = grads.clip(own=True)
        return super()._count_samples(grads)


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

# Positions and width of the input.
SIZES = {"small": (T, D), "one position": (1, D), "wide": (2, 514), "long": (150, 4), "medium": (33, 16)}


def _alternate(count: int) -> Tensor:
    """1 for even positions, -1 for odd ones, to broadcast over `(batch, positions, width)`."""
    return torch.tensor([1.0, -1.0]).repeat(count)[:count, None]


def _make_ids(x: Tensor, count: int) -> Tensor:
    return (x.float().abs() * 10).nan_to_num(0, 0, 0).clamp(max=1e9).long() % count


def _conv(layer: nn.Module) -> Net:
    """A layer of `(batch, channels, positions)`."""
    return Net(lambda m, x: m.c(x.mT).mT, c=layer)


def _image(**layers: nn.Module) -> Net:
    """Layers of images with one channel: `(batch, 1, positions, width)`."""

    def forward(m: Any, x: Tensor) -> Tensor:
        x = x.unsqueeze(1)
        for name in layers:
            x = getattr(m, name)(x)
        return x.flatten(2).mT

    return Net(forward, **layers)


class _Merged(nn.Module):
    """A weight with a low-rank update."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.w, self.a, self.b = _matrix(16, width), _matrix(2, width), _matrix(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.w + self.b @ self.a)


# Each model takes (batch, t, d) and returns (batch, positions, outputs).
MODELS: dict[str, Callable[[int, int], nn.Module]] = {
    "linear, ghost norms": lambda t, d: nn.Linear(d, 64),
    "linear, dense norms": lambda t, d: nn.Linear(d, 2),
    "two layers": lambda t, d: nn.Sequential(nn.Linear(d, 32), nn.Tanh(), nn.Linear(32, 8)),
    "layers of one shape": lambda t, d: nn.Sequential(*(nn.Linear(d, d) for _ in range(3))),
    "1x1 convolution": lambda t, d: _conv(nn.Conv1d(d, 40, 1)),
    "convolution": lambda t, d: _conv(nn.Conv1d(d, 64, 3, padding=1)),
    "dilated convolution": lambda t, d: _conv(nn.Conv1d(d, 8, 3, stride=2, padding=2, dilation=2)),
    "transposed convolution": lambda t, d: _conv(nn.ConvTranspose1d(d, 8, 3, stride=2, padding=1, output_padding=1)),
    "depthwise": lambda t, d: _conv(nn.Conv1d(d, d, 3, padding=1, groups=d)),
    "images": lambda t, d: _image(a=nn.Conv2d(1, 8, 3, padding=1), b=nn.ReLU(), c=nn.Conv2d(8, 16, 3, padding="same")),
    "grouped convolution": lambda t, d: _image(a=nn.Conv2d(1, 8, 1), b=nn.Conv2d(8, 16, 3, padding=1, groups=4)),
    "depthwise images": lambda t, d: _image(a=nn.Conv2d(1, 4, 1), b=nn.Conv2d(4, 8, 5, padding=2, groups=4)),
    "opposite signs": lambda t, d: Net(lambda m, x: F.linear(x, m.w) - F.linear(x * 1.0001, m.w), w=_matrix(32, d)),
    "reused layer": lambda t, d: Net(lambda m, x: m.l(m.l(x).tanh()) - m.l(x.flip(1)), l=nn.Linear(d, d)),
    "W and its transpose": lambda t, d: Net(lambda m, x: F.linear(x, m.w) - F.linear(x, m.w.t()), w=_matrix(d, d)),
    "W, then its transpose": lambda t, d: Net(lambda m, x: F.linear(F.linear(x, m.w), m.w.t()), w=_matrix(24, d)),
    "W and a derived weight": lambda t, d: Net(lambda m, x: F.linear(x, m.w) - x @ (m.w * 1.01).t(), w=_matrix(12, d)),
    "derived weight": lambda t, d: Net(lambda m, x: F.linear(x, m.w * m.s), w=_matrix(16, d), s=_matrix(16, 1)),
    "weight norm": lambda t, d: nn.utils.parametrizations.weight_norm(nn.Linear(d, 16)),
    "low-rank update": lambda t, d: _Merged(d),
    "adapter": lambda t, d: Net(
        lambda m, x: m.b(m.a(x)), a=nn.Linear(d, 2, bias=False), b=nn.Linear(2, 16, bias=False)
    ),
    "parts of a weight": lambda t, d: Net(lambda m, x: F.linear(x, m.w[:9]) - F.linear(x, m.w[9:]), w=_matrix(18, d)),
    "einsum": lambda t, d: Net(lambda m, x: torch.einsum("bti,oip->btop", x, m.w).flatten(2), w=_matrix(5, d, 3)),
    "a matrix for each position": lambda t, d: Net(
        lambda m, x: torch.einsum("bti,toi->bto", x, m.w), w=_matrix(t, 4, d)
    ),
    "product over positions": lambda t, d: Net(lambda m, x: m.w @ x, w=_matrix(7, t)),
    "bilinear": lambda t, d: Net(
        lambda m, x: m.b(x[..., :8], x.flip(1)[..., :8]), b=nn.Bilinear(min(d, 8), min(d, 8), 3)
    ),
    "norm": lambda t, d: nn.Sequential(nn.LayerNorm(d), nn.Linear(d, 16)),
    "group norm": lambda t, d: Net(lambda m, x: m.g(m.c(x.mT)).mT, c=nn.Conv1d(d, 8, 1), g=nn.GroupNorm(2, 8)),
    "elementwise": lambda t, d: Net(
        lambda m, x: (x * m.w + m.v) * _alternate(x.shape[1]).to(x.dtype), w=_matrix(d), v=_matrix(d)
    ),
    "attention": lambda t, d: Net(
        lambda m, x: m.a(x, x, x, need_weights=False)[0], a=nn.MultiheadAttention(d, 2, batch_first=True)
    ),
    "LSTM": lambda t, d: Net(lambda m, x: m.r(x)[0], r=nn.LSTM(d, 12, batch_first=True)),
    "GRU, two directions": lambda t, d: Net(
        lambda m, x: m.r(x)[0], r=nn.GRU(d, 5, batch_first=True, bidirectional=True)
    ),
    "cell": lambda t, d: Net(
        lambda m, x: torch.stack([m.r(x[:, i], m.r(x[:, i - 1])) for i in range(min(4, x.shape[1]))], 1),
        r=nn.GRUCell(d, 6),
    ),
    "tied embedding": lambda t, d: Net(
        lambda m, x: F.linear(m.e(_make_ids(x * 100, 7))[:, :, 0] * x[..., :1], m.e.weight), e=nn.Embedding(7, 16)
    ),
    "embedding": lambda t, d: Net(lambda m, x: m.e(_make_ids(x, 3))[:, :, 0] * x, e=nn.Embedding(3, d)),
    "embedding, one id": lambda t, d: Net(lambda m, x: m.e(_make_ids(x, 3) * 0)[:, :, 0] * x, e=nn.Embedding(3, d)),
    "bag": lambda t, d: Net(lambda m, x: (m.e(_make_ids(x, 5).flatten(1)) * x[:, 0])[:, None], e=nn.EmbeddingBag(5, d)),
}

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
AUTOCAST = "autocast"  # float32 parameters, with bfloat16 inside the model

# How the positions of the adversarial sample differ.
PATTERNS = ("equal", "alternating", "constant", "one is large", "many sizes", "random")


def _make_positions(pattern: str, count: int, width: int, repeat: float) -> Tensor:
    """`(count, width)`: numbers for each position. `repeat` is the relative difference of positions that are equal."""
    if pattern == "random":
        return torch.randn(count, width)
    if pattern == "many sizes":
        return torch.randn(count, width) * 10 ** torch.empty(count, 1).uniform_(-6, 6)
    if pattern == "one is large":
        return torch.randn(count, width) * torch.tensor([1.0] + [1e-6] * (count - 1))[:, None]
    first = torch.ones(1, width) if pattern == "constant" else torch.randn(1, width)
    equal = first * (1 + repeat * torch.randn(count, 1))
    return equal * _alternate(count) if pattern == "alternating" else equal


@dataclass(frozen=True)
class Attempt:
    """A model, a loss and an adversarial sample; `measure_change` tells how much it changes the private sum.

    By default the positions of the sample are nearly equal (`repeat` is their relative difference) with targets of
    opposite signs, so that what they contribute to the gradient cancels. `scale` and `target` are the sizes of its
    entries and targets, `others` is the number of ordinary samples.
    """

    model: str
    loss: str
    options: str
    dtype: str
    seed: int
    scale: float
    target: float
    repeat: float
    others: int
    size: str = "small"
    inputs: str = "equal"
    targets: str = "alternating"
    bound: float = 1.0


def measure_change(attempt: Attempt) -> float:
    """The change of the private sum by one sample, as a multiple of the bound."""
    torch.manual_seed(attempt.seed)
    positions, width = SIZES[attempt.size]
    is_autocast = attempt.dtype == AUTOCAST
    dtype = torch.float32 if is_autocast else DTYPES[attempt.dtype]
    module = MODELS[attempt.model](positions, width).to(dtype)
    kind = OPTIONS[attempt.options]
    count = len(list(module.parameters()))
    per_layer = kind.get("clipping") == "per_layer"
    bound = [attempt.bound / count**0.5] * count if per_layer else attempt.bound

    def compute(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=is_autocast):
            result: Tensor = module(x)
        return result.float()

    x = torch.randn(attempt.others + 1, positions, width)
    x[0] = _make_positions(attempt.inputs, positions, width, attempt.repeat) * attempt.scale
    x = x.to(dtype)
    with torch.no_grad():
        y = compute(x)
    z = torch.randn_like(y)
    z[0] = _make_positions(attempt.targets, *y.shape[1:], attempt.repeat) * attempt.target
    if attempt.loss == "squares":
        z[0] += y[0].nan_to_num(0, 0, 0)
    z = z.to(dtype)

    def compute_sum(start: int) -> Tensor:
        def compute_loss(_: nn.Module) -> Tensor:
            return LOSSES[attempt.loss](compute(x[start:]), z[start:].float()).sum()

        return compute_private_sum(module, compute_loss, bound, loss_reduction="sum", **kind)

    if not attempt.others:
        return float(compute_sum(0).norm()) / attempt.bound
    compute_sum(0)  # the first step of a model may add up in another order, which bfloat16 shows in the other samples
    return float((compute_sum(0) - compute_sum(1)).norm()) / attempt.bound
