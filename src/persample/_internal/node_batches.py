"""Batches of graphs in the form of torch_geometric: the nodes of all graphs in one dimension, and an edge list."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from persample.errors import ROWS_ADVICE, PerSampleError

# The name of the edge list in torch_geometric.
_EDGES = "edge_index"

ADVICE = (
    "The batch holds graphs in the form of torch_geometric: the nodes of all graphs share one dimension, and "
    "edge_index connects them, so that no dimension has one index for each graph. `record` and `watch` follow such a "
    "batch if an argument `batch` (or an attribute of the data) has the graph of each node, and batch_dim is not "
    "given. Else record one graph at a time with batch_size=1, or pad the graphs to a dense batch (to_dense_batch and "
    f"to_dense_adj of torch_geometric.utils) for a model with dense layers. {ROWS_ADVICE}"
)


class GraphsShareNodes(PerSampleError):
    """The nodes of all graphs of a batch share one dimension."""

    def __init__(self) -> None:
        super().__init__(ADVICE)


def has_edges(arguments: Iterable[tuple[Any, Any]]) -> bool:
    """Whether some of these (name, value) are a list of edges, or an object that has one.

    >>> has_edges([("x", 1), ("edge_index", 2)]), has_edges([("data", {"edge_index": 2})]), has_edges([("x", 1)])
    (True, True, False)
    """
    for name, value in arguments:
        if isinstance(value, Tensor):
            is_owner = False
        else:
            is_owner = _EDGES in value if isinstance(value, Mapping) else getattr(value, _EDGES, None) is not None
        if value is not None and (name == _EDGES or is_owner):
            return True
    return False
