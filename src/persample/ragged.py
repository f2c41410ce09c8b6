"""Arguments of a model in which the samples have different sizes, so that no dimension has one index for each sample.

Lists with one entry for each sample (images of different sizes, their target dicts), graphs with the graph of each node
in `batch`, bags of ids with offsets, and times or other vectors beside the samples. A `Reading` says which sample each
row of each tensor belongs to, and cuts the arguments to one sample."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from persample._internal.tree import has_attributes, iterate_tensors
from persample.errors import ROWS_ADVICE, PerSampleError
from persample.layouts import Layout, make_layout

# ---- graphs whose nodes share one dimension ----


# The name of the edge list in torch_geometric.
_EDGES = "edge_index"

GRAPHS_ADVICE = (
    "The batch holds graphs in the form of torch_geometric: the nodes of all graphs share one dimension, and "
    "edge_index connects them, so that no dimension has one index for each graph. `record` and `watch` follow such a "
    "batch if an argument `batch` (or an attribute of the data) has the graph of each node, and batch_dim is not "
    "given. Else record one graph at a time with batch_size=1, or pad the graphs to a dense batch (to_dense_batch and "
    f"to_dense_adj of torch_geometric.utils) for a model with dense layers. {ROWS_ADVICE}"
)


class GraphsShareNodes(PerSampleError):
    """The nodes of all graphs of a batch share one dimension."""

    def __init__(self) -> None:
        super().__init__(GRAPHS_ADVICE)


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


# ---- readings ----


# Replaces a tensor by the part of one sample, given the sample; None stands for a tensor that all samples share.
Cut = Callable[[Tensor, int], Tensor]

# Arguments with their names.
Named = Sequence[tuple[str | None, Any]]


@dataclass(frozen=True)
class Reading:
    """Where the samples lie in arguments of several sizes.

    Attributes:
        batch: the number of samples.
        layouts: the layout of each tensor of samples, by the tensor's id; the others are the same for all samples.
        cuts: how tensors whose values are positions are cut to one sample, by the tensor's id.
        is_list: the arguments are lists with one entry for each sample.
        can_cut: whether the arguments can be cut to one sample.
        is_structural: the structure of the arguments decides, and sizes do not.
        constants: the names of arguments that are the same for all samples.
    """

    batch: int
    layouts: Mapping[int, Layout]
    cuts: Mapping[int, Cut] = field(default_factory=dict)
    is_list: bool = False
    can_cut: bool = True
    is_structural: bool = False
    constants: Sequence[str] = ()


def find_structured_reading(named: Named, batch_size: int | None) -> Reading | None:
    """How to read arguments, given by name and value, of which the structure says where the samples lie.

    `batch_size` is the number of samples if the user gave it.
    """
    found = _read_graphs(named) or _read_lists(named, batch_size)
    return None if found is not None and batch_size not in (None, found.batch) else found


def find_reading_by_size(named: Named) -> Reading | None:
    """How to read arguments that have different sizes in the batch dimension."""
    return _read_bags(named) or _read_vectors(named)


# ---- lists with one entry for each sample ----


def _read_lists(named: Named, batch_size: int | None) -> Reading | None:
    """Lists of one length, of tensors that have no batch dimension in common; or lists of dicts beside other lists."""
    lists = [value for _, value in named if type(value) in (list, tuple) and _list_tensors(value)]
    others = [tensor for _, value in named if type(value) not in (list, tuple) for tensor in _list_tensors(value)]
    lengths = {len(value) for value in lists}
    if len(lengths) != 1 or any(not _list_tensors(entry) for value in lists for entry in value):
        return None
    (length,) = lengths
    entries = [tensor for value in lists for tensor in _list_tensors(value)]
    firsts = {tensor.shape[0] if tensor.dim() else None for tensor in entries}
    are_records = len(lists) > 1 and any(isinstance(entry, Mapping) for value in lists for entry in value)
    given = batch_size if batch_size is not None else length
    if length != given or any(not tensor.dim() or tensor.shape[0] != length for tensor in others):
        return None
    has_batch_dim = len(firsts) == 1 and (batch_size is None or firsts == {batch_size})
    if has_batch_dim and not (are_records and not others):
        return None
    layouts = {id(tensor): Layout(0) for tensor in others}
    for value in lists:
        for n, entry in enumerate(value):
            for tensor in _list_tensors(entry):
                rows = tensor.shape[0] if tensor.dim() else 1
                layouts[id(tensor)] = make_layout(0, (n,) * rows, length) if rows else Layout(0, ids=())
    return Reading(length, layouts, is_list=True, is_structural=True)


def _list_tensors(value: Any) -> list[Tensor]:
    return list(iterate_tensors(value))


# ---- vectors beside the samples ----


def _read_vectors(named: Named) -> Reading | None:
    """Tensors of several dimensions agree on the batch, and a vector of another length is the same for all samples.

    Only a vector that is an argument of its own, such as the times of `ODE(y0, ts)`.
    """
    tensors = [tensor for _, value in named for tensor in _list_tensors(value)]
    sizes = {tensor.shape[0] for tensor in tensors if tensor.dim() > 1}
    if len(sizes) != 1:
        return None
    (batch,) = sizes
    vectors = [value for _, value in named if isinstance(value, Tensor) and value.dim() == 1 and len(value) != batch]
    if not vectors or any(t.dim() == 1 and len(t) != batch and not any(t is v for v in vectors) for t in tensors):
        return None
    layouts = {id(tensor): Layout(0) for tensor in tensors if tensor.dim() and tensor.shape[0] == batch}
    names = [name for name, value in named if name is not None and any(value is vector for vector in vectors)]
    return Reading(batch, layouts, constants=names)


# ---- bags ----


def _read_bags(named: Named) -> Reading | None:
    """Ids of all samples one after the other, and the offset of each sample's first id.

    Other vectors have an entry for each id (weights), all other tensors a row for each sample.
    """
    tensors = [tensor for _, value in named for tensor in _list_tensors(value)]
    found = [t for t in tensors if _is_integer_vector(t) and _are_offsets(t, tensors)]
    if len(found) != 1:
        return None
    (offsets,) = found
    batch = len(offsets)
    layouts = {id(tensor): Layout(0) for tensor in tensors if tensor.dim() and tensor.shape[0] == batch}
    totals = {len(t) for t in tensors if t.dim() == 1 and len(t) != batch}
    if len(totals) != 1 or any(t.dim() > 1 and t.shape[0] != batch for t in tensors):
        return None
    return Reading(batch, layouts, can_cut=False)


def _is_integer_vector(tensor: Tensor) -> bool:
    return tensor.dim() == 1 and len(tensor) > 0 and tensor.dtype in (torch.int64, torch.int32)


def _are_offsets(tensor: Tensor, tensors: Sequence[Tensor]) -> bool:
    """Whether a vector starts at 0, does not decrease, and stays within another vector of integers."""
    longer = [len(t) for t in tensors if t is not tensor and _is_integer_vector(t) and len(t) != len(tensor)]
    if not longer:
        return False
    is_rising = bool((tensor[0] == 0) & (tensor.diff() >= 0).all())
    return is_rising and int(tensor[-1]) <= max(longer)


# ---- graphs ----

_EDGES, _GRAPHS = "edge_index", "batch"


def _read_graphs(named: Named) -> Reading | None:
    """The nodes of all graphs in one dimension, the graph of each node in `batch`, and edges between nodes."""
    tensors = _name_tensors(named)
    edges, graphs = tensors.get(_EDGES), tensors.get(_GRAPHS)
    if edges is None or graphs is None or edges.dim() != 2 or len(edges) != 2 or not _is_integer_vector(graphs):
        return None
    nodes, batch = len(graphs), int(graphs.max()) + 1
    of_node = graphs.tolist()
    start, end = (graphs[edges[i]] for i in (0, 1))
    if bool((start != end).any()):
        wrong = int((start != end).nonzero()[0])
        raise PerSampleError(
            f"edge_index connects nodes of different graphs: edge {wrong} is from a node of graph {int(start[wrong])} "
            f"to a node of graph {int(end[wrong])}, as `batch` says. Each graph is a sample; check both."
        )
    by_size = {edges.shape[1]: start.tolist(), batch: list(range(batch)), nodes: of_node}
    layouts: dict[int, Layout] = {id(edges): make_layout(1, tuple(start.tolist()), batch)}
    for name, tensor in tensors.items():
        if tensor is not edges and tensor.dim():
            size = tensor.shape[0]
            ids = start.tolist() if name.startswith("edge") and size == edges.shape[1] else by_size.get(size)
            if ids is not None:
                layouts[id(tensor)] = make_layout(0, tuple(ids), batch)
    number = torch.zeros_like(graphs)  # the number of each node within its graph
    for n in range(batch):
        own = graphs == n
        number[own] = torch.arange(int(own.sum()), device=graphs.device)
    cuts: dict[int, Cut] = {
        id(edges): lambda tensor, sample: number[tensor[:, start == sample]],
        id(graphs): lambda tensor, sample: torch.zeros_like(tensor[graphs == sample]),
    }
    return Reading(batch, layouts, cuts, is_structural=True)


def _name_tensors(named: Named) -> dict[str, Tensor]:
    """The tensors in arguments, by the name of the argument, item or attribute."""
    found: dict[str, Tensor] = {}
    for name, value in named:
        if isinstance(value, Tensor):
            found[name or str(len(found))] = value
        elif isinstance(value, Mapping):
            found |= {str(key): part for key, part in value.items() if isinstance(part, Tensor)}
        elif hasattr(value, "to_dict") and hasattr(value, "keys"):  # as torch_geometric's Data
            found |= {str(key): part for key, part in value.to_dict().items() if isinstance(part, Tensor)}
        elif has_attributes(value):
            found |= {key: part for key, part in vars(value).items() if isinstance(part, Tensor)}
    return found


# ---- cutting to some samples ----


def take_list_entries(value: Any, samples: Sequence[int]) -> Any:
    """The entries of some samples, of an argument that is a list with one entry for each sample.

    >>> take_list_entries(["a", "b", "c"], [2])
    ['c']
    """
    return type(value)([value[n] for n in samples]) if type(value) in (list, tuple) else value
