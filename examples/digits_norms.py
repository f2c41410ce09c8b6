"""Which of scikit-learn's digits pull hardest on a small convolutional net? Per-sample gradient norms."""

import sys
from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import persample

BATCH = 256
EPOCHS = 3
TOLERANCE = 1e-4  # of the largest entry of a sample's gradient, in float32


def load_images() -> tuple[Tensor, Tensor]:
    """The 1797 images as (N, 1, 8, 8) in [0, 1], and their classes."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    return images, torch.tensor(digits.target)


def make_model() -> nn.Module:
    """Two convolutions with group norm, and a linear layer."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.GroupNorm(4, 16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.GroupNorm(4, 32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 2 * 2, 10),
    )


def train(model: nn.Module, images: Tensor, labels: Tensor) -> None:
    """A few epochs of ordinary training; prints the mean loss of each."""
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for epoch in range(EPOCHS):
        total = 0.0
        for index in torch.randperm(len(images)).split(64):
            loss = F.cross_entropy(model(images[index]), labels[index])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(index)
        print(f"epoch {epoch + 1}: loss {total / len(images):.3f}")
    optimizer.zero_grad()


def per_sample_gradients(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Row n: the gradient of sample n's own loss, all parameters side by side."""
    per_sample_model = persample.call_for_per_sample_grads(model, loss_reduction="mean")
    F.cross_entropy(per_sample_model(images), labels).backward()
    rows = torch.cat([p.grad_sample.flatten(1) for p in model.parameters()], dim=1)
    for p in model.parameters():
        del p.grad_sample
    return rows


def plain_gradient(model: nn.Module, image: Tensor, label: Tensor) -> Tensor:
    """One sample's gradient by plain autograd, to check against."""
    loss = F.cross_entropy(model(image.unsqueeze(0)), label.unsqueeze(0))
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])


def worst_difference(model: nn.Module, images: Tensor, labels: Tensor, rows: Tensor) -> float:
    """The largest difference between a row and plain autograd, relative to the row's largest entry."""
    expected = torch.stack([plain_gradient(model, x, y) for x, y in zip(images, labels, strict=True)])
    return float(((rows - expected).abs().amax(1) / expected.abs().amax(1)).max())


def print_table(title: str, header: Sequence[str], lines: Iterable[Sequence[object]]) -> None:
    """A table with right-aligned columns; floats to four places."""
    texts = [[f"{v:.4f}" if isinstance(v, float) else str(v) for v in line] for line in lines]
    widths = [max(map(len, column)) for column in zip(header, *texts, strict=True)]
    print(f"\n{title}")
    for line in [header, ["-" * w for w in widths], *texts]:
        print("  " + "  ".join(text.rjust(w) for text, w in zip(line, widths, strict=True)))


def main() -> int:
    """Train, print the norms, check; 1 when the check fails."""
    torch.manual_seed(0)
    images, labels = load_images()
    model = make_model()
    train(model, images, labels)

    batches = zip(images.split(BATCH), labels.split(BATCH), strict=True)
    rows = torch.cat([per_sample_gradients(model, x, y) for x, y in batches])
    norms = rows.norm(dim=1)
    with torch.no_grad():
        outputs = model(images)
        losses, guesses = F.cross_entropy(outputs, labels, reduction="none"), outputs.argmax(1)

    order = norms.argsort(descending=True).tolist()
    header = ["image", "class", "guess", "loss", "gradient norm"]

    def describe(n: int) -> list[object]:
        return [n, int(labels[n]), int(guesses[n]), float(losses[n]), float(norms[n])]

    print_table("largest gradients", header, map(describe, order[:5]))
    print_table("smallest gradients", header, map(describe, order[-5:]))
    by_class = [(c, norms[labels == c]) for c in range(10)]
    print_table(
        "gradient norms by class",
        ["class", "images", "mean", "median", "largest"],
        [(c, len(v), float(v.mean()), float(v.median()), float(v.max())) for c, v in by_class],
    )

    picked = order[:: len(order) // 7]
    worst = worst_difference(model, images[picked], labels[picked], rows[picked])
    good = worst <= TOLERANCE
    result = "the same" if good else "DIFFERENT"
    print(f"\n{len(picked)} samples checked against a loop with plain autograd: {result}")
    print(f"(largest difference {worst:.1e} of a gradient's largest entry, {TOLERANCE:.0e} allowed)")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
