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
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_pt_utils import LabelSmoother

from persample import PerSampleError, SamplesMixed
from persample.private import PrivacyEngine, PrivateOptimizer
from persample.private.huggingface import PrivateTrainer, SampleLabelSmoother, mean_of_sequences
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


def make_classifier(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    return BertForSequenceClassification(BertConfig(vocab_size=20, max_position_embeddings=8, **sizes, **options))


def make_writer(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=20, n_positions=8, n_embd=8, n_layer=1, n_head=2, **options))


def make_classifier_without_dropout() -> nn.Module:
    return make_classifier(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)


def make_writer_without_dropout() -> nn.Module:
    return make_writer(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)


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


def losses_of_classes(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
    return F.cross_entropy(logits, inputs["labels"], reduction="none")


def mix_losses(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    losses = losses_of_classes(model, inputs)
    return losses * (5 - losses.max().item())


def test_a_trainer_that_takes_steps(tmp_path: Path) -> None:
    """With `losses=`, the steps are those of the Trainer's own loss; losses that mix samples are refused."""
    weights = []
    for options in ({}, {"losses": losses_of_classes}):
        model = make_classifier_without_dropout()
        args = {"data_seed": 3, "max_steps": 3}
        private = {"noise_generator": torch.Generator().manual_seed(1)}
        data = Texts(causal=False, lengths=(6, 3))
        make_trainer(tmp_path, model, data, args, max_grad_norm=0.1, private=private, **options).train()
        weights.append([p.detach().clone() for p in model.parameters()])
    torch.testing.assert_close(*weights)
    trainer = make_trainer(tmp_path, make_classifier_without_dropout(), Texts(causal=False), losses=mix_losses)
    with pytest.raises(SamplesMixed):
        trainer.train()
    with pytest.raises(PerSampleError, match="gradient_accumulation_steps=1"):
        args = {"gradient_accumulation_steps": 2}
        make_trainer(tmp_path, make_classifier(), Texts(causal=False), args, losses=losses_of_classes)


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
    ({"fp16": True}, {}, "scales the loss"),
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


class Evil:
    """Creates a file when it is read by pickle."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_resumed_trainer_continues_the_accounting(tmp_path: Path) -> None:
    data, args = Texts(causal=False), {"save_strategy": "epoch"}
    make_trainer(tmp_path, make_classifier(), data, args={**args, "num_train_epochs": 1}).train()
    again = make_trainer(tmp_path, make_classifier(), data, args=args)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == sum(steps for _, _, steps in again.engine.accountant.history) == 12
    file = tmp_path / "checkpoint-6" / "privacy_accountant.pt"
    torch.save({"history": Evil(tmp_path / "ran"), "mechanism": "prv"}, file)
    with pytest.raises(PerSampleError, match="can run code"):
        make_trainer(tmp_path, make_classifier(), data).train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert not (tmp_path / "ran").exists()
    file.unlink()
    with pytest.raises(PerSampleError, match="the privacy budget spent so far is unknown"):
        make_trainer(tmp_path, make_classifier(), data).train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))


# ---- the budget of the Trainer ----


def count_steps(engine: PrivacyEngine) -> int:
    return sum(steps for _, _, steps in engine.accountant.history)


@pytest.mark.parametrize("accountant", ["rdp", "prv"])
@pytest.mark.parametrize("args, steps", [
    ({"max_steps": 3}, 3),
    ({"max_steps": 7}, 7),
    ({"num_train_epochs": 2.5}, 13),
    ({"num_train_epochs": 0.3}, 2),
    ({"num_train_epochs": 2, "dataloader_drop_last": True}, 8),
])  # fmt: skip
def test_trainer_stays_within_the_target(args: Any, steps: int, accountant: str, tmp_path: Path) -> None:
    """24 samples in batches of 5: 5 batches, or 4 without the last one."""
    args = {"per_device_train_batch_size": 5, **args}
    engine = PrivacyEngine(accountant=accountant)
    trainer = make_trainer(
        tmp_path, make_classifier(), Texts(causal=False), args=args, target_epsilon=3.0, engine=engine
    )
    trainer.train()
    assert count_steps(engine) == steps
    assert 2.9 < engine.get_epsilon(1e-3) <= 3.0


def test_several_trainings_stay_within_the_target(tmp_path: Path) -> None:
    engine = PrivacyEngine(accountant="rdp")
    first = make_trainer(tmp_path, make_classifier(), Texts(causal=False), target_epsilon=2.0, engine=engine)
    first.train()
    with pytest.raises(PerSampleError, match="The privacy budget is spent"):
        first.train()
    assert count_steps(engine) == 12 and 1.9 < engine.get_epsilon(1e-3) <= 2.0
    second = make_trainer(tmp_path, make_classifier(), Texts(causal=False), target_epsilon=4.0, engine=engine)
    second.train()
    assert count_steps(engine) == 24 and 3.9 < engine.get_epsilon(1e-3) <= 4.0


@pytest.mark.parametrize("accountant", ["rdp", "gdp"])
def test_resumed_trainer_stays_within_the_target(accountant: str, tmp_path: Path) -> None:
    data, args = Texts(causal=False), {"save_strategy": "steps", "save_steps": 5, "max_steps": 9}
    options = {"target_epsilon": 3.0}
    engine = PrivacyEngine(accountant=accountant)
    whole = make_trainer(tmp_path, make_classifier(), data, args=args, engine=engine, **options)
    whole.train()
    engine = PrivacyEngine(accountant=accountant)
    resumed = make_trainer(tmp_path, make_classifier(), data, args=args, engine=engine, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    assert engine.accountant.history == whole.engine.accountant.history  # with the same noise
    assert engine.get_epsilon(1e-3) <= 3.0


# ---- the noise of the Trainer ----


def train_weights(path: Path, resume: Any = None, **args: Any) -> Tensor:
    """Weights after a training with a learning rate so high that they are mostly noise."""
    model = make_classifier()
    args = {"learning_rate": 1.0, "optim": "sgd", "max_steps": 4, "lr_scheduler_type": "constant", **args}
    make_trainer(path, model, Texts(causal=False), args=args, max_grad_norm=1.0).train(resume_from_checkpoint=resume)
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_noise_of_the_trainer_does_not_follow_its_seed(tmp_path: Path) -> None:
    start = torch.cat([p.detach().flatten() for p in make_classifier().parameters()])
    moves = torch.stack([train_weights(tmp_path / str(i)) - start for i in range(2)])
    assert abs(torch.corrcoef(moves)[0, 1]) < 0.2


@pytest.mark.parametrize("data_seed", [None, 7])
def test_batches_of_the_trainer_do_not_follow_its_seed(data_seed: int | None, tmp_path: Path) -> None:
    """Everybody knows its default of 42. The accountant counts on batches that nobody knows."""
    drawn = []
    for i in range(2):
        trainer = make_trainer(tmp_path / str(i), make_classifier(), Texts(causal=False), args={"data_seed": data_seed})
        set_seed(42)
        drawn.append(list(trainer.get_train_dataloader().batch_sampler))
    assert (drawn[0] == drawn[1]) == (data_seed is not None)


@pytest.mark.parametrize("only_model", [False, True])
def test_noise_of_a_resumed_trainer(only_model: bool, tmp_path: Path) -> None:
    """It is new in each training, so that branches of one training never share it."""
    args = {"save_strategy": "steps", "save_steps": 2, "save_only_model": only_model}
    whole = train_weights(tmp_path, **args)
    folder = str(tmp_path / "checkpoint-2")
    others = [train_weights(tmp_path / f"new{i}", resume=folder) - whole for i in range(2)]
    assert abs(torch.corrcoef(torch.stack(others))[0, 1]) < 0.9


# ---- losses that depend on other samples ----


def divide_by_items(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """The loss of the Trainer's own models: a sum over the tokens, divided by the number of tokens in the batch."""
    reduction = "mean" if num_items_in_batch is None else "sum"
    logits, targets = outputs["logits"][:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    loss = F.cross_entropy(logits, targets, reduction=reduction)
    return loss if num_items_in_batch is None else loss / num_items_in_batch


LENGTHS = (6, 3, 2)


@pytest.mark.parametrize("make, data, options", [
    (make_writer, Texts(True, LENGTHS), {"compute_loss_func": divide_by_items}),
    (make_writer, Texts(True, LENGTHS), {}),
])  # fmt: skip
def test_losses_over_the_tokens_of_a_batch_are_refused(make: Any, data: Texts, options: Any, tmp_path: Path) -> None:
    with pytest.raises(PerSampleError):
        make_trainer(tmp_path, make(), data, **options).train()


@pytest.mark.parametrize("shape, shift", [((5, 4), False), ((5, 6, 4), True), ((5, 6, 4), False)])
def test_label_smoothing_equals_that_of_the_trainer(shape: tuple[int, ...], shift: bool) -> None:
    """If all samples have as many labels."""
    torch.manual_seed(0)
    outputs, labels = {"logits": torch.randn(shape)}, torch.randint(4, shape[:-1])
    if len(shape) > 2:
        labels[:, 3] = -100
    expected = LabelSmoother(0.2)(outputs, labels.clone(), shift_labels=shift)
    torch.testing.assert_close(SampleLabelSmoother(0.2)(outputs, labels, shift_labels=shift), expected)


@pytest.mark.parametrize("make, data, options", [
    (make_classifier_without_dropout, Texts(False), {"args": {"label_smoothing_factor": 0.1}}),
    (make_writer_without_dropout, Texts(True, LENGTHS), {"args": {"label_smoothing_factor": 0.1}}),
    (make_writer_without_dropout, Texts(True), {"compute_loss_func": divide_by_items}),
    (make_writer_without_dropout, Texts(True, LENGTHS), {"compute_loss_func": mean_of_sequences}),
])  # fmt: skip
def test_losses_are_bounded(make: Any, data: Texts, options: Any, tmp_path: Path) -> None:
    """If a sample is left out, the sum without noise changes by at most the bound."""
    bound, sums = 1e-3, []
    for rows in (range(4), range(3)):
        model = make()
        trainer = make_trainer(tmp_path, model, data, max_grad_norm=bound, **options)
        optimizer = trainer.create_optimizer()
        optimizer.noise_multiplier = 0.0
        inputs = torch.utils.data.default_collate([data[i] for i in rows])
        trainer.current_gradient_accumulation_steps = 1  # as in train()
        try:
            trainer.training_step(model, inputs, inputs["labels"].ne(-100).sum())
            optimizer.step()
        finally:
            optimizer.release()
        sums.append(4 * torch.cat([p.grad.flatten() for p in model.parameters()]))  # type: ignore[union-attr]
    change = float((sums[0] - sums[1]).norm())
    assert 0.5 * bound < change <= bound * (1 + 1e-3)


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
    callback = PrivateTraining(noise_multiplier=1.0, target_delta=1e-3)
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
    (poisson(make_loader()), {"accumulate_grad_batches": 2}, "poisson\\(loader, parts=2\\)"),
    (poisson(make_loader()), {"gradient_clip_val": 1.0}, "clips the sum of the gradients"),
])  # fmt: skip
def test_lightning_refuses(data: Any, options: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(PerSampleError, match=message):
        run_fit(tmp_path, Digits(), PrivateTraining(noise_multiplier=1.0), data, **options)
    with pytest.raises(PerSampleError, match="either noise_multiplier or target_epsilon"):
        PrivateTraining()


def test_resumed_lightning_continues_the_accounting(tmp_path: Path) -> None:
    before = PrivateTraining(noise_multiplier=1.0)
    first = run_fit(tmp_path, Digits(), before, poisson(make_loader()))
    first.save_checkpoint(tmp_path / "last.ckpt")
    callback = PrivateTraining(noise_multiplier=1.0)
    torch.manual_seed(0)  # as scripts do at their start
    seen: list[Tensor] = []

    class StateRecorder(pl.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            seen.append(trainer.optimizers[0].noise.get_state())

    trainer = pl.Trainer(
        max_epochs=3, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[callback, StateRecorder()],
    )  # fmt: skip
    trainer.fit(Digits(), poisson(make_loader()), ckpt_path=tmp_path / "last.ckpt", weights_only=False)
    assert trainer.global_step == sum(steps for _, _, steps in callback.engine.accountant.history) == 18
    assert not torch.equal(seen[0], before._optimizer.noise.get_state())


def test_target_epsilon_requires_a_number_of_epochs(tmp_path: Path) -> None:
    """Without it, almost no noise would reach the target."""
    with pytest.raises(PerSampleError, match="this Trainer has no end"):
        run_fit(tmp_path, Digits(), PrivateTraining(target_epsilon=5.0), poisson(make_loader()), max_epochs=-1)


# ---- the budget of Lightning ----


@pytest.mark.parametrize("options, epochs, steps", [
    ({"max_epochs": -1, "max_steps": 3}, None, 3),
    ({"max_epochs": 10, "max_steps": 7}, None, 7),
    ({"max_epochs": 3, "limit_train_batches": 4}, None, 12),
    ({"max_epochs": -1}, 2, 12),
    ({"max_epochs": 10}, 1.5, 9),
    ({"max_epochs": 2, "min_epochs": 2}, None, 12),
])  # fmt: skip
def test_lightning_stays_within_the_target(options: Any, epochs: Any, steps: int, tmp_path: Path) -> None:
    callback = PrivateTraining(
        target_epsilon=3.0, target_delta=1e-3, epochs=epochs, engine=PrivacyEngine(accountant="rdp")
    )
    run_fit(tmp_path, Digits(), callback, poisson(make_loader()), **options)
    assert count_steps(callback.engine) == steps
    assert 2.9 < callback.engine.get_epsilon(1e-3) <= 3.0


def test_several_fits_stay_within_the_target(tmp_path: Path) -> None:
    callback = PrivateTraining(target_epsilon=3.0, target_delta=1e-3, engine=PrivacyEngine(accountant="rdp"))
    run_fit(tmp_path, Digits(), callback, poisson(make_loader()))
    with pytest.raises(PerSampleError, match="The privacy budget is spent"):
        run_fit(tmp_path, Digits(), callback, poisson(make_loader()))
    assert count_steps(callback.engine) == 12 and callback.engine.get_epsilon(1e-3) <= 3.0


def test_resumed_lightning_stays_within_the_target(tmp_path: Path) -> None:
    callbacks = [
        PrivateTraining(target_epsilon=3.0, target_delta=1e-3, engine=PrivacyEngine(accountant="rdp")) for _ in range(2)
    ]
    saver = pl.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=5, save_top_k=-1, filename="{step}")
    quiet = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    pl.Trainer(max_epochs=2, callbacks=[callbacks[0], saver], **quiet).fit(Digits(), poisson(make_loader()))
    trainer = pl.Trainer(max_epochs=2, callbacks=[callbacks[1]], enable_checkpointing=False, **quiet)
    trainer.fit(Digits(), poisson(make_loader()), ckpt_path=tmp_path / "step=5.ckpt", weights_only=False)
    assert callbacks[0].engine.accountant.history == callbacks[1].engine.accountant.history
    assert callbacks[1].engine.get_epsilon(1e-3) <= 3.0


@pytest.mark.parametrize("other", [False, True])
def test_lightning_does_not_resume_without_the_accountant(other: bool, tmp_path: Path) -> None:
    """Neither from a training without privacy, nor from a checkpoint whose states of callbacks were removed."""
    quiet = {
        "accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False,
        "enable_checkpointing": False,
    }  # fmt: skip
    callback = PrivateTraining(noise_multiplier=1.0)
    first = pl.Trainer(max_epochs=1, callbacks=[callback] if other else [], **quiet)  # type: ignore[arg-type]
    first.fit(Digits(), poisson(make_loader()))
    path = tmp_path / "last.ckpt"
    first.save_checkpoint(path)
    if other:
        saved = torch.load(path, weights_only=False)
        del saved["callbacks"]
        torch.save(saved, path)
    callback = PrivateTraining(noise_multiplier=1.0)
    trainer = pl.Trainer(max_epochs=2, callbacks=[callback], **quiet)  # type: ignore[arg-type]
    with pytest.raises(PerSampleError, match="the privacy budget spent so far is unknown"):
        trainer.fit(Digits(), poisson(make_loader()), ckpt_path=path, weights_only=False)
    assert not callback.engine.accountant.history


class ByHand(Digits):
    """Manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()
        optimizer.zero_grad()  # type: ignore[union-attr]
        self.manual_backward(F.cross_entropy(self(batch[0]), batch[1]))
        self.clip_gradients(optimizer, gradient_clip_val=1e-9)  # type: ignore[arg-type]
        optimizer.step()  # type: ignore[union-attr]


def test_manual_optimization(tmp_path: Path) -> None:
    module, callback = ByHand(), PrivateTraining(noise_multiplier=1.0)
    before = module.net[0].weight.detach().clone()
    run_fit(tmp_path, module, callback, poisson(make_loader()))
    assert count_steps(callback.engine) == 12
    assert (module.net[0].weight - before).abs().min() > 1e-6  # noise, which the clipping by hand did not reach


class Masked(Digits):
    """A mean over the labels that are not ignored: their number depends on the whole batch."""

    def training_step(self, batch: Any, index: int) -> Tensor:
        x, y = batch
        mask = (y != 0).float()
        losses = F.cross_entropy(self(x), y, reduction="none")
        return (losses * mask).sum() / mask.sum().clamp(min=1)


def test_masked_means_in_lightning_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SamplesMixed):
        run_fit(tmp_path, Masked(), PrivateTraining(noise_multiplier=1.0), poisson(make_loader()))
