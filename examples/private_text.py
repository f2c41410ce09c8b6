"""Trains a small transformer to write the next letter, twice: as usual and with differential privacy.

    python examples/private_text.py

The text is made of sentences like "the old cat sees a red house .", one of which is a sample: the bound is on what a
whole sentence does to the model. Each line tells how many of the letters of other sentences are guessed.
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


def sentences(count: int, seed: int) -> Tensor:
    """`(count, LENGTH)`: sentences as numbers of letters, filled up with spaces."""
    chosen = random.Random(seed)
    things = ["cat", "dog", "house", "tree", "bird", "river", "child"]
    kinds = ["old", "red", "small", "happy", "quiet", ""]
    verbs = ["sees", "likes", "finds", "leaves"]

    def thing() -> str:
        return " ".join(w for w in (chosen.choice(["the", "a"]), chosen.choice(kinds), chosen.choice(things)) if w)

    written = [f"{thing()} {chosen.choice(verbs)} {thing()} ." for _ in range(count)]
    return torch.tensor([[LETTERS.index(letter) for letter in text.ljust(LENGTH)[:LENGTH]] for text in written])


class Writer(nn.Module):
    """A decoder with its embedding tied to its head: what per-sample hooks of layers get wrong, or refuse."""

    def __init__(self, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.letters = nn.Embedding(len(LETTERS), width)
        self.places = nn.Parameter(torch.zeros(LENGTH - 1, width))
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        hidden = self.layers(self.letters(ids) + self.places, mask=mask, is_causal=True)
        return self.norm(hidden) @ self.letters.weight.T


def train(name: str, private: bool) -> float:
    """How many letters of new sentences the trained model guesses."""
    torch.manual_seed(0)
    model = Writer()
    optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    loader = DataLoader(TensorDataset(sentences(4000, seed=1)), batch_size=BATCH, shuffle=True)
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
    new = sentences(500, seed=2)
    with torch.no_grad():
        guessed = float((model(new[:, :-1]).argmax(-1) == new[:, 1:]).float().mean())
    spent = f"epsilon {engine.get_epsilon(DELTA):.2f} at delta {DELTA:g}" if private else "no privacy"
    print(f"{name:12} letters guessed {guessed:6.1%}   {spent:30} {seconds:5.1f} s")
    return guessed


if __name__ == "__main__":
    warnings.filterwarnings("ignore", message="Secure RNG turned off")  # fine for an example, not for production
    train("as usual", private=False)
    train("private", private=True)
