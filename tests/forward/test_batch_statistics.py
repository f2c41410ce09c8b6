"""Statistics of the batch that are sizes, or are not used, are accepted; values of them are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn

from persample import PerSampleError, SamplesMixed, record
from persample.testing.oracle import assert_rows_close, compute_test_loss, perturb, stack_gradients
from tests.support.cases import Calls

B, T, D = 3, 5, 4

# Different for each sample, and at most 3.
LENGTHS = torch.tensor([2, 3, 1])


def pad(m: Any, h: Tensor, lengths: Tensor) -> Tensor:
    """The first steps of each sample, in a tensor that is as long as the longest sample."""
    rows = h.new_zeros(len(h), lengths.max(), D)
    is_there = torch.arange(lengths.max())[None] < lengths[:, None]
    rows[is_there] = h[:, :3][torch.arange(3)[None] < lengths[:, None]]
    return m.b(rows) * is_there[..., None]


def cut(m: Any, h: Tensor, lengths: Tensor) -> Tensor:
    first = h.narrow(1, 0, lengths.max())
    rest = h.narrow(1, lengths.max(), T - lengths.max())
    return m.b(first).sum(1) + m.b(rest).sum(1)


ACCEPTED: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "the longest, as a size": lambda m, h, lengths: pad(m, h, lengths).sum(1),
    "a mask as long as the longest": lambda m, h, lengths: (
        (torch.arange(lengths.max()) < lengths[:, None])[..., None] * h[:, : int(lengths.max())]
    ).sum(1),
    "cut at the longest": cut,
    "sliced at the longest": lambda m, h, lengths: (
        m.b(h[:, : lengths.max()]).sum(1) + m.b(h[:, lengths.max() :]).sum(1)
    ),
    "weights of positions up to the longest": lambda m, h, lengths: (
        m.b(torch.arange(lengths.max())[:, None].double().expand(-1, D)) + h[:, : lengths.max()]
    )[:, :1].sum(1),
    "a branch that is not used": lambda m, h, lengths: torch.where(lengths[:, None] > 0, h.sum(1), h.sum(1).mean(0)),
    "the same as a method": lambda m, h, lengths: h.sum(1).where(lengths[:, None] > 0, h.mean((0, 1))),
    "the other branch": lambda m, h, lengths: torch.where(lengths[:, None] > 9, h.sum(1).amax(0), h.sum(1)),
    "random numbers in the shape of a view": lambda m, h, lengths: (
        h.transpose(0, 1) * torch.zeros_like(h.transpose(0, 1)).uniform_(2, 2)
    ).transpose(0, 1),
}  # fmt: skip


@pytest.mark.parametrize("name", ACCEPTED)
def test_sizes_and_unused_statistics(name: str) -> None:
    torch.manual_seed(0)
    forward = ACCEPTED[name]
    model = Calls(lambda m, x, lengths: forward(m, m.a(x), lengths), a=nn.Linear(D, D), b=nn.Linear(D, D)).double()
    perturb(model)
    x = torch.randn(B, T, D, dtype=torch.float64)

    def compute_loss(at: slice) -> Tensor:
        return compute_test_loss(model(x[at], LENGTHS[at]))

    losses = (compute_loss(slice(n, n + 1)) for n in range(B))
    expected = stack_gradients(losses, dict(model.named_parameters()))
    for _ in range(2):  # the second time, motions are cached
        with record(model, loss_reduction="sum") as grads:
            compute_loss(slice(None)).backward()
        assert_rows_close({key: rows for key, rows in grads.dense().items() if key in expected}, expected)


MIXED: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "a sum of numbers up to the longest": lambda m, h, lengths: h * torch.arange(lengths.max()).sum(),
    "a softmax over zeros": lambda m, h, lengths: h * torch.zeros(lengths.max()).softmax(0)[0],
    "the longest, as a number": lambda m, h, lengths: h * lengths.max(),
    "a step that depends on the batch": lambda m, h, lengths: h.narrow(1, lengths.max(), 1),
    "a branch that is used": lambda m, h, lengths: torch.where(lengths[:, None] > 1, h.sum(1), h.sum(1).mean(0)),
    "filled with a number of a sample": lambda m, h, lengths: h + torch.full_like(h, h[0, 0, 0].detach()),
    "a new tensor of that number": lambda m, h, lengths: h + h.new_full(h.shape, h[0, 0, 0].detach()),
    "a copy of a sample": lambda m, h, lengths: h + h.new_tensor(h[0].detach()),
}


@pytest.mark.filterwarnings("ignore:To copy construct")
@pytest.mark.parametrize("name", MIXED)
def test_values_of_statistics_are_refused(name: str) -> None:
    forward = MIXED[name]
    model = Calls(lambda m, x, lengths: m.b(forward(m, m.a(x), lengths)), a=nn.Linear(D, D), b=nn.Linear(D, D))
    with pytest.raises(SamplesMixed), record(model, loss_reduction="sum"):
        model(torch.randn(B, T, D), LENGTHS).square().sum().backward()


def test_the_condition_is_read_in_each_step() -> None:
    model = Calls(lambda m, x, seen: m.a(torch.where(seen[:, None], x, x.mean(0))), a=nn.Linear(D, D))
    x = torch.randn(B, D)
    for _ in range(2):
        with record(model, loss_reduction="sum"):
            model(x, torch.tensor([True, True, True])).sum().backward()
    with pytest.raises(SamplesMixed, match="in 1 of 3 places"), record(model, loss_reduction="sum"):
        model(x, torch.tensor([True, False, True])).sum().backward()


def use_dual_level(m: Any, x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        primal, tangent = forward_ad.unpack_dual(m.a(forward_ad.make_dual(x, torch.ones_like(x))))
        return primal + tangent


FORWARD_MODE: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "forward_ad": (use_dual_level, r"Forward-mode AD .* runs through module 'a'"),
    "jvp": (lambda m, x: torch.func.jvp(m.a, (x,), (torch.ones_like(x),))[1], "torch.func"),
    "jvp of the weight": (
        lambda m, x: torch.func.jvp(lambda w: x @ w, (m.a.weight,), (torch.ones(D, D),))[1],
        r"torch.func.* in Calls",
    ),
    "jacfwd": (lambda m, x: torch.func.jacfwd(m.a)(x).sum((2, 3)), "torch.func"),
}


@pytest.mark.parametrize("name", FORWARD_MODE)
def test_forward_mode_is_refused_by_name(name: str) -> None:
    forward, message = FORWARD_MODE[name]
    model = Calls(forward, a=nn.Linear(D, D))
    for _ in range(3):
        with pytest.raises(PerSampleError, match=message), record(model, loss_reduction="sum"):
            model(torch.randn(B, D)).sum().backward()


def test_arguments_with_tangents_are_refused() -> None:
    model, x = nn.Linear(D, D), torch.randn(B, D)
    with forward_ad.dual_level(), pytest.raises(PerSampleError, match="Forward-mode AD"), record(model):
        model(forward_ad.make_dual(x, torch.ones_like(x)))


def test_first_rows_are_each_samples_own_if_equal_in_every_step() -> None:
    """The values decide in each step, so steps with other values must not decide for later ones."""

    def forward(m: Any, x: Tensor) -> Tensor:
        frames = (m.token.expand(x.shape) + x).flatten(0, 1)
        return m.a(frames[: len(x)])

    model = Calls(forward, a=nn.Linear(D, D)).double()
    model.token = nn.Parameter(torch.randn(1, 1, D).double())
    parameters = dict(model.named_parameters())
    for scale in (0.0, 1.0, 0.0, 0.0):
        x = scale * torch.randn(B, 5, D).double()
        with record(model, loss_reduction="sum") as grads:
            model(x).square().sum().backward()
        if scale == 0:
            expected = stack_gradients((model(x[n : n + 1]).square().sum() for n in range(B)), parameters)
            assert_rows_close(grads.dense(), expected)
