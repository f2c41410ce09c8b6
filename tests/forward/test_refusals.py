"""Models without per-sample gradients are refused with the place, and nothing is changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from persample import PerSampleError, SamplesMixed, call_for_per_sample_grads, record
from tests.support.cases import B, Calls, D, T, param


class Square(torch.autograd.Function):
    """An autograd.Function of samples and a weight."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(h, w)
        return h * w * w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        h, w = ctx.saved_tensors
        return grad * w * w, (2 * grad * h * w).sum_to_size(w.shape)


def linear(**more: Any) -> dict[str, Any]:
    return {"a": nn.Linear(D, D), **more}


MIXING: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str]] = {
    "batch norm": (lambda: nn.BatchNorm1d(D), (B, D), "BatchNorm1d"),
    "batch norm in the middle": (lambda: nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D), nn.Linear(D, D)), (B, D), "'1'"),
    "batch norm 2d": (lambda: nn.BatchNorm2d(D), (B, D, 3, 3), "BatchNorm2d"),
    "batch norm, not affine": (lambda: nn.Sequential(nn.BatchNorm1d(D, affine=False), nn.Linear(D, D)), (B, D), "'0'"),
    "batch norm, not affine, last": (lambda: nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D, affine=False)), (B, D), "'1'"),
    "batch norm, frozen": (lambda: nn.Sequential(nn.BatchNorm1d(D).requires_grad_(False), nn.Linear(D, D)), (B, D), "'0'"),
    "batch norm, no statistics, eval": (lambda: nn.BatchNorm1d(D, track_running_stats=False).eval(), (B, D), "BatchNorm1d"),
    "mean taken off": (lambda: Calls(lambda m, h: m.a(h - h.mean(0)), **linear()), (B, D), "mean"),
    "mean kept, taken off": (lambda: Calls(lambda m, h: m.a(h - h.mean(0, keepdim=True)), **linear()), (B, T, D), "mean"),
    "mean taken off after": (lambda: Calls(lambda m, h: (y := m.a(h)) - y.mean(0), **linear()), (B, D), "mean"),
    "standardised": (lambda: Calls(lambda m, h: m.a(h / h.std(0)), **linear()), (B, D), "std"),
    "divided by the largest": (lambda: Calls(lambda m, h: m.a(h / h.amax()), **linear()), (B, D), "amax"),
    "softmax over the batch": (lambda: Calls(lambda m, h: m.a(h.softmax(0)), **linear()), (B, D), "softmax"),
    "cumulative sum over the batch": (lambda: Calls(lambda m, h: m.a(h.cumsum(0)), **linear()), (B, D), "cumsum"),
    "sorted over the batch": (lambda: Calls(lambda m, h: m.a(h.sort(0).values), **linear()), (B, D), "sort"),
    "normalised over the batch": (lambda: Calls(lambda m, h: m.a(F.normalize(h, dim=0)), **linear()), (B, D), "normalize"),
    "neighbour added": (lambda: Calls(lambda m, h: m.a(h + h.roll(1, 0)), **linear()), (B, D), "add"),
    "mirror added": (lambda: Calls(lambda m, h: m.a(h + h.flip(0)), **linear()), (B, D), "add"),
    "mirror added after": (lambda: Calls(lambda m, h: (y := m.a(h)) + y.flip(0), **linear()), (B, D), "add"),
    "softmax over some samples": (lambda: Calls(lambda m, h: m.a(h[1:3].softmax(0)), **linear()), (4, D), "softmax"),
    "an integer statistic": (lambda: Calls(lambda m, h: m.a(h) * (h > 0).long().cumsum(0), **linear()), (B, D), "cumsum"),
    "a flag of the batch": (lambda: Calls(lambda m, h: torch.where((h > 0).any(), m.a(h), h), **linear()), (B, D), "any"),
    "sorted, outside the gradient": (lambda: Calls(lambda m, h: m.a(h) * h.detach().sort(0).values, **linear()), (B, D), "sort"),
    "in-batch negatives": (lambda: Calls(lambda m, h: F.triplet_margin_loss(y := m.a(h), y + 0.1, y.roll(1, 0)), **linear()), (B, D), "triplet"),
    "in-batch negatives, by cosine": (lambda: Calls(lambda m, h: F.cosine_embedding_loss(y := m.a(h), y.roll(1, 0), -torch.ones(len(h))), **linear()), (B, D), "cosine"),
    "mirrored targets": (lambda: Calls(lambda m, h: F.mse_loss(y := m.a(h), y.flip(0)), **linear()), (B, D), "mse"),
    "classes across the batch": (lambda: Calls(lambda m, h: F.cross_entropy(m.a(h).t(), torch.zeros(D).long()), **linear()), (B, D), "cross_entropy"),
    "a loss with weighted classes": (lambda: Calls(lambda m, h: F.cross_entropy(m.a(h), (h[:, 0] > 0).long(), m.c), c=torch.rand(D), **linear()), (B, D), "cross_entropy"),
    "a quotient by the loss": (lambda: Calls(lambda m, h: torch.ones((), dtype=h.dtype) / m.a(h).square().sum(), **linear()), (B, D), "truediv|div"),
    "a mean that is not the loss": (lambda: Calls(lambda m, h: m.a(h).mean(0), **linear()), (B, D), "mean"),
    "differences": (lambda: Calls(lambda m, h: m.a(h[1:] - h[:-1]), **linear()), (B, D), "sub"),
    "contrastive logits": (lambda: Calls(lambda m, h: (y := m.a(h)) @ y.t(), **linear()), (B, D), "matmul"),
    "attention across the batch": (lambda: Calls(lambda m, h: m.a(F.scaled_dot_product_attention(h, h, h)), **linear()), (B, D), "attention"),
    "time-first attention on batch-first input": (lambda: Calls(lambda m, h: m.a(h, h, h)[0], a=nn.MultiheadAttention(D, 2)), (B, B, D), "a"),
    "time-first lstm on batch-first input": (lambda: Calls(lambda m, h: m.a(h)[0], a=nn.LSTM(D, D)), (B, B, D), "lstm"),
    "layer norm over the batch": (lambda: Calls(lambda m, h: m.a(h.t()), a=nn.LayerNorm(B)), (B, D), "layer_norm"),
    "linear over the batch": (lambda: Calls(lambda m, h: m.a(h.t()), a=nn.Linear(B, D)), (B, D), "linear"),
    "conv over the batch": (lambda: Calls(lambda m, h: m.a(h.permute(1, 2, 0)), a=nn.Conv1d(D, D, 2)), (B, T, D), "conv1d"),
    "samples as channels": (lambda: Calls(lambda m, h: m.a(h[None]), a=nn.Conv1d(B, D, 2)), (B, T), "conv1d"),
    "einsum over the batch": (lambda: Calls(lambda m, h: torch.einsum("bd,be,de->b", h, h.mean(0, keepdim=True).expand_as(h), m.w), w=param(D, D)), (B, D), "mean"),
    "equal to a neighbour": (lambda: Calls(lambda m, h: m.a(h) * (h.round() == h.round().roll(1, 0)), **linear()), (B, D), "different orders"),
    "close to a neighbour": (lambda: Calls(lambda m, h: m.a(h) * torch.isclose(h, h.roll(1, 0), atol=1.0), **linear()), (B, D), "different orders"),
    "norms over the batch, limited": (lambda: Calls(lambda m, h: m.a((10 * h).renorm(2, 1, 5.0)), **linear()), (B, D), "renorm"),
    "the first of the sorted": (lambda: Calls(lambda m, h: m.a(h[h[:, 0].argsort()])[:2], **linear()), (B, D), "by position"),
    "the first of the chosen": (lambda: Calls(lambda m, h: m.a(h[(h[:, 0] > -9).logical_and(h[:, 1] != h[0, 1])])[:1], **linear()), (B, D), "by position"),
    "half of the chosen": (lambda: Calls(lambda m, h: m.a(h.flatten(0, 1)[(h > 0).flatten(0, 1)[:, 0]]).chunk(2)[0], **linear()), (B, T, D), "by position"),
    "scaled by rank": (lambda: Calls(lambda m, h: m.a(h[h[:, 0].argsort()]) * torch.arange(1.0, 1 + len(h))[:, None], **linear()), (B, D), "mul"),
    "a row for each rank": (lambda: Calls(lambda m, h: m.a(h) * m.w[h[:, 0].argsort().argsort()], w=param(B, D), **linear()), (B, D), "positions that depend"),
    "ranks as numbers": (lambda: Calls(lambda m, h: m.a(h) * h[:, :1].squeeze(1).argsort().argsort()[:, None], **linear()), (B, D), "computes with indices"),
    "constants in the order of a mask": (lambda: Calls(lambda m, h: m.a(h.masked_scatter(h > 0, m.c)), c=torch.rand(B * D), **linear()), (B, D), "masked_scatter"),
    "the expert that most vote for": (lambda: Calls(lambda m, h: h @ m.w[m.a(h).sum(0).argmax()], w=param(D, D, 2), **linear()), (B, D), "sum"),
    "the first expert that anybody wants": (lambda: Calls(lambda m, h: h * m.w[m.a(h).argmax(1).unique()[0]], w=param(D, D), **linear()), (B, D), "unique"),
    "a step that all choose": (lambda: Calls(lambda m, h: m.a(h[:, h.sum((0, 2)).argmax()]), **linear()), (B, T, D), "argmax|sum"),
    "chosen from a neighbour's order": (lambda: Calls(lambda m, h: m.a(h.gather(1, h.roll(1, 0).argsort(1))), **linear()), (B, D), "by values of another sample"),
    "a table by two samples' numbers": (lambda: Calls(lambda m, h: m.a(h) * m.c[h.argmax(1), h.roll(1, 0).argmax(1)][:, None], c=torch.rand(D, D), **linear()), (B, D), "by values of another sample"),
    "added to another's row": (lambda: Calls(lambda m, h: m.a(torch.zeros_like(h).index_add_(0, torch.tensor([1, 2, 0]), h)), **linear()), (B, D), "over entries of another"),
    "two rows added into one": (lambda: Calls(lambda m, h: m.a(torch.zeros(B, D, dtype=h.dtype).index_add_(0, torch.tensor([0, 0, 1]), h)), **linear()), (B, D), "several samples"),
    "group norm over the batch": (lambda: Calls(lambda m, h: m.a(h[None]), a=nn.GroupNorm(1, B)), (B, T), "group_norm"),
}  # fmt: skip


