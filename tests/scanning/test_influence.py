"""Influence by all methods, compared with direct computations in float64 from dense per-sample gradients."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import persample
from persample.gradients import make_rows
from persample.scanning import RandomScores, ScanError, influence, queries, stored_gradients
from persample.scanning.answers import RunningTop
from persample.scanning.damping import (
    CANDIDATES,
    Whitening,
    choose_damping,
    choose_damping_of_directions,
    compare_with_step,
)
from persample.scanning.rescan import rescan
from persample.scanning.steps import read_steps
from persample.scanning.store import Store
from persample.scanning.stored_gradients import StoredGradients
from persample.terms import Dense
from tests.scanning.test_queries import store_rows
from tests.support.modules import make_mlp

N, CLASSES, DIM = 70, 4, 48
RATES = [0.3, 0.2]
DAMPING = 0.2
METHODS = influence.METHODS
OPTIONS: dict[str, Any] = {"batch_size": 8, "shard_size": 16, "project": DIM, "dtype": "float32", "progress": False}


def make_data(count: int = N, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 10, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(CLASSES, (count,), generator=generator)


def make_model() -> nn.Module:
    return make_mlp(10, 12, CLASSES)


def make_states(model: nn.Module) -> list[dict[str, Tensor]]:
    return [{name: value * scale for name, value in model.state_dict().items()} for scale in (0.5, 1.5)]


def compute_rows(model: nn.Module, batch: Any, function: Callable[..., Tensor], names: Any = None) -> Tensor:
    """`(samples, numbers)`: gradients by a loop over the samples. Parameters that are not in `names` count as zero."""
    rows = []
    for x, y in zip(*batch, strict=True):
        value = function(model, (x[None], y[None])).sum()
        grads = torch.autograd.grad(value, list(model.parameters()), allow_unused=True)
        parts = zip(model.named_parameters(), grads, strict=True)
        zero = lambda name, grad: grad is None or (names is not None and name not in names)  # noqa: E731
        rows.append(torch.cat([(torch.zeros_like(p) if zero(n, g) else g).flatten() for (n, p), g in parts]))
    return torch.stack(rows)


def find_projection(model: nn.Module, seed: int = 0) -> Tensor:
    """`(numbers, DIM)`: the matrix of the projection, from the projections of all unit vectors."""
    parameters = dict(model.named_parameters())
    total = sum(p.numel() for p in parameters.values())
    unit = torch.eye(total, dtype=torch.float64).split([p.numel() for p in parameters.values()], dim=1)
    named = zip(parameters.items(), unit, strict=True)
    terms = {name: Dense(part.reshape(total, *p.shape)) for (name, p), part in named}
    return make_rows(parameters, terms, total).project(DIM, seed, method="kronecker")


def find_blocks(model: nn.Module, projection: Tensor) -> list[Tensor]:
    """The numbers of a projected row that each parameter has a share in; parameters with the same numbers once."""
    parts = projection.split([p.numel() for p in model.parameters()])
    found = {tuple(part.abs().sum(0).nonzero().flatten().tolist()) for part in parts}
    assert sorted(i for numbers in found for i in numbers) == list(range(DIM)), "parameters have separate numbers"
    return [torch.tensor(numbers) for numbers in found]


def damp(moment: Tensor, blocks: list[Tensor], damping: float) -> Tensor:
    """The second moment plus the damping, which is relative to the mean eigenvalue of each block."""
    damped = moment.clone()
    for numbers in blocks:
        damped[numbers, numbers] += damping * torch.linalg.eigvalsh(moment[numbers][:, numbers]).mean()
    return damped


def compute_loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def compute_margin(model: nn.Module, batch: Any) -> Tensor:
    """log(p / (1 - p)) of the label."""
    logits = model(batch[0])
    label = F.one_hot(batch[1], CLASSES).bool()
    return logits[label] - torch.logsumexp(logits[~label].reshape(len(logits), -1), 1)


def compute_expected(
    method: str,
    model: nn.Module,
    states: list[Any],
    test: Any,
    data: Any = None,
    margin: Any = compute_margin,
    compute_residuals: Any = lambda model, data: 1 - torch.exp(-compute_loss(model, data)),
) -> Tensor:
    """The scores of a method, in float64 from its definition."""
    data = make_data() if data is None else data
    total, residuals = torch.zeros(()), []
    for checkpoint, (rate, state) in enumerate(zip(RATES, states, strict=True)):
        model.load_state_dict(state)
        projection = find_projection(model, checkpoint)
        function = margin if method == "trak" else compute_loss
        rows, own = (compute_rows(model, batch, function) @ projection for batch in (data, test))
        if method == "tracin":
            part = rate * own @ rows.T
        elif method == "cosine":
            part = rate / sum(RATES) * F.normalize(own) @ F.normalize(rows).T
        else:
            moment = rows.T @ rows / N
            damped = damp(moment, find_blocks(model, projection), DAMPING)
            part = own @ torch.linalg.inv(damped) @ rows.T / len(states)
        total = total + part
        residuals.append(compute_residuals(model, data).detach())
    return total * torch.stack(residuals).mean(0) if method == "trak" else total


@pytest.fixture(scope="module")
def scanned(tmp_path_factory: pytest.TempPathFactory) -> tuple[persample.Scan, nn.Module, list[dict[str, Tensor]]]:
    model = make_model()
    states = make_states(model)
    found = persample.scan(
        model,
        nn.CrossEntropyLoss(),
        make_data(),
        out=tmp_path_factory.mktemp("scan"),
        checkpoints=states,
        learning_rates=RATES,
        **OPTIONS,
    )
    return found, model, states


@pytest.mark.parametrize("block_size", [16, 4096])
@pytest.mark.parametrize("method", METHODS)
def test_scores_match_definition(method: Any, block_size: int, scanned: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_gradients, "BLOCK_SIZE", block_size)
    found, _, states = scanned
    test = make_data(5, seed=1)
    expected = compute_expected(method, make_model(), states, test)
    scores = found.scores(test, method, damping=DAMPING)
    torch.testing.assert_close(scores.double(), expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))

    answer, order = found.influence(test, 4, method, damping=DAMPING), scores.argsort(dim=1, descending=True)
    assert torch.equal(answer.for_ids, order[:, :4]) and torch.equal(answer.against_ids, order[:, -4:].flip(1))
    assert torch.equal(answer.for_scores, scores.gather(1, order[:, :4]))


@pytest.mark.parametrize("method", ["tracin", "whitened", "trak"])
def test_self_influence_is_the_diagonal(method: Any, scanned: Any) -> None:
    found, _, states = scanned
    ranking = found.self_influence(method, damping=DAMPING)
    expected = compute_expected(method, make_model(), states, make_data()).diag()
    torch.testing.assert_close(ranking.scores, expected[ranking.ids], rtol=1e-4, atol=1e-7)
    assert ranking.ids.tolist() == expected.argsort(descending=True).tolist()
    assert len(found.self_influence(method, 3).ids) == 3


def test_influence_on_a_measured_function(scanned: Any) -> None:
    found, _, states = scanned
    test, measure = make_data(5, seed=1), lambda model, batch: model(batch[0])[:, 2].square()
    model, expected = make_model(), torch.zeros(())
    for checkpoint, (rate, state) in enumerate(zip(RATES, states, strict=True)):
        model.load_state_dict(state)
        projection = find_projection(model, checkpoint)
        rows = compute_rows(model, make_data(), compute_loss) @ projection
        expected = expected + rate * compute_rows(model, test, measure) @ projection @ rows.T
    torch.testing.assert_close(found.scores(test, "tracin", measure=measure).double(), expected, rtol=1e-4, atol=1e-5)
    # With "trak", the loss as a measure differs from the margin by the factor 1 / (1 - p) of each test sample.
    found_one = persample.scan(make_model(), nn.CrossEntropyLoss(), make_data(), **OPTIONS)
    plain, loss = found_one.scores(test, "trak"), found_one.scores(test, "trak", measure=compute_loss)
    residuals = 1 - torch.exp(-compute_loss(make_model(), test)).detach()
    torch.testing.assert_close(plain.double(), loss.double() / residuals[:, None], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", ["tracin", "whitened", "trak"])
def test_influence_of_groups_adds_up(method: Any, scanned: Any) -> None:
    found, _, _ = scanned
    test, groups = make_data(5, seed=1), [["0.weight", "0.bias"], ["2.weight", "2.bias"]]
    parts = [found.scores(test, method, parameters=group) for group in groups]
    assert not torch.allclose(*parts)
    whole = found.scores(test, method)
    torch.testing.assert_close(sum(parts), whole, rtol=1e-4, atol=1e-4 * float(whole.abs().max()))


def test_influence_of_a_group_matches_masked_gradients(scanned: Any) -> None:
    found, _, states = scanned
    model, test, expected = make_model(), make_data(5, seed=1), torch.zeros(())
    for checkpoint, (rate, state) in enumerate(zip(RATES, states, strict=True)):
        model.load_state_dict(state)
        projection = find_projection(model, checkpoint)
        rows = compute_rows(model, make_data(), compute_loss) @ projection
        own = compute_rows(model, test, compute_loss, names=("2.weight", "2.bias")) @ projection
        expected = expected + rate * own @ rows.T
    scores = found.scores(test, "tracin", parameters=lambda name, p: name.startswith("2."))
    torch.testing.assert_close(scores.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("as_dict", [False, True])
def test_influence_with_steps_of_adam(as_dict: bool) -> None:
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, betas=(0.9, 0.99))
    for _ in range(3):
        optimizer.zero_grad()
        compute_loss(model, make_data()).mean().backward()
        optimizer.step()
    optimizer.zero_grad()
    moments = {n: optimizer.state[p]["exp_avg_sq"] / (1 - 0.99**3) for n, p in model.named_parameters()}
    found = persample.scan(model, nn.CrossEntropyLoss(), make_data(), **OPTIONS)
    test = make_data(5, seed=1)
    steps = torch.cat([1 / (moment.sqrt() + 1e-8).flatten() for moment in moments.values()])
    rows, own = (compute_rows(model, batch, compute_loss) for batch in (make_data(), test))
    projection = find_projection(model)
    expected = (own * steps) @ projection @ projection.T @ rows.T
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RandomScores)
        scores = found.scores(test, "tracin", adam=moments if as_dict else optimizer)
    torch.testing.assert_close(scores.double(), expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


WRONG_ARGUMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "adam": ({"method": "whitened", "adam": {}}, "adam can be combined with method='tracin' only"),
    "no moment": ({"method": "tracin", "adam": {}}, "adam has no second moment for the parameter '0.weight'"),
    "damping": ({"damping": 0}, "damping must be a positive number"),
    "name of a damping": ({"damping": "small"}, "damping must be a positive number"),
}


@pytest.mark.parametrize("case", WRONG_ARGUMENTS)
def test_wrong_arguments(case: str, scanned: Any) -> None:
    options, message = WRONG_ARGUMENTS[case]
    with pytest.raises(ScanError, match=message):
        scanned[0].influence(make_data(2), **options)


def test_sgd_has_no_second_moment(scanned: Any) -> None:
    optimizer = torch.optim.SGD(scanned[1].parameters(), 0.1)
    with pytest.raises(ScanError, match="The optimizer has no second moment for the parameter"):
        scanned[0].influence(make_data(2), method="tracin", adam=optimizer)
    with pytest.raises(ScanError, match="cosine of a gradient with itself is 1"):
        scanned[0].self_influence("cosine")


def test_trak_whitens_the_root_of_squared_errors() -> None:
    """Divided by the derivative of the loss, gradients have the Gauss-Newton matrix as second moment."""
    model, generator = make_model(), torch.Generator().manual_seed(3)
    states = make_states(model)
    data, test = (
        (x, torch.randn(len(x), CLASSES, generator=generator, dtype=torch.float64))
        for x, _ in (make_data(), make_data(5, seed=1))
    )
    root = lambda model, batch: F.mse_loss(model(batch[0]), batch[1], reduction="none").mean(1).sqrt()  # noqa: E731
    expected = compute_expected("trak", make_model(), states, test, data, root, lambda *batch: 2 * root(*batch))
    found = persample.scan(model, nn.MSELoss(), data, checkpoints=states, learning_rates=RATES, **OPTIONS)
    scores = found.scores(test, "trak", damping=DAMPING).double()
    torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


def test_trak_needs_the_loss_of_a_label() -> None:
    model, (x, _) = make_model(), make_data()
    found = persample.scan(model, nn.HuberLoss(), (x, torch.zeros(N, CLASSES).double()), **OPTIONS)
    with pytest.raises(ScanError, match="the loss of the scan is HuberLoss"):
        found.self_influence("trak")
    negative = persample.scan(model, lambda model, batch: model(batch[0]).sum(1) - 100, make_data(), **OPTIONS)
    with pytest.raises(ScanError, match="some losses of the scan are negative"):
        negative.self_influence("trak")


def test_memorised_examples_do_not_divide_by_zero(tmp_path: Path) -> None:
    model = make_model()
    with torch.no_grad():
        model[2].weight *= 1000  # probabilities of exactly 0 and 1
    x, _ = make_data()
    labels = model(x).argmax(1)
    found = persample.scan(model, nn.CrossEntropyLoss(), (x, labels), out=tmp_path, **OPTIONS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RandomScores)
        assert found.scores((x[:3], labels[:3]), "trak").isfinite().all()


# ---- damping ----


def test_whitening_matches_the_inverse() -> None:
    rows = torch.randn(40, 10, dtype=torch.float64)
    moment = rows.T @ rows / 40
    expected = rows @ torch.linalg.inv(moment + 0.3 * moment.trace() / 10 * torch.eye(10))
    whitening = Whitening(moment, 0.3)
    torch.testing.assert_close(whitening.solve(rows), expected)
    torch.testing.assert_close(whitening.compute_squares(rows), (expected * rows).sum(1))


@pytest.mark.parametrize(("dim", "wanted"), [(500, 40), (60, 20)])
def test_chosen_damping_leaves_effective_dimensions(dim: int, wanted: float) -> None:
    spectrum = torch.arange(1, dim + 1, dtype=torch.float64) ** -1.0
    ridge = choose_damping_of_directions(spectrum.diag()) * spectrum.mean()
    assert float((spectrum / (spectrum + ridge)).sum()) == pytest.approx(wanted, rel=1e-6)
    assert choose_damping_of_directions(7 * spectrum.diag()) == pytest.approx(float(ridge / spectrum.mean()))


def test_damping_of_directions_has_a_least_value() -> None:
    rows = torch.randn(50, 3, dtype=torch.float64) @ torch.randn(3, 30, dtype=torch.float64)
    assert choose_damping_of_directions(rows.T @ rows / 50) >= 1e-3
    assert Whitening(torch.zeros(5, 5, dtype=torch.float64), 0.1).solve(torch.zeros(2, 5)).isfinite().all()


def test_steps_are_compared_with_the_whitened_mean() -> None:
    """At the scale of each block, by the definition."""
    rows = torch.randn(60, 10, dtype=torch.float64) * torch.tensor([1.0] * 6 + [20.0] * 4)
    blocks = torch.tensor([0] * 6 + [1] * 4)
    moment, mean, step = rows.T @ rows / 60, rows.mean(0), torch.randn(10, dtype=torch.float64)
    scales = torch.cat([moment.diagonal()[part].mean().sqrt().expand(len(part)) for part in split_numbers(blocks)])
    expected = []
    for damping in CANDIDATES:
        predicted = torch.linalg.inv(moment + damping * torch.diag(scales.square())) @ mean
        expected.append(F.cosine_similarity(scales * predicted, scales * step, dim=0))
    torch.testing.assert_close(compare_with_step(moment, blocks, mean, step), torch.stack(expected))


def split_numbers(blocks: Tensor) -> list[Tensor]:
    return [(blocks == i).nonzero().flatten() for i in blocks.unique()]


def test_damping_is_that_of_the_steps_of_one_training() -> None:
    matching, other = torch.zeros(len(CANDIDATES)), torch.full((len(CANDIDATES),), 0.1)
    matching[4] = 0.9
    assert choose_damping([]) == choose_damping([other]) == 3.0
    assert choose_damping([matching, other]) == pytest.approx((3 * CANDIDATES[4]) ** 0.5)


@pytest.mark.parametrize("projection", ["kronecker", "sparse"])
def test_automatic_damping_is_chosen_by_the_training(projection: Any, tmp_path: Path) -> None:
    """A scan stores the steps between its checkpoints; longer steps of a training ask for less damping."""
    model, data = make_model(), make_data()
    optimizer, states = torch.optim.SGD(model.parameters(), lr=0.1), []
    for epoch in range(401):
        if epoch in (0, 2, 4, 400):
            states.append({name: value.clone() for name, value in model.state_dict().items()})
        optimizer.zero_grad()
        compute_loss(model, data).mean().backward()
        optimizer.step()
    options = {**OPTIONS, "projection": projection, "project": 512}
    briefly, long = (
        persample.scan(model, nn.CrossEntropyLoss(), data, checkpoints=[states[i] for i in chosen], **options)
        for chosen in ((0, 1, 2), (0, 3))
    )
    found = [influence.find_damping(scan._get_models(), "whitened", "auto") for scan in (briefly, long)]
    assert found[0] > 2 * found[1]
    assert influence.find_damping(long._get_models(), "tracin", "auto") == 0
    steps = read_steps(long.store)
    assert len(steps) == 2 and steps[0] is not None and steps[1] is None
    length = sum(float((states[0][name] - states[3][name]).square().sum()) for name in states[0]) ** 0.5
    assert float(steps[0].norm()) == pytest.approx(length, rel=1e-4 if projection == "kronecker" else 0.3)
    again = rescan(
        long, model, nn.CrossEntropyLoss(), data, before=data, out=tmp_path, checkpoints=[states[0], states[3]]
    )
    assert torch.equal(again.scores(data), long.scores(data))


def test_damping_is_relative_to_each_block() -> None:
    """Scaling the gradients of one parameter changes no score, and rounding errors of another one have no weight."""
    rows = torch.randn(40, 10, dtype=torch.float64)
    rows[:, 8:] *= 1e-12
    blocks = torch.tensor([0] * 3 + [1] * 5 + [2] * 2)
    for damping in (0.3, 3.0):
        scores = []
        for scale in (1.0, 1e-2):
            scaled = rows * torch.tensor([1.0] * 3 + [scale] * 5 + [1.0] * 2)
            whitening = Whitening(scaled.T @ scaled / 40, damping, blocks)
            scores.append(whitening.solve(scaled) @ scaled.T)
        torch.testing.assert_close(*scores)
        without = Whitening(rows[:, :8].T @ rows[:, :8] / 40, damping, blocks[:8])
        torch.testing.assert_close(scores[0], without.solve(rows[:, :8]) @ rows[:, :8].T)


def test_whitening_ignores_numbers_that_no_parameter_has() -> None:
    rows = torch.randn(40, 9, dtype=torch.float64)
    moment, blocks = rows.T @ rows / 40, torch.tensor([0] * 4 + [1] * 5)
    padded = torch.zeros(30, 30, dtype=torch.float64)
    padded[:9, :9] = moment
    found = Whitening(padded, 0.5, torch.cat([blocks, torch.full((21,), 2)]))
    torch.testing.assert_close(
        found.solve(torch.nn.functional.pad(rows, (0, 21)))[:, :9], Whitening(moment, 0.5, blocks).solve(rows)
    )


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"project": 16}, [0] * 12 + [1] * 3 + [2]),  # all parameters fit, and one number is left
        ({"project": 8}, [0] * 5 + [1] * 3),
        ({"project": 4}, [0] * 4),  # shares below 8 numbers are put together
        ({"project": 16, "projection": "tensor"}, None),
    ],
)
def test_entries_of_rows_know_their_parameter(options: Any, expected: list[int] | None, tmp_path: Path) -> None:
    data = torch.randn(20, 4), torch.randint(3, (20,))
    persample.scan(nn.Linear(4, 3), nn.CrossEntropyLoss(), data, out=tmp_path, **{**OPTIONS, **options})
    blocks = StoredGradients(Store(tmp_path), 0).blocks
    assert (None if blocks is None else blocks.tolist()) == expected


# ---- scores on par with random ----


def test_random_scores_are_noticed() -> None:
    """A model with many parameters and four projected numbers: the scores of both halves are unrelated."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 200), nn.Tanh(), nn.Linear(200, 10))
    kinds, labels = torch.randn(10, 300), torch.randint(10, (420,))
    inputs = kinds[labels] + torch.randn(420, 300)
    data, test = (inputs[:400], labels[:400]), (inputs[400:], labels[400:])
    options = {**OPTIONS, "batch_size": 64, "shard_size": 128, "quantities": ["loss", "norm"]}
    coarse = persample.scan(model, nn.CrossEntropyLoss(), data, **{**options, "project": 4, "projection": "tensor"})
    with pytest.warns(RandomScores, match="on par with random"):
        coarse.influence(test, method="tracin")
    fine = persample.scan(model, nn.CrossEntropyLoss(), data, **{**options, "project": 2048})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fine.influence(test, method="tracin")


