"""Losses of the post-training of language models, as in the guides of TRL."""

from __future__ import annotations

from typing import Any

import peft
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.everyday.hugging_face import ROUNDS, count_next, make, own_loss, padded, tokens
from tests.everyday.loop import MONITOR, PRIVATE, RECORD, SCAN, WATCH, Batch, Origin

guides = Origin("TRL guides")

gpt = make("GPT2LMHeadModel")


def prompted(size: int) -> dict[str, Tensor]:
    """Prompts and completions; only completions are targets."""
    batch = padded(size)
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    labels[torch.arange(7) < torch.tensor([2 + n % 2 for n in range(size)])[:, None]] = -100
    return {**batch, "labels": labels}


guides(
    "SFT, prompts masked by -100",
    gpt,
    prompted,
    count=count_next,
    tolerance=ROUNDS,
    front_ends=(RECORD, WATCH, MONITOR, PRIVATE, SCAN),
    refused={"private": "targets|mean over|average"},
)(own_loss)


def make_lora() -> nn.Module:
    config = peft.LoraConfig(r=2, lora_alpha=4, lora_dropout=0.0, target_modules=["q_proj", "v_proj"])
    return peft.get_peft_model(make("LlamaForCausalLM")(), config)  # type: ignore[return-value]


guides("SFT with LoRA", make_lora, prompted, count=count_next, tolerance=ROUNDS)(own_loss)


def packed(size: int) -> dict[str, Tensor]:
    """Rows that are filled with several texts each; positions start again with each text."""
    ids = tokens(size, 8)
    positions = torch.tensor([0, 1, 2, 0, 1, 2, 3, 4]).expand(size, -1).contiguous()
    return {"input_ids": ids, "position_ids": positions, "labels": ids.masked_fill(positions == 0, -100)}


guides(
    "SFT with packing, positions per text",
    make("LlamaForCausalLM"),
    packed,
    count=count_next,
    tolerance=ROUNDS,
    front_ends=(RECORD,),
)(own_loss)


def log_probs(logits: Tensor, labels: Tensor) -> Tensor:
    return logits[:, :-1].log_softmax(-1).gather(-1, labels[:, 1:, None]).squeeze(-1)


def pairs(size: int) -> dict[str, Tensor]:
    chosen, rejected = padded(size), padded(size)
    batch = {f"chosen_{k}": v for k, v in chosen.items()} | {f"rejected_{k}": v for k, v in rejected.items()}
    return {**batch, "ref_chosen": torch.randn(size), "ref_rejected": torch.randn(size)}


@guides(
    "DPO, chosen and rejected concatenated in one call",
    gpt,
    pairs,
    front_ends=(RECORD,),
    is_pair=True,
)
def dpo(model: nn.Module, batch: Batch) -> Tensor:
    ids = torch.cat([batch["chosen_input_ids"], batch["rejected_input_ids"]])
    mask = torch.cat([batch["chosen_attention_mask"], batch["rejected_attention_mask"]])
    logits = model(input_ids=ids, attention_mask=mask).logits
    logps = (log_probs(logits, ids) * mask[:, 1:]).sum(-1)
    chosen, rejected = logps.chunk(2)
    margin = (chosen - batch["ref_chosen"]) - (rejected - batch["ref_rejected"])
    return -F.logsigmoid(0.1 * margin).mean()


@guides("DPO, chosen and rejected in two calls", gpt, pairs, front_ends=(RECORD, MONITOR, PRIVATE))
def dpo_two_calls(model: nn.Module, batch: Batch) -> Tensor:
    found = []
    for kind in ("chosen", "rejected"):
        ids, mask = batch[f"{kind}_input_ids"], batch[f"{kind}_attention_mask"]
        logits = model(input_ids=ids, attention_mask=mask).logits
        found.append((log_probs(logits, ids) * mask[:, 1:]).sum(-1) - batch[f"ref_{kind}"])
    return -F.logsigmoid(0.1 * (found[0] - found[1])).mean()


@guides(
    "reward model, pairs in one call",
    make("GPT2ForSequenceClassification", num_labels=1),
    pairs,
    front_ends=(RECORD,),
    is_pair=True,
)
def reward(model: nn.Module, batch: Batch) -> Tensor:
    ids = torch.cat([batch["chosen_input_ids"], batch["rejected_input_ids"]])
    mask = torch.cat([batch["chosen_attention_mask"], batch["rejected_attention_mask"]])
    rewards_chosen, rewards_rejected = torch.chunk(model(input_ids=ids, attention_mask=mask).logits.squeeze(-1), 2)
    return -F.logsigmoid(rewards_chosen - rewards_rejected).mean()