@pytest.mark.parametrize("name", MIXING)
def test_mixed_samples_are_refused_with_the_place(name: str) -> None:
    make, shape, place = MIXING[name]
    module = make().double()
    with pytest.raises(SamplesMixed, match=place):
        output = call_for_per_sample_grads(module)(torch.randn(shape, dtype=torch.float64))
        output.sin().sum().backward()
    assert not any(hasattr(p, "grad_sample") for p in module.parameters())
    assert all(p.grad is None for p in module.parameters())


def write_at(at: Any, value: Any) -> Callable[[Tensor, Any], Tensor]:
    def write(rows: Tensor, m: Any) -> Tensor:
        rows = rows.clone()
        rows[at] = m.w if value is None else value
        return rows

    return write


BY_PLACE: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "the first is set": write_at(0, 0.0),
    "the first is learned": write_at(0, None),
    "the first two are set": write_at(slice(2), 0.0),
    "some are set by number": write_at(torch.tensor([0, 1]), 0.0),
    "index_fill": lambda rows, m: rows.index_fill(0, torch.tensor([0]), 0.0),
    "index_add": lambda rows, m: rows.index_add(0, torch.tensor([0]), torch.ones(1, D, dtype=rows.dtype)),
    "triu": lambda rows, m: rows.triu(),
    "beside their numbers": lambda rows, m: torch.cat([rows[:, 1:], torch.arange(len(rows))[:, None]], 1),
    "beside rows of a table": lambda rows, m: torch.stack([rows, m.table[: len(rows)]], 2).sum(2),
    "the first is taken": lambda rows, m: rows[:1],
    "times their numbers": lambda rows, m: rows * torch.arange(len(rows))[:, None],
    "the first two by themselves": lambda rows, m: torch.cat(
        [part * k for k, part in enumerate(rows.split([2, len(rows) - 2]))]
    ),
    "one marked": lambda rows, m: rows * write_at(0, 1.0)(torch.zeros_like(rows), m),
}


