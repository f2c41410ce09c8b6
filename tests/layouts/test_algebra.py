"""Declared motions: against exact sample numbers, against trials, and on calls that trials get wrong.

`test_torch_ops.py` compares the whole engine, declarations included, with the truth over torch's op database.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from persample import SamplesMixed, record
from persample._internal.functions import find_results
from persample.layouts import MEMO, Call, Layout, Motion, find
from persample.layouts.algebra import DECLARATIONS, find_declared_motion
from persample.layouts.algebra.shapes import find_reshaped
from persample.layouts.by_ids import find_motion_by_ids
from persample.layouts.by_trial import find_motion_by_trial
from persample.layouts.ids import find_layout_of_ids, make_sample_ids
from persample.layouts.layout import lose_entries
from persample.testing import assert_rows_close, loop_gradients

pytestmark = pytest.mark.quick

B = 3


def make_call(func: Callable[..., Any], *args: Any, where: dict[int, Layout], **kwargs: Any) -> tuple[Call, Any]:
    """A call and its results; `where` has the layouts of some of its tensors, by position among the tensors."""
    tensors = tuple(
        a for arg in args for a in (arg if isinstance(arg, (list, tuple)) else [arg]) if isinstance(a, Tensor)
    )
    layouts = tuple(where.get(i) for i in range(len(tensors)))
    results = find_results(func(*args, **kwargs), args)
    return Call(func, args, kwargs, tensors, layouts, B), results


# ---- against exact sample numbers ----


@pytest.mark.parametrize("seed", range(200))
def test_reshapes_equal_the_reshape_of_sample_numbers(seed: int) -> None:
    rng = random.Random(seed)
    inner, outer = rng.choice([1, 2, 3]), rng.choice([1, 2])
    shape = [rng.choice([1, 2, 3, 4]) for _ in range(rng.randint(0, 3))]
    dim = rng.randint(0, len(shape))
    shape.insert(dim, outer * B * inner)
    layout = Layout(dim, inner)
    ids = make_sample_ids(torch.zeros(shape), layout, B)
    new_shape: list[int] = []
    rest = math.prod(shape)
    while rest > 1:
        size = rng.choice([d for d in range(2, rest + 1) if rest % d == 0])
        new_shape.append(size)
        rest //= size
    found = find_reshaped(layout, shape, new_shape, (), B)
    expected = find_layout_of_ids(ids.reshape(new_shape), B)
    if found is None:
        assert not isinstance(expected, Layout) or expected.ids is not None
    else:
        assert torch.equal(make_sample_ids(torch.zeros(new_shape), found, B), ids.reshape(new_shape).int())


X = torch.randn(4, B * 2, 5)
MOVES: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "transpose": (Tensor.transpose, (0, 1)),
    "permute": (Tensor.permute, (2, 0, 1)),
    "permute by tuple": (torch.permute, ((1, -1, 0),)),
    "movedim": (torch.movedim, (1, 0)),
    "movedim of two": (torch.movedim, ((0, 1), (2, 0))),
    "expand": (Tensor.expand, (2, 4, B * 2, 5)),
    "repeat samples": (Tensor.repeat, (1, 2, 1)),
    "repeat in front": (Tensor.repeat, (2, 1, 1, 1)),
    "repeat_interleave": (Tensor.repeat_interleave, (2, 1)),
    "unsqueeze": (Tensor.unsqueeze, (1,)),
    "select": (Tensor.select, (0, 1)),
    "narrow": (Tensor.narrow, (2, 1, 2)),
    "chunk": (Tensor.chunk, (2,)),
    "split": (Tensor.split, (3, 2)),
    "unbind": (torch.unbind, (2,)),
    "flip": (Tensor.flip, (0, 2)),
    "flip by tuple": (torch.flip, ((2,),)),
    "roll": (torch.roll, (1, 2)),
    "index": (Tensor.__getitem__, ((0, slice(None), slice(1, 3)),)),
    "index with None": (Tensor.__getitem__, ((None, Ellipsis, 2),)),
    "index with a tensor": (Tensor.__getitem__, ((torch.tensor([[0, 1], [2, 2]]),),)),
    "index in the last dim": (Tensor.__getitem__, ((Ellipsis, torch.tensor([0, 3])),)),
    "flatten": (Tensor.flatten, (1,)),
    "flatten with the dim before": (Tensor.flatten, (0, 1)),
    "unflatten": (Tensor.unflatten, (1, (B, 2))),
}


@pytest.mark.parametrize("inner", [1, 2])
@pytest.mark.parametrize("name", MOVES)
def test_moves_equal_the_move_of_sample_numbers(name: str, inner: int) -> None:
    func, args = MOVES[name]
    call, results = make_call(func, X, *args, where={0: Layout(1, inner)})
    declared, exact = find_declared_motion(call, results), find_motion_by_ids(call, results)
    if declared is None:
        assert inner == 1 and name == "unflatten"  # the samples lie in the second part
        return
    for result, found, expected in zip(results, declared.results, exact.results, strict=True):
        assert torch.equal(make_sample_ids(result, found, B), make_sample_ids(result, expected, B))


def test_parts_of_the_batch_are_left_to_sample_numbers() -> None:
    for func, args in (
        (Tensor.__getitem__, (slice(1),)),
        (Tensor.flip, (0,)),
        (Tensor.select, (0, 1)),
        (Tensor.split, (2,)),
    ):
        call, results = make_call(func, torch.randn(B, 4), *args, where={0: Layout(0)})
        assert find_declared_motion(call, results) is None


# ---- against trials ----

A, W = torch.rand(B, 4, 5), torch.rand(5, 6)
CALLS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[int, Layout]]] = {
    "add": (torch.add, (A, torch.rand(4, 1)), {0: Layout(0)}),
    "add of two": (torch.add, (A, A), {0: Layout(0), 1: Layout(0)}),
    "add across": (torch.add, (torch.rand(B, 1), torch.rand(B)), {0: Layout(0), 1: Layout(0)}),
    "sum": (torch.sum, (A, 1), {0: Layout(0)}),
    "sum over samples": (torch.sum, (A, 0), {0: Layout(0)}),
    "softmax": (torch.softmax, (A, 2), {0: Layout(0)}),
    "softmax over samples": (torch.softmax, (A, 0), {0: Layout(0)}),
    "max": (torch.max, (A, 1), {0: Layout(0)}),
    "cumsum over samples": (torch.cumsum, (A, 0), {0: Layout(0)}),
    "topk": (torch.topk, (A, 2), {0: Layout(0)}),
    "matmul": (torch.matmul, (A, W), {0: Layout(0)}),
    "matmul of samples": (torch.matmul, (A, A.mT), {0: Layout(0), 1: Layout(0)}),
    "gram": (torch.matmul, (torch.rand(B, 4), torch.rand(4, B)), {0: Layout(0), 1: Layout(1)}),
    "linear": (F.linear, (A, W.t()), {0: Layout(0)}),
    "einsum": (torch.einsum, ("bti,io->bto", A, W), {0: Layout(0)}),
    "einsum across": (torch.einsum, ("bi,ci->bc", torch.rand(B, 4), torch.rand(B, 4)), {0: Layout(0), 1: Layout(0)}),
    "conv1d": (torch.conv1d, (A, torch.rand(2, 4, 3)), {0: Layout(0)}),
    "layer_norm": (F.layer_norm, (A, (5,)), {0: Layout(0)}),
    "layer_norm over samples": (F.layer_norm, (A, (B, 4, 5)), {0: Layout(0)}),
    "fft": (torch.fft.rfft, (A,), {0: Layout(0)}),
    "attention": (F.scaled_dot_product_attention, (A, A, A), {0: Layout(0), 1: Layout(0), 2: Layout(0)}),
    "attention across": (F.scaled_dot_product_attention, (A, A, A), {0: Layout(1), 1: Layout(1), 2: Layout(1)}),
    "cat": (torch.cat, ([A, A], 1), {0: Layout(0), 1: Layout(0)}),
    "mse_loss": (F.mse_loss, (A, A), {0: Layout(0), 1: Layout(0)}),
    "normalize over samples": (F.normalize, (A, 2.0, 0), {0: Layout(0)}),
    "linear with a bias for each row": (F.linear, (torch.rand(3, 4), A[:, 0, :4], torch.rand(3, 3)), {1: Layout(0)}),
    "huber_loss, none by position": (F.huber_loss, (A, A, "none"), {0: Layout(0), 1: Layout(0)}),
    "softmax of an implicit dim": (F.softmax, (A,), {0: Layout(0)}),
    "pixel_shuffle of channels": (F.pixel_shuffle, (torch.rand(4 * B, 2, 2), 2), {0: Layout(0)}),
    "unfold of channels": (F.unfold, (torch.rand(B, 4, 4), 2), {0: Layout(0)}),
    "renorm": (torch.renorm, (A, 2.0, 2, 0.1), {0: Layout(0)}),
    "svd": (torch.linalg.svdvals, (A,), {0: Layout(0)}),
}


# Unbatched calls, whose first dimension holds channels, and functions that are declared elsewhere.
UNDECLARED = {
    "linear with a bias for each row",
    "softmax of an implicit dim",
    "pixel_shuffle of channels",
    "unfold of channels",
}


@pytest.mark.parametrize("name", CALLS)
def test_declared_motions_equal_tried_ones(name: str) -> None:
    func, args, where = CALLS[name]
    if name == "attention across":
        where = {i: Layout(1) for i in where}
        args = tuple(torch.rand(4, B, 5) for _ in args)
    call, results = make_call(func, *args, where=where)
    declared, tried = find_declared_motion(call, results), find_motion_by_trial(call, results)
    if name in UNDECLARED:
        assert declared is None
        return
    assert isinstance(declared, Motion)
    for found, expected in zip(declared.results, tried.results, strict=True):
        assert type(lose_entries(found)) is type(expected)
        assert not isinstance(found, Layout) or found == expected


def test_a_wrong_declaration_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above fails if a declaration says that a softmax over the samples keeps them separate."""
    monkeypatch.setitem(DECLARATIONS, torch.softmax, lambda call, results: Motion((Layout(0),)))
    with pytest.raises(AssertionError):
        test_declared_motions_equal_tried_ones("softmax over samples")


