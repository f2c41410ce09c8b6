"""Scans of what is not as it should be: changed since, ambiguous, random, damaged."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

import persample
from persample.scanning import ScanError
from persample.scanning.digest import digest_of
from tests.scanning.test_scan import QUICK, N, as_matrix, built, contents, images, loop, near

OPTIONS = {**QUICK, "project": None}


def made(last: int = 3, activation: type[nn.Module] = nn.Tanh) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), activation(), nn.Linear(6, last)).double()


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


X, Y = numbers(N, 5), torch.arange(N) % 3


# ---- what has changed since ----


class Shifted(nn.Module):
    """A model with a number that is in no state dict."""

    def __init__(self, shift: float) -> None:
        super().__init__()
        self.inner = made()
        self.register_buffer("shift", torch.tensor(shift).double(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.shift * torch.arange(3)


def squares(power: float) -> Callable[..., Tensor]:
    return lambda model, batch: model(batch[0]).abs().pow(power).sum(1)


OTHERS: dict[str, tuple[Any, Any]] = {
    "a label": ((made(), nn.CrossEntropyLoss(), (X, Y)), (made(), nn.CrossEntropyLoss(), (X, Y.flip(0)))),
    "the last example": (
        (made(), nn.CrossEntropyLoss(), list(zip(X, Y, strict=True))),
        (made(), nn.CrossEntropyLoss(), [*zip(X[:-1], Y[:-1], strict=True), (X[-1], Y[0])]),
    ),
    "the smoothing of a loss": (
        (made(), nn.CrossEntropyLoss(), (X, Y)), (made(), nn.CrossEntropyLoss(label_smoothing=0.5), (X, Y)),
    ),
    "what a loss has from around it": ((made(), squares(1.0), (X, Y)), (made(), squares(3.0), (X, Y))),
    "the code of a loss": (
        (made(), lambda m, b: m(b[0]).sum(1), (X, Y)), (made(), lambda m, b: m(b[0]).abs().sum(1), (X, Y)),
    ),
    "a layer": ((made(), nn.CrossEntropyLoss(), (X, Y)), (made(activation=nn.ReLU), nn.CrossEntropyLoss(), (X, Y))),
    "a number that is in no state": (
        (Shifted(0.0), nn.CrossEntropyLoss(), (X, Y)), (Shifted(1.0), nn.CrossEntropyLoss(), (X, Y)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", OTHERS)
def test_a_scan_of_something_else_is_refused(what: str, tmp_path: Path) -> None:
    before, now = OTHERS[what]
    persample.scan(*before, out=tmp_path, **OPTIONS)
    persample.scan(*before, out=tmp_path, **OPTIONS)
    with pytest.raises(ScanError, match="holds a scan with another"):
        persample.scan(*now, out=tmp_path, **OPTIONS)


def test_what_no_digest_shows_is_seen_in_the_first_batch(tmp_path: Path) -> None:
    """A loss by a list that the program has changed in between, after the first shards."""
    powers, calls = [1.0], [0]

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        calls[0] += 1
        if calls[0] == 11:
            raise InterruptedError
        return model(batch[0]).abs().pow(powers[0]).sum(1)

    quantities = {**OPTIONS, "quantities": ["loss", "norm"]}
    with pytest.raises(InterruptedError):
        persample.scan(made(), loss_fn, (X, Y), out=tmp_path, **quantities)
    assert list(tmp_path.glob("0/*.npz"))
    powers[0] = 2.0
    with pytest.raises(ScanError, match="the first batch gives other numbers now"):
        persample.scan(made(), loss_fn, (X, Y), out=tmp_path, **quantities)


class Stream(IterableDataset[Any]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        return zip(X[: self.count], Y[: self.count], strict=True)


def test_a_stream_that_has_grown(tmp_path: Path) -> None:
    persample.scan(made(), nn.CrossEntropyLoss(), Stream(10), out=tmp_path, **OPTIONS)
    (tmp_path / "summary.json").unlink()  # as if it had been stopped just before the end
    with pytest.raises(ScanError, match="do not follow each other"):
        persample.scan(made(), nn.CrossEntropyLoss(), Stream(N), out=tmp_path, **OPTIONS)


def test_no_weight_is_too_far_back_to_be_seen(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(600)))
    before = digest_of(dict(model.named_parameters()))
    model[-1].bias.data += 1
    assert digest_of(dict(model.named_parameters())) != before
    assert digest_of([0] * 2000 + [1]) != digest_of([0] * 2000 + [2])


def test_a_collate_that_counts_is_still_the_same(tmp_path: Path) -> None:
    class Collate:
        def __init__(self) -> None:
            self.seen: dict[str, int] = {}

        def __call__(self, part: Any) -> Any:
            self.seen[str(len(self.seen))] = len(part)
            return torch.stack([x for x, _ in part]), torch.stack([y for _, y in part])

    collate, data = Collate(), list(zip(X, Y, strict=True))
    for _ in range(2):
        persample.scan(made(), nn.CrossEntropyLoss(), data, out=tmp_path, collate=collate, **OPTIONS)


# ---- losses that are not what they seem ----


def masked_mean(model: nn.Module, batch: Any) -> Tensor:
    return ((model(batch[0]) - 1).square().sum(1) * batch[1]).sum() / batch[1].sum()


AMBIGUOUS: dict[str, tuple[Any, Any, dict[str, Any], str]] = {
    "a mean by other weights": (masked_mean, (X, numbers(N).abs()), {}, "is refused|not the mean of its 4 samples"),
    "a sum for a mean": (
        lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction="sum"), (X, Y), {}, "Pass loss_reduction='sum'",
    ),
    "a mean for a sum": (
        lambda m, b: F.cross_entropy(m(b[0]), b[1]), (X, Y), {"loss_reduction": "sum"}, "Pass loss_reduction='mean'",
    ),
    "targets of another shape": (nn.MSELoss(), (X, numbers(N)), {}, r"outputs of shape \(4, 3\) and targets"),
    "a list that belongs to the samples": (
        lambda m, b: (F.cross_entropy(m(b["x"]), b["y"], reduction="none") * torch.tensor(b["w"])).mean(),
        [{"x": x, "y": y, "w": w} for x, y, w in zip(X, Y, range(N), strict=True)],
        {"collate": lambda part: {
            **{key: torch.stack([e[key] for e in part]) for key in ("x", "y")}, "w": [e["w"] for e in part],
        }},
        "not the mean of its 4 samples|in its batch, and",
    ),
    "a loss that numbers its samples": (
        lambda m, b: m(b[0]).square().sum(1) * torch.arange(1, len(b[0]) + 1), (X, Y), {}, "in its batch, and .* alone",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", AMBIGUOUS)
def test_ambiguous_losses_are_refused(kind: str, tmp_path: Path) -> None:
    loss_fn, data, options, message = AMBIGUOUS[kind]
    if kind == "targets of another shape":
        message = message.replace("(4, 3", "(4, 1")
    model = made(1 if kind == "targets of another shape" else 3)
    with pytest.raises(persample.PerSampleError, match=message):
        persample.scan(model, loss_fn, data, out=tmp_path, **OPTIONS, **options)


@pytest.mark.parametrize("length", [4, 7])  # as many as there are in a batch, and not
def test_samples_in_another_dim(length: int, tmp_path: Path) -> None:
    torch.manual_seed(0)

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru = nn.GRU(2, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.gru(x)[0]

    model = Recurrent().double()
    x, y = numbers(N, length, 2), numbers(N, length, 3, seed=1)
    found = persample.scan(
        model, nn.MSELoss(), list(zip(x, y, strict=True)), out=tmp_path, batch_dim=1,
        collate=lambda part: tuple(torch.stack(side, 1) for side in zip(*part, strict=True)), **OPTIONS,
    )  # fmt: skip
    losses, rows = [], []
    for i in range(N):
        loss = F.mse_loss(model(x[i, :, None]), y[i, :, None])
        losses.append(loss.detach())
        rows.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))]))
    near(found.column("loss"), torch.stack(losses))
    near(found.column("norm"), torch.stack(rows).norm(dim=1))


def test_bfloat16(tmp_path: Path) -> None:
    model, (x, y), loss_fn, _ = built("images")
    found = persample.scan(model.bfloat16(), loss_fn, (x.bfloat16(), y), out=tmp_path, **{**OPTIONS, "project": 16})
    model.double()
    losses, rows = loop(model, (x.bfloat16().double(), y), loss_fn)
    np.testing.assert_allclose(found.column("loss"), losses, rtol=0.05)
    np.testing.assert_allclose(found.column("norm"), as_matrix(rows).norm(dim=1), rtol=0.1)
    assert np.abs(found.column("alignment")).max() > 0.3


# ---- parameters that are not reached, numbers that are none ----


class Parts(nn.Module):
    """Samples with a positive first number take one layer, the others the other, or none at all."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 1).double(), nn.Linear(5, 1).double()

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > 1:
            return torch.cat([self(row[None]) for row in x])
        return self.a(x) if x[0, 0] > 0.5 else self.b(x) if x[0, 0] < -0.5 else x[:, :1]


