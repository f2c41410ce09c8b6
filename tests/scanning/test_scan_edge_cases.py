"""Scans in difficult situations: changed settings, ambiguous losses, random data, damaged files."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import persample
from persample._internal.files import write_atomically
from persample.scanning import ScanError
from persample.scanning.digest import compute_digest
from persample.scanning.measure import ALL_QUANTITIES
from persample.testing.oracle import loop_gradients
from tests.support.modules import flatten_rows
from tests.support.scans import QUICK, N, assert_near, build, images, loop, make_stale, read_files

OPTIONS = {**QUICK, "project": None}


def make_net(last: int = 3, activation: type[nn.Module] = nn.Tanh) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), activation(), nn.Linear(6, last)).double()


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


X, Y = draw(N, 5), torch.arange(N) % 3


# ---- detection: lists with an entry for each sample ----


class Boxes(Dataset[Any]):
    """Images with one to three boxes each."""

    def __init__(self) -> None:
        self.rows = [
            (draw(3, 2, 2, seed=i), {"boxes": draw(1 + i % 3, 4, seed=100 + i), "labels": torch.ones(1 + i % 3)})
            for i in range(12)
        ]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Any:
        return self.rows[i]


class Detector(nn.Module):
    """Returns its loss, as the models of torchvision and of Hugging Face do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 4).double()

    def forward(self, pixel_values: Any, labels: Any) -> dict[str, Tensor]:
        found = [self.layer(image.flatten()) for image in pixel_values]
        errors = [(box - own["boxes"].mean(0)).square().sum() for box, own in zip(found, labels, strict=True)]
        return {"loss": torch.stack(errors).mean()}


def collate_lists(rows: list[Any]) -> Any:
    return [image for image, _ in rows], [boxes for _, boxes in rows]


def collate_stacked(rows: list[Any]) -> Any:
    return {"pixel_values": torch.stack([image for image, _ in rows]), "labels": [boxes for _, boxes in rows]}


@pytest.mark.parametrize("collate", [collate_lists, collate_stacked])
@pytest.mark.parametrize("batch_size", [3, 4, 5])  # as many samples as channels, boxes' entries, and neither
def test_detection(collate: Any, batch_size: int) -> None:
    model, data = Detector(), Boxes()

    def compute_loss(model: nn.Module, batch: Any) -> Tensor:
        loss: Tensor = (model(**batch) if isinstance(batch, dict) else model(*batch))["loss"]
        return loss

    options = {**OPTIONS, "batch_size": batch_size, "collate": collate, "quantities": ["loss", "norm"]}
    found = persample.scan(model, compute_loss, data, **options)
    losses, norms = [], []
    for example in data.rows:
        loss = compute_loss(model, collate([example]))
        grads = torch.autograd.grad(loss, list(model.parameters()))
        losses.append(loss.detach())
        norms.append(torch.cat([grad.flatten() for grad in grads]).norm())
    assert_near(found.column("loss"), torch.stack(losses))
    assert_near(found.column("norm"), torch.stack(norms))


# ---- changes since the scan was started ----


