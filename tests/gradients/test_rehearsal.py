"""A rehearsal for devices that nobody has to own: tensors on the device `meta` have shapes, but no values.

Whatever reads a number from a tensor fails there, and whatever mixes devices shows. Verification compares values, so it
is off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import persample
from persample import PerSampleGradients, record
from persample._internal import host
from persample.scanning.factors import Projection
from persample.scanning.measure import ALL_QUANTITIES, Measurement


@contextmanager
def force_late_decisions() -> Iterator[None]:
    """Decide late on every device."""
    token = host.is_forced.set(True)
    try:
        yield
    finally:
        host.is_forced.reset(token)


B, T, D, CLASSES = 3, 5, 8, 4


class Text(nn.Module):
    """An encoder layer between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, D)
        self.layer = nn.TransformerEncoderLayer(D, 2, 16, 0.0, batch_first=True)
        self.head = nn.Linear(D, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layer(self.embedding(ids))).mean(1)
        return logits


def make_mlp() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(nn.Linear(D, D), nn.ReLU(), nn.Linear(D, D), nn.Linear(D, CLASSES)), torch.randn(B, D)


def make_cnn() -> tuple[nn.Module, Tensor]:
    layers = [nn.Conv2d(3, D, 3, padding=1), nn.GroupNorm(2, D), nn.ReLU(), nn.Conv2d(D, D, 3, padding=1)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * D, CLASSES)), torch.randn(B, 3, 4, 4)


def make_text() -> tuple[nn.Module, Tensor]:
    return Text(), torch.randint(16, (B, T))


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {"mlp": make_mlp, "cnn": make_cnn, "text": make_text}


def make(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    with torch.device("meta"):
        return *MODELS[name](), torch.randint(CLASSES, (B,))


def find_shapes(answer: Any) -> Any:
    if isinstance(answer, dict):
        return {name: find_shapes(part) for name, part in answer.items()}
    return answer.shape if isinstance(answer, Tensor) else type(answer)


ANSWERS: dict[str, Callable[[PerSampleGradients], Any]] = {
    "kfac_factors": lambda grads: grads.kfac_factors(),  # first: norms replace factors
    "norms": lambda grads: grads.norms(),
    "norms by parameter": lambda grads: grads.norms(per_parameter=True),
    "clip": lambda grads: grads.clip(1.0),
    "clip by parameter": lambda grads: grads.clip(1.0, per_parameter=True),
    "gram": lambda grads: grads.gram(),
    "inner": lambda grads: grads.inner(grads),
    "dense": lambda grads: grads.dense(),
    "a row": lambda grads: grads[0],
    "sum": lambda grads: grads.sum(),
    "mean": lambda grads: grads.mean(),
    "dot": lambda grads: grads.dot(grads.mean()),
    "project": lambda grads: grads.project(16),
    "project, kronecker": lambda grads: grads.project(16, method="kronecker"),
    "project, sparse": lambda grads: grads.project(16, method="sparse"),
    "second_moment": lambda grads: grads.second_moment(),
    "variance": lambda grads: grads.variance(),
    "noise_scale": lambda grads: grads.noise_scale(),
    "fisher_diagonal": lambda grads: grads.fisher_diagonal(torch.ones(len(grads), device=grads.norms().device)),
    "scale": lambda grads: grads.scale({}).norms(),
    "select": lambda grads: grads.select(grads.names[:1]).norms(),
    "nonfinite_count": lambda grads: grads.nonfinite_count,
    "repr": repr,
}

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "nonfinite": {"nonfinite": "zero"},
    "units": {"units": [0, 0, 1]},
}


@pytest.fixture(autouse=True)
def forget_conditions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_deciding_at_once", set())
    monkeypatch.setattr(host._conditions, "waiting", [])


def run_step(model: nn.Module, x: Tensor, y: Tensor, **options: Any) -> Any:
    with record(model, verify=False, **options) as grads:
        F.cross_entropy(model(x), y).backward()
    return grads


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", MODELS)
def test_answers(name: str, options: str) -> None:
    model, x, y = make(name)
    other = {key: value.clone() for key, value in MODELS[name]()[0].state_dict().items()}
    for _ in range(2):  # the first pass is audited
        grads = run_step(model, x, y, **OPTIONS[options])
        shapes = {answer: find_shapes(ask(grads)) for answer, ask in ANSWERS.items()}
    on_cpu = MODELS[name]()[0]
    on_cpu.load_state_dict(other)
    ids = torch.randint(16, x.shape) if name == "text" else torch.randn(x.shape)
    grads = run_step(on_cpu, ids, torch.randint(CLASSES, (B,)), **OPTIONS[options])
    assert shapes == {answer: find_shapes(ask(grads)) for answer, ask in ANSWERS.items()}


