"""The SFTTrainer of TRL with private training, where TRL is installed: it is not among the packages of the tests."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("trl")

from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from persample.private.huggingface import PrivateTrainer, mean_of_sequences
from tests.private.test_trainers import make_writer_without_dropout

pytestmark = pytest.mark.filterwarnings("ignore")


class PrivateSFTTrainer(PrivateTrainer, SFTTrainer):
    """The trainer of TRL with private training."""


def test_sft(tmp_path: Path) -> None:
    words = {f"w{i}": i for i in range(18)} | {"[EOS]": 18, "[PAD]": 19}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")), eos_token="[EOS]", pad_token="[PAD]"
    )
    data = Dataset.from_dict({"input_ids": [[1 + (i + j) % 17 for j in range(4 + i % 3)] for i in range(24)]})
    arguments = SFTConfig(
        str(tmp_path), per_device_train_batch_size=4, gradient_accumulation_steps=2, num_train_epochs=1, report_to=[],
        use_cpu=True, bf16=False, save_strategy="no", disable_tqdm=True, max_length=8, gradient_checkpointing=False,
    )  # fmt: skip
    trainer = PrivateSFTTrainer(
        model=make_writer_without_dropout(), args=arguments, train_dataset=data, processing_class=tokenizer,
        compute_loss_func=mean_of_sequences, noise_multiplier=1.0, max_grad_norm=0.1,
    )  # fmt: skip
    trainer.train()
    assert sum(steps for _, _, steps in trainer.engine.accountant.history) == trainer.state.global_step == 3
