"""What each of two processes checks of record() under DDP and FSDP2; started by test_distributed.py, as torchrun does.

Wrapped models, with the samples of this process, are compared to a plain one that has the samples of all processes.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Sequence
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from persample import PerSampleError, SamplesMixed, call_for_per_sample_grads, record

D, T, HEADS, WORDS = 4, 3, 2, 7


class Block(nn.Module):
    """Attention with a bias that is computed elsewhere, and an MLP; `mixes` makes it refuse."""

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
    """Tied words, derived weights, a convolution, an adapter for some samples, and a layer that none use."""

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


def plain_net(checkpointed: bool = False, unused_trains: bool = True) -> Net:
    torch.manual_seed(0)
    net = Net(checkpointed).double()
    net.unused.requires_grad_(unused_trains)
    return net


class Batch:
    """The samples of all processes, and which of them are this one's."""

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

    def loss(self, model: nn.Module, own: slice | None = None) -> Tensor:
        own = self.own if own is None else own
        x, y = self.x[own], self.y[own]
        total = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum")
        return total / max(1, y.numel()) if self.reduction == "mean" else total

    def shared(self, model: nn.Module, **options: Any) -> Any:
        """The recording of this process's samples."""
        with record(model, loss_reduction=self.reduction, **options) as grads:
            self.loss(model).backward()
        return grads

    @cache  # noqa: B019
    def alone(self, unused_trains: bool) -> Any:
        """The recording of one process that has all samples."""
        model = plain_net(unused_trains=unused_trains)
        with record(model, loss_reduction=self.reduction) as grads:
            self.loss(model, slice(None)).backward()
        return grads

    @cache  # noqa: B019
    def mean_of_processes(self) -> dict[str, Tensor]:
        """What a distributed backward pass leaves in `grad`: the mean of the gradients of each process's loss."""
        model = plain_net()
        for rank, size in enumerate(self.sizes):
            start = sum(self.sizes[:rank])
            (self.loss(model, slice(start, start + size)) / len(self.sizes)).backward()
        return {name: p.grad for name, p in model.named_parameters()}


@cache
def batch_of(*sizes: int, reduction: str = "mean", routed: int = 2) -> Batch:
    return Batch(*sizes, reduction=reduction, routed=routed)


def trainable(model: nn.Module) -> dict[str, Any]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def part_of(whole: Tensor, like: Tensor) -> Tensor:
    """What a process has of a tensor that is laid out as another."""
    if not hasattr(like, "placements"):
        return whole
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)
    return whole[tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))]


def same(actual: Tensor, expected: Tensor, what: str, tolerance: float = 1e-8) -> None:
    own = actual.to_local() if hasattr(actual, "to_local") else actual
    want = part_of(expected, actual).to(own.dtype)
    difference = (own - want).detach().abs()
    allowed = tolerance * (1 + want.detach().abs())
    assert own.shape == want.shape, (what, own.shape, want.shape)
    assert bool((difference <= allowed).all()), f"{what}: {own} instead of {want}"


def same_sums(actual: dict[str, Tensor], expected: dict[str, Tensor], model: nn.Module, what: str) -> None:
    """Equal, and laid out as the parameters are."""
    parameters = trainable(model)
    assert list(actual) == list(parameters)
    for (name, total), want in zip(actual.items(), expected.values(), strict=True):
        same(total, want, f"{what} of {name}")
        p = parameters[name]
        assert type(total) is type(p.data), (what, name, type(total))
        if hasattr(p, "placements"):
            assert (total.placements, total.device_mesh) == (p.placements, p.device_mesh), (what, name)
            assert total.to_local().shape == p.to_local().shape, (what, name)


