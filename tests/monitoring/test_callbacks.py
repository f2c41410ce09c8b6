"""Values and dynamics in trainers: ids belong to their examples, checkpoints keep them, the training is as usual."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and Lightning

COUNT = 24


def make_language_trainer(folder: Path, **options: Any) -> Any:
    """Every third example has no target, so that its value is zero."""
    from datasets import Dataset
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    torch.manual_seed(0)
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 20, "n_positions": 8}
    model = GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
    ids = torch.randint(20, (COUNT, 6))
    labels = ids.clone()
    labels[::3] = -100
    data = Dataset.from_dict({"input_ids": ids.tolist(), "labels": labels.tolist(), "text": ["unused"] * COUNT})
    arguments = TrainingArguments(
        str(folder), per_device_train_batch_size=4, num_train_epochs=1, report_to=[], use_cpu=True, disable_tqdm=True,
        **{"save_strategy": "no", **options},
    )  # fmt: skip
    return Trainer(model=model, args=arguments, train_dataset=data.add_column("id", list(range(COUNT))))


@pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 2}, {"bf16": True}], ids=str)
def test_values_of_a_trainer_belong_to_their_examples(tmp_path: Path, options: dict[str, Any]) -> None:
    from persample.monitoring.huggingface import add_values

    plain, trainer = (make_language_trainer(tmp_path, **options) for _ in range(2))
    plain.train()
    batch = {name: torch.tensor(trainer.train_dataset[:4][name]) for name in ("input_ids", "labels")}
    callback = add_values(trainer, validation=batch)
    trainer.train()
    for one, other in zip(trainer.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3 if options.get("bf16") else 1e-5)
    totals = callback.steps.totals()
    assert {i for i, total in totals.items() if total == 0} == set(range(0, COUNT, 3))
    assert set(callback.steps.counts().values()) == {1} and len(totals) == COUNT


def test_a_trainer_resumes_the_values(tmp_path: Path) -> None:
    from persample.monitoring.huggingface import add_values

    whole, first, second = (
        make_language_trainer(tmp_path / name, save_strategy="steps", save_steps=3) for name in ("a", "b", "b")
    )
    found = []
    for trainer, resume in ((whole, None), (first, None), (second, str(tmp_path / "b/checkpoint-3"))):
        batch = {name: torch.tensor(trainer.train_dataset[1:3][name]) for name in ("input_ids", "labels")}
        callback = add_values(trainer, validation=batch)
        trainer.train(resume_from_checkpoint=resume)
        found.append(callback.steps.totals())
    assert found[2] == pytest.approx(found[0], rel=1e-4) and len(found[2]) == COUNT


def test_a_missing_column_is_named(tmp_path: Path) -> None:
    from persample import PerSampleError
    from persample.monitoring.huggingface import add_values

    trainer = make_language_trainer(tmp_path)
    add_values(trainer, validation={}, ids="number")
    with pytest.raises(PerSampleError, match="have no 'number'"):
        trainer.train()


class Texts(nn.Module):
    """A classifier as the Trainer takes it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(4, 3)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.net(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def test_dynamics_and_values_of_a_trainer(tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    from persample.monitoring.huggingface import add_dynamics, add_values

    x, y = torch.randn(COUNT, 4), torch.randint(3, (COUNT,))
    data = [{"x": x[i], "labels": int(y[i]), "id": i} for i in range(COUNT)]
    arguments = TrainingArguments(
        str(tmp_path), per_device_train_batch_size=4, num_train_epochs=3, report_to=[], use_cpu=True,
        disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    trainer = Trainer(model=Texts(), args=arguments, train_dataset=data)
    learnt, values = add_dynamics(trainer), add_values(trainer, validation={"x": x[:4], "labels": y[:4]})
    trainer.train()
    found = learnt.steps.write(tmp_path / "run")
    assert found.column("label").tolist() == y.tolist()
    assert set(values.steps.counts().values()) == {3} and bool(learnt.steps.columns()["coherence"].isfinite().all())


def make_module() -> Any:
    import lightning.pytorch as pl

    class Classifier(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Linear(4, 3)

        def training_step(self, batch: Any, index: int) -> Any:
            x, y, _ = batch
            logits = self.net(x)
            return {"loss": F.cross_entropy(logits, y), "logits": logits.detach(), "labels": y}

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.1)

    return Classifier()


def test_values_and_dynamics_of_lightning(tmp_path: Path) -> None:
    import lightning.pytorch as pl

    from persample.monitoring.lightning import DynamicsCallback, ValueCallback

    torch.manual_seed(1)
    x, y = torch.randn(COUNT, 4), torch.randint(3, (COUNT,))
    x[5] = 0.0
    loader = DataLoader(TensorDataset(x, y, torch.arange(COUNT)), batch_size=4, shuffle=True)

    def make_callbacks() -> list[Any]:
        values = ValueCallback(
            validation=lambda module: F.cross_entropy(module.net(x[:4]), y[:4]), ids=lambda batch: batch[2],
            parameters=["net.weight"],
        )  # fmt: skip
        return [values, DynamicsCallback(ids=lambda batch: batch[2])]

    options = {
        "logger": False, "enable_progress_bar": False, "accelerator": "cpu", "enable_model_summary": False,
        "default_root_dir": tmp_path, "enable_checkpointing": False,
    }  # fmt: skip
    callbacks = make_callbacks()
    trainer = pl.Trainer(max_epochs=2, callbacks=callbacks, **options)
    trainer.fit(make_module(), loader)
    totals = callbacks[0].steps.totals()
    assert len(totals) == COUNT and [i for i, total in totals.items() if total == 0] == [5]
    assert callbacks[1].steps.write(tmp_path / "run").column("label").tolist() == y.tolist()
    trainer.save_checkpoint(tmp_path / "two.ckpt")
    resumed = make_callbacks()
    pl.Trainer(max_epochs=3, callbacks=resumed, **options).fit(make_module(), loader, ckpt_path=tmp_path / "two.ckpt")
    assert set(resumed[0].steps.counts().values()) == {3}
