"""Pull the terms of a weight that was computed from parameters back to the parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from persample import _torch
from persample._internal.graph import find_leaves
from persample.errors import PerSampleError
from persample.terms import Blocks, Dense, Outer, Rows, Slices, Term, add_terms, is_complex, sum_dense


def pull_back(derived: Tensor, terms: Sequence[Term], parameters: Mapping[int, Tensor]) -> list[tuple[Tensor, Term]]:
    """The terms of the parameters (given by id) that `derived` was computed from.

    If `derived` is a part, a copy or the transpose of a parameter, or rows of it that ids select, the term keeps its
    structure. Otherwise it is made dense and pulled back by autograd.
    """
    found = pull_back_term(derived, add_terms(terms))
    if found is not None and id(found[0]) in parameters:
        return [found]
    leaves = find_leaves(derived)
    foreign = [leaf for leaf in leaves if id(leaf) not in parameters]
    if foreign:
        raise PerSampleError(
            f"A weight of shape {tuple(derived.shape)} was computed from parameters of the model and from a tensor of "
            f"shape {tuple(foreign[0].shape)} that requires grad but is not a parameter of the model. Register that "
            "tensor as a parameter, or detach it."
        )
    rows = sum_dense(terms).to(derived.dtype)
    grads: tuple[Tensor | None, ...]
    try:
        grads = torch.autograd.grad(derived, leaves, rows, retain_graph=True, is_grads_batched=True, allow_unused=True)
    except RuntimeError:  # a function that vmap does not support
        each = [torch.autograd.grad(derived, leaves, row, retain_graph=True, allow_unused=True) for row in rows]
        grads = tuple(None if None in column else torch.stack(column) for column in zip(*each, strict=True))
    return [(leaf, Dense(grad)) for leaf, grad in zip(leaves, grads, strict=True) if grad is not None]


def pull_back_term(derived: Tensor, term: Term) -> tuple[Tensor, Term] | None:
    """The leaf that `derived` is a part, copy or transpose of, or looks up rows in, and the term of the leaf.

    None if `derived` was computed in another way.

    >>> import torch
    >>> w = torch.zeros(4, 3, requires_grad=True)
    >>> leaf, term = pull_back_term(w[1:3], Outer(torch.ones(2, 5, 3), torch.ones(2, 5, 2)))
    >>> leaf is w, term.shape, term.starts
    (True, torch.Size([4, 3]), [1])
    """
    node: Any = derived.grad_fn
    output = derived.output_nr
    while not hasattr(node, "variable"):
        pull_through = _STEPS.get(type(node).__name__)
        before = pull_through(node, output, term) if pull_through is not None else None
        if before is None:
            return None
        term = before
        node, output = node.next_functions[0]
    leaf = node.variable
    return (leaf, term) if term.shape == leaf.shape and is_complex(term) <= leaf.is_complex() else None


def transpose_term(term: Term) -> Term:
    """The term of the transpose of a matrix, or of the transposes in a stack of matrices."""
    if isinstance(term, Outer):
        return Outer(term.grad.conj(), term.input.conj())
    if isinstance(term, Blocks) and term.single and len(term.shape) > 2:
        return Blocks([transpose_term(part) for part in term.terms], term.starts, term.count, single=True)
    return Dense(term.dense().mT)


# ---- for each kind of autograd node: the term of its input, given the term of one of its outputs ----


def _pull_through_permutation(dims: list[int], term: Term) -> Term | None:
    last_two = [*range(len(dims) - 2), len(dims) - 1, len(dims) - 2]
    return transpose_term(term) if dims == last_two else None


def _pull_through_transpose(node: Any, output: int, term: Term) -> Term | None:
    dims = list(range(len(term.shape)))
    first, second = (_read_number(node, name) % len(dims) for name in ("dim0", "dim1"))
    dims[first], dims[second] = dims[second], dims[first]
    return _pull_through_permutation(dims, term)


def _pull_through_permute(node: Any, output: int, term: Term) -> Term | None:
    return _pull_through_permutation(
        [_restore_sign(d) % len(term.shape) for d in _torch.read_saved(node, "dims")], term
    )


def _pull_through_rows(start: int, node: Any, term: Term) -> Term | None:
    return Blocks([term], [start], _read_row_count(node)) if _read_number(node, "dim") == 0 else None


def _pull_through_slice(node: Any, output: int, term: Term) -> Term | None:
    if _torch.read_saved(node, "step") != 1:
        return None
    dim = _read_number(node, "dim") % len(term.shape)
    size = _torch.read_saved(node, "self_sym_sizes")[dim]
    start = max(0, min(size, s + size if (s := _read_number(node, "start")) < 0 else s))
    if isinstance(term, Slices) and dim == term.dim:
        return Slices(term.values, term.index + start, dim, size)
    return _pull_through_rows(start, node, term)


def _pull_through_select(node: Any, output: int, term: Term) -> Term | None:
    if _read_number(node, "dim") != 0:
        return None
    count = _read_row_count(node)
    return Blocks([term], [_read_number(node, "index") % count], count, single=True)


def _pull_through_unbind(node: Any, output: int, term: Term) -> Term | None:
    if _read_number(node, "dim") != 0:
        return None
    return Blocks([term], [output], _torch.count_results(node), single=True)


def _pull_through_unsqueeze(node: Any, output: int, term: Term) -> Term | None:
    dim = _read_number(node, "dim")
    if isinstance(term, Slices) and (own := dim % len(term.shape)) != term.dim:
        is_before = own < term.dim
        return Slices(term.values.squeeze(own + (1 if is_before else 0)), term.index, term.dim - is_before, term.count)
    return Dense(term.dense().squeeze(dim if dim < 0 else dim + 1))


def _pull_through_embedding(node: Any, output: int, term: Term) -> Term | None:
    if _torch.read_saved(node, "scale_grad_by_freq"):
        return None
    ids, count = _torch.read_saved(node, "indices"), _torch.read_saved(node, "weight_sym_argsize_0")
    padding = _restore_sign(_torch.read_saved(node, "padding_idx"))
    if isinstance(term, Slices) and padding < 0:
        return _place_slices(ids, term, count)
    grad = term.dense()
    if padding >= 0:
        grad = grad.masked_fill((ids == padding).unsqueeze(-1), 0)
    return _place_looked_up(ids, grad, count)


def _pull_through_index_select(node: Any, output: int, term: Term) -> Term | None:
    sizes = _torch.read_saved(node, "self_sym_sizes")
    if len(sizes) != 2 or _read_number(node, "dim") % 2 != 0:
        return None
    if isinstance(term, Slices):
        return _place_slices(_torch.read_saved(node, "index"), term, sizes[0])
    return _place_looked_up(_torch.read_saved(node, "index"), term.dense(), sizes[0])


def _place_looked_up(ids: Tensor, grad: Tensor, count: int) -> Term:
    """The term of a table of `count` rows of which all samples use the rows `ids`, with this dense gradient."""
    batch, width = len(grad), grad.shape[-1]
    return Rows(ids.reshape(1, -1).expand(batch, -1), grad.reshape(batch, ids.numel(), width), count)


def _place_slices(ids: Tensor, term: Slices, count: int) -> Term | None:
    """The term of a table of which position t uses the row `ids[t]`; None if positions use several."""
    if ids.numel() != term.count:
        return None
    return Rows(ids.reshape(-1)[term.index].unsqueeze(1), term.values.reshape(term.batch, 1, term.shape[-1]), count)


def _read_row_count(node: Any) -> int:
    """The size of dimension 0 of the op's input."""
    return _torch.read_saved(node, "self_sym_sizes")[0]