def rollouts(size: int) -> dict[str, Tensor]:
    batch = padded(size)
    mask = batch["attention_mask"][:, 1:].clone()
    mask[:, 0] = 0
    old = -torch.rand(size, 6) - 3
    return {
        **{**batch, "completion_mask": mask, "old_logps": old, "ref_logps": old + 0.1},
        "advantages": torch.randn(size),
    }


def count_completion(batch: Batch) -> Tensor:
    return batch["completion_mask"].sum()  # type: ignore[no-any-return]


def compute_logps(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return log_probs(logits, batch["input_ids"])


def policy_losses(model: nn.Module, batch: Batch) -> Tensor:
    logps, advantages = compute_logps(model, batch), batch["advantages"].unsqueeze(1)
    ratio = torch.exp(logps - batch["old_logps"])
    loss = -torch.min(ratio * advantages, torch.clamp(ratio, 0.8, 1.2) * advantages)
    delta = batch["ref_logps"] - logps
    return loss + 0.04 * (torch.exp(delta) - delta - 1)


@guides("GRPO, token losses divided by the mask's sum, KL penalty", gpt, rollouts, count=count_completion)
def grpo(model: nn.Module, batch: Batch) -> Tensor:
    losses, mask = policy_losses(model, batch), batch["completion_mask"]
    return (losses * mask).sum() / mask.sum()


@guides("GRPO, mask's sum clamped to 1", gpt, rollouts, count=count_completion, front_ends=(RECORD,))
def grpo_clamped(model: nn.Module, batch: Batch) -> Tensor:
    losses, mask = policy_losses(model, batch), batch["completion_mask"]
    return (losses * mask).sum() / mask.sum().clamp(min=1.0)


@guides("GRPO, mean over the tokens of each completion", gpt, rollouts, front_ends=(RECORD, MONITOR, PRIVATE))
def grpo_per_sequence(model: nn.Module, batch: Batch) -> Tensor:
    losses, mask = policy_losses(model, batch), batch["completion_mask"]
    return ((losses * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()


@guides("Dr. GRPO, divided by batch size times maximal length", gpt, rollouts, front_ends=(RECORD, MONITOR))
def dr_grpo(model: nn.Module, batch: Batch) -> Tensor:
    losses, mask = policy_losses(model, batch), batch["completion_mask"]
    return (losses * mask).sum() / (losses.size(0) * 12)


class PolicyAndValue(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.policy, self.value = gpt(), nn.Linear(50, 1)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.policy(input_ids=input_ids, attention_mask=attention_mask).logits
        return logits, self.value(logits).squeeze(-1)


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    return (values * mask).sum() / mask.sum()


@guides("PPO, policy and value losses as masked means", PolicyAndValue, rollouts, count=count_completion)
def ppo(model: Any, batch: Batch) -> Tensor:
    mask, advantages = batch["completion_mask"], batch["advantages"].unsqueeze(1)
    logits, values = model(batch["input_ids"], batch["attention_mask"])
    logps, vpred = log_probs(logits, batch["input_ids"]), values[:, :-1]
    returns = advantages + 0.1 * batch["old_logps"]
    vf_loss = 0.5 * masked_mean(
        torch.max((vpred - returns).square(), (vpred.clamp(-0.2, 0.2) - returns).square()), mask
    )
    ratio = torch.exp(logps - batch["old_logps"])
    pg_loss = masked_mean(torch.max(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2)), mask)
    return pg_loss + 0.1 * vf_loss


@guides(
    "GKD, divergence from a teacher over the completion", gpt, rollouts, count=count_completion, front_ends=(RECORD,)
)
def divergence(model: nn.Module, batch: Batch) -> Tensor:
    mask = batch["completion_mask"].bool()
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
    teacher = (logits.detach() * 0.7 + 0.1).log_softmax(-1)
    jsd = F.kl_div(logits.log_softmax(-1), teacher, reduction="none", log_target=True).sum(-1)
    return jsd[mask].sum() / mask.sum()