def compare_everything(model: nn.Module, batch: Batch, unused_trains: bool = True) -> None:
    alone, grads, own = batch.alone(unused_trains), batch.shared(model), batch.own
    same(grads.norms(), alone.norms()[own], "norms")
    each = alone.norms(per_parameter=True)
    for part, whole in zip(grads.norms(per_parameter=True).values(), each.values(), strict=True):
        same(part, whole[own], "norms per parameter")
    for (name, rows), whole in zip(grads.dense().items(), alone.dense().values(), strict=True):
        same(rows, whole[own], f"rows of {name}")
    same(grads.gram(), alone.gram()[own, own], "gram")
    assert grads.project(8).shape == (own.stop - own.start, 8)
    limit = float(alone.norms().median())
    for what, ask in {
        "sum": lambda g: g.sum(),
        "mean": lambda g: g.mean(),
        "clip": lambda g: g.clip(limit),
        "clip per parameter": lambda g: g.clip(limit / 4, per_parameter=True),
        "second moment": lambda g: g.second_moment(),
        "variance": lambda g: g.variance(),
    }.items():
        same_sums(ask(grads), ask(alone), model, what)
    same_sums(grads.sum(batch.weights[own]), alone.sum(batch.weights), model, "weighted sum")
    same(grads.noise_scale(), alone.noise_scale(), "noise scale")
    mean = alone.mean()
    same(grads.dot(dict(zip(grads.names, mean.values(), strict=True))), alone.dot(mean)[own], "dot")
    same(grads.dot(grads.mean()), alone.dot(mean)[own], "dot with what comes back")
    same(grads.dot(trainable(model)), alone.dot(trainable(plain_net(unused_trains=unused_trains)))[own], "dot with p")
    assert all(p.grad is None for p in model.parameters())


def compare_streamed(model: nn.Module, batch: Batch, unused_trains: bool = True) -> None:
    alone = batch.alone(unused_trains)
    same(batch.shared(model, keep="norms").norms(), alone.norms()[batch.own], "norms only")
    limit = float(alone.norms().median()) / 2
    memory = 2**30
    for passes in (1, 2):
        grads = batch.shared(model, keep="clip", max_norm=limit, memory=memory)
        assert grads.passes == passes or not len(batch.x[batch.own])
        same(grads.norms(), alone.norms()[batch.own], f"norms, {passes} passes")
        same_sums(grads.clip(), alone.clip(limit), model, f"clip, {passes} passes")
        assert all(torch.equal(a, b) for a, b in zip(grads.clip().values(), grads.clip().values(), strict=True))
        # Between what the processes would keep: they must decide alike.
        memory = int(repr(grads).split(" bytes to keep")[0].split()[-1]) * 3 // 4
    assert all(p.grad is None for p in model.parameters())


def compare_kept_grads(model: nn.Module, batch: Batch) -> None:
    """As a plain backward pass leaves them, added to what is there."""
    for times, options in enumerate(({}, {"keep": "norms"}, {"keep": "clip", "max_norm": 0.1, "passes": 2}), 1):
        batch.shared(model, keep_grad=True, **options)
        same_grads(model, batch.mean_of_processes(), times, f"{options}")
    model.zero_grad()


def compare_the_main_things(model: nn.Module, batch: Batch, unused_trains: bool = True) -> None:
    alone = batch.alone(unused_trains)
    limit = float(alone.norms().median())
    with record(model, loss_reduction=batch.reduction) as grads:
        batch.loss(model).backward()
        norms, clipped = grads.norms(), grads.clip(limit)
    same(norms, alone.norms()[batch.own], "norms")
    same_sums(clipped, alone.clip(limit), model, "clip")
    assert grads.samples() == len(batch.x)
    assert all(p.grad is None for p in model.parameters())
    grads = batch.shared(model, keep="clip", max_norm=limit, passes=2, keep_grad=True)
    same_sums(grads.clip(), alone.clip(limit), model, "clip in two passes")
    same_grads(model, batch.mean_of_processes(), 1, "kept")
    model.zero_grad()


def same_grads(model: nn.Module, expected: dict[str, Tensor], times: int, what: str) -> None:
    for (name, p), want in zip(model.named_parameters(), expected.values(), strict=True):
        assert (want is None) == (p.grad is None) or not p.requires_grad, (what, name)
        if p.grad is not None:
            same(p.grad, want * times, f"grad of {name}, {what}")
            assert type(p.grad) is type(p.data)


def step(model: nn.Module, batch: Batch) -> None:
    """An ordinary backward pass."""
    batch.loss(model).backward()
    same_grads(model, batch.mean_of_processes(), 1, "in an ordinary step")
    model.zero_grad()


def broken_recordings(model: nn.Module, batch: Batch, blocks: Sequence[Any]) -> Iterator[str]:
    """Blocks that are left by an exception, at different times."""
    for when in ("before", "between", "after"):
        try:
            with record(model, keep_grad=True):
                if when != "before":
                    loss = batch.loss(model)
                if when == "after":
                    loss.backward()
                raise KeyError(when)
        except KeyError:
            model.zero_grad()
            yield when
    blocks[1].mixes = True
    try:
        batch.shared(model)
    except SamplesMixed:
        blocks[1].mixes = False
        yield "mixed"
    try:
        with record(model, loss_reduction="sum"):
            out = model(batch.x[batch.own])
            (out.sum() + out.mean(0).square().sum()).backward()
    except SamplesMixed:
        yield "mixed in the loss"


