"""The test cases: modules that are difficult for per-sample gradients, for all front ends. A case is one line."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

from tests.support.case import Case

B, T, D = 3, 5, 4


class Calls(nn.Module):
    """A module whose forward is a function of the module and its inputs: `Calls(lambda m, x: m.a(x), a=nn.Linear(4, 4))`."""

    def __init__(self, forward: Callable[..., Any], **members: Any) -> None:
        super().__init__()
        self._forward = forward
        for name, member in members.items():
            if isinstance(member, Tensor) and not isinstance(member, nn.Parameter):
                self.register_buffer(name, member)
            else:
                setattr(self, name, member)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(self, *args, **kwargs)


def param(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape))


def x(*shape: int, grad: bool = False) -> Callable[[], list[Tensor]]:
    return lambda: [torch.randn(shape).requires_grad_(grad)]


def ids(*shape: int, most: int = 7) -> Callable[[], list[Tensor]]:
    return lambda: [torch.randint(0, most, shape)]


def frozen(module: nn.Module, *names: str) -> nn.Module:
    for name, p in module.named_parameters():
        p.requires_grad_(name not in names)
    return module


def evaluated(module: nn.Module) -> nn.Module:
    return module.eval()


def tied() -> nn.Module:
    a, b = nn.Linear(D, D), nn.Linear(D, D)
    b.weight = a.weight
    return nn.Sequential(a, nn.Tanh(), b)


def registered_twice() -> nn.Module:
    a = nn.Linear(D, D)
    return nn.Sequential(a, nn.Tanh(), a)


class Masked(nn.Module):
    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", mask)

    def forward(self, weight: Tensor) -> Tensor:
        return weight * self.mask


def masked_weight() -> nn.Module:
    layer = nn.Linear(D, D)
    parametrize.register_parametrization(layer, "weight", Masked(torch.tril(torch.ones(D, D))))
    return layer


def language_model(m: Any, tokens: Tensor) -> Tensor:
    h = m.embed(tokens) + m.position(torch.arange(tokens.shape[1]))
    h = m.norm(h)
    return F.linear(h.reshape(-1, D), m.embed.weight).view(*tokens.shape, -1)


def attention(m: Any, h: Tensor) -> Tensor:
    q, k, v = m.qkv(h).view(*h.shape[:2], 3, 2, D // 2).permute(2, 0, 3, 1, 4)
    a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return m.out(a.transpose(1, 2).flatten(2))


def windows(m: Any, image: Tensor) -> Tensor:
    n, h, w, c = image.shape
    parts = image.view(n, h // 2, 2, w // 2, 2, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, c)
    parts = m.mix(parts.transpose(1, 2)).transpose(1, 2)
    return parts.view(n, h // 2, w // 2, 2, 2, c).permute(0, 1, 3, 2, 4, 5).reshape(n, h, w, c)


def unrolled_cell(m: Any, h: Tensor) -> Tensor:
    state = torch.zeros(len(h), D, dtype=h.dtype)
    for step in h.unbind(1):
        state = torch.tanh(m.a(step) + m.b(state))
    return state


def written_in_place(m: Any, h: Tensor) -> Tensor:
    out = torch.zeros(len(h), T, 2 * D, dtype=h.dtype)
    out[:, :, :D] = m.a(h)
    out[..., D:] = m.b(h)
    return m.c(out)


def class_token_written_in(m: Any, h: Tensor) -> Tensor:
    out = F.pad(h, (0, 0, 1, 0))
    out[:, 0] = m.c
    return out.softmax(1)


def added_to_a_view(m: Any, h: Tensor) -> Tensor:
    out = m.a(h)
    out[:, 0] += m.b
    out[:, 1].mul_(m.b)
    return out.tanh()


def rows_of_a_mask(m: Any, h: Tensor, mask: Tensor) -> Tensor:
    out = torch.zeros_like(h)
    out[mask] = m.a(h[mask])
    return out


def learned_states(m: Any, h: Tensor) -> Tensor:
    state = (m.h0.expand(len(h), -1), m.c0.expand(len(h), -1))
    for step in h.unbind(1):
        state = m.r(step, state)
    return state[0]


def heads_first(m: Any, h: Tensor) -> Tensor:
    both = torch.stack([h, h.sin()]).flatten(0, 1)  # (heads * B, T, D)
    return torch.bmm(both, m.t.repeat_interleave(len(h), 0)).unflatten(0, (2, -1)).sum(0)


def null_where(m: Any, h: Tensor, drop: Tensor, null: Any = 0.0) -> Tensor:
    out = h.clone()
    out[drop] = m.null if hasattr(m, "null") else null
    return m.a(out).tanh()


def masked_labels(m: Any, y: Tensor, drop: Tensor) -> Tensor:
    y = y.clone()
    y[drop] = 4
    return m.e(y)


def optional_part(m: Any, h: Tensor, there: Tensor) -> Tensor:
    out = torch.full_like(h[:1], 0.5).expand(len(h), -1).clone()
    out[there] = m.b(h[there])
    return m.a(out.tanh())


def made_then_written(m: Any, h: Tensor, there: Tensor) -> Tensor:
    out = torch.zeros(len(h), D, dtype=h.dtype)
    out[there] = m.b(h[there])
    return m.a(out)


def written_through_a_view(m: Any, h: Tensor) -> Tensor:
    out = torch.zeros(len(h), 3, D, dtype=h.dtype)
    seen_before = out[:, 1]
    out[:, 1].copy_(h)
    out[:, 2] += h.sin()
    return m.a(out) + m.a(seen_before).cos().unsqueeze(1)


def experts(m: Any, h: Tensor, pick: Callable[[Tensor], Any]) -> Tensor:
    """Route each row to the expert with the highest score."""
    rows, out = h.flatten(0, 1), torch.zeros_like(h.flatten(0, 1))
    chosen = m.gate(rows).argmax(-1)
    for i in chosen.unique():
        at = pick(chosen == i)
        out[at] = m.w[i].mul(rows[at]).tanh()
    return out.view_as(h)


def experts_added_up(m: Any, h: Tensor) -> Tensor:
    rows = h.flatten(0, 1)
    out = torch.zeros(len(rows), D, dtype=h.dtype)
    weight, chosen = m.gate(rows).softmax(-1).topk(2)
    hit = torch.nn.functional.one_hot(chosen, 3).permute(2, 1, 0)
    for i in (hit.sum((1, 2)) > 0).nonzero():
        place, row = torch.where(hit[i[0]])
        out.index_add_(0, row, F.linear(rows[row], m.w[i[0]]) * weight[row, place, None])
    return out.view_as(h)


def experts_sorted(m: Any, h: Tensor) -> Tensor:
    rows = h.flatten(0, 1)
    chosen, order = m.gate(rows).argmax(-1).sort()
    parts = rows[order].split(chosen.bincount(minlength=3).tolist())
    out = torch.cat([part @ w for part, w in zip(parts, m.w, strict=True)])
    return out[order.argsort()].view_as(h)


def written_into_weights(m: Any, h: Tensor) -> Tensor:
    out = torch.zeros(len(h), T + 1, D, dtype=h.dtype)
    out[:, 0] = m.c
    out[:, 1:] = m.a(h).tanh()
    state = m.c.expand(len(h), D).clone()
    state += h[:, 0]
    return out * state.unsqueeze(1)


def ragged(m: Any, h: Tensor) -> Tensor:
    rows = [row[: 2 + int(row[0, 0] > 0)] for row in h]
    return m.a(nn.utils.rnn.pad_sequence(rows, batch_first=True)).tanh().sum(1)


def unpadded(m: Any, h: Tensor) -> Tensor:
    at = (h[..., 0] > 0).flatten().nonzero().flatten()
    return torch.zeros(h.shape[0] * T, D, dtype=h.dtype).index_put((at,), m.a(h.flatten(0, 1)[at])).view_as(h).cos()


def picked_and_put_back(m: Any, h: Tensor) -> Tensor:
    mask = (h[..., :1] > 0).expand_as(h)
    return h.masked_scatter(mask, m.a(h.masked_select(mask).view(-1, D)).tanh())


def chosen_beside_a_token(m: Any, h: Tensor) -> Tensor:
    there = h[..., 0] > 0
    rows = h[there]
    rows = m.a(torch.cat([rows, m.w.expand(len(rows), D)], 1)).mul(2)
    rows[:, 0] = 0
    return h.sin().index_put((there,), rows)


def one_after_the_other(m: Any, h: Tensor) -> Tensor:
    return torch.stack([m.a(row).square().sum() * m.w[row.detach().sum().long() % 2] for row in h])


def into_out(m: Any, h: Tensor) -> Tensor:
    out = torch.empty(0, dtype=h.dtype)
    torch.cat([h, h.sin()], -1, out=out)
    return m.a(out)


def samples_and_flags() -> list[Tensor]:
    return [torch.randn(B, D), torch.tensor([False, True, False])]


def low_rank(m: Any, h: Tensor) -> Tensor:
    return h @ (m.base + m.up @ m.down).t()


def sample_by_sample(m: Any, h: Tensor) -> Tensor:
    return torch.stack([m.a(row) for row in h])


@dataclass
class Pair:
    """A dataclass, which is no pytree."""

    left: Tensor
    right: Tensor


def linear_cases() -> list[Case]:
    return [
        Case("linear", lambda: nn.Linear(D, 5), x(B, D)),
        Case("linear, input with grad", lambda: nn.Linear(D, 5), x(B, D, grad=True)),
        Case("linear, batch of one", lambda: nn.Linear(D, 5), x(1, D)),
        Case("linear without bias", lambda: nn.Linear(D, 5, bias=False), x(B, D)),
        Case("linear on sequences", lambda: nn.Linear(D, 5), x(B, T, D)),
        Case("linear on sequences, T == B", lambda: nn.Linear(D, 5), x(B, B, D)),
        Case("linear in 4-D", lambda: nn.Linear(D, 5), x(B, 2, T, D)),
        Case("linear, time first", lambda: nn.Linear(D, 5), x(T, B, D), dims=[1], out_dim=1, options={"batch_first": False}),
        Case("linear, time first, T == B", lambda: nn.Linear(D, 5), x(B, B, D), dims=[1], out_dim=1, options={"batch_first": False}),
        Case("linear on a transposed input", lambda: Calls(lambda m, h: m.a(h.transpose(1, 2)), a=nn.Linear(T, D)), x(B, T, D)),
        Case("linear, time first inside", lambda: Calls(lambda m, h: m.a(h.transpose(0, 1)).transpose(0, 1), a=nn.Linear(D, 5)), x(B, T, D)),
        Case("linear, time first inside, T == B", lambda: Calls(lambda m, h: m.a(h.transpose(0, 1)).transpose(0, 1), a=nn.Linear(D, 5)), x(B, B, D)),
        Case("linear on rows (B*T, D)", lambda: Calls(lambda m, h: m.a(h.reshape(-1, D)).view(-1, T, 5), a=nn.Linear(D, 5)), x(B, T, D)),
        Case("linear on rows (T*B, D)", lambda: Calls(lambda m, h: m.a(h.transpose(0, 1).reshape(-1, D)).view(T, -1, 5).transpose(0, 1), a=nn.Linear(D, 5)), x(B, T, D)),
        Case("linear on the doubled batch", lambda: Calls(lambda m, h: sum(m.a(torch.cat([h, 2 * h])).chunk(2)), a=nn.Linear(D, 5)), x(B, D)),
        Case("linear on reversed samples", lambda: Calls(lambda m, h: m.a(h.flip(0)).flip(0), a=nn.Linear(D, 5)), x(B, D)),
        Case("linear on picked rows", lambda: Calls(lambda m, h: m.a(h.flatten(0, 1)[torch.arange(0, h.numel() // D, 2)]).tanh().unflatten(0, (-1, 2)), a=nn.Linear(D, 5)), x(B, 4, D)),
        Case("linear, sample by sample", lambda: Calls(sample_by_sample, a=nn.Linear(D, 5)), x(B, T, D)),
        Case("linear, all frozen but bias", lambda: frozen(nn.Linear(D, 5), "weight"), x(B, D)),
        Case("mlp", lambda: nn.Sequential(nn.Linear(D, 6), nn.ReLU(), nn.Linear(6, 5)), x(B, D)),
        Case("mlp, activations in place", lambda: nn.Sequential(nn.Linear(D, 6), nn.ReLU(inplace=True), nn.Linear(6, 5), nn.SiLU(inplace=True)), x(B, D)),
        Case("tied weights", tied, x(B, D)),
        Case("a module registered twice", registered_twice, x(B, D)),
        Case("an unused layer", lambda: Calls(lambda m, h: m.a(h), a=nn.Linear(D, 5), b=nn.Linear(2, 2)), x(B, D)),
        Case("two inputs", lambda: Calls(lambda m, a, b: m.a(a) * m.a(b), a=nn.Linear(D, 5)), lambda: [torch.randn(B, D), torch.randn(B, D)]),
        Case("keyword inputs", lambda: Calls(lambda m, a, *, b: m.a(a) * b, a=nn.Linear(D, 5)), x(B, D), lambda: {"b": torch.randn(B, 5)}),
        Case("an input that belongs to no sample", lambda: Calls(lambda m, a, b: m.a(a * b), a=nn.Linear(D, 5)), lambda: [torch.randn(B, D), torch.randn(D)], dims=[0, None], options={"batch_size": B}),
        Case("a (T, T) mask", lambda: Calls(lambda m, a, b: m.a(b @ a), a=nn.Linear(D, 5)), lambda: [torch.randn(B, T, D), torch.randn(T, T)], dims=[0, None], options={"batch_size": B}),
        Case("complex linear", lambda: nn.Linear(D, 5, dtype=torch.complex128), lambda: [torch.randn(B, T, D, dtype=torch.complex128)], double=False),
        Case("a dataclass in", lambda: Calls(lambda m, pair: m.a(pair.left) * m.a(pair.right), a=nn.Linear(D, 5)), lambda: [Pair(torch.randn(B, D), torch.randn(B, D))], options={"batch_size": B}),
        Case("dict out", lambda: Calls(lambda m, h: {"a": m.a(h), "b": [m.b(h)]}, a=nn.Linear(D, 5), b=nn.Linear(D, 2)), x(B, D)),
    ]  # fmt: skip


def conv_cases() -> list[Case]:
    settings: list[dict[str, Any]] = [
        {}, {"stride": 2}, {"padding": 1}, {"padding": "same"}, {"padding": "valid"}, {"padding": "same", "dilation": 2},
        {"dilation": 2, "stride": 2, "padding": 2}, {"groups": 2}, {"groups": 4, "padding": 1, "stride": 2}, {"bias": False},
        {"padding": 1, "padding_mode": "circular"}, {"padding": 1, "padding_mode": "reflect"},
    ]  # fmt: skip
    cases = []
    for dims, layer in ((1, nn.Conv1d), (2, nn.Conv2d), (3, nn.Conv3d)):
        for setting in settings:
            if dims == 3 and setting.get("padding_mode") == "reflect":
                continue
            name = f"conv{dims}d {setting}"
            size = (9, 8, 7)[:dims]
            cases.append(Case(name, lambda layer=layer, s=setting: layer(4, 8, 3, **s), x(B, 4, *size)))
    kernel = {"kernel_size": (2, 3), "stride": [2, 1], "padding": [0, 2], "dilation": (1, 2)}
    return [
        *cases,
        Case("conv2d, uneven settings", lambda: nn.Conv2d(4, 6, **kernel), x(B, 4, 8, 9)),
        Case("conv2d, lists to the function", lambda: Calls(lambda m, h: F.conv2d(h, m.w, m.b, [2, 1], [1, 0], [1, 2], 2), w=param(6, 2, 2, 3), b=param(6)), x(B, 4, 8, 9)),
        Case("conv2d, keywords", lambda: Calls(lambda m, h: F.conv2d(bias=m.b, padding=1, weight=m.w, input=h), w=param(6, 4, 3, 3), b=param(6)), x(B, 4, 5, 5)),
        Case("conv3d, dilation, large batch", lambda: nn.Conv3d(2, 3, 2, dilation=2), x(33, 2, 4, 4, 4)),
        Case("conv2d, large batch", lambda: nn.Conv2d(2, 3, 3, dilation=2, stride=2), x(34, 2, 9, 9)),
        Case("conv2d, even kernel, same", lambda: nn.Conv2d(2, 3, 4, padding="same"), x(B, 2, 6, 5)),
        Case("conv2d, 1x1", lambda: nn.Conv2d(4, 3, 1), x(B, 4, 5, 5)),
        Case("conv2d, depthwise", lambda: nn.Conv2d(4, 4, 3, padding=1, groups=4), x(B, 4, 5, 5)),
        Case("conv2d, channels last", lambda: nn.Conv2d(4, 3, 3).to(memory_format=torch.channels_last), lambda: [torch.randn(B, 4, 5, 5).to(memory_format=torch.channels_last)]),
        Case("conv2d, input with grad", lambda: nn.Conv2d(4, 3, 3), x(B, 4, 5, 5, grad=True)),
        Case("conv2d, frozen bias", lambda: frozen(nn.Conv2d(4, 3, 3), "bias"), x(B, 4, 5, 5)),
        Case("conv2d, patchify", lambda: Calls(lambda m, h: m.a(h).flatten(2).transpose(1, 2) ** 2, a=nn.Conv2d(3, D, 2, 2)), x(B, 3, 6, 4)),
        Case("conv2d, frames in the batch", lambda: Calls(lambda m, h: m.a(h.flatten(0, 1)).unflatten(0, (-1, 2)), a=nn.Conv2d(3, D, 3)), x(B, 2, 3, 6, 4)),
        Case("conv2d, frames first", lambda: Calls(lambda m, h: m.a(h.transpose(0, 1).flatten(0, 1)).unflatten(0, (2, -1)).transpose(0, 1), a=nn.Conv2d(3, D, 3)), x(B, 2, 3, 6, 4)),
        Case("complex conv2d", lambda: nn.Conv2d(2, 4, 3, groups=2, padding=1, dtype=torch.complex128), lambda: [torch.randn(B, 2, 4, 4, dtype=torch.complex128)], double=False),
        Case("cnn", lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(True), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 5)), x(B, 3, 7, 7)),
    ]  # fmt: skip


def embedding_cases() -> list[Case]:
    return [
        Case("embedding", lambda: nn.Embedding(7, D), ids(B, T)),
        Case("embedding, repeated ids", lambda: nn.Embedding(2, D), ids(B, T, most=2)),
        Case("embedding, ids (B,)", lambda: nn.Embedding(7, D), ids(B)),
        Case("embedding, ids in 3-D", lambda: nn.Embedding(7, D), ids(B, 2, T)),
        Case("embedding, padding_idx", lambda: nn.Embedding(7, D, padding_idx=2), ids(B, 9)),
        Case("embedding, negative padding_idx", lambda: nn.Embedding(7, D, padding_idx=-2), ids(B, 9)),
        Case("embedding, scale_grad_by_freq", lambda: nn.Embedding(3, D, scale_grad_by_freq=True), ids(B, T, most=3)),
        Case("embedding, scale and padding", lambda: nn.Embedding(3, D, padding_idx=1, scale_grad_by_freq=True), ids(B, T, most=3)),
        Case("embedding, max_norm", lambda: nn.Embedding(7, D, max_norm=0.5), ids(B, T)),
        Case("embedding, time first", lambda: nn.Embedding(7, D), ids(T, B), dims=[1], out_dim=1, options={"batch_first": False}),
        Case("embedding, time first, T == B", lambda: nn.Embedding(7, D), ids(B, B), dims=[1], out_dim=1, options={"batch_first": False}),
        Case("embedding, int32 ids", lambda: nn.Embedding(7, D), lambda: [torch.randint(0, 7, (B, T), dtype=torch.int32)]),
        Case("position embedding of arange(T)", lambda: Calls(lambda m, h: h + m.p(torch.arange(h.shape[1])), p=nn.Embedding(9, D)), x(B, T, D)),
        Case("position embedding of arange(T), T == B", lambda: Calls(lambda m, h: h * m.p(torch.arange(h.shape[1])), p=nn.Embedding(9, D)), x(B, B, D)),
        Case("position embedding of (1, T)", lambda: Calls(lambda m, h: h * m.p(torch.arange(h.shape[1])[None]), p=nn.Embedding(9, D)), x(B, T, D)),
        Case("position embedding through a slice of the table", lambda: Calls(lambda m, h: h * F.embedding(torch.arange(h.shape[1]), m.p[2:]), p=param(9, D)), x(B, T, D)),
        Case("position embedding of repeated ids, with padding", lambda: Calls(lambda m, h: h * m.p(torch.tensor([[2, 0, 2, 5, 0]])).sin() + m.p(torch.tensor([2, 1, 2, 5, 0])).unsqueeze(0), p=nn.Embedding(9, D, padding_idx=0)), x(B, T, D)),
        Case("rows of a table, selected by constants", lambda: Calls(lambda m, h: h * m.w.index_select(0, torch.tensor([3, 1, 3, 0, 1])) + m.w.index_select(1, torch.tensor([1, 1, 0, 2]))[1:6], w=param(7, D)), x(B, T, D)),
        Case("position embedding scaled by frequency", lambda: Calls(lambda m, h: h * m.p(torch.tensor([2, 0, 2, 5, 0])), p=nn.Embedding(9, D, scale_grad_by_freq=True)), x(B, T, D)),
        Case("position embedding tied to a head", lambda: Calls(lambda m, h: F.linear(h * m.p(torch.tensor([2, 0, 2, 5, 0])), m.p.weight), p=nn.Embedding(9, D)), x(B, T, D)),
        Case("position ids in a buffer", lambda: Calls(lambda m, h: h * m.p(m.i[:, : h.shape[1]]), p=nn.Embedding(9, D), i=torch.arange(9)[None]), x(B, B, D)),
        Case("language model, tied head", lambda: Calls(language_model, embed=nn.Embedding(7, D), position=nn.Embedding(9, D), norm=nn.LayerNorm(D)), ids(B, T)),
        Case("language model, tied head, T == B", lambda: Calls(language_model, embed=nn.Embedding(7, D), position=nn.Embedding(9, D), norm=nn.LayerNorm(D)), ids(B, B)),
        Case("rows by index", lambda: Calls(lambda m, i: m.w[i] ** 2, w=param(7, D)), ids(B, T)),
    ]  # fmt: skip


def norm_cases() -> list[Case]:
    return [
        Case("layer norm", lambda: nn.LayerNorm(D), x(B, T, D)),
        Case("layer norm over two dims", lambda: nn.LayerNorm([T, D]), x(B, 2, T, D)),
        Case("layer norm over all but the batch", lambda: nn.LayerNorm([T, D]), x(B, T, D)),
        Case("layer norm, no bias", lambda: nn.LayerNorm(D, bias=False), x(B, T, D)),
        Case("layer norm, frozen weight", lambda: frozen(nn.LayerNorm(D), "weight"), x(B, T, D)),
        Case("layer norm, time first", lambda: nn.LayerNorm(D), x(B, B, D), dims=[1], out_dim=1, options={"batch_first": False}),
        Case("layer norm on rows", lambda: Calls(lambda m, h: m.n(h.view(-1, D)).view(-1, T, D), n=nn.LayerNorm(D)), x(B, T, D)),
        Case("rms norm", lambda: nn.RMSNorm(D), x(B, T, D)),
        Case("group norm", lambda: nn.GroupNorm(2, 6), x(B, 6, 5)),
        Case("group norm, one value per channel", lambda: nn.GroupNorm(2, 6), x(B, 6)),
        Case("group norm, input with grad", lambda: nn.GroupNorm(2, 6), x(B, 6, 3, 3, grad=True)),
        Case("group norm, frozen bias", lambda: frozen(nn.GroupNorm(2, 6), "bias"), x(B, 6, 5)),
        Case("group norm, frozen weight", lambda: frozen(nn.GroupNorm(2, 6), "weight"), x(B, 6, 5)),
        Case("group norm, transposed input", lambda: Calls(lambda m, h: m.n(h.transpose(1, 2)), n=nn.GroupNorm(2, 6)), x(B, 5, 6)),
        Case("group norm, channels last", lambda: nn.GroupNorm(2, 4), lambda: [torch.randn(B, 4, 3, 3).to(memory_format=torch.channels_last).requires_grad_()]),
        Case("instance norm", lambda: nn.Sequential(nn.InstanceNorm1d(4, affine=True), nn.SiLU()), x(B, 4, 5)),
        Case("instance norm 2d", lambda: nn.Sequential(nn.InstanceNorm2d(4, affine=True), nn.SiLU()), x(B, 4, 5, 5)),
        Case("instance norm 3d", lambda: nn.Sequential(nn.InstanceNorm3d(4, affine=True), nn.SiLU()), x(B, 4, 3, 3, 3)),
        Case("instance norm, running statistics", lambda: nn.Sequential(nn.InstanceNorm1d(4, affine=True, track_running_stats=True), nn.SiLU()), x(B, 4, 5)),
        Case("instance norm, running statistics, eval", lambda: evaluated(nn.InstanceNorm2d(4, affine=True, track_running_stats=True)), x(B, 4, 5, 5)),
        Case("batch norm, eval", lambda: evaluated(nn.BatchNorm2d(4)), x(B, 4, 5, 5)),
        Case("batch norm 1d, eval", lambda: evaluated(nn.BatchNorm1d(4)), x(B, 4)),
    ]  # fmt: skip


def recurrent_cases() -> list[Case]:
    return [
        Case("lstm", lambda: Calls(lambda m, h: m.r(h)[0], r=nn.LSTM(D, 5, 2, batch_first=True, bidirectional=True)), x(B, T, D)),
        Case("gru, T == B", lambda: Calls(lambda m, h: m.r(h)[0], r=nn.GRU(D, 5, batch_first=True)), x(B, B, D)),
        Case("rnn, time first", lambda: Calls(lambda m, h: m.r(h)[0], r=nn.RNN(D, 5)), x(B, B, D), dims=[1], out_dim=1, options={"batch_first": False}),
        Case("cells unrolled by hand", lambda: Calls(unrolled_cell, a=nn.Linear(D, D), b=nn.Linear(D, D)), x(B, T, D)),
        Case("learned first state", lambda: Calls(lambda m, h: m.r(h, m.h0.expand(1, len(h), 5).contiguous())[0], r=nn.GRU(D, 5, batch_first=True), h0=param(1, 1, 5)), x(B, T, D)),
        Case("lstm cell", lambda: Calls(lambda m, h, s, c: m.r(h, (s, c))[0], r=nn.LSTMCell(D, 5)), lambda: [torch.randn(B, D), torch.randn(B, 5), torch.randn(B, 5)]),
        Case("gru cell", lambda: nn.GRUCell(D, 5), lambda: [torch.randn(B, D), torch.randn(B, 5)]),
        Case("rnn cell, no state given", lambda: Calls(lambda m, h: m.r(h, m.r(h)), r=nn.RNNCell(D, D)), x(B, D)),
    ]  # fmt: skip


def derived_cases() -> list[Case]:
    return [
        Case("weight norm", lambda: parametrizations.weight_norm(nn.Linear(D, 5)), x(B, D)),
        Case("weight norm of a conv", lambda: parametrizations.weight_norm(nn.Conv1d(D, 5, 3)), x(B, D, 6)),
        Case("spectral norm", lambda: evaluated(parametrizations.spectral_norm(nn.Linear(D, 5))), x(B, D)),
        Case("orthogonal", lambda: parametrizations.orthogonal(nn.Linear(D, D)), x(B, D)),
        Case("a masked weight", masked_weight, x(B, T, D)),
        Case("x @ W", lambda: Calls(lambda m, h: h @ m.w, w=param(D, 5)), x(B, T, D)),
        Case("W @ x", lambda: Calls(lambda m, h: m.w @ h, w=param(5, T)), x(B, T, D)),
        Case("x @ w, a vector", lambda: Calls(lambda m, h: h @ m.w, w=param(D)), x(B, T, D)),
        Case("addmm", lambda: Calls(lambda m, h: torch.addmm(m.b, h, m.w.t()), w=param(5, D), b=param(5)), x(B, D)),
        Case("einsum", lambda: Calls(lambda m, h: torch.einsum("btd,hde->bhte", h, m.w), w=param(2, D, 5)), x(B, T, D)),
        Case("a weight in chunks", lambda: Calls(lambda m, h: F.linear(h, m.w.chunk(2)[0]) * F.linear(h, m.w.chunk(2)[1]), w=param(10, D)), x(B, D)),
        Case("low-rank update", lambda: Calls(low_rank, base=param(D, D), up=param(D, 2), down=param(2, D)), x(B, T, D)),
        Case("low-rank update, base frozen", lambda: frozen(Calls(low_rank, base=param(D, D), up=param(D, 2), down=param(2, D)), "base"), x(B, T, D)),
        Case("scale and shift", lambda: Calls(lambda m, h: h * m.g + m.b, g=param(D), b=param(1)), x(B, T, D)),
        Case("scale and shift, in place", lambda: Calls(lambda m, h: (h * 2).mul_(m.g).add_(m.b), g=param(D), b=param(1)), x(B, T, D)),
        Case("scale along T == B", lambda: Calls(lambda m, h: h * m.g[:, None], g=param(B)), x(B, B, D)),
        Case("class token", lambda: Calls(lambda m, h: torch.cat([m.c.expand(len(h), -1, -1), h], 1).softmax(1), c=param(1, 1, D)), x(B, T, D)),
        Case("class token padded on", lambda: Calls(lambda m, h: (F.pad(h, (0, 0, 1, 0)) + F.pad(m.c.expand(len(h), 1, -1), (0, 0, 0, T))).softmax(1), c=param(1, 1, D)), x(B, T, D)),
        Case("class token written in", lambda: Calls(class_token_written_in, c=param(1, D)), x(B, T, D)),
        Case("learned queries", lambda: Calls(lambda m, h: m.a(m.q.expand(len(h), -1, -1), h, h)[0], a=nn.MultiheadAttention(D, 2, batch_first=True), q=param(1, 2, D)), x(B, T, D)),
        Case("a weight added to a view", lambda: Calls(added_to_a_view, a=nn.Linear(D, D), b=param(D)), x(B, T, D)),
        Case("index_add", lambda: Calls(lambda m, h: torch.zeros_like(h[:, 0]).index_add(1, torch.tensor([0, 0, 1, 2]), m.a(h[:, 0])), a=nn.Linear(D, D)), x(B, T, D)),
        Case("pooled by length", lambda: Calls(lambda m, h, n: m.a(h)[torch.arange(len(h)), n], a=nn.Linear(D, D)), lambda: [torch.randn(B, T, D), torch.tensor([4, 0, 2])]),
        Case("rows of a mask", lambda: Calls(rows_of_a_mask, a=nn.Linear(D, D)), lambda: [torch.randn(B, T, D), torch.rand(B, T) > 0.4]),
        Case("written in place", lambda: Calls(written_in_place, a=nn.Linear(D, D), b=nn.Linear(D, D), c=nn.Linear(2 * D, 5)), x(B, T, D)),
        Case("prelu", lambda: nn.PReLU(D), x(B, D)),
        Case("bilinear", lambda: nn.Bilinear(D, 3, 5), lambda: [torch.randn(B, D), torch.randn(B, 3)]),
        Case("transposed conv", lambda: nn.ConvTranspose2d(3, 4, 3, stride=2, padding=1), x(B, 3, 4, 4)),
        Case("temperature", lambda: Calls(lambda m, h: m.a(h) / m.t.exp(), a=nn.Linear(D, 5), t=param()), x(B, D)),
        Case("clamped scale", lambda: Calls(lambda m, h: m.a(h) * m.s.clamp(max=math.log(2)), a=nn.Linear(D, 5), s=param(1)), x(B, D)),
        Case("ParameterList", lambda: Calls(lambda m, h: sum(h * p for p in m.p), p=nn.ParameterList([param(D), param(D)])), x(B, D)),
    ]  # fmt: skip


def written_cases() -> list[Case]:
    a, b = (lambda: nn.Linear(D, 5)), (lambda: nn.Linear(D, D))
    return [
        Case("a constant written over a sample", lambda: Calls(null_where, a=a()), samples_and_flags),
        Case("a learned null written over a sample", lambda: Calls(null_where, a=a(), null=param(D)), samples_and_flags),
        Case("an id written over a sample's", lambda: Calls(masked_labels, e=nn.Embedding(7, D)), lambda: [torch.randint(0, 4, (B,)), torch.tensor([False, True, False])]),
        Case("all ids of a sample masked", lambda: Calls(masked_labels, e=nn.Embedding(7, D)), lambda: [torch.randint(0, 4, (B, T)), torch.tensor([[0], [1], [0]]).bool().expand(B, T)]),
        Case("a part that some samples lack", lambda: Calls(optional_part, a=a(), b=b()), samples_and_flags),
        Case("a part that some samples lack, in zeros", lambda: Calls(made_then_written, a=a(), b=b()), samples_and_flags),
        Case("doubled with constants", lambda: Calls(lambda m, h: sum(m.a(torch.cat([h, torch.ones(len(h), D, dtype=h.dtype)])).tanh().chunk(2)), a=a()), x(B, D)),
        Case("doubled with a learned null", lambda: Calls(lambda m, h: torch.sub(*m.a(torch.cat([h, m.n.expand(len(h), D)])).tanh().chunk(2)), a=a(), n=param(1, D)), x(B, D)),
        Case("written through a view", lambda: Calls(written_through_a_view, a=a()), x(B, D)),
        Case("experts by a mask", lambda: Calls(lambda m, h: experts(m, h, lambda mask: mask), gate=nn.Linear(D, 3), w=param(3, D)), x(B, T, D)),
        Case("experts by nonzero", lambda: Calls(lambda m, h: experts(m, h, lambda mask: mask.nonzero().squeeze(1)), gate=nn.Linear(D, 3), w=param(3, D)), x(B, T, D)),
        Case("experts added up", lambda: Calls(experts_added_up, gate=nn.Linear(D, 3), w=param(3, D, D)), x(B, T, D)),
        Case("experts added up, T == B", lambda: Calls(experts_added_up, gate=nn.Linear(D, 3), w=param(3, D, D)), x(B, B, D)),
        Case("experts sorted", lambda: Calls(experts_sorted, gate=nn.Linear(D, 3), w=param(3, D, D)), x(B, T, D)),
        Case("written into weights", lambda: Calls(written_into_weights, a=nn.Linear(D, D), c=param(D)), x(B, T, D)),
        Case("ragged", lambda: Calls(ragged, a=nn.Linear(D, 5, bias=False)), x(B, T, D)),
        Case("unpadded", lambda: Calls(unpadded, a=nn.Linear(D, D)), x(B, T, D)),
        Case("picked and put back", lambda: Calls(picked_and_put_back, a=nn.Linear(D, D)), x(B, T, D)),
        Case("gru on windows", lambda: Calls(lambda m, h: m.r(h.flatten(0, 1))[0].unflatten(0, h.shape[:2]), r=nn.GRU(D, 2, batch_first=True, bidirectional=True)), x(B, 2, T, D)),
        Case("parts of a weight", lambda: Calls(lambda m, h: sum(h @ w.T * k for k, w in enumerate(m.w.chunk(3), 1)) + h @ m.w[1:5].t() + F.linear(h, m.v[1]) - h @ m.v.mT.unbind()[0], w=param(12, D), v=param(3, 4, D)), x(B, T, D)),
        Case("shapes changed in place", lambda: Calls(lambda m, h: m.a(h.clone().unsqueeze_(0).transpose_(1, 2).squeeze_(0)).transpose(0, 1), a=a()), x(B, B, D)),
        Case("nothing, then something", lambda: Calls(lambda m, t: m.e(t[:, :0]).sum(1) + m.e(t[:, 0]), e=nn.Embedding(7, D)), ids(B, T)),
        Case("rows of a transposed weight", lambda: Calls(lambda m, h: h * m.w.t()[0] + h.sin() * m.w.T.unbind()[1] - h.cos() * m.v.mT[1][2], w=param(B, B), v=param(2, B, B)), x(B, B)),
        Case("integers beside weights", lambda: Calls(lambda m, t: torch.cat([t, m.w.expand(len(t), -1), torch.arange(2).expand(len(t), 2)], 1) * (t.double() @ torch.arange(1, 1 + T).double().sin())[:, None], w=param(T)), ids(B, T)),
        Case("one sample after the other, divided by", lambda: Calls(lambda m, h: torch.stack([m.w / row for row in h]), w=param(D)), x(B, D)),
        Case("chosen rows beside a learned token", lambda: Calls(chosen_beside_a_token, a=nn.Linear(2 * D, D), w=param(D)), x(B, T, D)),
        Case("embedding of chosen rows, scaled by frequency", lambda: Calls(lambda m, t: torch.zeros(*t.shape, D, dtype=m.e.weight.dtype).index_put((t > 1,), m.e((t - 2)[t > 1])), e=nn.Embedding(5, D, scale_grad_by_freq=True)), ids(B, T)),
        Case("windows by strides", lambda: Calls(lambda m, h: m.a(h.as_strided((len(h), 4, 2, D), (T * D, D, D, 1))), a=a()), x(B, T, D)),
        Case("inverse of a matrix of each sample", lambda: Calls(lambda m, h: m.a(torch.linalg.cholesky(h @ h.mT + 3 * torch.eye(D, dtype=h.dtype)).mT), a=a()), x(B, D, D)),
        Case("numbers of one sample after the other", lambda: Calls(one_after_the_other, a=a(), w=param(2)), x(B, D)),
        Case("cat into out=", lambda: Calls(into_out, a=nn.Linear(2 * D, 5)), x(B, D)),
        Case("a weight in the type of a sample", lambda: Calls(lambda m, h: h * m.w.type_as(h) + m.v.to(h), w=param(D), v=param(D)), x(B, D)),
        Case("conv of each sample without a batch", lambda: Calls(lambda m, h: torch.stack([m.c(i) for i in h]), c=nn.Conv1d(D, 5, 3)), x(B, D, 7)),
        Case("lstm of each sample", lambda: Calls(lambda m, h: torch.cat([m.r(h[n : n + 1])[0] for n in range(len(h))]), r=nn.LSTM(D, 5, batch_first=True)), x(B, T, D)),
        Case("lstm cell from learned states", lambda: Calls(learned_states, r=nn.LSTMCell(D, 4), h0=param(1, 4), c0=param(1, 4)), x(2, T, D)),
        Case("heads in front of the batch", lambda: Calls(heads_first, t=param(2, D, 3)), x(B, T, D)),
    ]  # fmt: skip


def bag_cases() -> list[Case]:
    def bag(**options: Any) -> Callable[[], nn.Module]:
        return lambda: nn.EmbeddingBag(7, D, **options)

    def weighted(m: Any, tokens: Tensor) -> Tensor:
        return m.e(tokens, per_sample_weights=m.w[tokens])

    def by_offsets(m: Any, tokens: Tensor) -> Tensor:
        width = tokens.shape[1]
        return m.e(
            tokens.flatten(), torch.arange(0, tokens.numel() + 1, width)[: None if m.e.include_last_offset else -1]
        )

    def two_bags(m: Any, tokens: Tensor) -> Tensor:
        return m.e(tokens.flatten(), torch.arange(0, tokens.numel(), 2)).unflatten(0, (len(tokens), -1)).sin()

    tokens = ids(B, T)
    return [
        *(Case(f"bag, {mode}", bag(mode=mode), tokens) for mode in ("sum", "mean", "max")),
        *(Case(f"bag, {mode}, padding", bag(mode=mode, padding_idx=2), tokens) for mode in ("sum", "mean", "max")),
        Case("bag scaled by frequency of embedding", bag(mode="sum", scale_grad_by_freq=True), tokens),
        Case("bag, T == B", bag(mode="mean"), ids(B, B)),
        Case("bag, learned weights of rows", lambda: Calls(weighted, e=nn.EmbeddingBag(7, D, mode="sum"), w=param(7)), tokens),
        Case("bag, learned weights of places", lambda: Calls(lambda m, t: m.e(t, per_sample_weights=m.w.expand(len(t), -1)), e=nn.EmbeddingBag(7, D, mode="sum"), w=param(T)), tokens),
        Case("bag by offsets", lambda: Calls(by_offsets, e=nn.EmbeddingBag(7, D, mode="max")), tokens),
        Case("bag by offsets, last included", lambda: Calls(by_offsets, e=nn.EmbeddingBag(7, D, include_last_offset=True)), tokens),
        Case("two bags of each sample", lambda: Calls(two_bags, e=nn.EmbeddingBag(7, D, mode="mean")), ids(B, 4)),
    ]  # fmt: skip


def product_cases() -> list[Case]:
    """Products and other functions with rules that are no layers of torch."""

    def calls(forward: Callable[..., Any], *shape: int, **members: Callable[[], Any]) -> tuple[Any, ...]:
        return (lambda: Calls(forward, **{name: make() for name, make in members.items()})), x(*shape)

    def w(*shape: int) -> Callable[[], nn.Parameter]:
        return lambda: param(*shape)

    return [
        Case("addmm", *calls(lambda m, h: torch.addmm(m.b, h, m.w, beta=0.5, alpha=2), B, D, b=w(5), w=w(D, 5))),
        Case("addmm of rows", *calls(lambda m, h: h.flatten(0, 1).addmm(h.flatten(0, 1), m.w).view_as(h), B, T, D, w=w(D, D))),
        Case("mm", *calls(lambda m, h: torch.mm(h, m.w), B, D, w=w(D, 5))),
        Case("matmul, weight last", *calls(lambda m, h: h.unsqueeze(1) @ m.w, B, T, D, w=w(D, 5))),
        Case("matmul, weight first", *calls(lambda m, h: m.w @ h, B, D, T, w=w(5, D))),
        Case("matmul, weight first, batch last", *calls(lambda m, h: (m.w @ h.T).T, B, D, w=w(5, D))),
        Case("matmul, weight first, learned queries", *calls(lambda m, h: (m.q @ m.k(h).mT).softmax(-1) @ m.k(h), B, T, D, q=w(5, D), k=lambda: nn.Linear(D, D))),
        Case("matmul by a vector", *calls(lambda m, h: h @ m.w, B, T, D, w=w(D))),
        Case("matmul by a stack", *calls(lambda m, h: h.unsqueeze(1) @ m.w, B, T, D, w=w(2, D, 3))),
        Case("bmm by heads", *calls(lambda m, h: torch.bmm(h.transpose(0, 1).flatten(2), m.w).transpose(0, 1), B, 2, D, w=w(2, D, 3))),
        Case("bmm by heads, rows", *calls(lambda m, h: torch.bmm(h.permute(2, 0, 1, 3).flatten(1, 2), m.w).tanh().unflatten(1, (-1, T)).transpose(0, 1), B, T, 2, D, w=w(2, D, 3))),
        Case("baddbmm", *calls(lambda m, h: torch.baddbmm(m.b, h, m.w.expand(len(h), -1, -1)), B, T, D, b=w(1, 1, 3), w=w(D, 3))),
        Case("einsum", *calls(lambda m, h: torch.einsum("btd,de->bte", h, m.w), B, T, D, w=w(D, 5))),
        Case("einsum to heads", *calls(lambda m, h: torch.einsum("dhe,btd->bhte", m.w, h), B, T, D, w=w(D, 2, 3))),
        Case("einsum from heads", *calls(lambda m, h: torch.einsum("bthe,hed->btd", h, m.w), B, T, 2, 3, w=w(2, 3, D))),
        Case("einsum to heads and back", *calls(lambda m, h: torch.einsum("hed,bhte->tbd", m.w, torch.einsum("btd,hed->bhte", h, m.w).tanh()).transpose(0, 1), B, T, D, w=w(2, 3, D))),
        Case("einsum, sums over a dim", *calls(lambda m, h: torch.einsum("btd,de->be", h, m.w), B, T, D, w=w(D, 5))),
        Case("einsum, by entry", *calls(lambda m, h: torch.einsum("btd,d->btd", h, m.w), B, T, D, w=w(D))),
        Case("einsum to a number", *calls(lambda m, h: torch.einsum("btd,td->b", h, m.w), B, T, D, w=w(T, D))),
        Case("einsum of a number", *calls(lambda m, h: torch.einsum("i,b->bi", m.w, h), B, w=w(D))),
        Case("einsum, broadcast", *calls(lambda m, h: torch.einsum("bi,ij->bj", h, m.w), B, D, w=w(1, 2))),
        Case("einsum of three", *calls(lambda m, h: torch.einsum("btd,de,ef->btf", h, m.w, m.v), B, T, D, w=w(D, 3), v=w(3, 5))),
        Case("tensordot", *calls(lambda m, h: torch.tensordot(h, m.w, ([1, 2], [1, 0])), B, T, D, w=w(D, T, 3))),
        Case("bilinear", lambda: Calls(lambda m, h: m.l(h, h.sin()), l=nn.Bilinear(D, D, 5)), x(B, T, D)),
        Case("sums and products", *calls(lambda m, h: (h + m.a) * m.b - m.c / (2 + h * h) - (m.d - h) / m.e, B, T, D, a=w(D), b=w(T, 1), c=w(1, 1, D), d=w(), e=w(T, D))),
        Case("sums and products in place", *calls(lambda m, h: h.clone().add_(m.a, alpha=2).mul_(m.b).sub_(m.c).div_(m.d), B, T, D, a=w(D), b=w(T, 1), c=w(1, 1, D), d=w(1))),
        Case("products of more dims than the samples", *calls(lambda m, h: (h * m.w).transpose(0, 1), B, D, w=w(3, 1, D))),
        Case("prelu", lambda: nn.PReLU(D), x(B, D, T)),
        Case("prelu, one number", lambda: nn.PReLU(), x(B, D, T)),
        Case("prelu of rows", lambda: nn.PReLU(D), x(B, D)),
        Case("rms norm", lambda: nn.RMSNorm(D), x(B, T, D)),
        Case("rms norm of two dims", lambda: nn.RMSNorm([T, D], eps=1e-3), x(B, T, D)),
        *(Case(f"transposed convolution {d}d", lambda d=d: (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[d - 1](4, 6, 3, stride=2, padding=1, output_padding=1, groups=2), x(B, 4, *(4, 3, 3)[:d])) for d in (1, 2, 3)),
        Case("transposed convolution, dilated", lambda: nn.ConvTranspose2d(4, 6, (3, 2), stride=(1, 2), dilation=(3, 1), output_padding=(2, 1), bias=False), x(B, 4, 4, 3)),
        *(Case(f"steps of {kind.__name__}", lambda kind=kind: Calls(stepped, r=kind(D, 3)), x(B, T, D)) for kind in (nn.RNNCell, nn.LSTMCell, nn.GRUCell)),
        Case("a step of relu", lambda: Calls(stepped, r=nn.RNNCell(D, 3, nonlinearity="relu", bias=False)), x(B, T, D)),
    ]  # fmt: skip


def stepped(m: Any, h: Tensor) -> Any:
    state = None
    for step in h.unbind(1):
        state = m.r(step, state)
    return state


def attention_cases() -> list[Case]:
    return [
        Case("attention from one projection", lambda: Calls(attention, qkv=nn.Linear(D, 3 * D), out=nn.Linear(D, D)), x(B, T, D)),
        Case("attention, T == B", lambda: Calls(attention, qkv=nn.Linear(D, 3 * D), out=nn.Linear(D, D)), x(B, B, D)),
        Case("MultiheadAttention", lambda: Calls(lambda m, h: m.a(h, h, h)[0], a=nn.MultiheadAttention(D, 2, batch_first=True)), x(B, T, D)),
        Case("MultiheadAttention, time first, T == B", lambda: Calls(lambda m, h: m.a(h, h, h, need_weights=False)[0], a=nn.MultiheadAttention(D, 2)), x(B, B, D), dims=[1], out_dim=1, options={"batch_first": False}),
        Case("encoder layer", lambda: nn.TransformerEncoderLayer(D, 2, 6, 0.0, batch_first=True), x(B, T, D)),
        Case("encoder layer, eval", lambda: evaluated(nn.TransformerEncoderLayer(D, 2, 6, batch_first=True)), x(B, T, D)),
        Case("windows", lambda: Calls(windows, mix=nn.Linear(4, 4)), x(B, 4, 4, 2)),
    ]  # fmt: skip


def checkpoint_cases() -> list[Case]:
    def block() -> nn.Sequential:
        return nn.Sequential(nn.Linear(D, 6), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, D))

    def through(reentrant: bool) -> Callable[..., Tensor]:
        return lambda m, h: m.c(checkpoint(m.b, m.a(h), use_reentrant=reentrant))

    def closure(m: Any, h: Tensor) -> Tensor:
        return checkpoint(
            lambda h: h + F.linear(h.transpose(0, 1), m.w.t()).transpose(0, 1).relu(), h, use_reentrant=False
        )

    def parts() -> dict[str, nn.Module]:
        return {"a": nn.Linear(D, D), "b": block(), "c": nn.Linear(D, 5)}

    return [
        Case("checkpoint", lambda: Calls(through(False), **parts()), x(B, T, D)),
        Case("reentrant checkpoint", lambda: Calls(through(True), **parts()), x(B, T, D)),
        Case("checkpoint of the input", lambda: Calls(lambda m, h: checkpoint(m.b, h, use_reentrant=False), b=block()), x(B, T, D)),
        Case("reentrant checkpoint of the input", lambda: Calls(lambda m, h: checkpoint(m.b, h, use_reentrant=True), b=block()), x(B, T, D, grad=True)),
        Case("checkpoint of a closure", lambda: Calls(closure, w=param(D, D)), x(B, B, D)),
        Case("reentrant checkpoint with weights as arguments", lambda: Calls(lambda m, h: checkpoint(lambda h, w, p: F.linear(h, w).tanh() + p, m.a(h), m.w, m.p(torch.arange(h.shape[1])), use_reentrant=True), a=nn.Linear(D, D), w=param(D, D), p=nn.Embedding(9, D)), x(B, T, D)),
        Case("checkpoint in a checkpoint", lambda: Calls(lambda m, h: checkpoint(lambda h: m.c(checkpoint(m.b, h, use_reentrant=False)), h, use_reentrant=False), b=block(), c=nn.Linear(D, 5)), x(B, T, D)),
    ]  # fmt: skip


CASES: list[Case] = [
    *linear_cases(),
    *conv_cases(),
    *embedding_cases(),
    *norm_cases(),
    *recurrent_cases(),
    *derived_cases(),
    *written_cases(),
    *bag_cases(),
    *product_cases(),
    *attention_cases(),
    *checkpoint_cases(),
]

# Projections are defined for real gradients only.
REAL_CASES = [case for case in CASES if "complex" not in case.name]

# keep="norms" and keep="clip" refuse reentrant checkpoints.
STREAMED_CASES = [case for case in REAL_CASES if "reentrant" not in case.name]
