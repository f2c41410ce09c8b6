"""Train LoRA adapters of a causal language model with differential privacy for each document.

python examples/cookbook/private_lora.py
"""

import warnings

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

from persample.private import PrivacyEngine
from persample.private.huggingface import mean_of_sequences

WORDS, LENGTH, DELTA = 20, 12, 1e-5


def make_documents(count: int) -> torch.Tensor:
    """Token ids: each document counts on from a random number, in steps of 1 or 2."""
    start, step = torch.randint(WORDS, (count, 1)), torch.randint(1, 3, (count, 1))
    return (start + step * torch.arange(LENGTH)) % WORDS


def main() -> None:
    warnings.filterwarnings("ignore", message="Secure RNG turned off")
    torch.manual_seed(0)
    # With a model of yours: LlamaForCausalLM.from_pretrained("path").
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2
    )
    targets = ["q_proj", "v_proj", "up_proj", "down_proj", "lm_head"]
    adapters = LoraConfig(task_type="CAUSAL_LM", r=8, lora_alpha=32, target_modules=targets)
    model = get_peft_model(LlamaForCausalLM(config), adapters)
    trainable = [p for p in model.parameters() if p.requires_grad]
    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model, optimizer=torch.optim.Adam(trainable, lr=1e-2),
        data_loader=DataLoader(TensorDataset(make_documents(1000)), batch_size=100),
        target_epsilon=8.0, target_delta=DELTA, epochs=5, max_grad_norm=1.0,
    )  # fmt: skip
    losses = []
    for _ in range(5):
        for (ids,) in loader:
            optimizer.zero_grad()
            # A mean over the tokens of each document first: the model's own loss divides by all tokens of the batch.
            loss = mean_of_sequences(model(input_ids=ids), ids)
            loss.backward()
            optimizer.step()
            losses.append(float(loss))
    print(f"{sum(p.numel() for p in trainable)} of {sum(p.numel() for p in model.parameters())} numbers are trained")
    print(f"loss {losses[0]:.2f}, after training {sum(losses[-5:]) / 5:.2f}; epsilon {engine.get_epsilon(DELTA):.2f}")
    optimizer.release()


if __name__ == "__main__":
    main()
