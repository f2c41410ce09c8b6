"""No sample adds more than the bound to the private sum, whatever its data."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from torch import Tensor, nn

import persample
from persample import PerSampleError, record
from persample.private import PrivateOptimizer
from tests.support.attempts import ATTEMPTS
from tests.support.bound import MODELS, OPTIONS, SIZES, Attempt, D, Net, T, compute_private_sum, measure_change

pytestmark = pytest.mark.filterwarnings("ignore")
ALLOWED = 1 + 1e-4


# ---- contributions that cancel ----


def make_cancelling_data(shape: tuple[int, ...] = (1, 1, 64)) -> tuple[Tensor, Tensor]:
    """Two positions that are nearly equal, and the signs of their targets."""
    position = torch.tensor([0.0, 1.0])[None, :, None]
    return torch.randn(shape).repeat(1, 2, 1) * (1 + 1e-4 * position), 1 - 2 * position


def compute_by_positions(kind: str, module: Callable[..., Tensor], x: Tensor) -> Tensor:
    return module(x.mT).mT if kind == "convolution" else module(x)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kind", ["linear", "convolution"])
def test_positions_that_cancel(kind: str, options: str) -> None:
    torch.manual_seed(0)
    module = nn.Linear(64, 64) if kind == "linear" else nn.Conv1d(64, 64, 1)
    x, signs = make_cancelling_data()
    y = compute_by_positions(kind, module, x).detach() + 1e6 * signs
    bound = [0.6, 0.8] if options == "per layer" else 1.0
    total = compute_private_sum(
        module, lambda m: F.mse_loss(compute_by_positions(kind, m, x), y), bound, **OPTIONS[options]
    )
    assert 0.5 < total.norm() <= ALLOWED


@pytest.mark.parametrize("options", ["one pass", "two passes"])
@pytest.mark.parametrize("positions", [1, 2, 4])
@pytest.mark.parametrize("kind", ["linear", "convolution"])
def test_squares_that_vanish(kind: str, positions: int, options: str) -> None:
    """The squares of the inputs are below the smallest number, but the gradients of the outputs are large."""
    torch.manual_seed(0)
    count, bound = 256, 0.1
    module = nn.Linear(64, 64, bias=False) if kind == "linear" else nn.Conv1d(64, 64, 1, bias=False)
    x, weights = torch.zeros(2, count, positions, 64)
    x[0] = 2.2e-23 * torch.randn(64).sign()
    weights[0] = 2e18 * count * torch.randn(64).sign() / positions
    total = compute_private_sum(
        module,
        lambda m: (compute_by_positions(kind, m, x) * weights).flatten(1).sum(1).mean(),
        bound,
        **OPTIONS[options],
    )
    assert total.norm() <= ALLOWED * bound


CANCELLING: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "opposite signs": lambda: (
        Net(lambda m, x: m.a(x) - m.a(x * 1.0001), a=nn.Linear(64, 64, bias=False)),
        torch.randn(1, 2, 64),
    ),
    "W and its transpose": lambda: (
        Net(lambda m, x: F.linear(x, m.a.weight) - F.linear(x, m.a.weight.t()), a=nn.Linear(64, 64, bias=False)),
        torch.ones(1, 2, 64) + 1e-4 * torch.randn(1, 2, 64),
    ),
    "tied embedding": lambda: (
        Net(lambda m, i: F.linear(m.e(i), m.e.weight), e=nn.Embedding(8, 64)),
        torch.tensor([[1, 1]]),
    ),
}


@pytest.mark.parametrize("options", ["one pass", "two passes", "automatic"])
@pytest.mark.parametrize("kind", CANCELLING, ids=str)
def test_uses_that_cancel(kind: str, options: str) -> None:
    torch.manual_seed(0)
    module, x = CANCELLING[kind]()
    signs = torch.tensor([1.0, -1.0])[None, :, None]
    weights = torch.ones(()) if kind == "W and its transpose" else signs + 1e-4
    total = compute_private_sum(
        module, lambda m: (m(x) * weights * 1e6).sum(), loss_reduction="sum", **OPTIONS[options]
    )
    assert 0.01 < total.norm() <= ALLOWED


@pytest.mark.parametrize("keep", ["everything", "norms", "clip", "two passes"])
def test_norms_are_those_of_the_rows(keep: str) -> None:
    torch.manual_seed(0)
    module = nn.Linear(64, 64, bias=False)
    x, signs = make_cancelling_data((3, 1, 64))
    weights = torch.randn(3, 1, 64) * 1e6 * signs
    options: dict[str, Any] = {"keep": "clip", "max_norm": 1.0, "passes": 2} if keep == "two passes" else {"keep": keep}
    if keep == "clip":
        options["max_norm"] = 1.0
    with record(module, loss_reduction="sum", **options) as grads:
        (module(x) * weights).sum().backward()
    rows = torch.einsum("bto,bti->boi", weights.double(), x.double())
    expected = rows.flatten(1).norm(dim=1)
    torch.testing.assert_close(grads.norms().double(), expected, rtol=1e-4, atol=0.0)
    torch.testing.assert_close(grads.norms(per_parameter=True)["weight"].double(), expected, rtol=1e-4, atol=0.0)
    if keep != "norms":
        clipped = (rows / expected[:, None, None]).sum(0)
        torch.testing.assert_close(grads.clip(1.0)["weight"].double(), clipped, rtol=1e-4, atol=1e-6)


def test_compiled_steps_clip_doubtful_rows_further() -> None:
    """A graph has no branches: the norm of a doubtful row is replaced by an upper bound."""
    torch.manual_seed(0)
    module = nn.Linear(64, 64, bias=False)
    x, signs = make_cancelling_data((3, 1, 64))
    weights = torch.randn(3, 1, 64) * signs
    weights[1:] *= 1e6
    x[0] = torch.randn(2, 64)  # an ordinary sample
    step = persample.compile(
        module, lambda m, x, w: (m(x) * w).sum(), lambda g: (g.norms(), g.clip(1.0)), backend="eager",
        loss_reduction="sum",
    )  # fmt: skip
    _, (norms, clipped) = step(x, weights)
    rows = torch.einsum("bto,bti->boi", weights.double(), x.double())
    exact = rows.flatten(1).norm(dim=1)
    torch.testing.assert_close(norms[0].double(), exact[0], rtol=1e-5, atol=0.0)
    assert (norms >= exact * (1 - 1e-4)).all()
    assert (clipped["weight"].double() - rows[0] / exact[0]).norm() <= 2 * ALLOWED


@settings(max_examples=80, deadline=None, database=None, derandomize=True)
@given(ATTEMPTS)
def test_no_sample_exceeds_the_bound(attempt: Attempt) -> None:
    """`python -m benchmarks.bound` makes more attempts, and looks for the largest change."""
    assert measure_change(attempt) <= ALLOWED


@pytest.mark.parametrize("options", ["one pass", "two passes"])
@pytest.mark.parametrize("kind", ["one layer", "several layers of one shape"])
def test_backward_passes_under_autocast(kind: str, options: str) -> None:
    """Autocast would round the products in norms and sums to bfloat16."""
    torch.manual_seed(0)
    layers = [nn.Linear(64, 64, bias=False) for _ in range(1 if kind == "one layer" else 3)]
    module, x, weights = nn.Sequential(*layers), torch.randn(1, 40, 64), torch.randn(1, 40, 64)

    def compute_loss(m: nn.Module) -> Tensor:
        loss: Tensor = (m(x).float() * weights).sum()
        return loss

    with torch.autocast("cpu", torch.bfloat16):
        total = compute_private_sum(module, compute_loss, loss_reduction="sum", **OPTIONS[options])
    assert float(total.norm()) == pytest.approx(1.0, rel=1e-6)


def test_answers_under_autocast() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    with record(module, loss_reduction="sum") as grads:
        module(torch.randn(3, 5, 32)).square().sum().backward()

    def read() -> list[Tensor]:
        parts = [*grads.clip(1.0).values(), *grads.sum().values(), *grads.dense().values(), *grads.variance().values()]
        return [*parts, grads.norms(), grads.gram(), grads.dot(grads.mean()), grads.project(8)]

    expected = read()
    with torch.autocast("cpu", torch.bfloat16):
        found = read()
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0.0, atol=0.0)


# ---- samples that are not finite ----


def make_classifier() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(D, 16), nn.Tanh(), nn.Linear(16, 3)), torch.randn(6, D), torch.randint(3, (6,))


BAD = [math.inf, -math.inf, math.nan, 1e19, 1e20, 1e38]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("squares", [False, True])
def test_a_sample_that_is_not_finite_adds_nothing(bad: float, options: str, squares: bool) -> None:
    module, x, y = make_classifier()
    if squares:
        module[1] = nn.Identity()
    bound: Any = [0.5] * 4 if options == "per layer" else 1.0
    weights = torch.ones(6)

    def compute(x: Tensor, weights: Tensor) -> Tensor:
        def compute_loss(m: nn.Module) -> Tensor:
            out = m(x)
            losses = (out - 1).square().sum(1) if squares else F.cross_entropy(out, y, reduction="none")
            return (losses * weights).sum()

        return compute_private_sum(module, compute_loss, bound, loss_reduction="sum", **OPTIONS[options])

    spoilt, ignored = x.clone(), weights.clone()
    spoilt[2], ignored[2] = bad, 0
    found = compute(spoilt, weights)
    if torch.equal(found, compute(x, ignored)):
        return
    # A saturated tanh has a gradient of zero: then the sample's own gradient is finite although its input's square is
    # not, and may be part of the sum.
    assert not squares and math.isfinite(bad)
    module.double()
    torch.testing.assert_close(found, compute(spoilt.double(), weights.double()), rtol=1e-4, atol=1e-6)


POSITIONS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(D, 40),
    "convolution": lambda: Net(lambda m, x: m.c(x.mT).mT, c=nn.Conv1d(D, 40, 3)),
    "recurrent": lambda: Net(lambda m, x: m.r(x)[0], r=nn.GRU(D, 8, batch_first=True)),
    "norm": lambda: nn.Sequential(nn.LayerNorm(D), nn.Linear(D, 4)),
    "rows of a mask": lambda: Net(
        lambda m, x: torch.zeros(*x.shape[:2], 4).masked_scatter(
            (x[..., 0] > 0)[..., None], F.layer_norm(m.l(x[x[..., 0] > 0]), (4,), m.w)
        ),
        l=nn.Linear(D, 4),
        w=nn.Parameter(torch.ones(4)),
    ),
    "weight used twice": lambda: Net(lambda m, x: m.l(x) + m.l(x.flip(1)), l=nn.Linear(D, 40)),
}


@pytest.mark.parametrize("keep", ["clip", "everything"])
@pytest.mark.parametrize("kind", POSITIONS, ids=str)
def test_other_samples_are_what_they_are_without_it(kind: str, keep: str) -> None:
    torch.manual_seed(0)
    module, x = POSITIONS[kind](), torch.randn(5, 7, D)
    x[..., 0] = torch.rand(5, 7) - torch.tensor([0.1, 0.4, 0.2, 1.5, 0.7])[:, None]  # one sample has no rows
    x[2, :, 0] = 1
    spoilt = x.clone()
    spoilt[2, :, 1] = math.inf
    others = [0, 1, 3, 4]
    options: dict[str, Any] = {"keep": "clip", "max_norm": 0.5} if keep == "clip" else {}
    with record(module, loss_reduction="sum", nonfinite="zero", verify=False, **options) as grads:
        module(spoilt).square().sum().backward()
    with record(module, loss_reduction="sum", verify=False, **options) as expected:
        module(x[others]).square().sum().backward()
    assert grads.nonfinite_count == 1
    assert "1 samples not finite and left out" in repr(grads)
    torch.testing.assert_close(grads.norms()[others], expected.norms())
    assert grads.norms()[2] == 0
    for name, part in grads.clip(0.5).items():
        torch.testing.assert_close(part, expected.clip(0.5)[name])
    if keep == "everything":
        for name, part in grads.sum().items():
            torch.testing.assert_close(part, expected.sum()[name])
        for name, rows in grads.dense().items():
            torch.testing.assert_close(rows[others], expected.dense()[name])
            assert not rows[2].any()


@pytest.mark.parametrize("options", ["one pass", "two passes"])
@pytest.mark.parametrize("kind", ["convolution", "LSTM", "GRU, two directions", "attention", "embedding", "norm"])
def test_other_samples_are_untouched_to_the_bit(kind: str, options: str) -> None:
    torch.manual_seed(0)
    module, x, weights = MODELS[kind](*SIZES["small"]), torch.randn(5, T, D), torch.ones(5)
    spoilt, ignored = x.clone(), weights.clone()
    spoilt[2], ignored[2] = math.nan, 0

    def compute(x: Tensor, weights: Tensor) -> Tensor:
        def compute_loss(m: nn.Module) -> Tensor:
            return (m(x).square().flatten(1).sum(1) * weights).sum()

        return compute_private_sum(module, compute_loss, loss_reduction="sum", **OPTIONS[options])

    compute(x, ignored)  # the first step of a model may add up in another order
    assert torch.equal(compute(spoilt, weights), compute(x, ignored))


@pytest.mark.parametrize("options", [{}, {"keep": "norms"}, {"keep": "clip", "max_norm": 1.0}], ids=str)
def test_record_raises(options: dict[str, Any]) -> None:
    module, x, y = make_classifier()
    x[4, 0] = math.nan
    with record(module, **options) as grads:
        F.cross_entropy(module(x), y).backward()
    with pytest.raises(PerSampleError, match=r"not finite: of sample 4 .*nonfinite='zero'"):
        grads.norms()
    if "max_norm" in options:
        with pytest.raises(PerSampleError, match="not finite"):
            grads.clip()
    with record(module, nonfinite="keep", **options) as grads:
        F.cross_entropy(module(x), y).backward()
    assert grads.norms().isnan().tolist() == [False] * 4 + [True, False]
    assert grads.nonfinite_count == 1


def test_norms_above_the_root_of_the_largest_number() -> None:
    module = nn.Linear(3, 2, bias=False)
    with record(module, loss_reduction="sum") as grads:
        (module(torch.ones(2, 3) * 1e15) * torch.tensor([[1e15], [1.0]])).sum().backward()
    torch.testing.assert_close(grads.norms().double(), torch.tensor([1e30, 1e15]).double() * math.sqrt(6))
    assert float(grads.clip(1.0)["weight"].norm()) <= 2 * ALLOWED


@pytest.mark.parametrize("per_parameter", [False, True])
def test_compiled_steps_raise(per_parameter: bool) -> None:
    module, x, y = make_classifier()
    step = persample.compile(module, nn.CrossEntropyLoss(), lambda g: g.clip(1.0, per_parameter), backend="eager")
    step(x, y)
    x[1] = math.nan
    with pytest.raises(PerSampleError, match="not finite"):
        step(x, y)


def test_the_optimizer_counts() -> None:
    module, x, y = make_classifier()
    optimizer = PrivateOptimizer(
        torch.optim.SGD(module.parameters(), lr=0.1), module=module, noise_multiplier=1.0, max_grad_norm=1.0,
        expected_batch_size=6,
    )  # fmt: skip
    for bad in (1, 2):
        x[:bad] = math.nan
        optimizer.zero_grad()
        F.cross_entropy(module(x), y).backward()
        optimizer.step()
    optimizer.release()
    assert optimizer.nonfinite_count == 3
    assert all(p.isfinite().all() for p in module.parameters())


# ---- dtypes ----


@pytest.mark.parametrize("count", [1037, 4113])
def test_sums_of_bfloat16_parameters_are_not_rounded(count: int) -> None:
    module = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    total = compute_private_sum(
        module, lambda m: m(torch.full((count, 1), 4.0, dtype=torch.bfloat16)).sum(), loss_reduction="sum"
    )
    assert float(total) == pytest.approx(count, rel=1e-6)


def test_noise_is_added_before_the_sum_is_rounded() -> None:
    """The sum, 1036, lies between 1032 and 1040, numbers of bfloat16; the noise decides which of them it becomes."""
    module = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    optimizer = PrivateOptimizer(
        torch.optim.SGD(module.parameters(), lr=0.0), module=module, noise_multiplier=0.3, max_grad_norm=1.0,
        expected_batch_size=1, loss_reduction="sum", generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    found = set()
    for _ in range(20):
        optimizer.zero_grad()
        module(torch.full((1036, 1), 4.0, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        found.add(float(module.weight.grad))
    optimizer.release()
    assert module.weight.grad.dtype == torch.bfloat16
    assert found == {1032.0, 1040.0}


@pytest.mark.parametrize("secure", [False, True])
def test_noise_of_complex_parameters(secure: bool) -> None:
    module = nn.Linear(40, 200, bias=False, dtype=torch.complex64)
    optimizer = PrivateOptimizer(
        torch.optim.SGD(module.parameters(), lr=0.0), module=module, noise_multiplier=2.0, max_grad_norm=1.0,
        expected_batch_size=1, loss_reduction="sum", generator=torch.Generator().manual_seed(0), secure_mode=secure,
    )  # fmt: skip
    optimizer.zero_grad()
    module(torch.zeros(1, 40, dtype=torch.complex64)).abs().sum().backward()
    optimizer.step()
    optimizer.release()
    noise = torch.view_as_real(module.weight.grad)
    assert noise.std((0, 1)).tolist() == pytest.approx([2.0, 2.0], rel=0.05)