@pytest.mark.parametrize("with_nan", [False, True])
def test_parameters_that_no_sample_reaches(with_nan: bool, tmp_path: Path) -> None:
    x, model = X.clone(), Parts()
    if with_nan:
        x[5, 1] = torch.nan
        x[5, 0] = 1.0
    loss_fn = lambda model, batch: model(batch[0]).square().sum(1)  # noqa: E731
    options = {**OPTIONS, "batch_size": 1, "nonfinite": "keep"}
    found = persample.scan(model, loss_fn, (x, Y), out=tmp_path / "1", **options)
    together = persample.scan(model, loss_fn, (x, Y), out=tmp_path / "4", **{**options, "batch_size": 4})
    rows = []
    for row in x:
        loss = model(row[None]).square().sum()
        grads = torch.autograd.grad(loss + 0 * sum(p.sum() for p in model.parameters()), list(model.parameters()))
        rows.append(torch.cat([grad.flatten() for grad in grads]))
    matrix = torch.stack(rows)
    finite = matrix.isfinite().all(1)
    assert finite.sum() == N - with_nan and (matrix == 0).all(1).any()
    mean = matrix[finite].mean(0)
    near(together.summary["mean_gradient_norm"], mean.norm())
    for scan in (found,) if with_nan else (found, together):  # in one batch, rows that are no numbers may spoil others
        near(scan.column("norm")[finite], matrix[finite].norm(dim=1))
        near(scan.column("alignment")[finite], F.cosine_similarity(matrix[finite], mean[None]))


