"""Monitor and values in the runs that people have: each setting is measured in every step, or the test says why not.

In each setting the sum of the values is compared with the first-order change of the validation loss.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import persample

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and peft

Loss = Callable[[Any, dict[str, Tensor]], Tensor]
VOCABULARY, LENGTH, SIZE = 20, 7, 5


def make_causal(**options: Any) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": VOCABULARY, "n_positions": 16}
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **options))


def make_masked() -> Any:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForMaskedLM(BertConfig(vocab_size=VOCABULARY, **sizes, **dropout))


def make_adapted() -> Any:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(make_causal(), LoraConfig(r=2, target_modules=["c_attn"], lora_dropout=0.0))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_()
    return model


def make_checkpointed() -> Any:
    model = make_causal()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def pad(seed: int) -> dict[str, Tensor]:
    """A batch as a collator pads it, with another number of targets in each row."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCABULARY, (SIZE, LENGTH), generator=generator)
    mask = torch.arange(LENGTH) < torch.randint(3, LENGTH + 1, (SIZE, 1), generator=generator)
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": ids.where(mask, -100)}


def mask_tokens(seed: int) -> dict[str, Tensor]:
    batch = pad(seed)
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.rand(SIZE, LENGTH, generator=generator) < 0.4
    chosen[:, 0] = True
    return {**batch, "labels": batch["input_ids"].where(chosen & batch["attention_mask"].bool(), -100)}


def pack(seed: int) -> dict[str, Tensor]:
    """Rows of two documents each, whose positions begin again; the first token of a document is no target."""
    ids = torch.randint(VOCABULARY, (SIZE, LENGTH), generator=torch.Generator().manual_seed(seed))
    positions = torch.cat([torch.arange(3), torch.arange(LENGTH - 3)]).expand(SIZE, LENGTH)
    return {"input_ids": ids, "position_ids": positions, "labels": ids.where(positions > 0, -100)}


def prepare_with_accelerate(model: Any) -> Any:
    from accelerate import Accelerator

    return Accelerator(cpu=True).prepare(model)


def compute_own(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch).loss


def count_items(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch, num_items_in_batch=torch.tensor(37)).loss


def smooth(model: Any, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
    targets = batch["labels"][:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), label_smoothing=0.1)


def cast(model: Any, batch: dict[str, Tensor]) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return model(**batch).loss


def compile_eagerly(model: Any) -> Any:
    return torch.compile(model, backend="eager")


# How the model is made, the batch, the loss, how many batches a step has, and the tolerance.
SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[int], dict[str, Tensor]], Loss, int, float]] = {
    "padded, own loss": (make_causal, pad, compute_own, 1, 1e-4),
    "masked language model": (make_masked, mask_tokens, compute_own, 1, 1e-4),
    "num_items_in_batch": (make_causal, pad, count_items, 1, 1e-4),
    "packed documents": (make_causal, pack, compute_own, 1, 1e-4),
    "accelerate": (lambda: prepare_with_accelerate(make_causal()), pad, compute_own, 1, 1e-4),
    "accumulation": (make_causal, pad, compute_own, 2, 1e-4),
    "label smoothing": (make_causal, pad, smooth, 1, 1e-4),
    "LoRA": (make_adapted, pad, compute_own, 1, 1e-4),
    "bf16 autocast": (make_causal, pad, cast, 1, 0.05),
    "checkpointing": (make_checkpointed, pad, compute_own, 1, 1e-4),
    "compiled": (lambda: compile_eagerly(make_causal()), pad, compute_own, 1, 1e-4),
}


# Settings of other tests: the test file, and what it finds for monitor and guards, `value` and `dynamics`.
ELSEWHERE = {
    "Hugging Face Trainer": ("test_callbacks.py", "yes, without resume", "yes, with resume", "yes, with resume"),
    "Lightning": ("test_callbacks.py", "yes, without checkpoints", "yes, with checkpoints", "yes, with checkpoints"),
    "private training": ("test_values.py", "norms and guards", "refused: it keeps no rows", "refused"),
    "DistributedDataParallel": ("../distributed/test_values.py", "yes", "yes", "not tested"),
    "FSDP2": ("../distributed/test_values.py", "yes", "refused", "not tested"),
    "TRL": ("", "not tested", "not tested", "not tested"),
}


def test_the_table_of_the_guide_is_that_of_the_tests() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "guides" / "in_run.md").read_text(encoding="utf-8")
    rows = [f"| {name} | yes | yes | classifiers only |" for name in SETTINGS]
    rows += [f"| {name} | {' | '.join(found)} |" for name, (_, *found) in ELSEWHERE.items()]
    assert "\n".join(rows) in guide
    assert all((Path(__file__).parent / file).exists() for file, *_ in ELSEWHERE.values())


@pytest.mark.parametrize("name", SETTINGS)
def test_each_step_is_measured(name: str) -> None:
    make, draw, compute_loss, batches, tolerance = SETTINGS[name]
    torch.manual_seed(0)
    model: nn.Module = make().train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    expected = 0.0
    values = persample.value(model, validation=lambda m: compute_loss(m, draw(99)), optimizer=optimizer)
    with values, persample.monitor(model, every=1) as watching:
        for t in range(2):
            optimizer.zero_grad()
            for k in range(batches):
                values.ids = [f"{t}/{k}/{n}" for n in range(SIZE)]
                (compute_loss(model, draw(10 * t + k)) / batches).backward()
            model.eval()
            loss = compute_loss(model, draw(99))
            gradients = torch.autograd.grad(loss, trained)
            model.train()
            change = sum(float((g.double() * p.grad.double()).sum()) for g, p in zip(gradients, trained, strict=True))
            expected += 0.1 * change
            optimizer.step()
    assert len(watching.history) == 2 * batches and len(values.totals()) == 2 * batches * SIZE
    assert not any(found.warnings for found in watching.history)
    assert sum(values.totals().values()) == pytest.approx(expected, rel=tolerance)
