"""Privacy loss distributions against the other accountants, dp-accounting itself and closed forms."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import dp_accounting as dp
import pytest
import torch
from opacus.accountants import create_accountant
from scipy.optimize import brentq
from scipy.stats import norm
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from persample.private import PrivacyEngine, read_statement
from persample.private.accounting import PLDAccountant, describe_accountant, make_event, merge_whole
from persample.private.limit import compute_epsilon

pytestmark = pytest.mark.filterwarnings("ignore")  # of Opacus

KINDS = {"pld": "ADD_OR_REMOVE_ONE", "pld-replace-one": "REPLACE_ONE", "pld-zero-out": "REPLACE_SPECIAL"}
HISTORIES = [
    [(2.0, 0.01, 300)],
    [(4.0, 1.0, 3), (2.0, 0.02, 50), (5.0, 1.0, 2)],
]
DELTA = 1e-5


def epsilon_by(mechanism: str, history: Any, delta: float = DELTA) -> float:
    accountant = create_accountant(mechanism)
    accountant.history = list(history)
    return float(accountant.get_epsilon(delta=delta))


def gaussian_epsilon(noise: float, delta: float) -> float:
    """Balle and Wang (2018), Theorem 8."""

    def excess(epsilon: float) -> float:
        a, b = 0.5 / noise - epsilon * noise, -0.5 / noise - epsilon * noise
        return norm.cdf(a) - math.exp(epsilon) * norm.cdf(b) - delta

    return float(brentq(excess, 0, 100))


@pytest.mark.parametrize("history", HISTORIES)
def test_pld_is_close_to_prv_and_below_rdp(history: Any) -> None:
    pld, prv, rdp = (epsilon_by(name, history) for name in ("pld", "prv", "rdp"))
    assert prv - 0.02 * prv - 0.012 < pld < prv  # prv adds its tolerance of 0.01
    assert prv < rdp


@pytest.mark.parametrize("name", KINDS)
def test_numbers_are_those_of_dp_accounting(name: str) -> None:
    history = [(2.0, 0.05, 4), (3.0, 0.1, 2)]
    theirs = dp.pld.PLDAccountant(dp.NeighboringRelation[KINDS[name]])
    for noise, rate, steps in history:
        theirs.compose(dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(noise)), steps)
    assert epsilon_by(name, history) == pytest.approx(theirs.get_epsilon(DELTA), rel=1e-6)
    accountant: Any = create_accountant(name)
    accountant.history = history
    assert accountant.get_delta(0.2) == pytest.approx(theirs.get_delta(0.2), rel=1e-9)


@pytest.mark.parametrize("noise, steps", [(1.0, 1), (3.0, 7), (20.0, 1000)])
@pytest.mark.parametrize("name, factor", [("pld", 1), ("pld-zero-out", 1), ("pld-replace-one", 2)])
def test_whole_batches_have_the_closed_form(name: str, factor: int, noise: float, steps: int) -> None:
    """To replace a sample changes a sum by up to twice its bound, which halves the noise."""
    expected = gaussian_epsilon(noise / factor / steps**0.5, DELTA)
    assert expected <= epsilon_by(name, [(noise, 1.0, steps)]) + 1e-9 < expected * 1.001 + 1e-3


def test_replacing_costs_more_than_zeroing_and_less_than_removing_and_adding() -> None:
    history = [(3.0, 0.05, 30)]
    zero, replace = epsilon_by("pld-zero-out", history), epsilon_by("pld-replace-one", history)
    assert zero < replace < 2 * epsilon_by("pld", history, DELTA / (1 + math.exp(zero)))  # group privacy


@pytest.mark.parametrize("distance", [0.3, 1.0])
@pytest.mark.parametrize("angle", [0.0, 1.5, math.pi])
@pytest.mark.parametrize("epsilon", [-0.5, 0.3])
def test_no_replacement_in_the_plane_exceeds_the_accountant(epsilon: float, angle: float, distance: float) -> None:
    """The worst case is a gradient of norm 1 replaced by the opposite one, also among those that are not opposite."""
    rate, noise = 0.3, 1.5
    x = torch.linspace(-8, 8, 201, dtype=torch.float64)
    grid = torch.cartesian_prod(x, x)

    def density(*centre: float) -> torch.Tensor:
        def bell(at: torch.Tensor) -> torch.Tensor:
            return (-(grid - at).square().sum(1) / 2 / noise**2).exp() / (2 * math.pi * noise**2)

        return (1 - rate) * bell(torch.zeros(2)) + rate * bell(torch.tensor(centre, dtype=torch.float64))

    old, new = density(1.0, 0.0), density(distance * math.cos(angle), distance * math.sin(angle))
    delta = float((old - math.exp(epsilon) * new).clamp(min=0).sum()) * float(x[1] - x[0]) ** 2
    accountant: Any = create_accountant("pld-replace-one")
    accountant.history = [(noise, rate, 1)]
    bound = accountant.get_delta(epsilon)
    assert delta <= bound * (1 + 1e-3)  # of the grid
    if angle == math.pi and distance == 1.0:
        assert delta == pytest.approx(bound, rel=1e-3)


def test_an_event_keeps_what_the_accountants_need() -> None:
    event = make_event([(1.0, 0.01, 5), (0.0, 0.5, 1)])
    assert event.events[0] == dp.SelfComposedDpEvent(dp.PoissonSampledDpEvent(0.01, dp.GaussianDpEvent(1.0)), 5)
    assert dp.rdp.RdpAccountant().compose(event).get_epsilon(DELTA) == math.inf
    assert epsilon_by("pld", [(0.0, 1.0, 1), (1.0, 1.0, 1)]) == math.inf
    assert epsilon_by("pld", []) == 0


def test_whole_batches_are_merged_exactly() -> None:
    history = [(3.0, 1.0, 2), (1.0, 0.1, 4), (6.0, 1.0, 1)]
    merged = merge_whole(history)
    assert merged == [(1.0, 0.1, 4), (2.0, 1.0, 1)] and merge_whole(history[:2]) == history[:2]
    assert epsilon_by("pld", merged) == pytest.approx(epsilon_by("pld", history), rel=1e-3)
    assert epsilon_by("rdp", merged) == pytest.approx(epsilon_by("rdp", history), rel=1e-6)


def test_the_engine_plans_and_states_with_the_accountant(tmp_path: Path) -> None:
    name = "pld-replace-one"
    engine, model = PrivacyEngine(accountant=name), nn.Linear(3, 2)
    data = TensorDataset(torch.randn(40, 3), torch.randint(2, (40,)))
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), target_epsilon=1.0, target_delta=1e-3,
        data_loader=DataLoader(data, batch_size=8), steps=2, max_grad_norm=1.0, epsilon_tolerance=0.3,
    )  # fmt: skip
    for x, y in list(loader)[:2]:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    epsilon = engine.get_epsilon(1e-3)
    assert 0.7 < epsilon <= 1.0 and compute_epsilon(engine.accountant, 1e-3) == epsilon
    theirs = dp.pld.PLDAccountant(dp.NeighboringRelation[KINDS[name]]).compose(engine.to_dp_accounting())
    assert theirs.get_epsilon(1e-3) == pytest.approx(epsilon, rel=1e-9)
    engine.write_statement(tmp_path / "privacy.json", 1e-3)
    stated = json.loads((tmp_path / "privacy.json").read_text())
    assert stated["accounting"]["accountant"] == name and stated["accounting"]["of"].startswith("dp-accounting 0.")
    assert stated["guarantee"]["neighbours"] == create_accountant(name).neighbours  # type: ignore[attr-defined]
    assert read_statement(tmp_path / "privacy.json").is_right


def test_accountants_of_opacus_are_described_as_before() -> None:
    assert describe_accountant(create_accountant("rdp"))["of"].startswith("opacus ")
    assert describe_accountant(PLDAccountant())["accountant"] == "pld"


def test_without_dp_accounting_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "dp_accounting", None)
    with pytest.raises(ValueError, match=r"pip install 'persample\[accounting\]'"):
        PrivacyEngine(accountant="pld")
