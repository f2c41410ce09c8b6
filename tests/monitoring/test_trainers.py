"""Callbacks of trainers measure what a plain loop with a monitor measures, and the figures reach the loggers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and Lightning


def make_trainer(folder: Path, is_ragged: bool = True, **options: Any) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    torch.manual_seed(0)
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 20, "n_positions": 8}
    model = GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
    ids = torch.randint(20, (24, 6))
    labels = torch.where(torch.arange(6) < torch.arange(24)[:, None] % 5 + 2, ids, -100) if is_ragged else ids
    data = [{"input_ids": one, "labels": label} for one, label in zip(ids, labels, strict=True)]
    arguments = TrainingArguments(
        str(folder), per_device_train_batch_size=4, num_train_epochs=1, report_to=[], use_cpu=True, save_strategy="no",
        disable_tqdm=True, logging_steps=100, **options,
    )  # fmt: skip
    return Trainer(model=model, args=arguments, train_dataset=data)


@pytest.mark.parametrize("is_ragged", [False, True])
@pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 2}], ids=str)
def test_the_trainer_logs_the_figures_and_trains_as_usual(
    tmp_path: Path, options: dict[str, Any], is_ragged: bool
) -> None:
    from persample.monitoring.huggingface import add_monitor

    plain, trainer = (make_trainer(tmp_path, is_ragged, **options) for _ in range(2))
    plain.train()
    callback = add_monitor(trainer, every=2, out=tmp_path / "run.jsonl")
    trainer.train()
    for one, other in zip(trainer.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    logged = [entry for entry in trainer.state.log_history if "gradients/norm_median" in entry]
    assert len(logged) == len(callback.monitor.history) == 3
    assert (tmp_path / "run.jsonl").read_text().count("\n") == 4


class Module:
    """Made when it is used, so that Lightning is imported in the tests only."""

    def __new__(cls, calls_submodule: bool) -> Any:
        import lightning.pytorch as pl

        class Classifier(pl.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                torch.manual_seed(0)
                self.net = nn.Linear(4, 3)

            def forward(self, x: Tensor) -> Tensor:
                return self.net(x)

            def training_step(self, batch: Any, index: int) -> Tensor:
                x, y = batch
                return F.cross_entropy((self.net if calls_submodule else self)(x), y)

            def configure_optimizers(self) -> Any:
                return torch.optim.SGD(self.parameters(), lr=0.1)

        return Classifier()


def fit(module: Any, *callbacks: Any) -> Any:
    import lightning.pytorch as pl

    torch.manual_seed(1)
    loader = DataLoader(TensorDataset(torch.randn(24, 4), torch.randint(3, (24,))), batch_size=4)
    trainer = pl.Trainer(
        max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False, accelerator="cpu",
        enable_model_summary=False, callbacks=list(callbacks),
    )  # fmt: skip
    trainer.fit(module, loader)
    return trainer


@pytest.mark.parametrize("name", ["", "net"])
def test_lightning_logs_the_figures_and_trains_as_usual(name: str) -> None:
    from persample.monitoring.lightning import MonitorCallback

    plain, module = Module(bool(name)), Module(bool(name))
    fit(plain)
    callback = MonitorCallback(every=2, module=name)
    trainer = fit(module, callback)
    for one, other in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other)
    assert callback.monitor is not None and [found.step for found in callback.monitor.history] == [0, 2, 4]
    assert "gradients/norm_median" in trainer.logged_metrics


def test_lightning_measures_a_module_whose_training_step_calls_a_submodule() -> None:
    from persample.monitoring.lightning import MonitorCallback

    plain, module = Module(calls_submodule=True), Module(calls_submodule=True)
    fit(plain)
    callback = MonitorCallback(every=2)
    fit(module, callback)
    for one, other in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other)
    assert callback.monitor is not None and [found.step for found in callback.monitor.history] == [0, 2, 4]
    assert not any(part._forward_pre_hooks for part in module.modules())


def test_lightning_says_if_no_step_was_measured() -> None:
    from persample.monitoring.lightning import MonitorCallback

    module = Module(calls_submodule=True)
    module.other = nn.Linear(2, 2)
    with pytest.warns(UserWarning, match="No step was measured"):
        fit(module, MonitorCallback(module="other"))


def test_a_model_that_cannot_be_measured_is_trained() -> None:
    from persample.monitoring.lightning import MonitorCallback

    modules = [Module(calls_submodule=False) for _ in range(2)]
    for module in modules:
        torch.manual_seed(0)
        module.net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    callback = MonitorCallback(every=2)
    fit(modules[0], callback)
    fit(modules[1])
    assert callback.monitor is not None and not callback.monitor.history and not modules[0]._forward_pre_hooks
    torch.testing.assert_close(modules[0].state_dict(), modules[1].state_dict())
