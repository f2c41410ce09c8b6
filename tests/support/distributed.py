"""A model and batches for distributed tests, and comparisons with one process that has all samples."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from persample import PerSampleError, record

D, T, HEADS, WORDS = 4, 3, 2, 7


class Block(nn.Module):
    """Attention with a bias that is computed elsewhere, and an MLP. `mixes`: the block mixes samples."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.qkv = nn.Linear(D, 3 * D)
        self.up = weight_norm(nn.Linear(D, 5))
        self.down = nn.Linear(5, D, bias=False)
        self.mixes = False

    def forward(self, h: Tensor, bias: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(h)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        h = h + F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).flatten(2)
        if self.mixes:
            h = h - h.mean(0)
        return h + self.down(F.gelu(self.up(h)))


class Net(nn.Module):
    """A model with tied words, derived weights, a convolution, an adapter for some samples, and an unused layer."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, D)
        self.places = nn.Parameter(torch.randn(T, D))
        self.bias = nn.Embedding(2 * T, HEADS)
        self.conv = nn.Conv1d(D, D, 3, padding=1)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.adapter = nn.Linear(D, D)
        self.unused = nn.Linear(D, 1)
        self.head = nn.Linear(D, WORDS)
        self.head.weight = self.words.weight
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        h = self.words(x) + self.places
        h = h + self.conv(h.transpose(1, 2)).transpose(1, 2)
        bias = self.bias(torch.arange(T)[:, None] - torch.arange(T) + T).permute(2, 0, 1)
        for block in self.blocks:
            h = checkpoint(block, h, bias, use_reentrant=False) if self.checkpointed else block(h, bias)
        routed = x[:, :1, None] == 0
        if routed.any():
            h = h + routed * self.adapter(h)
        return self.head(h)


def make_net(checkpointed: bool = False, unused_trains: bool = True) -> Net:
    """The model with the same weights in every process. `unused_trains`: the unused layer requires gradients."""
    torch.manual_seed(0)
    net = Net(checkpointed).double()
    net.unused.requires_grad_(unused_trains)
    return net


def shard(net: Any, **options: Any) -> Any:
    """The model under FSDP2: the blocks and the convolution in groups of their own."""
    from torch.distributed.fsdp import fully_shard

    for block in (*net.blocks, net.conv):
        fully_shard(block, **options)
    return fully_shard(net, **options)


class Batch:
    """The samples of all processes; `own` selects the samples of this process."""

    def __init__(self, *sizes: int, reduction: str = "mean", routed: int = 2) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randint(1, WORDS, (sum(sizes), T), generator=generator)
        self.y = torch.randint(0, WORDS, (sum(sizes), T), generator=generator)
        for rank in range(routed):  # the first sample of these processes takes the adapter
            self.x[sum(sizes[:rank]) : sum(sizes[: rank + 1])][:1, 0] = 0
        self.weights = torch.linspace(-1, 2, sum(sizes), dtype=torch.float64)
        self.reduction = reduction
        self.sizes = sizes
        rank = dist.get_rank()
        self.own = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))

    def compute_loss(self, model: nn.Module, samples: slice | None = None) -> Tensor:
        """The loss of this process, or of some samples."""
        samples = self.own if samples is None else samples
        x, y = self.x[samples], self.y[samples]
        total = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum")
        return total / max(1, y.numel()) if self.reduction == "mean" else total

    def record_own(self, model: nn.Module, **options: Any) -> Any:
        """A recording of the samples of this process."""
        with record(model, loss_reduction=self.reduction, **options) as grads:
            self.compute_loss(model).backward()
        return grads

    @cache  # noqa: B019
    def record_all(self, unused_trains: bool) -> Any:
        """A recording of one process that has all samples and a plain model."""
        model = make_net(unused_trains=unused_trains)
        with record(model, loss_reduction=self.reduction) as grads:
            self.compute_loss(model, slice(None)).backward()
        return grads

    @cache  # noqa: B019
    def compute_mean_gradient(self) -> dict[str, Tensor]:
        """What a distributed backward pass leaves in `grad`: the mean of the gradients of all processes."""
        model = make_net()
        for rank, size in enumerate(self.sizes):
            start = sum(self.sizes[:rank])
            (self.compute_loss(model, slice(start, start + size)) / len(self.sizes)).backward()
        return {name: p.grad for name, p in model.named_parameters()}


@cache
def make_batch(*sizes: int, reduction: str = "mean", routed: int = 2) -> Batch:
    """A batch with `sizes[rank]` samples in each process; the first `routed` processes use the adapter."""
    return Batch(*sizes, reduction=reduction, routed=routed)


def find_shard(whole: Tensor, like: Tensor) -> Tensor:
    """The part of a tensor that this process has of `like`, which may be a DTensor."""
    if not hasattr(like, "placements"):
        return whole
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)
    return whole[tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))]


def assert_same(actual: Tensor, expected: Tensor, what: str, tolerance: float = 1e-8) -> None:
    """Assert that a tensor, or the local part of a DTensor, is equal to `expected`."""
    own = actual.to_local() if hasattr(actual, "to_local") else actual
    want = find_shard(expected, actual).to(own.dtype)
    difference = (own - want).detach().abs()
    allowed = tolerance * (1 + want.detach().abs())
    assert own.shape == want.shape, (what, own.shape, want.shape)
    assert bool((difference <= allowed).all()), f"{what}: {own} instead of {want}"


def assert_refused(model: Any, x: Tensor, message: str, called: Any = None, penalty: bool = False) -> None:
    """Assert that a recording of the model is refused; `called` is the module that is called instead of the model."""
    try:
        with record(model):
            loss = (called or model)(x).mean()
            if penalty:
                loss = loss + model.weight.full_tensor().square().sum()
            loss.backward()
    except PerSampleError as error:
        assert message in str(error), error
    else:
        raise AssertionError(f"not refused: {message}")


def get_trainable(model: nn.Module) -> dict[str, Any]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def assert_same_sums(actual: dict[str, Tensor], expected: dict[str, Tensor], model: nn.Module, what: str) -> None:
    """Assert that sums over all samples are equal, and are distributed like the parameters."""
    parameters = get_trainable(model)
    assert list(actual) == list(parameters)
    for (name, total), want in zip(actual.items(), expected.values(), strict=True):
        assert_same(total, want, f"{what} of {name}")
        p = parameters[name]
        assert type(total) is type(p.data), (what, name, type(total))
        if hasattr(p, "placements"):
            assert (total.placements, total.device_mesh) == (p.placements, p.device_mesh), (what, name)
            assert total.to_local().shape == p.to_local().shape, (what, name)


def assert_same_grads(model: nn.Module, expected: dict[str, Tensor], times: int, what: str) -> None:
    """Assert that `grad` of each parameter is `times` the expected gradient."""
    for (name, p), want in zip(model.named_parameters(), expected.values(), strict=True):
        assert (want is None) == (p.grad is None) or not p.requires_grad, (what, name)
        if p.grad is not None:
            assert_same(p.grad, want * times, f"grad of {name}, {what}")
            assert type(p.grad) is type(p.data)


def check_ordinary_step(model: nn.Module, batch: Batch) -> None:
    """Check an ordinary backward pass, without a recording."""
    batch.compute_loss(model).backward()
    assert_same_grads(model, batch.compute_mean_gradient(), 1, "in an ordinary step")
    model.zero_grad()


def check_main_answers(model: nn.Module, batch: Batch, unused_trains: bool = True) -> None:
    """Check norms and clipped sums, read inside the block, and clipping in two passes that keeps `grad`."""
    alone = batch.record_all(unused_trains)
    limit = float(alone.norms().median())
    with record(model, loss_reduction=batch.reduction) as grads:
        batch.compute_loss(model).backward()
        norms, clipped = grads.norms(), grads.clip(limit)
    assert_same(norms, alone.norms()[batch.own], "norms")
    assert_same_sums(clipped, alone.clip(limit), model, "clip")
    assert grads.samples() == len(batch.x)
    assert all(p.grad is None for p in model.parameters())
    grads = batch.record_own(model, keep="clip", max_norm=limit, passes=2, keep_grad=True)
    assert_same_sums(grads.clip(), alone.clip(limit), model, "clip in two passes")
    assert_same_grads(model, batch.compute_mean_gradient(), 1, "kept")
    model.zero_grad()
