"""Rows of units: every answer against the sum of the rows of a loop, in float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from persample import PerSampleError, record
from persample.testing.oracle import Gradients, loop_gradients, perturb
from tests.support.answers import check_answers

B, T, D, WORDS = 6, 3, 4, 7


class Text(nn.Module):
    """Embeddings of words and places, attention, norms, a tied head, a stack of equal layers."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, D), nn.Embedding(T, D)
        self.norm, self.qkv = nn.LayerNorm(D), nn.Linear(D, 3 * D)
        self.layers = nn.ModuleList([nn.Linear(D, D) for _ in range(3)])
        self.unused = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.words(x) + self.places(torch.arange(T))
        q, k, v = self.qkv(self.norm(h)).chunk(3, -1)
        h = h + F.scaled_dot_product_attention(q, k, v)
        for layer in self.layers:
            h = h + layer(h).tanh()
        return h @ self.words.weight.T


def make_images() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Tanh(), nn.Conv2d(4, 4, 3, groups=2),
                         nn.Flatten(), nn.Linear(4 * 4, 3))  # fmt: skip


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "text": (Text, lambda count: torch.randint(0, WORDS, (count, T))),
    "images": (make_images, lambda count: torch.randn(count, 2, 4, 4, dtype=torch.float64)),
    "mlp": (
        lambda: nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)),
        lambda count: torch.randn(count, 5, dtype=torch.float64),
    ),
    "lstm": (lambda: nn.LSTM(D, 5, batch_first=True), lambda count: torch.randn(count, T, D, dtype=torch.float64)),
}


def compute_loss(model: nn.Module, x: Tensor) -> Tensor:
    out = model(x)
    out = out[0] if isinstance(out, tuple) else out
    return out.flatten(1).square().sum(1).mean() + out.flatten(1).sin().sum(1).mean()


@cache
def make_case(name: str, batch: int = B) -> tuple[nn.Module, Tensor, Gradients]:
    """A model, a batch, and the rows of its samples."""
    torch.manual_seed(0)
    model, make_batch = MODELS[name]
    module = model().double()
    perturb(module)
    x = make_batch(batch)
    rows = loop_gradients(module, x, compute_loss)
    for p_name, p in module.named_parameters():
        rows.setdefault(p_name, p.detach().new_zeros(batch, *p.shape))
    return module, x, rows


def add_rows(rows: Gradients, ids: list[int], count: int, reduction: str = "sum") -> Gradients:
    """The rows of units, by hand."""
    members = [[n for n, unit in enumerate(ids) if unit == u] for u in range(count)]
    return {
        name: torch.stack([part[m].sum(0) / (len(m) if reduction == "mean" and m else 1) for m in members])
        for name, part in rows.items()
    }


UNITS: dict[str, tuple[dict[str, Any], list[int], int]] = {
    "ragged": ({"units": [9, 3, 9, 9, 5, 3]}, [2, 0, 2, 2, 1, 0], 3),
    "tensor": ({"units": torch.tensor([1, 0, 1, 0, 1, 0])}, [1, 0, 1, 0, 1, 0], 2),
    "names": ({"units": ["b", "a", "c", "b", "b", "a"]}, [1, 0, 2, 1, 1, 0], 3),
    "empty": ({"units": [1, 3, 1, 1, 4, 3], "num_units": 6}, [1, 3, 1, 1, 4, 3], 6),
    "very ragged": ({"units": [2, 7, 2, 2, 2, 5], "num_units": 9}, [2, 7, 2, 2, 2, 5], 9),
    "consecutive": ({"units": 2}, [0, 0, 1, 1, 2, 2], 3),
    "single": ({"units": [4, 2, 0, 1, 5, 3]}, [4, 2, 0, 1, 5, 3], 6),
}


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("units", UNITS)
@pytest.mark.parametrize("name", MODELS)
def test_every_answer_has_a_row_for_each_unit(name: str, units: str, reduction: str) -> None:
    model, x, rows = make_case(name)
    options, ids, count = UNITS[units]
    for _ in range(2):  # small uses are stacked from the second step on
        with record(model, **options, unit_reduction=reduction) as grads:
            compute_loss(model, x).backward()
        check_answers(grads, add_rows(rows, ids, count, reduction))
    assert len(grads.units) == count
    assert f"{count} units of {B} samples ({reduction})" in repr(grads)


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("units", UNITS)
@pytest.mark.parametrize("name", MODELS)
def test_streamed_answers(name: str, units: str, passes: int) -> None:
    model, x, rows = make_case(name)
    options, ids, count = UNITS[units]
    expected = add_rows(rows, ids, count)
    norms = torch.cat([part.flatten(1) for part in expected.values()], 1).norm(dim=1)
    limit = float(norms.max()) / 2
    with record(model, **options, keep="norms") as streamed:
        compute_loss(model, x).backward()
    torch.testing.assert_close(streamed.norms(), norms)
    with record(model, **options, keep="clip", max_norm=limit, passes=passes) as clipped:
        compute_loss(model, x).backward()
    factors = (limit / norms.clamp(min=1e-30)).clamp(max=1)
    for p_name, part in clipped.clip().items():
        torch.testing.assert_close(part, torch.tensordot(factors, expected[p_name], 1))


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("name", MODELS)
def test_batches_of_one_unit_are_added_up(name: str, reduction: str) -> None:
    model, x, rows = make_case(name)
    ids, cuts = [2, 0, 2, 2, 1, 0], [(0, 2), (2, 5), (5, 6)]
    found = []
    for start, stop in cuts:
        with record(model, units=ids[start:stop], unit_reduction=reduction) as grads:
            compute_loss(model, x[start:stop]).backward()
        found.append(grads)
    together = found[0].combine(*found[1:])
    check_answers(together, add_rows(rows, ids, 3, reduction))
    assert (together.units, together.batch_size) == ([0, 1, 2], B)


