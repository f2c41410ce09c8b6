"""BiTFiT: train the biases alone, with differential privacy; the weights come from public data.

python examples/cookbook/private_bitfit.py
"""

import warnings

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from persample.private import PrivacyEngine, Step

DELTA = 1e-4


def losses_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    images, labels = batch
    return F.cross_entropy(model(images), labels, reduction="none")


def main() -> None:
    warnings.filterwarnings("ignore")  # of Opacus
    torch.manual_seed(0)
    images, labels = (torch.tensor(values) for values in load_digits(return_X_y=True))
    images = images.float() / 16
    public, private, test = slice(0, 600), slice(600, 1500), slice(1500, None)

    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    trainer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(100):
        trainer.zero_grad()
        losses_of(model, (images[public], labels[public])).mean().backward()
        trainer.step()

    darker = images * 0.4 + 0.3  # the private images come from another scanner
    for name, p in model.named_parameters():
        p.requires_grad_(name.endswith("bias"))
    before = (model(darker[test]).argmax(1) == labels[test]).float().mean()
    engine = PrivacyEngine()
    data = TensorDataset(darker[private], labels[private])
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model, optimizer=torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=2e-2),
        data_loader=DataLoader(data, batch_size=100), target_epsilon=4.0, target_delta=DELTA, epochs=10,
        max_grad_norm=1.0,
    )  # fmt: skip
    step = Step(model, losses_of, optimizer)
    for _ in range(10):
        for batch in loader:
            step(batch)
    optimizer.release()
    after = (model(darker[test]).argmax(1) == labels[test]).float().mean()
    print(f"accuracy {before:.0%}, after training {100 * after:.1f}%; epsilon {engine.get_epsilon(DELTA):.2f}")


if __name__ == "__main__":
    main()
