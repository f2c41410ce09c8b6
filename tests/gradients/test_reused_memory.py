"""Answers are computed later from memory that the caller may have changed: they are right, or an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from persample import PerSampleError, PerSampleGradients, record
from persample.gradients import find_term
from persample.terms.base import find_factors
from tests.support.cases import Calls, param

B, D = 4, 3


def write_to_data(x: Tensor) -> None:
    x.data.zero_()


def write_in_place(x: Tensor) -> None:
    x.zero_()


def write_through_numpy(x: Tensor) -> None:
    x.detach().numpy()[:] = 0


def write_through_an_old_view(x: Tensor) -> None:
    torch.from_dlpack(x.detach()).zero_()


WRITES = [write_to_data, write_in_place, write_through_numpy, write_through_an_old_view]


class TwoInputs(nn.Module):
    """Several layers use one argument, whole, in part and expanded."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D)
        self.scale = nn.Parameter(torch.randn(2, D))

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        h = self.first(x) + self.second(x.unsqueeze(1).expand(-1, 5, -1)).sum(1)
        return (h.unsqueeze(1) + self.third(context[:, :2])).mul(context[:, 2:]).sin() * self.scale


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(D, 2), (D,)),
    "sequence": (lambda: nn.Linear(D, 2), (5, D)),
    "mlp": (lambda: nn.Sequential(nn.Linear(D, 4), nn.Tanh(), nn.Linear(4, 2)), (D,)),
    "conv": (lambda: nn.Conv2d(2, 3, 2), (2, 4, 4)),
    "depthwise": (lambda: nn.Conv1d(2, 2, 2, groups=2), (2, 5)),
    "layer norm": (lambda: nn.LayerNorm(D), (D,)),
    "lstm": (lambda: Calls(lambda m, h: m.a(h)[0], a=nn.LSTM(D, 2, batch_first=True)), (4, D)),
    "product": (lambda: Calls(lambda m, h: m.w * h, w=param(D)), (D,)),
    "flattened": (lambda: Calls(lambda m, h: m.a(h.flatten(1)), a=nn.Linear(2 * D, 2)), (2, D)),
    "transposed": (lambda: Calls(lambda m, h: m.a(h.transpose(1, 2)), a=nn.Linear(2, 2)), (2, D)),
    "no rule": (lambda: Calls(lambda m, h: torch.hypot(h, m.w), w=param(D)), (D,)),
    "used twice": (lambda: Calls(lambda m, h: m.a(m.a(h).sin()), a=nn.Linear(D, D)), (D,)),
}


def record_model(model: nn.Module, *args: Tensor, **options: Any) -> PerSampleGradients:
    with record(model, loss_reduction="sum", **options) as grads:
        model(*args).square().sum().backward()
    return grads


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("name", MODELS)
def test_an_argument_may_be_changed_after_the_backward_pass(name: str, write: Callable[[Tensor], None]) -> None:
    make, shape = MODELS[name]
    model, x = make(), torch.randn(B, *shape)
    expected = record_model(model, x.clone()).dense()
    grads = record_model(model, x)
    write(x)
    assert not x.any()
    for key, rows in grads.dense().items():
        assert torch.equal(rows, expected[key])


def test_memory_of_numpy_may_be_changed() -> None:
    model, array = nn.Linear(D, 2), np.random.default_rng(0).normal(size=(B, D)).astype("float32")
    expected = record_model(model, torch.tensor(array)).norms()
    grads = record_model(model, torch.from_numpy(array))  # nobody keeps the tensor
    array[:] = 0
    torch.testing.assert_close(grads.norms(), expected)


def test_indices_may_be_changed() -> None:
    model, words = nn.Embedding(9, D), torch.randint(9, (B, 5))
    expected = record_model(model, words.clone()).dense()["weight"]
    grads = record_model(model, words)
    words.data.zero_()
    assert torch.equal(grads.dense()["weight"], expected)


