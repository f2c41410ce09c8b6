"""Kinds of torch functions, by what they do to the entries of their tensors."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

T: Any = torch.Tensor

# Ops that only move, repeat or drop entries of their first argument (or of the tensors in it).
MOVES: set[Any] = {
    T.__getitem__, T.view, T.view_as, T.reshape, T.reshape_as, T.flatten, T.unflatten, T.squeeze, T.unsqueeze,
    T.transpose, T.swapaxes, T.swapdims, T.t, T.permute, T.movedim, T.moveaxis, T.expand, T.expand_as,
    T.broadcast_to, T.repeat, T.tile, T.repeat_interleave, T.chunk, T.split, T.split_with_sizes, T.tensor_split,
    T.unbind, T.narrow, T.select, T.unfold, T.flip, T.fliplr, T.flipud, T.roll, T.index_select, T.gather,
    T.take_along_dim, T.masked_select, T.diagonal, T.squeeze_, T.unsqueeze_, T.transpose_, T.swapaxes_, T.swapdims_,
    T.t_, T.contiguous,
    T.as_strided, torch.as_strided, T.hsplit, T.vsplit, T.dsplit, torch.hsplit, torch.vsplit, torch.dsplit,
    T.clone, T.detach, T.detach_, T.ravel, T.T.__get__, T.mT.__get__, T.data.__get__,
    torch.reshape, torch.flatten, torch.unflatten, torch.squeeze, torch.unsqueeze, torch.transpose, torch.swapaxes,
    torch.swapdims, torch.t, torch.permute, torch.movedim, torch.moveaxis, torch.broadcast_to, torch.tile,
    torch.repeat_interleave, torch.chunk, torch.split, torch.split_with_sizes, torch.tensor_split, torch.unbind,
    torch.narrow, torch.select, torch.flip, torch.fliplr, torch.flipud, torch.roll, torch.index_select, torch.gather,
    torch.take_along_dim, torch.masked_select, torch.diagonal, torch.clone, torch.detach, torch.ravel,
    torch.cat, torch.concat, torch.concatenate, torch.stack, torch.hstack, torch.vstack, torch.dstack,
    torch.column_stack, torch.atleast_1d, torch.atleast_2d, torch.atleast_3d,
}  # fmt: skip

# Of these, the ones that leave all entries in their order.
RESHAPES: set[Any] = {
    T.view, T.reshape, T.flatten, T.unflatten, T.ravel, torch.reshape, torch.flatten, torch.unflatten, torch.ravel,
}  # fmt: skip

# Of these, the ones that may go by an index.
PICKS: set[Any] = {
    T.__getitem__, T.index_select, T.gather, T.take_along_dim, T.masked_select, T.repeat_interleave,
    torch.index_select, torch.gather, torch.take_along_dim, torch.masked_select, torch.repeat_interleave,
}  # fmt: skip

# Ops that write entries of one tensor into another, or add them to it.
WRITES: set[Any] = {
    T.__setitem__, T.copy_, T.index_copy_, T.index_copy, T.index_add_, T.index_add, T.index_put_, T.index_put,
    T.scatter_, T.scatter, T.scatter_add_, T.scatter_add, T.scatter_reduce_, T.scatter_reduce, T.masked_scatter_,
    T.masked_scatter, torch.index_copy, torch.index_add, torch.index_put_, torch.index_put, torch.scatter,
    torch.scatter_add, torch.scatter_reduce, torch.masked_scatter,
}  # fmt: skip

# Ops that list where something is, or what there is; and those that put entries in order.
LISTS: set[Any] = {
    T.nonzero, T.argwhere, T.unique, T.unique_consecutive, torch.nonzero, torch.argwhere, torch.unique,
    torch.unique_consecutive, torch.where,
}  # fmt: skip
SORTS: set[Any] = {T.sort, T.argsort, T.topk, torch.sort, torch.argsort, torch.topk}

# Ops that make a tensor like their argument, of which they read the shape alone.
LIKES: set[Any] = {
    torch.zeros_like, torch.ones_like, torch.empty_like, torch.full_like, torch.rand_like, torch.randn_like,
    torch.randint_like,
}  # fmt: skip

# Ops that read nothing of their tensor but its dtype and device.
MAKERS: set[Any] = {T.new_zeros, T.new_ones, T.new_empty, T.new_full, T.new_tensor}

# Reductions that add up what each sample gives, so that each sample's share has its own gradient.
ADDITIVE: set[Any] = {
    torch.sum, T.sum, torch.mean, T.mean, torch.nansum, T.nansum,
    F.cross_entropy, F.nll_loss, F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits, F.kl_div, F.poisson_nll_loss, F.gaussian_nll_loss, F.hinge_embedding_loss,
    F.margin_ranking_loss, F.multi_margin_loss, F.multilabel_margin_loss, F.multilabel_soft_margin_loss,
    F.soft_margin_loss, F.cosine_embedding_loss, F.triplet_margin_loss, F.triplet_margin_with_distance_loss,
    F.ctc_loss, torch.dot, T.dot, torch.vdot, T.vdot, torch.inner, T.inner, torch.einsum, torch.matmul,
    T.matmul, T.__matmul__,
}  # fmt: skip

# What keeps such a sum one: adding two, scaling by a constant, changing the shape or type of the number.
LINEAR: set[Any] = {
    torch.add, torch.sub, torch.mul, torch.div, torch.neg, T.add, T.sub, T.mul, T.div, T.neg, T.add_, T.sub_, T.mul_,
    T.div_, T.__add__, T.__radd__, T.__iadd__, T.__sub__, T.__rsub__, T.__isub__, T.__mul__, T.__rmul__, T.__imul__,
    T.__truediv__, T.__itruediv__, T.__neg__, torch.sum, T.sum, torch.mean, T.mean, torch.stack, T.to, T.float,
    T.double, *MOVES,
}  # fmt: skip
DIVISIONS: set[Any] = {torch.div, T.div, T.div_, T.__truediv__, T.__itruediv__}
BILINEAR: set[Any] = {torch.mul, T.mul, T.mul_, T.__mul__, T.__rmul__, T.__imul__, *DIVISIONS}
SUMS: set[Any] = LINEAR - BILINEAR - MOVES

# What an index or a mask can be made of.
INDEX_DTYPES = {torch.bool, torch.uint8, torch.int64, torch.int32}
