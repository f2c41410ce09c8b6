"""Scans by tasks of a Ray cluster: the bytes of a scan by one process, also if a worker is killed."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

import persample
from persample.cli import main
from persample.scanning import NotFinite, ScanError
from tests.support.scans import QUICK, build, read_files

ray = pytest.importorskip("ray", reason="pip install 'persample[ray]'")
pytestmark = pytest.mark.xdist_group("ray")  # one cluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A cluster of two workers on this machine, with tasks of one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    yield
    ray.shutdown()
    torch.set_num_threads(threads)


class Rows(Dataset[tuple[Tensor, int]]):
    """Examples of which one kills the first worker that reads it. The loss of the `bad` one is infinite."""

    def __init__(self, folder: Path, bad: int = -1) -> None:
        generator = torch.Generator().manual_seed(0)
        self.inputs, self.labels = torch.randn(60, 6, generator=generator), torch.arange(60) % 3
        self._folder, self._bad, self._owner = folder, bad, os.getpid()

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        killed = self._folder / "killed"
        if i == 37 and os.getpid() != self._owner and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return self.inputs[i] * (1e30 if i == self._bad else 1), int(self.labels[i])


def make_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def test_killed_worker(cluster: None, tmp_path: Path) -> None:
    net, data = make_net(), Rows(tmp_path)
    weights = [{name: part * scale for name, part in net.state_dict().items()} for scale in (0.5, 1.0)]
    options: dict[str, Any] = {**QUICK, "checkpoints": weights}
    for name, engine in (("one", "processes"), ("many", "ray")):
        persample.scan(net, nn.CrossEntropyLoss(), data, out=tmp_path / name, engine=engine, **options)
    assert (tmp_path / "killed").exists()
    one, many = (read_files(tmp_path / name) for name in ("one", "many"))
    assert one == many and len(one) > 2 * 2 * 60 // QUICK["shard_size"]


def test_error_of_an_example(cluster: None, tmp_path: Path) -> None:
    data = Rows(tmp_path, bad=50)
    loss_fn = lambda model, batch: model(batch[0]).square().sum(1)  # noqa: E731
    with pytest.raises(NotFinite, match="loss of example 50 is not a finite number"):
        persample.scan(nn.Linear(6, 3), loss_fn, data, out=tmp_path / "out", engine="ray", **QUICK)
    assert (tmp_path / "out" / "0" / "00000.npz").exists()


def test_command(cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers import the file of the user, which is not on their path."""
    monkeypatch.chdir(tmp_path)
    Path("on_workers.py").write_text(
        "import torch\nclass Net(torch.nn.Linear):\n    pass\n"
        "def to_scan():\n    torch.manual_seed(0)\n"
        "    return Net(4, 2), (torch.randn(30, 4), torch.arange(30) % 2), torch.nn.CrossEntropyLoss()\n"
    )
    command = ["scan", "on_workers.py:to_scan", "--quiet", "--shard-size", "8", "--batch-size", "4"]
    for out, engine in (("one", "processes"), ("many", "ray")):
        monkeypatch.delitem(sys.modules, "on_workers", raising=False)
        assert main([*command, "--out", out, "--engine", engine]) == 0
    assert read_files(tmp_path / "one") == read_files(tmp_path / "many")


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from zip(torch.randn(9, 6), torch.zeros(9).long(), strict=True)


def test_scans_without_tasks(tmp_path: Path) -> None:
    """Refused before a cluster is looked for."""
    net = make_net()
    with pytest.raises(ScanError, match="a stream has no shards"):
        persample.scan(net, nn.CrossEntropyLoss(), Stream(), engine="ray", **QUICK)
    model, data, loss_fn, _ = build("images")
    with pytest.raises(ScanError, match="no sum over all gradients"):
        persample.scan(model, loss_fn, data, engine="ray", quantities=["loss", "alignment"], **QUICK)
    with pytest.raises(ScanError, match="engine must be 'processes' or 'ray', got 'dask'"):
        persample.scan(model, loss_fn, data, engine="dask", **QUICK)  # type: ignore[arg-type]
