"""Two backward passes must see the same gradients, or the norms of the first do not bound the sum of the second."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from persample import PerSampleError, record

pytestmark = pytest.mark.quick

B, D = 5, 8


class Checkpointed(nn.Module):
    """A checkpointed block with dropout, which draws other masks when it is recomputed unless they are preserved."""

    def __init__(self, preserve: bool) -> None:
        super().__init__()
        self.preserve = preserve
        self.first, self.last = nn.Linear(D, D), nn.Linear(D, 2)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        def block(x: Tensor) -> Tensor:
            return self.drop(self.first(x)).relu()

        return self.last(checkpoint(block, x, use_reentrant=False, preserve_rng_state=self.preserve))


class Hooked(nn.Module):
    """A hook on an activation scales its gradient, from the second call on."""

    def __init__(self, later: float) -> None:
        super().__init__()
        self.first, self.last, self.later, self.calls = nn.Linear(D, D), nn.Linear(D, 2), later, 0

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        hidden.register_hook(self.scale)
        return self.last(hidden.tanh())

    def scale(self, grad: Tensor) -> Tensor:
        self.calls += 1
        return grad * (1 if self.calls == 1 else self.later)


def clip(model: nn.Module, passes: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(B, D)
    with record(model, keep="clip", max_norm=0.1, passes=passes, loss_reduction="sum") as grads:
        model(x).square().sum().backward()
    return grads.clip()


@pytest.mark.parametrize("make", [lambda: Checkpointed(False), lambda: Hooked(1000.0), lambda: Hooked(0.01)])
def test_passes_that_differ_are_refused(make: Any) -> None:
    torch.manual_seed(1)
    with pytest.raises(PerSampleError, match="two backward passes saw different gradients"):
        clip(make(), passes=2)


@pytest.mark.parametrize("make", [lambda: Checkpointed(True), lambda: Hooked(1.0)])
def test_passes_that_agree(make: Any) -> None:
    torch.manual_seed(1)
    model = make()
    once, twice = clip(model, passes=1), clip(model, passes=2)
    for name, total in once.items():
        torch.testing.assert_close(twice[name], total)


class Swapped(nn.Module):
    """Hooks scale the gradients of two layers by 100 and 1 in the first pass, by 1 and 100 in the second."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(D, D, bias=False), nn.Linear(D, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        def scale(result: Tensor, factors: list[float]) -> Tensor:
            result.register_hook(lambda grad: grad * factors.pop(0))
            return result

        return scale(self.a(x), [100.0, 1.0]) + scale(self.b(x), [1.0, 100.0])


def test_passes_that_differ_in_the_parts_are_refused() -> None:
    """The norm of the whole row is the same in both passes, but each part has a bound of its own."""
    model = Swapped()
    with (
        pytest.raises(PerSampleError, match="different gradients"),
        record(model, keep="clip", max_norm={"a.weight": 1.0, "b.weight": 1.0}, passes=2, loss_reduction="sum"),
    ):
        model(torch.ones(B, D)).sum().backward()


@pytest.mark.parametrize("size", [1e-4, 1e-3, 1e-2])
def test_passes_with_parts_that_cancel_are_equal(size: float) -> None:
    """A sample is doubtful for one parameter only: for the other, both passes take the norm in the same way."""
    torch.manual_seed(0)
    layers = nn.ModuleList([nn.Linear(16, 48, bias=False), nn.Linear(16, 64, bias=False)])
    signs = torch.tensor([1.0, -1.0])[None, :, None]
    x = torch.randn(3, 1, 16) * (1 + 1e-6 * signs)
    weights = [torch.randn(3, 1, 48) * signs * 100 * size, torch.randn(3, 1, 64) * signs * 100]

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([layer(x) * weight for layer, weight in zip(layers, weights, strict=True)], -1)

    model = Both()
    with record(model, keep="clip", max_norm=1.0, passes=2, loss_reduction="sum") as grads:
        model(x).sum().backward()
    rows = [torch.einsum("bto,bti->boi", w.double(), x.double()) for w in weights]
    norms = sum(row.flatten(1).square().sum(1) for row in rows).sqrt()  # type: ignore[union-attr]
    expected = [torch.tensordot((1 / norms).clamp(max=1), row, 1) for row in rows]
    for part, wanted in zip(grads.clip().values(), expected, strict=True):
        torch.testing.assert_close(part.double(), wanted, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("bound", [1.0, {"weight": 1.0, "bias": 1.0}], ids=["flat", "per parameter"])
def test_passes_that_differ_by_rounding_errors_of_nothing_are_equal(bound: Any) -> None:
    model, noise = nn.Linear(D, 2), [0.0, 1e-9]

    def compute(x: Tensor) -> Tensor:
        result: Tensor = model(x)
        result.register_hook(lambda grad: grad + noise.pop(0))
        return result

    with record(model, keep="clip", max_norm=bound, passes=2, loss_reduction="sum") as grads:
        (compute(torch.randn(B, D)) * 0).sum().backward()
    assert float(grads.clip()["bias"].norm()) <= 1e-6
