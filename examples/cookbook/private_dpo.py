"""Train a language model by direct preference optimization, with differential privacy for each pair of answers.

python examples/cookbook/private_dpo.py
"""

import warnings
from itertools import chain

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel

from persample.private import PrivacyEngine, Step

WORDS, LENGTH, PAIRS, BETA, DELTA = 20, 8, 1000, 0.5, 1e-5


def make_answers(share: float) -> torch.Tensor:
    """Token ids, of which a share is in the first half of the words: polite ones."""
    return torch.randint(WORDS // 2, (PAIRS, LENGTH)) + (torch.rand(PAIRS, LENGTH) > share) * (WORDS // 2)


def score(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:  # the log-probability of each answer
    return -F.cross_entropy(model(input_ids=ids).logits[:, :-1].mT, ids[:, 1:], reduction="none").sum(1)


@torch.no_grad()
def compute_margins(model: nn.Module, chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
    return score(model, chosen) - score(model, rejected)


def losses_of(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """The loss of each pair. A row is the gradient of a pair, over both of its answers."""
    chosen, rejected, margin = batch
    return -F.logsigmoid(BETA * (score(model, chosen) - score(model, rejected) - margin))


def main() -> None:
    warnings.filterwarnings("ignore")  # of Opacus
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, n_positions=LENGTH, n_embd=32, n_layer=1, n_head=2)).eval()
    chosen, rejected = make_answers(0.7), make_answers(0.3)
    margins = compute_margins(model, chosen, rejected)  # of the reference model: the one before the training
    data = DataLoader(TensorDataset(chosen, rejected, margins), batch_size=100)
    model, optimizer, loader = (engine := PrivacyEngine()).make_private_with_epsilon(
        module=model, optimizer=torch.optim.Adam(model.parameters(), lr=3e-3), data_loader=data,
        target_epsilon=8.0, target_delta=DELTA, epochs=4, max_grad_norm=1.0,
    )  # fmt: skip
    step = Step(model, losses_of, optimizer)
    for batch in chain(loader, loader, loader, loader):  # four epochs
        step(batch)
    optimizer.release()
    right = (compute_margins(model, chosen, rejected) > margins).float().mean()
    print(f"the chosen answer gained in {100 * right:.1f}% of the pairs; epsilon {engine.get_epsilon(DELTA):.2f}")


if __name__ == "__main__":
    main()