@pytest.mark.parametrize("write", WRITES)
def test_several_uses_of_an_argument(write: Callable[[Tensor], None]) -> None:
    model, x, context = TwoInputs(), torch.randn(B, D), torch.randn(B, 4, D)
    expected = record_model(model, x.clone(), context.clone()).dense()
    grads = record_model(model, x, context)
    write(x)
    write(context)
    for key, rows in grads.dense().items():
        assert torch.equal(rows, expected[key])


@pytest.mark.parametrize("write", WRITES)
def test_the_gradient_of_the_output_may_be_changed(write: Callable[[Tensor], None]) -> None:
    model, x, gradient = nn.Linear(D, 2), torch.randn(B, D), torch.randn(B, 2)
    with record(model, loss_reduction="sum") as expected:
        model(x).backward(gradient.clone())
    with record(model, loss_reduction="sum") as grads:
        model(x).backward(gradient)
    write(gradient)
    torch.testing.assert_close(grads.norms(), expected.norms())


@pytest.mark.parametrize("write", WRITES)
def test_a_target_that_meets_weights_may_be_changed(write: Callable[[Tensor], None]) -> None:
    model, x, target = nn.Linear(D, D), torch.randn(B, D), torch.from_numpy(np.ones((B, D), "float32"))
    norms = []
    for _ in range(2):
        with record(model, loss_reduction="sum") as grads:
            (model(x) - model(target)).square().sum().backward()
        norms.append(grads.norms() if not norms else None)
    write(target)
    torch.testing.assert_close(grads.norms(), norms[0])


def test_an_argument_changed_between_two_passes() -> None:
    model, x = nn.Linear(D, D), torch.randn(B, D)
    with record(model, loss_reduction="sum") as expected:
        model(x).sum().backward()
        model(2 * x).sin().sum().backward()  # the same samples: computed from them in the block
    with record(model, loss_reduction="sum") as grads:
        model(x).sum().backward()
        x.mul_(2)
        model(x).sin().sum().backward()
    torch.testing.assert_close(grads.norms(), expected.norms())


def test_an_activation_changed_after_the_backward_pass_raises() -> None:
    model, x = nn.Sequential(nn.Linear(D, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(B, D)
    kept: list[Tensor] = []
    model[1].register_forward_hook(lambda module, args, output: kept.append(output))
    with record(model) as grads:
        F.cross_entropy(model(x), torch.tensor([0, 1, 1, 0])).backward()
    with torch.no_grad():
        kept[0].zero_()
    with pytest.raises(PerSampleError, match=r"'2\.weight' was changed in place"):
        grads.norms()


def find_memory(grads: PerSampleGradients, name: str) -> set[int]:
    return {t.untyped_storage().data_ptr() for t in find_factors(find_term(grads, name))}


def test_only_arguments_are_copied_and_each_once() -> None:
    model = Calls(lambda m, h: m.b(m.a(h) + m.c(h)), a=nn.Linear(D, D), b=nn.Linear(D, D), c=nn.Linear(D, D))
    x, kept = torch.randn(B, D), []
    model.b.register_forward_pre_hook(lambda module, args: kept.append(args[0]))
    grads = record_model(model, x)
    assert kept[0].data_ptr() in find_memory(grads, "b.weight")
    assert x.data_ptr() not in find_memory(grads, "a.weight")
    assert len(find_memory(grads, "a.weight") & find_memory(grads, "c.weight")) == 2  # the input and its gradient


def test_an_expanded_argument_is_copied_without_repetitions() -> None:
    model, x = nn.Linear(D, 2), torch.randn(B, 1, D).expand(B, 1000, D)
    grads = record_model(model, x)
    sizes = [t.untyped_storage().nbytes() for t in find_factors(find_term(grads, "weight"))]
    assert min(sizes) <= 4 * B * D
    torch.testing.assert_close(grads.norms(), record_model(model, x.contiguous()).norms())