def check(model: nn.Module, blocks: Sequence[Any], unused_trains: bool = True) -> None:
    """Everything, of one wrapped model."""
    unequal = batch_of(4, 2)
    compare_everything(model, unequal, unused_trains)
    step(model, unequal)
    compare_streamed(model, unequal, unused_trains)
    step(model, unequal)
    # One process uses a layer that the other does not; and one has no samples.
    for batch in (batch_of(4, 2, reduction="sum", routed=1), batch_of(0, 4)):
        compare_everything(model, batch, unused_trains)
        compare_streamed(model, batch, unused_trains)
        compare_kept_grads(model, batch)
    times = []
    for when in broken_recordings(model, unequal, blocks):
        times.append(when)
        step(model, unequal)
    assert times == ["before", "between", "after", "mixed", "mixed in the loss"]
    compare_the_main_things(model, unequal, unused_trains)


def refuses(model: Any, x: Tensor, message: str, called: Any = None, penalty: bool = False) -> None:
    try:
        with record(model):
            loss = (called or model)(x).mean()
            if penalty:
                loss = loss + model.weight.full_tensor().square().sum()
            loss.backward()
    except PerSampleError as e:
        assert message in str(e), e
    else:
        raise AssertionError(f"not refused: {message}")


# ---- DistributedDataParallel ----


def settings_of(wrapper: Any) -> tuple[bool, ...]:
    return (
        wrapper.require_backward_grad_sync,
        wrapper.require_forward_param_sync,
        wrapper.find_unused_parameters,
        wrapper.static_graph,
    )


def ddp_everything() -> None:
    net = plain_net(unused_trains=False)
    wrapper = DistributedDataParallel(net)
    before = settings_of(wrapper)
    check(wrapper, net.blocks, unused_trains=False)
    assert settings_of(wrapper) == before
    assert not any(m._forward_pre_hooks for m in wrapper.modules())


def ddp_with_settings() -> None:
    batch = batch_of(4, 2, routed=1)
    for options in ({"find_unused_parameters": True}, {"static_graph": True}, {"gradient_as_bucket_view": True}):
        unused_trains = "find_unused_parameters" in options
        net = plain_net(unused_trains=unused_trains)
        wrapper = DistributedDataParallel(net, **options)
        usual = batch if unused_trains else batch_of(4, 2)
        before = settings_of(wrapper)
        compare_the_main_things(wrapper, usual, unused_trains)
        assert settings_of(wrapper) == before
        for _ in range(3):
            step(wrapper, usual)
        compare_the_main_things(wrapper, usual, unused_trains)
        step(wrapper, usual)


def ddp_around_and_within() -> None:
    """The module is recorded and its wrapper called; a wrapper is part of what is recorded; no wrapper takes part."""
    batch = batch_of(4, 2)
    net = plain_net(unused_trains=False)
    wrapper = DistributedDataParallel(net)
    alone = batch.alone(False)
    with record(net) as grads:
        batch.loss(wrapper).backward()
    same(grads.project(8), alone.project(8)[batch.own], "project")
    same_sums(grads.clip(0.1), alone.clip(0.1), net, "clip")
    step(wrapper, batch)
    with record(net, keep_grad=True) as grads:
        batch.loss(net).backward()
    assert float((grads.clip(0.1)["head.bias"] - alone.clip(0.1)["head.bias"]).abs().max()) > 1e-3
    own = torch.autograd.grad(batch.loss(net), net.head.bias)[0]
    same(net.head.bias.grad, own, "grad of a process alone")
    net.zero_grad()
    outer = nn.Sequential(wrapper)
    same_sums(batch.shared(outer).clip(0.1), alone.clip(0.1), outer, "clip of what has a wrapper")
    step(wrapper, batch)
    rows = call_for_per_sample_grads(net, loss_reduction="sum")(batch.x[batch.own])
    F.cross_entropy(rows.flatten(0, 1), batch.y[batch.own].flatten(), reduction="sum").backward()
    assert net.head.bias.grad_sample.shape == (batch.own.stop - batch.own.start, WORDS)


