"""Scans whose gradients are whitened by Kronecker factors before the projection, compared with dense computations."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import persample
from persample.scanning import NotFinite, ScanError, score
from persample.scanning.factors import DAMPING, get_factor_file
from persample.scanning.preconditioners import KFAC, PRECONDITIONERS, end_pass
from persample.scanning.rescan import rescan
from persample.terms import Dense, KroneckerSketch, Outer, Sides
from tests.scanning.test_exact import MODELS, N, compute_moments, compute_rows, make

EVERYTHING = 10_000  # numbers in a row: each parameter is stored as it is
OPTIONS: dict[str, Any] = {"batch_size": 8, "shard_size": 8, "dtype": "float32", "progress": False}


def find_root(moment: Tensor, damping: float) -> Tensor:
    """`(moment / mean eigenvalue + damping)^(-1/2)`."""
    values, vectors = torch.linalg.eigh(moment * len(moment) / moment.trace())
    return vectors @ (values.clamp(min=0) + damping).rsqrt().diag() @ vectors.T


def whiten(rows: Tensor, own: Tensor, moments: tuple[Tensor, Tensor]) -> Tensor:
    """Dense gradients `own`, times the damped inverse root of the Kronecker product for the gradients `rows`."""
    sizes = [len(moment) for moment in moments]
    damping = DAMPING ** (1 / max(1, sum(size > 1 for size in sizes)))
    left, right = (find_root(moment, damping * (len(moment) > 1)) for moment in moments)
    matrices = own.reshape(len(own), *sizes)
    return left @ matrices @ right / rows.square().sum(tuple(range(1, rows.dim()))).mean().div(rows[0].numel()).sqrt()


def scan(name: str, **options: Any) -> tuple[persample.Scan, Any, Any, nn.Module]:
    model, data, queries = make(name)
    given = {**OPTIONS, "precondition": "kfac", "project": EVERYTHING, **options}
    return persample.scan(model, nn.CrossEntropyLoss(), data, **given), data, queries, model


@pytest.mark.parametrize("name", MODELS)
def test_rows_without_a_projection_match_the_dense_computation(name: str) -> None:
    found, data, queries, model = scan(name)
    rows, own = compute_rows(model, data), compute_rows(model, queries)
    moments, expected = compute_moments(model, rows, data), torch.zeros(len(queries[0]), N, dtype=torch.float64)
    for parameter, part in rows.items():
        if float(part.abs().max()) > 1e-9:
            left, right = (whiten(part, some, moments[parameter]).flatten(1) for some in (own[parameter], part))
            expected += left @ right.T
    torch.testing.assert_close(
        found.scores(queries).double(), expected, rtol=2e-3, atol=1e-4 * float(expected.abs().max())
    )
    squares = found.self_influence().scores[found.self_influence().ids.argsort()]
    assert bool((squares > 0).all())


def test_a_projection_estimates_the_whitened_inner_products() -> None:
    generator, shape = torch.Generator().manual_seed(3), torch.Size([5, 7])
    term, fitted = Dense(torch.randn(9, *shape, generator=generator)), KFAC(shape)
    fitted.fit(term)
    fitted.end_pass()
    identity = fitted.whiten(Sides(None, None, 5, 7), DAMPING)
    exact = term.multiply_sides(identity).flatten(1)
    expected, total = exact @ exact.T, torch.zeros(())
    for seed in range(400):
        sketch = KroneckerSketch(12, seed, "weight", shape, torch.device("cpu"))
        rows = sketch.fold(term.multiply_sides(fitted.whiten(sketch.sides, DAMPING)))
        total = total + rows @ rows.T / 400
    assert float((total - expected).norm() / expected.norm()) < 0.1


@pytest.mark.parametrize("method", ["tracin", "trak"])
def test_methods_for_plain_gradients_are_refused(method: Any) -> None:
    found, _, queries, _ = scan("linear")
    with pytest.raises(ScanError, match="whitened"):
        found.scores(queries, method)
    with pytest.raises(ScanError, match="whitened"):
        found.self_influence(method)
    assert float(found.scores(queries, "cosine").abs().max()) <= 1.001


@pytest.mark.parametrize(
    "options",
    [
        {"project": None},
        {"projection": "sparse"},
        {"precondition": "ekfac"},
        {"quantities": ["loss", "norm", "estimated_alignment"]},
    ],
)
def test_options_that_do_not_fit_are_refused(options: Any) -> None:
    with pytest.raises(ScanError):
        scan("linear", **options)


def test_quantities_do_not_depend_on_the_whitening() -> None:
    found, plain = (
        scan("linear")[0],
        scan("linear", precondition=None, quantities=["loss", "norm", "noise_scale"], project=None)[0],
    )
    assert "estimated_alignment" not in found.columns
    np.testing.assert_allclose(found.column("norm"), plain.column("norm"), rtol=1e-6)
    assert found.summary["noise_scale"] == pytest.approx(plain.summary["noise_scale"], rel=1e-5)


def make_states(model: nn.Module) -> list[dict[str, Tensor]]:
    return [{name: value * scale for name, value in model.state_dict().items()} for scale in (0.5, 1.5)]


def test_a_resumed_scan_keeps_its_factors(tmp_path: Path) -> None:
    """Shards of a scan that continues are whitened by the factors of the shards that are there."""
    states = make_states(make("linear")[0])
    whole = scan("linear", out=tmp_path / "whole", checkpoints=states)[0]
    assert all((tmp_path / "whole" / get_factor_file(k)).is_file() for k in range(2))
    shutil.copytree(tmp_path / "whole", tmp_path / "part")
    for file in (*(tmp_path / "part" / "1").glob("00001.*"), tmp_path / "part" / "summary.json"):
        file.unlink()
    before = (tmp_path / "part" / get_factor_file(1)).read_bytes()
    again = scan("linear", out=tmp_path / "part", checkpoints=states)[0]
    assert (tmp_path / "part" / get_factor_file(1)).read_bytes() == before
    for k in range(2):
        for shard in range(3):
            np.testing.assert_array_equal(whole.store.read_rows(k, shard), again.store.read_rows(k, shard))


def test_a_rescan_has_the_factors_of_its_base(tmp_path: Path) -> None:
    base, (inputs, labels), queries, model = scan("linear", out=tmp_path / "base", project=24)
    changed = labels.clone()
    changed[[3, 11]] = (labels[[3, 11]] + 1) % 3
    found = rescan(
        base, model, nn.CrossEntropyLoss(), (inputs, changed), before=(inputs, labels), out=tmp_path / "new",
        progress=False,
    )  # fmt: skip
    given = scan("linear", project=24)[0]
    data = persample.scan(
        model, nn.CrossEntropyLoss(), (inputs, changed), **OPTIONS, project=24, precondition=given, verify=False
    )
    torch.testing.assert_close(found.scores(queries), data.scores(queries), rtol=1e-4, atol=1e-5)
    assert found.settings["precondition"] == "kfac"
    opened = persample.Scan(tmp_path / "new", model, nn.CrossEntropyLoss())
    torch.testing.assert_close(opened.scores(queries), found.scores(queries))


def test_factors_of_another_scan_must_fit() -> None:
    given, data, _, model = scan("linear", project=24)
    for options in ({"project": 32}, {"project": 24, "seed": 1}, {"project": 24, "parameters": ["0.weight"]}):
        with pytest.raises(ScanError, match="factors"):
            persample.scan(model, nn.CrossEntropyLoss(), data, **OPTIONS, **options, precondition=given)
    plain = scan("linear", precondition=None, project=24)[0]
    with pytest.raises(ScanError, match="no factors"):
        persample.scan(model, nn.CrossEntropyLoss(), data, **OPTIONS, project=24, precondition=plain)


def test_a_missing_file_of_factors_is_an_error(tmp_path: Path) -> None:
    found, _, queries, _ = scan("linear", out=tmp_path / "scan")
    (tmp_path / "scan" / get_factor_file(0)).unlink()
    with pytest.raises(ScanError, match=r"factors-0\.npz is missing"):
        found.scores(queries)


def test_examples_that_are_not_finite_are_left_out_of_the_factors() -> None:
    model, (inputs, labels), queries = make("linear")
    inputs[5] = torch.nan
    options = {**OPTIONS, "project": EVERYTHING, "precondition": "kfac"}
    with pytest.raises(NotFinite):
        persample.scan(model, nn.CrossEntropyLoss(), (inputs, labels), **options)
    found = persample.scan(model, nn.CrossEntropyLoss(), (inputs, labels), **options, nonfinite="keep")
    scores = found.scores(queries)
    assert bool(scores[:, torch.arange(N) != 5].isfinite().all())


@pytest.mark.parametrize("method", PRECONDITIONERS)
def test_gradients_that_are_rounding_errors_stay_small(method: Any) -> None:
    """The bias of keys in attention has no gradient but rounding errors, which whitening must not make large."""
    kind = PRECONDITIONERS[method]
    fitted = {"weight": kind(torch.Size([6])), "bias": kind(torch.Size([6]))}
    generator = torch.Generator().manual_seed(0)
    terms = {
        name: Dense(scale * torch.randn(30, 6, generator=generator, dtype=torch.float64))
        for name, scale in (("weight", 1.0), ("bias", 1e-9))
    }
    for _ in range(kind.passes):
        for name, own in fitted.items():
            own.fit(terms[name])
        end_pass(fitted)
    squares = {name: own.compute_squares(terms[name], 0.1) for name, own in fitted.items()}
    assert float(squares["bias"].max()) < 1e-9 * float(squares["weight"].min())


def test_sides_with_few_entries_share_the_damping() -> None:
    """A vector gets all of the damping, and a number too."""
    for shape in ((), (5,), (3, 4)):
        fitted = KFAC(torch.Size(shape))
        rows = torch.randn(40, *shape, dtype=torch.float64)
        fitted.fit(Dense(rows))
        fitted.end_pass()
        whole = fitted.whiten(Sides(None, None, fitted._rows, fitted._columns), 0.1)
        assert whole.left is not None and whole.right is not None
        root = torch.kron(whole.left.double(), whole.right.double())
        if len(shape) < 2:
            moment = rows.reshape(40, -1).T @ rows.reshape(40, -1) / 40
            damped = moment + 0.1 * moment.trace() / len(moment) * torch.eye(len(moment))
            torch.testing.assert_close(root @ root, torch.linalg.inv(damped), rtol=1e-4, atol=1e-6)


def test_exact_scores_ignore_gradients_that_are_rounding_errors() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key, self.value = (nn.Linear(4, 4) for _ in range(3))
            self.out = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            weights = (self.query(x) @ self.key(x).mT).softmax(-1)
            return self.out((weights @ self.value(x)).mean(1))

    torch.manual_seed(0)
    model, data = Attention(), (torch.randn(30, 5, 4), torch.randint(3, (30,)))
    queries = (torch.randn(4, 5, 4), torch.randint(3, (4,)))
    names = [name for name, _ in model.named_parameters() if name != "key.bias"]
    found, without = (score(model, nn.CrossEntropyLoss(), data, queries, parameters=chosen) for chosen in (None, names))
    torch.testing.assert_close(found, without, rtol=1e-4, atol=1e-5 * float(without.abs().max()))


def test_terms_of_layers_are_whitened_as_dense_ones() -> None:
    generator = torch.Generator().manual_seed(2)
    term = Outer(torch.randn(7, 3, 5, generator=generator), torch.randn(7, 3, 4, generator=generator))
    fitted = KFAC(torch.Size([4, 5]))
    fitted.fit(term)
    fitted.end_pass()
    sides = fitted.whiten(Sides(torch.randn(4, 2, generator=generator), None, 4, 5), 0.1)
    torch.testing.assert_close(
        term.multiply_sides(sides), Dense(term.dense()).multiply_sides(sides), rtol=1e-4, atol=1e-4
    )
