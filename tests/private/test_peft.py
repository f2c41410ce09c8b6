"""Models of peft: adapters and prompts on a small language model, in recordings, scans and private training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

from persample import record, scan
from persample.private import PrivacyEngine

pytestmark = pytest.mark.filterwarnings("ignore")

CONFIGS: dict[str, Any] = {
    "LoRA": lambda: peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj", "v_proj", "down_proj"]),
    "DoRA": lambda: peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj", "v_proj"], use_dora=True),
    "IA3": lambda: peft.IA3Config(
        task_type="CAUSAL_LM", target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]
    ),
    "prefix tuning": lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "prompt tuning": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
}


def make_model(name: str) -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=13, hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=16, attn_implementation="eager",
    )  # fmt: skip
    model = peft.get_peft_model(LlamaForCausalLM(config), CONFIGS[name]())
    for p in model.parameters():  # adapters start with zeros and ones
        if p.requires_grad:
            p.data += 0.1 * torch.randn_like(p)
    return model.double()


def make_tokens(batch: int = 5) -> Tensor:
    return torch.randint(13, (batch, 6), generator=torch.Generator().manual_seed(1))


def compute_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(input_ids=tokens).logits[:, -tokens.shape[1] :]
    losses = F.cross_entropy(logits[:, :-1].transpose(1, 2), tokens[:, 1:], reduction="none")
    return losses.mean(1).mean()


def get_trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def compute_rows(model: nn.Module, tokens: Tensor) -> Tensor:
    rows = []
    for sample in tokens:
        grads = torch.autograd.grad(compute_loss(model, sample[None]), get_trainable(model))
        rows.append(torch.cat([grad.flatten() for grad in grads]))
    return torch.stack(rows)


@pytest.mark.parametrize("name", CONFIGS)
def test_recorded_rows_equal_a_loop(name: str) -> None:
    model, tokens = make_model(name), make_tokens()
    expected = compute_rows(model, tokens)
    with record(model) as grads:
        compute_loss(model, tokens).backward()
    found = torch.cat([rows.flatten(1) for rows in grads.dense().values()], 1)
    torch.testing.assert_close(found, expected)
    assert (expected[0] - expected[1]).norm() > 1e-3 * expected[0].norm() > 0


@pytest.mark.parametrize("name", CONFIGS)
def test_private_steps_equal_a_loop(name: str) -> None:
    model = make_model(name)
    tokens = make_tokens(8)
    optimizer = torch.optim.SGD(get_trainable(model), lr=0.5)
    expected = [p.detach().clone() for p in get_trainable(model)]
    rows = compute_rows(model, tokens[:4])
    total = (0.05 / rows.norm(dim=1)).clamp(max=1) @ rows
    model, private, loader = PrivacyEngine().make_private(
        module=model, optimizer=optimizer, data_loader=DataLoader(TensorDataset(tokens), batch_size=4),
        noise_multiplier=0.0, max_grad_norm=0.05, poisson_sampling=False,
    )  # fmt: skip
    for (batch,) in loader:
        private.zero_grad()
        compute_loss(model, batch).backward()
        private.step()
        if expected:
            found = torch.cat([p.detach().flatten() for p in get_trainable(model)])
            before = torch.cat([p.flatten() for p in expected])
            torch.testing.assert_close(found, before - 0.5 * total / 4)
            expected = []
    private.release()


@pytest.mark.parametrize("name", ["LoRA", "prompt tuning"])
def test_scan(name: str, tmp_path: Path) -> None:
    model, tokens = make_model(name).float(), make_tokens(8)

    def compute_scanned_loss(model: nn.Module, batch: Any) -> Tensor:
        return compute_loss(model, batch[0])

    found = scan(model, compute_scanned_loss, TensorDataset(tokens), out=tmp_path / "scan")
    expected = compute_rows(model, tokens).norm(dim=1)
    norms = torch.tensor(found.table()["norm"].to_pylist())
    torch.testing.assert_close(norms, expected, rtol=1e-3, atol=1e-6)
