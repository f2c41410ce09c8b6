"""monitor(): its figures equal a loop over samples, and the training run is as it would be without it."""

from __future__ import annotations

import gc
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import persample
from persample import PerSampleError, _torch
from persample.monitoring.noise_scale import compute_parts, compute_ratio
from persample.testing import loop_gradients

pytestmark = pytest.mark.quick

SIZE, CLASSES = 6, 3


def make_model(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    layers = [
        nn.Linear(4, 8),
        nn.Tanh(),
        nn.Linear(8, 8),
        nn.Dropout(options.get("dropout", 0.0)),
        nn.Linear(8, CLASSES),
    ]
    return nn.Sequential(*layers).double()


def make_batches(count: int, size: int = SIZE) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(size, 4).double(), torch.randint(CLASSES, (size,))) for _ in range(count)]


def train(model: nn.Module, steps: int = 6, accumulate: int = 1, late_zero_grad: bool = False) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    torch.manual_seed(2)
    for i, (x, y) in enumerate(make_batches(steps)):
        if i % accumulate == 0 and not late_zero_grad:
            optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        if late_zero_grad:
            optimizer.zero_grad(set_to_none=False)
        loss.backward()
        if i % accumulate == accumulate - 1:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("every", [1, 2, 4])
@pytest.mark.parametrize("options", [{}, {"accumulate": 3}, {"late_zero_grad": True}], ids=str)
def test_the_training_run_stays_as_it_is(every: int, options: dict[str, Any]) -> None:
    expected = train(make_model(dropout=0.3), **options)
    model = make_model(dropout=0.3)
    with persample.monitor(model, every=every) as watching:
        found = train(model, **options)
    assert len(watching.history) == -(-6 // every)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def test_nothing_is_left_behind() -> None:
    model = make_model()
    with persample.monitor(model, every=2):
        train(model)
    assert not model._forward_pre_hooks and not model._forward_hooks
    assert all(not p._backward_hooks for p in model.parameters())
    assert not _torch.get_function_modes()
    watching = persample.monitor(model)
    del watching
    gc.collect()
    model(torch.randn(2, 4).double()).sum().backward()  # a monitor that was dropped does nothing


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_figures_equal_a_loop(reduction: str) -> None:
    model, ((x, y),) = make_model(), make_batches(1)
    rows = loop_gradients(model, (x, y), lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction="sum"))
    matrix = torch.cat([part.flatten(1) for part in rows.values()], 1)
    norms, mean = matrix.norm(dim=1), matrix.mean(0)
    with persample.monitor(model, bounds=[float(norms.median())]) as watching:
        F.cross_entropy(model(x), y, reduction=reduction).backward()
    found = watching.latest
    assert found is not None and found.samples == SIZE and found.not_finite == 0
    assert found.norms["median"] == pytest.approx(float(norms.quantile(0.5)))
    assert found.norms["most"] == pytest.approx(float(norms.max()))
    assert list(found.clipped.values()) == [pytest.approx(float((norms > norms.median()).double().mean()))]
    assert found.noise == pytest.approx(float(matrix.var(0).sum()))
    assert found.signal == pytest.approx(float(mean.square().sum() - matrix.var(0).sum() / SIZE))
    cosines = (matrix @ mean) / (norms * mean.norm())
    assert found.cosine_with_mean == pytest.approx(float((cosines * norms).sum() / norms.sum()))
    products = matrix @ matrix.T
    outside = ~torch.eye(SIZE, dtype=torch.bool)
    weights = torch.outer(norms, norms)
    assert found.cosine_between == pytest.approx(float(products[outside].sum() / weights[outside].sum()))
    layer = torch.cat([part.flatten(1) for name, part in rows.items() if name.startswith("2.")], 1).norm(dim=1)
    assert found.layers["2"]["median"] == pytest.approx(float(layer.quantile(0.5)))
    assert sum(part["share"] for part in found.layers.values()) == pytest.approx(1)


