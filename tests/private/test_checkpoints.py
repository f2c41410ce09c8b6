"""Checkpoints of private training: no code runs when one is loaded, and all that is written can be loaded."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import opacus
import pytest
import torch
from opacus.accountants import RDPAccountant
from opacus.schedulers import ExponentialGradClip, LambdaNoise
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from persample.errors import PerSampleError
from persample.private import PrivacyEngine
from persample.private.checkpoints import History

pytestmark = pytest.mark.filterwarnings("ignore")  # of Opacus


class Evil:
    """Creates a file when it is read by pickle."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


class Setting:
    """A harmless class of the user."""


Private = tuple[PrivacyEngine, nn.Module, Any]


@pytest.fixture
def private() -> Iterator[Private]:
    yield from make_private("rdp")


def make_private(accountant: str) -> Iterator[Private]:
    module, engine = nn.Linear(3, 2), PrivacyEngine(accountant=accountant)
    data = TensorDataset(torch.randn(16, 3), torch.arange(16) % 2)
    _, optimizer, loader = engine.make_private(
        module=module, optimizer=torch.optim.Adam(module.parameters()), data_loader=DataLoader(data, batch_size=8),
        noise_multiplier=1.0, max_grad_norm=1.0,
    )  # fmt: skip
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(module(x), y).backward()
        optimizer.step()
    yield engine, module, optimizer
    optimizer.release()


def test_loading_runs_no_code(private: Private, tmp_path: Path) -> None:
    engine, module, optimizer = private
    for name, save in (("new", torch.save), ("old", _save_in_old_format), ("bare", _pickle)):
        path = tmp_path / name
        save({"module_state_dict": module.state_dict(), "more": Evil(tmp_path / "ran")}, path)
        with pytest.raises(PerSampleError, match="can run code") as caught:
            engine.load_checkpoint(path=path, module=module, optimizer=optimizer)
        assert "weights_only=False" in str(caught.value) and "torch.save" in str(caught.value)
    assert not (tmp_path / "ran").exists()


def _save_in_old_format(value: Any, path: Path) -> None:
    torch.save(value, path, _use_new_zipfile_serialization=False)


def _pickle(value: Any, path: Path) -> None:
    path.write_bytes(pickle.dumps(value, 2))


def test_user_cannot_ask_for_pickle(private: Private, tmp_path: Path) -> None:
    engine, module, optimizer = private
    engine.save_checkpoint(path=tmp_path / "file", module=module, optimizer=optimizer)
    with pytest.raises(PerSampleError, match="weights_only=False is not supported"):
        engine.load_checkpoint(path=tmp_path / "file", module=module, torch_load_kwargs={"weights_only": False})
    engine.load_checkpoint(path=tmp_path / "file", module=module, torch_load_kwargs={"map_location": "cpu"})


@pytest.mark.parametrize("accountant", ["rdp", "prv", "gdp"])
def test_checkpoints_go_between_us_and_opacus(accountant: str, tmp_path: Path) -> None:
    for engine, module, optimizer in make_private(accountant):
        theirs, other = opacus.PrivacyEngine(accountant=accountant), nn.Linear(3, 2)
        engine.save_checkpoint(path=tmp_path / "ours", module=module, optimizer=optimizer)
        theirs.load_checkpoint(path=tmp_path / "ours", module=other)
        assert torch.equal(other.weight, module.weight)
        assert theirs.accountant.history == engine.accountant.history
        theirs.save_checkpoint(path=tmp_path / "theirs", module=other, checkpoint_dict={"epoch": 3})
        engine.accountant.history = []
        rest = engine.load_checkpoint(path=tmp_path / "theirs", module=module)
        assert engine.accountant.history == theirs.accountant.history and rest["epoch"] == 3


def test_numbers_of_numpy_can_be_loaded(private: Private, tmp_path: Path) -> None:
    """Old files have them if a noise multiplier was computed with numpy."""
    engine, module, optimizer = private
    engine.accountant.history = [(np.float64(1.5), np.float32(0.25), np.int64(3))]
    engine.save_checkpoint(path=tmp_path / "file", module=module, optimizer=optimizer)
    engine.accountant.history = []
    engine.load_checkpoint(path=tmp_path / "file", module=module, optimizer=optimizer)
    assert engine.accountant.history == [(1.5, 0.25, 3)]


def test_schedulers_keep_their_functions(private: Private, tmp_path: Path) -> None:
    engine, module, optimizer = private
    schedulers = {
        "noise_scheduler": LambdaNoise(optimizer, noise_lambda=lambda epoch: 0.5),
        "grad_clip_scheduler": ExponentialGradClip(optimizer, gamma=0.9),
    }
    for scheduler in schedulers.values():
        scheduler.step()
    engine.save_checkpoint(path=tmp_path / "file", module=module, optimizer=optimizer, **schedulers)
    for scheduler in schedulers.values():
        scheduler.step()
    engine.load_checkpoint(path=tmp_path / "file", module=module, optimizer=optimizer, **schedulers)
    assert [scheduler.last_epoch for scheduler in schedulers.values()] == [1, 1]
    schedulers["noise_scheduler"].step()
    assert optimizer.noise_multiplier == 0.5


