"""Private trainings to audit, all of them right. `tests/support/planted_faults.py` plants faults into them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from persample.private import AuditRun, BatchMemoryManager, PrivacyEngine

ADAPTIVE: dict[str, Any] = {
    "clipping": "adaptive",
    "target_unclipped_quantile": 0.5,
    "clipbound_learning_rate": 0.5,
    "max_clipbound": 10.0,
    "min_clipbound": 0.01,
    "unclipped_num_std": 10.0,
}


class Words(nn.Module):
    """Classifies texts of five words."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.cell, self.head = nn.Embedding(50, 8), nn.GRU(8, 12, batch_first=True), nn.Linear(12, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.cell(self.embedding(tokens))[0][:, -1])


MODELS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(10, 4),
    "mlp": lambda: nn.Sequential(nn.Linear(10, 30), nn.ReLU(), nn.Dropout(0.1), nn.Linear(30, 4)),
    "cnn": lambda: nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.GroupNorm(2, 6), nn.Flatten(), nn.Linear(216, 4)),
    "words": Words,
}
SHAPES = {"linear": (10,), "mlp": (10,), "cnn": (1, 8, 8), "words": (5,)}


@dataclass(frozen=True)
class Training:
    """A right training. It has units if `examples_per_unit` is not 1. `returns` is "engine" or "epsilon"."""

    model: str = "mlp"
    size: int = 256
    steps: int = 8  # of an epoch
    epochs: int = 1
    noise: float = 1.0
    accountant: str = "rdp"
    optimizer: str = "SGD"
    examples_per_unit: int = 1
    physical_batch_size: int | None = None
    returns: str = "engine"
    options: dict[str, Any] = field(default_factory=dict)

    def make_data(self) -> TensorDataset:
        generator, shape = torch.Generator().manual_seed(3), (self.size, *SHAPES[self.model])
        if self.model == "words":
            inputs = torch.randint(50, shape, generator=generator)
        else:
            inputs = torch.randn(shape, generator=generator)
        return TensorDataset(inputs, torch.randint(4, (self.size,), generator=generator))

    def __call__(self, run: AuditRun) -> Any:
        engine, model = PrivacyEngine(accountant=self.accountant), MODELS[self.model]()
        units = torch.arange(self.size) // self.examples_per_unit
        options = {"max_grad_norm": 1.0, **self.options}
        if self.examples_per_unit > 1:
            options["unit_ids"] = units
        loader = DataLoader(run.add_canaries(self.make_data()), batch_size=len(units.unique()) // self.steps)
        model, optimizer, loader = engine.make_private(
            module=model, optimizer=getattr(torch.optim, self.optimizer)(model.parameters(), lr=0.01),
            data_loader=loader, noise_multiplier=self.noise, **options,
        )  # fmt: skip
        run.observe(optimizer, sample_rate=1 / len(loader), model=model, loss_fn=F.cross_entropy)
        for _ in range(self.epochs):
            self._train_epoch(model, optimizer, loader)
        return engine if self.returns == "engine" else engine.get_epsilon(1e-5)

    def _train_epoch(self, model: Any, optimizer: Any, loader: Any) -> None:
        if self.physical_batch_size is not None:
            manager = BatchMemoryManager(
                data_loader=loader, max_physical_batch_size=self.physical_batch_size, optimizer=optimizer
            )
            with manager as parts:
                self._make_steps(model, optimizer, parts)
        else:
            self._make_steps(model, optimizer, loader)

    def _make_steps(self, model: Any, optimizer: Any, batches: Any) -> None:
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

    def __str__(self) -> str:
        changed = {name: value for name, value in asdict(self).items() if value != getattr(Training, name, {})}
        return ", ".join(f"{name}={value}" for name, value in changed.items())


def draw_training(generator: torch.Generator) -> Training:
    """A right training with random settings."""

    def pick(*choices: Any) -> Any:
        return choices[int(torch.randint(len(choices), (1,), generator=generator))]

    per_unit = pick(1, 1, 1, 4)
    return Training(
        model=pick(*MODELS),
        size=pick(64, 256, 1000),
        steps=pick(1, 4, 10, 16),
        epochs=pick(1, 1, 3),
        noise=pick(0.5, 1.0, 2.0, 5.0),
        accountant=pick("rdp", "prv"),
        optimizer=pick("SGD", "Adam"),
        examples_per_unit=per_unit,
        physical_batch_size=pick(None, None, 16),
        returns=pick("engine", "engine", "epsilon"),
        options=pick({}, {}, {"clipping": "automatic"}, {"normalize_clipping": True}, {"grad_samples": True}, ADAPTIVE),
    )