def test_hardest_examples_are_known_by_id(caplog: pytest.LogCaptureFixture) -> None:
    model, batches = make_model(), make_batches(3)
    batches[1][0][4] *= 100
    with persample.monitor(model, every=1, hardest=2) as watching:
        for i, (x, y) in enumerate(batches):
            watching.ids = torch.arange(SIZE) + SIZE * i
            F.cross_entropy(model(x), y).backward()
        assert watching.find_hardest(1)[0][0] == SIZE + 4
        assert watching.history[1].hardest[0][0] == SIZE + 4
        watching.ids = [1, 2]
        F.cross_entropy(model(x), y).backward()
        assert len(watching.history) == 3 and "has 2 entries, but the batch has 6 samples" in caplog.text


class TwoHeads(nn.Module):
    """The second head gets no gradient until it is switched on; then a large one."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.other = nn.Linear(4, 4), nn.Linear(4, 1), nn.Linear(4, 1)
        self.scale = 0.0

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x)
        return self.head(hidden) + self.scale * self.other(hidden)


def test_dead_and_exploding_layers_are_named() -> None:
    torch.manual_seed(0)
    model, x = TwoHeads(), torch.randn(8, 4)
    with persample.monitor(model, every=1) as watching:
        for scale in [0.0] * 8 + [1.0] * 8 + [100.0]:
            model.scale = scale
            model(x).square().mean().backward()
    warnings = [found.warnings for found in watching.history]
    assert not any(warnings[:5]) and warnings[5][0] == "other.bias, other.weight: no sample has had a gradient here"
    assert warnings[6:8] == [[], []]  # each cause once
    assert any("other: the largest norm is" in text for text in warnings[-1])


def test_samples_that_are_not_finite_are_counted_and_left_out() -> None:
    model, ((x, y),) = make_model(), make_batches(1)
    x[2] = torch.inf
    with persample.monitor(model, verify=False, every=1) as watching:
        F.cross_entropy(model(x), y).backward()
        assert watching.latest is not None and watching.latest.hardest == []  # places in a batch are no ids
        watching.ids = range(len(x))
        F.cross_entropy(model(x), y).backward()
    found = watching.latest
    assert found is not None and found.not_finite == 1 and math.isfinite(found.norms["most"]) and found.noise is None
    assert found.warnings == ["1 samples have a gradient that is not finite"] and found.hardest[0][0] == 2


def test_calls_without_a_step_are_not_measured() -> None:
    model, ((x, y),) = make_model(), make_batches(1)
    with persample.monitor(model, every=1) as watching:
        model.eval()
        model(x)
        model.train()
        with torch.no_grad():
            model(x)
        assert not watching.history and watching.step == 0
        with pytest.raises(RuntimeError):
            model(x[:, :2])  # a call that fails
        F.cross_entropy(model(x), y).backward()
        F.cross_entropy(model(x) + model(x + 1), y).backward()  # two calls, one step
    assert len(watching.history) == 2


def test_a_batch_of_one_sample_has_no_noise_scale() -> None:
    model, batches = make_model(), make_batches(1, size=1)
    with persample.monitor(model) as watching:
        F.cross_entropy(model(batches[0][0]), batches[0][1]).backward()
    assert watching.latest is not None and watching.latest.noise is None and watching.noise_scale is None
    assert "not known yet" in repr(watching)


class Writer:
    def __init__(self) -> None:
        self.found: list[tuple[str, float, int]] = []

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.found.append((name, value, step))


def test_figures_go_to_files_and_loggers(tmp_path: Path) -> None:
    model, calls, writer = make_model(), [], Writer()
    with persample.monitor(
        model, every=3, out=tmp_path / "run.jsonl", log=lambda *found: calls.append(found)
    ) as watching:
        train(model)
    with persample.monitor(model, every=3, log=writer):
        train(model)
    first, *lines = map(json.loads, (tmp_path / "run.jsonl").read_text().splitlines())
    assert first["every"] == 3 and first["layers"] == {"0": 40, "2": 72, "4": 27}
    assert [line["step"] for line in lines] == [0, 3] == [step for _, step in calls]
    assert lines[0]["norms"] == watching.history[0].norms
    assert {name for name, _, _ in writer.found} >= {"gradients/norm_median", "gradients/layer/0"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "at least 1"),
        ({"log": 3}, "SummaryWriter"),
        ({"parameters": lambda name, p: False}, "no parameter to monitor"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PerSampleError, match=message):
        persample.monitor(make_model(), **options)


# ---- the noise scale ----


def draw_parts(truth: Tensor, spread: float, steps: int, size: int) -> tuple[list[float], list[float]]:
    """Estimates of both parts from batches of rows with the mean `truth` and the given spread."""
    noise, signal = [], []
    for _ in range(steps):
        rows = truth + spread * torch.randn(size, len(truth), dtype=torch.float64)
        parts = compute_parts(float(rows.square().sum(1).mean()), float(rows.mean(0).square().sum()), size)
        noise.append(parts[0])
        signal.append(parts[1])
    return noise, signal


def test_the_interval_contains_the_noise_scale() -> None:
    torch.manual_seed(0)
    truth = torch.full((20,), 0.1, dtype=torch.float64)
    exact = 20 * 0.5**2 / float(truth.square().sum())
    intervals = [compute_ratio(*draw_parts(truth, 0.5, 30, 8)) for _ in range(200)]
    inside = [found.low <= exact <= found.high for found in intervals]
    assert 0.9 < sum(inside) / len(inside) <= 1
    assert all(found.low >= 0 and (found.value is None or found.value > 0) for found in intervals)


def test_a_mean_that_is_lost_in_noise_has_no_upper_end() -> None:
    torch.manual_seed(0)
    found = compute_ratio(*draw_parts(torch.zeros(50, dtype=torch.float64), 1.0, 30, 8))
    assert math.isinf(found.high) and found.low > 10 and str(found).startswith("above")


# ---- advice ----


def test_advice_follows_from_noise_scale_and_norms() -> None:
    model = make_model()
    with persample.monitor(model, every=1) as watching:
        train(model, steps=40)
    advice = watching.advise(examples=1000, epochs=2, noise_multiplier=1.5, delta=1e-5)
    assert advice.max_norm == advice.bounds["median"] and "clipping bound" in str(advice)
    scale = watching.noise_scale
    assert scale is not None
    if advice.batch_size is not None:
        assert scale.value is not None and 0.7 < advice.batch_size / scale.value < 1.5
    assert set(advice.epsilons) >= {SIZE} and all(0 < epsilon < 10 for epsilon in advice.epsilons.values())
    assert list(advice.epsilons.values()) == sorted(advice.epsilons.values())


# ---- importance sampling ----


def test_weighted_draws_are_unbiased_and_have_less_variance() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.linspace(0, 1, 50, dtype=torch.float64) ** 4 + 0.01
    sampler = persample.ImportanceSampler(50, draws=4000, uniform=0.1, generator=generator)
    sampler.update(torch.arange(50), values)
    ids = torch.tensor(list(sampler))
    weighted = values[ids] * sampler.weights(ids)
    uniform = values[torch.randint(50, (4000,), generator=generator)]
    assert float(weighted.mean()) == pytest.approx(float(values.mean()), rel=0.02)
    assert weighted.var() < 0.1 * uniform.var()
    assert sampler.weights(torch.arange(50)).max() <= 1 / 0.1 + 1e-6


def test_weights_fit_the_epoch_although_norms_change() -> None:
    sampler = persample.ImportanceSampler(4, uniform=0.2)
    ids = torch.tensor(list(sampler))
    before = sampler.weights(ids)
    sampler.update(torch.tensor([0, 1, 2]), torch.tensor([100.0, torch.nan, 1.0]))
    torch.testing.assert_close(sampler.weights(ids), before)
    list(sampler)
    assert sampler.weights(torch.tensor([0])) < 1 and sampler.probabilities.sum() == pytest.approx(1)


@pytest.mark.parametrize(
    "options", [{"size": 0}, {"size": 3, "uniform": 0}, {"size": 3, "decay": 1}, {"size": 3, "draws": 0}]
)
def test_wrong_samplers_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(PerSampleError):
        persample.ImportanceSampler(**options)


@pytest.mark.parametrize("keeps_output", [False, True], ids=["output freed", "output alive"])
def test_ids_after_a_step_that_was_given_up_are_those_of_the_next_call(keeps_output: bool) -> None:
    model, x = nn.Linear(3, 2), torch.tensor([[1.0, 0, 0], [9.0, 0, 0]])
    with persample.monitor(model, every=1) as watching:
        watching.ids = ["a", "b"]
        output = model(torch.randn(2, 3))
        if not keeps_output:
            del output
        watching.ids = ["c", "d"]
        model(x).square().mean().backward()
        assert [name for name, _ in watching.find_hardest()] == ["d", "c"]
        assert len(watching.history) == 1


@pytest.mark.parametrize("every", [1, 2, 3])
@pytest.mark.parametrize(
    "reduce", [lambda out: out.square().mean(), lambda out: out.sum(1).mean()], ids=["used", "freed"]
)
def test_several_calls_in_one_loss_are_one_step(every: int, reduce: Any) -> None:
    model, gradients = make_model(), []
    batches = make_batches(7)
    for is_monitored in (False, True):
        model.zero_grad()
        watching = persample.monitor(model, every=every) if is_monitored else None
        for x, _ in batches:
            (reduce(model(x)) + reduce(model(x + 1))).backward()
        gradients.append([p.grad for p in model.parameters()])
        if watching is not None:
            watching.stop()
            assert len(watching.history) >= 7 // every
    torch.testing.assert_close(*gradients)


def test_only_calls_of_the_model_in_training_are_measured() -> None:
    model, (x, y) = make_model(), make_batches(1)[0]
    with persample.monitor(model, every=5) as watching:
        F.cross_entropy(model(x), y).backward()
        F.cross_entropy(model.eval()(x), y).backward()
        model.train()[0](x).sum(1).mean().backward()
    assert len(watching.history) == 1


def test_groups_may_leave_parameters_out_and_parameters_may_be_frozen_later() -> None:
    model, (x, y) = make_model(), make_batches(1)[0]
    with persample.monitor(model, every=1, groups={"last": ["4.weight"], "both": ["4.weight", "4.bias"]}) as watching:
        for is_frozen in (False, True):
            model[4].weight.requires_grad_(not is_frozen)
            F.cross_entropy(model(x), y).backward()
            with persample.record(model.eval()) as grads:
                F.cross_entropy(model(x), y).backward()
            model.train()
            norms, mean = grads.norms(), grads.mean()
            length = torch.cat([part.flatten() for part in mean.values()]).norm()
            found = watching.history[-1]
            assert found.norms["most"] == pytest.approx(float(norms.max()))
            assert found.cosine_with_mean == pytest.approx(float(length / norms.mean()))
            assert (found.layers["last"]["most"] == 0) == is_frozen


def test_a_step_that_does_not_reach_the_chosen_parameters_has_norms_of_zero() -> None:
    model, (x, _) = nn.ModuleList([nn.Linear(4, 2), nn.Linear(4, 2)]).double(), make_batches(1)[0]
    model.forward = lambda x: model[0](x)
    with persample.monitor(model, every=1, parameters=["1.weight"]) as watching:
        model(x).square().mean().backward()
    assert watching.history[0].norms["most"] == 0


def test_steps_that_something_else_records_are_measured_later() -> None:
    first, second = nn.Linear(4, 4).double(), nn.Linear(4, 2).double()
    with persample.monitor(first, every=3) as one, persample.monitor(second, every=3) as other:
        for x, _ in make_batches(6):
            second(first(x)).square().mean().backward()
        before = [p.grad.clone() for p in second.parameters()]
        with persample.record(second) as grads:
            second(first(x).detach()).square().mean().backward()
    assert [found.step for found in one.history] == [0, 3]
    assert [found.step for found in other.history] == [1, 4]
    assert len(grads) == SIZE
    assert all(torch.equal(p.grad, grad) for p, grad in zip(second.parameters(), before, strict=True))


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("count", [2, 3])
def test_monitors_of_several_models_take_turns(count: int, every: int) -> None:
    models = [nn.Linear(4, 4).double() for _ in range(count)]
    monitors = [persample.monitor(model, every=every) for model in models]
    for x, _ in make_batches(8 * count):
        nn.Sequential(*models)(x).square().mean().backward()
    measured = [len(watching.history) for watching in monitors]
    assert min(measured) >= max(measured) - 1 >= 7
    monitors[0].stop()  # the others go on
    for x, _ in make_batches(4 * count):
        nn.Sequential(*models)(x).square().mean().backward()
    assert all(len(watching.history) > before + 1 for watching, before in zip(monitors[1:], measured[1:], strict=True))


def test_a_monitor_does_not_wait_for_a_model_that_is_not_called_any_more() -> None:
    first, second = nn.Linear(4, 4).double(), nn.Linear(4, 2).double()
    with persample.monitor(first, every=1) as one, persample.monitor(second, every=1):
        for x, _ in make_batches(1):
            second(first(x)).square().mean().backward()
        for x, _ in make_batches(6):
            first(x).square().mean().backward()
        assert len(one.history) == 1 + 5


def test_monitors_of_one_model_share_a_recording() -> None:
    model, batches = make_model(), make_batches(4)
    with (
        persample.monitor(model, every=2, parameters=["4.weight"]) as part,
        persample.monitor(model, every=2) as other,
        persample.monitor(model, every=1) as one,
    ):
        for x, y in batches:
            F.cross_entropy(model(x), y).backward()
        assert [found.step for found in one.history] == [0, 1, 2, 3]
        assert [found.step for found in other.history] == [0, 2] == [found.step for found in part.history]
        for found, measured, expected in zip(part.history, other.history, one.history[::2], strict=True):
            assert (measured.norms, measured.noise) == (expected.norms, expected.noise)
            assert 0 < found.norms["most"] < expected.norms["most"] and found.noise is None


def test_monitors_of_other_parameters_take_turns() -> None:
    model, batches = make_model(), make_batches(6)
    with (
        persample.monitor(model, every=1) as one,
        persample.monitor(model, every=1, parameters=["4.weight"]) as other,
    ):
        for x, y in batches:
            F.cross_entropy(model(x), y).backward()
        assert len(one.history) == len(other.history) == 3
        assert all(found.noise is not None for found in (*one.history, *other.history))


class Rated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(5, 3), nn.Embedding(4, 3)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        return (self.users(users) * self.items(items)).sum(-1)  # type: ignore[no-any-return]


def test_parts_that_are_called_before_the_model() -> None:
    """In all steps: a step begins with the part that was called first in the first step."""
    torch.manual_seed(0)
    model = Rated().double()

    def loss(model: Any, batch: Any) -> Tensor:
        apart = 0.5 * model.users(batch[0]).square().sum(1).mean()
        return apart + F.mse_loss(model(batch[0], batch[1]), batch[2])  # type: ignore[no-any-return]

    with persample.monitor(model, every=1) as watching:
        for step, size in enumerate((4, 3, 5)):
            batch = torch.randint(5, (size,)), torch.randint(4, (size,)), torch.randn(size).double()
            loss(model, batch).backward()
            rows = loop_gradients(model, batch, loss)
            norms = torch.cat([row.reshape(size, -1) for row in rows.values()], 1).norm(dim=1)
            assert len(watching.history) == step + 1
            assert watching.history[-1].norms["most"] == pytest.approx(float(norms.max()))
            assert watching.history[-1].norms["least"] == pytest.approx(float(norms.min()))