# ---- streaming ----


def test_running_top_matches_top_of_everything() -> None:
    scores = torch.randn(3, 57)
    for k, largest in ((1, True), (10, False), (100, True)):
        top, start = RunningTop(k, largest), 0
        for block in scores.split(8, dim=1):
            top.add(start, block)
            start += block.shape[1]
        expected = scores.topk(min(k, 57), largest=largest)
        assert torch.equal(top.ids, expected.indices) and torch.equal(top.scores, expected.values)


def test_second_moment_of_many_rows_uses_evenly_spaced_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.randn(100, 2)
    stored = store_rows(tmp_path, rows)
    monkeypatch.setattr(stored_gradients, "ROWS_OF_MOMENT", 34)
    used = rows[::3].double()
    found = stored.compute_second_moment(stored.lengths)
    torch.testing.assert_close(found, used.T @ used / len(used), rtol=1e-5, atol=1e-6)


def test_exported_rows_are_the_stored_ones(tmp_path: Path, scanned: Any) -> None:
    found = scanned[0]
    for dtype in ("float32", "float16"):
        directory = found.export_rows(tmp_path / dtype, dtype=dtype)
        rows = np.load(directory / "rows.npy", mmap_mode="r")
        stored = StoredGradients(found.store, 1)
        assert rows.dtype == dtype and rows.shape == (N, DIM)
        np.testing.assert_allclose(rows, stored[torch.arange(N)].numpy(), atol=1e-3 if dtype == "float16" else 0)
        assert np.load(directory / "ids.npy").tolist() == list(range(N))
        np.testing.assert_array_equal(np.load(directory / "lengths.npy"), stored.lengths.numpy())
    cosines = np.asarray(rows, np.float32) @ np.asarray(rows[7], np.float32)
    assert np.argsort(-cosines)[1:4].tolist() == found.neighbours(7, 3).ids.tolist()
    with pytest.raises(ScanError, match="dtype must be"):
        found.export_rows(tmp_path / "other", dtype="float64")


# ---- what results look like ----


def test_results_have_short_descriptions(scanned: Any) -> None:
    ranking = scanned[0].self_influence()
    assert repr(ranking).startswith(f"Ranking of {N} examples:\n  example")
    assert repr(ranking).endswith(f"... and {N - 10} more")
    assert list(ranking) == list(zip(ranking.ids.tolist(), ranking.scores.tolist(), strict=True))
    answer = scanned[0].influence(make_data(9), 5)
    assert repr(answer).startswith("Influence on 9 samples, 5 examples for and against:")
    assert repr(answer).endswith("... and 1 more samples")


def test_neighbours_do_not_include_the_example(tmp_path: Path) -> None:
    stored = store_rows(tmp_path, torch.randn(5, 3))
    assert sorted(queries.find_neighbours(stored, 2, 99).ids.tolist()) == [0, 1, 3, 4]
