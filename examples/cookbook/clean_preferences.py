"""Clean a preference set for RLHF: find the pairs in which the chosen and the rejected answer were swapped.

python examples/cookbook/clean_preferences.py
"""

import torch
import torch.nn.functional as F
from torch import nn

import persample

PAIRS, WORDS, LENGTH = 400, 30, 10


class Reward(nn.Module):
    """A bag of words with a score; in its place your reward model."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 16)
        self.head = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.words(ids).mean(1)).squeeze(1)


def main() -> None:
    torch.manual_seed(0)
    good = torch.randint(WORDS // 2, (2, PAIRS, LENGTH))  # the first half of the words is better than the second
    share = torch.tensor([0.8, 0.2]).view(2, 1, 1)
    answers = torch.where(torch.rand(good.shape) < share, good, good + WORDS // 2)
    swapped = torch.randperm(PAIRS)[:40]
    answers[:, swapped] = answers[:, swapped].flip(0)
    chosen, rejected = answers

    model = Reward()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    norms = torch.zeros(PAIRS)
    for epoch in range(8):
        for ids in torch.randperm(PAIRS).split(50):
            # The two answers of a pair are one unit: its row is the gradient of the pair's loss.
            with persample.record(model, units=torch.arange(len(ids)).repeat(2), keep_grad=True) as grads:
                better, worse = model(torch.cat([chosen[ids], rejected[ids]])).chunk(2)
                (-F.logsigmoid(better - worse)).mean().backward()
            if epoch >= 4:
                norms[ids] += grads.norms()
            optimizer.step()
            optimizer.zero_grad()

    suspects = norms.argsort(descending=True)[:40]
    hits = len(set(suspects.tolist()) & set(swapped.tolist()))
    print(f"of the 40 pairs with the longest gradients, {hits} are swapped ({40 / PAIRS:.0%} of all pairs are)")


if __name__ == "__main__":
    main()
