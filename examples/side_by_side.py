"""Trains with the engine of Opacus and with that of persample, side by side: epsilon and weights are equal.

    python examples/side_by_side.py                 # every row of the table in docs/guides/migration.md
    python examples/side_by_side.py adaptive lora   # some rows

Data are random. Both engines get the same batches and draw the same noise. The exit code is 1 if a row differs.
"""

from __future__ import annotations

import argparse
import io
import sys
import warnings
from collections.abc import Callable
from typing import Any

import opacus
import torch
import torch.nn.functional as F
from opacus.data_loader import DPDataLoader
from opacus.schedulers import ExponentialNoise, StepGradClip
from opacus.utils.batch_memory_manager import BatchMemoryManager
from opacus.validators import ModuleValidator
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from persample.private import PrivacyEngine

DELTA = 1e-3
TOLERANCE = 1e-5

# Weights and epsilon after a training.
Result = tuple[Tensor, float]
ROWS: dict[str, Callable[[Any], Result]] = {}


def row(function: Callable[[Any], Result]) -> Callable[[Any], Result]:
    """Decorator: a training as a function of the class of the engine."""
    ROWS[function.__name__] = function
    return function


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def make_loader() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(48, 6, generator=generator), torch.randint(3, (48,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=8)


def start(engine: Any, model: nn.Module, loader: DataLoader[Any] | None = None, **options: Any) -> tuple[Any, ...]:
    settings: dict[str, Any] = {"noise_multiplier": 1.0, "max_grad_norm": 0.3, "poisson_sampling": False, **options}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    return engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=make_loader() if loader is None else loader,
        noise_generator=torch.Generator().manual_seed(2),
        **settings,
    )


def train(model: Any, optimizer: Any, loader: Any, compute: Callable[..., Tensor] | None = None) -> None:
    for *inputs, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(*inputs) if compute is None else compute(model, *inputs), y).backward()
        optimizer.step()


def finish(engine: Any, model: nn.Module, optimizer: Any) -> Result:
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    if hasattr(optimizer, "release"):
        optimizer.release()
    return weights, engine.get_epsilon(DELTA)


def run(
    kind: Any, compute: Callable[..., Tensor] | None = None, model: nn.Module | None = None, **options: Any
) -> Result:
    engine = kind(accountant="rdp")
    model, optimizer, loader = start(engine, make_model() if model is None else model, **options)
    for _ in range(2):
        train(model, optimizer, loader, compute)
    return finish(engine, model, optimizer)


# ---- arguments of make_private ----


@row
def flat(kind: Any) -> Result:
    return run(kind)


@row
def hooks(kind: Any) -> Result:
    return run(kind, grad_sample_mode="hooks")


@row
def functorch(kind: Any) -> Result:
    return run(kind, grad_sample_mode="functorch")


@row
def ew(kind: Any) -> Result:
    return run(kind, grad_sample_mode="ew")


@row
def ghost(kind: Any) -> Result:
    engine = kind(accountant="rdp")
    model, optimizer, criterion, loader = start(engine, make_model(), grad_sample_mode="ghost")
    for x, y in loader:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
    return finish(engine, model, optimizer)


@row
def no_op(kind: Any) -> Result:
    from persample import record

    engine, module = kind(accountant="rdp"), make_model()
    _, optimizer, loader = start(engine, module, grad_sample_mode="no_op")
    for x, y in loader:
        optimizer.zero_grad()
        with record(module) as grads:
            F.cross_entropy(module(x), y).backward()
        rows = grads.dense()
        for name, p in module.named_parameters():
            p.grad_sample = rows[name]  # type: ignore[attr-defined]
        optimizer.step()
    return finish(engine, module, optimizer)


@row
def per_layer(kind: Any) -> Result:
    return run(kind, clipping="per_layer", max_grad_norm=[0.1, 0.2, 0.3, 0.4])


@row
def adaptive(kind: Any) -> Result:
    return run(
        kind, clipping="adaptive", target_unclipped_quantile=0.5, clipbound_learning_rate=0.2, max_clipbound=10.0,
        min_clipbound=0.01, unclipped_num_std=2.0,
    )  # fmt: skip


@row
def loss_reduction(kind: Any) -> Result:
    engine = kind(accountant="rdp")
    model, optimizer, loader = start(engine, make_model(), loss_reduction="sum")
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y, reduction="sum").backward()
        optimizer.step()
    return finish(engine, model, optimizer)


@row
def wrap_model(kind: Any) -> Result:
    engine, module = kind(accountant="rdp"), make_model()
    handle, optimizer, loader = start(engine, module, wrap_model=False)
    train(module, optimizer, loader)
    handle.cleanup()
    return finish(engine, module, optimizer)


@row
def target_epsilon(kind: Any) -> Result:
    engine, module = kind(accountant="rdp"), make_model()
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1), data_loader=make_loader(), epochs=2,
        target_epsilon=4.0, target_delta=DELTA, max_grad_norm=0.3, poisson_sampling=False,
        noise_generator=torch.Generator().manual_seed(2),
    )  # fmt: skip
    for _ in range(2):
        train(model, optimizer, loader)
    return finish(engine, model, optimizer)