# ---- calls that a trial gets wrong, or cannot try ----


class Model(nn.Module):
    """`function(self, linear(x), x)`"""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, self.linear(x), x)


def run(model: nn.Module, x: Tensor) -> Any:
    with record(model, loss_reduction="sum") as grads:
        model(x).float().square().sum().backward()
    return grads


def attend(model: nn.Module, h: Tensor, x: Tensor) -> Tensor:
    return model.attention(h, h, h, need_weights=False)[0]


MIXING: dict[str, tuple[Callable[..., Tensor], tuple[int, ...], bool]] = {
    "attention across the batch in bfloat16": (attend, (32, 5, 4), True),
    "softmax in bfloat16": (lambda model, h, x: h.softmax(0, dtype=torch.bfloat16), (32, 4), False),
    "softmax over many samples": (lambda model, h, x: h.softmax(0), (8192, 4), False),
    "normalize that is flat for small values": (
        lambda model, h, x: 1e3 * F.normalize(1e3 * h, dim=0, eps=100.0),
        (6, 4),
        False,
    ),
    "cumprod of zeros": (lambda model, h, x: h * (x * 0).cumprod(0), (5, 4), False),
}


@pytest.mark.parametrize("name", MIXING)
def test_mixing_that_rounding_or_values_hide_is_refused(name: str) -> None:
    function, shape, half = MIXING[name]
    model = Model(function)
    model.attention = nn.MultiheadAttention(4, 2)
    with pytest.raises(SamplesMixed), torch.autocast("cpu", torch.bfloat16, enabled=half):
        run(model, torch.randn(shape))


