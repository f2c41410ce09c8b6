"""Compiled models in a recording."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import persample
from persample import PerSampleError
from persample.testing.oracle import assert_rows_close
from tests.support.cases import Calls
from tests.support.compiled import (
    compute_loss,
    compute_rows,
    make_batch,
    make_mlp,
)


class CompiledPart(nn.Module):
    """A model with a compiled function in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 8).double(), nn.Linear(8, 3).double()
        self.compiled = torch.compile(lambda h: self.a(h).tanh() * 2, backend="eager")

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.compiled(x))


def compile_in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="eager")
    return model


def compile_first_layer(model: nn.Module) -> nn.Module:
    model[0] = torch.compile(model[0], backend="eager")  # type: ignore[index, operator]
    return model


WAYS: dict[str, Callable[[], nn.Module]] = {
    "torch.compile(model)": lambda: torch.compile(make_mlp(), backend="eager"),  # type: ignore[return-value]
    "with fullgraph": lambda: torch.compile(make_mlp(), backend="eager", fullgraph=True),  # type: ignore[return-value]
    "model.compile()": lambda: compile_in_place(make_mlp()),
    "a submodule": lambda: compile_first_layer(make_mlp()),
    "a function": CompiledPart,
}


@pytest.mark.parametrize("warm", [True, False], ids=["compiled before", "not yet"])
@pytest.mark.parametrize("way", WAYS)
def test_compiled_models_are_recorded(way: str, warm: bool) -> None:
    model, (x, y) = WAYS[way](), make_batch()
    if warm:
        model(x)
    with persample.record(model) as grads:
        compute_loss(model, x, y).backward()
    with torch.compiler.set_stance("force_eager"):
        expected = compute_rows(model, compute_loss, x, y)
    assert_rows_close(grads.dense(), expected)
    # Afterwards the model runs compiled as before. If it was compiled, it is not compiled again.
    with torch.compiler.set_stance("fail_on_recompile" if warm else "default"):
        model(x)


def test_compiled_models_with_checkpoints_and_backward_after_the_block() -> None:
    inner = torch.compile(make_mlp(), backend="eager")
    model = Calls(lambda self, x: checkpoint(self.inner, x, use_reentrant=False), inner=inner)
    x, y = make_batch()
    with persample.record(model) as grads:
        loss = compute_loss(model, x, y)
    loss.backward()
    with torch.compiler.set_stance("force_eager"):
        assert_rows_close(grads.dense(), compute_rows(model, compute_loss, x, y))


def test_the_stance_of_the_user_is_restored() -> None:
    from torch._dynamo import eval_frame

    model, (x, y) = make_mlp(), make_batch()
    with torch.compiler.set_stance("eager_on_recompile"):
        with persample.record(model):
            assert eval_frame._stance.stance == "force_eager"
            compute_loss(model, x, y).backward()
        assert eval_frame._stance.stance == "eager_on_recompile"
        with pytest.raises(ValueError), persample.record(model):
            raise ValueError
        assert eval_frame._stance.stance == "eager_on_recompile"
    assert eval_frame._stance.stance == "default"


def test_a_recording_inside_a_compiled_function() -> None:
    model, (x, y) = make_mlp(), make_batch()
    graphs = []

    def counting(graph: Any, inputs: Any) -> Any:
        graphs.append([node.target for node in graph.graph.nodes if node.op == "call_function"])
        return graph

    def step(x: Tensor, y: Tensor) -> Tensor:
        x = x * 1.5
        with persample.record(model) as grads:
            compute_loss(model, x, y).backward()
        return grads.norms() * 2

    expected = step(x, y)
    torch.testing.assert_close(torch.compile(step, backend=counting)(x, y), expected)
    assert not any(F.cross_entropy in graph or torch._C._nn.linear in graph for graph in graphs)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"persample\.compile compiles whole steps"):
        torch.compile(step, backend="eager", fullgraph=True)(x, y)


def test_compiled_autograd_is_disabled_or_refused() -> None:
    from torch._dynamo import compiled_autograd

    model, (x, y) = make_mlp(), make_batch()
    compiled = torch.compile(backend="eager")
    expected = compute_rows(model, compute_loss, x, y)
    with compiled_autograd._enable(compiled), persample.record(model) as grads:
        compute_loss(model, x, y).backward()
    assert_rows_close(grads.dense(), expected)
    with persample.record(model) as grads, compiled_autograd._enable(compiled):
        compute_loss(model, x, y).backward()
    assert_rows_close(grads.dense(), expected)
    with persample.record(model) as grads:
        loss = compute_loss(model, x, y)
    with compiled_autograd._enable(compiled), pytest.raises(PerSampleError, match="Compiled autograd"):
        loss.backward()


def test_import_persample_does_not_import_the_compiler() -> None:
    code = """if True:
        import sys, torch, persample
        assert "torch._dynamo" not in sys.modules
        class Lazy(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.a = torch.nn.Linear(3, 2)
            def forward(self, x):  # compiled for the first time inside the block
                return torch.compile(self.a, backend="eager")(x).tanh()
        lazy, x = Lazy(), torch.randn(4, 3)
        for _ in range(2):
            with persample.record(lazy, loss_reduction="sum") as grads:
                lazy(x).sum().backward()
            rows = (1 - lazy.a(x).tanh() ** 2).unsqueeze(2) * x.unsqueeze(1)
            assert torch.allclose(grads.dense()["a.weight"], rows, atol=1e-6)
    """
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, env=dict(os.environ))
