"""Per-sample gradient norms: which digits of scikit-learn have the largest gradients in a small convolutional net?"""

import sys
from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import persample

BATCH = 256
EPOCHS = 3
TOLERANCE = 1e-4  # in float32, relative to the largest entry of the gradient of a sample


def load_images() -> tuple[Tensor, Tensor]:
    """Return the 1797 images, as (N, 1, 8, 8) in [0, 1], and their classes."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    return images, torch.tensor(digits.target)


def make_model() -> nn.Module:
    """Return a net of two convolutions with group norm and a linear layer."""
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
    """Train for a few epochs and print the mean loss of each."""
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


def compute_per_sample_gradients(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Return a matrix. Row n is the gradient of the loss of sample n for all parameters."""
    per_sample_model = persample.call_for_per_sample_grads(model, loss_reduction="mean")
    F.cross_entropy(per_sample_model(images), labels).backward()
    rows = torch.cat([p.grad_sample.flatten(1) for p in model.parameters()], dim=1)
    for p in model.parameters():
        del p.grad_sample
    return rows


def compute_plain_gradient(model: nn.Module, image: Tensor, label: Tensor) -> Tensor:
    """Compute the gradient of one sample with plain autograd."""
    loss = F.cross_entropy(model(image.unsqueeze(0)), label.unsqueeze(0))
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])


def find_largest_difference(model: nn.Module, images: Tensor, labels: Tensor, rows: Tensor) -> float:
    """Return the largest difference between a row and plain autograd, relative to the largest entry of the row."""
    expected = torch.stack([compute_plain_gradient(model, x, y) for x, y in zip(images, labels, strict=True)])
    return float(((rows - expected).abs().amax(1) / expected.abs().amax(1)).max())


def print_table(title: str, header: Sequence[str], lines: Iterable[Sequence[object]]) -> None:
    """Print a table with right-aligned columns and four decimals."""
    texts = [[f"{v:.4f}" if isinstance(v, float) else str(v) for v in line] for line in lines]
    widths = [max(map(len, column)) for column in zip(header, *texts, strict=True)]
    print(f"\n{title}")
    for line in [header, ["-" * w for w in widths], *texts]:
        print("  " + "  ".join(text.rjust(w) for text, w in zip(line, widths, strict=True)))


def main() -> int:
    """Train, print the norms and check them. Return the exit code: 1 if the check fails."""
    torch.manual_seed(0)
    images, labels = load_images()
    model = make_model()
    train(model, images, labels)

    batches = zip(images.split(BATCH), labels.split(BATCH), strict=True)
    rows = torch.cat([compute_per_sample_gradients(model, x, y) for x, y in batches])
    norms = rows.norm(dim=1)
    with torch.no_grad():
        outputs = model(images)
        losses, predictions = F.cross_entropy(outputs, labels, reduction="none"), outputs.argmax(1)

    order = norms.argsort(descending=True).tolist()
    header = ["image", "class", "prediction", "loss", "gradient norm"]

    def make_row(n: int) -> list[object]:
        return [n, int(labels[n]), int(predictions[n]), float(losses[n]), float(norms[n])]

    print_table("largest gradients", header, map(make_row, order[:5]))
    print_table("smallest gradients", header, map(make_row, order[-5:]))
    by_class = [(c, norms[labels == c]) for c in range(10)]
    print_table(
        "gradient norms by class",
        ["class", "images", "mean", "median", "largest"],
        [(c, len(v), float(v.mean()), float(v.median()), float(v.max())) for c, v in by_class],
    )

    picked = order[:: len(order) // 7]
    difference = find_largest_difference(model, images[picked], labels[picked], rows[picked])
    is_correct = difference <= TOLERANCE
    result = "equal" if is_correct else "DIFFERENT"
    print(f"\n{len(picked)} samples checked against a loop with plain autograd: {result}")
    print(f"(largest relative difference: {difference:.1e}, tolerance: {TOLERANCE:.0e})")
    return 0 if is_correct else 1


if __name__ == "__main__":
    sys.exit(main())