def test_a_loss_of_all_pairs_is_refused_under_autocast() -> None:
    model = nn.Linear(4, 4)
    with pytest.raises(SamplesMixed), torch.autocast("cpu", torch.bfloat16), record(model, loss_reduction="sum"):
        z = model(torch.randn(16, 4))
        torch.einsum("bd,cd->", z, z).backward()


def slice_at(model: nn.Module, h: Tensor, x: Tensor) -> Tensor:
    return F.linear(h.detach().narrow(0, model.at, 2), model.linear.weight)


def test_a_slice_by_a_tensor_is_found_again_for_other_values() -> None:
    model, x = Model(slice_at), torch.randn(4, 4)
    for at in (0, 2):
        model.at = torch.tensor(at)
        assert (run(model, x).norms() > 0).nonzero().flatten().tolist() == [at, at + 1]


def test_strides_are_part_of_what_decides() -> None:
    model = Model(lambda model, h, x: F.linear(x.as_strided(x.shape, (4, 1)), model.linear.weight))
    run(model, torch.randn(4, 4))
    with pytest.raises(SamplesMixed):
        run(model, torch.randn(4, 4).t())


SIZES: dict[str, tuple[Callable[..., Tensor], Callable[[int], list[int]]]] = {
    "the last five": (
        lambda model, h, x: F.linear(torch.cat([h[-5:].detach()] * 2), model.linear.weight),
        lambda batch: list(range(max(0, batch - 5), batch)),
    ),
    "the first five": (lambda model, h, x: h[:5], lambda batch: list(range(min(5, batch)))),
    "parts of five": (lambda model, h, x: torch.cat([p * 2 for p in h.split(5)]), lambda batch: list(range(batch))),
}