def test_an_infinite_loss_with_a_finite_gradient_counts_nowhere(tmp_path: Path) -> None:
    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return model(batch[0]).square().sum(1) + torch.where(batch[1] == 2, torch.inf, 0.0)

    found = persample.scan(made(), loss_fn, (X, Y), out=tmp_path / "all", nonfinite="keep", **OPTIONS)
    rest = (Y != 2).nonzero().flatten()
    expected = persample.scan(made(), loss_fn, (X[rest], Y[rest]), out=tmp_path / "rest", **OPTIONS)
    assert found.summary["mean_gradient_norm"] == pytest.approx(expected.summary["mean_gradient_norm"])
    assert found.summary["noise_scale"] == pytest.approx(expected.summary["noise_scale"])


def test_gradients_whose_entries_add_up_to_more_than_float16_holds(tmp_path: Path) -> None:
    """Every entry is finite, and the gradient of the one weight is near the largest float16 in each example."""
    x = torch.full((N, 64), 1500.0).half() + torch.arange(N)[:, None]
    model = nn.Linear(64, 1, bias=False).half()
    found = persample.scan(model, lambda model, batch: model(batch).sum(1) / 16, x, out=tmp_path, **OPTIONS)
    expected = (x.double() / 16).mean(0).norm().item()
    assert found.summary["mean_gradient_norm"] == pytest.approx(expected, rel=1e-2)