def ddp_grads_without_sync() -> None:
    batch = batch_of(4, 2)
    wrapper = DistributedDataParallel(plain_net(unused_trains=False))
    with wrapper.no_sync():
        batch.shared(wrapper, keep_grad=True)
        own = torch.autograd.grad(batch.loss(wrapper), wrapper.module.head.bias)[0]
    same(wrapper.module.head.bias.grad, own, "grad within no_sync")
    batch.loss(wrapper).backward()
    same_grads(wrapper, batch.mean_of_processes(), 2, "after no_sync")
    wrapper.zero_grad()
    with record(wrapper, keep_grad=True, batch_dim={"x": 0}) as grads:
        loss = batch.loss(wrapper)
    loss.backward()
    same_grads(wrapper, batch.mean_of_processes(), 1, "after the block")
    same_sums(grads.sum(), batch.alone(False).sum(), wrapper, "sum after the block")


def ddp_refusals() -> None:
    from torch.distributed._composable import replicate

    x = torch.randn(4, D)
    one, other = (DistributedDataParallel(nn.Linear(D, D), process_group=dist.new_group([0, 1])) for _ in range(2))
    refuses(nn.Sequential(one, other), x, "different process groups")
    refuses(one.module, x, "part of what", called=DistributedDataParallel(nn.Sequential(one.module, nn.Linear(D, D))))
    one.mixed_precision = object()
    refuses(one, x, "mixed_precision")
    one.mixed_precision = None
    assert settings_of(one) == settings_of(other) == (True, True, False, False)
    refuses(replicate(nn.Linear(D, D)), x, "another part of torch.distributed")


# ---- FSDP2 ----


def sharded(net: Net, **options: Any) -> Net:
    from torch.distributed.fsdp import fully_shard

    for block in (*net.blocks, net.conv):
        fully_shard(block, **options)
    return fully_shard(net, **options)


def fsdp_everything() -> None:
    net = sharded(plain_net())
    check(net, net.blocks)
    assert not any(group.__dict__.get("_register_post_backward_hook") for m in net.blocks for group in groups_of(m))
    assert all(group.reduce_grads for m in net.blocks for group in groups_of(m))


def groups_of(module: Any) -> Any:
    return module._get_fsdp_state()._fsdp_param_groups


def fsdp_with_settings() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard

    batch = batch_of(4, 2)
    names = ("replicate", "shard")
    for options in (
        {"reshard_after_forward": False},
        {"reshard_after_forward": True},
        {"mesh": init_device_mesh("cpu", (2, 1), mesh_dim_names=names)},
        {"mesh": init_device_mesh("cpu", (1, 2), mesh_dim_names=names)},
        {"shard_placement_fn": lambda p: Shard(1) if p.dim() > 1 and p.shape[1] % 2 == 0 else None},
    ):
        net = sharded(plain_net(), **options)
        compare_the_main_things(net, batch)
        step(net, batch)


def fsdp_in_other_parts() -> None:
    """Several modules in one group, replicas instead of shards, and parameters that FSDP does not manage."""
    from torch.distributed._composable.replicate_with_fsdp import replicate
    from torch.distributed.fsdp import fully_shard

    batch = batch_of(4, 2)
    net = plain_net()
    fully_shard([net.words, net.head], reshard_after_forward=True)
    compare_the_main_things(sharded(net), batch)
    step(net, batch)
    net = plain_net()
    for block in net.blocks:
        replicate(block)
    compare_the_main_things(replicate(net), batch)
    step(net, batch)
    net, alone = plain_net(), plain_net()
    for block in net.blocks:
        fully_shard(block)
    grads = batch.shared(net, keep_grad=True)
    same_sums(grads.clip(0.1), batch.alone(True).clip(0.1), net, "clip of parts")
    batch.loss(alone).backward()
    same(net.places.grad, alone.places.grad, "grad that nobody reduces")
    same(net.blocks[0].norm.bias.grad, batch.mean_of_processes()["blocks.0.norm.bias"], "grad of a part")


def fsdp_checkpointed() -> None:
    batch = batch_of(4, 2)
    net = sharded(plain_net(checkpointed=True))
    compare_the_main_things(net, batch)
    step(net, batch)