class Shifted(nn.Module):
    """A model with a buffer that is not in the state dict."""

    def __init__(self, shift: float) -> None:
        super().__init__()
        self.inner = make_net()
        self.register_buffer("shift", torch.tensor(shift).double(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.shift * torch.arange(3)


def power_loss(power: float) -> Callable[..., Tensor]:
    return lambda model, batch: model(batch[0]).abs().pow(power).sum(1)


CHANGES: dict[str, tuple[Any, Any]] = {
    "a label": ((make_net(), nn.CrossEntropyLoss(), (X, Y)), (make_net(), nn.CrossEntropyLoss(), (X, Y.flip(0)))),
    "the last example": (
        (make_net(), nn.CrossEntropyLoss(), list(zip(X, Y, strict=True))),
        (make_net(), nn.CrossEntropyLoss(), [*zip(X[:-1], Y[:-1], strict=True), (X[-1], Y[0])]),
    ),
    "the label smoothing of a loss": (
        (make_net(), nn.CrossEntropyLoss(), (X, Y)), (make_net(), nn.CrossEntropyLoss(label_smoothing=0.5), (X, Y)),
    ),
    "a closure variable of a loss": ((make_net(), power_loss(1.0), (X, Y)), (make_net(), power_loss(3.0), (X, Y))),
    "the code of a loss": (
        (make_net(), lambda m, b: m(b[0]).sum(1), (X, Y)), (make_net(), lambda m, b: m(b[0]).abs().sum(1), (X, Y)),
    ),
    "a layer": (
        (make_net(), nn.CrossEntropyLoss(), (X, Y)), (make_net(activation=nn.ReLU), nn.CrossEntropyLoss(), (X, Y)),
    ),
    "a buffer that is not in the state dict": (
        (Shifted(0.0), nn.CrossEntropyLoss(), (X, Y)), (Shifted(1.0), nn.CrossEntropyLoss(), (X, Y)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_changes_are_refused(change: str, tmp_path: Path) -> None:
    before, now = CHANGES[change]
    persample.scan(*before, out=tmp_path, **OPTIONS)
    persample.scan(*before, out=tmp_path, **OPTIONS)
    with pytest.raises(ScanError, match=r"changed since the scan in .* was started"):
        persample.scan(*now, out=tmp_path, **OPTIONS)


def test_change_without_a_new_digest_shows_in_the_first_batch(tmp_path: Path) -> None:
    """The loss reads a list that changes after the first shards."""
    powers, calls = [1.0], [0]

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        calls[0] += 1
        if calls[0] == 8:
            raise InterruptedError
        return model(batch[0]).abs().pow(powers[0]).sum(1)

    quantities = {**OPTIONS, "quantities": ["loss", "norm"]}
    with pytest.raises(InterruptedError):
        persample.scan(make_net(), loss_fn, (X, Y), out=tmp_path, **quantities)
    assert list(tmp_path.glob("0/*.npz"))
    powers[0] = 2.0
    with pytest.raises(ScanError, match="the first batch gives other numbers now"):
        persample.scan(make_net(), loss_fn, (X, Y), out=tmp_path, **quantities)


class Stream(IterableDataset[Any]):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        return zip(X[: self.count], Y[: self.count], strict=True)


def test_longer_stream_is_refused(tmp_path: Path) -> None:
    persample.scan(make_net(), nn.CrossEntropyLoss(), Stream(10), out=tmp_path, **OPTIONS)
    (tmp_path / "summary.json").unlink()  # as if the scan had been interrupted just before the end
    with pytest.raises(ScanError, match="do not contain consecutive examples"):
        persample.scan(make_net(), nn.CrossEntropyLoss(), Stream(N), out=tmp_path, **OPTIONS)


def test_digest_includes_the_last_of_many_values(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(600)))
    before = compute_digest(dict(model.named_parameters()))
    model[-1].bias.data += 1
    assert compute_digest(dict(model.named_parameters())) != before
    assert compute_digest([0] * 2000 + [1]) != compute_digest([0] * 2000 + [2])


def test_collate_with_changing_state_is_accepted(tmp_path: Path) -> None:
    class Collate:
        def __init__(self) -> None:
            self.seen: dict[str, int] = {}

        def __call__(self, part: Any) -> Any:
            self.seen[str(len(self.seen))] = len(part)
            return torch.stack([x for x, _ in part]), torch.stack([y for _, y in part])

    collate, data = Collate(), list(zip(X, Y, strict=True))
    for _ in range(2):
        persample.scan(make_net(), nn.CrossEntropyLoss(), data, out=tmp_path, collate=collate, **OPTIONS)


# ---- ambiguous losses ----


def masked_mean(model: nn.Module, batch: Any) -> Tensor:
    return ((model(batch[0]) - 1).square().sum(1) * batch[1]).sum() / batch[1].sum()


AMBIGUOUS: dict[str, tuple[Any, Any, dict[str, Any], str]] = {
    "a sum instead of a mean": (
        lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction="sum"), (X, Y), {}, "Pass loss_reduction='sum'",
    ),
    "a mean instead of a sum": (
        lambda m, b: F.cross_entropy(m(b[0]), b[1]), (X, Y), {"loss_reduction": "sum"}, "Pass loss_reduction='mean'",
    ),
    "targets of a different shape": (nn.MSELoss(), (X, draw(N)), {}, r"outputs of shape \(4, 3\) and targets"),
    "a list with one item per sample": (
        lambda m, b: (F.cross_entropy(m(b["x"]), b["y"], reduction="none") * torch.tensor(b["w"])).mean(),
        [{"x": x, "y": y, "w": w} for x, y, w in zip(X, Y, range(N), strict=True)],
        {"collate": lambda part: {
            **{key: torch.stack([e[key] for e in part]) for key in ("x", "y")}, "w": [e["w"] for e in part],
        }},
        "not the mean of the losses of its 4 samples|in its batch, but",
    ),
    "a loss that depends on the index of the sample": (
        lambda m, b: m(b[0]).square().sum(1) * torch.arange(1, len(b[0]) + 1), (X, Y), {}, "in its batch, but .* alone",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", AMBIGUOUS)
def test_ambiguous_losses_are_refused(kind: str, tmp_path: Path) -> None:
    loss_fn, data, options, message = AMBIGUOUS[kind]
    if kind == "targets of a different shape":
        message = message.replace("(4, 3", "(4, 1")
    model = make_net(1 if kind == "targets of a different shape" else 3)
    with pytest.raises(persample.PerSampleError, match=message):
        persample.scan(model, loss_fn, data, out=tmp_path, **OPTIONS, **options)


class Centred(nn.Linear):
    """Mixes samples through numbers that leave torch."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean().item())


def test_samples_that_mix_out_of_sight_are_refused(tmp_path: Path) -> None:
    model, loss_fn = nn.Sequential(Centred(X.shape[1], 3).to(X.dtype)), nn.CrossEntropyLoss()
    model.register_forward_hook(lambda *args: None)
    with pytest.raises(persample.SamplesMixed, match=r"'0' \(Centred\)"):
        persample.scan(model, loss_fn, (X, Y), out=tmp_path / "a", **OPTIONS)
    assert len(persample.scan(model, loss_fn, (X, Y), out=tmp_path / "b", verify=False, **OPTIONS).column("loss")) == N


@pytest.mark.parametrize("length", [4, 7])  # equal to the batch size, and different
def test_samples_in_dimension_1(length: int, tmp_path: Path) -> None:
    torch.manual_seed(0)

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru = nn.GRU(2, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.gru(x)[0]

    model = Recurrent().double()
    x, y = draw(N, length, 2), draw(N, length, 3, seed=1)
    found = persample.scan(
        model, nn.MSELoss(), list(zip(x, y, strict=True)), out=tmp_path, batch_dim=1,
        collate=lambda part: tuple(torch.stack(side, 1) for side in zip(*part, strict=True)), **OPTIONS,
    )  # fmt: skip
    losses, rows = [], []
    for i in range(N):
        loss = F.mse_loss(model(x[i, :, None]), y[i, :, None])
        losses.append(loss.detach())
        rows.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))]))
    assert_near(found.column("loss"), torch.stack(losses))
    assert_near(found.column("norm"), torch.stack(rows).norm(dim=1))


def test_bfloat16_model(tmp_path: Path) -> None:
    model, (x, y), loss_fn, _ = build("images")
    found = persample.scan(model.bfloat16(), loss_fn, (x.bfloat16(), y), out=tmp_path, **{**OPTIONS, "project": 16})
    model.double()
    losses, rows = loop(model, (x.bfloat16().double(), y), loss_fn)
    np.testing.assert_allclose(found.column("loss"), losses, rtol=0.05)
    np.testing.assert_allclose(found.column("norm"), flatten_rows(rows).norm(dim=1), rtol=0.1)
    assert np.abs(found.column("estimated_alignment")).max() > 0.3


# ---- unused parameters, values that are not finite ----


class Parts(nn.Module):
    """The first entry of a sample decides whether it uses layer a, layer b or no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 1).double(), nn.Linear(5, 1).double()

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > 1:
            return torch.cat([self(row[None]) for row in x])
        return self.a(x) if x[0, 0] > 0.5 else self.b(x) if x[0, 0] < -0.5 else x[:, :1]


@pytest.mark.parametrize("with_nan", [False, True])
def test_parameters_that_some_samples_do_not_use(with_nan: bool, tmp_path: Path) -> None:
    x, model = X.clone(), Parts()
    if with_nan:
        x[5, 1] = torch.nan
        x[5, 0] = 1.0
    loss_fn = lambda model, batch: model(batch[0]).square().sum(1)  # noqa: E731
    options = {**OPTIONS, "batch_size": 1, "nonfinite": "keep", "quantities": ALL_QUANTITIES, "project": 16}
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
    assert_near(together.summary["mean_gradient_norm"], mean.norm())
    for scan in (found,) if with_nan else (found, together):  # NaN may spread to other samples of the same batch
        assert_near(scan.column("norm")[finite], matrix[finite].norm(dim=1))
        assert_near(scan.column("alignment")[finite], F.cosine_similarity(matrix[finite], mean[None]))


class Doubled(TensorDataset):
    """Returns other examples than its tensors contain."""

    def __getitem__(self, i: int) -> Any:
        x, y = super().__getitem__(i)
        return 2 * x, y


def test_subclass_of_tensor_dataset_is_read_by_example(tmp_path: Path) -> None:
    found = persample.scan(make_net(), nn.CrossEntropyLoss(), Doubled(X, Y), out=tmp_path / "1", **OPTIONS)
    expected = persample.scan(make_net(), nn.CrossEntropyLoss(), (2 * X, Y), out=tmp_path / "2", **OPTIONS)
    assert found.table().equals(expected.table())


class Checkpointed(nn.Module):
    """Runs a layer in a reentrant checkpoint, whose backward pass is one of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(5, 6).double(), nn.Linear(6, 3).double()
        self.reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(self.first, x.requires_grad_(), use_reentrant=self.reentrant).tanh())


def test_a_weighted_mean_is_divided_by_each_example(tmp_path: Path) -> None:
    """The rows of examples do not depend on which others are in the batch."""
    model, weights = make_net(), draw(N).abs()
    found = persample.scan(model, masked_mean, (X, weights), out=tmp_path, **OPTIONS)
    expected = loop_gradients(model, (X, weights), masked_mean)
    norms = torch.cat([rows.flatten(1) for rows in expected.values()], 1).norm(dim=1)
    np.testing.assert_allclose(found.column("norm"), norms.numpy(), rtol=1e-4)


def test_reentrant_checkpoint(tmp_path: Path) -> None:
    model, options = Checkpointed(), {**OPTIONS, "project": 16, "quantities": ALL_QUANTITIES}
    expected = persample.scan(model, nn.CrossEntropyLoss(), (X, Y), out=tmp_path / "1", **options)
    model.reentrant = True
    found = persample.scan(model, nn.CrossEntropyLoss(), (X, Y), out=tmp_path / "2", **options)
    for name in expected.columns:
        np.testing.assert_allclose(found.column(name), expected.column(name), rtol=1e-9, atol=1e-9)
    assert found.summary["noise_scale"] == pytest.approx(expected.summary["noise_scale"])


def test_infinite_loss_with_finite_gradient_is_left_out_of_the_mean(tmp_path: Path) -> None:
    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return model(batch[0]).square().sum(1) + torch.where(batch[1] == 2, torch.inf, 0.0)

    found = persample.scan(make_net(), loss_fn, (X, Y), out=tmp_path / "all", nonfinite="keep", **OPTIONS)
    rest = (Y != 2).nonzero().flatten()
    expected = persample.scan(make_net(), loss_fn, (X[rest], Y[rest]), out=tmp_path / "rest", **OPTIONS)
    assert found.summary["mean_gradient_norm"] == pytest.approx(expected.summary["mean_gradient_norm"])
    assert found.summary["noise_scale"] == pytest.approx(expected.summary["noise_scale"])


def test_sum_of_gradient_entries_overflows_float16(tmp_path: Path) -> None:
    """Every entry of a gradient is finite, but their sum is larger than the largest float16."""
    x = torch.full((N, 64), 1500.0).half() + torch.arange(N)[:, None]
    model = nn.Linear(64, 1, bias=False).half()
    found = persample.scan(model, lambda model, batch: model(batch).sum(1) / 16, x, out=tmp_path, **OPTIONS)
    expected = (x.double() / 16).mean(0).norm().item()
    assert found.summary["mean_gradient_norm"] == pytest.approx(expected, rel=1e-2)


def test_noise_scale_ignores_earlier_checkpoints_that_are_not_finite(tmp_path: Path) -> None:
    model = make_net()
    broken = {name: value.clone() for name, value in model.state_dict().items()}
    broken["2.weight"][0, 0] = torch.inf
    options = {**OPTIONS, "nonfinite": "keep"}
    states = [broken, model.state_dict()]
    both = persample.scan(model, nn.CrossEntropyLoss(), (X, Y), out=tmp_path / "2", checkpoints=states, **options)
    one = persample.scan(model, nn.CrossEntropyLoss(), (X, Y), out=tmp_path / "1", **options)
    assert both.summary["not_finite"] and both.summary["suggested_batch_size"] == one.summary["suggested_batch_size"]
    assert both.summary["noise_scale"] == one.summary["noise_scale"]


# ---- labels ----


def test_labels_of_different_forms(tmp_path: Path) -> None:
    vector = lambda model, batch: model(batch[0]).square().sum(1)  # noqa: E731
    with_index = persample.scan(
        make_net(), vector, (X, Y, torch.arange(1000, 1000 + N)), out=tmp_path / "index", **OPTIONS
    )
    assert with_index.column("label").tolist() == Y.tolist()
    many = persample.scan(make_net(), vector, (X, torch.arange(N)), out=tmp_path / "many", **OPTIONS)
    assert len(many.column("label")) == N

    def ragged(part: Any) -> dict[str, Tensor]:
        """Labels of tokens instead of samples; the first example has one token."""
        x = torch.stack([e[0] for e in part])
        return {"x": x, "labels": torch.cat([torch.zeros(1 + int(e[1]), dtype=torch.long) for e in part])}

    rows = lambda model, batch: model(batch["x"]).square().sum(1)  # noqa: E731
    data = list(zip(X, Y, strict=True))
    found = persample.scan(make_net(), rows, data, out=tmp_path / "ragged", collate=ragged, **OPTIONS)
    assert set(found.column("label").tolist()) <= {-1, 0}


# ---- random data, state of the user's objects ----


class Noisy(Dataset[Any]):
    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> Any:
        shift = torch.rand(1, dtype=torch.float64) + random.random() + np.random.rand()
        return X[i] + shift, Y[i]


def test_random_examples_are_the_same_in_every_run(tmp_path: Path) -> None:
    model = make_net()
    torch.manual_seed(3)
    first = persample.scan(model, nn.CrossEntropyLoss(), Noisy(), out=tmp_path, **OPTIONS)
    drawn = torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(drawn, torch.rand(1)), "the random number generator was not restored"
    (tmp_path / "summary.json").unlink()
    (tmp_path / "0" / "00001.npz").unlink()
    again = persample.scan(make_net(), nn.CrossEntropyLoss(), Noisy(), out=tmp_path, **OPTIONS)
    assert again.table().equals(first.table())


def test_gradients_of_a_loss_with_parameters_are_restored(tmp_path: Path) -> None:
    class Tempered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.t = nn.Parameter(torch.ones(()).double())

        def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
            return F.cross_entropy(outputs * self.t, targets, reduction="none")

    loss_fn = Tempered()
    loss_fn.t.grad = torch.tensor(5.0).double()
    found = persample.scan(make_net(), loss_fn, (X, Y), out=tmp_path, **{**OPTIONS, "project": 8})
    found.influence((X[:2], Y[:2]))
    assert loss_fn.t.grad.item() == 5.0 and loss_fn.training


def test_state_dict_with_values_that_are_not_tensors(tmp_path: Path) -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"version": 3}

        def set_extra_state(self, state: Any) -> None:
            assert state == {"version": 3}

    model = Extra(5, 3).double()
    persample.scan(model, nn.CrossEntropyLoss(), (X, Y), out=tmp_path, checkpoints=[model.state_dict()], **OPTIONS)


def test_checkpoint_that_shares_memory_with_the_model(tmp_path: Path) -> None:
    """Loading the first checkpoint into the model must not change the second one."""
    model = make_net()
    other = {name: value * 3 for name, value in model.state_dict().items()}
    found = persample.scan(
        model, nn.CrossEntropyLoss(), (X, Y), out=tmp_path, checkpoints=[other, model.state_dict()], **OPTIONS
    )
    assert_near(found.column("loss"), F.cross_entropy(model(X), Y, reduction="none").detach())


# ---- files ----


def test_interrupted_removal_of_an_old_scan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call = (make_net(), nn.CrossEntropyLoss(), (X, Y))
    persample.scan(*call, out=tmp_path / "out", **OPTIONS)
    whole = read_files(tmp_path / "out")
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
    assert read_files(tmp_path / "out") == whole


def test_killed_while_the_first_file_was_written(tmp_path: Path) -> None:
    unfinished = tmp_path / "scan.json.999999999.unfinished"
    unfinished.write_text("{")
    make_stale(unfinished)
    persample.scan(make_net(), nn.CrossEntropyLoss(), (X, Y), out=tmp_path, **OPTIONS)
    assert not list(tmp_path.glob("*.unfinished"))


def test_file_of_another_writer_is_kept(tmp_path: Path) -> None:
    persample.scan(make_net(), nn.CrossEntropyLoss(), (X, Y), out=tmp_path, **OPTIONS)
    with write_atomically(tmp_path / "x.npz"):
        persample.scan(make_net(), nn.CrossEntropyLoss(), (X, Y), out=tmp_path, **OPTIONS)
        assert list(tmp_path.glob("x.npz.*.unfinished"))
    assert (tmp_path / "x.npz").exists()


@pytest.mark.parametrize("name", ["scan.json", "0/00001.npz", "0/00001.npy"])
def test_damaged_file_is_named(name: str, tmp_path: Path) -> None:
    found = persample.scan(make_net(), nn.CrossEntropyLoss(), (X, Y), out=tmp_path, **{**OPTIONS, "project": 8})
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(ScanError, match=f"{name} is damaged"):
        persample.Scan(tmp_path).column("loss") if name != "0/00001.npy" else found.neighbours(1)


def test_missing_file_is_detected(tmp_path: Path) -> None:
    persample.scan(make_net(), nn.CrossEntropyLoss(), (X, Y), out=tmp_path, **OPTIONS)
    (tmp_path / "0" / "00001.npz").unlink()
    with pytest.raises(ScanError, match="are missing"):
        persample.Scan(tmp_path)


def test_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ScanError, match=r"Cannot write|exists and contains no scan"):
        persample.scan(make_net(), nn.CrossEntropyLoss(), (X, Y), out=tmp_path / "file" / "out", **OPTIONS)
    with pytest.raises(ScanError, match="batch_size must be positive"):
        persample.scan(make_net(), nn.CrossEntropyLoss(), images(), out=tmp_path / "out", batch_size=0)
