"""Batches of graphs in the form of torch_geometric are refused in words of graphs; one graph can be recorded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import persample
from persample.testing.oracle import assert_rows_close, perturb, stack_gradients

# Two graphs with 3 and 2 nodes.
NODES = torch.randn(5, 4, dtype=torch.float64)
EDGES = torch.tensor([[0, 1, 2, 3], [1, 2, 0, 4]])
GRAPH_OF_NODE = torch.tensor([0, 0, 0, 1, 1])


class Convolution(nn.Module):
    """Adds the features of neighbours, then those of each graph."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        h = self.a(x)
        h = torch.relu(h + torch.zeros_like(h).index_add(0, edge_index[1], h[edge_index[0]]))
        graphs = torch.zeros(int(batch.max()) + 1, 4, dtype=h.dtype).index_add(0, batch, h)
        return self.b(graphs)


class OfObject(Convolution):
    def forward(self, data: Any) -> Tensor:  # type: ignore[override]
        return super().forward(data.x, data.edge_index, data.batch)


def make_data() -> SimpleNamespace:
    return SimpleNamespace(x=NODES, edge_index=EDGES, batch=GRAPH_OF_NODE)


CALLS: dict[str, tuple[type[nn.Module], tuple[Any, ...], dict[str, Any]]] = {
    "arguments": (Convolution, (NODES, EDGES, GRAPH_OF_NODE), {}),
    "an object": (OfObject, (make_data(),), {}),
    "with the number of graphs": (OfObject, (make_data(),), {"batch_size": 2}),
    "arguments, with the number of graphs": (Convolution, (NODES, EDGES, GRAPH_OF_NODE), {"batch_size": 2}),
    "nodes as samples": (Convolution, (NODES, EDGES, GRAPH_OF_NODE), {"batch_dim": [0, None, None]}),
}


@pytest.mark.parametrize("name", CALLS)
def test_graphs_are_refused_in_words_of_graphs(name: str) -> None:
    cls, args, options = CALLS[name]
    model = cls().double()
    refused = pytest.raises(persample.PerSampleError, match=r"nodes of all graphs share one dimension.*to_dense_batch")
    with refused, persample.record(model, loss_reduction="sum", **options):
        model(*args).square().sum().backward()


@pytest.mark.parametrize("name", ["arguments", "an object"])
def test_expanded_weights_refuse_graphs(name: str) -> None:
    cls, args, _ = CALLS[name]
    with pytest.raises(persample.PerSampleError, match="nodes of all graphs share one dimension"):
        persample.call_for_per_sample_grads(cls().double())(*args)


def test_checks_refuse_graphs() -> None:
    model = OfObject().double()
    with pytest.raises(persample.PerSampleError, match="nodes of all graphs share one dimension"):
        persample.check(model, make_data(), lambda model, batch: model(batch).square().sum())


@pytest.mark.parametrize("cls", [Convolution, OfObject])
def test_one_graph_can_be_recorded(cls: type[nn.Module]) -> None:
    model = cls().double()
    perturb(model)
    data = SimpleNamespace(x=NODES[:3], edge_index=EDGES[:, :3], batch=GRAPH_OF_NODE[:3])
    args = (data,) if cls is OfObject else (data.x, data.edge_index, data.batch)
    expected = stack_gradients([model(*args).square().sum()], dict(model.named_parameters()))
    with persample.record(model, loss_reduction="sum", batch_size=1) as grads:
        model(*args).square().sum().backward()
    assert_rows_close(grads.dense(), expected)
