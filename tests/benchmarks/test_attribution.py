"""The comparison of attribution methods: its tables in the docs, and the EK-FAC that it compares with."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.attribution_tables import format_auc, format_lds, format_seconds
from benchmarks.output import RESULTS
from benchmarks.preconditioning import prepare_ekfac, prepare_whitening


@pytest.mark.parametrize("format_table", [format_lds, format_seconds, format_auc])
def test_tables_in_the_docs_are_those_of_the_results(format_table: Callable[[Any], str]) -> None:
    tasks = json.loads((RESULTS / "attribution.json").read_text())["tasks"]
    docs = (Path(__file__).parents[2] / "docs" / "scan.md").read_text()
    assert format_table(tasks) in docs, "python -m benchmarks.attribution_tables prints the tables"


def test_ekfac_inverts_a_second_moment_that_is_a_kronecker_product() -> None:
    """With each input and each output gradient together, the moment of a weight is a Kronecker product."""
    generator = torch.Generator().manual_seed(0)
    inputs, outputs = (torch.randn(n, 4, generator=generator, dtype=torch.float64) for n in (5, 6))
    data = {
        "weight": torch.einsum("ia,jb->ijab", outputs, inputs).flatten(0, 1),
        "bias": outputs.repeat_interleave(len(inputs), 0),
    }
    tests = {name: torch.randn(3, *part.shape[1:], generator=generator).double() for name, part in data.items()}
    expected = torch.zeros(3, len(inputs) * len(outputs), dtype=torch.float64)
    for name, part in data.items():
        rows, own = part.flatten(1), tests[name].flatten(1)
        moment = rows.T @ rows / len(rows)
        mean = torch.linalg.eigvalsh(moment).mean()
        expected += own @ torch.linalg.inv(moment + 0.2 * mean * torch.eye(len(moment))) @ rows.T
    for kind in ("whole", "wide", "512 numbers"):  # the gradients have fewer than 512 entries, so all are exact
        torch.testing.assert_close(prepare_ekfac(data, tests, kind)(0.2), expected)
    torch.testing.assert_close(prepare_whitening(data, tests, "by blocks")(0.2), expected)