def test_what_an_earlier_checkpoint_spoils_is_no_part_of_the_last_ones_noise(tmp_path: Path) -> None:
    model = made()
    spoilt = {name: value.clone() for name, value in model.state_dict().items()}
    spoilt["2.weight"][0, 0] = torch.inf
    options = {**OPTIONS, "nonfinite": "keep"}
    states = [spoilt, model.state_dict()]
    both = persample.scan(model, nn.CrossEntropyLoss(), (X, Y), out=tmp_path / "2", checkpoints=states, **options)
    one = persample.scan(model, nn.CrossEntropyLoss(), (X, Y), out=tmp_path / "1", **options)
    assert both.summary["not_finite"] and both.summary["suggested_batch_size"] == one.summary["suggested_batch_size"]
    assert both.summary["noise_scale"] == one.summary["noise_scale"]


# ---- labels ----


def test_labels(tmp_path: Path) -> None:
    vector = lambda model, batch: model(batch[0]).square().sum(1)  # noqa: E731
    with_index = persample.scan(made(), vector, (X, Y, torch.arange(1000, 1000 + N)), out=tmp_path / "index", **OPTIONS)
    assert with_index.column("label").tolist() == Y.tolist()
    many = persample.scan(made(), vector, (X, torch.arange(N)), out=tmp_path / "many", **OPTIONS)
    assert len(many.column("label")) == N

    def ragged(part: Any) -> dict[str, Tensor]:
        """Labels of tokens, not of samples; of the first example there is one."""
        x = torch.stack([e[0] for e in part])
        return {"x": x, "labels": torch.cat([torch.zeros(1 + int(e[1]), dtype=torch.long) for e in part])}

    rows = lambda model, batch: model(batch["x"]).square().sum(1)  # noqa: E731
    data = list(zip(X, Y, strict=True))
    found = persample.scan(made(), rows, data, out=tmp_path / "ragged", collate=ragged, **OPTIONS)
    assert set(found.column("label").tolist()) <= {-1, 0}


# ---- random data, other objects of the user ----


class Noisy(Dataset[Any]):
    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> Any:
        shift = torch.rand(1, dtype=torch.float64) + random.random() + np.random.rand()
        return X[i] + shift, Y[i]


def test_examples_that_are_drawn_at_random_are_drawn_once(tmp_path: Path) -> None:
    model = made()
    torch.manual_seed(3)
    first = persample.scan(model, nn.CrossEntropyLoss(), Noisy(), out=tmp_path, **OPTIONS)
    drawn = torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(drawn, torch.rand(1)), "the user's random numbers have changed"
    (tmp_path / "summary.json").unlink()
    (tmp_path / "0" / "00001.npz").unlink()
    again = persample.scan(made(), nn.CrossEntropyLoss(), Noisy(), out=tmp_path, **OPTIONS)
    assert again.table().equals(first.table())


def test_a_loss_with_parameters_is_left_alone(tmp_path: Path) -> None:
    class Tempered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.t = nn.Parameter(torch.ones(()).double())

        def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
            return F.cross_entropy(outputs * self.t, targets, reduction="none")

    loss_fn = Tempered()
    loss_fn.t.grad = torch.tensor(5.0).double()
    found = persample.scan(made(), loss_fn, (X, Y), out=tmp_path, **{**OPTIONS, "project": 8})
    found.influence((X[:2], Y[:2]))
    assert loss_fn.t.grad.item() == 5.0 and loss_fn.training


