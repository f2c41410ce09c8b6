"""Steps of the trainers equal steps of a plain loop with `PrivacyEngine`, the same batches and the same noise."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from persample.private import PrivacyEngine
from persample.private.huggingface import PrivateTrainer, mean_of_sequences
from persample.private.lightning import PrivateTraining, poisson
from tests.private.test_trainers import (
    Digits,
    Texts,
    make_classifier_without_dropout,
    make_loader,
    make_writer_without_dropout,
)
from tests.support.processes import in_two_processes

pytestmark = pytest.mark.filterwarnings("ignore")

CASES: dict[str, dict[str, Any]] = {
    "classifier": {},
    "accumulation": {"gradient_accumulation_steps": 3},
    "max_steps": {"max_steps": 4, "gradient_accumulation_steps": 2},
    "label smoothing": {"label_smoothing_factor": 0.1, "gradient_accumulation_steps": 2},
    "writer": {"gradient_accumulation_steps": 2},
}


class Recorded(PrivateTrainer):
    """Keeps the batches of each step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.batches: list[list[dict[str, Tensor]]] = [[]]

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        self.batches[-1].append({name: value.clone() for name, value in inputs.items()})
        loss = super().training_step(model, inputs, *args, **kwargs)
        if len(self.batches[-1]) == self.args.gradient_accumulation_steps:
            self.batches.append([])
        return loss


@contextmanager
def join_processes() -> Iterator[None]:
    """Let accelerate see the processes of this test."""
    from accelerate.state import AcceleratorState, PartialState

    if not dist.is_initialized():
        yield
        return
    rank, count = str(dist.get_rank()), str(dist.get_world_size())
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    names |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}  # the group exists already
    before = dict(os.environ)
    os.environ.update(names)
    try:
        AcceleratorState._reset_state(reset_partial_state=True)
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        AcceleratorState._reset_state(reset_partial_state=True)
        PartialState._reset_state()


def gather_batches(steps: list[list[dict[str, Tensor]]]) -> list[dict[str, Tensor]]:
    """The samples of each step, of all parts and processes."""
    everywhere: list[Any] = [steps]
    if dist.is_initialized():
        everywhere = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, steps)
    found = []
    for same in zip(*everywhere, strict=True):
        parts = [part for own in same for part in own]
        found.append({name: torch.cat([part[name] for part in parts]) for name in parts[0]})
    return found


def train_plainly(
    data: Any, compute_loss: Any, model: nn.Module, batches: list[dict[str, Tensor]], size: int
) -> PrivacyEngine:
    engine = PrivacyEngine(accountant="rdp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, private, _ = engine.make_private(
        module=model, optimizer=optimizer, data_loader=DataLoader(data, batch_size=size), noise_multiplier=1.0,
        max_grad_norm=0.1, noise_generator=torch.Generator().manual_seed(3),
    )  # fmt: skip
    for inputs in batches:
        private.zero_grad()
        private.add_samples(inputs)
        if len(inputs["labels"]):
            compute_loss(model, inputs).backward()
        private.step()
    private.release()
    return engine