def test_contents_that_cannot_be_loaded_are_not_saved(private: Private, tmp_path: Path) -> None:
    engine, module, optimizer = private
    path = tmp_path / "file"
    engine.save_checkpoint(path=path, module=module, optimizer=optimizer)
    before = path.read_bytes()
    with pytest.raises(PerSampleError, match=r"objects of tests.private.test_checkpoints.Setting.*add_safe_globals"):
        engine.save_checkpoint(path=path, module=module, checkpoint_dict={"setting": Setting()})
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["file"]
    with torch.serialization.safe_globals([Setting]):
        engine.save_checkpoint(path=path, module=module, checkpoint_dict={"setting": Setting()})
        found = engine.load_checkpoint(path=path, module=module)
    assert isinstance(found["setting"], Setting)


def test_checkpoint_is_not_written_through_a_link(private: Private, tmp_path: Path) -> None:
    engine, module, optimizer = private
    (tmp_path / "target").write_bytes(b"precious")
    (tmp_path / "file").symlink_to(tmp_path / "target")
    engine.save_checkpoint(path=tmp_path / "file", module=module, optimizer=optimizer)
    assert (tmp_path / "target").read_bytes() == b"precious" and not (tmp_path / "file").is_symlink()


def test_missing_state_of_the_optimizer_warns(private: Private, tmp_path: Path) -> None:
    engine, module, optimizer = private
    engine.save_checkpoint(path=tmp_path / "without", module=module)
    with pytest.warns(UserWarning, match="the checkpoint has none"):
        engine.load_checkpoint(path=tmp_path / "without", module=module, optimizer=optimizer)
    engine.save_checkpoint(path=tmp_path / "with", module=module, optimizer=optimizer)
    with pytest.warns(UserWarning, match="no optimizer was passed"):
        engine.load_checkpoint(path=tmp_path / "with", module=module)


def test_discarded_steps_stay_in_the_history(private: Private, tmp_path: Path) -> None:
    """What was released after a checkpoint was released, also if the training goes back to it."""
    engine, module, optimizer = private
    engine.save_checkpoint(path=tmp_path / "file", module=module, optimizer=optimizer)
    before = engine.get_epsilon(1e-3)
    for _ in range(3):
        optimizer.step()
    spent = engine.get_epsilon(1e-3)
    engine.load_checkpoint(path=tmp_path / "file", module=module, optimizer=optimizer)
    assert engine.get_epsilon(1e-3) == spent > before
    other = PrivacyEngine(accountant="rdp")
    other.load_checkpoint(path=tmp_path / "file", module=module, optimizer=optimizer)
    assert other.get_epsilon(1e-3) == before
    other.load_checkpoint(path=tmp_path / "file", module=module, optimizer=optimizer)
    assert other.get_epsilon(1e-3) == before  # it has made no steps since
    other.accountant.history.append((2.0, 0.5, 1))
    engine.load_checkpoint(path=tmp_path / "file", module=module)
    assert engine.get_epsilon(1e-3) == spent
    stranger = PrivacyEngine(accountant="rdp")
    stranger.accountant.history = [(1.0, 0.5, 2)]
    stranger.load_checkpoint(path=tmp_path / "file", module=module)
    assert stranger.get_epsilon(1e-3) > before  # steps of another training


@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("with_units", [False, True])
def test_a_restart_draws_other_batches(seed: int | None, with_units: bool, tmp_path: Path) -> None:
    """A script that sets its seeds at its start, and goes on from a checkpoint."""
    data, found = TensorDataset(torch.arange(64.0)[:, None]), []
    for start in range(2):
        torch.manual_seed(0)
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        module, engine = nn.Linear(1, 1), PrivacyEngine()
        _, optimizer, loader = engine.make_private(
            module=module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1), noise_multiplier=1.0,
            data_loader=DataLoader(data, batch_size=16, generator=generator), max_grad_norm=1.0,
            unit_ids=range(64) if with_units else None,
        )  # fmt: skip
        if start:
            engine.load_checkpoint(path=tmp_path / "file", module=module, optimizer=optimizer)
        found.append([x.flatten().tolist() for (x,) in loader])
        engine.save_checkpoint(path=tmp_path / "file", module=module, optimizer=optimizer)
        optimizer.release()
    assert found[0] != found[1]


# The steps of a trunk, and of two continuations; and what is loaded into what.
@pytest.mark.parametrize(
    "into, loaded, steps", [("first", "second", 13), ("second", "first", 13), ("first", "trunk", 8)]
)
def test_no_branch_of_a_history_is_lost(into: str, loaded: str, steps: int) -> None:
    def make(history: History | None = None, more: int = 0) -> History:
        made = History(RDPAccountant())
        if history is not None:
            made.load_state_dict(history.accountant.state_dict(), history.lineage)
        for _ in range(more):
            made.accountant.step(noise_multiplier=1.0, sample_rate=0.1)
        return made

    trunk = make(more=5)
    branches = {"trunk": trunk, "first": make(trunk, 3), "second": make(trunk, 5)}
    saved = branches[loaded].accountant.state_dict(), branches[loaded].lineage
    target = branches[into]
    target.load_state_dict(*saved)
    assert sum(count for _, _, count in target.accountant.history) == steps
    target.load_state_dict(*saved)  # again: nothing more was released
    assert sum(count for _, _, count in target.accountant.history) == steps
    for _ in range(4):
        trunk.accountant.step(noise_multiplier=1.0, sample_rate=0.1)
    if trunk is not target:
        target.load_state_dict(trunk.accountant.state_dict(), trunk.lineage)
        assert sum(count for _, _, count in target.accountant.history) == steps + 4