@pytest.mark.parametrize(
    "options",
    [
        {"keep": "norms"},
        {"keep": "clip", "max_norm": 1.0},
        {"keep": "clip", "max_norm": 1.0, "passes": 2},
        {"keep": "clip", "max_norm": 1.0, "nonfinite": "zero"},
        {"keep": "clip", "max_norm": 1.0, "units": [0, 1, 1]},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", MODELS)
def test_streamed_answers(name: str, options: dict[str, Any]) -> None:
    model, x, y = make(name)
    for _ in range(2):
        grads = run_step(model, x, y, **options)
        assert grads.norms().shape == (len(grads),)
        assert grads.norms().device.type == "meta"
        if options["keep"] == "clip":
            assert find_shapes(grads.clip()) == {name: p.shape for name, p in model.named_parameters()}


@pytest.mark.parametrize("passes", [1, 2])
def test_private_step(passes: int) -> None:
    pytest.importorskip("opacus")
    from torch.utils.data import DataLoader, TensorDataset

    from persample.private import PrivacyEngine

    model, _, _ = make("mlp")
    data = TensorDataset(torch.randn(12, D), torch.randint(CLASSES, (12,)))
    model, optimizer, loader = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=4),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        verify=False,
        passes=passes,
    )
    for x, y in loader:
        optimizer.zero_grad()
        if len(x):
            F.cross_entropy(model(x.to("meta")), y.to("meta")).backward()
        optimizer.step()


@pytest.mark.parametrize("name", MODELS)
def test_monitor(name: str) -> None:
    model, x, y = make(name)
    with persample.monitor(model, every=1, verify=False) as watching:
        for _ in range(3):
            F.cross_entropy(model(x), y).backward()
    assert [measured.samples for measured in watching.history] == 3 * [B]


@pytest.mark.parametrize("name", MODELS)
def test_scan_step(name: str) -> None:
    model, x, y = make(name)
    measurement = Measurement(
        model,
        nn.CrossEntropyLoss(reduction="none"),
        quantities=[quantity for quantity in ALL_QUANTITIES if quantity != "group_norms"],
        projection=Projection(16),
        verify=False,
    )
    for _ in range(2):
        columns, total, count = measurement.measure_and_sum(range(B), (x, y))
        assert columns["projection"].shape == (B, 16) and count == B
        assert find_shapes(total) == {name: p.shape for name, p in model.named_parameters()}


# ---- decisions that are left to the device, where there are values ----


def test_late_answers_equal_those_at_once() -> None:
    for make_model in MODELS.values():
        model, x = make_model()
        y = torch.randint(CLASSES, (B,))
        expected = run_step(model, x, y)
        with force_late_decisions():
            for options in ({}, {"nonfinite": "zero"}, {"keep": "clip", "max_norm": 1.0}, {"keep": "norms"}):
                grads = run_step(model, x, y, **options)
                torch.testing.assert_close(grads.norms(), expected.norms())
                if options.get("keep") != "norms":
                    torch.testing.assert_close(grads.clip(1.0), expected.clip(1.0))
                assert grads.nonfinite_count == 0
        host.check_conditions()


@pytest.mark.parametrize("keep", [{}, {"keep": "clip", "max_norm": 1.0}, {"keep": "norms"}], ids=str)
def test_a_sample_that_is_not_finite_is_refused_by_the_next_step(keep: dict[str, Any]) -> None:
    model, x, y = *make_mlp(), torch.randint(CLASSES, (B,))
    bad = x.clone()
    bad[1] = torch.inf
    with force_late_decisions():
        run_step(model, bad, y, **keep).norms()
        with pytest.raises(persample.PerSampleError, match=r"In the last step.*not finite"):
            run_step(model, x, y)
        run_step(model, x, y).norms()  # once only


@pytest.mark.parametrize("keep", [{}, {"keep": "clip", "max_norm": 1.0}], ids=str)
def test_a_sample_that_is_not_finite_is_left_out_late(keep: dict[str, Any]) -> None:
    model, x, y = *make_mlp(), torch.randint(CLASSES, (B,))
    x[1] = torch.inf
    expected = run_step(model, x, y, nonfinite="zero", **keep)
    with force_late_decisions():
        grads = run_step(model, x, y, nonfinite="zero", **keep)
        torch.testing.assert_close(grads.norms(), expected.norms())
        torch.testing.assert_close(grads.clip(1.0), expected.clip(1.0))
        assert grads.list_nonfinite() == [1]


@pytest.mark.parametrize("keep", [{}, {"keep": "clip", "max_norm": 1e-4}, {"keep": "norms"}], ids=str)
@pytest.mark.parametrize("per_parameter", [False, True])
def test_a_doubtful_norm_is_bounded_from_above(keep: dict[str, Any], per_parameter: bool) -> None:
    """Contributions of positions that cancel: rounding must not make the norm too small.

    Beside a large gradient of another parameter, the row is reliable as a whole, and its part is not.
    """
    torch.manual_seed(0)

    class TwoOutputs(nn.ModuleList):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return tuple(part(x) for part in self)

    model = TwoOutputs(nn.Linear(128, 128, bias=False) for _ in range(2))  # too large to be joined
    signs = torch.tensor([1.0, -1.0]).repeat(4).view(1, 8, 1)
    x = torch.randn(B, 1, 128).expand(B, 8, 128) * (1 + 1e-6 * torch.randn(B, 8, 1))

    def run() -> Any:
        with record(model, verify=False, **keep) as grads:
            first, second = model(x)
            ((first * signs).sum() + per_parameter * second.square().sum()).backward()
        return grads

    def measure(grads: Any) -> torch.Tensor:
        return grads.norms(per_parameter=True)["0.weight"] if per_parameter else grads.norms()

    exact = measure(run())
    with force_late_decisions():
        assert bool((measure(run()) >= exact * (1 - 1e-4)).all())
        with pytest.warns(UserWarning, match="An upper bound took its place"):
            run()
