"""Train a tiny classifier privately with the Trainer of Hugging Face, on random text without a download.

Run it with: python examples/private_trainer.py
"""

from __future__ import annotations

import tempfile
import warnings

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments

from persample.private.huggingface import PrivateTrainer


class Reviews(Dataset[dict[str, Tensor]]):
    """Random word ids. The label is 1 if most words are positive (ids 1 to 9) and not negative (ids 10 to 19)."""

    def __init__(self, count: int, seed: int) -> None:
        self.ids = torch.randint(1, 20, (count, 12), generator=torch.Generator().manual_seed(seed))
        self.labels = ((self.ids < 10).sum(1) > 6).long()

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[i], "labels": self.labels[i]}


def main() -> None:
    warnings.filterwarnings("ignore", message="Secure RNG turned off")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    model = BertForSequenceClassification(BertConfig(vocab_size=20, max_position_embeddings=16, **sizes))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, per_device_train_batch_size=128, num_train_epochs=6, learning_rate=2e-3, logging_steps=32,
            save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
        )  # fmt: skip
        trainer = PrivateTrainer(
            model=model, args=arguments, train_dataset=Reviews(4000, seed=1),
            target_epsilon=4.0, target_delta=1e-5, max_grad_norm=0.5,
        )  # fmt: skip
        trainer.train()
    test = Reviews(1000, seed=2)
    with torch.no_grad():
        accuracy = (model.eval()(input_ids=test.ids).logits.argmax(1) == test.labels).float().mean()
    print(f"accuracy {accuracy:.1%} at epsilon {trainer.budget.spent(trainer.engine):.2f}, delta 1e-05")


if __name__ == "__main__":
    main()
