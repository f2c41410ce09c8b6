"""Arguments and targets of several sizes: lists of images and target dicts, bags, times, matched boxes, CTC."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from persample import PerSampleError, record, watch
from persample.testing.oracle import assert_rows_close, perturb, stack_gradients

# A model, the arguments of the batch, and those of each sample alone.
Case = tuple[nn.Module, tuple[Any, ...], list[tuple[Any, ...]]]

# Called with the model and arguments, returns the loss as a sum over the samples.
Loss = Callable[..., Tensor]


class Bag(nn.Module):
    def __init__(self, mode: str = "mean") -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(9, 4, mode=mode), nn.Linear(4, 2)

    def forward(self, ids: Tensor, offsets: Tensor, weights: Tensor | None = None) -> Tensor:
        return self.head(self.bag(ids, offsets, weights).tanh())  # type: ignore[no-any-return]


def make_bags(batch: int, mode: str = "mean", weighted: bool = False) -> Case:
    sizes = [1 + n % 3 for n in range(batch)]
    ids = torch.randint(0, 9, (sum(sizes),))
    starts = torch.tensor([0, *sizes]).cumsum(0).tolist()
    weights = (torch.rand(len(ids)).double(),) if weighted else ()
    whole = (ids, torch.tensor(starts[:-1]), *weights)
    parts = [slice(a, b) for a, b in itertools.pairwise(starts)]
    return Bag(mode), whole, [(ids[own], torch.tensor([0]), *(w[own] for w in weights)) for own in parts]


class Equation(nn.Module):
    """An ODE, solved at given times: (T, B, D)."""

    def __init__(self) -> None:
        super().__init__()
        self.field = nn.Linear(3, 3)

    def forward(self, state: Tensor, times: Tensor) -> Tensor:
        states = [state]
        for step in times.diff():
            states.append(states[-1] + step * self.field(states[-1]).tanh())
        return torch.stack(states, 1)


def make_equation(batch: int) -> Case:
    state, times = torch.randn(batch, 3).double(), torch.linspace(0, 1, 6).double()
    return Equation(), (state, times), [(state[n : n + 1], times) for n in range(batch)]


class Detector(nn.Module):
    """Takes a list of images and a list of targets, as the detectors of torchvision do, and returns its losses."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.box, self.label = nn.Conv2d(3, 4, 3), nn.Linear(4, 4), nn.Linear(4, 5)

    def forward(self, images: Any, targets: Any) -> dict[str, Tensor]:
        batch = images[0].new_zeros(len(images), 3, 9, 9)
        for image, place in zip(images, batch, strict=True):
            place[:, : image.shape[1], : image.shape[2]].copy_(image)
        features = self.conv(batch).relu().mean((2, 3))
        boxes, labels = self.box(features), self.label(features)
        of_boxes, of_labels = [], []
        for n, target in enumerate(targets):
            count = len(target["boxes"])
            of_boxes.append(F.smooth_l1_loss(boxes[n].expand(count, 4), target["boxes"], reduction="sum"))
            of_labels.append(F.cross_entropy(labels[n].expand(count, 5), target["labels"], reduction="sum"))
        return {"box": torch.stack(of_boxes).sum(), "label": torch.stack(of_labels).sum()}


def make_detection(batch: int, is_equal: bool = False, as_tuple: bool = False) -> Case:
    images = [torch.randn(3, 9, 9 if is_equal else 9 - n % 2).double() for n in range(batch)]
    counts = [3 if is_equal else 1 + n for n in range(batch)]
    targets = [{"boxes": torch.randn(n, 4).double(), "labels": torch.randint(0, 5, (n,))} for n in counts]
    if as_tuple:
        return Detector(), (tuple(images), tuple(targets)), [((images[n],), (targets[n],)) for n in range(batch)]
    return Detector(), (images, targets), [([images[n]], [targets[n]]) for n in range(batch)]


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, images: list[Tensor]) -> Tensor:
        return torch.stack([self.conv(image[None]).tanh().mean((0, 2, 3)) for image in images])


