"""The rule of any function: the function's own derivative, taken for each sample as a batch of one."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from persample._internal.functions import find_results, is_inplace
from persample._internal.tree import put_in_tensors
from persample.errors import PerSampleError, op_name


def compute_generic_gradients(
    func: Callable[..., Any],
    call: tuple[Any, Any],
    tensors: Sequence[Tensor],
    batched: Sequence[bool],
    weights: Sequence[int],
    grads: Sequence[Tensor | None],
) -> list[Tensor]:
    """The per-sample gradients of the tensors at the positions `weights`.

    `call` is the call without its tensors; `tensors` fill it, with the samples in front where `batched`; `grads` are
    the gradients of the tensors in the result, samples in front, None where there is none.
    """
    inplace = is_inplace(func)
    moving = [i for i, there in enumerate(batched) if there]
    wanted = [i for i, grad in enumerate(grads) if grad is not None]
    own_grads = [grad for grad in grads if grad is not None]

    def run(own: Sequence[Tensor], chosen: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The function of one sample, of which it is given its own tensors, and of the weights."""
        given = dict(enumerate(tensors)) | dict(zip(moving, own, strict=True)) | dict(zip(weights, chosen, strict=True))
        args, kwargs = put_in_tensors(
            call, {i: t.clone() if i == 0 else t for i, t in given.items()} if inplace else given
        )
        results = find_results(func(*args, **kwargs), args)
        return tuple(results[i] for i in wanted)

    def vjp(own: Sequence[Tensor], chosen: Sequence[Tensor], grads: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return torch.func.vjp(lambda *w: run(own, w), *chosen)[1](tuple(grads))

    own = [tensors[i] for i in moving]
    chosen = [tensors[i] for i in weights]
    dims = [0 if batched[i] else None for i in weights]
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "There is a performance drop")  # vmap's own loop is as good as ours
            return list(torch.func.vmap(vjp, in_dims=(0, dims, 0))(own, chosen, own_grads))
    except RuntimeError:  # no batching rule, control flow on values, a write in place: one sample after the other
        try:
            return _loop(func, run, own, chosen, dims, own_grads)
        except PerSampleError:
            raise
        except Exception as error:
            raise PerSampleError(f"{op_name(func)} could not be run for a sample by itself: {error}") from error


def _loop(
    func: Callable[..., Any],
    run: Callable[..., tuple[Tensor, ...]],
    own: Sequence[Tensor],
    chosen: Sequence[Tensor],
    dims: Sequence[int | None],
    grads: Sequence[Tensor],
) -> list[Tensor]:
    rows = []
    for n in range(len(grads[0])):
        with torch.enable_grad():
            leaves = [
                (w if dim is None else w[n]).detach().requires_grad_() for w, dim in zip(chosen, dims, strict=True)
            ]
            results = run([t[n].detach().clone() for t in own], leaves)
        own_grads = [g[n] for g in grads]
        if any(r.shape != g.shape for r, g in zip(results, own_grads, strict=True)):
            raise PerSampleError(
                f"{op_name(func)} gives {[tuple(r.shape) for r in results]} for one sample, and "
                f"{[tuple(g.shape) for g in own_grads]} for it in a batch: its weights' gradients cannot be told apart."
            )
        rows.append(torch.autograd.grad(results, leaves, own_grads))
    return [torch.stack(parts) for parts in zip(*rows, strict=True)]