@pytest.mark.parametrize("name", SIZES)
def test_batches_of_other_sizes_are_not_assumed_to_be_alike(name: str) -> None:
    function, expected = SIZES[name]
    model = Model(function)
    for batch in (3, 4, 10, 8):
        norms = run(model, torch.randn(batch, 4)).norms()
        assert (norms > 0).nonzero().flatten().tolist() == expected(batch)


ACCEPTED: dict[str, Callable[..., Tensor]] = {
    "broadcast_tensors": lambda model, h, x: sum(torch.broadcast_tensors(h, torch.ones(4))),  # type: ignore[arg-type, return-value]
    "Normal": lambda model, h, x: -torch.distributions.Normal(h, 1.0).log_prob(x),
    "Laplace": lambda model, h, x: -torch.distributions.Laplace(h, 1.0).log_prob(x),
    "Gamma": lambda model, h, x: -torch.distributions.Gamma(h.exp(), 1.0).log_prob(x.exp()),
    "cosine with an expanded weight": lambda model, h, x: F.cosine_similarity(h, model.linear.bias.expand(len(h), 4)),
    "linear with an expanded bias": lambda model, h, x: F.linear(
        h, torch.eye(4).to(h), model.linear.bias.expand(len(h), 4)
    ),
    "kl_divergence": lambda model, h, x: torch.distributions.kl_divergence(
        torch.distributions.Normal(h, 1.0), torch.distributions.Normal(0.0, 1.0)
    ),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_distributions_and_expanded_weights_are_followed(name: str) -> None:
    model, x = Model(ACCEPTED[name]).double(), torch.randn(B, 4).double()
    expected = loop_gradients(model, x, lambda model, x: model(x).float().square().sum())
    assert_rows_close(run(model, x).dense(), expected, 1e-5)


def test_a_mean_over_unequal_rows_is_refused_for_every_spelling() -> None:
    for dims in ([], (), None):
        with pytest.raises(SamplesMixed), record(model := nn.Linear(4, 4), divisor="refuse"):
            h = model(torch.randn(B, 4))
            torch.mean(torch.cat([h, h[:1]]), dims).backward()


def test_a_failed_trial_is_not_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in the machinery says nothing about later calls, and running out of memory is raised."""
    MEMO.clear()
    x = torch.randn(B, 4)
    real = find._compute_motion

    def fail(call: Call, results: Any) -> Any:
        raise ValueError("not now")

    monkeypatch.setattr(find, "_compute_motion", fail)
    with pytest.raises(SamplesMixed, match="could not be followed"):
        run(Model(lambda model, h, x: h * 2), x)
    monkeypatch.setattr(find, "_compute_motion", real)
    assert run(Model(lambda model, h, x: h * 2), x).norms().shape == (B,)

    def run_out(call: Call, results: Any) -> Any:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(find, "_compute_motion", run_out)
    with pytest.raises(torch.OutOfMemoryError):
        run(Model(lambda model, h, x: h * 3), x)
