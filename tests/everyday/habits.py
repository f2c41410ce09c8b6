"""Habits of training loops: accumulation, chunks, mixed precision, checkpointing, objects among the arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.everyday.loop import MONITOR, PRIVATE, RECORD, USUAL, WATCH, Batch, Origin
from tests.everyday.objectives import classifier
from tests.everyday.pytorch_examples import labelled, mlp

habits = Origin("Habits of loops")


@habits("chunks of a batch, outputs concatenated", classifier, labelled, front_ends=(RECORD,))
def chunks(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    return F.cross_entropy(torch.cat([model(x[:2]), model(x[2:])]), y)


@habits("gradient accumulation inside one block", classifier, labelled, front_ends=(RECORD,))
def accumulation(model: nn.Module, batch: Batch) -> None:
    x, y = batch
    for i in range(0, len(x), 2):
        loss = F.cross_entropy(model(x[i : i + 2]), y[i : i + 2], reduction="sum") / len(x)
        loss.backward()


@habits(
    "augmentations of each sample in one call, predictions averaged",
    classifier,
    labelled,
    front_ends=(RECORD,),
    options={"units": 3},
)
def averaged_augmentations(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    repeated = x.repeat_interleave(3, dim=0)
    outputs = model(repeated + torch.arange(len(repeated))[:, None] % 3)
    return F.cross_entropy(outputs.view(len(y), 3, -1).mean(1), y)


@habits(
    "augmentations of each sample in one call, losses added up",
    classifier,
    labelled,
    front_ends=(RECORD,),
    options={"units": 3, "unit_reduction": "mean"},
)
def added_augmentations(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    views = x[:, None].expand(-1, 3, -1) + torch.arange(3)[:, None]
    return F.cross_entropy(model(views.reshape(-1, x.shape[1])), y.repeat_interleave(3))


@habits("mixed precision by autocast (bfloat16)", classifier, labelled, tolerance=0.1)
def autocast(model: nn.Module, batch: Batch) -> Tensor:
    x, y = batch
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = F.cross_entropy(model(x), y)
    return loss


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.reentrant = mlp(4, 5), mlp(5, 3), reentrant

    def forward(self, x: Tensor) -> Tensor:
        h = checkpoint(self.first, x, use_reentrant=self.reentrant)
        return self.second(h)  # type: ignore[no-any-return]


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


habits("gradient checkpointing", Checkpointed, labelled, front_ends=(RECORD, WATCH, MONITOR, PRIVATE))(cross_entropy)


@habits(
    "body and head called one after the other",
    lambda: nn.ModuleDict({"body": mlp(4, 5), "head": nn.Linear(5, 3)}),
    labelled,
    front_ends=(RECORD, WATCH),
)
def module_dict(model: Any, batch: Batch) -> Tensor:
    return F.cross_entropy(model["head"](model["body"](batch[0])), batch[1])


@habits(
    "layers of a ModuleList in the loop",
    lambda: nn.ModuleList([nn.Linear(4, 5), nn.Linear(5, 3)]),
    labelled,
    front_ends=(RECORD,),
)
def module_list(model: Any, batch: Batch) -> Tensor:
    h = batch[0]
    for i, layer in enumerate(model):
        h = layer(h) if i == 0 else layer(h.relu())
    return F.cross_entropy(h, batch[1])


@habits("forward() called directly", classifier, labelled, front_ends=(RECORD,))
def direct_forward(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model.forward(batch[0]), batch[1])


@habits(
    "a loss module with its own weights: two modules",
    lambda: {"model": mlp(4, 5), "criterion": nn.Linear(5, 3)},
    labelled,
    front_ends=(RECORD,),
)
def trained_criterion(models: Any, batch: Batch) -> Tensor:
    return F.cross_entropy(models["criterion"](models["model"](batch[0])), batch[1])


@habits("two modules in a list", lambda: [mlp(4, 5), nn.Linear(5, 3)], labelled, front_ends=(RECORD,))
def list_of_modules(models: Any, batch: Batch) -> Tensor:
    encoder, head = models
    return F.cross_entropy(head(encoder(batch[0])), batch[1])


@dataclass
class Example:
    x: Tensor
    y: Tensor
    seen: dict[str, int]


class TakesDataclass(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(4, 3)

    def forward(self, batch: Example) -> Tensor:
        batch.seen["calls"] = batch.seen.get("calls", 0) + 1
        return self.net(batch.x) * batch.seen["calls"]  # type: ignore[no-any-return]


@habits("a dataclass as argument that the model writes to", TakesDataclass, labelled)
def dataclass_argument(model: nn.Module, batch: Batch) -> Tensor:
    example = Example(*batch, seen={})
    return F.cross_entropy(model(example), example.y)


@habits(
    "DataParallel-style dict of inputs",
    lambda: TakesDict(),
    lambda size: {"x": torch.randn(size, 4), "y": torch.randint(3, (size,)), "id": [*range(size)]},
    take=lambda b, n: {"x": b["x"][n : n + 1], "y": b["y"][n : n + 1], "id": b["id"][n : n + 1]},
)
def dict_argument(model: nn.Module, batch: Batch) -> Tensor:
    return model(batch)["loss"]  # type: ignore[no-any-return]


class TakesDict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(4, 3)

    def forward(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        logits = self.net(batch["x"])
        return {"logits": logits, "loss": F.cross_entropy(logits, batch["y"])}


@habits("loss added up sample by sample", classifier, labelled, front_ends=(RECORD, MONITOR))
def sample_by_sample(model: nn.Module, batch: Batch) -> Tensor:
    loss, outputs = torch.zeros(()), model(batch[0])
    for output, label in zip(outputs, batch[1], strict=True):
        loss = loss + F.cross_entropy(output[None], label[None])
    return loss / len(outputs)


@habits(
    "deep supervision: losses of several outputs", lambda: DeepSupervision(), labelled, front_ends=(*USUAL, PRIVATE)
)
def deep_supervision(model: nn.Module, batch: Batch) -> Tensor:
    outputs = model(batch[0])
    return sum(w * F.cross_entropy(o, batch[1]) for w, o in zip((0.3, 1.0), outputs, strict=True))  # type: ignore[return-value]


class DeepSupervision(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.heads = nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 3)])

    def forward(self, x: Tensor) -> list[Tensor]:
        outputs = []
        for layer, head in zip(self.layers, self.heads, strict=True):
            x = layer(x).relu()
            outputs.append(head(x))
        return outputs


@habits("running loss, accuracy and perplexity for the log", classifier, labelled, front_ends=(RECORD, WATCH, MONITOR))
def with_metrics(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(batch[0])
    loss = F.cross_entropy(logits, batch[1])
    _ = loss.item(), (logits.argmax(1) == batch[1]).sum().item(), torch.exp(loss.detach()).item()
    return loss


@habits("mean loss times the batch size", classifier, labelled)
def times_batch_size(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1]) * batch[0].size(0)


@habits("mean loss times a number that equals the batch size", classifier, labelled)
def times_four(model: nn.Module, batch: Batch) -> Tensor:
    return 4 * F.cross_entropy(model(batch[0]), batch[1])


@habits("sum times the inverse of the batch size", classifier, labelled, front_ends=(RECORD,))
def times_inverse(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum") * (1.0 / len(batch[0]))


@habits("uneven chunks, each a sum over the batch size", classifier, labelled, front_ends=(RECORD,), sizes=(5, 7, 4))
def uneven_chunks(model: nn.Module, batch: Batch) -> None:
    x, y = batch
    for i in range(0, len(x), 3):
        (F.cross_entropy(model(x[i : i + 3]), y[i : i + 3], reduction="sum") / len(x)).backward()


@habits("two chunks, each a sum over the batch size", classifier, labelled, front_ends=(RECORD,), sizes=(3, 4, 2))
def two_chunks(model: nn.Module, batch: Batch) -> None:
    for x, y in zip(batch[0].chunk(2), batch[1].chunk(2), strict=True):
        (F.cross_entropy(model(x), y, reduction="sum") / len(batch[0])).backward()


@habits("chunks of one sample, each over the batch size", classifier, labelled, front_ends=(RECORD,))
def single_chunks(model: nn.Module, batch: Batch) -> None:
    for x, y in zip(batch[0].split(1), batch[1].split(1), strict=True):
        (F.cross_entropy(model(x), y) * len(x) / len(batch[0])).backward()