# ---- data, schedulers, gradients of samples, checkpoints ----


@row
def poisson_sampling(kind: Any) -> Result:
    torch.manual_seed(4)  # of the batches
    return run(kind, poisson_sampling=True)


@row
def data_loader(kind: Any) -> Result:
    loader = DPDataLoader.from_data_loader(make_loader(), generator=torch.Generator().manual_seed(4))
    return run(kind, loader=loader)


@row
def memory_manager(kind: Any) -> Result:
    engine = kind(accountant="rdp")
    model, optimizer, loader = start(engine, make_model())
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=3, optimizer=optimizer) as parts:
        train(model, optimizer, parts)
    return finish(engine, model, optimizer)


@row
def accumulation(kind: Any) -> Result:
    engine = kind(accountant="rdp")
    model, optimizer, loader = start(engine, make_model())
    for step, (x, y) in enumerate(loader):
        F.cross_entropy(model(x), y).backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    return finish(engine, model, optimizer)


@row
def schedulers(kind: Any) -> Result:
    engine = kind(accountant="rdp")
    model, optimizer, loader = start(engine, make_model())
    both = ExponentialNoise(optimizer, gamma=0.9), StepGradClip(optimizer, step_size=1, gamma=0.5)
    for _ in range(3):
        train(model, optimizer, loader)
        for scheduler in both:
            scheduler.step()
    return finish(engine, model, optimizer)


@row
def grad_samples(kind: Any) -> Result:
    engine = kind(accountant="rdp")
    model, optimizer, loader = start(engine, make_model(), grad_sample_mode="hooks")
    norms = []
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        norms += [rows.flatten(1).norm(dim=1) for rows in optimizer.grad_samples]
        optimizer.step()
    weights, epsilon = finish(engine, model, optimizer)
    return torch.cat([weights, *norms]), epsilon


@row
def checkpoints(kind: Any) -> Result:
    """Each engine goes on from a checkpoint of Opacus."""
    file, engine = io.BytesIO(), opacus.PrivacyEngine(accountant="rdp")
    model, optimizer, loader = start(engine, make_model())
    train(model, optimizer, loader)
    engine.save_checkpoint(path=file, module=model, optimizer=optimizer)
    engine = kind(accountant="rdp")
    model, optimizer, loader = start(engine, make_model())
    file.seek(0)
    engine.load_checkpoint(path=file, module=model, optimizer=optimizer)
    train(model, optimizer, loader)
    return finish(engine, model, optimizer)


# ---- models as people write them ----


@row
def submodules(kind: Any) -> Result:
    return run(kind, compute=lambda model, x: model._module[2](model._module[1](model._module[0](x))))


class Recurrent(nn.Module):
    def __init__(self, kind: Any = nn.LSTM) -> None:
        super().__init__()
        self.recurrent = kind(6, 5, num_layers=2, batch_first=True)
        self.norm = nn.BatchNorm1d(5)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> Tensor:
        return self.head(self.norm(self.recurrent(x, (h.transpose(0, 1), c.transpose(0, 1)))[0][:, -1]))


@row
def validator(kind: Any) -> Result:
    """LSTM and BatchNorm, replaced by `ModuleValidator.fix`. The state has the shape (layers, batch, features)."""
    torch.manual_seed(0)
    model = ModuleValidator.fix(Recurrent())
    generator = torch.Generator().manual_seed(1)
    sizes = [(24, 4, 6), (24, 2, 5), (24, 2, 5)]
    tensors = [torch.randn(size, generator=generator) for size in sizes]
    data = TensorDataset(*tensors, torch.randint(3, (24,), generator=generator))
    return run(kind, model=model, loader=DataLoader(data, batch_size=6))


@row
def lora(kind: Any) -> Result:
    """A language model with adapters of peft."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=13, num_key_value_heads=2, max_position_embeddings=16, **sizes)
    adapters = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["v_proj"], init_lora_weights=False)
    model = get_peft_model(LlamaForCausalLM(config), adapters)
    tokens = torch.randint(13, (12, 6), generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(tokens, tokens[:, -1]), batch_size=4)
    return run(kind, model=model, loader=loader, compute=lambda model, x: model(input_ids=x).logits[:, -1])


def compare(name: str) -> bool:
    """Run a row with both engines, print the differences, and return whether there are none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (ours, epsilon), (theirs, expected) = ROWS[name](PrivacyEngine), ROWS[name](opacus.PrivacyEngine)
    difference = float((ours - theirs).abs().max())
    is_equal = difference <= TOLERANCE and epsilon == expected
    print(
        f"{name:17} epsilon {epsilon:.6f} and {expected:.6f}, weights differ by {difference:.1e}"
        f"{'' if is_equal else '  DIFFERENT'}"
    )
    return is_equal


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Opacus and persample side by side.")
    parser.add_argument("rows", nargs="*", metavar="row", help=f"any of: {', '.join(ROWS)}; default: all")
    names = parser.parse_args(arguments).rows
    if unknown := [name for name in names if name not in ROWS]:
        parser.error(f"unknown rows: {', '.join(unknown)}")
    return 0 if all([compare(name) for name in names or ROWS]) else 1


if __name__ == "__main__":
    sys.exit(main())