def _read_number(node: Any, name: str) -> int:
    """An integer argument of the op, 0 if it was not given."""
    return _restore_sign(_torch.read_saved(node, name) or 0)


def _restore_sign(number: int) -> int:
    """Undo the conversion of negative integers to uint64 by autograd."""
    return number - 2**64 if number >= 2**63 else number


_STEPS: dict[str, Callable[[Any, int, Term], Term | None]] = {
    "TBackward0": lambda node, output, term: transpose_term(term) if len(term.shape) == 2 else term,
    "TransposeBackward0": _pull_through_transpose,
    "PermuteBackward0": _pull_through_permute,
    "CloneBackward0": lambda node, output, term: term,
    "ToCopyBackward0": lambda node, output, term: term,
    "SplitBackward0": lambda node, output, term: _pull_through_rows(
        output * _torch.read_saved(node, "split_size"), node, term
    ),
    "SplitWithSizesBackward0": lambda node, output, term: _pull_through_rows(
        sum(_torch.read_saved(node, "split_sizes")[:output]), node, term
    ),
    "SliceBackward0": _pull_through_slice,
    "SelectBackward0": _pull_through_select,
    "UnbindBackward0": _pull_through_unbind,
    "UnsqueezeBackward0": _pull_through_unsqueeze,
    "EmbeddingBackward0": _pull_through_embedding,
    "IndexSelectBackward0": _pull_through_index_select,
}
