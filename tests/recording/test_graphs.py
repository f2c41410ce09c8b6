"""Batches of graphs in the form of torch_geometric: followed if `batch` says the graph of each node, else refused."""

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


class Normalised(Convolution):
    """Degrees of nodes, attention over the edges of a node, features of edges, the mean of each graph."""

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor, edge_attr: Tensor) -> Tensor:  # type: ignore[override]
        h, (row, col) = self.a(x), edge_index
        degree = torch.ones(len(x), dtype=h.dtype).scatter_add_(0, col, torch.ones(len(col), dtype=h.dtype))
        message = h[row] * (degree[row] * degree[col]).rsqrt().unsqueeze(-1) * edge_attr.tanh()
        score = message.sum(-1).exp()
        score = score / torch.zeros(len(x), dtype=h.dtype).index_add(0, col, score)[col]
        h = h.tanh().scatter_add(0, col.unsqueeze(-1).expand_as(message), message * score.unsqueeze(-1))
        count = torch.bincount(batch, minlength=int(batch.max()) + 1)
        graphs = h.new_zeros(len(count), 4).index_add(0, batch, h) / count.unsqueeze(-1)
        highest = torch.full_like(graphs, -9.0).scatter_reduce(0, batch.unsqueeze(-1).expand_as(h), h, "amax")
        return self.b(graphs + highest)  # type: ignore[no-any-return]


def make_graphs(sizes: list[int]) -> list[SimpleNamespace]:
    torch.manual_seed(len(sizes))
    return [
        SimpleNamespace(
            x=torch.randn(n, 4).double(),
            edge_index=torch.randint(0, n, (2, n + 2)),
            batch=torch.zeros(n, dtype=torch.int64),
            edge_attr=torch.randn(n + 2, 4).double(),
        )
        for n in sizes
    ]


def join_graphs(graphs: list[SimpleNamespace]) -> SimpleNamespace:
    starts = torch.tensor([0, *(len(g.x) for g in graphs)]).cumsum(0).tolist()
    return SimpleNamespace(
        x=torch.cat([g.x for g in graphs]),
        edge_index=torch.cat([g.edge_index + start for g, start in zip(graphs, starts, strict=False)], 1),
        batch=torch.cat([torch.full((len(g.x),), n) for n, g in enumerate(graphs)]),
        edge_attr=torch.cat([g.edge_attr for g in graphs]),
    )


def call_graphs(model: nn.Module, data: SimpleNamespace) -> Tensor:
    if isinstance(model, OfObject):
        return model(data)  # type: ignore[no-any-return]
    names = ["x", "edge_index", "batch", "edge_attr"]
    return model(*(getattr(data, name) for name in names[: 4 if isinstance(model, Normalised) else 3]))  # type: ignore[no-any-return]


# Also with as many nodes as edges in another graph, single nodes, and as many graphs as features.
SIZES = [[3, 2], [2, 4, 3], [1, 1, 1, 1], [4, 4, 4, 4], [5, 1, 2]]


@pytest.mark.parametrize("front", ["record", "watch"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("cls", [Convolution, OfObject, Normalised])
def test_batches_of_graphs(cls: type[nn.Module], sizes: list[int], front: str) -> None:
    model = cls().double()
    perturb(model)
    graphs = make_graphs(sizes)
    losses = (call_graphs(model, graph).square().sum() for graph in graphs)
    expected = stack_gradients(losses, dict(model.named_parameters()))
    if front == "record":
        with persample.record(model) as grads:
            call_graphs(model, join_graphs(graphs)).square().sum().backward()
        assert grads.verification.startswith("verified")
    else:
        received: list[Any] = []
        watch = persample.watch(model, received.append)
        call_graphs(model, join_graphs(graphs)).square().sum().backward()
        watch.stop()
        (grads,) = received
    assert_rows_close(grads.dense(), expected)


def test_an_edge_between_two_graphs_is_refused() -> None:
    model = Convolution().double()
    edges = torch.cat([EDGES, torch.tensor([[0], [4]])], 1)
    refused = pytest.raises(persample.PerSampleError, match="edge 4 is from a node of graph 0 to a node of graph 1")
    with refused, persample.record(model):
        model(NODES, edges, GRAPH_OF_NODE).square().sum().backward()


def test_normalisation_over_all_nodes_is_refused() -> None:
    class Mixing(Convolution):
        def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
            return super().forward(x - x.mean(0), edge_index, batch)

    model = Mixing().double()
    with pytest.raises(persample.SamplesMixed, match="mean"), persample.record(model):
        model(NODES, EDGES, GRAPH_OF_NODE).square().sum().backward()


CALLS: dict[str, tuple[type[nn.Module], tuple[Any, ...], dict[str, Any]]] = {
    "nodes as samples": (Convolution, (NODES, EDGES, GRAPH_OF_NODE), {"batch_dim": [0, None, None]}),
    "another number of graphs": (Convolution, (NODES, EDGES, GRAPH_OF_NODE), {"batch_size": 5}),
}


@pytest.mark.parametrize("name", CALLS)
def test_graphs_are_refused_in_words_of_graphs(name: str) -> None:
    cls, args, options = CALLS[name]
    model = cls().double()
    refused = pytest.raises(persample.PerSampleError, match=r"nodes of all graphs share one dimension.*to_dense_batch")
    with refused, persample.record(model, loss_reduction="sum", **options):
        model(*args).square().sum().backward()


@pytest.mark.parametrize("cls", [Convolution, OfObject])
def test_expanded_weights_refuse_graphs(cls: type[nn.Module]) -> None:
    args = (make_data(),) if cls is OfObject else (NODES, EDGES, GRAPH_OF_NODE)
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
