"""A private training with canaries.

Audit it from the command line:

    persample audit examples/cookbook/audit_training.py:train --plot audit.svg
    persample audit examples/cookbook/audit_training.py:train --canaries input --runs 200 --delta 1e-3
"""

import warnings

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from persample.private import AuditRun, PrivacyEngine

warnings.filterwarnings("ignore")  # of Opacus

IMAGES, LABELS = load_digits(return_X_y=True)
DIGITS = TensorDataset(torch.tensor(IMAGES, dtype=torch.float32)[:512] / 16, torch.tensor(LABELS)[:512])


def train(run: AuditRun) -> PrivacyEngine:
    """Train a small net for four steps."""
    model, engine = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)), PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        data_loader=DataLoader(run.add_canaries(DIGITS), batch_size=128),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    run.observe(optimizer, sample_rate=1 / len(loader), model=model, loss_fn=F.cross_entropy)
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return engine