def make_images(batch: int) -> Case:
    images = [torch.randn(3, 6 + n, 7 + n % 2).double() for n in range(batch)]
    return Pooled(), (images,), [([image],) for image in images]


def add_up(model: nn.Module, *args: Any) -> Tensor:
    outputs = model(*args)
    return sum(outputs.values()) if isinstance(outputs, dict) else outputs.square().sum()  # type: ignore[no-any-return]


# name: (make the case, options)
CASES: dict[str, tuple[Callable[[int], Case], dict[str, Any]]] = {
    "bags": (make_bags, {}),
    "bags, sum": (lambda batch: make_bags(batch, "sum"), {}),
    "bags, weighted": (lambda batch: make_bags(batch, "sum", weighted=True), {}),
    "times": (make_equation, {}),
    "detection": (make_detection, {}),
    "detection, equal sizes": (lambda batch: make_detection(batch, is_equal=True), {}),
    "detection, tuples": (lambda batch: make_detection(batch, as_tuple=True), {}),
}


def check_case(case: Case, loss: Loss = add_up, **options: Any) -> None:
    model, args, alone = case
    model.double()
    perturb(model)
    expected = stack_gradients((loss(model, *own) for own in alone), dict(model.named_parameters()))
    with record(model, **options) as grads:
        loss(model, *args).backward()
    assert_rows_close(grads.dense(), expected)
    received: list[Any] = []
    watched = watch(model, received.append, **options)
    loss(model, *args).backward()
    watched.stop()
    assert_rows_close(received[0].dense(), expected)


@pytest.mark.parametrize("batch", [2, 3, 4, 5])
@pytest.mark.parametrize("name", CASES)
def test_arguments_of_several_sizes(name: str, batch: int) -> None:
    torch.manual_seed(batch)
    make, options = CASES[name]
    check_case(make(batch), **options)


@pytest.mark.parametrize("batch", [2, 4])
def test_a_list_of_images_with_batch_size(batch: int) -> None:
    check_case(make_images(batch), batch_size=batch)


def test_a_list_of_images_names_both_readings() -> None:
    model, args, _ = make_images(4)
    with pytest.raises(PerSampleError, match=r"a list of 4 tensors.*batch_size=4"), record(model.double()):
        model(*args).square().sum().backward()


def test_statistics_over_a_list_of_images_are_refused() -> None:
    class Centred(Detector):
        def forward(self, images: Any, targets: Any) -> dict[str, Tensor]:
            mean = torch.stack([image.mean() for image in images]).mean()
            return super().forward([image - mean for image in images], targets)

    _, args, _ = make_detection(4)
    model = Centred().double()
    with pytest.raises(PerSampleError, match="mixed"), record(model):
        add_up(model, *args).backward()


