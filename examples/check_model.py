"""A language model to check: python -m persample check examples/check_model.py:language_model"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, WIDTH, LENGTH = 100, 32, 12


class LanguageModel(nn.Module):
    """An embedding that is tied to the head, positions, one block of attention, and dropout."""

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
    """How badly each token is predicted from those before it."""
    return F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def language_model() -> tuple:
    """What `check` asks for: a model, a batch, and a loss of the two."""
    torch.manual_seed(0)
    return LanguageModel(), torch.randint(VOCABULARY, (64, LENGTH)), next_token_loss


def classifier() -> tuple:
    """The usual pair of inputs and targets, with a loss of torch."""
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Flatten(), nn.LazyLinear(10))
    images, labels = torch.randn(32, 1, 8, 8), torch.randint(10, (32,))
    model(images)  # a lazy layer finds its shape
    return model, (images, labels), nn.CrossEntropyLoss()


def classifier_that_is_refused() -> tuple:
    """With a BatchNorm, which mixes the samples of a batch while it is trained."""
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10))
    return model, (torch.randn(32, 1, 8, 8), torch.randint(10, (32,))), nn.CrossEntropyLoss()
