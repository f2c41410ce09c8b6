"""Train a small net on the digits of scikit-learn privately with Lightning.

Run it with: python examples/private_lightning.py
"""

from __future__ import annotations

import logging
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from persample.private.lightning import PrivateTraining, poisson


class Digits(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, index: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def main() -> None:
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.manual_seed(0)
    digits = load_digits()
    x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    order = torch.randperm(len(x))
    train, test = order[360:], order[:360]
    module, privacy = Digits(), PrivateTraining(target_epsilon=4.0, target_delta=1e-4, max_grad_norm=1.0)
    trainer = pl.Trainer(
        max_epochs=20, accelerator="cpu", callbacks=[privacy], logger=False, enable_checkpointing=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, poisson(DataLoader(TensorDataset(x[train], y[train]), batch_size=128)))
    with torch.no_grad():
        accuracy = (module(x[test]).argmax(1) == y[test]).float().mean()
    print(f"accuracy {accuracy:.1%} at epsilon {privacy.budget.spent(privacy.engine):.2f}, delta 0.0001")


if __name__ == "__main__":
    main()