@pytest.mark.parametrize("name", BY_PLACE)
def test_positions_of_masked_rows_cannot_be_used(name: str) -> None:
    def forward(m: Any, h: Tensor, there: Tensor) -> Tensor:
        return m.a(BY_PLACE[name](h[there], m))

    module = Calls(forward, w=param(D), table=param(8, D), **linear()).double()
    with pytest.raises(SamplesMixed):
        there = torch.tensor([True, True, False, True])
        call_for_per_sample_grads(module)(torch.randn(4, D, dtype=torch.float64), there).sum().backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_mixtures_in_half_precision(dtype: torch.dtype) -> None:
    for forward in (
        lambda m, h: m.a(h.softmax(0)),
        lambda m, h: m.a(F.normalize(h, dim=0)),
        lambda m, h: F.mse_loss(y := m.a(h), y.roll(1, 0)),
    ):
        with pytest.raises(SamplesMixed):
            call_for_per_sample_grads(Calls(forward, **linear()).to(dtype))(
                torch.randn(64, D, dtype=dtype)
            ).sum().backward()


class Reversible(torch.autograd.Function):
    """Runs a module without gradients, and again in backward."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, module: nn.Module) -> Tensor:
        ctx.module = module
        ctx.save_for_backward(h)
        return module(h)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        with torch.enable_grad():
            h = ctx.saved_tensors[0].detach().requires_grad_()
            ctx.module(h).backward(grad)
        return h.grad, None


@pytest.mark.parametrize("called", [True, False])
def test_weights_inside_a_custom_function_are_refused(called: bool) -> None:
    module = Calls(lambda m, h: m.b(Reversible.apply(m.b(h), m.a)), b=nn.Linear(D, D), **linear())
    h = torch.randn(B, D)
    with pytest.raises(PerSampleError, match="ReversibleBackward"):
        if called:
            call_for_per_sample_grads(module)(h)
        else:
            with record(module):
                module(h)
    assert all(p.grad is None for p in module.parameters())


@pytest.mark.parametrize("name", [n for n in MIXING if n.startswith("batch norm") and "eval" not in n])
def test_batch_norm_in_eval_is_recorded(name: str) -> None:
    make, shape, _ = MIXING[name]
    module = make().eval()
    call_for_per_sample_grads(module)(torch.randn(shape)).sum().backward()
    assert all(hasattr(p, "grad_sample") for p in module.parameters() if p.requires_grad)


def test_refused_call_restores_statistics_and_rng() -> None:
    module = nn.Sequential(nn.Linear(D, D), nn.Dropout(), nn.BatchNorm1d(D))
    before = {name: b.clone() for name, b in module.named_buffers()}
    rng = torch.get_rng_state()
    with pytest.raises(SamplesMixed):
        call_for_per_sample_grads(module)(torch.randn(B, D, generator=torch.Generator()))
    assert torch.equal(torch.get_rng_state(), rng)
    for name, buffer in module.named_buffers():
        assert torch.equal(buffer, before[name]), name


def test_statistics_of_the_batch_that_no_weight_uses() -> None:
    def forward(m: Any, h: Tensor) -> Tensor:
        if (h > -100).all():
            h = h[:, : int((h.abs() >= 0).sum(1).max())]
        return m.a(h)

    module = Calls(forward, **linear())
    call_for_per_sample_grads(module)(torch.randn(B, D)).sum().backward()
    assert module.a.weight.grad_sample.shape == (B, D, D)


def test_mixed_output_that_the_loss_does_not_use() -> None:
    module = Calls(lambda m, h: (m.a(h), m.a(h).std(0)), **linear())
    call_for_per_sample_grads(module)(torch.randn(B, D))[0].sum().backward()
    assert module.a.weight.grad_sample.shape == (B, D, D)


def test_loss_inside_the_model() -> None:
    torch.manual_seed(0)
    module = Calls(lambda m, h, y: 2 * F.cross_entropy(m.a(h), y), **linear())
    h, y = torch.randn(B, D), torch.tensor([0, 2, 1])
    call_for_per_sample_grads(module, loss_reduction="mean")(h, y).backward()
    for n in range(B):
        (expected,) = torch.autograd.grad(module(h[n : n + 1], y[n : n + 1]), module.a.weight)
        torch.testing.assert_close(module.a.weight.grad_sample[n], expected)


@pytest.mark.parametrize(
    "forward",
    [
        lambda m, h, y: F.cross_entropy(m.a(h), y) ** 2,
        lambda m, h, y: F.cross_entropy(m.a(h), y) * m.a(h).sum(),
        lambda m, h, y: F.cross_entropy(m.a(h), y) * m.a(h),
        lambda m, h, y: m.a(h).logsumexp((0, 1)),
    ],
)
def test_loss_that_is_no_sum_over_samples_is_refused(forward: Callable[..., Tensor]) -> None:
    module = Calls(forward, **linear())
    with pytest.raises(SamplesMixed):
        call_for_per_sample_grads(module)(torch.randn(B, D), torch.tensor([0, 2, 1])).sum().backward()


@pytest.mark.parametrize("forward", [
    lambda m, h: Square.apply(h, m.w),
    lambda m, h: Square.apply(m.a(h), m.w),
    lambda m, h: m.a(Square.apply(h, m.w)),
    lambda m, h: m.a(Square.apply(m.a(h), 2 * m.w)),
])  # fmt: skip
def test_weight_inside_an_autograd_function_is_refused(forward: Callable[..., Tensor]) -> None:
    module = Calls(forward, w=param(D), **linear())
    with pytest.raises(PerSampleError, match=r"SquareBackward.*'w'"):
        call_for_per_sample_grads(module)(torch.randn(B, D)).sum().backward()


@pytest.mark.parametrize("forward", [
    lambda m, h: m.a(Square.apply(m.a(h), h)),
    lambda m, h: m.a(h) * Square.apply(m.w, m.w),
])  # fmt: skip
def test_autograd_function_of_samples_only_or_weights_only(forward: Callable[..., Tensor]) -> None:
    torch.manual_seed(0)

    module = Calls(forward, w=param(1, D), **linear())
    h = torch.randn(B, D)
    call_for_per_sample_grads(module)(h).sin().sum().backward()
    for n in range(B):
        (expected,) = torch.autograd.grad(module(h[n : n + 1]).sin().sum(), module.a.weight)
        torch.testing.assert_close(module.a.weight.grad_sample[n], expected)


def test_random_function_of_a_weight_is_refused() -> None:
    def forward(m: Any, h: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(m.q.expand(len(h), -1, -1), h, h, dropout_p=0.5)

    module = Calls(forward, q=param(1, 2, D))
    with pytest.raises(PerSampleError, match=r"scaled_dot_product_attention.*random"):
        call_for_per_sample_grads(module)(torch.randn(B, T, D))


def test_script_module_is_refused() -> None:
    module = nn.Sequential(nn.Linear(D, D), torch.jit.script(nn.Linear(D, D)))
    with pytest.raises(PerSampleError, match="'1'"):
        call_for_per_sample_grads(module)


def test_index_is_followed_by_its_values() -> None:
    module = Calls(lambda m, h, i: h + m.a(h)[i], **linear())
    h = torch.randn(B, D)
    call_for_per_sample_grads(module, batch_size=B)(h, torch.arange(B)).sum().backward()
    for p in module.parameters():
        del p.grad_sample
    with pytest.raises(SamplesMixed):
        call_for_per_sample_grads(module, batch_size=B)(h, torch.tensor([1, 2, 0])).sum().backward()


def test_order_of_samples_is_followed_and_choices_are_refused() -> None:
    def chosen(m: Any, h: Tensor) -> Tensor:
        pairs = torch.cat([h, h.sin()])  # selects one of two rows of each sample, by the rank of another sample
        rank = h[:, 0].argsort()
        return m.a(pairs[torch.arange(len(h)) + len(h) * (rank > 0)])

    ordered = Calls(lambda m, h: m.a(h[h[:, 0].argsort()]), **linear())
    h = torch.randn(4, D)
    call_for_per_sample_grads(ordered)(h).sin().sum().backward()
    for n in range(4):
        (expected,) = torch.autograd.grad(ordered(h[n : n + 1]).sin().sum(), ordered.a.weight)
        torch.testing.assert_close(ordered.a.weight.grad_sample[n], expected)
    with pytest.raises(SamplesMixed):
        call_for_per_sample_grads(Calls(chosen, **linear()))(h).sum().backward()


def test_output_that_depends_on_weights_only_is_refused() -> None:
    module = Calls(lambda m, h: (m.a(h), (m.a.weight**2).sum()), **linear())
    output, penalty = call_for_per_sample_grads(module)(torch.randn(B, D))
    with pytest.raises(PerSampleError, match="weights alone"):
        (output.sum() + penalty).backward()


def test_gradient_of_a_returned_parameter_is_refused() -> None:
    module = Calls(lambda m, h: (m.a(h), m.w), w=param(D), **linear())
    output, weight = call_for_per_sample_grads(module)(torch.randn(B, D))
    assert torch.equal(weight, module.w)
    with pytest.raises(PerSampleError, match="weights alone"):
        (output.sum() + weight.sum()).backward()
    assert module.w.grad is None


def test_constant_rows_beside_the_samples_are_refused() -> None:
    module = Calls(lambda m, h: m.a(torch.cat([h, torch.ones(1, D)])), **linear())
    with pytest.raises(PerSampleError, match="belong to no sample"):
        call_for_per_sample_grads(module)(torch.randn(B, D)).sum().backward()


def test_mixture_of_equal_integers_is_found() -> None:
    module = Calls(lambda m, h, n: m.a(h) * n.cumsum(0)[:, None], **linear())
    for lengths in ([2, 2, 2], [2, 3, 4]):
        with pytest.raises(SamplesMixed, match="cumsum"):
            call_for_per_sample_grads(module)(torch.randn(B, D), torch.tensor(lengths)).sum().backward()


def test_mixing_constant_is_found_after_one_that_does_not_mix() -> None:
    module = Calls(
        lambda m, h: m.a(F.conv1d(h.t()[:, None], m.k, padding=1)[:, 0].t()),
        k=torch.tensor([[[0.0, 1.0, 0.0]]]),
        **linear(),
    )
    for kernel in ([0.0, 1.0, 0.0], [1.0, 1.0, 1.0]):
        module.k.copy_(torch.tensor([[kernel]]))
        with pytest.raises(SamplesMixed, match="conv1d"):
            call_for_per_sample_grads(module)(torch.randn(B, D))


def test_output_in_an_object_that_is_no_pytree() -> None:
    class Box:
        def __init__(self, content: Any) -> None:
            self.content = content

    module = Calls(lambda m, box: Box(m.a(box.content)), **linear())
    call_for_per_sample_grads(module, batch_size=B)(Box(torch.randn(B, D))).content.sum().backward()
    assert module.a.weight.grad_sample.shape == (B, D, D)
    module = Calls(lambda m, box: m.a(torch.ones(B, D)) * box.content, **linear())
    with pytest.raises(RuntimeError, match="Unable to find a tensor"):
        call_for_per_sample_grads(module, batch_size=B)(Box(3))


def test_tensors_of_the_user_are_unchanged() -> None:
    module = Calls(lambda m, h: m.a(h) + m.b.copy_(h.mean(0).detach()) * 0, b=torch.zeros(D), **linear())
    h = torch.randn(B, D)
    output = call_for_per_sample_grads(module)(h)
    for tensor in (h, output, module.b, module.a.weight):
        assert not vars(tensor)


def test_token_that_is_first_frozen_then_trained() -> None:
    module = Calls(
        lambda m, h: torch.cat([m.c.expand(len(h), -1, -1), m.a(h)], 1).softmax(1), c=param(1, 1, D), **linear()
    )
    for trained in (False, True):
        module.c.requires_grad_(trained)
        call_for_per_sample_grads(module)(torch.randn(B, T, D)).square().sum().backward()
        for p in module.parameters():
            assert hasattr(p, "grad_sample") == p.requires_grad
            p.grad_sample = None


def test_samples_written_into_weights_with_another_use_are_refused() -> None:
    def forward(m: Any, h: Tensor) -> Tensor:
        out = m.c.expand(len(h), 2, D).clone()
        before = h.unsqueeze(1) * out
        out[:, 1] = h
        return m.a(out) + before

    module = Calls(forward, c=param(1, 1, D), **linear())
    with pytest.raises(PerSampleError, match="__setitem__"):
        call_for_per_sample_grads(module)(torch.randn(B, D))


def test_trainable_tensor_that_is_no_parameter_is_refused() -> None:
    outside = torch.randn(D, requires_grad=True)
    module = Calls(lambda m, h: h * (m.g * outside), g=param(D))
    with pytest.raises(PerSampleError, match="not a parameter"):
        call_for_per_sample_grads(module)(torch.randn(B, D)).sum().backward()


NESTED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "of samples": lambda m, x: m.a(x) * torch.nested.nested_tensor(list(x)).to_padded_tensor(0.0),
    "of results": lambda m, x: torch.nested.as_nested_tensor([m.a(row) for row in x]).to_padded_tensor(0.0),
    "jagged": lambda m, x: m.a(torch.nested.as_nested_tensor(list(x), layout=torch.jagged)).to_padded_tensor(0.0),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", NESTED)
def test_nested_tensors_are_refused(name: str) -> None:
    model = Calls(NESTED[name], a=nn.Linear(4, 4))
    for _ in range(2):
        with pytest.raises(PerSampleError), record(model, verify=False):
            model(torch.randn(3, 5, 4)).square().sum().backward()
