"""Models for `persample check`, for example: persample check examples/check_model.py:language_model"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, WIDTH, LENGTH = 100, 32, 12


class LanguageModel(nn.Module):
    """Embedding tied to the head, positions, one transformer block with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.1)
        self.block = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.1, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.head(self.block(self.embedding(tokens) + self.positions, src_mask=causal))


def next_token_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Mean cross entropy of each token given the tokens before it."""
    return F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def language_model() -> tuple:
    """Return what `check` expects: a model, a batch and a loss function of both."""
    torch.manual_seed(0)
    return LanguageModel(), torch.randint(VOCABULARY, (64, LENGTH)), next_token_loss


def classifier() -> tuple:
    """A pair of inputs and targets, with a loss module of torch."""
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Flatten(), nn.LazyLinear(10))
    images, labels = torch.randn(32, 1, 8, 8), torch.randint(10, (32,))
    model(images)  # initialises the lazy layer
    return model, (images, labels), nn.CrossEntropyLoss()


def classifier_that_is_refused() -> tuple:
    """A model with BatchNorm, which mixes the samples of a batch in training."""
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10))
    return model, (torch.randn(32, 1, 8, 8), torch.randint(10, (32,))), nn.CrossEntropyLoss()
