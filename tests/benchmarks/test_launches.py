"""A warm step starts no more kernels than it did: the counts are exact, and are written by `benchmarks.launches`."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import launches

# Calls of functions of persample differ a little between versions of Python, which inlines some of them. They are not
# compared with those of another version of torch, whose functions call function modes at other places.
ALLOWED = {"own calls": 1.05}


@pytest.mark.parametrize("name", launches.MODELS)
def test_no_step_needs_more_ops_than_it_did(name: str) -> None:
    if name.startswith("GPT-2"):
        pytest.importorskip("transformers")
    written = json.loads(launches.RESULT.read_text())
    allowed = written["models"][name]
    is_same_torch = written["torch"].split("+")[0] == torch.__version__.split("+")[0]
    for kind, counts in launches.measure(name).items():
        for unit in ("launches", "reads", *(["own calls"] if is_same_torch else [])):
            assert counts[unit] <= allowed[kind][unit] * ALLOWED.get(unit, 1), f"{kind} of {name} needs more {unit}"


def test_ops_are_counted_without_views() -> None:
    x = torch.ones(2, 3)
    with launches.OpCounter() as counter:
        float((x.t().reshape(6) + 1).sum())
    assert counter.ops == {"clone": 1, "add": 1, "sum": 1, "_local_scalar_dense": 1}
    assert counter.reads == 1
