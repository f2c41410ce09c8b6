"""Train a small transformer to predict the next letter, without and with differential privacy.

    python examples/private_text.py

A sample is a sentence like "the old cat sees a red house .", so privacy protects whole sentences. Each line shows how
many letters of test sentences are predicted correctly.
"""

from __future__ import annotations

import random
import time
import warnings

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from persample.private import PrivacyEngine

EPSILON, DELTA, EPOCHS, BATCH = 8.0, 1e-5, 8, 128
LENGTH = 40
LETTERS = " .abcdefghijklmnopqrstuvwxyz"


def make_sentences(count: int, seed: int) -> Tensor:
    """Random sentences as letter indices, padded with spaces: shape `(count, LENGTH)`."""
    rng = random.Random(seed)
    things = ["cat", "dog", "house", "tree", "bird", "river", "child"]
    kinds = ["old", "red", "small", "happy", "quiet", ""]
    verbs = ["sees", "likes", "finds", "leaves"]

    def make_phrase() -> str:
        return " ".join(w for w in (rng.choice(["the", "a"]), rng.choice(kinds), rng.choice(things)) if w)

    texts = [f"{make_phrase()} {rng.choice(verbs)} {make_phrase()} ." for _ in range(count)]
    return torch.tensor([[LETTERS.index(letter) for letter in text.ljust(LENGTH)[:LENGTH]] for text in texts])


class Writer(nn.Module):
    """Decoder with an embedding tied to the head, which per-layer hooks compute wrongly or refuse."""

    def __init__(self, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.letters = nn.Embedding(len(LETTERS), width)
        self.positions = nn.Parameter(torch.zeros(LENGTH - 1, width))
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        hidden = self.layers(self.letters(ids) + self.positions, mask=mask, is_causal=True)
        return self.norm(hidden) @ self.letters.weight.T


def train(name: str, private: bool) -> float:
    """Train a model from scratch; return the fraction of letters of test sentences that it predicts correctly."""
    torch.manual_seed(0)
    model = Writer()
    optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    loader = DataLoader(TensorDataset(make_sentences(4000, seed=1)), batch_size=BATCH, shuffle=True)
    engine = PrivacyEngine(accountant="rdp")
    if private:
        model, optimizer, loader = engine.make_private_with_epsilon(
            module=model, optimizer=optimizer, data_loader=loader,
            target_epsilon=EPSILON, target_delta=DELTA, epochs=EPOCHS, max_grad_norm=0.5,
        )  # fmt: skip
    start = time.perf_counter()
    for _ in range(EPOCHS):
        for (ids,) in loader:
            optimizer.zero_grad()
            logits = model(ids[:, :-1])
            F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
            optimizer.step()
    seconds = time.perf_counter() - start
    test = make_sentences(500, seed=2)
    with torch.no_grad():
        accuracy = float((model(test[:, :-1]).argmax(-1) == test[:, 1:]).float().mean())
    spent = f"epsilon {engine.get_epsilon(DELTA):.2f} at delta {DELTA:g}" if private else "no privacy"
    print(f"{name:12} letters predicted {accuracy:6.1%}   {spent:30} {seconds:5.1f} s")
    return accuracy


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message="Secure RNG turned off")  # fine for an example, not for production
    train("as usual", private=False)
    train("private", private=True)