def check_trainer(case: str) -> None:
    options = dict(CASES[case])
    make = make_writer_without_dropout if case == "writer" else make_classifier_without_dropout
    kwargs: dict[str, Any] = {"compute_loss_func": mean_of_sequences} if case == "writer" else {}
    data = Texts(causal=case == "writer", lengths=(6, 3))
    with join_processes(), tempfile.TemporaryDirectory() as folder:
        from transformers import TrainingArguments

        arguments = TrainingArguments(
            folder, per_device_train_batch_size=2, num_train_epochs=1, report_to=[], use_cpu=True, save_strategy="no",
            disable_tqdm=True, lr_scheduler_type="constant", **options,
        )  # fmt: skip
        model = make()
        if dist.is_initialized() and dist.get_rank():  # the weights of the first process count
            nn.init.normal_(next(model.parameters()))
        trainer = Recorded(
            model=model, args=arguments, train_dataset=data, max_grad_norm=0.1, noise_multiplier=1.0,
            engine=PrivacyEngine(accountant="rdp"), private={"noise_generator": torch.Generator().manual_seed(3)},
            optimizers=(torch.optim.SGD(model.parameters(), lr=0.1), None), **kwargs,
        )  # fmt: skip
        trainer.train()
        processes = dist.get_world_size() if dist.is_initialized() else 1
        size = 2 * processes * options.get("gradient_accumulation_steps", 1)
        steps = options.get("max_steps", -(-24 // size))
        batches = gather_batches([step for step in trainer.batches if step])
        assert len(batches) == trainer.state.global_step == steps
        plain = make()
        engine = train_plainly(data, trainer.compute_loss, plain, batches, size)
        for (name, p), want in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p, want, rtol=0, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
        assert trainer.engine.get_epsilon(1e-3) == engine.get_epsilon(1e-3) > 0


@pytest.mark.parametrize("case", CASES)
def test_trainer_in_one_process(case: str) -> None:
    check_trainer(case)


@pytest.mark.parametrize("case", ["accumulation"])
@in_two_processes
def test_trainer_in_two_processes(case: str) -> None:
    check_trainer(case)


class RecordedDigits(Digits):
    """Keeps the batches of each step. Calls a submodule."""

    def __init__(self, parts: int) -> None:
        super().__init__(own_call=False)
        self.parts = parts
        self.batches: list[list[dict[str, Tensor]]] = [[]]

    def training_step(self, batch: Any, index: int) -> Tensor:
        self.batches[-1].append({"x": batch[0].clone(), "labels": batch[1].clone()})
        if len(self.batches[-1]) == self.parts:
            self.batches.append([])
        return super().training_step(batch, index)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def make_digits(parts: int) -> RecordedDigits:
    torch.manual_seed(0)
    return RecordedDigits(parts)


def check_lightning(parts: int) -> None:
    processes = dist.get_world_size() if dist.is_initialized() else 1
    callback = PrivateTraining(
        max_grad_norm=0.1, noise_multiplier=1.0, noise_generator=torch.Generator().manual_seed(3),
        engine=PrivacyEngine(accountant="rdp"),
    )  # fmt: skip
    distributed = {"strategy": "ddp", "devices": processes, "use_distributed_sampler": False} if processes > 1 else {}
    with join_processes(), tempfile.TemporaryDirectory() as folder:
        module = make_digits(parts)
        trainer = pl.Trainer(
            accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, default_root_dir=folder, callbacks=[callback], max_epochs=1,
            accumulate_grad_batches=parts, **distributed,
        )  # fmt: skip
        trainer.fit(module, poisson(make_loader(), parts))
        batches = gather_batches([step for step in module.batches if step])
    size = 4 * processes * parts
    assert len(batches) == trainer.global_step == 24 // size
    plain = make_digits(parts)
    engine = train_plainly(
        make_loader().dataset,
        lambda model, batch: nn.functional.cross_entropy(model.net(batch["x"]), batch["labels"]),
        plain,
        batches,
        size,
    )
    for p, want in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, want, rtol=0, atol=1e-5)
    assert callback.engine.get_epsilon(1e-3) == engine.get_epsilon(1e-3) > 0


@pytest.mark.parametrize("parts", [1, 2])
def test_lightning_in_one_process(parts: int) -> None:
    check_lightning(parts)


@pytest.mark.parametrize("parts", [3])
@in_two_processes
def test_lightning_in_two_processes(parts: int) -> None:
    check_lightning(parts)


def check_accelerate() -> None:
    from accelerate import Accelerator

    with join_processes():
        accelerator = Accelerator(cpu=True)
        model = accelerator.prepare_model(make_digits(1).net)
        engine = PrivacyEngine(accountant="rdp")
        model, optimizer, loader = engine.make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), data_loader=make_loader(),
            noise_multiplier=1.0, max_grad_norm=0.1, noise_generator=torch.Generator().manual_seed(3),
        )  # fmt: skip
        optimizer = accelerator.prepare_optimizer(optimizer)
        steps = []
        for x, y in loader:
            steps.append([{"x": x, "labels": y}])
            optimizer.zero_grad()
            accelerator.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
        batches = gather_batches(steps)
    plain = make_digits(1).net
    again = train_plainly(
        make_loader().dataset,
        lambda model, batch: nn.functional.cross_entropy(model(batch["x"]), batch["labels"]),
        plain,
        batches,
        size=4,  # the loader is that of all processes together
    )
    for p, want in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, want, rtol=0, atol=1e-5)
    assert engine.get_epsilon(1e-3) == again.get_epsilon(1e-3) > 0


def test_accelerate_in_one_process() -> None:
    check_accelerate()


@in_two_processes
def test_accelerate_in_two_processes() -> None:
    check_accelerate()
