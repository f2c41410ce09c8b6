"""Take the pictures of the documentation anew: `python tools/screenshots.py`. Needs chromium and playwright."""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from playwright.sync_api import sync_playwright
from sklearn.datasets import load_digits
from torch import nn

import persample
from persample.cli import main as run_command
from persample.monitoring.page import write_page

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"


def main() -> None:
    browser_path = shutil.which("chromium") or sys.exit("chromium is not installed")
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), sync_playwright() as runner:
        run_command(["demo", "--out", "demo"])  # a short path, because the page shows it
        pages = {
            "report.png": ((Path(folder) / "demo" / "report.html").as_uri(), 1420),
            "monitor.png": (_monitor_digits(Path(folder)).as_uri(), 1180),
        }
        browser = runner.chromium.launch(executable_path=browser_path, args=["--no-sandbox", "--disable-gpu"])
        for name, (address, height) in pages.items():
            page = browser.new_page(viewport={"width": 1280, "height": height}, reduced_motion="reduce")
            page.goto(address)
            page.screenshot(path=IMAGES / name)
            print(f"{name} is written")
        browser.close()


def _monitor_digits(folder: Path) -> Path:
    """The page of a training run on digits."""
    torch.manual_seed(0)
    digits = load_digits()
    x, y = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16, torch.tensor(digits.target)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with persample.monitor(model, every=10, out=folder / "digits.jsonl", bounds=[1.0, 4.0]) as watching:
        for _ in range(30):
            for batch in torch.randperm(len(x)).split(64):
                watching.ids = batch
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
                optimizer.step()
    return write_page(folder / "digits.jsonl", title="Training on digits")


if __name__ == "__main__":
    main()
