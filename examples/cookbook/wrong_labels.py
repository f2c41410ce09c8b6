"""Find wrong labels in a dataset of Hugging Face: made reviews, of which 6 % have the wrong label.

python examples/cookbook/wrong_labels.py
"""

import random

import torch
import torch.nn.functional as F
from datasets import Dataset
from transformers import BertConfig, BertForSequenceClassification

import persample
from persample.scanning.datasets import TextCollator, text_losses

WORDS = ["", "the", "film", "plot", "was", "very", "good", "great", "funny", "bad", "dull", "weak"]


def make_reviews(count: int, wrong: int) -> tuple[Dataset, set[int]]:
    """Reviews with their labels, and the ids of those whose label is wrong."""
    rng = random.Random(0)
    labels = [rng.randrange(2) for _ in range(count)]
    texts = []
    for label in labels:
        start, more = rng.choice(["the film was", "the plot was"]), ["very"] * rng.randrange(3)
        texts.append(" ".join([start, *more, rng.choice(WORDS[6:9] if label else WORDS[9:])]))
    flipped = set(rng.sample(range(count), wrong))
    given = [1 - label if i in flipped else label for i, label in enumerate(labels)]
    return Dataset.from_dict({"text": texts, "label": given}), flipped


def tokenize(texts: list[str]) -> dict[str, list[list[int]]]:
    """In place of the tokenizer of your model."""
    return {"input_ids": [[WORDS.index(word) for word in text.split()] for text in texts]}


def main() -> None:
    torch.manual_seed(0)
    data, flipped = make_reviews(500, 30)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    model = BertForSequenceClassification(BertConfig(vocab_size=len(WORDS), max_position_embeddings=8, **sizes))
    collate, optimizer = TextCollator(tokenize), torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(3):
        for ids in torch.randperm(len(data)).split(50):
            batch = collate([data[i] for i in ids.tolist()])
            optimizer.zero_grad()
            F.cross_entropy(model(**batch["tokens"]).logits, batch["label"]).backward()
            optimizer.step()

    found = persample.scan(model, text_losses, data, collate=collate, project=64, progress=False)
    suspects = found.ranked(k=len(flipped)).ids.tolist()
    print(f"wrong labels, estimated: {found.estimate_wrong_labels()}")
    for i in suspects[:3]:
        print(f"  {i}: {data[i]['text']!r} has the label {data[i]['label']}")
    print(f"of the first {len(flipped)}, {len(flipped & set(suspects))} are wrong")


if __name__ == "__main__":
    main()
