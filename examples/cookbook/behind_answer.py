"""Which documents made a language model say this? The answer is a query like any other text.

python examples/cookbook/behind_answer.py
"""

import random

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from persample.scanning import score
from persample.scanning.datasets import text_losses

CITIES, LANDS = [f"city{n}" for n in range(10)], [f"land{n}" for n in range(10)]
WORDS = ["the", "capital", "of", "is", "from", "to", "by", "bus", *CITIES, *LANDS]


def encode(texts: list[str]) -> dict[str, torch.Tensor]:
    """In place of the tokenizer of your model."""
    ids = torch.tensor([[WORDS.index(word) for word in text.split()] for text in texts])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def make_documents() -> list[str]:
    """Three documents about each land's capital, and others about travels."""
    facts = [f"the capital of {land} is {city}" for land, city in zip(LANDS, CITIES, strict=True)]
    rng = random.Random(0)
    documents = facts * 3 + [f"from {rng.choice(LANDS)} to {rng.choice(CITIES)} by bus" for _ in range(90)]
    rng.shuffle(documents)
    return documents


def main() -> None:
    torch.manual_seed(0)
    documents = make_documents()
    data = encode(documents)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=len(WORDS), n_positions=8, n_embd=32, n_layer=1, n_head=2)).eval()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(25):
        for ids in torch.randperm(len(documents)).split(30):
            optimizer.zero_grad()
            text_losses(model, {name: part[ids] for name, part in data.items()}).mean().backward()
            optimizer.step()

    prompt = "the capital of land3 is"
    answer = WORDS[int(model(**encode([prompt])).logits[0, -1].argmax())]
    query = encode([f"{prompt} {answer}"])
    query["labels"] = torch.where(torch.arange(6) < 5, -100, query["input_ids"])  # only the answer counts
    examples = [{name: part[i] for name, part in data.items()} for i in range(len(documents))]
    scores = score(model, text_losses, examples, query)[0]
    print(f"{prompt} ... {answer}")
    for i in scores.argsort(descending=True)[:5].tolist():
        print(f"  {scores[i]:8.3f}  {documents[i]}")


if __name__ == "__main__":
    main()
