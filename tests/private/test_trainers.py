"""Private training with the Trainer of Hugging Face and with Lightning."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel, TrainingArguments

from persample import PerSampleError, SamplesMixed
from persample.private import PrivacyEngine, PrivateOptimizer
from persample.private.huggingface import PrivateTrainer, mean_of_sequences
from persample.private.lightning import PrivateTraining, poisson

pytestmark = pytest.mark.filterwarnings("ignore")


# ---- Hugging Face ----


class Texts(Dataset[dict[str, Tensor]]):
    """Random token ids. Sequences have the given lengths in turn and are padded at the end."""

    def __init__(self, causal: bool, lengths: tuple[int, ...] = (6,)) -> None:
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(1, 20, (24, 6), generator=generator)
        self.lengths = [lengths[i % len(lengths)] for i in range(len(self.ids))]
        self.causal = causal

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        there = torch.arange(6) < self.lengths[i]
        labels = torch.where(there, self.ids[i], -100) if self.causal else self.ids[i].sum() % 2
        return {"input_ids": self.ids[i] * there, "attention_mask": there.long(), "labels": labels}


def make_classifier() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    return BertForSequenceClassification(BertConfig(vocab_size=20, max_position_embeddings=8, **sizes))


def make_writer() -> nn.Module:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=20, n_positions=8, n_embd=8, n_layer=1, n_head=2))


def make_trainer(path: Path, model: nn.Module, data: Any, args: dict[str, Any] | None = None, **kwargs: Any) -> Any:
    settings = {
        "per_device_train_batch_size": 4, "num_train_epochs": 2, "report_to": [], "use_cpu": True, "logging_steps": 1,
        "save_strategy": "no", "disable_tqdm": True, **(args or {}),
    }  # fmt: skip
    noise = {} if "target_epsilon" in kwargs else {"noise_multiplier": 1.0}
    arguments = TrainingArguments(str(path), **settings)  # type: ignore[arg-type]
    return PrivateTrainer(model=model, args=arguments, train_dataset=data, target_delta=1e-3, **noise, **kwargs)


@pytest.mark.parametrize("make, data, options", [
    (make_classifier, Texts(causal=False), {}),
    (make_classifier, Texts(causal=False, lengths=(6, 3)), {"private": {"passes": 2}}),
    (make_writer, Texts(causal=True), {}),
    (make_writer, Texts(causal=True, lengths=(6, 3)), {"compute_loss_func": mean_of_sequences}),
])  # fmt: skip
def test_trainer(make: Callable[[], nn.Module], data: Texts, options: dict[str, Any], tmp_path: Path) -> None:
    model = make()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer = make_trainer(tmp_path, model, data, **options)
    trainer.train()
    history = trainer.engine.accountant.history
    assert sum(steps for _, _, steps in history) == 12 and history[0][1] == pytest.approx(1 / 6)
    assert all(not torch.equal(p, before[name]) for name, p in model.named_parameters())
    epsilons = [entry["epsilon"] for entry in trainer.state.log_history if "epsilon" in entry]
    assert epsilons == sorted(epsilons) and epsilons[-1] > 0
    trainer.save_model()
    again = type(model).from_pretrained(tmp_path)  # type: ignore[attr-defined]
    assert all(torch.equal(p, again.state_dict()[name]) for name, p in model.state_dict().items())


def test_step_of_the_trainer(tmp_path: Path) -> None:
    """Without noise, a step is the sum of clipped rows over the expected batch size. The Trainer does not clip."""
    model, data = make_classifier().eval(), Texts(causal=False)
    inputs = torch.utils.data.default_collate([data[i] for i in range(3)])
    rows = []
    for i in range(3):
        loss = model(**{name: value[i : i + 1] for name, value in inputs.items()}).loss
        rows.append(torch.cat([part.flatten() for part in torch.autograd.grad(loss, list(model.parameters()))]))
    norms = torch.stack([row.norm() for row in rows])
    trainer = make_trainer(tmp_path, model, data, max_grad_norm=0.05, args={"max_grad_norm": 1e-6})
    assert trainer.args.max_grad_norm == 0
    optimizer = trainer.create_optimizer()
    optimizer.noise_multiplier = 0.0
    model(**inputs).loss.backward()
    optimizer.step()
    found = torch.cat([p.grad.flatten() for p in model.parameters()])  # type: ignore[union-attr]
    torch.testing.assert_close(found, (0.05 / norms).clamp(max=1) @ torch.stack(rows) / 4, rtol=1e-4, atol=1e-7)
    optimizer.release()


def test_empty_batches_of_the_trainer(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, make_writer(), Texts(causal=True), args={"per_device_train_batch_size": 1})
    trainer.train()
    assert sum(steps for _, _, steps in trainer.engine.accountant.history) == 48


def test_target_epsilon_of_the_trainer(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, make_classifier(), Texts(causal=False), target_epsilon=5.0)
    trainer.train()
    assert trainer.engine.get_epsilon(1e-3) == pytest.approx(5.0, rel=0.1)


@pytest.mark.parametrize("args, kwargs, message", [
    ({"gradient_accumulation_steps": 2}, {}, "adds up independent Poisson samples"),
    ({}, {"target_epsilon": 1.0, "noise_multiplier": 1.0}, "either noise_multiplier or target_epsilon"),
])  # fmt: skip
def test_trainer_refuses(args: Any, kwargs: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(PerSampleError, match=message):
        make_trainer(tmp_path, make_classifier(), Texts(causal=False), args=args, **kwargs)


def test_loss_over_all_tokens_is_refused(tmp_path: Path) -> None:
    """If sequences differ in length, the weight of a token would depend on the other samples."""
    trainer = make_trainer(tmp_path, make_writer(), Texts(causal=True, lengths=(6, 3)))
    with pytest.raises(SamplesMixed, match="is a mean over"):
        trainer.train()
    trainer.model(
        **torch.utils.data.default_collate([trainer.train_dataset[0]])
    ).loss.backward()  # the model trains without privacy again


def test_resumed_trainer_continues_the_accounting(tmp_path: Path) -> None:
    data, args = Texts(causal=False), {"save_strategy": "epoch"}
    make_trainer(tmp_path, make_classifier(), data, args={**args, "num_train_epochs": 1}).train()
    again = make_trainer(tmp_path, make_classifier(), data, args=args)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == sum(steps for _, _, steps in again.engine.accountant.history) == 12
    (tmp_path / "checkpoint-6" / "privacy_accountant.pt").unlink()
    with pytest.raises(PerSampleError, match="the privacy budget spent so far is unknown"):
        make_trainer(tmp_path, make_classifier(), data).train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))


# ---- Lightning ----


class Digits(pl.LightningModule):
    def __init__(self, own_call: bool = True) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
        self.own_call = own_call

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, index: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self(x) if self.own_call else self.net(x), y)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


def make_loader() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(24, 6, generator=generator), torch.randint(3, (24,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=4)


def run_fit(path: Path, module: pl.LightningModule, callback: PrivateTraining, data: Any, **options: Any) -> pl.Trainer:
    trainer = pl.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=path, callbacks=[callback], **{"max_epochs": 2, **options},
    )  # fmt: skip
    trainer.fit(module, data)
    return trainer


@pytest.mark.parametrize("own_call", [True, False])
def test_lightning(own_call: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = Digits(own_call)
    before = module.net[0].weight.detach().clone()
    callback = PrivateTraining(noise_multiplier=1.0, target_delta=1e-3, module=None if own_call else "net")
    trainer = run_fit(tmp_path, module, callback, poisson(make_loader()))
    assert sum(steps for _, _, steps in callback.engine.accountant.history) == 12
    assert not torch.equal(before, module.net[0].weight)
    assert trainer.callback_metrics["epsilon"] > 0
    assert not isinstance(trainer.optimizers[0], PrivateOptimizer)
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.025
    module(torch.randn(2, 6)).sum().backward()  # the model trains without privacy again


def test_target_epsilon_of_lightning(tmp_path: Path) -> None:
    callback = PrivateTraining(target_epsilon=5.0, target_delta=1e-3, engine=PrivacyEngine(accountant="rdp"))
    run_fit(tmp_path, Digits(), callback, poisson(make_loader()))
    assert callback.engine.get_epsilon(1e-3) == pytest.approx(5.0, rel=0.1)


@pytest.mark.parametrize("data, options, message", [
    (make_loader(), {}, "poisson\\(loader\\)"),
    (poisson(make_loader()), {"accumulate_grad_batches": 2}, "adds up independent Poisson samples"),
    (poisson(make_loader()), {"gradient_clip_val": 1.0}, "clips the sum of the gradients"),
])  # fmt: skip
def test_lightning_refuses(data: Any, options: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(PerSampleError, match=message):
        run_fit(tmp_path, Digits(), PrivateTraining(noise_multiplier=1.0), data, **options)
    with pytest.raises(PerSampleError, match="either noise_multiplier or target_epsilon"):
        PrivateTraining()


def test_submodule_called_directly_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PerSampleError, match="a submodule or forward\\(\\) called directly"):
        run_fit(tmp_path, Digits(own_call=False), PrivateTraining(noise_multiplier=1.0), poisson(make_loader()))


def test_resumed_lightning_continues_the_accounting(tmp_path: Path) -> None:
    first = run_fit(tmp_path, Digits(), PrivateTraining(noise_multiplier=1.0), poisson(make_loader()))
    first.save_checkpoint(tmp_path / "last.ckpt")
    callback = PrivateTraining(noise_multiplier=1.0)
    numbers = torch.get_rng_state()
    torch.manual_seed(0)  # as scripts do at their start
    seen: list[Tensor] = []

    class StateRecorder(pl.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            seen.append(torch.get_rng_state())

    trainer = pl.Trainer(
        max_epochs=3, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[callback, StateRecorder()],
    )  # fmt: skip
    trainer.fit(Digits(), poisson(make_loader()), ckpt_path=tmp_path / "last.ckpt", weights_only=False)
    assert trainer.global_step == sum(steps for _, _, steps in callback.engine.accountant.history) == 18
    assert torch.equal(seen[0], numbers)


def test_target_epsilon_requires_a_number_of_epochs(tmp_path: Path) -> None:
    """Without it, almost no noise would reach the target."""
    with pytest.raises(PerSampleError, match="epochs must be positive"):
        run_fit(tmp_path, Digits(), PrivateTraining(target_epsilon=5.0), poisson(make_loader()), max_epochs=-1)
