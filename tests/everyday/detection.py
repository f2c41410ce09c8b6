"""Losses of detectors and of models for segmentation: boxes, anchors and pixels, divided by their number."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.everyday.loop import RECORD, USUAL, Batch, Origin

detection = Origin("Detection and segmentation")

ANCHORS, CLASSES = 6, 3


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 8)
        self.classes, self.boxes = nn.Linear(8, ANCHORS * CLASSES), nn.Linear(8, ANCHORS * 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.body(x).relu()
        return self.classes(h).view(-1, ANCHORS, CLASSES), self.boxes(h).view(-1, ANCHORS, 4)


def annotated(size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Labels of anchors, 0 for the background, and boxes. Every image has an object and background."""
    labels = torch.randint(CLASSES, (size, ANCHORS))
    labels[:, 0], labels[:, 1] = 1, 0
    return torch.randn(size, 4), labels, torch.randn(size, ANCHORS, 4)


def count_objects(batch: Batch) -> Tensor:
    return (batch[1] > 0).sum()  # type: ignore[no-any-return]


@detection("boxes of each image in a loop, divided by the number of objects", Detector, annotated, count=count_objects)
def image_by_image(model: nn.Module, batch: Batch) -> Tensor:
    _, labels, boxes = batch
    scores, found = model(batch[0])
    number, box_losses, class_losses = 0, [], []
    for n in range(len(scores)):
        objects = torch.where(labels[n] > 0)[0]
        number += objects.numel()
        box_losses.append(F.smooth_l1_loss(found[n][objects], boxes[n][objects], reduction="sum"))
        class_losses.append(F.cross_entropy(scores[n], labels[n], reduction="sum"))
    return (torch.stack(box_losses).sum() + torch.stack(class_losses).sum()) / max(1, number)


@detection("hard negatives of each image, divided by the number of objects", Detector, annotated, count=count_objects)
def hard_negatives(model: nn.Module, batch: Batch) -> Tensor:
    _, labels, boxes = batch
    scores, found = model(batch[0])
    objects = labels > 0
    number = objects.long().sum(1, keepdim=True)
    box_loss = F.smooth_l1_loss(found[objects], boxes[objects], reduction="sum")
    losses = F.cross_entropy(scores.view(-1, CLASSES), labels.view(-1), reduction="none").view(len(scores), -1)
    order = losses.detach().masked_fill(objects, 0).argsort(1, descending=True)
    negatives = order.argsort(1) < (3 * number).clamp(max=ANCHORS - 1)
    return (box_loss + losses[objects | negatives].sum()) / number.sum()


@detection("boxes divided by the number of all anchors", Detector, annotated)
def all_anchors(model: nn.Module, batch: Batch) -> Tensor:
    scores, found = model(batch[0])
    labels = batch[1].flatten()
    objects = torch.where(labels > 0)[0]
    boxes, expected = found.view(-1, 4)[objects], batch[2].view(-1, 4)[objects]
    box_loss = F.smooth_l1_loss(boxes, expected, reduction="sum") / labels.numel()
    return F.cross_entropy(scores.view(-1, CLASSES), labels) + box_loss


@detection("each image divided by its own number of objects", Detector, annotated)
def own_number(model: nn.Module, batch: Batch) -> Tensor:
    losses = []
    for scores, found, labels, boxes in zip(*model(batch[0]), *batch[1:], strict=True):
        objects = labels > 0
        targets = F.one_hot(labels, CLASSES).double()
        loss = F.binary_cross_entropy_with_logits(scores, targets, reduction="sum")
        losses.append((loss + F.l1_loss(found[objects], boxes[objects], reduction="sum")) / max(1, objects.sum()))
    return sum(losses) / max(1, len(losses))  # type: ignore[no-any-return, call-overload]


def pixels(size: int) -> tuple[Tensor, Tensor]:
    labels = torch.randint(4, (size, 6, 6))
    return torch.randn(size, 3, 6, 6), labels.masked_fill(torch.rand(size, 6, 6) < 0.2, 255)


def segmenter() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 5, 3, padding=1), nn.ReLU(), nn.Conv2d(5, 4, 1))


@detection(
    "pixels, class weights and ignored pixels",
    segmenter,
    pixels,
    count=lambda batch: sum(weight * (batch[1] == c).sum() for c, weight in enumerate((1.0, 0.5, 2.0, 0.1))),
)
def weighted_pixels(model: nn.Module, batch: Batch) -> Tensor:
    weight = torch.tensor([1.0, 0.5, 2.0, 0.1])
    return nn.CrossEntropyLoss(weight=weight, ignore_index=255)(model(batch[0]), batch[1])


def mask(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 3, 6, 6), torch.randint(2, (size, 1, 6, 6)).double()


@detection("Dice loss of each image, with cross entropy", lambda: nn.Conv2d(3, 1, 3, padding=1), mask)
def dice(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(batch[0])
    p, target = logits.sigmoid().flatten(1), batch[1].flatten(1)
    overlap = (2 * (p * target).sum(-1) + 1) / (p.sum(-1) + target.sum(-1) + 1)
    return F.binary_cross_entropy_with_logits(logits, batch[1]) + 1 - overlap.mean()


@detection(
    "Dice loss of the batch",
    lambda: nn.Conv2d(3, 1, 3, padding=1),
    mask,
    front_ends=(RECORD,),
    refused={"all": "is not linear in that sum"},
)
def batch_dice(model: nn.Module, batch: Batch) -> Tensor:
    p, target = model(batch[0]).sigmoid().view(-1), batch[1].view(-1)
    return 1 - (2 * (p * target).sum() + 1) / (p.sum() + target.sum() + 1)  # type: ignore[no-any-return]


@detection(
    "heat maps, divided by the number of objects if there are some",
    lambda: nn.Conv2d(3, 2, 1),
    lambda size: (torch.randn(size, 3, 4, 4), torch.rand(size, 2, 4, 4).index_fill(3, torch.tensor([1]), 1.0)),
    count=lambda batch: (batch[1] == 1).sum(),
    front_ends=USUAL,
)
def heat_maps(model: nn.Module, batch: Batch) -> Tensor:
    p, target = model(batch[0]).sigmoid().clamp(1e-4, 1 - 1e-4), batch[1]
    is_object = target.eq(1).double()
    positive = (p.log() * (1 - p).square() * is_object).sum()
    negative = ((1 - p).log() * p.square() * (1 - target).pow(4) * (1 - is_object)).sum()
    number: Any = is_object.sum()
    return -negative if number == 0 else -(positive + negative) / number  # type: ignore[no-any-return]