def test_kept_grad_is_that_of_a_plain_pass() -> None:
    model, x, rows = make_case("text")
    with record(model, units=3, keep_grad=True) as grads:
        compute_loss(model, x).backward()
    for name, p in model.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(p.grad, rows[name].mean(0))
            p.grad = None
    assert grads.row_count == 2


def test_batch_without_samples() -> None:
    model, x, _ = make_case("mlp")
    with record(model, units=[], num_units=2) as grads:
        compute_loss(model, x[:0]).backward()
    assert grads.norms().tolist() == [0, 0]
    assert all(not part.any() for part in grads.clip(1.0).values())


@pytest.mark.parametrize("keep", ["everything", "clip"])
def test_unit_with_a_sample_that_is_not_finite_is_left_out(keep: str) -> None:
    model, x, rows = make_case("mlp")
    x = x.clone()
    x[0] = torch.inf
    ids = [2, 0, 2, 2, 1, 0]
    rows = {name: part.clone() for name, part in rows.items()}
    expected = {name: add_rows(rows, ids, 3)[name][:2] for name in rows}
    options: dict[str, Any] = {"keep": "clip", "max_norm": 1e6} if keep == "clip" else {}
    with record(model, units=ids, nonfinite="zero", verify=False, **options) as grads:
        compute_loss(model, x).backward()
    assert grads.nonfinite_count == 1
    assert "1 units not finite and left out" in repr(grads)
    for name, part in grads.clip(1e6).items():
        torch.testing.assert_close(part, expected[name].sum(0))


def test_norms_of_samples_that_cancel_in_a_unit() -> None:
    """The bound holds for the unit's row, which rounding must not make larger."""
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    x = torch.randn(1, 64).repeat(2, 1) * torch.tensor([[1.0], [1.0001]])
    y = model(x).detach() + 1e6 * torch.tensor([[1.0], [-1.0]])
    with record(model, units=2) as grads:
        F.mse_loss(model(x), y, reduction="sum").backward()
    total = torch.cat([part.flatten().double() for part in grads.clip(1.0).values()])
    assert float(total.norm()) <= 1.001


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"units": 4}, "multiple of 4"),
        ({"units": 0}, "positive"),
        ({"units": [1, 2]}, "2 ids, and the batch has 6"),
        ({"units": torch.zeros(6)}, "float32"),
        ({"units": torch.zeros(6, 1, dtype=torch.long)}, "shape"),
        ({"units": [0, 1, 2, 3, 4, 5], "num_units": 5}, "from 0 to 4"),
        ({"units": ["a", 1, 2, 3, 4, 5]}, "comparable"),
        ({"num_units": 5}, "require units"),
        ({"units": 2, "num_units": 3}, "id for each sample"),
        ({"units": 2, "unit_reduction": "max"}, "unit_reduction"),
    ],
)
def test_wrong_units_are_refused(options: dict[str, Any], message: str) -> None:
    model, x, _ = make_case("mlp")
    with pytest.raises(PerSampleError, match=message), record(model, **options):
        compute_loss(model, x).backward()


def test_combine_needs_named_units() -> None:
    model, x, _ = make_case("mlp")
    with record(model, units=2) as grads:
        compute_loss(model, x).backward()
    with pytest.raises(PerSampleError, match="unit of each sample"):
        grads.combine(grads)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("loss_reduction", ["sum", "mean"])
def test_some_parameters_and_the_sum_of_streamed_rows(reduction: Any, loss_reduction: str) -> None:
    model, x, y = nn.Linear(3, 2).double(), torch.randn(6, 3).double(), torch.tensor([0, 1, 1, 0, 1, 0])
    found = []
    for keep in ("everything", "norms"):
        with record(model, units=list("bababb"), unit_reduction=reduction, keep=keep, keep_grad=True) as grads:
            F.cross_entropy(model(x), y, reduction=loss_reduction).backward()
        found.append(grads)
    total = torch.cat([part.flatten() for part in found[0].sum().values()])
    torch.testing.assert_close(found[1].norm_of_sum(), total.norm())
    weights = found[0].select(["weight"])
    torch.testing.assert_close(weights.norms(), found[0].norms(per_parameter=True)["weight"])
    torch.testing.assert_close(weights.mean()["weight"], found[0].mean()["weight"])
    assert weights.units == ["a", "b"]


def test_a_sum_with_rows_that_are_not_finite_is_not_answered() -> None:
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    x[1] = torch.inf
    for nonfinite, error in (("raise", "not finite"), ("zero", "not finite")):
        with record(model, keep="norms", keep_grad=True, nonfinite=nonfinite) as grads:
            model(x).sum().backward()
        with pytest.raises(PerSampleError, match=error):
            grads.norm_of_sum()
