"""Fine-tune a language model on prompts and answers with PrivateTrainer; each step is checked as a whole.

python examples/cookbook/private_sft.py
"""

import tempfile
import warnings

import torch
import torch.nn.functional as F
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

from persample.private.huggingface import PrivateTrainer

WORDS, PROMPT, ANSWER, DELTA = 20, 4, 6, 1e-5


def make_example() -> dict[str, torch.Tensor]:
    """A prompt that counts up, and an answer that counts down from its last word. Labels of the prompt are ignored."""
    start = torch.randint(WORDS, ())
    prompt = (start + torch.arange(PROMPT)) % WORDS
    answer = (prompt[-1] - 1 - torch.arange(ANSWER)) % WORDS
    ids = torch.cat([prompt, answer])
    return {"input_ids": ids, "labels": torch.where(torch.arange(len(ids)) < PROMPT, -100, ids)}


def losses_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The mean loss of each answer, over its own words."""
    logits, labels = model(input_ids=batch["input_ids"]).logits[:, :-1], batch["labels"][:, 1:]
    losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none", ignore_index=-100)
    return losses.sum(1) / (labels != -100).sum(1).clamp(min=1)


def main() -> None:
    warnings.filterwarnings("ignore")  # of Opacus
    torch.manual_seed(0)
    sizes = {"n_positions": PROMPT + ANSWER, "n_embd": 32, "n_layer": 2, "n_head": 2}
    config = GPT2Config(vocab_size=WORDS, bos_token_id=None, eos_token_id=None, **sizes)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    data = [make_example() for _ in range(1000)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, per_device_train_batch_size=100, num_train_epochs=5, learning_rate=1e-2, use_cpu=True,
            lr_scheduler_type="constant", logging_steps=10, save_strategy="no", report_to=[], disable_tqdm=True,
        )  # fmt: skip
        trainer = PrivateTrainer(
            model=GPT2LMHeadModel(config), args=arguments, train_dataset=data, losses=losses_of,
            target_epsilon=8.0, target_delta=DELTA, max_grad_norm=1.0,
        )  # fmt: skip
        trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    print(f"loss {logged[0]['loss']:.2f}, after training {logged[-1]['loss']:.2f}; epsilon {logged[-1]['epsilon']:.2f}")


if __name__ == "__main__":
    main()