def test_a_state_that_is_not_all_tensors(tmp_path: Path) -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"version": 3}

        def set_extra_state(self, state: Any) -> None:
            assert state == {"version": 3}

    model = Extra(5, 3).double()
    persample.scan(model, nn.CrossEntropyLoss(), (X, Y), out=tmp_path, checkpoints=[model.state_dict()], **OPTIONS)


def test_the_model_s_own_state_among_the_checkpoints(tmp_path: Path) -> None:
    """It shares the memory of the model, into which the others are loaded."""
    model = made()
    other = {name: value * 3 for name, value in model.state_dict().items()}
    found = persample.scan(
        model, nn.CrossEntropyLoss(), (X, Y), out=tmp_path, checkpoints=[other, model.state_dict()], **OPTIONS
    )
    near(found.column("loss"), F.cross_entropy(model(X), Y, reduction="none").detach())


# ---- files ----


def test_stopped_while_an_old_scan_is_cleared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call = (made(), nn.CrossEntropyLoss(), (X, Y))
    persample.scan(*call, out=tmp_path / "out", **OPTIONS)
    whole = contents(tmp_path / "out")
    kept, left = Path.unlink, [3]

    def unlink(self: Path, missing_ok: bool = False) -> None:
        left[0] -= 1
        if not left[0]:
            raise InterruptedError
        kept(self, missing_ok)

    monkeypatch.setattr(Path, "unlink", unlink)
    with pytest.raises(InterruptedError):
        persample.scan(*call, out=tmp_path / "out", resume=False, **OPTIONS)
    monkeypatch.undo()
    persample.scan(*call, out=tmp_path / "out", **OPTIONS)
    assert contents(tmp_path / "out") == whole


def test_stopped_while_the_first_file_is_written(tmp_path: Path) -> None:
    (tmp_path / "scan.json.999999999.unfinished").write_text("{")
    persample.scan(made(), nn.CrossEntropyLoss(), (X, Y), out=tmp_path, **OPTIONS)
    assert not list(tmp_path.glob("*.unfinished"))


def test_what_another_process_writes_is_left_to_it(tmp_path: Path) -> None:
    persample.scan(made(), nn.CrossEntropyLoss(), (X, Y), out=tmp_path, **OPTIONS)
    theirs = tmp_path / f"x.npz.{os.getppid()}.unfinished"
    theirs.write_text("")
    persample.scan(made(), nn.CrossEntropyLoss(), (X, Y), out=tmp_path, **OPTIONS)
    assert theirs.exists()


@pytest.mark.parametrize("name", ["scan.json", "0/00001.npz", "0/00001.npy"])
def test_a_damaged_file_is_named(name: str, tmp_path: Path) -> None:
    found = persample.scan(made(), nn.CrossEntropyLoss(), (X, Y), out=tmp_path, **{**OPTIONS, "project": 8})
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(ScanError, match=f"{name} is damaged"):
        persample.Scan(tmp_path).column("loss") if name != "0/00001.npy" else found.neighbours(1)


def test_a_missing_file_is_noticed(tmp_path: Path) -> None:
    persample.scan(made(), nn.CrossEntropyLoss(), (X, Y), out=tmp_path, **OPTIONS)
    (tmp_path / "0" / "00001.npz").unlink()
    with pytest.raises(ScanError, match="are missing"):
        persample.Scan(tmp_path)


def test_a_place_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ScanError, match=r"cannot be written|exists and holds no scan"):
        persample.scan(made(), nn.CrossEntropyLoss(), (X, Y), out=tmp_path / "file" / "out", **OPTIONS)
    with pytest.raises(ScanError, match="batch_size must be positive"):
        persample.scan(made(), nn.CrossEntropyLoss(), images(), out=tmp_path / "out", batch_size=0)
