"""Loops of the guides of Lightning: the step is a method of the module."""

from __future__ import annotations

from typing import Any

import lightning
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.everyday.loop import MONITOR, RECORD, Batch, Origin
from tests.everyday.pytorch_examples import labelled, mlp, pixels

guides = Origin("Lightning guides")


class LitAutoEncoder(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(16, 3), mlp(3, 16)

    def encode(self, x: Tensor) -> Tensor:
        return self.encoder(x)  # type: ignore[no-any-return]

    def decode(self, z: Tensor) -> Tensor:
        return self.decoder(z)  # type: ignore[no-any-return]

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x = batch.view(batch.size(0), -1)
        return F.mse_loss(self.decode(self.encode(x)), x)


@guides("LightningModule.training_step, autoencoder", LitAutoEncoder, pixels)
def lit_autoencoder(model: Any, batch: Batch) -> Tensor:
    return model.training_step(batch, 0)  # type: ignore[no-any-return]


class LitClassifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = mlp(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)  # type: ignore[no-any-return]

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        x, y = batch
        logits = self(x)
        return {"loss": F.cross_entropy(logits, y), "accuracy": (logits.argmax(1) == y).double().mean()}


@guides("LightningModule.training_step that returns a dict", LitClassifier, labelled)
def lit_classifier(model: Any, batch: Batch) -> Tensor:
    return model.training_step(batch, 0)["loss"]  # type: ignore[no-any-return]


@guides("LightningModule, autoencoder used by encode and decode", LitAutoEncoder, pixels, front_ends=(RECORD,))
def lit_parts(model: Any, batch: Batch) -> Tensor:
    x = batch.flatten(1)
    z = model.encode(x)
    return F.mse_loss(model.decode(z), x) + 0.01 * z.square().sum(1).mean()


class LitGan(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.discriminator = mlp(3, 4), mlp(4, 1)

    def forward(self, z: Tensor) -> Tensor:
        return self.generator(z)  # type: ignore[no-any-return]

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        real, z = batch
        fake = self(z).detach()
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
        real_loss = F.binary_cross_entropy_with_logits(self.discriminator(real), ones)
        fake_loss = F.binary_cross_entropy_with_logits(self.discriminator(fake), zeros)
        ((real_loss + fake_loss) / 2).backward()  # manual optimisation of the discriminator


@guides(
    "LightningModule with manual optimisation, GAN",
    LitGan,
    lambda size: (torch.randn(size, 4), torch.randn(size, 3)),
    front_ends=(RECORD,),
)
def lit_gan(model: Any, batch: Batch) -> None:
    model.training_step(batch, 0)


class LitTwoHeads(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.heads = mlp(4, 5), nn.ModuleDict({"kind": nn.Linear(5, 3), "size": nn.Linear(5, 1)})

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, kind, value = batch
        h = self.body(x).tanh()
        return F.cross_entropy(self.heads["kind"](h), kind) + 0.5 * F.mse_loss(self.heads["size"](h)[:, 0], value)


@guides(
    "LightningModule with several heads",
    LitTwoHeads,
    lambda size: (*labelled(size), torch.randn(size)),
    front_ends=(RECORD, MONITOR),
)
def lit_heads(model: Any, batch: Batch) -> Tensor:
    return model.training_step(batch, 0)  # type: ignore[no-any-return]