@pytest.mark.parametrize("lengths", [(2, 1, 3), (1, 1, 1), (3, 0, 0), (0, 2, 1)], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("kind", ["tensor", "tuple", "from a mask"])
def test_ctc_with_concatenated_targets(kind: str, reduction: str, lengths: tuple[int, ...]) -> None:
    """Also with as many targets as samples, which then have no row for each sample."""
    torch.manual_seed(0)
    batch, model = len(lengths), nn.Linear(3, 5).double()
    perturb(model)
    x, padded = torch.randn(batch, 8, 3).double(), torch.randint(1, 5, (batch, 3))
    mask = torch.arange(3) < torch.tensor(lengths)[:, None]

    def loss(rows: slice) -> Tensor:
        own = mask[rows]
        count = len(own)
        targets = (
            padded[rows].masked_select(own) if kind == "from a mask" else flat[starts[rows.start] : starts[rows.stop]]
        )
        ends: Any = own.sum(1) if kind == "from a mask" else torch.tensor(lengths[rows])
        times: Any = torch.full((count,), 8)
        if kind == "tuple":
            ends, times = tuple(ends.tolist()), (8,) * count
        log_probs = model(x[rows]).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(log_probs, targets, times, ends, reduction=reduction, zero_infinity=True)

    flat, starts = padded[mask], [0, *torch.tensor(lengths).cumsum(0).tolist()]
    expected = stack_gradients((loss(slice(n, n + 1)) for n in range(batch)), dict(model.named_parameters()))
    with record(model) as grads:
        loss(slice(0, batch)).backward()
    assert_rows_close(grads.dense(), expected)


class SetPrediction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features, self.label, self.box = nn.Linear(3, 6), nn.Linear(6, 5), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.features(x).relu()
        return {"labels": self.label(h), "boxes": self.box(h).sigmoid()}


@torch.no_grad()
def match(outputs: dict[str, Tensor], targets: list[dict[str, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """For each image the queries that match its boxes, by scipy, from costs computed for all images at once."""
    from scipy.optimize import linear_sum_assignment

    boxes = torch.cat([target["boxes"] for target in targets])
    labels = torch.cat([target["labels"] for target in targets])
    cost = (
        torch.cdist(outputs["boxes"].flatten(0, 1), boxes, p=1) - outputs["labels"].flatten(0, 1).softmax(-1)[:, labels]
    )
    parts = cost.view(len(targets), -1, len(boxes)).split([len(target["boxes"]) for target in targets], -1)
    pairs = [linear_sum_assignment(part[n]) for n, part in enumerate(parts)]
    return [(torch.as_tensor(i, dtype=torch.int64), torch.as_tensor(j, dtype=torch.int64)) for i, j in pairs]


def match_boxes(model: nn.Module, x: Tensor, targets: list[dict[str, Tensor]]) -> Tensor:
    outputs = model(x)
    pairs = match(outputs, targets)
    image = torch.cat([torch.full_like(query, n) for n, (query, _) in enumerate(pairs)])
    query = torch.cat([query for query, _ in pairs])
    labels = torch.full(outputs["labels"].shape[:2], 4)
    labels[image, query] = torch.cat([t["labels"][j] for t, (_, j) in zip(targets, pairs, strict=True)])
    boxes = torch.cat([t["boxes"][j] for t, (_, j) in zip(targets, pairs, strict=True)])
    of_boxes = F.l1_loss(outputs["boxes"][image, query], boxes, reduction="none").sum()
    return F.cross_entropy(outputs["labels"].transpose(1, 2), labels, reduction="sum") + of_boxes


@pytest.mark.parametrize("counts", [(2, 1, 2), (1, 3), (1, 2, 3, 1, 2)], ids=str)
def test_boxes_matched_by_image_and_query(counts: tuple[int, ...]) -> None:
    pytest.importorskip("scipy")
    torch.manual_seed(0)
    x = torch.randn(len(counts), 5, 3).double()
    targets = [{"labels": torch.randint(0, 4, (n,)), "boxes": torch.rand(n, 4).double()} for n in counts]
    alone = [(x[n : n + 1], targets[n : n + 1]) for n in range(len(counts))]
    check_case((SetPrediction(), (x, targets), alone), match_boxes)


@pytest.mark.parametrize("batch", [3, 4])
def test_columns_written_in_place_after_a_norm_of_transposed_channels(batch: int) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.norm, self.outer = nn.Linear(3, 4), nn.GroupNorm(2, 4), nn.Linear(4, 4)
            self.scale = nn.Parameter(torch.rand(4))

        def forward(self, x: Tensor) -> Tensor:
            h = self.outer(self.norm(self.inner(x).mT).mT.tanh())
            h[:, 0].mul_(self.scale)
            return h  # type: ignore[no-any-return]

    x = torch.randn(batch, 6, 3).double()
    check_case((Model(), (x,), [(x[n : n + 1],) for n in range(batch)]))