def fsdp_states() -> None:
    """Some parameters are whole when the recording begins; gradients add up before they are reduced."""
    batch = batch_of(4, 2)
    net = sharded(plain_net(), reshard_after_forward=False)
    with torch.no_grad():
        net(batch.x)
    assert not hasattr(net.places, "full_tensor")
    grads = batch.shared(net)
    assert not any(hasattr(p, "full_tensor") for p in grads.dense().values())
    same_sums(grads.clip(0.1), batch.alone(True).clip(0.1), net, "clip")
    net.set_requires_gradient_sync(False)
    batch.shared(net, keep_grad=True)
    batch.shared(net)
    batch.loss(net).backward()
    assert net.places.grad is None
    net.set_requires_gradient_sync(True)
    batch.shared(net)
    assert net.places.grad is None
    batch.shared(net, keep_grad=True)
    same_grads(net, batch.mean_of_processes(), 3, "added up")
    net.zero_grad()
    net.set_reduce_scatter_unused_params(True)
    batch.shared(net)
    assert all(p.grad is None for p in net.parameters())
    net.set_reduce_scatter_unused_params(False)
    with record(net, keep_grad=True) as grads:
        loss = batch.loss(net)
    loss.backward()
    same_grads(net, batch.mean_of_processes(), 1, "after the block")
    same_sums(grads.sum(), batch.alone(True).sum(), net, "sum after the block")


def fsdp_cases() -> None:
    """Some of the awkward modules, each of their parts sharded by itself, with the same samples in both processes."""
    from torch.distributed.fsdp import fully_shard

    from persample.testing.oracle import compute_test_loss
    from tests.support.cases import REAL_CASES

    compared = 0
    for case in REAL_CASES[::13]:
        plain, args, kwargs = case.build()
        with record(plain, **case.record_options) as alone:
            compute_test_loss(plain(*args, **kwargs), case.out_dim).backward()
        net, args, kwargs = case.build()
        try:
            for part in (*net.children(), net):
                if list(part.parameters()):
                    fully_shard(part, reshard_after_forward=True)
            with torch.no_grad():
                net(*args, **kwargs)
        except (NotImplementedError, RuntimeError, ValueError):  # FSDP has its limits too
            continue
        with record(net, **case.record_options) as grads:
            compute_test_loss(net(*args, **kwargs), case.out_dim).backward()
        same(grads.norms(), alone.norms(), case.name)
        for total, want in zip(grads.clip(1.0).values(), alone.clip(1.0).values(), strict=True):
            same(total, 2 * want, case.name, tolerance=1e-6)
        compared += 1
    assert compared > 15


def fsdp_mixed_precision() -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    batch = batch_of(4, 2)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    net = sharded(plain_net().float(), mp_policy=policy)
    grads, alone = batch.shared(net, keep_grad=True), batch.alone(True)
    assert torch.allclose(grads.norms().double(), alone.norms()[batch.own], rtol=0.1)
    for (name, p), total, want in zip(net.named_parameters(), grads.sum().values(), alone.sum().values(), strict=True):
        assert total.dtype == torch.float32 and total.placements == p.placements, name
        same(total, want, name, tolerance=0.1)
        assert grads.dense([name])[name].dtype == torch.float32
    kept = {name: p.grad.full_tensor() for name, p in net.named_parameters() if p.grad is not None}
    net.zero_grad()
    batch.loss(net).backward()
    for name, p in net.named_parameters():
        if p.grad is not None:
            assert p.grad.dtype == torch.float32
            same(p.grad, kept[name], name, tolerance=0.02)


def fsdp_refusals() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, distribute_tensor

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, weight: Tensor) -> Tensor:
            ctx.save_for_backward(weight)
            return weight * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (weight,) = ctx.saved_tensors
            return grad * 2 + 0 * weight

    class Uses(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, Doubled.apply(self.weight), self.bias)

    x = torch.randn(4, D)
    refuses(fully_shard(Uses(D, 2)), x, "Have it save a clone")
    layer = nn.Linear(D, 2)
    weight = distribute_tensor(layer.weight.detach(), init_device_mesh("cpu", (2,)), [Replicate()])
    layer.weight = nn.Parameter(weight)
    refuses(layer, x, "Tensor parallelism")
    refuses(fully_shard(nn.Sequential(nn.Linear(D, D), nn.Linear(D, D)))[0], x, "record the whole")
    layer = fully_shard(nn.Linear(D, 2), reshard_after_forward=True)
    try:
        call_for_per_sample_grads(layer)
        raise AssertionError("grad_sample of shards")
    except PerSampleError as error:
        assert "use persample.record" in str(error)
    refuses(layer, x, "penalty", penalty=True)
    layer(x).sum().backward()


def run(checks: dict[str, Any]) -> None:
    """Makes the checks that are named on the command line, in this process."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    for name in sys.argv[1:]:
        checks[name]()
        print(f"{name} passed on {dist.get_rank()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    assert "torch.distributed.tensor" not in sys.modules, "importing persample must not import that"
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    run(globals())
